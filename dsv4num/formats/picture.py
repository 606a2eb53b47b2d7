"""The byte map of a layout as text: its fields, one row and one page, drawn. SPEC section 4."""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Sequence

from dsv4num.errors import ArgumentError
from dsv4num.formats.group import GroupRule
from dsv4num.formats.layout import Field, Layout, Plane

#: Columns of the drawings. A page of more than 10**8 rows may need more for its byte numbers.
WIDTH = 92


def describe(layout: Layout, block_size: int) -> str:
    r"""The fields of a row, and drawings of a row and a page, as text.

    Args:
        layout: the layout.
        block_size: rows per page.

    Returns:
        Lines without a final line feed, of at most 100 columns. Byte ranges include both ends.

    Raises:
        ArgumentError: `block_size` is not an integer of 1 or more.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> print(*describe(get_layout("indexer_mxfp4"), 2).splitlines()[-9:], sep="\n")
        one page: 2 rows, 136 bytes
                ┌ data: 2 x 64 bytes ──────────────────────────────────────────────────────────────┐
              0 │ row 0  codes 0..63                                                               │
             64 │ row 1  codes 64..127                                                             │
                ├ scales: 2 x 4 bytes ─────────────────────────────────────────────────────────────┤
            128 │ row 0  scale 128..131                                                            │
            132 │ row 1  scale 132..135                                                            │
                └──────────────────────────────────────────────────────────────────────────────────┘
            136
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ArgumentError("block_size", repr(block_size), "an integer of 1 or more", "4.2")
    parts = (
        _header(layout, block_size),
        _field_table(layout, block_size),
        _rules(layout),
        _row_drawing(layout),
        *(_page_drawing(layout, block_size, pool) for pool in range(layout.pools)),
    )
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part)


def _header(layout: Layout, block_size: int) -> list[str]:
    """Name, sizes and origin."""
    pools = range(layout.pools)
    owned = " + ".join(str(layout.owned_bytes(block_size, pool=pool)) for pool in pools)
    page = " + ".join(str(layout.page_bytes(block_size, pool=pool)) for pool in pools)
    rounded = f", a multiple of {layout.page_multiple}" if layout.page_multiple > 1 else ""
    lines = [
        f"layout {layout.name}: {layout.head_dim} values in {layout.row_bytes} bytes a row",
        f"page of {_count_rows(block_size)}: {page} bytes{rounded}; "
        f"its rows own {owned}; {layout.form}",
    ]
    if layout.aliases:
        lines += _wrapped("also", ", ".join(layout.aliases))
    if layout.source:
        lines += _wrapped("in", f"{layout.source} [{layout.evidence}]")
    return [*lines, f"fingerprint {layout.fingerprint()}"]


def _wrapped(head: str, text: str) -> list[str]:
    """A text behind its head, in lines that fit."""
    indent = " " * (len(head) + 1)
    return textwrap.wrap(f"{head} {text}", WIDTH, subsequent_indent=indent)


def _field_table(layout: Layout, block_size: int) -> list[str]:
    """One line per field: where it is, what it holds."""
    heads = ("plane", "field", "in row", "page, row 0", "per row", "kind", "format", "dims", "rule")
    table = [heads]
    for index, field in layout.fields():
        plane = layout.planes[index]
        first = layout.plane_offset(index, block_size) + field.offset
        table.append(
            (
                plane.name,
                field.name,
                _bytes(field, field.offset),
                "tiles" if plane.axes else _bytes(field, first),
                "tiles" if plane.axes else f"+{plane.row_bytes}",
                field.kind,
                field.format.name if field.format else "-",
                _span(field.dims[0], field.dims[1] - field.dims[0]) if field.format else "-",
                field.rule.name if field.rule else _verbatim(field),
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in table
    ]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:]]


def _verbatim(field: Field) -> str:
    """What stands in the place of a rule."""
    if field.kind == "gap":
        return "not written"
    return f"always 0x{field.pad_value:02X}" if field.kind == "pad" else "copied"


def _bytes(field: Field, first: int) -> str:
    """Where the bytes of a field lie, from its first one on."""
    if field.run:
        return f"{_span(first, field.run)} +{field.step}"
    return _span(first, field.nbytes) + (" mixed" if field.order else "")


def _rules(layout: Layout) -> list[str]:
    """Each group rule once, in words; then the rules of other writers."""
    rules: list[GroupRule] = []
    lines: list[str] = []
    for _, field in layout.fields():
        if field.rule and field.rule not in rules:
            rules.append(field.rule)
            stored = next((f.format for _, f in layout.fields() if _scales(f, field)), None)
            coded = any(f.kind == "codes" and f.rule == field.rule for _, f in layout.fields())
            lines += _rule(field.rule, stored.name if stored else "", coded=coded)
    base = layout.name.split("@")[0]
    for rule, who in layout.writers:
        own = rule == layout.rule
        lines += _wrapped(f"{rule.name if own else f'{base}@{rule.family}'}:", who)
    return lines


def _scales(field: Field, of: Field) -> bool:
    """Whether a field holds scales by the rule of another one."""
    return field.kind in ("scale", "row_scale") and field.rule == of.rule


#: How a scale is made, after "scale = ".
_ROUNDINGS = {
    "up_to_power_of_two": "{quotient}, rounded up to a power of two",
    "nearest_even": "{quotient}, rounded to the nearest {scale}",
    "up": "{quotient}, rounded up to a {scale}",
    "none": "{quotient} as it is",
    "down_to_power_of_two": "2 ** (exponent of amax - exponent of {qmax})",
    "unit": "1, not stored",
    "given": "one for the whole tensor, not stored",
}
#: What an element is encoded from.
_SCALINGS = {
    "multiply": "x * (1 / scale)",
    "divide": "x / scale",
    "reciprocal": "x * fp32(1/scale)",
    "reciprocal_or_zero": "x * fp32(1/scale or 0)",
    "amax_reciprocal": "x * fp32({qmax}/amax)",
}


def _rule(rule: GroupRule, stored: str, *, coded: bool) -> list[str]:
    """One group rule in words."""
    bits = struct.unpack("<I", struct.pack("<f", rule.floor))[0]
    as_stored = "" if stored in ("", rule.scale.name) else f", stored as {stored}"
    place = {"amax": "on amax", "scale": "on the scale", "added": "added to amax"}[rule.floor_place]
    floor = f"floor {rule.floor:.6g} (0x{bits:08X}) {place}" if rule.floor else "no floor"
    if rule.zero_scale is not None:
        floor += f"; a group of zeros has the scale {rule.zero_scale:g}"
    qmax = f"{rule.qmax:g}"
    quotient = f"amax / {qmax}"
    if rule.amax_factor:
        quotient = f"amax * fp32(1/{qmax})"
    scale = _ROUNDINGS[rule.scale_rounding].format(
        quotient=quotient, scale=rule.scale.name, qmax=qmax
    )
    scaled = _SCALINGS[rule.scaling].format(qmax=qmax)
    texts = (
        f"{rule.group} elements share one {rule.scale.name} scale{as_stored}",
        f"qmax {qmax}; {floor}",
        f"scale = {scale}; "
        + (f"code = {rule.element.name}({scaled})" if coded else f"then {scaled}"),
    )
    told = texts[2:] if rule.scale_rounding in ("unit", "given") else texts
    heads = (f"{rule.name}: ", *(" " * (len(rule.name) + 2) for _ in told[1:]))
    return [head + text for head, text in zip(heads, told, strict=True)]


def _row_drawing(layout: Layout) -> list[str]:
    """One row, plane beside plane, to scale as far as the labels allow."""
    cells = [_row_cell(field) for _, field in layout.fields()]
    starts: list[int] = []
    first = 0
    for plane in layout.planes:
        starts += [first + field.offset for field in plane.fields]
        first += plane.row_bytes
    sizes = [field.nbytes for _, field in layout.fields()]
    smallest = [
        max(max(map(len, cell)) + 2, len(str(start)) + 1)
        for cell, start in zip(cells, starts, strict=True)
    ]
    edges = len(cells) + len(layout.planes)
    widths = _to_scale(sizes, smallest, WIDTH - 8 - edges)
    title = f"one row: {layout.row_bytes} bytes"
    if len(layout.planes) > 1:
        title += ", its planes side by side"
    lines = [title] + [" " * 8 for _ in range(6)]
    index = 0
    for plane in layout.planes:
        count = len(plane.fields)
        own = widths[index : index + count]
        lines[1] += "".join(
            str(start).ljust(width + 1)
            for start, width in zip(starts[index : index + count], own, strict=True)
        )
        lines[1] += " "
        lines[2] += "┌" + "┬".join("─" * width for width in own) + "┐"
        for part in range(3):
            texts = (cell[part] for cell in cells[index : index + count])
            inner = "│".join(f" {text}".ljust(w) for text, w in zip(texts, own, strict=True))
            lines[3 + part] += f"│{inner}│"
        lines[6] += "└" + "┴".join("─" * width for width in own) + "┘"
        index += count
    return lines


def _row_cell(field: Field) -> tuple[str, str, str]:
    """The three lines inside a field's box."""
    size = f"{field.nbytes // field.run} x {field.run} B" if field.run else f"{field.nbytes} B"
    if field.format is None:
        return field.name, "-" if field.kind == "gap" else f"0x{field.pad_value:02X}", size
    copies = f" x {field.copies}" if field.copies > 1 else ""
    return field.name, f"{field.entries} {field.format.name}{copies}", size


