"""Group rules: quantize and dequantize with a shared scale. SPEC section 3."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import FP32, FloatFormat, GroupRule, get_rule
from dsv4num.reference.scalar import decode, encode, kind_of

__all__ = ["dequantize", "encode_scale", "quantize"]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_CODE_DTYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def encode_scale(amax: NDArray[np.float32], rule: str | GroupRule) -> NDArray[Any]:
    """Scale codes of groups from their largest magnitudes.

    Rule (clauses 3.1 to 3.3, and 3.6 for the rules of other writers):
        "up_to_power_of_two": a = max(amax, floor); the smallest code whose scale s has a <= qmax * s;
        infinity gives `infinite_code`.
        "nearest_even": s = amax * fp32(1/6), raised to the floor, limited to 448, encoded as E4M3.

    Args:
        amax: fp32, any shape, not negative and not NaN.
        rule: a `GroupRule` or its name.

    Returns:
        Scale codes of the same shape: uint8, uint16 for bf16 scales, uint32 for fp32 ones.

    Raises:
        ArgumentError: another dtype, a NaN or negative amax, or an unknown rule.

    Example:
        >>> encode_scale(np.float32([0, 300, 448, 449]), "P1/64").tolist()
        [105, 127, 127, 128]
        >>> encode_scale(np.float32([0, 6.3, 2800]), "N2/16").tobytes().hex(" ")
        '01 38 7e'
        >>> encode_scale(np.float32([0, 1]), "F2/128").astype(">u4").tobytes().hex(" ", 4)
        '00800000 3b124925'
    """
    chosen = get_rule(rule)
    if not isinstance(amax, np.ndarray) or amax.dtype != np.float32:
        given = kind_of(amax)
        raise ArgumentError("amax", given, "float32", chosen.clause)
    if not bool((amax >= 0).all()):
        raise ArgumentError("amax", "a NaN or negative value", "0 or more", chosen.clause)
    if chosen.scale_rounding == "up_to_power_of_two":
        return _power_of_two(amax, chosen)
    if chosen.scale_rounding == "down_to_power_of_two":
        return _power_of_two_below(amax, chosen)
    scale = _scale_number(amax, chosen)
    if chosen.scale is FP32:
        return scale.view(np.uint32)
    scale = np.minimum(scale, np.float32(chosen.scale.max_value))
    if chosen.scale_rounding == "nearest_even":
        return encode(scale, chosen.scale)
    return np.searchsorted(_positive_values(chosen.scale), scale, side="left").astype(np.uint8)


def _power_of_two(amax: NDArray[np.float32], rule: GroupRule) -> NDArray[np.uint8]:
    """The smallest codes whose scales bring amax to qmax or below it."""
    floor = np.float32(rule.floor)
    a = np.maximum(amax, floor) if rule.floor_place == "amax" else amax
    codes = np.searchsorted(_largest_amax(rule), a, side="left")
    if rule.floor_place == "scale":
        codes = np.maximum(codes, np.searchsorted(_largest_amax(rule), rule.floor * rule.qmax))
    if rule.zero_scale is not None:
        codes = np.where(
            amax == 0, encode(np.array([rule.zero_scale], np.float32), rule.scale), codes
        )
    return np.minimum(codes, rule.infinite_code).astype(np.uint8)


def _power_of_two_below(amax: NDArray[np.float32], rule: GroupRule) -> NDArray[np.uint16]:
    """bf16 codes of the power of two of amax over that of qmax; 0 for one below the normal numbers."""
    bits = amax.view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(np.int32)
    codes = np.maximum(exponent - (_exponent(rule.qmax)), 0) << 7
    return np.where(bits >= _INFINITY, rule.scale.encoded_nan, codes).astype(np.uint16)


def _scale_number(amax: NDArray[np.float32], rule: GroupRule) -> NDArray[np.float32]:
    """The scale before it is rounded to a code."""
    floor = np.float32(rule.floor)
    if rule.scale_rounding in ("unit", "given"):
        return np.ones_like(amax)
    with np.errstate(over="ignore", under="ignore"):
        a = amax
        if rule.floor_place == "added":
            a = amax + floor
        elif rule.floor_place == "amax":
            a = np.maximum(amax, floor)
        scale = a * np.float32(rule.amax_factor) if rule.amax_factor else a / np.float32(rule.qmax)
    if rule.floor_place == "scale":
        scale = np.maximum(scale, floor)
    if rule.zero_scale is not None:
        scale = np.where(amax == 0, np.float32(rule.zero_scale), scale)
    return scale


def quantize(x: NDArray[Any], rule: str | GroupRule) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codes and scale codes of rows of values.

    Rule (clauses 3.1 to 3.4; a rule of clause 3.6 may scale in another way):
        1. amax of each group, NaN elements ignored (clause 1.6).
        2. `encode_scale`.
        3. "multiply": x * 2**-e, the factor 0 for code 255. "divide": x / scale, correctly rounded.
        4. `encode` in the element format.

    Args:
        x: fp32 or bf16 [..., D], D a multiple of the group size.
        rule: a `GroupRule` or its name.

    Returns:
        uint8 codes [..., D], one per byte, and scale codes [..., D / group] as of `encode_scale`.

    Raises:
        ArgumentError: dtype, shape or rule.

    Example:
        >>> codes, scales = quantize(np.full((1, 16), 1.0, np.float32), "N2/16")
        >>> codes[0, :2].tobytes().hex(" "), scales.tobytes().hex(" ")
        ('07 07', '23')
    """
    chosen = get_rule(rule)
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, ml_dtypes.bfloat16):
        given = kind_of(x)
        raise ArgumentError("x", given, "float32 or bfloat16", chosen.clause)
    if x.ndim == 0 or x.shape[-1] % chosen.group:
        allowed = f"a last axis that is a multiple of {chosen.group}"
        raise ArgumentError("x", f"shape {list(x.shape)}", allowed, chosen.clause)
    groups = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // chosen.group, chosen.group)
    magnitude = groups.view(np.uint32) & _MAGNITUDE
    magnitude[magnitude > _INFINITY] = 0
    amax = magnitude.max(axis=-1).view(np.float32)
    scale_codes = encode_scale(amax, chosen)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        if chosen.scaling == "multiply":
            scaled = groups * _inverse_scale(chosen)[scale_codes][..., None]
        elif chosen.scaling == "divide":
            scaled = groups / decode_scale(scale_codes, chosen.scale)[..., None]
        else:
            scaled = groups * _reciprocal(amax, scale_codes, chosen)[..., None]
    return encode(scaled, chosen.element).reshape(x.shape), scale_codes


