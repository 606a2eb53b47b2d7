"""The compressor's kernels in the interpreter: recorded bytes, and errors equal to the reference's."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import test_compressor as oracle
from conftest import HAS_GPU
from test_recorded_bytes import FILE as GOLDENS

import dsv4num.reference
from dsv4num import ArgumentError, Dsv4numError, ValueRangeError
from dsv4num.formats import get_layout

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

import dsv4num.gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch, compressor  # noqa: E402  (only where torch is)
from dsv4num.gpu.compressor import choose_plan, plans  # noqa: E402  (only where torch is)

DEVICE = "cuda" if HAS_GPU else "cpu"
OUTPUTS = ("state_cache", "kv_cache", "latent_out")
TABLES = {
    "save_partial_states": (oracle.states_arguments, oracle.STATES_ERRORS),
    "compress_norm_rope_store": (oracle.compress_arguments, oracle.COMPRESS_ERRORS),
    "rope_quant_insert": (oracle.rope_arguments, oracle.ROPE_ERRORS),
    "pool_ring_latent": (oracle.ring_arguments, oracle.RING_ERRORS),
}


def can_be_a_tensor(value: Any) -> bool:
    """Torch has no read-only tensors, no negative strides, and fewer dtypes."""
    if not isinstance(value, np.ndarray):
        return True
    known = value.dtype == ml_dtypes.bfloat16 or value.dtype.name in (
        *("uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "bool"),
    )
    return known and value.flags.writeable and all(stride >= 0 for stride in value.strides)


def changed(operation: str, index: int) -> dict[str, Any]:
    """The arguments of one entry of a table, with its fault."""
    make, table = TABLES[operation]
    arguments = make()
    name, change, _, _ = table[index]
    arguments[name] = change(arguments)
    return arguments


#: Every fault of the reference's tables that a tensor can have.
BAD = [
    pytest.param(operation, index, id=f"{operation}-{entry[0]}-{entry[3]}-{index}")
    for operation, (_, table) in TABLES.items()
    for index, entry in enumerate(table)
    if all(can_be_a_tensor(value) for value in changed(operation, index).values())
]


def tensor(value: Any) -> Any:
    """A NumPy array as a tensor where kernels run, with the same strides."""
    if not isinstance(value, np.ndarray):
        return value
    half = value.dtype == ml_dtypes.bfloat16
    here = torch.from_numpy(value.view(np.int16) if half else value)
    whole = torch.empty(0, dtype=here.dtype).set_(here.untyped_storage()).to(DEVICE)
    there = whole.as_strided(here.shape, here.stride(), here.storage_offset())
    return there.view(torch.bfloat16) if half else there


def raw(value: Any) -> Any:
    """The bytes of a tensor's elements."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def plain(text: str) -> str:
    """An error's text without the names of either array library."""
    text = re.sub(r"numpy\.ndarray|torch\.Tensor|ndarray|Tensor", "array", text)
    return text.replace("numpy.", "").replace("torch.", "")


@pytest.mark.parametrize(("operation", "index"), BAD)
def test_the_errors_are_the_reference_s(operation: str, index: int) -> None:
    arguments = changed(operation, index)
    tensors = {key: tensor(value) for key, value in arguments.items()}
    before = {key: tensors[key].clone() for key in OUTPUTS if hasattr(tensors.get(key), "clone")}
    with pytest.raises(Dsv4numError) as wanted:
        getattr(dsv4num.reference, operation)(**arguments)
    with pytest.raises(type(wanted.value)) as found:
        getattr(dsv4num.gpu, operation)(**tensors, validate=True)
    assert plain(str(found.value)) == plain(str(wanted.value))
    for key, then in before.items():
        assert torch.equal(raw(tensors[key]), raw(then)), key
    if isinstance(wanted.value, ValueRangeError):  # without a look, the kernels skip, in bounds
        getattr(dsv4num.gpu, operation)(**tensors)


@pytest.mark.parametrize("launch", [Launch(), Launch(rows=2, columns=128)], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("compress_csa", "v4"),
        ("compress_hca", "v4"),
        ("compress_hca2", "v4"),
        ("compress_idx8", "indexer_fp8"),
    ],
)
def test_recorded_bytes(case: str, layout: str, launch: Launch) -> None:
    if launch.columns == 128 and layout == "indexer_fp8":
        launch = Launch(rows=2, columns=64)

    def given(name: str) -> Any:
        return GOLDENS[f"{case}/{name}"]

    names = ("state_cache", "token_to_req_indices", "positions", "slot_mapping", "block_table")
    cache = torch.full(given("cache").shape, int(given("fill")), dtype=torch.uint8, device=DEVICE)
    weight = tensor(given("rms_norm_weight_bf16").view(ml_dtypes.bfloat16))
    dsv4num.gpu.compress_norm_rope_store(
        *(tensor(given(name)) for name in (*names, "cos_sin_cache")),
        cache,
        tensor(given("kv_slot_mapping")),
        weight,
        float(given("rms_norm_eps")),
        compress_ratio=int(given("compress_ratio")),
        overlap=int(given("overlap")),
        layout=layout,
        kv_block_size=int(given("kv_block_size")),
        validate=True,
        launch=launch,
    )
    assert np.array_equal(cache.cpu().numpy(), given("cache"))


