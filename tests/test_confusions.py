"""Layouts of one size or one name that were taken for each other, by the bytes that tell.

Pages of ones and the like are typed in as runs ("512x78": 512 bytes of 78). The oracle must write
them, and `layout --vs` must name the first byte in which two of them differ; `guess`, `explain` and
`inspect` must tell ordinary pages apart, or the faults in them.
"""

from __future__ import annotations

from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
from typed_pages import blamed, dump_of, named, record

from dsv4num import ArgumentError, ValueRangeError, get_layout
from dsv4num.explain import Dump, Rows, explain_rows
from dsv4num.explain.guess import guess_layouts
from dsv4num.explain.inspect import inspect_row
from dsv4num.layouts import compare, convert
from dsv4num.reference import encode_records, write_records

BF16 = ml_dtypes.bfloat16
NOT_WRITTEN = -1


def runs(text: str) -> list[int]:
    """Bytes of runs; of "12x.." that many that are not written."""
    found: list[int] = []
    for run in text.split():
        count, _, code = run.partition("x")
        found += int(count) * ([NOT_WRITTEN] if code == ".." else list(bytes.fromhex(code)))
    return found


def page_of(name: str, rows: np.ndarray, fill: int = 0) -> np.ndarray:
    """One page of a layout with these rows."""
    layout = get_layout(name)
    page = np.full((1, layout.page_bytes(len(rows))), fill, np.uint8)
    write_records(
        encode_records(rows, layout), page, np.arange(len(rows)), len(rows), layout=layout
    )
    return page[0]


def as_typed(name: str, text: str, rows: np.ndarray) -> list[int]:
    """Typed bytes, which the oracle must write, and leave what is not written."""
    typed = runs(text)
    for fill in (0x5A, 0xA5):
        page = page_of(name, rows, fill)[: len(typed)].tolist()
        assert page == [fill if byte == NOT_WRITTEN else byte for byte in typed], name
    return typed


def tell(pages: dict[str, str], kind: str, rows: int) -> None:
    """Typed pages of ones or zeros; the first byte in which two differ is what `layout --vs` names."""
    value = {"ones": 1.0, "zeros": 0.0}[kind]
    typed = {
        name: as_typed(name, text, np.full((rows, get_layout(name).head_dim), value, np.float32))
        for name, text in pages.items()
    }
    for a, b in combinations(pages, 2):
        at = next(i for i, (x, y) in enumerate(zip(typed[a], typed[b], strict=False)) if x != y)
        here, there = (
            f"not written in {name}" if typed[name][at] < 0 else f"{typed[name][at]:02X} in {name}"
            for name in (a, b)
        )
        found = compare(get_layout(a), get_layout(b), rows)
        assert not found.equal and found.differences
        assert found.telling[kind] == f"byte {at} is {here}, {there}", (a, b)


def ordinary(name: str, count: int) -> Rows:
    """Ordinary rows."""
    rows = np.random.default_rng(4).standard_normal((count, get_layout(name).head_dim))
    return Rows(rows.astype(BF16), np.arange(count))


def guessed(names: list[str], block: int, pages: int = 4) -> None:
    """`guess` puts the layout of ordinary pages before each other one of these."""
    for name in names:
        layout = get_layout(name)
        records = encode_records(ordinary(name, pages * block).rows, layout)
        data = dump_of(layout, records, block, fill=0).data
        score = {guess.layout: guess.score for guess in guess_layouts(data, block)}
        assert name in score, (name, score)
        for other in names:
            assert other == name or score.get(other, 0) < score[name], (name, other, score)


TWO = np.float32([1.0, 0.5])[:, None] * np.ones((2, 512), np.float32)


