"""`reference.rope` against exact fractions, mpmath, and NumPy's float64 where that decides."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest
import slow_oracle as slow
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.reference import rope
from dsv4num.reference.arithmetic import round_bf16
from dsv4num.reference.rope import build_cos_sin_cache, rotate_gptj

Floats = NDArray[Any]
PRECISION = mpmath.workprec(240)
LONGEST = 1 << 20
PLAIN: dict[str, Any] = {"theta": 10000.0}
YARN: dict[str, Any] = {"theta": 160000.0, "factor": 16.0, "original_max_position": 65536}
#: SHA-256 of the two production tables with 1,048,576 rows, and how many of their entries float64
#: could not decide.
RECORDED = {
    "plain": ("0050e0e6cf278de5e5f63f438d8b8375159b92b2b6c52d6331b20a3a1f4f22a4", 41),
    "yarn": ("9f51f3c6e6c9e6cd11fdb7d5e3464a817b4c1ba7284c767d7df8f4b22863da50", 37),
}
POSITIONS = (0, 1, 65535, 65536, 1_000_000)


def f32(values: Sequence[float]) -> Floats:
    """An fp32 array."""
    return np.array(values, np.float32)


def bits_of(x: Floats) -> list[int]:
    """fp32 bit patterns as integers."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32).ravel().tolist()


def bf16_of(x: Floats) -> list[int]:
    """bf16 bit patterns of fp32 values, rounded."""
    return round_bf16(x).view(np.uint16).ravel().tolist()


def nearest_fp32(x: Any) -> Fraction:
    """The fp32 nearest to an mpmath number."""
    return Fraction(slow.round_fp32(Fraction(int(mpmath.nint(x * 2**200)), 2**200)))


def exact_row(angles: list[float]) -> list[int]:
    """Bits of the cosines and then the sines of float64 angles, by mpmath."""
    with PRECISION:
        cos = [nearest_fp32(mpmath.cos(mpmath.mpf(a))) for a in angles]
        sin = [nearest_fp32(mpmath.sin(mpmath.mpf(a))) for a in angles]
    return [slow.fp32_bits(v) if v else 0 for v in cos + sin]


def exact_frequencies(theta: float, half: int = 32) -> list[float]:
    """theta ** (-i / half), rounded once."""
    with PRECISION:
        return [float(mpmath.mpf(theta) ** (mpmath.mpf(-i) / half)) for i in range(half)]


def yarn_frequencies(theta: float, factor: float, original: int, half: int = 32) -> list[float]:
    """The scaled frequencies, each float64 operation written as an exact one that is rounded."""
    with PRECISION:
        low, high = (
            2 * half * mpmath.log(original / (2 * mpmath.pi * turns)) / (2 * mpmath.log(theta))
            for turns in (32, 1)
        )
        first, last = max(int(mpmath.floor(low)), 0), min(int(mpmath.ceil(high)), 2 * half - 1)
    frequencies = []
    for i, kept in enumerate(exact_frequencies(theta, half)):
        ramp = float(min(max(Fraction(i - first, last - first), Fraction(0)), Fraction(1)))
        mask = float(1 - Fraction(ramp))
        scaled = float(Fraction(kept) / Fraction(factor))
        part = float(Fraction(scaled) * (1 - Fraction(mask)))  # 1 - mask is exact here
        assert float(1 - Fraction(mask)) == 1 - Fraction(mask)
        frequencies.append(float(Fraction(part) + Fraction(float(Fraction(kept) * Fraction(mask)))))
    return frequencies


# --- rotate_gptj (clause 5.5) ---------------------------------------------------------


def slow_rotate(x: list[Fraction], cos: list[Fraction], sin: list[Fraction]) -> list[int]:
    """The rule in exact arithmetic, rounded after each operation."""
    rotated = []
    for i, (c, s) in enumerate(zip(cos, sin, strict=True)):
        a, b = x[2 * i], x[2 * i + 1]
        ac, bs, bc, as_ = (Fraction(slow.round_fp32(v)) for v in (a * c, b * s, b * c, a * s))
        rotated += [slow.round_fp32(ac - bs), slow.round_fp32(bc + as_)]
    return [slow.fp32_bits(v) for v in rotated]


