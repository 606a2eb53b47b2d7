"""`reference.group` against the slow oracle: every scale choice, every code pair, and laws."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4num import RULES, ArgumentError
from dsv4num.reference import dequantize, encode_scale, quantize

P1 = ("P1/64", "P1/64-fnuz")
ALL_RULES = tuple(slow.RULES)
SCALE_RULES = ("P1/64", "P1/64-fnuz", "M1/32", "N2/16")  # group size does not matter to a scale
LAW = settings(max_examples=60, deadline=None, derandomize=True)


def fp32(bits: list[int]) -> np.ndarray:
    """fp32 values of bit patterns."""
    return np.array(bits, np.uint32).view(np.float32)


def bits_of(x: np.ndarray) -> list[int]:
    """fp32 bit patterns as integers."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32).ravel().tolist()


def slow_quantize(x: np.ndarray, rule: str) -> tuple[list[int], list[int]]:
    """Codes and scale codes of one fp32 row by the slow oracle."""
    group = slow.RULES[rule][1]
    numbers = [slow.fp32_value(b) for b in bits_of(x)]
    codes, scales = [], []
    for first in range(0, len(numbers), group):
        part, scale = slow.quantize_group(numbers[first : first + group], rule)
        codes += part
        scales.append(scale)
    return codes, scales


def test_the_rules_are_those_of_the_contract() -> None:
    assert set(RULES) == set(slow.RULES)
    for name, (element, group, qmax) in slow.RULES.items():
        rule = RULES[name]
        assert (rule.element.name, rule.group, rule.qmax) == (element, group, qmax)
        assert rule.scale.name == ("e4m3fn" if name == "N2/16" else "ue8m0")
        floors = {"P": slow.P1_FLOOR, "M": slow.M1_FLOOR, "N": slow.two(-9)}
        assert Fraction(rule.floor) == floors[name[0]]
        assert rule.floor_place == ("scale" if name == "N2/16" else "amax")
    assert Fraction(RULES["N2/16"].amax_factor) == slow.ONE_SIXTH
    assert np.float32(RULES["P1/64"].floor).view(np.uint32) == 0x38D1B717


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scale_of_every_bf16_amax(rule: str) -> None:
    codes = range(0x7F81)
    got = encode_scale(fp32([code << 16 for code in codes]), rule)
    want = [slow.scale_code(slow.bf16_value(code), rule) for code in codes]
    assert got.dtype == np.uint8
    assert np.flatnonzero(got != np.array(want)).tolist() == []


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scale_around_every_octave_border(rule: str) -> None:
    qmax = slow.RULES[rule][2]
    patterns = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x38D1B716, 0x38D1B717, 0x38D1B718]
    for exponent in range(-151, 126):
        border = slow.round_fp32(qmax * slow.two(exponent))
        power = slow.round_fp32(slow.two(exponent))
        for x in (border, power):
            if x != 0 and not slow.is_inf(x):
                bits = slow.fp32_bits(x)
                patterns += [b for b in range(bits - 2, bits + 3) if 0 <= b <= 0x7F800000]
    got = encode_scale(fp32(patterns), rule)
    want = [slow.scale_code(slow.fp32_value(b), rule) for b in patterns]
    assert [hex(patterns[i]) for i in np.flatnonzero(got != np.array(want))] == []


def test_nvfp4_scale_around_every_tie() -> None:
    values = slow.positive_values("e4m3fn")
    patterns = []
    for low, high in itertools.pairwise(values):
        for x in ((low + high) / 2 * 6, high * 6):
            bits = slow.fp32_bits(slow.round_fp32(x))
            patterns += range(bits - 5, bits + 6)
    want = [slow.scale_code(slow.fp32_value(b), "N2/16") for b in patterns]
    assert encode_scale(fp32(patterns), "N2/16").tolist() == want


def test_nvfp4_scale_is_a_product_not_a_quotient() -> None:
    """amax * fp32(1/6) and amax / 6 differ next to ties of E4M3; the product is the rule."""
    amax = fp32([0x40E3FFFF, 0x3DE3FFFF])
    assert encode_scale(amax, "N2/16").tolist() == [0x3A, 10]
    for bits, quotient_code in ((0x40E3FFFF, 0x39), (0x3DE3FFFF, 9)):
        quotient = slow.round_fp32(slow.fp32_value(bits) / 6)
        assert slow.encode(quotient, "e4m3fn") == quotient_code


