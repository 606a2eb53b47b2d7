"""Insert into and gather from a paged K cache, on the GPU. SPEC clauses 5.1 and 5.2.

One program handles `ROWS` rows as a tile [ROWS * groups, GROUP]. Every address is a 64-bit count of
bytes, and a cache is read and written in bytes only, so that neither its base nor its page stride
needs an alignment; where they have one, the compiler widens the accesses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4num.arguments import Array, Cache, check_gather, check_insert
from dsv4num.errors import ArgumentError, UnsupportedError, ValueRangeError
from dsv4num.formats import FP32, Field, Layout
from dsv4num.gpu._target import Launch, interpreted, use_native
from dsv4num.gpu.group import quantize_groups, rule_constants
from dsv4num.gpu.scalar import (
    bits_of,
    decode_bits,
    device_of,
    float_of,
    pack_codes,
    round_bf16_bits,
    unpack_codes,
)

__all__ = ["dequantize_and_gather_k_cache", "quantize_and_insert_k_cache"]


@triton.jit
def _insert_kernel(
    k_ptr,
    cache_ptr,
    slots_ptr,
    tokens,
    k_stride,
    page_stride,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
    CODES_AT: tl.constexpr,
    CODES_STEP: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALES_STEP: tl.constexpr,
    RAW_AT: tl.constexpr,
    RAW_STEP: tl.constexpr,
    RAW: tl.constexpr,
    PAD_AT: tl.constexpr,
    PAD_STEP: tl.constexpr,
    PAD: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    FP32_SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    QMAX_BITS: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    FACTOR_BITS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    INFINITE_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    first = tl.program_id(0).to(tl.int64) * ROWS

    # One line per group: which token, which group of its row, and where its record is.
    line = tl.arange(0, ROWS * GROUPS)
    token = first + line // GROUPS
    group = line % GROUPS
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots)
    slot = tl.where(kept, slot, 0)
    page = slot // BLOCK_SIZE * page_stride
    row = slot % BLOCK_SIZE
    coded = kept & (group < CODED // GROUP)

    dims = tl.arange(0, GROUP)
    source = token[:, None] * k_stride + (group * GROUP)[:, None] + dims[None, :]
    halves = tl.load(k_ptr + source, mask=coded[:, None], other=0)
    bits = halves.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    codes, scale_codes = quantize_groups(
        bits,
        ELEMENT,
        SCALE,
        QMAX_BITS,
        FLOOR_BITS,
        FACTOR_BITS,
        LIMIT_BITS,
        INFINITE_CODE,
        NATIVE,
    )
    if ELEMENT == "e2m1":
        stored = pack_codes(codes)
        BYTES: tl.constexpr = GROUP // 2
    else:
        stored = codes.to(tl.uint8)
        BYTES: tl.constexpr = GROUP
    at = page + CODES_AT + row * CODES_STEP + group * BYTES
    tl.store(
        cache_ptr + at[:, None] + tl.arange(0, BYTES)[None, :], stored, mask=coded[:, None]
    )

    at = page + SCALES_AT + row * SCALES_STEP
    if FP32_SCALE:
        # 2**e has the code as its exponent field; code 255 gives infinity.
        byte = tl.arange(0, 4)
        words = (scale_codes << 23)[:, None] >> (8 * byte)[None, :]
        tl.store(
            cache_ptr + (at + 4 * group)[:, None] + byte[None, :],
            (words & 0xFF).to(tl.uint8),
            mask=coded[:, None],
        )
    else:
        tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=coded)

    if RAW + PAD > 0:
        token = first + tl.arange(0, ROWS)
        slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
        kept = (slot >= 0) & (slot < num_slots)
        slot = tl.where(kept, slot, 0)
        page = slot // BLOCK_SIZE * page_stride
        row = slot % BLOCK_SIZE
        if RAW > 0:
            byte = tl.arange(0, 2 * RAW)
            source = (token * k_stride + CODED)[:, None] * 2 + byte[None, :]
            k_bytes = k_ptr.to(tl.pointer_type(tl.uint8))
            raw = tl.load(k_bytes + source, mask=kept[:, None], other=0)
            at = page + RAW_AT + row * RAW_STEP
            tl.store(cache_ptr + at[:, None] + byte[None, :], raw, mask=kept[:, None])
        for index in tl.static_range(PAD):
            at = page + (PAD_AT + index) + row * PAD_STEP
            tl.store(cache_ptr + at, tl.full((ROWS,), PAD_VALUE, tl.uint8), mask=kept)


@triton.jit
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
    CODES_AT: tl.constexpr,
    CODES_STEP: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALES_STEP: tl.constexpr,
    RAW_AT: tl.constexpr,
    RAW_STEP: tl.constexpr,
    RAW: tl.constexpr,
    FP32_SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    first = tl.program_id(0).to(tl.int64) * ROWS
    request = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if request >= requests:
        return
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
    wanted = tl.load(gather_lens_ptr + request).to(tl.int64)
    length = tl.minimum(wanted, room)
    if first >= length:
        return
    out_row = request * out_request_stride + offset * out_row_stride

    line = tl.arange(0, ROWS * GROUPS)
    index = first + line // GROUPS
    group = line % GROUPS
    position = seq_len - wanted + index
    inside = (index < length) & (position >= 0)
    column = position // BLOCK_SIZE
    inside &= column < table_width
    page = tl.load(table_ptr + request * table_stride + column, mask=inside, other=-1).to(tl.int64)
    inside &= (page >= 0) & (page < num_blocks)
    base = tl.where(inside, page, 0) * page_stride
    row = tl.where(inside, position % BLOCK_SIZE, 0)
    coded = inside & (group < CODED // GROUP)

    if ELEMENT == "e2m1":
        BYTES: tl.constexpr = GROUP // 2
    else:
        BYTES: tl.constexpr = GROUP
    at = base + CODES_AT + row * CODES_STEP + group * BYTES
    stored = tl.load(
        cache_ptr + at[:, None] + tl.arange(0, BYTES)[None, :], mask=coded[:, None], other=0
    )
    codes = unpack_codes(stored) if ELEMENT == "e2m1" else stored
    values = float_of(decode_bits(codes, ELEMENT, NATIVE))

    at = base + SCALES_AT + row * SCALES_STEP
    if FP32_SCALE:
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
    target = out_row + index * out_row_stride + group * GROUP
    tl.store(
        out_ptr + target[:, None] + tl.arange(0, GROUP)[None, :], halves, mask=coded[:, None]
    )

    if RAW > 0:
        index = first + tl.arange(0, ROWS)
        position = seq_len - wanted + index
        inside = (index < length) & (position >= 0)
        column = position // BLOCK_SIZE
        inside &= column < table_width
        page = tl.load(table_ptr + request * table_stride + column, mask=inside, other=-1)
        page = page.to(tl.int64)
        inside &= (page >= 0) & (page < num_blocks)
        base = tl.where(inside, page, 0) * page_stride
        row = tl.where(inside, position % BLOCK_SIZE, 0)
        byte = tl.arange(0, 2 * RAW)
        at = base + RAW_AT + row * RAW_STEP
        raw = tl.load(cache_ptr + at[:, None] + byte[None, :], mask=inside[:, None], other=0)
        target = (out_row + index * out_row_stride + CODED) * 2
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
    constants = _field_constants(cache)
    native = use_native(launch, k.device)
    if validate:
        _validate_slots(slot_mapping, cache)
    tokens = slot_mapping.shape[0]
    if tokens == 0 or cache.num_blocks == 0:
        return
    rows = launch.rows or _rows_per_program(cache.layout)
    with device_of(k_cache):
        _insert_kernel[(triton.cdiv(tokens, rows),)](
            k.view(torch.int16),
            k_cache,
            slot_mapping,
            tokens,
            k.stride(0),
            cache.page_stride,
            cache.num_slots,
            **constants,
            NATIVE=native,
            ROWS=rows,
            num_warps=launch.num_warps or 4,
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
    cache = check_gather(
        describe("out", out),
        describe("k_cache", k_cache),
        describe("seq_lens", seq_lens),
        None if gather_lens is None else describe("gather_lens", gather_lens),
        describe("block_table", block_table),
        block_size,
        offset,
        layout,
    )
    constants = _field_constants(cache)
    native = use_native(launch, out.device)
    lengths = seq_lens if gather_lens is None else gather_lens
    if validate:
        _validate_gather(seq_lens, lengths, block_table, out.shape[1], offset, cache)
    requests, room = out.shape[0], out.shape[1] - offset
    if requests == 0 or room <= 0 or cache.num_blocks == 0 or block_table.shape[1] == 0:
        return
    rows = launch.rows or _rows_per_program(cache.layout)
    # A grid has at most 65,535 programs along its second and third axes.
    grid = (triton.cdiv(room, rows), min(requests, 65535), triton.cdiv(requests, 65535))
    unused = ("PAD", "QMAX", "FLOOR", "FACTOR", "LIMIT", "INFINITE")
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
            **{name: value for name, value in constants.items() if not name.startswith(unused)},
            NATIVE=native,
            ROWS=rows,
            num_warps=launch.num_warps or 4,
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


def _rows_per_program(layout: Layout) -> int:
    """Rows per program: 2,048 values on a GPU; the interpreter pays per program, so more there."""
    values = 65536 if interpreted() else 2048
    return max(1, values // layout.head_dim)


def _place(cache: Cache, field: Field | None) -> tuple[int, int]:
    """A field's first byte in a page, and the bytes from one row of it to the next."""
    for plane, candidate in cache.layout.fields():
        if candidate is field:
            start = cache.layout.plane_offset(plane, cache.block_size)
            return start + candidate.offset, cache.layout.planes[plane].row_bytes
    return 0, 0


