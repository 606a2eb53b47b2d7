"""Rows taken back from records: the input of a writer, as far as its right bytes tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsv4num.explain.encoder import Knobs, encode_under, field_columns
from dsv4num.formats import Layout
from dsv4num.reference import decode, unpack
from dsv4num.reference.record import load_scales

__all__ = ["Decoded", "values_of"]


@dataclass(frozen=True)
class Decoded:
    """A source whose rows are the decoded values of the expected records.

    Attributes:
        expected: uint8 [T, row bytes].
        slots: int64 [T].
        layout: the layout.
    """

    expected: NDArray[np.uint8]
    slots: NDArray[np.int64]
    layout: Layout
    _base: list[NDArray[np.uint8]] = field(default_factory=list, compare=False)
    _rows: list[NDArray[np.float32]] = field(default_factory=list, compare=False)

    @property
    def bf16(self) -> bool:
        """Raw fields keep their bits."""
        return True

    @property
    def kinds(self) -> frozenset[str]:
        """Nothing but the bytes."""
        return frozenset()

    def values(self, knobs: Knobs) -> NDArray[np.float32]:
        """The decoded rows."""
        if not self._rows:
            self._rows.append(values_of(self.expected, self.layout, for_encoding=True))
        return self._rows[0]

    def records(self, knobs: Knobs) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """The records of a writer, and the codes that may be one off.

        Where a dialect changes nothing the expected byte stands, whatever was lost in decoding. Where
        it moves an element to another code, the element itself is known to half a code only.
        """
        values = self.values(knobs)
        if not self._base:
            self._base.append(encode_under(values, self.layout, Knobs(), bf16=True))
        written = encode_under(values, self.layout, knobs, bf16=True)
        changed = written != self._base[0]
        near = np.zeros_like(changed)
        for entry, where in field_columns(self.layout):
            if entry.kind != "codes" or entry.rule is None:
                continue
            near[:, where] = changed[:, where]
            if not entry.rule.element.negative_zero and knobs.element is not None:
                near[:, where] |= self.expected[:, where] == 0  # what its sign was is lost
        return np.where(changed, written, self.expected), near

    def part(self, chosen: NDArray[np.int64]) -> Decoded:
        """The same with these rows alone."""
        return Decoded(self.expected[chosen], self.slots[chosen], self.layout)


def values_of(
    records: NDArray[np.uint8], layout: Layout, *, for_encoding: bool = False
) -> NDArray[np.float32]:
    """The fp32 values of records (clause 3.5), not rounded to bf16.

    Args:
        records: uint8 [T, row bytes].
        layout: the layout.
        for_encoding: push the largest element of a group up a little where it fell onto the border
            below which the scale would be smaller, so that encoding gives the same scale again.

    Returns:
        fp32 [T, head_dim].
    """
    rows = np.zeros((len(records), layout.head_dim), np.float32)
    columns = dict(field_columns(layout))
    outer = layout.field("row_scale")
    for entry, where in columns.items():
        stored = np.ascontiguousarray(records[:, where])
        dims = slice(*entry.dims)
        if entry.kind == "raw":
            bits = stored.view("<u2").astype(np.uint32) << np.uint32(16)
            rows[:, dims] = bits.view(np.float32)
        elif entry.kind == "codes":
            assert entry.rule is not None
            rule = entry.rule
            codes = unpack(stored) if rule.element.width == 4 else stored
            groups = decode(codes, rule.element).reshape(len(records), -1, rule.group)
            scale = layout.scale_of(entry)
            scales = np.ones(groups.shape[:2], np.float32)
            if scale is not None:
                scales = load_scales(np.ascontiguousarray(records[:, columns[scale]]), scale)
            if for_encoding and rule.scale_rounding == "up_to_power_of_two":
                border = np.abs(groups) == np.float32(rule.qmax / 2)
                at_border = np.nanmax(np.abs(groups), axis=-1, initial=0) == np.float32(
                    rule.qmax / 2
                )
                above = groups * np.float32(1.001)
                groups = np.where(border & at_border[..., None], above, groups)
            with np.errstate(all="ignore"):
                values = (groups * scales[..., None]).reshape(len(records), -1)
                if outer is not None and outer.dims == entry.dims:
                    held = np.ascontiguousarray(records[:, columns[outer]])
                    values = values * load_scales(held, outer)
                rows[:, dims] = values
    return rows
