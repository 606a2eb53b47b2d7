"""Figures of public bug reports (B..) and of known differences (A..), put to the tools.

What the report says was written is typed in and given to `explain`, which must name the fault and no
other one that fits as well; what it says is right must be no difference. Readers' mistakes go to
`inspect`, `decode` and `encode`, places to `layout`, `layout --vs`, `diff` and `convert`. `NOT_BYTES`
lists the reports that say nothing about encoding, layout or conversion; the last test holds the lists
to be whole.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typed_pages import Bytes, Case, above, blamed, dump_of, named, number, record

from dsv4num import ArgumentError, ValueRangeError, get_layout
from dsv4num.cli import main
from dsv4num.explain import Dump, Latents, Rows, explain_expected, explain_rows
from dsv4num.explain.diff import diff_dumps
from dsv4num.explain.encoder import field_columns
from dsv4num.explain.inspect import inspect_row
from dsv4num.layouts import c_header, compare, convert
from dsv4num.reference import (
    build_cos_sin_cache,
    decode_records,
    encode_records,
    rope_quant_insert,
)

BF16 = ml_dtypes.bfloat16


# --- helpers --------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    """The table that a command prints, without its heads."""
    assert main(list(argv)) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def codes_said(capsys: pytest.CaptureFixture[str], fmt: str, *values: str) -> str:
    """What `encode` says that values become."""
    codes = [line[2] for line in said(capsys, "encode", fmt, *values)]
    return " ".join(code.removeprefix("0x") for code in codes)


def values_said(capsys: pytest.CaptureFixture[str], fmt: str, *codes: str) -> list[float]:
    """What `decode` says that codes are."""
    return [float(np.float32(line[1])) for line in said(capsys, "decode", fmt, *codes)]


# --- UE8M0 scales ---------------------------------------------------------------------


def test_b01_scale_rounded_after_use() -> None:
    assert blamed(
        "v4",
        ([225], ("7F", "76"), ("7F", "7E")),
        ([300], ("7F", "79"), ("7F", "7E")),
        ([336], ("7F", "7A"), ("7F", "7E")),
        ([448], ("7F", "7E"), ("7F", "7E")),
        ([449], ("80", "76"), ("80", "7E")),
    ) == ["scale-rounded-after-use"]


def test_b02_place_of_the_floor() -> None:
    assert blamed(
        "v4",
        ([0], ("69", "00"), ("72", "00")),
        ([0.01, 2e-7], ("70", "7A 03"), ("72", "6A 01")),
        ([448 * 2.0**-14], ("71", "7E"), ("72", "76")),
        ([above(448 * 2.0**-14)], ("72", "76"), ("72", "76")),
    ) == ["floor-1e-4-on-scale"]


def test_b03_log2_in_fp32() -> None:
    cases: list[Case] = [([number(0x41600001)], ("7B", "76"), ("7A", "7E"))]
    for k in range(-14, 9):
        right, low = 128 + k, 127 + k
        lost = k <= -5 or k >= 4
        wrong = (f"{low:02X}", "7E") if lost else (f"{right:02X}", "76")
        cases.append(([above(448 * 2.0**k)], (f"{right:02X}", "76"), wrong))
    assert blamed("v4", *cases) == ["exponent-log2-ceil"]


def test_b06_an_fp32_scale_of_which_the_exponent_is_kept() -> None:
    assert blamed(
        "v4",
        ([336, 100], ("7F", "7A 6C"), ("7E", "7E 70")),
        ([448], ("7F", "7E"), ("7F", "7E")),
    ) == ["scale-mantissa-dropped"]
    # The writer's half of it: 0.75 as fp32. A reader that takes the exponent alone sees 224, not 336.
    layout = get_layout("indexer_fp8")
    wrong = record(layout, ("00 00 40 3F", "7E"))[None]
    row = inspect_row(dump_of(layout, wrong, 1), 0)
    assert row.anomalies == ["codes 0..127: scale is no power of two: 3F400000"]
    assert row.groups[0]["values"][0] == 336.0
    assert blamed(
        "indexer_fp8",
        ([336], ("00 00 80 3F", "7A"), ("00 00 40 3F", "7E")),
        ([0], ("00 00 80 34", "00"), ("AD AC 6F 34", "00")),
    ) == ["scale-word-unrounded"]


@pytest.mark.parametrize(
    ("dialect", "wrong"),
    [
        ("exponent-ocp", [("7F", "27")] * 4 + [("80", "16")]),
        ("exponent-even", [("7F", "27")] * 2 + [("80", "16")] * 3),
    ],
)
def test_b07_other_exponents(dialect: str, wrong: list[Bytes]) -> None:
    """Behind the largest element lies 1.0: its nibble is 2 under the smaller scale, else 1."""
    right = [("7F", "27"), ("80", "15"), ("80", "16"), ("80", "16"), ("80", "16")]
    values = [[6, 1], [6.5, 1], [7, 1], [7.5, 1], [8, 1]]
    assert blamed("indexer_mxfp4", *zip(values, right, wrong, strict=True)) == [dialect]


def test_b07_the_nearest_exponent() -> None:
    assert blamed(
        "v4",
        ([500], ("80", "78"), ("7F", "7E")),
        ([560], ("80", "79"), ("7F", "7E")),
        ([448 * 1.4375], ("80", "7A"), ("80", "7A")),  # its log2 is nearer to 1
    ) == ["exponent-log2-nearest"]


@pytest.mark.parametrize(
    ("dialect", "wrong"),
    [
        ("exponent-down", "7D 7D 7E 7F 80 81"),
        ("exponent-log2-cut", "7D 7E 7E 7F 80 81"),
    ],
)
def test_b08_log2_cut(dialect: str, wrong: str) -> None:
    """amax / 448 is 0.25, 0.3, 0.5, 1, 3, 4."""
    right = [("7D", "7E"), ("7E", "78"), ("7E", "7E"), ("7F", "7E"), ("81", "7A"), ("81", "7E")]
    values = [[448 * s] for s in (0.25, 0.3, 0.5, 1, 3, 4)]
    clipped = [
        (scale, codes if scale == own else "7E")
        for scale, (own, codes) in zip(wrong.split(), right, strict=True)
    ]
    second: Case = ([1344, 400], ("81", "7A 6C"), ("80", "7E 74"))  # divided by what is stored
    assert blamed("v4", *zip(values, right, clipped, strict=True), second) == [dialect]


@pytest.mark.parametrize(
    ("dialect", "wrong"),
    [
        ("floor-1e-4-on-amax", ["70 00", "70 00", "70 01", "71 06", "72 06"]),
        ("floor-1e-4-on-scale", ["72 00", "72 00", "72 00", "72 04", "72 06"]),
    ],
)
def test_b09_a03_floors_of_mxfp4(dialect: str, wrong: list[str]) -> None:
    right = ["01 00", "01 00", "6C 07", "71 06", "72 06"]
    values = [[0], [2.0**-140], [1e-5], [number(0x399D0000)], [6e-4]]
    typed = ((a[:2], a[3:]) for a in right), ((a[:2], a[3:]) for a in wrong)
    assert blamed("indexer_mxfp4", *zip(values, *typed, strict=True)) == [dialect]


def test_b10_b11_scale_codes_0_134_and_255(capsys: pytest.CaptureFixture[str]) -> None:
    layout = get_layout("v41_mxfp8")
    ones = record(layout, ("7F", "38" * 32))
    ones[512:] = [*range(15), 255]
    row = inspect_row(dump_of(layout, ones[None], 1), 0)
    first = [group["values"][0] for group in row.groups]
    assert first[:15] == [math.ldexp(1, code - 127) for code in range(15)]
    assert np.float32(first[0]).view(np.uint32) == 0x00400000
    assert math.isnan(first[15]) and math.isnan(row.groups[15]["scale"])
    assert "codes 480..511: the scale is NaN (FF), and so is every value" in row.anomalies
    found = values_said(capsys, "ue8m0", "85", "86", "87", "FE", "FF", "00")
    assert found[:3] == [64.0, 128.0, 256.0] and math.isnan(found[4])
    assert (found[3], found[5]) == (2.0**127, 2.0**-127)


def test_b12_a_code_stored_as_a_number() -> None:
    """Code 120 is 2**-7, stored as 120.0: 15,360 times too much."""
    assert blamed(
        "indexer_fp8",
        ([3.5], ("00 00 00 3C", "7E"), ("00 00 F0 42", "7E")),
        ([448], ("00 00 80 3F", "7E"), ("00 00 FE 42", "7E")),
        ([448 * 128], ("00 00 00 43", "7E"), ("00 00 06 43", "7E")),
    ) == ["scale-word-code-number"]
    layout = get_layout("indexer_fp8")
    values = [
        inspect_row(dump_of(layout, record(layout, (scale, "7E"))[None], 1), 0).groups[0]["values"]
        for scale in ("00 00 00 3C", "00 00 F0 42")
    ]
    assert values[1][0] / values[0][0] == 15360.0


def test_b13_fp32_words_read_as_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert values_said(capsys, "ue8m0", "B7", "6D", "2B", "3F") == [
        math.ldexp(1, e) for e in (56, -18, -84, -64)
    ]
    # The two indexer layouts are told apart by their fingerprints, and by the first scale byte.
    words, codes = get_layout("indexer_fp8@F1"), get_layout("indexer_fp8_mx")
    found = compare(words, codes)
    assert "scale: each entry is stored 1 times, 4 times" in found.differences
    assert found.telling["ones"] and "byte 0 is 7E in" in found.telling["ones"]
    stored = record(words, ("B7 6D 2B 3F", "7E"))[None]
    row = inspect_row(dump_of(codes, stored, 1), 0)
    assert row.anomalies[0] == "codes 0..127: the copies of the scale differ"
    with pytest.raises(ValueRangeError, match=r"0\.669642866 as scale 0 of slot 0; .*powers of"):
        convert(dump_of(words, stored, 1), codes)
    # 16 scale bytes of V4.1 that hold four fp32 numbers, one of them with a byte FF.
    layout = get_layout("v41_mxfp8")
    wrong = record(layout, ("01 FF 80 3F", "78" * 32))[None]
    anomalies = inspect_row(dump_of(layout, wrong, 1), 0).anomalies
    assert "codes 32..63: the scale is NaN (FF), and so is every value" in anomalies
    assert "codes 0..31: scale that no encoder writes: 01" in anomalies


def test_b14_a16_scales_by_a_cast(capsys: pytest.CaptureFixture[str]) -> None:
    """1.25 is cast down to 1; 1.5 up to 2."""
    assert blamed(
        "v4",
        ([448 * 1.25], ("80", "79"), ("7F", "7E")),
        ([448 * 1.5], ("80", "7A"), ("80", "7A")),
        ([448 * 1.4375], ("80", "7A"), ("7F", "7E")),  # its log2 is nearer to 1
    ) == ["exponent-cast-nearest"]
    own = codes_said(capsys, "ue8m0", "0", "0x1p-128", "-1", "1.25", "1.5", "inf", "nan")
    assert own == "00 00 FF 80 80 FF FF"


# --- E4M3 -----------------------------------------------------------------------------


def test_b16_negative_underflow_in_fnuz(capsys: pytest.CaptureFixture[str]) -> None:
    values = [224, *(-(2.0**-k) for k in range(9, 14)), -1e-30, -0.0]
    right = "7E 82 81 00 00 00 00 00"
    assert blamed("v4_fnuz", (values, ("7F", right), ("7F", "7E 82 81 80 80 80 80 80"))) == [
        "negative-zero-is-nan"
    ]
    layout = get_layout("v4_fnuz")
    wrong = record(layout, ("7F", "7E 82 81 80 80 80"))[None]
    row = inspect_row(dump_of(layout, wrong, 1), 0)
    assert row.anomalies[0] == "nope 0..63: 3 NaN codes, the first at element 3 of the group"
    tiny = [f"{v!r}" for v in values[1:]]
    assert codes_said(capsys, "e4m3fnuz", *tiny) == "82 81 00 00 00 00 00"
    assert codes_said(capsys, "e4m3fn", *tiny) == "81 80 80 80 80 80 80"
    assert values_said(capsys, "e4m3fn", "38") == [1.0]
    assert values_said(capsys, "e4m3fnuz", "38") == [0.5]


def test_b17_a12_divisors_of_fnuz() -> None:
    """232 is half way between 224 and 240; 244 and 448 tell 240 from 448 and from other exponents."""
    common: Case = ([232], ("80", "76"), ("7F", "7E"))
    of_240: list[Case] = [
        ([244], ("80", "77"), ("80", "77")),
        ([448], ("80", "7E"), ("80", "7E")),
    ]
    of_448: list[Case] = [
        ([244], ("80", "77"), ("7F", "7F")),
        ([448], ("80", "7E"), ("7F", "7F")),
    ]
    assert blamed("v4_fnuz", common, *of_240) == ["qmax-240"]
    assert blamed("v4_fnuz", common, *of_448) == ["qmax-448"]


def test_b17_one_dialect_read_as_the_other() -> None:
    rows = np.random.default_rng(5).standard_normal((8, 512)).astype(BF16)
    source = Rows(rows, np.arange(8))
    for written, read, name in (
        ("v4_fnuz", "v4", "fnuz-read-as-ocp"),
        ("v4", "v4_fnuz", "ocp-read-as-fnuz"),
    ):
        dump = dump_of(get_layout(read), encode_records(rows, written), 4)
        assert named(explain_rows(dump, source)) == [name]
        with pytest.raises(ArgumentError, match="one code is two values"):
            convert(
                dump_of(get_layout(written), encode_records(rows, written), 4), get_layout(read)
            )
    top = [record(get_layout("v4"), ("7F", "7E"))[None]] * 2
    values = [
        inspect_row(dump_of(get_layout(name), one, 1), 0).groups[0]["values"][0]
        for name, one in zip(("v4", "v4_fnuz"), top, strict=True)
    ]
    assert values == [448.0, 224.0]


def test_b18_early_saturation() -> None:
    values = [224, 112, 120, 128, 136, 144, 208, 17, -17]
    right, wrong = "7E 76 77 78 78 79 7D 60 E0", "7F 76 77 7F 7F 7F 7F 61 E1"
    assert blamed("v4_fnuz", (values, ("7F", right), ("7F", wrong))) == [
        "fnuz-early-saturation ties-away"
    ]
    layout = get_layout("v4_fnuz")
    row = inspect_row(dump_of(layout, record(layout, ("7F", wrong))[None], 1), 0)
    assert row.anomalies[0] == "nope 0..63: an element beyond qmax"


def test_b19_a_bf16_step_too_many_or_too_few() -> None:
    """Behind 448, 1.0625 and what lies next to it; and rows rotated with the step and without."""
    values = [448, *(1.0625 + d for d in (-(2.0**-12), 0, 2.0**-12, 2.0**-9, 2.0**-7))]
    direct, stepped = "7E 38 38 39 39 39", "7E 38 38 38 38 39"
    assert blamed("v41_mxfp8", (values, ("7F", direct), ("7F", stepped))) == ["bf16-step-present"]
    rows, table = ordinary("v41_mxfp8", 32).rows, build_cos_sin_cache(32)
    at = np.arange(32)
    caches = {}
    for step in (False, True):
        caches[step] = np.zeros((1, 32 * 528), np.uint8)
        rope_quant_insert(
            *(rows, at, table, caches[step], at),
            kv_block_size=32,
            layout="v41_mxfp8",
            compress_ratio=1,
            bf16_round_trip=step,
        )
    for step, name in ((True, "bf16-step-absent"), (False, "bf16-step-present")):
        source = Latents(rows, at, table, at, bf16_round_trip=step)
        dumps = [Dump.of(caches[one], get_layout("v41_mxfp8"), 32) for one in (step, not step)]
        assert explain_rows(dumps[0], source).status == "no difference"
        assert named(explain_rows(dumps[1], source)) == [name]


def test_b21_two_roundings() -> None:
    """126.24 would be cut to another code, and a bf16 step would change 1.0625 + 2**-9."""
    values = [448, 400.19958, 272.15656, 136.00208, 1.0625001, 126.24, 1.0625 + 2.0**-9]
    right, wrong = "7E 7D 79 71 39 70 39", "7E 7C 78 70 38 70 39"
    assert blamed("v4", (values, ("7F", right), ("7F", wrong))) == ["fp16-step"]


def test_b22_casts_of_an_interpreter() -> None:
    values = [448, 126.24, 17.0, -17.0, *(1.97 * 2.0**k for k in range(-5, 7))]
    right = "7E 70 58 D8" + "".join(f"{(k + 8) << 3:02X}" for k in range(-5, 7))
    wrong = "7E 68 59 D9" + "".join(f"{(k + 7) << 3:02X}" for k in range(-5, 7))
    assert blamed("v4", (values, ("7F", right), ("7F", wrong))) == ["carry-lost ties-away"]


def test_b23_decoders(capsys: pytest.CaptureFixture[str]) -> None:
    """Not 480, 0.0087890625, 0.0146484375 and 0.0078125."""
    found = values_said(capsys, "e4m3fn", "7F", "01", "07", "00", "FF")
    assert math.isnan(found[0]) and math.isnan(found[4])
    assert found[1:4] == [0.001953125, 0.013671875, 0.0]


def test_b24_a14_overflow(capsys: pytest.CaptureFixture[str]) -> None:
    """In rows without a scale of their own; 464 is a tie and goes to 448 under both policies."""
    layout = get_layout("plain_fp8")
    values = np.zeros((1, 512), np.float32)
    values[0, :7] = 448, 463.9, 464, 464.01, 465, 480, 1e6
    dumps = []
    for codes in ("7E 7E 7E 7E 7E 7E 7E", "7E 7E 7E 7F 7F 7F 7F"):
        typed = np.zeros(512, np.uint8)
        typed[:7] = list(bytes.fromhex(codes))
        dumps.append(dump_of(layout, typed[None], 1))
    source = Rows(values, np.int64([0]))
    assert explain_rows(dumps[0], source).status == "no difference"
    assert named(explain_rows(dumps[1], source)) == ["overflow-to-nan"]
    row = inspect_row(dumps[1], 0)
    assert row.anomalies == ["codes 0..511: 4 NaN codes, the first at element 3 of the group"]
    given = ("448", "463.9", "464", "464.01", "480", "1e6", "inf", "nan")
    assert codes_said(capsys, "e4m3fn", *given) == "7E 7E 7E 7E 7E 7E 7E 7F"


def test_b25_b26_check_points_and_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    """An FNUZ infinity saturates by SPEC 2, where the report wants NaN."""
    points = ("0x1p-10", "0x3p-11", "0x1p-6", "447.9")
    assert codes_said(capsys, "e4m3fn", *points) == "00 01 08 7E"
    given = ("inf", "-inf", "1e30", "-1e30", "nan", "465", "1000")
    assert codes_said(capsys, "e4m3fn", *given) == "7E FE 7E FE 7F 7E 7E"
    assert codes_said(capsys, "e4m3fnuz", *given) == "7F FF 7F FF 80 7F 7F"


# --- FP4 ------------------------------------------------------------------------------

MIDPOINTS = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]


@pytest.mark.parametrize(
    ("dialect", "plain", "negated"),
    [
        ("ties-away", "17 32 54 76", "9F BA DC FE"),
        ("ties-to-zero", "07 21 43 65", "8F A9 CB ED"),
    ],
)
def test_b27_b28_a04_ties(dialect: str, plain: str, negated: str) -> None:
    """The tile, its negation and a small copy; the larger code of a pair lies in the high nibble."""
    small = [x * 2.0**-10 for x in MIDPOINTS]
    assert blamed(
        "indexer_mxfp4",
        (MIDPOINTS, ("7F", "07 22 44 66"), ("7F", plain)),
        ([-x for x in MIDPOINTS], ("7F", "8F AA CC EE"), ("7F", negated)),
        (small, ("75", "07 22 44 66"), ("75", plain)),
        ([6, 0.4], ("7F", "17"), ("7F", "17")),  # no tie
    ) == [dialect]


def test_b28_a05_sign_of_zero() -> None:
    """-0.1, -0.25 and -0.0 are code 8, or 0; -0.0 alone may be 0 too."""
    values = [-0.1, 0.1, -0.25, 0.25, -0.0, 0.0, 6, -6]
    right = ("7F", "08 08 08 F7")
    for typed, name in (
        ("00 00 00 F7", "negative-zero-dropped"),
        ("08 08 00 F7", "negative-zero-input-lost"),
    ):
        assert blamed("indexer_mxfp4", (values, right, ("7F", typed))) == [name]
    drop = ([-x for x in MIDPOINTS], ("7F", "8F AA CC EE"), ("7F", "0F AA CC EE"))
    assert blamed("indexer_mxfp4", drop) == ["negative-zero-dropped"]


def test_b30_nvfp4_scale_rounded_up() -> None:
    """6.375 / 6 = 1.0625 is a tie: to the even byte 38, or up to 39."""
    assert blamed(
        "v41_nvfp4",
        ([0], ("01", "00"), ("01", "00")),
        ([0.005], ("01", "05"), ("01", "05")),
        ([0.0117], ("01", "07"), ("01", "07")),
        ([0.012], ("01", "07"), ("02", "05")),
        ([6.3], ("38", "07"), ("39", "07")),
        ([6.375], ("38", "07"), ("39", "07")),
        ([2688], ("7E", "07"), ("7E", "07")),
        ([2800], ("7E", "07"), ("7E", "07")),
    ) == ["scale-rounded-up"]


CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize(
    ("dialect", "wrong"),
    [
        ("nibbles-swapped", "01 23 45 67 89 AB CD EF" * 2),
        ("nibbles-group-halves", "00 11 22 33 44 55 66 77 88 99 AA BB CC DD EE FF"),
    ],
)
def test_b31_nibbles(dialect: str, wrong: str) -> None:
    """Codes 0 to 15 twice; and 1, 2, 3, 4, 0 and so on, with a 6 at the end of the group."""
    short = [0.5, 1, 1.5, 2, *[0.0] * 27, 6]
    first = {"nibbles-swapped": "12 34", "nibbles-group-halves": "01 02 03 04"}[dialect]
    rest = {"nibbles-swapped": "07", "nibbles-group-halves": "70"}[dialect]
    zeros = "00" * (15 - len(first.split()))
    assert blamed(
        "indexer_mxfp4",
        (CODES * 2, ("7F", "10 32 54 76 98 BA DC FE" * 2), ("7F", wrong)),
        (short, ("7F", "21 43" + "00" * 13 + "70"), ("7F", first + zeros + rest)),
    ) == [dialect]


def test_b32_zero_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Not 0.5, 0.75, -0.5 and -0.75; and a block of zeros is zero under the largest scale."""
    found = values_said(capsys, "e2m1", "0", "1", "8", "9")
    assert found == [0.0, 0.5, 0.0, -0.5] and math.copysign(1, found[2]) == -1
    layout = get_layout("indexer_mxfp4")
    row = inspect_row(dump_of(layout, record(layout, ("FE", "00"))[None], 1), 0)
    assert [set(group["values"]) for group in row.groups] == [{0.0}] * 4


