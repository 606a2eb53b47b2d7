"""Spreads `verify` over the GPUs of one machine: a process for each, with a shard for each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dsv4num
from dsv4num.errors import ArgumentError, UnsupportedError
from dsv4num.verify.merge import Report, merge, read_report


def choose_devices(asked: str, count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES shall be for each chosen GPU.

    Args:
        asked: "all", or indices such as "0,2", as torch counts the visible GPUs.
        count: how many torch sees.

    Raises:
        ArgumentError: not "all" and not a list of different indices below `count`.
        UnsupportedError: there is no GPU.
    """
    if count == 0:
        raise UnsupportedError("--devices: torch sees no GPU here")
    parts = [str(index) for index in range(count)] if asked == "all" else asked.split(",")
    chosen = [int(part) if part.isdecimal() else count for part in parts]
    if max(chosen) >= count or len(set(chosen)) != len(chosen):
        raise ArgumentError(
            "--devices", repr(asked), f"all, or different numbers of 0..{count - 1}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return [names[index] for index in chosen]


def run_on_devices(
    names: Sequence[str],
    options: Sequence[str],
    shard: tuple[int, int],
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs `verify` once for each device and joins the reports.

    Args:
        names: for each process what CUDA_VISIBLE_DEVICES is.
        options: of `verify`, without those about shards, devices and reports.
        shard: what is split among the devices; (0, 1) for everything.
        progress: called with each device that has ended.

    Raises:
        UnsupportedError: a process that did not write its report; the others are stopped.
    """
    index, shards = shard
    root = str(Path(dsv4num.__file__).parent.parent)  # the children run this very package
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="dsv4num-") as folder:
        running: dict[int, subprocess.Popen[bytes]] = {}
        files = [Path(folder) / f"{number}.json" for number in range(len(names))]
        try:
            for number, name in enumerate(names):
                part = f"{index + shards * number}/{shards * len(names)}"
                command = [sys.executable, "-m", "dsv4num", "verify", *options]
                with files[number].with_suffix(".err").open("wb") as errors:
                    running[number] = subprocess.Popen(
                        [*command, "--shard", part, "--json", str(files[number])],
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        env={**os.environ, "CUDA_VISIBLE_DEVICES": name, "PYTHONPATH": search},
                    )
            while running:
                ended = [
                    number for number, process in running.items() if process.poll() is not None
                ]
                for number in ended:
                    code = running.pop(number).returncode
                    if code not in (0, 1) or not files[number].exists():
                        said = files[number].with_suffix(".err").read_text(errors="replace")
                        last = (said.strip().splitlines() or ["no message"])[-1]
                        raise UnsupportedError(f"device {names[number]}: exit code {code}: {last}")
                    progress(f"device {names[number]}")
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
        reports = {
            f"device {names[number]}": read_report(file) for number, file in enumerate(files)
        }
    return merge(reports, shard)
