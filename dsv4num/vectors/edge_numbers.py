"""Edge vectors of single numbers, groups, sums and rotations. SPEC sections 1 to 3, clause 5.5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import FloatFormat, GroupRule
from dsv4num.reference import build_cos_sin_cache, decode
from dsv4num.vectors.generator import Numbers, two_to
from dsv4num.vectors.vector import (
    RULES,
    SCALARS,
    Array,
    Vector,
    bf16_bits,
    bits,
    fp32,
    from_bits,
    make,
)

_SIGN = 0x80000000
_NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)


def _bits(value: float) -> int:
    """The bit pattern of a number in fp32."""
    return int(bits(fp32(value))[0])


# --- scalar formats -------------------------------------------------------------------


def _notable(fmt: FloatFormat) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Bit patterns of fp32 numbers, what they are for the format, and flags."""
    yield 0, "+0", ("SignedZero",)
    yield _SIGN, "-0", ("SignedZero",)
    for bit in (1, 0x007FFFFF):
        text = f"the {'smallest' if bit == 1 else 'largest'} fp32 subnormal"
        yield bit, text, ("Subnormal",)
        yield _SIGN | bit, f"{text}, negative", ("Subnormal", "SignedZero")
    yield _bits(1), "1", ()
    yield _bits(-1), "-1", ()
    yield _bits(0.3), "0.3, in no format exactly", ()
    yield 0x7F7FFFFF, "the largest fp32", ("Saturation",)
    yield 0xFF7FFFFF, "the largest fp32, negative", ("Saturation",)
    yield 0x7F800000, "+infinity", ("Infinity",)
    yield 0xFF800000, "-infinity", ("Infinity",)
    for pattern in _NANS:
        yield pattern, "NaN, sign and payload of which do not matter", ("NaN",)
    if fmt.name == "ue8m0":
        for exponent in (-127, -126, 0, 1, 126, 127):
            exact = _bits(2.0**exponent)
            yield exact - 1, f"one step below 2^{exponent}: up to it", ("NearTie",)
            yield exact, f"2^{exponent}", ()
            yield exact + 1, f"one step above 2^{exponent}: up, never down", ("NearTie",)
        return
    largest = decode(np.array([fmt.max_code], np.uint16 if fmt.width == 16 else np.uint8), fmt)
    below = decode(np.array([fmt.max_code - 1], np.uint16 if fmt.width == 16 else np.uint8), fmt)
    step = float(largest[0]) - float(below[0])
    one = fmt.bias << fmt.mantissa_bits
    for code in (0, 1, one, one + 1):
        pair = np.array([code, code + 1], np.uint16 if fmt.width == 16 else np.uint8)
        low, high = (float(value) for value in decode(pair, fmt))
        middle = _bits((low + high) / 2)
        for sign in (0, _SIGN):
            where = f"between code {code:x} and the next"
            flags: tuple[str, ...] = ("SignedZero",) if sign and not code else ()
            yield sign | middle, f"the middle {where}: to the even one", ("Tie", *flags)
            if middle > 1:
                yield sign | (middle - 1), f"one step below the middle {where}", ("NearTie", *flags)
            yield sign | (middle + 1), f"one step above the middle {where}", ("NearTie", *flags)
    if fmt.width < 16:
        for excess, text in (
            (0, "the largest value"),
            (0.5, "half a step beyond the largest value"),
        ):
            for off in (-1, 0, 1):
                pattern = _bits(float(largest[0]) + excess * step) + off
                for sign in (0, _SIGN):
                    yield sign | pattern, f"{text}, {off:+d} fp32 steps", ("Saturation",)
    else:
        for pattern in (0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000):
            yield (
                pattern,
                "about the largest value: half a step beyond becomes infinity",
                ("Saturation",),
            )
    for pattern in (0x43C83333, 0x3F880001, 0x41880001, 0x40200001, 0x3F808001):
        yield pattern, "shows rounding twice: by way of fp16 or bf16 it is a middle", ("NearTie",)


