"""`reference.arithmetic` against exact fractions and mpmath."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import mpmath  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest
import slow_oracle as slow
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import arithmetic as facts
from dsv4num.reference.arithmetic import exp32, inv_rms, rms_norm, round_bf16, tree_sum

Floats = NDArray[Any]
LAW = settings(max_examples=60, deadline=None, derandomize=True)
#: The worst inputs of the exhaustive run (tools/derive_exp32.py) and their errors in ulp.
WORST = {0xC0A58069: 0.888348829, 0xC0A4EF6B: 0.886809832, 0xC216F392: 0.885113326}
RECORDED = 0.88835
PRECISION = mpmath.workprec(120)


def fp32(bits: list[int] | range | Floats) -> Floats:
    """fp32 values of bit patterns."""
    return np.array(bits, np.uint32).view(np.float32)


def f32(values: Sequence[float]) -> Floats:
    """An fp32 array."""
    return np.array(values, np.float32)


def bits_of(x: Floats) -> list[int]:
    """fp32 bit patterns as integers."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32).ravel().tolist()


def numbers(x: Floats) -> list[slow.Number]:
    """Exact values of an fp32 array."""
    return [slow.fp32_value(b) for b in bits_of(x)]


# --- exp32 (clause 1.3) ---------------------------------------------------------------


def exact_error(x: float, y: float) -> float:
    """|y - exp(x)| in ulp of exp(x)."""
    with PRECISION:
        exact = mpmath.exp(mpmath.mpf(x))
        ulp = mpmath.mpf(2) ** (mpmath.floor(mpmath.log(exact, 2)) - 23)
        return float(abs(y - exact) / ulp)


def slow_exp32(x: Fraction) -> Fraction:
    """The rule of clause 1.3, every operation done exactly and then rounded."""
    rn: Callable[[Fraction], Fraction] = lambda v: Fraction(slow.round_fp32(v))  # noqa: E731  (typed)
    magic = Fraction(facts.ROUND_MAGIC)
    n = rn(rn(rn(x * Fraction(facts.LOG2E)) + magic) - magic)
    assert n.denominator == 1
    hi = rn(x - rn(n * Fraction(facts.LN2_HI)))
    lo = rn(n * Fraction(facts.LN2_LO))
    r = rn(hi - lo)
    p = Fraction(facts.EXP32_POLYNOMIAL[-1])
    for coefficient in reversed(facts.EXP32_POLYNOMIAL[:-1]):
        p = rn(rn(p * r) + Fraction(coefficient))
    y = rn(1 + rn(hi + rn(rn(rn(r * r) * p) - lo)))
    return y * slow.two(int(n))


def test_constants() -> None:
    with PRECISION:
        assert np.float32(float(1 / mpmath.log(2))) == facts.LOG2E
        assert np.float32(float(mpmath.log(2) - facts.LN2_HI)) == facts.LN2_LO
    for value in (facts.LOG2E, facts.LN2_HI, facts.LN2_LO, *facts.EXP32_POLYNOMIAL):
        assert float(np.float32(value)) == value
    for n in range(513):
        product = n * Fraction(facts.LN2_HI)
        assert slow.round_fp32(product) == product
    patterns = [0x3EFFFFFE, 0x3E2AAA49, 0x3D2AAC5A, 0x3C091CCC, 0x3AB5245E]
    assert bits_of(f32(facts.EXP32_POLYNOMIAL)) == patterns
    four = [facts.LOG2E, facts.ROUND_MAGIC, facts.LN2_HI, facts.LN2_LO, facts.EXP32_LOWER_LIMIT]
    assert bits_of(f32(four)) == [0x3FB8AA3B, 0x4B400000, 0x3F317200, 0x35BFBE8E, 0xC2AE0000]


def test_exp32_rounds_every_step_to_fp32() -> None:
    rng = np.random.default_rng(13)
    uniform, small = -87 * rng.random(400), -(2.0 ** rng.uniform(-30, 0, 200))
    x = np.concatenate([uniform, small, [-87.0, -1.0]]).astype(np.float32)
    want = [slow.fp32_bits(slow_exp32(Fraction(v))) for v in x.tolist()]
    assert bits_of(exp32(x)) == want


