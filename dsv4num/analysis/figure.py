"""How figures and tables look, in colours that the colour-blind can tell apart. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
from cycler import cycler

__all__ = ["COLOURS", "markdown_table", "use_style"]

#: Okabe and Ito's palette, by what the hues are called.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#8A8A8A",
    "pale": "#E4E4E4",
}


def use_style() -> None:
    """Sets matplotlib's defaults for the figures of the notebooks."""
    mpl.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "white",
            "font.size": 9.5,
            "axes.titlesize": 10.5,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E4E4E4",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "lines.linewidth": 1.4,
            "axes.prop_cycle": cycler(color=[*COLOURS.values()][:8]),
        }
    )


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, the first column to the left, the others to the right.

    Example:
        >>> print(markdown_table(("format", "largest"), [("e2m1", 6.0)]))
        | format | largest |
        |:--|--:|
        | e2m1 | 6.0 |
    """
    titles = list(heads)
    lines = [titles, [":--", *("--:" for _ in titles[1:])], *rows]
    texts = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    texts[1] = texts[1].replace(" ", "")
    return "\n".join(texts)
