"""`reference.paged_cache`: insert and gather against loops over a bytearray, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow

from dsv4num import ArgumentError, Dsv4numError, ValueRangeError, get_layout
from dsv4num.reference import (
    dequantize_and_gather_k_cache,
    paged_cache,
    quantize_and_insert_k_cache,
)

NAMES = tuple(slow.LAYOUTS)
FILLS = (0xA5, 0x5A)
BF16 = ml_dtypes.bfloat16


def row_bytes(layout: str) -> int:
    """Bytes per row."""
    return slow.LAYOUTS[layout][1] + slow.LAYOUTS[layout][2]


def sample_bits(rows: int, width: int, seed: int) -> np.ndarray:
    """bf16 patterns: ordinary values, every third row any bits."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, width)).astype(np.float32)
    bits = values.astype(BF16).view(np.uint16)
    for row in range(2, rows, 3):
        bits[row] = rng.integers(0, 1 << 16, width)
    return bits


def slow_insert(
    bits: np.ndarray, slots: list[int], layout: str, fill: int, pages: int, stride: int, rows: int
) -> bytes:
    """The whole buffer after an insert, by the slow oracle."""
    want = bytearray([fill]) * (pages * stride)
    slow.insert(bits.tolist(), want, stride, slots, rows, layout)
    return bytes(want)


def as_pages(buffer: np.ndarray, layout: str, pages: int, rows: int, stride: int) -> np.ndarray:
    """A flat buffer as a 3-D cache with a page stride."""
    width = row_bytes(layout)
    return np.lib.stride_tricks.as_strided(buffer, (pages, rows, width), (stride, width, 1))


# --- insert ---------------------------------------------------------------------------


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", NAMES)
def test_insert_2d(layout: str, fill: int) -> None:
    pages, rows, slots = 3, 4, [7, -1, 0, 11, 5, -3, 2]
    stride = slow.page_bytes(layout, rows)
    bits = sample_bits(7, slow.LAYOUTS[layout][0], 21)
    cache = np.full((pages, stride), fill, np.uint8)
    k = bits.view(BF16)
    quantize_and_insert_k_cache(k, cache, np.int64(slots), rows, layout=layout)
    assert cache.tobytes() == slow_insert(bits, slots, layout, fill, pages, stride, rows)
    assert np.array_equal(bits, sample_bits(7, slow.LAYOUTS[layout][0], 21))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("padding", [0, 1, 60])
def test_insert_3d_with_a_page_stride(layout: str, fill: int, padding: int) -> None:
    pages, rows, slots = 3, 2, [5, 0, -1, 2]
    stride = slow.page_bytes(layout, rows) + padding
    bits = sample_bits(4, slow.LAYOUTS[layout][0], 22)
    buffer = np.full(pages * stride, fill, np.uint8)
    cache = as_pages(buffer, layout, pages, rows, stride)
    quantize_and_insert_k_cache(bits.view(BF16), cache, np.int64(slots), rows, layout=layout)
    assert buffer.tobytes() == slow_insert(bits, slots, layout, fill, pages, stride, rows)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", ["v4", "v41_nvfp4_inline", "indexer_fp8"])
def test_insert_into_a_slice_of_a_larger_buffer(layout: str, fill: int) -> None:
    """One layer's pages inside an allocation shared with others."""
    pages, rows, slots = 3, 2, [4, 1]
    own = slow.page_bytes(layout, rows)
    bits = sample_bits(2, slow.LAYOUTS[layout][0], 23)
    shared = np.full((pages, own + 100), fill, np.uint8)
    quantize_and_insert_k_cache(
        bits.view(BF16), shared[:, 33 : 33 + own], np.int64(slots), rows, layout=layout
    )
    want = bytearray([fill]) * shared.size
    inside = memoryview(want)[33:]
    # The oracle asks for a bytearray, and a view of one serves.
    slow.insert(bits.tolist(), inside, own + 100, slots, rows, layout)  # type: ignore[arg-type]
    assert shared.tobytes() == bytes(want)


