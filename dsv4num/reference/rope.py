"""Rotary position embedding on interleaved pairs, and its cosine table. SPEC clause 5.5.

The table is the same on every machine: no entry depends on the `cos` of NumPy or of the C library.
Entries are computed in float64 from sums and products alone, and the few that lie too close to a
rounding boundary of fp32 are decided with 80 decimal digits.
"""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.reference.scalar import kind_of

__all__ = ["build_cos_sin_cache", "rotate_gptj"]

MAX_POSITION = 1 << 20
_MAX_ROPE_DIM = 1 << 10
_MAX_THETA = 2.0**96
_MAX_FACTOR = 2.0**20
_CHUNK = 1 << 16  # angles at a time, so that intermediates stay in a cache

_PI = Decimal(
    "3.141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342117068"
)
_DIGITS = decimal.Context(prec=80, rounding=decimal.ROUND_HALF_EVEN)

_ROUND_MAGIC = float.fromhex("0x1.8p+52")  # rounds |v| < 2**51 to an integer
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# pi/2 in three parts. The first two have at most 33 bits: their products with k < 2**20 are exact.
_HALF_PI_1 = float.fromhex("0x1.921fb544p+0")
_HALF_PI_2 = float.fromhex("0x1.0b4611a6p-34")
_HALF_PI_3 = float.fromhex("0x1.3198a2e037073p-69")
# Taylor series in r**2 for |r| <= pi/4: what is cut off is below 2**-57 of the result.
_SIN_SERIES = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(1, 9))
_COS_SERIES = tuple((-1) ** n / math.factorial(2 * n) for n in range(1, 9))

# The 29 bits of a float64 significand that fp32 drops, their middle, and how near to it (in ulp of
# float64) a value is left undecided: 128 ulp is at least 2**-46 of the value, whose error is below
# 2**-49 of it.
_DROPPED = np.int64((1 << 29) - 1)
_MIDDLE = np.int64(1 << 28)
_UNDECIDED = np.int64(128)


