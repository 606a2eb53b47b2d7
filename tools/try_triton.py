"""Whether the kernels give the oracle's bytes, and compile as they must, on each supported Triton.

    python tools/try_triton.py [--versions 3.6.0 3.9.0] [--op NAME ...]

Builds one environment per version, with the torch of constraints.txt, and runs in each: `verify` at
level quick in the interpreter, `audit` for one target of each kind, and the tests of the kernels.
Prints one line per run, with the versions that were really there, and returns 1 if any fails. On a GPU
machine `verify` with the Triton that is there says more; `dsv4num targets` tells which that was.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The oldest and the newest that the package supports.
VERSIONS = ("3.6.0", "3.9.0")
#: NVIDIA without and with the native path; AMD with waves of 64 and of 32.
TARGETS = ("sm_80", "sm_90", "gfx942", "gfx1201")
KERNEL_TESTS = ("scalar", "arithmetic", "paged_cache", "compressor", "sparse_index")


def build(folder: Path, version: str) -> Path:
    """An environment with this Triton; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
    assert torch
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, torch[0]], check=True)
    # torch names the Triton that it was built with; another one serves the kernels as well.
    others = ("numpy", "ml_dtypes", "scipy", "rich", "pytest", "hypothesis", "mpmath")
    subprocess.run([*install, f"triton=={version}", *others], check=True)
    return python


def attempts(operations: list[str]) -> dict[str, list[str]]:
    """What is run, by name."""
    chosen = [word for name in operations for word in ("--op", name)]
    targets = [word for name in TARGETS for word in ("--arch", name)]
    tests = [f"tests/test_gpu_{name}.py" for name in KERNEL_TESTS]
    return {
        "verify": ["-m", "dsv4num", "verify", "--device", "cpu", *chosen],
        "audit": ["-m", "dsv4num", "audit", *chosen, *targets],
        "tests": ["-m", "pytest", "-p", "no:cacheprovider", *tests],
    }


def main() -> int:
    """Tries every version; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--op", nargs="+", default=[], help="only these operations in verify")
    options = parser.parse_args()
    failed = 0
    for version in options.versions:
        with tempfile.TemporaryDirectory(prefix="dsv4num-triton-") as folder:
            python = build(Path(folder), version)
            say = "import torch, triton; print(torch.__version__, triton.__version__)"
            found = subprocess.run(
                [str(python), "-c", say], capture_output=True, text=True, check=True
            )
            for name, arguments in attempts(options.op).items():
                began = time.perf_counter()
                done = subprocess.run(
                    [str(python), *arguments],
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(ROOT),
                        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                    },
                    capture_output=True,
                    text=True,
                    check=False,
                )
                lines = [
                    line
                    for line in done.stdout.splitlines()
                    if re.search(r"\d+ (runs|of|passed)", line)
                ]
                last = (
                    lines[-1] if lines else (done.stderr.strip().splitlines() or ["no output"])[-1]
                )
                failed += done.returncode != 0
                verdict = "FAILED" if done.returncode else "ok"
                seconds = time.perf_counter() - began
                print(
                    f"torch, triton {found.stdout.strip()}: {name} {verdict}, {seconds:.0f} s: {last}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