def dequantize(
    codes: NDArray[np.uint8], scale_codes: NDArray[Any], rule: str | GroupRule
) -> NDArray[np.float32]:
    """Values of codes and scale codes: decode(code) * decode(scale code) in fp32 (clause 3.5).

    Args:
        codes: uint8 [..., D], one per byte.
        scale_codes: [..., D / group], as of `encode_scale`.
        rule: a `GroupRule` or its name.

    Returns:
        fp32 [..., D].

    Raises:
        ArgumentError: dtype, shape or rule.

    Example:
        >>> dequantize(np.full(16, 7, np.uint8), np.uint8([0x23]), "N2/16")[0].item()
        1.03125
    """
    chosen = get_rule(rule)
    wanted = {"codes": np.uint8, "scale_codes": _CODE_DTYPES[chosen.scale.width]}
    for name, array in (("codes", codes), ("scale_codes", scale_codes)):
        if not isinstance(array, np.ndarray) or array.dtype != wanted[name]:
            given = kind_of(array)
            raise ArgumentError(name, given, np.dtype(wanted[name]).name, "3.5")
    wide = (*scale_codes.shape[:-1], *(n * chosen.group for n in scale_codes.shape[-1:]))
    if codes.ndim == 0 or codes.shape != wide:
        given = f"shapes {list(codes.shape)} and {list(scale_codes.shape)}"
        allowed = f"codes of shape scale_codes.shape with the last axis times {chosen.group}"
        raise ArgumentError("codes", given, allowed, "3.5")
    values, scales = decode(codes, chosen.element), decode_scale(scale_codes, chosen.scale)
    return apply_scales(values, scales, chosen.group)


def apply_scales(
    values: NDArray[np.float32], scales: NDArray[np.float32], group: int
) -> NDArray[np.float32]:
    """Each value times its group's scale, one fp32 multiplication (clause 3.5)."""
    grouped = values.reshape(*scales.shape, group)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return (grouped * scales[..., None]).reshape(values.shape)


def decode_scale(codes: NDArray[Any], fmt: FloatFormat) -> NDArray[np.float32]:
    """The numbers of scale codes; fp32 codes are the numbers' own bits."""
    return codes.view(np.float32) if fmt is FP32 else decode(codes, fmt)


def _reciprocal(
    amax: NDArray[np.float32], scale_codes: NDArray[Any], rule: GroupRule
) -> NDArray[np.float32]:
    """What the elements of each group are multiplied by, where it is no exact inverse."""
    if rule.scaling == "amax_reciprocal":
        return np.where(amax == 0, np.float32(1), np.float32(rule.qmax) / amax)
    scale = decode_scale(scale_codes, rule.scale)
    inverse = np.float32(1) / scale
    if rule.scaling == "reciprocal":
        return inverse
    return np.where(scale == 0, np.float32(0), inverse)


def _exponent(value: float) -> int:
    """The exponent of a positive normal fp32 number, as its bits hold it, less 127."""
    return int(np.float32(value).view(np.uint32) >> np.uint32(23)) - 127


@cache
def _positive_values(fmt: FloatFormat) -> NDArray[np.float32]:
    """The finite positive values of an 8-bit format, smallest first."""
    return decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt)


@cache
def _largest_amax(rule: GroupRule) -> NDArray[np.float64]:
    """For each scale code but 255, the largest amax it may serve: qmax * scale."""
    return np.array([rule.qmax * 2.0 ** (code - rule.scale.bias) for code in range(255)])


@cache
def _inverse_scale(rule: GroupRule) -> NDArray[np.float32]:
    """For each scale code, 2**-e; 0 for code 255."""
    inverse = [2.0 ** (rule.scale.bias - code) for code in range(255)]
    return np.array([*inverse, 0.0], np.float32)