@pytest.mark.parametrize("case", ["save_states_csa", "save_states_hca"])
def test_recorded_states(case: str) -> None:
    def given(name: str) -> Any:
        return GOLDENS[f"{case}/{name}"]

    state = torch.full(given("state_cache").shape, float(given("fill")), device=DEVICE)
    names = ("kv", "score", "ape", "positions")
    dsv4num.gpu.save_partial_states(
        *(tensor(given(name)) for name in names),
        state,
        tensor(given("slot_mapping")),
        compress_ratio=int(given("compress_ratio")),
        validate=True,
    )
    assert state.cpu().numpy().tobytes() == given("state_cache").tobytes()


@pytest.mark.parametrize(
    ("tokens", "requests", "window", "ratio", "plan"),
    [
        (65536, 1, 8, 4, (16, 512)),  # CSA, prefill
        (2048, 1, 8, 4, (4, 512)),  # a group per program
        (64, 64, 8, 4, (1, 512)),  # CSA, decode
        (65536, 1, 128, 128, (128, 32)),  # HCA, prefill: many groups
        (1024, 1, 128, 128, (128, 32)),
        (512, 1, 128, 128, (128, 16)),  # five groups at most: more programs per group
        (64, 64, 128, 128, (1, 32)),  # HCA, decode: any token may end a group
        (8, 8, 128, 128, (1, 16)),
        (1, 1, 128, 128, (1, 16)),
    ],
)
def test_the_plan_follows_the_groups(
    tokens: int, requests: int, window: int, ratio: int, plan: tuple[int, int]
) -> None:
    found = choose_plan(tokens, requests, window, ratio, 512)
    assert found == plan and found in plans(window, ratio, 512)


@pytest.mark.parametrize("layout", ["v4", "v41_mxfp8", "v41_nvfp4"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_in_parts(layout: str, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes the rows of a program four at a time; the interpreter, but here, all at once."""
    rng = np.random.default_rng(5)
    tokens = 21 * ratio
    cache = np.full((3, 8, get_layout(layout).row_bytes), 0xA5, np.uint8)
    slots = rng.permutation(24)[:21].repeat(ratio)
    arguments = oracle.rope_arguments() | {
        "latent": rng.standard_normal((tokens, 512)).astype(ml_dtypes.bfloat16),
        "positions": np.arange(tokens),
        "cos_sin_cache": rng.standard_normal((tokens, 64)).astype(np.float32),
        "slot_mapping": slots,
        "compress_ratio": ratio,
        "layout": layout,
    }
    want = cache.copy()
    dsv4num.reference.rope_quant_insert(**arguments | {"kv_cache": want})
    monkeypatch.setattr(compressor, "interpreted", lambda: False)
    given = {key: tensor(value) for key, value in (arguments | {"kv_cache": cache}).items()}
    dsv4num.gpu.rope_quant_insert(**given, launch=Launch(rows=16))
    assert given["kv_cache"].cpu().numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("validate", [1, None, "yes"])
def test_validate_is_true_or_false(validate: Any) -> None:
    arguments = {key: tensor(value) for key, value in oracle.compress_arguments().items()}
    with pytest.raises(ArgumentError, match="validate"):
        dsv4num.gpu.compress_norm_rope_store(**arguments, validate=validate)


@pytest.mark.parametrize("eps", [1e39, -1e-6, float("nan"), 10**400, True, "1e-6"])
def test_eps_is_that_of_the_reference(eps: Any) -> None:
    c = np.ones((1, 4), np.float32)
    with pytest.raises(ArgumentError) as wanted:
        dsv4num.reference.inv_rms(c, eps)
    with pytest.raises(ArgumentError) as found:
        dsv4num.gpu.inv_rms(tensor(c), eps)
    assert str(found.value) == str(wanted.value)
    small = np.float32(1e-6)  # a NumPy scalar is a number
    assert dsv4num.gpu.inv_rms(tensor(c), small).item() == dsv4num.reference.inv_rms(c, small)