@pytest.mark.parametrize("rule", ALL_RULES)
def test_zero_group(rule: str) -> None:
    want = {"P": 105, "M": 1, "N": 0x01}[rule[0]]
    if rule.endswith("fnuz"):
        want = 106  # half the largest element, so one octave more
    group = slow.RULES[rule][1]
    codes, scales = quantize(np.zeros((2, 2 * group), np.float32), rule)
    assert scales.tolist() == [[want, want]] * 2
    assert not codes.any()
    codes, scales = quantize(np.full((1, group), -0.0, np.float32), rule)
    negative_zero = {"e4m3fn": 0x80, "e4m3fnuz": 0x00, "e2m1": 0x8}[slow.RULES[rule][0]]
    assert set(codes.ravel().tolist()) == {negative_zero} and scales.tolist() == [[want]]


@pytest.mark.parametrize(
    ("rule", "code", "finite", "plus_inf", "minus_inf"),
    [
        ("P1/64", 0xFF, 0x00, 0x7F, 0x7F),
        ("P1/64-fnuz", 0xFF, 0x00, 0x80, 0x80),
        ("M1/32", 0xFE, 0x0, 0x7, 0xF),
        ("N2/16", 0x7E, 0x0, 0x7, 0xF),
    ],
)
def test_infinite_amax(rule: str, code: int, finite: int, plus_inf: int, minus_inf: int) -> None:
    x = np.full(slow.RULES[rule][1], 2.0, np.float32)
    x[3], x[5] = np.inf, -np.inf
    codes, scales = quantize(x, rule)
    assert scales.tolist() == [code]
    assert (int(codes[3]), int(codes[5])) == (plus_inf, minus_inf)
    assert set(np.delete(codes, [3, 5]).tolist()) == {finite}
    assert (codes.tolist(), scales.tolist()) == slow_quantize(x, rule)


def test_infinite_amax_keeps_the_sign_of_finite_elements() -> None:
    x = np.full(64, -3.0, np.float32)
    x[0] = np.inf
    codes, _ = quantize(x, "P1/64")
    assert codes[1:].tolist() == [0x80] * 63
    assert quantize(x, "P1/64-fnuz")[0][1:].tolist() == [0x00] * 63


@pytest.mark.parametrize("rule", ALL_RULES)
def test_nan_elements(rule: str) -> None:
    element, group, _ = slow.RULES[rule]
    nan_code = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e2m1": 0x7}[element]
    x = np.linspace(-5, 7, group, dtype=np.float32)
    plain_codes, plain_scales = quantize(x, rule)
    x[1] = fp32([0xFFC00123])[0]
    x[2] = fp32([0x7F800001])[0]
    codes, scales = quantize(x, rule)
    assert scales.tolist() == plain_scales.tolist()
    assert codes[[1, 2]].tolist() == [nan_code, nan_code]
    assert np.delete(codes, [1, 2]).tolist() == np.delete(plain_codes, [1, 2]).tolist()
    everything_nan = np.full(group, np.nan, np.float32)
    codes, scales = quantize(everything_nan, rule)
    assert scales.tolist() == quantize(np.zeros(group, np.float32), rule)[1].tolist()
    assert set(codes.tolist()) == {nan_code}


@pytest.mark.parametrize("rule", ALL_RULES)
def test_quantize_against_slow_oracle(rule: str) -> None:
    group = slow.RULES[rule][1]
    rng = np.random.default_rng(7)
    rows = [
        rng.normal(0, 1, 4 * group).astype(np.float32),
        np.exp2(rng.uniform(-40, 40, 4 * group)).astype(np.float32),
        rng.integers(0, 1 << 32, 2 * group, dtype=np.uint32).view(np.float32),
        np.exp2(rng.uniform(-149, -100, 2 * group)).astype(np.float32),
        (rng.integers(-14, 15, 8 * group) / 4).astype(np.float32),
        rng.uniform(-1, 1, 2 * group).astype(np.float32) * np.float32(3e38),
    ]
    for x in rows:
        codes, scales = quantize(x, rule)
        assert codes.dtype == scales.dtype == np.uint8
        assert (codes.tolist(), scales.tolist()) == slow_quantize(x, rule)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_quantize_takes_bf16_and_any_shape(rule: str) -> None:
    group = slow.RULES[rule][1]
    bits = np.random.default_rng(8).integers(0, 1 << 16, (3, 2, 2 * group), dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16)
    codes, scales = quantize(x, rule)
    assert codes.shape == x.shape and scales.shape == (3, 2, 2)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    for i in range(3):
        for j in range(2):
            want = slow_quantize(wide[i, j], rule)
            assert (codes[i, j].tolist(), scales[i, j].tolist()) == want
    swapped = np.asfortranarray(wide)
    assert np.array_equal(quantize(swapped, rule)[0], codes)
    assert np.array_equal(swapped.view(np.uint32), wide.view(np.uint32))
    empty_codes, empty_scales = quantize(np.zeros((0, group), np.float32), rule)
    assert empty_codes.shape == (0, group) and empty_scales.shape == (0, 1)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_dequantize_every_code_with_every_scale(rule: str) -> None:
    element, group, _ = slow.RULES[rule]
    width = 1 << slow.WIDTHS[element]
    codes = np.resize(np.arange(width, dtype=np.uint8), max(width, group))
    rows = np.repeat(codes[None], 256, axis=0)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], len(codes) // group, axis=1)
    got = dequantize(rows, scales, rule)
    assert got.dtype == np.float32
    for scale in range(256):
        number = slow.scale_value(scale, rule)
        want = [slow.dequantize(code, number, element) for code in codes.tolist()]
        ours = got[scale].view(np.uint32).tolist()
        for code, (a, b) in enumerate(zip(ours, want, strict=True)):
            if slow.is_nan(b):
                assert a & 0x7FFFFFFF > 0x7F800000, (scale, code)
            else:
                assert a == slow.fp32_bits(b), (scale, code)