def test_exp32_error_on_a_dense_sample() -> None:
    bits = np.arange(0x80000000, 0xC2AE0001, 751, dtype=np.uint32)
    x = bits.view(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulp = 2.0 ** (np.floor(np.log2(exact)) - 23)
    error = np.abs(exp32(x).astype(np.float64) - exact) / ulp
    assert error.max() < RECORDED < 1.1


@pytest.mark.parametrize("bits", WORST)
def test_exp32_error_at_and_around_the_worst_inputs(bits: int) -> None:
    x = fp32(range(bits - 200, bits + 201))
    errors = [exact_error(a, b) for a, b in zip(x.tolist(), exp32(x).tolist(), strict=True)]
    assert max(errors) < RECORDED
    assert errors[200] == pytest.approx(WORST[bits], abs=1e-9)


def test_exp32_error_around_the_steps_of_n() -> None:
    steps = [-(k + 0.5) * math.log(2) for k in range(126)]
    x = np.array([np.float32(s) for s in steps]).view(np.uint32)
    near = (x[:, None] + np.arange(-4, 5, dtype=np.int64)).astype(np.uint32)
    values = near[near <= 0xC2AE0000].view(np.float32)
    pairs = zip(values.tolist(), exp32(values).tolist(), strict=True)
    assert max(exact_error(a, b) for a, b in pairs) < RECORDED


def test_exp32_special_values() -> None:
    one = [0, 0x80000000, 0x80000001, 0xB3000000]
    assert bits_of(exp32(fp32(one))) == [0x3F800000] * 4
    low = [0xC2AE0000, 0xC2AE0001, 0xC2B00000, 0xFF7FFFFF, 0xFF800000]
    assert bits_of(exp32(fp32(low))) == [0x00B33687, 0, 0, 0, 0]
    nans = exp32(fp32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF923456, 0x7FFFFFFF]))
    assert np.isnan(nans).all()
    exp32(f32([1e-30, 1, 88, 3e38, np.inf]))  # not defined, but it answers


def test_exp32_keeps_shape_and_refuses_float64() -> None:
    assert exp32(np.zeros((2, 0, 3), np.float32)).shape == (2, 0, 3)
    assert exp32(np.zeros((), np.float32)).shape == ()
    x = -np.arange(24, dtype=np.float32).reshape(4, 6)
    assert bits_of(exp32(x.T)[2]) == bits_of(exp32(x[:, 2].copy()))
    assert exp32(x).dtype == np.float32
    with pytest.raises(ArgumentError, match=r"x: got float64; allowed: float32 \(SPEC 1.3\)"):
        exp32(np.zeros(3))  # type: ignore[arg-type]  # refused


# --- tree_sum (clause 1.2) ------------------------------------------------------------


def slow_tree_sum(values: list[Fraction]) -> Fraction:
    """Halves instead of pairs, from the top down, in exact arithmetic."""
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    total = slow_tree_sum(values[:middle]) + slow_tree_sum(values[middle:])
    return Fraction(slow.round_fp32(total))


@LAW
@given(st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_tree_sum_is_the_sum_of_the_halves(levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(1 << levels) * 2.0 ** rng.integers(-20, 20)).astype(np.float32)
    want = slow_tree_sum([Fraction(v) for v in x.tolist()])
    assert Fraction(float(tree_sum(x, 0))) == want


def test_tree_sum_is_not_a_running_sum() -> None:
    x = f32([2**24, 1, 1, 1])
    running = np.float32(0)
    for value in x:
        running = running + value
    assert bits_of(np.asarray(running)) == [0x4B800000]
    # (2**24 + 1) rounds to 2**24; (1 + 1) is 2; together 2**24 + 2.
    assert bits_of(tree_sum(x, 0)) == [0x4B800001]
    assert slow.fp32_bits(slow.round_fp32(Fraction(2**24 + 3))) == 0x4B800002  # nor the exact sum


def test_tree_sum_axes_and_chunks() -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 8, 4)).astype(np.float32)
    for axis in (1, -2):
        got = tree_sum(x, axis)
        assert got.shape == (3, 4) and got.dtype == np.float32
        for i in range(3):
            for j in range(4):
                assert bits_of(got[i, j]) == bits_of(tree_sum(x[i, :, j].copy(), 0))
    chunks = tree_sum(x.reshape(3, 2, 4, 4), 2)
    assert bits_of(tree_sum(chunks, 1)) == bits_of(tree_sum(x, 1))
    padded = np.concatenate([x, np.zeros_like(x)], axis=1)
    assert bits_of(tree_sum(padded, 1)) == bits_of(tree_sum(x, 1))