def test_b33_scales_with_a_sign(capsys: pytest.CaptureFixture[str]) -> None:
    """No scale is above 448, below 2**-9 or negative; a NaN makes its group NaN."""
    found = values_said(capsys, "e4m3fn", "7E", "01", "08", "7F")
    assert found[:3] == [448.0, 2.0**-9, 2.0**-6] and math.isnan(found[3])
    layout = get_layout("v41_nvfp4")
    scales = np.resize(np.uint8([0x7E, 0x01, 0x08, 0x80, 0xB8, 0xFE, 0x7F, 0x00]), 32)
    wrong = record(layout, ("38", "77" * 8))
    wrong[256:] = scales
    anomalies = inspect_row(dump_of(layout, wrong[None], 1), 0).anomalies
    assert anomalies[:6] == [
        "codes 48..63: scale that no encoder writes: 80",
        "codes 64..79: scale that no encoder writes: B8",
        "codes 80..95: scale that no encoder writes: FE",
        "codes 96..111: the scale is NaN (7F), and so is every value",
        "codes 96..111: scale that no encoder writes: 7F",
        "codes 112..127: scale code 0",
    ]
    assert not any(re.match(r"codes (0|16|32)\.\.", text) for text in anomalies)


def test_b34_a_global_scale() -> None:
    """With a further scale of 2 for the whole tensor every scale byte is 8 more, the codes the same."""
    rows = np.random.default_rng(6).standard_normal((16, 512)).astype(BF16)
    layout = get_layout("v41_nvfp4")
    right = encode_records(rows, layout)
    wrong = right.copy()
    wrong[:, 256:] += 8
    found = explain_rows(dump_of(layout, wrong, 4), Rows(rows, np.arange(16)))
    assert named(found) == ["scale-step"]
    assert "scale codes that are +8, while the elements do not follow" in found.lines()[1]


