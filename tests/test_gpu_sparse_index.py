"""`gpu.sparse_index`: the same errors as the reference, recorded indices, and every entry written once.

What the kernels write is compared with the reference by `dsv4num verify`; here is what that cannot see.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from conftest import no_waiting
from test_sparse_index import (
    COMBINE,
    INT32_MAX,
    MAKE,
    MIXED,
    MIXED_KEYWORDS,
    VALUES,
    WRONG,
    Arguments,
    case,
    mixed_arguments,
)

from dsv4num import ArgumentError, Dsv4numError, UnsupportedError, ValueRangeError
from dsv4num import reference as oracle

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from test_gpu_paged_cache import as_tensors, bits, error_of  # noqa: E402  (only where torch is)

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch  # noqa: E402  (only where torch is)

NAMES = {
    "topk": "compute_global_topk_indices_and_lens",
    "combine": "combine_topk_swa_indices",
    "mixed": "build_flashinfer_mixed_sparse_indices",
}
RECORDED = {
    "topk": ("topk_global", "topk_global_wide"),
    "combine": ("combine_c4", "combine_swa_only", "combine_c128_base"),
    "mixed": tuple(f"mixed_{mode}" for mode in ("none", "global", "lens", "local", "swa_only")),
}
RESULTS = {
    "topk": ("global_topk_indices", "topk_lens"),
    "combine": ("combined_indices", "combined_lens"),
    "mixed": ("sparse_indices", "sparse_topk_lens"),
}
ARGUMENTS = {
    "topk": list(MAKE["topk"]()),
    "combine": COMBINE,
    "mixed": [*MIXED, *MIXED_KEYWORDS],
}


def ours(operation: str, call: Arguments, device: str, **more: Any) -> tuple[Any, Any]:
    """The launcher on tensors of a call."""
    found: tuple[Any, Any] = getattr(gpu, NAMES[operation])(**as_tensors(call, device), **more)
    return found


def theirs(operation: str, call: Arguments, **more: Any) -> tuple[Any, Any]:
    """The reference."""
    found: tuple[Any, Any] = getattr(oracle, NAMES[operation])(**call, **more)
    return found


def assert_same(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """Indices, lengths, types and the distance of rows."""
    for tensor, array in zip(got, want, strict=True):
        assert tensor.dtype == torch.int32 and tuple(tensor.shape) == array.shape
        assert np.argwhere(tensor.cpu().numpy() != array).tolist() == []
    if len(want[0]) > 1 and want[0].shape[1] > 0:
        assert got[0].stride(0) * 4 == want[0].strides[0]


def recorded(operation: str, name: str) -> tuple[Arguments, tuple[Any, Any]]:
    """A recorded call, and what it returned on the H200."""
    found = case(name)
    call = {key: found[key] for key in ARGUMENTS[operation] if key in found}
    for key in ARGUMENTS[operation]:
        if key not in call and key not in MIXED_KEYWORDS:
            call[key] = None  # decode indices or lengths that the case does not have
    indices, lens = RESULTS[operation]
    return call, (found[indices], found[lens])


# --- recorded on an H200 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name"), [(op, name) for op, names in RECORDED.items() for name in names]
)
def test_recorded(operation: str, name: str, device: str) -> None:
    call, want = recorded(operation, name)
    got = ours(operation, call, device, validate=True)
    assert all(tensor.dtype == torch.int32 for tensor in got)
    for tensor, array in zip(got, want, strict=True):
        assert np.argwhere(tensor.cpu().numpy() != array).tolist() == []


def test_by_position(device: str) -> None:
    """The order of arguments is that of the production kernels."""
    for operation, make in MAKE.items():
        call = make()
        positional = [name for name in ARGUMENTS[operation] if name not in MIXED_KEYWORDS]
        tensors = as_tensors(call, device)
        keywords = {name: tensors[name] for name in MIXED_KEYWORDS if name in tensors}
        got = getattr(gpu, NAMES[operation])(*(tensors[name] for name in positional), **keywords)
        assert_same(got, theirs(operation, call))


# --- bad input -------------------------------------------------------------------------

OF_TENSORS = [row for row in WRONG if row[3] != "stride -1"]


@pytest.mark.parametrize(("operation", "name", "bad", "text"), OF_TENSORS)
def test_wrong_argument(operation: str, name: str, bad: Any, text: str, device: str) -> None:
    """One class and one text on both sides, whether or not values are looked at."""
    call = MAKE[operation]() | {name: bad}
    want = error_of(getattr(oracle, NAMES[operation]), call)
    for validate in (False, True):
        tensors = as_tensors(call, device)
        error = error_of(getattr(gpu, NAMES[operation]), tensors, validate=validate)
        assert type(error) is type(want) is ArgumentError
        assert str(error).replace("torch.Tensor", "numpy.ndarray") == str(want)


SPOILED = [(operation, {name: bad}) for operation, name, bad, _ in VALUES]
# Two things are wrong in some: which of them is named must not depend on the side.
SPOILED += [
    ("topk", {"topk_indices": np.int32(local), "block_table": np.int32(table)})
    for local, table in (
        ([[0, 3, -1], [9, 8, 1]], [[-4, 2], [1, 0]]),
        ([[0, 4, 9], [5, -1, 1]], [[-4, -2], [1, 0]]),
        ([[0, 4, 2], [5, -1, 1]], [[INT32_MAX, -1], [1, 0]]),
        ([[0, 4, 2], [5, -1, 1]], np.zeros((0, 2))),
        ([[0, 4, 2], [5, -1, 1]], np.zeros((2, 0))),
    )
]
SPOILED += [
    (
        "topk",
        {"topk_indices": np.int32([[9, 3], [5, 1]]), "token_to_req_indices": np.int32([0, 7])},
    ),
    ("combine", {"seq_lens": np.int32([-9, 4]), "gather_lens": np.int32([7, 4])}),
    ("combine", {"seq_lens": np.int64([2**63 - 1, -(2**63)])}),
    ("combine", {"query_start_loc": np.int64([-(2**63), 0, 2**63 - 1])}),
    ("combine", {"M": INT32_MAX, "N": INT32_MAX - 9, "topk_indices": np.int32([[0, 3]] * 3)}),
    ("combine", {"M": 2**30 + 9, "N": 2**30, "query_start_loc": np.int32([0, 1, 3])}),
    ("mixed", {"decode_swa_indices": np.full((2, 4), 2**31 - 5), "swa_block_span": 5}),
    ("mixed", {"swa_block_table": np.int32([[4, 2, 1], [1, 0, 3], [7, -6, 5]])}),
    ("mixed", {"swa_block_table": np.int32([[4, 2, 1], [1, 0, 3], [7, INT32_MAX, -5]])}),
    ("mixed", {"swa_block_table": np.int32([[4], [1], [7]])}),
    ("mixed", {"compressed_block_span": INT32_MAX}),
    ("mixed", {"seq_lens": np.int64([9, 4, 2**63 - 1])}),
    (
        "mixed",
        {"seq_lens": np.int64([9, 4, 2**63 - 1]), "replay_start": np.int64([0, 0, 2**63 - 1])},
    ),
    ("mixed", {"query_start_loc": np.int64([-(2**63), 1, 2, 5])}),
    ("mixed", {"token_to_req_indices": np.int32([0, 9, 2, -2, 2])}),
    (
        "mixed",
        {
            "token_to_req_indices": np.int32([0, 1, 2, 0, 7]),
            "prefill_topk_indices": np.int32([[9, 1]] * 3),
        },
    ),
]
NOT_LOCAL = {"decode_compressed_indices_are_local": False}
SPOILED += [
    ("mixed", NOT_LOCAL | {"decode_compressed_topk_lens": np.int32([-1, 3])}),
    ("mixed", NOT_LOCAL | {"decode_compressed_topk_lens": np.int64([1, 2**40])}),
    ("mixed", NOT_LOCAL | {"decode_compressed_indices": np.full((2, 3), 2**31)}),
    (
        "mixed",
        NOT_LOCAL
        | {
            "decode_compressed_indices": np.int32([[0, 5, -1], [2, INT32_MAX, 3]]),
            "compressed_block_span": 5,
            "decode_compressed_topk_lens": np.int32([9, 9]),
        },
    ),
]


@pytest.mark.parametrize(("operation", "changes"), SPOILED)
def test_value_out_of_range(operation: str, changes: Arguments, device: str) -> None:
    """Validated, the reference's error; otherwise what the reference gives where it skips."""
    call = MAKE[operation]() | changes
    tensors = as_tensors(call, device)
    assert_same(
        getattr(gpu, NAMES[operation])(**tensors), theirs(operation, call, out_of_range="skip")
    )
    try:
        want = theirs(operation, call)
    except ValueRangeError as refused:
        error = error_of(getattr(gpu, NAMES[operation]), tensors, validate=True)
        assert type(error) is ValueRangeError
        assert str(error) == str(refused) and error.name == refused.name
    else:
        assert_same(getattr(gpu, NAMES[operation])(**tensors, validate=True), want)


