"""Joins the reports of the shards of one run into the report of that run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsv4num.errors import ArgumentError
from dsv4num.verify.rows import Row, add_up

Report = dict[str, Any]

_OURS = "a report of `verify --json`"
#: What must be the same in all reports.
_SAME = ("level", "seed", "selection", "environment", "sources")


def parse_shard(text: str, option: str = "--shard") -> tuple[int, int]:
    """The shard "I/N", counted from 0.

    Raises:
        ArgumentError: not two numbers, or not 0 <= I < N.

    Example:
        >>> parse_shard("3/8")
        (3, 8)
    """
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and int(first) < int(second):
        return int(first), int(second)
    raise ArgumentError(option, repr(text), "I/N with 0 <= I < N, as in 0/8 ... 7/8")


def read_report(path: Path) -> Report:
    """One report, checked.

    Raises:
        ArgumentError: a file that is no report, or whose sums do not agree with its rows.
        OSError: a file that cannot be read.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        given = f"no JSON ({str(error).splitlines()[0]})"
        raise ArgumentError(str(path), given, _OURS) from None
    _check(path, "the whole", report, _REPORT)
    for index, row in enumerate(report["rows"]):
        _check(path, f"rows[{index}]", row, _ROW)
        if len(row["names"]) != row["cases"]:
            raise ArgumentError(str(path), f"rows[{index}] with other names than cases", _OURS)
    for key in ("bytes", "mismatches"):
        if sum(row[key] for row in report["rows"]) != report[key]:
            raise ArgumentError(str(path), f"{key} that are not the sum of the rows", _OURS)
    parse_shard(report["shard"], str(path))
    return dict(report)


def merge(reports: Mapping[str, Report], of: tuple[int, int] = (0, 1)) -> Report:
    """The report of a run from the reports of its shards.

    Args:
        reports: by the name that errors shall use.
        of: the shard that was itself split, (0, 1) for a whole run.

    Raises:
        ArgumentError: reports of different runs (level, seed, selection, versions, device, sources),
            a shard that is missing or there twice, or rows that do not fit each other.
    """
    if not reports:
        raise ArgumentError("reports", "none", "the reports of all shards")
    names = list(reports)
    first = reports[names[0]]
    for name in names[1:]:
        for key in _SAME:
            _require_same(key, first[key], names[0], reports[name][key], name)
    _require_all_shards(reports, of)
    rows = add_up(Row(**row) for report in reports.values() for row in report["rows"])
    for row in rows:
        if len(set(row.names)) != len(row.names):
            given = f"a case of {row.operation} {row.variant} twice"
            raise ArgumentError("reports", given, "shards that do not overlap")
    return {
        **{key: first[key] for key in _SAME},
        "date": max(report["date"] for report in reports.values()),
        "shard": f"{of[0]}/{of[1]}",
        # Of all shards together, on however many devices they ran.
        "seconds": round(sum(report["seconds"] for report in reports.values()), 1),
        "bytes": sum(row.bytes for row in rows),
        "mismatches": sum(row.mismatches for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def _require_all_shards(reports: Mapping[str, Report], of: tuple[int, int]) -> None:
    """The shards are one of each, and together they are `of`."""
    first_name = next(iter(reports))
    _, count = parse_shard(reports[first_name]["shard"], first_name)
    found: dict[int, str] = {}
    for name, report in reports.items():
        index, shards = parse_shard(report["shard"], name)
        if shards != count:
            raise ArgumentError(
                name, f"shard {report['shard']}", f"one of {count}, as {first_name}"
            )
        if index in found:
            raise ArgumentError(
                name, f"shard {index}/{count} again, after {found[index]}", "it once"
            )
        found[index] = name
    wanted = range(of[0], count, of[1])
    missing = [str(index) for index in wanted if index not in found]
    if missing:
        shown = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
        raise ArgumentError("reports", f"no shard {shown} of {count}", "all shards of one run")


def _require_same(key: str, one: Any, one_name: str, other: Any, other_name: str) -> None:
    """Two reports say the same; of a dictionary the first entry that differs is named."""
    if isinstance(one, dict) and isinstance(other, dict):
        for inner in sorted(one.keys() | other.keys()):
            _require_same(f"{key}.{inner}", one.get(inner), one_name, other.get(inner), other_name)
    elif one != other:
        raise ArgumentError(other_name, f"{key} {other}", f"{one}, as in {one_name}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_selection(value: Any) -> bool:
    keys = {"operations", "variants", "cases", "paths"}
    return isinstance(value, dict) and set(value) == keys and all(map(_is_texts, value.values()))


_ROW: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("operation", "variant", "path"), _is_text),
    **dict.fromkeys(("cases", "runs", "bytes", "mismatches"), _is_count),
    "seconds": _is_seconds,
    **dict.fromkeys(("names", "not_offered"), _is_texts),
    "failures": lambda value: isinstance(value, list) and all(map(_is_texts, value)),
}
_REPORT: dict[str, Callable[[Any], bool]] = {
    "environment": lambda value: _is_table(value) and "arch" in value,
    "sources": _is_table,
    "selection": _is_selection,
    **dict.fromkeys(("date", "shard"), _is_text),
    "level": lambda value: value in ("quick", "full", "exhaustive"),
    "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "seconds": _is_seconds,
    **dict.fromkeys(("bytes", "mismatches"), _is_count),
    "rows": lambda value: isinstance(value, list),
}


def _check(path: Path, what: str, value: Any, fields: Mapping[str, Callable[[Any], bool]]) -> None:
    """A JSON object with these fields and no others."""
    if not isinstance(value, dict):
        raise ArgumentError(str(path), f"{what} not an object", _OURS)
    for key, fits in fields.items():
        if key not in value:
            raise ArgumentError(str(path), f"{what} without '{key}'", _OURS)
        if not fits(value[key]):
            raise ArgumentError(str(path), f"'{key}' of {what} of another kind", _OURS)
    if more := sorted(set(value) - set(fields)):
        raise ArgumentError(str(path), f"{what} with '{more[0]}'", _OURS)
