"""Hold the NumPy reference to other oracles over every input it can have; minutes.

    python -m tools.exhaust_reference                     # everything; writes proof/reference.json
    python -m tools.exhaust_reference --jobs 8            # the same with eight processes
    python -m tools.exhaust_reference "quantize N2/16"    # some of it; writes nothing

A scalar encoder and a scale encoder are step functions of the fp32 pattern, so that what they answer
to all 2**32 patterns is a short list of *runs*: first pattern, code. The runs are found by asking the
reference about every pattern. Two judges look at the answers:

1. The Fraction oracle of the tests (``tests/slow_oracle.py``) judges the first and the last pattern of
   every run. Rounding to nearest and rounding up never fall when a magnitude grows, and no run goes on
   across a change of sign or from infinity to NaN; so it agrees on all patterns in between as well.
2. The casts of ml_dtypes judge every single pattern, apart from those where they are declared to
   differ (SPEC 2: NaN, and saturation instead of NaN).

`quantize` is asked about every bf16 amax with every bf16 element that a group of that amax can hold.
Its judge takes the scale from the Fraction oracle, multiplies or divides in float64, rounds to fp32,
limits to the largest value, and casts with ml_dtypes.

`exp32` is no step function either. Its judge evaluates SPEC 1.3 in float64 and rounds every operation
to fp32: float64 has more than twice the digits and two more, which makes the second rounding harmless.

The record holds a hash of each list of runs. ``tests/test_exhaustive.py`` finds the same lists from
the Fraction oracle alone, by bisection, and compares the hashes.
"""

from __future__ import annotations

import argparse
import bisect
import datetime
import hashlib
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import dsv4num
from dsv4num.formats import get_rule
from dsv4num.reference import encode, encode_scale, exp32, quantize
from dsv4num.verify.exhaustive import groups_of_amax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import slow_oracle  # noqa: E402  (of the tests, which are no package)

#: Patterns at a time: few enough for the arrays to stay in the cache.
BLOCK = 1 << 18
INFINITY = 0x7F800000
MINUS_ZERO = 0x80000000
#: Where a run ends whatever the code: what comes next is of another kind. NaN, -0, negative NaN.
BREAKS = (INFINITY + 1, MINUS_ZERO, MINUS_ZERO + INFINITY + 1)
#: The sources that decide what the reference answers here.
SOURCES = (
    *("formats/scalar.py", "formats/group.py", "formats/arithmetic.py"),
    *("reference/scalar.py", "reference/group.py", "reference/arithmetic.py"),
)

Bits = NDArray[np.uint32]


@dataclass
class Runs:
    """Where the code changes as the pattern counts up: the whole of a step function."""

    firsts: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    end: int = 0  # one past the last pattern

    def add(self, start: int, codes: NDArray[Any]) -> None:
        """The next patterns, from `start` on, which is where the last ones ended."""
        assert start == self.end
        changed = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        starts = {0, *changed.tolist(), *(b - start for b in BREAKS if 0 < b - start < len(codes))}
        for at in sorted(starts):
            code = int(codes[at])
            if not self.codes or code != self.codes[-1] or start + at in BREAKS:
                self.firsts.append(start + at)
                self.codes.append(code)
        self.end = start + len(codes)

    def ends(self) -> Iterator[tuple[int, int]]:
        """The first and the last pattern of every run, with its code."""
        lasts = [first - 1 for first in self.firsts[1:]] + [self.end - 1]
        for first, last, code in zip(self.firsts, lasts, self.codes, strict=True):
            yield first, code
            yield last, code

    def digest(self) -> str:
        """SHA-256 of the first patterns as uint32 and the codes as uint16, little-endian."""
        firsts, codes = np.array(self.firsts, "<u4"), np.array(self.codes, "<u2")
        return hashlib.sha256(firsts.tobytes() + codes.tobytes()).hexdigest()


def runs_by_bisection(oracle: Callable[[int], int], end: int) -> Runs:
    """The runs of patterns below `end`, found with a few questions to an oracle per run."""
    runs = Runs(end=end)
    borders = [0, *(b for b in BREAKS if b < end), end]
    for start, stop in itertools.pairwise(borders):
        first = start
        while first < stop:
            code = oracle(first)
            runs.firsts.append(first)
            runs.codes.append(code)
            # False while the code is still this one; true from the first pattern of the next run on.
            rest = range(first, stop)
            first += bisect.bisect_left(rest, True, key=lambda bits, c=code: oracle(bits) != c)
    return runs


