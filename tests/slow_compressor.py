"""A second oracle of the compressor: loops over exact numbers, each operation rounded to fp32.

Written from the contract alone; it shares the numbers and the records of `slow_oracle`, and nothing
with the package under test. A cache here is a bytearray, a state a nested list of fp32 bit patterns.
The float64 and mpmath forms at the end round nothing on the way; they judge errors, not bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]  # has no types
import numpy as np
import slow_oracle as slow
from slow_oracle import INF, MINUS_ZERO, NAN, ZERO, Number, is_inf, is_nan, is_negative

Row = list[Number]
ONE = Fraction(1)

# --- fp32 operations ------------------------------------------------------------------


def add(x: Number, y: Number) -> Number:
    """fp32 sum."""
    if is_nan(x) or is_nan(y):
        return NAN
    if is_inf(x) or is_inf(y):
        if is_inf(x) and is_inf(y) and is_negative(x) != is_negative(y):
            return NAN
        return x if is_inf(x) else y
    total = Fraction(x) + Fraction(y)
    if total == 0:
        return MINUS_ZERO if is_negative(x) and is_negative(y) else ZERO
    return slow.round_fp32(total)


def negate(x: Number) -> Number:
    """The other sign."""
    if is_nan(x):
        return NAN
    return slow.signed(not is_negative(x), slow.magnitude(x))


def sub(x: Number, y: Number) -> Number:
    """fp32 difference."""
    return add(x, negate(y))


def mul(x: Number, y: Number) -> Number:
    """fp32 product."""
    return slow.round_fp32(slow.multiply(x, y))


def div(x: Number, y: Number) -> Number:
    """fp32 quotient."""
    if is_nan(x) or is_nan(y) or (is_inf(x) and is_inf(y)) or (x == 0 and y == 0):
        return NAN
    negative = is_negative(x) != is_negative(y)
    if is_inf(y):
        return slow.signed(negative, ZERO)
    if y == 0:
        return slow.signed(negative, INF)
    return slow.round_fp32(slow.divide(x, y))


def sqrt(x: Number) -> Number:
    """fp32 square root of a number of 0 or more."""
    if is_nan(x) or is_inf(x) or x == 0:
        return x
    # 60 bits more than fp32 has; the remainder makes the last of them sticky.
    value = Fraction(x)
    shift = 400
    whole = (value.numerator << (2 * shift)) // value.denominator
    root = math.isqrt(whole)
    exact = root * root == whole and whole * value.denominator == value.numerator << (2 * shift)
    return slow.round_fp32(Fraction(2 * root + (0 if exact else 1), 1 << (shift + 1)))


def from_bits(bits: int) -> Number:
    """The number of an fp32 pattern."""
    return slow.fp32_value(bits)


# --- clauses 1.2 to 1.4 and 5.5 -------------------------------------------------------

LOG2E, MAGIC = from_bits(0x3FB8AA3B), from_bits(0x4B400000)
LN2_HIGH, LN2_LOW = from_bits(0x3F317200), from_bits(0x35BFBE8E)
POLYNOMIAL = [from_bits(b) for b in (0x3AB5245E, 0x3C091CCC, 0x3D2AAC5A, 0x3E2AAA49, 0x3EFFFFFE)]


def exp32(x: Number) -> Number:
    """Clause 1.3."""
    if is_nan(x):
        return NAN
    if x < -87:
        return ZERO
    assert x <= 0
    n = sub(add(mul(x, LOG2E), MAGIC), MAGIC)
    high = sub(x, mul(n, LN2_HIGH))
    low = mul(n, LN2_LOW)
    r = sub(high, low)
    p = POLYNOMIAL[0]
    for coefficient in POLYNOMIAL[1:]:
        p = add(mul(p, r), coefficient)
    y = add(ONE, add(high, sub(mul(mul(r, r), p), low)))
    return Fraction(y) * slow.two(int(n))


def tree_sum(xs: Sequence[Number]) -> Number:
    """Clause 1.2, from the top down."""
    if len(xs) == 1:
        return xs[0]
    half = len(xs) // 2
    return add(tree_sum(xs[:half]), tree_sum(xs[half:]))


def pool(column: Sequence[tuple[Number, Number] | None]) -> Number:
    """One pooled value of (kv, score) pairs; None is a missing row."""
    scores = [pair[1] for pair in column if pair is not None and not is_nan(pair[1])]
    top: Number = max(scores) if scores else -INF
    weights: Row = []
    terms: Row = []
    for pair in column:
        if pair is None:
            weights.append(ZERO)
            terms.append(ZERO)
            continue
        weights.append(exp32(sub(pair[1], top)))
        terms.append(mul(weights[-1], pair[0]))
    return div(tree_sum(terms), tree_sum(weights))


def norm(row: Row, weight: Row, eps: Number) -> Row:
    """Clause 1.4."""
    mean = mul(tree_sum([mul(x, x) for x in row]), Fraction(1, len(row)))
    inverse = div(ONE, sqrt(add(mean, eps)))
    return [mul(mul(x, inverse), w) for x, w in zip(row, weight, strict=True)]


def rotate_tail(row: Row, entry: Row) -> Row:
    """Clause 5.5 on the last 64 values; `entry` is 32 cosines, then 32 sines."""
    turned = list(row)
    first = len(row) - 64
    for i in range(32):
        a, b = row[first + 2 * i], row[first + 2 * i + 1]
        c, s = entry[i], entry[32 + i]
        turned[first + 2 * i] = sub(mul(a, c), mul(b, s))
        turned[first + 2 * i + 1] = add(mul(b, c), mul(a, s))
    return turned


def bf16(row: Row) -> Row:
    """Every value rounded to bf16."""
    return [slow.bf16_value(slow.round_bf16(x)) for x in row]


# --- operations -----------------------------------------------------------------------


def store(
    row: Row, cache: bytearray, page_stride: int, slot: int, block_size: int, layout: str
) -> None:
    """Writes the record of one row."""
    data, scales = slow.record_of_numbers(row, slow.LAYOUTS[layout][3], layout)
    at_data, at_scales = slow.places(layout, block_size, page_stride, slot)
    cache[at_data : at_data + len(data)] = data
    cache[at_scales : at_scales + len(scales)] = scales


def compress(
    state: Sequence[Sequence[Sequence[int]]],
    requests: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
    block_table: Sequence[Sequence[int]],
    cos_sin: Sequence[Sequence[int]],
    cache: bytearray,
    page_stride: int,
    kv_slots: Sequence[int],
    block_size: int,
    weight: Row,
    eps: Number,
    ratio: int,
    overlap: bool,
    layout: str,
) -> None:
    """Clause 5.4, one token after the other."""
    dim = slow.LAYOUTS[layout][0]
    width = 2 * dim if overlap else dim
    for token, slot in enumerate(slots):
        position = positions[token]
        if slot < 0 or kv_slots[token] < 0 or position % ratio != ratio - 1:
            continue
        first = position - (2 * ratio if overlap else ratio) + 1
        row: Row = []
        for column in range(dim):
            pairs: list[tuple[Number, Number] | None] = []
            for p in range(first, position + 1):
                if p < 0:
                    pairs.append(None)
                    continue
                at = column + dim if overlap and p > position - ratio else column
                blocks = block_table[requests[token]]
                stored = state[blocks[p // len(state[0])]][p % len(state[0])]
                pairs.append((from_bits(stored[at]), from_bits(stored[width + at])))
            row.append(pool(pairs))
        entry = [from_bits(b) for b in cos_sin[position - ratio + 1]]
        row = bf16(rotate_tail(norm(row, weight, eps), entry))
        store(row, cache, page_stride, kv_slots[token], block_size, layout)


def rope_insert(
    latents: Sequence[Row],
    positions: Sequence[int],
    cos_sin: Sequence[Sequence[int]],
    cache: bytearray,
    page_stride: int,
    slots: Sequence[int],
    block_size: int,
    ratio: int,
    layout: str,
    round_trip: bool,
) -> None:
    """Clause 5.6, one token after the other."""
    for token, slot in enumerate(slots):
        position = positions[token]
        if slot < 0 or position % ratio != ratio - 1:
            continue
        row = rotate_tail(latents[token], [from_bits(b) for b in cos_sin[position - ratio + 1]])
        store(bf16(row) if round_trip else row, cache, page_stride, slot, block_size, layout)


def latent_of_pair(
    older: Sequence[int], newer: Sequence[int], weight: Row, eps: Number
) -> list[int]:
    """bf16 patterns of the latent of two rows of fp32 patterns, kv then scores (clause 5.10)."""
    dim = len(newer) // 2
    rows = [[from_bits(b) for b in row] for row in (older, newer)]
    pooled = [pool([(row[i], row[dim + i]) for row in rows]) for i in range(dim)]
    return [slow.round_bf16(x) for x in norm(pooled, weight, eps)]


# --- without rounding -----------------------------------------------------------------


def float64_row(
    kv: Any, score: Any, present: Any, weight: Any, eps: float, entry: Any
) -> tuple[Any, Any, Any]:
    """Pooled, normed and rotated row in float64; kv and score [N, D], present [N]."""
    kv, score = np.float64(kv)[present], np.float64(score)[present]
    w = np.exp(score - score.max(axis=0))
    pooled = (w * kv).sum(axis=0) / w.sum(axis=0)
    normed = pooled / np.sqrt((pooled * pooled).mean() + eps) * np.float64(weight)
    return pooled, normed, float64_rotate(normed, entry)


def float64_rotate(row: Any, entry: Any) -> Any:
    """The last 64 values rotated, in float64."""
    turned = np.float64(row).copy()
    a, b = turned[-64::2].copy(), turned[-63::2].copy()
    c, s = np.float64(entry[:32]), np.float64(entry[32:])
    turned[-64::2] = a * c - b * s
    turned[-63::2] = b * c + a * s
    return turned


def bf16_of_float64(x: Any) -> Any:
    """bf16 patterns of float64 numbers, rounded once."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    back = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    bits -= np.abs(back) > np.abs(x)  # toward zero, then the lowest bit made sticky
    bits |= back != x
    upper, rest = bits >> 16, bits & 0xFFFF
    upper += (rest > 0x8000) | ((rest == 0x8000) & (upper & 1 == 1))
    return upper.astype(np.uint16)


def mpmath_row(
    kv: list[list[float]], score: list[list[float]], weight: list[float], eps: float
) -> list[Any]:
    """Pooled and normed row by mpmath, at the precision in force."""
    pooled = []
    for column in range(len(weight)):
        top = max(row[column] for row in score)
        w = [mpmath.exp(mpmath.mpf(row[column]) - top) for row in score]
        total = sum(a * mpmath.mpf(row[column]) for a, row in zip(w, kv, strict=True))
        pooled.append(total / sum(w))
    mean = sum(x * x for x in pooled) / len(pooled)
    inverse = 1 / mpmath.sqrt(mean + mpmath.mpf(eps))
    return [x * inverse * mpmath.mpf(w) for x, w in zip(pooled, weight, strict=True)]
