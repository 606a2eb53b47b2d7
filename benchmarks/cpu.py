"""Times the oracle against plain NumPy on one thread, with the memory that it takes.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --op 'insert_*' --rows 8192 --json cpu.json
    python benchmarks/cpu.py --op insert_v4 --profile             # where the time goes

The yardstick of insert and gather is a bare `astype(ml_dtypes.float8_e4m3fn)` of as many bf16 values;
of the compressor, a softmax pool with `np.exp` over the same states, read from the same state cache.
Neither gives the bytes that are promised: the share says what the promise costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# Before NumPy is imported: what it links may start threads.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The checkout is what is measured, also where the package is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dsv4num import __version__, reference
from dsv4num.formats import LAYOUTS

Timed = Callable[[], object]
PAGE = 64
E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Pair:
    """The oracle's call and its yardstick.

    Attributes:
        name: what `--op` selects.
        values: elements that are converted, or state elements that are pooled.
        oracle: the call.
        plain: the yardstick.
        goal: the share of the yardstick's speed to reach.
    """

    name: str
    values: int
    oracle: Timed
    plain: Timed
    goal: float


def insert_pair(layout: str, rows: int) -> Pair:
    """Insert of rows into random slots."""
    rng = np.random.default_rng(0)
    chosen = LAYOUTS[layout]
    k = rng.standard_normal((rows, chosen.head_dim), np.float32).astype(ml_dtypes.bfloat16)
    pages = -(-rows // PAGE)
    cache = np.zeros((pages, chosen.page_bytes(PAGE)), np.uint8)
    slots = rng.permutation(pages * PAGE)[:rows]

    def oracle() -> None:
        reference.quantize_and_insert_k_cache(k, cache, slots, PAGE, layout=layout)

    return Pair(f"insert_{layout}", k.size, oracle, lambda: k.astype(E4M3), 1 / 3)


def gather_pair(layout: str, rows: int) -> Pair:
    """Gather of one sequence whose pages are scattered."""
    rng = np.random.default_rng(0)
    chosen = LAYOUTS[layout]
    k = rng.standard_normal((rows, chosen.head_dim), np.float32).astype(ml_dtypes.bfloat16)
    pages = -(-rows // PAGE)
    cache = np.zeros((pages, chosen.page_bytes(PAGE)), np.uint8)
    slots = np.arange(rows)
    reference.quantize_and_insert_k_cache(k, cache, slots, PAGE, layout=layout)
    out = np.zeros((1, rows, chosen.head_dim), ml_dtypes.bfloat16)
    table = rng.permutation(pages).astype(np.int32)[None]
    lengths = np.array([rows], np.int32)

    def oracle() -> None:
        reference.dequantize_and_gather_k_cache(
            out, cache, lengths, None, table, PAGE, 0, layout=layout
        )

    return Pair(f"gather_{layout}", k.size, oracle, lambda: k.astype(E4M3), 1 / 3)


def compress_pair(name: str, layout: str, ratio: int, overlap: bool, tokens: int) -> Pair:
    """The compressor on one prompt."""
    rng = np.random.default_rng(0)
    chosen = LAYOUTS[layout]
    dim, lanes = chosen.head_dim, 2 if overlap else 1
    width, window, rows = dim * lanes, ratio * lanes, 4 if overlap else 8
    blocks = -(-tokens // rows)
    state = rng.standard_normal((blocks, rows, 2 * width), np.float32)
    table = rng.permutation(blocks).astype(np.int32)[None]
    positions = np.arange(tokens)
    ends = positions[(positions + 1) % ratio == 0]
    kv_slots = np.full(tokens, -1)
    kv_slots[ends] = np.arange(len(ends))
    cache = np.zeros((-(-len(ends) // PAGE), PAGE, chosen.row_bytes), np.uint8)
    cos = reference.build_cos_sin_cache(tokens)
    weight = rng.standard_normal(dim, np.float32)
    requests = np.zeros(tokens, np.int32)

    def oracle() -> None:
        reference.compress_norm_rope_store(
            state,
            requests,
            positions,
            positions,
            table,
            cos,
            cache,
            kv_slots,
            weight,
            1e-6,
            compress_ratio=ratio,
            overlap=overlap,
            layout=layout,
        )

    at = ends[:, None] + np.arange(1 - window, 1)
    present = at >= 0
    safe = np.where(present, at, 0)
    block, row = table[0, safe // rows], safe % rows

    def read(first: int) -> NDArray[np.float32]:
        parts = [
            state[block[:, part], row[:, part], first + lane * dim : first + (lane + 1) * dim]
            for lane, part in enumerate((slice(0, ratio), slice(ratio, None))[:lanes])
        ]
        return np.concatenate(parts, axis=1)

    def plain() -> NDArray[np.float32]:
        kv = read(0)
        score = np.where(present[..., None], read(width), np.float32(-np.inf))
        weights = np.exp(score - score.max(1, keepdims=True))
        pooled: NDArray[np.float32] = (weights * kv).sum(1) / weights.sum(1)
        return pooled

    return Pair(name, len(ends) * window * dim, oracle, plain, 1 / 4)


def pairs(rows: int) -> dict[str, Callable[[], Pair]]:
    """Every pair by its name, made when it is wanted."""
    found: dict[str, Callable[[], Pair]] = {}
    for layout in ("v4", "v41_mxfp8", "v41_nvfp4"):
        found[f"insert_{layout}"] = lambda layout=layout: insert_pair(layout, rows)
        found[f"gather_{layout}"] = lambda layout=layout: gather_pair(layout, rows)
    for name, layout, ratio, overlap in (
        ("compress_csa", "v4", 4, True),
        ("compress_hca", "v4", 128, False),
        ("compress_indexer_fp8", "indexer_fp8", 4, True),
        ("compress_indexer_mxfp4", "indexer_mxfp4", 4, True),
    ):
        found[name] = lambda name=name, layout=layout, ratio=ratio, overlap=overlap: compress_pair(
            name, layout, ratio, overlap, max(rows // 4, ratio)
        )
    return found


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Times both in turn, so that both meet the same machine, and the oracle's peak memory.

    CPU time of this thread, not wall time: what else runs there does not count.
    """
    pair.oracle()  # tables and page faults
    pair.plain()
    times = np.array([[_cpu(pair.oracle), _cpu(pair.plain)] for _ in range(repeats)])
    oracle, plain = np.median(times, axis=0)
    tracemalloc.start()
    pair.oracle()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "name": pair.name,
        "values": pair.values,
        "oracle_s": float(oracle),
        "plain_s": float(plain),
        "share": float(plain / oracle),
        "goal": pair.goal,
        "peak_bytes": peak,
    }


