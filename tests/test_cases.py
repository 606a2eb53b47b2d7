"""The cases of `verify` themselves: names, seeds, levels, and what the reference says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mutants import Mutant, planted

from dsv4num import reference
from dsv4num.errors import ValueRangeError
from dsv4num.reference import read_records
from dsv4num.verify.case import Case, Level, flat, start_of
from dsv4num.verify.cases import paged_cache
from dsv4num.verify.operations import OPERATIONS

names = pytest.mark.parametrize("name", list(OPERATIONS))


@pytest.fixture
def lazy_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of several gigabytes take memory only where they are written."""
    make = paged_cache.blank_cache

    def blank(layout: Any, pages: int, block_size: int, **named: Any) -> Any:
        if pages < 10_000:
            return make(layout, pages, block_size, **named)
        stride, guard = layout.page_bytes(block_size), 1 << 16
        buffer = np.zeros(pages * stride + 2 * guard, np.uint8)
        shape, strides = (pages, block_size, layout.row_bytes), (stride, layout.row_bytes, 1)
        return np.ndarray(shape, np.uint8, buffer, guard, strides)

    monkeypatch.setattr(paged_cache, "blank_cache", blank)


def made(name: str, variant: str, level: Level, seed: int = 0) -> Iterator[Case]:
    return OPERATIONS[name].cases(variant, level, seed)


def arrays(case: Case) -> dict[str, Any]:
    given = case.arguments | case.keywords
    return {name: value for name, value in given.items() if isinstance(value, np.ndarray)}


@names
def test_names(name: str, lazy_caches: None) -> None:
    """They are unique, and `--case` finds those of quick at level full too."""
    for variant in {OPERATIONS[name].variants[0], OPERATIONS[name].variants[-1]}:
        quick = [case.name for case in made(name, variant, "quick")]
        full = [case.name for case in made(name, variant, "full")]
        assert len(set(quick)) == len(quick) > 0 and len(set(full)) == len(full)
        assert set(quick) <= set(full)


@pytest.mark.parametrize("layout", ["v4", "v41_nvfp4_inline"])
def test_offsets_of_pages_in_32_bits(layout: str, lazy_caches: None) -> None:
    """The case of several gigabytes has rows before and behind 2**31 bytes.

    An implementation whose page offsets wrap is shown by it, at level full on a GPU. No quick case can:
    one that ends beyond 2**31 bytes is not done in seconds on a CPU.
    """
    case = list(made("dequantize_and_gather_k_cache", layout, "full"))[-1]
    assert case.large and case.name == "beyond 2**31 bytes"
    call = case.arguments | case.keywords
    stride = call["k_cache"].strides[0]

    def gathered() -> Any:
        out = np.zeros(call["out"].shape, call["out"].dtype)
        reference.dequantize_and_gather_k_cache(
            *(out, call["k_cache"], call["seq_lens"], None, call["block_table"], 64, 0),
            layout=layout,
        )
        return out.view(np.uint16)

    def wrapped(k_cache: Any, slots: Any, block_size: int, *, layout: Any) -> Any:
        offsets = slots // block_size * stride
        inside = offsets == offsets.astype(np.int32)
        records = read_records(k_cache, slots, block_size, layout=layout)
        return np.where(inside[:, None], records, np.uint8(0))  # what lies there, if anything

    right = gathered()
    fault = Mutant("", "", ((read_records, wrapped),), ())
    with planted(fault):
        wrong = gathered()
    differs = (right != wrong).any(axis=-1)
    behind = (call["block_table"].astype(np.int64) * stride >= 1 << 31).repeat(64, axis=1)
    assert (differs == behind[:, : differs.shape[1]]).all() and 0 < behind.sum() < behind.size


@names
def test_arrays_lie_in_guarded_buffers(name: str) -> None:
    for variant in OPERATIONS[name].variants:
        for case in made(name, variant, "quick"):
            for given, view in arrays(case).items():
                last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
                end = start_of(view) + (last + view.itemsize if view.size else 0)
                room = min(start_of(view), len(flat(view)) - end)
                assert room >= 1 << 16, f"{case.name}: {given}"
            assert {*case.outputs, *case.updated} <= set(arrays(case))


@names
def test_seeds(name: str) -> None:
    """The same seed gives the same bytes; another one does too only where every input is listed."""
    variant = OPERATIONS[name].variants[0]

    def content(seed: int) -> bytes:
        views = [v for case in made(name, variant, "quick", seed) for v in arrays(case).values()]
        return b"".join(flat(view).tobytes() for view in views)

    assert content(0) == content(0)
    listed = ("decode", "pack", "unpack", "dequantize")
    assert (content(0) == content(1)) == (name in listed)


@pytest.mark.parametrize(
    "name", [n for n, one in OPERATIONS.items() if one.clause[0] == "5" and one.clause != "5.5"]
)
def test_what_the_reference_refuses(name: str) -> None:
    """A case with arguments of its own for the reference holds values that it refuses.

    Clause 5.7 does not look at the indices of tokens that are not valid, nor 5.8 at those beyond a
    count, so that builders may have nothing to refuse in a few of them.
    """
    refused = total = 0
    for variant in OPERATIONS[name].variants:
        for case in made(name, variant, "quick"):
            if not case.reference:
                continue
            total += 1
            given = {n: v.copy() if n in case.outputs else v for n, v in arrays(case).items()}
            call = case.arguments | case.keywords | given
            positional = [call.pop(n) for n in case.arguments]
            try:
                getattr(reference, name)(*positional, **call)
            except ValueRangeError as error:
                assert error.clause == "6.2"
                refused += 1
    builders = name.endswith(("_indices", "_and_lens"))
    assert refused == total > 0 if not builders else refused > total // 2
