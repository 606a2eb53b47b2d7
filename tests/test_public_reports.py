"""Figures of public bug reports (B..) and of known differences between projects (A..).

One test per report; every expected value is typed in. Reports about the compressor, RoPE tables and
index builders belong to the tests of those modules.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow

from dsv4num import ArgumentError, get_layout
from dsv4num.reference import (
    decode,
    decode_records,
    dequantize,
    dequantize_and_gather_k_cache,
    encode,
    encode_records,
    encode_scale,
    pack,
    quantize,
    quantize_and_insert_k_cache,
    unpack,
)

BF16 = ml_dtypes.bfloat16
INF, NAN = float("inf"), float("nan")


def f32(*values: float) -> np.ndarray:
    """fp32 values, rounded from float64."""
    return np.array(values, np.float64).astype(np.float32)


def from_bits(*bits: int) -> np.ndarray:
    """fp32 values of bit patterns."""
    return np.array(bits, np.uint32).view(np.float32)


def hexes(codes: np.ndarray) -> str:
    """Bytes as upper-case hex."""
    return codes.astype(np.uint8).tobytes().hex(" ").upper()


def tile(rule: str, *values: float) -> tuple[list[int], int]:
    """Codes of the given elements in a group padded with zeros, and its scale code.

    The slow oracle must say the same.
    """
    group = slow.RULES[rule][1]
    x = np.zeros(group, np.float32)
    x[: len(values)] = f32(*values)
    codes, scales = quantize(x, rule)
    numbers = [slow.fp32_value(b) for b in x.view(np.uint32).tolist()]
    assert slow.quantize_group(numbers, rule) == (codes.tolist(), int(scales[0]))
    return codes[: len(values)].tolist(), int(scales[0])


# --- UE8M0 scales ---------------------------------------------------------------------


def test_B01_scale_is_rounded_before_use() -> None:
    """The power of two that is stored is the one that the elements were divided by."""
    amax = (225.0, 300.0, 336.0, 448.0, 449.0)
    got = [tile("P1/64", a) for a in amax]
    assert [scale for _, scale in got] == [127, 127, 127, 127, 128]
    assert [codes[0] for codes, _ in got] == [0x76, 0x79, 0x7A, 0x7E, 0x76]
    assert dequantize(np.full(64, 0x79, np.uint8), np.uint8([127]), "P1/64")[0] == 288.0


def test_B02_floor_is_on_amax() -> None:
    """1e-4 bounds amax, not the scale; the two differ for quiet tiles."""
    next_up = np.nextafter(np.float32(0.02734375), np.float32(1)).item()
    amax = f32(0, 1e-5, 2e-3, 0.01, 0.02734375, next_up, 0.03)
    assert encode_scale(amax, "P1/64").tolist() == [105, 105, 110, 112, 113, 114, 114]
    assert tile("P1/64", 0.01, 2e-7) == ([0x7A, 0x03], 112)
    values = dequantize(np.resize(np.uint8([0x7A, 0x03]), 64), np.uint8([112]), "P1/64")
    assert values[0] == 0.009765625
    assert values[1] == 3 * math.ldexp(1, -24)


def test_B03_just_above_an_octave() -> None:
    """The next fp32 above 448 * 2**k needs the next scale, also where fp32 log2 cannot see it."""
    exponents = range(-14, 9)
    up = [np.nextafter(np.float32(math.ldexp(448, k)), np.float32(INF)).item() for k in exponents]
    assert encode_scale(f32(*up), "P1/64").tolist() == list(range(114, 137))
    assert np.float32(up[9]) == from_bits(0x41600001)[0]
    codes, scale = tile("P1/64", up[9])
    assert (codes, scale) == ([0x76], 123)
    at = [math.ldexp(448, k) for k in exponents]
    assert encode_scale(f32(*at), "P1/64").tolist() == list(range(113, 136))


def test_B06_a_scale_stored_as_fp32_is_a_power_of_two() -> None:
    """Amax 336: the same scale 1.0 in an fp32-scale record and in a UE8M0 record, and 320 back."""
    fp8 = encode_records(np.full((1, 128), 336, np.float32), "indexer_fp8")
    v4 = encode_records(np.full((1, 512), 336, np.float32), "v4")
    assert hexes(fp8[0, 128:]) == "00 00 80 3F" and fp8[0, 0] == 0x7A
    assert v4[0, 576] == 127 and v4[0, 0] == 0x7A
    assert decode_records(fp8, "indexer_fp8")[0, 0] == decode_records(v4, "v4")[0, 0] == 320.0
    many = np.geomspace(1e-6, 1e6, 97).astype(np.float32)[:, None] * np.ones(128, np.float32)
    words = encode_records(many, "indexer_fp8")[:, 128:].copy().view("<u4")
    assert not (words & 0x007FFFFF).any()


def test_B07_ceil_rule() -> None:
    """Of ceil, floor and even, the records use ceil."""
    got = [tile("M1/32", amax, 1.0) for amax in (6.0, 6.5, 7.0, 7.5, 8.0)]
    assert [scale for _, scale in got] == [127, 128, 128, 128, 128]
    assert [codes[1] for codes, _ in got] == [2, 1, 1, 1, 1]
    assert tile("P1/64", 500.0) == ([0x78], 128)
    assert 2 * decode(np.uint8([0x78]), "e4m3fn")[0] == 512.0


def test_B08_scale_exponent_is_rounded_up() -> None:
    """Neither truncation nor floor of log2."""
    got = encode(f32(0.25, 0.3, 0.5, 1, 3, 4), "ue8m0")
    assert got.tolist() == [125, 126, 126, 127, 129, 129]


def test_B09_mxfp4_floor() -> None:
    """6 * 2**-126 on amax: quiet blocks keep their resolution."""
    amax = f32(0, math.ldexp(1, -140), 1e-5, 0.00029945374, 6e-4)
    assert amax.view(np.uint32)[3] == 0x399D0000
    assert encode_scale(amax, "M1/32").tolist() == [1, 1, 108, 113, 114]
    codes, scale = tile("M1/32", 0.00029945374)
    assert (codes, scale) == ([6], 113)
    zero = encode_records(np.zeros((1, 128), np.float32), "indexer_mxfp4")[0].tobytes()
    assert zero == b"\0" * 64 + b"\1" * 4


def test_B10_codes_0_and_255() -> None:
    """2**-127 is an fp32 subnormal; 255 is NaN; else the code is the exponent field."""
    got = decode(np.arange(256, dtype=np.uint8), "ue8m0").view(np.uint32).tolist()
    assert got[0] == 0x00400000
    assert got[1:255] == [code << 23 for code in range(1, 255)]
    assert got[255] & 0x7FFFFFFF > 0x7F800000
    one = np.full(512, 0x38, np.uint8)
    scales = np.uint8([*range(15), 255])
    row = dequantize(one, scales, "P1/32").view(np.uint32)
    assert row[::32].tolist()[:15] == [0x00400000] + [code << 23 for code in range(1, 15)]
    assert row[480] & 0x7FFFFFFF > 0x7F800000
    record = np.concatenate([one, scales])[None]
    back = decode_records(record, "v41_mxfp8").view(np.uint16)[0, ::32].tolist()
    assert back == [0x0040] + [code << 7 for code in range(1, 15)] + [0x7FFF]


def test_B11_nan_is_a_code_not_a_value() -> None:
    """128.0 is a scale like any other."""
    got = decode(np.uint8([133, 134, 135, 254, 255]), "ue8m0")
    assert got[:4].tolist() == [64.0, 128.0, 256.0, 1.7014118346046923e38]
    assert np.isnan(got[4])


def test_B12_a_code_is_not_its_value() -> None:
    """Code 120 is 2**-7; codes and values convert both ways and are told apart by dtype."""
    codes = np.uint8([120, 127, 134])
    values = decode(codes, "ue8m0")
    assert values.tolist() == [0.0078125, 1.0, 128.0]
    assert 120.0 / values[0] == 15360.0
    assert encode(values, "ue8m0").tolist() == codes.tolist()
    with pytest.raises(ArgumentError):
        decode(codes.astype(np.float32), "ue8m0")


def test_B13_fp32_words_are_not_codes() -> None:
    """The four bytes of one fp32 scale, read as codes, are four absurd scales, or a NaN."""
    stored = f32(0.66964287).astype("<f4").view(np.uint8)
    assert hexes(stored) == "B7 6D 2B 3F"
    want = [math.ldexp(1, e) for e in (56, -18, -84, -64)]
    assert decode(stored, "ue8m0").tolist() == want
    assert np.isnan(decode(from_bits(0x3F80FF01).view(np.uint8), "ue8m0")).sum() == 1
    with pytest.raises(ArgumentError):
        dequantize(np.zeros(128, np.uint8), f32(1.0), "P1/128")


def test_B14_own_answers_for_ue8m0() -> None:
    """Zero, subnormals, values between powers, overflow, infinity, NaN, a negative value."""
    x = f32(0, 2.0**-149, 2.0**-128, 2.0**-127, 1.25, 1.5, 2.0**127, 1.5 * 2.0**127, INF, NAN, -1)
    got = encode(x, "ue8m0").tolist()
    assert got == [0, 0, 0, 0, 128, 128, 254, 254, 255, 255, 255]


# --- E4M3 -----------------------------------------------------------------------------


def test_B16_fnuz_has_no_negative_zero() -> None:
    """A negative value that rounds to zero is 0x00 in FNUZ: 0x80 would be its NaN."""
    x = f32(*(-(2.0**-e) for e in range(9, 14)), -1e-30, -0.0)
    assert hexes(encode(x, "e4m3fnuz")) == "82 81 00 00 00 00 00"
    assert hexes(encode(x, "e4m3fn")) == "81 80 80 80 80 80 80"
    one = np.uint8([0x38])
    assert (decode(one, "e4m3fn")[0], decode(one, "e4m3fnuz")[0]) == (1.0, 0.5)


def test_B17_dialect_belongs_to_the_layout() -> None:
    """An FNUZ page read as OCP is exactly twice too large; FNUZ scales to 224."""
    assert decode(np.uint8([0x7E]), "e4m3fn")[0] == 448.0
    assert decode(np.uint8([0x7E]), "e4m3fnuz")[0] == 224.0
    assert tile("P1/64-fnuz", 232.0) == ([0x76], 128)
    assert tile("P1/64", 232.0)[1] == 127
    assert dequantize(np.full(64, 0x76, np.uint8), np.uint8([128]), "P1/64-fnuz")[0] == 224.0
    cache = np.zeros((1, 1, 584), np.uint8)
    rows = np.linspace(1, 2, 512, dtype=np.float32)[None].astype(BF16)
    quantize_and_insert_k_cache(rows, cache, np.int64([0]), 1, layout="v4_fnuz")
    outs = {}
    for layout in ("v4_fnuz", "v4"):
        out = np.zeros((1, 1, 512), BF16)
        dequantize_and_gather_k_cache(
            out, cache, np.int32([1]), None, np.int32([[0]]), 1, 0, layout=layout
        )
        outs[layout] = out[0, 0].astype(np.float32)
    assert np.array_equal(outs["v4"][:448], 2 * outs["v4_fnuz"][:448])
    assert np.array_equal(outs["v4"][448:], rows[0, 448:].astype(np.float32))


def test_B18_fnuz_top_binades() -> None:
    """Nothing below 248 saturates, and halves go to the even code."""
    assert hexes(encode(f32(128, 224, 17), "e4m3fnuz")) == "78 7E 60"
    x = np.minimum(f32(112, 120, 128, 136, 144, 208, 224, 232, 240), np.float32(224))
    assert hexes(encode(x, "e4m3fnuz")) == "76 77 78 78 79 7D 7E 7E 7E"


def test_B19_bf16_first_or_fp32_direct() -> None:
    """quantize takes what it is given: the caller decides whether a bf16 step comes first."""
    x = f32(*(1.0625 + d for d in (-(2.0**-12), 0, 2.0**-12, 2.0**-9, 2.0**-7)))
    group = np.zeros(64, np.float32)
    group[:5], group[63] = x, 448.0
    direct, scales = quantize(group, "P1/64")
    assert scales.tolist() == [127]
    assert hexes(direct[:5]) == "38 38 39 39 39"
    first, scales = quantize(group.astype(BF16), "P1/64")
    assert scales.tolist() == [127]
    assert hexes(first[:5]) == "38 38 38 38 39"
    rounded = decode(encode(group, "bf16"), "bf16")
    assert hexes(quantize(rounded, "P1/64")[0][:5]) == "38 38 38 38 39"


def test_B21_no_double_rounding() -> None:
    """A value just above a midpoint goes up, whatever a half-precision detour would make of it."""
    x = f32(400.19958, 272.15656, 136.00208, 1.0625001)
    assert hexes(encode(x, "e4m3fn")) == "7D 79 71 39"
    for code in range(0x7E):
        middle = (slow.value(code, "e4m3fn") + slow.value(code + 1, "e4m3fn")) / 2
        bits = slow.fp32_bits(middle)
        around = from_bits(bits - 1, bits + 1)
        assert encode(around, "e4m3fn").tolist() == [code, code + 1]


def test_B22_carry_into_the_exponent() -> None:
    """Just below a power of two the significand overflows into the next exponent."""
    assert hexes(encode(f32(126.24, 17.0), "e4m3fn")) == "70 58"
    x = f32(*(math.ldexp(1.97, k) for k in range(-6, 8)))
    assert encode(x, "e4m3fn").tolist() == [(k + 8) << 3 for k in range(-6, 8)]


def test_B23_subnormals_and_nan_on_decode() -> None:
    """The formula for normal numbers is wrong for 18 of 256 words."""
    got = decode(np.uint8([0x01, 0x07, 0x00]), "e4m3fn")
    assert got.tolist() == [0.001953125, 0.013671875, 0.0]
    assert np.isnan(decode(np.uint8([0x7F, 0xFF]), "e4m3fn")).all()
    all_values = decode(np.arange(256, dtype=np.uint8), "e4m3fn")
    naive = [(8 + (c & 7)) * 2.0 ** (((c >> 3) & 15) - 10) * (-1) ** (c >> 7) for c in range(256)]
    assert (naive[0x7F], naive[0x01]) == (480.0, 0.0087890625)
    assert int((all_values != np.array(naive)).sum()) == 18


def test_B24_overflow_saturates() -> None:
    """464 and everything above it, infinity too, is 448; only NaN is NaN."""
    x = f32(448, 463.9, 464, 464.01, 480, 1e6, INF, NAN)
    assert hexes(encode(x, "e4m3fn")) == "7E 7E 7E 7E 7E 7E 7E 7F"
    assert hexes(encode(-x, "e4m3fn")) == "FE FE FE FE FE FE FE 7F"


def test_B25_check_points_of_an_integer_encoder() -> None:
    """Underflow tie, first subnormal, first normal, the top."""
    x = f32(2.0**-10, 3 * 2.0**-11, 2.0**-6, 447.9)
    assert hexes(encode(x, "e4m3fn")) == "00 01 08 7E"


def test_B26_infinity_saturates_in_both_dialects() -> None:
    """The report wants NaN for an FNUZ infinity; the contract (section 2) saturates it: 0x7F."""
    x = f32(INF, -INF, 1e30, -1e30, NAN)
    assert hexes(encode(x, "e4m3fn")) == "7E FE 7E FE 7F"
    assert hexes(encode(x, "e4m3fnuz")) == "7F FF 7F FF 80"
    assert hexes(encode(f32(465, 1000), "e4m3fn")) == "7E 7E"
    assert hexes(encode(f32(1000), "e4m3fnuz")) == "7F"


# --- FP4 ------------------------------------------------------------------------------

MIDPOINTS = (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)


def test_B27_midpoints_to_even() -> None:
    """Every midpoint goes to the even code, in both signs and at other scales."""
    codes, scale = tile("M1/32", *MIDPOINTS)
    assert (hexes(pack(np.uint8(codes))), scale) == ("07 22 44 66", 127)
    codes, scale = tile("M1/32", *(-x for x in MIDPOINTS))
    assert (hexes(pack(np.uint8(codes))), scale) == ("8F AA CC EE", 127)
    codes, scale = tile("M1/32", *(x * 2.0**-10 for x in MIDPOINTS))
    assert (hexes(pack(np.uint8(codes))), scale) == ("07 22 44 66", 117)
    codes, scale = tile("N2/16", *MIDPOINTS)
    assert (hexes(pack(np.uint8(codes))), scale) == ("07 22 44 66", 0x38)


def test_B28_nearest_even_keeps_the_sign() -> None:
    """Not toward zero, and a negative value that rounds to zero stays negative."""
    codes, _ = tile("M1/32", -0.1, 0.1, -0.25, 0.25, -0.0, 0.0, 6, -6)
    assert codes == [8, 0, 8, 0, 8, 0, 7, 0xF]
    assert tile("N2/16", -0.1, 0.1, -0.25, 0.25, -0.0, 0.0, 6, -6)[0] == codes


def test_B30_nvfp4_scale_is_the_nearest() -> None:
    """Nearest, not up: the largest element may saturate. A zero tile has scale 0x01."""
    amax = f32(0, 0.005, 0.0117, 0.012, 6.3, 6.375, 2688, 2800)
    assert hexes(encode_scale(amax, "N2/16")) == "01 01 01 01 38 38 7E 7E"
    assert tile("N2/16", 6.3) == ([7], 0x38)
    assert tile("N2/16", 0.012) == ([7], 0x01)
    assert tile("N2/16", 2800.0) == ([7], 0x7E)
    assert dequantize(np.full(16, 7, np.uint8), np.uint8([0x38]), "N2/16")[0] == 6.0


def test_B31_nibble_order() -> None:
    """The even element is in the low nibble; neighbours share a byte."""
    assert hexes(pack(np.uint8([1, 2, 3, 4, 0, 0, 0, 0]))) == "21 43 00 00"
    block = np.resize(np.arange(16, dtype=np.uint8), 32)
    assert hexes(pack(block)) == " ".join(["10 32 54 76 98 BA DC FE"] * 2)
    values = np.resize(f32(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), 128)
    record = encode_records(values[None], "indexer_mxfp4")[0]
    assert hexes(record[:8]) == "10 32 54 76 98 BA DC FE" and record[64] == 127
    assert np.array_equal(unpack(record[:64]), np.resize(np.arange(16), 128))


def test_B32_zero_decodes_to_zero() -> None:
    """Exponent field 0 has no hidden one."""
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    got = decode(np.arange(16, dtype=np.uint8), "e2m1")
    assert got.view(np.uint32).tolist() == np.float32(want).view(np.uint32).tolist()
    zeros = dequantize(np.zeros(32, np.uint8), np.uint8([254]), "M1/32")
    assert zeros.view(np.uint32).tolist() == [0] * 32


def test_B33_nvfp4_scales_are_plain_e4m3() -> None:
    """Largest 448, smallest subnormal 2**-9, smallest normal 2**-6; no writer sets the sign."""
    got = decode(np.uint8([0x7E, 0x01, 0x08]), "e4m3fn")
    assert got.tolist() == [448.0, 0.001953125, 0.015625]
    positive = decode(np.arange(0x7F, dtype=np.uint8), "e4m3fn")
    assert positive.tolist() == [float(slow.value(c, "e4m3fn")) for c in range(0x7F)]
    assert np.isnan(decode(np.uint8([0x7F]), "e4m3fn")[0])
    amax = np.arange(0x7F81, dtype=np.uint32) << 16
    scales = encode_scale(amax.view(np.float32), "N2/16")
    assert (int(scales.min()), int(scales.max())) == (0x01, 0x7E)


# --- records and pages ----------------------------------------------------------------


def test_B36_a_page_is_planar() -> None:
    """Token 1 is at 128, its scale at 8196; token 0's scale at 8192. Token 63 proves nothing."""
    layout = get_layout("indexer_fp8")
    assert [layout.byte_offset(t, "codes", 64) for t in (0, 1, 31, 63)] == [0, 128, 3968, 8064]
    assert [layout.byte_offset(t, "scale", 64) for t in (0, 1, 63)] == [8192, 8196, 8444]
    cache = np.full((1, 8448), 0xEE, np.uint8)
    rows = np.float32([0.5, 1, 2, 4])[:, None] * np.ones((4, 128), np.float32)
    slots = np.int64([0, 1, 31, 63])
    quantize_and_insert_k_cache(rows.astype(BF16), cache, slots, 64, layout="indexer_fp8")
    words = cache[0, 8192:].view("<f4")
    assert words[[0, 1, 31, 63]].tolist() == [2.0**-9, 2.0**-8, 2.0**-7, 2.0**-6]
    out = np.zeros((1, 64, 128), BF16)
    dequantize_and_gather_k_cache(
        out, cache, np.int32([64]), None, np.int32([[0]]), 64, 0, layout="indexer_fp8"
    )
    assert out[0, [0, 1, 31, 63], 77].tolist() == [0.5, 1.0, 2.0, 4.0]