def _page_drawing(layout: Layout, block_size: int, pool: int) -> list[str]:
    """One page of a pool from top to bottom: planes in order, rows in order, padding."""
    owned = layout.owned_bytes(block_size, pool=pool)
    page = layout.page_bytes(block_size, pool=pool)
    indent = max(7, len(str(page))) + 1
    shown = [index for index, plane in enumerate(layout.planes) if plane.pool == pool]
    titles = [_plane_title(layout.planes[index], block_size) for index in shown]
    planes = [_plane_rows(layout, index, block_size) for index in shown]
    smallest = [
        [max(len(texts[cell]) for _, texts in rows) + 2 for cell in range(len(rows[0][1]))]
        for rows in planes
    ]
    for title, wanted in zip(titles, smallest, strict=True):
        wanted[0] = max(wanted[0], len(title) + 2)
    inner = max(WIDTH - indent - 2, *(sum(wanted) + len(wanted) - 1 for wanted in smallest))
    of = f" of pool {pool}" if layout.pools > 1 else ""
    lines = [f"one page{of}: {_count_rows(block_size)}, {page} bytes"]
    above: list[int] = []
    for index, plane in enumerate(layout.planes[i] for i in shown):
        sizes = [field.nbytes for field in plane.fields]
        widths = _to_scale(sizes, smallest[index], inner - len(sizes) + 1)
        below = [sum(widths[: i + 1]) + i for i in range(len(widths) - 1)]
        ends = "├┤" if index else "┌┐"
        lines.append(" " * indent + _border(titles[index], above, below, inner, ends))
        for offset, texts in planes[index]:
            cells = "│".join(f" {text}".ljust(w) for text, w in zip(texts, widths, strict=True))
            lines.append(f"{offset:>{indent - 1}} │{cells}│")
        above = below
    if page > owned:
        lines.append(" " * indent + _border("padding", above, [], inner, "├┤"))
        text = f" {page - owned} bytes that no row owns: never written, never read"
        lines.append(f"{owned:>{indent - 1}} │{text.ljust(inner)}│")
        above = []
    lines.append(" " * indent + _border("", above, [], inner, "└┘"))
    lines.append(f"{page:>{indent - 1}}")
    return lines


