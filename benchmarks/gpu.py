"""Times the kernels against the copy rate of the device.

    python benchmarks/gpu.py                                      # everything
    python benchmarks/gpu.py --op insert_v4 'gather_*' --size large
    python benchmarks/gpu.py --compare my_engine.kernels          # another module beside ours
    python benchmarks/gpu.py --op compress_hca --sweep rows=1,4 warps=1,2,4 columns=32,512
    python benchmarks/gpu.py --json run.json --plot run.png
    python benchmarks/gpu.py --from run.json --markdown           # a table of an earlier run
    python benchmarks/gpu.py --device cpu                         # tiny inputs, no figures

What is counted and how it is timed: RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# The checkout is what is measured, also where the package is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

#: What a sweep calls the fields of `Launch`.
FIELDS = {
    "rows": "rows",
    "warps": "num_warps",
    "num_warps": "num_warps",
    "columns": "columns",
    "path": "path",
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    assert __doc__
    summary, examples = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", nargs="+", metavar="NAME", help="names or patterns; all if absent")
    parser.add_argument("--size", choices=("large", "small", "all"), default="all")
    parser.add_argument("--list", action="store_true", help="names and sizes, nothing timed")
    parser.add_argument(
        "--compare", metavar="MODULE", help="times its operations of the same names"
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        metavar="FIELD=V,V",
        type=parse_choice,
        help="times every combination of rows, warps, columns, path; - is the built-in choice",
    )
    parser.add_argument(
        "--path", default="auto", choices=("auto", "native", "portable"), help="for all operations"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring, in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the run")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="reads a run")
    parser.add_argument("--markdown", action="store_true", help="prints Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws the run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--serial", action="store_true", help="compiles in this process only")
    return parser.parse_args(arguments)


def parse_choice(text: str) -> tuple[str, list[Any]]:
    """`rows=1,4` as the field of `Launch` and its values; `-` is the built-in choice."""
    name, _, values = text.partition("=")
    if name not in FIELDS or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(FIELDS)}, then =V,V")
    field = FIELDS[name]
    try:
        if field == "path":
            return field, values.split(",")
        return field, [None if value == "-" else int(value) for value in values.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def choose(patterns: list[str] | None, size: str) -> list[Any]:
    """The scenes that are asked for.

    Raises:
        SystemExit: none is.
    """
    from benchmarks.scenes import SCENES

    wanted = [scene for scene in SCENES if size in ("all", "small" if scene.small else "large")]
    if patterns:
        names = sorted({scene.name for scene in SCENES})
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in names):
                raise SystemExit(f"--op {pattern}: there is {', '.join(names)}")
        wanted = [s for s in wanted if any(fnmatch(s.name, pattern) for pattern in patterns)]
    if not wanted:
        raise SystemExit(f"no such operation has a {size} size")
    return wanted


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures what the options ask for."""
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from dataclasses import replace

    import torch

    from benchmarks import measure

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --device cpu runs tiny inputs in the interpreter")
    scenes = choose(options.op, options.size)
    if options.path != "auto":
        scenes = [replace(s, launch=replace(s.launch, path=options.path)) for s in scenes]
    launches = measure.launches_of({"path": [options.path]} | dict(options.sweep or []))
    other = importlib.import_module(options.compare) if options.compare else None
    tasks = [(s, launch) for s in scenes for launch in (launches if options.sweep else [s.launch])]

    clock = measure.Clock(options.device)
    share = options.seconds / (len(tasks) + 2)
    result: dict[str, Any] = {
        "format": 1,
        "environment": measure.environment(options.device),
        "seconds_per_scene": share,
    }
    if not clock.dry and not options.serial:
        result["compile_s"] = measure.compile_all(tasks)
        say(f"compiled {len(tasks)} in {result['compile_s']:.1f} s")
    result["baseline"] = measure.baseline(clock, 2 * share)
    rate = result["baseline"]["bytes_per_s"]
    if options.sweep:
        result["sweep"] = []
        for scene in scenes:
            result["sweep"] += measure.sweep(scene, launches, clock, share)
            measure.release()
        return result
    if other is not None:
        result["other"] = options.compare
    result["results"] = []
    for scene in scenes:
        row = measure.measure(scene, clock, share, other)
        result["results"].append(row)
        say(f"{scene.key}: {row['us']:.2f} us, {row['bytes'] / row['us'] * 1e6 / rate:.3f} of copy")
    return result


def say(text: str) -> None:
    """Progress, away from the tables."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    options = parse(arguments)
    if options.list:
        for scene in choose(options.op, options.size):
            print(f"{'small' if scene.small else 'large'}  {scene.key}")
        return 0
    start = time.perf_counter()
    if options.source:
        result = json.loads(options.source.read_text(encoding="utf-8"))
    else:
        result = run(options)
        result["wall_s"] = time.perf_counter() - start
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if "sweep" in result:
        report.show_sweep(result)
    elif options.markdown:
        print(report.markdown(result))
    else:
        report.show(result)
    if options.plot and "results" in result:
        report.draw(result, options.plot)
    if not options.source:
        say(f"{result['wall_s']:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