def test_01_528_bytes() -> None:
    """Rows of 1.0 and 0.5, which has the scale byte 76; then rows of ones, told apart in pairs."""
    for name, text in {
        "v41_mxfp8_inline": "512x78 16x77 512x78 16x76",
        "v41_mxfp8": "1024x78 16x77 16x76",
        "v32_fp8_norope": "512x78 4x0000803B 512x78 4x0000003B",
        "v32_fp8_norope@F3": "512x7E 4x2549123B 512x7E 4x2549923A",
        "ggml_fp8_b32_e8m0": 16 * "1x77 32x78 " + 16 * "1x76 32x78 ",
    }.items():
        as_typed(name, text, TWO)
    pages = {
        "v41_mxfp8_inline": 2 * "512x78 16x77 ",
        "v41_mxfp8": "1024x78 32x77",
        "v32_fp8_norope": 2 * "512x78 4x0000803B ",
        "v32_fp8_norope@F3": 2 * "512x7E 4x2549123B ",
        "ggml_fp8_b32_e8m0": 32 * "1x77 32x78 ",
    }
    tell(pages, "ones", 2)
    guessed(["v41_mxfp8_inline", "v41_mxfp8", "v32_fp8_norope", "ggml_fp8_b32_e8m0"], 8)
    # Four fp32 numbers as scales of UE8M0: 2**-127, 2**-127, 2, 2**-68, and so on.
    page = Dump.of(page_of("v32_fp8_norope", TWO), get_layout("v41_mxfp8_inline"), 2)
    scales = [group["scale"] for group in inspect_row(page, 0).groups]
    assert scales == [2.0**-127, 2.0**-127, 2.0, 2.0**-68] * 4
    # Planes read as rows: the scales of row 0 are codes of row 1, and its values twice too large.
    page = Dump.of(page_of("v41_mxfp8", TWO), get_layout("v41_mxfp8_inline"), 2)
    groups = inspect_row(page, 0).groups
    assert {(group["scale_code"], *set(group["values"])) for group in groups} == {("78", 2.0)}
    for name, dialect in (
        ("v41_mxfp8_inline", "segregated-read-as-inline"),
        ("v41_mxfp8", "inline-read-as-segregated"),
    ):
        written = {"v41_mxfp8": "v41_mxfp8_inline"}.get(name, "v41_mxfp8")
        source = ordinary(name, 8)
        records = encode_records(source.rows, written)
        data = dump_of(get_layout(written), records, 4).data
        assert named(explain_rows(Dump.of(data, get_layout(name), 4), source)) == [dialect]


def test_02_288_bytes() -> None:
    tell(
        {
            "v41_nvfp4_inline": 2 * "256x77 32x23 ",
            "v41_nvfp4": "512x77 64x23",
            "v41_mxfp4_ascend_g32": 2 * "256x66 16x803E ",
            "ggml_fp4_b16_e4m3": 64 * "1x23 8x77 ",
        },
        "ones",
        2,
    )
    guessed(["v41_nvfp4_inline", "v41_nvfp4", "v41_mxfp4_ascend_g32", "ggml_fp4_b16_e4m3"], 8)
    ones = np.ones((2, 512), np.float32)
    assert page_of("ggml_fp4_b16_e4m3", ones)[[0, 9]].tolist() == [0x23, 0x23]
    assert page_of("v41_nvfp4", ones)[256] == 0x77  # row 1


def test_03_656_bytes_in_three_orders() -> None:
    """The order with the scales last is known from documents alone and is not registered."""
    tell(
        {
            "v32_fp8": 2 * "512x78 4x0000803B 64x803F ",
            "v32_fp8_planes": "1024x78 8x0000803B 128x803F",
        },
        "ones",
        2,
    )
    assert get_layout("v32_fp8_planes").byte_offset(1, "codes", 2) == 16
    rows = np.float32([1.0, 0.75])[:, None] * np.ones((2, 576), np.float32)  # codes 78 and 7C
    assert page_of("v32_fp8_planes", rows)[[15, 16, 31, 32]].tolist() == [0x78, 0x7C, 0x7C, 0x78]
    guessed(["v32_fp8", "v32_fp8_planes"], 8)


