"""The commands `layout` and `convert`.

Exit codes: 0 done, and of `layout --vs` the same bytes; 1 the two differ; 2 bad input, or pages that
cannot be moved without quantizing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from dsv4num.errors import ArgumentError
from dsv4num.formats import LAYOUTS, WILD_LAYOUTS, Field, GroupRule, Layout, Plane, get_layout

_SOURCE = "raw bytes, .npy, .npz:NAME, .safetensors:NAME or .pt:NAME; pools joined by commas"


def add_layout(commands: Any) -> None:
    """Adds the `layout` command to a command line."""
    parser = commands.add_parser("layout", help="draw, list, compare or export layouts")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", metavar="NAME", help="a layout; --list names them")
    what.add_argument(
        "--list", action="store_true", help="name every layout, where it is, its sizes"
    )
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="rows per page (default: 64)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--vs", metavar="OTHER", help="what differs from another layout")
    how.add_argument("--c-header", action="store_true", help="constants and offsets for C and C++")
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")
    parser.set_defaults(func=_layout)


def add_convert(commands: Any) -> None:
    """Adds the `convert` command to a command line."""
    parser = commands.add_parser(
        "convert", help="move pages from one layout to another, bit for bit"
    )
    parser.add_argument("source", metavar="SOURCE", help=_SOURCE)
    parser.add_argument("target", metavar="TARGET", help="the same, but for .pt")
    parser.add_argument("--from", dest="source_layout", required=True, metavar="LAYOUT")
    parser.add_argument("--to", dest="target_layout", required=True, metavar="LAYOUT")
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="rows per page (default: 64)"
    )
    parser.add_argument("--to-block-size", type=int, metavar="N", help="of the target, if another")
    parser.add_argument(
        "--page-stride", type=int, metavar="BYTES", help="of the source, if another"
    )
    parser.add_argument(
        "--rows", metavar="LIST", help="only these slots: 0,3-7; others become zero"
    )
    parser.add_argument("--json", action="store_true", help="what was done as JSON")
    parser.set_defaults(func=_convert)


def _layout(args: argparse.Namespace) -> int:
    """Prints one layout, the list of them, two compared, or a header."""
    from dsv4num.cli import print_table, print_text

    size = args.block_size
    if size < 1:
        raise ArgumentError("--block-size", size, "1 or more", "4.2")
    known = [*LAYOUTS.values(), *WILD_LAYOUTS.values()]
    chosen = known if args.list else [get_layout(args.name)]
    if args.vs is not None:
        if args.list:
            raise ArgumentError("--vs", repr(args.vs), "a NAME to compare with", "4.6")
        from dsv4num.layouts.compare import compare

        found = compare(chosen[0], get_layout(args.vs), size)
        print(json.dumps(found.as_json(), indent=2) if args.json else "\n".join(found.lines()))
        return 0 if found.equal else 1
    if args.c_header:
        if args.json:
            raise ArgumentError("--json", "given with --c-header", "one of the two", "4.6")
        from dsv4num.layouts.header import c_header

        print("\n".join(c_header(layout) for layout in chosen), end="")
    elif args.json:
        facts = [_facts(layout, size) for layout in chosen]
        print(json.dumps(facts if args.list else facts[0], indent=2))
    elif args.list:
        print_table([_heads(size), *(_line(layout, size) for layout in chosen)])
    else:
        print_text(chosen[0].describe(size))
    return 0


def _heads(block_size: int) -> Sequence[str]:
    """The heads of the list."""
    page = f"bytes/page of {block_size}"
    return ("layout", "values", "bytes/row", page, "form", "seen", "kernels", "in", "also")


def _line(layout: Layout, block_size: int) -> Sequence[str]:
    """A layout's line in the list."""
    return (
        layout.name,
        str(layout.head_dim),
        str(layout.row_bytes),
        "-" if (page := _page(layout, block_size)) is None else str(page),
        layout.form,
        layout.evidence,
        "yes" if layout.name in LAYOUTS else "-",
        layout.source,
        ", ".join(layout.aliases),
    )


