"""Tables and the picture of a run, from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Run = dict[str, Any]


def rate(run: Run, row: Run, us: float) -> float:
    """The share of the copy rate of the same run."""
    return float(row["bytes"] / us * 1e6 / run["baseline"]["bytes_per_s"])


def above_empty(run: Run, row: Run, us: float) -> float:
    """Microseconds above an empty kernel and the time of the bytes at the copy rate."""
    own = row["bytes"] / run["baseline"]["bytes_per_s"] * 1e6
    return float(us - run["baseline"]["empty_us"] - own)


def reached(run: Run, row: Run) -> bool | None:
    """Whether a goal is reached; None where there is none."""
    if row["goal"] is None:
        return None
    if row["in_all"]:
        return bool(row["us"] <= row["goal"])
    if row["small"]:
        return bool(above_empty(run, row, row["us"]) <= row["goal"])
    return bool(rate(run, row, row["us"]) >= row["goal"])


def goal_place(run: Run, row: Run) -> float:
    """Where a goal lies on the axis of its figure: a share, or microseconds in all."""
    if row["small"] and not row["in_all"]:
        return float(row["goal"] - above_empty(run, row, 0.0))
    return float(row["goal"])


def head(run: Run) -> str:
    """One paragraph on where the figures come from."""
    where, base = run["environment"], run["baseline"]
    clocks = where.get("clocks") or {}
    text = ", ".join(f"{name} {value}" for name, value in clocks.items())
    parts = [
        f"{where['device']} ({where['architecture']}), torch {where['torch']}, triton "
        f"{where['triton']}, dsv4num {where['dsv4num']}{', ' + text if text else ''}.",
        f"Copy {base['bytes_per_s'] / 1e12:.3f} TB/s, empty kernel {base['empty_us']:.2f} us.",
    ]
    if where["dry"]:
        parts.insert(0, "DRY RUN: tiny inputs in the interpreter, the times mean nothing.")
    return " ".join(parts)


def _large_cells(run: Run) -> tuple[list[str], list[list[str]]]:
    other = "other" in run
    columns = ["operation", "size", "MB", "us", "p10..p90"]
    columns += ["TB/s", "share", "goal", "of copy", "eager"]
    columns += ["other us", "other share"] if other else []
    lines = []
    for row in run["results"]:
        if row["small"]:
            continue
        goal = ""
        if row["goal"] is not None:
            goal = f"{row['goal']:.2f}{'' if reached(run, row) else ' !'}"
        line = [
            row["name"],
            row["size"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['us']:.1f}",
            f"{row['p10_us']:.1f}..{row['p90_us']:.1f}",
            f"{row['bytes'] / row['us'] / 1e6:.2f}",
            f"{rate(run, row, row['us']):.3f}",
            goal,
            f"{row['copy_us'] / row['us']:.2f}",
            f"{row['eager_us']:.0f}",
        ]
        if other:
            line += _other(run, row, lambda us, row=row: f"{rate(run, row, us):.3f}")
        lines.append(line)
    return columns, lines


def _small_cells(run: Run) -> tuple[list[str], list[list[str]]]:
    other = "other" in run
    columns = ["operation", "size", "kB", "us", "p10..p90"]
    columns += ["above empty", "goal", "cold us", "eager"]
    columns += ["other us", "other above"] if other else []
    lines = []
    for row in run["results"]:
        if not row["small"]:
            continue
        goal = ""
        if row["goal"] is not None:
            goal = f"{row['goal']:.1f}{' in all' if row['in_all'] else ''}"
            goal += "" if reached(run, row) else " !"
        line = [
            row["name"],
            row["size"],
            f"{row['bytes'] / 1e3:.1f}",
            f"{row['us']:.2f}",
            f"{row['p10_us']:.2f}..{row['p90_us']:.2f}",
            f"{above_empty(run, row, row['us']):.2f}",
            goal,
            f"{row['cold_us']:.2f}",
            f"{row['eager_us']:.0f}",
        ]
        if other:
            line += _other(run, row, lambda us, row=row: f"{above_empty(run, row, us):.2f}")
        lines.append(line)
    return columns, lines


def _other(run: Run, row: Run, judge: Any) -> list[str]:
    found = row.get("other", {"error": "not run"})
    if "error" in found:
        return ["-", found["error"][:40]]
    return [f"{found['us']:.2f}" if row["small"] else f"{found['us']:.1f}", judge(found["us"])]


def tables(run: Run) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and lines of each table that is not empty."""
    found = [("Large sizes", *_large_cells(run)), ("Small sizes, graph replay", *_small_cells(run))]
    return [table for table in found if table[2]]


