"""What no encoder of a layout writes: impossible codes of records, group by group. SPEC section 3.

What a sound record cannot hold, and why:

- "scale range": the scale of a finite group lies between that of a group of zeros, since the floor
  bounds it from below, and that of the largest fp32 number.
- "scale power": a scale stored as fp32 or bf16 is 2**e, where the rule rounds it to that.
- "copies": a scale that is stored several times is the same each time.
- "amax missing": the scale is the smallest that serves. For a power of two 2**e this means amax >
  qmax * 2**(e - 1), so that the largest element is above qmax / 2 in units of the scale, and since
  rounding keeps order its code is at least that of qmax / 2. For a scale rounded to nearest, amax / 6
  is at least the middle between this scale and the one below. A group at the floor is exempt.
- "beyond qmax": the same rule keeps every code at or below that of qmax.
- "nan": a NaN code comes from NaN or, by P1, infinity in the input alone. Possible, but poison.
- "pad": a pad byte has its pad value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.explain.encoder import field_columns
from dsv4num.formats import BF16, FP32, Field, GroupRule, Layout
from dsv4num.reference import decode, encode, encode_scale, unpack
from dsv4num.reference.record import load_scales

__all__ = ["Checked", "check_records"]


@dataclass(frozen=True)
class Checked:
    """A field of records, taken apart.

    Attributes:
        field: the "codes" field.
        codes: uint8 [T, groups, group], one per element.
        scales: fp32 [T, groups].
        scale_codes: the scales as they are stored, uint8, uint16 or uint32 [T, groups].
        wrong: bool [T, groups] by kind of finding.
    """

    field: Field
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    scale_codes: NDArray[np.generic]
    wrong: dict[str, NDArray[np.bool_]]


def check_records(records: NDArray[np.uint8], layout: Layout) -> list[Checked]:
    """Takes records apart and looks for what no encoder writes.

    Args:
        records: uint8 [T, row bytes], any bytes.
        layout: the layout.

    Returns:
        One entry per "codes" field.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> record = np.zeros((1, 68), np.uint8)
        >>> record[0, 64:] = 1, 1, 0x7D, 1  # the third group has a scale, but no element needs it
        >>> wrong = check_records(record, get_layout("indexer_mxfp4"))[0].wrong
        >>> {kind: found[0].tolist() for kind, found in wrong.items() if found.any()}
        {'amax missing': [False, False, True, False]}
    """
    columns = dict(field_columns(layout))
    found = []
    for entry, where in columns.items():
        if entry.kind != "codes" or entry.rule is None:
            continue
        stored = np.ascontiguousarray(records[:, where])
        codes = unpack(stored) if entry.rule.element.width == 4 else stored
        groups = codes.reshape(len(records), -1, entry.rule.group)
        scale = layout.scale_of(entry)
        if scale is None:  # 1, or given from outside
            scales = np.ones(groups.shape[:2], np.float32)
            wrong = {"nan": np.asarray(_nan(groups, entry.rule).any(axis=-1))}
            found.append(Checked(entry, groups, scales, scales.view(np.uint32), wrong))
            continue
        held = np.ascontiguousarray(records[:, columns[scale]])
        found.append(_check(entry, groups, held, scale, entry.rule))
    return found


def _nan(codes: NDArray[np.uint8], rule: GroupRule) -> NDArray[np.bool_]:
    """Which elements are NaN."""
    return np.isin(codes, [code for codes in rule.element.nan_codes for code in codes])


def _check(
    entry: Field,
    codes: NDArray[np.uint8],
    held: NDArray[np.uint8],
    scale: Field,
    rule: GroupRule,
) -> Checked:
    wrong: dict[str, NDArray[np.bool_]] = {}
    assert scale.format is not None
    scales = load_scales(held, scale)
    words: Any = {8: "u1", 16: "<u2", 32: "<u4"}[scale.format.width]
    copies = held.view(words).reshape(*scales.shape, scale.copies)
    stored = np.ascontiguousarray(copies[..., 0])
    if scale.copies > 1:
        wrong["copies"] = (copies != copies[..., :1]).any(axis=-1)
    least = 0 if rule.zero_scale is None else 2.0**-149  # a scale of zeros is judged on its own
    extremes = np.array([least, np.finfo(np.float32).max], np.float32)
    low, high = (int(code) for code in encode_scale(extremes, rule))
    scale_codes = stored.astype(np.int64)
    infinite = scale_codes == rule.infinite_code
    if scale.format is not rule.scale:  # 2**e as a number: its exponent is the code
        mantissa = 23 if scale.format is FP32 else 7
        wrong["scale power"] = (scale_codes & ((1 << mantissa) - 1) != 0) | (scales < 0)
        infinite = np.isposinf(scales)
        scale_codes >>= mantissa
    elif rule.scale.width > 8:
        infinite = ~np.isfinite(scales)
        if rule.scale is BF16:
            wrong["scale power"] = (scale_codes & 0x7F != 0) & ~infinite
    wrong["scale range"] = ((scale_codes < low) | (scale_codes > high)) & ~infinite
    if rule.zero_scale is not None:
        wrong["scale range"] &= scales != np.float32(rule.zero_scale)
    magnitude = codes & np.uint8(rule.element.sign_code - 1)
    nan = _nan(codes, rule)
    largest = np.where(nan, 0, magnitude).max(axis=-1)
    judged = ~wrong["scale range"] & ~infinite & (scale_codes > low)
    if rule.zero_scale is not None:
        judged &= scales != np.float32(rule.zero_scale)
    table = _least_code(rule)
    needed = table[np.clip(scale_codes, 0, 255)] if rule.scale.width == 8 else table[0]
    wrong["amax missing"] = judged & (largest < needed)
    if rule.scale_rounding == "up_to_power_of_two":
        most = int(encode(np.array([rule.qmax], np.float32), rule.element)[0])
        wrong["beyond qmax"] = largest > most
    wrong["nan"] = np.asarray(nan.any(axis=-1))
    return Checked(entry, codes, scales, stored, wrong)


def _least_code(rule: GroupRule) -> NDArray[np.uint8]:
    """For each scale code, the least code that the largest element of its group can have."""
    if rule.scale_rounding == "up_to_power_of_two":
        return np.repeat(encode(np.array([rule.qmax / 2], np.float32), rule.element), 256)
    if rule.floor_place == "added":  # whatever small amax there was
        return np.zeros(256, np.uint8)
    if rule.scale.width > 8:  # amax / scale is qmax, or in [4, 8) by the rule of bf16 scales
        smallest = 2 * rule.qmax / 3 if rule.scale is BF16 else rule.qmax * (1 - 2.0**-20)
        return encode(np.array([smallest], np.float32), rule.element)
    values = decode(np.arange(rule.scale.max_code + 1, dtype=np.uint8), rule.scale)
    below = np.concatenate([[0], values[:-1]])
    border = below if rule.scale_rounding == "up" else (below + values) / 2
    with np.errstate(invalid="ignore"):
        least = np.where(values > 0, border / values * rule.qmax, 0) * (1 - 2.0**-20)
    codes = encode(least.astype(np.float32), rule.element)
    return np.concatenate([codes, np.zeros(256 - len(codes), np.uint8)])