def test_B38_a_record_is_more_than_its_dtype() -> None:
    """512 bytes per token gives 32768; the 584-byte record has pages of 37440, RoPE at 448..575."""
    layout = get_layout("v4")
    assert layout.page_bytes(64) == 37440 != 64 * 512 == 32768
    rope = layout.byte_offset(0, "rope", 64)
    assert (rope, rope + 128) == (448, 576) and rope < 512 < rope + 128
    assert get_layout("v41_mxfp8") != get_layout("v41_mxfp8_inline")
    assert hash(get_layout("v4")) == hash(get_layout("v4"))


def test_B39_offsets_of_tokens() -> None:
    """Neither 512 nor 584 is the data stride of V4."""
    want = {
        "v4": ("nope", [(0, 36864), (2880, 36904), (36288, 37368)]),
        "v41_mxfp8": ("codes", [(0, 32768), (2560, 32848), (32256, 33776)]),
        "v41_nvfp4": ("codes", [(0, 16384), (1280, 16544), (16128, 18400)]),
        "indexer_fp8": ("codes", [(0, 8192), (640, 8212), (8064, 8444)]),
        "indexer_mxfp4": ("codes", [(0, 4096), (320, 4116), (4032, 4348)]),
    }
    for name, (data, offsets) in want.items():
        layout = get_layout(name)
        got = [
            (layout.byte_offset(t, data, 64), layout.byte_offset(t, "scale", 64))
            for t in (0, 5, 63)
        ]
        assert got == offsets


