"""Cases of `encode_scale`, `quantize` and `dequantize`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import E4M3FN, GroupRule, get_rule
from dsv4num.reference import decode
from dsv4num.verify.case import Case, Level, edge_bf16, generator, place


def _octave_borders(rule: GroupRule) -> NDArray[np.float32]:
    """fp32 amax within two steps of qmax * 2**e for every e, of the floor, and of the ties of N2."""
    scales = decode(np.arange(E4M3FN.max_code + 1, dtype=np.uint8), E4M3FN).astype(np.float64)
    borders = np.concatenate(
        [
            np.ldexp(np.float64(rule.qmax), np.arange(-157, 126)),
            np.ldexp(1.0, np.arange(-149, 128)),
            [rule.floor, rule.floor * rule.qmax, 2688.0, 2800.0],
            6 * (scales[1:] + scales[:-1]) / 2,
        ]
    )
    with np.errstate(over="ignore", under="ignore"):
        bits = borders.astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.clip(bits[:, None] + np.arange(-2, 3), 0, 0x7F800000)
    amax: NDArray[np.float32] = near.astype(np.uint32).ravel().view(np.float32)
    return amax


def encode_scale_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `encode_scale`."""
    rng = generator(seed, "encode_scale", rule_name)
    many = 1 << (24 if level == "full" else 16)
    bf16 = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32)
    yield Case("every bf16 amax", {"amax": place(bf16), "rule": rule_name})
    borders = _octave_borders(get_rule(rule_name))
    yield Case("octave borders", {"amax": place(borders), "rule": rule_name})
    random = rng.integers(0, 0x7F800001, many, dtype=np.uint32).view(np.float32)
    yield Case("any amax", {"amax": place(random), "rule": rule_name})


def quantize_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `quantize`."""
    rng = generator(seed, "quantize", rule_name)
    rule = get_rule(rule_name)
    rows = 4096 if level == "full" else 64
    patterns = rng.integers(0, 1 << 32, (rows, 512), dtype=np.uint32).view(np.float32)
    yield Case("any fp32 bits", {"x": place(patterns), "rule": rule_name})
    yield Case("few rows", {"x": place(patterns[:3].copy()), "rule": rule_name}, sweep=True)
    scales = np.ldexp(np.float32(1), rng.integers(-100, 100, (rows, 1)))
    wide = rng.standard_normal((rows, 512)).astype(np.float32) * scales
    yield Case("wide fp32", {"x": place(wide.astype(np.float32)), "rule": rule_name})
    yield Case("edges", {"x": place(edge_bf16(rng, (rows, 512))), "rule": rule_name})
    borders = _octave_borders(rule)
    single = np.zeros((len(borders), rule.group), np.float32)  # one group each
    single[:, 1], single[:, 3] = borders, -borders
    yield Case("octave borders", {"x": place(single), "rule": rule_name})


def dequantize_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `dequantize`: every pair of code and scale code."""
    rule = get_rule(rule_name)
    codes = np.arange(rule.element.codes, dtype=np.uint32).astype(np.uint8)
    codes = np.resize(codes, max(len(codes), rule.group))
    rows = np.tile(codes, (256, 1))
    every = np.arange(256, dtype=np.uint32).astype(np.uint8)
    scales = np.repeat(every[:, None], len(codes) // rule.group, axis=1)
    arguments = {"codes": place(rows), "scale_codes": place(scales), "rule": rule_name}
    yield Case("every pair", arguments)