WILD = (-5, -1, -(2**31), INT32_MAX, INT32_MAX - 3, 700, 8, 2, 0)
FAR = (2**31, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**62 + 100)


def spoiled(rng: np.random.Generator, call: Arguments, share: float) -> Arguments:
    """Every integer array as int32 or int64, with some entries far out of range."""
    found = dict(call)
    for name, value in call.items():
        if not isinstance(value, np.ndarray) or value.dtype == np.bool_:
            continue
        dtype = rng.choice([np.int32, np.int64])
        kinds = np.array(WILD if dtype == np.int32 else WILD + FAR, dtype)
        where = rng.random(value.shape) < (0 if name == "query_start_loc" else share)
        found[name] = np.where(where, rng.choice(kinds, value.shape), value.astype(dtype))
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("operation", MAKE)
def test_any_values(operation: str, seed: int, device: str) -> None:
    """Results and errors are the reference's, whatever the arrays hold."""
    rng = np.random.default_rng(seed)
    call = MAKE[operation]()
    if operation == "mixed":
        call["decode_compressed_indices_are_local"] = bool(seed % 2)
        call["swa_block_span"] = (None, 7)[seed // 2 % 2]
    call = spoiled(rng, call, (0.02, 0.1, 0.4)[seed % 3])
    want = theirs(operation, call, out_of_range="skip")
    assert_same(ours(operation, call, device), want)
    try:
        want = theirs(operation, call)
    except Dsv4numError as refused:
        with pytest.raises(type(refused)) as caught:
            ours(operation, call, device, validate=True)
        assert str(caught.value) == str(refused)
    else:
        assert_same(ours(operation, call, device, validate=True), want)


@pytest.mark.parametrize("operation", MAKE)
def test_falling_starts_stay_inside(operation: str, device: str) -> None:
    """Which request a token then has is not specified; that nothing breaks is."""
    if operation == "topk":
        pytest.skip("has no query starts")
    for starts in ([7, 2, 9], [9, 9, 1], [0, 2**31 - 1, -(2**31)]):
        call = MAKE[operation]()
        call["query_start_loc"] = np.int32([*starts, 3][: len(call["query_start_loc"])])
        rows, lens = ours(operation, call, device)
        assert int(rows.min()) >= -1 and 0 <= int(lens.min()) <= int(lens.max()) <= rows.shape[1]
        error = error_of(getattr(gpu, NAMES[operation]), as_tensors(call, device), validate=True)
        assert str(error) == str(error_of(getattr(oracle, NAMES[operation]), call))


@pytest.mark.parametrize("operation", MAKE)
def test_device_mismatch(operation: str, device: str) -> None:
    tensors = as_tensors(MAKE[operation](), device)
    first = next(iter(tensors))
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and name != first:
            other = {**tensors, name: value.to("meta")}
            error = error_of(getattr(gpu, NAMES[operation]), other)
            assert type(error) is ArgumentError and error.name == name
            assert "device meta" in str(error)


def test_rows_that_32_bits_cannot_count(device: str) -> None:
    call = MAKE["combine"]() | {"window_size": INT32_MAX}
    error = error_of(gpu.combine_topk_swa_indices, as_tensors(call, device))
    assert type(error) is UnsupportedError and "32 bits" in str(error)


# --- what is written, and what is read -------------------------------------------------

FILLS = (0x7B7B7B7B, -2)


def fill_new_tensors(monkeypatch: pytest.MonkeyPatch, fill: int) -> list[tuple[Any, int]]:
    """New tensors lie in a buffer of `fill` with as much around them; (buffer, entries) of each."""
    made: list[tuple[Any, int]] = []

    def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
        shape = (shape,) if isinstance(shape, int) else shape
        entries = int(np.prod(shape))
        buffer = torch.full((4096 + entries + 4096,), fill, dtype=dtype, device=device)
        made.append((buffer, entries))
        return buffer[4096 : 4096 + entries].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    return made


def widened(value: Any, fill: int, device: str) -> Any:
    """An array as a tensor with `fill` around it and between its rows."""
    if not isinstance(value, np.ndarray) or value.dtype == np.bool_:
        return as_tensors({"": value}, device)[""]
    gap = 8 if value.ndim == 2 else 0
    width = value.shape[-1] + gap
    count = value.shape[0] * width if value.ndim == 2 else value.size
    dtype = torch.from_numpy(value[:0]).dtype
    buffer = torch.full((4096 + count + 4096,), fill, dtype=dtype, device=device)
    strides = (width, 1) if value.ndim == 2 else (1,)
    view = buffer.as_strided(value.shape, strides, 4096)
    view.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return view


def shapes(operation: str) -> list[Arguments]:
    """Calls with rows of many widths, and with values out of range."""
    base = MAKE[operation]()
    rng = np.random.default_rng(3)
    calls = [base, spoiled(rng, base, 0.3), spoiled(rng, base, 0.6)]
    if operation == "topk":
        wide = rng.integers(-1, 8, (2, 133)).astype(np.int32)
        calls += [base | {"topk_indices": wide}, base | {"topk_indices": wide[:, :0]}]
    elif operation == "combine":
        local = rng.integers(-1, 4, (3, 129)).astype(np.int32)
        calls += [base | {"topk_indices": local, "topk": 129}, base | {"window_size": 300}]
    else:
        for width in (4, 5, 6, 7, 133):
            swa = rng.integers(-1, 90, (2, width)).astype(np.int32)
            calls.append(base | {"decode_swa_indices": swa})
        calls.append(base | {"decode_compressed_indices": None, "topk": 0})
        calls.append(base | {"decode_compressed_indices": np.zeros((2, 133), np.int32)})
        calls.append(base | NOT_LOCAL)
    return calls


@pytest.mark.parametrize("operation", MAKE)
def test_every_entry_is_written_and_nothing_else(
    operation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the entries between the rows of a mixed matrix, which are -1."""
    for call in shapes(operation):
        want = theirs(operation, call, out_of_range="skip")
        for fill in FILLS:
            tensors = as_tensors(call, device)
            before = {name: bits(value) for name, value in tensors.items()}
            with monkeypatch.context() as patch:
                made = fill_new_tensors(patch, fill)
                got = getattr(gpu, NAMES[operation])(**tensors)
            assert_same(got, want)
            for buffer, entries in made:
                assert bool((buffer[:4096] == fill).all())
                assert bool((buffer[4096 + entries :] == fill).all())
                assert not bool((buffer[4096 : 4096 + entries] == fill).any())
            assert {name: bits(value) for name, value in tensors.items()} == before


@pytest.mark.parametrize("operation", MAKE)
def test_nothing_outside_is_used(operation: str, device: str) -> None:
    """Whatever lies around the arrays, and between their rows, the result is the same."""
    for call in shapes(operation):
        want = theirs(operation, call, out_of_range="skip")
        for fill in (0, 1, -1, INT32_MAX):
            tensors = {name: widened(value, fill, device) for name, value in call.items()}
            assert_same(getattr(gpu, NAMES[operation])(**tensors), want)


@pytest.mark.parametrize(("window", "entries"), [(128, 640), (133, 648), (190, 704), (191, 704)])
def test_rows_are_16_bytes_apart(window: int, entries: int, device: str) -> None:
    """B71: window columns, then top-k columns, then -1 up to the next row."""
    call = mixed_arguments() | {
        "decode_swa_indices": np.arange(2 * window, dtype=np.int32).reshape(2, window),
        "window_size": 128,
        "topk": 512,
        "prefill_topk_indices": np.zeros((3, 512), np.int32),
    }
    got, lens = ours("mixed", call, device)
    assert_same((got, lens), theirs("mixed", call))
    assert tuple(got.shape) == (5, window + 512) and got.stride() == (entries, 1)
    assert got.data_ptr() % 16 == 0 and got.stride(0) * 4 % 16 == 0
    whole = got.as_strided((5, entries), (entries, 1))
    assert bool((whole[:, window + 512 :] == -1).all())


@pytest.mark.parametrize("operation", MAKE)
def test_no_tokens(operation: str, device: str) -> None:
    call = MAKE[operation]()
    none = {"topk": ("topk_indices",), "combine": ("topk_indices",)}
    for name in none.get(operation, ("decode_swa_indices", "prefill_topk_indices")):
        call[name] = call[name][:0]
    if operation == "mixed":
        call["decode_compressed_indices"] = call["decode_compressed_indices"][:0]
        call["decode_compressed_topk_lens"] = None
    if "query_start_loc" in call:
        call["query_start_loc"] = np.zeros_like(call["query_start_loc"])
    for validate in (False, True):
        got = ours(operation, call, device, validate=validate)
        assert_same(got, theirs(operation, call))
        assert len(got[0]) == len(got[1]) == 0


# --- how kernels are launched ----------------------------------------------------------


@pytest.mark.parametrize("operation", MAKE)
def test_the_launch_changes_nothing(operation: str, device: str) -> None:
    call = MAKE[operation]()
    want = theirs(operation, call)
    for launch in (Launch(path="portable"), Launch(rows=8, num_warps=1), Launch(num_warps=8)):
        assert_same(ours(operation, call, device, launch=launch), want)
    error = error_of(
        getattr(gpu, NAMES[operation]),
        as_tensors(call, device),
        launch=Launch(path="fast"),  # type: ignore[arg-type]  # refused
    )
    assert type(error) is ArgumentError and "'fast'" in str(error)


@pytest.mark.parametrize("operation", MAKE)
def test_no_wait_for_the_device(operation: str, device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")
    function: Callable[..., Any] = getattr(gpu, NAMES[operation])
    tensors = as_tensors(MAKE[operation](), device)
    function(**tensors)  # compiles
    with no_waiting():
        function(**tensors)


@pytest.mark.parametrize("fails", [False, True])
def test_a_failure_leaves_no_mode_behind(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def set_mode(mode: str) -> None:  # as torch does it
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(RuntimeError) if fails else nullcontext(), no_waiting():
        assert modes == ["error"]
        if fails:
            raise RuntimeError("a wait")
    assert modes == ["error", "default"]
