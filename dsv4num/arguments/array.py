"""An array without its contents, and the checks that every operation makes of one (clause 6.1)."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4num.errors import ArgumentError
from dsv4num.formats import FP32

INTEGERS = ("int32", "int64")


@dataclass(frozen=True, slots=True)
class Array:
    """An array without its contents: strides in elements, dtype and device as text."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    writable: bool = True

    def _overlaps(self) -> bool:
        """Whether two elements may share memory: an axis steps by less than the inner ones span."""
        span = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < span:
                return True
            span += stride * (size - 1)
        return False

    def require(
        self,
        *,
        dtype: str | Sequence[str],
        shape: Sequence[int | str],
        clause: str,
        written: bool = False,
    ) -> None:
        """Checks dtype, rank, the sizes given as numbers, and that the last axis is contiguous.

        Args:
            dtype: the dtype allowed, or several.
            shape: one entry per axis: a number that the axis must have, or a name for any size.
            clause: the SPEC clause to cite.
            written: whether the operation writes this array.

        Raises:
            ArgumentError: the first requirement that does not hold.
        """
        allowed = (dtype,) if isinstance(dtype, str) else tuple(dtype)
        wanted = "[" + ", ".join(str(size) for size in shape) + "]"
        if self.dtype not in allowed:
            raise ArgumentError(self.name, f"dtype {self.dtype}", " or ".join(allowed), clause)
        if len(self.shape) != len(shape):
            given = f"{len(self.shape)} axes, shape {list(self.shape)}"
            raise ArgumentError(self.name, given, f"shape {wanted}", clause)
        for size, want in zip(self.shape, shape, strict=True):
            if isinstance(want, int) and size != want:
                given = f"shape {list(self.shape)}"
                raise ArgumentError(self.name, given, f"shape {wanted}", clause)
        if written and not self.writable:
            raise ArgumentError(self.name, "a read-only array", "a writable array", clause)
        if 0 in self.shape:
            return  # no element, so no stride means anything
        if self.shape and self.shape[-1] > 1 and self.strides[-1] != 1:
            given = f"stride {self.strides[-1]} along the last axis"
            raise ArgumentError(self.name, given, "stride 1 (contiguous rows)", clause)
        if any(s < 0 for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            given = f"strides {list(self.strides)}"
            raise ArgumentError(self.name, given, "strides of 0 or more", clause)
        if written and self._overlaps():
            given = f"strides {list(self.strides)}"
            raise ArgumentError(self.name, given, "rows that do not overlap", clause)


def integer(name: str, value: Any, least: int, clause: str) -> int:
    """`value` as an int of at least `least`; NumPy integers count, booleans, floats and arrays do not.

    Raises:
        ArgumentError: it is not such an integer.
    """
    found = whole(value)
    if isinstance(value, bool) or found is None or found < least:
        raise ArgumentError(name, repr(value), f"an integer of {least} or more", clause)
    return found


def whole(value: Any) -> int | None:
    """The int that a value is, if any; an array is none, though NumPy and torch have one for it."""
    if hasattr(value, "__array__") and not isinstance(value, numbers.Integral):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive_int(name: str, value: Any, clause: str) -> int:
    """`value` as an int of 1 or more.

    Raises:
        ArgumentError: it is not an integer, or below 1.
    """
    return integer(name, value, 1, clause)


def epsilon(name: str, value: Any, clause: str) -> float:
    """A number of 0 or more that is finite in fp32, as a float.

    Raises:
        ArgumentError: anything else.
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= FP32.max_value:  # false for NaN, and for any large integer
        raise ArgumentError(name, repr(value), "a number of 0 or more, finite in fp32", clause)
    return float(value)


def same_device(*arrays: Array) -> None:
    """Every array lies on the device of the first.

    Raises:
        ArgumentError: the first one that does not.
    """
    for array in arrays[1:]:
        if array.device != arrays[0].device:
            allowed = f"{arrays[0].device}, where {arrays[0].name} is"
            raise ArgumentError(array.name, f"device {array.device}", allowed)
