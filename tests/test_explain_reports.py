"""Dialects against figures of public bug reports (B..) and of known differences (A..).

The planted faults of test_explain.py and the search share one encoder; here every expected byte is
typed in, from what others published. `test_reports_by_tool.py` puts the figures to the search itself.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dsv4num import get_layout
from dsv4num.explain import DIALECTS, Latents, States, apply, encode_under
from dsv4num.explain.encoder import Knobs
from dsv4num.reference import build_cos_sin_cache

BF16 = ml_dtypes.bfloat16
TINY = 2.0**-140
BITS_399D = 0.00029945373535156250  # the bf16 next to 3e-4


def bits(word):
    return float(np.uint32(word).view(np.float32))


def tile(name, dialects, *values):
    """Scale bytes of the first group, and the codes of the given elements, as hex."""
    layout = get_layout(name)
    row = np.zeros((1, layout.head_dim), np.float32)
    row[0, : len(values)] = np.array(values, np.float64).astype(np.float32)
    knobs = apply(*(DIALECTS[part] for part in dialects.split()))
    record = encode_under(row, layout, knobs, bf16=False)[0]
    fields = {f.kind: (first, f) for first, f in starts(layout)}
    first, field = fields["codes"]
    count = len(values) * field.rule.element.width // 8 or 1
    codes = record[first : first + count].tobytes().hex(" ").upper()
    first, field = fields["scale"]
    scale = record[first : first + field.format.width // 8].tobytes().hex(" ").upper()
    return scale, codes


def starts(layout):
    """Every field with its first byte in a record."""
    first = 0
    for plane in layout.planes:
        yield from ((first + f.offset, f) for f in plane.fields)
        first += plane.row_bytes


def scales(name, dialects, *amaxes):
    """Scale codes of groups with these amax, in decimal."""
    return [int(tile(name, dialects, amax)[0].split()[0], 16) for amax in amaxes]


def test_b01_scale_rounded_after_use():
    amaxes = 225, 300, 336, 448, 449
    right = [tile("v4", "", amax) for amax in amaxes]
    assert right == [("7F", "76"), ("7F", "79"), ("7F", "7A"), ("7F", "7E"), ("80", "76")]
    assert tile("v4", "scale-rounded-after-use", 300) == ("7F", "7E")
    assert tile("v4", "scale-rounded-after-use", 225) == ("7F", "7E")


def test_b02_place_of_the_floor():
    edge = 448 * 2.0**-14
    amaxes = 0, 1e-5, 2e-3, 0.01, edge, float(np.nextafter(np.float32(edge), np.float32(1))), 0.03
    assert scales("v4", "", *amaxes) == [105, 105, 110, 112, 113, 114, 114]
    assert scales("v4", "floor-1e-4-on-scale", *amaxes) == [114] * 7
    assert tile("v4", "", 0.01, 2e-7) == ("70", "7A 03")
    assert tile("v4", "floor-1e-4-on-scale", 0.01, 2e-7) == ("72", "6A 01")


def test_b03_log2_in_fp32():
    for k in range(-14, 9):
        amax = float(np.nextafter(np.float32(448 * 2.0**k), np.float32(np.inf)))
        assert scales("v4", "", amax) == [128 + k]
        assert scales("v4", "exponent-log2-ceil", amax) == [128 + k - (k <= -5 or k >= 4)]
    assert tile("v4", "", bits(0x41600001)) == ("7B", "76")
    assert tile("v4", "exponent-log2-ceil", bits(0x41600001)) == ("7A", "7E")


def test_b06_mantissa_dropped():
    assert tile("v4", "scale-mantissa-dropped", 336) == ("7E", "7E")
    assert tile("v4", "", 336) == ("7F", "7A")


def test_b07_exponent_rules():
    amaxes = 6.0, 6.5, 7.0, 7.5, 8.0
    assert scales("indexer_mxfp4", "", *amaxes) == [127, 128, 128, 128, 128]
    assert scales("indexer_mxfp4", "exponent-ocp", *amaxes) == [127, 127, 127, 127, 128]
    assert scales("indexer_mxfp4", "exponent-even", *amaxes) == [127, 127, 128, 128, 128]
    assert tile("v4", "", 500) == ("80", "78")
    assert tile("v4", "exponent-log2-nearest", 500) == ("7F", "7E")


def test_b08_log2_cut():
    of = [448 * s for s in (0.25, 0.3, 0.5, 1, 3, 4)]
    assert scales("v4", "", *of) == [125, 126, 126, 127, 129, 129]
    assert scales("v4", "exponent-down", *of) == [125, 125, 126, 127, 128, 129]
    assert scales("v4", "exponent-log2-cut", 448 * 0.3, 448 * 3.0) == [126, 128]


def test_b09_floors_of_mxfp4():
    amaxes = 0, TINY, 1e-5, BITS_399D, 6e-4
    assert scales("indexer_mxfp4", "", *amaxes) == [1, 1, 108, 113, 114]
    assert scales("indexer_mxfp4", "floor-1e-4-on-amax", *amaxes) == [112, 112, 112, 113, 114]
    assert scales("indexer_mxfp4", "floor-1e-4-on-scale", *amaxes) == [114] * 5
    assert tile("indexer_mxfp4", "", BITS_399D, 0) == ("71", "06")
    assert tile("indexer_mxfp4", "floor-1e-4-on-scale", BITS_399D, 0) == ("72", "04")


def test_b16_negative_zero_in_fnuz():
    values = [-(2.0**-k) for k in range(9, 14)]
    assert tile("v4_fnuz", "", 224, *values) == ("7F", "7E 82 81 00 00 00")
    assert tile("v4_fnuz", "negative-zero-is-nan", 224, *values) == ("7F", "7E 82 81 80 80 80")
    assert tile("v4", "", 448, *values) == ("7F", "7E 81 80 80 80 80")


def test_b17_divisors_of_fnuz():
    assert tile("v4_fnuz", "", 232) == ("80", "76")
    assert tile("v4_fnuz", "qmax-240", 232) == ("7F", "7E")
    assert tile("v4_fnuz", "qmax-448", 232)[0] == "7F"


def test_b18_early_saturation():
    values = 224, 112, 120, 128, 136, 144, 208, 17
    assert tile("v4_fnuz", "", *values) == ("7F", "7E 76 77 78 78 79 7D 60")
    wrong = tile("v4_fnuz", "fnuz-early-saturation ties-away", *values)
    assert wrong == ("7F", "7F 76 77 7F 7F 7F 7F 61")


def test_b19_bf16_step():
    values = [1.0625 + d for d in (-(2.0**-12), 0, 2.0**-12, 2.0**-9, 2.0**-7)]
    layout = get_layout("v41_mxfp8")
    row = np.zeros((1, 512), np.float32)
    row[0, 0], row[0, 1:6] = 448, values
    assert tile("v41_mxfp8", "", 448, *values)[1] == "7E 38 38 39 39 39"
    from dsv4num.explain import Rows

    stepped = Rows(row, np.int64([0])).values(Knobs(bf16_step=True))
    record = encode_under(stepped, layout, Knobs(), bf16=False)[0]
    assert record[1:6].tobytes().hex(" ") == "38 38 38 38 39"


def test_b21_two_roundings():
    values = 448, 400.19958, 272.15656, 136.00208, 1.0625001
    assert tile("v4", "", *values) == ("7F", "7E 7D 79 71 39")
    assert tile("v4", "fp16-step", *values) == ("7F", "7E 7C 78 70 38")


def test_b22_casts_of_an_interpreter():
    assert tile("v4", "", 448, 126.24, 17.0) == ("7F", "7E 70 58")
    assert tile("v4", "carry-lost", 448, 126.24)[1] == "7E 68"
    assert tile("v4", "ties-away", 448, 17.0)[1] == "7E 59"


def test_b27_b28_a04_ties_of_e2m1():
    values = 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5
    assert tile("indexer_mxfp4", "", *values) == ("7F", "07 22 44 66")
    assert tile("indexer_mxfp4", "ties-to-zero", *values) == ("7F", "07 21 43 65")
    assert tile("indexer_mxfp4", "ties-away", *values) == ("7F", "17 32 54 76")


def test_b30_nvfp4_scale_rounded_up():
    assert tile("v41_nvfp4", "", 7.0, 0)[0] == "39"
    assert tile("v41_nvfp4", "scale-rounded-up", 7.0, 0)[0] == "3A"


def test_b31_nibbles():
    values = 0.5, 1, 1.5, 2, 0, 0, 0, 0
    rest = [0.0] * 23 + [6.0]
    for dialect, codes in (
        ("", "21 43 00 00"),
        ("nibbles-swapped", "12 34 00 00"),
        ("nibbles-group-halves", "01 02 03 04"),
        ("nibbles-halves", "01 02 03 04"),
    ):
        assert tile("indexer_mxfp4", dialect, *values, *rest)[1][:11] == codes
    assert tile("indexer_mxfp4", "nibbles-group-halves", *values, *rest)[1][-2:] == "70"


@pytest.mark.parametrize(
    ("dialect", "code"),
    [
        ("", "69"),
        ("floor-1e-4-on-scale", "72"),
        ("floor-1e-8-on-amax", "5C"),
        ("no-floor-zero-is-one", "7F"),
    ],
)
def test_a01_zero_tile(dialect, code):
    assert tile("v4", dialect, 0.0) == (code, "00")


def test_a02_a03_a13_small_tiles():
    assert tile("v41_mxfp8", "", bits(0x3C240000)) == ("70", "7A")
    assert tile("v41_mxfp8", "floor-1e-4-on-scale", bits(0x3C240000)) == ("72", "6A")
    assert scales("indexer_mxfp4", "floor-1e-4-on-scale", 0) == [114]
    assert scales("v41_nvfp4", "", 0) == [1]
    assert scales("v41_nvfp4", "floor-2^-6-on-scale", 0) == [8]
    assert scales("v41_nvfp4", "no-floor", 0) == [0]


def test_a05_sign_of_zero():
    assert tile("indexer_mxfp4", "", 6, -0.1)[1] == "87"
    assert tile("indexer_mxfp4", "negative-zero-dropped", 6, -0.1)[1] == "07"
    assert tile("indexer_mxfp4", "negative-zero-input-lost", 6, -0.1)[1] == "87"
    assert tile("indexer_mxfp4", "negative-zero-input-lost", 6, -0.0)[1] == "07"


def test_a06_fp32_scales():
    assert tile("indexer_fp8", "", 300, 100) == ("00 00 80 3F", "79 6C")
    assert tile("indexer_fp8", "scale-word-unrounded", 300, 100) == ("B7 6D 2B 3F", "7E 71")
    assert tile("indexer_fp8", "scale-word-unrounded", 0)[0] == "AD AC 6F 34"
    assert tile("indexer_fp8", "", 0)[0] == "00 00 80 34"
    assert tile("indexer_fp8", "scale-word-unrounded no-floor", 0)[0] == "00 00 00 00"
    assert tile("indexer_fp8", "scale-word-unrounded no-floor-zero-is-one", 0)[0] == "00 00 80 3F"
    assert tile("indexer_fp8", "scale-word-unrounded floor-1e-6-on-amax", 0)[0] == "46 64 19 31"
    assert tile("indexer_fp8", "scale-word-code-repeated", 0)[0] == "69 69 69 69"
    assert tile("indexer_fp8", "scale-word-code-repeated", 448 * 2.0**-7)[0] == "78 78 78 78"


def test_a08_amax_divided_by_six():
    assert tile("v41_nvfp4", "", bits(0x40E3FFFF), 0)[0] == "3A"
    assert tile("v41_nvfp4", "amax-divided", bits(0x40E3FFFF), 0)[0] == "39"


def test_a09_infinite_tile():
    assert tile("v4", "", np.inf)[0] == "FF"
    assert tile("v4", "infinite-code-254", np.inf)[0] == "FE"
    assert tile("v4", "infinite-as-largest", np.inf)[0] == "F7"


def test_reciprocal_of_an_nvfp4_scale():
    amax = 6 * 0.029296875
    assert tile("v41_nvfp4", "", amax, 0.03662109375) == ("0F", "27")
    assert tile("v41_nvfp4", "reciprocal", amax, 0.03662109375) == ("0F", "37")


def test_a07_and_b61_rotated_rows():
    table = build_cos_sin_cache(1024, theta=160000.0)
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448], latent[0, 460:462] = 3.0, (-0.8125, 0.34765625)
    table = table.copy()
    table[714, 0], table[714, 32] = 1, 0  # leaves pair 0, which holds amax
    source = Latents(latent.astype(BF16), np.int64([714]), table, np.int64([0]))
    layout = get_layout("v41_mxfp8")
    found = []
    for name in ("", "bf16-step-present"):
        knobs = apply(*(DIALECTS[part] for part in name.split()))
        record = encode_under(source.values(knobs), layout, knobs, bf16=False)[0]
        found.append(record[460:462].tobytes().hex(" ").upper())
    assert found == ["ED 61", "EE 60"]
    latent = np.zeros((1, 512), np.float32)
    latent[0, 448:450] = 1.03125, 1.0
    source = Latents(latent.astype(BF16), np.int64([1]), build_cos_sin_cache(2), np.int64([0]))
    for name, code in (("", 0xBE92), ("rope-table-bf16", 0xBE91)):
        knobs = apply(*(DIALECTS[part] for part in name.split()))
        record = encode_under(source.values(knobs), get_layout("v4"), knobs, bf16=False)[0]
        assert record[448:450].view("<u2")[0] == code


@pytest.mark.parametrize(
    ("dialect", "mean"), [("", 510.25), ("overlap-lost", 5.5), ("overlap-lanes-swapped", 528.25)]
)
def test_b47_overlap(dialect, mean):
    """Lane A of token t is 1000 + 10 t and lane B is t; group 1 is tokens 4 to 7."""
    kv = np.empty((1, 8, 256), np.float32)
    kv[..., :128] = (1000 + 10 * np.arange(8))[:, None]
    kv[..., 128:] = np.arange(8)[:, None]
    there, weight = np.ones((1, 8), np.bool_), np.ones(128, np.float32)
    at, table = np.int64([7]), build_cos_sin_cache(8)
    source = States(kv, 0 * kv, there, at, table, weight, 0.0, np.int64([0]), 4, True)
    knobs = apply(*(DIALECTS[part] for part in dialect.split()))
    assert source.pooled(knobs)[0, 0] == mean
