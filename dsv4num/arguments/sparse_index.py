"""What clause 6.1 allows of the arguments of the sparse index builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4num.arguments.array import INTEGERS, Array, integer, same_device
from dsv4num.errors import ArgumentError

LARGEST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Combine:
    """The checked numbers of `combine_topk_swa_indices` (clause 5.8).

    Attributes:
        tokens: rows of the result.
        requests: requests of the chunk.
        window_size: positions of a full window.
        compress_ratio: positions per compressed row, 0 for none.
        topk: columns of compressed rows.
        rows: M, rows of one request in the gathered buffer.
        compressed_rows: N, how many of those are compressed; the window's rows follow.
    """

    tokens: int
    requests: int
    window_size: int
    compress_ratio: int
    topk: int
    rows: int
    compressed_rows: int


@dataclass(frozen=True, slots=True)
class Mixed:
    """The checked numbers of `build_flashinfer_mixed_sparse_indices` (clause 5.9).

    Attributes:
        decode_tokens: rows of the result that come first.
        prefill_tokens: rows that follow.
        requests: requests of the batch.
        swa_width: columns of window slots.
        decode_width: columns of `decode_compressed_indices`, 0 where it is None.
        swa_block_size: rows per page of the window cache.
        swa_span: slots from one of its pages to the next.
        compressed_block_size: rows per page of the compressed cache.
        compressed_span: slots from one of its pages to the next.
        window_size: positions of a full window.
        compress_ratio: positions per compressed row, 0 for none.
        topk: compressed columns of a prefill token.
    """

    decode_tokens: int
    prefill_tokens: int
    requests: int
    swa_width: int
    decode_width: int
    swa_block_size: int
    swa_span: int
    compressed_block_size: int
    compressed_span: int
    window_size: int
    compress_ratio: int
    topk: int


def check_global_topk(
    topk_indices: Array,
    token_to_req_indices: Array,
    block_table: Array,
    block_size: Any,
    is_valid_token: Array,
) -> int:
    """The arguments of `compute_global_topk_indices_and_lens` (clause 5.7); its block size."""
    rows = _integer("block_size", block_size, 1, "5.7")
    topk_indices.require(dtype=INTEGERS, shape=("T", "width"), clause="5.7")
    tokens = topk_indices.shape[0]
    _at_least(token_to_req_indices, tokens, "one per row of topk_indices", "5.7")
    block_table.require(dtype=INTEGERS, shape=("requests", "pages"), clause="5.7")
    _at_least(is_valid_token, tokens, "one per row of topk_indices", "5.7", dtype="bool")
    same_device(topk_indices, token_to_req_indices, block_table, is_valid_token)
    return rows


def check_combine(
    topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    gather_lens: Array,
    window_size: Any,
    compress_ratio: Any,
    topk: Any,
    M: Any,
    N: Any,
) -> Combine:
    """The arguments of `combine_topk_swa_indices` (clause 5.8)."""
    window = _integer("window_size", window_size, 1, "5.8")
    ratio = _integer("compress_ratio", compress_ratio, 0, "5.8")
    columns = _integer("topk", topk, 0, "5.8")
    rows = _integer("M", M, 0, "5.8")
    compressed = _integer("N", N, 0, "5.8")
    if compressed > rows:
        raise ArgumentError("N", compressed, f"at most {rows}, which is M", "5.8")
    _indices(topk_indices, columns, "5.8")
    seq_lens.require(dtype=INTEGERS, shape=("requests",), clause="5.8")
    requests = seq_lens.shape[0]
    query_start_loc.require(dtype=INTEGERS, shape=(requests + 1,), clause="5.8")
    gather_lens.require(dtype=INTEGERS, shape=(requests,), clause="5.8")
    same_device(topk_indices, query_start_loc, seq_lens, gather_lens)
    tokens = topk_indices.shape[0]
    return Combine(tokens, requests, window, ratio, columns, rows, compressed)


def check_mixed(
    decode_swa_indices: Array,
    decode_compressed_indices: Array | None,
    decode_compressed_topk_lens: Array | None,
    prefill_topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    token_to_req_indices: Array,
    swa_block_table: Array,
    swa_block_size: Any,
    compressed_block_table: Array,
    compressed_block_size: Any,
    window_size: Any,
    compress_ratio: Any,
    topk: Any,
    decode_compressed_indices_are_local: Any,
    decode_is_valid_token: Array | None,
    swa_block_span: Any,
    compressed_block_span: Any,
    replay_start: Array | None,
) -> Mixed:
    """The arguments of `build_flashinfer_mixed_sparse_indices` (clause 5.9)."""
    swa_rows = _integer("swa_block_size", swa_block_size, 1, "5.9")
    compressed_rows = _integer("compressed_block_size", compressed_block_size, 1, "5.9")
    swa_span = _span("swa_block_span", swa_block_span, swa_rows)
    compressed_span = _span("compressed_block_span", compressed_block_span, compressed_rows)
    window = _integer("window_size", window_size, 1, "5.9")
    ratio = _integer("compress_ratio", compress_ratio, 0, "5.9")
    columns = _integer("topk", topk, 0, "5.9")
    if not isinstance(decode_compressed_indices_are_local, bool):
        given = repr(decode_compressed_indices_are_local)
        raise ArgumentError("decode_compressed_indices_are_local", given, "True or False", "5.9")

    decode_swa_indices.require(dtype=INTEGERS, shape=("decode", "swa_width"), clause="5.9")
    decode, swa_width = decode_swa_indices.shape
    _indices(prefill_topk_indices, columns, "5.9")
    prefill = prefill_topk_indices.shape[0]
    if swa_width < window:
        allowed = f"at least {window} columns, which is window_size"
        raise ArgumentError("decode_swa_indices", f"{swa_width} columns", allowed, "5.9")
    if decode_compressed_indices is not None:
        decode_compressed_indices.require(dtype=INTEGERS, shape=(decode, "width"), clause="5.9")
    if decode_compressed_topk_lens is not None:
        decode_compressed_topk_lens.require(dtype=INTEGERS, shape=(decode,), clause="5.9")
    if decode_is_valid_token is not None:
        _at_least(decode_is_valid_token, decode, "one per decode token", "5.9", dtype="bool")

    seq_lens.require(dtype=INTEGERS, shape=("requests",), clause="5.9")
    requests = seq_lens.shape[0]
    query_start_loc.require(dtype=INTEGERS, shape=(requests + 1,), clause="5.9")
    _at_least(token_to_req_indices, decode + prefill, "one per decode and prefill token", "5.9")
    for table in (swa_block_table, compressed_block_table):
        table.require(dtype=INTEGERS, shape=(f"at least {requests}", "pages"), clause="5.9")
        if table.shape[0] < requests:
            allowed = f"at least {requests}, one per request"
            raise ArgumentError(table.name, f"{table.shape[0]} rows", allowed, "5.9")
    if replay_start is not None:
        replay_start.require(dtype=INTEGERS, shape=(requests,), clause="5.9")
    optional = (
        decode_compressed_indices,
        decode_compressed_topk_lens,
        decode_is_valid_token,
        replay_start,
    )
    same_device(
        decode_swa_indices,
        prefill_topk_indices,
        query_start_loc,
        seq_lens,
        token_to_req_indices,
        swa_block_table,
        compressed_block_table,
        *(array for array in optional if array is not None),
    )
    return Mixed(
        decode_tokens=decode,
        prefill_tokens=prefill,
        requests=requests,
        swa_width=swa_width,
        decode_width=0 if decode_compressed_indices is None else decode_compressed_indices.shape[1],
        swa_block_size=swa_rows,
        swa_span=swa_span,
        compressed_block_size=compressed_rows,
        compressed_span=compressed_span,
        window_size=window,
        compress_ratio=ratio,
        topk=columns,
    )


def _integer(name: str, value: Any, least: int, clause: str) -> int:
    """`value` as an int that fits int32, of `least` or more.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
    found = integer(name, value, least, clause)
    if found > LARGEST:
        raise ArgumentError(name, found, f"at most {LARGEST}", clause)
    return found


def _span(name: str, value: Any, block_size: int) -> int:
    """A block span: None is the block size, and a smaller one would let two rows share a slot."""
    return block_size if value is None else _integer(name, value, block_size, "5.9")


def _indices(array: Array, topk: int, clause: str) -> None:
    """Top-k indices with at least `topk` columns."""
    array.require(dtype=INTEGERS, shape=("T", f"at least {topk}"), clause=clause)
    if array.shape[1] < topk:
        allowed = f"at least {topk}, which is topk"
        raise ArgumentError(array.name, f"{array.shape[1]} columns", allowed, clause)


def _at_least(
    array: Array, length: int, why: str, clause: str, dtype: str | tuple[str, ...] = INTEGERS
) -> None:
    """A vector of at least `length` entries; what is behind them is not used."""
    array.require(dtype=dtype, shape=("T",), clause=clause)
    if array.shape[0] < length:
        allowed = f"at least {length}, {why}"
        raise ArgumentError(array.name, f"{array.shape[0]} entries", allowed, clause)
