"""`reference.scalar` against the slow oracle, exhaustively, and ml_dtypes where it agrees."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow

from dsv4num import ArgumentError
from dsv4num.reference import decode, encode, pack, unpack

FORMATS = ("e4m3fn", "e4m3fnuz", "e2m1", "ue8m0")
SIGNED = ("e4m3fn", "e4m3fnuz", "e2m1")
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)


def fp32(bits: list[int]) -> np.ndarray:
    """fp32 values of bit patterns."""
    return np.array(bits, np.uint32).view(np.float32)


def around(x: Fraction, ulps: int = 2) -> list[int]:
    """The bit patterns of the fp32 number x > 0 and of its neighbours."""
    bits = slow.fp32_bits(x)
    return [bits + step for step in range(-ulps, ulps + 1) if bits + step >= 0]


def boundaries(fmt: str) -> list[Fraction]:
    """Where the code of a magnitude changes or could: values and the points half way between."""
    values = slow.positive_values(fmt)
    if fmt == "ue8m0":
        return list(values)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    overflow = values[-1] + (values[-1] - values[-2]) / 2
    return sorted({*values, *middles, overflow} - {Fraction(0)})


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_bf16_pattern(fmt: str) -> None:
    want = [slow.encode(slow.bf16_value(bits), fmt) for bits in range(1 << 16)]
    got = encode(ALL_BF16.view(ml_dtypes.bfloat16), fmt)
    assert got.dtype == np.uint8
    assert np.flatnonzero(got != np.array(want)).tolist() == []
    widened = (ALL_BF16.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(encode(widened, fmt), got)


@pytest.mark.parametrize("fmt", FORMATS)
def test_fp32_around_every_boundary(fmt: str) -> None:
    patterns = [bits for x in boundaries(fmt) for bits in around(x)]
    patterns += [0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000]
    patterns += [0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    patterns += [bits | 0x80000000 for bits in patterns]
    want = [slow.encode(slow.fp32_value(bits), fmt) for bits in patterns]
    assert encode(fp32(patterns), fmt).tolist() == want


@pytest.mark.parametrize("fmt", SIGNED)
def test_slow_oracle_search_equals_its_walk(fmt: str) -> None:
    """The second oracle finds codes by bisection; looking at every code gives the same."""
    for x in [*boundaries(fmt), Fraction(0), Fraction(1, 3), Fraction(10**9), slow.INF]:
        for number in (x, slow.multiply(x, Fraction(-1))):
            assert slow.encode(number, fmt) == slow.encode_walking(number, fmt)
    rng = np.random.default_rng(1)
    for bits in rng.integers(0, 1 << 16, 300).tolist():
        number = slow.bf16_value(bits)
        assert slow.encode(number, fmt) == slow.encode_walking(number, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_random_fp32(fmt: str) -> None:
    patterns = np.random.default_rng(2).integers(0, 1 << 32, 4000, dtype=np.uint32)
    near = np.random.default_rng(3).normal(0, 50, 4000).astype(np.float32).view(np.uint32)
    both = [*patterns.tolist(), *near.tolist()]
    want = [slow.encode(slow.fp32_value(bits), fmt) for bits in both]
    assert encode(fp32(both), fmt).tolist() == want


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_every_code(fmt: str) -> None:
    codes = np.arange(1 << slow.WIDTHS[fmt], dtype=np.uint8)
    got = decode(codes, fmt)
    assert got.dtype == np.float32
    want = [slow.fp32_bits(slow.value(code, fmt)) for code in codes.tolist()]
    assert [hex(b) for b in got.view(np.uint32).tolist()] == [hex(b) for b in want]


def test_decode_special_codes() -> None:
    def bits(codes: list[int], fmt: str) -> list[int]:
        return decode(np.uint8(codes), fmt).view(np.uint32).tolist()

    assert bits([0x7F, 0xFF, 0x80, 0x00], "e4m3fn") == [0x7FC00000, 0x7FC00000, 0x80000000, 0]
    assert bits([0x80, 0x7F, 0xFF, 0x00], "e4m3fnuz") == [0x7FC00000, 0x43700000, 0xC3700000, 0]
    assert bits([0x0, 0x8, 0x7, 0xF], "e2m1") == [0, 0x80000000, 0x40C00000, 0xC0C00000]
    assert bits([0, 1, 254, 255], "ue8m0") == [0x00400000, 0x00800000, 0x7F000000, 0x7FC00000]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_survives_decode_and_encode(fmt: str) -> None:
    codes = np.arange(1 << slow.WIDTHS[fmt], dtype=np.uint8)
    want = codes.copy()
    if fmt == "e4m3fn":
        want[0xFF] = 0x7F
    assert encode(decode(codes, fmt), fmt).tolist() == want.tolist()


def test_bf16_decode_keeps_every_bit() -> None:
    got = decode(ALL_BF16, "bf16").view(np.uint32)
    assert np.array_equal(got, ALL_BF16.astype(np.uint32) << 16)


def test_bf16_encode_of_bf16_keeps_all_but_nans() -> None:
    got = encode(ALL_BF16.view(ml_dtypes.bfloat16), "bf16")
    assert got.dtype == np.uint16
    nan = (ALL_BF16 & 0x7FFF) > 0x7F80
    assert np.array_equal(got[~nan], ALL_BF16[~nan])
    assert set(got[nan].tolist()) == {0x7FFF}
    assert int(nan.sum()) == 254


@pytest.mark.parametrize("lower", [0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_encode_around_every_tie(lower: int) -> None:
    step = 1 if lower == 0x8000 else 5
    uppers = [*range(0, 1 << 16, step), 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x007F, 0x0000]
    patterns = [upper << 16 | lower for upper in uppers]
    want = [slow.round_bf16(slow.fp32_value(bits)) for bits in patterns]
    assert np.flatnonzero(encode(fp32(patterns), "bf16") != np.array(want)).tolist() == []


def test_bf16_encode_examples() -> None:
    x = fp32([0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x80000001, 0xFFC00001])
    want = [0x3F80, 0x3F82, 0x7F7F, 0x7F80, 0xFF80, 0x8000, 0x7FFF]
    assert encode(x, "bf16").tolist() == want


def test_ue8m0_rounds_up() -> None:
    x = [0.0, -0.0, math.ldexp(1, -149), math.ldexp(1, -127), math.ldexp(1, -126), 1.0, 1.25, 3.0]
    assert encode(np.float32(x), "ue8m0").tolist() == [0, 0, 0, 0, 1, 127, 128, 129]
    past = fp32(
        [0x00400001, 0x3F800001, 0x7F000000, 0x7F000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    )
    assert encode(past, "ue8m0").tolist() == [1, 128, 254, 254, 254, 255, 255]
    assert encode(fp32([0x80000001, 0xBF800000, 0x7FC00000]), "ue8m0").tolist() == [255] * 3


# --- ml_dtypes: where it means the same, and where it must not be believed ------------


def test_ml_dtypes_decodes_the_same_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for fmt, dtype in (
        ("e4m3fn", ml_dtypes.float8_e4m3fn),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        ("ue8m0", ml_dtypes.float8_e8m0fnu),
    ):
        theirs, ours = codes.view(dtype).astype(np.float32), decode(codes, fmt)
        nan = np.isnan(theirs)
        assert np.array_equal(nan, np.isnan(ours))
        assert np.array_equal(theirs[~nan].view(np.uint32), ours[~nan].view(np.uint32))
    nibbles = np.arange(16, dtype=np.uint8)
    theirs = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(theirs.view(np.uint32), decode(nibbles, "e2m1").view(np.uint32))


@pytest.mark.parametrize(
    ("fmt", "dtype", "largest"),
    [
        ("e4m3fn", ml_dtypes.float8_e4m3fn, 464.0),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 247.9),
        ("e2m1", ml_dtypes.float4_e2m1fn, np.inf),
    ],
)
def test_ml_dtypes_encodes_the_same_below_overflow(fmt: str, dtype: type, largest: float) -> None:
    x = (ALL_BF16.astype(np.uint32) << 16).view(np.float32)
    odd = np.random.default_rng(4).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.random.default_rng(5).normal(0, 8, 200_000).astype(np.float32)
    both = np.concatenate([x, odd, near])
    both = both[np.abs(both) <= np.float32(largest)]
    assert np.array_equal(encode(both, fmt), both.astype(dtype).view(np.uint8))


def test_ml_dtypes_rounds_to_bf16_the_same() -> None:
    bits = np.random.default_rng(6).integers(0, 1 << 32, 500_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(encode(x, "bf16"), x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize(
    ("fmt", "dtype", "x", "ours", "theirs"),
    [
        ("e4m3fn", ml_dtypes.float8_e4m3fn, 465.0, 0x7E, 0x7F),
        ("e4m3fn", ml_dtypes.float8_e4m3fn, -1e6, 0xFE, 0xFF),
        ("e4m3fn", ml_dtypes.float8_e4m3fn, np.inf, 0x7E, 0x7F),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 248.0, 0x7F, 0x80),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 448.0, 0x7F, 0x80),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, -np.inf, 0xFF, 0x80),
        ("e2m1", ml_dtypes.float4_e2m1fn, np.nan, 0x7, 0x8),
        ("ue8m0", ml_dtypes.float8_e8m0fnu, 1.25, 128, 127),
        ("ue8m0", ml_dtypes.float8_e8m0fnu, 0.0, 0, 255),
        ("ue8m0", ml_dtypes.float8_e8m0fnu, 2.5, 129, 128),
    ],
)
def test_ml_dtypes_differs(fmt: str, dtype: type, x: float, ours: int, theirs: int) -> None:
    values = np.float32([x])
    with np.errstate(invalid="ignore"):
        assert values.astype(dtype).view(np.uint8).tolist() == [theirs]
    assert encode(values, fmt).tolist() == [ours]


# --- packing, shapes, errors ----------------------------------------------------------


def test_pack_puts_the_even_element_low() -> None:
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    codes = np.stack([low.ravel(), high.ravel()], axis=-1)
    packed = pack(codes)
    assert packed.shape == (256, 1)
    assert packed[:, 0].tolist() == list(range(256))
    assert np.array_equal(unpack(packed), codes)
    assert pack(np.uint8([1, 2, 3, 4])).tobytes().hex() == "2143"
    assert pack(np.zeros((3, 0), np.uint8)).shape == (3, 0)


def test_shapes_and_strides_are_kept() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert np.array_equal(encode(x[:, ::2, ::-1], "e4m3fn"), encode(x, "e4m3fn")[:, ::2, ::-1])
    assert encode(np.zeros((0, 5), np.float32), "e2m1").shape == (0, 5)
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(decode(codes.T, "e2m1"), decode(codes, "e2m1").T)
    assert encode(np.array(3.0, np.float32), "e2m1").shape == ()


@pytest.mark.parametrize(
    ("call", "name", "given"),
    [
        (lambda: encode(np.float64([1]), "e4m3fn"), "x", "float64"),
        (lambda: encode(np.float16([1]), "bf16"), "x", "float16"),
        (lambda: encode([1.0], "e4m3fn"), "x", "list"),
        (lambda: encode(np.float32([1]), "e5m2"), "fmt", "'e5m2'"),
        (lambda: encode(np.float32([1]), None), "fmt", "None"),
        (lambda: decode(np.int8([1]), "e4m3fn"), "codes", "int8"),
        (lambda: decode(np.uint8([1]), "bf16"), "codes", "uint8"),
        (lambda: decode(np.uint16([1]), "ue8m0"), "codes", "uint16"),
        (lambda: decode(np.uint8([16]), "e2m1"), "codes", "16"),
        (lambda: decode(np.uint8([1]), "e4m3"), "fmt", "'e4m3'"),
        (lambda: pack(np.uint8([1, 2, 3])), "codes", "[3]"),
        (lambda: pack(np.uint8([1, 16])), "codes", "16"),
        (lambda: pack(np.int64([1, 2])), "codes", "int64"),
        (lambda: pack(np.array(1, np.uint8)), "codes", "[]"),
        (lambda: unpack(np.int8([1])), "packed", "int8"),
        (lambda: unpack([1]), "packed", "list"),
    ],
)
def test_errors(call: object, name: str, given: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()  # type: ignore[operator]  # refused
    text = str(caught.value)
    assert text.startswith(f"{name}: got ") and given in text
    assert "; allowed: " in text and "(SPEC 2" in text
    assert isinstance(caught.value, ValueError)