def _cpu(call: Timed) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    assert __doc__
    summary, examples = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", nargs="+", metavar="NAME", help="names or patterns; all if absent")
    parser.add_argument("--rows", type=int, default=16384, help="rows; a quarter as many tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures")
    parser.add_argument("--markdown", action="store_true", help="prints Markdown")
    parser.add_argument("--profile", action="store_true", help="shows where the oracle's time goes")
    options = parser.parse_args(arguments)
    known = pairs(options.rows)
    wanted = [n for n in known if any(fnmatch(n, p) for p in options.op or ["*"])]
    if not wanted:
        raise SystemExit(f"--op {' '.join(options.op)}: there is {', '.join(known)}")

    rows = []
    for name in wanted:
        pair = known[name]()
        rows.append(measure(pair, options.repeats))
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(pair.oracle)
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
    found = {
        "format": 1,
        "environment": {
            "dsv4num": __version__,
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "python": sys.version.split()[0],
            "cpu": _cpu_name(),
        },
        "rows": options.rows,
        "results": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        print(markdown(found))
    else:
        show(found)
    return 0


def cells(found: dict[str, Any]) -> list[list[str]]:
    """The table, its head first."""
    lines = [["operation", "values", "oracle ms", "plain ms", "share", "goal", "peak MB"]]
    for row in found["results"]:
        lines.append(
            [
                row["name"],
                f"{row['values']:,}",
                f"{1e3 * row['oracle_s']:.1f}",
                f"{1e3 * row['plain_s']:.1f}",
                f"{row['share']:.2f}",
                f"{row['goal']:.2f}{'' if row['share'] >= row['goal'] else ' !'}",
                f"{row['peak_bytes'] / 1e6:.0f}",
            ]
        )
    return lines


def markdown(found: dict[str, Any]) -> str:
    """The table for RESULTS.md."""
    head, *lines = cells(found)
    rule = [" --- ", *[" ---: "] * (len(head) - 1)]
    texts = [_where(found), "", f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*texts, *(f"| {' | '.join(line)} |" for line in lines)])


def show(found: dict[str, Any]) -> None:
    """The table on the terminal."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_where(found), soft_wrap=True, highlight=False)
    head, *lines = cells(found)
    table = Table(box=None, header_style="bold")
    for column in head:
        table.add_column(column, justify="left" if column == "operation" else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table, highlight=False)


def _where(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found["environment"].items()) + "."


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    raise SystemExit(main())
