"""An encoder with knobs: records as writers with another contract make them. SPEC section 8.

With every knob at rest it writes what `dsv4num.reference.encode_records` writes. Nothing here defines a
byte: the oracle does, and a test holds this encoder to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import BF16, FP32, UE8M0, Field, FloatFormat, GroupRule, Layout
from dsv4num.reference import decode

__all__ = ["Columns", "Knobs", "encode_under", "field_columns"]

#: Columns of a record: together, or, where entries are permuted or dealt out, one by one.
Columns: TypeAlias = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a writer may do otherwise. None, and each first choice, is what the contract says.

    Attributes:
        rotation: pairs of RoPE: neighbours, or halves (NeoX); "inverse" turns the other way.
        table: the cosine table as it is, rounded to bf16, or its row read as cosines and sines in turn.
        position: the position of a compressed row: that of the first or the last token of its group, or
            the number of the entry.
        fused: the product that a fused multiply-add leaves unrounded: the one with the cosine or the
            one with the sine.
        hadamard: rows go through a Walsh-Hadamard transform before they are quantized.
        bf16_step: whether the row is rounded to bf16 before it is quantized; None: as the operation
            does.
        bf16_rounding: how fp32 becomes bf16.
        lanes: with overlap, the columns that older and newer states use; "lost" pools the newer alone.
        element: format of the elements.
        qmax: the magnitude that the largest element is scaled to.
        floor: the smallest amax or scale; 0 for none.
        floor_place: whether the floor bounds amax or the scale.
        zero_is_one: a group of zeros has the scale 1.
        exponent: how amax / qmax becomes a power of two, or, for a scale that is no power of two,
            whether it is rounded "up" in place of to nearest.
        unrounded: the elements are divided by amax / qmax itself.
        truncated: its exponent alone is stored.
        infinite_code: the scale code of a group whose amax is infinite.
        infinite_as_largest: such a group has the scale of the largest fp32 number.
        poisoned: a NaN (in FP4 also an infinity) makes the whole group NaN.
        amax_division: amax is divided by qmax, not multiplied by fp32(1 / qmax).
        reciprocal: elements are multiplied by the reciprocal of the scale, not divided by the scale.
        fp16_step: elements go through fp16, cut off, as the compiler for sm_89 does.
        ties: where a value goes that lies in the middle of two codes; "cut" rounds toward zero.
        carry: what becomes of a mantissa that rounds up to the next power of two.
        nan: the code of a NaN element: the format's, the largest of either sign, or a zero.
        raw_nan: whether a NaN in a raw field stays one.
        overflow: above the largest value: that value, NaN, or, from half of it on, the largest.
        negative_zero: kept; "input" loses the sign of -0.0 alone, "dropped" of all that rounds to
            zero; "nan" writes the sign bit even where the format has no -0.
        scale_word: what four scale bytes hold: what the layout says; amax / qmax itself; the number of
            the UE8M0 code; that code four times; 2**e as fp32.
        nibbles: which element of a pair is in the low one; "halves" pairs the first element of the row
            with that in its middle, "group_halves" those of each group.
        big_endian: bf16 and fp32 entries have their high byte first.
        pad_written: whether pad bytes are written.
        in_order: scales lie one after the other where the layout permutes them.
        rule: a whole group rule, that of another writer of this record.
        arrangement: "inline" or "segregated", whatever the layout says.
        page_multiple: what a page is rounded up to, 1 for nothing.
        pages: rows per page are this many times those of the layout.
        slot_shift: how many slots further a row lies.
    """

    rotation: Literal["pairs", "halves", "inverse", "none"] = "pairs"
    table: Literal["fp32", "bf16", "in_turn"] = "fp32"
    position: Literal["first", "last", "entry"] = "first"
    fused: Literal["none", "cos", "sin"] = "none"
    hadamard: bool = False
    bf16_step: bool | None = None
    bf16_rounding: Literal["even", "half_up", "cut"] = "even"
    lanes: Literal["as_is", "swapped", "lost"] = "as_is"
    element: FloatFormat | None = None
    qmax: float | None = None
    floor: float | None = None
    floor_place: Literal["amax", "scale"] | None = None
    zero_is_one: bool = False
    exponent: Literal[
        "contract", "down", "ocp", "even", "log2_nearest", "nearest", "log2_ceil", "log2_cut", "up"
    ] = "contract"
    unrounded: bool = False
    truncated: bool = False
    infinite_code: int | None = None
    infinite_as_largest: bool = False
    poisoned: bool = False
    amax_division: bool = False
    reciprocal: bool = False
    fp16_step: bool = False
    ties: Literal["even", "away", "zero", "up", "cut"] = "even"
    carry: Literal["kept", "lost"] = "kept"
    nan: Literal["code", "max", "-max", "zero", "-zero"] = "code"
    raw_nan: Literal["kept", "zero"] = "kept"
    overflow: Literal["saturates", "nan", "early"] = "saturates"
    negative_zero: Literal["kept", "input", "dropped", "nan"] = "kept"
    scale_word: Literal["layout", "unrounded", "number", "repeated", "power"] = "layout"
    nibbles: Literal["low_first", "high_first", "halves", "group_halves"] = "low_first"
    big_endian: bool = False
    pad_written: bool = True
    in_order: bool = False
    rule: GroupRule | None = None
    arrangement: Literal["inline", "segregated"] | None = None
    page_multiple: int | None = None
    pages: float = 1
    slot_shift: int = 0