@pytest.mark.parametrize("layout", ["v4", "v41_mxfp8_inline", "v41_nvfp4"])
def test_insert_strided_k_and_more_rows_than_slots(layout: str) -> None:
    pages, rows, slots = 2, 3, [3, 0, 4]
    stride = slow.page_bytes(layout, rows)
    wide = sample_bits(10, 520, 24)
    before = wide.copy()
    k = wide[::2, 5:517]
    cache = np.full((pages, stride), 0xA5, np.uint8)
    quantize_and_insert_k_cache(k.view(BF16), cache, np.int64(slots), rows, layout=layout)
    assert cache.tobytes() == slow_insert(k[:3], slots, layout, 0xA5, pages, stride, rows)
    assert np.array_equal(wide, before)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_insert_slot_dtypes_and_strided_slots(dtype: type) -> None:
    pages, rows, slots = 2, 64, [127, 64, -1, 0]
    bits = sample_bits(4, 512, 25)
    cache = np.full((pages, 37440), 0xA5, np.uint8)
    quantize_and_insert_k_cache(bits.view(BF16), cache, np.array(slots, dtype))
    assert cache.tobytes() == slow_insert(bits, slots, "v4", 0xA5, pages, 37440, rows)


def test_insert_default_is_v4_with_64_rows() -> None:
    bits = sample_bits(1, 512, 26)
    one, two = np.full((2, 1, 37440), 0xA5, np.uint8)
    quantize_and_insert_k_cache(bits.view(BF16), one, np.int64([63]))
    quantize_and_insert_k_cache(bits.view(BF16), two, np.int64([63]), 64, layout="v4")
    assert np.array_equal(one, two)
    assert (one[0, 37376:] == 0xA5).all()
    assert one[0, 37375] == 0


def test_insert_accepts_a_layout_object() -> None:
    bits = sample_bits(1, 512, 26)
    one, two = np.zeros((2, 1, 288), np.uint8)
    quantize_and_insert_k_cache(bits.view(BF16), one, np.int64([0]), 1, layout="v41_nvfp4")
    layout = get_layout("v41_nvfp4")
    quantize_and_insert_k_cache(bits.view(BF16), two, np.int64([0]), 1, layout=layout)
    assert one.any() and np.array_equal(one, two)


@pytest.mark.parametrize("layout", NAMES)
def test_insert_nothing(layout: str) -> None:
    width = slow.LAYOUTS[layout][0]
    cache = np.full((2, slow.page_bytes(layout, 2)), 0xA5, np.uint8)
    some = np.zeros((3, width), BF16)
    quantize_and_insert_k_cache(some, cache, np.int64([]), 2, layout=layout)
    quantize_and_insert_k_cache(some, cache, np.int64([-1, -1, -9]), 2, layout=layout)
    quantize_and_insert_k_cache(some[:0], cache, np.int64([]), 2, layout=layout)
    quantize_and_insert_k_cache(np.zeros((0, width), BF16), cache, np.int64([]), 2, layout=layout)
    assert (cache == 0xA5).all()


def test_insert_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = sample_bits(7, 128, 27)
    slots = [5, -1, 3, 0, 7, -1, 1]
    for chunk in (1, 2, 3):
        monkeypatch.setattr(paged_cache, "CHUNK", chunk)
        cache = np.full((2, 4 * 68), 0xA5, np.uint8)
        k = bits.view(BF16)
        quantize_and_insert_k_cache(k, cache, np.int64(slots), 4, layout="indexer_mxfp4")
        assert cache.tobytes() == slow_insert(bits, slots, "indexer_mxfp4", 0xA5, 2, 272, 4)
        out = np.full((1, 5, 128), -7.0, BF16)
        lens, table = np.int32([4]), np.int32([[1]])
        dequantize_and_gather_k_cache(out, cache, lens, None, table, 4, 1, layout="indexer_mxfp4")
        want = np.full((1, 5, 128), -7.0, BF16).view(np.uint16).tolist()
        slow.gather(want, cache.tobytes(), 272, [4], None, [[1]], 4, 1, "indexer_mxfp4")
        assert out.view(np.uint16).tolist() == want


