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
from typing import Any

from rich.console import Console
from rich.table import Table

import dsv4num
from dsv4num.verify.runner import Options, Row

_PACKAGE = Path(dsv4num.__file__).parent


def source_hashes() -> dict[str, str]:
    """SHA-256 of every source that decides what a kernel writes: `formats/` and `gpu/`."""
    files = sorted([*_PACKAGE.glob("formats/*.py"), *_PACKAGE.glob("gpu/*.py")])
    return {
        str(path.relative_to(_PACKAGE).as_posix()): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def environment(device: str) -> dict[str, str]:
    """Versions and the device, as they were in this run."""
    import torch

    from dsv4num.gpu._target import target_of

    found = {
        "dsv4num": dsv4num.__version__,
        "spec": dsv4num.SPEC_VERSION,
        "arch": target_of(torch.device(device)).name,
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
    return {
        "environment": found,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "level": options.level,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "bytes": sum(row.bytes for row in rows),
        "mismatches": sum(row.mismatches for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def print_table(console: Console, rows: list[Row]) -> None:
    """One line per operation, variant and path."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("operation", "variant", "path"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "runs", "bytes", "mismatches", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row.mismatches else None
        numbers = (f"{row.cases}", f"{row.runs}", f"{row.bytes:,}", f"{row.mismatches:,}")
        table.add_row(
            row.operation, row.variant, row.path, *numbers, f"{row.seconds:.1f}", style=style
        )
    console.print(table)


def write_record(folder: Path, report: dict[str, Any]) -> Path:
    """Writes the record of proof of one architecture: `<folder>/<arch>.json`."""
    record = {
        **{key: report[key] for key in ("date", "environment", "level", "seed", "seconds")},
        "bytes": report["bytes"],
        "mismatches": report["mismatches"],
        "sources": source_hashes(),
        "ran": [
            {
                key: row[key]
                for key in ("operation", "variant", "path", "cases", "runs", "bytes", "mismatches")
            }
            for row in report["rows"]
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['environment']['arch']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def proof_folder() -> Path:
    """Where a checkout keeps the records."""
    return _PACKAGE.parent / "proof"


def stale_sources(record: dict[str, Any]) -> list[str]:
    """The sources that changed, came or went since a record was written."""
    then, now = record["sources"], source_hashes()
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def print_targets(console: Console, folder: Path) -> None:
    """Every record in the folder, with STALE where the sources have changed since."""
    records = sorted(folder.glob("*.json"))
    if not records:
        console.print(f"no record of proof in {folder}")
    for path in records:
        try:
            record = json.loads(path.read_text())
            env, stale = record["environment"], stale_sources(record)
        except (ValueError, KeyError, TypeError) as error:
            console.print(
                f"[red]{path.name}[/] is no record of proof: {type(error).__name__} {error}"
            )
            continue
        state = f"[yellow]STALE[/]: changed since: {', '.join(stale)}" if stale else "current"
        where = f"executed on {env['gpu']}" if "gpu" in env else "interpreted on a CPU"
        console.print(
            f"[bold]{env['arch']}[/]  {where}, {record['date'][:10]}, "
            f"triton {env['triton']}, torch {env['torch']}, driver {env.get('driver', '-')}"
        )
        paths = sorted({row["path"] for row in record["ran"]})
        console.print(
            f"  level {record['level']}: {record['bytes']:,} bytes compared on the "
            f"{' and '.join(paths)} path, {record['mismatches']} mismatches; {state}"
        )
