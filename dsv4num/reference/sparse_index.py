"""Sparse index builders: which rows an attention query reads. SPEC clauses 5.7, 5.8 and 5.9."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import check_combine, check_global_topk, check_mixed
from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.reference.record import describe

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
]

OutOfRange = Literal["raise", "skip"]

INT32_MAX = (1 << 31) - 1


def compute_global_topk_indices_and_lens(
    topk_indices: NDArray[Any],
    token_to_req_indices: NDArray[Any],
    block_table: NDArray[Any],
    block_size: int,
    is_valid_token: NDArray[np.bool_],
    *,
    out_of_range: OutOfRange = "raise",
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Turns indices into a request's sequence into slots of the cache.

    Rule (clause 5.7), for index l of token t with request q = token_to_req_indices[t]:
        1. l < 0 gives -1.
        2. Otherwise the slot block_table[q, l // block_size] * block_size + l % block_size.
        3. Every slot keeps its column.
        4. The length of t is how many of its slots are 0 or more; 0 where is_valid_token[t] is
           false, whose slots are written all the same.

    Args:
        topk_indices: int32 or int64 [T, width], negative where there is none.
        token_to_req_indices: int32 or int64 [>= T].
        block_table: int32 or int64 [requests, pages].
        block_size: rows per page.
        is_valid_token: bool [>= T]; false for a padding token.
        out_of_range: "raise", or "skip" for what a kernel does: -1 for each index whose request,
            column or page does not exist, or whose slot does not fit int32. The indices of an
            invalid token are skipped in both cases.

    Returns:
        Slots int32 [T, width] and lengths int32 [T].

    Raises:
        ArgumentError: dtype, rank, size, stride or block size (clause 6.1).
        ValueRangeError: a value of a valid token out of range (clause 6.2).

    Example:
        >>> local, request, table = np.int32([[0, 63, 64, -1]]), np.int32([0]), np.int32([[7, 3]])
        >>> slots, lens = compute_global_topk_indices_and_lens(
        ...     local, request, table, 64, np.array([True]))
        >>> slots.tolist(), lens.tolist()
        ([[448, 511, 192, -1]], [3])
    """
    rows = check_global_topk(
        describe("topk_indices", topk_indices),
        describe("token_to_req_indices", token_to_req_indices),
        describe("block_table", block_table),
        block_size,
        describe("is_valid_token", is_valid_token),
    )
    skip = _skips(out_of_range)
    slots = np.full(topk_indices.shape, -1, np.int32)
    lens = np.zeros(len(topk_indices), np.int32)
    for token, local in enumerate(topk_indices):
        valid = bool(is_valid_token[token])
        request = int(token_to_req_indices[token])
        if not _request_exists(request, token, len(block_table), skip or not valid):
            continue
        slots[token] = _mapped(
            local,
            block_table[request],
            rows,
            rows,
            names=("topk_indices", "block_table"),
            token=token,
            skip=skip or not valid,
        )
        if valid:
            lens[token] = np.count_nonzero(slots[token] >= 0)
    return slots, lens


