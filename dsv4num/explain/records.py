"""What no encoder of a layout writes: impossible codes of records, group by group. SPEC section 3.

What a sound record cannot hold, and why:

- "scale range": the scale of a finite group lies between that of a group of zeros, since the floor
  bounds it from below, and that of the largest fp32 number.
- "scale power": an fp32 scale is 2**e.
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

import numpy as np
from numpy.typing import NDArray

from dsv4num.explain.encoder import field_columns
from dsv4num.formats import FP32, Field, GroupRule, Layout
from dsv4num.reference import decode, encode, encode_scale, unpack

__all__ = ["Checked", "check_records"]


@dataclass(frozen=True)
class Checked:
    """A field of records, taken apart.

    Attributes:
        field: the "codes" field.
        codes: uint8 [T, groups, group], one per element.
        scales: fp32 [T, groups].
        scale_codes: the scales as they are stored, uint8 or uint32 [T, groups].
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
        scale = next(f for f in columns if f.kind == "scale" and f.dims == entry.dims)
        held = np.ascontiguousarray(records[:, columns[scale]])
        groups = codes.reshape(len(records), -1, entry.rule.group)
        found.append(_check(entry, groups, held, scale, entry.rule))
    return found


def _check(
    entry: Field,
    codes: NDArray[np.uint8],
    held: NDArray[np.uint8],
    scale: Field,
    rule: GroupRule,
) -> Checked:
    wrong: dict[str, NDArray[np.bool_]] = {}
    low, high = (
        int(c) for c in encode_scale(np.array([0, np.finfo(np.float32).max], np.float32), rule)
    )
    if scale.format is FP32:
        words = held.view("<u4").astype(np.uint32)
        scales = words.view(np.float32)
        scale_codes = (words >> np.uint32(23)).astype(np.int64)
        infinite = words == 0x7F800000
        wrong["scale power"] = ((words & np.uint32(0x7FFFFF)) != 0) | (words >> np.uint32(31) == 1)
        stored: NDArray[np.generic] = words
    else:
        scales = decode(held, rule.scale)
        scale_codes = held.astype(np.int64)
        infinite = scale_codes == rule.infinite_code
        stored = held
    wrong["scale range"] = ((scale_codes < low) | (scale_codes > high)) & ~infinite
    magnitude = codes & np.uint8(rule.element.sign_code - 1)
    nan = np.isin(codes, [code for codes in rule.element.nan_codes for code in codes])
    largest = np.where(nan, 0, magnitude).max(axis=-1)
    needed = _least_code(rule)[np.clip(scale_codes, 0, 255)]
    judged = ~wrong["scale range"] & ~infinite & (scale_codes > low)
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
    values = decode(np.arange(rule.scale.max_code + 1, dtype=np.uint8), rule.scale)
    middles = np.concatenate([[0], (values[:-1] + values[1:]) / 2])
    with np.errstate(invalid="ignore"):
        least = np.where(values > 0, middles / values * rule.qmax, 0) * (1 - 2.0**-20)
    codes = encode(least.astype(np.float32), rule.element)
    return np.concatenate([codes, np.zeros(256 - len(codes), np.uint8)])
