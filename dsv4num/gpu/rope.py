"""Rotary position embedding on the GPU. The rule is in `dsv4num.reference.rope`, SPEC clause 5.5.

Tables are made once, on the host: `dsv4num.reference.build_cos_sin_cache`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4num.errors import ArgumentError
from dsv4num.gpu._target import Launch, use_native
from dsv4num.gpu.scalar import device_of

__all__ = ["rotate_gptj"]


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """The rotated even and odd elements; each product and each sum is rounded."""
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _rotate_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    even = tl.load(x_ptr + 2 * at, mask=inside, other=0.0)
    odd = tl.load(x_ptr + 2 * at + 1, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
    even, odd = rotate_pairs(even, odd, cos, sin)
    tl.store(y_ptr + 2 * at, even, mask=inside)
    tl.store(y_ptr + 2 * at + 1, odd, mask=inside)


def rotate_gptj(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `dsv4num.reference.rotate_gptj`: the same values."""
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            given = getattr(tensor, "dtype", type(tensor).__name__)
            raise ArgumentError(name, given, "float32", "5.5")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ArgumentError("x", f"shape {list(x.shape)}", "an even last axis", "5.5")
    wanted = (*x.shape[:-1], x.shape[-1] // 2)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tuple(tensor.shape) != wanted:
            allowed = f"shape {list(wanted)}"
            raise ArgumentError(name, f"shape {list(tensor.shape)}", allowed, "5.5")
    use_native(Launch(), x.device)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if cos.numel():
        block = 1024
        with device_of(x):
            _rotate_kernel[(triton.cdiv(cos.numel(), block),)](
                x.contiguous(),
                cos.contiguous(),
                sin.contiguous(),
                y,
                cos.numel(),
                BLOCK=block,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return y