# --- records and pages ----------------------------------------------------------------


def ordinary(name: str, count: int, seed: int = 0) -> Rows:
    """Ordinary rows in slots from 0 on."""
    rows = np.random.default_rng(seed).standard_normal((count, get_layout(name).head_dim))
    return Rows(rows.astype(BF16), np.arange(count))


def test_b36_planar_read_as_interleaved() -> None:
    """Tokens 0, 1, 31 and 63 of a page of 64, read as 132 bytes each."""
    planar, inline = get_layout("indexer_fp8"), get_layout("indexer_fp8_inline")
    places = [
        [
            layout.byte_offset(t, field, 64)
            for t, field in ((1, "codes"), (0, "scale"), (1, "scale"))
        ]
        for layout in (planar, inline)
    ]
    assert places == [[128, 8192, 8196], [132, 128, 260]]
    assert {layout.byte_offset(63, "scale", 64) for layout in (planar, inline)} == {8444}
    found = compare(planar, inline)
    assert "form: segregated, inline" in found.differences
    assert "codes: row r begins at byte 128 * r, byte 132 * r" in found.differences
    assert "scale: row r begins at byte 8192 + 4 * r, byte 128 + 132 * r" in found.differences

    values = np.ones((64, 128), np.float32)
    values[[0, 1, 31, 63]] = np.float32([0.5, 1, 2, 4])[:, None]
    records = encode_records(values, planar)
    page = dump_of(planar, records, 64).data
    misread = Dump.of(page, inline, 64)
    assert inspect_row(misread, 0).groups[0]["scale_code"] == "78787878"  # codes of token 1
    assert inspect_row(misread, 63).groups[0]["scale"] == 2.0**-6  # the last one is right

    source = ordinary("indexer_fp8", 64)
    right = encode_records(source.rows, planar)
    # A writer of interleaved rows, read as planes; and planes that are read as interleaved rows.
    assert named(explain_rows(Dump.of(right.reshape(-1), planar, 64), source)) == [
        "inline-read-as-segregated"
    ]
    plain = get_layout("indexer_fp8_inline")
    page = np.zeros(8448, np.uint8)
    of_plain = encode_records(source.rows, plain)
    page[:8192], page[8192:] = of_plain[:, :128].reshape(-1), of_plain[:, 128:].reshape(-1)
    assert named(explain_rows(Dump.of(page, plain, 64), source)) == ["segregated-read-as-inline"]


