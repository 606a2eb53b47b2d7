"""What clause 6.1 allows of the arguments of the compressor's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4num.arguments.array import (
    INTEGERS,
    Array,
    epsilon,
    positive_int,
    same_device,
    whole,
)
from dsv4num.arguments.paged_cache import Cache, check_cache
from dsv4num.errors import ArgumentError
from dsv4num.formats import LAYOUTS, Layout, get_layout

#: Layouts that `compress_norm_rope_store` writes.
COMPRESS_LAYOUTS = ("v4", "v4_fnuz", "indexer_fp8", "indexer_mxfp4")
#: Layouts that `rope_quant_insert` writes: every one of 512 values.
LATENT_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.head_dim == 512)

ROPE_DIM = 64
LATENT_DIM = 512
_LARGEST_RATIO = 1 << 30


@dataclass(frozen=True, slots=True)
class State:
    """A state cache whose geometry was checked. Strides count elements.

    Attributes:
        num_blocks: blocks.
        block_size: rows per block; the capacity of a ring.
        width: W; a row is W kv columns, then W score columns.
        block_stride: from one block to the next.
        row_stride: from one row of a block to the next.
    """

    num_blocks: int
    block_size: int
    width: int
    block_stride: int
    row_stride: int

    @property
    def num_slots(self) -> int:
        """Rows in the whole state cache; slots run from 0 to one below."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Compression:
    """A checked call of `compress_norm_rope_store`.

    Attributes:
        cache: the cache that is written.
        state: the state cache that is read; `state.width` is (1 + overlap) * head_dim.
        tokens: T, the length of slot_mapping.
        ratio: tokens per group.
        overlap: whether a group is pooled together with the one before it.
        head_dim: values per row.
        num_reqs: rows of the block table.
        table_columns: columns of the block table.
        max_position: rows of the cosine table.
        eps: added to the mean square.
    """

    cache: Cache
    state: State
    tokens: int
    ratio: int
    overlap: bool
    head_dim: int
    num_reqs: int
    table_columns: int
    max_position: int
    eps: float

    @property
    def window(self) -> int:
        """State rows that one group pools."""
        return self.ratio * (2 if self.overlap else 1)


def check_save_partial_states(
    kv: Array,
    score: Array,
    ape: Array,
    positions: Array,
    state_cache: Array,
    slot_mapping: Array,
    compress_ratio: Any,
) -> State:
    """The arguments of `save_partial_states` (clause 5.3)."""
    ratio = _ratio(compress_ratio, "5.3")
    _refuse_numpy(compress_ratio, "5.3")
    kv.require(dtype="float32", shape=("tokens", "W"), clause="5.3")
    width = kv.shape[1]
    if width < 1:
        raise ArgumentError("kv", f"shape {list(kv.shape)}", "a width of 1 or more", "5.3")
    score.require(dtype="float32", shape=("tokens", width), clause="5.3")
    ape.require(dtype="float32", shape=(ratio, width), clause="5.3")
    state = _check_state(state_cache, width, "5.3", written=True)
    tokens = _token_count(slot_mapping, "5.3")
    positions.require(dtype=INTEGERS, shape=("tokens",), clause="5.3")
    _at_least(tokens, "5.3", kv, score, positions)
    same_device(state_cache, kv, score, ape, positions, slot_mapping)
    return state


