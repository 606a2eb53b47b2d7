"""Compares two byte buffers and says what differs, in terms of the operation. Text for people."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import FP32, FloatFormat
from dsv4num.reference import decode
from dsv4num.verify.case import Case
from dsv4num.verify.operations import Operation, Place

#: A mismatch report has at most this many lines.
MAX_LINES = 20


def differing_bytes(expected: NDArray[np.uint8], observed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Indices of the bytes that differ."""
    return np.flatnonzero(expected != observed)


def explain_mismatch(
    operation: Operation,
    case: Case,
    output: str,
    start: int,
    expected: NDArray[np.uint8],
    observed: NDArray[np.uint8],
    fill: int | None,
) -> list[str]:
    """What differs in one output: a count, the places of the first codes, a likely reason.

    Args:
        operation: what ran.
        case: on what.
        output: name of the output.
        start: the byte of the buffer where the output starts.
        expected: the whole buffer after the oracle.
        observed: the whole buffer after the kernel.
        fill: the poison that the output held before, if any.
    """
    where = differing_bytes(expected, observed)
    lines = [f"{output}: {len(where)} of {len(expected)} bytes differ"]
    seen: set[int] = set()
    places: list[Place] = []
    for byte in where:
        place = operation.locate(case, output, int(byte), start)
        if place.first in seen:
            continue
        seen.add(place.first)
        places.append(place)
        if len(places) > 4096:
            break
    for place in places[: MAX_LINES - 5]:
        want = expected[place.first : place.first + place.nbytes]
        got = observed[place.first : place.first + place.nbytes]
        lines.append(
            f"  {place.text}: expected {_code(want, place.format)}, got {_code(got, place.format)}"
        )
    if len(places) > MAX_LINES - 5:
        lines.append(f"  ... {len(places) - (MAX_LINES - 5)} more codes")
    lines.append("  likely: " + _reason(places, expected, observed, fill))
    return lines


def _code(stored: NDArray[np.uint8], fmt: FloatFormat | None) -> str:
    """A code in hex and decoded."""
    text = "0x" + stored[::-1].tobytes().hex().upper()
    if fmt is None:
        return text
    if fmt is FP32:
        return f"{text} = {stored.view('<f4')[0]:.9g}"
    if fmt.width == 16:
        return f"{text} = {float(stored.view('<u2').view(ml_dtypes.bfloat16)[0]):.9g}"
    if fmt.width == 4:
        low, high = decode(np.array([stored[0] & 15, stored[0] >> 4], np.uint8), fmt)
        return f"{text} = ({low:g}, {high:g})"
    return f"{text} = {decode(stored, fmt)[0]:.9g}"


def _reason(
    places: list[Place],
    expected: NDArray[np.uint8],
    observed: NDArray[np.uint8],
    fill: int | None,
) -> str:
    """The likeliest reason, from what kinds of byte differ and how."""
    kinds = {place.kind for place in places}
    first = np.array([place.first for place in places])
    want, got = expected[first].astype(np.int16), observed[first].astype(np.int16)
    if kinds == {"unowned"}:
        return "a write outside the rows that the operation owns"
    if fill is not None and bool((got == fill).all()):
        return "bytes that were never written (the poison is still there)"
    if kinds == {"pad"}:
        return "padding not written with its pad value"
    if kinds == {"scale"}:
        shifts = set((got - want).tolist())
        one = f", always by {shifts.pop():+d}" if len(shifts) == 1 else ""
        return f"the scale is chosen differently{one}, and the elements do not follow it"
    if "scale" in kinds:
        return "the scale is chosen differently, and the elements follow it"
    if all(place.format is not None and place.format.width == 4 for place in places):
        swapped = ((want & 15) << 4) | (want >> 4)
        if bool((swapped == got).all()):
            return "nibbles swapped"
        low, high = (got & 15) - (want & 15), (got >> 4) - (want >> 4)
        steps = np.concatenate([low, high])
    else:
        steps = got - want
    if bool((np.abs(steps) <= 1).all()):
        return "rounding: every difference is one code (a tie rule, or one rounding too many)"
    return "not recognised"