def test_b38_512_bytes_per_token() -> None:
    """A dtype says nothing; fingerprints, pages and places do."""
    v4, plain = get_layout("v4"), get_layout("sglang:UNIFORM_FP8")
    found = compare(v4, plain)
    assert not found.equal and len(set(found.fingerprints)) == 2
    assert "bytes of a page of 64 rows: 37440, 32768" in found.differences
    assert compare(v4, get_layout("vllm:fp8_ds_mla@v4")).equal
    assert plain.byte_offset(1, "codes", 64) == 512
    assert v4.byte_offset(0, "rope", 64) == 448 < 512 < v4.byte_offset(1, "nope", 64) == 576
    records = encode_records(np.ones((64, 512), np.float32), v4)
    with pytest.raises(ArgumentError, match="this needs quantizing"):
        convert(dump_of(v4, records, 64), plain)
    # Token 1 by the rule of 512 bytes begins in the bf16 values of token 0.
    misread = Dump.of(dump_of(v4, records, 64).data[:32768], plain, 64)
    assert inspect_row(misread, 1).groups[0]["codes"][:4] == ["80", "3F", "80", "3F"]


def facts(capsys: pytest.CaptureFixture[str], name: str, block: int = 64) -> dict[str, int]:
    """What `layout --json` says of a page: its bytes, and first byte and row bytes of each plane."""
    assert main(["layout", name, "--block-size", str(block), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)
    found = {"page": layout["page_bytes"]}
    for index, plane in enumerate(layout["planes"]):
        found |= {f"at{index}": plane["page_offset"], f"row{index}": plane["row_bytes"]}
    return found


def test_b39_b42_places_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Token 5, and slot 700: page 10, row 60. V4.1 pages are padded to 512 or 256 by some."""
    for name, of_5, of_700 in (
        ("v4", (2880, 36904), (408960, 411744)),
        ("v41_mxfp8", (2560, 32848), (368640, 371648)),
        ("v41_nvfp4", (1280, 16544), (199680, 202624)),
        ("indexer_fp8", (640, 8212), (92160, 92912)),
        ("indexer_mxfp4", (320, 4116), (47360, 47856)),
    ):
        page = facts(capsys, name)
        for index in (0, 1):
            start, row = page[f"at{index}"], page[f"row{index}"]
            assert start + 5 * row == of_5[index]
            assert 10 * page["page"] + start + 60 * row == of_700[index]
    for name, sizes in (
        ("v4", [1728, 19008, 37440, 74880, 149760]),
        ("sglang:V41", [1536, 16896, 33792, 67584, 135168]),
        ("sglang:V41_FP4", [768, 9216, 18432, 36864, 73728]),
    ):
        assert [facts(capsys, name, rows)["page"] for rows in (2, 32, 64, 128, 256)] == sizes


def test_b40_padding_is_no_row() -> None:
    """37,440 / 64 is 585, no row; what lies in the last 64 bytes is neither read nor moved."""
    layout, source = get_layout("v4"), ordinary("v4", 64)
    dumps = [
        dump_of(layout, encode_records(source.rows, layout), 64, fill=fill) for fill in (0xFF, 0)
    ]
    assert len(dumps[0].data) == 37440 and layout.byte_offset(63, "nope", 64) == 36288
    found = diff_dumps(*dumps)
    assert found.equal and found.padding == 64
    flat = [convert(dump, get_layout("v4_unpadded"))[0] for dump in dumps]
    assert flat[0].shape == (1, 64 * 584) and np.array_equal(*flat)
    assert explain_rows(dumps[0], source).status == "no difference"
    # The page taken as 64 rows of 585 bytes: row 63 then begins at 36,855.
    copied = np.zeros(64 * 584, np.uint8).reshape(64, 584)
    copied[:] = dumps[1].data.reshape(64, 585)[:, :584]
    assert explain_rows(
        Dump.of(copied.reshape(-1), get_layout("v4_unpadded"), 64), source
    ).status == ("unexplained")


def test_b41_a_buffer_that_was_not_sent() -> None:
    """Dims 448 to 511 are stale, all else is equal: 128 of 576 bytes of each row."""
    for name in ("v4_two_pools", "v4"):
        layout, source = get_layout(name), ordinary(name, 8)
        source.rows[:, 448:] = 1  # no byte of which is A5
        records = encode_records(source.rows, layout)
        sent = dump_of(layout, records, 4)
        rope = dict((f.name, w) for f, w in field_columns(layout))["rope"]
        stale = dump_of(layout, records, 4)
        stale.data[stale.offsets(np.arange(8))[:, rope]] = 0xA5
        for found in (explain_rows(stale, source), explain_expected(stale, sent)):
            assert named(found) == ["fields-not-written"]
            assert found.fields == {"rope": 8 * 128}
            assert "rope holds A5 in 8 rows: not written" in found.lines()[1]
        assert {name: n for name, (n, _) in diff_dumps(sent, stale).fields.items() if n} == {
            "rope": 8 * 128
        }


def test_b42_v4_and_v41_need_quantizing() -> None:
    found = compare(get_layout("v4"), get_layout("v41_mxfp8"))
    assert "rope (64 bf16, dims 448..511): in v4 alone" in found.differences
    source = ordinary("v4", 2)
    dump = dump_of(get_layout("v4"), encode_records(source.rows, "v4"), 2)
    with pytest.raises(ArgumentError, match=r"v4 to v41_mxfp8: .*needs quantizing"):
        convert(dump, get_layout("v41_mxfp8"))


def test_b43_rows_per_page() -> None:
    """Entries 0, 31, 32, 40, 63 and 64, written to pages of 32 rows and read as pages of 64."""
    layout, entries = get_layout("v4"), np.int64([0, 31, 32, 40, 63, 64])
    places = {0: (0, 0), 31: (0, 31), 32: (1, 0), 40: (1, 8), 63: (1, 31), 64: (2, 0)}
    rows = np.random.default_rng(2).standard_normal((6, 512)).astype(BF16)
    records = encode_records(rows, layout)
    data = np.full(4 * 37440, 0xA5, np.uint8)
    for entry, stored in zip(entries.tolist(), records, strict=True):
        page, row = places[entry]
        start = page * 19008
        data[start + row * 576 :][:576] = stored[:576]
        data[start + 32 * 576 + row * 8 :][:8] = stored[576:]
    source = Rows(rows, entries)
    assert named(explain_rows(Dump.of(data, layout, 64), source)) == ["rows-per-page-half"]
    assert explain_rows(Dump.of(data[: 7 * 19008], layout, 32), source).status == "no difference"


def test_b44_pages_of_two_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """block / ratio rows; a layout whose tiles they do not fill says so."""
    assert [facts(capsys, "v41_mxfp8", 64 // r)["page"] for r in (1, 2)] == [33792, 16896]
    assert [facts(capsys, "v41_mxfp8", 128 // r)["page"] for r in (1, 2)] == [67584, 33792]
    assert [facts(capsys, "v4", 256 // r)["page"] for r in (4, 128)] == [37440, 1728]
    assert main(["layout", "indexer_mxfp4_slots64", "--block-size", "32"]) == 2
    assert "block_size: got 32; allowed: 64" in capsys.readouterr().err


def test_b46_offsets_have_64_bits(tmp_path: Path) -> None:
    """By the header that `layout --c-header` writes, where a C compiler is there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    asked = [
        (1039680, 2065, 2146939200),
        (1039680, 2066, 2147978880),
        (1435968, 1495, 2146772160),
        (1435968, 1496, 2148208128),
        (276480, 7767, 2147420160),
        (276480, 7768, 2147696640),
        (1435968, 4564, 6553757952),
    ]
    calls = [
        f'printf("%lld\\n", (long long)dsv4num_v4_nope_offset({block}LL * 64, 0, 64, {stride}));'
        for stride, block, _ in asked
    ]
    (tmp_path / "v4.h").write_text(c_header(get_layout("v4")))
    source = tmp_path / "b46.c"
    source.write_text(
        '#include <stdio.h>\n#include "v4.h"\nint main(void) {' + "\n".join(calls) + "return 0;}"
    )
    subprocess.run([compiler, "-std=c11", "-o", tmp_path / "b46", source], check=True)
    out = subprocess.run([tmp_path / "b46"], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in out.split()] == [offset for _, _, offset in asked]
    assert 6553757952 - 2 * 2**32 == -2036176640  # what 32 bits make of the last


# --- rounding to bf16, RoPE, pooling --------------------------------------------------


def rope_record(words: dict[int, int]) -> np.ndarray:
    """A v4 record of zeros with bf16 words in some of its dims from 448 on."""
    found = np.zeros(584, np.uint8)
    found[576:583] = 0x69
    for dim, word in words.items():
        found[448 + 2 * dim : 450 + 2 * dim] = word & 0xFF, word >> 8
    return found


def rope_blamed(source: Latents | Rows, right: dict[int, int], wrong: dict[int, int]) -> list[str]:
    """What explains the wrong words of one v4 row; the right ones must be no difference."""
    layout = get_layout("v4")
    found = explain_rows(dump_of(layout, rope_record(right)[None], 1), source)
    assert found.status == "no difference", found.lines()
    return named(explain_rows(dump_of(layout, rope_record(wrong)[None], 1), source))


def test_b56_half_up() -> None:
    """1.00390625 is a tie between 3F80 and 3F81, 1.01171875 one between 3F81 and 3F82."""
    row = np.zeros((1, 512), np.float32)
    row[0, 448:450] = 1.00390625, 1.01171875
    source = Rows(row, np.int64([0]))
    assert rope_blamed(source, {0: 0x3F80, 1: 0x3F82}, {0: 0x3F81, 1: 0x3F82}) == ["bf16-half-up"]


def first_pair_of(table: np.ndarray, pair: int = 0) -> np.ndarray:
    """A table that turns this pair alone; others would make -0 of 0."""
    found = np.zeros_like(table)
    found[:, :32] = 1
    found[:, [pair, 32 + pair]] = table[:, [pair, 32 + pair]]
    return found


def word(x: float) -> int:
    """The bf16 word next to a decimal figure."""
    return int(np.float32(x).astype(BF16).view(np.uint16))


def test_b58_halves() -> None:
    """1, 2, 3, 4 at angles 1.0 and 0.1, in dims that are the toy's four under either pairing."""
    table = np.zeros((1, 64), np.float32)
    table[0, :32] = 1
    for pair, angle in ((0, 1.0), (1, 0.1), (16, 0.1)):
        table[0, pair], table[0, 32 + pair] = math.cos(angle), math.sin(angle)
    latent = np.zeros((1, 512), np.float32)
    dims = (0, 1, 32, 33)
    latent[0, [448 + dim for dim in dims]] = 1, 2, 3, 4
    source = Latents(latent.astype(BF16), np.int64([0]), table, np.int64([0]))
    right, wrong = (
        dict(zip(dims, map(word, figures), strict=True))
        for figures in (
            (-1.142640, 1.922076, 2.585679, 4.279517),
            (-1.984111, 1.590675, 2.462378, 4.179683),
        )
    )
    assert rope_blamed(source, right, wrong) == ["rope-halves"]


@pytest.mark.parametrize(
    ("words", "dialect"),
    [
        ((0x3F41, 0x3F28), "rope-position-last"),
        ((0x3F0A, 0x3F57), "rope-position-entry"),
        ((0x3F80, 0x0000), "rope-absent"),
    ],
)
def test_b59_positions(words: tuple[int, int], dialect: str) -> None:
    """Tokens 4 to 7 with ratio 4: position 4, not 7, not the entry 1, and not none."""
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448] = 1
    table = first_pair_of(build_cos_sin_cache(8))
    source = Latents(latent.astype(BF16), np.int64([7]), table, np.int64([0]), 4)
    right = {0: 0xBF27, 1: 0xBF42}
    assert rope_blamed(source, right, dict(enumerate(words))) == [dialect]