def test_dequantize_each_group_by_its_own_scale() -> None:
    for rule in ALL_RULES:
        group = slow.RULES[rule][1]
        one = {"e4m3fn": 0x38, "e4m3fnuz": 0x40, "e2m1": 2}[slow.RULES[rule][0]]
        scale_codes = [0x28, 0x38, 0x40] if rule == "N2/16" else [125, 127, 128]
        got = dequantize(np.full(3 * group, one, np.uint8), np.uint8(scale_codes), rule)
        assert got.tolist() == [0.25] * group + [1.0] * group + [2.0] * group


def test_division_is_not_a_product_with_the_reciprocal() -> None:
    """Scale 0x0F = 0.029296875, x = 0.03662109375 is a tie at 1.25: code 2; the product gives 3."""
    x = np.zeros(16, np.float32)
    x[0], x[1] = 0.029296875 * 6, 0.03662109375
    codes, scales = quantize(x, "N2/16")
    assert scales.tolist() == [0x0F]
    assert codes[:2].tolist() == [7, 2]
    scale = slow.value(0x0F, "e4m3fn")
    product = slow.round_fp32(Fraction(x[1].item()) * slow.round_fp32(1 / scale))
    assert slow.encode(product, "e2m1") == 3


def test_ties_that_a_reciprocal_would_move() -> None:
    """882 pairs of a positive E4M3 scale and a tie of E2M1; a reciprocal moves 42 of them."""
    middles = [Fraction(n, 4) for n in (1, 3, 5, 7, 10, 14, 20)]
    pairs = moved = 0
    for code in range(1, 0x7F):
        scale = slow.value(code, "e4m3fn")
        reciprocal = slow.round_fp32(1 / scale)
        x = np.zeros(16, np.float32)
        want = []
        for i, middle in enumerate(middles):
            tie = middle * scale
            assert slow.bf16_value(slow.round_bf16(tie)) == tie
            pairs += 1
            want.append([0, 2, 2, 4, 4, 6, 6][i])
            moved += slow.encode(slow.round_fp32(tie * reciprocal), "e2m1") != want[i]
            x[i] = float(tie)
        x[15] = float(6 * scale)
        codes, scales = quantize(x, "N2/16")
        assert scales.tolist() == [code]
        assert codes[:7].tolist() == want
    assert (pairs, moved) == (882, 42)


# --- laws -----------------------------------------------------------------------------

finite = st.floats(-(2.0**100), 2.0**100, width=32)
ordinary = st.floats(-1000, 1000, width=32)


