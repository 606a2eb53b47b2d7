"""Arguments that no other test refuses, or draws: odd strides, odd layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from dsv4num import reference
from dsv4num.errors import ArgumentError
from dsv4num.formats import LAYOUTS, Field, Layout, Plane, get_layout, layout
from dsv4num.formats.picture import WIDTH
from dsv4num.verify.case import BF16


def test_rows_in_reverse() -> None:
    cache = np.zeros((1, 2 * 584), np.uint8)
    k = np.zeros((2, 512), BF16)
    with pytest.raises(
        ArgumentError, match=r"k: got strides \[-512, 1\]; allowed: strides of 0 or"
    ):
        reference.quantize_and_insert_k_cache(k[::-1], cache, np.int64([0]), 2)
    assert not cache.any()


def test_pages_that_overlap() -> None:
    """A cache that is only read may not have pages shorter than their rows either."""
    cache = as_strided(np.zeros(4000, np.uint8), (3, 2 * 584), (1167, 1))
    out = np.zeros((1, 1, 512), BF16)
    table = np.int32([[0]])
    with pytest.raises(
        ArgumentError, match="k_cache: got page stride 1167; allowed: at least 1168"
    ):
        reference.dequantize_and_gather_k_cache(
            out, cache, np.int32([1]), None, table, 2, 0, layout="v4"
        )


def compress(state: Any, overlap: Any = False) -> None:
    """One group of ratio 4."""
    reference.compress_norm_rope_store(
        *(state, np.int32([0]), np.int64([3]), np.int64([3]), np.int32([[0]])),
        *(np.ones((4, 64), np.float32), np.zeros((1, 1, 68), np.uint8), np.int64([0])),
        *(np.ones(128, np.float32), 0.0),
        compress_ratio=4,
        overlap=overlap,
        layout="indexer_mxfp4",
    )


def test_states_that_overlap() -> None:
    """A state cache that is only read: blocks may lie between the rows of others, not over them."""
    memory = np.ones(8 * 256, np.float32)
    compress(as_strided(memory, (2, 4, 256), (1024, 2048, 4)))  # rows of two blocks take turns
    for strides in ((1024, 1024, 4), (2044, 1024, 4), (1020, 2048, 4)):
        numbers = f"block stride {strides[0] // 4} with row stride {strides[1] // 4}"
        with pytest.raises(
            ArgumentError, match=f"state_cache: got {numbers}; allowed: rows that do"
        ):
            compress(as_strided(memory, (2, 4, 256), strides))


def test_an_overlap_that_is_no_flag() -> None:
    state = np.ones((2, 4, 256), np.float32)
    for flag in (0, False, np.int64(0)):
        compress(state, flag)
    for wrong in (np.array(0), np.array([0]), np.array([0, 1]), np.array(0.0), 2, -1, 0.0, "0", None):
        with pytest.raises(ArgumentError, match="overlap: got "):
            compress(state, wrong)


@pytest.mark.parametrize("size", [np.array(1), np.array([1]), np.float64(1)])
def test_an_array_is_no_number(size: Any) -> None:
    """NumPy has a whole number for an array of one, and a kernel would take it as it is."""
    cache = np.zeros((1, 2 * 584), np.uint8)
    with pytest.raises(ArgumentError, match=r"block_size: got .*; allowed: an integer of 1"):
        reference.quantize_and_insert_k_cache(np.zeros((1, 512), BF16), cache, np.int64([0]), size)
    with pytest.raises(ArgumentError, match=r"overlap: got .*; allowed: True or False"):
        compress(np.ones((1, 4, 512), np.float32), size)


def test_a_numpy_scalar_is_no_array() -> None:
    with pytest.raises(
        ArgumentError, match=r"x: got a NumPy scalar \(float32\); allowed: an array"
    ):
        reference.encode(np.float32(1), "e2m1")  # type: ignore[arg-type]  # refused


def test_block_sizes_of_a_layout() -> None:
    for wrong in (0, -1, True, 1.0, "64", None):
        with pytest.raises(ArgumentError, match=r"block_size: got .*; allowed: an integer of 1 or"):
            get_layout("v4").page_bytes(wrong)  # type: ignore[arg-type]  # refused


def test_an_alias_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(get_layout("v4"), aliases=("k_cache_584",))
    monkeypatch.setitem(layout.LAYOUTS, "v4", known)
    assert get_layout("k_cache_584") is known
    with pytest.raises(ArgumentError, match="layout: got 'k_cache_585'; allowed: v4, "):
        get_layout("k_cache_585")
    assert LAYOUTS is layout.LAYOUTS


def test_a_picture_of_many_fields() -> None:
    """Where even the narrowest columns do not fit, the drawing is as wide as they need."""
    fields = tuple(Field(f"field_{i:02}", "pad", i, 1) for i in range(16))
    crowded = Layout("crowded", 0, (Plane("data", 16, fields),))
    lines = crowded.describe(2).splitlines()
    assert all(any(f"field_{i:02}" in line for line in lines) for i in range(16))
    assert max(len(line) for line in lines) > WIDTH
