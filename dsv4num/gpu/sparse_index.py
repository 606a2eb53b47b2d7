"""Sparse index builders on the GPU. SPEC clauses 5.7, 5.8 and 5.9.

One program writes one row of the result and its length: it passes over the columns in tiles, and every
entry, -1 and the padding between rows among them, is stored once. Row starts are 64-bit. What is done
per entry has 32 bits where the given indices have: a place is split into page and row by a division by
a constant, and a slot is formed only where it is known to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from dsv4num.arguments import Combine, Mixed, check_combine, check_global_topk, check_mixed
from dsv4num.errors import UnsupportedError, ValueRangeError
from dsv4num.gpu import _validate
from dsv4num.gpu._target import Launch, interpreted, use_native
from dsv4num.gpu.paged_cache import describe
from dsv4num.gpu.scalar import device_of

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
]

INT32_MAX = (1 << 31) - 1

_INT32_MAX = tl.constexpr(INT32_MAX)
_FAR = tl.constexpr(1 << 62)  # farther than any position, row or count that can be used


@triton.jit
def _limited_sum(a, minus_b, c, d):
    """a - minus_b + c + d, exact for any int64 operands but brought within about 2**62 of 0."""
    quarter = (a >> 2) - (minus_b >> 2) + (c >> 2) + (d >> 2)
    total = a - minus_b + c + d
    total = tl.where(quarter > _FAR // 4, _FAR, total)
    return tl.where(quarter < -(_FAR // 4), -_FAR, total)


@triton.jit
def _compressed_count(pos, topk, RATIO: tl.constexpr):
    """How many compressed rows a query at `pos` reads, as int32; RATIO 0 means that there are none."""
    if RATIO == 0:
        count = tl.full((), 0, tl.int32)
    else:
        count = tl.minimum(tl.maximum(pos + 1, 0) // RATIO, topk).to(tl.int32)
    return count


@triton.jit
def _page_and_row(place, BLOCK_SIZE: tl.constexpr):
    """The page (int64) and row (uint32) of places in a sequence; of no meaning below 0."""
    if place.dtype == tl.int32:
        bare = place.to(tl.uint32, bitcast=True)
    else:
        bare = place.to(tl.uint64, bitcast=True)
    page = bare // BLOCK_SIZE
    return page.to(tl.int64), (bare - page * BLOCK_SIZE).to(tl.uint32)


@triton.jit
def _slots_of(page, row, kept, SPAN: tl.constexpr):
    """page * SPAN + row as int32; -1 where not kept, below 0 or beyond int32. Rows are below SPAN."""
    LAST: tl.constexpr = _INT32_MAX // SPAN
    slot = page.to(tl.uint32) * SPAN + row  # does not wrap up to page LAST
    fits = kept & (page >= 0) & (page <= LAST) & (slot <= _INT32_MAX)
    return tl.where(fits, slot.to(tl.int32, bitcast=True), -1)


@triton.jit
def _looked_up(column, row, kept, table_ptr, pages, SPAN: tl.constexpr):
    """Slots of rows of pages that a request's block table names in these columns."""
    kept &= column < pages
    page = tl.load(table_ptr + column, mask=kept, other=-1)
    return _slots_of(page, row, kept, SPAN)


@triton.jit
def _load_first(source_ptr, c, count, width):
    """The first `count` of `width` entries, -1 after them. Read in fours, so that loads are wide."""
    fours = (count + 3) // 4 * 4
    given = tl.load(source_ptr + c, mask=(c < fours) & (c < width), other=-1)
    return tl.where(c < count, given, -1)


