"""`dsv4num.analysis`: measures against definitions, bounds against every input or the worst ones."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="the analysis extra is not installed")

from scipy import stats

from dsv4num import analysis
from dsv4num.analysis import ROUNDINGS
from dsv4num.errors import ArgumentError
from dsv4num.formats import BF16, E2M1, E4M3FN, E4M3FNUZ, RULES, SCALARS, FloatFormat
from dsv4num.reference import (
    decode,
    encode,
    encode_scale,
    exp32,
    pool_ring_latent,
    quantize,
    rms_norm,
    round_bf16,
    tree_sum,
)
from tools import figures

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ELEMENTS = (E4M3FN, E4M3FNUZ, E2M1)
POWER_RULES = ("P1/64", "P1/64-fnuz", "M1/32")

#: Every positive finite bf16 number, ascending.
EVERY_BF16 = decode(np.arange(1, 0x7F80, dtype=np.uint16), "bf16")
#: Every bf16 number of one octave, 1 to 2.
OCTAVE = decode(np.arange(0x3F80, 0x4000, dtype=np.uint16), "bf16")


def every_fp32_of_an_octave() -> np.ndarray:
    """The 2**23 numbers from 1 to 2."""
    return np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)


# Measures


def test_relative_error_of_every_kind_of_zero() -> None:
    exact = np.float32([4, -4, 0, 0, -0.0, np.nan])
    y = np.float32([5, -3, 0, 1, 0.0, 1])
    got = analysis.relative_error(exact, y)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [0.25, 0.25, 0, np.inf, 0, np.nan])


def test_sqnr_of_a_uniform_quantizer_is_six_decibels_a_bit() -> None:
    x = np.random.default_rng(1).uniform(-1, 1, 1_000_000)
    for bits in (4, 8):
        step = 2.0 ** (1 - bits)
        y = (np.floor(x / step) + 0.5) * step
        assert analysis.sqnr(x, y).item() == pytest.approx(20 * bits * np.log10(2), abs=0.05)


def test_sqnr_by_axis_and_at_its_ends() -> None:
    x = np.float64([[3, 4], [0, 0], [0, 0], [1, 1]])
    y = np.float64([[3, 4], [0, 0], [1, 0], [1, 2]])
    np.testing.assert_allclose(
        analysis.sqnr(x, y, axis=1), [np.inf, np.inf, -np.inf, 10 * np.log10(2)]
    )


def test_ulp_distance_of_all_neighbours_in_bf16() -> None:
    """Numbers in order of value are one step apart, -0 and +0 none."""
    codes = np.concatenate([np.arange(0xFF80, 0x7FFF, -1), np.arange(0x0000, 0x7F81)])
    numbers = codes.astype(np.uint16).view(ml_dtypes.bfloat16)
    wide = numbers.astype(np.float64)
    step = analysis.ulp_distance(numbers[:-1], numbers[1:])
    assert (np.diff(wide) >= 0).all()
    np.testing.assert_array_equal(step, np.diff(wide) > 0)
    assert analysis.ulp_distance(numbers[:1], numbers[-1:]).item() == 2 * 0x7F80


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 1000))
def test_ulp_distance_counts_the_steps_of_nextafter(start: float, steps: int) -> None:
    first = np.float32([start])
    there = first
    for _ in range(steps % 50):
        there = np.nextafter(there, np.float32(np.inf))
    assert analysis.ulp_distance(first, there).item() == steps % 50


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(allow_nan=False, min_value=-1e38, max_value=1e38))
def test_error_of_a_correctly_rounded_result_is_half_an_ulp_at_most(x: float) -> None:
    exact = np.float64([x])
    rounded = exact.astype(np.float32)
    assert analysis.error_in_ulp(exact, rounded).item() <= 0.5
    narrow = round_bf16(rounded)
    assert analysis.error_in_ulp(rounded.astype(np.float64), narrow, BF16).item() <= 0.5


def test_error_in_ulp_is_the_distance_where_the_exact_value_is_a_number() -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0x00000001, 0x7F000000, 20_000, dtype=np.uint32)
    bits &= np.uint32(0xFFFFFF80)  # so that up to 64 steps stay within the binade
    exact, y = (
        bits.view(np.float32),
        (bits + rng.integers(0, 64, 20_000, np.uint32)).view(np.float32),
    )
    np.testing.assert_array_equal(
        analysis.error_in_ulp(exact.astype(np.float64), y), analysis.ulp_distance(exact, y)
    )


def test_bias_test_is_the_t_test() -> None:
    errors = np.random.default_rng(3).normal(0.02, 1, 500)
    ours, theirs = analysis.bias_test(errors, 0.95), stats.ttest_1samp(errors, 0)
    interval = theirs.confidence_interval(0.95)
    # Not bytes: float64 statistics by two routes.
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert ours.count == 500


def test_bias_test_tells_truncation_from_rounding() -> None:
    x = np.random.default_rng(4).uniform(1, 2, 100_000).astype(np.float32)
    truncated = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    wide = x.astype(np.float64)
    assert analysis.bias_test(truncated - wide).biased
    assert not analysis.bias_test(round_bf16(x).astype(np.float64) - wide).biased


def test_bias_test_of_equal_errors() -> None:
    assert analysis.bias_test(np.full(3, 0.5)).biased
    none = analysis.bias_test(np.zeros(3))
    assert not none.biased and none.p_value == 1


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_rate_interval_covers_every_rate(confidence: float) -> None:
    """Computed, not sampled: the chance that the interval of 30 trials holds the true rate."""
    intervals = [analysis.rate_interval(count, 30, confidence) for count in range(31)]
    for rate in np.linspace(0.01, 0.99, 99):
        chances = stats.binom.pmf(np.arange(31), 30, rate)
        holds = np.array([low <= rate <= high for low, high in intervals])
        covered = chances[holds].sum()
        assert covered >= confidence


# Scale rules


def slow_exponent(amax: Fraction, fmt: FloatFormat, qmax: Fraction, rounding: str) -> int:
    """The exponent by search in exact fractions."""

    def two(n: int) -> Fraction:
        return Fraction(2) ** n

    def scales() -> range:
        return range(-20, 21)

    low = max(n for n in scales() if two(n) <= amax)  # amax = M * 2**low
    k = max(n for n in scales() if two(n) <= qmax)
    if rounding == "ceil":
        return min(n for n in scales() if amax <= qmax * two(n))
    if rounding == "floor":
        return low - k
    if rounding == "even":
        step = two(low - fmt.mantissa_bits)
        rounded = (amax / step + Fraction(1, 2)).__floor__() * step
        return max(n for n in scales() if two(n) <= rounded) - k
    return min(scales(), key=lambda n: abs_ratio(amax / qmax / two(n)))


def abs_ratio(ratio: Fraction) -> Fraction:
    """How far a ratio is from 1, alike in both directions."""
    return max(ratio, 1 / ratio)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("fmt", "qmax"), [(E4M3FN, 448), (E4M3FNUZ, 224), (E4M3FNUZ, 240), (E2M1, 6)]
)
def test_exponents_of_an_octave_by_fractions(fmt: FloatFormat, qmax: int, rounding: str) -> None:
    got = analysis.shared_exponent(OCTAVE, fmt, qmax, rounding)
    wanted = [slow_exponent(Fraction(float(a)), fmt, Fraction(qmax), rounding) for a in OCTAVE]
    assert got.tolist() == wanted
    for power in (-130, -14, 90):  # subnormal, small, large: only the octave changes
        moved = np.ldexp(OCTAVE.astype(np.float64), power)
        assert (analysis.shared_exponent(moved, fmt, qmax, rounding) == got + power).all()


@pytest.mark.parametrize("rule", POWER_RULES)
def test_ceil_is_the_rule_of_the_spec(rule: str) -> None:
    np.testing.assert_array_equal(
        analysis.encode_scale_by(EVERY_BF16, rule), encode_scale(EVERY_BF16, rule)
    )
    zero = np.zeros(1, np.float32)
    assert analysis.encode_scale_by(zero, rule) == encode_scale(zero, rule)


def test_floors_of_other_writers() -> None:
    zero = np.zeros(1, np.float32)
    found = {
        place: analysis.encode_scale_by(zero, "P1/64", floor_place=place).item()
        for place in ("amax", "scale")
    }
    assert found == {"amax": 105, "scale": 114}
    assert analysis.encode_scale_by(zero, "M1/32", floor=1e-4).item() == 112
    assert analysis.encode_scale_by(zero, "M1/32", floor=1e-4, floor_place="scale").item() == 114
    assert analysis.encode_scale_by(zero, "P1/64", floor=0).item() == 0


def test_the_logarithm_agrees_on_every_bf16_amax_and_fails_on_fp32() -> None:
    for qmax, fmt in ((448.0, E4M3FN), (6.0, E2M1)):
        normal = EVERY_BF16[np.float32(2.0**-100) <= EVERY_BF16]
        np.testing.assert_array_equal(
            analysis.exponent_by_log2(normal, qmax),
            analysis.shared_exponent(normal, fmt, qmax, "ceil"),
        )
    above = np.nextafter(np.float32(448 * 2.0**20), np.float32(np.inf)).reshape(1)
    assert analysis.exponent_by_log2(above, 448.0) == 20
    assert analysis.shared_exponent(above, E4M3FN, 448.0, "ceil") == 21


@pytest.mark.parametrize("rule", sorted(RULES))
def test_quantize_by_the_rules_own_scales(rule: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((50, 512)) * np.ldexp(1.0, rng.integers(-20, 20, (50, 1)))).astype(
        np.float32
    )
    codes, scale_codes = quantize(x, rule)
    np.testing.assert_array_equal(analysis.quantize_by(x, scale_codes, rule), codes)
    np.testing.assert_array_equal(
        analysis.round_trip(x, rule, scale_codes), analysis.round_trip(x, rule)
    )


# Bounds


@pytest.mark.parametrize("fmt", [*ELEMENTS, BF16], ids=lambda f: f.name)
def test_element_bound_holds_for_every_number_and_is_reached(fmt: FloatFormat) -> None:
    relative, absolute = analysis.element_bound(fmt)
    x = every_fp32_of_an_octave() if fmt is BF16 else EVERY_BF16[fmt.max_value >= EVERY_BF16]
    exact = x.astype(np.float64)
    error = np.abs(decode(encode(x, fmt), fmt) - exact)
    assert (error <= np.maximum(relative * exact, absolute)).all()
    assert (error / exact)[error > absolute].max() == relative
    if fmt is not BF16:
        assert error[exact < absolute * 2].max() == absolute


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("fmt", "qmax"), [(E4M3FN, 448), (E4M3FNUZ, 224), (E4M3FNUZ, 240), (E2M1, 6)]
)
def test_scaled_range_of_every_amax(fmt: FloatFormat, qmax: int, rounding: str) -> None:
    low, high = analysis.scaled_range(fmt, qmax, rounding)
    wide = EVERY_BF16.astype(np.float64)
    scaled = np.ldexp(wide, -analysis.shared_exponent(wide, fmt, qmax, rounding))
    assert (scaled >= low).all() and (scaled <= high).all()
    if rounding in ("ceil", "nearest"):
        assert (scaled > low).all()
    if rounding in ("floor", "even", "nearest"):
        assert (scaled < high).all()
    assert scaled.min() < low * (1 + 2.0**-6) and scaled.max() > high * (1 - 2.0**-6)


def worst_in_group(amax: np.ndarray, rule: str, scale_codes: np.ndarray) -> float:
    """The largest error / amax over all bf16 numbers from amax / 4096 to amax."""
    group = RULES[rule].group
    worst = 0.0
    for a, code in zip(amax, scale_codes, strict=True):
        last = int(np.float32(a).view(np.uint32)) >> 16
        x = decode(np.arange(max(last - 12 * 128, 1), last + 1, dtype=np.uint16), "bf16")
        rows = np.full(-(-x.size // group) * group, a, np.float32)
        rows[: x.size] = x
        codes = np.full(rows.size // group, code, np.uint8)
        error = np.abs(analysis.round_trip(rows, rule, codes).astype(np.float64) - rows)
        worst = max(worst, float(error.max()) / float(a))
    return worst


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", POWER_RULES)
def test_group_bound_of_power_of_two_scales(rule: str, rounding: str) -> None:
    """Every bf16 amax of an octave with every bf16 element; other octaves only shift exponents."""
    scale_codes = analysis.encode_scale_by(OCTAVE, rule, rounding=rounding)
    worst = worst_in_group(OCTAVE, rule, scale_codes)
    bound = analysis.group_bound(rule, rounding=rounding)
    assert worst <= bound
    assert worst > bound * 0.94  # bf16 does not come closer to some ends of the octave
    if rounding == "ceil":
        assert worst == bound


@pytest.mark.parametrize("rule", POWER_RULES)
def test_group_bound_for_the_largest_element_of_every_amax(rule: str) -> None:
    group, bound = RULES[rule].group, analysis.group_bound(rule)
    amax = EVERY_BF16[(np.float32(RULES[rule].floor) <= EVERY_BF16) & (EVERY_BF16 <= 2.0**127)]
    rows = np.repeat(amax[:, None], group, axis=1)
    error = np.abs(analysis.round_trip(rows, rule)[:, 0].astype(np.float64) - amax)
    assert (error <= bound * amax).all()


def test_group_bound_of_a_rounded_scale() -> None:
    """Every bf16 amax whose scale is a normal E4M3 number, with every bf16 element."""
    amax = EVERY_BF16[(EVERY_BF16 >= 6 * 2.0**-6) & (EVERY_BF16 <= 6 * 448)]
    worst = worst_in_group(amax, "N2/16", encode_scale(amax, "N2/16"))
    bound = analysis.group_bound("N2/16")
    assert 0.98 * bound < worst <= bound


def test_the_product_with_a_sixth_never_chooses_another_scale() -> None:
    """For a bf16 amax, E4M3(fp32(amax * fp32(1/6))) is amax / 6 rounded once, in fractions."""
    amax = EVERY_BF16[(EVERY_BF16 >= 6 * 2.0**-9) & (EVERY_BF16 <= 6 * 448)]
    values = [Fraction(float(v)) for v in decode(np.arange(0x7F, dtype=np.uint8), "e4m3fn")]
    for a, code in zip(amax, encode_scale(amax, "N2/16").tolist(), strict=True):
        exact = Fraction(float(a)) / 6
        near = [c for c in (code - 1, code, code + 1) if 0 <= c < 0x7F]
        best = min(near, key=lambda c: (abs(values[c] - exact), c % 2))
        assert best == code


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("fmt", "qmax"), [(E4M3FN, 448), (E4M3FNUZ, 240), (E4M3FNUZ, 224), (E2M1, 6)]
)
def test_clip_probability_over_an_even_octave(fmt: FloatFormat, qmax: int, rounding: str) -> None:
    amax = np.exp2((np.arange(200_000) + 0.5) / 200_000)
    scaled = np.ldexp(amax, -analysis.shared_exponent(amax.astype(np.float32), fmt, qmax, rounding))
    measured = (scaled > fmt.max_value).mean()
    # Not bytes: a rate measured on samples beside the predicted one.
    assert measured == pytest.approx(analysis.clip_probability(fmt, qmax, rounding), abs=2e-5)


@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda f: f.name)
def test_double_rounding_rate_over_an_octave(fmt: FloatFormat) -> None:
    x = every_fp32_of_an_octave()
    changed = encode(round_bf16(x), fmt) != encode(x, fmt)
    # Not bytes: a measured rate beside the predicted one.
    assert changed.mean() == pytest.approx(analysis.double_rounding_rate(fmt), rel=1e-4)


@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda f: f.name)
@pytest.mark.parametrize("ulps", [1, 3])
def test_code_change_rate_over_an_octave(fmt: FloatFormat, ulps: int) -> None:
    x = every_fp32_of_an_octave()
    moved = (x.view(np.uint32) + np.uint32(ulps)).view(np.float32)
    before, after = round_bf16(x), round_bf16(moved)
    steps = (before.view(np.uint16) != after.view(np.uint16)).mean()
    assert steps == analysis.bf16_step_rate(ulps)
    changed = (encode(before, fmt) != encode(after, fmt)).mean()
    assert changed == analysis.code_change_rate(ulps, fmt)


@pytest.mark.parametrize("order", ["tree", "running"])
def test_sum_bound_holds_for_random_and_for_adverse_terms(order: str) -> None:
    function = {"tree": tree_sum, "running": analysis.running_sum}[order]
    rng = np.random.default_rng(6)
    adverse = np.full((128, 1), 2.0**-24 * 0.9999, np.float32)
    adverse[0] = 1
    random = [(rng.random((128, 500)) ** power).astype(np.float32) for power in (1, 8)]
    for terms in (adverse, *random):
        for count in (2, 8, 128):
            part = terms[:count]
            exact = part.astype(np.float64).sum(0)
            relative = np.abs(function(part, 0) - exact) / exact
            assert relative.max() <= analysis.sum_bound(count, order) * (1 + 1e-7)
    if order == "running":  # every small term is lost
        exact = adverse.astype(np.float64).sum()
        lost = abs(function(adverse, 0).item() - exact) / exact
        assert lost > 0.99 * analysis.sum_bound(128, "running")


def test_exp_by_exp2_stays_below_its_bound() -> None:
    x = np.arange(0x80000000, 0xC2AE0000, 1009, dtype=np.uint32).view(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(analysis.exp_by_exp2(x) - exact) / exact
    bound = analysis.exp_by_exp2_bound(x)
    assert (error <= bound).all()
    assert (error / bound).max() > 0.9


# Pooling


def test_pool_is_what_the_reference_pools() -> None:
    rng = np.random.default_rng(7)
    kv_score = rng.standard_normal((64, 1024)).astype(np.float32)
    kv_score[:, 512:] *= 5
    out = np.zeros((64, 512), ml_dtypes.bfloat16)
    weight, at = np.ones(512, np.float32), np.arange(64)
    requests = np.zeros(64, np.int32)
    ring = np.zeros((1, 64, 1024), np.float32)
    pool_ring_latent(
        kv_score, at, ring, at, np.int32([0, 64]), requests, weight, 1e-6, out, compress_ratio=2
    )
    pairs = kv_score.reshape(32, 2, 1024)
    pooled = analysis.pool(pairs[..., :512], pairs[..., 512:])
    wanted = round_bf16(rms_norm(pooled, weight, 1e-6))
    np.testing.assert_array_equal(out[1::2].view(np.uint16), wanted.view(np.uint16))
    exact = analysis.pool_exact(pairs[..., :512], pairs[..., 512:])
    assert analysis.sqnr(exact, pooled).item() > 140


def test_parts_of_the_pool_are_exchanged() -> None:
    rng = np.random.default_rng(8)
    kv = rng.standard_normal((4, 128, 64)).astype(np.float32)
    score = (8 * rng.standard_normal((4, 128, 64))).astype(np.float32)
    plain = analysis.pool(kv, score)
    assert (analysis.pool(kv, score, exp=exp32) == plain).all()
    assert (analysis.pool(kv, score, exp=analysis.exp_by_exp2) != plain).any()
    assert (analysis.pool(kv, score, add=analysis.running_sum) != plain).any()


def test_norm_by_one_rounding() -> None:
    rows = np.random.default_rng(9).standard_normal((64, 512)).astype(np.float32)
    weight = np.ones(512, ml_dtypes.bfloat16)
    exact = rows / np.sqrt(np.square(rows.astype(np.float64)).mean(-1, keepdims=True) + 1e-6)
    error = [
        analysis.error_in_ulp(exact, analysis.rms_norm_by_rsqrt(rows, weight, 1e-6, ulps)).mean()
        for ulps in (0, 2)
    ]
    assert error[0] < analysis.error_in_ulp(exact, rms_norm(rows, weight, 1e-6)).mean() + 0.05
    assert error[1] > error[0] + 1


# Bad input


@pytest.mark.parametrize(
    "call",
    [
        lambda: analysis.relative_error(np.ones(2), np.ones(3)),
        lambda: analysis.sqnr(np.ones(2), np.ones(3)),
        lambda: analysis.ulp_distance(np.ones(2), np.ones(2)),
        lambda: analysis.ulp_distance(np.float32([1]), np.float32([np.nan])),
        lambda: analysis.ulp_distance(np.ones(2, np.float32), np.ones(3, np.float32)),
        lambda: analysis.error_in_ulp(np.ones(1), np.ones(1), SCALARS["ue8m0"]),
        lambda: analysis.bias_test(np.ones(1)),
        lambda: analysis.bias_test(np.float64([1, np.inf])),
        lambda: analysis.bias_test(np.ones(3), 1.0),
        lambda: analysis.rate_interval(3, 2),
        lambda: analysis.shared_exponent(np.zeros(1), "e2m1", 6, "ceil"),
        lambda: analysis.shared_exponent(
            np.ones(1),
            "e2m1",
            6,
            "up",  # type: ignore[arg-type]  # refused
        ),
        lambda: analysis.encode_scale_by(np.ones(1, np.float32), "N2/16"),
        lambda: analysis.quantize_by(np.ones(64, np.float32), np.uint8([127]), "M1/32"),
        lambda: analysis.element_bound("ue8m0"),
        lambda: analysis.scaled_range("e2m1", 6, "up"),  # type: ignore[arg-type]  # refused
        lambda: analysis.group_bound("N2/16", rounding="floor"),
        lambda: analysis.double_rounding_rate("bf16"),
        lambda: analysis.sum_bound(3, "tree"),
        lambda: analysis.sum_bound(4, "pairwise"),
    ],
)
def test_bad_arguments_raise(call) -> None:
    with pytest.raises(ArgumentError, match=r"got .* \(SPEC [0-9.]+\)"):
        call()


def test_the_oracle_does_not_need_scipy() -> None:
    code = "import sys, dsv4num.reference, dsv4num.cli; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_as_executed(path: Path) -> None:
    """Every cell ran, in order and without an error, and nothing tells on which machine."""
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(place in text for place in ("/home/", "/tmp/", "/work/", "site-packages"))


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


def test_the_figures_of_the_documents_are_those_of_the_notebooks() -> None:
    assert figures.main(["--check"]) == 0


def test_a_figure_that_is_out_of_date_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "records.png").write_bytes(b"another picture")
    assert figures.main(["--check"]) == 1
    assert "records.png is not the figure of the notebook" in capsys.readouterr().out
    assert figures.main([]) == 0
    assert (tmp_path / "records.png").read_bytes().startswith(b"\x89PNG")
    assert figures.main(["--check"]) == 0