@dataclass(frozen=True)
class Encoder:
    """A step function of the reference, and its judges.

    Attributes:
        end: one past the last pattern that it takes.
        reference: codes of patterns.
        slow: the code of one pattern, by the Fraction oracle.
        cast: codes of patterns by ml_dtypes, or None where it has no such cast.
        agrees: the patterns on which the cast must agree.
        excepted: what the others are, in words.
    """

    end: int
    reference: Callable[[Bits], NDArray[Any]]
    slow: Callable[[int], int]
    cast: Callable[[Bits], NDArray[Any]] | None = None
    agrees: Callable[[Bits], NDArray[np.bool_]] | None = None
    excepted: str = ""


def magnitude_up_to(limit: int) -> Callable[[Bits], NDArray[np.bool_]]:
    """True where the pattern without its sign is at most `limit`."""
    return lambda bits: (bits & np.uint32(0x7FFFFFFF)) <= limit


def power_negative_or_nan(bits: Bits) -> NDArray[np.bool_]:
    """Where rounding up to a power of two and rounding to the nearest one agree, and NaN."""
    power = ((bits & np.uint32(0x7FFFFF)) == 0) & (bits > 0) & (bits <= INFINITY)
    below_zero = bits > MINUS_ZERO
    return power | below_zero | ((bits > INFINITY) & (bits < MINUS_ZERO))


def scalar_encoder(fmt: str) -> Encoder:
    """`encode` in one format."""
    dtype, agrees, excepted = {
        "ue8m0": (ml_dtypes.float8_e8m0fnu, power_negative_or_nan, "what is rounded, and zeros"),
        "e4m3fn": (ml_dtypes.float8_e4m3fn, magnitude_up_to(0x43E80000), "above 464, and NaN"),
        "e4m3fnuz": (
            ml_dtypes.float8_e4m3fnuz,
            magnitude_up_to(0x4377FFFF),
            "248 and above, and NaN",
        ),
        "e2m1": (ml_dtypes.float4_e2m1fn, magnitude_up_to(INFINITY), "NaN"),
        "bf16": (ml_dtypes.bfloat16, magnitude_up_to(INFINITY), "NaN"),
    }[fmt]

    def slow(bits: int) -> int:
        number = slow_oracle.fp32_value(bits)
        return slow_oracle.round_bf16(number) if fmt == "bf16" else slow_oracle.encode(number, fmt)

    def cast(bits: Bits) -> NDArray[Any]:
        with np.errstate(all="ignore"):
            codes = bits.view(np.float32).astype(dtype)
        return codes.view(np.uint16 if fmt == "bf16" else np.uint8)

    return Encoder(
        1 << 32, lambda bits: encode(bits.view(np.float32), fmt), slow, cast, agrees, excepted
    )


def scale_encoder(rule: str) -> Encoder:
    """`encode_scale` of one rule, which takes +0 to infinity."""
    return Encoder(
        INFINITY + 1,
        lambda bits: encode_scale(bits.view(np.float32), rule),
        lambda bits: slow_oracle.scale_code(slow_oracle.fp32_value(bits), rule),
    )


ENCODERS = {
    **{f"encode {fmt}": (scalar_encoder, fmt) for fmt in (*slow_oracle.WIDTHS, "bf16")},
    **{f"encode_scale {rule}": (scale_encoder, rule) for rule in slow_oracle.RULES},
}


def blocks(start: int, end: int) -> Iterator[tuple[int, Bits]]:
    """The patterns from `start` up to `end`, a block at a time."""
    for first in range(start, end, BLOCK):
        yield first, np.arange(first, min(first + BLOCK, end), dtype=np.uint32)


def exhaust_encoder(encoder: Encoder) -> dict[str, Any]:
    """Asks the reference about every pattern and the judges about the answers."""
    runs, compared, mismatches = Runs(), 0, 0
    for first, bits in blocks(0, encoder.end):
        codes = encoder.reference(bits)
        runs.add(first, codes)
        if encoder.cast is not None and encoder.agrees is not None:
            agrees = encoder.agrees(bits)
            compared += int(np.count_nonzero(agrees))
            mismatches += int(np.count_nonzero(agrees & (encoder.cast(bits) != codes)))
    wrong = [(bits, code) for bits, code in runs.ends() if encoder.slow(bits) != code]
    for bits, code in wrong[:20]:
        print(f"  {bits:08X}: reference {code:02X}, oracle {encoder.slow(bits):02X}", flush=True)
    found: dict[str, Any] = {
        "inputs": runs.end,
        "runs": len(runs.firsts),
        "runs_sha256": runs.digest(),
        "mismatches": mismatches + len(wrong),
    }
    if encoder.cast is not None:
        found |= {"ml_dtypes_compared": compared, "ml_dtypes_excepted": encoder.excepted}
    return found


#: element format -> its ml_dtypes, its largest value, the code of NaN
ELEMENTS = {
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448, 0x7F),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240, 0x80),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6, 0x7),
}


