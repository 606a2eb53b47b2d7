"""Bytes do not depend on how a kernel is launched, or on what else the device does (SPEC 1.1).

Every operation, on one or two quick cases of `verify`: the number of warps, the block shape, the order
of tokens, the number of calls that they are spread over, where arrays lie in memory, a busy device, and
repetition. Where there is no GPU, the parts that Triton's interpreter can tell apart run on some.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from calls import bytes_of, copied, tensor_of, whole
from conftest import HAS_GPU
from mutants import FILLS, run

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch  # noqa: E402  (only where torch is)
from dsv4num.verify.case import Case, flat, place  # noqa: E402  (only where torch is)
from dsv4num.verify.operations import OPERATIONS  # noqa: E402  (only where torch is)

DEVICE = "cuda" if HAS_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter has no streams")

#: Operation, variant and case.
CALLS = {
    "encode": ("encode", "e4m3fn", "near one"),
    "decode": ("decode", "e4m3fnuz", "every code"),
    "round_bf16": ("round_bf16", "fp32", "ties"),
    "quantize": ("quantize", "N2/16", "few rows"),
    "dequantize": ("dequantize", "P1/64", "every pair"),
    "insert": ("quantize_and_insert_k_cache", "v4", "wide"),
    "gather": ("dequantize_and_gather_k_cache", "v4", "tails at an offset"),
    "save": ("save_partial_states", "csa", "plain"),
    "csa": ("compress_norm_rope_store", "v4", "csa chunks"),
    "hca": ("compress_norm_rope_store", "v4", "hca decode"),
    "latent": ("rope_quant_insert", "v41_mxfp8", "ratio 2, fp32"),
    "ring": ("pool_ring_latent", "ratio2", "chunks"),
    "global": ("compute_global_topk_indices_and_lens", "bs64", "top-k 512"),
    "combine": ("combine_topk_swa_indices", "ratio4", "prefill"),
    "mixed": ("build_flashinfer_mixed_sparse_indices", "local", "decode and prefill, ratio 4"),
}
#: Those that the interpreter gets through fast.
INTERPRETED = ("quantize", "insert", "save", "csa", "latent")
#: Arguments with a row per token.
PER_TOKEN = {
    "insert": ("k", "slot_mapping"),
    "save": ("kv", "score", "positions", "slot_mapping"),
    "csa": ("token_to_req_indices", "positions", "slot_mapping", "kv_slot_mapping"),
    "hca": ("token_to_req_indices", "positions", "slot_mapping", "kv_slot_mapping"),
    "latent": ("latent", "positions", "slot_mapping"),
}
#: Besides those of `verify`'s sweep.
LAUNCHES = (
    Launch(rows=1, num_warps=2, columns=128),
    Launch(rows=16, num_warps=8, columns=32),
)

names = pytest.mark.parametrize("name", list(CALLS) if HAS_GPU else INTERPRETED)
per_token = pytest.mark.parametrize("name", [n for n in PER_TOKEN if HAS_GPU or n in INTERPRETED])


@dataclass
class Call:
    """A case on the device, with what the reference gives.

    Attributes:
        name: key of `CALLS`.
        case: the case; its arrays may be changed before `upload`.
        want: bytes of outputs and returned values after the reference.
        tensors: the arguments on the device.
    """

    name: str
    case: Case = field(init=False)
    want: dict[str, Any] = field(init=False)
    tensors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operation, variant, wanted = CALLS[self.name]
        self.operation = OPERATIONS[operation]
        cases = self.operation.cases(variant, "quick", 0)
        (self.case,) = [case for case in cases if case.name == wanted]
        assert not self.case.reference
        self.want = run(self.operation, self.case, FILLS[0])

    @property
    def written(self) -> tuple[str, ...]:
        return (*self.case.outputs, *self.case.updated)

    def upload(self) -> None:
        """Puts fresh arguments on the device."""
        self.tensors = {}
        for name, value in (self.case.arguments | self.case.keywords).items():
            own = copied(value)
            if name in self.case.outputs:
                flat(own).fill(FILLS[0])
            self.tensors[name] = tensor_of(own, DEVICE)

    def launch(self, launch: Launch | None = None, rows: slice | None = None) -> dict[str, Any]:
        """Runs the operation, on some of its tokens only, and gives what it returns by name."""
        function = getattr(gpu, self.operation.name)
        given = dict(self.tensors)
        if rows is not None:
            tokens = len(given["slot_mapping"])
            for name in PER_TOKEN[self.name]:
                given[name] = given[name][:tokens][rows]
        positional = [given.pop(name) for name in self.case.arguments]
        if launch is not None:
            given["launch"] = launch
        returned = function(*positional, **given)
        values = returned if isinstance(returned, tuple) else (returned,)
        return dict(zip(self.operation.returns, values, strict=False))

    def check(self, returned: dict[str, Any], want: dict[str, Any] | None = None) -> None:
        """Every byte of the buffers that are written, and of what was returned."""
        got = {name: whole(self.tensors[name]).cpu().numpy() for name in self.written}
        got |= {name: bytes_of(value) for name, value in returned.items()}
        want = want or self.want
        assert set(got) == set(want)
        for name in want:
            assert np.array_equal(got[name], want[name]), f"{self.name}: {name}"


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@names
def test_block_shape_and_warps(name: str, launch: Launch) -> None:
    call = Call(name)
    assert "launch" in inspect.signature(getattr(gpu, call.operation.name)).parameters
    call.upload()
    call.check(call.launch(launch))


def shifted(value: Any, step: int) -> Any:
    """A placed array with the same strides, its first element off every larger alignment."""
    if not isinstance(value, np.ndarray):
        return value
    strides = tuple(stride // value.itemsize for stride in value.strides)
    return place(value, strides, shift=value.itemsize * step)


@names
def test_alignment(name: str) -> None:
    """All arrays begin at an odd element."""
    call = Call(name)
    for part in (call.case.arguments, call.case.keywords):
        part.update({key: shifted(value, 1) for key, value in part.items()})
    want = run(call.operation, call.case, FILLS[0])
    call.upload()
    call.check(call.launch(), want)


@pytest.mark.parametrize("order", ["backwards", "shuffled"])
@per_token
def test_order_of_tokens(name: str, order: str) -> None:
    """Tokens are independent of each other: whatever their order, the same rows are written."""
    call = Call(name)
    tokens = len(call.case.arguments["slot_mapping"])
    index = np.arange(tokens)[::-1]
    if order == "shuffled":
        index = np.random.default_rng(1).permutation(tokens)
    for key in PER_TOKEN[name]:
        rows = call.case.arguments[key]
        rows[:tokens] = rows[:tokens][index]
    call.upload()
    call.check(call.launch())


@pytest.mark.parametrize("parts", [2, 5])
@per_token
def test_number_of_calls(name: str, parts: int) -> None:
    """Tokens in one call, or spread over several."""
    call = Call(name)
    call.upload()
    ends = np.linspace(0, len(call.case.arguments["slot_mapping"]), parts + 1).astype(int)
    for first, end in pairwise(ends):
        call.launch(rows=slice(int(first), int(end)))
    call.check({})


def repeat(call: Call, times: int) -> Any:
    """Runs a call on fresh buffers again and again: how many bytes differed, on the device."""
    call.upload()
    buffers = {name: whole(call.tensors[name]) for name in call.written}
    fresh = {name: buffer.clone() for name, buffer in buffers.items()}
    want = {name: torch.from_numpy(value.copy()).to(DEVICE) for name, value in call.want.items()}
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(times):
        for name, buffer in buffers.items():
            buffer.copy_(fresh[name])
        returned = call.launch()
        for name, value in returned.items():
            buffers[name] = value.contiguous().reshape(-1).view(torch.uint8)
        for name, buffer in buffers.items():
            wrong += (buffer != want[name]).sum()
        for name in returned:
            del buffers[name]
    return wrong


@names
def test_repetition(name: str) -> None:
    """A hundred runs on a GPU, three in the interpreter."""
    assert int(repeat(Call(name), 100 if HAS_GPU else 3)) == 0


@needs_gpu
@names
def test_a_busy_device(name: str) -> None:
    """While another stream keeps the device full, and the same kernel runs on a third."""
    call, other = Call(name), Call(name)
    assert int(repeat(call, 1)) == 0 == int(repeat(other, 1))  # compiled before the device is busy
    busy, one, two = (torch.cuda.Stream() for _ in range(3))
    matrix = torch.full((4096, 4096), 1e-3, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            matrix = (matrix @ matrix).clamp_(-1, 1)
    with torch.cuda.stream(one):
        wrong = repeat(call, 10)
    with torch.cuda.stream(two):
        more = repeat(other, 10)
    torch.cuda.synchronize()
    assert int(wrong) == 0 == int(more)