@triton.jit
def _write_mapped(
    target_ptr,
    columns,
    local_ptr,
    count,
    width,
    table_ptr,
    pages,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the slots of the first `count` of `width` local indices, then -1; how many are slots."""
    found = tl.zeros((TILE,), tl.int32)
    for tile in range(TILES):
        c = tile * TILE + tl.arange(0, TILE)
        local = _load_first(local_ptr, c, count, width)
        column, row = _page_and_row(local, BLOCK_SIZE)
        slots = _looked_up(column, row, local >= 0, table_ptr, pages, SPAN)
        tl.store(target_ptr + c, slots, mask=c < columns)
        found += (slots >= 0).to(tl.int32)
    return tl.sum(found)


@triton.jit
def _write_spread(
    target_ptr,
    columns,
    source_ptr,
    width,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes `width` given slots with their pages SPAN apart, then -1."""
    for tile in range(TILES):
        c = tile * TILE + tl.arange(0, TILE)
        given = tl.load(source_ptr + c, mask=c < width, other=-1)
        kept = (given >= 0) & (given <= _INT32_MAX)
        if SPAN == BLOCK_SIZE:
            slots = tl.where(kept, given, -1).to(tl.int32)
        else:
            page, row = _page_and_row(given, BLOCK_SIZE)
            slots = _slots_of(page, row, kept, SPAN)
        tl.store(target_ptr + c, slots, mask=c < columns)


@triton.jit
def _write_window(
    target_ptr,
    columns,
    pos,
    count,
    table_ptr,
    pages,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the slots of the last `count` positions up to `pos`, then -1."""
    first = pos - count + 1  # below 0 only where the count is 0
    first_page = first // BLOCK_SIZE
    first_row = (first % BLOCK_SIZE).to(tl.uint32)
    for tile in range(TILES):
        c = tile * TILE + tl.arange(0, TILE)
        behind = first_row + c.to(tl.uint32)
        column = first_page + (behind // BLOCK_SIZE).to(tl.int64)
        slots = _looked_up(column, behind % BLOCK_SIZE, c < count, table_ptr, pages, SPAN)
        tl.store(target_ptr + c, slots, mask=c < columns)


@triton.jit(
    do_not_specialize=["request_ptr", "table_ptr", "valid_ptr", "table_stride", "requests", "pages"]
)
def _global_kernel(
    slots_ptr,
    lens_ptr,
    local_ptr,
    request_ptr,
    table_ptr,
    valid_ptr,
    width,
    local_stride,
    table_stride,
    requests,
    pages,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token).to(tl.int64)
    exists = (request >= 0) & (request < requests)
    count = _write_mapped(
        slots_ptr + token * width,
        width,
        local_ptr + token * local_stride,
        tl.where(exists, width, 0),
        width,
        table_ptr + tl.where(exists, request, 0) * table_stride,
        pages,
        BLOCK_SIZE,
        BLOCK_SIZE,
        TILES,
        TILE,
    )
    valid = tl.load(valid_ptr + token)
    tl.store(lens_ptr + token, tl.where(valid, count, 0))


@triton.jit
def _starts_up_to(starts_ptr, origin, token, requests, FANOUT: tl.constexpr):
    """How many of the rising query starts lie at or before a token, by a FANOUT-ary search."""
    found = tl.full((), 0, tl.int64)
    unknown = tl.full((), 1, tl.int64) + requests
    while unknown > 0:
        # The last entry of each of FANOUT parts; the parts up to the last of these are before it.
        part = (unknown + FANOUT - 1) // FANOUT
        at = found + (tl.arange(0, FANOUT) + 1) * part - 1
        start = tl.load(starts_ptr + at, mask=at <= requests, other=0).to(tl.int64)
        before = (at <= requests) & (_limited_sum(start, origin, 0, 0) <= token)
        found += tl.sum(before.to(tl.int32)) * part
        unknown = part - 1
    return found


@triton.jit(
    do_not_specialize=["starts_ptr", "seq_lens_ptr", "gather_lens_ptr", "requests", "M", "N"]
)
def _combine_kernel(
    rows_ptr,
    lens_ptr,
    local_ptr,
    starts_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    columns,
    local_stride,
    requests,
    window_size,
    topk,
    M,
    N,
    RATIO: tl.constexpr,
    FANOUT: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    origin = tl.load(starts_ptr).to(tl.int64)
    request = _starts_up_to(starts_ptr, origin, token, requests, FANOUT) - 1
    exists = (request >= 0) & (request < requests)
    end = tl.load(starts_ptr + request + 1, mask=exists, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request, mask=exists, other=0).to(tl.int64)
    gathered = tl.load(gather_lens_ptr + request, mask=exists, other=0).to(tl.int64)

    # The position of the query, and its place among the gathered rows of the sequence, -1 and below
    # where it is before them. The window ends there.
    pos = _limited_sum(seq_len, end, origin, token)
    last = _limited_sum(gathered, end, origin, token)
    k = tl.where(exists, _compressed_count(pos, topk, RATIO), 0)
    count = tl.maximum(tl.minimum(tl.minimum(pos, last) + 1, window_size), 0)
    count = tl.where(exists, count, 0).to(tl.int32)

    # Rows of the request that may be named, from its row 0 on, and where the window's first is.
    base = request * M
    room = tl.minimum(_INT32_MAX + 1 - base, M)
    compressed = tl.maximum(tl.minimum(room, N), 0).to(tl.int32)
    first = N + last - count + 1
    fitting = tl.maximum(tl.minimum(room - first, count), 0).to(tl.int32)
    # Of these two only the low 32 bits are used; where an entry is named, they are all of it.
    row_of_index = base.to(tl.int32)
    row_of_column = (base + first - k).to(tl.int32)

    rows_ptr += token * columns
    local_ptr += token * local_stride
    for tile in range(TILES):
        c = tile * TILE + tl.arange(0, TILE)
        local = _load_first(local_ptr, c, k, topk)
        named = (local >= 0) & (local < compressed)
        row = tl.where(named, local.to(tl.int32) + row_of_index, -1)
        window = tl.where(c - k < fitting, c + row_of_column, -1)
        tl.store(rows_ptr + c, tl.where(c < k, row, window), mask=c < columns)
    tl.store(lens_ptr + token, k + count)


@triton.jit(
    do_not_specialize=[
        "given_lens_ptr",
        "valid_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "replay_ptr",
        "request_ptr",
        "swa_table_ptr",
        "table_ptr",
        "swa_table_stride",
        "table_stride",
        "decode_tokens",
        "requests",
        "swa_pages",
        "pages",
    ]
)
def _mixed_kernel(
    slots_ptr,
    lens_ptr,
    swa_ptr,
    given_ptr,
    given_lens_ptr,
    valid_ptr,
    local_ptr,
    starts_ptr,
    seq_lens_ptr,
    replay_ptr,
    request_ptr,
    swa_table_ptr,
    table_ptr,
    fours,
    swa_width,
    swa_stride,
    given_width,
    given_stride,
    local_stride,
    swa_table_stride,
    table_stride,
    decode_tokens,
    requests,
    swa_pages,
    pages,
    window_size,
    topk,
    SWA_BLOCK_SIZE: tl.constexpr,
    SWA_SPAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    LOCAL: tl.constexpr,
    SWA_TILES: tl.constexpr,
    SWA_TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = slots_ptr + token * fours * 4
    compressed_ptr = row_ptr + swa_width
    columns = fours * 4 - swa_width
    request = tl.load(request_ptr + token).to(tl.int64)
    exists = (request >= 0) & (request < requests)
    table_ptr += tl.where(exists, request, 0) * table_stride

    if token < decode_tokens:
        swa_ptr += token * swa_stride
        _write_spread(
            row_ptr,
            swa_width,
            swa_ptr,
            swa_width,
            SWA_BLOCK_SIZE,
            SWA_SPAN,
            SWA_TILES,
            SWA_TILE,
        )
        given_ptr += token * given_stride
        if LOCAL:
            count = _write_mapped(
                compressed_ptr,
                columns,
                given_ptr,
                tl.where(exists, given_width, 0),
                given_width,
                table_ptr,
                pages,
                BLOCK_SIZE,
                SPAN,
                TILES,
                TILE,
            )
            if valid_ptr is not None:
                count = tl.where(tl.load(valid_ptr + token), count, 0)
        else:
            _write_spread(
                compressed_ptr, columns, given_ptr, given_width, BLOCK_SIZE, SPAN, TILES, TILE
            )
            count = tl.full((), 0, tl.int32) + given_width
            if given_lens_ptr is not None:
                asked = tl.load(given_lens_ptr + token).to(tl.int64)
                count = tl.minimum(tl.maximum(asked, 0), given_width).to(tl.int32)
        tl.store(lens_ptr + token, swa_width + count)
    else:
        origin = tl.load(starts_ptr).to(tl.int64)
        end = tl.load(starts_ptr + request + 1, mask=exists, other=0).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + request, mask=exists, other=0).to(tl.int64)
        pos = _limited_sum(seq_len, end, origin, token)
        k = tl.where(exists, _compressed_count(pos, topk, RATIO), 0)
        positions = pos + 1
        if replay_ptr is not None:
            replay = tl.load(replay_ptr + request, mask=exists, other=0).to(tl.int64)
            positions -= tl.minimum(tl.maximum(replay, 0), _FAR)
        count = tl.maximum(tl.minimum(positions, window_size), 0)
        count = tl.where(exists, count, 0).to(tl.int32)
        swa_table_ptr += tl.where(exists, request, 0) * swa_table_stride
        _write_window(
            row_ptr,
            swa_width,
            pos,
            count,
            swa_table_ptr,
            swa_pages,
            SWA_BLOCK_SIZE,
            SWA_SPAN,
            SWA_TILES,
            SWA_TILE,
        )
        local_ptr += (token - decode_tokens) * local_stride
        _write_mapped(
            compressed_ptr,
            columns,
            local_ptr,
            k,
            topk,
            table_ptr,
            pages,
            BLOCK_SIZE,
            SPAN,
            TILES,
            TILE,
        )
        tl.store(lens_ptr + token, swa_width + k)


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    *,
    validate: bool = False,
    launch: Launch = Launch(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dsv4num.reference.compute_global_topk_indices_and_lens`: the same slots and lengths.

    A value out of range gives -1; `validate=True` looks first, which waits for the device, and raises
    the reference's error. One program per token: `launch.rows` has no effect.
    """
    rows = check_global_topk(
        describe("topk_indices", topk_indices),
        describe("token_to_req_indices", token_to_req_indices),
        describe("block_table", block_table),
        block_size,
        describe("is_valid_token", is_valid_token),
    )
    use_native(launch, topk_indices.device)
    if _validate.asked(validate):
        _validate_global(topk_indices, token_to_req_indices, block_table, rows, is_valid_token)
    tokens, width = topk_indices.shape
    slots = _empty(topk_indices, tokens, width)
    lens = torch.empty(tokens, dtype=torch.int32, device=topk_indices.device)
    if tokens == 0:
        return slots, lens
    tiles, tile = _tiles(width)
    with device_of(topk_indices):
        _global_kernel[(tokens,)](
            slots,
            lens,
            topk_indices,
            token_to_req_indices,
            block_table,
            is_valid_token,
            width,
            topk_indices.stride(0),
            block_table.stride(0),
            block_table.shape[0],
            block_table.shape[1],
            BLOCK_SIZE=rows,
            TILES=tiles,
            TILE=tile,
            num_warps=launch.num_warps or 4,
            enable_fp_fusion=False,
        )
    return slots, lens


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    validate: bool = False,
    launch: Launch = Launch(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dsv4num.reference.combine_topk_swa_indices`: the same rows and lengths.

    Lengths are used as they are, and a row beyond the request's or beyond int32 is -1; where starts
    fall, a token has the rows of some request or of none. `validate=True` looks first, which waits
    for the device, and raises the reference's error. One program per token: `launch.rows` has no
    effect.
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
    use_native(launch, topk_indices.device)
    if _validate.asked(validate):
        _validate_combine(topk_indices, query_start_loc, seq_lens, gather_lens, shape)
    columns = triton.cdiv(shape.topk + shape.window_size, 128) * 128
    rows = _empty(topk_indices, shape.tokens, columns)
    lens = torch.empty(shape.tokens, dtype=torch.int32, device=topk_indices.device)
    if shape.tokens == 0:
        return rows, lens
    tiles, tile = _tiles(columns)
    with device_of(topk_indices):
        _combine_kernel[(shape.tokens,)](
            rows,
            lens,
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            columns,
            topk_indices.stride(0),
            shape.requests,
            shape.window_size,
            shape.topk,
            shape.rows,
            shape.compressed_rows,
            RATIO=shape.compress_ratio,
            FANOUT=128,
            TILES=tiles,
            TILE=tile,
            num_warps=launch.num_warps or 4,
            enable_fp_fusion=False,
        )
    return rows, lens


def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    swa_block_table: torch.Tensor,
    swa_block_size: int,
    compressed_block_table: torch.Tensor,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    *,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: torch.Tensor | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    replay_start: torch.Tensor | None = None,
    validate: bool = False,
    launch: Launch = Launch(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dsv4num.reference.build_flashinfer_mixed_sparse_indices`: the same slots and lengths.

    The rows lie in memory as those of the reference do, at multiples of 16 bytes. A value out of
    range gives -1; `validate=True` looks first, which waits for the device, and raises the
    reference's error. One program per token: `launch.rows` has no effect.
    """

    def optional(name: str, tensor: torch.Tensor | None):
        return None if tensor is None else describe(name, tensor)

    shape = check_mixed(
        describe("decode_swa_indices", decode_swa_indices),
        optional("decode_compressed_indices", decode_compressed_indices),
        optional("decode_compressed_topk_lens", decode_compressed_topk_lens),
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
        optional("decode_is_valid_token", decode_is_valid_token),
        swa_block_span,
        compressed_block_span,
        optional("replay_start", replay_start),
    )
    use_native(launch, decode_swa_indices.device)
    if _validate.asked(validate):
        _validate_mixed(
            shape,
            decode_swa_indices,
            decode_compressed_indices,
            decode_compressed_topk_lens,
            prefill_topk_indices,
            query_start_loc,
            seq_lens,
            token_to_req_indices,
            swa_block_table,
            compressed_block_table,
            decode_compressed_indices_are_local,
            decode_is_valid_token,
            replay_start,
        )
    tokens = shape.decode_tokens + shape.prefill_tokens
    columns = shape.swa_width + triton.cdiv(max(shape.topk, shape.decode_width), 4) * 4
    fours = triton.cdiv(columns, 4)
    slots = _empty(decode_swa_indices, tokens, fours * 4)[:, :columns]
    lens = torch.empty(tokens, dtype=torch.int32, device=decode_swa_indices.device)
    if tokens == 0:
        return slots, lens
    # No decode indices are given slots of width 0, so that their pointer is not used.
    given = decode_swa_indices if decode_compressed_indices is None else decode_compressed_indices
    local = decode_compressed_indices is not None and decode_compressed_indices_are_local
    swa_tiles, swa_tile = _tiles(shape.swa_width)
    tiles, tile = _tiles(4 * fours - shape.swa_width)
    with device_of(decode_swa_indices):
        _mixed_kernel[(tokens,)](
            slots,
            lens,
            decode_swa_indices,
            given,
            None if local else decode_compressed_topk_lens,
            decode_is_valid_token if local else None,
            prefill_topk_indices,
            query_start_loc,
            seq_lens,
            replay_start,
            token_to_req_indices,
            swa_block_table,
            compressed_block_table,
            fours,
            shape.swa_width,
            decode_swa_indices.stride(0),
            shape.decode_width,
            given.stride(0),
            prefill_topk_indices.stride(0),
            swa_block_table.stride(0),
            compressed_block_table.stride(0),
            shape.decode_tokens,
            shape.requests,
            swa_block_table.shape[1],
            compressed_block_table.shape[1],
            shape.window_size,
            shape.topk,
            SWA_BLOCK_SIZE=shape.swa_block_size,
            SWA_SPAN=shape.swa_span,
            BLOCK_SIZE=shape.compressed_block_size,
            SPAN=shape.compressed_span,
            RATIO=shape.compress_ratio,
            LOCAL=local,
            SWA_TILES=swa_tiles,
            SWA_TILE=swa_tile,
            TILES=tiles,
            TILE=tile,
            num_warps=launch.num_warps or 4,
            enable_fp_fusion=False,
        )
    return slots, lens


def _empty(like: torch.Tensor, tokens: int, columns: int) -> torch.Tensor:
    """An int32 matrix where `like` is, not filled.

    Raises:
        UnsupportedError: columns that the kernels cannot count in 32 bits.
    """
    if tokens and columns > INT32_MAX - (1 << 16):
        raise UnsupportedError(f"rows of {columns} indices: the kernels count columns in 32 bits")
    return torch.empty((tokens, columns), dtype=torch.int32, device=like.device)


def _tiles(columns: int) -> tuple[int, int]:
    """How many tiles a row has, and columns of each, a power of two.

    Both are constants of a kernel, since rows of one model are of one width.
    """
    largest = 65536 if interpreted() else 1024  # the interpreter pays per tile
    tile = max(128, min(triton.next_power_of_2(columns), largest))
    return triton.cdiv(columns, tile), tile


# Values out of range (clause 6.2), on request only. The reference looks at one token after another,
# and at each in a fixed order; here each thing is looked at in all tokens, and the first is kept.


class _Faults:
    """The first fault in the reference's order: by token, then by step."""

    def __init__(self) -> None:
        self.key = (INT32_MAX + 1, 0)
        self.error: ValueRangeError | None = None

    def look(
        self,
        step: int,
        tokens: torch.Tensor,
        wrong: torch.Tensor,
        error: Callable[[int], tuple[str, str, str]],
    ) -> None:
        """Looks at entries in the order of their tokens.

        Args:
            step: where the reference looks at them, within a token.
            tokens: int64 [n], rising, the token of each entry.
            wrong: bool [n].
            error: argument, what was given, and what is allowed, for an entry by its number.
        """
        found = torch.nonzero(wrong)
        if found.numel() == 0:
            return
        first = int(found[0, 0])
        key = (int(tokens[first]), step)
        if key < self.key:
            self.key, self.error = key, ValueRangeError(*error(first))

    def requests(self, tokens: torch.Tensor, given: torch.Tensor, count: int) -> torch.Tensor:
        """Looks for requests that do not exist, in step 1; which do."""
        exists = (given >= 0) & (given < count)
        self.look(
            1,
            tokens,
            ~exists,
            lambda i: (
                "token_to_req_indices",
                f"{int(given[i])} for token {int(tokens[i])}",
                f"0..{count - 1}",
            ),
        )
        return exists

    def mapped(
        self,
        step: int,
        tokens: torch.Tensor,
        local: torch.Tensor,
        requests: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        span: int,
        names: tuple[str, str],
    ) -> None:
        """Looks for places beyond the table, and for wrong pages and slots, in three steps.

        Args:
            step: the first of the three.
            tokens: int64 [n].
            local: places, [n, width].
            requests: rows of the table, int64 [n].
            table: the block table.
            block_size: rows per page.
            span: slots from one page to the next.
            names: the arguments that places and pages come from.
        """
        index_name, table_name = names
        pages = table.shape[1]
        line, column = torch.nonzero(local >= 0, as_tuple=True)
        tokens, requests, place = tokens[line], requests[line], local[line, column].long()
        beyond = place >= pages * block_size
        self.look(
            step,
            tokens,
            beyond,
            lambda i: (
                index_name,
                f"place {int(place[i])} for token {int(tokens[i])}",
                f"at most {pages * block_size - 1}: {pages} pages",
            ),
        )
        if bool(beyond.any()):
            tokens, requests, place = tokens[~beyond], requests[~beyond], place[~beyond]
        page = table[requests, place // block_size].long()
        wrong = (page < 0) | (page > INT32_MAX)
        self.look(
            step + 1,
            tokens,
            wrong,
            lambda i: (
                table_name,
                f"page {int(page[i])} for token {int(tokens[i])}",
                f"0..{INT32_MAX}",
            ),
        )
        slot = torch.where(wrong, 0, page) * span + place % block_size
        self.look(
            step + 2,
            tokens,
            slot > INT32_MAX,
            lambda i: (
                table_name,
                f"slot {int(slot[i])} for token {int(tokens[i])}",
                "slots that fit int32",
            ),
        )

    def spread(self, step: int, given: torch.Tensor, block_size: int, span: int, name: str) -> None:
        """Looks for slots that do not fit int32 before or after the span is applied."""
        line, column = torch.nonzero(given >= 0, as_tuple=True)
        slot = given[line, column].long()
        kept = slot.clamp(max=INT32_MAX)
        moved = kept // block_size * span + kept % block_size
        self.look(
            step,
            line,
            (slot > INT32_MAX) | (moved > INT32_MAX),
            lambda i: (
                name,
                f"slot {int(slot[i])} for token {int(line[i])}, spread to pages {span} apart",
                "slots that fit int32",
            ),
        )

    def report(self) -> None:
        """Raises the first fault, if there is one."""
        if self.error is not None:
            raise self.error


def _validate_global(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> None:
    """Raises the reference's error for a value of a valid token (clause 5.7)."""
    tokens = torch.nonzero(is_valid_token[: topk_indices.shape[0]])[:, 0]
    faults = _Faults()
    requests = token_to_req_indices[tokens].long()
    exists = faults.requests(tokens, requests, block_table.shape[0])
    tokens, requests = tokens[exists], requests[exists]
    names = ("topk_indices", "block_table")
    local = topk_indices[tokens]
    faults.mapped(2, tokens, local, requests, block_table, block_size, block_size, names)
    faults.report()


def _validate_combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    shape: Combine,
) -> None:
    """Raises the reference's error for a start, a length or a row (clause 5.8)."""
    starts, lengths, gathers = query_start_loc.tolist(), seq_lens.tolist(), gather_lens.tolist()
    _validate_starts(starts)
    if starts[-1] - starts[0] > shape.tokens:
        given = f"{starts[-1] - starts[0]} tokens"
        allowed = f"at most {shape.tokens}, the rows of topk_indices"
        raise ValueRangeError("query_start_loc", given, allowed)
    _validate_lengths(lengths)
    room = shape.rows - shape.compressed_rows
    for request, (length, seq_len) in enumerate(zip(gathers, lengths, strict=True)):
        largest = min(seq_len, room)
        if not 0 <= length <= largest:
            given = f"{length} for request {request}"
            allowed = f"0..{largest}: the sequence has {seq_len} rows, M - N is {room}"
            raise ValueRangeError("gather_lens", given, allowed)
    for request in range(shape.requests):
        base = shape.rows * request
        if base + shape.rows - 1 <= INT32_MAX:
            continue
        end = starts[request + 1] - starts[0]
        for token in range(starts[request] - starts[0], end):
            pos = lengths[request] - end + token
            k = _count_at(pos, shape.compress_ratio, shape.topk)
            local = topk_indices[token, :k]
            named = local[(local >= 0) & (local < shape.compressed_rows)]
            largest = base + int(named.max()) if named.numel() else -1
            last = gathers[request] - end + token
            if min(pos, last) >= 0:
                largest = base + shape.compressed_rows + last
            if largest > INT32_MAX:
                given = f"M = {shape.rows}: row {largest} for token {token}"
                raise ValueRangeError("M", given, "rows that fit int32")


def _validate_mixed(
    shape: Mixed,
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    swa_block_table: torch.Tensor,
    compressed_block_table: torch.Tensor,
    are_local: bool,
    decode_is_valid_token: torch.Tensor | None,
    replay_start: torch.Tensor | None,
) -> None:
    """Raises the reference's error for a value out of range (clause 5.9)."""
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    _validate_starts(starts)
    _validate_lengths(lengths)
    device = seq_lens.device
    decode, width = shape.decode_tokens, shape.decode_width
    size, span = shape.compressed_block_size, shape.compressed_span
    faults = _Faults()

    name = "decode_swa_indices"
    faults.spread(0, decode_swa_indices, shape.swa_block_size, shape.swa_span, name)
    name = "decode_compressed_indices"
    if decode_compressed_indices is not None and are_local:
        tokens = torch.arange(decode, device=device)
        if decode_is_valid_token is not None:
            tokens = tokens[decode_is_valid_token[:decode]]
        requests = token_to_req_indices[tokens].long()
        exists = faults.requests(tokens, requests, shape.requests)
        tokens, requests = tokens[exists], requests[exists]
        local = decode_compressed_indices[tokens]
        names = (name, "compressed_block_table")
        faults.mapped(2, tokens, local, requests, compressed_block_table, size, span, names)
    elif decode_compressed_indices is not None:
        faults.spread(1, decode_compressed_indices, size, span, name)
        if decode_compressed_topk_lens is not None:
            counts = decode_compressed_topk_lens
            faults.look(
                2,
                torch.arange(decode, device=device),
                (counts < 0) | (counts > width),
                lambda i: (
                    "decode_compressed_topk_lens",
                    f"{int(counts[i])} for token {i}",
                    f"0..{width}, the columns of decode_compressed_indices",
                ),
            )

    tokens = torch.arange(decode, decode + shape.prefill_tokens, device=device)
    requests = token_to_req_indices[decode : decode + shape.prefill_tokens].long()
    exists = faults.requests(tokens, requests, shape.requests)
    tokens, requests = tokens[exists], requests[exists]
    pairs = list(zip(tokens.tolist(), requests.tolist(), strict=True))
    queries = [(starts[q] - starts[0], starts[q + 1] - starts[0]) for _, q in pairs]
    own = [b <= t < e for (t, _), (b, e) in zip(pairs, queries, strict=True)]
    faults.look(
        2,
        tokens,
        ~torch.tensor(own, dtype=torch.bool, device=device),
        lambda i: (
            "token_to_req_indices",
            f"request {pairs[i][1]} for token {pairs[i][0]}",
            f"its own request: the query of that one is tokens {queries[i][0]}..{queries[i][1] - 1}",
        ),
    )
    # Positions in Python's integers, since a length may be anything; none where the query is not own.
    replays = [0] * shape.requests if replay_start is None else replay_start.tolist()
    windows, counts_at = [], []
    for (token, q), (_, end), is_own in zip(pairs, queries, own, strict=True):
        pos = lengths[q] - end + token if is_own else -1
        first = max(pos - shape.window_size + 1, 0, replays[q])
        windows.append((first, pos - first + 1) if first <= pos else (0, 0))
        counts_at.append(_count_at(pos, shape.compress_ratio, shape.topk))

    bounds = torch.tensor(windows, dtype=torch.int64, device=device).reshape(-1, 2)
    step = torch.arange(min(shape.window_size, shape.swa_width), device=device)
    positions = torch.where(step < bounds[:, 1:], bounds[:, :1] + step, -1)
    names = ("seq_lens", "swa_block_table")
    size_and_span = shape.swa_block_size, shape.swa_span
    faults.mapped(3, tokens, positions, requests, swa_block_table, *size_and_span, names)

    kept = torch.tensor(counts_at, dtype=torch.int64, device=device)[:, None]
    local = prefill_topk_indices[tokens - decode, : shape.topk]
    local = torch.where(torch.arange(shape.topk, device=device) < kept, local, -1)
    names = ("prefill_topk_indices", "compressed_block_table")
    faults.mapped(6, tokens, local, requests, compressed_block_table, size, span, names)
    faults.report()


def _count_at(pos: int, ratio: int, topk: int) -> int:
    """How many compressed rows a query at `pos` reads."""
    return min(max(pos + 1, 0) // ratio, topk) if ratio else 0


def _validate_starts(starts: Sequence[int]) -> None:
    """Raises the reference's error for starts that fall."""
    for request in range(len(starts) - 1):
        start, end = starts[request], starts[request + 1]
        if end < start:
            given = f"{end} after {start}, request {request}"
            raise ValueRangeError("query_start_loc", given, "starts that do not fall")


def _validate_lengths(lengths: Sequence[int]) -> None:
    """Raises the reference's error for a sequence length below 0."""
    for request, seq_len in enumerate(lengths):
        if seq_len < 0:
            raise ValueRangeError("seq_lens", f"{seq_len} for request {request}", "0 or more")
