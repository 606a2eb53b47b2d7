"""A second oracle: exact fractions, plain loops, nothing shared with the package under test.

Every fact about a format, a rule or a record is written down again here, from the contract. A
number is a `Fraction`, or one of the four floats that a fraction cannot be: NaN, +inf, -inf and
-0.0. (+0 is `Fraction(0)`.) Never use such numbers as dictionary keys: -0.0 equals `Fraction(0)`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

NAN = float("nan")
INF = float("inf")
MINUS_ZERO = -0.0
ZERO = Fraction(0)

Number = Fraction | float


@cache
def two(exponent: int) -> Fraction:
    """2**exponent, exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


# --- numbers --------------------------------------------------------------------------


def is_nan(x: Number) -> bool:
    """Whether x is the NaN."""
    return isinstance(x, float) and math.isnan(x)


def is_inf(x: Number) -> bool:
    """Whether x is an infinity."""
    return isinstance(x, float) and math.isinf(x)


def is_negative(x: Number) -> bool:
    """The sign bit of a number that is not NaN."""
    return math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0


def magnitude(x: Number) -> Number:
    """The number without its sign: a fraction, or +inf."""
    if is_inf(x):
        return INF
    return abs(Fraction(x))


def signed(negative: bool, size: Number) -> Number:
    """A magnitude with a sign."""
    if size == 0:
        return MINUS_ZERO if negative else ZERO
    return -size if negative else size


def multiply(x: Number, y: Number) -> Number:
    """The exact product, by the rules of IEEE 754 for zeros, infinities and NaN."""
    if is_nan(x) or is_nan(y):
        return NAN
    negative = is_negative(x) != is_negative(y)
    if is_inf(x) or is_inf(y):
        return NAN if x == 0 or y == 0 else signed(negative, INF)
    return signed(negative, magnitude(x) * magnitude(y))


def divide(x: Number, y: Number) -> Number:
    """The exact quotient by a finite y that is not zero."""
    if is_nan(x) or is_nan(y):
        return NAN
    negative = is_negative(x) != is_negative(y)
    if is_inf(x):
        return signed(negative, INF)
    return signed(negative, magnitude(x) / magnitude(y))