@pytest.mark.parametrize("slots", [[3, 1, 3], [3, 1, 8]])
def test_insert_checks_every_slot_before_the_first_chunk(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated or too large slot in a later chunk leaves the cache untouched."""
    monkeypatch.setattr(paged_cache, "CHUNK", 1)
    cache = np.full((2, 4 * 68), 0xA5, np.uint8)
    k = np.ones((3, 128), BF16)
    with pytest.raises(ValueRangeError, match=r"^slot_mapping: got .*SPEC "):
        quantize_and_insert_k_cache(k, cache, np.int64(slots), 4, layout="indexer_mxfp4")
    assert (cache == 0xA5).all()


# --- gather ---------------------------------------------------------------------------

SEQ_LENS, GATHER_LENS = [5, 0, 8, 3], [2, 0, 8, 0]
TABLE = [[3, 1, 9], [-1, -1, -1], [0, 4, 99], [2, -5, 0]]


def poisoned_cache(layout: str, pages: int, stride: int, rows: int, seed: int) -> np.ndarray:
    """Any bytes; the scales of a row of each page are 0 and 255."""
    buffer = np.random.default_rng(seed).integers(0, 256, pages * stride, dtype=np.uint8)
    for page in range(pages):
        _, at = slow.places(layout, rows, stride, page * rows)
        buffer[at : at + 2] = (0, 255)
    return buffer


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("gather_lens", [None, GATHER_LENS])
def test_gather(layout: str, fill: int, gather_lens: list[int] | None) -> None:
    pages, rows, offset, room = 5, 4, 1, 10
    width = slow.LAYOUTS[layout][0]
    stride = slow.page_bytes(layout, rows) + 3
    buffer = poisoned_cache(layout, pages, stride, rows, 31)
    before = buffer.copy()
    out = np.full((4, room, width), fill * 0x0101, np.uint16)
    want = out.tolist()
    lens = None if gather_lens is None else np.int32(gather_lens)
    inputs = np.int32(SEQ_LENS), np.int32(TABLE)
    dequantize_and_gather_k_cache(
        out.view(BF16),
        as_pages(buffer, layout, pages, rows, stride),
        inputs[0],
        lens,
        inputs[1],
        rows,
        offset,
        layout=layout,
    )
    slow.gather(want, buffer.tobytes(), stride, SEQ_LENS, gather_lens, TABLE, rows, offset, layout)
    assert out.tolist() == want
    assert np.array_equal(buffer, before)
    assert inputs[0].tolist() == SEQ_LENS and inputs[1].tolist() == TABLE


@pytest.mark.parametrize(
    ("layout", "width"),
    [
        ("v4", 584),
        ("v41_mxfp8", 528),
        ("v41_nvfp4", 288),
        ("indexer_fp8", 132),
        ("indexer_mxfp4", 68),
    ],
)
def test_gather_reads_the_layout_off_a_3d_cache(layout: str, width: int) -> None:
    head = slow.LAYOUTS[layout][0]
    cache = np.random.default_rng(32).integers(0, 256, (2, 2, width), dtype=np.uint8)
    out = np.zeros((1, 4, head), BF16)
    dequantize_and_gather_k_cache(out, cache, np.int64([4]), None, np.int64([[1, 0]]), 2, 0)
    want = np.zeros((1, 4, head), np.uint16).tolist()
    slow.gather(want, cache.tobytes(), 2 * width, [4], None, [[1, 0]], 2, 0, layout)
    assert out.view(np.uint16).tolist() == want


def test_gather_repeated_pages_and_shared_prefixes() -> None:
    layout, stride = "v41_nvfp4", 2 * 288
    buffer = poisoned_cache(layout, 3, stride, 2, 33)
    table, lens = [[1, 1, 1], [1, 0, 2]], [6, 5]
    out = np.zeros((2, 6, 512), BF16)
    cache = buffer.reshape(3, stride)
    dequantize_and_gather_k_cache(
        out, cache, np.int64(lens), None, np.int64(table), 2, 0, layout=layout
    )
    want = np.zeros((2, 6, 512), np.uint16).tolist()
    slow.gather(want, buffer.tobytes(), stride, lens, None, table, 2, 0, layout)
    got = out.view(np.uint16)
    assert got.tolist() == want
    assert np.array_equal(got[0, :2], got[0, 2:4]) and np.array_equal(got[0, :2], got[1, :2])


@pytest.mark.parametrize("fill", FILLS)
def test_gather_into_a_strided_out(fill: int) -> None:
    """Rows of out wider apart than needed, and requests apart: what lies between keeps its fill."""
    layout, stride = "v4", slow.page_bytes("v4", 2)
    buffer = poisoned_cache(layout, 2, stride, 2, 34)
    base = np.full((4, 9, 600), fill * 0x0101, np.uint16)
    out = base[::2, 1:8:2, 10:522]
    want = base.tolist()
    inner = out.tolist()
    dequantize_and_gather_k_cache(
        out.view(BF16),
        buffer.reshape(2, stride),
        np.int32([3, 1]),
        np.int32([2, 1]),
        np.int32([[1, 0], [0, 1]]),
        2,
        1,
        layout=layout,
    )
    slow.gather(inner, buffer.tobytes(), stride, [3, 1], [2, 1], [[1, 0], [0, 1]], 2, 1, layout)
    for request in range(2):
        for row in range(4):
            want[2 * request][1 + 2 * row][10:522] = inner[request][row]
    assert base.tolist() == want


def test_gather_strided_table_and_lens() -> None:
    layout = "indexer_mxfp4"
    cache = np.random.default_rng(35).integers(0, 256, (4, 136), dtype=np.uint8)
    table = np.int32([[3, 0, 7, 7], [9, 9, 9, 9], [2, 1, 7, 7]])[::2, :2]
    out = np.zeros((2, 4, 128), BF16)
    dequantize_and_gather_k_cache(
        out, cache, np.int64([4, 3]), np.int64([1, 3]), table, 2, 0, layout=layout
    )
    want = np.zeros((2, 4, 128), np.uint16).tolist()
    slow.gather(want, cache.tobytes(), 136, [4, 3], [1, 3], table.tolist(), 2, 0, layout)
    assert out.view(np.uint16).tolist() == want


@pytest.mark.parametrize("layout", NAMES)
def test_gather_nothing(layout: str) -> None:
    width = slow.LAYOUTS[layout][0]
    cache = np.zeros((2, slow.page_bytes(layout, 2)), np.uint8)
    out = np.full((2, 3, width), -7.0, BF16)
    table, lens = np.int32([[0], [0]]), np.int32([0, 2])

    def gather(out: np.ndarray, seq: np.ndarray, got: Any, table: np.ndarray, at: int) -> None:
        dequantize_and_gather_k_cache(out, cache, seq, got, table, 2, at, layout=layout)

    gather(out, np.int32([0, 0]), None, table, 0)
    gather(out, lens, np.int32([0, 0]), table, 3)
    gather(out[:0], np.int32([]), None, table[:0], 0)
    gather(np.zeros((2, 0, width), BF16), np.int32([0, 0]), None, table, 0)
    gather(out, np.int32([0, 0]), None, np.zeros((2, 0), np.int32), 0)
    assert (out == np.asarray(-7.0, BF16)).all()


@pytest.mark.parametrize("layout", NAMES)
def test_insert_then_gather_is_record_decode(layout: str) -> None:
    width = slow.LAYOUTS[layout][0]
    bits = sample_bits(5, width, 36)
    cache = np.full((3, slow.page_bytes(layout, 2)), 0xA5, np.uint8)
    slots = np.int64([4, 5, 0, 1, 2])  # pages 2, 0, 1
    quantize_and_insert_k_cache(bits.view(BF16), cache, slots, 2, layout=layout)
    out = np.zeros((1, 5, width), BF16)
    table = np.int32([[2, 0, 1]])
    dequantize_and_gather_k_cache(out, cache, np.int32([5]), None, table, 2, 0, layout=layout)
    for row, got in enumerate(out[0].view(np.uint16).tolist()):
        data, scales = slow.record(bits[row].tolist(), layout)
        assert got == slow.row_of_record(data, scales, layout)


# --- errors: nothing may be written ---------------------------------------------------


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, not writable."""
    array.flags.writeable = False
    return array


def insert_arguments() -> dict[str, Any]:
    """A valid call: two tokens, two pages of two v4 rows."""
    return {
        "k": np.ones((2, 512), BF16),
        "k_cache": np.full((2, 1728), 0xA5, np.uint8),
        "slot_mapping": np.int64([0, 3]),
        "block_size": 2,
        "layout": "v4",
    }


Change = Callable[[dict[str, Any]], Any]

INSERT_ERRORS: list[tuple[str, Change, type, str]] = [
    ("k", lambda a: np.ones((2, 512), np.float32), ArgumentError, "float32"),
    ("k", lambda a: np.ones((2, 512), np.float16), ArgumentError, "float16"),
    ("k", lambda a: np.ones((2, 511), BF16), ArgumentError, "[2, 511]"),
    ("k", lambda a: np.ones(512, BF16), ArgumentError, "[512]"),
    ("k", lambda a: np.ones((1, 2, 512), BF16), ArgumentError, "[1, 2, 512]"),
    ("k", lambda a: np.ones((1, 512), BF16), ArgumentError, "1 rows"),
    ("k", lambda a: np.ones((2, 1024), BF16)[:, ::2], ArgumentError, "stride 2"),
    ("k", lambda a: np.ones((2, 512), BF16)[:, ::-1], ArgumentError, "stride -1"),
    ("k", lambda a: a["k"].tolist(), ArgumentError, "list"),
    ("k_cache", lambda a: np.full((2, 1728), 5, np.int8), ArgumentError, "int8"),
    ("k_cache", lambda a: np.full(3456, 5, np.uint8), ArgumentError, "[3456]"),
    ("k_cache", lambda a: np.full((2, 2, 1, 584), 5, np.uint8), ArgumentError, "[2, 2, 1, 584]"),
    ("k_cache", lambda a: np.full((2, 2, 512), 5, np.uint8), ArgumentError, "[2, 2, 512]"),
    ("k_cache", lambda a: np.full((2, 3, 584), 5, np.uint8), ArgumentError, "[2, 3, 584]"),
    ("k_cache", lambda a: np.full((2, 1167), 5, np.uint8), ArgumentError, "1167"),
    ("k_cache", lambda a: np.full((2, 3456), 5, np.uint8)[:, ::2], ArgumentError, "stride 2"),
    ("k_cache", lambda a: np.full((2, 2, 600), 5, np.uint8)[:, :, :584], ArgumentError, "600"),
    ("k_cache", lambda a: read_only(np.full((2, 1728), 5, np.uint8)), ArgumentError, "read-only"),
    (
        "k_cache",
        lambda a: np.lib.stride_tricks.as_strided(np.zeros(4000, np.uint8), (2, 1728), (1000, 1)),
        ArgumentError,
        "1000",
    ),
    ("slot_mapping", lambda a: np.float32([0, 3]), ArgumentError, "float32"),
    ("slot_mapping", lambda a: np.uint64([0, 3]), ArgumentError, "uint64"),
    ("slot_mapping", lambda a: np.array([True, False]), ArgumentError, "bool"),
    ("slot_mapping", lambda a: np.int64([[0, 3]]), ArgumentError, "[1, 2]"),
    ("slot_mapping", lambda a: [0, 3], ArgumentError, "list"),
    ("slot_mapping", lambda a: np.int64([0, 4]), ValueRangeError, "4"),
    ("slot_mapping", lambda a: np.int64([2**40, 0]), ValueRangeError, str(2**40)),
    ("slot_mapping", lambda a: np.int64([3, 3]), ValueRangeError, "slot 3"),
    ("block_size", lambda a: 0, ArgumentError, "0"),
    ("block_size", lambda a: -1, ArgumentError, "-1"),
    ("block_size", lambda a: True, ArgumentError, "True"),
    ("block_size", lambda a: 1.5, ArgumentError, "1.5"),
    ("block_size", lambda a: None, ArgumentError, "None"),
    ("block_size", lambda a: "2", ArgumentError, "'2'"),
    ("layout", lambda a: "v4x", ArgumentError, "'v4x'"),
    ("layout", lambda a: None, ArgumentError, "None"),
    ("layout", lambda a: 584, ArgumentError, "584"),
]


def check_message(error: Dsv4numError, name: str, text: str) -> None:
    """The argument, what was given, what is allowed, the clause."""
    message = str(error)
    assert message.startswith(f"{name}: got "), message
    given, allowed = message.split("; allowed: ")
    assert text in given, message
    assert len(allowed.split(" (SPEC ")[0]) > 3 and "(SPEC " in allowed, message
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(("name", "change", "kind", "text"), INSERT_ERRORS)
def test_insert_errors(name: str, change: Change, kind: type, text: str) -> None:
    arguments = insert_arguments()
    arguments[name] = change(arguments)
    before = np.array(arguments["k_cache"], copy=True)
    with pytest.raises(kind) as caught:
        quantize_and_insert_k_cache(**arguments)
    check_message(caught.value, name, text)
    assert np.array_equal(arguments["k_cache"], before)


def test_insert_arguments_are_valid_without_a_change() -> None:
    quantize_and_insert_k_cache(**insert_arguments())


def gather_arguments() -> dict[str, Any]:
    """A valid call: two requests, three pages of two v4 rows."""
    return {
        "out": np.full((2, 5, 512), -7.0, BF16),
        "k_cache": np.full((3, 2, 584), 0x11, np.uint8),
        "seq_lens": np.int32([4, 3]),
        "gather_lens": np.int32([4, 1]),
        "block_table": np.int32([[2, 0], [1, 1]]),
        "block_size": 2,
        "offset": 1,
        "layout": None,
    }


GATHER_ERRORS: list[tuple[str, Change, type, str]] = [
    ("out", lambda a: np.zeros((2, 5, 512), np.float32), ArgumentError, "float32"),
    ("out", lambda a: np.zeros((2, 5, 511), BF16), ArgumentError, "[2, 5, 511]"),
    ("out", lambda a: np.zeros((10, 512), BF16), ArgumentError, "[10, 512]"),
    ("out", lambda a: np.zeros((3, 5, 512), BF16), ArgumentError, "[3, 5, 512]"),
    ("out", lambda a: np.zeros((2, 5, 1024), BF16)[:, :, ::2], ArgumentError, "stride 2"),
    ("out", lambda a: read_only(np.zeros((2, 5, 512), BF16)), ArgumentError, "read-only"),
    (
        "out",
        lambda a: np.broadcast_to(np.zeros(512, BF16), (2, 5, 512)),
        ArgumentError,
        "read-only",
    ),
    ("out", lambda a: None, ArgumentError, "NoneType"),
    ("k_cache", lambda a: np.zeros((3, 2, 584), np.int8), ArgumentError, "int8"),
    ("k_cache", lambda a: np.zeros((3, 4, 584), np.uint8), ArgumentError, "[3, 4, 584]"),
    ("k_cache", lambda a: np.zeros((3, 2, 1168), np.uint8)[:, :, ::2], ArgumentError, "stride 2"),
    ("seq_lens", lambda a: np.float32([4, 3]), ArgumentError, "float32"),
    ("seq_lens", lambda a: np.int32([[4, 3]]), ArgumentError, "[1, 2]"),
    ("seq_lens", lambda a: np.int32([4, -1]), ValueRangeError, "-1"),
    ("seq_lens", lambda a: [4, 3], ArgumentError, "list"),
    ("gather_lens", lambda a: [4, 1], ArgumentError, "list"),
    ("gather_lens", lambda a: np.int16([4, 1]), ArgumentError, "int16"),
    ("gather_lens", lambda a: np.int32([4]), ArgumentError, "[1]"),
    ("gather_lens", lambda a: np.int32([4, 4]), ValueRangeError, "4"),
    ("gather_lens", lambda a: np.int32([-1, 1]), ValueRangeError, "-1"),
    ("block_table", lambda a: np.int8([[2, 0], [1, 1]]), ArgumentError, "int8"),
    ("block_table", lambda a: np.int32([2, 0]), ArgumentError, "[2]"),
    ("block_table", lambda a: np.int32([[2, 0]]), ArgumentError, "[1, 2]"),
    ("block_table", lambda a: np.int32([[2, 3], [1, 1]]), ValueRangeError, "page 3"),
    ("block_table", lambda a: np.int32([[2, -1], [1, 1]]), ValueRangeError, "page -1"),
    ("block_table", lambda a: np.int32([[2], [1]]), ValueRangeError, "column 1"),
    ("block_size", lambda a: 0, ArgumentError, "0"),
    ("block_size", lambda a: -1, ArgumentError, "-1"),
    ("block_size", lambda a: True, ArgumentError, "True"),
    ("block_size", lambda a: 1.5, ArgumentError, "1.5"),
    ("offset", lambda a: -1, ArgumentError, "-1"),
    ("offset", lambda a: True, ArgumentError, "True"),
    ("offset", lambda a: 0.0, ArgumentError, "0.0"),
    ("layout", lambda a: "v4x", ArgumentError, "'v4x'"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), GATHER_ERRORS)
def test_gather_errors(name: str, change: Change, kind: type, text: str) -> None:
    arguments = gather_arguments()
    arguments[name] = change(arguments)
    out = arguments["out"]
    before = None if out is None else np.array(out, copy=True)
    with pytest.raises(kind) as caught:
        dequantize_and_gather_k_cache(**arguments)
    check_message(caught.value, name, text)
    if before is not None:
        assert np.array_equal(out, before)


def test_gather_arguments_are_valid_without_a_change() -> None:
    arguments = gather_arguments()
    arguments["layout"] = "v4_fnuz"
    dequantize_and_gather_k_cache(**arguments)
    arguments["layout"] = None
    dequantize_and_gather_k_cache(**arguments)


@pytest.mark.parametrize(("offset", "rows", "lens"), [(2, 4, [1, 3]), (5, 5, [0, 1])])
def test_gather_out_too_small(offset: int, rows: int, lens: list[int]) -> None:
    """The second request is refused before the first is written."""
    arguments = gather_arguments()
    arguments.update(offset=offset, gather_lens=np.int32(lens), out=arguments["out"][:, :rows])
    with pytest.raises(ValueRangeError) as caught:
        dequantize_and_gather_k_cache(**arguments)
    check_message(caught.value, "gather_lens", f"{lens[1]} rows for request 1")
    assert f"out has {rows} rows and offset is {offset}" in str(caught.value)
    assert (arguments["out"] == np.asarray(-7.0, BF16)).all()


def test_gather_bad_second_request_leaves_the_first_unwritten() -> None:
    arguments = gather_arguments()
    arguments["block_table"] = np.int32([[2, 0], [1, 7]])
    with pytest.raises(ValueRangeError, match="page 7 of request 1"):
        dequantize_and_gather_k_cache(**arguments)
    assert (arguments["out"] == np.asarray(-7.0, BF16)).all()


def test_gather_absurd_length_is_an_error_of_this_package() -> None:
    """A corrupt length is refused before memory for its rows is asked for."""
    arguments = gather_arguments()
    arguments.update(seq_lens=np.int64([4, 2**62]), gather_lens=np.int64([4, 2**62]))
    with pytest.raises(ValueRangeError, match=r"request 1.*\(SPEC "):
        dequantize_and_gather_k_cache(**arguments)
    assert (arguments["out"] == np.asarray(-7.0, BF16)).all()


def test_no_pages() -> None:
    """A cache of no pages has no slots; skipping every token, or no token, is fine."""
    for cache in (np.zeros((0, 2, 584), np.uint8), np.zeros((0, 1728), np.uint8)):
        k = np.ones((1, 512), BF16)
        quantize_and_insert_k_cache(k, cache, np.int64([-1]), 2)
        quantize_and_insert_k_cache(k, cache, np.int64([]), 2)
        with pytest.raises(ValueRangeError, match="slot_mapping: got 0;"):
            quantize_and_insert_k_cache(k, cache, np.int64([0]), 2)


def test_gather_2d_cache_needs_a_layout() -> None:
    arguments = gather_arguments()
    arguments["k_cache"] = np.zeros((3, 1728), np.uint8)
    with pytest.raises(ArgumentError) as caught:
        dequantize_and_gather_k_cache(**arguments)
    check_message(caught.value, "layout", "None")


def test_gather_width_of_no_layout_names_the_argument() -> None:
    arguments = gather_arguments()
    arguments["k_cache"] = np.zeros((3, 2, 512), np.uint8)
    with pytest.raises(ArgumentError) as caught:
        dequantize_and_gather_k_cache(**arguments)
    check_message(caught.value, "k_cache", "512")


def test_pages_beyond_the_gathered_rows_are_not_looked_at() -> None:
    """Table entries that no gathered position needs may hold anything."""
    arguments = gather_arguments()
    arguments["block_table"] = np.int32([[999, 0, -7], [-1, 1, 2**31 - 1]])
    arguments["gather_lens"] = np.int32([2, 1])
    dequantize_and_gather_k_cache(**arguments)


def test_optional_arguments_are_keyword_only() -> None:
    a = insert_arguments()
    places = (a["k"], a["k_cache"], a["slot_mapping"], 2, "v4")
    with pytest.raises(TypeError):
        quantize_and_insert_k_cache(*places)  # type: ignore[misc]  # refused