def test_b61_a_table_of_bf16() -> None:
    """A second pair is turned by a cosine that bf16 holds, and would show a cut of the product."""
    table = first_pair_of(build_cos_sin_cache(2))
    table[1, 1] = 0.75
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448:451] = 1.03125, 1.0, 1.0078125
    source = Latents(latent.astype(BF16), np.int64([1]), table, np.int64([0]))
    same = {1: word(1.03125 * math.sin(1.0) + math.cos(1.0)), 2: 0x3F42}
    assert rope_blamed(source, {0: 0xBE92, **same}, {0: 0xBE91, **same}) == ["rope-table-bf16"]


# --- Annex A --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "dialect"),
    [
        ("72", "floor-1e-4-on-scale"),
        ("5C", "floor-1e-8-on-amax"),
        ("7F", "no-floor-zero-is-one"),
    ],
)
def test_a01_zero_tile(code: str, dialect: str) -> None:
    assert blamed(
        "v4",
        ([0], ("69", "00"), (code, "00")),
        ([448], ("7F", "7E"), ("7F", "7E")),
    ) == [dialect]


def test_a02_a_small_tile() -> None:
    values = [number(0x3C240000)]  # bf16 of 0.01
    case: Case = (values, ("70", "7A"), ("72", "6A"))
    assert blamed("v41_mxfp8", case, ([0], ("69", "00"), ("72", "00"))) == ["floor-1e-4-on-scale"]
    same = {
        name: inspect_row(
            dump_of(get_layout(name), record(get_layout(name), typed)[None], 1), 0
        ).groups[0]["amax"]
        for name, typed in (("v41_mxfp8", case[1]), ("v41_mxfp8@P2", case[2]))
    }
    assert set(same.values()) == {0.009765625}


