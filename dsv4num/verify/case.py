"""Cases: one call of one operation, with arrays placed in memory as hostile callers place them.

Every array is a view into its own flat byte buffer with guard bytes around it, so that the runner can
compare a whole buffer: bytes that an operation does not own must keep what was there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Level = Literal["quick", "full", "exhaustive"]
Array = NDArray[Any]
BF16 = ml_dtypes.bfloat16

_GUARD = 65536  # bytes before and after every array: more than a page


@dataclass
class Case:
    """One call.

    Attributes:
        name: unique within operation and layout.
        arguments: positional arguments by name, in call order.
        keywords: keyword-only arguments.
        outputs: names of arguments that are written and hold nothing before (filled with poison).
        updated: names of arguments that are read and written.
        reference: arguments and keywords that differ for the reference, where the kernels must skip
            what the reference refuses.
        restore: rows of outputs that the kernels skip: called with the expected views after the
            reference ran and with the untouched ones, to put the poison back.
        sweep: run under every launch configuration, not only the default one.
        half: the returned values are bf16, not fp32.
        large: needs several gigabytes; runs on a GPU at level full only.
    """

    name: str
    arguments: dict[str, Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    reference: dict[str, Any] = field(default_factory=dict)
    restore: Callable[[dict[str, Array], dict[str, Array]], None] | None = None
    sweep: bool = False
    half: bool = False
    large: bool = False


@dataclass(frozen=True)
class Block:
    """A case that is made only where it runs: the exhaustive level has thousands of them.

    Attributes:
        name: the name that the case has.
        make: makes the case.
    """

    name: str
    make: Callable[[], Case]


def ready(case: Case) -> Block:
    """A case that is there already."""
    return Block(case.name, lambda: case)


def generator(seed: int, *names: str) -> np.random.Generator:
    """A random generator that depends on the seed and the names only."""
    return np.random.default_rng([seed, zlib.crc32("/".join(names).encode())])


def int32(values: list[int]) -> NDArray[np.int32]:
    """An int32 array."""
    return np.array(values, np.int32)


def int64(values: list[int]) -> NDArray[np.int64]:
    """An int64 array."""
    return np.array(values, np.int64)


def place(values: Array, strides: tuple[int, ...] | None = None, shift: int = 0) -> Array:
    """A copy of `values` inside a guarded buffer, with the given strides in elements.

    Args:
        values: the contents.
        strides: in elements; contiguous if not given.
        shift: bytes by which the first element is moved off its alignment of 16.
    """
    if strides is None:
        counts = [int(np.prod(values.shape[axis + 1 :])) for axis in range(values.ndim)]
        strides = tuple(counts)
    last = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    extent = (last + 1) * values.itemsize if values.size else 0
    size = -(-(_GUARD + shift + extent + _GUARD) // 16) * 16
    buffer = np.full(size, 0xC3, np.uint8)
    steps = tuple(s * values.itemsize for s in strides)
    view: Array = np.ndarray(values.shape, values.dtype, buffer, _GUARD + shift, steps)
    view[...] = values
    return view


def flat(view: Array) -> NDArray[np.uint8]:
    """The whole buffer that a placed array lies in."""
    base = view.base
    assert isinstance(base, np.ndarray) and base.dtype == np.uint8 and base.ndim == 1
    return base


def start_of(view: Array) -> int:
    """The byte of the buffer at which a placed array starts."""
    start: int = view.__array_interface__["data"][0]
    origin: int = flat(view).__array_interface__["data"][0]
    return start - origin


def rebase(view: Array, buffer: NDArray[np.uint8]) -> Array:
    """The same view into another buffer of the same size."""
    return np.ndarray(view.shape, view.dtype, buffer, start_of(view), view.strides)


# Values


def any_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Every bit pattern is as likely as any other: NaN, infinities and subnormals among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(BF16)


def wide_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal numbers, each row at its own magnitude, 2**-8 to 2**8 or 2**-40 to 2**40."""
    exponents = rng.integers(-40, 41, (*shape[:-1], 1))
    exponents[::2] = rng.integers(-8, 9, exponents[::2].shape)
    scales = np.ldexp(np.float32(1), exponents)
    rows: Array = (rng.standard_normal(shape).astype(np.float32) * scales).astype(BF16)
    return rows


def edge_bf16(rng: np.random.Generator, shape: tuple[int, ...], group: int = 16) -> Array:
    """Rows that sit on the decisions of every rule.

    Groups whose amax is the largest that a scale may serve, or one step beyond; midpoints of the
    element formats; zeros of both signs; single infinities and NaNs; and rows of one value.
    """
    rows = np.empty(shape, np.float32)
    groups = rows.reshape(-1, group)
    qmax = rng.choice(np.array([448, 240, 224, 6], np.float32), len(groups))
    exponent = rng.integers(-24, 25, len(groups))
    amax = np.ldexp(qmax, exponent).astype(BF16)
    step = rng.integers(-1, 2, len(groups)).astype(np.int16)
    amax = (amax.view(np.int16) + step).view(BF16).astype(np.float32)
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1.0625, 1.1875, 19, 0.001953125, 152, 6, 0]
    fractions = rng.choice(np.array(middles, np.float32), groups.shape)
    fractions *= rng.choice(np.array([-1, 1], np.float32), groups.shape)
    groups[:] = np.ldexp(fractions, exponent[:, None])
    np.clip(groups, -amax[:, None], amax[:, None], out=groups)
    groups[np.arange(len(groups)), rng.integers(0, group, len(groups))] = amax
    kinds = rng.integers(0, 12, len(groups))
    groups[kinds == 0] = np.float32(-0.0)
    groups[kinds == 1, 3] = np.inf
    groups[kinds == 2, 5] = np.nan
    groups[kinds == 3] = np.nan
    groups[kinds == 4] = -np.inf
    groups[kinds == 5] = amax[kinds == 5][:, None]
    return rows.astype(BF16)


def shuffled_slots(
    rng: np.random.Generator, tokens: int, slots: int, skipped: float = 0.1
) -> NDArray[np.int64]:
    """Distinct slots in random order, some of them -1 or another negative number."""
    chosen = rng.permutation(slots)[:tokens].astype(np.int64)
    chosen[rng.random(tokens) < skipped] = rng.choice([-1, -1, -7, -(1 << 31)])
    return chosen
