"""Records on the GPU: where a row's bytes lie, and how a tile of groups is stored there.

A tile has one line per group: [rows * groups per row, group size]. Every address is a 64-bit count of
bytes, and a cache is read and written in bytes only, so that neither its base nor its page stride
needs an alignment; where they have one, the compiler widens the accesses.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from dsv4num.arguments import Cache
from dsv4num.errors import UnsupportedError
from dsv4num.formats import FP32, Field
from dsv4num.gpu.group import Rule, quantize_groups, rule_constant
from dsv4num.gpu.scalar import pack_codes


class Record(NamedTuple):
    """Where the fields of a record lie in a page, as one kernel constant.

    For each field, `*_at` is its first byte in the page for row 0 and `*_step` the bytes from one row
    to the next.
    """

    block_size: int
    head_dim: int
    coded: int  # dimensions that are quantized; the others are raw
    codes_at: int
    codes_step: int
    scales_at: int
    scales_step: int
    fp32_scale: bool
    raw_at: int
    raw_step: int
    raw: int
    pad_at: int
    pad_step: int
    pad: int
    pad_value: int


@triton.jit
def page_and_row(slot, page_stride, RECORD: tl.constexpr):
    """The first byte of a slot's page, and its row; of no meaning where the slot is not kept."""
    return slot // RECORD.block_size * page_stride, slot % RECORD.block_size


@triton.jit
def store_groups(
    cache_ptr,
    bits,
    page,
    row,
    group,
    kept,
    RECORD: tl.constexpr,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantizes a tile of fp32 bits and stores its codes and scales, one line per group."""
    codes, scale_codes = quantize_groups(bits, RULE, NATIVE)
    stored = pack_codes(codes) if RULE.element == "e2m1" else codes.to(tl.uint8)
    NBYTES: tl.constexpr = RULE.group // 2 if RULE.element == "e2m1" else RULE.group
    at = page + RECORD.codes_at + row * RECORD.codes_step + group * NBYTES
    tl.store(cache_ptr + at[:, None] + tl.arange(0, NBYTES)[None, :], stored, mask=kept[:, None])

    at = page + RECORD.scales_at + row * RECORD.scales_step
    if RECORD.fp32_scale:
        # 2**e has the code as its exponent field; code 255 gives infinity.
        byte = tl.arange(0, 4)
        words = (scale_codes << 23)[:, None] >> (8 * byte)[None, :]
        tl.store(
            cache_ptr + (at + 4 * group)[:, None] + byte[None, :],
            (words & 0xFF).to(tl.uint8),
            mask=kept[:, None],
        )
    else:
        tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=kept)


@triton.jit
def store_raw(cache_ptr, halves, page, row, group, kept, RECORD: tl.constexpr, RULE: tl.constexpr):
    """Stores the bf16 codes [N, GROUP] of the lines that lie in the raw field, byte by byte."""
    stored = tl.interleave((halves & 0xFF).to(tl.uint8), (halves >> 8).to(tl.uint8))
    first = group * RULE.group - RECORD.coded
    at = page + RECORD.raw_at + row * RECORD.raw_step + 2 * first
    byte = tl.arange(0, 2 * RULE.group)
    tl.store(cache_ptr + at[:, None] + byte[None, :], stored, mask=(kept & (first >= 0))[:, None])


@triton.jit
def store_pad(cache_ptr, page, row, kept, RECORD: tl.constexpr):
    """Stores the pad bytes of rows."""
    PAD: tl.constexpr = RECORD.pad
    for index in tl.static_range(PAD):
        at = page + (RECORD.pad_at + index) + row * RECORD.pad_step
        tl.store(cache_ptr + at, tl.full(row.shape, RECORD.pad_value, tl.uint8), mask=kept)


def record_constant(cache: Cache) -> tuple[Record, Rule]:
    """A cache's layout and its group rule, as kernel constants.

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
    fields = [field for _, field in layout.fields()]
    if layout.pools > 1 or any(plane.axes for plane in layout.planes):
        raise UnsupportedError(f"layout {layout.name}: the kernels know no tiles and no pools")
    if any(field.order or field.run or field.copies > 1 for field in fields):
        raise UnsupportedError(f"layout {layout.name}: the kernels know no permuted or copied fields")
    if "row_scale" in kinds or scale.format not in (codes.rule.scale, FP32):
        raise UnsupportedError(f"layout {layout.name}: the kernels know no such scale")

    def place(field: Field | None) -> tuple[int, int]:
        for plane, candidate in layout.fields():
            if candidate is field:
                start = layout.plane_offset(plane, cache.block_size)
                return start + candidate.offset, layout.planes[plane].row_bytes
        return 0, 0

    (codes_at, codes_step), (scales_at, scales_step) = place(codes), place(scale)
    (raw_at, raw_step), (pad_at, pad_step) = place(raw), place(pad)
    record = Record(
        block_size=cache.block_size,
        head_dim=layout.head_dim,
        coded=codes.dims[1],
        codes_at=codes_at,
        codes_step=codes_step,
        scales_at=scales_at,
        scales_step=scales_step,
        fp32_scale=scale.format is FP32,
        raw_at=raw_at,
        raw_step=raw_step,
        raw=raw.dims[1] - raw.dims[0] if raw else 0,
        pad_at=pad_at,
        pad_step=pad_step,
        pad=pad.nbytes if pad else 0,
        pad_value=pad.pad_value if pad else 0,
    )
    return record, rule_constant(codes.rule)
