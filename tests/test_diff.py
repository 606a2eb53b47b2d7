"""`diff`, `inspect` and `guess`: what they say about bytes that are known."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dsv4num import LAYOUTS, ArgumentError, get_layout
from dsv4num.explain import DIALECTS, Dump, apply, encode_under
from dsv4num.explain.diff import diff_dumps
from dsv4num.explain.guess import guess_layouts
from dsv4num.explain.inspect import inspect_row
from dsv4num.explain.probes import probe_rows
from dsv4num.explain.records import check_records
from dsv4num.formats import WILD_LAYOUTS
from dsv4num.reference import encode_records

BF16 = ml_dtypes.bfloat16


def page_of(rows, name, block_size=4, fill=0):
    """A dump with these rows in its first slots."""
    layout = get_layout(name)
    pages = -(-len(rows) // block_size)
    data = np.full(pages * layout.page_bytes(block_size), fill, np.uint8)
    dump = Dump.of(data, layout, block_size)
    dump.data[dump.offsets(np.arange(len(rows)))] = encode_records(rows, layout)
    return dump


def ordinary(name, rows=64):
    """Values of a K cache: each row at its own size."""
    rng = np.random.RandomState(8)
    values = rng.standard_normal((rows, get_layout(name).head_dim))
    return (values * np.exp2(rng.randint(-3, 4, (rows, 1)))).astype(BF16)


def copy(dump):
    return Dump(dump.data.copy(), dump.layout, dump.block_size, dump.page_stride)


def test_diff_counts_and_decodes():
    rows = np.ones((8, 512), BF16)
    a = page_of(rows, "v4")
    b = copy(a)
    where = a.offsets(np.int64([5]))[0]
    b.data[where[7]] = 0x79  # 288 in units of 2**-8
    b.data[where[448 + 2 * 3 + 1]] = 0x40  # rope element 3: 4080, 2.0 ... the high byte of 3F80
    b.data[where[576 + 2]] += 1
    b.data[where[583]] = 9
    found = diff_dumps(a, b)
    assert found.fields == {"nope": (1, 3584), "rope": (1, 1024), "scale": (1, 56), "pad": (1, 8)}
    assert (found.differing, found.rows, found.padding, found.equal) == (4, [5], 0, False)
    said = found.lines()
    place = "  page 1 slot 5 row 1"
    assert f"{place} nope[7] (dim 7): A 0x78 = 1, B 0x79 = 1.125" in said
    assert f"{place} rope[3] (dim 451): A 0x3F80 = 1, B 0x4080 = 4" in said
    assert f"{place} scale[2]: A 0x77, B 0x78" in said
    assert f"{place} pad[0]: A 0x00, B 0x09" in said


def test_diff_maps_the_page():
    a = page_of(np.ones((8, 512), BF16), "v4")
    b = copy(a)
    b.data[a.offsets(np.int64([1, 2]))[:, :28]] ^= 0x10  # one cell of nope: 448 / 16 dims
    b.data[a.offsets(np.int64([1, 2]))[:, 576]] ^= 1
    lines = diff_dumps(a, b).lines()
    start = lines.index("page 0        nope              rope              scale    pad")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["row", "0", "·" * 16, "·" * 16, "·" * 7, "·"],
        ["rows", "1-2", "#" + "·" * 15, "·" * 16, "#" + "·" * 6, "·"],
        ["row", "3", "·" * 16, "·" * 16, "·" * 7, "·"],
    ]
    assert not any(line.startswith("page 1") for line in lines)


def test_diff_of_nibbles():
    a = page_of(np.ones((1, 512), BF16), "v41_nvfp4_inline", 1)
    b = copy(a)
    b.data[3] = 0x7A
    first = diff_dumps(a, b).first
    assert [(e["element"], e["a"], e["b"], e["value_b"]) for e in first] == [
        (6, "7", "A", -0.171875)
    ]


def test_diff_of_padding_rows_and_pages():
    a = page_of(np.ones((8, 512), BF16), "v4")
    b = copy(a)
    b.data[4 * 584] = 1  # behind the rows of page 0
    found = diff_dumps(a, b)
    assert found.equal and found.padding == 1
    assert found.lines()[-1] == "bytes that no row owns differ: 1; nothing reads them"
    shorter = page_of(np.ones((4, 512), BF16), "v4")
    found = diff_dumps(a, shorter)
    assert not found.equal and found.differing == 0
    assert found.lines()[0].startswith("A has 2 pages, B has 1")
    with pytest.raises(ArgumentError, match=r"0\.\.3"):
        diff_dumps(a, shorter, np.int64([4]))
    unpadded = Dump(encode_records(np.ones((8, 512), BF16), "v4"), a.layout, 4, 4 * 584)
    assert unpadded.page_stride != a.page_stride
    flat = np.zeros(2 * 4 * 584, np.uint8)
    other = Dump(flat, a.layout, 4, 4 * 584)
    other.data[other.offsets(other.slots)] = a.records(a.slots)
    assert diff_dumps(a, other).equal


# What no encoder writes.


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bf16", [True, False])
def test_no_encoder_writes_what_is_called_impossible(name, bf16):
    """No finding but NaN in any row of the oracle: edges, any bf16 bits, any fp32 bits."""
    layout = get_layout(name)
    rng = np.random.default_rng(1)
    shape = 400, layout.head_dim
    rows = [probe_rows(layout, bf16=bf16)]
    rows.append(rng.integers(0, 1 << 16, shape, np.uint16).view(BF16).astype(np.float32))
    if not bf16:
        rows.append(rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32))
    records = encode_records(np.concatenate(rows), layout)
    for checked in check_records(records, layout):
        for kind, wrong in checked.wrong.items():
            assert kind == "nan" or not wrong.any(), kind


@pytest.mark.parametrize(
    ("name", "dialect", "kind"),
    [
        ("v4", "floor-1e-4-on-scale", "amax missing"),
        ("v4", "floor-1e-8-on-amax", "scale range"),
        ("v4", "no-floor", "scale range"),
        ("v4", "qmax-240", "amax missing"),
        ("v4_fnuz", "qmax-240", "beyond qmax"),
        ("v4_fnuz", "fnuz-early-saturation", "beyond qmax"),
        ("v41_nvfp4", "no-floor", "scale range"),
        ("v41_nvfp4", "floor-2^-6-on-scale", "amax missing"),
        ("indexer_fp8", "scale-word-unrounded", "scale power"),
        ("indexer_fp8", "scale-word-code-repeated", "scale power"),
        ("indexer_mxfp4", "floor-1e-4-on-amax", "amax missing"),
    ],
)
def test_dialects_that_show_in_a_single_row(name, dialect, kind):
    layout = get_layout(name)
    rows = probe_rows(layout, bf16=True)
    records = encode_under(rows, layout, apply(DIALECTS[dialect]), bf16=True)
    assert any(checked.wrong[kind].any() for checked in check_records(records, layout))


def test_the_smallest_nvfp4_scales_have_their_own_bound():
    """Scale 02 = 2**-8 serves amax / 6 from 1.5 * 2**-9 on: 4.5 in its units, code 6."""
    rows = np.zeros((2, 512), np.float32)
    rows[0, 0] = np.float32(9 * 2.0**-9 * 1.0001)
    records = encode_records(rows, "v41_nvfp4")
    assert records[0, 256] == 2 and records[0, 0] == 6
    assert not check_records(records, get_layout("v41_nvfp4"))[0].wrong["amax missing"].any()
    records[0, 0] = 5
    assert check_records(records, get_layout("v41_nvfp4"))[0].wrong["amax missing"].sum() == 1


def test_inspect_a_sound_row():
    rows = np.ones((8, 512), BF16)
    rows[5, 7] = 300
    row = inspect_row(page_of(rows, "v4"), 5)
    assert (row.page, row.row, row.anomalies) == (1, 1, [])
    group = row.groups[0]
    assert (group["dims"], group["scale_code"], group["scale"]) == ([0, 63], "7F", 1.0)
    assert (group["codes"][6:9], group["values"][6:9]) == (["38", "79", "38"], [1.0, 288.0, 1.0])
    assert row.raw[0]["codes"][:2] == ["3F80", "3F80"]
    lines = row.lines()
    assert lines[:2] == ["slot 5: page 1, row 1", "nope 0..63: scale 0x7F = 1, amax 288"]
    assert lines[-1] == "no anomaly"


def test_inspect_anomalies():
    rows = np.ones((4, 512), BF16)
    rows[0, 500] = np.nan
    dump = page_of(rows, "v4")
    where = dump.offsets(np.int64([0]))[0]
    dump.data[where[[10, 20]]] = 0x7F
    dump.data[where[64:128]] = 0x38  # no element near 448 in a group whose scale stays
    dump.data[where[576 + 2]] = 0xFF
    dump.data[where[576 + 3]] = 0
    dump.data[where[576 + 4]] = 0x20
    dump.data[where[583]] = 0xA5
    assert inspect_row(dump, 0).anomalies == [
        "nope 0..63: 2 NaN codes, the first at element 10 of the group",
        "nope 64..127: no element is large enough for this scale: it could be smaller",
        "nope 128..191: the scale is NaN (FF), and so is every value",
        "nope 192..255: scale code 0",
        "nope 256..319: scale that no encoder writes: 20",
        "rope: 1 values are NaN or infinite",
        "pad: A5 where 00 is written",
    ]
    facts = inspect_row(dump, 0).as_json()
    assert facts["raw"][0]["values"][52] == "nan"
    assert facts["groups"][2]["values"][0] == "nan"


def test_inspect_a_row_that_was_never_written():
    found = inspect_row(page_of(np.ones((2, 512), BF16), "v4", fill=0xA5), 3)
    assert found.anomalies[0] == "every byte of the row is A5: it may never have been written"


def test_inspect_an_fp32_scale():
    dump = page_of(np.ones((1, 128), BF16), "indexer_fp8", 1)
    dump.data[128:] = np.frombuffer(np.float32(1 / 448).tobytes(), np.uint8)
    assert inspect_row(dump, 0).anomalies == ["codes 0..127: scale is no power of two: 3B124925"]


# Guessing.


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_guess(name, block_size):
    """The layout is first, or equal to the first: OCP and FNUZ, or tiles, may hold the same bytes."""
    layout = get_layout(name)
    dump = page_of(ordinary(name, 3 * block_size), name, block_size)
    found = guess_layouts(dump.data)
    best = [guess for guess in found if guess.score == found[0].score]
    assert name in [guess.layout for guess in best]
    twins = {name.removesuffix("_fnuz"), name.removesuffix("_fnuz") + "_fnuz"}
    twins |= {n for n, x in WILD_LAYOUTS.items() if x.form == "tiled"}
    assert {guess.layout for guess in best} <= twins
    assert all(guess.score <= 0.9 for guess in found if guess.layout not in twins)
    if not layout.inline:
        assert found[0].block_size == block_size
        assert found[0].page_stride == layout.page_bytes(block_size)


def test_guess_unpadded_pages():
    layout = get_layout("v4")
    rows = encode_records(ordinary("v4", 128), layout)
    data = np.zeros(128 * 584, np.uint8)
    dump = Dump(data, layout, 64, 64 * 584)
    data[dump.offsets(dump.slots)] = rows
    best = guess_layouts(data)[0]
    assert (best.layout, best.block_size, best.page_stride) == ("v4", 64, 64 * 584)
    assert "without padding" in best.reasons[0]


def test_guess_tells_ocp_by_its_minus_zero():
    rows = ordinary("v4", 64)
    rows[::7, :64] = 1e-30
    rows[::7, 1] = -1.0
    rows[::7, 2] = -1e-30  # rounds to -0, which is NaN in FNUZ
    found = guess_layouts(page_of(rows, "v4", 64).data)
    assert found[0].layout == "v4" and found[0].score > found[1].score


@pytest.mark.parametrize("kind", ["random", "zeros", "odd size", "text"])
def test_guess_nothing(kind):
    data = {
        "random": np.random.default_rng(0).integers(0, 256, 37440).astype(np.uint8),
        "zeros": np.zeros(37440, np.uint8),
        "odd size": encode_records(ordinary("v4"), "v4").reshape(-1)[:-5],
        "text": np.resize(np.frombuffer(Path(__file__).read_bytes(), np.uint8), 38016),
    }[kind]
    assert [guess.layout for guess in guess_layouts(data) if guess.score > 0.9] == []
