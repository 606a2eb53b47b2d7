"""The exhaustive level: every input of the operations whose inputs can be counted.

The oracle and the kernel both answer every one of them, and every byte is compared; nothing is taken
from a table of expected results. What is counted:

    encode        all 2**32 fp32 patterns, in every format
    encode_scale  every amax: the patterns of +0 to infinity, and -0; under every rule
    exp32         every fp32 number from -87 to -0, and +0
    quantize      every bf16 amax with every bf16 element that a group of that amax can hold
    decode, pack, unpack, dequantize
                  every code; every pair of codes; every byte; every pair of code and scale code

A block of inputs is one case, so that shards, reports and `--case` work as at the other levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import GroupRule, get_rule
from dsv4num.verify.case import BF16, Block, Case, Level, place, ready

#: fp32 patterns in one case. Its arrays and the temporaries of the oracle take some 100 MB.
PATTERNS = 1 << 21
#: bf16 amax in one case of `quantize`; up to 65,536 elements each.
AMAXES = 64

_INFINITY = 0x7F800000
_MINUS_ZERO = 0x80000000
_MINUS_87 = 0xC2AE0000
_BF16_INFINITY = 0x7F80


def every_fp32(fmt_name: str) -> Iterator[Block]:
    """Blocks of `encode`: all 2**32 patterns."""
    return _patterns("x", {"fmt": fmt_name}, 0, (1 << 32) - 1)


def every_amax(rule_name: str) -> Iterator[Block]:
    """Blocks of `encode_scale`: +0 to infinity, and -0, which is not negative."""
    return _patterns("amax", {"rule": rule_name}, 0, _INFINITY, _MINUS_ZERO)


def every_exponent(_: str) -> Iterator[Block]:
    """Blocks of `exp32`: -0 to -87, and +0."""
    return _patterns("x", {}, _MINUS_ZERO, _MINUS_87, 0)


def every_bf16_amax_and_element(rule_name: str) -> Iterator[Block]:
    """Blocks of `quantize`: every bf16 amax with every element that is not larger, and every NaN."""
    for first in range(0, _BF16_INFINITY + 1, AMAXES):
        last = min(first + AMAXES - 1, _BF16_INFINITY)
        name = f"amax {first:04X} to {last:04X}"
        yield Block(name, partial(_amax_case, name, get_rule(rule_name), first, last))


def all_of(cases: Callable[[str, Level, int], Iterator[Case]]) -> Callable[[str], Iterator[Block]]:
    """Blocks of an operation whose cases are every input at any level."""

    def blocks(variant: str) -> Iterator[Block]:
        return map(ready, cases(variant, "full", 0))

    return blocks


def _patterns(
    argument: str, others: dict[str, str], first: int, last: int, *extra: int
) -> Iterator[Block]:
    """Blocks of the fp32 patterns from `first` to `last`; the last block also has `extra`."""
    for start in range(first, last + 1, PATTERNS):
        end = min(start + PATTERNS - 1, last)
        name = f"patterns {start:08X} to {end:08X}"
        added = extra if end == last else ()
        yield Block(name, partial(_pattern_case, name, argument, others, start, end, added))


def _pattern_case(
    name: str, argument: str, others: dict[str, str], start: int, end: int, added: tuple[int, ...]
) -> Case:
    bits = np.arange(start, end + 1, dtype=np.uint32)
    if added:
        bits = np.concatenate([bits, np.array(added, np.uint32)])
    return Case(name, {argument: place(bits.view(np.float32)), **others})


def _amax_case(name: str, rule: GroupRule, first: int, last: int) -> Case:
    groups = np.concatenate([groups_of_amax(rule, amax) for amax in range(first, last + 1)])
    return Case(name, {"x": place(groups.view(BF16)), "rule": rule.name})


def groups_of_amax(rule: GroupRule, amax: int) -> NDArray[np.uint16]:
    """Groups [N, rule.group] of bf16 patterns that all have one amax and together hold every element.

    Args:
        rule: the group rule.
        amax: a bf16 pattern, 0 to 0x7F80. It stands in one column of every group, which column
            depends on it.

    Example:
        For amax 0x0001, the elements 0000 0001, 7F81 to 7FFF, 8000 8001, FF81 to FFFF, filled up with
        0001 to whole groups.
    """
    nan = np.arange(_BF16_INFINITY + 1, 0x8000, dtype=np.uint16)
    positive = np.concatenate([np.arange(amax + 1, dtype=np.uint16), nan])
    elements = np.concatenate([positive, positive | np.uint16(0x8000)])
    width = rule.group - 1
    filled = np.full(-(-len(elements) // width) * width, amax, np.uint16)
    filled[: len(elements)] = elements
    return np.insert(filled.reshape(-1, width), amax % rule.group, np.uint16(amax), axis=1)
