"""`layout --vs`, `--c-header` and `convert`."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dsv4num.cli import main
from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.explain import DIALECTS
from dsv4num.explain.files import load_array, save_array
from dsv4num.explain.pages import Dump
from dsv4num.formats import LAYOUTS, WILD_LAYOUTS, Layout, get_layout, get_rule
from dsv4num.layouts import c_header, compare, convert
from dsv4num.reference import decode_records, encode_records, read_records, write_records

BF16 = ml_dtypes.bfloat16
EVERY = {**LAYOUTS, **WILD_LAYOUTS}


def block_of(layout: Layout) -> int:
    """A block size that a layout can have."""
    rows, several = layout.tile_rows
    return 2 * rows if several else rows


def written(
    layout: Layout, block: int, pages: int = 2, seed: int = 1, fill: int = 0
) -> tuple[Dump, np.ndarray]:
    """A dump of random rows, and their records."""
    rows = (
        np.random.default_rng(seed).standard_normal((pages * block, layout.head_dim)).astype(BF16)
    )
    records = encode_records(rows, layout)
    sizes = [layout.page_bytes(block, pool=pool) for pool in range(layout.pools)]
    cache = [np.full((pages, size), fill, np.uint8) for size in sizes]
    given = cache if len(cache) > 1 else cache[0]
    write_records(records, given, np.arange(len(rows)), block, layout=layout)
    return Dump.of(cache, layout, block), records


# --- the header -----------------------------------------------------------------------

COMPILERS = [("cc", "-std=c11", "c"), ("c++", "-std=c++17", "cc")]


@pytest.mark.parametrize(("compiler", "standard", "suffix"), COMPILERS)
def test_header_says_what_byte_offset_says(
    compiler: str, standard: str, suffix: str, tmp_path: Path
) -> None:
    """Every layout's header, compiled with all warnings, against `byte_offset`."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    chosen = [*EVERY.values(), get_layout("v4@P2")]
    queries: list[str] = []
    expected: list[int] = []
    for layout in chosen:
        name = layout.name.replace("@", "_").lower()
        macro = f"DSV4NUM_{name.upper()}"
        queries += [
            f"{macro}_{fact}" for fact in ("HEAD_DIM", "ROW_BYTES", "PAGE_MULTIPLE", "POOLS")
        ]
        expected += [layout.head_dim, layout.row_bytes, layout.page_multiple, layout.pools]
        block = block_of(layout)
        for pool in range(layout.pools):
            of = f"dsv4num_{name}_pool{pool}" if layout.pools > 1 else f"dsv4num_{name}"
            queries += [f"{of}_page_bytes({block})", f"{of}_owned_bytes({block})"]
            expected += [layout.page_bytes(block, pool=pool), layout.owned_bytes(block, pool=pool)]
        for _, field in layout.fields():
            own = f"{macro}_{field.name.upper()}"
            queries += [f"{own}_OFFSET", f"{own}_BYTES"]
            expected += [field.offset, field.nbytes]
            if field.format is None:
                continue
            stride = layout.page_bytes(block) + 64
            entries = {0, 1, field.entries // 3, field.entries - 1} & set(range(field.entries))
            for slot in (0, 1, block - 1, block + 1, 5 * block + block // 2, 2**33 * block + 1):
                for entry in sorted(entries):
                    at = f"{slot}, {entry}, {block}, {stride}"
                    queries.append(f"dsv4num_{name}_{field.name}_offset({at})")
                    expected.append(
                        layout.byte_offset(slot, field.name, block, page_stride=stride, entry=entry)
                    )
    source = tmp_path / f"offsets.{suffix}"
    lines = [f'  printf("%lld\\n", (long long)({query}));' for query in queries]
    functions = [
        f"static void part{i}(void) {{\n" + "\n".join(lines[at : at + 500]) + "\n}"
        for i, at in enumerate(range(0, len(lines), 500))
    ]
    calls = " ".join(f"part{i}();" for i in range(len(functions)))
    (tmp_path / "layouts.h").write_text("\n".join(c_header(layout) for layout in chosen))
    source.write_text(
        '#include "layouts.h"\n#include <stdio.h>\n'
        + "\n".join(functions)
        + f"\nint main(void) {{ {calls} return 0; }}\n"
    )
    program = tmp_path / "offsets"
    warnings = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-Wno-unused-function"]
    subprocess.run([compiler, standard, *warnings, "-o", program, source], check=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert len(found) == len(expected) > 3000
    wrong = [
        (query, int(number), right)
        for query, number, right in zip(queries, found, expected, strict=True)
        if int(number) != right
    ]
    assert not wrong, wrong[:5]


def test_header_constants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "v4", "--c-header"]) == 0
    text = capsys.readouterr().out
    assert text == c_header(get_layout("v4"))
    for line in (
        '#define DSV4NUM_V4_FINGERPRINT "5e2cfde5841d6299"',
        "#define DSV4NUM_V4_PAGE_MULTIPLE 576",
        "#define DSV4NUM_V4_NOPE_GROUP 64",
        "#define DSV4NUM_V4_NOPE_QMAX 448.0f",
        "#define DSV4NUM_V4_NOPE_FLOOR_BITS 0x38D1B717u /* fp32, amax */",
        "#define DSV4NUM_V4_PAD_VALUE 0",
    ):
        assert line in text.splitlines()
    assert main(["layout", "--list", "--c-header"]) == 0
    every = capsys.readouterr().out
    assert every.count("#endif /* DSV4NUM_") == len(EVERY)


# --- two layouts ----------------------------------------------------------------------


def test_first_bytes_that_tell_two_layouts_apart() -> None:
    """Pairs that were taken for each other, and the byte that tells."""
    for a, b, rows, page, text in [
        ("v41_mxfp8", "v41_mxfp8_inline", 2, "ones", "byte 512 is 78 in v41_mxfp8, 77 in"),
        ("v41_mxfp8", "v32_fp8_norope", 2, "ones", "byte 512 is 78 in v41_mxfp8, 00 in"),
        (
            "v41_mxfp8_inline",
            "ggml_fp8_b32_e8m0",
            2,
            "ones",
            "byte 0 is 78 in v41_mxfp8_inline, 77",
        ),
        ("v41_nvfp4", "v41_nvfp4_inline", 2, "ones", "byte 256 is 77 in v41_nvfp4, 23 in"),
        ("v41_nvfp4", "v41_mxfp4_ascend_g32", 2, "ones", "byte 0 is 77 in v41_nvfp4, 66 in"),
        ("v41_nvfp4", "ggml_fp4_b16_e4m3", 2, "ones", "byte 0 is 77 in v41_nvfp4, 23 in"),
        ("v32_fp8", "v32_fp8_planes", 2, "ones", "byte 512 is 00 in v32_fp8, 78 in"),
        ("v4_mxfp4", "glm_nvfp4_fp8rope", 2, "ones", "byte 0 is 66 in v4_mxfp4, 77 in"),
        ("v4", "v4@P2", 64, "zeros", "byte 36864 is 69 in v4, 72 in v4@P2"),
        ("v4", "v4_trtllm", 64, "zeros", "byte 36864 is 69 in v4, 5C in v4_trtllm"),
        ("v4", "v4_unpadded", 64, "ones", "byte 37376 is not written in v4, 78 in v4_unpadded"),
        ("indexer_fp8", "indexer_fp8_mx", 64, "ones", "byte 8192 is 00 in indexer_fp8, 77 in"),
        ("indexer_fp8", "indexer_fp8_inline", 64, "zeros", "byte 128 is 00 in indexer_fp8, AD"),
        ("indexer_mxfp4", "indexer_mxfp4_inline", 64, "ones", "byte 64 is 66 in indexer_mxfp4, 7D"),
        ("v32_fp8", "v32_fp8@F2", 64, "zeros", "byte 514 is 00 in v32_fp8, 80 in v32_fp8@F2"),
        ("v32_fp8@F3", "v32_fp8@F2", 64, "zeros", "byte 0 is 7F in v32_fp8@F3, 00 in"),
    ]:
        found = compare(get_layout(a), get_layout(b), rows)
        assert not found.equal and found.differences
        assert (found.telling[page] or "").startswith(text), (a, b, found.telling)


def test_what_differs_in_words() -> None:
    def said(a: str, b: str, rows: int = 64) -> str:
        return "\n".join(compare(get_layout(a), get_layout(b), rows).lines())

    for a, b, texts in [
        ("v4", "v4_trtllm", ("pad: is written 00, not written", "pages are a multiple of: 576, 1")),
        ("v4", "v4@P4", ("floor is 0.0001 on amax, none", "a group of zeros is None, 1.0")),
        ("v32_nvfp4", "v41_nvfp4", ("values per row: 576, 512", "rope (64 e4m3fn, dims 512..575)")),
        ("v32_nvfp4", "v32_fp8", ("format is e2m1, e4m3fn", "0, 8, 16, 24, 1, ..., one after")),
        ("indexer_fp8", "indexer_fp8_mx", ("scale: each entry is stored 1 times, 4 times",)),
        ("indexer_mxfp4", "indexer_mxfp4_pools", ("scale: lies in pool 0, 1",)),
        (
            "indexer_fp8",
            "indexer_fp8_tiles",
            (
                "bytes 0, 16, 6384 (tiles)",
                "steps: byte 16 is",
            ),
        ),
        ("ggml_fp8_b32_e8m0", "v41_mxfp8_inline", ("runs of 1 bytes, 33 apart, one after",)),
        ("v4", "v4_mxfp4", ("pad of 1 bytes: in v4 alone", "gap of 2 bytes: in v4_mxfp4 alone")),
        ("v41_nvfp4", "v41_nvfp4@N1", ("amax is multiplied by a reciprocal, divided",)),
        ("v41_nvfp4", "v4_nvfp4", ("scale (28 e4m3fn, dims 0..447): in v4_nvfp4 alone",)),
        ("v32_nvfp4", "v32_nvfp4@N3", ("scale rounding is nearest_even, up",)),
        ("v32_fp8@F4", "v32_fp8@F5", ("1e-05 added to amax, 1e-06 on amax",)),
        ("v4_nvfp4", "glm_nvfp4", ("codes (512 e2m1, dims 0..511): in glm_nvfp4 alone",)),
    ]:
        text = said(a, b)
        for part in texts:
            assert part in text, (a, b, part, text)
    assert (
        said("v4", "flashmla:MODEL1")
        == "v4 and v4 are the same bytes: fingerprint 5e2cfde5841d6299"
    )
    small = said("indexer_mxfp4_slots8", "indexer_mxfp4", 8)
    assert "bytes 0, 128, 400 (tiles)" in small
    assert "two pages of ones: byte 16" not in small  # all codes are 66
    planes = compare(get_layout("v32_fp8_planes"), get_layout("v32_fp8"), 2)
    assert "codes: row r begins at bytes 0, 16 (tiles), byte 656 * r" in planes.differences


def test_readme_says_what_differs_and_how_many_there_are() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    lines = compare(get_layout("v4"), get_layout("trtllm:footer_scale_kv")).lines()
    assert "\n".join(["$ dsv4num layout v4 --vs trtllm:footer_scale_kv", *lines]) + "\n" in text
    assert f"the registry holds {len(WILD_LAYOUTS)} that public engines" in text
    assert f"`explain` tries {len(DIALECTS)} named dialects" in text


@pytest.mark.parametrize("name", EVERY)
def test_a_layout_is_itself(name: str) -> None:
    layout = get_layout(name)
    found = compare(layout, layout, block_of(layout))
    assert found.equal and found.differences == ()
    assert found.telling == {"ones": None, "zeros": None, "steps": None}


def test_vs_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "v4", "--vs", "v4_trtllm"]) == 1
    assert "two pages of zeros: byte 36864 is 69 in v4, 5C in v4_trtllm" in capsys.readouterr().out
    assert main(["layout", "v4", "--vs", "vllm:fp8_ds_mla@v4"]) == 0
    assert main(["layout", "v4", "--vs", "v4@P2", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert facts["telling"]["ones"] is None and facts["layouts"] == ["v4", "v4@P2"]
    for argv, text in [
        (["layout", "--list", "--vs", "v4"], "--vs: got 'v4'; allowed: a NAME to compare with"),
        (["layout", "v4", "--vs", "v5"], "layout: got 'v5'"),
        (["layout", "v4", "--c-header", "--json"], "--json: got given with --c-header"),
        (
            ["layout", "v4", "--vs", "v4_fnuz", "--block-size", "9999"],
            "block_size: got 9999; allow",
        ),
        (["layout", "v4", "--vs", "indexer_mxfp4_slots8"], "block_size: got 64; allowed: 8"),
        (
            ["layout", "indexer_fp8_tiles", "--block-size", "8"],
            "block_size: got 8; allowed: a mult",
        ),
    ]:
        assert main(argv) == 2
        assert f"dsv4num: {text}" in capsys.readouterr().err


# --- convert --------------------------------------------------------------------------

#: From, to: pairs where only places, padding, copies or the format of a scale differ.
MOVES = [
    ("v4", "v4_unpadded"),
    ("v4_unpadded", "v4"),
    ("v4", "v4_page16"),
    ("v4", "v4_trtllm"),
    ("v4_trtllm", "v4"),
    ("v4@P2", "v4"),
    ("v4", "v4_two_pools"),
    ("v4_two_pools", "v4"),
    ("v4", "v4_ascend"),
    ("v41_mxfp8", "v41_mxfp8_inline"),
    ("v41_mxfp8_inline", "v41_mxfp8"),
    ("v41_mxfp8_inline", "v41_mxfp8_page512"),
    ("v41_mxfp8_inline", "v41_mxfp8_inline_page3168"),
    ("v41_mxfp8", "v41_mxfp8_ascend"),
    ("v41_mxfp8_ascend", "v41_mxfp8"),
    ("v41_mxfp8", "ggml_fp8_b32_e8m0"),
    ("ggml_fp8_b32_e8m0", "v41_mxfp8_inline"),
    ("v41_nvfp4", "v41_nvfp4_inline"),
    ("v41_nvfp4_inline", "v41_nvfp4_page256"),
    ("v41_nvfp4", "ggml_fp4_b16_e4m3"),
    ("v32_fp8", "v32_fp8_planes"),
    ("v32_fp8_planes", "v32_fp8"),
    ("indexer_fp8", "indexer_fp8_mx"),
    ("indexer_fp8_mx", "indexer_fp8"),
    ("indexer_fp8", "indexer_fp8_inline"),
    ("indexer_fp8_tiles", "indexer_fp8"),
    ("indexer_fp8", "indexer_fp8_tiles"),
    ("indexer_mxfp4", "indexer_mxfp4_inline"),
    ("indexer_mxfp4", "indexer_mxfp4_pools"),
    ("indexer_mxfp4_pools", "indexer_mxfp4_chunks"),
    ("indexer_mxfp4_chunks", "indexer_mxfp4_slots64"),
    ("indexer_mxfp4_slots64", "indexer_mxfp4_slots8"),
    ("indexer_mxfp4_slots8", "indexer_mxfp4_runs16"),
    ("indexer_mxfp4_runs16", "indexer_mxfp4_runs32"),
    ("indexer_mxfp4_runs64", "ggml_fp4_b32_e8m0"),
    ("ggml_fp4_b32_e8m0", "indexer_mxfp4"),
]


@pytest.mark.parametrize(("a", "b"), MOVES)
def test_moved_rows_have_the_same_values(a: str, b: str) -> None:
    """As the target's own writer places them, and decoded the same; what nobody writes is zero."""
    source, target = get_layout(a), get_layout(b)
    dump, records = written(source, block_of(source), fill=0xA5)
    block = block_of(target)
    pools = convert(dump, target, block)
    count = len(records)
    cache = pools if len(pools) > 1 else pools[0]
    moved = read_records(cache, np.arange(count), block, layout=target)
    assert np.array_equal(
        decode_records(moved, target).view(np.uint16),
        decode_records(records, source).view(np.uint16),
    )
    again = [np.zeros_like(pool) for pool in pools]
    write_records(
        moved, again if len(again) > 1 else again[0], np.arange(count), block, layout=target
    )
    for pool, rewritten in zip(pools, again, strict=True):
        assert np.array_equal(pool, rewritten)
        assert pool.shape[0] == -(-count // block)
    # There and back: the same records, but for what the target does not store.
    back = convert(Dump.of(pools, target, block), source, dump.block_size)
    there = read_records(
        back if len(back) > 1 else back[0], np.arange(count), dump.block_size, layout=source
    )
    assert np.array_equal(there, records)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ("v4", "v41_mxfp8", "nope|codes (dims 0..511) not stored so"),
        ("v4", "v4_fnuz", "e4m3fn and e4m3fnuz codes, and one code is two values"),
        ("indexer_fp8", "indexer_fp8_tiles_fnuz", "e4m3fn and e4m3fnuz codes"),
        ("v41_mxfp8", "v41_nvfp4", "e4m3fn and e2m1 codes"),
        ("v41_mxfp8", "v32_fp8_norope", "groups of 32 and 128 elements"),
        ("v4_two_pools", "v4_two_pools_g32", "groups of 64 and 32 elements"),
        ("v32_fp8", "v32_fp8_norope", "576 and 512 values per row"),
        ("v41_mxfp8", "plain_fp8", "scales stored in one of them alone"),
        ("plain_fp8", "v41_mxfp8", "scales stored in one of them alone"),
        ("plain_bf16", "plain_fp8", "codes (dims 0..511) not stored so"),
        ("glm_nvfp4_norope", "v41_nvfp4", "a scale for all groups of a row in the first alone"),
        ("v41_nvfp4", "glm_nvfp4_norope", "outer (dims 0..511) not stored so"),
        ("v32_nvfp4", "glm_nvfp4", "rope (dims 512..575) not stored so"),
        ("v32_nvfp4", "glm_nvfp4_fp8rope", "scales stored in one of them alone"),
    ],
)
def test_what_needs_quantizing_is_refused(a: str, b: str, text: str) -> None:
    dump, _ = written(get_layout(a), block_of(get_layout(a)))
    with pytest.raises(ArgumentError) as caught:
        convert(dump, get_layout(b))
    message = str(caught.value)
    assert message.startswith(f"{a} to {b}: got ") and text.rpartition("|")[2] in message
    assert "this needs quantizing (SPEC 4.8)" in message


def test_a_scale_of_one_is_not_a_scale_from_outside() -> None:
    given = get_layout("plain_fp8")
    (plane,) = given.planes
    (field,) = plane.fields
    rule = replace(get_rule("tensor/512"), name="unit/512", scale_rounding="unit")
    unit = replace(given, planes=(replace(plane, fields=(replace(field, rule=rule),)),))
    dump, _ = written(given, 2)
    with pytest.raises(ArgumentError, match="a scale of 1 and one from outside"):
        convert(dump, unit)
    assert np.array_equal(convert(dump, given)[0].reshape(-1), dump.data)


def test_scales_that_do_not_fit_are_refused() -> None:
    fp32 = get_layout("indexer_fp8@F1")
    dump, _ = written(fp32, 4)
    with pytest.raises(
        ValueRangeError, match=r"as scale 0 of slot 0; allowed: powers of two, which"
    ):
        convert(dump, get_layout("indexer_fp8_mx"))
    assert convert(dump, get_layout("indexer_fp8_inline"))[0].any()
    two = get_layout("v4_two_pools")
    dump, _ = written(two, 4)
    dump.data[dump.offsets(np.int64([3]))[0, 451]] ^= 1  # the second copy of the second scale
    with pytest.raises(ValueRangeError, match=r"7\w 7\w for scale 1 of slot 3; allowed: 2 equal"):
        convert(dump, get_layout("v4"))
    assert len(convert(dump, get_layout("v4"), slots=np.int64([0, 1, 2]))) == 1
    bf16 = get_layout("v41_mxfp8_ascend")
    dump, _ = written(bf16, 2)
    dump.data[dump.offsets(np.int64([1]))[0, 514]] = 0x01
    with pytest.raises(ValueRangeError, match=r"as scale 1 of slot 1; allowed: powers of two"):
        convert(dump, get_layout("v41_mxfp8"))
    mx = get_layout("v41_mxfp4_ascend")
    dump, _ = written(mx, 2)
    assert convert(dump, get_layout("v41_nvfp4"))[0].any()  # powers of two that E4M3 holds
    dump.data[dump.offsets(np.int64([0]))[0, 256:258]] = (0x00, 0x30)
    with pytest.raises(ValueRangeError, match="e4m3fn numbers, which e4m3fn holds"):
        convert(dump, get_layout("v41_nvfp4"))


def test_infinite_and_extreme_scales() -> None:
    layout, target = get_layout("indexer_fp8_mx"), get_layout("indexer_fp8")
    records = np.zeros((4, 132), np.uint8)
    for row, code in enumerate((0, 1, 254, 255)):
        records[row, 128:] = code
    page = np.zeros((1, 4 * 132), np.uint8)
    write_records(records, page, np.arange(4), 4, layout=layout)
    pages = convert(Dump.of(page, layout, 4), target)
    words = pages[0][0, 512:].view("<u4").tolist()
    assert words == [0x00400000, 0x00800000, 0x7F000000, 0x7F800000]
    back = convert(Dump.of(pages[0], target, 4), layout)
    assert np.array_equal(back[0], page)
    for word in (0x7FC00000, 0xBF800000, 0x80000000, 0x00000001):
        pages[0][0, 512:516] = np.array([word], "<u4").view(np.uint8)
        with pytest.raises(ValueRangeError, match="powers of two"):
            convert(Dump.of(pages[0], target, 4), layout)


def test_rows_and_block_sizes() -> None:
    layout = get_layout("v4")
    dump, records = written(layout, 4, pages=3, fill=0xA5)
    (pages,) = convert(dump, get_layout("v4_unpadded"), 5)
    assert pages.shape == (3, 5 * 584)
    assert np.array_equal(read_records(pages, np.arange(12), 5, layout="v4_unpadded"), records)
    assert not read_records(pages, np.arange(12, 15), 5, layout="v4_unpadded").any()
    (some,) = convert(dump, layout, slots=np.int64([7, 2]))
    assert np.array_equal(read_records(some, np.int64([2, 7]), 4, layout=layout), records[[2, 7]])
    assert not read_records(some, np.int64([0, 1, 3, 11]), 4, layout=layout).any()
    assert not some[:, 4 * 584 :].any()
    for slots in ([12], [-1, 3]):
        with pytest.raises(ValueRangeError, match=r"slots: got .*; allowed: 0\.\.11"):
            convert(dump, layout, slots=np.int64(slots))
    with pytest.raises(ValueRangeError, match="more than once"):
        convert(dump, layout, slots=np.int64([1, 1]))
    with pytest.raises(ArgumentError, match="block_size"):
        convert(dump, layout, 0)
    for rows in (1 << 50, 1 << 62):
        with pytest.raises(ArgumentError, match=r"block_size: got .*: 1 pages of .* into memory"):
            convert(dump, layout, rows)


@pytest.mark.parametrize("suffix", [".bin", ".npy", ".npz", ".npz:file", ".safetensors:layer 0"])
def test_convert_on_the_command_line(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = get_layout("v4")
    dump, records = written(layout, 64, fill=0xA5)
    source, target = tmp_path / "source.bin", f"{tmp_path}/target{suffix}"
    source.write_bytes(dump.data.tobytes())
    argv = ["convert", str(source), target, "--from", "flashmla:MODEL1", "--to", "v4_trtllm"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "128 rows from v4 to v4_trtllm, no value changed" in out
    assert f"{target}: 2 pages of 37,376 bytes" in out
    pages = load_array(target).reshape(2, 37_376)
    assert np.array_equal(read_records(pages, np.arange(128), 64, layout="v4_trtllm"), records)
    back = f"{tmp_path}/back.bin"
    more = ["--from", "v4_trtllm", "--to", "v4", "--to-block-size", "32", "--rows", "0-3", "--json"]
    assert main(["convert", target, back, *more]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"rows": 4, "from": "v4_trtllm", "to": "v4", "written": {back: [4, 19_008]}}
    page = load_array(back).reshape(4, -1)
    assert np.array_equal(read_records(page, np.arange(4), 32, layout="v4"), records[:4])
    assert not page[1:].any()


def test_pools_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, _ = written(get_layout("v4"), 8)
    source = tmp_path / "v4.bin"
    source.write_bytes(dump.data.tobytes())
    pools = f"{tmp_path}/nope.npy,{tmp_path}/rope.npy"
    size = ["--block-size", "8"]
    assert main(["convert", str(source), pools, "--from", "v4", "--to", "v4_two_pools", *size]) == 0
    assert "rope.npy: 2 pages of 1,024 bytes" in capsys.readouterr().out
    link = tmp_path / "link.bin"
    link.hardlink_to(source)
    back = tmp_path / "back.bin"
    assert main(["convert", pools, str(back), "--from", "v4_two_pools", "--to", "v4", *size]) == 0
    assert back.read_bytes() == dump.data.tobytes()
    for argv, text in [
        (
            [str(source), "x", "--from", "v4", "--to", "v4_two_pools"],
            "x: got 1 file; allowed: 2",
        ),
        (["a,b,c", "x", "--from", "v4_two_pools", "--to", "v4"], "a,b,c: got 3 files; allowed: 2"),
        ([str(source), str(source), "--from", "v4", "--to", "v4"], "TARGET: got "),
        ([str(source), str(link), "--from", "v4", "--to", "v4"], "TARGET: got "),
        (
            [str(source), f"{tmp_path}/x,{tmp_path}/./x", "--from", "v4", "--to", "v4_two_pools"],
            f"TARGET: got {tmp_path}/x,{tmp_path}/./x; allowed: a file of its own for each pool",
        ),
        (
            [str(source), f"{tmp_path}/x,{tmp_path}/no/x", "--from", "v4", "--to", "v4_two_pools"],
            f"{tmp_path}/no/x: got no such directory",
        ),
        (
            [str(source), f"{tmp_path}", "--from", "v4", "--to", "v4"],
            f"{tmp_path}: got a directory",
        ),
        ([str(source), "x.npz:", "--from", "v4", "--to", "v4"], "x.npz: got an array called ''"),
        ([str(source), "x.npz:a/k", "--from", "v4", "--to", "v4"], "x.npz: got an array called 'a/k'"),
        ([str(source), "x.pt", "--from", "v4", "--to", "v4"], "x.pt: got a file of torch"),
        ([str(source), "x.pt:k", "--from", "v4", "--to", "v4"], "x.pt:k: got a file of torch"),
        ([str(source), "x", "--from", "v4", "--to", "v4", "--rows", "3-1"], "--rows: got '3-1'"),
        ([str(source), f"{tmp_path}/no/x", "--from", "v4", "--to", "v4"], f"{tmp_path}/no/x: got"),
        ([str(source), "x", "--from", "v4", "--to", "v41_mxfp8"], "v4 to v41_mxfp8: got"),
        (
            [str(source), "x", "--from", "v4", "--to", "v4", "--to-block-size", "0"],
            "--to-block-size",
        ),
        ([f"{tmp_path}/none", "x", "--from", "v4", "--to", "v4"], f"{tmp_path}/none: got No such"),
        ([str(source), "x", "--from", "v4", "--to", "v4", "--rows", "99"], "slots: got 99..99"),
    ]:
        assert main(["convert", *argv, *size]) == 2
        assert f"dsv4num: {text}" in capsys.readouterr().err
    for name in ("x", "x.pt", "x.pt:k", f"{tmp_path}/x"):
        assert not Path(name).exists()
    assert source.read_bytes() == dump.data.tobytes()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_an_archive_is_one_file(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing one array replaces the others, of the source or of the pool before."""
    dump, _ = written(get_layout("v4"), 8)
    source = tmp_path / f"source{suffix}"
    save_array(f"{source}:a", dump.data)
    before, size = source.read_bytes(), ["--from", "v4", "--block-size", "8"]
    assert main(["convert", f"{source}:a", f"{source}:b", "--to", "v4_unpadded", *size]) == 2
    assert "TARGET: got " in capsys.readouterr().err
    pools = ",".join(f"{tmp_path}/x{suffix}:{name}" for name in ("nope", "rope"))
    assert main(["convert", f"{source}:a", pools, "--to", "v4_two_pools", *size]) == 2
    assert "a file of its own for each pool" in capsys.readouterr().err
    assert source.read_bytes() == before and list(tmp_path.iterdir()) == [source]


def test_saved_arrays_are_read_back(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.uint8).reshape(3, 20)
    for name in ("a.npy", "a.npz", "a.npz:file", "a.safetensors", "a.safetensors:k v", "a.bin"):
        save_array(f"{tmp_path}/{name}", array)
        back = load_array(f"{tmp_path}/{name}")
        assert back.dtype == np.uint8 and np.array_equal(back.reshape(3, 20), array)
    with pytest.raises(ArgumentError, match="a file of torch"):
        save_array(f"{tmp_path}/a.pth", array)
    assert not (tmp_path / "a.pth").exists()


def test_dumps_of_pools() -> None:
    layout = get_layout("v4_two_pools")
    parts = [np.zeros((3, 4 * 512), np.uint8), np.zeros((3, 4 * 128), np.uint8)]
    parts[1][2, 3] = 9
    dump = Dump.of(parts, layout, 4)
    assert (dump.pages, len(dump.slots)) == (3, 12)
    assert dump.records(np.int64([8]))[0, 515] == 9
    for given, text in [
        (parts[:1], "got 1 arrays; allowed: 2 for v4_two_pools"),
        ([parts[0], parts[1][:2]], "got pools of 3, 2 pages; allowed: the same number"),
        ([parts[0], parts[1][:, :100].copy()], "got a page stride|got 300 bytes"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            Dump.of(given, layout, 4)
    with pytest.raises(ArgumentError, match="page_stride: got 9; allowed: none"):
        Dump.of(parts, layout, 4, 9)
