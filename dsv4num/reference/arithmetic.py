"""Fp32 arithmetic that gives the same bits everywhere. SPEC section 1.

Only operations that IEEE 754 rounds correctly are used: add, subtract, multiply, divide, square
root, each rounded to fp32 on its own. The order of operations is part of the definition.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import epsilon
from dsv4num.errors import ArgumentError
from dsv4num.formats.arithmetic import (
    EXP32_LOWER_LIMIT,
    EXP32_POLYNOMIAL,
    LN2_HI,
    LN2_LO,
    LOG2E,
    ROUND_MAGIC,
)
from dsv4num.formats.scalar import BF16, FP32
from dsv4num.reference.scalar import decode, encode, kind_of

__all__ = ["exp32", "inv_rms", "rms_norm", "round_bf16", "tree_sum"]

_ONE = np.float32(1)
_NAN = np.uint32(FP32.encoded_nan).view(np.float32)


def exp32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """e to the power of x, for x <= 0, to within 0.89 ulp.

    Rule (clause 1.3; every line rounds each of its operations to fp32):
        1. n = (x * LOG2E + ROUND_MAGIC) - ROUND_MAGIC, the integer nearest to x / ln(2).
        2. hi = x - n * LN2_HI, exact; lo = n * LN2_LO; r = hi - lo.
        3. p = the polynomial at r by Horner's scheme, highest coefficient first.
        4. y = 1 + (hi + ((r * r) * p - lo)).
        5. y * 2**n, where 2**n is the fp32 number with the bits (n + 127) << 23. Exact.
        6. x < -87, -infinity too, gives +0. NaN gives NaN.

    The result for x > 0 is not defined; here it is NaN, so that misuse shows.

    Args:
        x: fp32, any shape, 0 or less, or NaN.

    Returns:
        fp32 of the same shape. Both zeros give exactly 1.

    Raises:
        ArgumentError: another dtype.

    Example:
        >>> y = exp32(np.float32([-0.0, -1, -80, -87, -88, -np.inf]))
        >>> [f"{bits:08X}" for bits in y.view(np.uint32)]
        ['3F800000', '3EBC5AB2', '05BFECBA', '00B33687', '00000000', '00000000']
    """
    _require_fp32("x", x, "1.3")
    with np.errstate(invalid="ignore"):  # a comparison with a signalling NaN
        served = (x <= 0) & (x >= np.float32(EXP32_LOWER_LIMIT))
        below = x < np.float32(EXP32_LOWER_LIMIT)
    inside = np.where(served, x, np.float32(0))
    magic = np.float32(ROUND_MAGIC)
    n = (inside * np.float32(LOG2E) + magic) - magic
    hi = inside - n * np.float32(LN2_HI)
    lo = n * np.float32(LN2_LO)
    r = hi - lo
    p = np.full_like(r, EXP32_POLYNOMIAL[-1])
    for coefficient in EXP32_POLYNOMIAL[-2::-1]:
        p = p * r + np.float32(coefficient)
    y = _ONE + (hi + ((r * r) * p - lo))
    power = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(served, y * power, np.where(below, np.float32(0), _NAN))


def tree_sum(x: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Sum along an axis in one fixed order.

    Rule (clause 1.2): replace the axis by the sums of its adjacent pairs (0 + 1, 2 + 3, ...), each
    rounded to fp32; repeat until one is left. A single element is returned unchanged.

    Args:
        x: fp32; the length of `axis` is a power of two.
        axis: the axis to sum over; negative counts from the end.

    Returns:
        fp32, the shape of `x` without that axis.

    Raises:
        ArgumentError: another dtype, no such axis, or a length that is not a power of two.

    Example:
        >>> x = np.float32([2**24, 1, 1, 1])  # one at a time, every 1 would be lost
        >>> f"{tree_sum(x, 0).view(np.uint32):08X}"
        '4B800001'
    """
    _require_fp32("x", x, "1.2")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ArgumentError("axis", repr(axis), f"an axis of an array of {x.ndim} axes", "1.2")
    _require_power_of_two(f"axis {axis} of x", x.shape[axis], "1.2")
    rows = np.moveaxis(x, axis, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        while rows.shape[-1] > 1:
            rows = rows[..., 0::2] + rows[..., 1::2]
    return rows[..., 0].copy()


def inv_rms(c: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """One over the root of the mean square of each row.

    Rule (clause 1.4): 1 / sqrt(tree_sum(c * c) * (1 / D) + eps). Every operation is rounded to
    fp32; 1 / D is exact. The square root and the division round separately.

    Args:
        c: fp32 [..., D], D a power of two.
        eps: 0 or more; rounded to fp32 first.

    Returns:
        fp32 [...]. A row of zeros with eps 0 gives infinity.

    Raises:
        ArgumentError: another dtype, no axis, a D that is not a power of two, or a bad `eps`.

    Example:
        >>> f"{inv_rms(np.float32([1, 2, 3, 4]), 1e-6).view(np.uint32):08X}"
        '3EBAF4BA'
    """
    _require_rows("c", c, "1.4")
    small = np.float32(epsilon("eps", eps, "1.4"))
    share = _ONE / np.float32(c.shape[-1])
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.asarray(_ONE / np.sqrt(tree_sum(c * c, -1) * share + small))


def rms_norm(c: NDArray[np.float32], weight: NDArray[Any], eps: float) -> NDArray[np.float32]:
    """Rows divided by their root mean square, times a weight per column.

    Rule (clause 1.4): (c * inv_rms(c, eps)) * weight, each product rounded to fp32.

    Args:
        c: fp32 [..., D], D a power of two.
        weight: fp32 or bf16 [D]; bf16 is widened, exactly.
        eps: 0 or more; rounded to fp32 first.

    Returns:
        fp32 [..., D].

    Raises:
        ArgumentError: a dtype, shape or `eps` that is not as above.

    Example:
        >>> y = rms_norm(np.float32([1, 2, 3, 4]), np.float32([1, 1, 1, 0.5]), 1e-6)
        >>> [f"{bits:08X}" for bits in y.view(np.uint32)]
        ['3EBAF4BA', '3F3AF4BA', '3F8C378C', '3F3AF4BA']
    """
    _require_rows("c", c, "1.4")
    if not isinstance(weight, np.ndarray) or weight.dtype not in (np.float32, ml_dtypes.bfloat16):
        given = kind_of(weight)
        raise ArgumentError("weight", given, "float32 or bfloat16", "1.4")
    if weight.shape != c.shape[-1:]:
        allowed = f"[{c.shape[-1]}], the width of c"
        raise ArgumentError("weight", f"shape {list(weight.shape)}", allowed, "1.4")
    if weight.dtype == np.float32:
        widened = weight
    else:
        widened = decode(np.ascontiguousarray(weight).view(np.uint16), BF16)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray((c * inv_rms(c, eps)[..., None]) * widened)


def round_bf16(x: NDArray[np.float32]) -> NDArray[Any]:
    """Fp32 to bf16.

    Rule (clause 1.5): to nearest, ties to the even code; what rounds beyond the largest becomes
    infinity; every NaN becomes 0x7FFF, whatever its sign and payload.

    Args:
        x: fp32, any shape.

    Returns:
        `ml_dtypes.bfloat16` of the same shape.

    Raises:
        ArgumentError: another dtype.

    Example:
        >>> y = round_bf16(np.float32([1.00390625, 1.01171875, -0.0, np.nan]))
        >>> [f"{bits:04X}" for bits in y.view(np.uint16)]
        ['3F80', '3F82', '8000', '7FFF']
    """
    _require_fp32("x", x, "1.5")
    return encode(x, BF16).view(ml_dtypes.bfloat16)


def _require_fp32(name: str, x: Any, clause: str) -> None:
    """An fp32 array or NumPy scalar."""
    if not isinstance(x, np.ndarray | np.float32) or x.dtype != np.float32:
        raise ArgumentError(name, kind_of(x), "float32", clause)


def _require_rows(name: str, x: Any, clause: str) -> None:
    """An fp32 array whose last axis has a power-of-two length."""
    _require_fp32(name, x, clause)
    if x.ndim == 0:
        raise ArgumentError(name, "no axis", "[..., D]", clause)
    _require_power_of_two(f"last axis of {name}", x.shape[-1], clause)


def _require_power_of_two(name: str, length: int, clause: str) -> None:
    """A length that adjacent pairs can reduce to one."""
    if length < 1 or length & (length - 1):
        raise ArgumentError(name, f"length {length}", "a power of two", clause)
