"""Records: the bytes of one row, and where they lie in a paged cache. SPEC section 4.

A record here is a row's bytes plane after plane, as one uint8 array [rows, row bytes]: the segregated
and the inline form of a layout have the same records and differ only in where their bytes lie. So do
layouts in tiles (clause 4.6). A layout with several pools has a cache for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache as cached
from numbers import Real
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import Array, Cache, check_pools
from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.formats import BF16, FP32, Field, Layout, Plane, get_layout
from dsv4num.reference.group import apply_scales, decode_scale, encode_scale, quantize
from dsv4num.reference.scalar import decode, encode, kind_of, pack, unpack

__all__ = ["decode_records", "encode_records", "load_scales", "read_records", "write_records"]

#: A cache, or one for each pool of the layout.
Caches: TypeAlias = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]

#: Rows handled at once; keeps the temporaries of a 512-wide row under 16 MiB, near the caches.
CHUNK = 1024


def encode_records(
    rows: NDArray[Any], layout: str | Layout, *, tensor_scale: float = 1.0
) -> NDArray[np.uint8]:
    """Records of rows of values.

    Rule (clause 4.1), for each field: "codes" and "scale" by the field's group rule; "raw" the bits of
    the bf16 value, fp32 rounded by clause 1.5; "pad" the pad value; "gap" is zero here and written
    nowhere.

    Args:
        rows: bf16 or fp32 [T, head_dim].
        layout: a `Layout` or its name.
        tensor_scale: the scale of a layout that stores none, above 0 and finite in fp32.

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
    scale = _checked_scale(tensor_scale)
    records = np.zeros((rows.shape[0], chosen.row_bytes), np.uint8)
    for start in range(0, rows.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        _encode_chunk(rows[part], records[part], chosen, scale)
    return records


def decode_records(
    records: NDArray[np.uint8], layout: str | Layout, *, tensor_scale: float = 1.0
) -> NDArray[Any]:
    """Rows of values of records, as the gather returns them.

    Rule (clause 4.1): "codes" decoded, multiplied by the scale in fp32, rounded to bf16 by clause 1.5;
    "raw" copied bit by bit. Any byte is decoded, also one that no encoder writes.

    Args:
        records: uint8 [T, row bytes].
        layout: a `Layout` or its name.
        tensor_scale: as in `encode_records`.

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
    scale = _checked_scale(tensor_scale)
    rows = np.empty((records.shape[0], chosen.head_dim), ml_dtypes.bfloat16)
    for start in range(0, records.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        _decode_chunk(records[part], rows[part], chosen, scale)
    return rows


def write_records(
    records: NDArray[np.uint8],
    k_cache: Caches,
    slots: NDArray[Any],
    block_size: int,
    *,
    layout: str | Layout,
) -> None:
    """Writes records into their slots of a cache; no other byte changes (clauses 4.3, 4.4).

    The bytes of a "gap" field are not written (clause 4.6).

    Args:
        records: uint8 [T, row bytes].
        k_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], written; for a
            layout with several pools a sequence of these, one for each pool.
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
    pools = check_pools(describe_pools(k_cache), block_size, layout, written=True)
    cache = pools[0]
    kept = checked_slots("slots", slots, cache, unique=True)
    shape = (len(slots), cache.layout.row_bytes)
    describe("records", records).require(dtype="uint8", shape=shape, clause="4.1")
    chosen = slots[kept]
    page, row = chosen // cache.block_size, chosen % cache.block_size
    arrays = [k_cache] if isinstance(k_cache, np.ndarray) else k_cache
    for array, pool in zip(arrays, pools, strict=True):
        for plane, columns in _planes(array, pool):
            stored = records[kept][:, columns]
            gaps = _gaps(cache.layout)[columns]
            if gaps.any():
                stored = np.where(gaps, plane[page, row], stored)
            plane[page, row] = stored


