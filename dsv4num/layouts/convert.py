"""Pages of one layout as pages of another, where no element has to be quantized anew. SPEC 4.8."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError, ValueRangeError
from dsv4num.explain.encoder import Columns, field_columns
from dsv4num.explain.pages import Dump
from dsv4num.formats import FP32, Field, FloatFormat, Layout
from dsv4num.reference import decode, encode, write_records
from dsv4num.reference.group import decode_scale

__all__ = ["convert"]


def convert(
    source: Dump,
    target: Layout,
    block_size: int | None = None,
    slots: NDArray[np.int64] | None = None,
) -> list[NDArray[np.uint8]]:
    """The rows of a dump in another layout, bit for bit.

    Rule (clause 4.8): each row goes to the slot of the same number. Codes, raw values and scales are
    moved as they are. A scale in another format is the same number; one that the source stores several
    times must be the same each time. Pad bytes are written by the target's rule; bytes that the target
    does not write, and rows that are not moved, are zero.

    Args:
        source: pages of the layout to move from.
        target: the layout to move to.
        block_size: rows per page of the target; None for that of the source.
        slots: the slots to move; None for all.

    Returns:
        For each pool of the target uint8 [pages, page bytes].

    Raises:
        ArgumentError: the two layouts hold different elements, groups or dimensions, or the block size
            does not suit the target.
        ValueRangeError: a slot beyond the dump, or a scale that the target cannot hold.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> rows = np.zeros((2, 68), np.uint8)
        >>> rows[:, 64:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
        >>> inline = Dump.of(rows, get_layout("indexer_mxfp4_inline"), 2)
        >>> convert(inline, get_layout("indexer_mxfp4"))[0][0, 128:].tolist()
        [1, 2, 3, 4, 5, 6, 7, 8]
    """
    rows = source.block_size if block_size is None else block_size
    chosen = source.slots if slots is None else slots
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(source.slots):
        given = f"{chosen.min()}..{chosen.max()}"
        raise ValueRangeError("slots", given, f"0..{len(source.slots) - 1}")
    _check(source.layout, target)
    records = _moved(source.records(chosen), source.layout, target, chosen)
    count = -(-len(source.slots) // rows) if target.owned_bytes(rows) else 0
    sizes = [target.page_bytes(rows, pool=pool) for pool in range(target.pools)]
    try:
        pools = [np.zeros((count, size), np.uint8) for size in sizes]
    except (MemoryError, ValueError):
        given = f"{rows}: {count} pages of {sum(sizes)} bytes"
        raise ArgumentError("block_size", given, "pages that fit into memory", "4.2") from None
    cache = pools if len(pools) > 1 else pools[0]
    write_records(records, cache, chosen, rows, layout=target)
    return pools


def _check(source: Layout, target: Layout) -> None:
    """Whether every value of the target is in the source as it is.

    Raises:
        ArgumentError: it is not, and why.
    """
    reason = next(_reasons(source, target), None)
    if reason is not None:
        allowed = "layouts with the same elements in the same groups: this needs quantizing"
        raise ArgumentError(f"{source.name} to {target.name}", reason, allowed, "4.8")


def _reasons(source: Layout, target: Layout) -> Iterator[str]:
    """Why rows cannot be moved as they are."""
    if source.head_dim != target.head_dim:
        yield f"{source.head_dim} and {target.head_dim} values per row"
    for _, field in target.fields():
        if field.kind not in ("codes", "raw", "row_scale") or field.format is None:
            continue
        own = _same(source, field)
        if own is None or own.format is None:
            yield f"{field.name} (dims {field.dims[0]}..{field.dims[1] - 1}) not stored so"
        elif field.format is not own.format:
            names = {own.format.name, field.format.name}
            why = ", and one code is two values" if names == {"e4m3fn", "e4m3fnuz"} else ""
            yield f"{own.format.name} and {field.format.name} codes{why}"
        elif field.kind == "codes" and own.rule is not None and field.rule is not None:
            stored = source.scale_of(own) is not None, target.scale_of(field) is not None
            if stored[0] != stored[1]:
                yield "scales stored in one of them alone"
            elif not stored[0] and own.rule.scale_rounding != field.rule.scale_rounding:
                yield "a scale of 1 and one from outside"
            elif own.rule.group != field.rule.group:
                yield f"groups of {own.rule.group} and {field.rule.group} elements"
    if source.field("row_scale") and not target.field("row_scale"):
        yield "a scale for all groups of a row in the first alone"


def _same(layout: Layout, field: Field) -> Field | None:
    """The field of a layout that holds what `field` does."""
    found = (f for _, f in layout.fields() if (f.kind, f.dims) == (field.kind, field.dims))
    return next(found, None)


def _moved(
    records: NDArray[np.uint8], source: Layout, target: Layout, slots: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Records of the target with what those of the source hold."""
    moved = np.zeros((len(records), target.row_bytes), np.uint8)
    columns: dict[Field, Columns] = dict(field_columns(source))
    for field, where in field_columns(target):
        if field.format is None:
            moved[:, where] = field.pad_value
            continue
        own = _same(source, field)
        assert own is not None  # else `_check` had refused
        stored = np.ascontiguousarray(records[:, columns[own]])
        moved[:, where] = _entries(stored, own, field, slots)
    return moved


def _entries(
    stored: NDArray[np.uint8], own: Field, field: Field, slots: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The bytes of a field as another one stores them.

    Raises:
        ValueRangeError: copies that differ, or a scale that the other format cannot hold.
    """
    assert own.format is not None and field.format is not None
    if own.format is field.format and own.copies == field.copies:
        return stored
    words: dict[int, str] = {8: "u1", 16: "<u2", 32: "<u4"}
    codes = stored.view(words[own.format.width]).reshape(len(stored), -1, own.copies)
    differ = (codes != codes[..., :1]).any(axis=2)
    if differ.any():
        row, entry = np.argwhere(differ)[0].tolist()
        copies = " ".join(f"{code:0{own.format.width // 4}X}" for code in codes[row, entry])
        given = f"{copies} for {own.name} {entry} of slot {slots[row]}"
        raise ValueRangeError("source", given, f"{own.copies} equal copies")
    single = np.ascontiguousarray(codes[..., 0])
    if own.format is not field.format:
        single = _converted(single, own, field, slots)
    little = single.astype(words[field.format.width])
    return np.repeat(little, field.copies, axis=1).view(np.uint8)


def _converted(
    codes: NDArray[np.generic], own: Field, field: Field, slots: NDArray[np.int64]
) -> NDArray[np.generic]:
    """Codes of the same numbers in another format. UE8M0 code 255 and an infinite number are one.

    Raises:
        ValueRangeError: a number that the other format does not hold.
    """
    assert own.format is not None and field.format is not None
    numbers = _numbers(codes, own.format)
    if field.format is FP32:
        return numbers.view(np.uint32)
    with np.errstate(invalid="ignore"):
        found: NDArray[np.generic] = encode(numbers, field.format)
        back = _numbers(found, field.format)
    wrong = back.view(np.uint32) != numbers.view(np.uint32)
    if wrong.any():
        row, entry = np.argwhere(wrong)[0].tolist()
        number = float(numbers[row, entry])
        kind = (
            "powers of two" if field.format.mantissa_bits == 0 else f"{field.format.name} numbers"
        )
        given = f"{number:.9g} as {own.name} {entry} of slot {slots[row]}"
        raise ValueRangeError("source", given, f"{kind}, which {field.format.name} holds")
    return found


def _numbers(codes: NDArray[np.generic], fmt: FloatFormat) -> NDArray[np.float32]:
    """What scale codes are as fp32 numbers, an unusable UE8M0 one as infinity (clause 4.1)."""
    native = codes.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[fmt.width])
    numbers = decode_scale(native, fmt) if fmt is FP32 else decode(native, fmt)
    if fmt.mantissa_bits == 0:
        numbers[native == 255] = np.inf
    return numbers
