"""Layouts in the wild: bytes typed in from what their writers publish, places from their formulas."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from dsv4num.errors import ArgumentError
from dsv4num.formats import (
    LAYOUTS,
    WILD_LAYOUTS,
    WILD_RULES,
    Layout,
    Plane,
    get_layout,
    get_rule,
)
from dsv4num.formats.group import P1_32, P1_64, P2_64
from dsv4num.reference import (
    decode_records,
    dequantize,
    dequantize_and_gather_k_cache,
    encode_records,
    encode_scale,
    quantize,
    quantize_and_insert_k_cache,
    read_records,
    write_records,
)

BF16 = ml_dtypes.bfloat16
EVERY = {**LAYOUTS, **WILD_LAYOUTS}
VARIANTS = [
    found.under(rule).name
    for found in EVERY.values()
    for rule, _ in found.writers
    if rule != found.rule
]


def blocks(layout: Layout) -> list[int]:
    """Block sizes that a layout can have."""
    rows, several = layout.tile_rows
    return [rows, 2 * rows, 5 * rows] if several else [rows]


def pages(layout: Layout, block: int, count: int, fill: int) -> list[np.ndarray]:
    """A cache, one array for each pool."""
    sizes = [layout.page_bytes(block, pool=pool) for pool in range(layout.pools)]
    return [np.full((count, size), fill, np.uint8) for size in sizes]


def given(cache: list[np.ndarray]) -> object:
    """The cache as the operations take it."""
    return cache if len(cache) > 1 else cache[0]


def some_rows(layout: Layout, count: int, seed: int = 3) -> np.ndarray:
    """Rows of ordinary values, small ones, and zeros."""
    rows = np.random.default_rng(seed).standard_normal((count, layout.head_dim))
    rows[1::4] *= 1e-3
    rows[2::7] = 0
    return rows.astype(BF16)


# --- the registry ---------------------------------------------------------------------


def test_names_and_aliases_mean_one_layout() -> None:
    names = [*EVERY, *(alias for layout in EVERY.values() for alias in layout.aliases)]
    assert len(names) == len(set(names)) and not LAYOUTS.keys() & WILD_LAYOUTS.keys()
    for layout in EVERY.values():
        for name in (layout.name, *layout.aliases):
            assert get_layout(name) is layout
    for alias, name in {
        "vllm:fp8_ds_mla@v4": "v4",
        "flashmla:MODEL1": "v4",
        "sglang:V41_NEW": "v41_mxfp8_inline",
        "sglang:V41": "v41_mxfp8_page512",
        "sglang:V41_FP4": "v41_nvfp4_page256",
        "sgl-flash-mla:V32_NO_ROPE": "v32_fp8_norope",
        "trtllm:footer_scale_kv": "v4_trtllm",
        "vllm:fp8_ds_mla@v3.2": "v32_fp8",
    }.items():
        assert get_layout(alias).name == name


def test_every_layout_has_a_source_and_known_rules() -> None:
    for layout in EVERY.values():
        assert layout.source and layout.evidence in ("S", "T", "D"), layout.name
        for _, field in layout.fields():
            if field.rule is not None:
                assert get_rule(field.rule.name) == field.rule
        if layout.writers:
            assert layout.rule in [rule for rule, _ in layout.writers]


def test_a_layout_under_the_rule_of_another_writer() -> None:
    other = get_layout("v4@P2")
    assert other == get_layout("flashmla:MODEL1@P2") == get_layout("v4").under(P2_64)
    assert other.name == "v4@P2" and other.rule == P2_64
    assert get_layout("v4@P1") is get_layout("v4")
    assert [f.nbytes for _, f in other.fields()] == [f.nbytes for _, f in get_layout("v4").fields()]
    fnuz = get_layout("indexer_fp8_tiles_fnuz@P1_240")
    assert fnuz.rule.qmax == 240 and fnuz.field("codes").format.name == "e4m3fnuz"
    rope = dict((f.name, f.rule.name) for _, f in get_layout("v32_nvfp4@N3").fields())
    assert rope == {"codes": "N3/16", "rope": "unit/64", "scale": "N3/16"}
    with pytest.raises(
        ArgumentError, match=r"'v4@M1'; allowed: v4@RULE with P1, P2, P3, P4 .*4\.6"
    ):
        get_layout("v4@M1")
    with pytest.raises(ArgumentError, match="plain_bf16@RULE with no rule but its own"):
        get_layout("plain_bf16@P1")
    with pytest.raises(ArgumentError, match="P1/32; allowed: P1/64, P2/64, P3/64, P4/64 in v4"):
        get_layout("v4").under(P1_32)
    with pytest.raises(ArgumentError, match="P1/64; allowed: no other rule in plain_bf16"):
        get_layout("plain_bf16").under(P1_64)


@pytest.mark.parametrize("name", [*EVERY, *VARIANTS])
def test_fields_tile_every_plane(name: str) -> None:
    layout = get_layout(name)
    described = np.zeros(layout.head_dim, int)
    for plane in layout.planes:
        places = [place for field in plane.fields for place in field.places]
        assert sorted(places) == list(range(plane.row_bytes))
        for field in plane.fields:
            if field.kind in ("codes", "raw"):
                described[slice(*field.dims)] += 1
                assert field.entries == field.dims[1] - field.dims[0]
            if field.kind == "scale":
                assert field.entries * field.rule.group == field.dims[1] - field.dims[0]
    assert (described == 1).all()


def test_widths() -> None:
    widths = {
        656: ("v32_fp8", "v32_fp8_planes"),
        640: ("v4_ascend", "v4_two_pools", "v4_two_pools_g32"),
        584: ("v4", "v4_unpadded", "v4_page16", "v4_trtllm"),
        544: ("v41_mxfp8_ascend",),
        528: ("v32_fp8_norope", "ggml_fp8_b32_e8m0", "v41_mxfp8_page512"),
        432: ("glm_nvfp4",),
        384: ("v4_nvfp4",),
        368: ("v4_mxfp4", "glm_nvfp4_fp8rope", "glm_nvfp4_fp8rope_token"),
        360: ("v4_nvfp4_g64",),
        352: ("v32_nvfp4",),
        320: ("v41_mxfp4_ascend",),
        304: ("glm_nvfp4_norope",),
        288: ("v41_mxfp4_ascend_g32", "ggml_fp4_b16_e4m3", "v41_nvfp4_page256"),
        132: ("indexer_fp8_mx", "indexer_fp8_inline", "indexer_fp8_tiles"),
        68: ("ggml_fp4_b32_e8m0", "indexer_mxfp4_inline", "indexer_mxfp4_slots64"),
        512: ("plain_fp8",),
        1024: ("plain_bf16",),
    }
    for width, names in widths.items():
        for name in names:
            assert get_layout(name).row_bytes == width


def test_pages() -> None:
    """Page sizes as engines state them."""
    for name, rows, size in [
        ("v4_trtllm", 64, 37_376),
        ("v4", 64, 37_440),
        ("v4_page16", 1, 592),
        ("v41_mxfp8_page512", 32, 16_896),
        ("v41_mxfp8_page512", 2, 1_536),
        ("v41_nvfp4_page256", 64, 18_432),
        ("v41_nvfp4_page256", 2, 768),
        ("v41_mxfp8_inline_page3168", 32, 19_008),
        ("indexer_fp8_page576", 64, 8_640),
        ("indexer_fp8_page512", 64, 8_704),
        ("plain_fp8", 1, 512),
        ("v4_two_pools", 64, 64 * 512 + 64 * 128),
    ]:
        assert get_layout(name).page_bytes(rows) == size, name
    pools = get_layout("v4_two_pools")
    assert [pools.page_bytes(64, pool=pool) for pool in (0, 1)] == [32_768, 8_192]


def test_tiles_need_whole_tiles() -> None:
    for name, rows, allowed in [
        ("indexer_fp8_tiles", 24, "a multiple of 16"),
        ("indexer_mxfp4_slots64", 128, "64 in"),
        ("indexer_mxfp4_slots64", 32, "64 in"),
        ("indexer_mxfp4_slots8", 64, "8 in"),
        ("indexer_mxfp4_runs32", 16, "a multiple of 32"),
    ]:
        with pytest.raises(ArgumentError, match=f"block_size: got {rows}; allowed: {allowed}"):
            get_layout(name).page_bytes(rows)


# --- bytes of records -----------------------------------------------------------------

#: A row of ones, from what is known of each writer.
ONES = {
    "v32_fp8": "512x78 4x0000803B 64x803F",
    "v32_fp8@F2": "512x7E 4x2549123B 64x803F",
    "v32_fp8@F3": "512x7E 4x2549123B 64x803F",
    "v32_fp8@F5": "512x7E 4x2549123B 64x803F",
    "v32_fp8_planes": "512x78 4x0000803B 64x803F",
    "v32_fp8_norope": "512x78 4x0000803B",
    "v32_fp8_norope@F3": "512x7E 4x2549123B",
    "v32_nvfp4": "256x77 64x38 32x23",
    "v32_nvfp4@N3": "256x77 64x38 32x23",
    "glm_nvfp4": "256x77 32x23 16x00 64x803F",
    "glm_nvfp4_fp8rope": "256x77 32x23 1x2549123B 12x00 64x7E",
    "v4@P2": "448x78 64x803F 7x77 1x00",
    "v4_trtllm": "448x78 64x803F 7x77 1x00",
    "v4_two_pools": "448x78 14x77 50x00 64x803F",
    "v4_two_pools_g32": "448x78 14x77 50x00 64x803F",
    "v4_mxfp4": "224x66 14x7D 2x00 64x803F",
    "v4_nvfp4": "224x77 64x803F 28x23 4x00",
    "v4_nvfp4_g64": "224x66 64x803F 7x7D 1x00",
    "v4_ascend": "448x78 64x803F 7x77 57x00",
    "v41_mxfp8_ascend": "512x78 16x803B",
    "v41_mxfp4_ascend": "256x66 32x803E",
    "v41_mxfp4_ascend_g32": "256x66 16x803E",
    "ggml_fp8_b32_e8m0": 16 * "1x77 32x78 ",
    "ggml_fp4_b16_e4m3": 32 * "1x23 8x77 ",
    "ggml_fp4_b32_e8m0": 4 * "1x7D 16x66 ",
    "plain_bf16": "512x803F",
    "plain_fp8": "512x38",
    "indexer_fp8_mx": "128x78 4x77",
    "indexer_fp8_inline": "128x7E 1x2549123B",
    "indexer_fp8@F1": "128x7E 1x2549123B",
    "indexer_fp8_tiles": "128x78 1x0000803B",
    "indexer_mxfp4_inline": "64x66 4x7D",
}
#: The scale bytes of one group of zeros.
ZEROS = {
    "v4@P1": "69",
    "v4@P2": "72",
    "v4@P3": "5C",
    "v4@P4": "7F",
    "v4_trtllm": "5C",
    "v32_fp8": "00000039",
    "v32_fp8@F2": "00008000",
    "v32_fp8@F3": "00000000",
    "v32_fp8@F4": "57BDBF32",
    "v32_fp8@F5": "46641931",
    "v32_fp8_norope@F6": "0000803F",
    "v41_mxfp8@P2": "72",
    "v41_mxfp8_inline_page3168": "69",
    "v41_nvfp4@N1": "01",
    "v32_nvfp4@N3": "01",
    "glm_nvfp4": "00",
    "v4_nvfp4": "00",
    "v4_nvfp4_g64": "19",
    "v4_mxfp4": "00",
    "v41_mxfp8_ascend": "8034",
    "v41_mxfp4_ascend": "0000",
    "indexer_fp8": "00008034",
    "indexer_fp8@F1": "ADAC6F34",
    "indexer_fp8@F3z": "00000000",
    "indexer_fp8@F5": "46641931",
    "indexer_fp8_mx": "69696969",
    "indexer_mxfp4": "01",
    "indexer_mxfp4@M2": "70",
    "indexer_mxfp4@M3": "72",
    "ggml_fp4_b32_e8m0": "01",
}


@pytest.mark.parametrize("name", ONES)
def test_a_row_of_ones(name: str) -> None:
    layout = get_layout(name)
    runs = [run.partition("x") for run in ONES[name].split()]
    expected = b"".join(int(count) * bytes.fromhex(code) for count, _, code in runs)
    row = np.ones((1, layout.head_dim), np.float32)
    record = encode_records(row, layout)
    assert record.tobytes() == expected
    values = decode_records(record, layout).astype(np.float32)
    assert np.abs(values - 1).max() <= 1 / 32  # 6 * 0.171875 is 1.03125


@pytest.mark.parametrize("name", ZEROS)
def test_a_group_of_zeros(name: str) -> None:
    layout = get_layout(name)
    row = np.zeros((1, layout.head_dim), np.float32)
    index, field = next((i, f) for i, f in layout.fields() if f.kind == "scale")
    first = sum(plane.row_bytes for plane in layout.planes[:index])
    record = encode_records(row, layout)[0]
    stored = record[[first + at for at in field.places]]
    size = len(bytes.fromhex(ZEROS[name]))
    assert stored[:size].tobytes().hex().upper() == ZEROS[name]
    assert (stored.reshape(-1, size) == stored[:size]).all()
    if not name.endswith("@F3"):  # whose 0 * (1 / 0) is NaN
        assert not decode_records(record[None], layout).astype(np.float32).any()


def test_no_floor_and_a_reciprocal_give_nan() -> None:
    codes, scales = quantize(np.zeros((1, 128), np.float32), "F3/128")
    assert (codes == 0x7F).all() and scales.tolist() == [[0]]


def test_scales_of_one_tile_with_a_small_amax() -> None:
    """amax 0.01, as bf16 0.010009766: code 112 and element 7A by P1, 114 and 6A by P2."""
    row = np.zeros((1, 512), np.float32)
    row[0, 0] = 0.010009766
    for name, scale, code in (("v4", 112, 0x7A), ("v4@P2", 114, 0x6A), ("v4@P3", 112, 0x7A)):
        record = encode_records(row, name)[0]
        assert (record[576], record[0]) == (scale, code)


def test_the_two_roundings_of_one_release() -> None:
    """amax 7: 39 to nearest, 3A up."""
    amax = np.array([7.0], np.float32)
    assert encode_scale(amax, "N2/16").tolist() == [0x39]
    assert encode_scale(amax, "N3/16").tolist() == [0x3A]
    assert encode_scale(amax, "N1/16").tolist() == [0x39]
    assert encode_scale(np.array([1e9], np.float32), "N3/16").tolist() == [0x7E]
    assert encode_scale(amax, "S1/16").tolist() == [0x3F80]
    codes, _ = quantize(np.full((1, 16), 7, np.float32), "S1/16")
    assert (codes == 7).all()  # 7 saturates to 6


def test_division_and_reciprocal() -> None:
    """Scale 0F, element 0.03662109375: code 2 by division, 3 by the reciprocal."""
    group = np.full((1, 16), 0.03662109375, np.float32)
    group[0, 0] = 6 * 0.029296875
    for rule, code in (("N1/16", 2), ("N4/16", 3), ("N6/16", 3)):
        codes, scales = quantize(group, rule)
        assert (int(scales[0, 0]), int(codes[0, 1])) == (0x0F, code), rule


def test_divided_by_six_or_multiplied() -> None:
    amax = np.array([0x3DE3FFFF], np.uint32).view(np.float32)
    assert {int(encode_scale(amax, r)[0]) for r in ("N1/16", "N2/16")} == {9, 10}


def test_scales_of_one_layout_read_by_another() -> None:
    """528 bytes whose last 16 are four fp32 numbers or sixteen UE8M0 codes."""
    record = encode_records(np.ones((1, 512), np.float32), "v32_fp8_norope@F3")
    scales = record[0, 512:516].astype(np.int64) - 127
    assert scales.tolist() == [-90, -54, -109, -68]
    record = encode_records(np.ones((1, 512), np.float32), "v32_fp8_norope")
    assert (record[0, 512:516].astype(np.int64) - 127).tolist() == [-127, -127, 1, -68]
    values = decode_records(record, "v41_mxfp8")[0, [0, 32, 64, 96]].astype(np.float64)
    assert values.tolist() == [256 * 2.0**e for e in (-127, -127, 1, -68)]


def test_seven_by_each_rule() -> None:
    """amax 7: scale 1 by S1, which saturates; 2 by M1, 7 becomes 8; 1.125 by N1."""
    group = np.full((1, 32), 7, np.float32)
    for rule, scale, value in (("S1/32", 0x3F80, 6.0), ("M1/32", 128, 8.0)):
        codes, scales = quantize(group, rule)
        assert int(scales[0, 0]) == scale
        assert (dequantize(codes, scales, rule) == value).all()
    codes, scales = quantize(group[:, :16], "N1/16")
    assert (dequantize(codes, scales, "N1/16") == 6 * 1.125).all()


def test_permuted_scales() -> None:
    """Blocks 0..7 of 352 bytes are at +0, 8, 16, 24, 1, 9, 17, 25."""
    row = np.zeros((1, 576), np.float32)
    row[0, :512] = np.repeat(np.arange(1, 33) * 6.0, 16)
    stored = encode_records(row, "v32_nvfp4")[0, 320:]
    values = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    where = [int(np.argmin(np.abs(values - s))) for s in range(1, 9)]
    assert where == [0, 8, 16, 24, 1, 9, 17, 25]
    assert get_layout("v32_nvfp4").byte_offset(0, "scale", 64, entry=5) == 320 + 9


def test_a_scale_for_all_groups_of_a_row() -> None:
    row = np.zeros((2, 512), np.float32)
    row[0, :16], row[0, 16:] = 2688, 448 * 3
    record = encode_records(row, "glm_nvfp4_norope")[0]
    assert record[292:296].tobytes().hex(" ") == "00 00 80 3f"
    assert record[256:258].tobytes().hex(" ") == "7e 76" and (record[:256] == 0x77).all()
    assert not record[[*range(288, 292), *range(296, 304)]].any()
    assert decode_records(record[None], "glm_nvfp4_norope")[0, [0, 16]].astype(float).tolist() == [
        2688.0,
        1344.0,
    ]
    nan = np.full((1, 576), np.nan, np.float32)
    nan[0, 1] = 5.25
    record = encode_records(nan, "glm_nvfp4_fp8rope_token")[0]
    assert record[292:296].view("<f4")[0] == np.float32(5.25) / np.float32(2688)


def test_one_scale_for_a_tensor() -> None:
    row = np.full((1, 512), 3.0, np.float32)
    record = encode_records(row, "plain_fp8", tensor_scale=0.5)
    assert (record == 0x4C).all()  # 6
    assert (decode_records(record, "plain_fp8", tensor_scale=0.5).astype(float) == 3).all()
    assert (decode_records(record, "plain_fp8").astype(float) == 6).all()
    assert np.array_equal(encode_records(row, "v4", tensor_scale=9), encode_records(row, "v4"))
    rope = np.full((1, 576), 2.0, np.float32)
    record = encode_records(rope, "v32_nvfp4", tensor_scale=4.0)
    assert (record[0, 256:320] == 0x40).all()  # 2: its scale is 1, whatever is given
    for wrong in (0.0, -1.0, float("inf"), float("nan"), 1e39, True, "1", None, np.ones(2)):
        with pytest.raises(ArgumentError, match="tensor_scale: got"):
            encode_records(row, "plain_fp8", tensor_scale=wrong)  # type: ignore[arg-type]  # refused
        with pytest.raises(ArgumentError, match="tensor_scale: got"):
            decode_records(record, "v32_nvfp4", tensor_scale=wrong)  # type: ignore[arg-type]  # refused


# --- rules ----------------------------------------------------------------------------


def exact_power(amax: Fraction, qmax: Fraction, floor: Fraction, place: str) -> int:
    """The smallest e with max(...) <= 2**e, in fractions; -200 for zero."""
    scale = max(amax, floor) / qmax if place == "amax" else max(amax / qmax, floor)
    if not scale:
        return -200
    e = scale.numerator.bit_length() - scale.denominator.bit_length() - 1
    while Fraction(2) ** e < scale:
        e += 1
    return e


@pytest.mark.parametrize("name", [n for n, r in WILD_RULES.items() if r.scale.name == "ue8m0"])
def test_powers_of_two_against_fractions(name: str) -> None:
    rule = get_rule(name)
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 0x7F800000, 400).astype(np.uint32)
    near = np.array([rule.qmax * 2.0**k for k in range(-40, 30)], np.float32).view(np.uint32)
    amax = (
        np.concatenate([bits, near - 1, near, near + 1, [0, 1]]).astype(np.uint32).view(np.float32)
    )
    codes = encode_scale(amax, rule)
    for value, code in zip(amax.tolist(), codes.tolist(), strict=True):
        parts = (Fraction(v) for v in (value, rule.qmax, rule.floor))
        e = exact_power(*parts, rule.floor_place)
        if value == 0 and rule.zero_scale is not None:
            e = 0
        assert code == min(max(e + 127, 0), 254), value


def test_infinite_amax_of_other_rules() -> None:
    infinite = np.array([np.inf], np.float32)
    for name, code in [
        *(("P2/64", 255), ("M2/32", 254), ("M4/32", 255), ("N3/16", 0x7E), ("N4/16", 0x7E)),
        *(("S1/16", 0x7FFF), ("F2/128", 0x7F800000)),
    ]:
        assert encode_scale(infinite, name).tolist() == [code], name


def test_scales_rounded_up_are_not_smaller() -> None:
    amax = np.random.default_rng(2).uniform(0.02, 2000, 999).astype(np.float32)
    scale = encode_scale(amax, "N3/16").view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    below = (encode_scale(amax, "N3/16") - 1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wanted = (amax / np.float32(6)).astype(np.float64)
    assert (scale >= wanted).all() and (below < wanted).all()


def test_fp32_scales() -> None:
    amax = np.random.default_rng(6).uniform(1e-8, 99, 500).astype(np.float32)
    amax[:3] = 0, 1e-30, 1e-6
    one_448th = np.array([0x3B124925], np.uint32).view(np.float32)[0]
    with np.errstate(under="ignore"):
        expected = {
            "F1/128": np.maximum(amax, np.float32(1e-4)) / np.float32(448),
            "F2/128": np.maximum(amax / np.float32(448), np.float32(2.0**-126)),
            "F3/128": amax / np.float32(448),
            "F3z/128": amax / np.float32(448),
            "F4/128": (amax + np.float32(1e-5)) / np.float32(448),
            "F5/128": np.maximum(amax, np.float32(1e-6)) * one_448th,
            "F6/128": np.where(amax == 0, np.float32(1), amax * one_448th),
        }
    for name, scales in expected.items():
        codes = encode_scale(amax, name)
        assert codes.dtype == np.uint32
        assert np.array_equal(codes, scales.view(np.uint32)), name


@pytest.mark.parametrize("name", [n for n in WILD_RULES if n != "R/512"])  # of a row's scale
def test_dequantize_gives_about_what_was_quantized(name: str) -> None:
    rule = get_rule(name)
    x = np.random.default_rng(1).standard_normal((3, 2 * rule.group)).astype(np.float32)
    codes, scales = quantize(x, rule)
    assert codes.max() < (16 if rule.element.width == 4 else 256)
    back = dequantize(codes, scales, rule)
    amax = np.abs(x).reshape(3, 2, -1).max(axis=2)
    bound = np.repeat(amax, rule.group, axis=1) / (3 if rule.element.width == 4 else 14)
    assert (np.abs(back - x) <= bound).all()
    with pytest.raises(ArgumentError, match="scale_codes: got int8"):
        dequantize(codes, scales.astype(np.int8), rule)


def test_factors_of_fp32_scales() -> None:
    """What elements are scaled with, where the quotient and both products differ."""
    rng = np.random.default_rng(4)
    x = rng.uniform(1, 2, (512, 128)).astype(np.float32)  # amax, then elements next to ties
    ties = 272 + 32.0 * rng.integers(0, 5, (512, 127))
    x[:, 1:] = ties * (x[:, :1] / 448).astype(np.float64)
    scale = np.abs(x).max(axis=1) / np.float32(448)
    one = np.float32(1)
    expected = {
        "F1/128": x / scale[:, None],
        "F3/128": x * (one / scale)[:, None],
        "F3z/128": x * (np.float32(448) / np.abs(x).max(axis=1))[:, None],
    }
    seen = set()
    for name, scaled in expected.items():
        codes, _ = quantize(x, name)
        wanted = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(codes, wanted), name
        seen.add(codes.tobytes())
    assert len(seen) == 3


# --- places ---------------------------------------------------------------------------

#: Where a byte of a plane lies: (plane, row, byte, rows of the page) to an offset in the plane.
PLACES = {
    "indexer_fp8_tiles": {0: lambda t, b, n: (t // 16 * 8 + b // 16) * 256 + t % 16 * 16 + b % 16},
    "indexer_fp8_tiles_fnuz": {
        0: lambda t, b, n: (t // 16 * 8 + b // 16) * 256 + t % 16 * 16 + b % 16
    },
    "v32_fp8_planes": {
        0: lambda t, b, n: b // 16 * 16 * n + t * 16 + b % 16,
        1: lambda t, b, n: b // 4 * 4 * n + t * 4 + b % 4,
    },
    "indexer_mxfp4_chunks": {
        0: lambda t, b, n: (b // 16 * n + t) * 16 + b % 16,
        1: lambda t, b, n: b * n + t,
    },
    "indexer_mxfp4_slots64": {
        0: lambda t, b, n: (b // 16 * 64 + t) * 16 + b % 16,
        1: lambda t, b, n: b * 64 + t % 16 * 4 + t // 16,
    },
    "indexer_mxfp4_slots8": {
        0: lambda t, b, n: (t % 4 * 4 + b // 16) * 32 + t // 4 * 16 + b % 16,
        1: lambda t, b, n: b * 8 + t,
    },
    **{
        f"indexer_mxfp4_runs{run}": {
            0: lambda t, b, n, r=run: t // r * r * 64 + (b // 16 * r + t % r) * 16 + b % 16,
            1: lambda t, b, n, r=run: (
                t // r * r * 4 + (b % (64 // r) * r + t % r) * (r // 16) + b // (64 // r)
            ),
        }
        for run in (16, 32, 64)
    },
}


def test_tiled_layouts_are_those_with_formulas() -> None:
    assert {name for name, found in EVERY.items() if found.form == "tiled"} == set(PLACES)


@pytest.mark.parametrize("name", EVERY)
def test_every_byte_is_where_byte_offset_says(name: str) -> None:
    """Records of single bytes, written and looked for, against the formulas and `byte_offset`."""
    layout = get_layout(name)
    for block in blocks(layout):
        slots = np.arange(0, 2 * block, max(1, block // 3))
        records = np.random.default_rng(7).integers(
            0, 256, (len(slots), layout.row_bytes), dtype=np.uint8
        )
        cache = pages(layout, block, 2, 0xA5)
        want = [array.copy() for array in cache]
        write_records(records, given(cache), slots, block, layout=layout)
        for slot, record in zip(slots.tolist(), records, strict=True):
            first = 0
            for index, plane in enumerate(layout.planes):
                place = PLACES.get(name, {}).get(index)
                page, row = divmod(slot, block)
                start = layout.plane_offset(index, block)
                gaps = gaps_of(plane)
                for byte in range(plane.row_bytes):
                    at = place(row, byte, block) if place else row * plane.row_bytes + byte
                    assert at == plane.row_offset(row, block) + plane.byte_offset(byte, block)
                    if byte not in gaps:
                        want[plane.pool][page, start + at] = record[first + byte]
                first += plane.row_bytes
        for got, wanted in zip(cache, want, strict=True):
            assert np.array_equal(got, wanted)
        back = read_records(given(cache), slots, block, layout=layout)
        gap = np.concatenate(
            [
                np.isin(
                    np.arange(p.row_bytes),
                    [b for f in p.fields if f.kind == "gap" for b in f.places],
                )
                for p in layout.planes
            ]
        )
        assert np.array_equal(back[:, ~gap], records[:, ~gap])
        assert (back[:, gap] == 0xA5).all()


@pytest.mark.parametrize("name", EVERY)
def test_byte_offset_of_every_entry(name: str) -> None:
    """A row's codes and scales, found in the page by `byte_offset`, are those that were quantized."""
    layout = get_layout(name)
    block = blocks(layout)[-1]
    slot, stride = block + block // 2, layout.page_bytes(block, pool=0) + 48
    rows = some_rows(layout, 1)
    cache = [
        np.zeros((2, layout.page_bytes(block, pool=pool) + 48), np.uint8)
        for pool in range(layout.pools)
    ]
    quantize_and_insert_k_cache(rows, given(cache), np.int64([slot]), block, layout=layout)
    for index, field in layout.fields():
        flat = cache[layout.planes[index].pool].reshape(-1)
        stride = cache[layout.planes[index].pool].shape[1]
        at = [
            layout.byte_offset(slot, field.name, block, page_stride=stride, entry=entry)
            for entry in range(field.entries)
        ]
        if field.kind == "codes":
            values = rows[:, slice(*field.dims)].astype(np.float32)
            if layout.field("row_scale") and field.dims == (0, 512):
                continue
            codes, scales = quantize(values, field.rule)
            stored = flat[at]
            if field.rule.element.width == 4:
                stored = np.where(np.arange(len(at)) % 2, stored >> 4, stored & 15)
            assert np.array_equal(stored, codes[0])
            held = layout.scale_of(field)
            if held and held.format is field.rule.scale and held.format.width == 8:
                pool = cache[pool_of(layout, held)]
                where = [
                    layout.byte_offset(slot, held.name, block, page_stride=pool.shape[1], entry=e)
                    for e in range(held.entries)
                ]
                assert np.array_equal(pool.reshape(-1)[where], scales[0])
        elif field.kind == "raw":
            bits = rows[0, slice(*field.dims)].view(np.uint16)
            assert np.array_equal(flat[at] | flat[np.array(at) + 1].astype(np.uint16) << 8, bits)
    with pytest.raises(ArgumentError, match=r"entry: got 99999; allowed: 0\.\."):
        layout.byte_offset(0, next(layout.fields())[1].name, block, entry=99999)


