"""The command `audit`: cross-compiles every kernel for every architecture and inspects the result."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4num import SPEC_VERSION, __version__
from dsv4num.audit.rules import RULES, Finding, inspect
from dsv4num.audit.specialization import (
    ARCHITECTURES,
    Specialization,
    choose,
    collect,
    compile_to_text,
)
from dsv4num.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of the table.
_WIDTH = 130
#: What is printed of the findings; `--json` has all.
_PRINTED = 20


class Row(NamedTuple):
    """The result of one kernel on one target."""

    target: str
    kernel: str
    portable: int
    native: int
    findings: int


class Result(NamedTuple):
    """One specialization, and what breaks a rule in it."""

    specialization: Specialization
    findings: list[Finding]


def add_audit(subparsers: Any) -> None:
    """Adds the `audit` command to a command line."""
    parser = subparsers.add_parser(
        "audit", help="inspect the compiled kernels of every architecture"
    )
    parser.add_argument(
        "--arch", action="append", default=[], help="architecture (may be repeated)"
    )
    parser.add_argument(
        "--level",
        choices=("quick", "full"),
        default="quick",
        help="quick: one specialization of each family; full: every one that verify launches",
    )
    parser.add_argument("--op", action="append", default=[], help="operation (may be repeated)")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: by the machine)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write FOLDER/audit.json")
    parser.set_defaults(func=audit)


def audit(arguments: argparse.Namespace) -> int:
    """Collects, compiles and inspects; 0 only if nothing breaks a rule.

    Raises:
        ArgumentError: an unknown name, a report that cannot be written, a record of a part.
        UnsupportedError: no triton.
    """
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise UnsupportedError(f"audit needs {module}: pip install 'dsv4num[gpu]'")
    operations = _checked(arguments)
    # Read by triton when it is imported, here and in the processes that do the work.
    os.environ["TRITON_INTERPRET"] = "0"
    from rich.console import Console
    from rich.progress import (
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    targets = tuple(name for name in ARCHITECTURES if not arguments.arch or name in arguments.arch)
    console = Console()
    if console.width < _WIDTH:  # rather wrapped than cut
        console = Console(width=_WIDTH)
    found = _environment()
    console.print("  ".join(f"{key} {value}" for key, value in found.items()), highlight=False)
    began = time.perf_counter()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    jobs = arguments.jobs or min(os.cpu_count() or 1, 8)
    with bar, ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare) as pool:
        task = bar.add_task("collecting", total=len(operations))

        def step(text: str) -> None:
            bar.update(task, description=text, advance=1)

        launched = _collected(pool, operations, targets, arguments.level, step)
        chosen = choose(launched, arguments.level)
        bar.update(task, description="compiling", total=len(chosen), completed=0)
        results = list(_compiled(pool, chosen, step))
    seconds = time.perf_counter() - began
    rows = _rows(results)
    _print_table(console, rows, targets)
    _print_findings(console, results)
    whole = {
        "environment": found,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "level": arguments.level,
        "seconds": round(seconds, 1),
        "launched": len(launched),
        "specializations": len(results),
        "findings": sum(row.findings for row in rows),
        "rules": {rule.name: rule.why for rule in RULES},
        "rows": [row._asdict() for row in rows],
        "found": list(_found(results)),
    }
    verdict = f"{len(results):,} of {len(launched):,} specializations on {len(targets)} targets"
    console.print(
        f"{verdict}, {whole['findings']:,} findings, {seconds:.0f} s",
        style="red" if whole["findings"] else "green",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    if arguments.record:
        console.print(f"recorded in {_write_record(arguments.record, whole)}")
    return 1 if whole["findings"] else 0


def _checked(arguments: argparse.Namespace) -> list[str]:
    """The operations to audit, in registry order, when all arguments are good."""
    from dsv4num.verify.operations import OPERATIONS

    for name in arguments.arch:
        if name not in ARCHITECTURES:
            raise ArgumentError("--arch", repr(name), ", ".join(ARCHITECTURES))
    for name in arguments.op:
        if name not in OPERATIONS:
            raise ArgumentError("--op", repr(name), ", ".join(OPERATIONS))
    if arguments.jobs < 0:
        raise ArgumentError("--jobs", arguments.jobs, "0 (by the machine) or more")
    file, folder = arguments.json, arguments.record
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ArgumentError("--json", str(file), "a file in a folder that exists")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ArgumentError("--record", str(folder), "a folder")
    if folder is not None and (arguments.arch or arguments.op):
        raise ArgumentError("--record", "a part of the kernels", "a run of everything")
    return [name for name in OPERATIONS if not arguments.op or name in arguments.op]


def _prepare() -> None:
    """The cases compute with NumPy, which reports the overflows that clause 3 defines."""
    warnings.simplefilter("ignore", RuntimeWarning)


def _collected(
    pool: ProcessPoolExecutor,
    operations: list[str],
    targets: tuple[str, ...],
    level: Any,
    step: Callable[[str], None],
) -> list[Specialization]:
    """What the operations launch, each specialization once."""
    futures = [pool.submit(collect, name, targets, level) for name in operations]
    found: dict[Any, Specialization] = {}
    for future in futures:
        for made in future.result():
            types = tuple(made.signature.items())
            constants = tuple(sorted((path, repr(value)) for path, value in made.constants.items()))
            known = tuple(sorted((path, repr(value)) for path, value in made.attributes.items()))
            options = tuple(sorted((name, repr(value)) for name, value in made.options.items()))
            key = (made.target, made.module, made.kernel, types, constants, known, options)
            if key not in found or (made.default and not found[key].default):
                found[key] = made
        step("collecting")
    return list(found.values())


def _compiled(
    pool: ProcessPoolExecutor, chosen: list[Specialization], step: Callable[[str], None]
) -> Iterator[Result]:
    """Compiles and inspects. The compressor's kernels take longest: they start first."""
    ordered = sorted(chosen, key=lambda made: "compress" not in made.kernel)
    futures = {pool.submit(examine, made): made for made in ordered}
    for future in as_completed(futures):
        made = futures[future]
        step(f"compiled {made.target} {made.kernel}")
        yield future.result()