def check_compress(
    state_cache: Array,
    token_to_req_indices: Array,
    positions: Array,
    slot_mapping: Array,
    block_table: Array,
    cos_sin_cache: Array,
    kv_cache: Array,
    kv_slot_mapping: Array,
    rms_norm_weight: Array,
    rms_norm_eps: Any,
    compress_ratio: Any,
    overlap: Any,
    layout: str | Layout,
    kv_block_size: Any,
) -> Compression:
    """The arguments of `compress_norm_rope_store` (clause 5.4)."""
    ratio = _ratio(compress_ratio, "5.4")
    flag = whole(overlap)
    if flag not in (0, 1):
        raise ArgumentError("overlap", repr(overlap), "True or False, 1 or 0", "5.4")
    eps = epsilon("rms_norm_eps", rms_norm_eps, "5.4")
    cache = _check_kv_cache(kv_cache, kv_block_size, layout, COMPRESS_LAYOUTS, "5.4")
    head_dim = cache.layout.head_dim
    state = _check_state(state_cache, (1 + flag) * head_dim, "5.4", written=False)
    tokens = _token_count(slot_mapping, "5.4")
    for array in (token_to_req_indices, positions, kv_slot_mapping):
        array.require(dtype=INTEGERS, shape=("tokens",), clause="5.4")
    _at_least(tokens, "5.4", token_to_req_indices, positions, kv_slot_mapping)
    block_table.require(dtype=INTEGERS, shape=("num_reqs", "blocks"), clause="5.4")
    _check_table_and_weight(cos_sin_cache, rms_norm_weight, head_dim, "5.4")
    same_device(
        kv_cache,
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        cos_sin_cache,
        kv_slot_mapping,
        rms_norm_weight,
    )
    return Compression(
        cache,
        state,
        tokens,
        ratio,
        flag == 1,
        head_dim,
        block_table.shape[0],
        block_table.shape[1],
        cos_sin_cache.shape[0],
        eps,
    )


def check_rope_quant_insert(
    latent: Array,
    positions: Array,
    cos_sin_cache: Array,
    kv_cache: Array,
    slot_mapping: Array,
    compress_ratio: Any,
    layout: str | Layout,
    bf16_round_trip: Any,
    kv_block_size: Any,
) -> Cache:
    """The arguments of `rope_quant_insert` (clause 5.6)."""
    _small_ratio(compress_ratio, "5.6")
    if not isinstance(bf16_round_trip, bool):
        raise ArgumentError("bf16_round_trip", repr(bf16_round_trip), "True or False", "5.6")
    cache = _check_kv_cache(kv_cache, kv_block_size, layout, LATENT_LAYOUTS, "5.6")
    latent.require(dtype="bfloat16", shape=("tokens", LATENT_DIM), clause="5.6")
    tokens = _token_count(slot_mapping, "5.6")
    positions.require(dtype=INTEGERS, shape=("tokens",), clause="5.6")
    _at_least(tokens, "5.6", latent, positions)
    _check_table_and_weight(cos_sin_cache, None, LATENT_DIM, "5.6")
    same_device(kv_cache, latent, positions, cos_sin_cache, slot_mapping)
    return cache


def check_pool_ring_latent(
    kv_score: Array,
    positions: Array,
    state_cache: Array | None,
    slot_mapping: Array,
    query_start_loc: Array,
    token_to_req_indices: Array,
    rms_norm_weight: Array,
    rms_norm_eps: Any,
    latent_out: Array,
    compress_ratio: Any,
) -> State | None:
    """The arguments of `pool_ring_latent` (clause 5.10); ratio 1 has no ring, hence no `State`.

    Callers describe a `state_cache` at ratio 2 alone.
    """
    ratio = _small_ratio(compress_ratio, "5.10")
    epsilon("rms_norm_eps", rms_norm_eps, "5.10")
    kv_score.require(dtype="float32", shape=("tokens", ratio * LATENT_DIM), clause="5.10")
    ring = _check_state(state_cache, LATENT_DIM, "5.10", written=True) if state_cache else None
    tokens = _token_count(slot_mapping, "5.10")
    for array in (positions, token_to_req_indices):
        array.require(dtype=INTEGERS, shape=("tokens",), clause="5.10")
    query_start_loc.require(dtype=INTEGERS, shape=("num_reqs + 1",), clause="5.10")
    if query_start_loc.shape[0] < 1:
        raise ArgumentError("query_start_loc", "no entries", "num_reqs + 1 entries", "5.10")
    _check_table_and_weight(None, rms_norm_weight, LATENT_DIM, "5.10")
    latent_out.require(dtype="bfloat16", shape=("tokens", LATENT_DIM), clause="5.10", written=True)
    _at_least(tokens, "5.10", kv_score, positions, token_to_req_indices, latent_out)
    same_device(
        latent_out,
        kv_score,
        positions,
        *([state_cache] if state_cache else []),
        slot_mapping,
        query_start_loc,
        token_to_req_indices,
        rms_norm_weight,
    )
    return ring