@pytest.mark.parametrize(
    ("rule", "zeros", "ones", "code"),
    [
        ("F2", "00 00 80 00", "25 49 12 3B", "7E"),
        ("F3", "00 00 00 00", "25 49 12 3B", "7E"),
        ("F4", "57 BD BF 32", None, "7E"),
        ("F5", "46 64 19 31", "25 49 12 3B", "7E"),
    ],
)
def test_04_656_bytes_by_five_rules(rule: str, zeros: str, ones: str | None, code: str) -> None:
    """Three rows: zeros, ones and 448, by the rule of another writer. NaN of no floor is 7F."""
    layout = get_layout("v32_fp8")
    rows = np.zeros((3, 576), np.float32)
    rows[1], rows[2] = 1, 448
    source = Rows(rows, np.arange(3))
    right = encode_records(rows, layout)
    assert right[:2, 512:528].tobytes().hex(" ").upper() == " ".join(
        ["00 00 00 39"] * 4 + ["00 00 80 3B"] * 4
    )
    assert set(right[1, :512].tolist()) == {0x78}
    wrong = encode_records(rows, f"v32_fp8@{rule}")
    assert wrong[0, 512:528].tobytes().hex(" ").upper() == " ".join([zeros] * 4)
    assert ones is None or wrong[1, 512:528].tobytes().hex(" ").upper() == " ".join([ones] * 4)
    assert set(wrong[1, :512].tolist()) == {int(code, 16)}
    assert set(wrong[0, :512].tolist()) == ({0x7F} if rule == "F3" else {0})
    assert explain_rows(dump_of(layout, right, 3), source).status == "no difference"
    assert named(explain_rows(dump_of(layout, wrong, 3), source)) == [f"rule-{rule}"]
    found = compare(layout, get_layout(f"v32_fp8@{rule}"), 3)
    assert found.telling["zeros"] and found.telling["ones"].startswith(
        "byte 0 is 78 in v32_fp8, 7E"
    )


def test_05_584_bytes_by_four_floors_in_pages_of_two_sizes() -> None:
    tell(
        {
            "v4": "1152x00 7x69 1x00 7x69 1x00",
            "v4@P2": "1152x00 7x72 1x00 7x72 1x00",
            "v4@P4": "1152x00 7x7F 1x00 7x7F 1x00",
            "v4_trtllm": "1152x00 7x5C 1x.. 7x5C 1x..",
        },
        "zeros",
        2,
    )
    quiet = ([0.010009766], ("70", "7A"), ("72", "6A"))
    for typed, name in (
        ("72", "floor-1e-4-on-scale"),
        ("5C", "floor-1e-8-on-amax"),
        ("7F", "no-floor-zero-is-one"),
    ):
        cases = [([0], ("69", "00"), (typed, "00")), ([448], ("7F", "7E"), ("7F", "7E"))]
        cases += [quiet] if typed == "72" else [([0.010009766], ("70", "7A"), ("70", "7A"))]
        assert blamed("v4", *cases) == [name]
    found = compare(get_layout("v4"), get_layout("v4_trtllm"))
    assert "bytes of a page of 64 rows: 37440, 37376" in found.differences
    assert not any(584 * rows % 576 == 0 for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256))
    source = ordinary("v4", 128)
    unpadded = dump_of(get_layout("v4_unpadded"), encode_records(source.rows, "v4"), 64).data
    layout = get_layout("v4")
    read = Dump.of(np.append(unpadded, np.zeros(128, np.uint8)), layout, 64, 37440)
    assert named(explain_rows(read, source)) == ["page-unpadded"]
    best = guess_layouts(unpadded)[0]
    assert (best.layout, best.block_size, best.page_stride) == ("v4", 64, 37376)


def test_06_floors_of_v41() -> None:
    tell(
        {
            "v41_mxfp8_inline": 2 * "512x00 16x69 ",
            "v41_mxfp8_inline@P2": 2 * "512x00 16x72 ",
        },
        "zeros",
        2,
    )
    for name in ("v41_mxfp8", "v41_mxfp8_inline"):
        cases = [([0], ("69", "00"), ("72", "00")), ([448], ("7F", "7E"), ("7F", "7E"))]
        assert blamed(name, *cases) == ["floor-1e-4-on-scale"]


def test_07_368_bytes() -> None:
    """The 4-byte scale of a whole row is 1 / 2688 in a row of ones, where each group's then is 448."""
    token = np.float32(1 / 2688).tobytes().hex()
    tell(
        {
            "v4_mxfp4": 2 * "224x66 14x7D 2x.. 64x803F ",
            "glm_nvfp4_fp8rope": 2 * "256x77 32x23 1x2549123B 12x00 64x7E ",
            "glm_nvfp4_fp8rope_token": 2 * f"256x77 32x7E 1x2549123B 1x{token} 8x00 64x7E ",
        },
        "ones",
        2,
    )
    guessed(["v4_mxfp4", "glm_nvfp4_fp8rope"], 8)
    ones = np.ones((1, 512), np.float32)
    assert page_of("v4_mxfp4", ones)[224] == 0x7D
    assert page_of("glm_nvfp4_fp8rope", np.ones((1, 576), np.float32))[224] == 0x77
    # Earlier revisions rounded log2 to nearest: amax 8 had the scale byte 127, not 128.
    assert blamed(
        "v4_mxfp4",
        ([8, 2], ("80", "26"), ("7F", "47")),
        ([9], ("80", "06"), ("80", "06")),
        ([8.5], ("80", "06"), ("80", "06")),
    ) == ["exponent-log2-nearest"]