def examine(specialization: Specialization) -> Result:
    """Compiles and inspects one specialization. One that does not compile is a finding."""
    try:
        stages = compile_to_text(specialization)
    except Exception as error:  # the compiler's own errors have no common base
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Result(specialization, [Finding("no code", "compiler", "", text)])
    return Result(specialization, inspect(stages, native=specialization.native))


# The report


def _environment() -> dict[str, str]:
    """Versions, as they were in this run."""
    found = {
        "dsv4num": __version__,
        "spec": SPEC_VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return found | {name: metadata.version(name) for name in ("numpy", "torch", "triton")}


def _rows(results: Iterable[Result]) -> list[Row]:
    """One row per target and kernel."""
    portable: Counter[tuple[str, str]] = Counter()
    native: Counter[tuple[str, str]] = Counter()
    findings: Counter[tuple[str, str]] = Counter()
    for result in results:
        key = (result.specialization.target, result.specialization.kernel)
        (native if result.specialization.native else portable)[key] += 1
        findings[key] += len(result.findings)
    order = list(ARCHITECTURES)
    keys = sorted(portable | native, key=lambda key: (order.index(key[0]), key[1]))
    return [Row(*key, portable[key], native[key], findings[key]) for key in keys]


def _found(results: Iterable[Result]) -> Iterator[dict[str, str]]:
    """Every finding as plain data."""
    for made, findings in results:
        for finding in findings:
            yield {
                "target": made.target,
                "kernel": made.kernel,
                "specialization": str(made),
                "rule": finding.rule,
                "stage": finding.stage,
                "source": finding.source,
                "text": finding.text,
            }


def _print_table(console: Console, rows: list[Row], targets: tuple[str, ...]) -> None:
    """A line per kernel and a column per target: specializations, portable and native."""
    from rich.table import Table

    cells = {(row.target, row.kernel): row for row in rows}
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=True)
    table.add_column("kernel", "portable + native", no_wrap=True)
    for target in targets:
        mine = [row for row in rows if row.target == target]
        table.add_column(target, _cell(_total(target, mine)), justify="right", no_wrap=True)
    for kernel in sorted({row.kernel for row in rows}):
        line = [cells.get((target, kernel)) for target in targets]
        table.add_row(kernel, *(_cell(row) if row else "" for row in line))
    console.print(table)


def _total(target: str, rows: list[Row]) -> Row:
    """The sums of some rows."""
    return Row(
        target,
        "",
        sum(row.portable for row in rows),
        sum(row.native for row in rows),
        sum(row.findings for row in rows),
    )


def _cell(row: Row) -> str:
    """Counts; those of findings stand out."""
    text = f"{row.portable}" + (f"+{row.native}" if row.native else "")
    return f"[red]{text} !{row.findings}[/]" if row.findings else text


def _print_findings(console: Console, results: list[Result]) -> None:
    """Findings that agree in target, kernel, rule and place are printed once, with their number."""
    groups: Counter[tuple[str, ...]] = Counter()
    examples: dict[tuple[str, ...], dict[str, str]] = {}
    for found in _found(results):
        key = tuple(found[name] for name in ("target", "kernel", "rule", "stage", "source"))
        groups[key] += 1
        examples.setdefault(key, found)
    why = {rule.name: rule.why for rule in RULES}
    for key in sorted(groups)[:_PRINTED]:
        found = examples[key]
        target, kernel, rule, stage, source = key
        place = f"{stage}, {source}" if source else stage
        console.print(f"{target} {kernel}: {rule} ({groups[key]} in {place})", style="red")
        for line in (why.get(rule, ""), found["text"], f"in {found['specialization']}"):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if len(groups) > _PRINTED:
        console.print(f"... and {len(groups) - _PRINTED} more; --json FILE has all")


def _write_record(folder: Path, whole: dict[str, Any]) -> Path:
    """Writes `<folder>/audit.json`: how much was audited for each target, and of which sources."""
    from dsv4num.verify.report import source_hashes

    targets: dict[str, dict[str, Any]] = {}
    for row in whole["rows"]:
        entry = targets.setdefault(row["target"], {"portable": 0, "native": 0, "findings": 0})
        for count in ("portable", "native", "findings"):
            entry[count] += row[count]
    kept = ("date", "environment", "level", "seconds", "launched", "specializations", "findings")
    record = {
        **{key: whole[key] for key in kept},
        "rules": list(whole["rules"]),
        "sources": source_hashes(),
        "targets": targets,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
