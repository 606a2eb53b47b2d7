"""Pages whose bytes a test types in, and what `explain` says of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dsv4num import get_layout
from dsv4num.explain import Dump, Explanation, Rows, explain_rows
from dsv4num.explain.encoder import field_columns
from dsv4num.formats import Layout

Bytes = tuple[str, str]
Case = tuple[list[float], Bytes, Bytes]


def number(bits: int) -> float:
    """The fp32 number with these bits."""
    return float(np.uint32(bits).view(np.float32))


def above(x: float) -> float:
    """The next fp32 number."""
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


def group_of(layout: Layout) -> int:
    """Elements of a group."""
    assert layout.rule is not None
    return layout.rule.group


def rows_of(layout: Layout, values: list[list[float]]) -> np.ndarray:
    """fp32 rows: in each the given values at the start of every group, and zeros. RoPE bits are 0."""
    size = group_of(layout)
    rows = np.zeros((len(values), layout.head_dim // size, size), np.float32)
    for row, given in zip(rows, values, strict=True):
        row[:, : len(given)] = np.array(given, np.float64).astype(np.float32)
    flat = rows.reshape(len(values), -1)
    for _, field in layout.fields():
        if field.kind == "raw":
            flat[:, slice(*field.dims)] = 0
    return flat


def record(layout: Layout, typed: Bytes) -> np.ndarray:
    """A record with this scale for every group, these codes at the start of each, and zeros."""
    scale, codes = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in typed)
    found = np.zeros(layout.row_bytes, np.uint8)
    for field, where in field_columns(layout):
        if field.kind == "codes":
            assert field.rule is not None
            group = np.zeros(field.rule.group * field.rule.element.width // 8, np.uint8)
            group[: len(codes)] = codes
            found[where] = np.tile(group, field.nbytes // len(group))
        elif field.kind == "scale":
            found[where] = np.tile(scale, field.nbytes // len(scale))
    return found


def dump_of(layout: Layout, records: np.ndarray, block: int, fill: int = 0xA5) -> Dump:
    """Records in the first slots of a dump."""
    pages = -(-len(records) // block)
    sizes = [layout.page_bytes(block, pool=pool) for pool in range(layout.pools)]
    dump = Dump.of([np.full(pages * size, fill, np.uint8) for size in sizes], layout, block)
    dump.data[dump.offsets(np.arange(len(records)))] = records
    return dump


def named(found: Explanation) -> list[str]:
    """The hypotheses that explain every byte, the dialects of a pair in the order of the alphabet."""
    assert found.status == "explained", found.lines()
    return [" ".join(sorted(h.names)) for h in found.hypotheses if h.exact]


def blamed(name: str, *cases: Case) -> list[str]:
    """What explains the wrong bytes of all cases; the right ones must be no difference."""
    layout = get_layout(name)
    source = Rows(rows_of(layout, [values for values, _, _ in cases]), np.arange(len(cases)))
    right, wrong = (
        dump_of(layout, np.array([record(layout, case[side]) for case in cases]), 2)
        for side in (1, 2)
    )
    found = explain_rows(right, source)
    assert found.status == "no difference", found.lines()
    return named(explain_rows(wrong, source))


def ordinary_rows(layout: Layout, tokens: int) -> Rows:
    """Rows of several magnitudes: every fifth of zeros of both signs, some below floors."""
    rows = np.random.RandomState(1).standard_normal((tokens, layout.head_dim))
    rows *= np.exp2(np.arange(tokens)[:, None] % 9 - 4)
    rows[::5] = 0
    rows[::5, ::2] = -0.0
    rows[3::7] *= 2.0**-12
    return Rows(rows.astype(ml_dtypes.bfloat16), np.arange(tokens))
