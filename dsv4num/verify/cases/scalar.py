"""Cases of `encode`, `decode`, `pack` and `unpack`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import get_scalar
from dsv4num.reference import decode
from dsv4num.verify.case import Case, Level, any_bf16, generator, place


def _boundaries(fmt_name: str) -> NDArray[np.float32]:
    """Every rounding boundary of a format, and the two fp32 on either side of each."""
    fmt = get_scalar(fmt_name)
    if fmt.width == 16:
        codes = np.arange(0, 1 << 16, 3, dtype=np.uint32)
        middles = (codes << 16) | 0x8000
    else:
        values = decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
        middles = np.concatenate([values, (values[1:] + values[:-1]) / 2, [464, 480, 256, 7]])
        middles = middles.astype(np.float32).view(np.uint32)
    near = middles[:, None].astype(np.int64) + np.arange(-2, 3)
    bits = np.clip(near, 0, 0x7FFFFFFF).astype(np.uint32).ravel()
    both: NDArray[np.float32] = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(
        np.float32
    )
    return both


def encode_cases(fmt_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `encode`."""
    rng = generator(seed, "encode", fmt_name)
    many = 1 << (24 if level == "full" else 16)
    patterns = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    random = rng.integers(0, 1 << 32, many, dtype=np.uint32).view(np.float32)
    yield Case("every bf16 pattern", {"x": place(patterns), "fmt": fmt_name})
    yield Case("bf16 input", {"x": place(any_bf16(rng, (5, 1000))), "fmt": fmt_name})
    yield Case("boundaries", {"x": place(_boundaries(fmt_name)), "fmt": fmt_name})
    yield Case("any fp32 bits", {"x": place(random), "fmt": fmt_name})
    near_one = np.ldexp(rng.standard_normal(many).astype(np.float32), rng.integers(-12, 12, many))
    yield Case("near one", {"x": place(near_one.astype(np.float32)), "fmt": fmt_name})
    yield Case("empty", {"x": place(np.zeros((3, 0), np.float32)), "fmt": fmt_name})


def decode_cases(fmt_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `decode`."""
    fmt = get_scalar(fmt_name)
    dtype = np.uint16 if fmt.width == 16 else np.uint8
    codes = np.arange(fmt.codes, dtype=np.uint32).astype(dtype)
    yield Case("every code", {"codes": place(codes), "fmt": fmt_name})


def pack_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `pack`: every pair of codes."""
    pairs = np.stack(np.meshgrid(np.arange(16), np.arange(16)), axis=-1).reshape(16, 32)
    yield Case("every pair", {"codes": place(pairs.astype(np.uint8))})


def unpack_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `unpack`: every byte."""
    yield Case("every byte", {"packed": place(np.arange(256, dtype=np.uint8).reshape(8, 32))})
