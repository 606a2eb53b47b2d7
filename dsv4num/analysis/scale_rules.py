"""How a shared scale can be chosen: the rule of SPEC 3, and what other writers do (SPEC 8).

Only the choices differ; whatever is not chosen here is done by the reference. Nothing in this module
is allowed in a record that claims to follow the SPEC.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import UE8M0, FloatFormat, GroupRule, get_rule, get_scalar
from dsv4num.reference import decode, dequantize, encode, quantize

__all__ = [
    "ROUNDINGS",
    "Rounding",
    "encode_scale_by",
    "exponent_by_log2",
    "quantize_by",
    "round_trip",
    "shared_exponent",
]

Rounding = Literal["ceil", "floor", "nearest", "even"]

#: The ways to make the exponent of amax / qmax an integer. "ceil" is the one of SPEC 3.
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


def shared_exponent(
    amax: NDArray[Any], element: str | FloatFormat, qmax: float, rounding: Rounding
) -> NDArray[np.int64]:
    """The exponent e of the scale 2**e that a group with this amax gets.

    With amax = M * 2**p and qmax = Q * 2**k, both significands in [1, 2), and m mantissa bits:

    - "ceil": the smallest e with amax <= qmax * 2**e, so p - k, plus one where M > Q. Nothing clips.
    - "floor": p - k; the rule of the OCP microscaling specification. amax / 2**e is at least 2**k.
    - "even": as "floor", after M was rounded half up to m bits: plus one where M >= 2 - 2**-(m + 1).
    - "nearest": log2(amax / qmax) rounded to the nearest integer.

    All are decided exactly, in float64.

    Args:
        amax: finite numbers above 0, any shape.
        element: format of the elements.
        qmax: the largest magnitude to be used, normally `element.max_value`.
        rounding: which of them.

    Returns:
        int64 of that shape, not limited to what a scale format can hold.

    Raises:
        ArgumentError: an amax that is 0, negative or not finite, or an unknown format or rounding.

    Example:
        >>> amax = np.float32([6, 6.5, 7, 7.5, 8])
        >>> [(127 + shared_exponent(amax, "e2m1", 6, r)).tolist() for r in ("ceil", "floor", "even")]
        [[127, 128, 128, 128, 128], [127, 127, 127, 127, 128], [127, 127, 128, 128, 128]]
    """
    wide = np.asarray(amax, np.float64)
    if not bool((np.isfinite(wide) & (wide > 0)).all()):
        raise ArgumentError("amax", "a value that is 0, negative or not finite", "above 0")
    significand, p = np.frexp(wide)  # in [0.5, 1): both sides by the same factor of two
    limit, k = np.frexp(np.float64(qmax))
    base: NDArray[np.int64] = p.astype(np.int64) - int(k)
    if rounding == "ceil":
        return np.asarray(base + (significand > limit))
    if rounding == "floor":
        return base
    if rounding == "even":
        half_up = 1 - 2.0 ** -(get_scalar(element).mantissa_bits + 2)
        return np.asarray(base + (significand >= half_up))
    if rounding == "nearest":
        # log2(M / Q) rounds to 1 where (M / Q)**2 > 2. The squares of fp32 numbers are exact here.
        square, unit = significand * significand, limit * limit
        return np.asarray(base + (square > 2 * unit) - (2 * square < unit))
    raise ArgumentError("rounding", repr(rounding), ", ".join(ROUNDINGS), "8")


def exponent_by_log2(amax: NDArray[np.float32], qmax: float) -> NDArray[np.int64]:
    """The exponent as ceil(log2(amax / qmax)) gives it in fp32, with the best logarithm there is.

    Quotient and logarithm are each correctly rounded to fp32, which no GPU instruction promises. It
    still fails: between 2**n and its next fp32 neighbours, log2 is n + 1.44 * 2**-23 * j, and where n
    has many bits the rest is rounded away, so that "ceil" gives n and the elements overflow.

    Args:
        amax: fp32 above 0, finite.
        qmax: the largest magnitude to be used.

    Returns:
        int64 of that shape.

    Example:
        >>> amax = np.nextafter(np.float32([448 * 2.0**20]), np.float32(np.inf))
        >>> exponent_by_log2(amax, 448.0).item(), shared_exponent(amax, "e4m3fn", 448.0, "ceil").item()
        (20, 21)
    """
    quotient = (amax / np.float32(qmax)).astype(np.float64)
    return np.asarray(np.ceil(np.log2(quotient).astype(np.float32)).astype(np.int64))


def encode_scale_by(
    amax: NDArray[np.float32],
    rule: str | GroupRule,
    *,
    qmax: float | None = None,
    rounding: Rounding = "ceil",
    floor: float | None = None,
    floor_place: Literal["amax", "scale"] = "amax",
) -> NDArray[np.uint8]:
    """UE8M0 scale codes of groups, by a choice of rules. With the defaults, those of SPEC 3.1 and 3.2.

    Args:
        amax: fp32, 0 or more and finite.
        rule: a rule with power-of-two scales: its element format, and the defaults of the rest.
        qmax: the magnitude that amax is scaled to, at most.
        rounding: see `shared_exponent`.
        floor: the smallest amax or scale; 0 for none, and then a zero group has code 0.
        floor_place: whether the floor bounds amax, or amax / qmax before it is rounded.

    Returns:
        uint8 of that shape.

    Raises:
        ArgumentError: a rule with another scale format, or an amax that is negative or not finite.

    Example:
        >>> zero = np.float32([0])
        >>> [encode_scale_by(zero, "P1/64", floor_place=p).item() for p in ("amax", "scale")]
        [105, 114]
    """
    chosen = get_rule(rule)
    if chosen.scale is not UE8M0:
        raise ArgumentError("rule", chosen.name, "a rule with ue8m0 scales", "3")
    limit = chosen.qmax if qmax is None else qmax
    least = np.float64(chosen.floor if floor is None else floor)
    if floor_place == "scale":
        least = least * limit
    raised = np.maximum(np.asarray(amax, np.float64), max(least, 2.0**-149))
    exponent = shared_exponent(raised, chosen.element, limit, rounding)
    return np.clip(exponent + UE8M0.bias, 0, UE8M0.max_code).astype(np.uint8)


def quantize_by(
    x: NDArray[Any], scale_codes: NDArray[np.uint8], rule: str | GroupRule
) -> NDArray[np.uint8]:
    """Codes of elements under scales that somebody else chose.

    Args:
        x: fp32 or bf16 [..., D].
        scale_codes: uint8 [..., D / group].
        rule: gives formats, group size, and whether to multiply or divide.

    Returns:
        uint8 [..., D], one code per byte, saturated where an element is beyond the format.

    Raises:
        ArgumentError: an unknown rule, or scale codes that are not one per group.

    Example:
        >>> x = np.full(32, 7, np.float32)
        >>> quantize_by(x, np.uint8([127]), "M1/32")[0].item()  # 7 saturates to 6
        7
    """
    chosen = get_rule(rule)
    if x.shape != (*scale_codes.shape[:-1], scale_codes.shape[-1] * chosen.group):
        given = f"shapes {list(x.shape)} and {list(scale_codes.shape)}"
        raise ArgumentError("scale_codes", given, f"one per {chosen.group} elements", "3")
    groups = x.astype(np.float32).reshape(*scale_codes.shape, chosen.group)
    # Exact by a power of two, and a correctly rounded quotient otherwise: what SPEC 3.1 to 3.3 say.
    with np.errstate(over="ignore", under="ignore"):
        scaled = groups / decode(scale_codes, chosen.scale)[..., None]
    codes: NDArray[np.uint8] = encode(scaled, chosen.element).reshape(x.shape)
    return codes


def round_trip(
    x: NDArray[Any], rule: str | GroupRule, scale_codes: NDArray[np.uint8] | None = None
) -> NDArray[np.float32]:
    """What is left of values after a rule: quantized and dequantized (SPEC 3), in fp32.

    Args:
        x: fp32 or bf16 [..., D].
        rule: a `GroupRule` or its name.
        scale_codes: uint8 [..., D / group], to be used in place of the rule's own.

    Returns:
        fp32 [..., D].

    Raises:
        ArgumentError: dtype, shape or rule.

    Example:
        >>> round_trip(np.full(32, 7, np.float32), "M1/32")[0].item()
        8.0
    """
    if scale_codes is None:
        codes, scale_codes = quantize(x, rule)
    else:
        codes = quantize_by(x, scale_codes, rule)
    return dequantize(codes, scale_codes, rule)
