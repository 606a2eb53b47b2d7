"""Kernels and layouts in the wild: what they cannot write they refuse, and nothing is written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dsv4num.errors import Dsv4numError
from dsv4num.formats import LAYOUTS, WILD_LAYOUTS, WILD_RULES, get_layout
from dsv4num.reference import quantize_and_insert_k_cache as reference_insert

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import gpu  # noqa: E402  (only where torch is)

#: Those that differ from one of the nine in pages or arrangement alone: the kernels write them.
WRITTEN = {
    *("v4_unpadded", "v4_page16", "v41_mxfp8_page512", "v41_mxfp8_inline_page3168"),
    *("v41_nvfp4_page256", "v41_nvfp4_page512", "v41_nvfp4_inline_page3168"),
    *("indexer_fp8_page576", "indexer_fp8_page512"),
    *("indexer_mxfp4_page576", "indexer_mxfp4_page512", "indexer_mxfp4_inline"),
}
VARIANTS = [
    found.under(rule).name
    for found in LAYOUTS.values()
    for rule, _ in found.writers
    if rule != found.rule
]


@pytest.mark.parametrize("name", [*WILD_LAYOUTS, *VARIANTS])
def test_the_right_bytes_or_a_refusal(name: str, device: str) -> None:
    layout = get_layout(name)
    rows = layout.tile_rows[0]
    block = rows if rows > 1 else 3
    rng = np.random.default_rng(5)
    k = torch.from_numpy(rng.standard_normal((2, layout.head_dim)).astype(np.float32))
    k = k.to(torch.bfloat16)
    stride = layout.page_bytes(block)
    cache = torch.full((2, stride), 0xA5, dtype=torch.uint8)
    slots = torch.tensor([block + 1, 0])
    on_device = cache.to(device)
    arguments = k.to(device), on_device, slots.to(device), block
    if name in WRITTEN:
        gpu.quantize_and_insert_k_cache(*arguments, layout=name)
        right = np.full((2, stride), 0xA5, np.uint8)
        bits = k.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        reference_insert(bits, right, slots.numpy(), block, layout=name)
        assert np.array_equal(on_device.cpu().numpy(), right)
        return
    with pytest.raises(Dsv4numError, match=r"the kernels know|one for each pool"):
        gpu.quantize_and_insert_k_cache(*arguments, layout=name)
    assert torch.equal(on_device.cpu(), cache)


@pytest.mark.parametrize("name", WILD_RULES)
def test_rules_of_other_writers_are_refused(name: str, device: str) -> None:
    x = torch.ones((1, WILD_RULES[name].group), device=device)
    with pytest.raises(Dsv4numError, match="the kernels know P1/64"):
        gpu.quantize(x, name)
    with pytest.raises(Dsv4numError, match="the kernels know P1/64"):
        gpu.encode_scale(torch.ones(3, device=device), name)
