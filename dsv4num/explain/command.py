"""The commands `diff`, `explain`, `inspect` and `guess`.

Exit codes: 0 the bytes are equal, explained, without anomaly, of a known layout; 1 they differ, are not
explained, have an anomaly, or fit no layout; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from dsv4num.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dsv4num.explain.pages import Dump
    from dsv4num.explain.sources import Source

_FILES = "raw bytes, .npy, .npz:NAME, .safetensors:NAME or .pt:NAME"
#: Options of `explain` about how --input is rotated.
_ROTATION = ("positions", "cos_sin", "ratio", "bf16_round_trip")


def add_diff(commands: Any) -> None:
    """Adds the `diff` command to a command line."""
    parser = commands.add_parser("diff", help="compare two dumps of pages, field by field")
    parser.add_argument("a", metavar="A", help=_FILES)
    parser.add_argument("b", metavar="B", help="the same")
    _add_geometry(parser)
    parser.add_argument("--rows", metavar="LIST", help="only these slots: 0,3-7")
    parser.set_defaults(func=_diff)


def add_explain(commands: Any) -> None:
    """Adds the `explain` command to a command line."""
    parser = commands.add_parser("explain", help="say why the bytes of a writer differ")
    parser.add_argument("observed", metavar="OBSERVED", help=f"what was written: {_FILES}")
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--expected", metavar="FILE", help="what should have been written")
    known.add_argument("--input", metavar="FILE", help="the rows: bf16 or fp32 [T, values per row]")
    parser.add_argument("--slots", metavar="FILE", help="int [T]; without it row i is in slot i")
    parser.add_argument(
        "--positions", metavar="FILE", help="int [T]: --input is rotated first (5.6)"
    )
    parser.add_argument("--cos-sin", metavar="FILE", help="fp32 [positions, 64], for --positions")
    parser.add_argument("--ratio", type=int, help="compress ratio, for --positions (default: 1)")
    parser.add_argument(
        "--bf16-round-trip", action="store_true", help="as in SPEC 5.6, for --positions"
    )
    _add_geometry(parser)
    parser.set_defaults(func=_explain)


def add_inspect(commands: Any) -> None:
    """Adds the `inspect` command to a command line."""
    parser = commands.add_parser("inspect", help="show a row of a dump and what is wrong with it")
    parser.add_argument("file", metavar="FILE", help=_FILES)
    parser.add_argument("--slot", type=int, required=True, metavar="N")
    _add_geometry(parser)
    parser.set_defaults(func=_inspect)


def add_guess(commands: Any) -> None:
    """Adds the `guess` command to a command line."""
    parser = commands.add_parser("guess", help="rank the layouts that could have written a dump")
    parser.add_argument("file", metavar="FILE", help=_FILES)
    parser.add_argument("--block-size", type=int, metavar="N", help="rows per page, if known")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(func=_guess)


def _add_geometry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", required=True, metavar="NAME", help="`dsv4num layout --list`")
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="rows per page (default: 64)"
    )
    parser.add_argument("--page-stride", type=int, metavar="BYTES", help="from page to page")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def _diff(args: argparse.Namespace) -> int:
    """Prints what differs; 0 only if nothing does."""
    from dsv4num.explain.diff import diff_dumps

    a, b = _dump(args, args.a), _dump(args, args.b)
    found = diff_dumps(a, b, None if args.rows is None else slots_of(args.rows))
    _print(args.json, found)
    return 0 if found.equal else 1


def _explain(args: argparse.Namespace) -> int:
    """Prints why bytes differ; 0 if they do not, or if one hypothesis explains every byte."""
    from dsv4num.explain.search import explain_expected, explain_rows

    observed = _dump(args, args.observed)
    # An option without effect would let its user believe that it had one.
    if args.expected:
        _refuse_options(args, ("slots", *_ROTATION), "given with --expected", "only with --input")
        found = explain_expected(observed, _dump(args, args.expected))
    else:
        if not args.positions:
            _refuse_options(args, _ROTATION, "given without --positions", "only with --positions")
        source = _source(args, observed)
        if not (source.slots >= 0).any():  # equal in no byte is not equal
            raise ArgumentError("--input", "no row that is written", "one or more", "8")
        found = explain_rows(observed, source)
    _print(args.json, found)
    return 0 if found.status in ("no difference", "explained") else 1


def _refuse_options(
    args: argparse.Namespace, options: tuple[str, ...], given: str, allowed: str
) -> None:
    for option in options:
        if getattr(args, option) not in (None, False):
            raise ArgumentError(f"--{option.replace('_', '-')}", given, allowed, "8")


def _inspect(args: argparse.Namespace) -> int:
    """Prints a row; 0 only if nothing is wrong with it."""
    from dsv4num.explain.inspect import inspect_row

    row = inspect_row(_dump(args, args.file), args.slot)
    _print(args.json, row)
    return 1 if row.anomalies else 0


def _guess(args: argparse.Namespace) -> int:
    """Prints the layouts that fit; 0 if there is one."""
    import numpy as np

    from dsv4num.explain.files import load_array
    from dsv4num.explain.guess import guess_layouts

    if args.block_size is not None and args.block_size < 1:
        raise ArgumentError("--block-size", args.block_size, "1 or more", "4.2")
    array = load_array(args.file)
    if array.dtype.itemsize != 1:
        raise ArgumentError(args.file, f"dtype {array.dtype}", "bytes: a dtype of one byte", "4.3")
    found = guess_layouts(np.ascontiguousarray(array).view(np.uint8).reshape(-1), args.block_size)
    if args.json:
        print(json.dumps([guess.as_json() for guess in found], indent=2))
    elif not found:
        print(f"no layout: none fits {array.size:,} bytes and what they hold")
    for guess in [] if args.json else found:
        block = f", block size {guess.block_size}" if guess.block_size else ", any block size"
        print(f"{guess.layout}{block}: {100 * guess.score:.1f} %")
        for reason in guess.reasons:
            print(f"  {reason}")
    if not args.json and len(found) > 1 and found[0].score == found[1].score:
        equal = ", ".join(guess.layout for guess in found if guess.score == found[0].score)
        print(f"these bytes do not tell apart: {equal}")
    return 0 if found else 1


def _dump(args: argparse.Namespace, name: str) -> Dump:
    """A file as pages."""
    from dsv4num.explain.files import load_array, pool_files
    from dsv4num.explain.pages import Dump
    from dsv4num.formats import get_layout

    layout = get_layout(args.layout)
    if args.page_stride is not None and args.page_stride < 1:
        raise ArgumentError("--page-stride", args.page_stride, "1 or more", "4.3")
    arrays = [load_array(file) for file in pool_files(name, layout)]
    dump = Dump.of(arrays, layout, args.block_size, args.page_stride, name=name)
    usual = layout.page_bytes(args.block_size, pool=0)
    if dump.page_stride != usual and args.page_stride is None and not args.json:
        print(
            f"{name}: read as pages of {dump.page_stride:,} bytes; those of the layout have {usual:,}"
        )
    return dump


def _source(args: argparse.Namespace, observed: Dump) -> Source:
    """The input rows."""
    import ml_dtypes
    import numpy as np

    from dsv4num.explain.files import load_array
    from dsv4num.explain.sources import check_latents, check_rows

    rows = load_array(args.input)
    if rows.dtype == np.uint16:  # how bf16 is often saved
        rows = rows.view(ml_dtypes.bfloat16)
    slots = load_array(args.slots) if args.slots else np.arange(len(rows) if rows.ndim else 0)
    found = check_rows(rows, slots, observed.layout)
    if not args.positions:
        return found
    if not args.cos_sin:
        raise ArgumentError("--cos-sin", "none", "a table, with --positions", "5.6")
    ratio = 1 if args.ratio is None else args.ratio
    positions, table = load_array(args.positions), load_array(args.cos_sin)
    return check_latents(found, positions, table, ratio, args.bf16_round_trip)


def slots_of(text: str) -> NDArray[np.int64]:
    """Slots of a list such as 0,3-7."""
    import numpy as np

    slots: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise ArgumentError("--rows", repr(text), "slots such as 0,3-7", "4.3")
        if int(ends[1]) < int(ends[0]):  # it would select nothing, and nothing never differs
            raise ArgumentError("--rows", repr(text), "ranges that do not fall, such as 3-7", "4.3")
        if int(ends[1]) - int(ends[0]) > 1 << 24:
            raise ArgumentError("--rows", repr(text), f"at most {1 << 24} slots", "4.3")
        slots += range(int(ends[0]), int(ends[1]) + 1)
    return np.array(slots, np.int64)


def _print(as_json: bool, found: Any) -> None:
    """Lines for people, or JSON; on a terminal the first line is bold and marks are coloured."""
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    text = "\n".join(found.lines())
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    styled.stylize("bold", 0, text.find("\n") if "\n" in text else len(text))
    styled.highlight_regex(
        r"(?m)^(unexplained|no difference|every one|runner-up|fits equally).*$", "green"
    )
    styled.highlight_regex(r"[+#]+(?=[·+# ]*$)", "red")
    styled.highlight_regex(r"\b0x[0-9A-F]+\b", "cyan")
    Console(highlight=False).print(styled, soft_wrap=True)
