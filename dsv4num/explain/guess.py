"""Which layouts could have written a dump, from its bytes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.pages import Dump
from dsv4num.explain.records import check_records
from dsv4num.formats import FP32, LAYOUTS, WILD_LAYOUTS, Layout

__all__ = ["Guess", "guess_layouts"]

#: Block sizes to try. With one row per page a segregated page is an inline one.
_BLOCK_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
#: Rows that are looked at.
_ROWS = 2048
#: Scales of a K cache lie between these powers of two, but for groups at the floor.
_PLAUSIBLE = (-40, 24)


@dataclass(frozen=True)
class Guess:
    """A layout that could have written a dump.

    Attributes:
        layout: its name.
        block_size: rows per page; 0 where rows follow each other and any number fits.
        page_stride: bytes from page to page; 0 where any fits.
        score: 0 to 1, the product of the shares in `reasons`.
        reasons: sentences.
    """

    layout: str
    block_size: int
    page_stride: int
    score: float
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "layout": self.layout,
            "block_size": self.block_size or None,
            "page_stride": self.page_stride or None,
            "score": round(self.score, 4),
            "reasons": list(self.reasons),
        }


def guess_layouts(data: NDArray[np.uint8], block_size: int | None = None) -> list[Guess]:
    """Ranks the layouts that could have written these bytes.

    Each layout is tried with each block size and page stride that the number of bytes allows. Of rows
    that hold more than one byte value it counts the groups that an encoder can write (`check_records`),
    the scales of a plausible size, the groups with elements of both signs, and the pad bytes.

    Args:
        data: uint8 [n].
        block_size: rows per page, if known.

    Returns:
        The best first; those below a score of 0.5 are left out, and so is a second block size or stride
        for a layout that fits no better, and a layout that differs from another one in its pages alone.
        A layout with several pools has several dumps and is not looked for.

    Example:
        >>> from dsv4num.reference import encode_records
        >>> rows = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
        >>> data = encode_records(rows, "v41_nvfp4_inline").reshape(-1)
        >>> guess_layouts(data)[0].layout
        'v41_nvfp4_inline'
    """
    found: dict[str, Guess] = {}
    for layout in (*LAYOUTS.values(), *WILD_LAYOUTS.values()):
        if layout.pools > 1:
            continue
        best = max(
            (
                _score(data, layout, *geometry)
                for geometry in _geometries(len(data), layout, block_size)
            ),
            key=lambda guess: guess.score,
            default=None,
        )
        record = replace(layout, page_multiple=1).fingerprint()
        if best and best.score >= 0.5 and (record not in found or best.score > found[record].score):
            found[record] = best
    return sorted(found.values(), key=lambda guess: -guess.score)


def _geometries(size: int, layout: Layout, block_size: int | None) -> list[tuple[int, int, bool]]:
    """Block sizes and page strides that fill the dump: padded, or else unpadded."""
    if layout.inline and layout.page_multiple == 1:
        return [(1, layout.row_bytes, True)] if size and size % layout.row_bytes == 0 else []
    found = []
    for rows in (block_size,) if block_size else _BLOCK_SIZES:
        try:
            strides = layout.page_bytes(rows), layout.owned_bytes(rows)
        except ArgumentError:  # rows that its tiles do not fill
            continue
        for stride in dict.fromkeys(strides):
            rest = size % stride
            if size >= stride and rest in (0, layout.owned_bytes(rows)):
                found.append((rows, stride, False))
    return found


def _score(
    data: NDArray[np.uint8], layout: Layout, rows: int, stride: int, any_block: bool
) -> Guess:
    """How well one layout and geometry fit."""
    dump = Dump(data, layout, rows, stride)
    slots = dump.slots
    if len(slots) > _ROWS:
        slots = slots[np.linspace(0, len(slots) - 1, _ROWS).astype(np.int64)]
    records = dump.records(slots)
    live = records[~dump.blank(records)]
    unpadded = stride != layout.page_bytes(rows)
    padding = " without padding" if unpadded else ""
    unit = "rows" if any_block else f"pages of {rows} rows{padding}"
    reasons = [f"{len(data):,} bytes: {unit}, {stride:,} bytes each"]
    if not len(live):
        return Guess(layout.name, rows, stride, 0.0, ("no row holds more than one byte value",))
    score = 1.0
    for checked in check_records(live, layout):
        bad = np.zeros(checked.scales.shape, np.bool_)
        for kind in ("copies", "scale power", "scale range", "amax missing", "beyond qmax", "nan"):
            if kind in checked.wrong:
                bad |= checked.wrong[kind]
        with np.errstate(all="ignore"):
            exponent = np.log2(checked.scales.astype(np.float64))
        floor = exponent == np.nanmin(exponent, initial=np.inf)
        sane = ((exponent >= _PLAUSIBLE[0]) & (exponent <= _PLAUSIBLE[1])) | floor
        rule = checked.field.rule
        assert rule is not None
        negative = (checked.codes & np.uint8(rule.element.sign_code)).astype(np.bool_).mean(axis=-1)
        zero = ((checked.codes & np.uint8(rule.element.sign_code - 1)) == 0).all(axis=-1)
        signs = ((negative > 0.05) & (negative < 0.95)) | zero
        for share, text in (
            (1 - bad.mean(), "groups are such as its encoder writes"),
            (sane.mean(), "scales have a plausible size"),
            (signs.mean(), "groups have elements of both signs"),
        ):
            score *= float(share)
            reasons.append(f"{100 * share:.1f} % of {checked.scales.size:,} {text}")
    if not any(f.kind == "scale" for f, _ in dump.fields):
        score *= 0.9  # next to nothing in such rows can be wrong
        reasons.append("it stores no scales that could speak for or against it")
    for entry, where in dump.fields:
        if entry.kind == "pad":
            share = (live[:, where] == entry.pad_value).mean()
            score *= float(0.9 + 0.1 * share)  # not every writer writes it
            reasons.append(f"{100 * share:.1f} % of its pad bytes are {entry.pad_value:02X}")
        elif entry.kind == "raw" and entry.format is not FP32:
            bits = np.ascontiguousarray(live[:, where]).view("<u2")
            field = (bits >> 7) & 0xFF
            share = ((field == 0) | ((field > 127 - 50) & (field < 127 + 30))).mean()
            score *= float(share)
            reasons.append(
                f"{100 * share:.1f} % of {bits.size:,} bf16 values have a plausible size"
            )
    block, step = (0, 0) if any_block else (rows, stride)
    return Guess(layout.name, block, step, score, tuple(reasons))