def encode_under(
    values: NDArray[np.float32], layout: Layout, knobs: Knobs, *, bf16: bool
) -> NDArray[np.uint8]:
    """Records of rows of values, by a writer with these knobs.

    Args:
        values: fp32 [T, head_dim].
        layout: the layout.
        knobs: those of the rows' origin and of their place are not looked at.
        bf16: whether the values come from a bf16 array, whose NaN payloads a raw field keeps.

    Returns:
        uint8 [T, row bytes], plane after plane.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> zeros = np.zeros((1, 128), np.float32)
        >>> for floor in None, 1e-8, 0.0:
        ...     record = encode_under(zeros, get_layout("indexer_mxfp4"), Knobs(floor=floor), bf16=True)
        ...     print(record[0, 64:].tobytes().hex(" "))
        01 01 01 01
        62 62 62 62
        00 00 00 00
    """
    records = np.zeros((len(values), layout.row_bytes), np.uint8)
    columns = {field.name: where for field, where in field_columns(layout, in_order=knobs.in_order)}
    outer = layout.field("row_scale")
    for _, field in layout.fields():
        where, part = columns[field.name], values[:, slice(*field.dims)]
        if field.kind == "pad":
            records[:, where] = field.pad_value
        elif field.kind == "raw":
            records[:, where] = _entries(_bf16_bits(part, knobs, bf16), knobs)
        elif field.kind == "codes":
            rule = knobs.rule if knobs.rule and field.rule == layout.rule else field.rule
            assert rule is not None
            if outer is not None and outer.dims == field.dims:
                part, numbers = _divided(part, outer)
                records[:, columns[outer.name]] = _entries(numbers, knobs)
            codes, scale_codes, numbers = _quantize(part, rule, knobs)
            records[:, where] = (
                _pack(codes, rule.group, knobs) if rule.element.width == 4 else codes
            )
            scale = layout.scale_of(field)
            if scale is not None:
                records[:, columns[scale.name]] = _scale_bytes(
                    scale_codes, numbers, scale, rule, knobs
                )
    return records


def field_columns(layout: Layout, *, in_order: bool = False) -> Iterator[tuple[Field, Columns]]:
    """Every field with its columns in a record, entry after entry, or as they lie (`in_order`)."""
    first = 0
    for plane in layout.planes:
        for field in plane.fields:
            start = first + field.offset
            if (field.order and not in_order) or field.run:
                yield field, np.array(field.places) + first
            else:
                yield field, slice(start, start + field.nbytes)
        first += plane.row_bytes