def test_a06_unrounded_scale_words() -> None:
    """The word 300 / 448 as fp32, and the one of zeros, with the floor."""
    assert blamed(
        "indexer_fp8",
        ([300, 100], ("00 00 80 3F", "79 6C"), ("B7 6D 2B 3F", "7E 71")),
        ([0], ("00 00 80 34", "00"), ("AD AC 6F 34", "00")),
    ) == ["scale-word-unrounded"]


def test_a07_rotation_rounded_to_bf16() -> None:
    """Position 714, pair 6, base 160000; the scale comes from 3.0 in pair 0, which is not turned."""
    table = first_pair_of(build_cos_sin_cache(715, theta=160000.0), 6)
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448], latent[0, 460:462] = 3.0, (-0.8125, 0.34765625)
    source = Latents(latent.astype(BF16), np.int64([714]), table, np.int64([0]))
    layout = get_layout("v41_mxfp8")
    records = []
    for codes in ((0xED, 0x61), (0xEE, 0x60)):
        typed = np.zeros(528, np.uint8)
        typed[512:] = 0x69
        typed[526], typed[448], typed[460:462] = 120, 0x7C, codes
        records.append(typed)
    assert explain_rows(dump_of(layout, records[0][None], 1), source).status == "no difference"
    assert named(explain_rows(dump_of(layout, records[1][None], 1), source)) == [
        "bf16-step-present"
    ]


