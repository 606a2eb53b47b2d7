"""Fp32 arithmetic on the GPU. The rules are in `dsv4num.reference.arithmetic` and SPEC section 1.

No approximate instruction is used, and no product is contracted into a sum: every launch turns
floating-point fusion off. A sum is a tree of adjacent pairs by construction, whatever the layout of
its operand over threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

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
from dsv4num.gpu._target import Launch, use_native
from dsv4num.gpu.scalar import bits_of, device_of, encode, float_of

__all__ = ["exp32", "inv_rms", "rms_norm", "round_bf16", "tree_sum"]

_LOG2E = tl.constexpr(LOG2E)
_MAGIC = tl.constexpr(ROUND_MAGIC)
_LN2_HI = tl.constexpr(LN2_HI)
_LN2_LO = tl.constexpr(LN2_LO)
_LOWER_LIMIT = tl.constexpr(EXP32_LOWER_LIMIT)
_P0, _P1, _P2, _P3, _P4 = (tl.constexpr(p) for p in EXP32_POLYNOMIAL)
_NAN = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(float("inf"))
_SMALL, _TWO_32, _TWO_M16 = (tl.constexpr(2.0**power) for power in (-96, 32, -16))


@triton.jit
def exp_nonpositive(x):
    """exp32 of fp32 values that are 0 or less, or NaN, which gives a NaN; of no meaning for x > 0."""
    # The bits of the sum with MAGIC end in those of n.
    shifted = x * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    high = x - n * _LN2_HI
    low = n * _LN2_LO
    r = high - low
    p = (((_P4 * r + _P3) * r + _P2) * r + _P1) * r + _P0
    y = 1.0 + (high + ((r * r) * p - low))
    power = float_of((bits_of(shifted) << 23) + 0x3F800000)
    return tl.where(x < _LOWER_LIMIT, 0.0, y * power)


# A level of the tree adds the two elements of an axis of length 2, so that there is no order to choose
# for the reduction, and the compiler needs one exchange between threads at most.


@triton.jit
def tree_sum_columns(x):
    """[N, M] to [N, 1]: adjacent pairs of the last axis, again and again (clause 1.2)."""
    if x.shape[1] == 1:
        total = x
    else:
        total = tree_sum_columns(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2))
    return total


@triton.jit
def square_root(x, NATIVE: tl.constexpr):
    """The root, rounded to nearest, of fp32 values that are 0 or more, or NaN.

    Triton's own is not rounded to nearest everywhere: that of 3.6 is not below 2**-104 on AMD. So the
    portable path takes an estimate, good to a unit in its last place, and corrects it with integers.
    """
    if NATIVE:
        root = tl.sqrt_rn(x)
    else:
        small = x < _SMALL
        bits = bits_of(tl.where(small, x * _TWO_32, x))
        # x is s * 4**k with s from 1 to below 4. Three steps of Heron's, from within 4 % of its root.
        odd = (bits & 0x800000) != 0  # the exponent field, where s is below 2
        s = float_of((bits & 0x7FFFFF) | tl.where(odd, 0x3F800000, 0x40000000).to(tl.uint32))
        guess = s * 0.34375 + 0.6875
        for _ in tl.static_range(3):
            guess = (guess + tl.div_rn(s, guess)) * 0.5
        # In units of 2**-23 the root of n is nearest to r where -r < n - r * r <= r. Both numbers may
        # have 48 bits, but their difference has 27, so that their lower 32 give it.
        r = bits_of(guess) - (0x3F800000 - 0x800000)
        n = ((bits & 0x7FFFFF) | 0x800000) << tl.where(odd, 23, 24).to(tl.uint32)
        error = (n - r * r).to(tl.int32, bitcast=True)
        r = r.to(tl.int32, bitcast=True)
        r += (error > r).to(tl.int32) - (error <= -r).to(tl.int32)
        field = ((bits >> 23) + 127) >> 1  # that of 2**k; r carries a 1 into it
        root = float_of(((field - 1) << 23) + r.to(tl.uint32, bitcast=True))
        root = tl.where(small, root * _TWO_M16, root)
        root = tl.where((x > 0.0) & (x < _INFINITY), root, x)
    return root


@triton.jit
def inverse_rms(c, eps, NATIVE: tl.constexpr):
    """[N, D] to [N, 1]: 1 / sqrt(mean square + eps), as clause 1.4 orders the roundings."""
    share: tl.constexpr = 1.0 / c.shape[1]
    root = square_root(tree_sum_columns(c * c) * share + eps, NATIVE)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def load_weight(weight_ptr, column):
    """fp32 weights from an fp32 pointer, or from bf16 given as int16."""
    weight = tl.load(weight_ptr + column)
    if weight.dtype == tl.int16:
        weight = float_of(weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return weight


@triton.jit
def _exp32_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.where(x <= 0.0, bits_of(exp_nonpositive(x)), _NAN)
    tl.store(y_ptr + at, float_of(y.to(tl.uint32)), mask=at < n)


@triton.jit
def _tree_sum_kernel(x_ptr, y_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tree_sum_columns(tl.load(x_ptr + at, mask=(row < rows)[:, None], other=0.0))
    tl.store(y_ptr + row[:, None], total, mask=(row < rows)[:, None])


@triton.jit
def _rms_norm_kernel(
    c_ptr,
    weight_ptr,
    y_ptr,
    eps,
    rows,
    WIDTH: tl.constexpr,
    SCALE_ONLY: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + column[None, :]
    inside = (row < rows)[:, None]
    c = tl.load(c_ptr + at, mask=inside, other=0.0)
    scale = inverse_rms(c, eps, NATIVE)
    if SCALE_ONLY:
        tl.store(y_ptr + row[:, None], scale, mask=inside)
    else:
        normed = (c * scale) * load_weight(weight_ptr, column)[None, :]
        tl.store(y_ptr + at, normed, mask=inside)


def exp32(x: torch.Tensor) -> torch.Tensor:
    """See `dsv4num.reference.exp32`: the same values."""
    _require_fp32("x", x, "1.3")
    use_native(Launch(), x.device)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        block = 1024
        with device_of(x):
            _exp32_kernel[(triton.cdiv(x.numel(), block),)](
                x.contiguous(), y, x.numel(), BLOCK=block, num_warps=4, enable_fp_fusion=False
            )
    return y


def tree_sum(x: torch.Tensor, axis: int) -> torch.Tensor:
    """See `dsv4num.reference.tree_sum`: the same values."""
    _require_fp32("x", x, "1.2")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
        raise ArgumentError("axis", repr(axis), f"an axis of an array of {x.dim()} axes", "1.2")
    _require_power_of_two(f"axis {axis} of x", x.shape[axis], "1.2")
    use_native(Launch(), x.device)
    rows = x.movedim(axis, -1).contiguous()
    y = torch.empty(rows.shape[:-1], dtype=torch.float32, device=x.device)
    if y.numel():
        per_program = max(1, 1024 // rows.shape[-1])
        with device_of(x):
            _tree_sum_kernel[(triton.cdiv(y.numel(), per_program),)](
                rows,
                y,
                y.numel(),
                WIDTH=rows.shape[-1],
                ROWS=per_program,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return y


def inv_rms(c: torch.Tensor, eps: float) -> torch.Tensor:
    """See `dsv4num.reference.inv_rms`: the same values."""
    _require_rows("c", c, "1.4")
    y = torch.empty(c.shape[:-1], dtype=torch.float32, device=c.device)
    _launch_rms_norm(c, c, y, epsilon("eps", eps, "1.4"), scale_only=True)
    return y


def rms_norm(c: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `dsv4num.reference.rms_norm`: the same values."""
    _require_rows("c", c, "1.4")
    if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.float32, torch.bfloat16):
        given = getattr(weight, "dtype", type(weight).__name__)
        raise ArgumentError("weight", given, "float32 or bfloat16", "1.4")
    if weight.shape != c.shape[-1:]:
        allowed = f"[{c.shape[-1]}], the width of c"
        raise ArgumentError("weight", f"shape {list(weight.shape)}", allowed, "1.4")
    y = torch.empty(c.shape, dtype=torch.float32, device=c.device)
    small = epsilon("eps", eps, "1.4")
    _launch_rms_norm(c, weight_view(weight.contiguous()), y, small, scale_only=False)
    return y