def _boundaries(fmt: FloatFormat) -> NDArray[np.float32]:
    """Every value, every middle and the fp32 steps beside them; of bf16 a part."""
    if fmt.width == 16:
        codes = np.arange(0, 0x7F80, 61, dtype=np.int64)
        near = np.concatenate([codes << 16, codes << 16 | 0x8000])
    else:
        values = decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
        all_values = np.concatenate([values, (values[1:] + values[:-1]) / 2])
        near = all_values.astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.clip(near[:, None] + np.arange(-1, 2), 0, 0x7F7FFFFF).astype(np.uint32).ravel()
    return np.concatenate([around, around | np.uint32(_SIGN)]).view(np.float32)


def scalar() -> Iterator[Vector]:
    """`encode`, `decode`, `pack`, `unpack`."""
    for fmt in SCALARS.values():
        nan = ("known_difference_1",) if fmt.name in ("e4m3fn", "e4m3fnuz", "e2m1") else ()
        seen: set[int] = set()
        for pattern, comment, flags in _notable(fmt):
            if pattern not in seen:
                seen.add(pattern)
                yield make(
                    f"encode.{fmt.name}.{pattern:08x}",
                    "encode",
                    comment,
                    {"fmt": fmt.name},
                    flags=flags or ("Any",),
                    policy=nan if "NaN" in flags else (),
                    clause=fmt.clause,
                    x=from_bits(pattern),
                )
        part = "every value and middle" if fmt.width < 16 else "every 61st value and its middle"
        yield make(
            f"encode.{fmt.name}.boundaries",
            "encode",
            f"{part}, and one fp32 step to either side, of both signs",
            {"fmt": fmt.name},
            flags=("Boundary", "Tie", "NearTie"),
            clause=fmt.clause,
            x=_boundaries(fmt),
        )
        patterns = np.arange(0, 1 << 16, 37, dtype=np.int64)
        yield make(
            f"encode.{fmt.name}.bf16",
            "encode",
            "every 37th bf16 number, given as bf16",
            {"fmt": fmt.name},
            flags=("Any", "NaN", "Subnormal"),
            policy=nan,
            clause=fmt.clause,
            x=bf16_bits(patterns),
        )
        if fmt.width == 16:
            codes: Array = np.array(
                [0, 0x8000, 1, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0xFFC3], np.uint16
            )
            comment = "a zero of each sign, a subnormal, infinity, and NaN payloads, which are kept"
        else:
            codes, comment = np.arange(fmt.codes).astype(np.uint8), "every code"
        yield make(
            f"decode.{fmt.name}.codes",
            "decode",
            comment,
            {"fmt": fmt.name},
            flags=("EveryCode", "NaN"),
            policy=("known_difference_2", "known_difference_3") if fmt.name == "ue8m0" else (),
            clause=fmt.clause,
            codes=codes,
        )
    for low, high in ((1, 2), (0, 15), (15, 0), (7, 8)):
        yield make(
            f"pack.{low:x}{high:x}",
            "pack",
            "the element with the even index is in the low nibble",
            flags=("Packing",),
            codes=np.array([low, high], np.uint8),
        )
    yield make(
        "pack.spec",
        "pack",
        "four elements: neighbours share a byte, not the halves of a row",
        flags=("Packing",),
        codes=np.array([7, 0, 2, 2], np.uint8),
    )
    every = np.arange(256)
    yield make(
        "pack.pairs",
        "pack",
        "every pair of codes",
        flags=("Packing", "EveryCode"),
        codes=np.stack([every & 15, every >> 4], axis=-1).astype(np.uint8).reshape(512),
    )
    yield make(
        "unpack.bytes",
        "unpack",
        "every byte",
        flags=("Packing", "EveryCode"),
        packed=every.astype(np.uint8),
    )


# --- group rules ----------------------------------------------------------------------