def combine_topk_swa_indices(
    topk_indices: NDArray[Any],
    query_start_loc: NDArray[Any],
    seq_lens: NDArray[Any],
    gather_lens: NDArray[Any],
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    out_of_range: OutOfRange = "raise",
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows of a gathered buffer that each query reads: compressed ones, then its window.

    The buffer holds M rows per request: N compressed ones, then the last gather_lens[b] rows of the
    sequence.

    Rule (clause 5.8), for token j of request b, token query_start_loc[b] - query_start_loc[0] + j:
        1. pos = seq_lens[b] - query length of b + j.
        2. k = min((pos + 1) // compress_ratio, topk), and 0 where the ratio is 0 or pos < 0.
        3. Column c < k: i = topk_indices[token, c] gives M * b + i if 0 <= i < N, otherwise -1.
        4. The columns from k on: M * b + N + p - (seq_lens[b] - gather_lens[b]) for every p from
           max(pos - window_size + 1, 0, seq_lens[b] - gather_lens[b]) up to pos.
        5. The length is k plus the number of those p. All other columns are -1.

    Args:
        topk_indices: int32 or int64 [T, >= topk].
        query_start_loc: int32 or int64 [requests + 1]; its first entry need not be 0.
        seq_lens: int32 or int64 [requests].
        gather_lens: int32 or int64 [requests].
        window_size: positions of a full window.
        compress_ratio: positions per compressed row; 0 where there are none.
        topk: columns of compressed rows.
        M: rows per request in the gathered buffer.
        N: compressed rows among them.
        out_of_range: "raise", or "skip" for what a kernel does: values are used as they are, and an
            entry beyond the request's M rows or beyond int32 is -1.

    Returns:
        Rows int32 [T, topk + window_size rounded up to a multiple of 128] and lengths int32 [T]. A
        token of no request has length 0.

    Raises:
        ArgumentError: dtype, rank, size, stride or option (clause 6.1).
        ValueRangeError: a length or a start out of range (clause 6.2).

    Example:
        >>> local, starts = np.int32([[0, 1], [1, 0]]), np.int32([0, 2])
        >>> rows, lens = combine_topk_swa_indices(
        ...     local, starts, np.int32([8]), np.int32([4]), 3, 4, 2, 6, 2)
        >>> rows[:, :6].tolist(), lens.tolist()
        ([[0, 2, 3, 4, -1, -1], [1, 0, 3, 4, 5, -1]], [4, 5])
    """
    shape = check_combine(
        describe("topk_indices", topk_indices),
        describe("query_start_loc", query_start_loc),
        describe("seq_lens", seq_lens),
        describe("gather_lens", gather_lens),
        window_size,
        compress_ratio,
        topk,
        M,
        N,
    )
    skip = _skips(out_of_range)
    starts = [int(start) for start in query_start_loc]
    if not skip:
        _check_starts(starts, shape.tokens)
        _check_seq_lens(seq_lens)
        _check_gather_lens(gather_lens, seq_lens, shape.rows - shape.compressed_rows)
    columns = _rounded_up(shape.topk + shape.window_size, 128)
    rows = np.full((shape.tokens, columns), -1, np.int32)
    lens = np.zeros(shape.tokens, np.int32)
    for request in range(shape.requests):
        base = shape.rows * request
        seq_len = int(seq_lens[request])
        gathered_from = seq_len - int(gather_lens[request])
        begin, end = starts[request] - starts[0], starts[request + 1] - starts[0]
        for token in range(max(begin, 0), min(end, shape.tokens)):
            pos = seq_len - (end - token)
            k = _compressed_count(pos, shape.compress_ratio, shape.topk)
            local = topk_indices[token, :k].astype(np.int64)
            inside = (local >= 0) & (local < shape.compressed_rows)
            first = max(pos - shape.window_size + 1, 0, gathered_from)
            count = max(pos - first + 1, 0)
            # No row behind the request's last is kept, so the clamp only spares int64.
            shift = min(shape.compressed_rows + first - gathered_from, shape.rows)
            behind = np.arange(count, dtype=np.int64) + shift
            row = np.concatenate((np.where(inside, local + base, -1), behind + base))
            row[k:][behind >= shape.rows] = -1
            if not skip and bool((row > INT32_MAX).any()):
                given = f"M = {shape.rows}: row {int(row.max())} for token {token}"
                raise ValueRangeError("M", given, "rows that fit int32")
            rows[token, : k + count] = np.where(row > INT32_MAX, -1, row)
            lens[token] = k + count
    return rows, lens


def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: NDArray[Any],
    decode_compressed_indices: NDArray[Any] | None,
    decode_compressed_topk_lens: NDArray[Any] | None,
    prefill_topk_indices: NDArray[Any],
    query_start_loc: NDArray[Any],
    seq_lens: NDArray[Any],
    token_to_req_indices: NDArray[Any],
    swa_block_table: NDArray[Any],
    swa_block_size: int,
    compressed_block_table: NDArray[Any],
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    *,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: NDArray[np.bool_] | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    replay_start: NDArray[Any] | None = None,
    out_of_range: OutOfRange = "raise",
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """One matrix of slots for a batch of decode and prefill tokens: window first, then compressed.

    Rule (clause 5.9). A row has swa_width window columns, then compressed columns; entries that no
    step names are -1. A slot s of a page is stored as (s // block_size) * span + s % block_size.
        1. Decode token t, window: decode_swa_indices[t], negative ones as -1.
        2. Decode token t, compressed: none; or decode_compressed_indices[t] as slots, with the
           count decode_compressed_topk_lens[t], or the full width; or, where they are local, mapped
           through compressed_block_table and counted as in clause 5.7. Length = swa_width + count.
        3. Prefill token t of request q: pos = seq_lens[q] - query length of q + place of t in its
           query. The first window columns are the slots of positions
           max(pos - window_size + 1, 0, replay_start[q]) up to pos, through swa_block_table.
        4. Its first k = min((pos + 1) // compress_ratio, topk) compressed columns (k is 0 where the
           ratio is 0) are its first k local indices, mapped. Length = swa_width + k.

    Args:
        decode_swa_indices: int32 or int64 [decode tokens, swa_width >= window_size], slots.
        decode_compressed_indices: int32 or int64 [decode tokens, width], or None.
        decode_compressed_topk_lens: int32 or int64 [decode tokens], or None; has no effect on local
            indices, or without indices.
        prefill_topk_indices: int32 or int64 [prefill tokens, >= topk], local.
        query_start_loc: int32 or int64 [requests + 1]; its first entry need not be 0.
        seq_lens: int32 or int64 [requests].
        token_to_req_indices: int32 or int64 [>= tokens].
        swa_block_table: int32 or int64 [>= requests, pages].
        swa_block_size: rows per page of the window cache.
        compressed_block_table: int32 or int64 [>= requests, pages].
        compressed_block_size: rows per page of the compressed cache.
        window_size: positions of a full window.
        compress_ratio: positions per compressed row; 0 where there are none.
        topk: compressed columns of a prefill token.
        decode_compressed_indices_are_local: whether they count rows of the sequence, not slots.
        decode_is_valid_token: bool [>= decode tokens], or None for all; has an effect on local
            indices only.
        swa_block_span: slots from one window page to the next; None is the block size.
        compressed_block_span: the same of the compressed cache.
        replay_start: int32 or int64 [requests], first position that a window may hold, or None.
        out_of_range: "raise", or "skip" for what a kernel does: -1 for each index whose request,
            column or page does not exist, or whose slot does not fit int32; a given count is
            brought into 0..width; a prefill token whose request does not exist has no entries.
            Local indices of an invalid decode token are skipped in both cases.

    Returns:
        Slots int32 [T, swa_width + max(topk, width) rounded up to a multiple of 4] and lengths
        int32 [T]. Rows start at multiples of 4 entries, 16 bytes; entries between them are -1.

    Raises:
        ArgumentError: dtype, rank, size, stride or option (clause 6.1).
        ValueRangeError: a value out of range (clause 6.2).

    Example:
        >>> no_decode, local, starts = np.zeros((0, 3), np.int32), np.int32([[1, 0]]), np.int32([0, 1])
        >>> seq_lens, request = np.int32([4]), np.int32([0])
        >>> slots, lens = build_flashinfer_mixed_sparse_indices(
        ...     no_decode, None, None, local, starts, seq_lens, request,
        ...     np.int32([[5, 6]]), 2, np.int32([[9]]), 2, 3, 2, 2)
        >>> slots.tolist(), lens.tolist()
        ([[11, 12, 13, 19, 18, -1, -1]], [5])
        >>> slots.strides[0]
        32
    """
    shape = check_mixed(
        describe("decode_swa_indices", decode_swa_indices),
        _describe_optional("decode_compressed_indices", decode_compressed_indices),
        _describe_optional("decode_compressed_topk_lens", decode_compressed_topk_lens),
        describe("prefill_topk_indices", prefill_topk_indices),
        describe("query_start_loc", query_start_loc),
        describe("seq_lens", seq_lens),
        describe("token_to_req_indices", token_to_req_indices),
        describe("swa_block_table", swa_block_table),
        swa_block_size,
        describe("compressed_block_table", compressed_block_table),
        compressed_block_size,
        window_size,
        compress_ratio,
        topk,
        decode_compressed_indices_are_local,
        _describe_optional("decode_is_valid_token", decode_is_valid_token),
        swa_block_span,
        compressed_block_span,
        _describe_optional("replay_start", replay_start),
    )
    skip = _skips(out_of_range)
    starts = [int(start) for start in query_start_loc]
    if not skip:
        _check_starts(starts, None)
        _check_seq_lens(seq_lens)
    tokens = shape.decode_tokens + shape.prefill_tokens
    columns = shape.swa_width + _rounded_up(max(shape.topk, shape.decode_width), 4)
    slots = np.full((tokens, _rounded_up(columns, 4)), -1, np.int32)[:, :columns]
    lens = np.full(tokens, shape.swa_width, np.int32)
    compressed = slots[:, shape.swa_width :]

    def mapped_compressed(
        name: str, token: int, request: int, local: NDArray[Any], skip: bool
    ) -> NDArray[np.int64]:
        return _mapped(
            local,
            compressed_block_table[request],
            shape.compressed_block_size,
            shape.compressed_span,
            names=(name, "compressed_block_table"),
            token=token,
            skip=skip,
        )

    for token in range(shape.decode_tokens):
        slots[token, : shape.swa_width] = _spread(
            decode_swa_indices[token],
            shape.swa_block_size,
            shape.swa_span,
            name="decode_swa_indices",
            token=token,
            skip=skip,
        )
        if decode_compressed_indices is None:
            continue
        given = decode_compressed_indices[token]
        width = slice(0, shape.decode_width)
        if decode_compressed_indices_are_local:
            valid = decode_is_valid_token is None or bool(decode_is_valid_token[token])
            request = int(token_to_req_indices[token])
            if not _request_exists(request, token, shape.requests, skip or not valid):
                continue
            compressed[token, width] = mapped_compressed(
                "decode_compressed_indices", token, request, given, skip or not valid
            )
            if valid:
                lens[token] += np.count_nonzero(compressed[token] >= 0)
        else:
            compressed[token, width] = _spread(
                given,
                shape.compressed_block_size,
                shape.compressed_span,
                name="decode_compressed_indices",
                token=token,
                skip=skip,
            )
            count = shape.decode_width
            if decode_compressed_topk_lens is not None:
                count = int(decode_compressed_topk_lens[token])
                if not 0 <= count <= shape.decode_width and not skip:
                    raise ValueRangeError(
                        "decode_compressed_topk_lens",
                        f"{count} for token {token}",
                        f"0..{shape.decode_width}, the columns of decode_compressed_indices",
                    )
            lens[token] += min(max(count, 0), shape.decode_width)

    for token in range(shape.decode_tokens, tokens):
        request = int(token_to_req_indices[token])
        if not _request_exists(request, token, shape.requests, skip):
            continue
        begin, end = starts[request] - starts[0], starts[request + 1] - starts[0]
        if not begin <= token < end and not skip:
            wrong = f"request {request} for token {token}"
            allowed = f"its own request: the query of that one is tokens {begin}..{end - 1}"
            raise ValueRangeError("token_to_req_indices", wrong, allowed)
        pos = int(seq_lens[request]) - (end - begin) + (token - begin)
        first = max(pos - shape.window_size + 1, 0)
        if replay_start is not None:
            first = max(first, int(replay_start[request]))
        window = first + np.arange(max(pos - first + 1, 0), dtype=np.int64)
        slots[token, : len(window)] = _mapped(
            window,
            swa_block_table[request],
            shape.swa_block_size,
            shape.swa_span,
            names=("seq_lens", "swa_block_table"),
            token=token,
            skip=skip,
        )
        k = _compressed_count(pos, shape.compress_ratio, shape.topk)
        local = prefill_topk_indices[token - shape.decode_tokens, :k]
        compressed[token, :k] = mapped_compressed(
            "prefill_topk_indices", token, request, local, skip
        )
        lens[token] += k
    return slots, lens


def _rounded_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _compressed_count(pos: int, ratio: int, topk: int) -> int:
    """How many compressed rows a query at `pos` may read; ratio 0 means that there are none."""
    return max(min((pos + 1) // ratio, topk), 0) if ratio else 0


def _mapped(
    local: NDArray[Any],
    table_row: NDArray[Any],
    block_size: int,
    span: int,
    *,
    names: tuple[str, str],
    token: int,
    skip: bool,
) -> NDArray[np.int64]:
    """Slots of places in a sequence, through its row of a block table; -1 for negative places.

    Raises:
        ValueRangeError: a place beyond the table, or a page or slot out of range, unless `skip`.
    """
    index_name, table_name = names
    wide = local.astype(np.int64)
    slots = np.full(wide.shape, -1, np.int64)
    beyond = wide >= len(table_row) * block_size
    if not skip and bool(beyond.any()):
        given = f"place {int(wide[beyond][0])} for token {token}"
        last = len(table_row) * block_size - 1
        raise ValueRangeError(index_name, given, f"at most {last}: {len(table_row)} pages")
    at = np.flatnonzero((wide >= 0) & ~beyond)
    pages = table_row[wide[at] // block_size].astype(np.int64)
    wrong = (pages < 0) | (pages > INT32_MAX)
    if not skip and bool(wrong.any()):
        given = f"page {int(pages[wrong][0])} for token {token}"
        raise ValueRangeError(table_name, given, f"0..{INT32_MAX}")
    result = np.where(wrong, 0, pages) * span + wide[at] % block_size
    large = result > INT32_MAX
    if not skip and bool(large.any()):
        given = f"slot {int(result[large][0])} for token {token}"
        raise ValueRangeError(table_name, given, "slots that fit int32")
    slots[at] = np.where(wrong | large, -1, result)
    return slots


def _spread(
    given: NDArray[Any], block_size: int, span: int, *, name: str, token: int, skip: bool
) -> NDArray[np.int64]:
    """Given slots with their pages `span` apart; -1 for negative ones.

    Raises:
        ValueRangeError: a slot that does not fit int32, unless `skip`.
    """
    wide = given.astype(np.int64)
    large = wide > INT32_MAX
    kept = np.where(large, 0, wide)
    result = kept // block_size * span + kept % block_size
    large |= result > INT32_MAX
    large &= wide >= 0
    if not skip and bool(large.any()):
        text = f"slot {int(wide[large][0])} for token {token}, spread to pages {span} apart"
        raise ValueRangeError(name, text, "slots that fit int32")
    slots: NDArray[np.int64] = np.where(large | (wide < 0), -1, result)
    return slots


def _describe_optional(name: str, array: NDArray[Any] | None) -> Any:
    """`describe`, or None for None."""
    return None if array is None else describe(name, array)


def _skips(out_of_range: str) -> bool:
    """Whether values out of range are skipped.

    Raises:
        ArgumentError: neither "raise" nor "skip".
    """
    if out_of_range not in ("raise", "skip"):
        raise ArgumentError("out_of_range", repr(out_of_range), "'raise' or 'skip'", "6.2")
    return out_of_range == "skip"


def _request_exists(request: int, token: int, requests: int, skip: bool) -> bool:
    """Whether a token's request id is one.

    Raises:
        ValueRangeError: it is not, unless `skip`.
    """
    exists = 0 <= request < requests
    if not exists and not skip:
        allowed = f"0..{requests - 1}"
        raise ValueRangeError("token_to_req_indices", f"{request} for token {token}", allowed)
    return exists


def _check_starts(starts: list[int], tokens: int | None) -> None:
    """Queries follow each other, and end within `tokens`."""
    for request, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            given = f"{end} after {start}, request {request}"
            raise ValueRangeError("query_start_loc", given, "starts that do not fall")
    if tokens is not None and starts[-1] - starts[0] > tokens:
        given = f"{starts[-1] - starts[0]} tokens"
        allowed = f"at most {tokens}, the rows of topk_indices"
        raise ValueRangeError("query_start_loc", given, allowed)


def _check_seq_lens(seq_lens: NDArray[Any]) -> None:
    """Lengths of sequences are 0 or more."""
    for request, seq_len in enumerate(seq_lens):
        if seq_len < 0:
            raise ValueRangeError("seq_lens", f"{int(seq_len)} for request {request}", "0 or more")


def _check_gather_lens(gather_lens: NDArray[Any], seq_lens: NDArray[Any], room: int) -> None:
    """A request gathers no more than its sequence, and no more than its rows of the buffer."""
    for request, (length, seq_len) in enumerate(zip(gather_lens, seq_lens, strict=True)):
        largest = min(int(seq_len), room)
        if not 0 <= length <= largest:
            given = f"{int(length)} for request {request}"
            allowed = f"0..{largest}: the sequence has {int(seq_len)} rows, M - N is {room}"
            raise ValueRangeError("gather_lens", given, allowed)