def _console() -> Console:
    """The terminal; what is not one is as wide as the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def show(run: Run) -> None:
    """The tables on the terminal."""
    console = _console()
    console.print(head(run), highlight=False, soft_wrap=True)
    for title, columns, lines in tables(run):
        _print(console, title, columns, lines)
    for row in run["results"]:
        if "error" in row.get("other", {}):
            console.print(f"{run['other']}: {row['name']}: {row['other']['error']}", markup=False)


def show_sweep(run: Run) -> None:
    """A sweep on the terminal, the fastest first."""
    console = _console()
    console.print(head(run), highlight=False, soft_wrap=True)
    for name, size in dict.fromkeys((row["name"], row["size"]) for row in run["sweep"]):
        rows = [row for row in run["sweep"] if (row["name"], row["size"]) == (name, size)]
        rows.sort(key=lambda row: row.get("us", float("inf")))
        lines = []
        for row in rows:
            if "error" in row:
                lines.append([row["launch"], "-", "-", "-", "-", row["error"]])
                continue
            lines.append(
                [
                    row["launch"],
                    f"{row['us']:.2f}",
                    f"{row['p10_us']:.2f}..{row['p90_us']:.2f}",
                    f"{row['cold_us']:.2f}" if "cold_us" in row else "",
                    f"{rate(run, row, row['us']):.3f}",
                    row["resources"],
                ]
            )
        columns = ["launch", "us", "p10..p90", "cold us", "share", "kernels"]
        _print(console, f"{name}, {size}", columns, lines)


def _print(console: Console, title: str, columns: list[str], lines: list[list[str]]) -> None:
    words = {"operation", "size", "launch", "kernels", "other share"}
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table, markup=False, highlight=False)


def markdown(run: Run) -> str:
    """The tables for RESULTS.md."""
    texts = [head(run)]
    for title, columns, lines in tables(run):
        texts += ["", f"### {title}", "", f"| {' | '.join(columns)} |"]
        texts.append(f"|{'|'.join(' --- ' if i < 2 else ' ---: ' for i in range(len(columns)))}|")
        texts += [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join(texts)


def draw(run: Run, path: Path) -> None:
    """The share of the copy rate per operation, and the time above an empty kernel, as a picture.

    Raises:
        SystemExit: matplotlib is not there.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'dsv4num[analysis]'") from error
    large = [row for row in run["results"] if not row["small"]]
    small = [row for row in run["results"] if row["small"]]
    panels = [
        (large, "share of the device's copy rate", lambda row, us: rate(run, row, us)),
        (small, "microseconds in a replayed graph", lambda row, us: us),
    ]
    panels = [panel for panel in panels if panel[0]]
    heights = [len(rows) for rows, _, _ in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 1.6 + 0.3 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (rows, title, value), axis in zip(panels, axes[:, 0], strict=True):
        places = range(len(rows))
        axis.barh(places, [value(row, row["us"]) for row in rows], color="#3b6ea5", label="dsv4num")
        found = [(i, row) for i, row in enumerate(rows) if "us" in row.get("other", {})]
        if found:
            ours = [value(row, row["other"]["us"]) for _, row in found]
            axis.plot(ours, [i for i, _ in found], "o", color="#c8553d", label=run["other"])
        goals = [(i, row) for i, row in enumerate(rows) if row["goal"] is not None]
        if goals:
            ends = [goal_place(run, row) for _, row in goals]
            axis.plot(ends, [i for i, _ in goals], "k|", ms=12, label="goal")
        if rows is large:
            axis.axvline(1, color="gray", lw=0.8)
        else:
            empty = run["baseline"]["empty_us"]
            axis.axvline(empty, color="gray", lw=0.8, label="empty kernel")
        axis.set_yticks(places, [f"{row['name']}, {row['size']}" for row in rows], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel(title)
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)
    where = run["environment"]
    figure.suptitle(f"{where['device']}, {run['baseline']['bytes_per_s'] / 1e12:.2f} TB/s copy")
    figure.savefig(path, dpi=140)
    plt.close(figure)