def _groups(rule: GroupRule) -> Iterator[tuple[str, str, tuple[str, ...], list[float]]]:
    """Groups of values: a name, a comment, flags, and the first elements; the last one repeats."""
    qmax, floor = rule.qmax, float(np.float32(rule.floor))
    floor = floor * qmax if rule.scaling == "divide" else floor  # on amax
    beyond = float(np.nextafter(np.float32(qmax), np.float32(np.inf)))
    below = float(np.nextafter(np.float32(floor), np.float32(0)))
    above = float(np.nextafter(np.float32(floor), np.float32(1)))
    nan, inf = float("nan"), float("inf")
    yield "zeros", "a group of +0 has the scale of the floor", ("Floor",), [0.0]
    yield "minus-zeros", "a group of -0: the codes keep the signs", ("Floor", "SignedZero"), [-0.0]
    yield "ones", "a group of 1", ("Any",), [1.0]
    yield "spec-300", "one large element", ("Any",), [300.0, 1.0]
    yield "qmax", "amax is the largest that scale 1 serves", ("Octave",), [qmax]
    yield "beyond-qmax", "one fp32 step more: the next scale", ("Octave",), [beyond]
    yield "qmax-256", "the same at scale 256", ("Octave",), [qmax * 256, qmax]
    yield "floor", "amax is the floor", ("Floor",), [floor, 0.0]
    yield "below-floor", "amax one fp32 step below the floor", ("Floor",), [below, 0.0]
    yield "above-floor", "amax one fp32 step above the floor", ("Floor",), [above, 0.0]
    yield "tiny", "fp32 subnormals", ("Floor", "Subnormal"), [1e-40, -1e-45]
    yield "huge", "the largest fp32 number", ("Saturation",), [3.4028234663852886e38, -1.0]
    yield "negative", "the largest magnitude is negative", ("Any",), [-300.0, 1.0]
    yield "last", "the largest element is the last", ("Any",), [*[1.0] * (rule.group - 1), 500.0]
    yield "first", "the largest element is the first", ("Any",), [500.0, -1.0]
    yield "nan", "a NaN has no part in amax", ("NaN",), [nan, 1.0]
    yield "all-nan", "NaN alone: the scale of a zero group", ("NaN", "Floor"), [nan]
    yield "infinity", "one infinity", ("Infinity", "SignedZero"), [inf, -1.0]
    yield "minus-infinity", "an infinity among the largest", ("Infinity",), [-inf, 3e38]
    yield "infinity-nan", "an infinity, a NaN and zeros", ("Infinity", "NaN"), [inf, nan, -0.0, 0.0]
    top = float(qmax)
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -2.5]
    if rule.element.width == 8:
        middles = [17.0, 19.0, 1.0625, 1.1875, -17.0, 2.0**-10, -(2.0**-10), 3 * 2.0**-10]
    yield "middles", "middles of the element format at scale 1", ("Tie",), [top, *middles, 0.0]
    scaled = [middle * 2.0**20 for middle in (top, *middles, 0.0)]
    yield "middles-scaled", "middles of the element format at scale 2^20", ("Tie",), scaled
    if rule.scaling == "divide":
        comment = "the scale is rounded down, so that an element saturates"
        yield "lifted", comment, ("Saturation",), [6.3, -6.3, 3.0]
        yield (
            "2688",
            "amax is 6 * 448, the last that the scale serves",
            ("Saturation",),
            [2688.0, 1.0],
        )
        yield "2800", "amax is beyond 6 * 448", ("Saturation",), [2800.0, 2688.0, 1.0]


