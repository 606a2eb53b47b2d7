"""`reference.record`: all layouts against the loops of the slow oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow

from dsv4num import ArgumentError, ValueRangeError
from dsv4num.reference import decode_records, encode_records, read_records, write_records
from dsv4num.reference import record as record_module

NAMES = tuple(slow.LAYOUTS)


def sample_bits(rows: int, width: int, seed: int) -> np.ndarray:
    """bf16 patterns: ordinary rows, rows of any bits, a row of zeros, one of tiny values."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, width)).astype(np.float32)
    values *= np.exp2(rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if rows > 1:
        bits[1] = rng.integers(0, 1 << 16, width)
    if rows > 2:
        bits[2] = 0
    if rows > 3:
        bits[3] = rng.integers(0, 0x0400, width) | (rng.integers(0, 2, width) << 15)
    return bits


def slow_record(row: np.ndarray, layout: str) -> list[int]:
    """Data bytes then scale bytes."""
    data, scales = slow.record(row.tolist(), layout)
    return [*data, *scales]


@pytest.mark.parametrize("layout", NAMES)
def test_encode_bf16_rows(layout: str) -> None:
    bits = sample_bits(6, slow.LAYOUTS[layout][0], 11)
    got = encode_records(bits.view(ml_dtypes.bfloat16), layout)
    assert got.dtype == np.uint8
    for row in range(len(bits)):
        assert got[row].tolist() == slow_record(bits[row], layout), row


@pytest.mark.parametrize("layout", NAMES)
def test_encode_fp32_rows(layout: str) -> None:
    """fp32 values are quantized as they are; a raw field rounds them to bf16."""
    width, _, _, rule, _ = slow.LAYOUTS[layout]
    rng = np.random.default_rng(12)
    x = rng.normal(0, 3, (2, width)).astype(np.float32)
    x[1] = rng.integers(0, 1 << 32, width, dtype=np.uint32).view(np.float32)
    got = encode_records(x, layout)
    for row in range(2):
        numbers = [slow.fp32_value(b) for b in x[row].view(np.uint32).tolist()]
        data, scales = slow.record_of_numbers(numbers, rule, layout)
        assert got[row].tolist() == [*data, *scales]


@pytest.mark.parametrize("layout", NAMES)
def test_decode_records_of_any_bytes(layout: str) -> None:
    _, data, scales, _, _ = slow.LAYOUTS[layout]
    records = np.random.default_rng(13).integers(0, 256, (5, data + scales), dtype=np.uint8)
    records[0, data:] = 0
    records[1, data:] = 255
    got = decode_records(records, layout).view(np.uint16)
    for row, stored in enumerate(records.tolist()):
        want = slow.row_of_record(bytes(stored[:data]), bytes(stored[data:]), layout)
        assert got[row].tolist() == want, row


@pytest.mark.parametrize("layout", ["v4", "v4_fnuz"])
def test_raw_values_keep_every_bit(layout: str) -> None:
    bits = np.zeros((1024, 512), np.uint16)
    bits[:, 448:] = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 64)
    records = encode_records(bits.view(ml_dtypes.bfloat16), layout)
    assert np.array_equal(records[:, 448:576], bits[:, 448:].astype("<u2").view(np.uint8))
    assert np.array_equal(decode_records(records, layout).view(np.uint16), bits)


def test_pad_byte_is_zero_and_is_not_read() -> None:
    bits = sample_bits(4, 512, 14)
    records = encode_records(bits.view(ml_dtypes.bfloat16), "v4")
    assert not records[:, 583].any()
    changed = records.copy()
    changed[:, 583] = 0xFF
    want = decode_records(records, "v4").view(np.uint16)
    assert np.array_equal(decode_records(changed, "v4").view(np.uint16), want)


def test_a_row_of_ones() -> None:
    """Bytes worked out by hand: scale 2**-8, 2**-8, 0.171875, 2**-8 as fp32, 2**-2."""
    ones512, ones128 = np.ones((1, 512), np.float32), np.ones((1, 128), np.float32)
    v4 = encode_records(ones512, "v4")[0].tobytes()
    assert v4 == b"\x78" * 448 + b"\x80\x3f" * 64 + b"\x77" * 7 + b"\x00"
    fnuz = encode_records(ones512, "v4_fnuz")[0].tobytes()
    assert fnuz == b"\x78" * 448 + b"\x80\x3f" * 64 + b"\x78" * 7 + b"\x00"
    for name in ("v41_mxfp8", "v41_mxfp8_inline"):
        assert encode_records(ones512, name)[0].tobytes() == b"\x78" * 512 + b"\x77" * 16
    for name in ("v41_nvfp4", "v41_nvfp4_inline"):
        assert encode_records(ones512, name)[0].tobytes() == b"\x77" * 256 + b"\x23" * 32
    assert encode_records(ones128, "indexer_fp8")[0].tobytes() == b"\x78" * 128 + b"\0\0\x80\x3b"
    assert encode_records(ones128, "indexer_mxfp4")[0].tobytes() == b"\x66" * 64 + b"\x7d" * 4


