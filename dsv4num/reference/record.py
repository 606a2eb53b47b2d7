"""Records: the bytes of one row, and where they lie in a paged cache. SPEC section 4.

A record here is a row's bytes plane after plane, as one uint8 array [rows, row bytes]: the segregated
and the inline form of a layout have the same records and differ only in where their bytes lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import Array, Cache, check_cache
from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.formats import FP32, Field, Layout, get_layout
from dsv4num.reference.group import apply_scales, quantize
from dsv4num.reference.scalar import decode, encode, kind_of, pack, unpack

__all__ = ["decode_records", "encode_records", "read_records", "write_records"]

#: Rows handled at once; keeps the temporaries of a 512-wide row under 16 MiB, near the caches.
CHUNK = 1024


def encode_records(rows: NDArray[Any], layout: str | Layout) -> NDArray[np.uint8]:
    """Records of rows of values.

    Rule (clause 4.1), for each field: "codes" and "scale" by the field's group rule; "raw" the bits of
    the bf16 value, fp32 rounded by clause 1.5; "pad" the pad value.

    Args:
        rows: bf16 or fp32 [T, head_dim].
        layout: a `Layout` or its name.

    Returns:
        uint8 [T, row bytes].

    Raises:
        ArgumentError: dtype, shape or layout.

    Example:
        >>> encode_records(np.ones((1, 128), np.float32), "indexer_mxfp4")[0, 62:].tobytes().hex(" ")
        '66 66 7d 7d 7d 7d'
        >>> encode_records(np.ones((1, 128), np.float32), "indexer_fp8")[0, 127:].tobytes().hex(" ")
        '78 00 00 80 3b'
    """
    chosen = get_layout(layout)
    if not isinstance(rows, np.ndarray) or rows.dtype not in (np.float32, ml_dtypes.bfloat16):
        given = kind_of(rows)
        raise ArgumentError("rows", given, "float32 or bfloat16", "4.1")
    if rows.ndim != 2 or rows.shape[1] != chosen.head_dim:
        allowed = f"shape [rows, {chosen.head_dim}]"
        raise ArgumentError("rows", f"shape {list(rows.shape)}", allowed, "4.1")
    records = np.empty((rows.shape[0], chosen.row_bytes), np.uint8)
    for start in range(0, rows.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        _encode_chunk(rows[part], records[part], chosen)
    return records


def decode_records(records: NDArray[np.uint8], layout: str | Layout) -> NDArray[Any]:
    """Rows of values of records, as the gather returns them.

    Rule (clause 4.1): "codes" decoded, multiplied by the scale in fp32, rounded to bf16 by clause 1.5;
    "raw" copied bit by bit. Any byte is decoded, also one that no encoder writes.

    Args:
        records: uint8 [T, row bytes].
        layout: a `Layout` or its name.

    Returns:
        bf16 [T, head_dim].

    Raises:
        ArgumentError: dtype, shape or layout.

    Example:
        >>> record = encode_records(np.full((1, 128), 300, np.float32), "indexer_fp8")
        >>> decode_records(record, "indexer_fp8")[0, 0].item()
        288.0
    """
    chosen = get_layout(layout)
    if not isinstance(records, np.ndarray) or records.dtype != np.uint8:
        given = kind_of(records)
        raise ArgumentError("records", given, "uint8", "4.1")
    if records.ndim != 2 or records.shape[1] != chosen.row_bytes:
        allowed = f"shape [rows, {chosen.row_bytes}]"
        raise ArgumentError("records", f"shape {list(records.shape)}", allowed, "4.1")
    rows = np.empty((records.shape[0], chosen.head_dim), ml_dtypes.bfloat16)
    for start in range(0, records.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        _decode_chunk(records[part], rows[part], chosen)
    return rows


def write_records(
    records: NDArray[np.uint8],
    k_cache: NDArray[np.uint8],
    slots: NDArray[Any],
    block_size: int,
    *,
    layout: str | Layout,
) -> None:
    """Writes records into their slots of a cache; no other byte changes (clauses 4.3, 4.4).

    Args:
        records: uint8 [T, row bytes].
        k_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], written.
        slots: int32 or int64 [T]; below 0 means "skip this record".
        block_size: rows per page.
        layout: a `Layout` or its name.

    Raises:
        ArgumentError: dtype, shape, stride or layout.
        ValueRangeError: a slot beyond the cache, or given twice.

    Example:
        >>> cache = np.zeros((1, 2 * 68), np.uint8)
        >>> record = np.arange(1, 69, dtype=np.uint8)[None]
        >>> write_records(record, cache, np.int64([1]), 2, layout="indexer_mxfp4")
        >>> cache[0, 62:68].tobytes().hex(" "), cache[0, 130:].tobytes().hex(" ")
        ('00 00 01 02 03 04', '00 00 41 42 43 44')
    """
    cache = check_cache(describe("k_cache", k_cache), block_size, layout, written=True)
    kept = checked_slots("slots", slots, cache, unique=True)
    shape = (len(slots), cache.layout.row_bytes)
    describe("records", records).require(dtype="uint8", shape=shape, clause="4.1")
    chosen = slots[kept]
    for plane, columns in _planes(k_cache, cache):
        plane[chosen // cache.block_size, chosen % cache.block_size] = records[kept][:, columns]


def read_records(
    k_cache: NDArray[np.uint8],
    slots: NDArray[Any],
    block_size: int,
    *,
    layout: str | Layout,
) -> NDArray[np.uint8]:
    """The records in the given slots of a cache (clause 4.3).

    Args:
        k_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes].
        slots: int32 or int64 [T], each within the cache; repetitions are allowed.
        block_size: rows per page.
        layout: a `Layout` or its name.

    Returns:
        uint8 [T, row bytes].

    Raises:
        ArgumentError: dtype, shape, stride or layout.
        ValueRangeError: a slot outside the cache.

    Example:
        >>> cache = np.arange(2 * 68, dtype=np.uint8)[None]
        >>> read_records(cache, np.int64([1]), 2, layout="indexer_mxfp4")[0, 62:].tolist()
        [126, 127, 132, 133, 134, 135]
    """
    cache = check_cache(describe("k_cache", k_cache), block_size, layout, written=False)
    if not bool(checked_slots("slots", slots, cache, unique=False).all()):
        raise ValueRangeError("slots", int(slots.min()), f"0..{cache.num_slots - 1}")
    records = np.empty((len(slots), cache.layout.row_bytes), np.uint8)
    for plane, columns in _planes(k_cache, cache):
        records[:, columns] = plane[slots // cache.block_size, slots % cache.block_size]
    return records


def describe(name: str, array: object) -> Array:
    """A NumPy array as the shared checks see it.

    Raises:
        ArgumentError: it is not a NumPy array.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, type(array).__name__, "numpy.ndarray")
    strides = tuple(stride // array.itemsize for stride in array.strides)
    dtype = array.dtype.name if array.dtype.isnative else array.dtype.str  # "<f4" is no float32
    return Array(name, array.shape, strides, dtype, "cpu", array.flags.writeable)


def checked_slots(
    name: str, slots: NDArray[Any], cache: Cache, *, unique: bool
) -> NDArray[np.bool_]:
    """Which slots are to be used (clause 6.2).

    Raises:
        ArgumentError: dtype or rank.
        ValueRangeError: a slot beyond the cache, or, with `unique`, given twice.
    """
    described = describe(name, slots)
    described.require(dtype=("int32", "int64"), shape=("tokens",), clause="4.3")
    if slots.size and slots.max() >= cache.num_slots:
        allowed = f"below {cache.num_slots} ({cache.num_blocks} pages of {cache.block_size} rows)"
        raise ValueRangeError(name, int(slots.max()), allowed)
    kept: NDArray[np.bool_] = slots >= 0
    if unique:
        values, counts = np.unique(slots[kept], return_counts=True)
        if bool((counts > 1).any()):
            given = f"slot {int(values[counts > 1][0])} more than once"
            raise ValueRangeError(name, given, "each slot once")
    return kept


def _planes(
    k_cache: NDArray[np.uint8], cache: Cache
) -> Iterator[tuple[NDArray[np.uint8], slice]]:
    """Each plane as a view [num_blocks, block_size, its row bytes], and its columns in a record."""
    owned = cache.layout.owned_bytes(cache.block_size)
    pages = k_cache
    if k_cache.ndim == 3:
        pages = np.lib.stride_tricks.as_strided(
            k_cache, (cache.num_blocks, owned), (cache.page_stride, 1)
        )
    first = 0
    for index, plane in enumerate(cache.layout.planes):
        start = cache.layout.plane_offset(index, cache.block_size)
        rows = pages[:, start : start + cache.block_size * plane.row_bytes]
        yield (
            rows.reshape(cache.num_blocks, cache.block_size, plane.row_bytes, copy=False),
            slice(first, first + plane.row_bytes),
        )
        first += plane.row_bytes


def _columns(layout: Layout) -> Iterator[tuple[Field, slice]]:
    """Every field with its columns in a record."""
    first = 0
    for plane in layout.planes:
        for field in plane.fields:
            start = first + field.offset
            yield field, slice(start, start + field.nbytes)
        first += plane.row_bytes


def _encode_chunk(rows: NDArray[Any], records: NDArray[np.uint8], layout: Layout) -> None:
    """Fills `records` field by field."""
    columns = dict(_columns(layout))
    for field, where in columns.items():
        values = rows[:, field.dims[0] : field.dims[1]]
        if field.kind == "pad":
            records[:, where] = field.pad_value
        elif field.kind == "raw":
            records[:, where] = _bf16_bits(values).astype("<u2").view(np.uint8)
        elif field.kind == "codes":
            assert field.rule is not None
            codes, scale_codes = quantize(values, field.rule)
            records[:, where] = pack(codes) if field.rule.element.width == 4 else codes
            scale = next(f for f in columns if f.kind == "scale" and f.dims == field.dims)
            records[:, columns[scale]] = _store_scales(scale_codes, scale)


def _decode_chunk(records: NDArray[np.uint8], rows: NDArray[Any], layout: Layout) -> None:
    """Fills the bf16 `rows` field by field."""
    columns = dict(_columns(layout))
    bits = rows.view(np.uint16)
    for field, where in columns.items():
        stored = np.ascontiguousarray(records[:, where])
        dims = slice(*field.dims)
        if field.kind == "raw":
            bits[:, dims] = stored.view("<u2")
        elif field.kind == "codes":
            assert field.rule is not None
            codes = unpack(stored) if field.rule.element.width == 4 else stored
            scale = next(f for f in columns if f.kind == "scale" and f.dims == field.dims)
            scales = _load_scales(np.ascontiguousarray(records[:, columns[scale]]), scale)
            values = apply_scales(decode(codes, field.rule.element), scales, field.rule.group)
            bits[:, dims] = encode(values, "bf16")


def _bf16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """bf16 values as they are, fp32 values rounded to bf16."""
    if values.dtype == ml_dtypes.bfloat16:
        return np.ascontiguousarray(values).view(np.uint16)
    codes: NDArray[np.uint16] = encode(values, "bf16")
    return codes


def _store_scales(scale_codes: NDArray[np.uint8], field: Field) -> NDArray[np.uint8]:
    """Scale codes as stored: themselves, or the fp32 number 2**e (+infinity for code 255)."""
    if field.format is not FP32:
        return scale_codes
    numbers = decode(scale_codes, "ue8m0")
    numbers[scale_codes == 255] = np.inf
    return numbers.astype("<f4").view(np.uint8)


def _load_scales(stored: NDArray[np.uint8], field: Field) -> NDArray[np.float32]:
    """The scales as fp32 numbers."""
    if field.format is FP32:
        return stored.view("<f4").astype(np.float32)
    assert field.rule is not None
    return decode(stored, field.rule.scale)
