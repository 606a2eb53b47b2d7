"""What a run found, for people and machines, and the committed record of proof."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import dsv4num
from dsv4num.errors import ArgumentError
from dsv4num.verify.rows import Row

if TYPE_CHECKING:  # the runner needs torch, and merging reports does not
    from dsv4num.verify.runner import Options

_PACKAGE = Path(dsv4num.__file__).parent

#: The architectures that the kernels are meant for.
ARCHITECTURES = (
    *("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1201"),
)


def source_hashes() -> dict[str, str]:
    """SHA-256 of every source that decides what a kernel writes: `formats/` and `gpu/`."""
    files = sorted([*_PACKAGE.glob("formats/*.py"), *_PACKAGE.glob("gpu/*.py")])
    return {path.relative_to(_PACKAGE).as_posix(): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment(device: str, *, kernels: bool = True) -> dict[str, str]:
    """Versions and the device in this run, of the kernels or of another implementation."""
    import torch

    from dsv4num.gpu._target import target_of

    on_cpu = device == "cpu" and not kernels
    found = {
        "dsv4num": dsv4num.__version__,
        "spec": dsv4num.SPEC_VERSION,
        "arch": "cpu" if on_cpu else target_of(torch.device(device)).name,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in ("numpy", "ml_dtypes", "torch", "triton"):
        found[package] = metadata.version(package)
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["driver"] = _driver()
    return found


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.splitlines()[0].strip()


def as_json(
    options: Options, rows: list[Row], found: dict[str, str], seconds: float
) -> dict[str, Any]:
    """The whole run as JSON."""
    names = {key: getattr(options, key) for key in ("operations", "variants", "cases", "paths")}
    return {
        "environment": found,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "level": options.level,
        "seed": options.seed,
        "shard": "{}/{}".format(*options.shard),
        "selection": {key: list(chosen) for key, chosen in names.items()},
        "sources": source_hashes(),
        "seconds": round(seconds, 1),
        "bytes": sum(row.bytes for row in rows),
        "mismatches": sum(row.mismatches for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def print_table(console: Console, rows: list[Row]) -> None:
    """One line per operation, variant and path that was run; then what was not offered."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("operation", "variant", "path"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "runs", "bytes", "mismatches", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.not_offered and not row.runs and not row.mismatches:
            continue
        style = "red" if row.mismatches else None
        numbers = (f"{row.cases}", f"{row.runs}", f"{row.bytes:,}", f"{row.mismatches:,}")
        table.add_row(
            row.operation, row.variant, row.path, *numbers, f"{row.seconds:.1f}", style=style
        )
    console.print(table)
    for line in not_offered(rows):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def not_offered(rows: list[Row]) -> list[str]:
    """One line per operation and reason, for all variants; operations of one reason share a line."""
    variants: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for reason in row.not_offered:
            name = f"some cases of {row.variant}" if row.cases else row.variant
            variants.setdefault((row.operation, reason), {})[name] = None
    operations: dict[tuple[str, str], list[str]] = {}
    for (operation, reason), names in variants.items():
        whole = set(names) == {row.variant for row in rows if row.operation == operation}
        key = (reason, "" if whole else ", ".join(names))
        operations.setdefault(key, []).append(operation)
    return [
        f"not offered: {', '.join(names)}{f' ({of})' if of else ''}: {reason}"
        for (reason, of), names in operations.items()
    ]


def is_whole(report: dict[str, Any]) -> bool:
    """Whether a report is of everything that its level has: no selection, no shard."""
    return report["shard"] == "0/1" and not any(report["selection"].values())


def record_name(environment: dict[str, str], level: str) -> str:
    """The file of a record: `<arch>.json`, or `<arch>.ptx.json` for PTX of an older architecture.

    The exhaustive level has other cases than the full one, and a file of its own:
    `<arch>.exhaustive.json`.
    """
    parts = [environment["ptx"], "ptx"] if "ptx" in environment else [environment["arch"]]
    return ".".join([*parts, *(["exhaustive"] if level == "exhaustive" else []), "json"])


