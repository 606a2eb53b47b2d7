"""Whether the oracle gives the same bytes on NumPy's oldest and newest supported versions.

`python tools/try_numpy.py` builds one environment for each pair of a NumPy and an ml_dtypes, and runs
every quick case of `verify` through the reference in each: as NumPy comes, without the newest group of
CPU instructions that it would use here, and without any of them. It prints one line per run and returns
1 if a byte of an output differs anywhere.

`--digest` prints, as JSON, what one run gives: versions, and a hash of the inputs and of the outputs of
every operation. `--versions 2.2.0:0.5.1` tries others than the oldest and the newest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def digest() -> dict[str, Any]:
    """Versions, and per operation the hash of its inputs and that of its outputs."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import ml_dtypes
    import numpy as np
    from mutants import FILLS, run

    from dsv4num.verify.case import flat
    from dsv4num.verify.operations import OPERATIONS

    found: dict[str, Any] = {}
    for operation in OPERATIONS.values():
        given, got = hashlib.sha256(), hashlib.sha256()
        for variant in operation.variants:
            for case in operation.cases(variant, "quick", 0):
                for value in case.arguments.values():
                    if isinstance(value, np.ndarray):
                        given.update(flat(value).tobytes())
                for fill in FILLS if case.outputs else FILLS[:1]:
                    for output in run(operation, case, fill).values():
                        got.update(output.tobytes())
        found[operation.name] = {"inputs": given.hexdigest(), "outputs": got.hexdigest()}
    versions = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "instructions": dispatched(),
    }
    return {"versions": versions, "operations": found}


def dispatched() -> list[str]:
    """The groups of CPU instructions that NumPy chooses at run time and that this CPU has."""
    import numpy as np

    core = np._core._multiarray_umath
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]


def settings(groups: list[str]) -> Iterator[str]:
    """Values of NPY_DISABLE_CPU_FEATURES: nothing, the newest group, all of them (one may be all)."""
    yield ""
    yield " ".join(groups[-1:])
    yield " ".join(groups)


def run_in(python: str | Path, disabled: str) -> dict[str, Any]:
    """What `--digest` prints in another process."""
    command = [str(python), "-W", "ignore", __file__, "--digest"]
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}, without {disabled or 'nothing'}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def supported() -> list[str]:
    """The oldest versions that pyproject.toml allows, and the newest there are: "numpy:ml_dtypes"."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = []
    for package in ("numpy", "ml_dtypes"):
        found = re.search(rf'"{package}>=([\d.]+)"', text)
        assert found, f"pyproject.toml has no lower bound of {package}"
        oldest.append(found[1] if found[1].count(".") > 1 else found[1] + ".0")
    return [":".join(oldest), ":"]


def environment_of(folder: Path, pair: str) -> Path:
    """The Python of a new environment with those versions; an empty version is the newest."""
    numpy, ml_dtypes = pair.split(":")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    wanted = [
        f"{name}=={version}" if version else name
        for name, version in (("numpy", numpy), ("ml_dtypes", ml_dtypes))
    ]
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--upgrade",
    ]
    subprocess.run([*command, *wanted, "rich"], check=True)
    return python


def compare(found: list[dict[str, Any]]) -> list[str]:
    """One line for every operation whose bytes are not the same in all runs."""
    lines = []
    for name in found[0]["operations"]:
        for what in ("inputs", "outputs"):
            hashes = {run["operations"][name][what] for run in found}
            if len(hashes) > 1:
                lines.append(f"{name}: {len(hashes)} different {what}")
    return lines


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digest", action="store_true", help="print the hashes of one run as JSON")
    parser.add_argument("--versions", nargs="+", metavar="NUMPY:ML_DTYPES")
    options = parser.parse_args()
    if options.digest:
        print(json.dumps(digest()))
        return 0
    found = []
    for pair in options.versions or supported():
        with tempfile.TemporaryDirectory() as folder:
            python = environment_of(Path(folder), pair)
            first = run_in(python, "")
            for disabled in settings(first["versions"]["instructions"]):
                found.append(run_in(python, disabled) if disabled else first)
                versions = found[-1]["versions"]
                text = ", ".join(
                    f"{key} {versions[key]}" for key in ("python", "numpy", "ml_dtypes")
                )
                same = found[-1]["operations"] == found[0]["operations"]
                without = f", without {disabled}" if disabled else ""
                print(f"{text}{without}: {'the same bytes' if same else 'OTHER BYTES'}", flush=True)
    lines = compare(found)
    print(
        "\n".join(lines)
        or f"{len(found)} runs, {len(found[0]['operations'])} operations: one result"
    )
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