def round_bf16(x: torch.Tensor, *, launch: Launch = Launch()) -> torch.Tensor:
    """See `dsv4num.reference.round_bf16`: the same bits."""
    _require_fp32("x", x, "1.5")
    return encode(x, "bf16", launch=launch).view(torch.bfloat16)


def weight_view(weight: torch.Tensor) -> torch.Tensor:
    """A weight as kernels read it: bf16 as int16."""
    return weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight


def _launch_rms_norm(
    c: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, eps: float, *, scale_only: bool
) -> None:
    native = use_native(Launch(), c.device)
    width = c.shape[-1]
    rows = c.numel() // width
    if rows == 0:
        return
    per_program = max(1, 1024 // width)
    with device_of(c):
        _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
            c.contiguous(),
            weight,
            y,
            eps,
            rows,
            WIDTH=width,
            SCALE_ONLY=scale_only,
            NATIVE=native,
            ROWS=per_program,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _require_fp32(name: str, x: Any, clause: str) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise ArgumentError(name, getattr(x, "dtype", type(x).__name__), "float32", clause)


def _require_rows(name: str, x: Any, clause: str) -> None:
    _require_fp32(name, x, clause)
    if x.dim() == 0:
        raise ArgumentError(name, "no axis", "[..., D]", clause)
    _require_power_of_two(f"last axis of {name}", x.shape[-1], clause)


def _require_power_of_two(name: str, length: int, clause: str) -> None:
    if length < 1 or length & (length - 1):
        raise ArgumentError(name, f"length {length}", "a power of two", clause)
