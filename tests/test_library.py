"""`gpu.library`: operators that `torch.compile` can keep in a graph, with the launchers' bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_seed_api import case, same
from test_sparse_index import MAKE, MIXED, MIXED_KEYWORDS

import dsv4num

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from test_gpu_paged_cache import as_tensors  # noqa: E402  (only where torch is)

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import library  # noqa: E402  (only where torch is)

#: The compiler behind torch.compile uses what Python and torch have deprecated, in some versions.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Call = tuple[list[Any], dict[str, Any]]
#: The arguments that an operator writes, by position.
WRITTEN = {
    "quantize_and_insert_k_cache": (1,),
    "dequantize_and_gather_k_cache": (0,),
    "save_partial_states": (4,),
    "compress_norm_rope_store": (6,),
    "rope_quant_insert": (3,),
    "pool_ring_latent": (2, 8),
}


def insert(device: str) -> Call:
    """Two tokens of three, K rows in V4 pages."""
    k = torch.linspace(-9, 9, 3 * 512, device=device).reshape(3, 512).to(torch.bfloat16)
    cache = torch.full((2, 4, 584), 0xA5, dtype=torch.uint8, device=device)
    return [k, cache, torch.tensor([5, -1], device=device), 4], {"layout": "v4"}


def gather(device: str) -> Call:
    """What `insert` wrote, read back; lengths absent."""
    (k, cache, slots, rows), options = insert(device)
    gpu.quantize_and_insert_k_cache(k, cache, slots, rows, **options)
    out = torch.zeros((1, 4, 512), dtype=torch.bfloat16, device=device)
    number = torch.tensor([2], dtype=torch.int32, device=device)
    return [out, cache, number, None, (number - 1)[:, None], rows, 1], {}


def save(device: str) -> Call:
    """A recorded call."""
    c = case("save_states_csa", device)
    names = ("kv", "score", "ape", "positions", "state_cache", "slot_mapping")
    c["state_cache"] = torch.full_like(c["state_cache"], 9.0)
    return [c[name] for name in names], {"compress_ratio": c["compress_ratio"]}


def compress(device: str) -> Call:
    """Twelve tokens of a recorded call."""
    c = case("compress_csa", device)
    tensors = [
        c["state_cache"],
        c["token_to_req_indices"],
        c["positions"],
        c["slot_mapping"][:12],
        c["block_table"],
        c["cos_sin_cache"],
        torch.full_like(c["cache"], 0xA5),
        c["kv_slot_mapping"],
        c["rms_norm_weight"],
        c["rms_norm_eps"],
    ]
    return tensors, {"compress_ratio": 4, "overlap": True, "layout": "v4", "kv_block_size": 64}


def rope_quant(device: str) -> Call:
    """Two tokens in an NVFP4 cache."""
    latent = torch.linspace(-3, 3, 1024, device=device).reshape(2, 512).to(torch.bfloat16)
    cos = torch.linspace(-1, 1, 4 * 64, device=device).reshape(4, 64)
    cache = torch.full((2, 4, 288), 0xA5, dtype=torch.uint8, device=device)
    numbers = torch.tensor([3, 1], device=device)
    options = {"compress_ratio": 2, "layout": "v41_nvfp4"}
    return [latent, numbers, cos, cache, numbers], options


def ring(device: str) -> Call:
    """Three tokens of one request, ratio 2."""
    kv_score = torch.linspace(-2, 2, 3 * 1024, device=device).reshape(3, 1024)
    numbers = torch.arange(3, device=device)
    state = torch.full((2, 4, 1024), 9.0, device=device)
    starts = torch.tensor([0, 3], device=device)
    weight = torch.ones(512, device=device)
    out = torch.full((3, 512), -7.0, dtype=torch.bfloat16, device=device)
    requests = torch.zeros_like(numbers)
    arguments = [kv_score, numbers, state, numbers, starts, requests, weight, 1e-6, out]
    return arguments, {"compress_ratio": 2}


def ring_alone(device: str) -> Call:
    """Ratio 1, without a ring."""
    arguments, _ = ring(device)
    arguments[0], arguments[2] = arguments[0][:, :512].contiguous(), None
    return arguments, {"compress_ratio": 1}


def indices(key: str) -> Callable[[str], Call]:
    """A call of an index builder, from the tests of the reference."""

    def make(device: str) -> Call:
        call = as_tensors(MAKE[key](), device)
        if key != "mixed":
            return list(call.values()), {}
        named = {name: call[name] for name in MIXED_KEYWORDS if name in call}
        return [call[name] for name in MIXED], named

    return make


CALLS: dict[str, Callable[[str], Call]] = {
    "quantize_and_insert_k_cache": insert,
    "dequantize_and_gather_k_cache": gather,
    "save_partial_states": save,
    "compress_norm_rope_store": compress,
    "rope_quant_insert": rope_quant,
    "pool_ring_latent": ring,
    "compute_global_topk_indices_and_lens": indices("topk"),
    "combine_topk_swa_indices": indices("combine"),
    "build_flashinfer_mixed_sparse_indices": indices("mixed"),
}
ALL = [*CALLS.items(), ("pool_ring_latent", ring_alone)]


def results(name: str, function: Any, call: Call) -> list[Any]:
    """What a call returns, or what it wrote."""
    arguments, options = call
    returned = function(*arguments, **options)
    if name in WRITTEN:
        assert returned is None
        return [arguments[i] for i in WRITTEN[name] if arguments[i] is not None]
    return list(returned)


def test_names() -> None:
    assert sorted(library.__all__) == sorted(CALLS)
    for name in CALLS:
        schema = getattr(torch.ops.dsv4num, name).default._schema
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
        assert tuple(written) == WRITTEN.get(name, ())


@pytest.mark.parametrize(("name", "make"), ALL)
def test_opcheck(name: str, make: Callable[[str], Call], device: str) -> None:
    arguments, options = make(device)
    torch.library.opcheck(getattr(torch.ops.dsv4num, name).default, tuple(arguments), options)


@pytest.mark.parametrize(("name", "make"), ALL)
def test_operator_is_the_launcher(name: str, make: Callable[[str], Call], device: str) -> None:
    want = results(name, getattr(gpu, name), make(device))
    got = results(name, getattr(library, name), make(device))
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        same(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("name", "make"), ALL)
def test_compiled(name: str, make: Callable[[str], Call], backend: str, device: str) -> None:
    """One graph without a break, twice, with work before and after the operator."""
    torch._dynamo.reset()
    operator = getattr(torch.ops.dsv4num, name)

    def step(*arguments: Any, **options: Any) -> Any:
        found = operator(*arguments, **options)
        written = [arguments[i] for i in WRITTEN.get(name, ())] if found is None else found
        return [tensor + 1 for tensor in written if tensor is not None]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        want = results(name, getattr(gpu, name), make(device))
        arguments, options = make(device)
        got = compiled(*arguments, **options)
        for one, other in zip(got, want, strict=True):
            same(one, other + 1)
        for i, index in enumerate(i for i in WRITTEN.get(name, ()) if arguments[i] is not None):
            same(arguments[index], want[i])


def test_fake_has_the_launchers_geometry(device: str) -> None:
    """Shapes, strides and types of the builders, for widths that are no multiple of four."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("topk", "combine", "mixed"):
        operation = {
            "topk": "compute_global_topk_indices_and_lens",
            "combine": "combine_topk_swa_indices",
            "mixed": "build_flashinfer_mixed_sparse_indices",
        }[name]
        arguments, options = indices(name)(device)
        want = getattr(gpu, operation)(*arguments, **options)
        mode = FakeTensorMode()

        def fake(value: Any, mode: Any = mode) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        with mode:
            got = getattr(torch.ops.dsv4num, operation)(
                *map(fake, arguments), **{key: fake(value) for key, value in options.items()}
            )
        for one, other in zip(got, want, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride()
            assert one.dtype == other.dtype and one.device == other.device


def test_bad_input_is_refused(device: str) -> None:
    (k, cache, slots, _), _ = insert(device)
    with pytest.raises(dsv4num.ArgumentError, match="5, 584"):
        library.quantize_and_insert_k_cache(k, cache, slots, 5, layout="v4")


def test_registered_on_import_only() -> None:
    """`dsv4num.gpu` alone registers nothing, so that eager calls cannot pay."""
    code = (
        "import sys, torch, dsv4num.gpu, dsv4num.gpu.seed_api\n"
        "assert 'dsv4num.gpu.library' not in sys.modules\n"
        "assert not hasattr(torch.ops.dsv4num, 'save_partial_states')\n"
        "import dsv4num.gpu.library\n"
        "torch.ops.dsv4num.save_partial_states.default\n"
    )
    root = Path(dsv4num.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
