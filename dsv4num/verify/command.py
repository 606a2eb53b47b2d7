"""The commands `verify`, `report` and `targets`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4num.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:  # the command line works where torch and rich are not
    from rich.console import Console

    from dsv4num.verify.merge import Report
    from dsv4num.verify.runner import Options

#: Columns of the table.
_WIDTH = 120


def add_verify(subparsers: Any) -> None:
    """Adds the `verify` command to a command line."""
    parser = subparsers.add_parser("verify", help="hold the kernels to the oracle, byte for byte")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="cuda if there is a GPU, else cpu"
    )
    parser.add_argument("--level", choices=("quick", "full", "exhaustive"), default="quick")
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
    parser.add_argument(
        "--shard", metavar="I/N", help="only the part I of N, counted from 0: $RANK/$WORLD_SIZE"
    )
    parser.add_argument(
        "--devices", metavar="LIST", help="a process for each local GPU: all, or as in 0,2"
    )
    parser.add_argument(
        "--ptx",
        metavar="LIST",
        default="",
        help="run what is generated for older targets, compiled by the driver: sm_80,sm_89",
    )
    parser.add_argument(
        "--impl", metavar="MODULE[:PREFIX]", help="another implementation, in place of the kernels"
    )
    parser.add_argument(
        "--arrays",
        choices=("torch", "numpy"),
        help="what it takes (default: what it says, or torch)",
    )
    parser.add_argument(
        "--profile", metavar="FILE.toml|NAME", help="the contract that --impl declares"
    )
    parser.add_argument(
        "--profiles", action="store_true", help="list profiles and dialects, and run nothing"
    )
    _add_outputs(parser)
    parser.set_defaults(func=verify)


def add_report(subparsers: Any) -> None:
    """Adds the `report` command to a command line."""
    parser = subparsers.add_parser("report", help="join the reports of the shards of one run")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    action = actions.add_parser("merge", help="join reports; fails as `verify` does")
    action.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of verify --json")
    _add_outputs(action)
    action.set_defaults(func=merge_reports)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write FOLDER/<arch>.json")


def add_targets(subparsers: Any) -> None:
    """Adds the `targets` command to a command line."""
    parser = subparsers.add_parser("targets", help="how far each architecture is proven")
    parser.set_defaults(func=targets)


def verify(arguments: argparse.Namespace) -> int:
    """Runs the cases; 0 only if nothing differs."""
    if arguments.profiles:
        return _list_profiles()
    device = _choose_device(arguments.device or ("cpu" if arguments.arrays == "numpy" else None))

    from dsv4num.verify.merge import parse_shard
    from dsv4num.verify.runner import Options

    if arguments.impl is not None:
        device = _check_implementation(arguments, device)

    at_once = 16 if arguments.level == "exhaustive" else 8  # there the oracle is what takes time
    options = Options(
        device=device,
        level=arguments.level,
        operations=tuple(arguments.op),
        variants=(*arguments.layout, *arguments.variant),
        cases=tuple(arguments.case),
        paths=tuple(arguments.path),
        seed=arguments.seed,
        jobs=arguments.jobs or min(os.cpu_count() or 1, at_once),
        shard=parse_shard(arguments.shard) if arguments.shard is not None else (0, 1),
        implementation=arguments.impl or "",
        arrays=arguments.arrays or "",
        profile=arguments.profile or "",
    )
    _check_options(arguments, options)
    code = 0
    for ptx in arguments.ptx.split(","):
        code |= _verify_one(_console(), arguments, replace(options, ptx=ptx))
    return code


def _verify_one(console: Console, arguments: argparse.Namespace, options: Options) -> int:
    """One run, of the device's own code or of one older target's; its exit code."""
    if arguments.devices is not None:
        whole = _run_on_devices(console, arguments, options)
    else:
        whole = _run_here(console, options)
    return _conclude(console, whole, arguments.json, arguments.record)


def _list_profiles() -> int:
    """Prints the named profiles, and every dialect that a profile may name."""
    from dsv4num.explain.dialects import DIALECTS
    from dsv4num.formats import LAYOUTS
    from dsv4num.verify.profile import load_profile, named_profiles

    for name in named_profiles():
        print(f"{name}: {load_profile(name).about}")
    print()
    for dialect in DIALECTS.values():
        # Some are of layouts in the wild alone, which the operations are not verified over.
        for layout in [layout for layout in LAYOUTS.values() if dialect.suits(layout)][:1]:
            print(f"{dialect.name}: {dialect.describe(layout)}")
    return 0


def _check_implementation(arguments: argparse.Namespace, device: str) -> str:
    """Refuses what does not apply to another implementation; the device that it runs on."""
    from dsv4num.verify.implementation import load_implementation
    from dsv4num.verify.profile import load_profile

    for option in ("path", "ptx", "record"):
        if getattr(arguments, option):
            given = "given with --impl"
            raise ArgumentError(f"--{option}", given, "only for the kernels of this package")
    found = load_implementation(arguments.impl, arguments.arrays or "")
    if arguments.profile is not None:
        load_profile(arguments.profile)
    if found.arrays == "torch":
        return device
    if arguments.device == "cuda":
        raise ArgumentError("--device", "cuda, for an implementation on NumPy arrays", "cpu")
    return "cpu"


def merge_reports(arguments: argparse.Namespace) -> int:
    """Joins reports; 0 only if nothing differs."""
    from dsv4num.verify.merge import merge, read_report

    _check_writable(arguments.json, arguments.record)
    whole = merge({str(path): read_report(path) for path in _each_once(arguments.files)})
    console = _console()
    _print_environment(console, whole["environment"])
    return _conclude(console, whole, arguments.json, arguments.record)


def _each_once(files: list[Path]) -> list[Path]:
    """The files, which may not be named twice."""
    for path in files:
        if files.count(path) > 1:
            raise ArgumentError("FILE", f"{path} twice", "each report once")
    return files


def _check_options(arguments: argparse.Namespace, options: Options) -> None:
    """Refuses what could only fail later, or prove nothing."""
    from dsv4num.verify.operations import OPERATIONS
    from dsv4num.verify.runner import selected

    for option in ("arrays", "profile"):
        if getattr(arguments, option) is not None and arguments.impl is None:
            raise ArgumentError(f"--{option}", "given without --impl", "only with --impl")
    known = {variant for operation in OPERATIONS.values() for variant in operation.variants}
    for name in arguments.op:
        if name not in OPERATIONS:
            raise ArgumentError("--op", repr(name), ", ".join(OPERATIONS))
    for option, names in (("--layout", arguments.layout), ("--variant", arguments.variant)):
        for name in names:
            if name not in known:
                raise ArgumentError(option, repr(name), ", ".join(sorted(known)))
    if arguments.seed < 0:
        raise ArgumentError("--seed", arguments.seed, "0 or more")
    if arguments.jobs < 0:
        raise ArgumentError("--jobs", arguments.jobs, "0 (by the machine) or more")
    pairs = list(selected(options))
    for name in arguments.op:
        if name not in {operation.name for operation, _ in pairs}:
            allowed = f"an operation that has the chosen variants at level {options.level}"
            raise ArgumentError("--op", repr(name), allowed)
    for name in options.variants:
        if name not in {variant for _, variant in pairs}:
            raise ArgumentError("--variant", repr(name), "a variant of the chosen operations")
    _check_writable(arguments.json, arguments.record)
    _check_ptx(arguments, options)
    chosen = (options.operations, options.variants, options.cases, options.paths)
    if arguments.record and (any(chosen) or options.shard != (0, 1)):
        raise ArgumentError("--record", "a part of the cases", "a run of everything")
    if options.device == "cpu":
        if arguments.devices is not None:
            raise UnsupportedError("--devices: there is no GPU in use")
        if options.level == "exhaustive" and options.shard == (0, 1) and not options.cases:
            raise UnsupportedError(
                "--level exhaustive: without a GPU it takes days; choose a part of it with --shard "
                "or --case"
            )


def _check_ptx(arguments: argparse.Namespace, options: Options) -> None:
    """Refuses targets that the device cannot run."""
    names = arguments.ptx.split(",") if arguments.ptx else []
    if not names:
        return
    if options.device == "cpu":
        raise UnsupportedError("--ptx: there is no GPU in use")
    from dsv4num.verify.ptx import runnable

    allowed = runnable()
    for name in names:
        if name not in allowed or names.count(name) > 1:
            raise ArgumentError(
                "--ptx", repr(arguments.ptx), f"different ones of {', '.join(allowed)}"
            )
    if len(names) > 1 and arguments.json is not None:
        raise ArgumentError("--json", f"one file for {len(names)} targets", "one target at a time")


def _run_here(console: Console, options: Options) -> Report:
    """Runs in this process and the processes that it starts."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dsv4num.verify import report
    from dsv4num.verify.runner import run, tasks

    found = report.environment(options.device, kernels=not options.implementation)
    if options.ptx:
        found["ptx"] = options.ptx
    found |= _described(options)
    _print_environment(console, found)
    if options.device == "cpu" and not options.implementation:
        console.print("no GPU: the portable path runs in Triton's interpreter", style="yellow")
    began = time.perf_counter()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=len(tasks(options)))
        rows = run(options, lambda text: bar.update(task, description=text, advance=1))
    return report.as_json(options, rows, found, time.perf_counter() - began)


