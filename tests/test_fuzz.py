"""Calls with arguments that are wrong in every way: a documented error, or a result, and no stray byte.

A call starts as a quick case of `verify`, or as a small one made here, and up to three of its arguments
are replaced: another dtype, size, rank, stride, place in memory, content, or something that is no array
at all. Whatever comes of it, bytes outside the outputs stay as they were; where an error is raised, so
do the outputs. `FUZZ_MINUTES=10 pytest tests/test_fuzz.py` goes on with new seeds for ten minutes.
"""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from calls import copied, is_placed, tensor_of, whole
from conftest import HAS_KERNELS
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutants import MUTANTS, planted

from dsv4num import reference
from dsv4num.errors import Dsv4numError
from dsv4num.formats import LAYOUTS, get_layout
from dsv4num.verify.case import BF16, Array, Case, flat, place, start_of
from dsv4num.verify.operations import OPERATIONS

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
#: Examples of one round. CI makes one round for every function, with the same seed each time.
EXAMPLES = 60
KERNEL_EXAMPLES = 12

DTYPES = (
    *("bool", "int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", ">i4", ">f4", ">i8"),
    BF16,
)
#: In place of a number, a name or a flag. Sizes between 2**12 and 2**31 would be valid, and slow.
SCALARS = (
    *(0, 1, 2, 3, 4, 7, 16, 64, 128, 512, 1 << 12, -1, -(1 << 70), 1 << 31, 1 << 63, 1 << 80),
    *(True, False, None, 0.0, -0.0, 0.5, 1e-6, 1e300, float("nan"), float("inf"), 2j),
    *("", "v4", "v5", "indexer_mxfp4", "P1/32", "N2/16", "e4m3fn", "e2m1", "bf16", "skip", "raise"),
    *(b"v4", (), [], {}, [1], object(), int, np.int64(3), np.float32(2), np.bool_(True)),
    *(np.array(2), np.array([2]), np.array(1.5), get_layout("v41_nvfp4")),
)
WILD = (
    *(-1, -2, 0, 1, 5, 63, 64, 1 << 20, (1 << 31) - 1, 1 << 31),
    *((1 << 62) + 1, (1 << 63) - 1, -(1 << 63)),
)


# --- arguments ------------------------------------------------------------------------


