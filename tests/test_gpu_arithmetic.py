"""The square root of the portable path, which takes none: over every significand, and at the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="kernels need torch")
triton = pytest.importorskip("triton", reason="kernels need triton")

import triton.language as tl  # noqa: E402  (only where torch is)

from dsv4num.gpu.arithmetic import square_root  # noqa: E402  (only where torch is)

BLOCK = 1 << 20


@triton.jit
def root_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    tl.store(y_ptr + at, square_root(x, False), mask=at < n)


def wrong(bits: NDArray[np.uint32], device: str) -> list[str]:
    """The first of these fp32 patterns whose root is not the one of IEEE 754, which NumPy takes."""
    block = BLOCK if device == "cpu" else 1024
    x = torch.from_numpy(bits.view(np.float32)).to(device)
    y = torch.empty_like(x)
    root_kernel[(triton.cdiv(len(bits), block),)](
        x, y, len(bits), BLOCK=block, enable_fp_fusion=False
    )
    got: NDArray[Any] = y.cpu().numpy()
    with np.errstate(invalid="ignore"):  # a signalling NaN
        expected = np.sqrt(bits.view(np.float32))
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    return [f"{int(pattern):08X}" for pattern in bits[~same][:3]]


def test_root_of_every_significand(device: str) -> None:
    # From 1 to below 4: a power of four more changes the exponent alone.
    assert wrong(np.arange(0x3F800000, 0x40800000, dtype=np.uint32), device) == []


def test_root_at_every_exponent_and_at_the_ends(device: str) -> None:
    rng = np.random.default_rng(1)
    ends = np.array([0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF])
    significands = np.concatenate([ends, rng.integers(0, 1 << 23, 2000)])
    finite = ((np.arange(255) << 23)[:, None] + significands[None, :]).ravel()
    special = [0x7F800000, 0x7FC00000, 0x7F800001, 0xFFC00000]  # infinity, NaN
    assert wrong(np.concatenate([finite, special]).astype(np.uint32), device) == []