def test_B40_a_page_is_not_rows_times_page_over_rows() -> None:
    """37440 / 64 = 585 is no row; the last 64 bytes belong to nobody, and are never touched."""
    layout = get_layout("v4")
    assert 37440 // 64 == 585 and 63 * 585 == 36855
    assert layout.byte_offset(63, "nope", 64) == 36288
    assert layout.page_bytes(64) - layout.owned_bytes(64) == 64
    cache = np.full((11, 37440), 0xFF, np.uint8)
    rows = np.ones((64, 512), BF16)
    quantize_and_insert_k_cache(rows, cache, 640 + np.arange(64))
    assert (cache[:10] == 0xFF).all() and (cache[10, 37376:] == 0xFF).all()
    assert not (cache[10, :37376] == 0xFF).any()
    out = np.zeros((1, 64, 512), BF16)
    dequantize_and_gather_k_cache(
        out, cache, np.int32([64]), None, np.int32([[10]]), 64, 0, layout="v4"
    )
    assert (out == np.asarray(1, BF16)).all()


def test_B41_v4_data_is_448_codes_and_64_bf16() -> None:
    """448 of 576 data bytes are codes; the other 128 are dims 448..511."""
    layout = get_layout("v4")
    nope, rope = layout.planes[0].fields
    assert (nope.nbytes, nope.dims) == (448, (0, 448))
    assert (rope.nbytes, rope.dims, rope.offset) == (128, (448, 512), 448)
    assert layout.planes[0].row_bytes == 576


