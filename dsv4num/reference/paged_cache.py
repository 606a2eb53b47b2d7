"""Insert into and gather from a paged K cache. SPEC clauses 5.1 and 5.2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import Cache, check_gather, check_insert
from dsv4num.errors import ValueRangeError
from dsv4num.formats import Layout
from dsv4num.reference.record import (
    CHUNK,
    Caches,
    checked_slots,
    decode_records,
    describe,
    describe_pools,
    encode_records,
    read_records,
    write_records,
)

__all__ = ["dequantize_and_gather_k_cache", "quantize_and_insert_k_cache"]


def quantize_and_insert_k_cache(
    k: NDArray[Any],
    k_cache: Caches,
    slot_mapping: NDArray[Any],
    block_size: int = 64,
    *,
    layout: str | Layout = "v4",
) -> None:
    """Quantizes rows and writes their records into their slots.

    Rule (clause 5.1):
        1. Token t is row t of `k`; `slot_mapping` has one entry per token, `k` may have more rows.
        2. A slot below 0 skips its token.
        3. The row is encoded as the layout's record (clause 4.1) and stored at slot // block_size,
           slot % block_size (clause 4.3). No other byte of the cache changes.

    Args:
        k: bf16 [>= T, head_dim]; 512 wide, 128 for the indexer layouts. A layout whose scale comes from
            outside takes 1 (`encode_records` takes others).
        k_cache: uint8 [num_blocks, block_size, row bytes] whose first stride is the page stride, or
            [num_blocks, page bytes]; written in place. Of a layout with several pools (clause 4.6) a
            sequence of these, one for each pool.
        slot_mapping: int64 or int32 [T].
        block_size: rows per page.
        layout: a `Layout` or its name.

    Raises:
        ArgumentError: dtype, rank, width, stride, block size or layout (clause 6.1).
        ValueRangeError: a slot beyond the cache, or given twice (clause 6.2).

    Example:
        >>> import ml_dtypes
        >>> cache = np.zeros((1, 2 * 584), np.uint8)
        >>> row = np.ones((1, 512), ml_dtypes.bfloat16)
        >>> quantize_and_insert_k_cache(row, cache, np.int64([1]), 2)
        >>> cache[0, 576:578].tobytes().hex(" "), cache[0, 1024:1026].tobytes().hex(" ")
        ('78 78', '80 3f')
        >>> cache[0, 1160:].tobytes().hex(" ")
        '77 77 77 77 77 77 77 00'
    """
    described = describe("k", k), describe_pools(k_cache), describe("slot_mapping", slot_mapping)
    cache = check_insert(*described, block_size, layout)
    kept = checked_slots("slot_mapping", slot_mapping, cache, unique=True)
    tokens = np.flatnonzero(kept)
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        records = encode_records(k[part], cache.layout)
        write_records(records, k_cache, slot_mapping[part], cache.block_size, layout=cache.layout)


def dequantize_and_gather_k_cache(
    out: NDArray[Any],
    k_cache: Caches,
    seq_lens: NDArray[Any],
    gather_lens: NDArray[Any] | None,
    block_table: NDArray[Any],
    block_size: int,
    offset: int,
    *,
    layout: str | Layout | None = None,
) -> None:
    """Reads the last rows of every request's sequence, as bf16.

    Rule (clause 5.2), for request b with g = gather_lens[b], or seq_lens[b] where that is None:
        1. Row i of 0..g-1 is position p = seq_lens[b] - g + i, in page block_table[b, p // block_size],
           row p % block_size.
        2. Its record is decoded (clause 4.1) into out[b, offset + i].
        3. Other rows of `out` are untouched.

    Args:
        out: bf16 [num_reqs, M, head_dim], written in place.
        k_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], or a sequence of
            such as in `quantize_and_insert_k_cache`.
        seq_lens: int32 or int64 [num_reqs].
        gather_lens: int32 or int64 [num_reqs], or None for whole sequences.
        block_table: int32 or int64 [num_reqs, pages], page numbers.
        block_size: rows per page.
        offset: first row of `out` to write.
        layout: a `Layout` or its name; None reads it off the row width of a 3-D cache (clause 4.5).

    Raises:
        ArgumentError: dtype, rank, width, stride, block size, offset or layout (clause 6.1).
        ValueRangeError: a length, a position or a page out of range (clause 6.2).

    Example:
        >>> import ml_dtypes
        >>> cache = np.zeros((1, 2, 584), np.uint8)
        >>> row = np.full((1, 512), 300, ml_dtypes.bfloat16)
        >>> quantize_and_insert_k_cache(row, cache, np.int64([0]), 2)
        >>> out = np.zeros((1, 1, 512), ml_dtypes.bfloat16)
        >>> dequantize_and_gather_k_cache(out, cache, np.int32([1]), None, np.int32([[0]]), 2, 0)
        >>> out[0, 0, [0, 511]].view(np.uint16).tolist() == [0x4390, 0x4396]  # 288 and 300
        True
    """
    cache, offset = check_gather(
        describe("out", out),
        describe_pools(k_cache),
        describe("seq_lens", seq_lens),
        None if gather_lens is None else describe("gather_lens", gather_lens),
        describe("block_table", block_table),
        block_size,
        offset,
        layout,
    )
    name, lengths = ("seq_lens", seq_lens) if gather_lens is None else ("gather_lens", gather_lens)
    room = max(out.shape[1] - offset, 0)
    for request, length in enumerate(lengths):
        if length > room:
            given = f"{length} rows for request {request}"
            allowed = f"at most {room}: out has {out.shape[1]} rows and offset is {offset}"
            raise ValueRangeError(name, given, allowed)
    plan = [
        _slots_of_request(request, int(seq_lens[request]), int(length), block_table, cache)
        for request, length in enumerate(lengths)
    ]
    for request, slots in enumerate(plan):
        for start in range(0, len(slots), CHUNK):
            part = slots[start : start + CHUNK]
            records = read_records(k_cache, part, cache.block_size, layout=cache.layout)
            first = offset + start
            out[request, first : first + len(part)] = decode_records(records, cache.layout)


def _slots_of_request(
    request: int, seq_len: int, length: int, block_table: NDArray[Any], cache: Cache
) -> NDArray[np.int64]:
    """The slots that request's gather reads, in order."""
    if seq_len < 0:
        raise ValueRangeError("seq_lens", f"{seq_len} for request {request}", "0 or more")
    if not 0 <= length <= seq_len:
        given = f"{length} for request {request}"
        raise ValueRangeError("gather_lens", given, f"0..{seq_len}, its sequence length")
    width, last = block_table.shape[1], (seq_len - 1) // cache.block_size
    if length and last >= width:
        given = f"position {seq_len - 1} of request {request}, column {last}"
        raise ValueRangeError("block_table", given, f"columns below {width}")
    positions = np.arange(seq_len - length, seq_len, dtype=np.int64)
    columns, rows = positions // cache.block_size, positions % cache.block_size
    pages = block_table[request, columns].astype(np.int64)
    wrong = (pages < 0) | (pages >= cache.num_blocks)
    if bool(wrong.any()):
        given = f"page {int(pages[wrong][0])} of request {request}"
        raise ValueRangeError("block_table", given, f"0..{cache.num_blocks - 1}")
    slots: NDArray[np.int64] = pages * cache.block_size + rows
    return slots
