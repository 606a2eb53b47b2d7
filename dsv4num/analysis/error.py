"""Measured errors: relative, SQNR, in ulp, and whether a mean or a rate is what it seems to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]  # has no types

from dsv4num.errors import ArgumentError
from dsv4num.formats import BF16, FP32, FloatFormat

__all__ = [
    "BiasTest",
    "bias_test",
    "error_in_ulp",
    "rate_interval",
    "relative_error",
    "sqnr",
    "ulp_distance",
]


def relative_error(exact: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """|y - exact| / |exact|, element by element.

    Args:
        exact: numbers, any shape; widened to float64.
        y: numbers of the same shape.

    Returns:
        float64. 0 where both are 0, infinity where only `exact` is, NaN where one is NaN or where both
        are infinite.

    Raises:
        ArgumentError: shapes that differ.

    Example:
        >>> relative_error(np.float64([17, 0, 0]), np.float64([16, 0, 1])).round(4).tolist()
        [0.0588, 0.0, inf]
    """
    wanted, got = _pair("exact", exact, "y", y)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(got - wanted) / np.abs(wanted)
    return np.where((wanted == 0) & (got == 0), 0.0, error)


def sqnr(
    exact: NDArray[Any], y: NDArray[Any], axis: int | tuple[int, ...] | None = None
) -> NDArray[np.float64]:
    """Signal to quantization noise ratio in dB: 10 log10(sum exact**2 / sum (y - exact)**2).

    Args:
        exact: finite numbers; widened to float64.
        y: numbers of the same shape.
        axis: the axes to sum over; all of them if None.

    Returns:
        float64 without those axes. Infinity where there is no error, also for a signal of zeros; minus
        infinity where there is an error but no signal.

    Raises:
        ArgumentError: shapes that differ.

    Example:
        >>> sqnr(np.float64([10, 10]), np.float64([10, 11])).round(2).item()
        23.01
    """
    wanted, got = _pair("exact", exact, "y", y)
    signal, noise = np.square(wanted).sum(axis), np.square(got - wanted).sum(axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(noise == 0, np.inf, signal / noise)
        return np.asarray(10 * np.log10(ratio), np.float64)


def ulp_distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """How many steps from one representable number to the next lie between two numbers.

    Bit patterns are numbered so that neighbours differ by one; +0 and -0 are the same number.

    Args:
        a: fp32 or bf16, no NaN.
        b: of the same dtype and shape.

    Returns:
        int64 of that shape, 0 or more.

    Raises:
        ArgumentError: another dtype, shapes that differ, or a NaN.

    Example:
        >>> one, small = np.float32([1]), np.float32([2.0**-149])
        >>> ulp_distance(one, np.float32([1.5])).item() == 2**22, ulp_distance(small, -small).item()
        (True, 2)
    """
    if a.dtype != b.dtype or a.dtype not in (np.float32, ml_dtypes.bfloat16):
        given = f"{a.dtype.name} and {b.dtype.name}"
        raise ArgumentError("a, b", given, "two of float32 or two of bfloat16")
    _same_shape("a", a, "b", b)
    if bool(np.isnan(a).any() or np.isnan(b).any()):
        raise ArgumentError("a, b", "a NaN", "numbers")
    return np.asarray(np.abs(_rank(a) - _rank(b)))


def error_in_ulp(
    exact: NDArray[np.float64], y: NDArray[Any], fmt: FloatFormat = FP32
) -> NDArray[np.float64]:
    """|y - exact| in units of the format's spacing around `exact`.

    The spacing is that of the binade of `exact`, and never below that of the subnormals.

    Args:
        exact: float64, finite.
        y: numbers of the same shape.
        fmt: FP32 or BF16, or another format with a zero.

    Returns:
        float64 of that shape. A correctly rounded result has at most 0.5.

    Raises:
        ArgumentError: shapes that differ, or a format without subnormals.

    Example:
        >>> error_in_ulp(np.float64([1.0]), np.float64([1.0 + 2.0**-23])).item()
        1.0
    """
    if not fmt.zero:
        raise ArgumentError("fmt", fmt.name, "a format with a zero")
    wanted, got = _pair("exact", exact, "y", y)
    exponent = np.maximum(np.frexp(wanted)[1] - 1, 1 - fmt.bias)
    return np.asarray(np.abs(got - wanted) / np.ldexp(1.0, exponent - fmt.mantissa_bits))


@dataclass(frozen=True, slots=True)
class BiasTest:
    """A mean error with its confidence interval.

    Attributes:
        mean: of the errors.
        low, high: the interval that holds the true mean with the confidence asked for.
        p_value: how often unbiased errors would have a mean at least as far from 0.
        count: how many errors.
    """

    mean: float
    low: float
    high: float
    p_value: float
    count: int

    @property
    def biased(self) -> bool:
        """Whether 0 lies outside the interval."""
        return not self.low <= 0 <= self.high


def bias_test(errors: NDArray[Any], confidence: float = 0.99) -> BiasTest:
    """Whether errors have a mean other than 0 (Student's t, two-sided).

    Args:
        errors: signed errors, independent of each other, at least two; any shape.
        confidence: of the interval, between 0 and 1.

    Returns:
        The mean, its interval and the p-value. Errors that are all equal have an interval of width 0.

    Raises:
        ArgumentError: fewer than two errors, a value that is not finite, or a confidence out of range.

    Example:
        >>> bias_test(np.float64([-1, 1, -2, 2])).biased
        False
        >>> bias_test(np.float64([0.9, 1.0, 1.1, 1.0, 0.9, 1.1])).biased
        True
    """
    _require_confidence(confidence)
    values = np.asarray(errors, np.float64).ravel()
    if values.size < 2 or not bool(np.isfinite(values).all()):
        raise ArgumentError("errors", f"{values.size} values", "two or more finite numbers")
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if spread == 0:
        return BiasTest(mean, mean, mean, float(mean == 0), values.size)
    deviation = spread / values.size**0.5
    reach = deviation * float(stats.t.ppf((1 + confidence) / 2, values.size - 1))
    p_value = 2 * float(stats.t.sf(abs(mean) / deviation, values.size - 1))
    return BiasTest(mean, mean - reach, mean + reach, p_value, values.size)


def rate_interval(count: int, trials: int, confidence: float = 0.99) -> tuple[float, float]:
    """The rates that `count` events in `trials` independent trials leave possible (Clopper-Pearson).

    Args:
        count: events, 0 to `trials`.
        trials: 1 or more.
        confidence: between 0 and 1. The interval holds the true rate at least that often.

    Returns:
        Lowest and highest rate.

    Raises:
        ArgumentError: a count outside 0..trials, or a confidence out of range.

    Example:
        >>> low, high = rate_interval(0, 1000, 0.95)
        >>> low, round(high, 5)
        (0.0, 0.00368)
    """
    _require_confidence(confidence)
    if not 0 <= count <= trials or trials < 1:
        raise ArgumentError("count", f"{count} of {trials}", "0 to trials, trials 1 or more")
    interval = stats.binomtest(count, trials).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ArgumentError("confidence", confidence, "between 0 and 1")


def _same_shape(first: str, a: NDArray[Any], second: str, b: NDArray[Any]) -> None:
    if a.shape != b.shape:
        given = f"shapes {list(a.shape)} and {list(b.shape)}"
        raise ArgumentError(f"{first}, {second}", given, "equal shapes")


def _pair(
    first: str, a: NDArray[Any], second: str, b: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both as float64."""
    _same_shape(first, a, second, b)
    return a.astype(np.float64), b.astype(np.float64)


def _rank(x: NDArray[Any]) -> NDArray[np.int64]:
    """The number of each value in the order of all values, 0 for both zeros."""
    fmt, dtype = (FP32, np.uint32) if x.dtype == np.float32 else (BF16, np.uint16)
    bits = np.ascontiguousarray(x).view(dtype).reshape(x.shape).astype(np.int64)
    magnitude = bits & (fmt.sign_code - 1)
    return np.where(bits & fmt.sign_code, -magnitude, magnitude)
