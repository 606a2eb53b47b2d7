"""The compressor on the GPU. The rules are in `dsv4num.reference.compressor`, SPEC 5.3 to 5.6, 5.10.

A window of N state rows is pooled as a tile [N / 8, columns] of which eight are held at once: row i of
tile j is window row 8 i + j. The three first levels of the sum tree are then additions of tiles, with
no exchange between threads, and the others halve one tile. Where a window has more than eight rows, the
columns are spread over programs, and a second kernel norms, rotates and stores the pooled rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4num.arguments import (
    check_compress,
    check_pool_ring_latent,
    check_rope_quant_insert,
    check_save_partial_states,
)
from dsv4num.errors import ArgumentError
from dsv4num.formats import Layout
from dsv4num.gpu import _validate
from dsv4num.gpu._record import (
    load_groups,
    page_and_row,
    record_constant,
    store_groups,
    store_raw,
)
from dsv4num.gpu._target import Launch, interpreted, target_of, use_native
from dsv4num.gpu._tuning import tile_of
from dsv4num.gpu.arithmetic import (
    exp_nonpositive,
    inverse_rms,
    load_weight,
    weight_view,
)
from dsv4num.gpu.paged_cache import describe
from dsv4num.gpu.rope import rotate_pairs
from dsv4num.gpu.scalar import bits_of, device_of, float_of, round_bf16_bits

__all__ = [
    "compress_norm_rope_store",
    "pool_ring_latent",
    "rope_quant_insert",
    "save_partial_states",
]

_ROPE_DIM = tl.constexpr(64)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
_NAN = tl.constexpr(0x7FFFFFFF)
_LATENT_DIM = 512
#: Values of a tile that is quantized at a time: 64 per thread of a warp.
_PART = 2048
#: A row of the scratch buffer is followed by whether its window exists; four keep the next one aligned.
_SCRATCH = tl.constexpr(4)


class Window(NamedTuple):
    """What a group pools, as one kernel constant."""

    rows: int
    ratio: int
    overlap: bool
    head_dim: int
    width: int  # columns of kv in a state row; the scores follow
    block_size: int  # rows per state block
    held: int  # rows of the window that follow each other in one thread
    run: int  # of these, rows that are sure to follow each other in one state block


# Pooling


@triton.jit
def _window_rows(
    table_ptr, table_width, num_state_blocks, last, block_stride, row_stride, WINDOW: tl.constexpr
):
    """Where the rows of the window that ends at position `last` are: a place [L, R] for each run.

    Also whether each run is in the table and in the state cache, and whether all are that have a
    position. The window ends with a group, so that runs begin at multiples of their length: each lies
    in one block, and before position 0 wholly or not at all.
    """
    LINES: tl.constexpr = WINDOW.rows // WINDOW.held
    line = tl.arange(0, LINES)[:, None] * WINDOW.held
    index = line + tl.arange(0, WINDOW.held // WINDOW.run)[None, :] * WINDOW.run
    # Below max_position, hence below 2**31.
    position = last.to(tl.int32) - (WINDOW.rows - 1) + index
    entry = position // WINDOW.block_size
    listed = (position >= 0) & (entry < table_width)
    block = tl.load(table_ptr + entry, mask=listed, other=-1).to(tl.int64)
    known = listed & (block >= 0) & (block < num_state_blocks)
    good = tl.min(tl.min((known | (position < 0)).to(tl.int32), axis=1), axis=0) == 1
    place = block * block_stride + (position % WINDOW.block_size) * row_stride
    if WINDOW.overlap:
        place += tl.where(index < WINDOW.ratio, 0, WINDOW.head_dim)
    return place, known, good


@triton.jit
def _pool(state_ptr, place, known, whole, column, row_stride, WINDOW: tl.constexpr):
    """The softmax-weighted mean [1, C] of the rows at places; `whole`: all are known."""
    HELD: tl.constexpr = WINDOW.held
    LINES: tl.constexpr = WINDOW.rows // HELD
    row = tl.arange(0, WINDOW.run).to(tl.int64) * row_stride
    at = state_ptr + place[:, :, None, None] + row[None, None, :, None] + column[None, None, None, :]
    if whole:
        # No mask, hence nothing to fill.
        score, kv = tl.load(at + WINDOW.width), tl.load(at)
    else:
        loaded = tl.broadcast_to(known[:, :, None, None], at.shape)
        score = tl.load(at + WINDOW.width, mask=loaded, other=_NEGATIVE_INFINITY)
        kv = tl.load(at, mask=loaded, other=0.0)
    score = tl.reshape(score, (LINES, HELD, column.shape[0]))
    kv = tl.reshape(kv, (LINES, HELD, column.shape[0]))
    # A NaN score makes the weight of its row NaN, and all of its column, whatever is largest.
    largest = tl.max(tl.max(score, axis=1), axis=0)
    weight = exp_nonpositive(score - largest[None, None, :])
    # A row without a position has the weight exp(-inf) = 0; or NaN, where that of the last row is too.
    total, norm = _sum_held(weight * kv), _sum_held(weight)
    # Both at once where rows are spread over threads.
    total, norm = tl.split(_sum_lines(tl.join(total, norm)))
    return tl.div_rn(total, norm)


@triton.jit
def _sum_held(x):
    """[L, H, C] to [L, C]: the lower levels of the tree over the window rows, within a thread."""
    if x.shape[1] == 1:
        total = tl.reshape(x, (x.shape[0], x.shape[2]))
    else:
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2, x.shape[2]))
        total = _sum_held(tl.sum(pairs, axis=2))
    return total


@triton.jit
def _sum_lines(x):
    """[L, C, 2] to [1, C, 2]: the upper levels."""
    if x.shape[0] == 1:
        total = x
    else:
        pairs = tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1], x.shape[2]))
        total = _sum_lines(tl.sum(pairs, axis=1))
    return total


# Scanning for the tokens that end a group


@triton.jit
def _ending_tokens(
    index,
    first,
    tokens,
    positions_ptr,
    slots_ptr,
    kv_slots_ptr,
    num_slots,
    max_position,
    RATIO: tl.constexpr,
):
    """Which of the tokens first + index end a group, are not skipped and can be rotated.

    Also the positions and kv slots of all.
    """
    token = first + index
    inside = token < tokens
    position = tl.load(positions_ptr + token, mask=inside, other=-1).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    kv_slot = tl.load(kv_slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    wanted = inside & (slot >= 0) & (kv_slot >= 0) & (kv_slot < num_slots)
    ends = (position >= 0) & ((position + 1) % RATIO == 0)
    wanted &= ends & (position // RATIO * RATIO < max_position)
    return wanted, position, kv_slot


@triton.jit
def _value_of(values, ptr, token):
    """The value of a token that a program found, of those that it loaded for all its tokens.

    One alone is there already, which saves decode steps a wait; of several, loading it again costs less
    than an exchange between threads.
    """
    if values.shape[0] == 1:  # noqa: SIM108 - a choice of the compiler, not of the kernel
        value = tl.sum(values, axis=0)
    else:
        value = tl.load(ptr + token).to(tl.int64)
    return value


@triton.jit
def _next(index, wanted, after, COUNT: tl.constexpr):
    """The first wanted index beyond `after`, or COUNT."""
    return tl.min(tl.where(wanted & (index > after), index, COUNT), axis=0)


# Norm, rotation, store


@triton.jit
def _load_cos_sin(cos_ptr, entry, entry_stride, D: tl.constexpr):
    """cos and sin [1, D / 2] of a table entry, and which pairs of a row they rotate: the last 32."""
    pair = tl.arange(0, D // 2) - (D - _ROPE_DIM) // 2
    rotated = pair >= 0
    at = cos_ptr + entry * entry_stride + pair
    cos = tl.load(at, mask=rotated)
    sin = tl.load(at + _ROPE_DIM // 2, mask=rotated)
    return cos[None, :], sin[None, :], rotated[None, :]


@triton.jit
def _store_row(
    row,
    slot,
    cache_ptr,
    page_stride,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rounds a row [1, D] to bf16 and stores its record."""
    GROUPS: tl.constexpr = RECORD.head_dim // RULE.group
    halves = tl.reshape(round_bf16_bits(bits_of(row), NATIVE), (GROUPS, RULE.group))
    group = tl.arange(0, GROUPS)
    kept = group >= 0
    page, line = page_and_row(slot + tl.zeros((GROUPS,), tl.int64), page_stride, RECORD)
    bits = halves.to(tl.uint32) << 16
    store_groups(cache_ptr, bits, page, line, group, kept, RECORD, RULE, NATIVE, True)
    if RECORD.raw > 0:
        store_raw(cache_ptr, halves, page, line, group, kept, RECORD, RULE)