def test_B42_offsets_of_slot_700_and_page_bytes() -> None:
    """Page 10, row 60. The report pads V4.1 pages to multiples of 512, the contract does not."""
    want = {
        "v4": ("nope", 408960, 411744),
        "v41_mxfp8": ("codes", 368640, 371648),
        "v41_nvfp4": ("codes", 199680, 202624),
        "indexer_fp8": ("codes", 92160, 92912),
        "indexer_mxfp4": ("codes", 47360, 47856),
    }
    for name, (data, at_data, at_scale) in want.items():
        layout = get_layout(name)
        assert layout.byte_offset(700, data, 64) == at_data
        assert layout.byte_offset(700, "scale", 64) == at_scale
    pages = {
        "v4": (1728, 19008, 37440, 74880, 149760),
        "v41_mxfp8": (1056, 16896, 33792, 67584, 135168),
        "v41_nvfp4": (576, 9216, 18432, 36864, 73728),
    }
    for name, sizes in pages.items():
        got = tuple(get_layout(name).page_bytes(rows) for rows in (2, 32, 64, 128, 256))
        assert got == sizes


def test_B43_page_geometry_decides_where_an_entry_is() -> None:
    """Entries 0, 31, 32, 40, 63, 64 in pages of 64 rows and in pages of 32 rows."""
    layout = get_layout("v4")
    entries = (0, 31, 32, 40, 63, 64)
    by_64 = [layout.byte_offset(e, "nope", 64) for e in entries]
    assert by_64 == [0, 17856, 18432, 23040, 36288, 37440]
    by_32 = [layout.byte_offset(e, "nope", 32) for e in entries]
    assert by_32 == [0, 17856, 19008, 19008 + 8 * 576, 19008 + 17856, 2 * 19008]


