"""`gpu.paged_cache`: the same errors as the reference, nothing written on error, recorded bytes.

What the kernels write is compared with the reference by `dsv4num verify`; here is what that cannot see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_paged_cache import (
    GATHER_ERRORS,
    INSERT_ERRORS,
    Change,
    gather_arguments,
    insert_arguments,
)

from dsv4num import ArgumentError, Dsv4numError, UnsupportedError, ValueRangeError, get_layout
from dsv4num import reference as oracle
from dsv4num.formats import LAYOUTS

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch  # noqa: E402  (only where torch is)

BF16 = ml_dtypes.bfloat16
FILLS = (0xA5, 0x5A)
VECTORS = np.load(Path(__file__).parent / "vectors" / "h200_triton36.npz", allow_pickle=False)


# --- the same call on both sides ------------------------------------------------------


def as_tensor(value: Any, device: str) -> Any:
    """A NumPy array as a tensor of the same geometry; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BF16:
        return as_tensor(value.view(np.int16), device).view(torch.bfloat16)
    extent = sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True))
    size = 0 if value.size == 0 else extent // value.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(value, (size,), (value.itemsize,)).copy()
    strides = [stride // value.itemsize for stride in value.strides]
    return torch.from_numpy(flat).to(device).as_strided(value.shape, strides)


def as_tensors(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """A whole call."""
    return {name: as_tensor(value, device) for name, value in arguments.items()}


def bits(value: Any) -> list[Any]:
    """What an array or tensor holds, as integers; [] for anything else."""
    if isinstance(value, np.ndarray):
        return value.view(np.int16).tolist() if value.dtype == BF16 else value.tolist()
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return []
    held = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    found: list[Any] = held.cpu().tolist()
    return found


def error_of(function: Any, arguments: dict[str, Any], **more: Any) -> Dsv4numError:
    """The error that a call raises; no argument may change."""
    before = {name: bits(value) for name, value in arguments.items()}
    with pytest.raises(Dsv4numError) as caught:
        function(**arguments, **more)
    for name, value in arguments.items():
        assert bits(value) == before[name], f"{name} was changed"
    return caught.value


def assert_same_error(name: str, call: dict[str, Any], kind: type, device: str) -> None:
    """The call is refused by both sides with one class and one text."""
    operation = (
        "quantize_and_insert_k_cache" if "k" in call else "dequantize_and_gather_k_cache"
    )
    theirs = error_of(getattr(oracle, operation), call)
    tensors = as_tensors(call, device)
    ours = error_of(getattr(gpu, operation), tensors, validate=True)
    assert type(theirs) is kind
    assert type(ours) is kind
    assert str(ours).replace("torch.Tensor", "numpy.ndarray") == str(theirs)
    assert isinstance(ours, ArgumentError) and ours.name == name
    if kind is ArgumentError:  # seen without looking at the device
        assert str(error_of(getattr(gpu, operation), tensors)) == str(ours)


def strided(values: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A view with strides in elements."""
    steps = tuple(s * values.itemsize for s in strides)
    return np.lib.stride_tricks.as_strided(values, shape, steps)


MORE_INSERT_ERRORS: list[tuple[str, Change, type]] = [
    ("k", lambda a: None, ArgumentError),
    ("k", lambda a: np.ones((2, 128), BF16), ArgumentError),
    ("k", lambda a: np.ones((), BF16), ArgumentError),
    ("k", lambda a: np.ones((0, 512), BF16), ArgumentError),
    ("k_cache", lambda a: None, ArgumentError),
    ("k_cache", lambda a: np.zeros((), np.uint8), ArgumentError),
    ("k_cache", lambda a: np.zeros((0, 1167), np.uint8), ArgumentError),
    ("k_cache", lambda a: strided(np.zeros(1728, np.uint8), (2, 1728), (0, 1)), ArgumentError),
    (
        "k_cache",
        lambda a: strided(np.zeros(1752, np.uint8), (2, 2, 584), (584, 584, 1)),
        ArgumentError,
    ),
    (
        "k_cache",
        lambda a: strided(np.zeros(1752, np.uint8), (2, 2, 584), (1168, 0, 1)),
        ArgumentError,
    ),
    ("slot_mapping", lambda a: None, ArgumentError),
    ("slot_mapping", lambda a: np.int64(0), ArgumentError),
    ("slot_mapping", lambda a: np.int16([0, 3]), ArgumentError),
    ("slot_mapping", lambda a: np.int64([0, 1, 3])[::2], ArgumentError),
    ("slot_mapping", lambda a: strided(np.int64([1]), (2,), (0,)), ArgumentError),
    ("slot_mapping", lambda a: np.int32([0, 4]), ValueRangeError),
    ("slot_mapping", lambda a: np.int64([2**63 - 1, 1]), ValueRangeError),
    ("slot_mapping", lambda a: np.int32([1, 1]), ValueRangeError),
    ("block_size", lambda a: np.float32(2), ArgumentError),
    ("layout", lambda a: "", ArgumentError),
    ("layout", lambda a: ["v4"], ArgumentError),
]

MORE_GATHER_ERRORS: list[tuple[str, Change, type]] = [
    ("out", lambda a: strided(np.zeros(512, BF16), (2, 5, 512), (0, 0, 1)), ArgumentError),
    ("out", lambda a: strided(np.zeros(1024, BF16), (2, 5, 512), (512, 0, 1)), ArgumentError),
    ("out", lambda a: np.zeros((2, 5, 512), np.float16), ArgumentError),
    ("k_cache", lambda a: None, ArgumentError),
    ("k_cache", lambda a: np.zeros((3, 2, 512), np.uint8), ArgumentError),
    ("seq_lens", lambda a: None, ArgumentError),
    ("seq_lens", lambda a: np.int32([4, 0, 3, 0])[::2], ArgumentError),
    ("seq_lens", lambda a: np.int64([4, -(2**63)]), ValueRangeError),
    ("gather_lens", lambda a: np.int32([[4, 1]]), ArgumentError),
    ("gather_lens", lambda a: np.int32([4, 0, 1, 0])[::2], ArgumentError),
    ("gather_lens", lambda a: np.int64([2**63 - 1, 1]), ValueRangeError),
    ("block_table", lambda a: None, ArgumentError),
    ("block_table", lambda a: np.float32([[2, 0], [1, 1]]), ArgumentError),
    ("block_table", lambda a: np.int32([[2, 9, 0], [1, 9, 1]])[:, ::2], ArgumentError),
    ("block_table", lambda a: np.zeros((2, 0), np.int32), ValueRangeError),
    ("block_table", lambda a: np.int64([[2, 2**62], [1, 1]]), ValueRangeError),
    ("block_size", lambda a: None, ArgumentError),
    ("offset", lambda a: None, ArgumentError),
    ("layout", lambda a: 584, ArgumentError),
]


def of_tensors(table: list[tuple[str, Change, type, str]]) -> list[tuple[str, Change, type]]:
    """The reference's bad calls, without those that no tensor can make."""
    return [row[:3] for row in table if row[3] not in ("read-only", "stride -1")]


@pytest.mark.parametrize(
    ("name", "change", "kind"), of_tensors(INSERT_ERRORS) + MORE_INSERT_ERRORS
)
def test_insert_errors(name: str, change: Change, kind: type, device: str) -> None:
    call = insert_arguments()
    call[name] = change(call)
    assert_same_error(name, call, kind, device)


@pytest.mark.parametrize(
    ("name", "change", "kind"), of_tensors(GATHER_ERRORS) + MORE_GATHER_ERRORS
)
def test_gather_errors(name: str, change: Change, kind: type, device: str) -> None:
    call = gather_arguments()
    call[name] = change(call)
    assert_same_error(name, call, kind, device)


@pytest.mark.parametrize(
    ("changes", "blames"),
    [
        ({"seq_lens": np.int32([4, -1]), "gather_lens": None}, "seq_lens"),
        ({"seq_lens": np.int32([5, 3]), "gather_lens": None}, "seq_lens"),
        ({"seq_lens": np.int32([2, 3])}, "gather_lens"),
        ({"offset": 2}, "gather_lens"),
        ({"offset": 2**70}, "gather_lens"),
        ({"k_cache": np.zeros((3, 1728), np.uint8)}, "layout"),
        ({"k_cache": np.zeros((3, 1, 2, 584), np.uint8)}, "layout"),
        ({"k_cache": np.zeros((0, 2, 584), np.uint8)}, "block_table"),
        ({"out": np.zeros((2, 0, 512), BF16)}, "gather_lens"),
        # Two things are wrong: which of them is named must not depend on the side.
        ({"gather_lens": np.int32([-1, 9])}, "gather_lens"),
        ({"seq_lens": np.int32([-4, 3]), "gather_lens": np.int32([4, 5])}, "gather_lens"),
        ({"block_table": np.int32([[2, 9], [-1, 1]]), "seq_lens": np.int32([4, -3])}, "block_table"),
        ({"block_size": 0, "offset": -1}, "block_size"),
    ],
)
def test_gather_errors_of_several_arguments(
    changes: dict[str, Any], blames: str, device: str
) -> None:
    call = {**gather_arguments(), **changes}
    seen = blames in ("layout", "block_size")
    assert_same_error(blames, call, ArgumentError if seen else ValueRangeError, device)


def test_one_tensor_as_both_lengths(device: str) -> None:
    """The argument blamed does not depend on whether the caller shares a tensor."""
    call = gather_arguments()
    call["seq_lens"] = call["gather_lens"] = np.int32([9, 3])
    theirs = error_of(oracle.dequantize_and_gather_k_cache, call)
    tensors = as_tensors(call, device)
    tensors["seq_lens"] = tensors["gather_lens"]
    ours = error_of(gpu.dequantize_and_gather_k_cache, tensors, validate=True)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("name", ["k", "k_cache", "slot_mapping"])
def test_insert_device_mismatch(name: str, device: str) -> None:
    call = as_tensors(insert_arguments(), device)
    call[name] = call[name].to("meta")
    error = error_of(gpu.quantize_and_insert_k_cache, call)
    assert type(error) is ArgumentError
    assert "device " in str(error) and "meta" in str(error) and "(SPEC 6.1)" in str(error)
    assert error.name == ("k" if name == "k_cache" else name)  # the one that differs from k_cache


@pytest.mark.parametrize(
    "name", ["out", "k_cache", "seq_lens", "gather_lens", "block_table"]
)
def test_gather_device_mismatch(name: str, device: str) -> None:
    call = as_tensors(gather_arguments(), device)
    call[name] = call[name].to("meta")
    error = error_of(gpu.dequantize_and_gather_k_cache, call)
    assert type(error) is ArgumentError
    assert "device " in str(error) and "meta" in str(error) and "(SPEC 6.1)" in str(error)
    assert error.name == ("k_cache" if name == "out" else name)


def test_optional_arguments_are_keyword_only(device: str) -> None:
    insert = list(as_tensors(insert_arguments(), device).values())
    gather = list(as_tensors(gather_arguments(), device).values())
    with pytest.raises(TypeError):
        gpu.quantize_and_insert_k_cache(*insert)
    with pytest.raises(TypeError):
        gpu.dequantize_and_gather_k_cache(*gather)


# --- what is good on one side is good on the other ------------------------------------


def insert_both(call: dict[str, Any], device: str, **more: Any) -> None:
    """Both sides leave the same bytes in the cache and their inputs alone."""
    tensors = as_tensors(call, device)
    inputs = {name: bits(value) for name, value in tensors.items() if name != "k_cache"}
    oracle.quantize_and_insert_k_cache(**call)
    gpu.quantize_and_insert_k_cache(**tensors, **more)
    assert bits(tensors["k_cache"]) == bits(call["k_cache"])
    assert {name: bits(value) for name, value in tensors.items() if name != "k_cache"} == inputs


def gather_both(call: dict[str, Any], device: str, **more: Any) -> None:
    """Both sides leave the same bits in out and their inputs alone."""
    tensors = as_tensors(call, device)
    inputs = {name: bits(value) for name, value in tensors.items() if name != "out"}
    oracle.dequantize_and_gather_k_cache(**call)
    gpu.dequantize_and_gather_k_cache(**tensors, **more)
    assert bits(tensors["out"]) == bits(call["out"])
    assert {name: bits(value) for name, value in tensors.items() if name != "out"} == inputs


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("slots", [np.int64([3, -1]), np.int32([3, 0]), np.int32([-5, -(2**31)])])
def test_valid_insert(slots: np.ndarray, validate: bool, device: str) -> None:
    call = insert_arguments()
    rows = np.random.default_rng(3).integers(0, 1 << 16, (2, 512), dtype=np.uint16)
    insert_both({**call, "k": rows.view(BF16), "slot_mapping": slots}, device, validate=validate)


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_valid_gather(dtype: type, validate: bool, device: str) -> None:
    call = gather_arguments()
    rng = np.random.default_rng(4)
    call["k_cache"] = rng.integers(0, 256, (3, 2, 584), dtype=np.uint8)
    for name in ("seq_lens", "gather_lens", "block_table"):
        call[name] = call[name].astype(dtype)
    gather_both(call, device, validate=validate)
    # Entries that no gathered position needs may hold anything.
    call["block_table"] = np.array([[999, 0, -7], [-1, 1, 2**31 - 1]], dtype)
    call["gather_lens"] = np.array([2, 1], np.int64)
    gather_both(call, device, validate=validate)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_numpy_integers_and_layout_objects(layout: str, device: str) -> None:
    chosen = get_layout(layout)
    rows = np.random.default_rng(5).normal(0, 3, (3, chosen.head_dim)).astype(BF16)
    cache = np.full((2, chosen.page_bytes(3)), 0xA5, np.uint8)
    call = {"k": rows, "k_cache": cache, "slot_mapping": np.int64([5, 0, 2])}
    call |= {"block_size": np.int32(3), "layout": chosen}
    insert_both(call, device)
    out = np.full((1, 4, chosen.head_dim), -7.0, BF16)
    call = {"out": out, "k_cache": cache, "seq_lens": np.int32([6]), "gather_lens": np.int32([3])}
    call |= {"block_table": np.int32([[0, 1]]), "block_size": np.int64(3), "offset": np.int64(1)}
    gather_both({**call, "layout": chosen}, device)


@pytest.mark.parametrize("validate", [False, True])
def test_nothing_to_do_writes_nothing(validate: bool, device: str) -> None:
    none = np.zeros(0, np.int64)
    for changes in (
        {"slot_mapping": none},
        {"slot_mapping": none, "k": np.zeros((0, 512), BF16)},
        {"slot_mapping": np.int64([-1, -1])},
        {"slot_mapping": np.int64([-1]), "k_cache": np.zeros((0, 1728), np.uint8)},
        {"slot_mapping": none, "k_cache": np.zeros((0, 2, 584), np.uint8)},
    ):
        insert_both({**insert_arguments(), **changes}, device, validate=validate)
    two = np.int32([0, 0])
    for changes in (
        {"seq_lens": two, "gather_lens": None},
        {"gather_lens": two},
        {"gather_lens": two, "offset": 5},
        {"gather_lens": two, "offset": 2**70},
        {"gather_lens": two, "out": np.zeros((2, 0, 512), BF16)},
        {"seq_lens": two, "gather_lens": None, "block_table": np.zeros((2, 0), np.int32)},
        {"gather_lens": two, "k_cache": np.zeros((0, 2, 584), np.uint8)},
        {
            "seq_lens": two[:0],
            "gather_lens": two[:0],
            "block_table": np.zeros((0, 3), np.int64),
            "out": np.zeros((0, 5, 512), BF16),
        },
    ):
        gather_both({**gather_arguments(), **changes}, device, validate=validate)


# --- values out of range, not validated: skipped, and nothing outside is touched ------


def guarded(values: np.ndarray, fill: int, device: str, strides: Any = None) -> tuple[Any, Any]:
    """A tensor with 64 KiB of `fill` on either side, and the whole buffer."""
    around = 1 << 16
    buffer = torch.full((2 * around + 4 * values.nbytes,), fill, dtype=torch.uint8, device=device)
    source = as_tensor(np.ascontiguousarray(values), device)
    typed = buffer.view(source.dtype)
    shape, step = values.shape, strides or source.stride()
    view = typed.as_strided(shape, step, around // values.itemsize)
    view.copy_(source)
    return view, buffer


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", ["v4", "v41_nvfp4_inline", "indexer_fp8"])
def test_insert_skips_slots_out_of_range(layout: str, fill: int, device: str) -> None:
    chosen = get_layout(layout)
    rng = np.random.default_rng(6)
    wild = [6, 7, 2**31, 2**62, 2**63 - 1, -1, -(2**63), 5, 1]
    rows = rng.normal(0, 1, (len(wild), chosen.head_dim)).astype(BF16)
    blank = np.full((2, chosen.page_bytes(3)), fill, np.uint8)
    cache, buffer = guarded(blank, fill, device)
    before = buffer.clone()
    slots = as_tensor(np.int64(wild), device)
    gpu.quantize_and_insert_k_cache(as_tensor(rows, device), cache, slots, 3, layout=layout)
    tame = np.int64([slot if slot < 6 else -1 for slot in wild])
    oracle.quantize_and_insert_k_cache(rows, blank, tame, 3, layout=layout)
    assert bits(cache) == blank.tolist()
    cache.fill_(fill)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("fill", FILLS)
def test_gather_skips_what_is_out_of_range(fill: int, device: str) -> None:
    rng = np.random.default_rng(7)
    cache = rng.integers(0, 256, (4, 3, 584), dtype=np.uint8)
    lens = [3, 3, 3, 9, 2**62, -1, 3, 2**63 - 1]
    asked = [3, 3, 3, 3, 2, 1, 5, 2**63 - 1]
    table = [[4, 0], [-1, 0], [2**31 - 1, 0], [0, 1], [1, 2], [0, 0], [2, 2], [3, 3]]
    blank = np.full((len(lens), 7, 512), fill * 0x0101, np.uint16).view(BF16)
    out, buffer = guarded(blank, fill, device, (9 * 520, 520, 1))
    before = buffer.clone()
    values = [as_tensor(np.int64(value), device) for value in (lens, asked, table)]
    stored = as_tensor(cache, device)
    gpu.dequantize_and_gather_k_cache(out, stored, *values, 3, 2)
    # Request 6 asks for two rows before its sequence and has its three; request 7, whose length has
    # no room and whose sequence no columns beyond 6 rows, gets the five that fit.
    want, one = blank.copy(), np.int64([3])
    oracle.dequantize_and_gather_k_cache(want[6:7], cache, one, one, np.int64([[2]]), 3, 4)
    five = np.int64([5])
    oracle.dequantize_and_gather_k_cache(want[7:8], cache, five, five, np.int64([[3, 3]]), 3, 2)
    got = np.array(bits(out), np.int16)
    wrong = np.argwhere((got != want.view(np.int16)).any(axis=-1))
    assert wrong.tolist() == []
    out.copy_(as_tensor(blank, device))
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("lens", [[-(2**63), 3], [2**63 - 1, 3]])
def test_gather_of_absurd_lengths_stays_inside(lens: list[int], device: str) -> None:
    """seq_len - length may not wrap around into positions that exist."""
    call = gather_arguments()
    call.update(seq_lens=np.int64(lens), gather_lens=np.int64([2**63 - 1, 0]))
    call["block_table"] = np.int64([[2, 0], [1, 1]])
    tensors = as_tensors(call, device)
    gpu.dequantize_and_gather_k_cache(**tensors)
    rows = np.array(bits(tensors["out"]), np.int16)
    written = (rows != call["out"].view(np.int16)).any(axis=-1)
    assert not written[:, 0].any() and not written[1].any()
    if lens[0] < 0:
        assert not written.any()


def test_a_repeated_slot_gets_one_of_its_tokens(device: str) -> None:
    call = insert_arguments()
    call["k"] = np.stack([np.full(512, 1.0), np.full(512, -3.0)]).astype(BF16)
    call["slot_mapping"] = np.int64([3, 3])
    tensors = as_tensors(call, device)
    gpu.quantize_and_insert_k_cache(**tensors)
    either = []
    for slots in ([3, -1], [-1, 3]):
        alone = {**call, "slot_mapping": np.int64(slots), "k_cache": call["k_cache"].copy()}
        oracle.quantize_and_insert_k_cache(**alone)
        either.append(alone["k_cache"][1])
    got = np.array(bits(tensors["k_cache"]), np.uint8)[1]
    assert ((got == either[0]) | (got == either[1])).all()


# --- how kernels are launched ---------------------------------------------------------


@pytest.mark.parametrize("make", [insert_arguments, gather_arguments])
def test_paths(make: Any, device: str) -> None:
    tensors = as_tensors(make(), device)
    function = (
        gpu.quantize_and_insert_k_cache if "k" in tensors else gpu.dequantize_and_gather_k_cache
    )
    error = error_of(function, tensors, launch=Launch(path="fast"))  # type: ignore[arg-type]  # refused
    assert type(error) is ArgumentError
    assert "'fast'" in str(error) and "auto, native, portable" in str(error)
    if device == "cpu":
        error = error_of(function, tensors, launch=Launch(path="native"))
        assert type(error) is UnsupportedError and "interpreter" in str(error)
    function(**tensors, launch=Launch(path="portable"))


@pytest.mark.parametrize("launch", [Launch(rows=1), Launch(rows=64, num_warps=8)])
def test_bytes_do_not_depend_on_the_launch(launch: Launch, device: str) -> None:
    rng = np.random.default_rng(8)
    call = insert_arguments()
    call["k"] = rng.normal(0, 1, (5, 512)).astype(BF16)
    call.update(k_cache=np.full((3, 1800), 0xA5, np.uint8), slot_mapping=np.int64([5, 0, 2, -1, 1]))
    insert_both(call, device, launch=launch)
    gather_both(gather_arguments(), device, launch=launch)


NO_INTERPRETER = """
import torch
from dsv4num import UnsupportedError
from dsv4num import gpu

rows, slots = torch.ones((1, 512), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
cache, out = torch.full((1, 1, 584), 5, dtype=torch.uint8), torch.zeros((1, 1, 512)).bfloat16()
calls = [
    lambda: gpu.quantize_and_insert_k_cache(rows, cache, slots, 1),
    lambda: gpu.quantize_and_insert_k_cache(rows, cache, slots, 1, launch=gpu.Launch("portable")),
    lambda: gpu.dequantize_and_gather_k_cache(out, cache, slots + 1, None, slots[None], 1, 0),
    lambda: gpu.encode(rows, "e2m1"),
    lambda: gpu.pack(cache),
    lambda: gpu.quantize(rows, "N2/16"),
]
for call in calls:
    try:
        call()
    except UnsupportedError as error:
        print("cpu" in str(error), "TRITON_INTERPRET=1" in str(error))
print(cache.unique().tolist(), out.unique().tolist())
"""


def test_a_cpu_tensor_without_the_interpreter() -> None:
    """A named error that says what to do, and nothing written."""
    done = subprocess.run(
        [sys.executable, "-c", NO_INTERPRETER],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(oracle.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True"] * 6 + ["[5] [0.0]"]


# --- bytes that the production kernels wrote on an H200 -------------------------------

PATHS = ["auto", "portable"] if torch.cuda.is_available() else ["portable"]


def recorded(name: str) -> dict[str, np.ndarray]:
    """The arrays of one recorded case."""
    return {key.split("/")[1]: VECTORS[key] for key in VECTORS.files if key.split("/")[0] == name}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("v4_insert", "v4"), ("v4_insert_bs16", "v4"), ("v41_mxfp8_insert", "v41_mxfp8")],
)
@pytest.mark.parametrize("path", PATHS)
def test_recorded_insert(name: str, layout: str, path: Any, device: str) -> None:
    c = recorded(name)
    cache = torch.full(c["cache"].shape, c["fill"].item(), dtype=torch.uint8, device=device)
    gpu.quantize_and_insert_k_cache(
        as_tensor(c["k_bf16"].view(BF16), device),
        cache,
        as_tensor(c["slot_mapping"], device),
        c["block_size"].item(),
        layout=layout,
        launch=Launch(path),
    )
    assert np.argwhere(cache.cpu().numpy() != c["cache"]).tolist() == []


@pytest.mark.parametrize(
    ("name", "layout"),
    [("v4_gather", "v4"), ("v4_gather_lens", "v4"), ("v41_mxfp8_gather", "v41_mxfp8")],
)
@pytest.mark.parametrize("path", PATHS)
def test_recorded_gather(name: str, layout: str, path: Any, device: str) -> None:
    c = recorded(name)
    theirs = c["out_bf16"]
    out = torch.full(theirs.shape, c["out_fill"].item(), dtype=torch.bfloat16, device=device)
    gpu.dequantize_and_gather_k_cache(
        out,
        as_tensor(c["cache"], device),
        as_tensor(c["seq_lens"], device),
        as_tensor(c.get("gather_lens"), device),
        as_tensor(c["block_table"], device),
        c["block_size"].item(),
        c["offset"].item(),
        layout=layout,
        launch=Launch(path),
    )
    got = out.view(torch.int16).cpu().numpy().view(np.uint16)
    assert np.argwhere(got != theirs).tolist() == []