def test_a08_amax_divided_by_six() -> None:
    """Only an fp32 amax shows it; 7 does not."""
    assert blamed(
        "v41_nvfp4",
        ([number(0x40E3FFFF)], ("3A", "07"), ("39", "07")),
        ([7], ("39", "07"), ("39", "07")),
        ([12], ("40", "07"), ("40", "07")),
    ) == ["amax-divided"]


def test_a09_infinite_tile() -> None:
    """FE in place of FF, under which the infinity is the largest number and not NaN."""
    assert blamed("v4", ([np.inf, 1], ("FF", "7F 00"), ("FE", "7E 00"))) == ["infinite-code-254"]
    # The same writer makes 0 of a NaN in the bf16 values.
    layout, row = get_layout("v4"), np.zeros((1, 512), np.float32)
    row[0, :64], row[0, 450] = np.inf, np.nan
    right = rope_record({2: 0x7FFF})
    right[:64], right[576] = 0x7F, 0xFF
    wrong = rope_record({})
    wrong[:64], wrong[576] = 0x7E, 0xFE
    source = Rows(row, np.int64([0]))
    assert explain_rows(dump_of(layout, right[None], 1), source).status == "no difference"
    assert named(explain_rows(dump_of(layout, wrong[None], 1), source))[0] == (
        "infinite-code-254 raw-nan-to-zero"
    )