def test_B44_page_bytes_of_block_and_ratio() -> None:
    """Rows of a page = block / ratio; any row count is served."""
    v41, v4 = get_layout("v41_mxfp8"), get_layout("v4")
    assert [v41.page_bytes(64 // ratio) for ratio in (1, 2)] == [33792, 16896]
    assert [v41.page_bytes(128 // ratio) for ratio in (1, 2)] == [67584, 33792]
    assert [v4.page_bytes(256 // ratio) for ratio in (4, 128)] == [37440, 1728]


def test_B46_offsets_have_64_bits() -> None:
    """The last block below 2**31 and the first beyond it, for three page strides."""
    layout = get_layout("v4")
    for stride, block, below, beyond in (
        (1039680, 2066, 2146939200, 2147978880),
        (1435968, 1496, 2146772160, 2148208128),
        (276480, 7768, 2147420160, 2147696640),
    ):
        got = [
            layout.byte_offset(b * 64, "nope", 64, page_stride=stride) for b in (block - 1, block)
        ]
        assert got == [below, beyond]
        assert below < 2**31 <= beyond
    wrapped = layout.byte_offset(4564 * 64, "nope", 64, page_stride=1435968)
    assert wrapped == 6553757952
    assert wrapped - 2 * 2**32 == -2036176640


# --- Annex A: where public implementations differ; ours is named by the contract ------


def test_A01_zero_tile_of_v4() -> None:
    """105, not 114, 92 or 127; the data bytes are zero."""
    record = encode_records(np.zeros((1, 512), np.float32), "v4")[0].tobytes()
    assert record == b"\0" * 576 + b"\x69" * 7 + b"\0"


def test_A02_quiet_mxfp8_tile() -> None:
    """Amax 0.01: code 112 and byte 0x7A."""
    assert tile("P1/32", 0.01) == ([0x7A], 112)
    bf16 = float(np.float32(0.01).astype(BF16))
    assert bf16 == 0.010009765625 and tile("P1/32", bf16) == ([0x7A], 112)


def test_A03_zero_block_of_mxfp4() -> None:
    """Code 1."""
    assert tile("M1/32", 0.0) == ([0], 1)


def test_A04_midpoints() -> None:
    """To even, as the hardware conversion does; not down (07 21 43 65), not away (17 32 54 76)."""
    assert hexes(pack(encode(f32(*MIDPOINTS), "e2m1"))) == "07 22 44 66"


def test_A05_negative_zero_in_fp4() -> None:
    """-0.1 keeps its sign: nibble 0x8."""
    assert encode(f32(-0.1), "e2m1").tolist() == [0x8]


def test_A06_indexer_scale_word_is_a_power_of_two() -> None:
    """Amax 300: scale word 1.0, not 300/448; bytes 0x79 and 0x6C."""
    x = np.zeros((1, 128), np.float32)
    x[0, :2] = 300, 100
    record = encode_records(x, "indexer_fp8")[0]
    assert hexes(record[:2]) == "79 6C" and hexes(record[128:]) == "00 00 80 3F"


def test_A08_nvfp4_scale_by_reciprocal() -> None:
    """amax * fp32(1/6): 0x3A, where the quotient would give 0x39. No bf16 amax tells them apart."""
    assert hexes(encode_scale(from_bits(0x40E3FFFF), "N2/16")) == "3A"
    assert tile("N2/16", from_bits(0x40E3FFFF)[0].item())[1] == 0x3A
    for bits in range(0x3000, 0x4700):  # bf16 amax from 2**-31 to 2**15
        amax = Fraction(slow.bf16_value(bits))
        quotient = min(max(slow.round_fp32(amax / 6), slow.two(-9)), Fraction(448))
        assert slow.encode(quotient, "e4m3fn") == slow.scale_code(amax, "N2/16")


def test_A09_infinity_in_a_v4_tile() -> None:
    """The scale is 0xFF, which makes the whole tile NaN on decode; other tiles are untouched."""
    x = np.ones((1, 512), np.float32)
    x[0, 3] = INF
    record = encode_records(x, "v4")
    assert hexes(record[0, 576:]) == "FF 77 77 77 77 77 77 00"
    assert hexes(record[0, :5]) == "00 00 00 7F 00"
    back = decode_records(record, "v4").view(np.uint16)[0]
    assert set(back[:64].tolist()) == {0x7FFF} and set(back[64:].tolist()) == {0x3F80}


def test_A10_slot_0_is_a_slot_and_minus_1_is_none() -> None:
    """No slot is reserved."""
    cache = np.full((1, 68), 0xA5, np.uint8)
    rows = np.ones((1, 128), BF16)
    quantize_and_insert_k_cache(rows, cache, np.int64([-1]), 1, layout="indexer_mxfp4")
    assert (cache == 0xA5).all()
    quantize_and_insert_k_cache(rows, cache, np.int64([0]), 1, layout="indexer_mxfp4")
    assert (cache != 0xA5).all()


def test_A12_fnuz_divisor_is_224() -> None:
    """Amax 232: code 128 and byte 0x76; a divisor of 240 or 448 would give code 127."""
    assert tile("P1/64-fnuz", 232.0) == ([0x76], 128)
    assert tile("P1/32-fnuz", 232.0) == ([0x76], 128)
    assert tile("P1/64-fnuz", 224.0) == ([0x7E], 127)


def test_A13_zero_tile_of_nvfp4() -> None:
    """Scale 0x01 = 2**-9, the smallest subnormal."""
    record = encode_records(np.zeros((1, 512), np.float32), "v41_nvfp4")[0].tobytes()
    assert record == b"\0" * 256 + b"\1" * 32


def test_A14_465_saturates() -> None:
    """0x7E."""
    assert encode(f32(465), "e4m3fn").tolist() == [0x7E]


def test_A15_nan_in_fp4() -> None:
    """E2M1 has no NaN: +6, code 0x7, whatever the sign of the NaN."""
    assert encode(from_bits(0x7FC00000, 0xFFC00000, 0x7F800001), "e2m1").tolist() == [7, 7, 7]


def test_A16_ue8m0_is_a_ceil_rule() -> None:
    """1.25 / 0.0 / -1.0."""
    assert encode(f32(1.25, 0.0, -1.0), "ue8m0").tolist() == [128, 0, 255]
