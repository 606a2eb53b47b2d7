"""Cases of the fp32 arithmetic and of the rotation: every bit of every result counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsv4num.reference import build_cos_sin_cache
from dsv4num.verify.case import BF16, Case, Level, generator, place


def exp32_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `exp32`: a sample of [-87, 0], its ends, and what is outside."""
    rng = generator(seed, "exp32")
    many = 1 << (24 if level == "full" else 17)
    inside = rng.integers(0, 0x42AE0001, many, dtype=np.uint32) | np.uint32(0x80000000)
    yield Case("inside", {"x": place(inside.view(np.float32))})
    yield Case("uniform", {"x": place(-87 * rng.random(many, np.float32))})
    ends = [0.0, -0.0, -87.0, -87.00001, -88.0, -1e-45, -3e38, -np.inf, np.nan, 1.0, np.inf]
    yield Case("ends", {"x": place(np.array(ends, np.float32))})


def tree_sum_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `tree_sum`: terms of very different magnitude, so that the order decides."""
    rng = generator(seed, "tree_sum")
    for length in (1, 2, 4, 8, 64, 128, 512):
        terms = np.ldexp(rng.standard_normal((37, length)), rng.integers(-20, 20, (37, length)))
        yield Case(f"{length} columns", {"x": place(terms.astype(np.float32)), "axis": -1})
    rows = np.ldexp(rng.standard_normal((3, 128, 33)), rng.integers(-20, 20, (3, 128, 33)))
    yield Case("128 rows", {"x": place(rows.astype(np.float32)), "axis": 1})


def rms_norm_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `rms_norm`."""
    rng = generator(seed, "rms_norm")
    for width in (128, 512):
        scales = np.ldexp(1.0, rng.integers(-60, 40, (50, 1)))
        rows = (rng.standard_normal((50, width)) * scales).astype(np.float32)
        rows[0] = 0
        weight = rng.standard_normal(width).astype(np.float32)
        for kind in (np.float32, BF16):
            placed = place(weight.astype(kind))
            arguments = {"c": place(rows), "weight": placed, "eps": 1e-6}
            yield Case(f"{width} columns, {np.dtype(kind).name}", arguments)


def inv_rms_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `inv_rms`."""
    for case in rms_norm_cases("", level, seed):
        del case.arguments["weight"]
        yield case


def rotate_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `rotate_gptj`: products that nearly cancel, where a contracted one would show."""
    rng = generator(seed, "rotate")
    many = 4096 if level == "full" else 256
    table = build_cos_sin_cache(many)
    cos, sin = table[:, :32], table[:, 32:]
    x = rng.standard_normal((many, 64)).astype(np.float32)
    yield Case("plain", {"x": place(x), "cos": place(cos), "sin": place(sin)})
    near = np.empty_like(x)  # even * cos and odd * sin are nearly equal
    near[:, 0::2] = x[:, 0::2] * sin
    near[:, 1::2] = x[:, 0::2] * cos
    yield Case("cancelling", {"x": place(near), "cos": place(cos), "sin": place(sin)})


def round_bf16_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `round_bf16`."""
    rng = generator(seed, "round_bf16")
    many = 1 << (24 if level == "full" else 17)
    bits = rng.integers(0, 1 << 32, many, dtype=np.uint32)
    yield Case("any bits", {"x": place(bits.view(np.float32))}, half=True)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    yield Case("ties", {"x": place(ties.view(np.float32))}, half=True)