def test_tree_sum_special_values() -> None:
    one = fp32([0x7F923456])
    assert bits_of(tree_sum(one, 0)) == [0x7F923456]
    assert bits_of(tree_sum(f32([-0.0]), 0)) == [0x80000000]
    assert bits_of(tree_sum(f32([-0.0, -0.0]), 0)) == [0x80000000]
    assert np.isnan(tree_sum(f32([np.inf, -np.inf]), 0))
    assert bits_of(tree_sum(f32([3e38, 3e38]), 0)) == [0x7F800000]
    assert bits_of(tree_sum(fp32([1, 1]), 0)) == [2]  # subnormals are not flushed


@pytest.mark.parametrize("length", [0, 3, 6, 96])
def test_tree_sum_refuses_other_lengths(length: int) -> None:
    with pytest.raises(ArgumentError, match=rf"axis 0 of x: got length {length}; .*\(SPEC 1.2\)"):
        tree_sum(np.zeros(length, np.float32), 0)


def test_tree_sum_refuses_bad_arguments() -> None:
    for axis in (1, -2, True, 0.0, None):
        with pytest.raises(ArgumentError, match="axis"):
            tree_sum(np.zeros(4, np.float32), axis)  # type: ignore[arg-type]  # refused
    with pytest.raises(ArgumentError, match="float16"):
        tree_sum(np.zeros(4, np.float16), 0)


# --- inv_rms and rms_norm (clause 1.4) ------------------------------------------------


def slow_sqrt(x: Fraction) -> Fraction:
    """The fp32 nearest to a square root: 100 binary digits and a sticky one, then rounded."""
    scaled = x * slow.two(300)
    root = math.isqrt(math.floor(scaled))
    inexact = root * root != scaled
    return Fraction(slow.round_fp32(Fraction(2 * root + inexact) * slow.two(-151)))


def slow_norm(row: list[Fraction], weight: list[Fraction], eps: Fraction) -> list[Fraction]:
    """The rule of clause 1.4 in exact arithmetic, rounded after each operation."""
    rn: Callable[[Fraction], Fraction] = lambda v: Fraction(slow.round_fp32(v))  # noqa: E731  (typed)
    mean = rn(slow_tree_sum([rn(v * v) for v in row]) / len(row))
    inverse = rn(1 / slow_sqrt(rn(mean + eps)))
    return [inverse, *(rn(rn(v * inverse) * w) for v, w in zip(row, weight, strict=True))]