def _page(layout: Layout, block_size: int) -> int | None:
    """The bytes of a page; None where its tiles do not fill it."""
    try:
        return layout.page_bytes(block_size)
    except ArgumentError:
        return None


def _facts(layout: Layout, block_size: int) -> dict[str, Any]:
    """A layout as plain data. Offsets in bytes; `dims` is first and one past the last."""
    page = _page(layout, block_size)
    rules = dict.fromkeys(f.rule for _, f in layout.fields() if f.rule is not None)
    return {
        "name": layout.name,
        "aliases": list(layout.aliases),
        "fingerprint": layout.fingerprint(),
        "source": layout.source,
        "evidence": layout.evidence,
        "head_dim": layout.head_dim,
        "row_bytes": layout.row_bytes,
        "form": layout.form,
        "pools": layout.pools,
        "tile_rows": layout.tile_rows[0],
        "block_size": block_size,
        "owned_bytes": None if page is None else layout.owned_bytes(block_size),
        "page_bytes": page,
        "page_multiple": layout.page_multiple,
        "planes": [
            _plane_facts(plane, None if page is None else layout.plane_offset(index, block_size))
            for index, plane in enumerate(layout.planes)
        ],
        "rules": {rule.name: _rule_facts(rule) for rule in rules},
        "writers": {rule.name: who for rule, who in layout.writers},
    }


def _plane_facts(plane: Plane, offset: int | None) -> dict[str, Any]:
    """A plane as plain data; `axes` from the outermost one, as [of, step, count], or empty."""
    return {
        "name": plane.name,
        "pool": plane.pool,
        "page_offset": offset,
        "row_bytes": plane.row_bytes,
        "axes": [[axis.of, axis.step, axis.count] for axis in plane.axes],
        "fields": [_field_facts(field) for field in plane.fields],
    }


def _field_facts(field: Field) -> dict[str, Any]:
    """A field as plain data."""
    return {
        "name": field.name,
        "kind": field.kind,
        "offset": field.offset,
        "nbytes": field.nbytes,
        "format": field.format.name if field.format else None,
        "dims": list(field.dims) if field.format else None,
        "rule": field.rule.name if field.rule else None,
        "pad_value": field.pad_value if field.kind == "pad" else None,
        "order": list(field.order),
        "copies": field.copies,
        "run": field.run,
        "step": field.step,
    }


def _rule_facts(rule: GroupRule) -> dict[str, Any]:
    """A rule as plain data; formats by name."""
    values = {f.name: getattr(rule, f.name) for f in fields(rule)}
    return values | {"element": rule.element.name, "scale": rule.scale.name}


def _convert(args: argparse.Namespace) -> int:
    """Moves pages and says what was written."""
    import numpy as np

    from dsv4num.explain.command import slots_of
    from dsv4num.explain.files import check_targets, load_array, pool_files, save_array
    from dsv4num.explain.pages import Dump
    from dsv4num.layouts.convert import convert

    source, target = get_layout(args.source_layout), get_layout(args.target_layout)
    for option in ("block_size", "to_block_size", "page_stride"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            name = f"--{option.replace('_', '-')}"
            raise ArgumentError(name, getattr(args, option), "1 or more", "4.3")
    names = pool_files(args.source, source), pool_files(args.target, target)
    check_targets(names[1], names[0])
    arrays = [load_array(name) for name in names[0]]
    dump = Dump.of(arrays, source, args.block_size, args.page_stride, name=args.source)
    slots = None if args.rows is None else slots_of(args.rows)
    pages = convert(dump, target, args.to_block_size, slots)
    for name, part in zip(names[1], pages, strict=True):
        save_array(name, part)
    rows = len(dump.slots if slots is None else np.unique(slots))
    written = {name: list(part.shape) for name, part in zip(names[1], pages, strict=True)}
    if args.json:
        print(
            json.dumps({"rows": rows, "from": source.name, "to": target.name, "written": written})
        )
        return 0
    print(f"{rows:,} rows from {source.name} to {target.name}, no value changed")
    for name, (count, size) in written.items():
        print(f"{name}: {count:,} pages of {size:,} bytes")
    return 0