def test_rotate_rounds_each_operation() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 64)).astype(np.float32)
    angles = rng.uniform(0, 100, (20, 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = rotate_gptj(x, cos, sin)
    assert got.shape == x.shape and got.dtype == np.float32
    for row in range(20):
        exact = [[Fraction(v) for v in array[row].tolist()] for array in (x, cos, sin)]
        assert bits_of(got[row]) == slow_rotate(*exact)
    fused = 0
    for row in range(20):  # the test would notice a fused multiply-add
        for i in range(32):
            a, b, c, s = (float(v) for v in (*x[row, 2 * i : 2 * i + 2], cos[row, i], sin[row, i]))
            one = slow.round_fp32(Fraction(a) * Fraction(c) - Fraction(float(np.float32(b * s))))
            fused += one != float(got[row, 2 * i])
    assert fused > 50


def test_rotate_shapes_strides_and_special_values() -> None:
    table = build_cos_sin_cache(8)
    x = np.arange(3 * 2 * 64, dtype=np.float32).reshape(3, 2, 64)
    cos = np.broadcast_to(table[5:8, None, :32], (3, 2, 32))
    sin = np.broadcast_to(table[5:8, None, 32:], (3, 2, 32))
    got = rotate_gptj(x, cos, sin)
    for i in range(3):
        want = rotate_gptj(x[i, 1].copy(), table[5 + i, :32].copy(), table[5 + i, 32:].copy())
        assert bits_of(got[i, 1]) == bits_of(want)
    wide = np.zeros((2, 512), np.float32)
    wide[:, 448:] = x[0]
    assert bits_of(rotate_gptj(wide[:, 448:], cos[0], sin[0])) == bits_of(got[0])
    assert rotate_gptj(np.zeros((0, 64), np.float32), cos[:0, 0], sin[:0, 0]).shape == (0, 64)
    hot = np.zeros(64, np.float32)
    hot[0] = np.nan
    hot[4] = np.inf
    out = rotate_gptj(hot, table[1, :32], table[1, 32:])
    assert np.isnan(out[:2]).all() and np.isinf(out[4:6]).all() and not np.isnan(out[2:]).any()


def test_rotate_refuses_bad_arguments() -> None:
    x, half = np.zeros((2, 64), np.float32), np.zeros((2, 32), np.float32)
    bad: list[tuple[str, tuple[Any, Any, Any]]] = [
        ("x: got float64", (x.astype(np.float64), half, half)),
        ("cos: got float16", (x, half.astype(np.float16), half)),
        ("sin: got list", (x, half, [])),
        (r"x: got shape \[2, 63\]", (x[:, :63], half, half)),
        (r"x: got shape \[\]", (x[0, 0][...], half, half)),
        (r"cos: got shape \[2, 64\]", (x, x, half)),
        (r"sin: got shape \[1, 32\]", (x, half, half[:1])),
    ]
    for message, arguments in bad:
        with pytest.raises(ArgumentError, match=message):
            rotate_gptj(*arguments)


# --- frequencies and tables (clause 5.5) ----------------------------------------------


@pytest.mark.parametrize("theta", [10000.0, 160000.0, 1.5, 2.0**64, 500000.0])
def test_inverse_frequencies_are_correctly_rounded(theta: float) -> None:
    assert rope._inverse_frequencies(64, theta).tolist() == exact_frequencies(theta)


def test_yarn_frequencies() -> None:
    low, high = (rope._correction_dim(t, 64, 160000.0, 65536) for t in (32.0, 1.0))
    assert (math.floor(low), math.ceil(high)) == (15, 25)
    blended = rope._blend(rope._inverse_frequencies(64, 160000.0), 16.0, 15, 25)
    assert blended.tolist() == yarn_frequencies(160000.0, 16.0, 65536)
    plain = exact_frequencies(160000.0)
    assert blended[:16].tolist() == plain[:16]
    assert blended[25:].tolist() == [f / 16 for f in plain[25:]]
    equal = rope._blend(np.ones(4), 2.0, 2, 2)  # a ramp of 0.001
    assert equal.tolist() == [1.0, 1.0, 1.0, 0.5]


def test_constants_of_the_reduction() -> None:
    with PRECISION:
        assert abs(mpmath.mpf(str(rope._PI)) - mpmath.pi) < mpmath.mpf(10) ** -71
        parts = [mpmath.mpf(p) for p in (rope._HALF_PI_1, rope._HALF_PI_2, rope._HALF_PI_3)]
        assert abs(mpmath.fsum(parts) - mpmath.pi / 2) < mpmath.mpf(2) ** -122
        assert float(2 / mpmath.pi) == rope._TWO_OVER_PI
    for value in (rope._HALF_PI_1, rope._HALF_PI_2):
        assert Fraction(value).numerator.bit_length() <= 33  # times k < 2**20: at most 53 bits


def test_float64_error_is_far_below_the_undecided_range() -> None:
    rng = np.random.default_rng(0)
    turns = np.round(rng.uniform(0, 667543, 1500)) * (np.pi / 2)  # close to multiples of pi/2
    small = 2.0 ** rng.uniform(-60, 20, 500)
    angles = np.concatenate([turns, rng.uniform(0, LONGEST, 1500), small])
    cos, sin = rope._cos_sin(angles)
    with PRECISION:
        for a, c, s in zip(angles.tolist(), cos.tolist(), sin.tolist(), strict=True):
            assert abs(c / mpmath.cos(mpmath.mpf(a)) - 1) < 2**-49
            assert abs(s / mpmath.sin(mpmath.mpf(a)) - 1) < 2**-49


def test_the_exact_path_agrees_with_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = build_cos_sin_cache(40, theta=160000.0)
    monkeypatch.setattr(rope, "_UNDECIDED", np.int64(1 << 27))  # half of all entries
    exact, count = rope._table(rope._inverse_frequencies(64, 160000.0), 40)
    assert 900 < count < 1600
    assert bits_of(exact) == bits_of(fast)


Production = tuple[str, list[float], Floats, int]


@pytest.fixture(scope="module", params=["plain", "yarn"])
def production(request: pytest.FixtureRequest) -> Iterator[Production]:
    """One of the two production tables at full length, with its frequencies."""
    if request.param == "plain":
        frequencies = exact_frequencies(10000.0)
    else:
        frequencies = yarn_frequencies(160000.0, 16.0, 65536)
    table, undecided = rope._table(np.array(frequencies), LONGEST)
    yield request.param, frequencies, table, undecided


def test_production_table_bytes(production: Production) -> None:
    name, _, table, undecided = production
    assert (hashlib.sha256(table.tobytes()).hexdigest(), undecided) == RECORDED[name]
    short = build_cos_sin_cache(300, **(PLAIN if name == "plain" else YARN))
    assert bits_of(short) == bits_of(table[:300])


def test_production_table_rows(production: Production) -> None:
    _, frequencies, table, _ = production
    for position in POSITIONS:
        angles = [float(position) * f for f in frequencies]
        assert bits_of(table[position]) == exact_row(angles)


def test_production_table_entries(production: Production) -> None:
    """Every entry: NumPy's float64 decides nearly all of them, mpmath the rest."""
    _, frequencies, table, undecided = production
    close = 0
    for start in range(0, LONGEST, 1 << 14):
        rows = np.arange(start, start + (1 << 14), dtype=np.float64)
        angles = rows[:, None] * np.array(frequencies)
        for column, function in ((0, np.cos), (32, np.sin)):
            values = function(angles)
            tail = values.view(np.int64) & 0x1FFFFFFF
            open_ = np.abs(tail - (1 << 28)) <= 160
            got = table[start : start + (1 << 14), column : column + 32]
            assert np.array_equal(got[~open_], values.astype(np.float32)[~open_])
            for row, i in zip(*np.nonzero(open_), strict=True):
                want = exact_row([float(angles[row, i])])[1 if column else 0]
                assert bits_of(got[row, i]) == [want]
                close += 1
    assert close >= undecided


def test_table_of_another_width() -> None:
    table = build_cos_sin_cache(3, rope_dim=4, theta=100.0)
    assert table.shape == (3, 4) and table.dtype == np.float32
    for position in range(3):
        angles = [position * f for f in exact_frequencies(100.0, 2)]
        assert bits_of(table[position]) == exact_row(angles)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("max_position", {"max_position": 0}),
        ("max_position", {"max_position": LONGEST + 1}),
        ("max_position", {"max_position": 4.0}),
        ("max_position", {"max_position": True}),
        ("rope_dim", {"rope_dim": 63}),
        ("rope_dim", {"rope_dim": 0}),
        ("theta", {"theta": 0.0}),
        ("theta", {"theta": -10000.0}),
        ("theta", {"theta": 1.0}),
        ("theta", {"theta": math.nan}),
        ("theta", {"theta": math.inf}),
        ("theta", {"theta": "10000"}),
        ("factor", {"factor": 0.5}),
        ("factor", {"factor": math.nan}),
        ("original_max_position", {"factor": 2.0, "original_max_position": 0}),
        ("beta_slow", {"beta_slow": 0.0}),
        ("beta_fast", {"beta_fast": 0.5}),
    ],
)
def test_build_refuses_bad_arguments(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=rf"{name}: got .* \(SPEC 5.5\)"):
        build_cos_sin_cache(**{"max_position": 4, **arguments})