@pytest.mark.parametrize("width", [1, 2, 128, 512])
@pytest.mark.parametrize("bf16", [False, True])
def test_rms_norm_against_fractions(width: int, bf16: bool) -> None:
    rng = np.random.default_rng(width)
    c = rng.standard_normal((3, width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(ml_dtypes.bfloat16 if bf16 else np.float32)
    eps = Fraction(float(np.float32(1e-6)))
    inverse, normed = inv_rms(c, 1e-6), rms_norm(c, weight, 1e-6)
    assert inverse.shape == (3,) and normed.shape == c.shape
    assert inverse.dtype == normed.dtype == np.float32
    for i in range(3):
        want = slow_norm(
            [Fraction(v) for v in c[i].tolist()],
            [Fraction(float(w)) for w in weight],
            eps,
        )
        assert bits_of(inverse[i]) + bits_of(normed[i]) == [slow.fp32_bits(v) for v in want]


def test_inv_rms_special_values() -> None:
    c = np.zeros((4, 4), np.float32)
    c[1, 0], c[2, 0], c[3, 0] = np.nan, np.inf, 1e-30  # 1e-60 underflows to zero
    got = inv_rms(c, 0)
    assert got[0] == np.inf and np.isnan(got[1]) and got[2] == 0 and got[3] == np.inf
    assert bits_of(inv_rms(c[:1], 1.0)) == [0x3F800000]


def test_rms_norm_refuses_bad_arguments() -> None:
    c, weight = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("c: got float64", lambda: inv_rms(c.astype(np.float64), 0.0)),
        ("last axis of c: got length 3", lambda: inv_rms(c[:, :3], 0.0)),
        ("c: got no axis", lambda: inv_rms(c[0, 0], 0.0)),
        ("eps: got -1", lambda: inv_rms(c, -1.0)),
        ("eps: got nan", lambda: inv_rms(c, math.nan)),
        (r"eps: got 1e\+39", lambda: inv_rms(c, 1e39)),
        ("eps: got 1000", lambda: inv_rms(c, 10**400)),
        ("eps: got inf", lambda: inv_rms(c, math.inf)),
        ("eps: got '1'", lambda: inv_rms(c, "1")),  # type: ignore[arg-type]  # refused
        ("weight: got float64", lambda: rms_norm(c, weight.astype(np.float64), 0.0)),
        (r"weight: got shape \[2\]", lambda: rms_norm(c, weight[:2], 0.0)),
        (r"weight: got shape \[2, 4\]", lambda: rms_norm(c, c, 0.0)),
    ]
    for message, call in bad:
        with pytest.raises(ArgumentError, match=message):
            call()


# --- round_bf16 (clause 1.5) ----------------------------------------------------------


def test_round_bf16_at_every_boundary() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    upper = upper[(upper & 0x7FFFFFFF) < 0x7F800000]
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        got = round_bf16(x)
        assert got.dtype == ml_dtypes.bfloat16
        codes = got.view(np.uint16).astype(np.uint32)
        nearest = upper >> np.uint32(16)
        up = lower > 0x8000 or (lower == 0x8000 and (nearest & 1) == 1)
        assert np.array_equal(codes, nearest + np.where(up, 1, 0))
        few = slice(lower % 31, None, 31)
        assert codes[few].tolist() == [slow.round_bf16(v) for v in numbers(x[few])]


def test_round_bf16_nan_and_infinity() -> None:
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF, 0x7F923456]
    assert (round_bf16(fp32(nans)).view(np.uint16) == 0x7FFF).all()
    ends = fp32([0x7F800000, 0xFF800000, 0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000])
    want = [0x7F80, 0xFF80, 0x7F7F, 0x7F80, 0xFF80]
    assert round_bf16(ends).view(np.uint16).tolist() == want


def test_round_bf16_refuses_other_types() -> None:
    for x in (np.zeros(2), np.zeros(2, ml_dtypes.bfloat16), [1.0]):
        with pytest.raises(ArgumentError, match=r"allowed: float32 \(SPEC 1.5\)"):
            round_bf16(x)  # type: ignore[arg-type]  # refused


# --- public reports -------------------------------------------------------------------


def pool(score: Floats, kv: Floats) -> float:
    """The weighted mean of clause 5.4 for one column."""
    weight = exp32(score - score.max())
    return float(tree_sum(weight * kv, 0) / tree_sum(weight, 0))


def test_b55_minus_infinity_masks_at_any_score() -> None:
    """B55: four missing rows; a finite pad leaks weight into them, minus infinity does not."""
    kv = f32([0, 0, 0, 0, 1, 1, 1, 1])
    for score in (0, -9990, -10000, -20000, -3e38):
        masked = f32([-np.inf] * 4 + [score] * 4)
        assert pool(masked, kv) == 1.0
    leaks = {-9990: 0.99995, -9999: 0.731, -10000: 0.5, -10010: 4.5e-5}
    for score, value in leaks.items():
        padded = f32([-1e4] * 4 + [score] * 4)
        assert pool(padded, kv) == pytest.approx(value, rel=1e-2)


def test_b56_ties_go_to_even_not_up() -> None:
    """B56: a golden reference that adds 0x8000 and cuts gives 0x3F81 for the first."""
    x = f32([1.00390625, 1.01171875, -1.00390625, -1.01171875])
    half_up = [(b + 0x8000) >> 16 for b in bits_of(x)]
    assert half_up == [0x3F81, 0x3F82, 0xBF81, 0xBF82]
    assert round_bf16(x).view(np.uint16).tolist() == [0x3F80, 0x3F82, 0xBF80, 0xBF82]