def test_08_384_bytes() -> None:
    """The one that is registered; a proposal and one with HiFloat8 codes are not."""
    ones = np.ones((2, 512), np.float32)
    as_typed("v4_nvfp4", "224x77 64x803F 224x77 64x803F 28x23 4x00 28x23 4x00", ones)
    found = compare(get_layout("v4_nvfp4"), get_layout("v4_nvfp4_g64"), 2)
    assert "bytes per row: 384, 360" in found.differences
    assert (found.telling["ones"] or "").startswith("byte 0 is 77 in v4_nvfp4, 66 in v4_nvfp4_g64")
    guessed(["v4_nvfp4", "v4_nvfp4_g64"], 8)


def test_09_352_bytes_and_scales_out_of_order() -> None:
    """A whole record, or the data of one row; its scale s is at 320 + 8 * (s % 4) + s // 4."""
    whole = get_layout("v32_nvfp4")
    assert whole.row_bytes == 352
    for name in ("v4_nvfp4", "v4_nvfp4_g64"):
        assert get_layout(name).planes[0].row_bytes == 352
    rows = np.zeros((1, 576), np.float32)
    rows[0, :512] = np.repeat([6 * (1 + s % 8) for s in range(32)], 16)
    right = encode_records(rows, whole)
    ordered = [0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50]  # 1 to 8
    at = [320 + offset for offset in (0, 8, 16, 24, 1, 9, 17, 25)]
    assert right[0, at].tolist() == ordered
    assert [whole.byte_offset(0, "scale", 1, entry=s) for s in range(8)] == at
    wrong = right.copy()
    wrong[0, 320:] = ordered * 4
    source = Rows(rows, np.int64([0]))
    assert named(explain_rows(dump_of(whole, wrong, 1), source)) == ["scales-in-order"]
    said = "\n".join(compare(whole, get_layout("v41_nvfp4_inline"), 2).differences)
    assert "0, 8, 16, 24, 1, ..., one after" in said
    inline = get_layout("v41_nvfp4_inline")
    places = [inline.byte_offset(0, "scale", 1, entry=s) for s in range(8)]
    assert places == list(range(256, 264))


def test_10_one_name_and_several_layouts() -> None:
    sizes = {
        "vllm:nvfp4_ds_mla@v3.2": 352,
        "vllm:nvfp4_ds_mla@v4.1": 288,
        "b12x:nvfp4_ds_mla@432": 432,
        "b12x:nvfp4_ds_mla@368": 368,
        "b12x:nvfp4_ds_mla@368-token": 368,
        "b12x:nvfp4_ds_mla@304": 304,
        "vllm:fp8_ds_mla@v3.2": 656,
        "vllm:fp8_ds_mla@v4": 584,
        "vllm:fp8_ds_mla@v4.1": 528,
    }
    assert {name: get_layout(name).row_bytes for name in sizes} == sizes
    assert len({get_layout(name).fingerprint() for name in sizes}) == len(sizes)
    for a, b in combinations(sizes, 2):
        found = compare(get_layout(a), get_layout(b), 2)
        assert not found.equal and any(found.telling.values()), (a, b)
    for name in ("nvfp4_ds_mla", "fp8_ds_mla", "vllm:nvfp4_ds_mla", "vllm:fp8_ds_mla"):
        with pytest.raises(ArgumentError):  # of which model?
            get_layout(name)


