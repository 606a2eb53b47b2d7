"""Facts about bytes that differ, for which no input is needed: stale rows, moved rows, equal values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsv4num.explain.decoded import values_of
from dsv4num.explain.encoder import field_columns
from dsv4num.explain.pages import Dump

__all__ = ["Fact", "facts_of"]


@dataclass(frozen=True)
class Fact:
    """Something that is true of differing bytes.

    Attributes:
        name: short, stable.
        text: completes "is explained by: ...".
        explained: bool [T, row bytes], the bytes that it is true of.
    """

    name: str
    text: str
    explained: NDArray[np.bool_]


def facts_of(dump: Dump, slots: NDArray[np.int64], expected: NDArray[np.uint8]) -> list[Fact]:
    """The facts that are true of some byte.

    Args:
        dump: what is there.
        slots: int64 [T].
        expected: uint8 [T, row bytes], what should be in these slots.
    """
    found = dump.records(slots)
    differs = found != expected
    return [
        *_stale_rows(dump, found, differs, slots),
        *_stale_fields(dump, found, differs),
        *_moved(found, expected, differs, slots),
        *_equal_values(dump, found, expected, differs),
        *_scale_alone(dump, found, expected, differs),
    ]


def _count(rows: int) -> str:
    return f"{rows:,} row{'s' if rows > 1 else ''}"


def _stale_rows(
    dump: Dump, found: NDArray[np.uint8], differs: NDArray[np.bool_], slots: NDArray[np.int64]
) -> Iterator[Fact]:
    """Rows of one byte throughout."""
    same = dump.blank(found) & differs.any(axis=1)
    if same.any():
        values, counts = np.unique(found[same, 0], return_counts=True)
        byte = int(values[np.argmax(counts)])
        rows = same & (found[:, 0] == byte)
        first = int(slots[np.flatnonzero(rows)[0]])
        text = f"{_count(int(rows.sum()))} never written, the first in slot {first}: all {byte:02X}"
        yield Fact("rows-not-written", text, np.broadcast_to(rows[:, None], found.shape))


def _stale_fields(
    dump: Dump, found: NDArray[np.uint8], differs: NDArray[np.bool_]
) -> Iterator[Fact]:
    """Fields of one byte throughout, in every row that differs."""
    mark = np.zeros_like(differs)
    texts = []
    for entry, where in dump.fields:
        rows = differs[:, where].any(axis=1)
        part = found[rows][:, where]
        if part.size < 4 or not bool((part == part.flat[0]).all()):
            continue
        mark[np.ix_(rows, np.arange(mark.shape[1])[where])] = True
        texts.append(f"{entry.name} holds {int(part.flat[0]):02X} in {_count(int(rows.sum()))}")
    if texts:
        yield Fact("fields-not-written", f"{', '.join(texts)}: not written", mark)


def _moved(
    found: NDArray[np.uint8],
    expected: NDArray[np.uint8],
    differs: NDArray[np.bool_],
    slots: NDArray[np.int64],
) -> Iterator[Fact]:
    """Rows that hold the record of another slot."""
    homes: dict[bytes, int] = {}
    for row, record in enumerate(expected):
        homes.setdefault(record.tobytes(), row)
    mark = np.zeros_like(differs)
    moves = []
    for row in np.flatnonzero(differs.any(axis=1)).tolist():
        home = homes.get(found[row].tobytes())
        if home is not None:
            mark[row] = True
            moves.append((int(slots[row]), int(slots[home])))
    if moves:
        here, there = moves[0]
        more = f", and {_count(len(moves) - 1)} more" if len(moves) > 1 else ""
        text = f"rows that hold the record of another slot: slot {here} that of slot {there}{more}"
        yield Fact("rows-moved", text, mark)


def _equal_values(
    dump: Dump, found: NDArray[np.uint8], expected: NDArray[np.uint8], differs: NDArray[np.bool_]
) -> Iterator[Fact]:
    """Groups with another scale whose decoded values are the same."""
    layout = dump.layout
    here, there = values_of(found, layout), values_of(expected, layout)
    same = (here.view(np.uint32) == there.view(np.uint32)) | (np.isnan(here) & np.isnan(there))
    columns = dict(field_columns(layout))
    mark = np.zeros_like(differs)
    steps: set[int] = set()
    for entry, where in columns.items():
        if entry.kind != "codes" or entry.rule is None:
            continue
        scale = layout.scale_of(entry)
        if scale is None:
            continue
        groups = (entry.dims[1] - entry.dims[0]) // entry.rule.group
        equal = same[:, slice(*entry.dims)].reshape(len(found), groups, -1).all(axis=-1)
        there_too, width = columns[scale], scale.nbytes // groups
        per_scale = differs[:, there_too].reshape(len(found), groups, width).any(axis=-1)
        equal &= per_scale
        mark[:, there_too] = np.repeat(equal, width, axis=1)
        mark[:, where] = np.repeat(equal, entry.nbytes // groups, axis=1)
        if width == 1:
            codes = found[:, there_too].astype(np.int16) - expected[:, there_too]
            steps.update(int(step) for step in codes[equal])
    if mark.any():
        by = f" by {steps.pop():+d}" if len(steps) == 1 else ""
        text = f"the scale is another one{by}, the elements follow it, and the decoded values are equal"
        yield Fact("values-equal", text, mark)


def _scale_alone(
    dump: Dump, found: NDArray[np.uint8], expected: NDArray[np.uint8], differs: NDArray[np.bool_]
) -> Iterator[Fact]:
    """Scale codes that all differ by the same step, while the elements stay."""
    for entry, where in dump.fields:
        if entry.kind != "scale" or entry.format is None or entry.format.width != 8:
            continue
        part = differs[:, where]
        steps = found[:, where].astype(np.int16) - expected[:, where]
        if int(part.sum()) >= 4 and len(np.unique(steps[part])) == 1:
            mark = np.zeros_like(differs)
            mark[:, where] = True
            step = int(steps[part][0])
            text = f"scale codes that are {step:+d}, while the elements do not follow"
            yield Fact("scale-step", text, mark)
