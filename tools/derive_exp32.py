"""Derive the polynomial of exp32 and measure exp32 over every input. SPEC clause 1.3.

    python -m tools.derive_exp32            # all 1,118,699,521 fp32 numbers in [-87, 0]; minutes
    python -m tools.derive_exp32 --quick    # one number in 1009

Needs mpmath. Writes no file. Exits with 1 when the derived polynomial is not the one committed in
``dsv4num/formats/arithmetic.py`` or when the worst error exceeds 1.1 ulp.

The exact exponential of the bulk is NumPy's float64 `exp`. Its relative error, under 2**-51, shifts
an error stated in ulp of fp32 by less than 2**-51 * 2**24 = 8e-9. Results that close to a rounding
boundary, and the worst cases of the run, are evaluated again with mpmath; so the count is exact,
and the worst figure could only be beaten by 8e-9.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath  # type: ignore[import-untyped]  # has no types
import numpy as np

from dsv4num.formats.arithmetic import EXP32_POLYNOMIAL
from dsv4num.reference.arithmetic import exp32

FIRST = 0x80000000  # -0
LAST = 0xC2AE0000  # -87
BELOW = 0xBF800000  # -1
CHUNK = 1 << 18
LIMIT = 1.1
#: A float64 exponential this close (in ulp of fp32) to a rounding boundary does not decide.
UNDECIDED = 2e-8
GRID_POINTS = 1001

Real = Any  # mpmath has no types


def round_to_fp32(value: Real) -> float:
    """The fp32 number nearest to an mpmath number of ordinary size."""
    return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])


def fit_minimax(
    target: Sequence[Real], weight: Sequence[Real], grid: Sequence[Real], degree: int
) -> list[Real]:
    """The polynomial with the least largest weighted error on a grid (Remez, single exchange)."""
    count = degree + 2  # points on which the error of the best polynomial alternates
    knots = [-grid[-1] * mpmath.cos(mpmath.pi * i / (count - 1)) for i in range(count)]
    points = [nearest(grid, knot) for knot in knots]
    while True:
        matrix, right = mpmath.matrix(count), mpmath.matrix(count, 1)
        for row, point in enumerate(points):
            for power in range(degree + 1):
                matrix[row, power] = grid[point] ** power
            matrix[row, count - 1] = (-1) ** row / weight[point]
            right[row] = target[point]
        *coefficients, level = mpmath.lu_solve(matrix, right)
        error = [
            w * (mpmath.polyval(coefficients[::-1], g) - t)
            for g, w, t in zip(grid, weight, target, strict=True)
        ]
        worst = max(range(len(grid)), key=lambda j: abs(error[j]))
        if abs(error[worst]) <= abs(level) * (1 + mpmath.mpf(2) ** -40):
            return list(coefficients)
        exchange(points, worst, error)


def nearest(grid: Sequence[Real], knot: Real) -> int:
    """Index of the grid point nearest to `knot`."""
    return min(range(len(grid)), key=lambda j: abs(grid[j] - knot))


def exchange(points: list[int], worst: int, error: Sequence[Real]) -> None:
    """Let `worst` replace a point so that the signs of the error still alternate."""
    place = bisect.bisect(points, worst)
    for i in (place - 1, place):
        if 0 <= i < len(points) and (error[points[i]] > 0) == (error[worst] > 0):
            points[i] = worst
            return
    points[:] = [worst, *points[:-1]] if place == 0 else [*points[1:], worst]


def derive_polynomial(degree: int) -> tuple[float, ...]:
    """Fp32 coefficients of p in 1 + r + r**2 * p(r), the relative error of the whole minimised.

    Coefficients are fixed from r**0 upward: fit all that are free, round the lowest to fp32,
    subtract it, divide by r, fit the rest. So each makes up for the rounding of those before it.
    """
    bound = mpmath.log(2) / 2 * (1 + mpmath.mpf(2) ** -10)
    step = 2 * bound / (GRID_POINTS - 1)
    grid = [-bound + i * step for i in range(GRID_POINTS) if i != GRID_POINTS // 2]
    weight = [r * r / mpmath.exp(r) for r in grid]
    target = [(mpmath.exp(r) - 1 - r) / (r * r) for r in grid]
    done: list[float] = []
    for free in range(degree, -1, -1):
        done.append(round_to_fp32(fit_minimax(target, weight, grid, free)[0]))
        target = [(t - done[-1]) / r for t, r in zip(target, grid, strict=True)]
        weight = [w * abs(r) for w, r in zip(weight, grid, strict=True)]
    return tuple(done)


def exact_error(x: float, result: float) -> tuple[float, bool]:
    """|result - exp(x)| in ulp of exp(x), and whether the result is correctly rounded."""
    exact = mpmath.exp(mpmath.mpf(x))
    ulp = mpmath.mpf(2) ** (mpmath.floor(mpmath.log(exact, 2)) - 23)
    return float(abs(result - exact) / ulp), round_exactly(exact, ulp) == mpmath.mpf(result)


def round_exactly(exact: Real, ulp: Real) -> Real:
    """An mpmath number to the nearest multiple of `ulp`, ties to even."""
    return mpmath.nint(exact / ulp) * ulp


def patterns(step: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Bit patterns of the inputs, chunk by chunk, in order of magnitude."""
    for start in range(FIRST, LAST + 1, CHUNK * step):
        stop = min(start + CHUNK * step, LAST + 1)
        yield np.arange(start, stop, step, dtype=np.uint32)