def _dtype(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that do not fit, complex parts that are lost
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        changed = array.astype(np.float64 if array.dtype == BF16 else array.dtype).astype(dtype)
    return place(changed)


def _size(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    if array.ndim == 0:
        return place(array[None])
    axis = draw(st.integers(0, array.ndim - 1))
    have = array.shape[axis]
    want = draw(st.sampled_from((0, 1, max(have - 1, 0), have + 1, 2 * have)))
    rows = np.moveaxis(array, axis, 0)
    return place(np.moveaxis(np.resize(rows, (want, *rows.shape[1:])), 0, axis))


def _rank(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    choices = [array[None], array[..., None], array.ravel(), array.T, array.reshape(-1)[:0]]
    if array.ndim and len(array):
        choices.append(np.asarray(array[0]))
    return place(draw(st.sampled_from(range(len(choices))).map(choices.__getitem__)))


def _stride(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    if array.ndim == 0:
        return array
    inner = draw(st.sampled_from((0, 1, 1, 2, 3)))
    steps, step = [], 1
    for size in array.shape[::-1]:
        steps.append(step * (inner if not steps else 1))
        step *= max(size, 1) * max(inner, 1) + draw(st.integers(-2, 9))
    if draw(st.booleans()):
        steps[-1] = draw(st.sampled_from((0, 1, 3)))
    steps = [max(one, 0) for one in steps]
    placed = place(array, tuple(steps[::-1]))
    return placed[::-1] if draw(st.integers(0, 5)) == 0 else placed


def _shifted(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    return place(array, shift=draw(st.integers(1, 15)))


def _content(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    changed = array.copy()
    share = draw(st.sampled_from((0.02, 0.3, 1.0)))
    where = rng.random(array.shape) < share
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        fitting = [value for value in WILD if info.min <= value <= info.max]
        near = array.astype(np.float64).max(initial=0) + rng.integers(-3, 4, array.shape)
        values = rng.choice(np.array(fitting, array.dtype), array.shape)
        if draw(st.booleans()):
            values = np.clip(near, max(info.min, -(2.0**52)), min(info.max, 2.0**52))
        changed[where] = values[where].astype(array.dtype)
    else:
        bits = rng.integers(0, 256, (*array.shape, array.itemsize), dtype=np.uint8)
        if array.dtype == np.bool_:
            bits &= 1
        changed[where] = bits.view(array.dtype)[..., 0][where]
    return place(changed)


def _read_only(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    placed = place(array)
    placed.flags.writeable = False
    return placed


def _no_array(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    return draw(st.sampled_from((None, 3, "x", [1, 2], (), b"12", np.float32(1), object())))


def _other_array(draw: Any, rng: np.random.Generator, array: Array) -> Any:
    return draw(
        st.sampled_from(
            (
                np.array([object()]),
                np.array(["a"]),
                np.zeros(2, "i4,f4"),
                np.zeros((), array.dtype),
                np.ma.masked_array([1, 2]),
                np.array(["2026-01-01"], "M8[D]"),
            )
        )
    )


CHANGES: tuple[Callable[..., Any], ...] = (
    *(_dtype, _size, _size, _rank, _stride, _stride, _shifted, *[_content] * 9),
    *(_read_only, _no_array, _other_array),
)


@cache
def small_calls() -> dict[str, list[Case]]:
    """Calls of the functions that `verify` has no cases of."""
    calls: dict[str, list[Case]] = {}

    def add(name: str, outputs: tuple[str, ...] = (), **arguments: Any) -> None:
        calls.setdefault(name, []).append(Case("small", arguments, outputs=outputs))

    rng = np.random.default_rng(3)
    for layout in LAYOUTS.values():
        rows = rng.standard_normal((3, layout.head_dim)).astype(np.float32)
        records = reference.encode_records(rows, layout)
        pages = place(rng.integers(0, 256, (2, layout.page_bytes(3) + 5), dtype=np.uint8))
        slots = place(np.array([4, -1, 0], np.int64))
        add("encode_records", rows=place(rows), layout=layout.name)
        add("decode_records", records=place(records), layout=layout.name)
        shared = {"slots": slots, "block_size": 3, "layout": layout.name}
        add("write_records", ("k_cache",), records=place(records), k_cache=pages, **shared)
        shared["slots"] = place(np.array([4, 4, 0], np.int32))
        add("read_records", k_cache=pages, **shared)
    numbers = {"max_position": 5, "rope_dim": 6, "theta": 1e4, "factor": 4.0}
    numbers |= {"original_max_position": 512, "beta_fast": 32.0, "beta_slow": 1.0}
    add("build_cos_sin_cache", **numbers)
    return calls


@cache
def calls_of(name: str) -> list[Case]:
    """The calls that a function starts from."""
    if name not in OPERATIONS:
        return small_calls()[name]
    operation = OPERATIONS[name]
    return [case for one in operation.variants for case in operation.cases(one, "quick", 0)]


def poisoned(case: Case, call: dict[str, Any]) -> dict[str, Array]:
    """The placed arrays of a call, outputs full of a byte that shows where nothing was written."""
    placed = {n: v for n, v in call.items() if isinstance(v, np.ndarray) and is_placed(v)}
    for name in set(case.outputs) & set(placed):
        flat(placed[name]).fill(0xA5)
    return placed


def changed_call(data: st.DataObject, case: Case, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, up to three of them replaced."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    names = draw(st.lists(st.sampled_from(sorted(given)), max_size=3, unique=True))
    call = {name: copied(value) for name, value in given.items()}
    for name in names:
        if isinstance(call[name], np.ndarray) and draw(st.integers(0, 9)):
            call[name] = copied(draw(st.sampled_from(CHANGES))(draw, rng, call[name]))
        else:
            call[name] = draw(st.sampled_from(SCALARS))
    return call


def may_change(view: Any, call: dict[str, Any]) -> Array:
    """Which bytes of a placed output's buffer the operation may write."""
    mask = np.zeros(flat(view).shape, np.bool_)
    byte = np.ndarray(
        (*view.shape, view.itemsize), np.bool_, mask, start_of(view), (*view.strides, 1)
    )
    if view.dtype != np.uint8 or view.ndim != 2:
        byte[...] = True
        return mask
    size = operator.index(call.get("kv_block_size") or call.get("block_size"))
    byte[:, : get_layout(call["layout"]).owned_bytes(size)] = True  # not the padding of a page
    return mask


# --- the reference --------------------------------------------------------------------


def call_reference(name: str, case: Case, call: dict[str, Any]) -> None:
    """Calls a function of the reference and looks at every byte around it."""
    placed = poisoned(case, call)
    before = {n: flat(v).copy() for n, v in placed.items()}
    positional = [] if name == "build_cos_sin_cache" else list(case.arguments)
    if name in ("write_records", "read_records"):
        positional.remove("layout")
    if name == "build_cos_sin_cache":
        positional = ["max_position"]
    arguments = [call[n] for n in positional]
    named = {n: v for n, v in call.items() if n not in positional}
    written: tuple[str, ...] = (*case.outputs, *case.updated)
    try:
        getattr(reference, name)(*arguments, **named)
    except Dsv4numError as error:
        assert str(error)
        written = ()
    for n, view in placed.items():
        where = flat(view) != before[n]
        if n in written and where.any():
            where &= ~may_change(view, call)
        assert not where.any(), f"{name}: {n} changed at byte {int(np.flatnonzero(where)[0])}"


def fuzz(function: Callable[[Any], None], number: int, examples: int) -> None:
    """Runs a test of random data with one seed."""
    run = given(st.data())(function)
    phases = (Phase.generate, Phase.shrink)
    run = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )(run)
    seed(number)(run)()


def fuzz_for(share: float, function: Callable[[Any], None], examples: int) -> None:
    """One round, or as many with new seeds as fit a share of FUZZ_MINUTES (`-rP` shows how many)."""
    end = time.monotonic() + 60 * MINUTES * share
    number = 0
    while number == 0 or time.monotonic() < end:
        fuzz(function, number, examples)
        number += 1
    print(f"{number * examples} calls")


FUNCTIONS = list(reference.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference(name: str) -> None:
    def once(data: st.DataObject) -> None:
        case = data.draw(st.sampled_from(calls_of(name)), label="case")
        # Cases of values that kernels skip start from what the reference takes.
        given_ = {**case.arguments, **case.keywords, **case.reference}
        call_reference(name, case, changed_call(data, case, given_))

    fuzz_for(0.6 / len(FUNCTIONS), once, EXAMPLES)


def test_a_stray_byte_is_found() -> None:
    """Zeros behind the rows of a page, and an output written before an error."""
    (case, *_) = calls_of("quantize_and_insert_k_cache")

    def call(name: str = "", value: Any = None) -> None:
        given_ = {n: copied(v) for n, v in (case.arguments | case.keywords).items()}
        call_reference(
            "quantize_and_insert_k_cache", case, given_ | ({name: value} if name else {})
        )

    call()
    call("block_size", -1)
    with (
        planted(MUTANTS["page padding cleared"]),
        pytest.raises(AssertionError, match="k_cache changed at byte"),
    ):
        call()

    def writes_first(k: Any, k_cache: Array, *args: Any, **named: Any) -> None:
        k_cache[0] = 0
        reference.paged_cache.quantize_and_insert_k_cache(k, k_cache, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "quantize_and_insert_k_cache", writes_first)
        with pytest.raises(AssertionError, match="k_cache changed at byte"):
            call("block_size", -1)


# --- the launchers --------------------------------------------------------------------


@cache
def light_calls(name: str) -> list[Case]:
    """The calls whose arrays are small."""

    def size(case: Case) -> int:
        arrays = [v for v in case.arguments.values() if isinstance(v, np.ndarray)]
        return sum(array.size * array.itemsize for array in arrays)

    calls = sorted(calls_of(name), key=size)
    return calls[: max(len(calls) // 3, 1)]


@pytest.mark.skipif(not HAS_KERNELS, reason="needs torch and triton")
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_the_launchers(name: str, device: str) -> None:
    """Values out of range are no error here: whatever they are, no byte outside changes."""
    import torch

    from dsv4num import gpu

    def once(data: st.DataObject) -> None:
        case = data.draw(st.sampled_from(light_calls(name)), label="case")
        call = changed_call(data, case, {**case.arguments, **case.keywords})
        views = poisoned(case, call)
        tensors = {n: tensor_of(v, device) for n, v in call.items()}
        before = {n: flat(v).copy() for n, v in views.items()}
        arguments = [tensors[n] for n in case.arguments]
        named = {n: v for n, v in tensors.items() if n not in case.arguments}
        written: tuple[str, ...] = (*case.outputs, *case.updated)
        try:
            with np.errstate(all="ignore"):  # the interpreter computes with NumPy
                getattr(gpu, name)(*arguments, **named)
        except Dsv4numError as error:
            assert str(error)
            written = ()
        for n, view in views.items():
            tensor = tensors[n]
            if not isinstance(tensor, torch.Tensor):
                continue
            where = whole(tensor).cpu().numpy() != before[n]
            if n in written and where.any():
                where &= ~may_change(view, call)
            assert not where.any(), f"{name}: {n} changed at byte {int(np.flatnonzero(where)[0])}"

    fuzz_for(0.4 / len(OPERATIONS), once, KERNEL_EXAMPLES)
