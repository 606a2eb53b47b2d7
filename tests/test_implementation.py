"""`dsv4num verify --impl`: another implementation through the same cases, however it behaves."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import readme_blocks

import dsv4num
from dsv4num.cli import main

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num.verify import command, devices  # noqa: E402  (only where torch is)
from dsv4num.verify.implementation import load_implementation  # noqa: E402  (only where torch is)
from dsv4num.verify.operations import OPERATIONS  # noqa: E402  (only where torch is)

ROOT = Path(dsv4num.__file__).parent.parent
INSERT, GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
COMPRESS = "compress_norm_rope_store"
SEEDS = "dsv4num.gpu.seed_api"

#: A module on NumPy arrays that has every operation right, to be spoiled.
RIGHT = """
import numpy as np
from dsv4num.reference import *

DSV4NUM_ARRAYS = "numpy"
"""


NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module into the current directory, and returns its name, which no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        name = f"impl_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def judge(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """Runs `verify --impl` in this process: exit code, output, errors, the rows of the report."""
    interpreted = os.environ.get("TRITON_INTERPRET")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")  # the command may set it

    def run(name: str, *options: str) -> tuple[int, str, str, list[dict[str, Any]]]:
        file = Path("run.json").absolute()
        file.unlink(missing_ok=True)
        given = ["verify", "--impl", name, "--json", str(file)]
        code = main([*given, *(() if "--jobs" in options else ("--jobs", "1")), *options])
        out, err = capsys.readouterr()
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        return code, " ".join(out.split()), err, rows

    yield run
    if interpreted is None:  # on a GPU machine; the command may have chosen the interpreter
        os.environ.pop("TRITON_INTERPRET", None)


def report_of(rows: list[dict[str, Any]]) -> str:
    """The first failure, without its heading and the line that reproduces it."""
    failures = [failure for row in rows for failure in row["failures"]]
    assert failures and all(len(lines) <= 20 for lines in failures)
    assert all(lines[-1].startswith("  reproduce: python -m dsv4num ") for lines in failures)
    return "\n".join(failures[0][1:-1])


# --- who takes what -------------------------------------------------------------------


def test_the_oracle_on_numpy_arrays(module: Any, judge: Any, tmp_path: Path) -> None:
    """Every operation; where values are out of range the oracle raises, and is failed for it."""
    name = module(RIGHT)
    (tmp_path / "tame.toml").write_text('undefined = ["out-of-range"]\n')
    code, out, err, rows = judge(name, "--profile", "tame.toml")
    assert (code, err) == (0, "") and "not offered" not in out
    assert {row["operation"] for row in rows if row["runs"]} == set(OPERATIONS)
    assert all(row["path"] == "impl" for row in rows)
    found = json.loads((tmp_path / "run.json").read_text())["environment"]
    assert re.fullmatch(rf"{name}@[0-9a-f]{{12}}", found["implementation"])
    assert (found["arrays"], found["profile"], found["arch"]) == ("numpy", "tame.toml", "cpu")
    case = ("--op", INSERT, "--layout", "v4", "--case", "slots out of range")
    code, _, _, rows = judge(name, *case)
    assert code == 1
    assert report_of(rows).startswith("raised ValueRangeError: slot_mapping: got 92233")
    assert f"--impl {name}" in rows[0]["failures"][0][-1]


def test_our_kernels_as_an_implementation(judge: Any, module: Any, device: str) -> None:
    some = ("--device", device, "--op", INSERT, "--op", GATHER, "--layout", "v41_nvfp4")
    code, out, err, rows = judge("dsv4num.gpu", *some, "--op", "pack", "--layout", "e2m1")
    assert (code, err) == (0, "") and "0 mismatches" in out
    assert [row["cases"] for row in rows] == [1, 7, 6]
    assert "Triton's interpreter" not in out


def test_the_engines_names(judge: Any, module: Any, device: str) -> None:
    """Insert and gather are told the record by its bytes, pages are given with three axes."""
    some = ("--device", device, "--op", INSERT, "--op", GATHER)
    code, out, err, rows = judge(SEEDS, *some, "--case", "views")
    assert (code, err) == (0, ""), out
    ran = {(row["operation"], row["variant"]) for row in rows if row["runs"]}
    records = ("v4", "v4_fnuz", "v41_mxfp8", "v41_mxfp8_fnuz", "v41_nvfp4")
    assert ran == {(name, record) for name in (INSERT, GATHER) for record in records}
    left = {row["variant"]: row["not_offered"] for row in rows if row["not_offered"]}
    assert left["indexer_fp8"] == left["v41_mxfp8_inline"] == ["no parameter layout"]


@pytest.mark.parametrize("layout", ["v4", "indexer_mxfp4"])
def test_the_engines_compressor_in_both_forms(
    layout: str, judge: Any, module: Any, device: str
) -> None:
    some = ("--device", device, "--op", COMPRESS, "--layout", layout, "--case", "csa chunks")
    code, out, err, rows = judge(SEEDS, *some)
    assert (code, err) == (0, ""), out
    assert {row["path"]: row["runs"] for row in rows} == {"one stage": 2, "two stages": 2}


def test_the_engines_compressor_cannot_name_every_record(judge: Any, module: Any) -> None:
    code, out, _, _ = judge(SEEDS, "--op", COMPRESS, "--layout", "v4_fnuz")
    assert code == 2 and "the engine's arguments cannot name it" in out


def test_the_engines_compressor_on_numpy_arrays(module: Any, judge: Any) -> None:
    """What it is told agrees with the arguments of SPEC 5.4; parameters may be missing."""
    name = module("""
import numpy as np
from dsv4num.reference import compress_norm_rope_store

DSV4NUM_ARRAYS = "numpy"

def my_compress_norm_rope_store_two_stage_triton(
    state_cache, num_actual, token_to_req_indices, positions, slot_mapping, block_table, block_size,
    state_width, cos_sin_cache, kv_cache, k_cache_metadata, head_dim, rope_head_dim, compress_ratio,
    overlap, use_fp4_cache, rms_norm_weight, rms_norm_eps, quant_block, token_stride, scale_dim,
    num_decode_tokens, compress_scratch,
):
    assert (head_dim, rope_head_dim, use_fp4_cache) == (128, 64, True)
    assert (quant_block, token_stride, scale_dim) == (32, 64, 4)
    assert state_cache.shape[1:] == (block_size, 2 * state_width) and num_decode_tokens == 0
    assert compress_scratch.shape == (num_actual, 128) and len(slot_mapping) == num_actual
    assert kv_cache.ndim == 3
    compress_norm_rope_store(
        state_cache, token_to_req_indices, positions, slot_mapping, block_table, cos_sin_cache,
        kv_cache, k_cache_metadata.slot_mapping, rms_norm_weight, rms_norm_eps,
        compress_ratio=compress_ratio, overlap=overlap, layout="indexer_mxfp4",
    )
""")
    some = ("--op", COMPRESS, "--layout", "indexer_mxfp4", "--profile", "vllm")
    code, out, _, rows = judge(f"{name}:my_", *some)
    assert code == 0, out
    assert [(row["path"], row["cases"]) for row in rows] == [("two stages", 9)]


def test_arguments_by_name_by_position_and_in_any_form(module: Any, judge: Any) -> None:
    name = module(
        RIGHT
        + """
def a_pack(*, codes): return pack(codes)
def a_unpack(packed, /): return unpack(packed)
def a_exp32(*args, **kwargs): return exp32(*args, **kwargs)
def a_quantize(rule, x): return list(quantize(x, rule))
class a_tree_sum:
    def __new__(cls, values, axis): return tree_sum(values, axis)
a_round_bf16 = type("", (), {"__call__": staticmethod(round_bf16), "__signature__": 1})()
a_encode = 5
"""
    )
    wanted = ("pack", "unpack", "exp32", "quantize", "tree_sum", "round_bf16", "encode")
    options = [word for operation in wanted for word in ("--op", operation)]
    code, out, err, rows = judge(f"{name}:a_", *options)
    assert (code, err) == (0, ""), out
    assert {row["operation"] for row in rows if row["runs"]} == set(wanted) - {"encode"}
    assert "not offered: encode: no function of this name" in out


def test_a_function_without_layout_is_for_v4_or_what_the_module_says(
    module: Any, judge: Any
) -> None:
    text = (
        RIGHT
        + """
def one_quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size):
    assert k_cache.shape[1:] == (block_size, WIDTH)
    quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, layout=LAYOUT)

def one_rope_quant_insert(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio):
    rope_quant_insert(latent, positions, cos_sin_cache, kv_cache, slot_mapping,
                      compress_ratio=compress_ratio, layout=LAYOUT)
"""
    )
    for declared, layout, width in (
        ("", "v4", 584),
        ('DSV4NUM_LAYOUTS = "v41_mxfp8"', "v41_mxfp8", 528),
        ('DSV4NUM_LAYOUTS = ["v41_nvfp4"]', "v41_nvfp4", 288),
    ):
        name = module(f"{text}\nLAYOUT, WIDTH = '{layout}', {width}\n{declared}\n")
        some = ("--op", INSERT, "--op", "rope_quant_insert", "--profile", "vllm")
        code, out, _, rows = judge(f"{name}:one_", *some)
        assert code == 0, out
        ran = {row["variant"]: row["not_offered"] for row in rows if row["runs"]}
        assert ran == {layout: ["no parameter bf16_round_trip"] * 2}
        assert [row["cases"] for row in rows if row["runs"]] == [6, 5]
        others = "not among DSV4NUM_LAYOUTS" if declared else "no parameter layout"
        assert f": {others}" in out
        assert f"not offered: rope_quant_insert (some cases of {layout}): no parameter" in out


# --- how an implementation misbehaves -------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "body", "text"),
    [
        ("pack", "raise KeyError('a')", r"raised KeyError: 'a'\n  in pack, impl_\d+\.py line 8"),
        ("pack", "raise ValueError", r"raised ValueError\n  in pack, impl"),
        ("pack", "raise SystemExit(0)", "raised SystemExit: 0\n"),
        ("pack", "np.empty(-1)", "raised ValueError: negative dimensions.*\n  in pack, impl"),
        ("pack", "return None", r"packed: NoneType returned; expected: uint8 \[16, 16\]"),
        ("pack", "return 'abc'", r"packed: str returned; expected: uint8 \[16, 16\]"),
        ("pack", "return right(codes)[:1]", r"packed: uint8 \[1, 16\] returned; expected: uint8 \["),
        ("pack", "return right(codes) * 1.0", r"packed: float64 \[16, 16\] returned; expected:"),
        ("pack", "return codes[:, ::2]", "packed: 240 bytes differ\n"),
        ("pack", "codes += 1; return right(codes - 1)", "codes: the operation changed its input"),
        ("exp32", "return right(x).view(np.int32)", r"y: int32 \[\d+\] returned; expected: float32"),
        ("exp32", "return right(x).astype('>f4')", r"y: >f4 \[\d+\] returned; expected: float32"),
        ("quantize", "return None", "codes: nothing was returned; expected: codes and scale_codes"),
        ("quantize", "return right(x, rule)[0]", "codes: 1 values were returned; expected: codes and"),
        ("quantize", "return (*right(x, rule), 1)", "codes: 3 values were returned; expected: codes"),
        ("quantize", "return right(x, rule)[::-1]", r"codes: uint8 \[64, 8\] returned; expected"),
    ],
)  # fmt: skip
def test_a_function_that_misbehaves(
    operation: str, body: str, text: str, module: Any, judge: Any
) -> None:
    arguments = {"pack": "codes", "exp32": "x", "quantize": "x, rule"}[operation]
    name = module(f"{RIGHT}right = {operation}\ndef {operation}({arguments}):\n    {body}\n")
    some = ("--layout", "P1/64") if operation == "quantize" else ()
    code, out, err, rows = judge(name, "--op", operation, *some)
    assert (code, err) == (1, "")
    assert re.match(text, report_of(rows)), report_of(rows)
    assert rows[0]["mismatches"] > 0 and "Traceback" not in out


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("pass", "likely: bytes that were never written (the poison is still there)"),
        ("right(*given); k_cache.base[-9] = 1", "likely: a write outside the rows"),
        ("right(*given); k_cache.base[-9] = 1; k_cache[..., 7] |= 128", "  and: a write outside"),
        ("right(*given); k_cache.base[70] = 1", "byte -65466 outside the cache: expected"),
        ("right(*given); slot_mapping[0] = 0", "slot_mapping: the operation changed its input"),
        ("right(*given); k[3, 5] = 1", "k: the operation changed its input"),
        ("right(k, k_cache.copy(), slot_mapping, 64); return k_cache", "never written"),
        ("right(np.roll(k, 1, 0), k_cache, slot_mapping, 64)", "hold the record of another slot"),
    ],
)
def test_an_insert_that_misbehaves(body: str, text: str, module: Any, judge: Any) -> None:
    name = module(f"""{RIGHT}
right = quantize_and_insert_k_cache
def quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size):
    given = k, k_cache, slot_mapping, block_size
    {body}
""")
    code, _, _, rows = judge(name, "--op", INSERT, "--layout", "v4", "--case", "any bits")
    assert code == 1
    report = "\n".join(line for failure in rows[0]["failures"] for line in failure)
    assert text in report, report


def test_signals_that_something_is_not_offered(module: Any, judge: Any) -> None:
    name = module(
        RIGHT
        + """
import dsv4num
def pack(codes): raise NotImplementedError("not here\\nnor there")
def unpack(packed): raise dsv4num.UnsupportedError("no such unit")
def exp32(x):
    if x.shape[0] < 20: raise NotImplementedError
    from dsv4num.reference import exp32
    return exp32(x)
"""
    )
    code, out, err, rows = judge(name, "--op", "pack", "--op", "unpack", "--op", "exp32")
    assert (code, err) == (0, "")
    assert {row["operation"]: row["not_offered"] for row in rows} == {
        "pack": ["NotImplementedError: not here"],
        "unpack": ["UnsupportedError: no such unit"],
        "exp32": ["NotImplementedError"],
    }
    assert "not offered: pack: NotImplementedError: not here" in out
    assert "not offered: exp32 (some cases of fp32): NotImplementedError" in out
    assert [row["cases"] for row in rows if row["operation"] == "exp32"] == [2]
    code, out, err, _ = judge(name, "--op", "pack")
    assert code == 2 and "not offered: pack: NotImplementedError" in out
    assert "selection: got no case" in err
    code, _, _, _ = judge(name, "--op", "exp32", "--case", "ends", "--case", "inside")
    assert code == 0


def test_a_process_that_dies(module: Any, judge: Any) -> None:
    """What it took with it runs again; only the operation that ended it has failed."""
    name = module(RIGHT + "import os\ndef pack(codes): os._exit(3)\n")
    code, out, err, rows = judge(name, "--op", "pack", "--op", "unpack", "--jobs", "2")
    assert (code, err) == (1, "")
    found = {row["operation"]: (row["runs"], row["mismatches"]) for row in rows}
    assert found == {"pack": (0, 1), "unpack": (1, 0)}
    assert "pack e2m1: the process died while it ran its cases" in out


def test_results_with_dlpack(module: Any, judge: Any, device: str) -> None:
    """Any object with the protocol counts as an array, as do bytes of a format that NumPy lacks."""
    name = module("""
import torch
from dsv4num import gpu

class Result:
    def __init__(self, tensor): self.tensor = tensor
    def __dlpack__(self, **how): return self.tensor.__dlpack__(**how)
    def __dlpack_device__(self): return self.tensor.__dlpack_device__()

def pack(codes): return Result(gpu.pack(codes))
def encode(x, fmt): return gpu.encode(x, fmt).view(torch.float8_e4m3fn).requires_grad_(False)
def round_bf16(x): return gpu.round_bf16(x)
def tree_sum(x, axis): return gpu.tree_sum(x, axis).requires_grad_()
class unpack:
    def __new__(cls, packed): return cls
""")
    ops = ("pack", "encode", "round_bf16", "tree_sum", "unpack")
    options = [word for operation in ops for word in ("--op", operation)]
    options += ["--layout", "e4m3fn", "--layout", "e2m1", "--layout", "fp32", "--device", device]
    code, out, _, rows = judge(
        name,
        *options,
        "--case",
        "every pair",
        "--case",
        "near one",
        "--case",
        "ties",
        "--case",
        "8 columns",
        "--case",
        "every byte",
    )
    assert code == 1, out
    wrong = {row["operation"]: row["mismatches"] for row in rows if row["mismatches"]}
    assert wrong == {"unpack": 512} and "codes: type returned; expected: uint8 [8, 64]" in out


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", ("--impl", ""), "--impl: got '' (ValueError: Empty module name); allowed: MODULE"),
        (None, (), "--impl: got 'no_such_module' (ModuleNotFoundError: No module named"),
        ("import sys; sys.exit()", (), "(SystemExit: no message); allowed: MODULE[:PREFIX]"),
        ("1 +", (), "(SyntaxError: invalid syntax"),
        ("encode_ = 1\nencode = 2", (), "allowed: a module with a function such as quantize_and"),
        ("DSV4NUM_ARRAYS = 'cupy'", (), "DSV4NUM_ARRAYS: got 'cupy'; allowed: 'torch' or 'numpy'"),
        ("DSV4NUM_LAYOUTS = 5", (), "DSV4NUM_LAYOUTS: got 5; allowed: v4, "),
        ("DSV4NUM_LAYOUTS = ['v5']", (), "DSV4NUM_LAYOUTS: got 'v5'; allowed: v4, "),
        (RIGHT, ("--path", "portable"), "--path: got given with --impl; allowed: only for"),
        (RIGHT, ("--ptx", "sm_80"), "--ptx: got given with --impl"),
        (RIGHT, ("--record", "x"), "--record: got given with --impl"),
        ("", ("--profile", ""), "module with a function"),
        (RIGHT, ("--profile", ""), "--profile: got ''; allowed: a file FILE.toml, or atom, "),
        (RIGHT, ("--profile", "no"), "--profile: got 'no'; allowed: a file FILE.toml, or atom, "),
        (RIGHT, ("--profile", "no.toml"), "No such file"),
        (RIGHT, ("--op", "packs"), "--op: got 'packs'"),
    ],
)  # fmt: skip
def test_bad_options(
    text: str | None, options: tuple[str, ...], message: str, module: Any, judge: Any
) -> None:
    name = "no_such_module" if text is None else module(text)
    code, out, err, rows = judge(name, *options)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not rows and out == ""


def test_options_that_need_an_implementation(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (("--profile", "vllm"), ("--arrays", "torch")):
        assert main(["verify", "--device", device, "--op", "pack", option, value]) == 2
        assert f"{option}: got given without --impl" in capsys.readouterr().err


def test_numpy_arrays_are_on_the_cpu(
    module: Any, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(RIGHT)
    monkeypatch.setattr(command, "_choose_device", lambda asked: asked or "cuda")
    code, _, err, _ = judge(name, "--device", "cuda", "--op", "pack")
    assert code == 2 and "--device: got cuda, for an implementation on NumPy arrays" in err
    code, out, _, _ = judge(name, "--op", "pack")
    assert code == 0 and "arch cpu" in out
    code, out, _, _ = judge("dsv4num.reference", "--op", "pack", "--arrays", "numpy")
    assert code == 0 and "arrays numpy" in out


def test_a_run_of_another_implementation_is_no_record(
    module: Any, judge: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its shards are joined as others are; those of two versions are not."""
    name = module(RIGHT)
    files = [tmp_path / f"{index}.json" for index in range(2)]
    for index, file in enumerate(files):
        code, _, _, _ = judge(name, "--op", "decode", "--shard", f"{index}/2")
        assert code == 0
        (tmp_path / "run.json").rename(file)
    merged = ["report", "merge", *map(str, files)]
    assert main(merged) == 0 and f"implementation {name}@" in capsys.readouterr().out
    assert main([*merged, "--record", "proof"]) == 2
    assert "--record: got a run of another implementation" in capsys.readouterr().err
    files[1].write_text(files[1].read_text().replace(f"{name}@", f"{name}@0"))
    assert main(merged) == 2
    assert "got environment.implementation" in capsys.readouterr().err


def test_devices_are_told_of_the_implementation(
    module: Any, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, asked = module(RIGHT.replace('numpy"', 'torch"')), []

    def answer(names: Any, options: list[str], *more: Any) -> dict[str, Any]:
        asked.append(options)
        raise dsv4num.UnsupportedError("enough")

    monkeypatch.setattr(command, "_choose_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "run_on_devices", answer)
    more = ("--profile", "vllm", "--arrays", "torch")
    assert judge(name, "--op", "pack", "--devices", "all", *more)[0] == 2
    assert asked[0][-6:] == ["--impl", name, "--arrays", "torch", "--profile", "vllm"]


def test_a_module_without_a_file(judge: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = type(sys)("made_up")
    made.my_pack = dsv4num.reference.pack
    monkeypatch.setitem(sys.modules, "made_up", made)
    code, out, _, _ = judge("made_up:my_", "--op", "pack", "--arrays", "numpy")
    assert code == 0 and "implementation made_up:my_ arrays" in out
    assert load_implementation("made_up:my_", "numpy").prefix == "my_"


# --- the example, and what README shows of it -----------------------------------------


def transcript(command: str) -> list[str]:
    """What README shows of a command."""
    blocks = [block for block in readme_blocks("text") if block.startswith(f"$ {command}")]
    assert len(blocks) == 1
    return blocks[0].splitlines()


def test_the_example_and_its_transcript(capsys: pytest.CaptureFixture[str]) -> None:
    """README shows, line by line and but for the seconds, what the command prints below its heads."""
    command = [sys.executable, "-m", "dsv4num", "verify", "--device", "cpu", "--jobs", "1"]
    first, *shown = transcript("dsv4num verify --impl examples.my_kernels:my_")
    words = first.removeprefix("$ dsv4num verify ").split()
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr

    def timeless(line: str) -> str:
        return re.sub(r" +\d+\.\d$|, \d+ s$", "", line)

    printed = iter(map(timeless, done.stdout.splitlines()))
    for line in map(timeless, shown):
        if line.strip() != "...":
            assert line in printed, line  # in this order
    assert any("floor 1e-4 on the scale instead of on amax" in line for line in shown)

    done = subprocess.run(
        [*command, *words, "--profile", "flashmla"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and ", 0 mismatches, " in done.stdout


def test_the_example_without_its_fault(module: Any, judge: Any) -> None:
    """With the floor in its place no byte differs: the fault is the only one."""
    text = (ROOT / "examples" / "my_kernels.py").read_text()
    fault, right = "(amax / 448).clamp(min=1e-4)", "amax.clamp(min=1e-4) / 448"
    assert text.count(fault) == 1
    code, out, err, rows = judge(f"{module(text.replace(fault, right))}:my_", "--device", "cpu")
    assert (code, err) == (0, ""), out
    assert {row["operation"]: row["cases"] for row in rows if row["runs"]} == {INSERT: 7, GATHER: 6}


def test_arrays_of_every_kind() -> None:
    """What counts as an array, and what does not."""
    from dsv4num.verify.call import as_array

    for value in (np.float32(1), np.ones(2), torch.ones(2, dtype=torch.bfloat16)):
        assert as_array(value) is not None
    assert as_array(torch.zeros(2, dtype=torch.float8_e5m2)).dtype == np.uint8
    for value in (None, "a", 5, [1, 2], torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        assert as_array(value) is None


def test_dlpack_where_there_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dsv4num.cases` works without torch, and so does what it takes."""
    from dsv4num.verify.call import as_array

    class Result:
        def __dlpack__(self, **how: Any) -> Any:
            return np.arange(3).__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    monkeypatch.delitem(sys.modules, "torch")
    found = as_array(Result())
    assert found is not None and found.tolist() == [0, 1, 2]
    assert as_array("a") is None
