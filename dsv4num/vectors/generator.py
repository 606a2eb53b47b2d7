"""Numbers that look random and never change: SplitMix64, and what is made of it by exact steps.

NumPy keeps the raw stream of its bit generators, but not what `Generator` makes of it. The generator
here is three lines in any language, its values are a function of name and index, and everything built
on it is integers or an exact conversion, so that vectors are the same with every NumPy and on every
machine.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from dsv4num.vectors.vector import Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


class Numbers:
    """A stream of numbers.

    The seed is the first eight bytes of the SHA-256 of the name, low byte first. Number i of the
    stream, from 0, is mix(seed + (i + 1) * 0x9E3779B97F4A7C15), where mix is SplitMix64's.

    Args:
        name: decides the stream.

    Example:
        >>> [f"{number:016x}" for number in Numbers("").raw(2)]
        ['dfd603d66fd2cf11', 'b57f1523f853b5fe']
    """

    def __init__(self, name: str) -> None:
        digest = hashlib.sha256(name.encode("utf-8")).digest()
        self._seed = np.uint64(int.from_bytes(digest[:8], "little"))
        self._taken = 0

    def raw(self, count: int) -> NDArray[np.uint64]:
        """The next numbers, 64 bits each."""
        index = np.arange(self._taken + 1, self._taken + count + 1, dtype=np.uint64)
        self._taken += count
        z = self._seed + index * _STEP
        for shift, factor in _MIX:
            z = (z ^ (z >> shift)) * factor
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed

    def below(self, end: int, *shape: int) -> NDArray[np.int64]:
        """Integers from 0 to end - 1, `end` at most 2**32: the upper half of a number times `end`."""
        high = self.raw(math.prod(shape)) >> np.uint64(32)
        scaled = (high * np.uint64(end)) >> np.uint64(32)
        return scaled.astype(np.int64).reshape(shape)

    def between(self, first: int, last: int, *shape: int) -> NDArray[np.int64]:
        """Integers from `first` to `last`, both included."""
        return first + self.below(last - first + 1, *shape)

    def pick(self, values: Array, *shape: int) -> Array:
        """Some of the values."""
        picked: Array = np.asarray(values)[self.below(len(values), *shape)]
        return picked

    def shuffled(self, count: int) -> NDArray[np.int64]:
        """The integers from 0 to count - 1 in another order."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64)

    def any_fp32(self, *shape: int) -> NDArray[np.float32]:
        """Any bits: NaN, infinities and subnormals among them."""
        high = (self.raw(math.prod(shape)) >> np.uint64(32)).astype(np.uint32)
        return high.view(np.float32).reshape(shape)

    def bell(self, *shape: int) -> NDArray[np.float32]:
        """Numbers about 0, multiples of 2**-15, deviation near 1.15: the sum of four of 16 bits."""
        fields = self.raw(math.prod(shape)).view("<u2").reshape(*shape, 4).astype(np.int32)
        total = fields[..., 0] + fields[..., 1] + fields[..., 2] + fields[..., 3] - 131070
        return total.astype(np.float32) * np.float32(2.0**-15)

    def wide(self, *shape: int, most: int = 40) -> NDArray[np.float32]:
        """Rows about 0, each with its own magnitude of 2**-most to 2**most."""
        return self.bell(*shape) * two_to(self.between(-most, most, *shape[:-1], 1))

    def edgy(self, *shape: int, group: int = 16) -> NDArray[np.float32]:
        """Rows of bf16 numbers that sit on the decisions of every rule.

        Groups whose amax is the largest that a scale may serve, or one bf16 step beside it; middles of
        the element formats; zeros of both signs; infinities, NaN, and groups of one value.
        """
        rows = np.empty(shape, np.float32)
        groups = rows.reshape(-1, group)
        count = len(groups)
        exponent = self.between(-24, 24, count)
        largest = self.pick(np.array([448, 240, 224, 6], np.float32), count) * two_to(exponent)
        upper = (largest.view(np.uint32) >> 16).astype(np.int64) + self.between(-1, 1, count)
        amax = (upper << 16).astype(np.uint32).view(np.float32)
        middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1.0625, 1.1875, 19, 0.001953125, 152, 6, 0]
        fractions = self.pick(np.array(middles, np.float32), count, group)
        fractions = fractions * self.pick(np.array([-1, 1], np.float32), count, group)
        groups[:] = np.clip(fractions * two_to(exponent)[:, None], -amax[:, None], amax[:, None])
        groups[np.arange(count), self.below(group, count)] = amax
        kind = self.below(12, count)
        groups[kind == 0] = np.float32(-0.0)
        groups[kind == 1, 3] = np.inf
        groups[kind == 2, 5] = np.nan
        groups[kind == 3] = np.nan
        groups[kind == 4] = -np.inf
        groups[kind == 5] = amax[kind == 5][:, None]
        return rows


def two_to(exponent: NDArray[np.int64]) -> NDArray[np.float32]:
    """Powers of two from -126 to 127, from their bits."""
    powers: NDArray[np.float32] = ((exponent + 127) << 23).astype(np.uint32).view(np.float32)
    return powers