def quantize_by_casts(x: NDArray[Any], amax: int, rule: str) -> tuple[NDArray[np.uint8], int]:
    """Codes and the scale code of bf16 groups that have one amax, without the reference."""
    scale = slow_oracle.scale_code(slow_oracle.bf16_value(amax), rule)
    value = slow_oracle.scale_value(scale, rule)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        if rule == "N2/16":
            scaled = wide / float(value)
        else:
            scaled = wide * (0.0 if slow_oracle.is_nan(value) else float(1 / value))
        scaled = scaled.astype(np.float32)
        dtype, largest, nan = ELEMENTS[slow_oracle.RULES[rule][0]]
        codes = np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(nan), codes), scale


def exhaust_quantize(rule: str, amaxes: Iterable[int] = range(0x7F81)) -> dict[str, Any]:
    """Every bf16 amax with every bf16 element."""
    inputs = mismatches = 0
    facts = get_rule(rule)
    for amax in amaxes:
        x = groups_of_amax(facts, amax).view(ml_dtypes.bfloat16)
        codes, scales = quantize(x, facts)
        wanted, scale = quantize_by_casts(x, amax, rule)
        wrong = np.count_nonzero(codes != wanted) + np.count_nonzero(scales != scale)
        if wrong and not mismatches:
            print(f"  {rule}, amax {amax:04X}: {wrong} codes differ", flush=True)
        mismatches += int(wrong)
        inputs += x.size
    return {"inputs": inputs, "mismatches": mismatches}


def exp32_in_float64(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """SPEC 1.3 for -87 <= x <= 0, in float64, rounded to fp32 after every operation."""

    def rounded(value: NDArray[np.float64]) -> NDArray[np.float64]:
        return value.astype(np.float32).astype(np.float64)

    wide = x.astype(np.float64)
    magic = float.fromhex("0x1.8p+23")
    n = rounded(rounded(rounded(wide * float.fromhex("0x1.715476p+0")) + magic) - magic)
    high = rounded(wide - rounded(n * float.fromhex("0x1.62e4p-1")))
    low = rounded(n * float.fromhex("0x1.7f7d1cp-20"))
    r = rounded(high - low)
    p = np.float64(float.fromhex("0x1.6a48bcp-10"))
    for text in ("0x1.123998p-7", "0x1.5558b4p-5", "0x1.555492p-3", "0x1.fffffcp-2"):
        p = rounded(rounded(p * r) + float.fromhex(text))
    y = rounded(1.0 + rounded(high + rounded(rounded(rounded(r * r) * p) - low)))
    return np.ldexp(y, n.astype(np.int32)).astype(np.float32)


def exhaust_exp32() -> dict[str, Any]:
    """Every fp32 number from -87 to -0."""
    inputs = mismatches = 0
    digest = hashlib.sha256()
    for _, bits in blocks(MINUS_ZERO, 0xC2AE0001):
        x = bits.view(np.float32)
        y = exp32(x)
        inputs += len(x)
        mismatches += int(
            np.count_nonzero(y.view(np.uint32) != exp32_in_float64(x).view(np.uint32))
        )
        digest.update(y.astype("<f4").tobytes())
    return {"inputs": inputs, "results_sha256": digest.hexdigest(), "mismatches": mismatches}


NAMES = (*ENCODERS, *(f"quantize {rule}" for rule in slow_oracle.RULES), "exp32")


def exhaust(name: str) -> dict[str, Any]:
    """What the record says about one of `NAMES`."""
    began = time.perf_counter()
    operation, _, of = name.partition(" ")
    if operation == "exp32":
        found = exhaust_exp32()
    elif operation == "quantize":
        found = exhaust_quantize(of)
    else:
        make, _ = ENCODERS[name]
        found = exhaust_encoder(make(of))
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(f"{name}: {found}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="as in the record; all if not given"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}")
    package = Path(dsv4num.__file__).parent
    sources = {name: hashlib.sha256((package / name).read_bytes()).hexdigest() for name in SOURCES}
    names = given.names or NAMES
    if given.jobs > 1:
        with ProcessPoolExecutor(given.jobs) as pool:
            found = dict(zip(names, pool.map(exhaust, names), strict=True))
    else:
        found = {name: exhaust(name) for name in names}
    wrong = sum(result["mismatches"] for result in found.values())
    if not given.names:
        record = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "environment": {
                "dsv4num": dsv4num.__version__,
                "spec": dsv4num.SPEC_VERSION,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                **{name: metadata.version(name) for name in ("numpy", "ml_dtypes")},
            },
            # Of all processes together.
            "seconds": round(sum(result["seconds"] for result in found.values()), 1),
            "inputs": sum(result["inputs"] for result in found.values()),
            "mismatches": wrong,
            "sources": sources,
            "found": found,
        }
        (ROOT / "proof" / "reference.json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
