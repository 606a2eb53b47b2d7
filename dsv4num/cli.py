"""The command `dsv4num`: look at layouts and codes, verify kernels, explain and move bytes.

Exit codes: 0 done; 1 something differs, breaks a rule or stays unexplained; 2 bad input; 130
interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4num import SPEC_VERSION, __version__
from dsv4num.errors import ArgumentError, Dsv4numError
from dsv4num.formats import SCALARS, get_scalar
from dsv4num.reference import decode, encode

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.

    Example:
        >>> main(["encode", "e4m3fn", "0.3", "-0.0"])
        value  fp32        code  decoded
        0.3    0x3E99999A  0x2A  0.3125
        -0.0   0x80000000  0x80  -0.0
        0
    """
    from dsv4num.audit.command import add_audit
    from dsv4num.explain.command import add_diff, add_explain, add_guess, add_inspect
    from dsv4num.layouts.command import add_convert, add_layout
    from dsv4num.vectors.command import add_vectors
    from dsv4num.verify.command import add_report, add_targets, add_verify

    parser = argparse.ArgumentParser(
        prog="dsv4num", description="What the bytes of a DeepSeek-V4 / V4.1 paged K cache must be."
    )
    version = f"dsv4num {__version__}, SPEC {SPEC_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_layout(commands)
    add_convert(commands)
    _add_encode(commands)
    _add_decode(commands)
    add_verify(commands)
    add_audit(commands)
    add_report(commands)
    add_targets(commands)
    add_diff(commands)
    add_explain(commands)
    add_inspect(commands)
    add_guess(commands)
    add_vectors(commands)
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a drawing on a terminal that has no lines
    try:
        code = int(args.func(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # as a shell says it
    except BrokenPipeError:  # the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (Dsv4numError, OSError) as error:
        print(f"dsv4num: {error}", file=sys.stderr)
        return 2


def _add_encode(commands: Any) -> None:
    """The command `encode`."""
    parser = commands.add_parser("encode", help="codes of values")
    parser.add_argument("format", metavar="FORMAT", help=", ".join(SCALARS))
    # REMAINDER, so that -inf and -1e-3 are not taken for options.
    parser.add_argument(
        "values",
        nargs=argparse.REMAINDER,
        metavar="VALUE",
        help="as Python reads floats, or a hex float: 0.3, -1e-3, inf, nan, 0x1.8p+3; goes to fp32",
    )
    parser.set_defaults(func=_encode)


def _encode(args: argparse.Namespace) -> int:
    """Prints values, their codes and what these decode to."""
    chosen = get_scalar(args.format)
    if not args.values:
        raise ArgumentError("VALUE", "none", "one or more numbers", chosen.clause)
    with np.errstate(over="ignore", under="ignore"):
        x = np.array([_number(text) for text in args.values], np.float64).astype(np.float32)
    codes = encode(x, chosen)
    lines = zip(x.view(np.uint32), codes, decode(codes, chosen), args.values, strict=True)
    print_table(
        [
            ("value", "fp32", "code", "decoded"),
            *((t, f"0x{b:08X}", _hex(c, chosen.width), str(v)) for b, c, v, t in lines),
        ]
    )
    return 0


def _number(text: str) -> float:
    """A number as Python reads it, or a hex float."""
    try:
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except (ValueError, OverflowError):
        raise ArgumentError("VALUE", repr(text), "a number, inf or nan", "2") from None


def _add_decode(commands: Any) -> None:
    """The command `decode`."""
    parser = commands.add_parser("decode", help="values of codes")
    parser.add_argument("format", metavar="FORMAT", help=", ".join(SCALARS))
    parser.add_argument("codes", nargs="+", metavar="CODE", help="hexadecimal: 7e or 0x7E")
    parser.set_defaults(func=_decode)


def _decode(args: argparse.Namespace) -> int:
    """Prints codes and their values."""
    chosen = get_scalar(args.format)
    codes = np.array(
        [_code(text, chosen.codes, chosen.clause) for text in args.codes],
        np.uint16 if chosen.width == 16 else np.uint8,
    )
    values = decode(codes, chosen)
    lines = zip(codes, values, values.view(np.uint32), strict=True)
    print_table(
        [
            ("code", "value", "fp32"),
            *((_hex(c, chosen.width), str(v), f"0x{b:08X}") for c, v, b in lines),
        ]
    )
    return 0


def _code(text: str, count: int, clause: str) -> int:
    """A code in hexadecimal."""
    try:
        code = int(text, 16)
    except ValueError:
        code = -1
    if not 0 <= code < count:
        raise ArgumentError("CODE", repr(text), f"hexadecimal 0..{count - 1:X}", clause)
    return code


def _hex(code: Any, width: int) -> str:
    """A code with as many hex digits as its width needs."""
    return f"0x{int(code):0{-(-width // 4)}X}"


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Columns, left aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    print_text("\n".join(row.rstrip() for row in rows))


def print_text(text: str) -> None:
    """Text as it is; on a terminal the first line is bold and the lines of drawings are dim."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    styled.stylize("bold", 0, text.find("\n") if "\n" in text else len(text))
    styled.highlight_regex(r"[─│┌┐└┘├┤┬┴┼]+", "dim")
    styled.highlight_regex(r"\b0x[0-9A-F]+\b", "cyan")
    Console(highlight=False).print(styled, soft_wrap=True)
