"""The rows of a report: what a run found, one row per operation, variant and path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Row:
    """The result of one operation over one variant on one path.

    Attributes:
        operation, variant, path: of what.
        cases: how many were run, and `names` their names.
        runs: calls of what is judged.
        bytes: that were compared.
        mismatches: bytes that differ, and calls that failed.
        seconds: of both sides.
        failures: the report of every run that failed.
        not_offered: why another implementation did not do it: once for a case, or once for all.
    """

    operation: str
    variant: str
    path: str
    cases: int = 0
    runs: int = 0
    bytes: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    names: list[str] = field(default_factory=list)
    failures: list[list[str]] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)


def add_up(rows: Iterable[Row]) -> list[Row]:
    """One row per operation, variant and path, in the order of the first of each."""
    sums: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.operation, row.variant, row.path)
        total = sums.setdefault(key, Row(*key))
        total.cases += row.cases
        total.runs += row.runs
        total.bytes += row.bytes
        total.mismatches += row.mismatches
        total.seconds += row.seconds
        total.names += row.names
        total.failures += row.failures
        total.not_offered += row.not_offered
    return list(sums.values())
