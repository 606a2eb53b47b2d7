"""Where the bytes of records lie in a dump of pages, as a layout says or as a writer does. SPEC 4.3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.encoder import Columns, Knobs, field_columns
from dsv4num.formats import Field, Layout, Plane

__all__ = ["Dump"]


@dataclass(frozen=True)
class Dump:
    """Pages as bytes, one after the other; of a layout with several pools one pool after the other.

    Attributes:
        data: uint8 [n]. The last page may end with the last byte that a row owns.
        layout: the record and page.
        block_size: rows per page.
        page_stride: bytes from one page to the next, in the first pool.
        others: first byte and page stride of every other pool.
    """

    data: NDArray[np.uint8]
    layout: Layout
    block_size: int
    page_stride: int
    others: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        array: NDArray[Any] | Sequence[NDArray[Any]],
        layout: Layout,
        block_size: int,
        page_stride: int | None = None,
        *,
        name: str = "dump",
    ) -> Dump:
        """A dump, its size checked.

        Args:
            array: bytes in any shape: [n], [pages, page bytes] or [pages, block_size, row bytes]; for a
                layout with several pools a sequence of these, one for each pool.
            layout: the layout.
            block_size: rows per page.
            page_stride: bytes from page to page. Without it the page of the layout (clause 4.2), or
                that of a 2-D array, or without padding where only this fits the size. Not for pools.
            name: what to call it in an error.

        Raises:
            ArgumentError: block size, dtype or size; not one array for each pool, or pools of different
                numbers of pages.
        """
        arrays = [array] if isinstance(array, np.ndarray) else list(array)
        if len(arrays) != layout.pools:
            allowed = f"{layout.pools} for {layout.name}, one for each pool"
            raise ArgumentError(name, f"{len(arrays)} arrays", allowed, "4.6")
        if page_stride and layout.pools > 1:
            raise ArgumentError("page_stride", page_stride, "none: pools have their own", "4.6")
        parts = [
            _part(part, layout, block_size, page_stride, pool, name)
            for pool, part in enumerate(arrays)
        ]
        starts = [0]
        for data, _ in parts:
            starts.append(starts[-1] + len(data))
        others = tuple((starts[pool], parts[pool][1]) for pool in range(1, len(parts)))
        data = parts[0][0] if len(parts) == 1 else np.concatenate([data for data, _ in parts])
        dump = cls(data, layout, block_size, parts[0][1], others)
        counts = [-(-(end - start) // stride) for start, end, stride in dump.pools]
        if len(set(counts)) > 1:
            given = f"pools of {', '.join(map(str, counts))} pages"
            raise ArgumentError(name, given, "the same number in each", "4.6")
        return dump

    @property
    def pools(self) -> list[tuple[int, int, int]]:
        """First byte, one past the last, and page stride of every pool."""
        starts = [0, *(start for start, _ in self.others), len(self.data)]
        strides = [self.page_stride, *(stride for _, stride in self.others)]
        return [(*span, stride) for span, stride in zip(pairwise(starts), strides, strict=True)]

    @property
    def pages(self) -> int:
        """How many pages."""
        start, end, stride = self.pools[0]
        return -(-(end - start) // stride)

    @property
    def slots(self) -> NDArray[np.int64]:
        """Every slot."""
        return np.arange(self.pages * self.block_size, dtype=np.int64)

    def records(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The records in these slots, uint8 [T, row bytes]; bytes of gaps are 0, whatever is there."""
        records = self.data[self.offsets(slots)]
        if self.gaps.any():
            records[:, self.gaps] = 0
        return records

    def blank(self, records: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which records hold one byte throughout, gaps aside, and may never have been written."""
        same: NDArray[np.bool_] = ((records == records[:, :1]) | self.gaps).all(axis=1)
        return same

    @cached_property
    def gaps(self) -> NDArray[np.bool_]:
        """Which bytes of a record are not written (clause 4.6)."""
        gaps = np.zeros(self.layout.row_bytes, np.bool_)
        for entry, where in self.fields:
            gaps[where] = entry.kind == "gap"
        return gaps

    def offsets(self, slots: NDArray[np.int64], knobs: Knobs | None = None) -> NDArray[np.int64]:
        """Where each byte of each record lies; -1 for one outside the dump, in a gap, or not written.

        Args:
            slots: int64 [T]; below 0 for a row that is not written.
            knobs: of the place, of a writer who arranges otherwise.

        Returns:
            int64 [T, row bytes].
        """
        rows, stride, arrangement, shift, pad_written = self.place(knobs or _REST)
        at = slots + shift
        page, row = at // rows, at % rows
        parts, outside = [], (slots < 0) | (at < 0)
        for pool, start, row_at, byte_at in self._planes(rows, arrangement):
            first, end, own = self.pools[pool]
            part = (first + start + page * (own if pool else stride) + row_at[row])[
                :, None
            ] + byte_at
            outside |= part.max(axis=1, initial=-1) >= end
            parts.append(part)
        where: NDArray[np.int64] = np.concatenate(parts, axis=1)
        where[outside] = -1
        for entry, columns in self.fields:
            if entry.kind == "gap" or (entry.kind == "pad" and not pad_written):
                where[:, columns] = -1
        return where

    def place(self, knobs: Knobs) -> tuple[int, int, str, int, bool]:
        """Rows per page, page stride, arrangement, slot shift, and whether pad bytes are written."""
        rows, stride = self.block_size, self.page_stride
        if knobs.pages != 1:
            rows = max(1, int(rows * knobs.pages))
            stride = self.layout.page_bytes(rows)
        if knobs.page_multiple is not None:
            stride = -(-rows * self.layout.row_bytes // knobs.page_multiple) * knobs.page_multiple
        arrangement = knobs.arrangement or self.layout.form
        return rows, stride, arrangement, knobs.slot_shift, knobs.pad_written

    def _planes(
        self, rows: int, arrangement: str
    ) -> Iterator[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]]:
        """Each plane of a page: its pool and first byte, and where its rows and its bytes lie."""
        planes = self.layout.planes
        if arrangement != self.layout.form:
            sizes = [plane.row_bytes for plane in planes]
            if arrangement == "inline":
                sizes = [sum(sizes)]
            elif self.layout.inline:
                fields = self.layout.fields()
                data = min(f.offset for _, f in fields if f.kind in ("scale", "pad", "gap"))
                sizes = [data, sizes[0] - data]
            planes = tuple(Plane("", size, ()) for size in sizes)
        starts = [0] * self.layout.pools
        for plane in planes:
            row_at = [plane.row_offset(row, rows) for row in range(rows)]
            byte_at = [plane.byte_offset(byte, rows) for byte in range(plane.row_bytes)]
            yield (
                *(plane.pool, starts[plane.pool]),
                *(np.array(row_at, np.int64), np.array(byte_at, np.int64)),
            )
            starts[plane.pool] += rows * plane.row_bytes

    @cached_property
    def fields(self) -> list[tuple[Field, Columns]]:
        """Every field with its columns in a record."""
        return list(field_columns(self.layout))


_REST = Knobs()


def _part(
    array: NDArray[Any],
    layout: Layout,
    block_size: int,
    page_stride: int | None,
    pool: int,
    name: str,
) -> tuple[NDArray[np.uint8], int]:
    """The bytes of one pool, and its page stride."""
    owned = layout.owned_bytes(block_size, pool=pool)
    if array.dtype.itemsize != 1:
        raise ArgumentError(name, f"dtype {array.dtype}", "bytes: a dtype of one byte", "4.3")
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    stride = page_stride or _stride(array, layout, block_size, pool)
    if not owned <= stride < 1 << 62:  # places in a dump are 64-bit numbers
        given = f"a page stride of {stride}"
        allowed = f"at least {owned} for {block_size} {layout.name} rows, below 2^62"
        raise ArgumentError(name, given, allowed, "4.3")
    rest = len(data) % stride
    if len(data) < owned or (rest and rest < owned):
        given = f"{len(data)} bytes"
        allowed = (
            f"pages of {stride} bytes, {owned} of them owned by {block_size} {layout.name} rows"
        )
        raise ArgumentError(name, given, allowed, "4.2")
    return data, stride


def _stride(array: NDArray[Any], layout: Layout, block_size: int, pool: int) -> int:
    """The page stride that a dump without one has."""
    owned = layout.owned_bytes(block_size, pool=pool)
    padded = layout.page_bytes(block_size, pool=pool)
    if array.ndim == 2 and array.shape[1] >= owned:
        return int(array.shape[1])
    if array.ndim == 3 and array.shape[1:] == (block_size, owned // block_size):
        return owned
    fits_padded = array.size % padded in (0, owned)
    return padded if fits_padded or array.size % owned else owned
