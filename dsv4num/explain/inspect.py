"""One row of a dump: codes, scales, values, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4num.errors import ArgumentError
from dsv4num.explain.decoded import values_of
from dsv4num.explain.encoder import field_columns
from dsv4num.explain.pages import Dump
from dsv4num.explain.records import Checked, check_records
from dsv4num.reference import encode_scale

__all__ = ["Row", "inspect_row"]

_MEANING = {
    "scale power": "scale is no power of two",
    "copies": "the copies of the scale differ",
    "scale range": "scale that no encoder writes",
    "amax missing": "no element is large enough for this scale: it could be smaller",
    "beyond qmax": "an element beyond qmax",
    "nan": "NaN codes",
}


@dataclass(frozen=True)
class Row:
    """A row, read.

    Attributes:
        slot: where.
        groups: for each group its field, dims, scale (stored and as a number), codes and values.
        raw: for each raw field its name, dims, codes and values.
        pad: name and bytes of each pad field.
        anomalies: sentences.
    """

    slot: int
    page: int
    row: int
    groups: list[dict[str, Any]] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    pad: list[dict[str, Any]] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Text for people."""
        lines = [f"slot {self.slot}: page {self.page}, row {self.row}"]
        for group in self.groups:
            dims = f"{group['dims'][0]}..{group['dims'][1]}"
            scale = f"scale 0x{group['scale_code']} = {group['scale']:.9g}"
            lines.append(f"{group['field']} {dims}: {scale}, amax {group['amax']:.9g}")
            lines += _wrapped(group["codes"], group["values"])
        for part in self.raw:
            lines.append(f"{part['field']} {part['dims'][0]}..{part['dims'][1]}: bf16")
            lines += _wrapped(part["codes"], part["values"])
        lines += [f"{part['field']}: {' '.join(part['codes'])}" for part in self.pad]
        if not self.anomalies:
            return [*lines, "no anomaly"]
        count = len(self.anomalies)
        return [
            *lines,
            f"{count} anomal{'y' if count == 1 else 'ies'}:",
            *(f"  {a}" for a in self.anomalies),
        ]

    def as_json(self) -> dict[str, Any]:
        """As plain data; NaN and infinities as text, which JSON has no numbers for."""
        kinds = {"groups": self.groups, "raw": self.raw, "pad": self.pad}
        plain = {name: [_plain(part) for part in parts] for name, parts in kinds.items()}
        where = {"slot": self.slot, "page": self.page, "row": self.row}
        return {**where, **plain, "anomalies": self.anomalies}


def inspect_row(dump: Dump, slot: int) -> Row:
    """Reads one row.

    Args:
        dump: the pages.
        slot: page * block_size + row.

    Raises:
        ArgumentError: the slot is not in the dump.
    """
    if not 0 <= slot < len(dump.slots):
        raise ArgumentError("--slot", slot, f"0..{len(dump.slots) - 1}", "4.3")
    record = dump.records(np.array([slot], np.int64))
    page, row = divmod(slot, dump.block_size)
    read = Row(slot, page, row)
    values = values_of(record, dump.layout)[0]
    if bool(dump.blank(record)[0]):
        read.anomalies.append(
            f"every byte of the row is {record[0, 0]:02X}: it may never have been written"
        )
    for checked in check_records(record, dump.layout):
        _add_groups(read, checked, values)
    for entry, where in field_columns(dump.layout):
        stored = np.ascontiguousarray(record[:, where])
        if entry.kind == "raw":
            bits = stored.view("<u2")[0]
            numbers = values[slice(*entry.dims)]
            dims = [entry.dims[0], entry.dims[1] - 1]
            codes = [f"{b:04X}" for b in bits]
            part = {"field": entry.name, "dims": dims, "codes": codes, "values": numbers.tolist()}
            read.raw.append(part)
            if not np.isfinite(numbers).all():
                count = int((~np.isfinite(numbers)).sum())
                read.anomalies.append(f"{entry.name}: {count} values are NaN or infinite")
        elif entry.kind == "pad":
            codes = [f"{b:02X}" for b in stored[0]]
            read.pad.append({"field": entry.name, "codes": codes})
            if bool((stored != entry.pad_value).any()):
                text = f"{entry.name}: {' '.join(codes)} where {entry.pad_value:02X} is written"
                read.anomalies.append(text)
    return read


def _add_groups(read: Row, checked: Checked, values: Any) -> None:
    """The groups of one field and what is wrong with them."""
    entry, size = checked.field, checked.codes.shape[-1]
    rule = entry.rule
    assert rule is not None
    digits = 1 if rule.element.width == 4 else 2
    of_zeros = int(encode_scale(np.zeros(1, np.float32), rule)[0])
    wide = 2 * checked.scale_codes.dtype.itemsize
    for index in range(checked.codes.shape[1]):
        first = entry.dims[0] + index * size
        numbers = values[first : first + size]
        finite = np.abs(numbers[~np.isnan(numbers)])
        code = int(checked.scale_codes[0, index])
        read.groups.append(
            {
                "field": entry.name,
                "dims": [first, first + size - 1],
                "scale_code": f"{code:0{wide}X}",
                "scale": float(checked.scales[0, index]),
                "amax": float(finite.max(initial=0)),
                "codes": [f"{c:0{digits}X}" for c in checked.codes[0, index]],
                "values": numbers.tolist(),
            }
        )
        place = f"{entry.name} {first}..{first + size - 1}"
        if wide == 2 and code == rule.scale.encoded_nan and rule.scale.nan_codes:
            read.anomalies.append(f"{place}: the scale is NaN ({code:02X}), and so is every value")
        elif code == 0 and of_zeros:
            read.anomalies.append(f"{place}: scale code 0")
        for kind, wrong in checked.wrong.items():
            if wrong[0, index] and not (kind == "scale range" and code == 0):
                read.anomalies.append(f"{place}: {_detail(kind, checked, index, code, wide)}")


def _detail(kind: str, checked: Checked, index: int, code: int, wide: int) -> str:
    """What is wrong, with its figures."""
    text = _MEANING[kind]
    rule = checked.field.rule
    assert rule is not None
    if kind == "nan":
        codes = [c for codes in rule.element.nan_codes for c in codes]
        where = np.flatnonzero(np.isin(checked.codes[0, index], codes))
        return f"{len(where)} {text}, the first at element {where[0]} of the group"
    if kind.startswith("scale"):
        return f"{text}: {code:0{wide}X}"
    return text


def _wrapped(codes: list[str], values: list[float]) -> list[str]:
    """Codes, up to 32 in a line, each line with the values at its start."""
    width = 32 if len(codes[0]) < 4 else 16
    lines = []
    for start in range(0, len(codes), width):
        shown = " ".join(f"{value:.4g}" for value in values[start : start + 3])
        lines.append(f"  {' '.join(codes[start : start + width])}  = {shown} ...")
    return lines


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON cannot write become text."""

    def number(value: Any) -> Any:
        return value if not isinstance(value, float) or np.isfinite(value) else str(value)

    return {
        k: [number(v) for v in x] if isinstance(x, list) else number(x) for k, x in part.items()
    }
