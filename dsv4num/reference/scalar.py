"""Scalar formats: encode and decode without a scale. SPEC section 2.

Encoding looks a value up in the sorted list of what the format can hold, as a standard would define
it. To make that fast, fp32 is first narrowed to the upper 16 bits with the lowest one *sticky* (set
if anything was cut off). Every rounding boundary of the 8-bit and 4-bit formats has at most five
significant bits, so the narrowed value lies on the same side of each boundary as the original.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import BF16, UE8M0, FloatFormat, get_scalar

__all__ = ["decode", "encode", "pack", "unpack"]

_NAN = np.uint32(0x7FC00000)  # the NaN that decode returns


def encode(x: NDArray[Any], fmt: str | FloatFormat) -> NDArray[Any]:
    """Codes of fp32 values in a scalar format.

    Rule (clauses 2.1 to 2.5):
        1. Round to the nearest value of the format, ties to the even code. UE8M0 instead rounds up to
           a power of two, and encodes a negative value as NaN.
        2. A magnitude above the largest saturates to it, infinity too; bf16 rounds to infinity as IEEE
           754 says; infinity in UE8M0 is NaN.
        3. NaN becomes the format's `encoded_nan`. The sign of zero is kept where there is a -0.

    Args:
        x: fp32 or bf16, any shape.
        fmt: a `FloatFormat` or its name.

    Returns:
        Codes of the same shape, one per uint8; uint16 for bf16.

    Raises:
        ArgumentError: another dtype, or an unknown format.

    Example:
        >>> encode(np.float32([0.3, -0.0, 465, np.nan]), "e4m3fn").tobytes().hex(" ")
        '2a 80 7e 7f'
        >>> encode(np.float32([0.25, 0.75, -5, 7]), "e2m1").tobytes().hex(" ")
        '00 02 0e 07'
    """
    chosen = get_scalar(fmt)
    bits = _fp32_bits(x)
    if chosen is BF16:
        return _round_to_bf16(bits)
    sticky = (bits & np.uint32(0xFFFF)) != 0
    narrowed = (bits >> np.uint32(16)).astype(np.uint16) | sticky
    codes: NDArray[np.uint8] = _encode_table(chosen)[narrowed]
    return codes


def decode(codes: NDArray[Any], fmt: str | FloatFormat) -> NDArray[np.float32]:
    """The fp32 values of codes. Exact.

    Rule (clauses 2.1 to 2.5): the value of the code; every NaN of an 8-bit format is 0x7FC00000. bf16
    keeps its bits, NaN payloads too.

    Args:
        codes: uint8, or uint16 for bf16; any shape. E2M1 codes are one per byte and below 16.
        fmt: a `FloatFormat` or its name.

    Returns:
        fp32 of the same shape.

    Raises:
        ArgumentError: another dtype, an unknown format, or a code of 16 or more for E2M1.

    Example:
        >>> decode(np.uint8([0x01, 0x7E, 0xFF]), "e4m3fn").tolist()
        [0.001953125, 448.0, nan]
        >>> decode(np.uint8([0, 127, 254]), "ue8m0").view(np.uint32).tolist() == [
        ...     0x00400000, 0x3F800000, 0x7F000000]
        True
    """
    chosen = get_scalar(fmt)
    dtype = np.uint16 if chosen.width == 16 else np.uint8
    if not isinstance(codes, np.ndarray) or codes.dtype != dtype:
        given = kind_of(codes)
        raise ArgumentError("codes", given, np.dtype(dtype).name, chosen.clause)
    if chosen is BF16:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if chosen.width < 8 and codes.size and codes.max() >= chosen.codes:
        raise ArgumentError("codes", int(codes.max()), f"0..{chosen.codes - 1}", chosen.clause)
    values: NDArray[np.float32] = _decode_table(chosen)[codes]
    return values


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two E2M1 codes per byte, the even element in the low nibble (clause 2.6).

    Args:
        codes: uint8 [..., 2n], each below 16.

    Returns:
        uint8 [..., n].

    Raises:
        ArgumentError: another dtype, an odd last axis, or a code of 16 or more.

    Example:
        >>> pack(np.uint8([7, 0, 2, 2, 4, 4, 6, 6])).tobytes().hex(" ")
        '07 22 44 66'
    """
    if not isinstance(codes, np.ndarray) or codes.dtype != np.uint8:
        given = kind_of(codes)
        raise ArgumentError("codes", given, "uint8", "2.6")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ArgumentError("codes", f"shape {list(codes.shape)}", "an even last axis", "2.6")
    if codes.size and codes.max() > 0xF:
        raise ArgumentError("codes", int(codes.max()), "0..15", "2.6")
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The two E2M1 codes of every byte, low nibble first (clause 2.6).

    Args:
        packed: uint8 [..., n].

    Returns:
        uint8 [..., 2n], each below 16.

    Raises:
        ArgumentError: another dtype, or no axis.

    Example:
        >>> unpack(np.uint8([0x21, 0x43])).tolist()
        [1, 2, 3, 4]
    """
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.ndim == 0:
        given = kind_of(packed)
        raise ArgumentError("packed", given, "uint8 with at least one axis", "2.6")
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & np.uint8(0xF)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def kind_of(x: object) -> str:
    """What an argument is, for an error: the dtype of an array, the type of anything else."""
    if isinstance(x, np.generic):
        return f"a NumPy scalar ({x.dtype})"
    return str(x.dtype) if isinstance(x, np.ndarray) else type(x).__name__


def _fp32_bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    """The bit patterns of fp32 values; bf16 is widened, bits unchanged."""
    if isinstance(x, np.ndarray):
        if x.dtype == np.float32:
            return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
        if x.dtype == ml_dtypes.bfloat16:
            halves = np.ascontiguousarray(x).view(np.uint16).reshape(x.shape)
            return halves.astype(np.uint32) << np.uint32(16)
    raise ArgumentError("x", kind_of(x), "an array of float32 or bfloat16", "2")


def _round_to_bf16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """fp32 bits to bf16 codes: the upper half, plus one where the lower half is past the middle."""
    upper = bits >> np.uint32(16)
    lower = bits & np.uint32(0xFFFF)
    odd = (upper & np.uint32(1)) == 1
    past = (lower > 0x8000) | ((lower == 0x8000) & odd)
    codes = upper + past
    nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
    return np.where(nan, np.uint32(BF16.encoded_nan), codes).astype(np.uint16)


@cache
def _decode_table(fmt: FloatFormat) -> NDArray[np.float32]:
    """The value of every code, from the definition of the format."""
    table = np.empty(fmt.codes, np.float32)
    for code in range(fmt.codes):
        if fmt.is_nan(code):
            table[code : code + 1].view(np.uint32)[0] = _NAN
            continue
        magnitude = code & ~fmt.sign_code
        exponent = magnitude >> fmt.mantissa_bits
        fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
        if fmt.zero and exponent == 0:  # zero and the subnormals have no hidden one
            significand, exponent = fraction, 1
        else:
            significand = (1 << fmt.mantissa_bits) + fraction
        value = significand * 2.0 ** (exponent - fmt.bias - fmt.mantissa_bits)
        table[code] = -value if code & fmt.sign_code else value
    return table


@cache
def _encode_table(fmt: FloatFormat) -> NDArray[np.uint8]:
    """The code of each of the 65,536 narrowed fp32 patterns."""
    patterns = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    x = patterns.view(np.float32)
    negative = (patterns >> np.uint32(31)) == 1
    nan = np.isnan(x)
    values = _decode_table(fmt)[: fmt.max_code + 1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    if fmt is UE8M0:
        # `left`: the number of powers of two below x is the first code that is not below it.
        codes = np.minimum(np.searchsorted(values, magnitude, side="left"), fmt.max_code)
        nan |= np.isinf(x) | (negative & (magnitude > 0))
        return np.where(nan, fmt.encoded_nan, codes).astype(np.uint8)
    middles = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(middles, magnitude, side="left")  # a tie stays at the lower code
    above = np.searchsorted(middles, magnitude, side="right")  # a tie goes to the upper code
    codes = np.where(below % 2 == 0, below, above)
    signed = codes | np.where(negative, fmt.sign_code, 0)
    if not fmt.negative_zero:
        signed = np.where(codes == 0, 0, signed)
    return np.where(nan, fmt.encoded_nan, signed).astype(np.uint8)