def _divisions() -> NDArray[np.float32]:
    """Groups of 16: the largest element and the middles, of both signs, times every normal scale."""
    half = fp32(6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
    middles = np.concatenate([half, -half])
    scales = decode(np.arange(8, 0x7F, dtype=np.uint8), "e4m3fn")
    groups: NDArray[np.float32] = scales[:, None] * middles
    return groups


def _amaxes(rule: GroupRule) -> NDArray[np.float32]:
    """Around every amax where the scale steps, 2^e for every e, and the floor."""
    exponents = np.arange(-149, 128)
    borders = np.concatenate(
        [
            np.ldexp(np.float64(rule.qmax), exponents[exponents < 126]),
            np.ldexp(1.0, exponents),
            [rule.floor, rule.floor * rule.qmax, 2688, 2800],
        ]
    )
    if rule.scaling == "divide":  # the scale is rounded to nearest: where it steps
        values = decode(np.arange(0x7F, dtype=np.uint8), rule.scale).astype(np.float64)
        borders = np.concatenate(
            [borders, rule.qmax * values, rule.qmax * (values[1:] + values[:-1]) / 2]
        )
    with np.errstate(over="ignore", under="ignore"):
        near = borders.astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.clip(near[:, None] + np.arange(-1, 2), 0, 0x7F800000)
    return np.unique(around).astype(np.uint32).view(np.float32)


def group() -> Iterator[Vector]:
    """`encode_scale`, `quantize`, `dequantize`."""
    for rule in RULES.values():
        slug = rule.name.lower().replace("/", "-")
        clause = rule.clause
        for pattern, comment, flag in (
            (0, "a zero group", "Floor"),
            (_bits(rule.floor), "the floor", "Floor"),
            (_bits(rule.floor) + 1, "one step above the floor", "Floor"),
            (_bits(rule.qmax), "the largest amax of scale 1", "Octave"),
            (_bits(rule.qmax) + 1, "one step beyond it", "Octave"),
            (0x7F7FFFFF, "the largest fp32", "Saturation"),
            (0x7F800000, "infinity", "Infinity"),
        ):
            yield make(
                f"encode_scale.{slug}.{pattern:08x}",
                "encode_scale",
                comment,
                {"rule": rule.name},
                flags=(flag,),
                clause=clause,
                amax=from_bits(pattern),
            )
        yield make(
            f"encode_scale.{slug}.octaves",
            "encode_scale",
            "every amax where the scale steps, and one fp32 step to either side",
            {"rule": rule.name},
            flags=("Octave", "Floor"),
            policy=("known_difference_5",) if rule.scale.name == "ue8m0" else (),
            clause=clause,
            amax=_amaxes(rule),
        )
        for name, comment, flags, values in _groups(rule):
            first = values[: rule.group]
            gives_nan = "NaN" in flags or ("Infinity" in flags and rule.infinite_code == 0xFF)
            row = fp32(*first, *[first[-1]] * (rule.group - len(first)))
            yield make(
                f"quantize.{slug}.{name}",
                "quantize",
                comment,
                {"rule": rule.name},
                flags=flags,
                policy=("known_difference_1",) if gives_nan else (),
                clause="3.4" if {"NaN", "Infinity"} & set(flags) else clause,
                x=row,
            )
        if rule.scaling == "divide":
            yield make(
                f"quantize.{slug}.divisions",
                "quantize",
                "middles times every normal scale: a division finds them, a reciprocal does not always",
                {"rule": rule.name},
                flags=("Tie", "Rounding"),
                clause=clause,
                x=_divisions(),
            )
        yield from _dequantize(rule, slug)


def _dequantize(rule: GroupRule, slug: str) -> Iterator[Vector]:
    """Every code under scale codes that are easily got wrong."""
    codes = np.arange(rule.element.codes, dtype=np.int64).astype(np.uint8)
    codes = np.resize(codes, max(len(codes), rule.group))
    power = rule.scale.name == "ue8m0"
    chosen = (
        (0x00, 0x01, 0x77, 0x7F, 0x86, 0xF7, 0xFF)
        if power
        else (0x00, 0x01, 0x23, 0x7E, 0x7F, 0x81)
    )
    texts = {
        0x00: "2^-127, a subnormal" if power else "zero: products are zeros with signs",
        0xFF: "NaN: the whole group is",
        0x7F: "1" if power else "NaN",
        0x86: "2^7, a finite scale like any other",
        0x81: "negative",
        0xF7: "2^120: the largest codes give infinity",
    }
    for code in chosen:
        number = {0x00: 2, 0xFF: 3}.get(code, 0) if power else 4
        yield make(
            f"dequantize.{slug}.scale-{code:02x}",
            "dequantize",
            f"every code; the scale is {texts.get(code, 'an ordinary one')}",
            {"rule": rule.name},
            flags=("EveryCode", "Subnormal") if code < 2 else ("EveryCode",),
            policy=(f"known_difference_{number}",) if number else (),
            codes=codes,
            scale_codes=np.full(len(codes) // rule.group, code, np.uint8),
        )


# --- arithmetic -----------------------------------------------------------------------


def arithmetic() -> Iterator[Vector]:
    """`exp32`, `tree_sum`, `inv_rms`, `rms_norm`, `round_bf16`."""
    ends: tuple[tuple[float, str], ...] = (
        (0.0, "exactly 1"),
        (-0.0, "exactly 1"),
        (-1e-45, "the smallest subnormal below 0"),
        (-1.0, "the example of the clause"),
        (-5.1719, "near the worst error, 0.89 ulp"),
        (-80.0, "the example of the clause"),
        (-87.0, "the last that is not 0; not subnormal"),
        (-87.00001, "one step further: +0"),
        (-88.0, "+0"),
        (-3e38, "+0"),
        (-float("inf"), "+0"),
    )
    for value, comment in ends:
        yield make(
            f"exp32.{_bits(value):08x}",
            "exp32",
            comment,
            flags=("Boundary",),
            policy=("known_difference_6",),
            x=fp32(value),
        )
    yield make("exp32.nan", "exp32", "NaN gives NaN", flags=("NaN",), x=from_bits(*_NANS))
    numbers = Numbers("edge exp32")
    yield make(
        "exp32.spread",
        "exp32",
        "numbers from -87 to 0, as many near 0 as far from it",
        flags=("Any", "Rounding"),
        policy=("known_difference_6",),
        x=np.concatenate(
            [
                -np.abs(numbers.bell(200)) * two_to(numbers.between(-20, 4, 200)),
                from_bits(*(int(n) for n in numbers.below(0x42AE0001, 100) | _SIGN)),
            ]
        ),
    )
    yield from _sums()
    rows = numbers.wide(4, 128)
    rows[0] = 0
    for width in (128, 512):
        inputs: dict[str, Any] = {"c": np.resize(rows, (4, width))}
        for operation in ("inv_rms", "rms_norm"):
            if operation == "rms_norm":
                inputs["weight"] = numbers.bell(width)
            yield make(
                f"{operation}.{width}",
                operation,
                "a row of zeros, and rows of several magnitudes",
                {"eps": 1e-6},
                flags=("Rounding", "Order"),
                policy=("known_difference_6",),
                **inputs,
            )
    yield make(
        "inv_rms.spec", "inv_rms", "1, 2, 3, 4", {"eps": 1e-6}, flags=("Any",), c=fp32(1, 2, 3, 4)
    )
    yield make(
        "inv_rms.eps",
        "inv_rms",
        "eps belongs under the root",
        {"eps": 0.25},
        flags=("Rounding",),
        c=fp32(0.5, -0.5),
    )
    yield make(
        "inv_rms.zero",
        "inv_rms",
        "zeros with eps 0 give infinity",
        {"eps": 0.0},
        flags=("Infinity",),
        c=fp32(0, 0),
    )
    yield make(
        "inv_rms.overflow",
        "inv_rms",
        "a mean square beyond fp32 gives 0",
        {"eps": 0.0},
        flags=("Infinity",),
        c=fp32(3e38, 1),
    )
    yield make(
        "inv_rms.nan",
        "inv_rms",
        "one NaN makes its row NaN",
        {"eps": 1e-6},
        flags=("NaN",),
        c=fp32(1, float("nan")),
    )
    yield make(
        "rms_norm.bf16-weight",
        "rms_norm",
        "a bf16 weight is widened",
        {"eps": 1e-6},
        flags=("Rounding",),
        c=numbers.bell(3, 64),
        weight=bf16_bits(numbers.between(0x3E00, 0x4000, 64)),
    )
    for pattern, comment, flag in (
        (0x3F808000, "a tie: to the even code below", "Tie"),
        (0x3F818000, "a tie: to the even code above", "Tie"),
        (0x3F808001, "one step above a tie", "NearTie"),
        (0x80000000, "-0", "SignedZero"),
        (0x80000001, "a negative subnormal: -0", "SignedZero"),
        (0x00008001, "a subnormal: not flushed", "Subnormal"),
        (0x7F7F8000, "beyond the largest: infinity", "Saturation"),
        (0x7F800001, "NaN: 7fff, not infinity", "NaN"),
        (0xFFFFFFFF, "NaN: 7fff, not zero", "NaN"),
    ):
        yield make(
            f"round_bf16.{pattern:08x}", "round_bf16", comment, flags=(flag,), x=from_bits(pattern)
        )
    yield make(
        "round_bf16.any", "round_bf16", "any bits", flags=("Any", "NaN"), x=numbers.any_fp32(300)
    )


def _sums() -> Iterator[Vector]:
    """`tree_sum`: terms of very different magnitude."""
    yield make(
        "tree_sum.spec",
        "tree_sum",
        "2^24, 1, 1, 1: a running sum gives 2^24, the exact sum rounds to 2^24 + 4",
        {"axis": 0},
        flags=("Order",),
        x=fp32(2.0**24, 1, 1, 1),
    )
    yield make(
        "tree_sum.one",
        "tree_sum",
        "one term is returned as it is, -0 too",
        {"axis": 0},
        flags=("Order", "SignedZero"),
        x=fp32(-0.0),
    )
    numbers = Numbers("edge tree_sum")
    for length in (2, 4, 8, 16, 64, 128, 512):
        rows = 4 if length < 128 else 1
        x = numbers.bell(rows, length) * two_to(numbers.between(-20, 20, rows, length))
        yield make(
            f"tree_sum.{length}",
            "tree_sum",
            f"{length} terms from 2^-20 to 2^20",
            {"axis": 1},
            flags=("Order",),
            x=x,
        )
    x = numbers.bell(2, 8, 3) * two_to(numbers.between(-20, 20, 2, 8, 3))
    yield make(
        "tree_sum.middle-axis",
        "tree_sum",
        "an axis that is not the last",
        {"axis": 1},
        flags=("Order",),
        x=x,
    )


# --- rotation -------------------------------------------------------------------------


def rope() -> Iterator[Vector]:
    """`rotate_gptj` and rows of the cosine table."""
    cos, sin = fp32(0.6), fp32(0.8)
    for name, x in (("even", fp32(1, 0)), ("odd", fp32(0, 1)), ("minus-zero", fp32(-0.0, -0.0))):
        yield make(
            f"rotate.{name}",
            "rotate_gptj",
            "one pair: even * cos - odd * sin, odd * cos + even * sin",
            flags=("SignedZero",) if name == "minus-zero" else ("Any",),
            x=x,
            cos=cos,
            sin=sin,
        )
    yield make(
        "rotate.pairs",
        "rotate_gptj",
        "neighbours are pairs, not the halves of a row",
        flags=("Packing",),
        x=fp32(1, 2, 3, 4, 5, 6, 7, 8),
        cos=fp32(1, 0, -1, 0),
        sin=fp32(0, 1, 0, -1),
    )
    for value, flag in ((float("inf"), "Infinity"), (float("nan"), "NaN")):
        yield make(
            f"rotate.{flag.lower()}",
            "rotate_gptj",
            "both elements of a pair are spoilt, the next pair is not",
            flags=(flag,),
            x=fp32(value, 1, 2, 3),
            cos=fp32(0.6, 0.6),
            sin=fp32(0.8, 0.8),
        )
    numbers = Numbers("edge rope")
    table = build_cos_sin_cache(16)
    cos, sin = table[:, :32], table[:, 32:]
    x = numbers.bell(16, 64)
    yield make(
        "rotate.positions",
        "rotate_gptj",
        "positions 0 to 15 of the plain table",
        flags=("Rounding",),
        x=x,
        cos=cos,
        sin=sin,
    )
    near = np.empty_like(x)
    near[:, 0::2], near[:, 1::2] = x[:, 0::2] * sin, x[:, 0::2] * cos
    yield make(
        "rotate.cancelling",
        "rotate_gptj",
        "both products are nearly equal: a fused one shows in every bit",
        flags=("Rounding",),
        x=near,
        cos=cos,
        sin=sin,
    )
    positions = np.array([0, 1, 2, 4, 100, 1000, 8191], np.int64)
    for name, parameters in (
        ("plain", {"theta": 10000.0, "factor": 1.0}),
        ("theta-160000", {"theta": 160000.0, "factor": 1.0}),
        ("yarn-16", {"theta": 160000.0, "factor": 16.0}),
    ):
        yield make(
            f"cos_sin_rows.{name}",
            "cos_sin_rows",
            "rows of the table: 32 cosines, then 32 sines, correctly rounded",
            {**parameters},
            flags=("Position",),
            positions=positions,
        )
