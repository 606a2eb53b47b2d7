"""What `verify` says about a mismatch: of mutants, and of single bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from mutants import (
    COMBINE,
    COMPRESS,
    DECODE,
    DEQUANTIZE,
    ENCODE,
    FILLS,
    GATHER,
    GLOBAL,
    INSERT,
    LATENT,
    MIXED,
    MUTANTS,
    PACK,
    QUANTIZE,
    RING,
    SAVE,
    SCALE,
    expectations,
    planted,
    run,
)

from dsv4num.verify.case import Case, start_of
from dsv4num.verify.compare import MAX_LINES, explain_mismatch
from dsv4num.verify.operations import OPERATIONS, Operation

NEVER = "bytes that were never written (the poison is still there)"
NOTHING = "bytes written where the oracle writes nothing"
OUTSIDE = "a write outside the rows that the operation owns"
UNEXPLAINED = "  unexplained: no dialect, alone or in a pair, explains these bytes"
ALONE = "the scale is chosen differently, and the elements do not follow it"
ROUNDING = "rounding: every difference is one code (a tie rule, or one rounding too many)"
UNKNOWN = "not recognised"


def every(count: str, text: str) -> str:
    """What is said where one dialect explains every byte."""
    return f"every one of {count} is explained by: {text}"


@cache
def expected(name: str, variant: str, wanted: str) -> tuple[Operation, Case, dict[str, Any]]:
    """An operation, a quick case, and what the reference gives with the first fill."""
    (found,) = [
        (case, want)
        for case, fill, want in expectations(name, variant)
        if case.name == wanted and fill == FILLS[0]
    ]
    return OPERATIONS[name], *found


def explained(operation: Operation, case: Case, output: str, want: Any, got: Any) -> list[str]:
    start = start_of(case.arguments[output]) if output in case.outputs + case.updated else 0
    fill = FILLS[0] if output in case.outputs else None
    assert (want != got).any()
    lines = explain_mismatch(operation, case, output, start, want, got, fill)
    assert len(lines) <= MAX_LINES
    count = int((want != got).sum())
    assert lines[0] == f"{output}: {count:,} bytes differ"
    return lines


@pytest.mark.parametrize(
    ("mutant", "name", "variant", "case", "output", "reason", "first"),
    [
        ("zero loses its sign", ENCODE, "e4m3fn", "boundaries", "codes", "the sign of zero",
         r"codes\[\d+\] of x = 0x8.* = -.*: expected 0x80 = -0, got 0x00 = 0"),
        ("fp8 ties away", ENCODE, "e4m3fn", "boundaries", "codes", ROUNDING,
         r"codes\[\d+\] of x = 0x.*: expected 0x.. = .*, got 0x.. = .*"),
        ("bf16 half up", "round_bf16", "fp32", "ties", "y", ROUNDING,
         r"y\[0\] of x = 0x00008000 = 4.59\d+e-41: expected 0x0000 = 0, got 0x0001 = 9.18\d+e-41"),
        ("bf16 half up", ENCODE, "bf16", "boundaries", "codes", ROUNDING,
         r"codes\[\d+\] of x = 0x.*: expected 0x.... = .*, got 0x.... = .*"),
        ("ocp read as fnuz", DECODE, "e4m3fn", "every code", "x", UNKNOWN,
         r"x\[1\] of codes = 0x01: expected 0x3B000000 = 0\.001953125, got 0x3A800000 = 0\.0009765625"),
        ("scale code 0 is zero", DEQUANTIZE, "P1/64", "every pair", "x", UNKNOWN,
         r"x\[\d+\] of codes = 0x.., scale code 0x00: expected 0x.* = .*, got 0x00000000 = 0"),
        ("nibbles swapped", PACK, "e2m1", "every pair", "packed", "nibbles swapped",
         r"packed\[1\]: expected 0x01 = \(0\.5, 0\), got 0x10 = \(0, 0\.5\)"),
        ("floor on the scale", SCALE, "M1/32", "every bf16 amax", "scale_codes", ALONE,
         r"scale_codes\[0\] of amax = 0x00000000 = 0: expected 0x01 = 1\.17.*, got 0x0[2-4] = .*"),
        ("tile of half the size", QUANTIZE, "P1/64", "edges", "codes", UNKNOWN,
         r"codes\[\d+\] of x = 0x.... = .* with amax = 0x.... = .*: expected 0x.. = .*, got .*"),
        ("tile of half the size", QUANTIZE, "P1/64", "edges", "scale_codes", ALONE,
         r"scale_codes\[\d+\] of amax = 0x.... = .*: expected 0x.. = .*, got 0x.. = .*"),
        ("floor on the scale", INSERT, "v4", "edges", "k_cache",
         every("212 differing bytes (205 nope, 7 scale)", "floor 1e-4 on the scale instead of on amax"),
         r"page \d+ slot \d+ row .*"),
        ("scale code stored as a number", INSERT, "indexer_fp8", "edges", "k_cache",
         every("175 differing scale bytes",
               "the fp32 scale holds the number of the UE8M0 code instead of 2^e"),
         r"page \d+ slot \d+ row \d+ scale\[0\]: expected 0x.{8} = [^,]*, got 0x4.{7} = \d+"),
        ("rope part left out", INSERT, "v4", "any bits", "k_cache", NEVER,
         r"page 0 slot \d+ row \d+ rope\[\d+\] \(dim \d+\): expected 0x.... = .*, got 0xA5A5 = -2.*"),
        ("stale pad byte", INSERT, "v4", "wide", "k_cache", NEVER,
         r"page \d+ slot \d+ row \d+ pad\[0\]: expected 0x00, got 0xA5"),
        ("page padding cleared", INSERT, "v4", "any bits", "k_cache", OUTSIDE,
         r"page 0 byte 37376, owned by no row: expected 0xA5, got 0x00"),
        ("nibbles swapped", INSERT, "v41_nvfp4", "any bits", "k_cache",
         every("16,661 differing codes bytes", "nibbles swapped: the even element is in the high one"),
         r"page \d+ slot \d+ row \d+ codes\[\d+\] \(dim \d+\): expected 0x.. = \(.*, .*\), got .*"),
        ("gather clears the rest", GATHER, "v4", "tails at an offset", "out", NOTHING,
         r"request 0 row 0 dim 0: expected 0xA5A5 = -2.*, got 0x0000 = 0"),
        ("open group clears its latent", RING, "ratio2", "chunks", "latent_out", NOTHING,
         r"token 0 dim 0: expected 0xA5A5 = .*, got 0x0000 = 0"),
        ("kv rounded to bf16", SAVE, "csa", "plain", "state_cache", UNKNOWN,
         r"block \d+ row \d+ column \d+: expected 0x.{8} = .*, got 0x....0000 = .*"),
        ("not rotated", LATENT, "v41_mxfp8", "ratio 2, fp32", "kv_cache",
         every("1,027 differing bytes (1,024 codes, 3 scale)", "RoPE is not applied"), r"page .*"),
        ("not rotated", COMPRESS, "indexer_fp8", "csa decode", "kv_cache",
         every("126 differing codes bytes", "RoPE is not applied"),
         r"page \d slot \d+ row \d+ codes\[\d+\] \(dim \d+\): expected 0x.. = .*, got 0x.. = .*"),
        ("index of minus 1 is 0", GLOBAL, "bs64", "top-k 512", "indices", UNKNOWN,
         r"token 0 column \d+, index -\d+: expected 0xFFFFFFFF, got 0x.{8}"),
        ("length counts every column", GLOBAL, "bs64", "top-k 512", "lens", UNKNOWN,
         r"token \d length: expected 0x.{8}, got 0x00000200"),
        ("all requests at row 0", COMBINE, "ratio4", "prefill", "indices", UNKNOWN,
         r"token 2 column 0, compressed or window: expected 0x.{8}, got 0x.{8}"),
        ("window column missing", MIXED, "absent", "from the start", "indices", UNKNOWN,
         r"token 4 column 0, prefill window\[0\]: expected 0x.{8}, got 0x.{8}"),
        ("index of minus 1 is 0", MIXED, "local", "decode", "indices", UNKNOWN,
         r"token 0 column \d+, decode compressed\[\d+\]: expected 0xFFFFFFFF, got 0x.{8}"),
    ],
)  # fmt: skip
def test_mutants(
    mutant: str, name: str, variant: str, case: str, output: str, reason: str, first: str
) -> None:
    """The reason, and the first place that differs."""
    operation, found, want = expected(name, variant, case)
    with planted(MUTANTS[mutant]):
        got = run(operation, found, FILLS[0])
    lines = explained(operation, found, output, want[output], got[output])
    assert lines[-1] == f"  likely: {reason}"
    assert re.fullmatch("  " + first, lines[1]), lines[1]


def changed(name: str, variant: str, case: str, output: str, flips: dict[int, int]) -> list[str]:
    """The explanation where bytes, counted from the start of the output, differ by these bits."""
    operation, found, want = expected(name, variant, case)
    start = start_of(found.arguments[output]) if output in found.outputs + found.updated else 0
    got = want[output].copy()
    for byte, bits in flips.items():
        got[start + byte] ^= bits
    return explained(operation, found, output, want[output], got)


def bytes_around(name: str, variant: str, case: str, output: str) -> Iterator[tuple[int, str]]:
    """Bytes before an output and behind it, and what the explanation calls them."""
    view = expected(name, variant, case)[1].arguments[output]
    end = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize
    for byte in (-1, -4096, end + 70000 - 65536):
        line = changed(name, variant, case, output, {byte: 1})[1]
        yield byte, line.split(":")[0].strip()


def test_bytes_around_an_output() -> None:
    for byte, text in bytes_around(GATHER, "v4", "views", "out"):
        assert text == f"byte {byte}, owned by no row"
    for byte, text in bytes_around(SAVE, "csa", "views", "state_cache"):
        assert text == f"byte {byte}, owned by no row"
    around = dict(bytes_around(INSERT, "v41_mxfp8", "any bits", "k_cache"))
    assert [around[-1], around[-4096]] == [
        "byte -1 outside the cache",
        "byte -4096 outside the cache",
    ]


def test_reasons_that_no_mutant_has() -> None:
    """One kind of byte at a time, of the first row that the case writes."""
    slots = expected(INSERT, "v4", "zeros")[1].arguments["slot_mapping"]
    page, row = divmod(int(slots.max()), 64)
    data, scale = page * 37440 + row * 576, page * 37440 + 64 * 576 + row * 8
    of = (INSERT, "v4", "zeros", "k_cache")
    assert changed(*of, {scale + 7: 3})[-1] == "  likely: padding not written with its pad value"
    more = {scale + i: 3 for i in range(7)}  # 105 is 0x69, 106 is 0x6A
    lines = changed(*of, more)[-2:]
    assert [line.split(": ", 2)[-1] for line in lines] == [
        "the scale is another one by +1, the elements follow it, and the decoded values are equal",
        "scale codes that are +1, while the elements do not follow",
    ]
    assert all("or: every one of 7 differing scale" in line for line in lines[1:])
    assert changed(*of, {page * 37440 + 64 * 584: 1})[-1] == f"  likely: {OUTSIDE}"
    assert changed(*of, {data: 0x80})[-1] == "  likely: the sign of zero"
    both = changed(*of, {data: 0x80, page * 37440 + 64 * 584: 1})
    assert both[-2:] == ["  likely: the sign of zero", f"  and: {OUTSIDE}"]
    # A code that the format does not have is shown as a byte.
    line = changed(ENCODE, "e2m1", "boundaries", "codes", {0: 0x10})[1]
    assert re.search(r": expected 0x0\d = [\d.]+, got 0x1\d$", line)


def test_many_mismatches() -> None:
    """Of very many bytes the first and a spread of the others are looked at: every kind is shown."""
    operation, case, want = expected(INSERT, "v4", "any bits")
    got = want["k_cache"] ^ np.uint8(0x11)
    lines = explained(operation, case, "k_cache", want["k_cache"], got)
    assert lines[-3:] == ["  ... and more", UNEXPLAINED, f"  and: {OUTSIDE}"]
    assert any("outside the cache" in line for line in lines)
    assert any("nope[" in line for line in lines) and any("rope[" in line for line in lines)
