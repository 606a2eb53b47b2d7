"""The compressor: states, pooling, norm, RoPE and store. SPEC clauses 5.3, 5.4, 5.6 and 5.10."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import (
    Cache,
    Compression,
    State,
    check_compress,
    check_pool_ring_latent,
    check_rope_quant_insert,
    check_save_partial_states,
)
from dsv4num.errors import ValueRangeError
from dsv4num.formats import FP32, Layout
from dsv4num.reference.arithmetic import exp32, rms_norm, round_bf16, tree_sum
from dsv4num.reference.record import CHUNK, describe, encode_records, write_records
from dsv4num.reference.rope import rotate_gptj

__all__ = [
    "compress_norm_rope_store",
    "pool_ring_latent",
    "rope_quant_insert",
    "save_partial_states",
]

_ROPE_DIM = 64
_LATENT_DIM = 512
_NAN = np.uint32(FP32.encoded_nan).view(np.float32)

#: fp32 numbers in one pooled temporary: 1 MiB, which stays in a core's cache.
POOLED = 1 << 18


def save_partial_states(
    kv: NDArray[np.float32],
    score: NDArray[np.float32],
    ape: NDArray[np.float32],
    positions: NDArray[Any],
    state_cache: NDArray[np.float32],
    slot_mapping: NDArray[Any],
    *,
    compress_ratio: int,
) -> None:
    """Stores each token's kv and biased score in its row of the state cache.

    Rule (clause 5.3), for each token t with slot_mapping[t] >= 0:
        1. Its row is block slot // rows per block, row slot % rows per block.
        2. Columns 0..W-1 are row t of `kv`, bit for bit.
        3. Columns W..2W-1 are row t of `score` + ape[positions[t] % compress_ratio], one fp32
           addition; a NaN sum is stored as 0x7FFFFFFF. No other element changes.

    Args:
        kv: fp32 [>= T, W].
        score: fp32 [>= T, W].
        ape: fp32 [compress_ratio, W].
        positions: int32 or int64 [>= T].
        state_cache: fp32 [blocks, rows, 2W], written in place.
        slot_mapping: int32 or int64 [T].
        compress_ratio: tokens per group, a power of two.

    Raises:
        ArgumentError: dtype, rank, width, stride or ratio (clause 6.1).
        ValueRangeError: a slot beyond the state cache or given twice, or a position below 0 of a
            token that is not skipped (clause 6.2).

    Example:
        >>> one = np.ones((1, 2), np.float32)
        >>> ape = np.float32([[0, 0], [10, 20]])
        >>> state = np.zeros((1, 2, 4), np.float32)
        >>> slot = np.int64([1])
        >>> save_partial_states(one, one, ape, np.int64([5]), state, slot, compress_ratio=2)
        >>> state[0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 11.0, 21.0]]
    """
    state = check_save_partial_states(
        describe("kv", kv),
        describe("score", score),
        describe("ape", ape),
        describe("positions", positions),
        describe("state_cache", state_cache),
        describe("slot_mapping", slot_mapping),
        compress_ratio,
    )
    tokens = np.flatnonzero(slot_mapping >= 0)
    _check_slots("slot_mapping", slot_mapping[tokens], state, unique=True)
    _check_positions(positions[tokens])
    for part in _chunks(tokens, CHUNK):
        slots = slot_mapping[part].astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            biased = score[part] + ape[positions[part] % compress_ratio]
        biased[np.isnan(biased)] = _NAN
        block, row = slots // state.block_size, slots % state.block_size
        state_cache[block, row, : state.width] = kv[part]
        state_cache[block, row, state.width :] = biased


def compress_norm_rope_store(
    state_cache: NDArray[np.float32],
    token_to_req_indices: NDArray[Any],
    positions: NDArray[Any],
    slot_mapping: NDArray[Any],
    block_table: NDArray[Any],
    cos_sin_cache: NDArray[np.float32],
    kv_cache: NDArray[np.uint8],
    kv_slot_mapping: NDArray[Any],
    rms_norm_weight: NDArray[Any],
    rms_norm_eps: float,
    *,
    compress_ratio: int,
    overlap: bool | int,
    layout: str | Layout,
    kv_block_size: int | None = None,
) -> None:
    """Pools the states of every group that ends in this call and stores the record of the result.

    Rule (clause 5.4), for each token t with slot_mapping[t] >= 0, kv_slot_mapping[t] >= 0 and
    (positions[t] + 1) % ratio == 0:
        1. Take the N = (1 + overlap) * ratio rows of positions positions[t] - N + 1 .. positions[t].
           Position p of request q is in block block_table[q, p // rows], row p % rows; p < 0 is
           missing.
        2. W = (1 + overlap) * D. The last `ratio` rows use columns W - D .. W - 1; with overlap the
           older ones use columns 0 .. D - 1. A score is W columns behind its kv.
        3. Pool each column: m = the largest score that is not NaN; w = exp32(score - m);
           c = tree_sum(w * kv) / tree_sum(w). A missing row adds +0 to both sums.
        4. normed = rms_norm(c, weight, eps).
        5. The last 64 dimensions are rotated (clause 5.5) in fp32 with row
           (positions[t] // ratio) * ratio of the table.
        6. Everything is rounded to bf16 and stored as a record (clauses 4.1, 4.3) in
           kv_slot_mapping[t].

    Args:
        state_cache: fp32 [blocks, rows, 2W], as `save_partial_states` fills it.
        token_to_req_indices: int32 or int64 [>= T].
        positions: int32 or int64 [>= T].
        slot_mapping: int32 or int64 [T]; only its sign is used.
        block_table: int32 or int64 [num_reqs, blocks], block numbers of the state cache.
        cos_sin_cache: fp32 [positions, 64].
        kv_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], written.
        kv_slot_mapping: int32 or int64 [>= T], slots of `kv_cache`.
        rms_norm_weight: bf16 or fp32 [D].
        rms_norm_eps: 0 or more; rounded to fp32.
        compress_ratio: tokens per group, a power of two.
        overlap: whether the group before is pooled too.
        layout: "v4" or "v4_fnuz" (D = 512), "indexer_fp8" or "indexer_mxfp4" (D = 128).
        kv_block_size: rows per page; needed for a 2-D cache.

    Raises:
        ArgumentError: dtype, rank, width, stride, length, ratio, overlap, eps, block size or layout
            (clause 6.1).
        ValueRangeError: a request, position, block or kv slot out of range, or a kv slot given
            twice (clause 6.2).

    Example:
        >>> state = np.ones((1, 4, 2 * 256), np.float32)
        >>> cache = np.zeros((1, 1, 68), np.uint8)
        >>> table = np.repeat(np.float32([[1, 0]]), 32, axis=1)  # cosine 1, sine 0
        >>> compress_norm_rope_store(
        ...     state, np.int32([0]), np.int64([3]), np.int64([3]), np.int32([[0]]), table, cache,
        ...     np.int64([0]), np.ones(128, np.float32), 0.0,
        ...     compress_ratio=4, overlap=True, layout="indexer_mxfp4")
        >>> cache[0, 0, 62:].tobytes().hex(" ")
        '66 66 7d 7d 7d 7d'
    """
    call = check_compress(
        describe("state_cache", state_cache),
        describe("token_to_req_indices", token_to_req_indices),
        describe("positions", positions),
        describe("slot_mapping", slot_mapping),
        describe("block_table", block_table),
        describe("cos_sin_cache", cos_sin_cache),
        describe("kv_cache", kv_cache),
        describe("kv_slot_mapping", kv_slot_mapping),
        describe("rms_norm_weight", rms_norm_weight),
        rms_norm_eps,
        compress_ratio,
        overlap,
        layout,
        kv_block_size,
    )
    at = positions[: call.tokens].astype(np.int64)
    kept = (slot_mapping >= 0) & (kv_slot_mapping[: call.tokens] >= 0)
    _check_positions(at[kept])
    tokens = np.flatnonzero(kept & ((at + 1) % call.ratio == 0))
    _check_slots("kv_slot_mapping", kv_slot_mapping[tokens], call.cache, unique=True)
    _check_entry_positions(at[tokens], call.ratio, call.max_position)
    size = max(1, POOLED // (call.window * call.head_dim))
    for part in _chunks(tokens, size):
        _window(at[part], token_to_req_indices[part], block_table, call)  # checks before any write
    for part in _chunks(tokens, size):
        blocks, rows, present = _window(at[part], token_to_req_indices[part], block_table, call)
        kv, score = _read_states(state_cache, blocks, rows, call)
        normed = rms_norm(_pool(kv, score, present), rms_norm_weight, call.eps)
        rotated = round_bf16(_rotate_tail(normed, at[part], cos_sin_cache, call.ratio))
        records = encode_records(rotated, call.cache.layout)
        slots = kv_slot_mapping[part]
        write_records(records, kv_cache, slots, call.cache.block_size, layout=call.cache.layout)


def rope_quant_insert(
    latent: NDArray[Any],
    positions: NDArray[Any],
    cos_sin_cache: NDArray[np.float32],
    kv_cache: NDArray[np.uint8],
    slot_mapping: NDArray[Any],
    *,
    compress_ratio: int,
    layout: str | Layout,
    bf16_round_trip: bool = False,
    kv_block_size: int | None = None,
) -> None:
    """Rotates latents and stores their records.

    Rule (clause 5.6), for each token t with slot_mapping[t] >= 0 and
    (positions[t] + 1) % ratio == 0:
        1. Row t of `latent` is widened to fp32; its last 64 dimensions are rotated (clause 5.5)
           with row (positions[t] // ratio) * ratio of the table.
        2. With `bf16_round_trip` the row is rounded to bf16.
        3. The record of the row (clause 4.1) goes to slot_mapping[t] (clause 4.3). Raw fields are
           rounded to bf16 in any case, so that `v4` does not depend on step 2.

    Args:
        latent: bf16 [>= T, 512].
        positions: int32 or int64 [>= T].
        cos_sin_cache: fp32 [positions, 64].
        kv_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], written.
        slot_mapping: int32 or int64 [T], slots of `kv_cache`.
        compress_ratio: 1 or 2.
        layout: a layout of 512 values.
        bf16_round_trip: whether the rotated row is rounded to bf16 before it is quantized.
        kv_block_size: rows per page; needed for a 2-D cache.

    Raises:
        ArgumentError: dtype, rank, width, stride, length, ratio, block size or layout (clause 6.1).
        ValueRangeError: a position or slot out of range, or a slot given twice (clause 6.2).

    Example:
        >>> import ml_dtypes
        >>> cache = np.zeros((1, 1, 528), np.uint8)
        >>> table = np.repeat(np.float32([[0, 1]]), 32, axis=1)  # cosine 0, sine 1: a quarter turn
        >>> latent = np.ones((1, 512), ml_dtypes.bfloat16)
        >>> rope_quant_insert(latent, np.int64([0]), table, cache, np.int64([0]),
        ...     compress_ratio=1, layout="v41_mxfp8")
        >>> cache[0, 0, 446:450].tobytes().hex(" "), cache[0, 0, 512:514].tobytes().hex(" ")
        ('78 78 f8 78', '77 77')
    """
    cache = check_rope_quant_insert(
        describe("latent", latent),
        describe("positions", positions),
        describe("cos_sin_cache", cos_sin_cache),
        describe("kv_cache", kv_cache),
        describe("slot_mapping", slot_mapping),
        compress_ratio,
        layout,
        bf16_round_trip,
        kv_block_size,
    )
    at = positions[: len(slot_mapping)].astype(np.int64)
    kept = slot_mapping >= 0
    _check_positions(at[kept])
    tokens = np.flatnonzero(kept & ((at + 1) % compress_ratio == 0))
    _check_slots("slot_mapping", slot_mapping[tokens], cache, unique=True)
    _check_entry_positions(at[tokens], compress_ratio, len(cos_sin_cache))
    for part in _chunks(tokens, CHUNK):
        row = latent[part].astype(np.float32)
        rotated: NDArray[Any] = _rotate_tail(row, at[part], cos_sin_cache, compress_ratio)
        if bf16_round_trip:
            rotated = round_bf16(rotated)
        records = encode_records(rotated, cache.layout)
        write_records(records, kv_cache, slot_mapping[part], cache.block_size, layout=cache.layout)


def pool_ring_latent(
    kv_score: NDArray[np.float32],
    positions: NDArray[Any],
    state_cache: NDArray[np.float32] | None,
    slot_mapping: NDArray[Any],
    query_start_loc: NDArray[Any],
    token_to_req_indices: NDArray[Any],
    rms_norm_weight: NDArray[Any],
    rms_norm_eps: float,
    latent_out: NDArray[Any],
    *,
    compress_ratio: int,
) -> None:
    """Pools pairs of tokens into latents, with a ring of rows that remembers across calls.

    Rule (clause 5.10). Chunk q is tokens query_start_loc[q] .. query_start_loc[q + 1] - 1. A token
    with a slot below 0 is skipped: it publishes nothing, is not stored, and is no predecessor.
    Ratio 1: for every other token, latent_out[t] = bf16(rms_norm(kv_score[t])). Ratio 2:
        1. A token with an odd position closes a group. Its predecessor is token t - 1, if that is
           in the same chunk and not skipped; otherwise ring row (position - 1) % capacity of block
           slot_mapping[t] // capacity, as it was before the call.
        2. The two rows, predecessor first, are pooled as in clause 5.4, normed, rounded to bf16 and
           written to latent_out[t]. Other rows of `latent_out` are untouched.
        3. After all reads, token t is stored bit for bit in ring slot slot_mapping[t], unless token
           t + capacity is in the same chunk and not skipped.

    Args:
        kv_score: fp32 [>= T, 512] for ratio 1; [>= T, 1024], 512 kv, then 512 scores, for ratio 2.
        positions: int32 or int64 [>= T].
        state_cache: fp32 [blocks, capacity, 1024], the rings, read and written. Ratio 1 does not
            look at it, so that it may be None.
        slot_mapping: int32 or int64 [T]: block * capacity + position % capacity. Ratio 1 uses its
            sign alone.
        query_start_loc: int32 or int64 [num_reqs + 1]; used by ratio 2.
        token_to_req_indices: int32 or int64 [>= T]; used by ratio 2.
        rms_norm_weight: bf16 or fp32 [512].
        rms_norm_eps: 0 or more; rounded to fp32.
        latent_out: bf16 [>= T, 512], written in place.
        compress_ratio: 1 or 2.

    Raises:
        ArgumentError: dtype, rank, width, stride, length, eps or ratio (clause 6.1).
        ValueRangeError: a position below 0; for ratio 2 also a request, chunk border or slot out of
            range, a slot that is not its position's, tokens of a chunk that do not follow each
            other, or a ring slot written twice (clause 6.2).

    Example:
        >>> import ml_dtypes
        >>> row = np.zeros((2, 1024), np.float32)
        >>> row[0, :512], row[1, :512] = 1, 3
        >>> ring, out = np.zeros((1, 2, 1024), np.float32), np.zeros((2, 512), ml_dtypes.bfloat16)
        >>> pool_ring_latent(row, np.int64([0, 1]), ring, np.int64([0, 1]), np.int32([0, 2]),
        ...     np.int32([0, 0]), np.full(512, 2, np.float32), 0.0, out, compress_ratio=2)
        >>> out[:, 0].tolist(), ring[0, :, 0].tolist()
        ([0.0, 2.0], [1.0, 3.0])
    """
    ring = check_pool_ring_latent(
        describe("kv_score", kv_score),
        describe("positions", positions),
        describe("state_cache", state_cache) if compress_ratio == 2 else None,
        describe("slot_mapping", slot_mapping),
        describe("query_start_loc", query_start_loc),
        describe("token_to_req_indices", token_to_req_indices),
        describe("rms_norm_weight", rms_norm_weight),
        rms_norm_eps,
        describe("latent_out", latent_out),
        compress_ratio,
    )
    kept = slot_mapping >= 0
    _check_positions(positions[: len(kept)][kept])
    if ring is None:
        for part in _chunks(np.flatnonzero(kept), CHUNK):
            latent_out[part] = round_bf16(rms_norm(kv_score[part], rms_norm_weight, rms_norm_eps))
        return
    assert state_cache is not None
    at = positions[: len(kept)].astype(np.int64)
    first, end = _chunk_borders(kept, query_start_loc, token_to_req_indices)
    stored = _check_ring(kept, at, slot_mapping, first, end, ring)
    for part in _chunks(np.flatnonzero(kept & (at % 2 == 1)), CHUNK // 2):
        inside = (part > first[part]) & kept[part - 1]
        block = slot_mapping[part].astype(np.int64) // ring.block_size
        row = (at[part] - 1) % ring.block_size
        pairs = np.empty((len(part), 2, 2 * _LATENT_DIM), np.float32)
        pairs[:, 0] = np.where(inside[:, None], kv_score[part - 1], state_cache[block, row])
        pairs[:, 1] = kv_score[part]
        kv, score = pairs[..., :_LATENT_DIM], pairs[..., _LATENT_DIM:]
        pooled = _pool(kv, score, np.ones((len(part), 2), np.bool_))
        latent_out[part] = round_bf16(rms_norm(pooled, rms_norm_weight, rms_norm_eps))
    for part in _chunks(stored, CHUNK):
        slots = slot_mapping[part].astype(np.int64)
        state_cache[slots // ring.block_size, slots % ring.block_size] = kv_score[part]


def _pool(
    kv: NDArray[np.float32], score: NDArray[np.float32], present: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Softmax-weighted mean over axis 1 of [n, N, D]; rows that are not `present` add +0."""
    there = present[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        m = np.where(there & ~np.isnan(score), score, np.float32(-np.inf)).max(axis=1)
        below = np.where(there, score - m[:, None], np.float32(0))
        weight = np.where(there, exp32(below), np.float32(0))
        terms = np.where(there, weight * kv, np.float32(0))
        pooled: NDArray[np.float32] = tree_sum(terms, 1) / tree_sum(weight, 1)
    return pooled


def _window(
    at: NDArray[np.int64], requests: NDArray[Any], block_table: NDArray[Any], call: Compression
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Block and row of every position that each group pools, and whether it is 0 or more."""
    _check_below("token_to_req_indices", requests, call.num_reqs)
    rows = call.state.block_size
    beyond = at // rows >= call.table_columns
    if bool(beyond.any()):
        last = int(at[beyond][0])
        given = f"position {last}, column {last // rows}"
        raise ValueRangeError("block_table", given, f"columns below {call.table_columns}")
    window = at[:, None] + np.arange(1 - call.window, 1, dtype=np.int64)
    present = window >= 0
    window = np.where(present, window, 0)
    blocks = block_table[requests[:, None], window // rows].astype(np.int64)
    _check_below("block_table", blocks, call.state.num_blocks)
    return blocks, window % rows, present


def _read_states(
    state_cache: NDArray[np.float32],
    blocks: NDArray[np.int64],
    rows: NDArray[np.int64],
    call: Compression,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The kv and the scores [n, N, D] of state rows, from the columns that each row uses."""
    width, dim = call.state.width, call.head_dim
    kv = np.empty((*blocks.shape, dim), np.float32)
    score = np.empty_like(kv)
    for lane in range(2 if call.overlap else 1):
        part = slice(lane * call.ratio, (lane + 1) * call.ratio)
        where = blocks[:, part], rows[:, part]
        kv[:, part] = state_cache[(*where, slice(lane * dim, (lane + 1) * dim))]
        score[:, part] = state_cache[(*where, slice(width + lane * dim, width + (lane + 1) * dim))]
    return kv, score


def _rotate_tail(
    row: NDArray[np.float32],
    at: NDArray[np.int64],
    cos_sin_cache: NDArray[np.float32],
    ratio: int,
) -> NDArray[np.float32]:
    """Rows [n, D] with their last 64 dimensions rotated at the first position of their group."""
    entries = cos_sin_cache[at // ratio * ratio]
    rotated = row.copy()
    tail = slice(row.shape[1] - _ROPE_DIM, None)
    half = _ROPE_DIM // 2
    rotated[:, tail] = rotate_gptj(row[:, tail], entries[:, :half], entries[:, half:])
    return rotated


def _chunk_borders(
    kept: NDArray[np.bool_], query_start_loc: NDArray[Any], token_to_req_indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First token and end of the chunk of every token that is kept; 0 for the others."""
    starts = query_start_loc.astype(np.int64)
    tokens = len(kept)
    if starts[0] < 0 or starts[-1] > tokens or bool((starts[1:] < starts[:-1]).any()):
        given = f"{int(starts[0])} to {int(starts[-1])}, or a step down"
        raise ValueRangeError("query_start_loc", given, f"not falling, within 0..{tokens}")
    requests = token_to_req_indices[:tokens].astype(np.int64)
    _check_below("token_to_req_indices", requests[kept], len(starts) - 1)
    first, end = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
    first[kept], end[kept] = starts[requests[kept]], starts[requests[kept] + 1]
    index = np.arange(tokens)
    outside = kept & ((index < first) | (index >= end))
    if bool(outside.any()):
        token = int(index[outside][0])
        given = f"request {int(requests[token])} for token {token}"
        allowed = f"the request whose chunk, {first[token]}..{end[token] - 1}, holds it"
        raise ValueRangeError("token_to_req_indices", given, allowed)
    return first, end


def _check_ring(
    kept: NDArray[np.bool_],
    at: NDArray[np.int64],
    slot_mapping: NDArray[Any],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    ring: State,
) -> NDArray[np.int64]:
    """The tokens that are stored in the ring, after checks of slots and positions."""
    tokens = np.flatnonzero(kept)
    _check_slots("slot_mapping", slot_mapping[tokens], ring, unique=False)
    rows = slot_mapping.astype(np.int64) % ring.block_size
    moved = kept & (rows != at % ring.block_size)
    if bool(moved.any()):
        token = int(np.flatnonzero(moved)[0])
        given = f"row {rows[token]} for position {at[token]}"
        allowed = f"row {at[token] % ring.block_size}, position % capacity"
        raise ValueRangeError("slot_mapping", given, allowed)
    here, before = tokens[1:], tokens[:-1]
    together = first[here] <= before
    apart = together & (here != before + 1)
    if bool(apart.any()):
        given = f"a skipped token between tokens {before[apart][0]} and {here[apart][0]}"
        allowed = "skipped tokens only before and after the others of a chunk"
        raise ValueRangeError("slot_mapping", given, allowed)
    jump = together & (at[here] != at[before] + 1)
    if bool(jump.any()):
        given = f"{at[before[jump][0]]}, then {at[here[jump][0]]} in one chunk"
        raise ValueRangeError("positions", given, "consecutive positions within a chunk")
    later = tokens + ring.block_size
    replaced = later < end[tokens]
    replaced[replaced] = kept[later[replaced]]
    stored = tokens[~replaced]
    _check_slots("slot_mapping", slot_mapping[stored], ring, unique=True)
    return stored


def _check_positions(at: NDArray[Any]) -> None:
    """Positions of tokens that are not skipped are 0 or more."""
    if bool((at < 0).any()):
        raise ValueRangeError("positions", int(at.min()), "0 or more for a token not skipped")


def _check_entry_positions(at: NDArray[np.int64], ratio: int, max_position: int) -> None:
    """The first position of every group has a row in the cosine table."""
    entries = at // ratio * ratio
    if entries.size and entries.max() >= max_position:
        given = f"{int(at[entries.argmax()])}, rotated at {int(entries.max())}"
        allowed = f"rotated below {max_position}, the rows of cos_sin_cache"
        raise ValueRangeError("positions", given, allowed)


def _check_below(name: str, values: NDArray[Any], end: int) -> None:
    """Every value is 0..end-1."""
    wrong = (values < 0) | (values >= end)
    if bool(wrong.any()):
        raise ValueRangeError(name, int(values[wrong][0]), f"0..{end - 1}")


def _check_slots(name: str, slots: NDArray[Any], store: Cache | State, *, unique: bool) -> None:
    """Slots, none below 0, are within their cache and, with `unique`, given once."""
    if slots.size and slots.max() >= store.num_slots:
        allowed = f"below {store.num_slots} ({store.num_blocks} blocks of {store.block_size} rows)"
        raise ValueRangeError(name, int(slots.max()), allowed)
    if unique:
        values, counts = np.unique(slots, return_counts=True)
        if bool((counts > 1).any()):
            given = f"slot {int(values[counts > 1][0])} more than once"
            raise ValueRangeError(name, given, "each slot once")


def _chunks(tokens: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Runs of at most `size` tokens."""
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]
