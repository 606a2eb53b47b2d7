"""Errors that cannot be exceeded, with the reason why, and rates that are to be expected.

A *bound* holds for every input in its domain and is tested against all of them or the worst ones. A
*rate* is exact for numbers whose significands are spread evenly or logarithmically, as it says, and is
compared with measurements in the notebooks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dsv4num.analysis.scale_rules import ROUNDINGS, Rounding
from dsv4num.errors import ArgumentError
from dsv4num.formats import BF16, FP32, UE8M0, FloatFormat, GroupRule, get_rule, get_scalar
from dsv4num.formats.arithmetic import LOG2E
from dsv4num.reference import decode

__all__ = [
    "bf16_step_rate",
    "clip_probability",
    "code_change_rate",
    "double_rounding_rate",
    "element_bound",
    "exp_by_exp2_bound",
    "group_bound",
    "scaled_range",
    "sum_bound",
]

_UNIT = 2.0**-24  # half an ulp of fp32, relative to the power of two below


def element_bound(fmt: str | FloatFormat) -> tuple[float, float]:
    """What rounding to a format can do: |y - x| <= max(relative * |x|, absolute), if |x| <= largest.

    Derivation. Between 2**k and 2**(k + 1) numbers are 2 u 2**k apart, u = 2**-(m + 1) for m mantissa
    bits. The error is at most u 2**k, and reaches it only at midpoints, the lowest of which is
    (1 + u) 2**k. So error / |x| <= u / (1 + u), attained there. Among the subnormals the error is at
    most half of the smallest one.

    Args:
        fmt: a format with a zero, or its name.

    Returns:
        The relative and the absolute bound.

    Raises:
        ArgumentError: an unknown format, or one without a zero.

    Example:
        >>> element_bound("e4m3fn") == (1 / 17, 2.0**-10), element_bound("e2m1") == (1 / 5, 0.25)
        (True, True)
    """
    chosen = get_scalar(fmt)
    if not chosen.zero:
        raise ArgumentError("fmt", chosen.name, "a format with a zero", "2")
    u = 2.0 ** -(chosen.mantissa_bits + 1)
    return u / (1 + u), 2.0 ** (1 - chosen.bias - chosen.mantissa_bits - 1)


def scaled_range(
    element: str | FloatFormat, qmax: float, rounding: Rounding
) -> tuple[float, float]:
    """Where amax / scale lies under a power-of-two scale.

    Derivation, with qmax = Q * 2**k and u as in `element_bound`: "ceil" takes the smallest scale with
    amax / scale <= qmax, so amax / scale > qmax / 2. "floor" leaves the significand of amax, times
    2**k: from 2**k to 2**(k + 1). "even" does that after rounding to m bits: from 2**k (1 - u / 2) to
    2**k (2 - u). "nearest" allows half an octave on either side of qmax.

    Args:
        element: format of the elements.
        qmax: the largest magnitude to be used.
        rounding: see `shared_exponent`.

    Returns:
        The lower and the upper end; "ceil" and "nearest" do not reach the lower one, "floor" and
        "even" not the upper one.

    Raises:
        ArgumentError: an unknown format or rounding.

    Example:
        >>> scaled_range("e4m3fn", 448, "ceil"), scaled_range("e2m1", 6, "even")
        ((224.0, 448.0), (3.5, 7.0))
    """
    u = 2.0 ** -(get_scalar(element).mantissa_bits + 1)
    power = 2.0 ** math.floor(math.log2(qmax))
    ranges = {
        "ceil": (qmax / 2, float(qmax)),
        "floor": (power, 2 * power),
        "even": (power * (1 - u / 2), power * (2 - u)),
        "nearest": (qmax / math.sqrt(2), qmax * math.sqrt(2)),
    }
    if rounding not in ranges:
        raise ArgumentError("rounding", repr(rounding), ", ".join(ROUNDINGS), "8")
    return ranges[rounding]


def group_bound(
    rule: str | GroupRule, *, qmax: float | None = None, rounding: Rounding = "ceil"
) -> float:
    """The largest error of any element of a group, divided by the group's amax.

    Derivation. Let a = amax / scale, in (low, high) by `scaled_range`, and x an element divided by the
    scale, |x| <= a. While |x| is at most the largest value, its error is piecewise linear and largest
    at the midpoints t, where it is half the gap; and a >= max(t, low). Beyond the largest value the
    error is |x| - largest, at most a - largest, and (a - largest) / a grows with a. Hence

        bound = max over midpoints t of halfgap(t) / max(t, low), and 1 - largest / high.

    For a scale that is itself rounded to nearest (N2) with relative error at most v = 1/17, a = qmax *
    exact scale / scale lies between qmax / (1 + v) and qmax / (1 - v).

    It holds where neither a floor nor an end of the format holds the scale: with power-of-two scales
    for an amax from `floor` to 2**127 (beyond, a value that is rounded up may overflow fp32); with N2
    from 6 * 2**-6 (below, the scale is subnormal) to 6 * 448, for an amax of bf16 precision, which the
    product with fp32(1/6) never moves across a midpoint.

    Args:
        rule: a rule of SPEC 3, or its name.
        qmax: another qmax than the rule's (power-of-two scales only).
        rounding: another way to choose the exponent (power-of-two scales only).

    Returns:
        The bound, between 0 and 1.

    Raises:
        ArgumentError: an unknown rule or rounding, or a choice that the rule's scale does not have.

    Example:
        >>> group_bound("P1/64") == 1 / 17, group_bound("M1/32") == 1 / 5
        (True, True)
        >>> round(group_bound("N2/16") * 17, 9)
        3.0
        >>> group_bound("P1/64", rounding="floor"), group_bound("M1/32", rounding="floor")
        (0.125, 0.25)
    """
    chosen = get_rule(rule)
    if chosen.scale is UE8M0:
        limit = chosen.qmax if qmax is None else qmax
        low, high = scaled_range(chosen.element, limit, rounding)
    elif qmax is not None or rounding != "ceil":
        given = f"qmax {qmax}, rounding {rounding!r}"
        raise ArgumentError("rule", f"{chosen.name} with {given}", "neither", chosen.clause)
    else:
        v, _ = element_bound(chosen.scale)
        low, high = chosen.qmax / (1 + v), chosen.qmax / (1 - v)
    codes = np.arange(chosen.element.max_code + 1, dtype=np.uint8)
    values = decode(codes, chosen.element).astype(np.float64)
    middles, halves = (values[1:] + values[:-1]) / 2, np.diff(values) / 2
    inside = halves / np.maximum(middles, low)
    return max(float(inside.max()), 1 - chosen.element.max_value / high)


def clip_probability(element: str | FloatFormat, qmax: float, rounding: Rounding) -> float:
    """How often a group has an element above the largest value, if log2(amax) is spread evenly.

    amax / scale is then spread evenly in the logarithm over the octave of `scaled_range`, so that the
    rate is the part of that octave above the largest value.

    Args:
        element: format of the elements.
        qmax: the largest magnitude to be used.
        rounding: see `shared_exponent`.

    Returns:
        A rate, 0 to 1.

    Raises:
        ArgumentError: an unknown format or rounding.

    Example:
        >>> clip_probability("e2m1", 6, "ceil"), round(clip_probability("e2m1", 6, "floor"), 3)
        (0.0, 0.415)
    """
    _, high = scaled_range(element, qmax, rounding)
    return min(max(0.0, math.log2(high / get_scalar(element).max_value)), 1.0)


def double_rounding_rate(element: str | FloatFormat) -> float:
    """How many codes change when values are rounded to bf16 before they are quantized.

    Between two neighbours of a format with m mantissa bits lie 2**(7 - m) steps of bf16, and their
    midpoint is itself a bf16 number. The values within half a bf16 step of it are rounded to it, and
    then all to the even neighbour: wrong for those of one side. That is half a step of 2**(7 - m).
    Exact for normal elements under a power-of-two scale, spread evenly over that distance.

    Args:
        element: a format of at most 6 mantissa bits.

    Returns:
        A rate per code.

    Raises:
        ArgumentError: an unknown format, or one as precise as bf16.

    Example:
        >>> 1 / double_rounding_rate("e4m3fn"), 1 / double_rounding_rate("e2m1")
        (32.0, 128.0)
    """
    return 0.5 / _bf16_steps(element)


def bf16_step_rate(error_ulp: float) -> float:
    """How many bf16 results change when their fp32 values move by that many ulp on average.

    Between two bf16 numbers lie 2**16 steps of fp32, with one rounding boundary among them; a move of d
    ulp crosses it with probability d / 2**16, as long as d is small.

    Args:
        error_ulp: mean absolute difference in ulp of fp32, well below 2**16.

    Returns:
        A rate per value.

    Example:
        >>> bf16_step_rate(2) == 2.0**-15
        True
    """
    return error_ulp * 2.0 ** (BF16.mantissa_bits - FP32.mantissa_bits)


def code_change_rate(error_ulp: float, element: str | FloatFormat) -> float:
    """How many codes change when the fp32 values, rounded to bf16 and quantized, move by that many ulp.

    A code can change only where the bf16 number does, and of the 2**(7 - m) boundaries between bf16
    numbers that an interval between two codes has, one is where the code changes.

    Args:
        error_ulp: mean absolute difference in ulp of fp32.
        element: the format of the codes, at most 6 mantissa bits.

    Returns:
        A rate per code, for a scale that does not change.

    Raises:
        ArgumentError: an unknown format, or one as precise as bf16.

    Example:
        >>> code_change_rate(1, "e4m3fn") == 2.0**-20
        True
    """
    return bf16_step_rate(error_ulp) / _bf16_steps(element)


def sum_bound(count: int, order: str) -> float:
    """The largest relative error of an fp32 sum of numbers of one sign.

    Every addition multiplies what it adds by 1 + d, |d| <= u = 2**-24. A term goes through log2(n)
    additions in a tree and through at most n - 1 one after the other. With one sign nothing cancels,
    so that the error is at most (1 + u)**additions - 1. Sums that are subnormal are exact.

    Args:
        count: terms; a power of two for a tree.
        order: "tree" or "running".

    Returns:
        The bound.

    Raises:
        ArgumentError: a count below 1 or not a power of two, or another order.

    Example:
        >>> round(sum_bound(128, "tree") * 2**24, 3), round(sum_bound(128, "running") * 2**24, 3)
        (7.0, 127.0)
    """
    if count < 1 or (order == "tree" and count & (count - 1)):
        raise ArgumentError("count", count, "1 or more, a power of two for a tree", "1.2")
    if order not in ("tree", "running"):
        raise ArgumentError("order", repr(order), "'tree' or 'running'", "1.2")
    additions = count.bit_length() - 1 if order == "tree" else count - 1
    return math.expm1(additions * math.log1p(_UNIT))


def exp_by_exp2_bound(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The largest relative error of `exp_by_exp2` at x.

    LOG2E is log2(e) (1 + c) with |c| known, and the product rounds by 1 + d, |d| <= u = 2**-24; so the
    exponent is off by a factor of at most 1 + c + d + c d, the power by exp(|x| * that), and its own
    rounding adds u.

    Args:
        x: fp32, -87 to 0.

    Returns:
        float64 of the same shape.

    Example:
        >>> (exp_by_exp2_bound(np.float32([-1, -80])) * 2**24).round(1).tolist()
        [2.2, 98.9]
    """
    constant = abs(LOG2E * math.log(2) - 1)
    exponent = constant + _UNIT + constant * _UNIT
    power = np.expm1(np.abs(x.astype(np.float64)) * exponent)
    return np.asarray(power + (1 + power) * _UNIT)


def _bf16_steps(element: str | FloatFormat) -> int:
    """Steps of bf16 between two neighbours of a format, in one binade."""
    chosen = get_scalar(element)
    if not chosen.zero or chosen.mantissa_bits >= BF16.mantissa_bits:
        raise ArgumentError("element", chosen.name, "a format with fewer bits than bf16", "2")
    return 1 << (BF16.mantissa_bits - chosen.mantissa_bits)
