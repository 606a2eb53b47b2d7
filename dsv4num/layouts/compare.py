"""What differs between two layouts, and which byte of a page tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.formats import Field, GroupRule, Layout
from dsv4num.reference import encode_records, write_records

__all__ = ["Comparison", "compare"]

#: Rows of a page that are written to look for a byte that tells.
_MOST_ROWS = 4096


@dataclass(frozen=True)
class Comparison:
    """Two layouts side by side.

    Attributes:
        names: of the two.
        fingerprints: of the two.
        differences: sentences; none for the same bytes.
        telling: for pages of "ones", of "zeros" and of "steps" (0 to 7 in turn, at another power of two
            from group to group and from row to row), the first byte that tells the two apart, as a
            sentence; None where none does.
    """

    names: tuple[str, str]
    fingerprints: tuple[str, str]
    differences: tuple[str, ...]
    telling: dict[str, str | None]

    @property
    def equal(self) -> bool:
        """Whether the two give the same bytes."""
        return self.fingerprints[0] == self.fingerprints[1]

    def lines(self) -> list[str]:
        """Text for people."""
        a, b = self.names
        if self.equal:
            return [f"{a} and {b} are the same bytes: fingerprint {self.fingerprints[0]}"]
        lines = [f"{a} and {b}: fingerprints {self.fingerprints[0]} and {self.fingerprints[1]}"]
        lines += [f"  {text}" for text in self.differences]
        for page, text in self.telling.items():
            lines.append(f"two pages of {page}: {text or 'the same bytes in both'}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "layouts": list(self.names),
            "fingerprints": list(self.fingerprints),
            "differences": list(self.differences),
            "telling": self.telling,
        }


def compare(a: Layout, b: Layout, block_size: int = 64) -> Comparison:
    r"""What differs between two layouts.

    Args:
        a: one layout.
        b: the other.
        block_size: rows of the pages that are looked at.

    Raises:
        ArgumentError: a block size that one of the two cannot have, or above 4096.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> found = compare(get_layout("v41_mxfp8"), get_layout("v41_mxfp8_inline"), 2)
        >>> print(*found.differences, found.telling["ones"], sep="\n")
        form: segregated, inline
        codes: row r begins at byte 512 * r, byte 528 * r
        scale: row r begins at byte 1024 + 16 * r, byte 512 + 528 * r
        byte 512 is 78 in v41_mxfp8, 77 in v41_mxfp8_inline
    """
    if block_size > _MOST_ROWS:
        raise ArgumentError("block_size", block_size, f"at most {_MOST_ROWS} to compare", "4.2")
    telling = {kind: _first_byte(a, b, block_size, kind) for kind in ("ones", "zeros", "steps")}
    return Comparison(
        (a.name, b.name),
        (a.fingerprint(), b.fingerprint()),
        tuple(_differences(a, b, block_size)),
        telling,
    )


def _differences(a: Layout, b: Layout, block_size: int) -> Iterator[str]:
    """Sentences, the whole first, then field by field."""
    for text, values in (
        ("values per row", (a.head_dim, b.head_dim)),
        ("bytes per row", (a.row_bytes, b.row_bytes)),
        ("form", (a.form, b.form)),
        ("pages are a multiple of", (a.page_multiple, b.page_multiple)),
        (f"bytes of a page of {block_size} rows", tuple(x.page_bytes(block_size) for x in (a, b))),
    ):
        if values[0] != values[1]:
            yield f"{text}: {values[0]}, {values[1]}"
    left = {_meaning(f): (i, f) for i, f in a.fields()}
    right = {_meaning(f): (i, f) for i, f in b.fields()}
    for meaning in left | right:
        if meaning not in right:
            yield f"{_told(left[meaning][1])}: in {a.name} alone"
        elif meaning not in left:
            yield f"{_told(right[meaning][1])}: in {b.name} alone"
        else:
            pair = left[meaning], right[meaning]
            for text, value in _field(a, pair[0], b, pair[1], block_size):
                yield f"{pair[0][1].name}: {text} {value}"


def _meaning(field: Field) -> tuple[Any, ...]:
    """What makes two fields of different layouts the same one."""
    return (field.kind, field.dims) if field.format else ("filling", field.offset, field.nbytes)


def _told(field: Field) -> str:
    """A field in a few words."""
    if field.format is None:
        return f"{field.name} of {field.nbytes} bytes"
    dims = f"dims {field.dims[0]}..{field.dims[1] - 1}"
    return f"{field.name} ({field.entries} {field.format.name}, {dims})"


def _field(
    a: Layout, left: tuple[int, Field], b: Layout, right: tuple[int, Field], block_size: int
) -> Iterator[tuple[str, str]]:
    """What differs between two fields of one meaning."""
    (i, f), (j, g) = left, right
    for text, values in (
        ("is", (_written(f), _written(g))),
        ("format is", (f.format and f.format.name, g.format and g.format.name)),
        ("each entry is stored", (f"{f.copies} times", f"{g.copies} times")),
        ("order of entries is", (_order(f), _order(g))),
        ("lies in pool", (a.planes[i].pool, b.planes[j].pool)),
        ("row r begins at", (_place(a, i, f, block_size), _place(b, j, g, block_size))),
    ):
        if values[0] != values[1]:
            yield text, f"{values[0]}, {values[1]}"
    if f.rule is not None and g.rule is not None and f.kind == "codes":
        yield from _rules(f.rule, g.rule)


def _written(field: Field) -> str:
    """What stands in filling bytes; nothing for others."""
    if field.format is not None:
        return ""
    return "not written" if field.kind == "gap" else f"written {field.pad_value:02X}"


def _order(field: Field) -> str:
    """The order of entries in words."""
    if field.order:
        return f"{', '.join(map(str, field.order[:5]))}, ..."
    return f"runs of {field.run} bytes, {field.step} apart" if field.run else "one after the other"


def _place(layout: Layout, index: int, field: Field, block_size: int) -> str:
    """Where the rows of a field begin in a page."""
    plane = layout.planes[index]
    start = layout.plane_offset(index, block_size)
    if plane.axes:
        rows = (0, 1, block_size - 1) if block_size > 2 else range(block_size)
        at = [
            start + plane.row_offset(r, block_size) + plane.byte_offset(field.places[0], block_size)
            for r in rows
        ]
        return f"bytes {', '.join(map(str, at))} (tiles)"
    first = start + field.places[0]
    return f"byte {first} + {plane.row_bytes} * r" if first else f"byte {plane.row_bytes} * r"


def _rules(f: GroupRule, g: GroupRule) -> Iterator[tuple[str, str]]:
    """What differs between two rules."""
    for text, values in (
        ("group is", (f.group, g.group)),
        ("scale is", (f.scale.name, g.scale.name)),
        ("qmax is", (f"{f.qmax:g}", f"{g.qmax:g}")),
        ("floor is", (_floor(f), _floor(g))),
        ("scale rounding is", (f.scale_rounding, g.scale_rounding)),
        ("elements are scaled by", (f.scaling, g.scaling)),
        ("amax is", (_factor(f), _factor(g))),
        ("scale of a group of zeros is", (f.zero_scale, g.zero_scale)),
        (
            "scale code of an infinite group is",
            (f"{f.infinite_code:02X}", f"{g.infinite_code:02X}"),
        ),
    ):
        if values[0] != values[1]:
            yield text, f"{values[0]}, {values[1]}"


def _floor(rule: GroupRule) -> str:
    """A floor in words."""
    place = {"amax": "on amax", "scale": "on the scale", "added": "added to amax"}[rule.floor_place]
    return f"{rule.floor:.6g} {place}" if rule.floor else "none"


def _factor(rule: GroupRule) -> str:
    """How amax becomes a scale."""
    return "multiplied by a reciprocal" if rule.amax_factor else "divided"


def _first_byte(a: Layout, b: Layout, block_size: int, kind: str) -> str | None:
    """The first byte that tells two pages of the same rows apart, pool after pool."""
    pages = [_pages(layout, block_size, kind) for layout in (a, b)]
    for pool, (left, right) in enumerate(zip(*pages, strict=False)):
        size = min(len(left), len(right))
        differ = np.flatnonzero(left[:size] != right[:size])
        if differ.size:
            at = int(differ[0])
            said = ["not written" if p[at] < 0 else f"{p[at]:02X}" for p in (left, right)]
            of = f" of pool {pool}" if max(a.pools, b.pools) > 1 else ""
            return f"byte {at}{of} is {said[0]} in {a.name}, {said[1]} in {b.name}"
    return None


def _pages(layout: Layout, block_size: int, kind: str) -> list[NDArray[np.int16]]:
    """Two pages of rows, pool by pool; -1 for bytes that are not written."""
    rows = np.full((2 * block_size, layout.head_dim), kind == "ones", np.float32)
    if kind == "steps":
        # Scales of E4M3 hold these powers; groups of 16 to 128 elements and rows differ in theirs.
        row, dim = np.arange(len(rows))[:, None], np.arange(layout.head_dim)
        power = row % 8 + dim // 16 % 4 + dim // 64 % 8 - 9
        rows += np.ldexp(((row + dim) % 8).astype(np.float32), power)
    records, slots = encode_records(rows, layout), np.arange(2 * block_size)
    found = []
    for fill in (0x00, 0xFF):
        sizes = [layout.page_bytes(block_size, pool=pool) for pool in range(layout.pools)]
        pools = [np.full((2, size), fill, np.uint8) for size in sizes]
        cache = pools if len(pools) > 1 else pools[0]
        write_records(records, cache, slots, block_size, layout=layout)
        found.append(pools)
    return [
        np.where(zero == one, zero, np.int16(-1)).reshape(-1).astype(np.int16)
        for zero, one in zip(*found, strict=True)
    ]
