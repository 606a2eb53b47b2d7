"""Compares two byte buffers and says what differs, in terms of the operation. Text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import Dsv4numError
from dsv4num.explain.call import CACHES, explain_call
from dsv4num.formats import FP32, get_layout
from dsv4num.reference import decode
from dsv4num.verify.case import Case, rebase
from dsv4num.verify.operations import Operation, Place

if TYPE_CHECKING:
    from dsv4num.verify.profile import Profile

#: A mismatch report has at most this many lines.
MAX_LINES = 20
#: Its heading, its count, "and more", up to four lines of reasons, and the line that reproduces it.
_OTHER_LINES = 8
_SAMPLE = 2048

#: Facts that the search states of bytes that are all equal.
_UNWRITTEN = ("rows-not-written", "fields-not-written")
_UNKNOWN = "not recognised"
_FOLLOWED = "the scale is chosen differently, and the elements follow it"
#: Reasons that do not stand where the search for dialects found none.
_VAGUE = (_UNKNOWN, _FOLLOWED)
_OUTSIDE = "a write outside the rows that the operation owns"


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
    *,
    profile: Profile | None = None,
    explained: bool = True,
) -> list[str]:
    """What differs in one output: a count, the places of the first codes, likely reasons.

    Args:
        operation: what ran.
        case: on what.
        output: name of the output.
        start: the byte of the buffer where the output starts.
        expected: the whole buffer after the oracle.
        observed: the whole buffer after the kernel.
        fill: the poison that the output held before, if any.
        profile: whose contract the expected bytes keep, if it is not the oracle.
        explained: whether to look for the dialects of whoever wrote a cache, which takes a while.
    """
    where = differing_bytes(expected, observed)
    lines = [f"{output}: {len(where):,} bytes differ"]
    places = _places(operation, case, output, start, where)
    shown = _choose(places)
    for place in shown:
        want = expected[place.first : place.first + place.nbytes]
        got = observed[place.first : place.first + place.nbytes]
        lines.append(f"  {place.text}: expected {_code(want, place)}, got {_code(got, place)}")
    if len(places) > len(shown):
        lines.append("  ... and more")
    owned = [place for place in places if place.kind != "unowned"]
    if not owned:
        return [*lines, f"  likely: {_OUTSIDE}"]
    certain = None if fill is None else _certain_reason(owned, expected, observed, fill)
    reason = certain or _reason(owned, expected, observed)
    dialects = None
    if fill is not None and explained and certain is None:
        dialects = _dialects(operation, case, output, observed, fill, profile, reason)
    if dialects:
        lines += dialects
    elif dialects is not None and reason in _VAGUE:
        lines.append("  unexplained: no dialect, alone or in a pair, explains these bytes")
    else:
        lines.append(f"  likely: {reason}")
    if len(owned) < len(places):
        lines.append(f"  and: {_OUTSIDE}")
    return lines


def _places(
    operation: Operation, case: Case, output: str, start: int, where: NDArray[np.int64]
) -> list[Place]:
    """The places of the differing bytes; of many, the first ones and others spread over the rest."""
    if len(where) > 2 * _SAMPLE:
        spread = np.linspace(_SAMPLE, len(where) - 1, _SAMPLE).astype(np.int64)
        where = np.concatenate([where[:_SAMPLE], where[spread]])
    found: dict[int, Place] = {}
    for byte in where:
        place = operation.locate(case, output, int(byte), start)
        found.setdefault(place.first, place)
    return list(found.values())


def _choose(places: list[Place]) -> list[Place]:
    """The places to show: the first ones, and at least one of every kind."""
    room = MAX_LINES - _OTHER_LINES
    firsts = {place.kind: place for place in reversed(places)}
    chosen = list(firsts.values()) + [p for p in places if p is not firsts[p.kind]]
    return sorted(chosen[:room], key=lambda place: place.first)


def _code(stored: NDArray[np.uint8], place: Place) -> str:
    """A code in hex and decoded."""
    fmt = place.format
    text = "0x" + stored[::-1].tobytes().hex().upper()
    if fmt is None:
        return text
    if fmt is FP32:
        return f"{text} = {stored.view('<f4')[0]:.9g}"
    if fmt.width == 16:
        return f"{text} = {float(stored.view('<u2').view(ml_dtypes.bfloat16)[0]):.9g}"
    if place.packed:
        low, high = decode(np.array([stored[0] & 15, stored[0] >> 4], np.uint8), fmt)
        return f"{text} = ({low:g}, {high:g})"
    if int(stored[0]) >= fmt.codes:
        return text
    return f"{text} = {decode(stored, fmt)[0]:.9g}"


def _whole_codes(buffer: NDArray[np.uint8], places: list[Place]) -> NDArray[np.int64]:
    """The codes at the places as integers; of two packed codes, one after the other."""
    codes = []
    for place in places:
        code = int.from_bytes(buffer[place.first : place.first + place.nbytes].tobytes(), "little")
        codes += [code & 15, code >> 4] if place.packed else [code]
    return np.array(codes, np.int64)


def _dialects(
    operation: Operation,
    case: Case,
    output: str,
    observed: NDArray[np.uint8],
    fill: int,
    profile: Profile | None,
    reason: str,
) -> list[str] | None:
    """Which dialects of other writers explain a cache: the best hypotheses, at most three lines.

    None where there is nothing to search, an empty list where the search found nothing.

    Two dialects at once may be too clever an answer: then the reason found without them is said too.
    """
    if CACHES.get(operation.name) != output:
        return None
    given = {**case.arguments, **case.keywords, **case.reference}
    try:
        found = explain_call(operation.name, given, rebase(case.arguments[output], observed))
    except Dsv4numError:  # a call that the search does not take
        found = None
    if found is None:
        return None
    layout = get_layout(case.keywords["layout"])
    declared = profile is not None and profile.dialects(operation.name, layout)
    if declared and found.status == "no difference":
        return ["  against SPEC: no difference"]
    # What was not written holds the poison: one equal byte all over is no sign of it here.
    told = [h for h in found.hypotheses if h.names[0] not in _UNWRITTEN or f" {fill:02X}" in h.text]
    if not told:
        return []
    lead = "against SPEC" if declared else "likely"
    first, *others = told
    lines = [f"  {lead}: {first.sentence()}"]
    equal = [other for other in others if first.exact and other.exact]
    lines += [f"  or: {other.sentence()}" for other in equal[:1]]
    if equal and found.separating:
        lines.append(f"  what would tell: {found.separating}")
    if not equal and len(first.names) > 1 and reason != _UNKNOWN:
        lines.append(f"  or: {reason}")
    return lines


def _certain_reason(
    places: list[Place],
    expected: NDArray[np.uint8],
    observed: NDArray[np.uint8],
    fill: int,
) -> str | None:
    """A reason that leaves no doubt, because of the poison that the output held."""
    untouched = _whole_codes(np.full_like(expected, fill), places)
    if bool((_whole_codes(observed, places) == untouched).all()):
        return "bytes that were never written (the poison is still there)"
    if bool((_whole_codes(expected, places) == untouched).all()):
        return "bytes written where the oracle writes nothing"
    return None


def _reason(places: list[Place], expected: NDArray[np.uint8], observed: NDArray[np.uint8]) -> str:
    """The likeliest reason, from what kinds of byte differ and how."""
    kinds = {place.kind for place in places}
    want, got = _whole_codes(expected, places), _whole_codes(observed, places)
    if kinds == {"pad"}:
        return "padding not written with its pad value"
    if kinds == {"scale"}:
        steps = _steps(places, want, got)
        return f"the scale is chosen differently{steps}, and the elements do not follow it"
    if "scale" in kinds:
        return _FOLLOWED
    if all(place.packed for place in places) and bool(
        (want.reshape(-1, 2) == got.reshape(-1, 2)[:, ::-1]).all()
    ):
        return "nibbles swapped"
    formats = {place.format for place in places}
    if len(formats) == 1 and (fmt := formats.pop()) is not None and fmt.signed:
        differs = want != got
        if bool((((want | got)[differs] & (fmt.sign_code - 1)) == 0).all()):
            return "the sign of zero"
    if bool((np.abs(got - want) <= 1).all()):
        return "rounding: every difference is one code (a tie rule, or one rounding too many)"
    return _UNKNOWN


def _steps(places: list[Place], want: NDArray[np.int64], got: NDArray[np.int64]) -> str:
    """By how much scales differ, if it is the same everywhere: in codes, or in powers of two."""
    shifts = set((got - want).tolist())
    if len(shifts) > 1:
        return ""
    shift = shifts.pop()
    if places[0].format is not FP32:
        return f", always by {shift:+d}"
    exponent, rest = divmod(shift, 1 << 23)
    return "" if rest else f", always by a factor of 2^{exponent}"
