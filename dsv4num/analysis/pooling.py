"""The compressor's arithmetic with its parts exchanged: another exp, another order, another root.

`pool` with the exponential and the sum of SPEC 1 is what SPEC 5.4 says; with others it shows what each
choice does to the bytes. `pool_exact` is the same formula in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats.arithmetic import EXP32_LOWER_LIMIT, LOG2E
from dsv4num.reference import exp32, tree_sum

__all__ = ["exp_by_exp2", "pool", "pool_exact", "rms_norm_by_rsqrt", "running_sum"]

Fp32 = NDArray[np.float32]


def exp_by_exp2(x: Fp32) -> Fp32:
    """exp(x) as 2**(x * log2(e)) with the product rounded to fp32, as GPU code computes it.

    The power itself is correctly rounded here, so that the whole error is that of the product: half
    an ulp of a number of up to 126, which the power turns into a relative error.

    Args:
        x: fp32, 0 or less.

    Returns:
        fp32 of the same shape; 0 below -87, as `exp32`.

    Example:
        >>> x = np.float32([-1, -50])
        >>> (exp_by_exp2(x).view(np.int32) - exp32(x).view(np.int32)).tolist()
        [0, 17]
    """
    product = (x * np.float32(LOG2E)).astype(np.float64)
    power = np.exp2(product).astype(np.float32)
    return np.where(x < np.float32(EXP32_LOWER_LIMIT), np.float32(0), power)


def running_sum(x: Fp32, axis: int) -> Fp32:
    """Sum along an axis from first to last, each addition rounded to fp32.

    Args:
        x: fp32 with at least one element along `axis`.
        axis: the axis.

    Returns:
        fp32, the shape of `x` without that axis.

    Example:
        >>> running_sum(np.float32([2**24, 1, 1, 1]), 0).item()
        16777216.0
    """
    rows = np.moveaxis(x, axis, 0)
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    return np.asarray(total)


def pool(
    kv: Fp32,
    score: Fp32,
    *,
    exp: Callable[[Fp32], Fp32] = exp32,
    add: Callable[[Fp32, int], Fp32] = tree_sum,
) -> Fp32:
    """Softmax-weighted mean over axis 1, in fp32.

    With the defaults, step 3 of SPEC 5.4 where no row is missing: m = max, w = exp(score - m),
    add(w * kv) / add(w).

    Args:
        kv: fp32 [n, N, D].
        score: fp32 [n, N, D], no NaN.
        exp: what to use for the exponential.
        add: what to use for both sums.

    Returns:
        fp32 [n, D].

    Example:
        >>> pool(np.float32([[[1], [3]]]), np.zeros((1, 2, 1), np.float32)).item()
        2.0
    """
    weight = exp(score - score.max(axis=1, keepdims=True))
    return np.asarray(add(weight * kv, 1) / add(weight, 1))


def pool_exact(kv: Fp32, score: Fp32) -> NDArray[np.float64]:
    """`pool` in float64: what the result would be without fp32 rounding.

    Args:
        kv: fp32 [n, N, D].
        score: fp32 [n, N, D].

    Returns:
        float64 [n, D].

    Example:
        >>> pool_exact(np.float32([[[1], [3]]]), np.zeros((1, 2, 1), np.float32)).item()
        2.0
    """
    wide = score.astype(np.float64)
    weight = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray((weight * kv).sum(1) / weight.sum(1))


def rms_norm_by_rsqrt(c: Fp32, weight: NDArray[Any], eps: float, ulps: int = 0) -> Fp32:
    """RMS norm whose reciprocal root is rounded once, then moved by some ulp.

    SPEC 1.4 rounds the root and then its reciprocal. Hardware has one approximate instruction for
    both, in the documents good to 2 ulp: `ulps` is how far off it is.

    Args:
        c: fp32 [..., D], D a power of two.
        weight: fp32 or bf16 [D].
        eps: 0 or more.
        ulps: added to the bit pattern of the correctly rounded reciprocal root.

    Returns:
        fp32 [..., D].

    Example:
        >>> rms_norm_by_rsqrt(np.float32([[3, 3]]), np.ones(2, np.float32), 0.0).tolist()
        [[1.0, 1.0]]
    """
    share = np.float32(1) / np.float32(c.shape[-1])
    mean = tree_sum(c * c, -1) * share + np.float32(eps)
    root = (1 / np.sqrt(mean.astype(np.float64))).astype(np.float32)
    inverse = (root.view(np.int32) + np.int32(ulps)).view(np.float32)
    return np.asarray((c * inverse[..., None]) * weight.astype(np.float32))
