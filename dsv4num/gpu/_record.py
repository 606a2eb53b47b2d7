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
from dsv4num.formats import BF16, FP32
from dsv4num.gpu.group import Rule, quantize_groups, rule_constant
from dsv4num.gpu.scalar import widen_bf16


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
    pad_value: int  # of the byte for each raw group that follows the scales


@triton.jit
def page_and_row(slot, page_stride, RECORD: tl.constexpr):
    """The first byte of a slot's page, and its row; of no meaning where the slot is not kept."""
    return slot // RECORD.block_size * page_stride, slot % RECORD.block_size


@triton.jit
def load_groups(ptr, first, kept, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """Loads bf16 codes [N, GROUP] that start `first` [N] elements after pointers, as fp32 bits.

    0 where not kept.
    """
    if GROUP == 16 and first.shape[0] >= 32:
        # In two halves of 16 bytes, so that a thread has both: the maximum of a group takes no exchange
        # between threads then, nor does the store of its eight bytes.
        dim = tl.arange(0, 8)
        at = (ptr + first)[:, None] + dim[None, :]
        low = widen_bf16(tl.load(at, mask=kept[:, None], other=0), NATIVE)
        high = widen_bf16(tl.load(at + 8, mask=kept[:, None], other=0), NATIVE)
        bits = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (first.shape[0], 16))
    else:
        at = (ptr + first)[:, None] + tl.arange(0, GROUP)[None, :]
        bits = widen_bf16(tl.load(at, mask=kept[:, None], other=0), NATIVE)
    return bits


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
    HALVES: tl.constexpr,
):
    """Quantizes a tile of fp32 bits, one line per group of a row, and stores codes, scales and pads.

    A raw group has no codes, and a byte of padding in the place of its scale. HALVES: the bits are
    those of bf16 values.
    """
    stored, scale_codes = quantize_groups(bits, RULE, NATIVE, HALVES)
    NBYTES: tl.constexpr = stored.shape[1]
    coded = kept & (group < RECORD.coded // RULE.group)
    at = page + RECORD.codes_at + row * RECORD.codes_step + group * NBYTES
    tl.store(cache_ptr + at[:, None] + tl.arange(0, NBYTES)[None, :], stored, mask=coded[:, None])

    at = page + RECORD.scales_at + row * RECORD.scales_step
    if RECORD.fp32_scale:
        # 2**e has the code as its exponent field; code 255 gives infinity.
        byte = tl.arange(0, 4)
        words = (scale_codes << 23)[:, None] >> (8 * byte)[None, :]
        tl.store(
            cache_ptr + (at + 4 * group)[:, None] + byte[None, :],
            (words & 0xFF).to(tl.uint8),
            mask=coded[:, None],
        )
    else:
        scale_codes = tl.where(group < RECORD.coded // RULE.group, scale_codes, RECORD.pad_value)
        tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=kept)


@triton.jit
def store_raw(cache_ptr, halves, page, row, group, kept, RECORD: tl.constexpr, RULE: tl.constexpr):
    """Stores the bf16 codes [N, GROUP] of the lines that lie in the raw field, byte by byte."""
    stored = tl.interleave((halves & 0xFF).to(tl.uint8), (halves >> 8).to(tl.uint8))
    first = group * RULE.group - RECORD.coded
    at = page + RECORD.raw_at + row * RECORD.raw_step + 2 * first
    byte = tl.arange(0, 2 * RULE.group)
    tl.store(cache_ptr + at[:, None] + byte[None, :], stored, mask=(kept & (first >= 0))[:, None])


def record_constant(cache: Cache) -> tuple[Record, Rule]:
    """A cache's layout and its group rule, as kernel constants.

    Raises:
        UnsupportedError: the kernels do not know this shape of record: one quantized field that
            starts at dimension 0, its scales, and either nothing more, or one raw field of whole groups
            and, right behind the scales, a byte of padding for each of these groups.
    """
    layout = cache.layout
    fields = [field for _, field in layout.fields()]
    if layout.pools > 1 or any(plane.axes for plane in layout.planes):
        raise UnsupportedError(f"layout {layout.name}: the kernels know no tiles and no pools")
    if any(field.order or field.run or field.copies > 1 for field in fields):
        raise UnsupportedError(f"layout {layout.name}: the kernels know no permuted or copied fields")
    places = {
        field.kind: (field, layout.plane_offset(plane, cache.block_size) + field.offset, step)
        for plane, field in layout.fields()
        for step in (layout.planes[plane].row_bytes,)
    }
    kinds = ["codes", "raw", "scale", "pad"] if "raw" in places else ["codes", "scale"]
    refusal = UnsupportedError(f"layout {layout.name}: the kernels know no such record")
    if len(fields) != len(kinds) or set(places) != set(kinds):
        raise refusal
    codes, codes_at, codes_step = places["codes"]
    scale, scales_at, scales_step = places["scale"]
    rule = codes.rule
    if rule is None or codes.dims[0] != 0 or scale.format not in (rule.scale, FP32):
        raise refusal
    raw_groups, rest = divmod(layout.head_dim - codes.dims[1], rule.group)
    raw_at = raw_step = pad_value = 0
    if "raw" in places:
        raw, raw_at, raw_step = places["raw"]
        pad, *beside = places["pad"]
        behind = [scales_at + scale.nbytes, scales_step]
        if raw.dims != (codes.dims[1], layout.head_dim) or raw.format is not BF16:
            raise refusal
        if rest or beside != behind or pad.nbytes != raw_groups:
            raise refusal
        pad_value = pad.pad_value
    elif raw_groups or rest:
        raise refusal
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
        raw=layout.head_dim - codes.dims[1],
        pad_value=pad_value,
    )
    return record, rule_constant(rule)