def _field_constants(cache: Cache) -> dict[str, Any]:
    """Where the fields of a record are and how they are coded, as kernel constants.

    Raises:
        UnsupportedError: the kernels do not know this shape of record: one quantized field that
            starts at dimension 0, its scales, at most one raw field after it, and padding.
    """
    layout = cache.layout
    codes, scale, raw, pad = (layout.field(kind) for kind in ("codes", "scale", "raw", "pad"))
    kinds = [field.kind for _, field in layout.fields()]
    known = codes is not None and scale is not None and len(kinds) == len(set(kinds))
    if not known or codes is None or scale is None or codes.rule is None or codes.dims[0] != 0:
        raise UnsupportedError(f"layout {layout.name}: the kernels know one quantized field")
    values = {
        "BLOCK_SIZE": cache.block_size,
        "HEAD_DIM": layout.head_dim,
        "GROUP": codes.rule.group,
        "CODED": codes.dims[1],
        "RAW": raw.dims[1] - raw.dims[0] if raw else 0,
        "PAD": pad.nbytes if pad else 0,
        "PAD_VALUE": pad.pad_value if pad else 0,
        "FP32_SCALE": scale.format is FP32,
        **rule_constants(codes.rule),
    }
    for name, field in (("CODES", codes), ("SCALES", scale), ("RAW", raw), ("PAD", pad)):
        values[f"{name}_AT"], values[f"{name}_STEP"] = _place(cache, field)
    return values


def _validate_slots(slots: torch.Tensor, cache: Cache) -> None:
    """Raises the reference's error for a slot beyond the cache or given twice (clause 6.2)."""
    if slots.numel() == 0:
        return
    largest = int(slots.max())
    if largest >= cache.num_slots:
        allowed = f"below {cache.num_slots} ({cache.num_blocks} pages of {cache.block_size} rows)"
        raise ValueRangeError("slot_mapping", largest, allowed)
    values, counts = torch.unique(slots[slots >= 0], return_counts=True)
    repeated = values[counts > 1]
    if repeated.numel():
        given = f"slot {int(repeated[0])} more than once"
        raise ValueRangeError("slot_mapping", given, "each slot once")


def _validate_gather(
    seq_lens: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    out_rows: int,
    offset: int,
    cache: Cache,
) -> None:
    """Raises the reference's error for a length, position or page out of range (clause 6.2)."""
    host = torch.stack((seq_lens.long(), lengths.long())).cpu().tolist()
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
    for request, length in enumerate(host[1]):
        if length > out_rows - offset:
            given = f"{length} rows for request {request}"
            allowed = f"at most {out_rows - offset}: out has {out_rows} rows and offset is {offset}"
            raise ValueRangeError("gather_lens", given, allowed)
