"""Two dumps, byte by byte: counts by field, the first differences decoded, and a map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.decoded import values_of
from dsv4num.explain.pages import Dump
from dsv4num.formats import Field

__all__ = ["Difference", "diff_dumps"]

#: Cells of a field and rows of a page in the map, and pages that have one.
_CELLS, _LINES, _PAGES = 16, 24, 3


@dataclass(frozen=True)
class Difference:
    """What differs between two dumps.

    Attributes:
        compared: bytes of rows that were compared.
        fields: for each field the bytes that differ, and all of them.
        padding: bytes of pages that no row owns and that differ.
        rows: slots that differ.
        first: the first differences: slot, field, element, dim, both codes and both values.
        pages: pages of each dump.
        map: lines, where in the pages they lie.
    """

    compared: int
    fields: dict[str, tuple[int, int]]
    padding: int
    rows: list[int]
    first: list[dict[str, Any]]
    pages: tuple[int, int]
    map: list[str]

    @property
    def differing(self) -> int:
        """Bytes of rows that differ."""
        return sum(count for count, _ in self.fields.values())

    @property
    def equal(self) -> bool:
        """Whether the dumps have the same rows with the same bytes."""
        return not self.differing and self.pages[0] == self.pages[1]

    def lines(self) -> list[str]:
        """Text for people."""
        lines = []
        if self.pages[0] != self.pages[1]:
            lines.append(
                f"A has {self.pages[0]:,} pages, B has {self.pages[1]:,}: the first ones compared"
            )
        if not self.differing:
            lines.append(f"no difference in {self.compared:,} bytes of rows")
        else:
            lines.append(
                f"{self.differing:,} of {self.compared:,} bytes differ, in {len(self.rows):,} rows"
            )
            lines += [
                f"  {name}: {count:,} of {total:,}" for name, (count, total) in self.fields.items()
            ]
            lines += [_said(entry) for entry in self.first]
            lines += ["", *self.map]
        if self.padding:
            lines.append(f"bytes that no row owns differ: {self.padding:,}; nothing reads them")
        return lines

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "differing": self.differing,
            "fields": {name: {"differing": n, "of": of} for name, (n, of) in self.fields.items()},
            "padding": self.padding,
            "rows": self.rows,
            "pages": list(self.pages),
            "first": self.first,
        }


def diff_dumps(
    a: Dump, b: Dump, slots: NDArray[np.int64] | None = None, *, limit: int = 12
) -> Difference:
    """Compares the rows of two dumps of one layout.

    Args:
        a: the first dump, in an example what was expected.
        b: the second; its page stride may be another one.
        slots: the slots to compare; None for all that both have.
        limit: how many differences to decode.

    Raises:
        ArgumentError: a slot that one of the dumps does not have.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> bytes_a, bytes_b = np.zeros((2, 2 * 68), np.uint8)
        >>> bytes_b[64] = 0x30
        >>> layout = get_layout("indexer_mxfp4")
        >>> found = diff_dumps(Dump.of(bytes_a, layout, 2), Dump.of(bytes_b, layout, 2))
        >>> found.fields["codes"], found.rows, found.first[0]["dim"], found.first[0]["b"]
        ((1, 128), [1], 1, '3')
    """
    count = min(len(a.slots), len(b.slots))
    chosen = np.arange(count, dtype=np.int64) if slots is None else slots
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
        raise ArgumentError(
            "--rows", f"slots {chosen.min()}..{chosen.max()}", f"0..{count - 1}", "4.3"
        )
    here, there = a.records(chosen), b.records(chosen)
    differs = here != there
    fields = {
        f.name: (int(differs[:, where].sum()), int(differs[:, where].size)) for f, where in a.fields
    }
    rows = np.flatnonzero(differs.any(axis=1))
    return Difference(
        int(differs.size),
        fields,
        _padding(a, b) if slots is None else 0,
        [int(slot) for slot in chosen[rows]],
        _first(a, b, chosen[rows], here[rows], there[rows], limit),
        (a.pages, b.pages),
        _map(a, chosen, differs),
    )


def _padding(a: Dump, b: Dump) -> int:
    """Bytes that no row owns and that differ."""
    total = 0
    for pool, parts in enumerate(zip(a.pools, b.pools, strict=True)):
        owned = a.layout.owned_bytes(a.block_size, pool=pool)
        for page in range(min(a.pages, b.pages)):
            tails = [
                d.data[start:end][page * stride + owned : (page + 1) * stride]
                for d, (start, end, stride) in zip((a, b), parts, strict=True)
            ]
            size = min(len(tail) for tail in tails)
            total += int((tails[0][:size] != tails[1][:size]).sum())
    return total


def _first(
    a: Dump,
    b: Dump,
    slots: NDArray[np.int64],
    here: NDArray[np.uint8],
    there: NDArray[np.uint8],
    limit: int,
) -> list[dict[str, Any]]:
    """The first elements that differ, row by row."""
    found: list[dict[str, Any]] = []
    for index, slot in enumerate(slots[:limit]):
        pair = [records[index : index + 1] for records in (here, there)]
        values = [values_of(record, a.layout)[0] for record in pair]
        for entry, where in a.fields:
            codes = [_codes(record[0, where], entry) for record in pair]
            digits = entry.format.width // 4 if entry.format else 2
            for element in np.flatnonzero(codes[0] != codes[1]).tolist():
                if len(found) == limit:
                    return found
                page, row = divmod(int(slot), a.block_size)
                item = {"page": page, "slot": int(slot), "row": row, "field": entry.name}
                item |= {"element": element, "dim": None}
                item |= {
                    name: f"{int(code[element]):0{digits}X}"
                    for name, code in zip("ab", codes, strict=True)
                }
                if entry.kind in ("codes", "raw"):
                    dim = entry.dims[0] + element
                    item["dim"] = dim
                    item |= {"value_a": _number(values[0][dim]), "value_b": _number(values[1][dim])}
                found.append(item)
    return found


def _codes(stored: NDArray[np.uint8], entry: Field) -> NDArray[Any]:
    """The codes of a field of one record."""
    if entry.format is None or entry.format.width == 8:
        return stored
    if entry.format.width == 4:
        return np.stack([stored & 15, stored >> 4], axis=-1).reshape(-1)
    return np.ascontiguousarray(stored).view(f"<u{entry.format.width // 8}")


def _number(value: Any) -> float | str:
    """A number, or text for what JSON has no number for."""
    return float(value) if np.isfinite(value) else str(value)


def _said(item: dict[str, Any]) -> str:
    """One difference as a line."""
    where = " ".join(f"{name} {item[name]}" for name in ("page", "slot", "row"))
    place = f"  {where} {item['field']}[{item['element']}]"
    if item["dim"] is None:
        return f"{place}: A 0x{item['a']}, B 0x{item['b']}"
    values = [v if isinstance(v, str) else f"{v:.9g}" for v in (item["value_a"], item["value_b"])]
    dim = f" (dim {item['dim']})"
    return f"{place}{dim}: A 0x{item['a']} = {values[0]}, B 0x{item['b']} = {values[1]}"


def _map(dump: Dump, slots: NDArray[np.int64], differs: NDArray[np.bool_]) -> list[str]:
    """Pages with differences: a line per run of rows that look the same, cells per field."""
    pages = slots // dump.block_size
    touched = np.unique(pages[differs.any(axis=1)])
    lines = []
    for page in touched[:_PAGES]:
        of_page = pages == page
        rows, marks = (slots % dump.block_size)[of_page], differs[of_page]
        texts = [_row_cells(mark, dump) for mark in marks]
        widths = [
            max(len(f.name), len(cell)) for (f, _), cell in zip(dump.fields, texts[0], strict=True)
        ]
        heads = "  ".join(f.name.ljust(w) for (f, _), w in zip(dump.fields, widths, strict=True))
        lines.append(f"{f'page {page}':<14}{heads}".rstrip())
        runs = _runs(rows, texts)
        for label, cells in runs[:_LINES]:
            shown = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
            lines.append(f"{label:<14}{shown}".rstrip())
        if len(runs) > _LINES:
            lines.append("...")
    if len(touched) > _PAGES:
        lines.append(f"... and {len(touched) - _PAGES:,} more pages")
    return [*lines, "· equal  + some bytes differ  # all differ"] if lines else lines


def _row_cells(mark: NDArray[np.bool_], dump: Dump) -> tuple[str, ...]:
    """The cells of each field of one row."""
    cells = []
    for _, where in dump.fields:
        parts = np.array_split(mark[where], min(_CELLS, mark[where].size))
        cells.append("".join("#" if p.all() else "+" if p.any() else "·" for p in parts))
    return tuple(cells)


def _runs(
    rows: NDArray[np.int64], texts: list[tuple[str, ...]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Neighbouring rows with the same cells as one line."""
    runs: list[tuple[int, int, tuple[str, ...]]] = []
    for row, cells in zip(rows.tolist(), texts, strict=True):
        if runs and runs[-1][2] == cells and runs[-1][1] == row - 1:
            runs[-1] = (runs[-1][0], row, cells)
        else:
            runs.append((row, row, cells))
    return [
        (f"row {first}" if first == last else f"rows {first}-{last}", cells)
        for first, last, cells in runs
    ]