@triton.jit
def _norm_and_rotate(pooled, weight, eps, cos, sin, rotated, NATIVE: tl.constexpr):
    """Norms a row [1, D] and rotates its last 64 columns."""
    # One number, not a tile: Triton 3.9 spreads the layout of a [1, 1] tile, in which every thread has
    # the whole row, over all that follows.
    scale = inverse_rms(pooled, eps, NATIVE).item()
    normed = (pooled * scale) * weight
    even, odd = tl.split(tl.reshape(normed, (1, normed.shape[1] // 2, 2)))
    new_even, new_odd = rotate_pairs(even, odd, cos, sin)
    return tl.interleave(tl.where(rotated, new_even, even), tl.where(rotated, new_odd, odd))


@triton.jit(
    do_not_specialize=[
        "requests_ptr",
        "positions_ptr",
        "slots_ptr",
        "table_ptr",
        "kv_slots_ptr",
        "tokens",
        "num_requests",
        "table_stride",
        "table_width",
        "num_state_blocks",
        "max_position",
        "num_slots",
    ]
)
def _compress_kernel(
    state_ptr,
    requests_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    cos_ptr,
    cache_ptr,
    kv_slots_ptr,
    weight_ptr,
    pooled_ptr,
    eps,
    tokens,
    num_requests,
    table_stride,
    table_width,
    num_state_blocks,
    block_stride,
    row_stride,
    entry_stride,
    max_position,
    page_stride,
    num_slots,
    POOL: tl.constexpr,
    FINISH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Pools, finishes, or both; between two launches a row waits in `pooled_ptr`, see _SCRATCH.

    OVERLAPPED: the second launch begins when all programs of the first have, and waits for their end.
    """
    if OVERLAPPED and POOL:
        tl.extra.cuda.gdc_launch_dependents()
    RATIO: tl.constexpr = WINDOW.ratio
    D: tl.constexpr = WINDOW.head_dim
    first = tl.program_id(0).to(tl.int64) * TOKENS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, TOKENS)
    wanted, positions, kv_slots = _ending_tokens(
        index, first, tokens, positions_ptr, slots_ptr, kv_slots_ptr, num_slots, max_position, RATIO
    )
    if POOL:
        inside = first + index < tokens
        requests = tl.load(requests_ptr + first + index, mask=inside, other=-1).to(tl.int64)
    found = _next(index, wanted, -1, TOKENS)
    if FINISH:
        weight = load_weight(weight_ptr, column)[None, :]
    if OVERLAPPED and FINISH:
        tl.extra.cuda.gdc_wait()
    while found < TOKENS:
        token = first + found
        last = _value_of(positions, positions_ptr, token)
        scratch = pooled_ptr + token * (D + _SCRATCH)
        if FINISH:
            slot = _value_of(kv_slots, kv_slots_ptr, token)
            cos, sin, rotated = _load_cos_sin(cos_ptr, last // RATIO * RATIO, entry_stride, D)
        if POOL:
            request = _value_of(requests, requests_ptr, token)
            listed = (request >= 0) & (request < num_requests)
            row_ptr = table_ptr + tl.where(listed, request, 0) * table_stride
            width = tl.where(listed, table_width, 0)
            place, known, good = _window_rows(
                row_ptr, width, num_state_blocks, last, block_stride, row_stride, WINDOW
            )
            whole = good & (last >= WINDOW.rows - 1)
            pooled = _pool(state_ptr, place, known, whole, column, row_stride, WINDOW)
        else:
            pooled = tl.load(scratch + column)[None, :]
            good = tl.load(scratch + D) == 1.0
        if FINISH:
            if good:
                row = _norm_and_rotate(pooled, weight, eps, cos, sin, rotated, NATIVE)
                _store_row(row, slot, cache_ptr, page_stride, RECORD, RULE, NATIVE)
        else:
            tl.store((scratch + column)[None, :], pooled)
            if tl.program_id(1) == 0:
                tl.store(scratch + D, good.to(tl.float32))
        found = _next(index, wanted, found, TOKENS)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr", "tokens", "num_slots"])
def _save_states_kernel(
    kv_ptr,
    score_ptr,
    ape_ptr,
    positions_ptr,
    state_ptr,
    slots_ptr,
    tokens,
    kv_stride,
    score_stride,
    ape_stride,
    block_stride,
    row_stride,
    num_slots,
    block_size,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=inside, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots) & (position >= 0)
    slot = tl.where(kept, slot, 0)
    phase = tl.where(kept, position, 0) % RATIO
    mask = kept[:, None] & (column < WIDTH)[None, :]
    kv = tl.load(kv_ptr + (token * kv_stride)[:, None] + column[None, :], mask=mask, other=0)
    score = tl.load(
        score_ptr + (token * score_stride)[:, None] + column[None, :], mask=mask, other=0.0
    )
    ape = tl.load(ape_ptr + (phase * ape_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    total = score + ape
    bits = tl.where(total == total, bits_of(total), _NAN)
    at = (slot // block_size) * block_stride + (slot % block_size) * row_stride
    target = state_ptr + at[:, None] + column[None, :]
    tl.store(target, kv, mask=mask)
    tl.store(target + WIDTH, bits.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _ends_group(
    token, tokens, positions_ptr, slots_ptr, max_position, num_slots, RATIO: tl.constexpr
):
    """Whether tokens are stored, their slots, and their entries of the cosine table."""
    inside = token < tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=inside, other=-1).to(tl.int64)
    entry = position // RATIO * RATIO
    kept = (slot >= 0) & (slot < num_slots) & (position >= 0) & ((position + 1) % RATIO == 0)
    return kept & (entry < max_position), slot, entry


@triton.jit
def _rotate_groups(bits, table, index, kept):
    """fp32 bits [N, GROUP] rotated: line n is the index[n]-th group that is, table[n] its entry."""
    PAIRS: tl.constexpr = bits.shape[1] // 2
    even, odd = tl.split(tl.reshape(bits, (bits.shape[0], PAIRS, 2)))
    at = table[:, None] + (index * PAIRS)[:, None] + tl.arange(0, PAIRS)[None, :]
    cos = tl.load(at, mask=kept[:, None])
    sin = tl.load(at + _ROPE_DIM // 2, mask=kept[:, None])
    even, odd = rotate_pairs(float_of(even), float_of(odd), cos, sin)
    return tl.interleave(bits_of(even), bits_of(odd))


@triton.jit
def _store_latents(
    latent_ptr,
    positions_ptr,
    cos_ptr,
    cache_ptr,
    slots_ptr,
    first,
    tokens,
    latent_stride,
    entry_stride,
    max_position,
    page_stride,
    num_slots,
    OFFSET: tl.constexpr,
    RATIO: tl.constexpr,
    ROUND_TRIP: tl.constexpr,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Stores the latents at an offset in RATIO tokens: PART rows at a time, then the rotated groups.

    Those are few: of all rows at once, they leave no thread idle.
    """
    GROUPS: tl.constexpr = RECORD.head_dim // RULE.group
    ROTATED: tl.constexpr = _ROPE_DIM // RULE.group
    for part in tl.static_range(ROWS // PART):
        line = tl.arange(0, PART * GROUPS)
        group = line % GROUPS
        token = (first + part * PART + line // GROUPS) * RATIO + OFFSET
        kept, slot, _ = _ends_group(
            token, tokens, positions_ptr, slots_ptr, max_position, num_slots, RATIO
        )
        page, row = page_and_row(slot, page_stride, RECORD)
        # Where each token is a group, the row of a skipped one may be read, too, so that no load has
        # to wait for a slot or a position.
        inside = (token < tokens) if RATIO == 1 else kept
        plain = group < GROUPS - ROTATED
        at = token * latent_stride + group * RULE.group
        bits = load_groups(latent_ptr, at, inside & plain, RULE.group, NATIVE)
        store_groups(
            cache_ptr, bits, page, row, group, kept & plain, RECORD, RULE, NATIVE, True
        )

    line = tl.arange(0, ROWS * ROTATED)
    token = (first + line // ROTATED) * RATIO + OFFSET
    kept, slot, entry = _ends_group(
        token, tokens, positions_ptr, slots_ptr, max_position, num_slots, RATIO
    )
    inside = (token < tokens) if RATIO == 1 else kept
    index = line % ROTATED
    group = GROUPS - ROTATED + index
    at = token * latent_stride + group * RULE.group
    bits = load_groups(latent_ptr, at, inside, RULE.group, NATIVE)
    bits = _rotate_groups(bits, cos_ptr + entry * entry_stride, index, kept)
    halves = round_bf16_bits(bits, NATIVE)
    if ROUND_TRIP:
        bits = halves.to(tl.uint32) << 16
    page, row = page_and_row(slot, page_stride, RECORD)
    store_groups(cache_ptr, bits, page, row, group, kept, RECORD, RULE, NATIVE, ROUND_TRIP)
    if RECORD.raw > 0:
        store_raw(cache_ptr, halves, page, row, group, kept, RECORD, RULE)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr", "tokens", "max_position", "num_slots"])
def _rope_quant_kernel(
    latent_ptr,
    positions_ptr,
    cos_ptr,
    cache_ptr,
    slots_ptr,
    tokens,
    latent_stride,
    entry_stride,
    max_position,
    page_stride,
    num_slots,
    RATIO: tl.constexpr,
    ROUND_TRIP: tl.constexpr,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """One program looks at ROWS times RATIO tokens.

    At ratio 2 as a rule those at an odd place end a group; those at an even place, where a sequence
    started in between; and both where requests meet.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    for offset in tl.static_range(RATIO):
        some = True
        if RATIO > 1:
            token = (first + tl.arange(0, ROWS)) * RATIO + offset
            ends, _, _ = _ends_group(
                token, tokens, positions_ptr, slots_ptr, max_position, num_slots, RATIO
            )
            some = tl.max(ends.to(tl.int32), axis=0) > 0
        if some:
            _store_latents(
                latent_ptr, positions_ptr, cos_ptr, cache_ptr, slots_ptr, first, tokens, latent_stride,
                entry_stride, max_position, page_stride, num_slots, offset, RATIO, ROUND_TRIP, RECORD,
                RULE, NATIVE, ROWS, PART,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "positions_ptr",
        "slots_ptr",
        "starts_ptr",
        "requests_ptr",
        "tokens",
        "num_requests",
        "num_slots",
    ]
)
def _publish_kernel(
    kv_score_ptr,
    positions_ptr,
    ring_ptr,
    slots_ptr,
    starts_ptr,
    requests_ptr,
    weight_ptr,
    out_ptr,
    eps,
    tokens,
    num_requests,
    kv_score_stride,
    block_stride,
    row_stride,
    num_slots,
    capacity,
    out_stride,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program per token: the latent of the group that it closes, if it closes one."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    closes = (slot >= 0) & (position >= 0)
    column = tl.arange(0, WIDTH)
    here = kv_score_ptr + token * kv_score_stride + column
    if RATIO == 2:
        request = tl.load(requests_ptr + token).to(tl.int64)
        known = (request >= 0) & (request < num_requests)
        closes &= (slot < num_slots) & known & (position % 2 == 1)
    if closes:
        pooled = tl.load(here)[None, :]
        if RATIO == 2:
            start = tl.load(starts_ptr + request).to(tl.int64)
            before = tl.load(slots_ptr + token - 1, mask=token > 0, other=-1).to(tl.int64)
            inside = (token > start) & (before >= 0) & (before < num_slots)
            score1 = tl.load(here + WIDTH)[None, :]
            # Loads in both branches: of a choice of pointers, Triton 3.6 makes nothing for AMD.
            if inside:
                earlier = kv_score_ptr + (token - 1) * kv_score_stride + column
                kv0, score0 = tl.load(earlier)[None, :], tl.load(earlier + WIDTH)[None, :]
            else:
                back = (slot // capacity) * block_stride + ((position - 1) % capacity) * row_stride
                earlier = ring_ptr + back + column
                kv0, score0 = tl.load(earlier)[None, :], tl.load(earlier + WIDTH)[None, :]
            largest = tl.maximum(score0, score1)  # a NaN score gives NaN, whatever is largest
            weight0, weight1 = exp_nonpositive(score0 - largest), exp_nonpositive(score1 - largest)
            pooled = tl.div_rn(weight0 * kv0 + weight1 * pooled, weight0 + weight1)
        scale = inverse_rms(pooled, eps, NATIVE)
        normed = (pooled * scale) * load_weight(weight_ptr, column)[None, :]
        halves = round_bf16_bits(bits_of(normed), NATIVE).to(tl.int16, bitcast=True)
        tl.store((out_ptr + token * out_stride + column)[None, :], halves)


@triton.jit(
    do_not_specialize=[
        "positions_ptr",
        "slots_ptr",
        "starts_ptr",
        "requests_ptr",
        "tokens",
        "num_requests",
        "num_slots",
    ]
)
def _remember_kernel(
    kv_score_ptr,
    positions_ptr,
    ring_ptr,
    slots_ptr,
    starts_ptr,
    requests_ptr,
    tokens,
    num_requests,
    kv_score_stride,
    block_stride,
    row_stride,
    num_slots,
    capacity,
    WIDTH: tl.constexpr,
):
    """One program per token: its row into the ring, unless a later token of its chunk replaces it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    request = tl.load(requests_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    known = (request >= 0) & (request < num_requests) & (position >= 0)
    if known & (slot >= 0) & (slot < num_slots):
        end = tl.load(starts_ptr + request + 1).to(tl.int64)
        later = token + capacity
        replacing = tl.load(slots_ptr + later, mask=(later < end) & (later < tokens), other=-1)
        if (replacing < 0) | (replacing >= num_slots):
            column = tl.arange(0, WIDTH)
            row = tl.load(kv_score_ptr + token * kv_score_stride + column)
            at = (slot // capacity) * block_stride + (slot % capacity) * row_stride
            tl.store(ring_ptr + at + column, row)


def save_partial_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_ratio: int,
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.save_partial_states`: the same bits, on torch tensors.

    A token with a slot beyond the state cache or a position below 0 is skipped; `validate=True` raises
    the reference's error instead, which waits for the device.
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
    use_native(launch, kv.device)
    tokens = slot_mapping.shape[0]
    if _validate.asked(validate):
        kept = slot_mapping >= 0
        _validate.slots("slot_mapping", slot_mapping[kept], state)
        _validate.positions(positions[:tokens][kept])
    if tokens == 0 or state.num_blocks == 0:
        return
    block = min(1024, triton.next_power_of_2(state.width))
    tile = tile_of("save_states", kv.device)
    rows = launch.rows or tile.rows(block)
    with device_of(state_cache):
        _save_states_kernel[(triton.cdiv(tokens, rows), triton.cdiv(state.width, block))](
            kv.view(torch.int32),
            score,
            ape,
            positions,
            state_cache.view(torch.int32),
            slot_mapping,
            tokens,
            kv.stride(0),
            score.stride(0),
            ape.stride(0),
            state.block_stride,
            state.row_stride,
            state.num_slots,
            state.block_size,
            WIDTH=state.width,
            RATIO=compress_ratio,
            ROWS=rows,
            BLOCK=block,
            num_warps=launch.num_warps or tile.warps,
            enable_fp_fusion=False,
        )


def compress_norm_rope_store(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    *,
    compress_ratio: int,
    overlap: bool | int,
    layout: str | Layout,
    kv_block_size: int | None = None,
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.compress_norm_rope_store`: the same bytes, on torch tensors.

    A token whose request, position, state rows or kv slot are out of range is skipped; `validate=True`
    raises the reference's error instead, which waits for the device. Windows of more than eight rows
    take a scratch buffer of 4 * head_dim bytes per token.
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
    record, rule = record_constant(call.cache)
    native = use_native(launch, kv_cache.device)
    plan = choose_plan(call.tokens, call.num_reqs, call.window, call.ratio, call.head_dim)
    if interpreted():
        plan = Plan(64, call.head_dim)  # the interpreter pays per program
    columns = launch.columns or plan.columns
    if columns > call.head_dim:
        allowed = f"a power of two up to {call.head_dim}"
        raise ArgumentError("launch.columns", columns, allowed)
    if _validate.asked(validate):
        _validate.compression(
            token_to_req_indices, positions, slot_mapping, block_table, kv_slot_mapping, call
        )
    if 0 in (call.tokens, call.cache.num_blocks, call.state.num_blocks, call.num_reqs):
        return
    split = columns < call.head_dim
    overlapped = split and target_of(kv_cache.device).overlaps
    pooled = state_cache
    if split:
        shape = (call.tokens, call.head_dim + _SCRATCH.value)
        pooled = torch.empty(shape, dtype=torch.float32, device=state_cache.device)

    def run(pool: bool, finish: bool, per_program: int) -> None:
        rows = launch.rows or plan.tokens
        tile = tile_of(("finish" if split else "compress") if finish else "pool", kv_cache.device)
        # A warp for 128 columns that are stored, so that few have to wait for each other.
        most = max(1, per_program // 128) if finish else tile.warps
        warps = launch.num_warps or min(tile.warps, most)
        held = max(1, min(call.window, call.window * per_program // (128 * warps)))
        window = Window(
            rows=call.window,
            ratio=call.ratio,
            overlap=call.overlap,
            head_dim=call.head_dim,
            width=call.state.width,
            block_size=call.state.block_size,
            held=held,
            run=math.gcd(held, call.ratio, call.state.block_size),
        )
        _compress_kernel[(triton.cdiv(call.tokens, rows), call.head_dim // per_program)](
            state_cache,
            token_to_req_indices,
            positions,
            slot_mapping,
            block_table,
            cos_sin_cache,
            kv_cache,
            kv_slot_mapping,
            weight_view(rms_norm_weight),
            pooled,
            call.eps,
            call.tokens,
            call.num_reqs,
            block_table.stride(0),
            call.table_columns,
            call.state.num_blocks,
            call.state.block_stride,
            call.state.row_stride,
            cos_sin_cache.stride(0),
            call.max_position,
            call.cache.page_stride,
            call.cache.num_slots,
            POOL=pool,
            FINISH=finish,
            COLUMNS=per_program,
            WINDOW=window,
            RECORD=record,
            RULE=rule,
            NATIVE=native,
            TOKENS=rows,
            OVERLAPPED=overlapped,
            num_warps=warps,
            enable_fp_fusion=False,
            **tile.limit,
            **({"launch_pdl": True} if overlapped and finish else {}),
        )

    with device_of(kv_cache):
        if split:
            run(pool=True, finish=False, per_program=columns)
            run(pool=False, finish=True, per_program=call.head_dim)
        else:
            run(pool=True, finish=True, per_program=call.head_dim)


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_ratio: int,
    layout: str | Layout,
    bf16_round_trip: bool = False,
    kv_block_size: int | None = None,
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.rope_quant_insert`: the same bytes, on torch tensors.

    A token whose position or slot is out of range is skipped; `validate=True` raises the reference's
    error instead, which waits for the device.
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
    record, rule = record_constant(cache)
    native = use_native(launch, latent.device)
    tokens = slot_mapping.shape[0]
    if _validate.asked(validate):
        kept = slot_mapping >= 0
        at = positions[:tokens]
        _validate.positions(at[kept])
        ends = kept & ((at + 1) % compress_ratio == 0)
        _validate.slots("slot_mapping", slot_mapping[ends], cache)
        _validate.entries(at[ends], compress_ratio, cos_sin_cache.shape[0])
    if tokens == 0 or cache.num_blocks == 0:
        return
    tile = tile_of("rope_quant", latent.device, packed=rule.element == "e2m1")
    rows = launch.rows or tile.rows(cache.layout.head_dim, tokens)
    part = rows if interpreted() else min(rows, max(1, _PART // cache.layout.head_dim))
    with device_of(kv_cache):
        _rope_quant_kernel[(triton.cdiv(tokens, rows * compress_ratio),)](
            latent.view(torch.int16),
            positions,
            cos_sin_cache,
            kv_cache,
            slot_mapping,
            tokens,
            latent.stride(0),
            cos_sin_cache.stride(0),
            cos_sin_cache.shape[0],
            cache.page_stride,
            cache.num_slots,
            RATIO=compress_ratio,
            ROUND_TRIP=bf16_round_trip,
            RECORD=record,
            RULE=rule,
            NATIVE=native,
            ROWS=rows,
            PART=part,
            num_warps=launch.num_warps or tile.warps,
            enable_fp_fusion=False,
            **tile.limit,
        )


def pool_ring_latent(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    latent_out: torch.Tensor,
    *,
    compress_ratio: int,
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.pool_ring_latent`: the same bits, on torch tensors.

    A token whose slot, request or position is out of range is skipped; `validate=True` raises the
    reference's error instead, which waits for the device. The ring is read by one kernel
    and written by the next, so that no read can see a row of the same call.
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
    native = use_native(launch, kv_score.device)
    tokens, requests = slot_mapping.shape[0], query_start_loc.shape[0] - 1
    if _validate.asked(validate):
        _validate.ring(positions, slot_mapping, query_start_loc, token_to_req_indices, ring)
    if tokens == 0 or (ring is not None and ring.num_blocks == 0):
        return
    state = kv_score if ring is None or state_cache is None else state_cache
    block_stride, row_stride = (ring.block_stride, ring.row_stride) if ring else (0, 0)
    num_slots, capacity = (ring.num_slots, ring.block_size) if ring else (0, 1)
    warps = launch.num_warps or tile_of("pool_ring", latent_out.device).warps
    with device_of(latent_out):
        _publish_kernel[(tokens,)](
            kv_score,
            positions,
            state,
            slot_mapping,
            query_start_loc,
            token_to_req_indices,
            weight_view(rms_norm_weight),
            latent_out.view(torch.int16),
            float(rms_norm_eps),
            tokens,
            requests,
            kv_score.stride(0),
            block_stride,
            row_stride,
            num_slots,
            capacity,
            latent_out.stride(0),
            WIDTH=_LATENT_DIM,
            RATIO=compress_ratio,
            NATIVE=native,
            num_warps=warps,
            enable_fp_fusion=False,
        )
        if ring is not None:
            _remember_kernel[(tokens,)](
                kv_score.view(torch.int32),
                positions,
                state.view(torch.int32),
                slot_mapping,
                query_start_loc,
                token_to_req_indices,
                tokens,
                requests,
                kv_score.stride(0),
                block_stride,
                row_stride,
                num_slots,
                capacity,
                WIDTH=2 * _LATENT_DIM,
                num_warps=warps,
                enable_fp_fusion=False,
            )


class Plan(NamedTuple):
    """How `compress_norm_rope_store` is spread over programs.

    Attributes:
        tokens: that one program looks through for ends of groups.
        columns: of a pooled row per program; fewer than the row has take a second kernel, which stores.
    """

    tokens: int
    columns: int


def plans(window: int, ratio: int, head_dim: int) -> tuple[Plan, ...]:
    """Every plan that `choose_plan` may take: many groups, few groups, a group in every token.

    A window of up to eight rows fits the registers of one program, which stores the row at once. Few
    groups have a program each; many share one, which then starts fewer.

    A larger window is spread over programs of 32 columns: full lines of memory, and 128 rows in
    registers; of 16, where 32 would leave multiprocessors without work.
    """
    group = min(ratio, 128)
    if window <= 8:
        many = max(16 if head_dim > 128 else 32, group)
        return Plan(many, head_dim), Plan(max(4, group), head_dim), Plan(1, head_dim)
    wide, narrow = min(32, head_dim), min(16, head_dim)
    many = max(16, group)
    return Plan(many, wide), Plan(many, narrow), Plan(1, wide), Plan(1, narrow)


def choose_plan(tokens: int, requests: int, window: int, ratio: int, head_dim: int) -> Plan:
    """The plan for the most groups that the tokens can end: no device is asked for the positions."""
    groups = min(tokens, tokens // ratio + requests)
    decode = groups * ratio > 2 * tokens  # or short prefills
    if window <= 8:
        many, few, every = plans(window, ratio, head_dim)
        return every if decode else many if groups > 1024 else few
    many, few, every, every_few = plans(window, ratio, head_dim)
    if groups > 8:
        return every if decode else many
    return every_few if decode else few