def gaps_of(plane: Plane) -> list[int]:
    """The bytes of a plane's row that are not written."""
    return [byte for f in plane.fields if f.kind == "gap" for byte in f.places]


def pool_of(layout: Layout, field: object) -> int:
    """The pool that holds a field."""
    return next(layout.planes[index].pool for index, f in layout.fields() if f is field)


@pytest.mark.parametrize("name", [*EVERY, *VARIANTS])
def test_round_trip(name: str) -> None:
    """Insert and gather give what decoding the records gives, which is near the rows."""
    layout = get_layout(name)
    block = blocks(layout)[-1]
    rows = some_rows(layout, 7)
    slots = np.random.default_rng(9).permutation(2 * block)[: len(rows)]
    rows = rows[: len(slots)]
    cache = pages(layout, block, 2, 0x5A)
    quantize_and_insert_k_cache(rows, given(cache), slots, block, layout=layout)
    records = encode_records(rows, layout)
    decoded = decode_records(records, layout)
    for index, slot in enumerate(slots.tolist()):
        out = np.zeros((1, 1, layout.head_dim), BF16)
        table = np.int32([[slot // block] * 2])
        lens = np.int32([slot % block + 1])
        dequantize_and_gather_k_cache(
            out, given(cache), lens, np.int32([1]), table, block, 0, layout=layout
        )
        assert np.array_equal(out[0, 0].view(np.uint16), decoded[index].view(np.uint16))
    finite = ~np.isnan(decoded.astype(np.float32))
    assert finite.all() or name.endswith("@F3")  # zeros without a floor
    error = np.abs(decoded.astype(np.float64) - rows.astype(np.float64))
    amax = np.abs(rows.astype(np.float64)).max(axis=1, keepdims=True)
    lost = 6 * 2.0**-10  # E4M3 scales without a floor make zeros of smaller groups
    assert (np.where(finite, error, 0) <= amax / 3 + lost).all()
    # Encoding what was decoded gives codes of the same values.
    again = decode_records(encode_records(decoded, layout), layout)
    error = np.abs(again.astype(np.float64) - decoded.astype(np.float64))
    assert (np.where(finite, error, 0) <= amax / 6).all()


def test_three_axes_with_pools() -> None:
    """A cache [pages, block size, bytes] for each pool, with a page stride."""
    layout, block = get_layout("v4_two_pools"), 4
    rows = some_rows(layout, 3)
    memory = [np.full((3, block * width + 32), 0xA5, np.uint8) for width in (512, 128)]
    cache = tuple(
        np.lib.stride_tricks.as_strided(m, (3, block, w), (m.shape[1], w, 1))
        for m, w in zip(memory, (512, 128), strict=True)
    )
    slots = np.int64([9, -1, 2])
    quantize_and_insert_k_cache(rows, cache, slots, block, layout=layout)
    records = encode_records(rows, layout)
    assert np.array_equal(memory[0][2, 512:960], records[0, :448])
    assert np.array_equal(memory[1][0, 256:384], records[2, 512:])
    assert (memory[0][2, 974:1024] == 0xA5).all()
    got = read_records(cache, np.int64([9, 2]), block, layout=layout)
    assert np.array_equal(got[:, :462], records[[0, 2], :462])


def test_errors_of_pools() -> None:
    rows = some_rows(get_layout("v4_two_pools"), 1)
    whole = [np.zeros((1, 512), np.uint8), np.zeros((1, 128), np.uint8)]
    slots = np.int64([0])

    def insert(cache: object, layout: str = "v4_two_pools") -> None:
        # Some of the caches are refused for what they are.
        quantize_and_insert_k_cache(rows, cache, slots, 1, layout=layout)  # type: ignore[arg-type]

    for cache, layout, message in [
        (whole[0], "v4_two_pools", "k_cache: got one array; allowed: 2 arrays for v4_two_pools"),
        (whole[:1], "v4_two_pools", "k_cache: got a sequence of 1 arrays; allowed: 2 arrays"),
        (whole, "v4", "k_cache: got a sequence of 2 arrays; allowed: one array"),
        ([whole[1], whole[0]], "v4_two_pools", r"k_cache\[0\]: got pages of 128 bytes"),
        ([whole[0], np.zeros((2, 128), np.uint8)], "v4_two_pools", r"k_cache\[1\]: got 2 pages"),
        ([whole[0], 3], "v4_two_pools", "k_cache: got list"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            insert(cache, layout)
    assert not whole[0].any() and not whole[1].any()
    out = np.zeros((1, 1, 512), BF16)
    with pytest.raises(ArgumentError, match="a sequence of 2 arrays; allowed: one array"):
        dequantize_and_gather_k_cache(out, whole, np.int32([1]), None, np.int32([[0]]), 1, 0)


# --- pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EVERY, *VARIANTS])
def test_drawings(name: str) -> None:
    """Every drawn place is where `byte_offset` finds the field; lines fit; rules and names are said."""
    layout = get_layout(name)
    block = blocks(layout)[-1]
    text = layout.describe(block)
    assert max(map(len, text.splitlines())) <= 100
    assert f"fingerprint {layout.fingerprint()}" in text
    for alias in layout.aliases:
        assert alias in text
    for rule, _ in layout.writers:
        variant = f"{name.split('@')[0]}@{rule.name.split('/')[0]}"
        assert f"\n{rule.name if rule == layout.rule else variant}: " in text
    drawn = set()
    for pool, drawing in enumerate(text.split("one page")[1:]):
        row = -1
        assert int(drawing.split()[-1]) == layout.page_bytes(block, pool=pool)
        fields = {f.name: f for i, f in layout.fields() if layout.planes[i].pool == pool}
        for cell in (
            c for line in drawing.splitlines() if "│" in line for c in line.split("│")[1:-1]
        ):
            if label := re.search(r"row (\d+) ", cell):
                row = int(label[1])
            if found := re.search(r"(\w+)(?:\[0\])? (\d+)(?:\.\.\d+)?(?: mixed| \+\d+)?\s*$", cell):
                field, first = found[1], int(found[2])
                assert first == layout.byte_offset(row, field, block)
                drawn.add((row, field))
        rows = range(block) if block <= 3 else (0, 1, block - 1)
        assert {(row, field) for row in rows for field in fields} <= drawn


def test_rules_in_words() -> None:
    for name, words in {
        "v4@P4": "no floor; a group of zeros has the scale 1",
        "v32_fp8@F4": "added to amax",
        "v32_fp8@F3": "amax / 448 as it is; code = e4m3fn(x * fp32(1/scale))",
        "indexer_fp8@F3z": "x * fp32(448/amax)",
        "v32_nvfp4@N3": "amax / 6, rounded up to a e4m3fn",
        "glm_nvfp4": "x * fp32(1/scale or 0)",
        "v41_mxfp4_ascend": "2 ** (exponent of amax - exponent of 6)",
        "plain_fp8": "one for the whole tensor, not stored",
        "v32_nvfp4": "unit/64: scale = 1, not stored",
        "v4_trtllm": "not written",
    }.items():
        assert words in get_layout(name).describe(64), name


# --- fingerprints ---------------------------------------------------------------------

FINGERPRINTS = {
    "v4": "5e2cfde5841d6299",
    "v4_fnuz": "6f13bf5d31f8c47f",
    "v41_mxfp8": "0ef8fd60f9ad75aa",
    "v41_mxfp8_inline": "704d2818efa445f6",
    "v41_mxfp8_fnuz": "4de7a72cfd47633e",
    "v41_nvfp4": "2c62f88d8c5d69a7",
    "v41_nvfp4_inline": "9bd32d39de7e0e43",
    "indexer_fp8": "b99f3b772a3a4d58",
    "indexer_mxfp4": "ed9fbae4052324b9",
    "v4_unpadded": "98dec170e3fe53ea",
    "v4_page16": "df4f73adbf459848",
    "v4_trtllm": "75ce52e8b2d5dd77",
    "v4_two_pools": "e0ae0ab336e9938d",
    "v4_two_pools_g32": "35d536d88fb4fc45",
    "v4_nvfp4": "9ae8b759bfeb8dae",
    "v4_nvfp4_g64": "32cab31eb6faca7b",
    "v4_mxfp4": "e6d5661997265616",
    "v4_ascend": "7e9d38365930f4dd",
    "v41_mxfp8_page512": "bb9bb58594f2b5b2",
    "v41_mxfp8_inline_page3168": "48beccd045a2096b",
    "v41_nvfp4_page256": "5b191bc96d39094e",
    "v41_nvfp4_page512": "5b9bebff35cd9613",
    "v41_nvfp4_inline_page3168": "42724f1aeaa43e50",
    "v41_mxfp8_ascend": "6d39e3cfbe77e0fe",
    "v41_mxfp4_ascend": "a8b4fc83c54d03c8",
    "v41_mxfp4_ascend_g32": "a84b32d2edfbc285",
    "v32_fp8": "764719a0f9db640d",
    "v32_fp8_planes": "1cbf7b86defabf3a",
    "v32_fp8_norope": "9db267ba064ea06e",
    "v32_nvfp4": "6ee9412925ec22ec",
    "glm_nvfp4": "4abe80ed632ed849",
    "glm_nvfp4_fp8rope": "7296edc2446c9d6a",
    "glm_nvfp4_fp8rope_token": "c4284913c182b606",
    "glm_nvfp4_norope": "8393c85d6ff867f5",
    "ggml_fp8_b32_e8m0": "bac5a4f765399ffa",
    "ggml_fp4_b16_e4m3": "a0c8d0ced9e79705",
    "ggml_fp4_b32_e8m0": "9cb6bc15a13771c5",
    "plain_bf16": "67a09deda1b2759a",
    "plain_fp8": "f7f7131f0f153655",
    "indexer_fp8_page576": "deeadbb1e82b6b5f",
    "indexer_fp8_page512": "d58d758b33f4d758",
    "indexer_fp8_mx": "c2ef7818339cf9e1",
    "indexer_fp8_inline": "959f026cf4f050c5",
    "indexer_fp8_tiles": "04320267c18f71c0",
    "indexer_fp8_tiles_fnuz": "5c064369027fce30",
    "indexer_mxfp4_page576": "ec98fa9ba074d72a",
    "indexer_mxfp4_page512": "86e073fec1ecbe4b",
    "indexer_mxfp4_inline": "cdbcf5b59a79b0eb",
    "indexer_mxfp4_pools": "caad259a441fa389",
    "indexer_mxfp4_chunks": "b71a7fda0f6917c5",
    "indexer_mxfp4_slots64": "1790a40b272b579c",
    "indexer_mxfp4_slots8": "5d237bca1e816a6a",
    "indexer_mxfp4_runs16": "beaee368c61843b4",
    "indexer_mxfp4_runs32": "1221bbf28f5524ac",
    "indexer_mxfp4_runs64": "69afa7af285ce78f",
}


def test_fingerprints() -> None:
    """Pinned: a writer and a reader of different versions compare them."""
    assert {name: layout.fingerprint() for name, layout in EVERY.items()} == FINGERPRINTS
    assert len(set(FINGERPRINTS.values())) == len(EVERY)


def test_a_fingerprint_is_of_bytes_and_of_nothing_else() -> None:
    v4 = get_layout("v4")
    renamed = replace(
        v4,
        name="other",
        aliases=("x",),
        source="y",
        evidence="T",
        writers=(),
        planes=tuple(
            replace(
                plane,
                name=plane.name + "_",
                fields=tuple(replace(f, name=f.name + "_") for f in reversed(plane.fields)),
            )
            for plane in v4.planes
        ),
    )
    assert renamed.fingerprint() == v4.fingerprint()
    scale = v4.planes[1].fields[0]
    changed = [
        replace(v4, page_multiple=1),
        replace(v4, planes=v4.planes[::-1]),
        v4.under(P2_64),
        replace(v4, planes=(v4.planes[0], replace(v4.planes[1], pool=1))),
        *(
            replace(v4, planes=(v4.planes[0], replace(v4.planes[1], fields=fields)))
            for fields in [
                (scale, replace(v4.planes[1].fields[1], pad_value=1)),
                (scale, replace(v4.planes[1].fields[1], kind="gap")),
                (replace(scale, order=(1, 0, 2, 3, 4, 5, 6)), v4.planes[1].fields[1]),
            ]
        ),
    ]
    prints = {layout.fingerprint() for layout in (v4, *changed)}
    assert len(prints) == len(changed) + 1


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = "from dsv4num.formats import get_layout; print(get_layout('v32_nvfp4').fingerprint())"
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert found.stdout.strip() == get_layout("v32_nvfp4").fingerprint()