def write_record(folder: Path, report: dict[str, Any]) -> Path:
    """Writes the record of proof of one architecture, `record_name`, and returns where it is.

    Raises:
        ArgumentError: a report of a part, or of another implementation.
    """
    if "implementation" in report["environment"]:
        raise ArgumentError("--record", "a run of another implementation", "a run of the kernels")
    if not is_whole(report):
        raise ArgumentError("--record", "a part of the cases", "a run of everything")
    same = ("date", "environment", "level", "seed", "seconds", "bytes", "mismatches", "sources")
    counts = ("operation", "variant", "path", "cases", "runs", "bytes", "mismatches")
    record = {
        **{key: report[key] for key in same},
        "ran": [{key: row[key] for key in counts} for row in report["rows"]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / record_name(report["environment"], report["level"])
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def proof_folder() -> Path:
    """Where a checkout keeps the records."""
    return _PACKAGE.parent / "proof"


def stale_sources(record: dict[str, Any]) -> list[str]:
    """The sources that changed, came or went since a record was written.

    A record about kernels is about all of `formats/` and `gpu/`. The one about the reference names the
    few files that it depends on, and only those count.
    """
    then = record["sources"]
    if any(name.startswith("gpu/") for name in then):
        now = source_hashes()
    else:
        now = {name: _sha256(_PACKAGE / name) for name in then if (_PACKAGE / name).is_file()}
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


#: What is said of an architecture that no record is about.
_UNKNOWN = "no record: not known to run, and not audited"
#: Why a file in `proof/` may be unreadable: it is written by hand, torn, or of another version.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)


def print_targets(console: Console, folder: Path) -> None:
    """How far every architecture is proven, the strongest statement first; then the reference."""
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in ARCHITECTURES}
    reference, broken = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if path.name == "reference.json":
                reference.append(_say_reference(record))
            elif path.name == "audit.json":
                for arch, of in record["targets"].items():
                    found.setdefault(arch, []).append((2, _say_audited(record, of)))
            else:
                arch = record["environment"].get("ptx") or record["environment"]["arch"]
                rank = 1 if "ptx" in record["environment"] else 0
                found.setdefault(arch, []).append((rank, _say_executed(record)))
        except _UNREADABLE as error:
            reason = escape(f"{type(error).__name__} {error}")
            broken.append(f"[red]{escape(path.name)}[/] is no record of proof: {reason}")
    if not any(found.values()) and not reference and not broken:
        console.print(f"no record of proof in {folder}")
    for arch, statements in found.items():
        console.print(f"[bold]{escape(arch)}[/]")
        _print_statements(console, [text for _, text in sorted(statements)] or [_UNKNOWN])
    if reference:
        console.print("[bold]reference[/]")
        _print_statements(console, reference)
    for text in broken:
        console.print(text)


def _print_statements(console: Console, statements: list[str]) -> None:
    """Statements of two lines, the second one indented more; what does not fit is too."""
    for text in statements:
        for indent, line in zip((2, 4), text.splitlines(), strict=False):
            console.print(Padding(line, (0, 0, 0, indent)))


def _say_executed(record: dict[str, Any]) -> str:
    """What a record of `verify` proves."""
    env = record["environment"]
    how = "interpreted on a CPU"
    if "gpu" in env:
        how = f"executed {'as PTX' if 'ptx' in env else 'on hardware'}: {env['gpu']}"
    paths = " and ".join(sorted({row["path"] for row in record["ran"]}))
    return (
        f"{escape(how)}, {record['date'][:10]}, triton {env['triton']}, torch {env['torch']}, "
        f"driver {env.get('driver', '-')}\n"
        f"level {record['level']}: {record['bytes']:,} bytes compared on the {paths} path, "
        f"{_count(record['mismatches'], 'mismatches')}, {record['seconds']:,.0f} s; {_state(record)}"
    )


def _say_audited(record: dict[str, Any], of: dict[str, Any]) -> str:
    """What the record of `audit` proves about one architecture."""
    env = record["environment"]
    counts = " and ".join(f"{of[path]:,} {path}" for path in ("native", "portable") if of[path])
    return (
        f"compiled and audited: {record['date'][:10]}, triton {env['triton']}, torch {env['torch']}\n"
        f"level {record['level']}: {counts or 'no'} specializations, "
        f"{_count(of['findings'], 'findings')}; {_state(record)}"
    )


def _say_reference(record: dict[str, Any]) -> str:
    """What the record of `tools/exhaust_reference.py` proves."""
    env = record["environment"]
    return (
        f"held to other oracles: {record['date'][:10]}, numpy {env['numpy']}, "
        f"ml_dtypes {env['ml_dtypes']}\n"
        f"every input of {len(record['found'])} functions: {record['inputs']:,} inputs, "
        f"{_count(record['mismatches'], 'mismatches')}, {record['seconds']:,.0f} s; {_state(record)}"
    )


def _count(number: int, what: str) -> str:
    """A number that should be 0."""
    return f"[red]{number:,} {what}[/]" if number else f"0 {what}"


def _state(record: dict[str, Any]) -> str:
    """Whether a record speaks of the sources that are here."""
    stale = stale_sources(record)
    if not stale:
        return "current"
    return f"[yellow]STALE[/]: changed since: {escape(', '.join(stale))}"