def test_many_rows_are_the_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are handled in chunks; a border of a chunk must not show."""
    bits = sample_bits(9, 128, 15)
    x = bits.view(ml_dtypes.bfloat16)
    for layout in ("indexer_fp8", "indexer_mxfp4"):
        whole = encode_records(x, layout)
        back = decode_records(whole, layout).view(np.uint16)
        for chunk in (1, 4, 9):
            monkeypatch.setattr(record_module, "CHUNK", chunk)
            assert np.array_equal(encode_records(x, layout), whole)
            assert np.array_equal(decode_records(whole, layout).view(np.uint16), back)
        monkeypatch.undo()
    long = np.tile(x, (911, 1))
    assert len(long) > 8192
    assert np.array_equal(encode_records(long, "indexer_mxfp4"), np.tile(whole, (911, 1)))


def test_strided_rows_and_inputs_unchanged() -> None:
    bits = sample_bits(8, 600, 16)
    before = bits.copy()
    view = bits.view(ml_dtypes.bfloat16)[::2, 40:552]
    packed = np.ascontiguousarray(view)
    for layout in ("v4", "v41_nvfp4", "v41_mxfp8"):
        assert np.array_equal(encode_records(view, layout), encode_records(packed, layout))
        records = encode_records(packed, layout)
        spread = np.full((8, records.shape[1] + 5), 0xEE, np.uint8)
        spread[1::2, 2:-3] = records
        want = decode_records(records, layout).view(np.uint16)
        assert np.array_equal(decode_records(spread[1::2, 2:-3], layout).view(np.uint16), want)
    assert np.array_equal(bits, before)


@pytest.mark.parametrize("fill", [0xA5, 0x5A])
@pytest.mark.parametrize("layout", NAMES)
def test_write_and_read(layout: str, fill: int) -> None:
    _, data, scales, _, _ = slow.LAYOUTS[layout]
    block_size, pages = 3, 3
    stride = slow.page_bytes(layout, block_size) + 7
    records = np.random.default_rng(17).integers(0, 256, (5, data + scales), dtype=np.uint8)
    slots = np.int64([8, -1, 0, 4, -7])
    cache = np.full((pages, stride), fill, np.uint8)
    write_records(records, cache, slots, block_size, layout=layout)
    want = bytearray([fill]) * (pages * stride)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at_data, at_scales = slow.places(layout, block_size, stride, slot)
            want[at_data : at_data + data] = records[token, :data].tobytes()
            want[at_scales : at_scales + scales] = records[token, data:].tobytes()
    assert cache.tobytes() == bytes(want)
    got = read_records(cache, np.int32([4, 8, 4, 0]), block_size, layout=layout)
    assert np.array_equal(got, records[[3, 0, 3, 2]])
    assert cache.tobytes() == bytes(want)


@pytest.mark.parametrize("layout", NAMES)
def test_nothing_to_do(layout: str) -> None:
    width, data, scales, _, _ = slow.LAYOUTS[layout]
    none = np.zeros((0, width), ml_dtypes.bfloat16)
    assert encode_records(none, layout).shape == (0, data + scales)
    assert decode_records(np.zeros((0, data + scales), np.uint8), layout).shape == (0, width)
    cache = np.full((2, 4 * (data + scales)), 0xA5, np.uint8)
    write_records(np.zeros((0, data + scales), np.uint8), cache, np.int64([]), 4, layout=layout)
    assert (cache == 0xA5).all()
    assert read_records(cache, np.int64([]), 4, layout=layout).shape == (0, data + scales)


RECORD = np.zeros((1, 68), np.uint8)


def cache68() -> np.ndarray:
    """Two pages of two 68-byte rows."""
    return np.zeros((2, 136), np.uint8)


@pytest.mark.parametrize(
    ("call", "kind", "name", "text"),
    [
        (lambda: encode_records(np.zeros((1, 512)), "v4"), ArgumentError, "rows", "float64"),
        (lambda: encode_records(np.zeros((1, 511), "f4"), "v4"), ArgumentError, "rows", "[1, 511]"),
        (lambda: encode_records(np.zeros(512, "f4"), "v4"), ArgumentError, "rows", "[512]"),
        (lambda: encode_records([[0.0]], "v4"), ArgumentError, "rows", "list"),
        (lambda: encode_records(np.zeros((1, 512), "f4"), "v5"), ArgumentError, "layout", "'v5'"),
        (lambda: decode_records(np.zeros((1, 584), "i1"), "v4"), ArgumentError, "records", "int8"),
        (
            lambda: decode_records(np.zeros((1, 583), "u1"), "v4"),
            ArgumentError,
            "records",
            "[1, 583]",
        ),
        (
            lambda: write_records(RECORD, cache68(), np.int64([4]), 2, layout="indexer_mxfp4"),
            ValueRangeError,
            "slots",
            "4",
        ),
        (
            lambda: write_records(
                np.zeros((2, 68), np.uint8), cache68(), np.int64([1, 1]), 2, layout="indexer_mxfp4"
            ),
            ValueRangeError,
            "slots",
            "slot 1 more than once",
        ),
        (
            lambda: write_records(RECORD, cache68(), np.int64([1, 2]), 2, layout="indexer_mxfp4"),
            ArgumentError,
            "records",
            "[1, 68]",
        ),
        (
            lambda: write_records(RECORD, cache68(), np.float32([1]), 2, layout="indexer_mxfp4"),
            ArgumentError,
            "slots",
            "float32",
        ),
        (
            lambda: read_records(cache68(), np.int64([-1]), 2, layout="indexer_mxfp4"),
            ValueRangeError,
            "slots",
            "-1",
        ),
        (
            lambda: read_records(cache68(), np.int64([4]), 2, layout="indexer_mxfp4"),
            ValueRangeError,
            "slots",
            "4",
        ),
        (
            lambda: read_records(cache68(), [0], 2, layout="indexer_mxfp4"),
            ArgumentError,
            "slots",
            "list",
        ),
        (
            lambda: read_records(cache68(), np.int64([[0]]), 2, layout="indexer_mxfp4"),
            ArgumentError,
            "slots",
            "[1, 1]",
        ),
    ],
)
def test_errors(call: object, kind: type, name: str, text: str) -> None:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]  # refused
    message = str(caught.value)
    assert message.startswith(f"{name}: got ") and text in message
    assert "; allowed: " in message and "(SPEC " in message