def test_11_132_bytes() -> None:
    """The scale 2**-7, by amax 3.5; the bytes after row 0; and a row of zeros by five rules."""
    rows = np.zeros((2, 128), np.float32)
    rows[:, 0] = 3.5
    for name, text in {
        "indexer_fp8": "1x7E 127x00 1x7E 127x00 2x0000003C",
        "indexer_fp8_mx": "1x7E 127x00 1x7E 127x00 8x78",
        "indexer_fp8_inline": 2 * "1x7E 127x00 1x0000003C ",
    }.items():
        as_typed(name, text, rows)
    tell(
        {
            "indexer_fp8": "256x78 2x0000803B",
            "indexer_fp8_mx": "256x78 8x77",
            "indexer_fp8_inline": 2 * "128x7E 1x2549123B ",
        },
        "ones",
        2,
    )
    tell(
        {
            "indexer_fp8": "256x00 2x00008034",
            "indexer_fp8@F1": "256x00 2xADAC6F34",
            "indexer_fp8@F5": "256x00 2x46641931",
            "indexer_fp8@F3z": "256x00 8x00",
            "indexer_fp8_mx": "256x00 8x69",
            "indexer_fp8_inline": 2 * "128x00 1xADAC6F34 ",
        },
        "zeros",
        2,
    )
    rows = np.ones((16, 128), np.float32)
    rows[1] = 0.75  # code 7C
    tiles = page_of("indexer_fp8_tiles", rows)
    assert tiles[[15, 16, 31, 32]].tolist() == [0x78, 0x7C, 0x7C, 0x78]
    found = compare(get_layout("indexer_fp8"), get_layout("indexer_fp8_tiles"), 16)
    assert (found.telling["steps"] or "").startswith("byte 16 is")
    guessed(["indexer_fp8", "indexer_fp8_mx", "indexer_fp8_inline"], 16)
    source = ordinary("indexer_fp8", 32)
    records = encode_records(source.rows, "indexer_fp8")
    for written, read, dialect in (
        ("indexer_fp8", "indexer_fp8_tiles", "rows-in-order-read-as-tiles"),
        ("indexer_fp8", "indexer_fp8_mx", "scale-word-fp32"),
        ("indexer_fp8_mx", "indexer_fp8", "scale-word-code-repeated"),
    ):
        data = dump_of(get_layout(written), encode_records(source.rows, written), 16).data
        assert named(explain_rows(Dump.of(data, get_layout(read), 16), source)) == [dialect]
    page = dump_of(get_layout("indexer_fp8"), records, 16).data
    # 132 bytes at a time: the scale of row 0 is then four codes of row 1.
    step = inspect_row(Dump.of(page, get_layout("indexer_fp8_inline"), 16), 0)
    word = int.from_bytes(records[1, :4].tobytes(), "little")
    assert step.groups[0]["scale_code"] == f"{word:08X}"


SLOTS = {"indexer_mxfp4_slots64": 64, "indexer_mxfp4_slots8": 8}
ARRANGED = [
    "indexer_mxfp4",
    "indexer_mxfp4_inline",
    "ggml_fp4_b32_e8m0",
    "indexer_mxfp4_chunks",
    "indexer_mxfp4_slots64",
    "indexer_mxfp4_slots8",
    "indexer_mxfp4_runs16",
    "indexer_mxfp4_runs32",
    "indexer_mxfp4_runs64",
]


def test_12_68_bytes_in_many_arrangements() -> None:
    for a, b in combinations(ARRANGED, 2):
        if {a, b} == set(SLOTS):  # no page has 64 rows and 8
            continue
        rows = SLOTS.get(a) or SLOTS.get(b) or 64
        if rows == 8 and any("runs" in name for name in (a, b)):
            continue
        found = compare(get_layout(a), get_layout(b), rows)
        assert not found.equal and found.telling["steps"], (a, b)
    guessed(["indexer_mxfp4", "indexer_mxfp4_inline", "ggml_fp4_b32_e8m0"], 64)
    source = ordinary("indexer_mxfp4", 64)
    for name in ARRANGED[3:]:
        if name == "indexer_mxfp4_slots8":
            continue
        right = encode_records(source.rows, name)
        data = dump_of(get_layout("indexer_mxfp4"), right, 64).data
        found = explain_rows(Dump.of(data, get_layout(name), 64), source)
        assert named(found) == ["rows-in-order-read-as-tiles"], name
    # Pages that reserve 132 bytes for each row of 68.
    page = np.zeros((2, 64 * 132), np.uint8)
    layout, source = get_layout("indexer_mxfp4"), ordinary("indexer_mxfp4", 128)
    write_records(encode_records(source.rows, layout), page, source.slots, 64, layout=layout)
    dump = Dump.of(page.reshape(-1), layout, 64, 64 * 132)
    assert explain_rows(dump, source).status == "no difference"