def _ratio(value: Any, clause: str) -> int:
    """A power of two of 1 or more."""
    ratio = positive_int("compress_ratio", value, clause)
    if ratio & (ratio - 1) or ratio > _LARGEST_RATIO:
        raise ArgumentError("compress_ratio", ratio, "a power of two up to 2**30", clause)
    return ratio


def _small_ratio(value: Any, clause: str) -> int:
    """1 or 2."""
    ratio = positive_int("compress_ratio", value, clause)
    if ratio > 2:
        raise ArgumentError("compress_ratio", ratio, "1 or 2", clause)
    _refuse_numpy(value, clause)
    return ratio


def _refuse_numpy(ratio: Any, clause: str) -> None:
    """Launchers hand these ratios on as constants of kernels, which Triton knows as Python's only."""
    if hasattr(ratio, "__array__"):
        raise ArgumentError("compress_ratio", repr(ratio), "an int of Python", clause)


def _token_count(slot_mapping: Array, clause: str) -> int:
    """T, the length of slot_mapping."""
    slot_mapping.require(dtype=INTEGERS, shape=("tokens",), clause=clause)
    return slot_mapping.shape[0]


def _at_least(tokens: int, clause: str, *arrays: Array) -> None:
    """Every array has a row per token; more are allowed, since engines pad."""
    for array in arrays:
        if array.shape[0] < tokens:
            allowed = f"at least {tokens}, the length of slot_mapping"
            raise ArgumentError(array.name, f"{array.shape[0]} rows", allowed, clause)


def _check_state(state_cache: Array, width: int, clause: str, *, written: bool) -> State:
    """A state cache fp32 [blocks, rows, 2 * width] whose rows do not overlap."""
    columns = 2 * width
    shape = ("blocks", "rows", columns)
    state_cache.require(dtype="float32", shape=shape, clause=clause, written=written)
    blocks, rows, _ = state_cache.shape
    if rows < 1:
        given = f"shape {list(state_cache.shape)}"
        raise ArgumentError(state_cache.name, given, "1 row per block or more", clause)
    block_stride, row_stride, _ = state_cache.strides
    if blocks and rows > 1 and row_stride < columns:
        given = f"row stride {row_stride}"
        raise ArgumentError(state_cache.name, given, f"at least {columns}", clause)
    rows_apart = block_stride >= (rows - 1) * row_stride + columns
    blocks_apart = block_stride >= columns and row_stride >= (blocks - 1) * block_stride + columns
    if blocks > 1 and not (rows_apart or blocks_apart):
        given = f"block stride {block_stride} with row stride {row_stride}"
        raise ArgumentError(state_cache.name, given, "rows that do not overlap", clause)
    return State(blocks, rows, width, block_stride, row_stride)


def _check_kv_cache(
    kv_cache: Array,
    kv_block_size: Any,
    layout: str | Layout,
    names: tuple[str, ...],
    clause: str,
) -> Cache:
    """A cache to write, of one of the layouts; only three axes show the block size."""
    chosen = get_layout(layout)
    if chosen not in [LAYOUTS[name] for name in names]:
        raise ArgumentError("layout", repr(chosen.name), ", ".join(names), clause)
    if kv_block_size is not None:
        rows = positive_int("kv_block_size", kv_block_size, clause)
    elif len(kv_cache.shape) == 3:
        rows = kv_cache.shape[1]
        if rows < 1:
            given = f"shape {list(kv_cache.shape)}"
            raise ArgumentError(kv_cache.name, given, "1 row per page or more", clause)
    elif len(kv_cache.shape) == 2:
        allowed = "the rows per page: only a 3-D cache shows them"
        raise ArgumentError("kv_block_size", None, allowed, clause)
    else:
        rows = 1  # refused below, by its number of axes
    return check_cache(kv_cache, rows, chosen, written=True)


def _check_table_and_weight(
    cos_sin_cache: Array | None, weight: Array | None, head_dim: int, clause: str
) -> None:
    """The cosine table and the norm's weight, where the operation has them."""
    if cos_sin_cache is not None:
        shape = ("positions", ROPE_DIM)
        cos_sin_cache.require(dtype="float32", shape=shape, clause=clause)
    if weight is not None:
        weight.require(dtype=("float32", "bfloat16"), shape=(head_dim,), clause=clause)
