"""What the production kernels wrote on an H200 (see vectors/README.md) against the reference."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow

from dsv4num.reference import dequantize_and_gather_k_cache, quantize_and_insert_k_cache

FILE = np.load(Path(__file__).parent / "vectors" / "h200_triton36.npz", allow_pickle=False)


def case(name: str) -> dict[str, np.ndarray]:
    """The arrays of one case."""
    return {key.split("/")[1]: FILE[key] for key in FILE.files if key.split("/")[0] == name}


def gathered(name: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits of our gather and of theirs."""
    c = case(name)
    theirs = c["out_bf16"]
    out = np.full(theirs.shape, c["out_fill"].item(), ml_dtypes.bfloat16)
    before = c["cache"].copy()
    dequantize_and_gather_k_cache(
        out,
        c["cache"],
        c["seq_lens"],
        c.get("gather_lens"),
        c["block_table"],
        c["block_size"].item(),
        c["offset"].item(),
        layout=layout,
    )
    assert np.array_equal(c["cache"], before)
    return out.view(np.uint16), theirs


def stored_codes(name: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """The element code and the scale code behind every gathered element; -1 where there is none."""
    c = case(name)
    rows, page_bytes = c["block_size"].item(), c["cache"].shape[1]
    stored, table = c["cache"].ravel(), c["block_table"].tolist()
    width, data_bytes, _, rule, _ = slow.LAYOUTS[layout]
    element, group, _ = slow.RULES[rule]
    quantized = 448 if layout == "v4" else width
    codes = np.full(c["out_bf16"].shape, -1)
    scales = np.full(c["out_bf16"].shape, -1)
    for request, seq_len in enumerate(c["seq_lens"].tolist()):
        for position in range(seq_len):
            slot = table[request][position // rows] * rows + position % rows
            at, at_scales = slow.places(layout, rows, page_bytes, slot)
            to = request, c["offset"].item() + position, slice(0, quantized)
            data = stored[at : at + data_bytes]
            if element == "e2m1":
                data = np.stack([data & 15, data >> 4], axis=-1).ravel()
            codes[to] = data[:quantized]
            scales[to] = np.repeat(stored[at_scales : at_scales + quantized // group], group)
    return codes, scales


def test_file_is_complete() -> None:
    names = {key.split("/")[0] for key in FILE.files}
    assert len(FILE.files) == 279 and len(names) == 25


@pytest.mark.parametrize(
    ("name", "layout"),
    [("v4_insert", "v4"), ("v4_insert_bs16", "v4"), ("v41_mxfp8_insert", "v41_mxfp8")],
)
def test_insert(name: str, layout: str) -> None:
    c = case(name)
    cache = np.full(c["cache"].shape, c["fill"].item(), np.uint8)
    quantize_and_insert_k_cache(
        c["k_bf16"].view(ml_dtypes.bfloat16),
        cache,
        c["slot_mapping"],
        c["block_size"].item(),
        layout=layout,
    )
    assert np.argwhere(cache != c["cache"]).tolist() == []
    assert (c["slot_mapping"] < 0).any() and (cache != c["fill"]).any()


@pytest.mark.parametrize("name", ["v4_insert", "v4_insert_bs16", "v41_mxfp8_insert"])
def test_insert_by_the_slow_oracle(name: str) -> None:
    """Half of the tokens, so as to be quick; only their bytes are compared."""
    c = case(name)
    layout = "v41_mxfp8" if name == "v41_mxfp8_insert" else "v4"
    rows, stride = c["block_size"].item(), c["cache"].shape[1]
    theirs = c["cache"].tobytes()
    _, data_bytes, scale_bytes, _, _ = slow.LAYOUTS[layout]
    for token, slot in list(enumerate(c["slot_mapping"].tolist()))[::2]:
        if slot >= 0:
            data, scales = slow.record(c["k_bf16"][token].tolist(), layout)
            at, at_scales = slow.places(layout, rows, stride, slot)
            assert theirs[at : at + data_bytes] == data
            assert theirs[at_scales : at_scales + scale_bytes] == scales


@pytest.mark.parametrize(
    ("name", "layout"),
    [("v4_gather", "v4"), ("v4_gather_lens", "v4"), ("v41_mxfp8_gather", "v41_mxfp8")],
)
def test_gather(name: str, layout: str) -> None:
    ours, theirs = gathered(name, layout)
    assert np.argwhere(ours != theirs).tolist() == []
    assert (theirs == 0xC0E0).any() and (theirs != 0xC0E0).any()


@pytest.mark.parametrize(
    ("name", "layout", "nan_scales", "flushed", "zeros"),
    [
        ("v4_gather_anybyte", "v4", 188, 120, 0),
        ("v41_mxfp8_gather_anybyte", "v41_mxfp8", 218, 210, 0),
        ("v41_nvfp4_gather", "v41_nvfp4", 0, 0, 3797),
    ],
)
def test_gather_of_any_bytes(
    name: str, layout: str, nan_scales: int, flushed: int, zeros: int
) -> None:
    """Each known difference counted; every other element equal.

    1. Scale code 255 and an element that is neither zero nor NaN: NaN here, infinity there.
    2. Scale code 0: 2**-127 times the element here, a zero of the same sign there.
    3. NVFP4 element code 8: a -0 times the scale here, a +0 times the scale there.
    """
    ours, theirs = gathered(name, layout)
    codes, scales = stored_codes(name, layout)
    differs = ours != theirs
    power_of_two = layout != "v41_nvfp4"
    is_nan = (ours == 0x7FFF) & ((theirs & 0x7FFF) == 0x7F80) & (scales == 255) & power_of_two
    is_flushed = ((theirs & 0x7FFF) == 0) & (scales == 0) & power_of_two
    is_flushed &= ((ours ^ theirs) & 0x8000) == 0
    is_zero = ((ours & 0x7FFF) == 0) & ((ours ^ theirs) == 0x8000) & (codes == 8)
    is_zero &= not power_of_two
    assert int((differs & is_nan).sum()) == nan_scales
    assert int((differs & is_flushed).sum()) == flushed
    assert int((differs & is_zero).sum()) == zeros
    unexplained = differs & ~is_nan & ~is_flushed & ~is_zero
    assert np.argwhere(unexplained).tolist() == []
    assert int(differs.sum()) == nan_scales + flushed + zeros


def test_gather_of_any_bytes_by_the_slow_oracle() -> None:
    """The second oracle gives the same bits as the reference; the first 28 rows of each request."""
    for name, layout in (
        ("v4_gather_anybyte", "v4"),
        ("v41_mxfp8_gather_anybyte", "v41_mxfp8"),
        ("v41_nvfp4_gather", "v41_nvfp4"),
    ):
        c = case(name)
        ours, _ = gathered(name, layout)
        requests, offset = len(c["seq_lens"]), c["offset"].item()
        want = np.full((requests, offset + 28, 512), 0xC0E0, np.uint16).tolist()
        slow.gather(
            want,
            c["cache"].tobytes(),
            c["cache"].shape[1],
            [28] * requests,
            None,
            c["block_table"].tolist(),
            c["block_size"].item(),
            offset,
            layout,
        )
        assert np.array_equal(ours[:, : offset + 28], np.array(want, np.uint16))
