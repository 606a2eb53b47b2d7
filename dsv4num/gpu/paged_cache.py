"""Insert into and gather from a paged K cache, on the GPU. SPEC clauses 5.1 and 5.2.

One program handles `ROWS` rows as one tile with a line per group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4num.arguments import Array, Cache, check_gather, check_insert
from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.formats import Layout
from dsv4num.gpu import _validate
from dsv4num.gpu._record import (
    load_groups,
    page_and_row,
    record_constant,
    store_groups,
)
from dsv4num.gpu._target import Launch, use_native
from dsv4num.gpu._tuning import tile_of
from dsv4num.gpu.scalar import (
    bits_of,
    decode_bits,
    device_of,
    float_of,
    round_bf16_bits,
    unpack_e2m1_bits,
)

__all__ = ["dequantize_and_gather_k_cache", "quantize_and_insert_k_cache"]


@triton.jit(do_not_specialize=["slots_ptr", "tokens", "num_slots"])
def _insert_kernel(
    k_ptr,
    cache_ptr,
    slots_ptr,
    tokens,
    k_stride,
    page_stride,
    num_slots,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    GROUPS: tl.constexpr = RECORD.head_dim // RULE.group
    first = tl.program_id(0).to(tl.int64) * ROWS

    # One line per group: which token, which group of its row, and where its record is.
    line = tl.arange(0, ROWS * GROUPS)
    token = first + line // GROUPS
    group = line % GROUPS
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots)
    page, row = page_and_row(slot, page_stride, RECORD)
    # Also of tokens that are skipped, whose rows are there too: so the slots need not be waited for.
    coded = (token < tokens) & (group < RECORD.coded // RULE.group)
    bits = load_groups(k_ptr, token * k_stride + group * RULE.group, coded, RULE.group, NATIVE)
    store_groups(cache_ptr, bits, page, row, group, kept, RECORD, RULE, NATIVE, True)

    if RECORD.raw > 0:
        # Bytes, which need no alignment, in a tile of their own, which needs no exchange of threads.
        token = first + tl.arange(0, ROWS)
        inside = token < tokens
        slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
        kept = (slot >= 0) & (slot < num_slots)
        page, row = page_and_row(slot, page_stride, RECORD)
        byte = tl.arange(0, 2 * RECORD.raw)
        source = (token * k_stride + RECORD.coded)[:, None] * 2 + byte[None, :]
        k_bytes = k_ptr.to(tl.pointer_type(tl.uint8))
        raw = tl.load(k_bytes + source, mask=inside[:, None], other=0)
        at = page + RECORD.raw_at + row * RECORD.raw_step
        tl.store(cache_ptr + at[:, None] + byte[None, :], raw, mask=kept[:, None])


@triton.jit
def _find_rows(
    position, room, index, table_ptr, table_width, page_stride, num_blocks, RECORD: tl.constexpr
):
    """For positions of a request: whether each has a row, its page's first byte, its row there."""
    column = position // RECORD.block_size
    inside = (index < room) & (position >= 0) & (column < table_width)
    page = tl.load(table_ptr + column, mask=inside, other=-1).to(tl.int64)
    inside &= (page >= 0) & (page < num_blocks)
    return inside, page * page_stride, position % RECORD.block_size


