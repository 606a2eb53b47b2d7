"""Runs `verify` under NVIDIA's compute-sanitizer: no access outside a tensor, no race in shared memory.

    python -m tools.sanitize [--tool memcheck racecheck] [--level quick] [--jobs N]

Every operation and variant is a process of its own under every tool: the sanitizer slows a process
down and holds memory. Kernels that are in Triton's cache are not compiled again: run `verify`
first. The exit code is 0 if every process ended well and the sanitizer counted no error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

#: Operations whose variants are small enough for one process.
TOGETHER = (
    *("encode", "decode", "pack", "unpack", "encode_scale", "quantize", "dequantize"),
    *("exp32", "tree_sum", "inv_rms", "rms_norm", "round_bf16", "rotate_gptj"),
    *("save_partial_states", "compute_global_topk_indices_and_lens", "combine_topk_swa_indices"),
)
#: What the sanitizer says at the end, whichever tool it is.
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:error|hazard)")


def selections() -> list[list[str]]:
    """The options of `verify` for each process, the longest first."""
    from dsv4num.verify.operations import OPERATIONS

    chosen = []
    for operation in reversed(OPERATIONS.values()):
        if operation.name in TOGETHER:
            chosen.append(["--op", operation.name])
        else:
            chosen += [["--op", operation.name, "--variant", v] for v in operation.variants]
    return chosen


def sanitize(tool: str, level: str, selection: list[str], gpu: int) -> tuple[bool, str]:
    """One process: whether it is clean, and a line about it."""
    command = [
        *(
            "compute-sanitizer",
            "--tool",
            tool,
            "--target-processes",
            "all",
            "--error-exitcode",
            "9",
        ),
        *(sys.executable, "-m", "dsv4num", "verify", "--device", "cuda", "--jobs", "1"),
        *("--level", level, *selection),
    ]
    began = time.perf_counter()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    output = done.stdout + done.stderr
    counts = SUMMARY.findall(output)
    runs = re.findall(r"([\d,]+ runs, [\d,]+ bytes compared, [\d,]+ mismatches)", output)
    clean = done.returncode == 0 and bool(runs) and bool(counts) and not any(map(int, counts))
    found = (
        f"{'+'.join(counts) or 'no summary'} errors, {runs[0] if runs else 'verify did not end'}"
    )
    line = f"{tool} {' '.join(selection[1::2])}: {found}, {time.perf_counter() - began:.0f} s"
    if not clean:
        line += "\n" + "\n".join(output.splitlines()[-25:])
    return clean, line


def main() -> int:
    """Runs everything; 0 if all is clean."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--log", type=Path, metavar="FILE", help="a line for every process")
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print(
            "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr
        )
        return 2
    tasks = [(tool, options.level, chosen) for chosen in selections() for tool in options.tool]
    gpus = torch.cuda.device_count()
    bad = 0
    lines = []
    with ThreadPoolExecutor(options.jobs) as pool:
        spread = enumerate(tasks)
        for clean, line in pool.map(lambda at: sanitize(*at[1], at[0] % gpus), spread):
            bad += not clean
            lines.append(line)
            print(line, flush=True)
    print(f"{len(tasks)} processes, {bad} not clean")
    if options.log:
        options.log.write_text(
            "\n".join([*lines, f"{len(tasks)} processes, {bad} not clean"]) + "\n"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
