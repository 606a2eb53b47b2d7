"""Where rows come from: what is known of a writer's input. SPEC 5.1, 5.4, 5.6.

Each source gives the fp32 rows that a writer with given knobs quantizes, and the slots that it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError
from dsv4num.explain.encoder import Knobs, round_to_bf16
from dsv4num.formats import Layout
from dsv4num.reference import exp32, rms_norm, rotate_gptj, tree_sum

__all__ = ["Latents", "Rows", "Source", "States"]

_ROPE_DIM = 64


class Source(Protocol):
    """What is known of the input of a writer.

    Attributes:
        kinds: what a dialect may ask for: "fp32" (values that bf16 cannot hold), "rope", "group" (more
            than one token per row), "overlap", "bf16_step" or "no_bf16_step" (what the operation does
            before it quantizes).
        slots: int64 [T], below 0 for a row that is not written.
        bf16: whether the values are those of a bf16 array.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """See above."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """See above."""

    @property
    def bf16(self) -> bool:
        """See above."""

    def values(self, knobs: Knobs) -> NDArray[np.float32]:
        """The fp32 rows [T, head_dim] that are quantized."""

    def part(self, chosen: NDArray[np.int64]) -> Source:
        """The same with these rows alone."""


@dataclass(frozen=True)
class Rows:
    """Rows as `quantize_and_insert_k_cache` and `encode_records` take them.

    Attributes:
        rows: bf16 or fp32 [T, head_dim].
        slots: int64 [T].
    """

    rows: NDArray[Any]
    slots: NDArray[np.int64]

    @property
    def bf16(self) -> bool:
        """Whether the rows are bf16."""
        return bool(self.rows.dtype == ml_dtypes.bfloat16)

    @property
    def kinds(self) -> frozenset[str]:
        """Rows of fp32 show what rounding to bf16 hides."""
        return frozenset() if self.bf16 else frozenset({"fp32", "no_bf16_step"})

    def values(self, knobs: Knobs) -> NDArray[np.float32]:
        """The rows, rounded to bf16 only where a knob says so."""
        rows = _transformed(self.rows.astype(np.float32), knobs)
        if knobs.hadamard and self.bf16:  # a row stays what it was
            rows = _bf16_step(rows, knobs, step=True)
        return _bf16_step(rows, knobs, step=False)

    def part(self, chosen: NDArray[np.int64]) -> Rows:
        """The same with these rows alone."""
        return Rows(self.rows[chosen], self.slots[chosen])


@dataclass(frozen=True)
class Latents:
    """The input of `rope_quant_insert` (clause 5.6).

    Attributes:
        latent: bf16 [T, head_dim].
        positions: int64 [T].
        cos_sin_cache: fp32 [positions, 64].
        slots: int64 [T].
        compress_ratio: 1 or 2.
        bf16_round_trip: whether the operation rounds the rotated row to bf16.
    """

    latent: NDArray[Any]
    positions: NDArray[np.int64]
    cos_sin_cache: NDArray[np.float32]
    slots: NDArray[np.int64]
    compress_ratio: int = 1
    bf16_round_trip: bool = False

    @property
    def bf16(self) -> bool:
        """Rotated values are fp32."""
        return False

    @property
    def kinds(self) -> frozenset[str]:
        """RoPE, and fp32 values behind it."""
        step = "bf16_step" if self.bf16_round_trip else "no_bf16_step"
        group = {"group"} if self.compress_ratio > 1 else set()
        return frozenset({"fp32", "rope", step, *group})

    def values(self, knobs: Knobs) -> NDArray[np.float32]:
        """The rotated rows."""
        rows = self.latent.astype(np.float32)
        rotated = _rotate(rows, self.positions, self.cos_sin_cache, self.compress_ratio, knobs)
        return _bf16_step(_transformed(rotated, knobs), knobs, step=self.bf16_round_trip)

    def part(self, chosen: NDArray[np.int64]) -> Latents:
        """The same with these rows alone."""
        return Latents(
            self.latent[chosen],
            self.positions[chosen],
            self.cos_sin_cache,
            self.slots[chosen],
            self.compress_ratio,
            self.bf16_round_trip,
        )


@dataclass(frozen=True)
class States:
    """The input of `compress_norm_rope_store` (clause 5.4), its groups gathered.

    Attributes:
        kv: fp32 [T, N, 2 D or D]: the state rows of each group, the oldest first, all their columns.
        score: fp32 like `kv`.
        present: bool [T, N]: whether the position of a row is 0 or more.
        positions: int64 [T], of the last token.
        cos_sin_cache: fp32 [positions, 64].
        weight: bf16 or fp32 [D].
        eps: of the norm.
        slots: int64 [T].
        compress_ratio: tokens per group.
        overlap: whether the group before is pooled too.
    """

    kv: NDArray[np.float32]
    score: NDArray[np.float32]
    present: NDArray[np.bool_]
    positions: NDArray[np.int64]
    cos_sin_cache: NDArray[np.float32]
    weight: NDArray[Any]
    eps: float
    slots: NDArray[np.int64]
    compress_ratio: int
    overlap: bool

    @classmethod
    def gathered(
        cls,
        state_cache: NDArray[np.float32],
        token_to_req_indices: NDArray[Any],
        positions: NDArray[Any],
        slot_mapping: NDArray[Any],
        block_table: NDArray[Any],
        cos_sin_cache: NDArray[np.float32],
        kv_slot_mapping: NDArray[Any],
        rms_norm_weight: NDArray[Any],
        rms_norm_eps: float,
        *,
        compress_ratio: int,
        overlap: bool | int,
    ) -> States:
        """The groups that a call of `compress_norm_rope_store` stores, from its own arguments."""
        ratio, tokens = compress_ratio, len(slot_mapping)
        at, slots = positions[:tokens].astype(np.int64), kv_slot_mapping[:tokens].astype(np.int64)
        ends = np.flatnonzero((slot_mapping >= 0) & (slots >= 0) & ((at + 1) % ratio == 0))
        window = at[ends, None] + np.arange(1 - (1 + bool(overlap)) * ratio, 1)
        present = window >= 0
        window = np.maximum(window, 0)
        rows = state_cache.shape[1]
        blocks = block_table[token_to_req_indices[ends].astype(np.int64)[:, None], window // rows]
        states = state_cache[blocks.astype(np.int64), window % rows]
        width = states.shape[-1] // 2
        return cls(
            states[..., :width],
            states[..., width:],
            present,
            at[ends],
            cos_sin_cache,
            rms_norm_weight,
            rms_norm_eps,
            slots[ends],
            ratio,
            bool(overlap),
        )

    @property
    def bf16(self) -> bool:
        """Pooled values are fp32."""
        return False

    @property
    def kinds(self) -> frozenset[str]:
        """RoPE, groups, and the rounding to bf16 that clause 5.4 asks for."""
        overlap = {"overlap"} if self.overlap else set()
        group = {"group"} if self.compress_ratio > 1 else set()
        return frozenset({"fp32", "rope", "bf16_step", *group, *overlap})

    def values(self, knobs: Knobs) -> NDArray[np.float32]:
        """Pooled, normed and rotated rows."""
        normed = rms_norm(self.pooled(knobs), self.weight, self.eps)
        rotated = _rotate(normed, self.positions, self.cos_sin_cache, self.compress_ratio, knobs)
        return _bf16_step(_transformed(rotated, knobs), knobs, step=True)

    def pooled(self, knobs: Knobs) -> NDArray[np.float32]:
        """The softmax mean of each column (clause 5.4, step 3)."""
        kv, score, present = self.kv, self.score, self.present
        if self.overlap:
            dim, ratio = kv.shape[-1] // 2, self.compress_ratio
            lanes = (slice(dim, None), slice(0, dim))
            older, newer = lanes if knobs.lanes == "swapped" else lanes[::-1]
            kv, score = (
                np.concatenate([x[:, :ratio, older], x[:, ratio:, newer]], axis=1)
                for x in (kv, score)
            )
            if knobs.lanes == "lost":
                kv, score, present = kv[:, ratio:], score[:, ratio:], present[:, ratio:]
        there = present[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            m = np.where(there & ~np.isnan(score), score, np.float32(-np.inf)).max(axis=1)
            below = np.where(there, score - m[:, None], np.float32(0))
            weight = np.where(there, exp32(below), np.float32(0))
            terms = np.where(there, weight * kv, np.float32(0))
            return tree_sum(terms, 1) / tree_sum(weight, 1)

    def part(self, chosen: NDArray[np.int64]) -> States:
        """The same with these rows alone."""
        return States(
            self.kv[chosen],
            self.score[chosen],
            self.present[chosen],
            self.positions[chosen],
            self.cos_sin_cache,
            self.weight,
            self.eps,
            self.slots[chosen],
            self.compress_ratio,
            self.overlap,
        )


def check_rows(rows: NDArray[Any], slots: NDArray[Any], layout: Layout) -> Rows:
    """Rows and their slots, checked.

    Raises:
        ArgumentError: dtype, width or lengths.
    """
    if rows.dtype not in (np.float32, ml_dtypes.bfloat16):
        raise ArgumentError("rows", str(rows.dtype), "bfloat16 or float32", "5.1")
    if rows.ndim != 2 or rows.shape[1] != layout.head_dim:
        allowed = f"shape [rows, {layout.head_dim}] for {layout.name}"
        raise ArgumentError("rows", f"shape {list(rows.shape)}", allowed, "5.1")
    if slots.ndim != 1 or slots.dtype.kind not in "iu":
        raise ArgumentError("slots", f"{slots.dtype} {list(slots.shape)}", "integers [rows]", "5.1")
    if slots.size and int(slots.max()) > np.iinfo(np.int64).max:  # it would become negative: no row
        raise ArgumentError("slots", int(slots.max()), "below 2^63", "6.2")
    if len(slots) > len(rows):
        given = f"{len(rows)} rows"
        raise ArgumentError("rows", given, f"at least {len(slots)}, the number of slots", "5.1")
    return Rows(rows[: len(slots)], slots.astype(np.int64))


def check_latents(
    rows: Rows, positions: NDArray[Any], table: NDArray[Any], ratio: int, bf16_round_trip: bool
) -> Latents:
    """Rows that are rotated first, checked (clause 5.6); tokens that end no group are skipped.

    Raises:
        ArgumentError: dtype, shape, ratio, or a position beyond the table.
    """
    if not 1 <= ratio <= 128 or ratio & (ratio - 1):
        raise ArgumentError("compress_ratio", ratio, "a power of two, 1 to 128", "5.6")
    if positions.ndim != 1 or positions.dtype.kind not in "iu" or len(positions) < len(rows.slots):
        given = f"{positions.dtype} {list(positions.shape)}"
        raise ArgumentError("positions", given, f"integers [{len(rows.slots)}]", "5.6")
    if table.dtype != np.float32 or table.ndim != 2 or table.shape[1] != _ROPE_DIM:
        given = f"{table.dtype} {list(table.shape)}"
        raise ArgumentError("cos_sin_cache", given, f"float32 [positions, {_ROPE_DIM}]", "5.5")
    at = positions[: len(rows.slots)].astype(np.int64)
    kept = np.flatnonzero((rows.slots >= 0) & ((at + 1) % ratio == 0))
    if kept.size and not 0 <= int(at[kept].min()) <= int(at[kept].max()) < len(table):
        given = f"{at[kept].min()}..{at[kept].max()}"
        raise ArgumentError("positions", given, f"0..{len(table) - 1}", "5.5")
    slots = rows.slots[kept]
    return Latents(rows.rows[kept], at[kept], table, slots, ratio, bf16_round_trip)


def _bf16_step(rows: NDArray[np.float32], knobs: Knobs, *, step: bool) -> NDArray[np.float32]:
    """Rows rounded to bf16 and widened again, where the operation or a knob says so."""
    if not (step if knobs.bf16_step is None else knobs.bf16_step):
        return rows
    halves = round_to_bf16(np.ascontiguousarray(rows).view(np.uint32), knobs.bf16_rounding)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _transformed(rows: NDArray[np.float32], knobs: Knobs) -> NDArray[np.float32]:
    """Rows through an orthonormal Walsh-Hadamard transform, where a knob says so."""
    if not knobs.hadamard:
        return rows
    count, width = rows.shape
    step = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while step < width:
            pairs = rows.reshape(count, -1, 2, step)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            rows = np.stack([low + high, low - high], axis=2).reshape(count, width)
            step *= 2
        return rows * np.float32(width**-0.5)


def _rotate(
    rows: NDArray[np.float32],
    positions: NDArray[np.int64],
    table: NDArray[np.float32],
    ratio: int,
    knobs: Knobs,
) -> NDArray[np.float32]:
    """Rows with their last 64 values rotated."""
    if knobs.rotation == "none":
        return rows
    entry = positions // ratio
    at = {"first": entry * ratio, "last": positions, "entry": entry}[knobs.position]
    entries = table[at]
    if knobs.table == "bf16":
        halves = round_to_bf16(np.ascontiguousarray(entries).view(np.uint32), "even")
        entries = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    half = _ROPE_DIM // 2
    cos, sin = entries[:, :half], entries[:, half:]
    if knobs.table == "in_turn":
        cos, sin = entries[:, 0::2], entries[:, 1::2]
    if knobs.rotation == "inverse":
        sin = -sin
    tail = rows[:, -_ROPE_DIM:]
    if knobs.rotation == "halves":
        tail = tail.reshape(-1, 2, half).swapaxes(1, 2).reshape(-1, _ROPE_DIM)
    if knobs.fused == "none":
        turned = rotate_gptj(np.ascontiguousarray(tail), cos, sin)
    else:
        turned = _rotate_fused(tail, cos, sin, knobs.fused)
    if knobs.rotation == "halves":
        turned = turned.reshape(-1, half, 2).swapaxes(1, 2).reshape(-1, _ROPE_DIM)
    rotated = rows.copy()
    rotated[:, -_ROPE_DIM:] = turned
    return rotated


def _rotate_fused(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32], product: str
) -> NDArray[np.float32]:
    """The rotation with one product kept unrounded in a fused multiply-add."""
    even, odd = x[:, 0::2], x[:, 1::2]
    turned = np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        if product == "cos":
            turned[:, 0::2] = _fma(even, cos, -(odd * sin))
            turned[:, 1::2] = _fma(odd, cos, even * sin)
        else:
            turned[:, 0::2] = _fma(-odd, sin, even * cos)
            turned[:, 1::2] = _fma(even, sin, odd * cos)
    return turned


def _fma(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """a * b + c with one rounding to fp32.

    The product is exact in float64; their sum is rounded to odd there, so that the second rounding is
    the right one.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    other = total - product
    rest = (product - (total - other)) + (addend - other)
    toward = np.where(rest > 0, np.inf, -np.inf)
    even = (total.view(np.int64) & 1) == 0
    total = np.where((rest != 0) & even & np.isfinite(rest), np.nextafter(total, toward), total)
    return total.astype(np.float32)