def read_records(
    k_cache: Caches,
    slots: NDArray[Any],
    block_size: int,
    *,
    layout: str | Layout,
) -> NDArray[np.uint8]:
    """The records in the given slots of a cache (clause 4.3).

    Args:
        k_cache: uint8 [num_blocks, block_size, row bytes] or [num_blocks, page bytes], or a sequence
            as in `write_records`.
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
    pools = check_pools(describe_pools(k_cache), block_size, layout, written=False)
    cache = pools[0]
    if not bool(checked_slots("slots", slots, cache, unique=False).all()):
        raise ValueRangeError("slots", int(slots.min()), f"0..{cache.num_slots - 1}")
    records = np.empty((len(slots), cache.layout.row_bytes), np.uint8)
    arrays = [k_cache] if isinstance(k_cache, np.ndarray) else k_cache
    for array, pool in zip(arrays, pools, strict=True):
        for plane, columns in _planes(array, pool):
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


def describe_pools(k_cache: Caches) -> Array | list[Array]:
    """A cache as the shared checks see it, or each pool of one (clause 4.6).

    Raises:
        ArgumentError: neither a NumPy array nor a sequence of such.
    """
    if isinstance(k_cache, (tuple, list)) and all(isinstance(a, np.ndarray) for a in k_cache):
        return [describe(f"k_cache[{pool}]", array) for pool, array in enumerate(k_cache)]
    return describe("k_cache", k_cache)


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


def _checked_scale(tensor_scale: Any) -> np.float32:
    """A scale of a whole tensor as fp32.

    Raises:
        ArgumentError: it is not above 0 and finite.
    """
    number = isinstance(tensor_scale, Real) and not isinstance(tensor_scale, bool)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.float32(float(tensor_scale) if number else 0)
    if not 0 < scale < np.inf:
        allowed = "a number above 0, finite in fp32"
        raise ArgumentError("tensor_scale", repr(tensor_scale), allowed, "3.6")
    return scale


class _Tiles:
    """A plane in tiles, indexed by page and row like one whose rows lie one after the other."""

    def __init__(self, pages: NDArray[np.uint8], plane: Plane, block_size: int) -> None:
        self.pages = pages
        self.rows = np.array([plane.row_offset(row, block_size) for row in range(block_size)])
        size = range(plane.row_bytes)
        self.bytes = np.array([plane.byte_offset(byte, block_size) for byte in size])

    def _at(self, key: tuple[NDArray[Any], NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        page, row = key
        return page[:, None], self.rows[row][:, None] + self.bytes

    def __getitem__(self, key: tuple[NDArray[Any], NDArray[Any]]) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self.pages[self._at(key)]
        return found

    def __setitem__(
        self, key: tuple[NDArray[Any], NDArray[Any]], stored: NDArray[np.uint8]
    ) -> None:
        self.pages[self._at(key)] = stored


def _planes(k_cache: NDArray[np.uint8], cache: Cache) -> Iterator[tuple[Any, slice]]:
    """Each plane of a pool, to be indexed [page, row], and its columns in a record.

    A plane whose rows lie one after the other is a view [num_blocks, block_size, its row bytes].
    """
    owned = cache.layout.owned_bytes(cache.block_size, pool=cache.pool)
    pages = k_cache
    if k_cache.ndim == 3:
        pages = np.lib.stride_tricks.as_strided(
            k_cache, (cache.num_blocks, owned), (cache.page_stride, 1)
        )
    first = 0
    for index, plane in enumerate(cache.layout.planes):
        columns = slice(first, first + plane.row_bytes)
        first += plane.row_bytes
        if plane.pool != cache.pool:
            continue
        start = cache.layout.plane_offset(index, cache.block_size)
        rows = pages[:, start : start + cache.block_size * plane.row_bytes]
        if plane.axes:
            yield _Tiles(rows, plane, cache.block_size), columns
        else:
            shape = cache.num_blocks, cache.block_size, plane.row_bytes
            yield rows.reshape(shape, copy=False), columns


def _columns(layout: Layout) -> Iterator[tuple[Field, slice | NDArray[np.int64]]]:
    """Every field with its columns in a record, entry after entry."""
    first = 0
    for plane in layout.planes:
        for field in plane.fields:
            if field.order or field.run:
                yield field, np.array(field.places) + first
            else:
                start = first + field.offset
                yield field, slice(start, start + field.nbytes)
        first += plane.row_bytes


@cached
def _gaps(layout: Layout) -> NDArray[np.bool_]:
    """Which bytes of a record are never written."""
    gaps = np.zeros(layout.row_bytes, np.bool_)
    for field, where in _columns(layout):
        gaps[where] = field.kind == "gap"
    return gaps


def _encode_chunk(
    rows: NDArray[Any], records: NDArray[np.uint8], layout: Layout, tensor_scale: np.float32
) -> None:
    """Fills `records` field by field."""
    columns = {field.name: where for field, where in _columns(layout)}
    outer = layout.field("row_scale")
    for _, field in layout.fields():
        where = columns[field.name]
        values = rows[:, field.dims[0] : field.dims[1]]
        if field.kind == "pad":
            records[:, where] = field.pad_value
        elif field.kind == "raw":
            records[:, where] = _bf16_bits(values).astype("<u2").view(np.uint8)
        elif field.kind == "codes":
            assert field.rule is not None
            if outer is not None and outer.dims == field.dims:
                values, records[:, columns[outer.name]] = _divide_rows(values, outer)
            if field.rule.scale_rounding == "given":
                with np.errstate(over="ignore", invalid="ignore"):
                    values = values.astype(np.float32) * (np.float32(1) / tensor_scale)
            codes, scale_codes = quantize(values, field.rule)
            records[:, where] = pack(codes) if field.rule.element.width == 4 else codes
            scale = layout.scale_of(field)
            if scale is not None:
                records[:, columns[scale.name]] = _store_scales(scale_codes, scale)


def _decode_chunk(
    records: NDArray[np.uint8], rows: NDArray[Any], layout: Layout, tensor_scale: np.float32
) -> None:
    """Fills the bf16 `rows` field by field."""
    columns = {field.name: where for field, where in _columns(layout)}
    outer = layout.field("row_scale")
    bits = rows.view(np.uint16)
    for _, field in layout.fields():
        stored = np.ascontiguousarray(records[:, columns[field.name]])
        dims = slice(*field.dims)
        if field.kind == "raw":
            bits[:, dims] = stored.view("<u2")
        elif field.kind == "codes":
            assert field.rule is not None
            codes = unpack(stored) if field.rule.element.width == 4 else stored
            values = decode(codes, field.rule.element)
            scale = layout.scale_of(field)
            if scale is not None:
                held = np.ascontiguousarray(records[:, columns[scale.name]])
                values = apply_scales(values, load_scales(held, scale), field.rule.group)
            if outer is not None and outer.dims == field.dims:
                held = np.ascontiguousarray(records[:, columns[outer.name]])
                values = apply_scales(values, load_scales(held, outer), values.shape[1])
            if field.rule.scale_rounding == "given":
                with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                    values = values * tensor_scale
            bits[:, dims] = encode(values, "bf16")


def _divide_rows(
    values: NDArray[Any], outer: Field
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Rows over the scale that all their groups share, and that scale as it is stored."""
    assert outer.rule is not None
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    bits[bits > np.uint32(0x7F800000)] = 0
    scale_codes = encode_scale(bits.max(axis=1, keepdims=True).view(np.float32), outer.rule)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        divided = values.astype(np.float32) / decode_scale(scale_codes, outer.rule.scale)
    return divided, _store_scales(scale_codes, outer)


def _bf16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """bf16 values as they are, fp32 values rounded to bf16."""
    if values.dtype == ml_dtypes.bfloat16:
        return np.ascontiguousarray(values).view(np.uint16)
    codes: NDArray[np.uint16] = encode(values, "bf16")
    return codes


def _store_scales(scale_codes: NDArray[Any], field: Field) -> NDArray[np.uint8]:
    """Scale codes as stored: themselves, or the number 2**e (+infinity for code 255); each copy."""
    assert field.rule is not None and field.format is not None
    stored = scale_codes
    if field.format is not field.rule.scale:  # 2**e as fp32 or bf16
        numbers = decode(scale_codes, field.rule.scale)
        numbers[scale_codes == 255] = np.inf
        bits = numbers.view(np.uint32)
        stored = bits if field.format is FP32 else (bits >> np.uint32(16)).astype(np.uint16)
    little = np.ascontiguousarray(stored.astype(stored.dtype.newbyteorder("<")))
    return np.repeat(little, field.copies, axis=-1).view(np.uint8)


def load_scales(stored: NDArray[np.uint8], field: Field) -> NDArray[np.float32]:
    """Stored scales, uint8 [T, bytes], as fp32 numbers [T, groups]; of several copies the first."""
    assert field.format is not None
    if field.format is FP32:
        return stored.view("<f4")[:, :: field.copies].astype(np.float32)
    if field.format is BF16:
        return decode(stored.view("<u2")[:, :: field.copies].astype(np.uint16), BF16)
    return decode(np.ascontiguousarray(stored[:, :: field.copies]), field.format)