def test_a10_slot_0_and_padding_tokens() -> None:
    """-1 writes nothing; a project that reserves slot 0 leaves it as it was."""
    layout, rows = get_layout("indexer_mxfp4"), ordinary("indexer_mxfp4", 4).rows
    records = encode_records(rows, layout)
    slots = np.int64([0, -1, 1, 2])
    dump = dump_of(layout, np.full((4, 68), 0xA5, np.uint8), 4)
    dump.data[dump.offsets(slots[[0, 2, 3]])] = records[[0, 2, 3]]
    source = Rows(rows, slots)
    assert explain_rows(dump, source).status == "no difference"
    dump.data[dump.offsets(np.int64([0]))] = 0xA5
    found = explain_rows(dump, source)
    assert named(found)[0] == "rows-not-written"
    assert "1 row never written, the first in slot 0: all A5" in found.lines()[1]


def test_a11_a_table_read_in_turn() -> None:
    """A row of 32 cosines, then 32 sines; read in turn, the first pair takes two cosines."""
    table = np.zeros((1, 64), np.float32)
    table[0, :32], table[0, 32:] = 0.5, 0.25
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448:450] = 2, 1
    source = Latents(latent.astype(BF16), np.int64([0]), table, np.int64([0]))
    right = {0: word(1.0 - 0.25), 1: word(0.5 + 0.5)}
    wrong = {0: word(1.0 - 0.5), 1: word(0.5 + 1.0)}
    assert rope_blamed(source, right, wrong) == ["rope-table-in-turn"]


def test_a13_zero_tile_of_nvfp4() -> None:
    assert blamed("v41_nvfp4", ([0], ("01", "00"), ("08", "00"))) == ["floor-2^-6-on-scale"]


@pytest.mark.parametrize(
    ("codes", "dialect"), [("07", "nan-to-zero"), ("87", "nan-to-negative-zero")]
)
def test_a15_nan_in_fp4(codes: str, dialect: str) -> None:
    """Behind a 6: 7 by the contract, 0 by encoders with thresholds, 8 by a library's cast."""
    assert blamed("indexer_mxfp4", ([6, np.nan], ("7F", "77"), ("7F", codes))) == [dialect]


def test_a17_quantized_twice() -> None:
    """Codes 9, 4, 12, 9 by a packer with the floor on the scale; 10 behind a first quantization."""
    row = np.zeros((1, 128), np.uint16)
    row[0, :4] = 0xB899, 0x399E, 0xB98B, 0xB8B8
    row = row.view(BF16)
    layout = get_layout("indexer_mxfp4")
    direct = encode_records(row, "indexer_mxfp4@M3")
    assert direct[0].tobytes() == bytes.fromhex("49 9C" + "00" * 62 + "72" * 4)
    source = Rows(row, np.int64([0]))
    assert named(explain_rows(dump_of(layout, direct, 1), source)) == ["floor-1e-4-on-scale"]
    first = decode_records(encode_records(row, layout), layout)
    twice = encode_records(first, "indexer_mxfp4@M3")
    assert twice[0].tobytes() == bytes.fromhex("49 AC" + "00" * 62 + "72" * 4)
    # No dialect quantizes twice: the floor explains all but that nibble, and the rest is said.
    found = explain_rows(dump_of(layout, twice, 1), source)
    assert (found.status, found.left) == ("partly explained", {"codes": 1})
    assert found.hypotheses[0].names == ("floor-1e-4-on-scale",)


# --- what should not matter -----------------------------------------------------------


def test_b73_a_poisoned_row() -> None:
    """Slot 7 holds NaN in codes, RoPE and scales: `inspect` names them all."""
    layout, source = get_layout("v4"), ordinary("v4", 8)
    dump = dump_of(layout, encode_records(source.rows, layout), 8)
    poison = rope_record(dict.fromkeys(range(64), 0x7FC0))
    poison[:448], poison[576:583] = 0x7F, 0xFF
    dump.data[dump.offsets(np.int64([7]))] = poison
    anomalies = inspect_row(dump, 7).anomalies
    assert "nope 0..63: the scale is NaN (FF), and so is every value" in anomalies
    assert "nope 0..63: 64 NaN codes, the first at element 0 of the group" in anomalies
    assert anomalies[-1] == "rope: 64 values are NaN or infinite"
    assert inspect_row(dump, 6).anomalies == []


# --- the list -------------------------------------------------------------------------

#: Reports without a figure of encoding, layout or conversion, and why.
NOT_BYTES = {
    **dict.fromkeys(
        ("B47", "B49", "B51", "B52", "B53", "B55", "B57"),
        "the state and the pooling of the compressor, before a record is encoded",
    ),
    "B54": "which layers have a compressor",
    "B60": "the table, which is given to the operations and to `explain`",
    **dict.fromkeys(
        ("B63", "B65", "B66", "B67", "B68", "B69", "B70", "B71", "B72"),
        "indices and lengths, not the bytes of pages",
    ),
    "B74": "attention over the rows of a page that nobody wrote",
}
#: Every report of the collection. Its numbers have gaps.
REPORTS = [
    *(f"B{n:02d}" for n in range(1, 75) if n not in {4, 5, 15, 20, 29, 35, 37, 45, 48, 50, 62, 64}),
    *(f"A{n:02d}" for n in range(1, 18)),
]


def test_every_report_is_put_to_a_tool_or_is_not_about_bytes() -> None:
    here = {
        number.upper()
        for name in globals()
        if name.startswith("test_")
        for number in re.findall(r"(?<=_)[ab]\d\d(?=_)", name)
    }
    assert not here & NOT_BYTES.keys()
    assert here | NOT_BYTES.keys() == set(REPORTS)