def _plane_rows(
    layout: Layout, index: int, block_size: int
) -> list[tuple[int | str, tuple[str, ...]]]:
    """The rows of a plane to draw: first byte and cells of the first two and the last."""
    plane = layout.planes[index]
    base = layout.plane_offset(index, block_size)
    label = len(f"row {block_size - 1}")
    shown = range(block_size) if block_size <= 3 else (0, 1, block_size - 1)
    rows: list[tuple[int | str, tuple[str, ...]]] = []
    for row in shown:
        if row > 2:
            rows.append(("", ("⋮", *("" for _ in plane.fields[1:]))))
        start = base + row * plane.row_bytes
        texts = [f"{f.name} {_bytes(f, start + f.offset)}" for f in plane.fields]
        if len(texts) > 4:  # where each field starts is what fits
            texts = [f"{f.name} {start + f.offset}" for f in plane.fields]
        if plane.axes:
            start = base + plane.row_offset(row, block_size)
            first = (start + plane.byte_offset(f.offset, block_size) for f in plane.fields)
            names = (field.name for field in plane.fields)
            texts = [f"{name}[0] {at}" for name, at in zip(names, first, strict=True)]
        texts[0] = f"{f'row {row}'.ljust(label)}  {texts[0]}"
        rows.append((start, tuple(texts)))
    return rows


def _plane_title(plane: Plane, block_size: int) -> str:
    """Name and size of a plane, and the axes of one in tiles, outermost first."""
    title = f"{plane.name}: {block_size} x {plane.row_bytes} bytes"
    rest = block_size
    for axis in plane.axes:
        rest //= (axis.count or 1) if axis.of == "row" else 1
    names = [
        f"{axis.count or rest} {axis.of}s" + (f" step {axis.step}" if axis.step > 1 else "")
        for axis in plane.axes
    ]
    return f"{title} as [{', '.join(names)}]" if names else title


def _border(title: str, above: list[int], below: list[int], inner: int, ends: str) -> str:
    """A horizontal line with its title, joined to the splits above and below it."""
    line = ["─"] * inner
    for place in {*above, *below}:
        line[place] = "┼" if place in above and place in below else "┴┬"[place in below]
    if title:
        line[: len(title) + 2] = f" {title} "
    return ends[0] + "".join(line) + ends[1]


def _to_scale(sizes: Sequence[int], smallest: Sequence[int], width: int) -> list[int]:
    """Column widths that add up to `width`, in proportion to `sizes` but none below `smallest`."""
    widths = list(smallest)
    free = set(range(len(sizes)))
    while free:
        room = width - sum(widths[i] for i in range(len(sizes)) if i not in free)
        total = sum(sizes[i] for i in free)
        tight = {i for i in free if sizes[i] * room < smallest[i] * total}
        if not tight:
            for i in free:
                widths[i] = sizes[i] * room // total
            break
        free -= tight
    largest = max(range(len(sizes)), key=lambda i: widths[i])
    widths[largest] = max(smallest[largest], widths[largest] + width - sum(widths))
    return widths


def _count_rows(count: int) -> str:
    """`count` rows in words."""
    return "1 row" if count == 1 else f"{count} rows"


def _span(first: int, count: int) -> str:
    """A range that includes both ends; a single number for one byte."""
    return str(first) if count == 1 else f"{first}..{first + count - 1}"