def test_12_68_bytes_zeros_ties_and_signs() -> None:
    tell(
        {
            "indexer_mxfp4": "128x00 8x01",
            "indexer_mxfp4@M2": "128x00 8x70",
            "indexer_mxfp4@M3": "128x00 8x72",
        },
        "zeros",
        2,
    )
    zeros = ([0], ("01", "00"))
    six = ([6], ("7F", "07"), ("7F", "07"))
    for scale, name in (("70", "floor-1e-4-on-amax"), ("72", "floor-1e-4-on-scale")):
        assert blamed("indexer_mxfp4", (*zeros, (scale, "00")), six) == [name]
    # 0.75 is code 2, or 1 by comparisons that are all strict; 0.7 is 1 and 0.8 is 2 by both.
    tie = ([6, 0.75, 0.7, 0.8], ("7F", "27 21"), ("7F", "17 21"))
    up = ([6, 2.5, 0.4, 0.2], ("7F", "47 01"), ("7F", "47 01"))
    assert blamed("indexer_mxfp4", tie, up) == ["ties-to-zero"]
    # -0.1 and -0.0 behind a 6: the sign is kept, lost of -0.0 alone, or never there.
    for codes, name in (
        ("87 00", "negative-zero-input-lost"),
        ("07 00", "negative-zero-dropped"),
    ):
        signs = ([6, -0.1, -0.0], ("7F", "87 08"), ("7F", codes))
        assert blamed("indexer_mxfp4", signs) == [name]


def test_13_272_and_360_bytes() -> None:
    """272 bytes (INT2 of rotated rows, or an MXFP4 experiment) are nobody's; 360 are FlashInfer's."""
    with pytest.raises(ArgumentError, match="layout: got 272"):
        get_layout(272)
    assert get_layout("flashinfer:360").name == "v4_nvfp4_g64"
    as_typed(
        "v4_nvfp4_g64",
        "224x66 64x803F 224x66 64x803F 7x7D 1x00 7x7D 1x00",
        np.ones((2, 512), np.float32),
    )


def test_14_ocp_and_fnuz() -> None:
    """One byte, two values; and two FNUZ writers with other divisors."""
    values = {}
    for name in ("v4", "v4_fnuz"):
        layout = get_layout(name)
        dump = dump_of(layout, record(layout, ("7F", "78 80 7F"))[None], 1)
        row = inspect_row(dump, 0)
        values[name] = row.groups[0]["values"][:3]
        bad = {"v4": 2, "v4_fnuz": 1}[name]
        assert row.anomalies[0] == (
            f"nope 0..63: 1 NaN codes, the first at element {bad} of the group"
            if name == "v4"
            else "nope 0..63: an element beyond qmax"
        )
    assert values["v4"][:2] == [256.0, 0.0] and np.isnan(values["v4"][2])
    assert np.signbit(values["v4"][1])
    assert values["v4_fnuz"][::2] == [128.0, 240.0] and np.isnan(values["v4_fnuz"][1])
    a, b = (get_layout(f"indexer_fp8_tiles_fnuz{rule}") for rule in ("", "@P1_240"))
    assert not compare(a, b, 16).equal
    source = Rows(np.full((16, 128), 232, np.float32), np.arange(16))
    source.rows[1], source.rows[2] = 244, 448
    found = explain_rows(dump_of(a, encode_records(source.rows, b), 16), source)
    assert named(found) == ["qmax-240"]
    # The two caches of one model on gfx942.
    window = ordinary("v4", 16)
    for written, read, name in (
        ("v4", "v4_fnuz", "ocp-read-as-fnuz"),
        ("v4_fnuz", "v4", "fnuz-read-as-ocp"),
    ):
        dump = dump_of(get_layout(read), encode_records(window.rows, written), 8)
        assert named(explain_rows(dump, window)) == [name]


def test_15_fourteen_scale_bytes() -> None:
    """Seven scales twice, or fourteen: a group of 1.0 and 0.5 tells."""
    rows = np.ones((1, 512), np.float32)
    rows[0, :448] = np.tile(np.repeat([1, 0.5], 32), 7)
    seven, fourteen = get_layout("v4_two_pools"), get_layout("v4_two_pools_g32")
    stored = {layout.name: encode_records(rows, layout)[0] for layout in (seven, fourteen)}
    assert stored["v4_two_pools"][448:462].tolist() == [0x77] * 14
    assert stored["v4_two_pools"][[0, 32]].tolist() == [0x78, 0x70]
    assert stored["v4_two_pools_g32"][448:462].tolist() == [0x77, 0x76] * 7
    assert stored["v4_two_pools_g32"][[0, 32]].tolist() == [0x78, 0x78]
    assert "scale: each entry is stored 2 times, 1 times" in compare(seven, fourteen, 2).differences
    misread = dump_of(seven, stored["v4_two_pools_g32"][None], 1)
    assert inspect_row(misread, 0).anomalies[0] == "nope 0..63: the copies of the scale differ"
    with pytest.raises(ValueRangeError, match="77 76 for scale 0 of slot 0; allowed: 2 equal"):
        convert(misread, get_layout("v4"))
    with pytest.raises(ArgumentError, match="groups of 64 and 32"):
        convert(dump_of(seven, stored["v4_two_pools"][None], 1), fourteen)