# --- public reports -------------------------------------------------------------------


def test_b58_pairs_are_interleaved() -> None:
    """B58: half-split rotation gives [-1.984111, 1.590675, 2.462378, 4.179683]."""
    with PRECISION:
        angles = (mpmath.mpf(1), mpmath.mpf(1) / 10)
        cos = [nearest_fp32(mpmath.cos(a)) for a in angles]
        sin = [nearest_fp32(mpmath.sin(a)) for a in angles]
    x = f32([1, 2, 3, 4])
    tables = [f32([float(v) for v in values]) for values in (cos, sin)]
    got = rotate_gptj(x, *tables)
    assert bits_of(got) == slow_rotate([Fraction(i) for i in (1, 2, 3, 4)], cos, sin)
    want = [-1.142640, 1.922076, 2.585679, 4.279517]
    assert [round(v, 6) for v in got.tolist()] == want
    split = rotate_gptj(x[[0, 2, 1, 3]], *tables)[[0, 2, 1, 3]]
    assert split.tolist() == pytest.approx([-1.984111, 1.590675, 2.462378, 4.179683], abs=1e-6)
    table = build_cos_sin_cache(2)
    hot = np.zeros(64, np.float32)
    hot[0] = 1
    assert np.flatnonzero(rotate_gptj(hot, table[1, :32], table[1, 32:])).tolist() == [0, 1]


