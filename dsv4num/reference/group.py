"""Group rules: quantize and dequantize with a shared scale. SPEC section 3."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import GroupRule, get_rule
from dsv4num.reference.scalar import decode, encode, kind_of

__all__ = ["dequantize", "encode_scale", "quantize"]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


def encode_scale(amax: NDArray[np.float32], rule: str | GroupRule) -> NDArray[np.uint8]:
    """Scale codes of groups from their largest magnitudes.

    Rule (clauses 3.1 to 3.3):
        "up_to_power_of_two": a = max(amax, floor); the smallest code whose scale s has a <= qmax * s;
        infinity gives `infinite_code`.
        "nearest_even": s = amax * fp32(1/6), raised to the floor, limited to 448, encoded as E4M3.

    Args:
        amax: fp32, any shape, not negative and not NaN.
        rule: a `GroupRule` or its name.

    Returns:
        uint8 scale codes of the same shape.

    Raises:
        ArgumentError: another dtype, a NaN or negative amax, or an unknown rule.

    Example:
        >>> encode_scale(np.float32([0, 300, 448, 449]), "P1/64").tolist()
        [105, 127, 127, 128]
        >>> encode_scale(np.float32([0, 6.3, 2800]), "N2/16").tobytes().hex(" ")
        '01 38 7e'
    """
    chosen = get_rule(rule)
    if not isinstance(amax, np.ndarray) or amax.dtype != np.float32:
        given = kind_of(amax)
        raise ArgumentError("amax", given, "float32", chosen.clause)
    if not bool((amax >= 0).all()):
        raise ArgumentError("amax", "a NaN or negative value", "0 or more", chosen.clause)
    floor = np.float32(chosen.floor)
    if chosen.scale_rounding == "up_to_power_of_two":
        codes = np.searchsorted(_largest_amax(chosen), np.maximum(amax, floor), side="left")
        return np.minimum(codes, chosen.infinite_code).astype(np.uint8)
    scale = np.maximum(amax * np.float32(chosen.amax_factor), floor)
    return encode(np.minimum(scale, np.float32(chosen.scale.max_value)), chosen.scale)


def quantize(
    x: NDArray[Any], rule: str | GroupRule
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scale codes of rows of values.

    Rule (clauses 3.1 to 3.4):
        1. amax of each group, NaN elements ignored (clause 1.6).
        2. `encode_scale`.
        3. "multiply": x * 2**-e, the factor 0 for code 255. "divide": x / scale, correctly rounded.
        4. `encode` in the element format.

    Args:
        x: fp32 or bf16 [..., D], D a multiple of the group size.
        rule: a `GroupRule` or its name.

    Returns:
        uint8 codes [..., D], one per byte, and uint8 scale codes [..., D / group].

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
    groups = x.astype(np.float32).reshape(
        *x.shape[:-1], x.shape[-1] // chosen.group, chosen.group
    )
    magnitude = groups.view(np.uint32) & _MAGNITUDE
    magnitude[magnitude > _INFINITY] = 0
    amax = magnitude.max(axis=-1).view(np.float32)
    scale_codes = encode_scale(amax, chosen)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if chosen.scaling == "multiply":
            scaled = groups * _inverse_scale(chosen)[scale_codes][..., None]
        else:
            scaled = groups / decode(scale_codes, chosen.scale)[..., None]
    return encode(scaled, chosen.element).reshape(x.shape), scale_codes


def dequantize(
    codes: NDArray[np.uint8], scale_codes: NDArray[np.uint8], rule: str | GroupRule
) -> NDArray[np.float32]:
    """Values of codes and scale codes: decode(code) * decode(scale code) in fp32 (clause 3.5).

    Args:
        codes: uint8 [..., D], one per byte.
        scale_codes: uint8 [..., D / group].
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
    for name, array in (("codes", codes), ("scale_codes", scale_codes)):
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
            given = kind_of(array)
            raise ArgumentError(name, given, "uint8", "3.5")
    wide = (*scale_codes.shape[:-1], *(n * chosen.group for n in scale_codes.shape[-1:]))
    if codes.ndim == 0 or codes.shape != wide:
        given = f"shapes {list(codes.shape)} and {list(scale_codes.shape)}"
        allowed = f"codes of shape scale_codes.shape with the last axis times {chosen.group}"
        raise ArgumentError("codes", given, allowed, "3.5")
    values, scales = decode(codes, chosen.element), decode(scale_codes, chosen.scale)
    return apply_scales(values, scales, chosen.group)


def apply_scales(
    values: NDArray[np.float32], scales: NDArray[np.float32], group: int
) -> NDArray[np.float32]:
    """Each value times its group's scale, one fp32 multiplication (clause 3.5)."""
    grouped = values.reshape(*scales.shape, group)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return (grouped * scales[..., None]).reshape(values.shape)


@cache
def _largest_amax(rule: GroupRule) -> NDArray[np.float64]:
    """For each scale code but 255, the largest amax it may serve: qmax * scale."""
    return np.array([rule.qmax * 2.0 ** (code - rule.scale.bias) for code in range(255)])


@cache
def _inverse_scale(rule: GroupRule) -> NDArray[np.float32]:
    """For each scale code, 2**-e; 0 for code 255."""
    inverse = [2.0 ** (rule.scale.bias - code) for code in range(255)]
    return np.array([*inverse, 0.0], np.float32)