@triton.jit(
    do_not_specialize=[
        "seq_lens_ptr",
        "gather_lens_ptr",
        "table_ptr",
        "table_stride",
        "table_width",
        "num_blocks",
        "room",
        "offset",
        "requests",
    ]
)
def _gather_kernel(
    out_ptr,
    cache_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    table_ptr,
    out_request_stride,
    out_row_stride,
    table_stride,
    table_width,
    page_stride,
    num_blocks,
    room,
    offset,
    requests,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """WHOLE: sequences are gathered from their start, so that pages are known before lengths are."""
    GROUPS: tl.constexpr = RECORD.head_dim // RULE.group
    first = tl.program_id(0).to(tl.int64) * ROWS
    request = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if request >= requests:
        return
    table_ptr += request * table_stride
    out_row = request * out_request_stride + offset * out_row_stride
    line = tl.arange(0, ROWS * GROUPS)
    group = line % GROUPS
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    start = first
    length = tl.minimum(seq_len, room)
    if not WHOLE:
        wanted = tl.load(gather_lens_ptr + request).to(tl.int64)
        start += seq_len - wanted
        length = tl.minimum(wanted, room)
    index = line // GROUPS
    inside, page, row = _find_rows(
        start + index, room, first + index, table_ptr, table_width, page_stride, num_blocks, RECORD
    )
    if (first >= length) | (seq_len < 0):
        return

    index += first
    inside &= index < length
    coded = inside & (group < RECORD.coded // RULE.group)
    NBYTES: tl.constexpr = RULE.group // 2 if RULE.element == "e2m1" else RULE.group
    at = page + RECORD.codes_at + row * RECORD.codes_step + group * NBYTES
    stored = tl.load(
        cache_ptr + at[:, None] + tl.arange(0, NBYTES)[None, :], mask=coded[:, None], other=0
    )
    ELEMENT: tl.constexpr = RULE.element
    SCALE: tl.constexpr = RULE.scale
    if ELEMENT == "e2m1":
        values = float_of(unpack_e2m1_bits(stored))
    else:
        values = float_of(decode_bits(stored, ELEMENT, NATIVE))

    at = page + RECORD.scales_at + row * RECORD.scales_step
    if RECORD.fp32_scale:
        byte = tl.arange(0, 4)
        words = tl.load(
            cache_ptr + (at + 4 * group)[:, None] + byte[None, :], mask=coded[:, None], other=0
        )
        scale_bits = tl.sum(words.to(tl.uint32) << (8 * byte)[None, :], axis=1).to(tl.uint32)
    else:
        scale_codes = tl.load(cache_ptr + at + group, mask=coded, other=0)
        scale_bits = decode_bits(scale_codes, SCALE, False)
    bits = bits_of(values * float_of(scale_bits)[:, None])
    halves = round_bf16_bits(bits, NATIVE).to(tl.int16, bitcast=True)
    target = out_row + index * out_row_stride + group * RULE.group
    tl.store(
        out_ptr + target[:, None] + tl.arange(0, RULE.group)[None, :], halves, mask=coded[:, None]
    )

    if RECORD.raw > 0:
        index = tl.arange(0, ROWS)
        inside, page, row = _find_rows(
            start + index, length, first + index, table_ptr, table_width, page_stride, num_blocks,
            RECORD,
        )  # fmt: skip
        index += first
        byte = tl.arange(0, 2 * RECORD.raw)
        at = page + RECORD.raw_at + row * RECORD.raw_step
        raw = tl.load(cache_ptr + at[:, None] + byte[None, :], mask=inside[:, None], other=0)
        target = (out_row + index * out_row_stride + RECORD.coded) * 2
        out_bytes = out_ptr.to(tl.pointer_type(tl.uint8))
        tl.store(out_bytes + target[:, None] + byte[None, :], raw, mask=inside[:, None])


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    *,
    layout: str | Layout = "v4",
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.quantize_and_insert_k_cache`: the same bytes, on torch tensors.

    A slot beyond the cache skips its token and a repeated slot gets either token; `validate=True`
    looks first, which waits for the device, and raises the reference's error.
    """
    cache = check_insert(
        describe("k", k),
        describe("k_cache", k_cache),
        describe("slot_mapping", slot_mapping),
        block_size,
        layout,
    )
    record, rule = record_constant(cache)
    native = use_native(launch, k.device)
    if _validate.asked(validate):
        _validate.cache_slots("slot_mapping", slot_mapping, cache)
    tokens = slot_mapping.shape[0]
    if tokens == 0 or cache.num_blocks == 0:
        return
    tile = tile_of("insert", k.device)
    rows = launch.rows or tile.rows(cache.layout.head_dim, tokens)
    with device_of(k_cache):
        _insert_kernel[(triton.cdiv(tokens, rows),)](
            k.view(torch.int16),
            k_cache,
            slot_mapping,
            tokens,
            k.stride(0),
            cache.page_stride,
            cache.num_slots,
            RECORD=record,
            RULE=rule,
            NATIVE=native,
            ROWS=rows,
            num_warps=launch.num_warps or tile.warps,
            enable_fp_fusion=False,
        )


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    *,
    layout: str | Layout | None = None,
    validate: bool = False,
    launch: Launch = Launch(),
) -> None:
    """See `dsv4num.reference.dequantize_and_gather_k_cache`: the same bits, on torch tensors.

    A row whose position, table column or page is out of range, or that has no room in `out`, stays
    untouched; `validate=True` looks first, which waits for the device, and raises the reference's
    error.
    """
    cache, offset = check_gather(
        describe("out", out),
        describe("k_cache", k_cache),
        describe("seq_lens", seq_lens),
        None if gather_lens is None else describe("gather_lens", gather_lens),
        describe("block_table", block_table),
        block_size,
        offset,
        layout,
    )
    record, rule = record_constant(cache)
    native = use_native(launch, out.device)
    lengths = seq_lens if gather_lens is None else gather_lens
    if _validate.asked(validate):
        name = "seq_lens" if gather_lens is None else "gather_lens"
        _validate_gather(name, seq_lens, lengths, block_table, out.shape[1], offset, cache)
    requests, room = out.shape[0], out.shape[1] - offset
    if requests == 0 or room <= 0 or cache.num_blocks == 0 or block_table.shape[1] == 0:
        return
    tile = tile_of("gather", out.device, packed=rule.element == "e2m1")
    rows = launch.rows or tile.rows(cache.layout.head_dim, requests * room)
    # A grid has at most 65,535 programs along its second and third axes.
    grid = (triton.cdiv(room, rows), min(requests, 65535), triton.cdiv(requests, 65535))
    with device_of(out):
        _gather_kernel[grid](
            out.view(torch.int16),
            k_cache,
            seq_lens,
            lengths,
            block_table,
            out.stride(0),
            out.stride(1),
            block_table.stride(0),
            block_table.shape[1],
            cache.page_stride,
            cache.num_blocks,
            room,
            offset,
            requests,
            RECORD=record,
            RULE=rule,
            NATIVE=native,
            WHOLE=gather_lens is None,
            ROWS=rows,
            num_warps=launch.num_warps or tile.warps,
            enable_fp_fusion=False,
        )


def describe(name: str, tensor: object) -> Array:
    """A torch tensor as the shared checks see it.

    Raises:
        ArgumentError: it is not a torch tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, type(tensor).__name__, "torch.Tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Array(name, tuple(tensor.shape), tensor.stride(), dtype, str(tensor.device))


def _validate_gather(
    name: str,
    seq_lens: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    out_rows: int,
    offset: int,
    cache: Cache,
) -> None:
    """Raises the reference's error for a length, position or page out of range (clause 6.2)."""
    host = torch.stack((seq_lens.long(), lengths.long())).cpu().tolist()
    room = max(out_rows - offset, 0)
    for request, length in enumerate(host[1]):
        if length > room:
            given = f"{length} rows for request {request}"
            allowed = f"at most {room}: out has {out_rows} rows and offset is {offset}"
            raise ValueRangeError(name, given, allowed)
    for request, (seq_len, length) in enumerate(zip(*host, strict=True)):
        if seq_len < 0:
            raise ValueRangeError("seq_lens", f"{seq_len} for request {request}", "0 or more")
        if not 0 <= length <= seq_len:
            given = f"{length} for request {request}"
            raise ValueRangeError("gather_lens", given, f"0..{seq_len}, its sequence length")
        if length == 0:
            continue
        last = (seq_len - 1) // cache.block_size
        if last >= table.shape[1]:
            given = f"position {seq_len - 1} of request {request}, column {last}"
            raise ValueRangeError("block_table", given, f"columns below {table.shape[1]}")
        pages = table[request, (seq_len - length) // cache.block_size : last + 1]
        wrong = pages[(pages < 0) | (pages >= cache.num_blocks)]
        if wrong.numel():
            given = f"page {int(wrong[0])} of request {request}"
            raise ValueRangeError("block_table", given, f"0..{cache.num_blocks - 1}")