def groups(rule: str, values: st.SearchStrategy[float] = finite) -> st.SearchStrategy[list[float]]:
    """One group of values."""
    size = slow.RULES[rule][1]
    few = st.lists(values, min_size=1, max_size=8)
    return few.map(lambda xs: [xs[i % len(xs)] for i in range(size)])


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_law_scale_is_monotone(rule: str) -> None:
    positive = st.floats(0, float(np.finfo(np.float32).max), width=32)

    @LAW
    @given(a=positive, b=positive)
    def law(a: float, b: float) -> None:
        codes = encode_scale(np.float32(sorted([a, b])), rule)
        assert codes[0] <= codes[1]

    law()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_law_codes_are_monotone_and_follow_the_slow_oracle(rule: str) -> None:
    @LAW
    @given(xs=groups(rule))
    def law(xs: list[float]) -> None:
        x = np.float32(sorted(xs))
        codes, scales = quantize(x, rule)
        values = dequantize(codes, scales, rule)
        assert bool((values[:-1] <= values[1:]).all())
        assert (codes.tolist(), scales.tolist()) == slow_quantize(x, rule)

    law()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_law_sign_symmetry(rule: str) -> None:
    element = slow.RULES[rule][0]
    sign = 0x8 if element == "e2m1" else 0x80

    @LAW
    @given(xs=groups(rule))
    def law(xs: list[float]) -> None:
        codes, scales = quantize(np.float32(xs), rule)
        mirrored, same = quantize(-np.float32(xs), rule)
        want = codes ^ sign
        if element == "e4m3fnuz":
            want = np.where(codes == 0, 0, want)
        assert mirrored.tolist() == want.tolist() and same.tolist() == scales.tolist()

    law()


@pytest.mark.parametrize("rule", ["P1/64", "P1/32", "P1/64-fnuz", "M1/32"])
def test_law_values_survive_a_second_round(rule: str) -> None:
    """Power-of-two rules: what was read back quantizes to itself (NVFP4: its scale may change)."""

    @LAW
    @given(xs=groups(rule))
    def law(xs: list[float]) -> None:
        once = dequantize(*quantize(np.float32(xs), rule), rule)
        twice = dequantize(*quantize(once, rule), rule)
        assert bits_of(once) == bits_of(twice)

    law()


@pytest.mark.parametrize(("rule", "low"), [("P1/64", 105), ("P1/64-fnuz", 106), ("M1/32", 1)])
def test_law_a_power_of_two_moves_only_the_scale(rule: str, low: int) -> None:
    @LAW
    @given(xs=groups(rule, ordinary), shift=st.integers(-12, 30))
    def law(xs: list[float], shift: int) -> None:
        x = np.float32([round(v * 1024) / 1024 for v in xs])
        codes, scales = quantize(x, rule)
        moved_codes, moved_scales = quantize(x * np.float32(2.0**shift), rule)
        if scales[0] > low and int(scales[0]) + shift > low:
            assert moved_codes.tolist() == codes.tolist()
            assert int(moved_scales[0]) == int(scales[0]) + shift

    law()


@pytest.mark.parametrize("rule", (*P1, "M1/32"))
def test_law_the_scale_is_the_smallest_that_does_not_overflow(rule: str) -> None:
    qmax = slow.RULES[rule][2]

    @LAW
    @given(a=st.floats(float(np.float32(2e-4)), 2.0**120, width=32))
    def law(a: float) -> None:
        code = int(encode_scale(np.float32([a]), rule)[0])
        assert Fraction(a) <= qmax * slow.two(code - 127)
        assert Fraction(a) > qmax * slow.two(code - 128)

    law()


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name", "given_text"),
    [
        (lambda: quantize(np.float64(np.zeros((1, 64))), "P1/64"), "x", "float64"),
        (lambda: quantize([0.0] * 64, "P1/64"), "x", "list"),
        (lambda: quantize(np.zeros((1, 63), np.float32), "P1/64"), "x", "[1, 63]"),
        (lambda: quantize(np.array(1, np.float32), "M1/32"), "x", "[]"),
        (lambda: quantize(np.zeros((1, 64), np.float32), "P1"), "rule", "'P1'"),
        (lambda: encode_scale(np.float32([-1]), "P1/64"), "amax", "negative"),
        (lambda: encode_scale(np.float32([np.nan]), "M1/32"), "amax", "NaN"),
        (lambda: encode_scale(np.float64([1]), "N2/16"), "amax", "float64"),
        (lambda: encode_scale(np.float32([1]), 7), "rule", "7"),
        (
            lambda: dequantize(np.zeros(64, np.uint8), np.zeros(2, np.uint8), "P1/64"),
            "codes",
            "[64]",
        ),
        (
            lambda: dequantize(np.zeros(64, np.int8), np.zeros(1, np.uint8), "P1/64"),
            "codes",
            "int8",
        ),
        (lambda: dequantize(np.full(16, 16, np.uint8), np.uint8([1]), "N2/16"), "codes", "16"),
    ],
)
def test_errors(call: object, name: str, given_text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()  # type: ignore[operator]  # refused
    text = str(caught.value)
    assert text.startswith(f"{name}: got ") and given_text in text
    assert "; allowed: " in text and "(SPEC " in text