def _described(options: Options) -> dict[str, str]:
    """What is judged, and by which contract, where it is not the kernels and the oracle's."""
    from dsv4num.verify.implementation import described, load_implementation

    if not options.implementation:
        return {}
    found = load_implementation(options.implementation, options.arrays)
    entries = {
        "implementation": described(options.implementation, found),
        "arrays": found.arrays,
        "profile": options.profile,
    }
    return {name: text for name, text in entries.items() if text}


def _run_on_devices(console: Console, arguments: argparse.Namespace, options: Options) -> Report:
    """Runs one process for each GPU."""
    import torch

    from dsv4num.verify.devices import choose_devices, run_on_devices

    devices = choose_devices(arguments.devices, torch.cuda.device_count())
    jobs = arguments.jobs or max(1, min(options.jobs, (os.cpu_count() or 1) // len(devices)))
    command = ["--device", options.device, "--level", options.level, "--jobs", str(jobs)]
    command += ["--seed", str(options.seed)]
    for option, names in (
        ("--op", options.operations),
        ("--variant", options.variants),
        ("--case", options.cases),
        ("--path", options.paths),
    ):
        command += [word for name in names for word in (option, name)]
    for option, value in (
        ("--ptx", options.ptx),
        ("--impl", options.implementation),
        ("--arrays", options.arrays),
        ("--profile", options.profile),
    ):
        command += [option, value] if value else []
    console.print(f"{len(devices)} devices, {jobs} processes each", highlight=False)
    began = time.perf_counter()
    whole = run_on_devices(
        devices, command, options.shard, lambda text: console.print(f"{text} has ended")
    )
    whole["seconds"] = round(time.perf_counter() - began, 1)
    _print_environment(console, whole["environment"])
    return whole


def _conclude(console: Console, whole: Report, json_file: Path | None, record: Path | None) -> int:
    """Prints and writes a report; the exit code."""
    from dsv4num.verify import report
    from dsv4num.verify.rows import Row

    rows = [Row(**row) for row in whole["rows"]]
    ran = sum(row.runs for row in rows)
    if whole["shard"] == "0/1":  # a shard may have nothing to do
        for name in whole["selection"]["cases"]:
            if ran and not any(name in row.names or row.not_offered for row in rows):
                raise ArgumentError("--case", repr(name), "a case of what was chosen")
        if ran == 0 and whole["mismatches"] == 0:
            for line in report.not_offered(rows):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            raise ArgumentError("selection", "no case", "options that select at least one case")
    report.print_table(console, rows)
    for row in rows:
        for lines in row.failures[:3]:
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if len(row.failures) > 3:
            console.print(
                f"... and {len(row.failures) - 3} more runs of {row.operation} {row.variant}"
            )
    verdict = f"{ran:,} runs, {whole['bytes']:,} bytes compared, {whole['mismatches']:,} mismatches"
    if whole["shard"] != "0/1":
        verdict = f"shard {whole['shard']}: {verdict}"
    style = "red" if whole["mismatches"] else "green"
    console.print(f"{verdict}, {whole['seconds']:.0f} s", style=style)
    if record:
        path = report.write_record(record, whole)
    if json_file:
        json_file.write_text(json.dumps(whole, indent=1) + "\n")
    if record:
        console.print(f"recorded in {path}")
    return 1 if whole["mismatches"] else 0


def _console() -> Console:
    """A console that rather wraps than cuts."""
    from rich.console import Console

    console = Console()
    return console if console.width >= _WIDTH else Console(width=_WIDTH)


def _print_environment(console: Console, found: dict[str, str]) -> None:
    console.print("  ".join(f"{key} {value}" for key, value in found.items()), highlight=False)


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
