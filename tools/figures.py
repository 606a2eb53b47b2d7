"""Copy the figures of the documents out of the executed notebooks.

    python -m tools.figures              # writes docs/figures/<name>.png
    python -m tools.figures --execute    # runs the notebooks and saves their outputs first
    python -m tools.figures --check      # writes nothing; exits with 1 if a figure is not up to date

A code cell with the tag ``figure=<name>`` is a figure that a document may show; those in `SHOWN` are
copied. So there is one piece of code for each figure, and the notebooks have it.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures"

#: The figures that the README shows.
SHOWN = ("scale_rules", "records")


def figures(notebooks: Sequence[Path]) -> dict[str, bytes]:
    """The PNG of every tagged cell, by the name in its tag."""
    found: dict[str, bytes] = {}
    for path in notebooks:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            names = [t.removeprefix("figure=") for t in cell["metadata"].get("tags", ())]
            shown = [output.get("data", {}) for output in cell.get("outputs", ())]
            images = [data["image/png"] for data in shown if "image/png" in data]
            for name, image in zip(names, images, strict=bool(names)):
                if name in found:
                    raise ValueError(f"{path.name}: a second figure {name}")
                found[name] = base64.b64decode(image)
    return found


def execute(path: Path) -> None:
    """Run a notebook in place. Times and versions are left out, so that only results change it."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, record_timing=False, resources=where).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures, or compare them."""
    parser = argparse.ArgumentParser(description="Copy figures out of the executed notebooks.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--execute", action="store_true", help="run the notebooks first")
    options = parser.parse_args(arguments)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if options.execute:
        for path in notebooks:
            print(f"running {path.name}")
            execute(path)
    found = figures(notebooks)
    stale = 0
    for name in SHOWN:
        path = FOLDER / f"{name}.png"
        if path.exists() and path.read_bytes() == found[name]:
            continue
        stale += 1
        if options.check:
            print(f"{path.relative_to(ROOT)} is not the figure of the notebook: make figures")
        else:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found[name])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