def round_binary(x: Number, significant: int, least_exponent: int, end_exponent: int) -> Number:
    """Nearest number with that many significant bits, ties to even.

    Underflow is gradual: the smallest normal number is 2**least_exponent. What reaches
    2**end_exponent is an infinity.
    """
    if is_nan(x) or is_inf(x) or x == 0:
        return x
    size = magnitude(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < two(exponent):
        exponent -= 1
    assert two(exponent) <= size < two(exponent + 1)
    step = two(max(exponent, least_exponent) - (significant - 1))
    steps = size / step
    whole, rest = divmod(steps.numerator, steps.denominator)
    if 2 * rest > steps.denominator or (2 * rest == steps.denominator and whole % 2 == 1):
        whole += 1
    rounded = whole * step
    return signed(is_negative(x), INF if rounded >= two(end_exponent) else rounded)


def round_fp32(x: Number) -> Number:
    """Nearest fp32."""
    return round_binary(x, 24, -126, 128)


def fp32_value(bits: int) -> Number:
    """The number of an fp32 bit pattern."""
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 255:
        size: Number = INF if fraction == 0 else NAN
    elif exponent == 0:
        size = fraction * two(-149)
    else:
        size = (0x800000 + fraction) * two(exponent - 150)
    return NAN if is_nan(size) else signed(bits >> 31 == 1, size)


def fp32_bits(x: Number) -> int:
    """The fp32 bit pattern of a number that is one (NaN: 0x7FC00000)."""
    if is_nan(x):
        return 0x7FC00000
    sign = 0x80000000 if is_negative(x) else 0
    size = magnitude(x)
    if is_inf(x):
        return sign | 0x7F800000
    if size < two(-126):
        steps = size / two(-149)
        assert steps.denominator == 1, "not an fp32 number"
        return sign | steps.numerator
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < two(exponent):
        exponent -= 1
    steps = size / two(exponent - 23)
    assert steps.denominator == 1 and exponent < 128, "not an fp32 number"
    return sign | (exponent + 127) << 23 | (steps.numerator - 0x800000)


def bf16_value(bits: int) -> Number:
    """The number of a bf16 bit pattern."""
    return fp32_value(bits << 16)


def round_bf16(x: Number) -> int:
    """The bf16 bit pattern nearest to a number; every NaN is 0x7FFF."""
    if is_nan(x):
        return 0x7FFF
    return fp32_bits(round_binary(x, 8, -126, 128)) >> 16


# --- scalar formats -------------------------------------------------------------------

WIDTHS = {"e4m3fn": 8, "e4m3fnuz": 8, "e2m1": 4, "ue8m0": 8}
E2M1_MAGNITUDES = (
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
)


@cache
def value(code: int, fmt: str) -> Number:
    """What a code means."""
    if fmt == "ue8m0":
        return NAN if code == 255 else two(code - 127)
    if fmt == "e2m1":
        return signed(code >= 8, E2M1_MAGNITUDES[code % 8])
    if fmt == "e4m3fn":
        if code % 128 == 0x7F:
            return NAN
        bias = 7
    else:
        assert fmt == "e4m3fnuz"
        if code == 0x80:
            return NAN
        bias = 8
    exponent, fraction = (code >> 3) & 15, code & 7
    size = fraction * two(1 - bias - 3) if exponent == 0 else (8 + fraction) * two(exponent - bias - 3)
    return signed(code >= 128, size)


@cache
def positive_codes(fmt: str) -> tuple[int, ...]:
    """The codes of +0 and of every finite positive value, smallest value first."""
    found = [
        code
        for code in range(1 << WIDTHS[fmt])
        if not is_nan(value(code, fmt)) and not is_negative(value(code, fmt))
    ]
    return tuple(sorted(found, key=lambda code: value(code, fmt)))


@cache
def positive_values(fmt: str) -> tuple[Fraction, ...]:
    """The values of `positive_codes`."""
    return tuple(Fraction(value(code, fmt)) for code in positive_codes(fmt))


NAN_CODES = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e2m1": 0x7, "ue8m0": 0xFF}


def encode(x: Number, fmt: str) -> int:
    """The code of a number: nearest value, ties to the even code, saturating."""
    codes, values = positive_codes(fmt), positive_values(fmt)
    if is_nan(x):
        return NAN_CODES[fmt]
    if fmt == "ue8m0":
        return _encode_power(x)
    size = magnitude(x)
    at = bisect_left(values, size)
    if at == len(values):
        code = codes[-1]
    elif values[at] == size:
        code = codes[at]
    else:
        to_lower, to_upper = size - values[at - 1], values[at] - size
        if to_lower == to_upper:
            code = codes[at] if codes[at] % 2 == 0 else codes[at - 1]
        else:
            code = codes[at] if to_upper < to_lower else codes[at - 1]
    return _with_sign(code, x, fmt)


def encode_walking(x: Number, fmt: str) -> int:
    """The same without a search: the distance to every code is looked at. Slower still."""
    if is_nan(x) or fmt == "ue8m0":
        return encode(x, fmt)
    codes = positive_codes(fmt)
    if is_inf(x):
        return _with_sign(max(codes, key=lambda code: value(code, fmt)), x, fmt)
    size = magnitude(x)
    code = min(codes, key=lambda code: (abs(value(code, fmt) - size), code % 2))
    return _with_sign(code, x, fmt)


def _with_sign(code: int, x: Number, fmt: str) -> int:
    """The code of a magnitude with the sign of x; FNUZ has no -0."""
    if not is_negative(x) or (fmt == "e4m3fnuz" and code == 0):
        return code
    return code + (8 if fmt == "e2m1" else 128)


def _encode_power(x: Number) -> int:
    """UE8M0: the next power of two, not below x."""
    if is_inf(x) or (is_negative(x) and x != 0):
        return 255
    return min(bisect_left(positive_values("ue8m0"), x), 254)


# --- group rules ----------------------------------------------------------------------

#: name -> element format, group size, largest magnitude after scaling
RULES = {
    "P1/64": ("e4m3fn", 64, 448),
    "P1/32": ("e4m3fn", 32, 448),
    "P1/128": ("e4m3fn", 128, 448),
    "P1/64-fnuz": ("e4m3fnuz", 64, 224),
    "P1/32-fnuz": ("e4m3fnuz", 32, 224),
    "M1/32": ("e2m1", 32, 6),
    "N2/16": ("e2m1", 16, 6),
}
ONE_SIXTH = round_fp32(Fraction(1, 6))
P1_FLOOR = round_fp32(Fraction(1, 10000))
M1_FLOOR = 6 * two(-126)


@cache
def _limits(qmax: int) -> tuple[Fraction, ...]:
    """qmax * 2**e for e = -127 .. 127."""
    return tuple(qmax * two(e) for e in range(-127, 128))


def scale_code(amax: Number, rule: str) -> int:
    """The scale code of a group whose largest magnitude is amax (0 or more, not NaN)."""
    _, _, qmax = RULES[rule]
    if rule == "N2/16":
        scale = INF if is_inf(amax) else round_fp32(amax * ONE_SIXTH)
        return encode(min(max(scale, two(-9)), Fraction(448)), "e4m3fn")
    if is_inf(amax):
        return 254 if rule == "M1/32" else 255
    floor = M1_FLOOR if rule == "M1/32" else P1_FLOOR
    at_least = max(amax, floor)
    code = bisect_left(_limits(qmax), at_least)  # the first whose limit is not below
    assert code < 255, "no finite fp32 needs a larger scale"
    return code


def scale_value(code: int, rule: str) -> Number:
    """What a scale code multiplies by on decode."""
    return value(code, "e4m3fn" if rule == "N2/16" else "ue8m0")


def quantize_group(xs: Sequence[Number], rule: str) -> tuple[list[int], int]:
    """Codes and scale code of one group of fp32 numbers."""
    element, group, _ = RULES[rule]
    assert len(xs) == group
    amax: Number = ZERO
    for x in xs:
        if not is_nan(x) and magnitude(x) > amax:
            amax = magnitude(x)
    scale = scale_code(amax, rule)
    codes = []
    for x in xs:
        if rule == "N2/16":
            scaled = round_fp32(divide(x, value(scale, "e4m3fn")))
        elif scale == 255:
            scaled = multiply(x, ZERO)
        else:
            scaled = round_fp32(multiply(x, two(127 - scale)))
        codes.append(encode(scaled, element))
    return codes, scale


def dequantize(code: int, scale: Number, element: str) -> Number:
    """One element: decoded, times the scale, rounded to fp32."""
    return round_fp32(multiply(value(code, element), scale))


# --- records and pages ----------------------------------------------------------------

#: name -> values per row, data bytes, scale bytes, rule, scales right after their own data?
LAYOUTS = {
    "v4": (512, 576, 8, "P1/64", False),
    "v4_fnuz": (512, 576, 8, "P1/64-fnuz", False),
    "v41_mxfp8": (512, 512, 16, "P1/32", False),
    "v41_mxfp8_inline": (512, 512, 16, "P1/32", True),
    "v41_mxfp8_fnuz": (512, 512, 16, "P1/32-fnuz", False),
    "v41_nvfp4": (512, 256, 32, "N2/16", False),
    "v41_nvfp4_inline": (512, 256, 32, "N2/16", True),
    "indexer_fp8": (128, 128, 4, "P1/128", False),
    "indexer_mxfp4": (128, 64, 4, "M1/32", False),
}


def page_bytes(layout: str, block_size: int) -> int:
    """Bytes of a page with its padding; only the 584-byte records pad, to whole 576s."""
    _, data, scales, _, _ = LAYOUTS[layout]
    size = block_size * (data + scales)
    if layout in ("v4", "v4_fnuz"):
        while size % 576 != 0:
            size += 1
    return size


def places(layout: str, block_size: int, page_stride: int, slot: int) -> tuple[int, int]:
    """Where a row's data and its scales start, in bytes from the start of the cache."""
    _, data, scales, _, inline = LAYOUTS[layout]
    page, row = slot // block_size, slot % block_size
    start = page * page_stride
    if inline:
        return start + row * (data + scales), start + row * (data + scales) + data
    return start + row * data, start + block_size * data + row * scales


def record(row_bits: Sequence[int], layout: str) -> tuple[bytes, bytes]:
    """Data bytes and scale bytes of one row of bf16 bit patterns."""
    _, _, _, rule, _ = LAYOUTS[layout]
    return record_of_numbers([bf16_value(b) for b in row_bits], rule, layout, row_bits)


def record_of_numbers(
    numbers: Sequence[Number], rule: str, layout: str, row_bits: Sequence[int] | None = None
) -> tuple[bytes, bytes]:
    """The same for fp32 numbers; the raw part then is rounded to bf16."""
    width, data_bytes, scale_bytes, _, _ = LAYOUTS[layout]
    element, group, _ = RULES[rule]
    quantized = 448 if layout in ("v4", "v4_fnuz") else width
    codes: list[int] = []
    scales = bytearray()
    for first in range(0, quantized, group):
        group_codes, code = quantize_group(numbers[first : first + group], rule)
        codes += group_codes
        if layout == "indexer_fp8":
            word = 0x7F800000 if code == 255 else fp32_bits(two(code - 127))
            for shift in (0, 8, 16, 24):
                scales.append((word >> shift) & 0xFF)
        else:
            scales.append(code)
    data = bytearray()
    if element == "e2m1":
        for i in range(0, len(codes), 2):
            data.append(codes[i] + 16 * codes[i + 1])
    else:
        data += bytes(codes)
    for i in range(quantized, width):
        bits = row_bits[i] if row_bits is not None else round_bf16(numbers[i])
        data.append(bits & 0xFF)
        data.append(bits >> 8)
    if layout in ("v4", "v4_fnuz"):
        scales.append(0)
    assert len(data) == data_bytes and len(scales) == scale_bytes
    return bytes(data), bytes(scales)


def row_of_record(data: bytes, scales: bytes, layout: str) -> list[int]:
    """The bf16 bit patterns that a record means."""
    width, _, _, rule, _ = LAYOUTS[layout]
    element, group, _ = RULES[rule]
    quantized = 448 if layout in ("v4", "v4_fnuz") else width
    row = []
    for i in range(quantized):
        if element == "e2m1":
            code = data[i // 2] % 16 if i % 2 == 0 else data[i // 2] // 16
        else:
            code = data[i]
        if layout == "indexer_fp8":
            word = scales[0] + (scales[1] << 8) + (scales[2] << 16) + (scales[3] << 24)
            scale = fp32_value(word)
        else:
            scale = scale_value(scales[i // group], rule)
        row.append(round_bf16(dequantize(code, scale, element)))
    for i in range(quantized, width):
        at = quantized + 2 * (i - quantized)
        row.append(data[at] + 256 * data[at + 1])
    return row


def insert(
    rows_bits: Sequence[Sequence[int]],
    cache_bytes: bytearray,
    page_stride: int,
    slots: Sequence[int],
    block_size: int,
    layout: str,
) -> None:
    """Writes rows into their slots, byte by byte."""
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        data, scales = record(rows_bits[token], layout)
        at_data, at_scales = places(layout, block_size, page_stride, slot)
        for i, byte in enumerate(data):
            cache_bytes[at_data + i] = byte
        for i, byte in enumerate(scales):
            cache_bytes[at_scales + i] = byte


def gather(
    out: list[list[list[int]]],
    cache_bytes: bytes | bytearray,
    page_stride: int,
    seq_lens: Sequence[int],
    gather_lens: Sequence[int] | None,
    block_table: Sequence[Sequence[int]],
    block_size: int,
    offset: int,
    layout: str,
) -> None:
    """Reads the last rows of each request into `out[request][row]`, lists of bf16 bit patterns."""
    _, data_bytes, scale_bytes, _, _ = LAYOUTS[layout]
    for request, seq_len in enumerate(seq_lens):
        count = seq_len if gather_lens is None else gather_lens[request]
        for i in range(count):
            position = seq_len - count + i
            page = block_table[request][position // block_size]
            slot = page * block_size + position % block_size
            at_data, at_scales = places(layout, block_size, page_stride, slot)
            data = bytes(cache_bytes[at_data : at_data + data_bytes])
            scales = bytes(cache_bytes[at_scales : at_scales + scale_bytes])
            out[request][offset + i] = row_of_record(data, scales, layout)