def measure(
    function: Callable[[Any], Any], step: int, keep: int = 8
) -> tuple[list[tuple[float, int]], int, int, int, int]:
    """Run `function` over the inputs.

    Returns:
        The `keep` worst (error, bit pattern), worst first; how many results are not correctly
        rounded; how many of those have x <= -1; how many inputs needed mpmath; how many there were.
    """
    worst: list[tuple[float, int]] = []
    wrong = wrong_below = decided = total = 0
    for bits in patterns(step):
        x = bits.view(np.float32)
        result = function(x)
        exact = np.exp(x.astype(np.float64))
        # ulp(exact): keep the exponent bits of the float64, 23 places lower.
        ulp = ((exact.view(np.int64) & 0x7FF0000000000000) - (23 << 52)).view(np.float64)
        error = np.abs(result.astype(np.float64) - exact) / ulp
        incorrect = result != exact.astype(np.float32)
        # On either side of a rounding boundary the error is one half, in ulp of the exact value.
        close = np.flatnonzero(np.abs(error - 0.5) < UNDECIDED)
        for i in close:
            incorrect[i] = not exact_error(float(x[i]), float(result[i]))[1]
        wrong += int(incorrect.sum())
        wrong_below += int(incorrect[x <= -1].sum())
        decided += close.size
        total += x.size
        floor = worst[0][0] if len(worst) == keep else 0.0
        if error.max() > floor:
            for i in np.argsort(error)[-keep:]:
                heapq.heappush(worst, (float(error[i]), int(bits[i])))
                if len(worst) > keep:
                    heapq.heappop(worst)
    return sorted(worst, reverse=True), wrong, wrong_below, decided, total


def main(arguments: Sequence[str] | None = None) -> int:
    """Derive, compare with the committed facts, measure, print."""
    parser = argparse.ArgumentParser(description="Derive exp32's polynomial and measure exp32.")
    parser.add_argument("--quick", action="store_true", help="measure one input in 1009")
    options = parser.parse_args(arguments)
    mpmath.mp.prec = 160
    started = time.perf_counter()

    derived = derive_polynomial(len(EXP32_POLYNOMIAL) - 1)
    print("derived polynomial, r**0 first:")
    for value in derived:
        print(f"  {value.hex()} = 0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}")
    same = derived == EXP32_POLYNOMIAL
    print("equal to the committed one" if same else "NOT the committed one")

    step = 1009 if options.quick else 1
    worst, wrong, wrong_below, decided, total = measure(exp32, step)
    below = total - -(-(BELOW - FIRST) // step)
    print(f"inputs: {total:,} fp32 numbers in [-87, -0]")
    print(f"not correctly rounded: {wrong:,} ({100 * wrong / total:.4f} %)")
    print(f"  with x <= -1: {wrong_below:,} of {below:,} ({100 * wrong_below / below:.4f} %)")
    print(f"  {decided:,} inputs were too close to a tie for float64; mpmath decided")
    print("worst cases (error in ulp, evaluated with mpmath):")
    confirmed = 0.0
    for _, pattern in worst:
        x = np.array([pattern], np.uint32).view(np.float32)
        y = exp32(x)
        error, _ = exact_error(float(x[0]), float(y[0]))
        confirmed = max(confirmed, error)
        code = int(y.view(np.uint32)[0])
        print(f"  {error:.9f}  x = 0x{pattern:08X} = {float(x[0])!r}  -> 0x{code:08X}")
    print(f"worst error: {confirmed:.6f} ulp (allowed: {LIMIT})")
    print(f"run time: {time.perf_counter() - started:.0f} s")
    return 0 if same and confirmed <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
