"""Rows that tell dialects apart: groups on the decisions of every rule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.explain.sources import Latents, Rows, Source
from dsv4num.formats import Layout

__all__ = ["probe_rows", "probes_like"]

#: In units of the scale: midpoints of E2M1 and of E4M3, values below the smallest, ordinary ones.
_FRACTIONS = (
    *(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1.0, 0.1, 0.3, 0.6, 4.5),
    *(1.0625, 17.0, 19.0, 126.0, 152.0, 2.0**-10, 2.0**-11, 2.0**-12, 3.0, 60.0, 200.0, 0.0),
)

#: Values of amax around which floors act.
_FLOORS = (1e-4, 1e-6, 1e-8, 1e-4 * 448, 6e-4, 1e-38, 0.02, 2e-3, 1e-5)


def probe_rows(layout: Layout, *, bf16: bool) -> NDArray[np.float32]:
    """Rows [n, head_dim] that make as many dialects visible as this layout can show.

    Group by group: zeros of both signs; every floor; amax at, one bf16 step below and one above qmax *
    2^k, and between; midpoints; values that round to zero; NaN; infinities. The rows do not depend on
    a random seed that could change.

    Args:
        layout: the layout.
        bf16: whether each value must be one of bf16; otherwise a part has its lower half set too.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> probe_rows(get_layout("v4"), bf16=True).shape
        (96, 512)
    """
    rules = [f.rule for _, f in layout.fields() if f.kind == "codes" and f.rule is not None]
    group = min((rule.group for rule in rules), default=16)
    rng = np.random.default_rng(4)
    rows = np.zeros((96, layout.head_dim), np.float32)
    groups = rows.reshape(-1, group)
    count = len(groups)
    qmax = rng.choice(np.array([448, 240, 224, 6], np.float32), count)
    amax = np.ldexp(
        qmax * rng.uniform(0.5, 1, count).astype(np.float32), rng.integers(-20, 14, count)
    )
    at = np.arange(count)
    exact = at % 3 == 0
    amax[exact] = np.ldexp(qmax[exact], rng.integers(-16, 12, int(exact.sum())))
    tiny = at % 5 == 1  # around each floor
    floors = np.array(_FLOORS, np.float32)
    amax[tiny] = rng.choice(floors, int(tiny.sum())) * rng.uniform(0.3, 1.5, int(tiny.sum()))
    amax = _bf16(amax)
    step = rng.integers(-1, 2, count).astype(np.int32) << 16
    amax = (amax.view(np.int32) + step).view(np.float32)
    power = np.ldexp(
        np.float32(1), np.ceil(np.log2(amax / qmax.astype(np.float64))).astype(np.int32)
    )
    fractions = rng.choice(np.array(_FRACTIONS, np.float32), groups.shape)
    fractions *= rng.choice(np.array([-1, 1], np.float32), groups.shape)
    free = at % 4 == 2
    fractions[free] = rng.standard_normal((int(free.sum()), group)) * qmax[free, None] / 4
    with np.errstate(over="ignore", invalid="ignore"):
        groups[:] = np.clip(_bf16(fractions * power[:, None]), -amax[:, None], amax[:, None])
    groups[at, rng.integers(0, group, count)] = amax
    for kind, place, value in (
        (7, slice(None), 0.0),
        (8, slice(None), -0.0),
        (9, slice(3, 4), np.nan),
        (10, slice(5, 6), np.inf),
        (11, slice(None, None, 2), -0.0),
    ):
        groups[at % 37 == kind, place] = value
    if group == 16:  # division by the scale 0F gives a tie, its reciprocal more
        rows[92, :group] = 0.03662109375
        rows[92, 0] = 0.17578125
    if not bf16:
        bits = rows.view(np.uint32)
        low = rng.integers(1, 1 << 16, rows.shape, dtype=np.uint32)
        bits[24:60] ^= np.where(np.isfinite(rows) & (rows != 0), low, 0)[24:60]
        bits[60:80] += np.where(np.isfinite(rows) & (rows != 0), 1, 0)[60:80].astype(np.uint32)
        bits[80:] |= np.where(np.isfinite(rows) & (rows != 0), 0x8000, 0)[80:].astype(np.uint32)
        _amax_divided(rows[90], group)
    return rows


def probes_like(source: Source, layout: Layout) -> Source:
    """Probe rows as input of the operation that a source is of; for pooled states, as their result."""
    slots = np.arange(96, dtype=np.int64)
    bf16: Any = ml_dtypes.bfloat16
    if isinstance(source, Latents):
        latent = probe_rows(layout, bf16=True).astype(bf16)
        last = len(source.cos_sin_cache) - 1
        positions = np.linspace(0, last, 96).astype(np.int64) | (source.compress_ratio - 1)
        return Latents(
            latent,
            np.minimum(positions, last),
            source.cos_sin_cache,
            slots,
            source.compress_ratio,
            source.bf16_round_trip,
        )
    rows = probe_rows(layout, bf16=source.bf16)
    return Rows(rows.astype(bf16) if source.bf16 else rows, slots)


def _amax_divided(row: NDArray[np.float32], group: int) -> None:
    """Groups whose amax / 6 and amax * fp32(1/6) lie on two sides of the middle of two E4M3 codes."""
    for index, bits in enumerate((0x3DE3FFFF, 0x40E3FFFF)[: len(row) // group]):
        row[index * group : (index + 1) * group] = 0
        row[index * group] = np.uint32(bits).view(np.float32)


def _bf16(values: NDArray[Any]) -> NDArray[np.float32]:
    """Values rounded to bf16."""
    rounded: NDArray[np.float32] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded
