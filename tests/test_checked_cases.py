"""`dsv4num.cases`: the cases of `verify` in a test of one's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsv4num
from dsv4num import ArgumentError, MismatchError, reference
from dsv4num.verify import compare
from dsv4num.verify.case import BF16
from dsv4num.verify.operations import OPERATIONS
from dsv4num.verify.testing import CheckedCase, cases

ROOT = Path(dsv4num.__file__).parent.parent
INSERT, GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
RING = "pool_ring_latent"


def tame(operation: str, layout: str | None = None, **how: Any) -> Iterator[CheckedCase]:
    """The cases that the oracle takes: nothing is out of range."""
    return cases(operation, layout, profile="vllm", **how)


def first(operation: str, layout: str, name: str, **how: Any) -> CheckedCase:
    """The first case of that name."""
    return next(case for case in cases(operation, layout, **how) if case.name == name)


def report(case: CheckedCase, **outputs: Any) -> list[str]:
    """The lines of the report of a check that must fail."""
    with pytest.raises(MismatchError) as error:
        case.check(**outputs)
    assert isinstance(error.value, AssertionError)
    lines = str(error.value).splitlines()
    assert len(lines) <= 20 and lines[0] == str(case)
    assert lines[-1].startswith("  reproduce: dsv4num.cases(") and case.name in lines[-1]
    return lines[1:-1]


# --- right implementations ------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_oracle_passes_every_check(operation: str) -> None:
    """Called by name, its results given by name."""
    count = 0
    for case in tame(operation):
        returned = getattr(reference, operation)(**case.inputs)
        names = OPERATIONS[operation].returns
        values = returned if isinstance(returned, tuple) else (returned,)
        case.check(**dict(zip(names, values, strict=False)))
        count += 1
    assert count >= 1


def test_outputs_may_be_given_in_any_way() -> None:
    """The array itself, a copy, nothing, or None, as an operation returns that writes in place."""
    case = first(INSERT, "v4", "any bits")
    assert case.outputs == ("k_cache",) and case.poison == 0xA5
    inputs = case.inputs
    returned = reference.quantize_and_insert_k_cache(**inputs)
    for outputs in ({}, {"k_cache": None}, {"k_cache": returned}, {"k_cache": inputs["k_cache"]}):
        case.check(**outputs)
    written = inputs["k_cache"].copy()
    unwritten = case.inputs
    assert (unwritten["k_cache"] == 0xA5).all() and written.flags["C_CONTIGUOUS"]
    case.check(k_cache=written)  # of a function that leaves its inputs alone
    assert "never written" in report(case)[-1]  # but a cache that nobody gives was not written


def test_inputs_are_fresh_and_named_as_the_operation_names_them() -> None:
    case = first(GATHER, "v41_nvfp4", "tails at an offset")
    one, other = case.inputs, case.inputs
    names = ["out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset"]
    assert list(one) == [*names, "layout"] and one["layout"] == "v41_nvfp4"
    assert one["out"].dtype == BF16 and not np.shares_memory(one["out"], other["out"])
    one["out"][...] = 0
    reference.dequantize_and_gather_k_cache(**other)
    case.check(out=other["out"])
    ring = first(RING, "ratio2", "decode")
    assert ring.outputs == ("latent_out", "state_cache")
    reference.pool_ring_latent(**ring.inputs)
    ring.check()


def test_every_case_comes_with_both_poisons() -> None:
    found = [(case.name, case.poison) for case in cases(INSERT, "v41_mxfp8")]
    assert len(found) == 14 and len(set(found)) == 14
    assert {poison for _, poison in found} == {0xA5, 0x5A}
    assert [case.poison for case in cases("unpack")] == [None]
    assert {case.variant for case in cases("decode")} == set(OPERATIONS["decode"].variants)
    assert str(next(cases(INSERT, "v4"))) == f"{INSERT} v4, case 'any bits', poison A5"
    assert len(list(cases("tree_sum", level="full"))) == 8


def test_the_seed_changes_the_inputs() -> None:
    one, same, other = (next(cases(INSERT, "v4", seed=seed)).inputs for seed in (0, 0, 1))
    assert one["k"].tobytes() == same["k"].tobytes() != other["k"].tobytes()


def test_cases_that_need_gigabytes_are_for_a_gpu() -> None:
    names = {case.name for case in cases(INSERT, "indexer_mxfp4", level="full")}
    assert "every amax" in names and "beyond 2**31 bytes" not in names


def test_tensors(device: str) -> None:
    """Kernels, on whatever device the session has."""
    torch = pytest.importorskip("torch", reason="kernels need torch")
    from dsv4num import gpu

    how = {"arrays": "torch", "device": device}
    for case in cases(INSERT, "indexer_mxfp4", **how):
        inputs = case.inputs
        assert inputs["k"].device.type == device and inputs["k"].dtype == torch.bfloat16
        gpu.quantize_and_insert_k_cache(**inputs)
        case.check(k_cache=inputs["k_cache"])
    for case in cases("round_bf16", **how):
        case.check(y=gpu.round_bf16(**case.inputs))
    case = first("round_bf16", "fp32", "ties", **how)
    y = gpu.round_bf16(**case.inputs)
    assert report(case, y=y.float()) == ["y: float32 [65536] returned; expected: bfloat16 [65536]"]


def test_a_profile(tmp_path: Path) -> None:
    """The contract of a project, and its name for the layout."""
    path = tmp_path / "mine.toml"
    path.write_text(
        '[layouts]\nv4 = "fp8_ds_mla"\n[[writes]]\nlayouts = ["v4"]\ndialects = ["pad-not-written"]\n'
    )
    case = first(INSERT, "v4", "zeros", profile=str(path))
    inputs = case.inputs
    assert inputs.pop("layout") == "fp8_ds_mla"
    reference.quantize_and_insert_k_cache(**inputs, layout="v4")
    lines = report(case)
    assert "pad[0]: expected 0xA5, got 0x00" in lines[1]
    assert lines[-1] == "  likely: bytes written where the oracle writes nothing"
    case = first(INSERT, "v4", "edges", profile="flashmla")
    reference.quantize_and_insert_k_cache(**case.inputs)
    lines = report(case)
    assert lines[-1] == "  against SPEC: no difference"
    inputs = case.inputs
    k = np.where(np.abs(inputs["k"].astype(np.float32)) < 1e-3, BF16(0), inputs["k"])
    reference.quantize_and_insert_k_cache(**{**inputs, "k": k.astype(BF16)})
    assert "  against SPEC: no difference" not in report(case)
    with pytest.raises(MismatchError, match=r"seed=0, profile='flashmla'\), case 'edges'$"):
        case.check()


def test_a_profile_of_other_places(tmp_path: Path) -> None:
    """Rows that are inline where the layout has planes."""
    path = tmp_path / "inline.toml"
    path.write_text('[[writes]]\nlayouts = ["v4"]\ndialects = ["inline-read-as-segregated"]\n')
    for case in cases(INSERT, "v4", profile=str(path)):
        inputs = case.inputs
        cache, slots, rows = inputs["k_cache"], inputs["slot_mapping"], inputs["block_size"]
        limit = len(cache) * rows
        records = reference.encode_records(inputs["k"], "v4")
        for record, slot in zip(records, slots.tolist(), strict=False):
            if 0 <= slot < limit:
                page, row = divmod(slot, rows)
                if cache.ndim == 3:
                    cache[page, row] = record
                else:
                    cache[page, row * 584 : row * 584 + 584] = record
        case.check()


# --- wrong ones -----------------------------------------------------------------------


def spoiled(change: Any, name: str = "wide") -> list[str]:
    """The report of a right insert after which something is changed."""
    case = first(INSERT, "v4", name)
    inputs = case.inputs
    reference.quantize_and_insert_k_cache(**inputs)
    return report(case, **(change(inputs) or {}))


def scales(code: int) -> Any:
    """Changes every scale of a `v4` cache."""

    def change(inputs: dict[str, Any]) -> None:
        cache, slots = inputs["k_cache"], inputs["slot_mapping"]
        pages = cache.reshape(len(cache), -1)
        for slot in slots[slots >= 0].tolist():
            at = 64 * 576 + slot % 64 * 8
            pages[slot // 64, at : at + 7] = code

    return change


def test_reports() -> None:
    every = "every one of 21 differing scale bytes is explained by: "
    floor = "floor 1e-4 on the scale instead of on amax"
    assert spoiled(scales(0x72), "zeros")[-1] == f"  likely: {every}{floor}"
    likely, other, tell = spoiled(scales(0x68), "zeros")[-3:]
    down = "amax / 448 is rounded down to a power of two instead of up"
    assert likely == f"  likely: {every}{down}" and other.startswith(f"  or: {every}the elements")
    assert tell.startswith("  what would tell: ") and "by the first, " in tell
    lines = spoiled(lambda inputs: inputs["k"].__setitem__((0, 0), BF16(1)))
    assert lines == ["k: the operation changed its input"]
    lines = spoiled(lambda inputs: inputs["k_cache"].base.__setitem__(5, 1))
    assert lines[-1] == "  likely: a write outside the rows that the operation owns"
    assert "outside the cache: expected 0xA5, got 0x01" in lines[1]


def test_a_call_that_the_search_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the kinds of the bytes that differ must do."""

    def refuse(*arguments: Any) -> None:
        raise ArgumentError("slots", "a slot more than once", "each slot once")

    monkeypatch.setattr(compare, "explain_call", refuse)
    assert spoiled(scales(0x72), "zeros")[-1] == (
        "  likely: the scale is chosen differently, always by +9, and the elements do not follow it"
    )


@pytest.mark.parametrize(
    ("factor", "text"),
    [(4, ", always by a factor of 2^2"), (0.5, " of 2^-1"), (1.5, "differently,")],
)
def test_steps_of_fp32_scales(factor: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in powers of two; a step of the mantissa is no number for people."""
    monkeypatch.setattr(compare, "explain_call", lambda *arguments: None)
    case = first(INSERT, "indexer_fp8", "zeros")
    inputs = case.inputs
    reference.quantize_and_insert_k_cache(**inputs)
    cache, slots = inputs["k_cache"], inputs["slot_mapping"]
    pages = cache.reshape(len(cache), -1)
    for slot in slots[slots >= 0].tolist():
        at = 64 * 128 + slot % 64 * 4
        pages[slot // 64, at : at + 4].view(np.float32)[:] *= np.float32(factor)
    assert text in report(case)[-1] and "8388608" not in report(case)[-1]


def test_a_copy_does_not_hide_what_was_written_elsewhere() -> None:
    """The bytes around the array that was given count, whatever is returned."""

    def change(inputs: dict[str, Any]) -> dict[str, Any]:
        inputs["k_cache"].base[-1] ^= 1
        return {"k_cache": inputs["k_cache"].copy()}

    assert "outside the cache" in spoiled(change)[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "k_cache: int given; expected: uint8 [3, 64, 584]"),
        (np.zeros((3, 64, 583), np.uint8), "k_cache: uint8 [3, 64, 583] given; expected: uint8"),
        (np.zeros((3, 64, 584), np.float32), "k_cache: float32 [3, 64, 584] given; expected: uint8"),
    ],
)  # fmt: skip
def test_outputs_that_are_no_caches(value: Any, text: str) -> None:
    lines = spoiled(lambda inputs: {"k_cache": value}, "any bits")
    assert lines[0].startswith(text) and len(lines) == 1


def test_many_outputs_in_one_report() -> None:
    """The first is shown in full, and of the others as many as there is room for."""
    case = first(GATHER, "v4", "tails at an offset")
    inputs = case.inputs
    for name in ("k_cache", "seq_lens", "gather_lens", "block_table"):
        inputs[name][...] ^= 1
    lines = report(case, out=None)
    assert lines[0].startswith("out: ") and "never written" in lines[-4]
    assert lines[-3:] == [
        "also k_cache: the operation changed its input",
        "also seq_lens: the operation changed its input",
        "also 2 more arrays",
    ]
    case = first("quantize", "P1/64", "few rows")
    codes, scale_codes = reference.quantize(**case.inputs)
    lines = report(case, codes=codes ^ 1, scale_codes=scale_codes[:1])
    assert lines[-1] == "also scale_codes: uint8 [1, 8] returned; expected: uint8 [3, 8]"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"operation": "insert"}, "operation: got 'insert'; allowed: encode, "),
        ({"layout": "v5"}, "layout: got 'v5'; allowed: v4, "),
        ({"level": "exhaustive"}, "level: got 'exhaustive'; allowed: 'quick' or 'full'"),
        ({"operation": [INSERT]}, f"operation: got ['{INSERT}']; allowed: encode, "),
        ({"seed": -1}, "seed: got -1; allowed: an integer of 0 or more"),
        ({"seed": "x"}, "seed: got 'x'; allowed: an integer of 0 or more"),
        ({"profile": 3}, "--profile: got 3; allowed: "),
        ({"arrays": "jax"}, "arrays: got 'jax'; allowed: 'numpy' or 'torch'"),
        ({"device": "cuda"}, "device: got 'cuda'; allowed: 'cpu' for NumPy arrays"),
        ({"profile": "nobody"}, "--profile: got 'nobody'; allowed: "),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    """Raised by the call, not by the first step of the loop."""
    with pytest.raises(ArgumentError) as error:
        dsv4num.cases(**{"operation": INSERT, **arguments})
    assert str(error.value).startswith(text)


def test_a_device_that_is_not_there() -> None:
    """An AssertionError of torch would read as a failed check."""
    pytest.importorskip("torch", reason="kernels need torch")
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(ArgumentError, match=rf"device: got '{device}' \(.*allowed: a device"):
            cases(INSERT, "v4", arrays="torch", device=device)


def test_inputs_that_are_taken_twice() -> None:
    """The second time gives arrays that no call has seen: the report says so."""
    case = next(tame(INSERT, "v4"))
    reference.quantize_and_insert_k_cache(**case.inputs)
    lines = report(case, k_cache=case.inputs["k_cache"])
    assert any("the poison is still there" in line for line in lines)
    assert lines[-1] == "note: .inputs was taken 2 times, fresh each; the last are looked at"
    case.check(k_cache=reference.quantize_and_insert_k_cache(**case.inputs))
    assert not any("taken" in line for line in report(case, k_cache=case.inputs["k_cache"] * 0))


def test_wrong_checks() -> None:
    case = next(cases("pack"))
    with pytest.raises(ArgumentError, match=r"outputs: got 'codes'; allowed: packed"):
        case.check(codes=1)
    with pytest.raises(ArgumentError, match=r"outputs: got no 'packed'; allowed: what the call"):
        case.check()
    with pytest.raises(ArgumentError, match=r"inputs: got not taken; allowed: check\(\) after"):
        case.check(packed=1)
    assert case.inputs and report(case, packed=1)


def test_the_name_is_loaded_when_it_is_asked_for() -> None:
    """Neither torch nor the oracle comes with the package; no torch comes with the cases."""
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
import dsv4num
assert "cases" in dsv4num.__all__ and "dsv4num.reference" not in sys.modules
from dsv4num import reference
for case in dsv4num.cases("quantize_and_insert_k_cache", layout="v4", profile="vllm"):
    case.check(k_cache=reference.quantize_and_insert_k_cache(**case.inputs))
for case in dsv4num.cases("pack"):
    case.check(packed=reference.pack(**case.inputs))
try:
    dsv4num.case
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'dsv4num' has no attribute 'case'\n"
    with pytest.raises(AttributeError, match="no attribute 'case'"):
        _ = dsv4num.case  # type: ignore[attr-defined]  # refused
    assert dsv4num.cases is cases