def _divided(
    x: NDArray[np.float32], outer: Field
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows over the scale that all their groups share, and that scale."""
    assert outer.rule is not None
    _, amax = _amax(x[:, None])
    number = _number(amax, outer.rule, Knobs())
    with np.errstate(all="ignore"):
        return x / number, number


def _amax(groups: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Which elements are NaN, and the largest magnitude of the others of each group."""
    magnitude = np.ascontiguousarray(groups).view(np.uint32) & np.uint32(0x7FFFFFFF)
    nan = magnitude > np.uint32(0x7F800000)
    return nan, np.where(nan, np.uint32(0), magnitude).max(axis=-1).view(np.float32)


def _quantize(
    x: NDArray[np.float32], rule: GroupRule, knobs: Knobs
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Codes, scale codes, and the scales before they are rounded."""
    element = knobs.element if knobs.element and rule.element.width == 8 else rule.element
    groups = x.reshape(len(x), x.shape[1] // rule.group, rule.group)
    nan, amax = _amax(groups)
    with np.errstate(all="ignore"):
        scale_codes, numbers = _scales(amax, rule, element, knobs)
        if knobs.poisoned and rule.scale.width == 8:
            bad = np.asarray(nan.any(axis=-1))
            if not element.nan_codes:
                bad |= np.isinf(amax)
            scale_codes = np.where(bad, rule.scale.encoded_nan, scale_codes).astype(np.uint8)
        scaled = _scale(groups, amax, scale_codes, numbers, rule, knobs)
    if knobs.poisoned and rule.scale.width == 8:
        scaled = np.where(bad[..., None], np.float32(np.nan if element.nan_codes else 0), scaled)
    codes = _elements(scaled, element, knobs).reshape(x.shape)
    return codes, scale_codes, numbers


def _scales(
    amax: NDArray[np.float32], rule: GroupRule, element: FloatFormat, knobs: Knobs
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Scale codes, and the scales before they are rounded."""
    if rule.scale_rounding == "up_to_power_of_two":
        return _power_of_two(amax, rule, element, knobs)
    if rule.scale_rounding == "down_to_power_of_two":
        exponent = np.frexp(amax)[1] - np.frexp(rule.qmax)[1]
        known = (amax > 0) & (amax < np.inf) & (exponent >= -126)
        numbers = np.where(known, np.ldexp(np.float32(1), exponent), np.float32(0))
        numbers = np.where(np.isinf(amax), np.float32(np.nan), numbers).astype(np.float32)
        bits = round_to_bf16(numbers.view(np.uint32), "even")
        return bits, numbers
    numbers = _number(amax, rule, knobs)
    if rule.scale_rounding == "none":
        return numbers.view(np.uint32), numbers
    if rule.scale_rounding in ("unit", "given"):
        return np.ones_like(numbers).view(np.uint32), np.ones_like(numbers)
    return _code_of(numbers, rule, knobs), numbers


def _power_of_two(
    amax: NDArray[np.float32], rule: GroupRule, element: FloatFormat, knobs: Knobs
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """UE8M0 codes, and amax / qmax as fp32 (1 where it is zero)."""
    qmax = _qmax(rule, knobs)
    floor = np.float32(rule.floor if knobs.floor is None else knobs.floor)
    zero_is_one = knobs.zero_is_one or (knobs.floor is None and rule.zero_scale is not None)
    if knobs.infinite_as_largest:
        amax = np.minimum(amax, np.finfo(np.float32).max)
    if (knobs.floor_place or rule.floor_place) == "scale":
        a = np.maximum(amax.astype(np.float64), float(floor) * qmax)
        numbers = np.maximum(amax / np.float32(qmax), floor)
    else:
        a = np.maximum(amax, floor).astype(np.float64)
        numbers = a.astype(np.float32) / np.float32(qmax)
    known = (a > 0) & np.isfinite(a)
    mantissa, power = np.frexp(np.where(known, a, 1.0))
    limit, base = np.frexp(qmax)
    e = power - int(base)
    exponent = "down" if knobs.truncated else knobs.exponent
    if exponent == "contract":
        e += mantissa > limit
    elif exponent == "down":
        e -= mantissa < limit
    elif exponent == "even":
        e += mantissa >= 1 - 2.0 ** -(element.mantissa_bits + 2)
    elif exponent != "ocp":
        e = _rounded_log2(np.where(known, numbers, np.float32(1)), exponent)
    codes = np.clip(e + 127, 0, 254)
    codes = np.where(a > 0, codes, 127 if zero_is_one else 0)
    infinite = rule.infinite_code if knobs.infinite_code is None else knobs.infinite_code
    codes = np.where(np.isinf(a), infinite, codes).astype(np.uint8)
    if zero_is_one:
        numbers = np.where(a > 0, numbers, np.float32(1))
    return codes, numbers


def _qmax(rule: GroupRule, knobs: Knobs) -> float:
    """What the largest element is scaled to; a knob is about FP8 alone."""
    return knobs.qmax if knobs.qmax and rule.element.width == 8 else rule.qmax


def _rounded_log2(numbers: NDArray[np.float32], how: str) -> NDArray[Any]:
    """The logarithm of scales as an integer, by the roundings that go through fp32."""
    if how == "nearest":
        mantissa, power = np.frexp(numbers)
        return power - 1 + (mantissa >= 0.75)
    log2 = np.log2(numbers.astype(np.float64)).astype(np.float32)
    to_integer: Any = {"log2_ceil": np.ceil, "log2_cut": np.trunc, "log2_nearest": np.rint}[how]
    return np.asarray(to_integer(log2).astype(np.int64))


def _number(amax: NDArray[np.float32], rule: GroupRule, knobs: Knobs) -> NDArray[np.float32]:
    """A scale that is no power of two, before it is rounded."""
    floor = np.float32(rule.floor if knobs.floor is None else knobs.floor)
    place = rule.floor_place
    with np.errstate(all="ignore"):
        a = amax
        if place == "added":
            a = amax + floor
        elif place == "amax":
            a = np.maximum(amax, floor)
        divided = knobs.amax_division or knobs.qmax or not rule.amax_factor
        s = a / np.float32(_qmax(rule, knobs)) if divided else a * np.float32(rule.amax_factor)
    if place == "scale":
        s = np.maximum(s, floor)
    if rule.zero_scale is not None and knobs.floor is None:
        s = np.where(amax == 0, np.float32(rule.zero_scale), s)
    largest = np.float32(np.inf if rule.scale is FP32 else rule.scale.max_value)
    return np.asarray(np.minimum(s, largest), np.float32)


def _code_of(s: NDArray[np.float32], rule: GroupRule, knobs: Knobs) -> NDArray[np.uint8]:
    """8-bit codes of scales that are no powers of two."""
    if (knobs.exponent == "up") != (rule.scale_rounding == "up"):
        values = decode(np.arange(rule.scale.max_code + 1, dtype=np.uint8), rule.scale)
        return np.searchsorted(values, s, side="left").astype(np.uint8)
    return _element_table(rule.scale, Knobs())[_narrow(s)]


def _scale(
    groups: NDArray[np.float32],
    amax: NDArray[np.float32],
    scale_codes: NDArray[Any],
    numbers: NDArray[np.float32],
    rule: GroupRule,
    knobs: Knobs,
) -> NDArray[np.float32]:
    """The elements in units of their scale."""
    if knobs.unrounded or knobs.truncated or knobs.scale_word == "unrounded":
        divisor = np.where(numbers > 0, numbers, np.float32(1))
        return np.asarray(groups / divisor[..., None], np.float32)
    if rule.scaling == "multiply":
        inverse = np.ldexp(np.float32(1), 127 - scale_codes.astype(np.int32))
        inverse[scale_codes == 255] = 0
        return np.asarray(groups * inverse[..., None], np.float32)
    if rule.scaling == "amax_reciprocal":
        factor = np.where(amax == 0, np.float32(1), np.float32(_qmax(rule, knobs)) / amax)
        return np.asarray(groups * factor[..., None], np.float32)
    scale = decode(scale_codes, rule.scale) if rule.scale is not FP32 else numbers
    if rule.scaling == "reciprocal":
        return np.asarray(groups * (np.float32(1) / scale)[..., None], np.float32)
    scale = scale[..., None]
    if knobs.reciprocal or rule.scaling == "reciprocal_or_zero":
        return groups * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return np.where(scale == 0, np.float32(0), groups / scale)


def _elements(scaled: NDArray[np.float32], fmt: FloatFormat, knobs: Knobs) -> NDArray[np.uint8]:
    """Codes of scaled elements."""
    if knobs.fp16_step:
        with np.errstate(all="ignore"):
            half = np.clip(scaled, -65504, 65504).astype(np.float16)
            beyond = np.abs(half.astype(np.float32)) > np.abs(scaled)
            half = np.where(beyond, np.nextafter(half, np.float16(0)), half)
            scaled = np.where(np.isfinite(scaled), half.astype(np.float32), scaled)
    return _element_table(fmt, knobs)[_narrow(scaled)]


def _narrow(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of fp32 values, its lowest bit set where anything was cut off.

    All rounding borders of the formats have at most five significant bits, so that no value changes
    sides.
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    sticky = (bits & np.uint32(0xFFFF)) != 0
    narrowed: NDArray[np.uint16] = ((bits >> np.uint32(16)) | sticky).astype(np.uint16)
    return narrowed


def _element_table(fmt: FloatFormat, knobs: Knobs) -> NDArray[np.uint8]:
    """The code of each narrowed fp32 pattern."""
    kinds = knobs.ties, knobs.carry, knobs.nan, knobs.overflow, knobs.negative_zero
    return _table(fmt, *kinds)


@lru_cache(256)
def _table(
    fmt: FloatFormat, ties: str, carry: str, nan: str, overflow: str, negative_zero: str
) -> NDArray[np.uint8]:
    """One code for each of 65,536 patterns: the magnitude, then sign and NaN."""
    below, exact, magnitude = _neighbours(fmt, cut=ties == "cut")
    values = np.tile(magnitude, 2)
    negative = np.repeat([False, True], 1 << 15)
    lower, upper = np.tile(below, 2), np.tile(exact, 2)
    if ties == "even":
        codes = np.where(lower % 2 == 0, lower, upper)
    elif ties == "away":
        codes = upper
    elif ties == "up":
        codes = np.where(negative, lower, upper)
    else:
        codes = lower
    largest = fmt.max_value
    if carry == "lost":
        step = 1 << fmt.mantissa_bits
        with np.errstate(invalid="ignore"):
            start = np.tile(np.searchsorted(_values(fmt), magnitude, side="right") - 1, 2)
        wrapped = (codes > start) & (codes % step == 0) & (start >= step)
        codes = np.where(wrapped, codes - step, codes)
    nan_code = fmt.encoded_nan if fmt.nan_codes else 0
    signs = np.where(negative, fmt.sign_code, 0)
    if overflow == "early":
        codes = np.where(values >= largest / 1.875, fmt.max_code, codes)
    signed = codes | signs
    zero = codes == 0
    if negative_zero == "dropped" or (not fmt.negative_zero and negative_zero != "nan"):
        signed = np.where(zero, 0, signed)
    elif negative_zero == "input":
        signed[1 << 15] = 0
    if overflow == "nan" and fmt.nan_codes:
        odd = fmt.max_code % 2
        last = _values(fmt)[-2:]
        border = largest + (last[1] - last[0]) / 2
        over = (values > border) | ((values == border) & bool(odd))
        signed = np.where(
            over, nan_code if fmt.negative_zero is False else nan_code | signs, signed
        )
    as_nan = {
        "code": fmt.encoded_nan,
        "max": fmt.max_code,
        "-max": fmt.max_code | fmt.sign_code,
        "zero": 0,
        "-zero": fmt.sign_code,
    }
    return np.where(np.isnan(values), as_nan[nan], signed).astype(np.uint8)


@lru_cache(16)
def _neighbours(
    fmt: FloatFormat, *, cut: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]:
    """For each positive narrowed pattern the code that a tie rounds down and up to, and its value."""
    patterns = np.arange(1 << 15, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):
        magnitude = patterns.view(np.float32).astype(np.float64)
    values = _values(fmt)
    if cut:
        codes = np.clip(np.searchsorted(values, magnitude, side="right") - 1, 0, fmt.max_code)
        return codes, codes, magnitude
    middles = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(middles, magnitude, side="left")
    return below, np.searchsorted(middles, magnitude, side="right"), magnitude


@lru_cache(16)
def _values(fmt: FloatFormat) -> NDArray[np.float64]:
    """The finite positive values, smallest first."""
    return decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)


def _pack(codes: NDArray[np.uint8], group: int, knobs: Knobs) -> NDArray[np.uint8]:
    """Two four-bit codes per byte."""
    if knobs.nibbles in ("halves", "group_halves"):
        size = codes.shape[1] if knobs.nibbles == "halves" else group
        low, high = codes.reshape(-1, 2, size // 2).swapaxes(0, 1).reshape(2, len(codes), -1)
    else:
        low, high = codes[:, 0::2], codes[:, 1::2]
    if knobs.nibbles == "high_first":
        low, high = high, low
    return low | (high << np.uint8(4))


def _bf16_bits(values: NDArray[np.float32], knobs: Knobs, bf16: bool) -> NDArray[np.uint16]:
    """bf16 patterns of a raw field; the bits of values that were bf16 stay."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if knobs.raw_nan == "zero":
        bits = np.where(np.isnan(values), np.uint32(0), bits)
    if bf16:
        return (bits >> np.uint32(16)).astype(np.uint16)
    return round_to_bf16(bits, knobs.bf16_rounding)


def round_to_bf16(bits: NDArray[np.uint32], how: str) -> NDArray[np.uint16]:
    """fp32 patterns to bf16 patterns; every NaN becomes 7FFF (clause 1.5)."""
    add: Any = {
        "even": 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1)),
        "half_up": 0x8000,
        "cut": 0,
    }
    upper = (bits.astype(np.uint64) + add[how]) >> np.uint64(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, 0x7FFF, upper).astype(np.uint16)


def _entries(numbers: NDArray[Any], knobs: Knobs) -> NDArray[np.uint8]:
    """Entries of several bytes as bytes."""
    order = numbers.dtype.newbyteorder(">" if knobs.big_endian else "<")
    stored = np.ascontiguousarray(numbers.astype(order))
    return stored.view(np.uint8)


def _scale_bytes(
    scale_codes: NDArray[Any],
    numbers: NDArray[np.float32],
    field: Field,
    rule: GroupRule,
    knobs: Knobs,
) -> NDArray[np.uint8]:
    """Scales as they are stored."""
    if rule.scale is not UE8M0:
        stored = scale_codes if rule.scale is field.format else numbers.view(np.uint32)
        return np.repeat(_entries(stored, knobs), field.copies, axis=-1)
    if field.format is UE8M0 and knobs.scale_word != "power":
        return np.repeat(scale_codes, field.copies, axis=-1)
    if knobs.scale_word == "repeated":
        return np.repeat(scale_codes, 4, axis=-1)
    if knobs.scale_word == "number":
        return _entries(scale_codes.astype(np.float32), knobs)
    if knobs.scale_word == "unrounded":
        return _entries(numbers, knobs)
    powers = decode(scale_codes, UE8M0)
    powers[scale_codes == 255] = np.inf
    if field.format is BF16:
        return _entries(round_to_bf16(powers.view(np.uint32), "even"), knobs)
    return _entries(powers, knobs)
