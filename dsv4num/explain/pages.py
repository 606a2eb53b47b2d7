"""Where the bytes of records lie in a dump of pages, as a layout says or as a writer does. SPEC 4.3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.encoder import Knobs, field_columns
from dsv4num.formats import Field, Layout

__all__ = ["Dump"]


@dataclass(frozen=True)
class Dump:
    """Pages as bytes, one after the other.

    Attributes:
        data: uint8 [n]. The last page may end with the last byte that a row owns.
        layout: the record and page.
        block_size: rows per page.
        page_stride: bytes from one page to the next.
    """

    data: NDArray[np.uint8]
    layout: Layout
    block_size: int
    page_stride: int

    @classmethod
    def of(
        cls,
        array: NDArray[Any],
        layout: Layout,
        block_size: int,
        page_stride: int | None = None,
        *,
        name: str = "dump",
    ) -> Dump:
        """A dump, its size checked.

        Args:
            array: bytes in any shape: [n], [pages, page bytes] or [pages, block_size, row bytes].
            layout: the layout.
            block_size: rows per page.
            page_stride: bytes from page to page. Without it the page of the layout (clause 4.2), or
                that of a 2-D array, or without padding where only this fits the size.
            name: what to call it in an error.

        Raises:
            ArgumentError: block size, dtype or size.
        """
        owned = layout.owned_bytes(block_size)
        if array.dtype.itemsize != 1:
            raise ArgumentError(name, f"dtype {array.dtype}", "bytes: a dtype of one byte", "4.3")
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        stride = page_stride or _stride(array, layout, block_size)
        if stride < owned:
            given = f"a page stride of {stride}"
            allowed = f"at least {owned} for {block_size} {layout.name} rows"
            raise ArgumentError(name, given, allowed, "4.3")
        rest = len(data) % stride
        if len(data) < owned or (rest and rest < owned):
            given = f"{len(data)} bytes"
            allowed = (
                f"pages of {stride} bytes, {owned} of them owned by {block_size} {layout.name} rows"
            )
            raise ArgumentError(name, given, allowed, "4.2")
        return cls(data, layout, block_size, stride)

    @property
    def pages(self) -> int:
        """How many pages."""
        return -(-len(self.data) // self.page_stride)

    @property
    def slots(self) -> NDArray[np.int64]:
        """Every slot."""
        return np.arange(self.pages * self.block_size, dtype=np.int64)

    def records(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The records in these slots, uint8 [T, row bytes]."""
        return self.data[self.offsets(slots)]

    def offsets(self, slots: NDArray[np.int64], knobs: Knobs | None = None) -> NDArray[np.int64]:
        """Where each byte of each record lies; -1 for one outside the dump or not written.

        Args:
            slots: int64 [T]; below 0 for a row that is not written.
            knobs: of the place, of a writer who arranges otherwise.

        Returns:
            int64 [T, row bytes].
        """
        rows, stride, arrangement, shift, pad_written = self.place(knobs or _REST)
        at = slots + shift
        page, row = at // rows, at % rows
        within = self._columns(rows, arrangement)
        where: NDArray[np.int64] = (page * stride)[:, None] + row[:, None] * within[1] + within[0]
        outside = (slots < 0) | (at < 0) | (where.max(axis=1, initial=-1) >= len(self.data))
        where[outside] = -1
        if not pad_written:
            for entry, columns in self.fields:
                if entry.kind == "pad":
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
        arrangement = knobs.arrangement or ("inline" if self.layout.inline else "segregated")
        return rows, stride, arrangement, knobs.slot_shift, knobs.pad_written

    def _columns(self, rows: int, arrangement: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each byte of a record: where it lies for row 0, and its step from row to row."""
        planes = [plane.row_bytes for plane in self.layout.planes]
        if arrangement == "inline":
            planes = [sum(planes)]
        elif arrangement == "segregated" and self.layout.inline:
            data = min(f.offset for _, f in self.layout.fields() if f.kind in ("scale", "pad"))
            planes = [data, planes[0] - data]
        first, step = [], []
        start = 0
        for size in planes:
            first.append(start + np.arange(size, dtype=np.int64))
            step.append(np.full(size, size, np.int64))
            start += rows * size
        return np.concatenate(first), np.concatenate(step)

    @cached_property
    def fields(self) -> list[tuple[Field, slice]]:
        """Every field with its columns in a record."""
        return list(field_columns(self.layout))


_REST = Knobs()


def _stride(array: NDArray[Any], layout: Layout, block_size: int) -> int:
    """The page stride that a dump without one has."""
    owned, padded = layout.owned_bytes(block_size), layout.page_bytes(block_size)
    if array.ndim == 2 and array.shape[1] >= owned:
        return int(array.shape[1])
    if array.ndim == 3 and array.shape[1:] == (block_size, layout.row_bytes):
        return owned
    fits_padded = array.size % padded in (0, owned)
    return padded if fits_padded or array.size % owned else owned