def test_b59_position_of_the_first_token_of_a_group() -> None:
    """B59: tokens 4 to 7 with ratio 4 rotate by position 4, not by 7 and not by the entry, 1."""
    table = build_cos_sin_cache(8)
    answers = {4: [0xBF27, 0xBF42], 7: [0x3F41, 0x3F28], 1: [0x3F0A, 0x3F57]}
    for position, want in answers.items():
        pair = rotate_gptj(f32([1, 0]), table[position, :1], table[position, 32:33])
        assert bf16_of(pair) == want
    assert {token // 4 * 4 for token in (4, 5, 6, 7)} == {4}


def test_b60_base_of_a_layer_type() -> None:
    """B60: pair 1 at position 1000, base 10000 or 160000 before scaling."""
    for theta, angle, cosine in ((10000.0, 749.894, -0.58458), (160000.0, 687.656, -0.93842)):
        assert round(1000 * exact_frequencies(theta)[1], 3) == angle
        table = build_cos_sin_cache(1001, theta=theta)
        assert round(float(table[1000, 1]), 5) == cosine
    scaled = build_cos_sin_cache(1001, **YARN)
    assert bits_of(scaled[1000, :16]) == bits_of(table[1000, :16])
    assert (scaled[1000, 25:32] != table[1000, 25:32]).all()


def test_b61_the_table_is_fp32() -> None:
    """B61: a table rounded to bf16, even if stored as fp32, gives 0xBE91."""
    table = build_cos_sin_cache(40)
    x = f32([1.03125, 1.0])
    cos, sin = table[1, :1], table[1, 32:33]
    assert bf16_of(rotate_gptj(x, cos, sin))[0] == 0xBE92
    narrowed = [round_bf16(v).astype(np.float32) for v in (cos, sin)]
    assert bf16_of(rotate_gptj(x, *narrowed))[0] == 0xBE91
    lower_halves = np.array(bits_of(table[1:])) & 0xFFFF
    assert np.count_nonzero(lower_halves) > 0.9 * lower_halves.size