def rotate_gptj(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rotate the pairs (0, 1), (2, 3), ... of the last axis.

    Rule (clause 5.5): even' = even * cos - odd * sin and odd' = odd * cos + even * sin. Both
    products, then their difference or sum, are each rounded to fp32.

    Args:
        x: fp32 [..., 2n] (64 in production).
        cos: fp32 [..., n].
        sin: fp32 [..., n].

    Returns:
        fp32 [..., 2n], the pairs in the places they came from.

    Raises:
        ArgumentError: another dtype, an odd last axis, or shapes that do not fit.

    Example:
        >>> table = build_cos_sin_cache(5)
        >>> y = rotate_gptj(np.float32([1, 0]), table[4, :1], table[4, 32:33])
        >>> [f"{bits:08X}" for bits in y.view(np.uint32)]
        ['BF275530', 'BF41BDCF']
    """
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            given = kind_of(array)
            raise ArgumentError(name, given, "float32", "5.5")
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ArgumentError("x", f"shape {list(x.shape)}", "an even last axis", "5.5")
    wanted = (*x.shape[:-1], x.shape[-1] // 2)
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != wanted:
            allowed = f"shape {list(wanted)}"
            raise ArgumentError(name, f"shape {list(array.shape)}", allowed, "5.5")
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = odd * cos + even * sin
    return rotated


def build_cos_sin_cache(
    max_position: int,
    *,
    rope_dim: int = 64,
    theta: float = 10000.0,
    factor: float = 1.0,
    original_max_position: int = 65536,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> NDArray[np.float32]:
    """Cosines and sines of every position, plain or with YaRN scaling.

    Rule (clause 5.5; d = `rope_dim`, i = 0 .. d/2 - 1):
        1. f[i] = theta ** (-2i / d), rounded once to float64.
        2. YaRN, only if factor > 1. D(turns) = d * ln(original / (2 pi turns)) / (2 ln(theta));
           low = max(floor(D(beta_fast)), 0); high = min(ceil(D(beta_slow)), d - 1), plus 0.001 if
           equal to low. In float64, each operation rounded: ramp = (i - low) / (high - low) limited
           to 0..1; mask = 1 - ramp; f[i] = (f[i] / factor) * (1 - mask) + f[i] * mask.
        3. angle = position * f[i], rounded once to float64.
        4. Row `position`: the d/2 cosines, then the d/2 sines, of these float64 angles, each
           correctly rounded to fp32. Amplitudes are not scaled (mscale 0).

    Args:
        max_position: rows of the table, 1 to 1,048,576.
        rope_dim: rotated dimensions, even, 2 to 1024.
        theta: the base, above 1 and at most 2**96.
        factor: how many times the context is extended, 1 to 2**20; 1 means plain.
        original_max_position: context length before extension, used by YaRN only.
        beta_fast: turns within that context above which a frequency is kept.
        beta_slow: turns below which it is divided by `factor`; at most `beta_fast`.

    Returns:
        fp32 [max_position, rope_dim].

    Raises:
        ArgumentError: a value out of these ranges.

    Example:
        >>> table = build_cos_sin_cache(1001)
        >>> [f"{bits:08X}" for bits in table[1000, [0, 1, 32, 33]].view(np.uint32)]
        ['3F0FF813', 'BF15A6FD', '3F53AE61', '3F4FB3C1']
    """
    _require_integer("max_position", max_position, MAX_POSITION)
    _require_integer("rope_dim", rope_dim, _MAX_ROPE_DIM)
    if rope_dim % 2:
        raise ArgumentError("rope_dim", rope_dim, "an even number", "5.5")
    _require_number("theta", theta, math.nextafter(1.0, 2.0), _MAX_THETA, "above 1, at most 2**96")
    _require_number("factor", factor, 1.0, _MAX_FACTOR, "1 to 2**20")
    _require_integer("original_max_position", original_max_position, MAX_POSITION)
    _require_number("beta_slow", beta_slow, 2.0**-20, 2.0**20, "2**-20 to 2**20")
    _require_number("beta_fast", beta_fast, beta_slow, 2.0**20, "beta_slow to 2**20")
    frequencies = _inverse_frequencies(rope_dim, float(theta))
    if factor > 1:
        low, high = (
            _correction_dim(float(turns), rope_dim, float(theta), original_max_position)
            for turns in (beta_fast, beta_slow)
        )
        frequencies = _blend(frequencies, float(factor), math.floor(low), math.ceil(high))
    return _table(frequencies, max_position)[0]


def _inverse_frequencies(rope_dim: int, theta: float) -> NDArray[np.float64]:
    """Step 1. `decimal` gives the same 80 digits on every machine; `float` rounds them right."""
    half = rope_dim // 2
    with decimal.localcontext(_DIGITS):
        powers = [Decimal(theta) ** (Decimal(-i) / half) for i in range(half)]
    return np.array([float(power) for power in powers], np.float64)


def _correction_dim(turns: float, rope_dim: int, theta: float, original: int) -> Decimal:
    """D(turns) of step 2: the (fractional) i whose angle makes that many turns in the context."""
    with decimal.localcontext(_DIGITS):
        ratio = original / (2 * _PI * Decimal(turns))
        return rope_dim * ratio.ln() / (2 * Decimal(theta).ln())


def _blend(kept: NDArray[np.float64], factor: float, low: int, high: int) -> NDArray[np.float64]:
    """The float64 part of step 2."""
    half = kept.shape[0]
    first = max(low, 0)
    last = float(min(high, 2 * half - 1))
    if last == first:
        last = last + 0.001
    ramp = np.clip((np.arange(half, dtype=np.float64) - first) / (last - first), 0.0, 1.0)
    mask = 1.0 - ramp
    return (kept / factor) * (1.0 - mask) + kept * mask


def _table(frequencies: NDArray[np.float64], max_position: int) -> tuple[NDArray[np.float32], int]:
    """Steps 3 and 4, and how many entries float64 could not decide."""
    half = frequencies.shape[0]
    table = np.empty((max_position, 2 * half), np.float32)
    undecided = 0
    rows = max(_CHUNK // half, 1)
    for start in range(0, max_position, rows):
        stop = min(start + rows, max_position)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * frequencies
        cos, sin = _cos_sin(angles)
        table[start:stop, :half], few = _round_to_fp32(cos, angles, quarter_turns=1)
        table[start:stop, half:], more = _round_to_fp32(sin, angles, quarter_turns=0)
        undecided += few + more
    return table, undecided


def _cos_sin(angles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of 0 <= angle <= 2**20, with a relative error below 2**-49."""
    k = (angles * _TWO_OVER_PI + _ROUND_MAGIC) - _ROUND_MAGIC
    r = ((angles - k * _HALF_PI_1) - k * _HALF_PI_2) - k * _HALF_PI_3
    square = r * r
    odd = r + r * (square * _horner(_SIN_SERIES, square))
    even = 1.0 + square * _horner(_COS_SERIES, square)
    quadrant = k.astype(np.int64) & 3
    swapped = (quadrant & 1) == 1
    sin = np.where(swapped, even, odd)
    cos = np.where(swapped, odd, even)
    sin = np.where(quadrant >= 2, -sin, sin)
    cos = np.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    return cos, sin


def _horner(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The polynomial at x, the coefficient of x**0 first."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


def _round_to_fp32(
    values: NDArray[np.float64], angles: NDArray[np.float64], *, quarter_turns: int
) -> tuple[NDArray[np.float32], int]:
    """sin(angle + quarter turns), correctly rounded, and how many float64 left undecided."""
    rounded = values.astype(np.float32)
    bits = values.view(np.int64)
    near = np.abs((bits & _DROPPED) - _MIDDLE) <= _UNDECIDED
    undecided = np.flatnonzero(near)
    for index in undecided:
        lower = int(bits.flat[index]) & ~int(_DROPPED)  # magnitude bits: the nearer to zero
        middle = np.int64(lower | int(_MIDDLE)).view(np.float64)
        exact = _sine(Decimal(float(angles.flat[index])), quarter_turns)
        above = abs(exact) > abs(Decimal(float(middle)))
        chosen = np.int64(lower + int(_DROPPED) + 1 if above else lower)
        rounded.flat[index] = np.float32(chosen.view(np.float64))
    return rounded, int(undecided.size)


def _sine(angle: Decimal, quarter_turns: int) -> Decimal:
    """sin(angle + quarter turns) to about 70 digits, by Taylor's series."""
    with decimal.localcontext(_DIGITS):
        k = (angle / (_PI / 2)).to_integral_value()
        r = angle - k * _PI / 2
        quadrant = (int(k) + quarter_turns) % 4
        term, order = (Decimal(1), 0) if quadrant % 2 else (r, 1)
        total = Decimal(0)
        while abs(term) > Decimal("1e-75"):
            total += term
            term = -term * r * r / ((order + 1) * (order + 2))
            order += 2
        return -total if quadrant >= 2 else total


def _require_integer(name: str, value: Any, largest: int) -> None:
    """An integer of 1 to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(name, repr(value), f"an integer of 1 to {largest}", "5.5")
    if not 1 <= value <= largest:
        raise ArgumentError(name, value, f"an integer of 1 to {largest}", "5.5")


def _require_number(name: str, value: Any, least: float, largest: float, allowed: str) -> None:
    """A finite number within bounds."""
    number = isinstance(value, float | int | np.floating | np.integer)
    if isinstance(value, bool) or not number or not least <= value <= largest:
        raise ArgumentError(name, repr(value), allowed, "5.5")