def test_16_two_roundings_of_one_release() -> None:
    """amax 7: 3A, rounded up, or 39; and 0.0 in both."""
    rows = np.zeros((2, 576), np.float32)
    rows[0, :512] = 7
    layout = get_layout("v32_nvfp4")
    right, wrong = (encode_records(rows, name) for name in ("v32_nvfp4", "v32_nvfp4@N3"))
    assert set(right[0, 320:].tolist()) == {0x39} and set(wrong[0, 320:].tolist()) == {0x3A}
    found = explain_rows(dump_of(layout, wrong, 2), Rows(rows, np.arange(2)))
    assert named(found)[0] == "scale-rounded-up"
    said = compare(layout, get_layout("v32_nvfp4@N3"), 2).differences
    assert "codes: scale rounding is nearest_even, up" in said


def test_17_division_and_reciprocal() -> None:
    """Every tie of an element under every scale: 42 of 882 codes are others by the reciprocal."""
    scales = np.arange(1, 0x7F, dtype=np.uint8)
    numbers = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    rows = np.zeros((4, 32, 16), np.float32)
    groups = rows.reshape(128, 16)
    groups[:126, 0] = 6 * numbers
    groups[:126, 1:8] = ties * numbers[:, None]
    flat = rows.reshape(4, 512)
    assert np.array_equal(flat, flat.astype(BF16).astype(np.float32))
    layout = get_layout("v41_nvfp4")
    right = encode_records(flat, layout)
    assert right[:, 256:].reshape(-1)[:126].tolist() == scales.tolist()
    even, quotients = np.uint8([0, 2, 2, 4, 4, 6, 6]), np.uint8([0, 1, 2, 3, 4, 5, 6])
    codes = np.stack([right[:, :256] & 15, right[:, :256] >> 4], axis=-1).reshape(128, 16)
    assert (codes[:126, 1:8] == even).all()
    # By the reciprocal a quotient next to a tie goes to the code on its side.
    scaled = groups[:126, 1:8] * (np.float32(1) / numbers)[:, None]
    other = np.where(scaled == ties, even, quotients + (scaled > ties)).astype(np.uint8)
    assert int((other != even).sum()) == 42
    changed = codes.copy()
    changed[:126, 1:8] = other
    wrong = right.copy()
    wrong[:, :256] = (changed[:, 0::2] | changed[:, 1::2] << 4).reshape(4, 256)
    source = Rows(flat.astype(BF16), np.arange(4))
    assert named(explain_rows(dump_of(layout, wrong, 4), source)) == ["reciprocal"]
    at = 0x0E  # the scale 0F: 0.03662109375 is code 2, or 3
    assert groups[at, 3] == np.float32(0.03662109375) and other[at, 2] == 3


def test_18_index_keys_rotated_or_not() -> None:
    """(1, 0, ..., 0) is one code, or, spread by a Walsh-Hadamard transform, 128 equal ones."""
    row = np.zeros((1, 128), np.float32)
    row[0, 0] = 1
    spread = np.full((1, 128), 128**-0.5, np.float32).astype(BF16)
    for name, one in (("indexer_fp8", 0x78), ("indexer_mxfp4", 0x06)):
        layout = get_layout(name)
        source = Rows(row.astype(BF16), np.int64([0]))
        plain = dump_of(layout, encode_records(source.rows, layout), 1)
        turned = dump_of(layout, encode_records(spread, layout), 1)
        assert explain_rows(plain, source).status == "no difference"
        assert named(explain_rows(turned, source)) == ["hadamard"]
        codes = [
            [c for g in inspect_row(dump, 0).groups for c in g["codes"]] for dump in (plain, turned)
        ]
        assert int(codes[0][0], 16) == one and set(codes[0][1:]) == {codes[0][1]}
        assert len(set(codes[1])) == 1 and int(codes[1][0], 16) != 0
