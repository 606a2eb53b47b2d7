"""The commands `verify` and `targets`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

from dsv4num.errors import ArgumentError, UnsupportedError

#: Columns of the table.
_WIDTH = 120


def add_verify(subparsers: Any) -> None:
    """Adds the `verify` command to a command line."""
    parser = subparsers.add_parser("verify", help="hold the kernels to the oracle, byte for byte")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="cuda if there is a GPU, else cpu"
    )
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--op", action="append", default=[], help="operation (may be repeated)")
    parser.add_argument(
        "--layout", action="append", default=[], help="layout; the same as --variant"
    )
    parser.add_argument(
        "--variant", action="append", default=[], help="layout, format, rule or mode"
    )
    parser.add_argument("--case", action="append", default=[], help="case name (may be repeated)")
    parser.add_argument("--path", action="append", default=[], choices=("native", "portable"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: by the machine)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write FOLDER/<arch>.json")
    parser.set_defaults(func=verify)


def add_targets(subparsers: Any) -> None:
    """Adds the `targets` command to a command line."""
    parser = subparsers.add_parser("targets", help="how far each architecture is proven")
    parser.set_defaults(func=targets)


def verify(arguments: argparse.Namespace) -> int:
    """Runs the cases; 0 only if nothing differs."""
    device = _choose_device(arguments.device)
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dsv4num.verify import report
    from dsv4num.verify.operations import OPERATIONS
    from dsv4num.verify.runner import Options, run, selected

    known = {variant for operation in OPERATIONS.values() for variant in operation.variants}
    for name in arguments.op:
        if name not in OPERATIONS:
            raise ArgumentError("--op", repr(name), ", ".join(OPERATIONS))
    for option, names in (("--layout", arguments.layout), ("--variant", arguments.variant)):
        for name in names:
            if name not in known:
                raise ArgumentError(option, repr(name), ", ".join(sorted(known)))
    options = Options(
        device=device,
        level=arguments.level,
        operations=tuple(arguments.op),
        variants=(*arguments.layout, *arguments.variant),
        cases=tuple(arguments.case),
        paths=tuple(arguments.path),
        seed=arguments.seed,
        jobs=arguments.jobs or min(os.cpu_count() or 1, 8),
    )
    if arguments.jobs < 0:
        raise ArgumentError("--jobs", arguments.jobs, "0 (by the machine) or more")
    pairs = list(selected(options))
    for name in arguments.op:
        if name not in {operation.name for operation, _ in pairs}:
            raise ArgumentError("--op", repr(name), "an operation that has the chosen variants")
    for name in options.variants:
        if name not in {variant for _, variant in pairs}:
            raise ArgumentError("--variant", repr(name), "a variant of the chosen operations")
    _check_writable(arguments.json, arguments.record)
    chosen = (options.operations, options.variants, options.cases, options.paths)
    if arguments.record and any(chosen):
        raise ArgumentError("--record", "a part of the cases", "a run of everything")
    console = Console()
    console = (
        console if console.width >= _WIDTH else Console(width=_WIDTH)
    )  # rather wrapped than cut
    found = report.environment(device)
    console.print("  ".join(f"{key} {value}" for key, value in found.items()), highlight=False)
    if device == "cpu":
        console.print("no GPU: the portable path runs in Triton's interpreter", style="yellow")
    began = time.perf_counter()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=len(pairs))
        rows = run(options, lambda text: bar.update(task, description=text, advance=1))
    seconds = time.perf_counter() - began
    ran = sum(row.runs for row in rows)
    for name in options.cases:
        if ran and not any(name in row.names for row in rows):
            raise ArgumentError("--case", repr(name), "a case of what was chosen")
    if ran == 0:
        raise ArgumentError("selection", "no case", "options that select at least one case")
    report.print_table(console, rows)
    whole = report.as_json(options, rows, found, seconds)
    for row in rows:
        for lines in row.failures[:3]:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if len(row.failures) > 3:
            console.print(
                f"... and {len(row.failures) - 3} more runs of {row.operation} {row.variant}"
            )
    verdict = f"{ran:,} runs, {whole['bytes']:,} bytes compared, {whole['mismatches']:,} mismatches"
    console.print(f"{verdict}, {seconds:.0f} s", style="red" if whole["mismatches"] else "green")
    if arguments.json:
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    if arguments.record:
        console.print(f"recorded in {report.write_record(arguments.record, whole)}")
    return 1 if whole["mismatches"] else 0


def targets(arguments: argparse.Namespace) -> int:
    """Prints the records of proof."""
    from rich.console import Console

    from dsv4num.verify import report

    report.print_targets(Console(width=120), report.proof_folder())
    return 0


def _check_writable(json_file: Path | None, record: Path | None) -> None:
    """A report that cannot be written is refused before the run, not after it."""
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise ArgumentError("--json", str(json_file), "a file in a folder that exists")
    if record is not None and record.exists() and not record.is_dir():
        raise ArgumentError("--record", str(record), "a folder")


def _choose_device(asked: str | None) -> str:
    """The device to run on; on a CPU the interpreter is chosen before triton is imported."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            raise UnsupportedError(f"verify needs {module}: pip install 'dsv4num[gpu]'")
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch sees no GPU here")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        # The interpreter computes with NumPy, which reports the overflows that clause 3 defines.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::RuntimeWarning")
        warnings.simplefilter("ignore", RuntimeWarning)
    return device
