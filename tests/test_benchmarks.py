"""The benchmarks: every operation runs on tiny inputs, and bytes are counted as by hand."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dsv4num import reference
from dsv4num.formats import LAYOUTS
from dsv4num.reference import compressor

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import cpu, report, scenes  # noqa: E402  (only where torch is)
from benchmarks import gpu as command  # noqa: E402  (only where torch is)
from benchmarks.scenes import SCENES, Maker, Traffic, bind  # noqa: E402  (only where torch is)
from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import seed_api  # noqa: E402  (only where torch is)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, *arguments]
    return subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The JSON, the table and the folder of a dry run of everything, in a process of its own."""
    folder = tmp_path_factory.mktemp("benchmarks")
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    done = run("benchmarks/gpu.py", "--device", "cpu", *files)
    return json.loads((folder / "run.json").read_text()), done.stdout, folder


def test_dry_run_has_every_scene(dry: tuple[dict[str, Any], str, Path]) -> None:
    found, table, folder = dry
    assert [(r["name"], r["size"]) for r in found["results"]] == [(s.name, s.size) for s in SCENES]
    for row, scene in zip(found["results"], SCENES, strict=True):
        tiny = scene.make(Maker("cpu"), tiny=True)
        assert row["operation"] == tiny.operation
        assert (row["bytes_read"], row["bytes_written"]) == tiny.traffic
        assert row["bytes"] == sum(tiny.traffic)
        assert row["us"] > 0
    assert found["environment"]["dry"] and found["baseline"]["bytes_per_s"] > 0
    assert "DRY RUN" in table
    assert all(scene.name in table for scene in SCENES)
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_every_public_operation_on_caches_is_timed() -> None:
    """Whoever adds an operation adds a scene."""
    timed = {scene.make(Maker("cpu"), tiny=True).operation for scene in SCENES}
    scalar = {"exp32", "inv_rms", "rms_norm", "round_bf16", "tree_sum", "rotate_gptj"}
    scalar |= {"encode", "decode", "pack", "unpack", "quantize", "dequantize", "encode_scale"}
    public = {name for name in gpu.__all__ if not isinstance(getattr(gpu, name), type)}
    assert timed == public - scalar


def test_markdown(dry: tuple[dict[str, Any], str, Path]) -> None:
    found, _, folder = dry
    printed = run("benchmarks/gpu.py", "--from", str(folder / "run.json"), "--markdown").stdout
    assert printed.strip() == report.markdown(found)
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(lines) == len(SCENES) + 4  # two tables, each with a head and a rule
    assert {line.count("|") for line in lines[:3]} == {11}


def test_shares_and_goals() -> None:
    base = {"baseline": {"bytes_per_s": 4e12, "empty_us": 1.0}}
    row = {"bytes": 4_000_000, "us": 1.25, "small": False, "in_all": False, "goal": 0.8}
    assert report.rate(base, row, row["us"]) == 0.8
    assert report.reached(base, row)
    assert not report.reached(base, row | {"us": 1.26})
    assert report.reached(base, row | {"goal": None}) is None
    # 400,000 bytes take 0.1 us; the empty kernel 1 us.
    small = row | {"bytes": 400_000, "small": True, "us": 2.0, "goal": 1.0}
    assert report.above_empty(base, small, 2.0) == pytest.approx(0.9)
    assert report.reached(base, small)
    assert not report.reached(base, small | {"us": 2.2})
    assert report.reached(base, small | {"us": 12.0, "goal": 12.0, "in_all": True})
    assert not report.reached(base, small | {"us": 12.1, "goal": 12.0, "in_all": True})


def test_sweep(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    options = [
        "--size",
        "large",
        "--sweep",
        "rows=1,-",
        "path=portable,native",
        "--json",
        str(path),
    ]
    done = run("benchmarks/gpu.py", "--device", "cpu", "--op", "insert_mxfp8", *options)
    rows = json.loads(path.read_text())["sweep"]
    launches = ["path=portable rows=1", "path=portable", "path=native rows=1", "path=native"]
    assert [row["launch"] for row in rows] == launches
    failed = [row for row in rows if "error" in row]
    assert [row["launch"] for row in failed] == launches[2:]  # the interpreter has no such path
    assert all("UnsupportedError" in row["error"] for row in failed)
    assert "UnsupportedError" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "inserted"], "insert_v4"),
        (["--op", "mixed", "--size", "small"], "small size"),
    ],
)
def test_selections_that_match_nothing(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command.main([*arguments, "--list"])


@pytest.mark.parametrize("text", ["rows", "rows=", "rows=x", "stages=3"])
def test_bad_sweeps(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--sweep", text])
    assert text in capsys.readouterr().err


# Bytes, counted by hand


def test_bytes_of_insert_and_gather() -> None:
    v4, nvfp4 = LAYOUTS["v4"], LAYOUTS["v41_nvfp4"]
    # 512 bf16 values and a slot of 8 bytes; a record of 584.
    assert scenes.insert_traffic(v4, 1) == Traffic(1024 + 8, 584)
    assert scenes.insert_traffic(nvfp4, 10) == Traffic(10 * 1032, 10 * 288)
    # The pad byte of v4 is not read; 65 rows lie in two pages.
    assert scenes.gather_traffic(v4, 1, 1) == Traffic(583 + 4 + 4, 1024)
    assert scenes.gather_traffic(v4, 3, 65) == Traffic(3 * (65 * 583 + 4 + 8), 3 * 65 * 1024)
    assert scenes.gather_traffic(nvfp4, 2, 64) == Traffic(2 * (64 * 288 + 8), 2 * 64 * 1024)


def test_bytes_of_compress() -> None:
    v4, fp8 = LAYOUTS["v4"], LAYOUTS["indexer_fp8"]
    weight, rope = 2 * 512, 256
    # One request of 8 tokens from position 0: the first group has 4 rows, the second 8, of 512 kv
    # and 512 scores; two state blocks of 4 rows; 24 bytes per token, 4 per group.
    state = (4 + 8) * 1024 * 4
    read = state + 2 * 4 + 8 * 24 + 2 * 4 + 2 * rope + weight
    assert scenes.compress_traffic(v4, 4, True, 4, 1, 0, 8) == Traffic(read, 2 * 584)
    # A decode step that ends a group of 128: sixteen blocks of 8 rows.
    read = 128 * 1024 * 4 + 16 * 4 + 24 + 4 + rope + weight
    assert scenes.compress_traffic(v4, 128, False, 8, 1, 1023, 1) == Traffic(read, 584)
    # Three requests: the cosine row and the weights are the same ones.
    each = 8 * 2 * 128 * 4 + 2 * 4 + 24 + 4
    read = 3 * each + 256 + 2 * 128
    assert scenes.compress_traffic(fp8, 4, True, 4, 3, 7, 1) == Traffic(read, 3 * 132)
    # No group ends.
    assert scenes.compress_traffic(v4, 4, True, 4, 1, 0, 3) == Traffic(3 * 24 + weight, 0)


def test_bytes_of_states_and_latents() -> None:
    assert scenes.save_states_traffic(2, 4, 3) == Traffic(3 * (16 + 16) + 4 * 8, 3 * 16)
    mxfp8 = LAYOUTS["v41_mxfp8"]
    # Ratio 2 of five tokens: two end a group.
    assert scenes.rope_quant_traffic(mxfp8, 1, 2, 3) == Traffic(
        2 * (3 * 1024 + 3 * 16) + 3 * 256, 2 * 3 * 528
    )
    assert scenes.rope_quant_traffic(mxfp8, 2, 1, 5) == Traffic(
        2 * 1024 + 5 * 16 + 2 * 256, 2 * 528
    )
    assert scenes.pool_ring_traffic(1, 4, 1, 3) == Traffic(3 * (2048 + 16) + 1024, 3 * 1024)
    # Ratio 2 of five tokens: two latents, and the last four rows stay in the ring.
    assert scenes.pool_ring_traffic(2, 4, 1, 5) == Traffic(
        5 * (4096 + 20) + 8 + 1024, 2 * 1024 + 4 * 4096
    )


def test_bytes_of_indices() -> None:
    assert scenes.global_topk_traffic(3, 10, 2, 7) == Traffic(3 * 45 + 56, 3 * 44)
    # 10 + 128 columns are rounded up to 256.
    assert scenes.combine_traffic(3, 10, 128, 2) == Traffic(3 * 40 + 7 * 4, 3 * (1024 + 4))
    # One decode token and one request of 3 tokens, top 8, window 4, 5 pages of compressed rows.
    read = 16 + 4 * (32 + 4) + 1 + 4 * 2 * 5 + 4 * 2 + 4 * 4
    assert scenes.mixed_traffic(1, 1, 3, 8, 4, 5) == Traffic(read, 4 * 4 * (4 + 8 + 1))


# What the reference writes into, by operation; the others return what they write.
OUTPUTS = {
    "quantize_and_insert_k_cache": {"k_cache"},
    "dequantize_and_gather_k_cache": {"out"},
    "compress_norm_rope_store": {"kv_cache"},
    "save_partial_states": {"state_cache"},
    "rope_quant_insert": {"kv_cache"},
    "pool_ring_latent": {"latent_out", "state_cache"},
}


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.key)
def test_counted_output_bytes_are_those_that_are_written(scene: scenes.Scene) -> None:
    call = scene.make(Maker("cpu"), tiny=True)
    assert call.traffic.written == written_bytes(call)


def written_bytes(call: scenes.Call) -> int:
    """Bytes that the reference writes: those that end up alike whatever was there before."""
    function = getattr(reference, call.operation)
    given = dict(zip(parameters_of(call), call.arguments, strict=False)) | call.keywords
    outputs = OUTPUTS.get(call.operation, set())
    ends = []
    for flip in (np.uint8(0), np.uint8(0xFF)):
        arguments = {name: to_numpy(value) for name, value in given.items()}
        for name in outputs:
            if arguments[name] is not None:
                arguments[name].view(np.uint8)[...] ^= flip
        with np.errstate(all="ignore"):
            returned = function(**arguments)
        if returned is not None:
            assert not outputs
            return sum(array.size * array.itemsize for array in returned)
        ends.append(
            [arguments[name].view(np.uint8) for name in outputs if arguments[name] is not None]
        )
    return sum(int((a == b).sum()) for a, b in zip(*ends, strict=True))


def parameters_of(call: scenes.Call) -> list[str]:
    """The names of an operation's parameters, in order."""
    return list(inspect.signature(getattr(reference, call.operation)).parameters)


def to_numpy(value: Any) -> Any:
    """A contiguous copy of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return np.ascontiguousarray(value.numpy()).copy()


# Another module beside ours


@pytest.mark.parametrize(
    "name",
    [
        "insert_nvfp4",
        "gather_v4",
        "compress_csa",
        "compress_hca",
        "compress_indexer_mxfp4",
        "mixed",
    ],
)
def test_calls_by_the_seeds_names_do_the_same(name: str, device: str) -> None:
    scene = next(scene for scene in SCENES if scene.name == name)
    both = []
    for module in (gpu, seed_api):
        call = scene.make(Maker(device), tiny=True)
        given = dict(zip(parameters_of(call), call.arguments, strict=False))
        written = [given[name] for name in OUTPUTS.get(call.operation, ())]
        before = [value.clone() for value in written]
        returned = bind(module, call)()
        assert all(not torch.equal(*pair) for pair in zip(written, before, strict=True))
        both.append([to_numpy(value.cpu()).tobytes() for value in returned or written])
    assert both[0] and both[0] == both[1]


def test_a_module_without_the_operation_is_reported(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "def quantize_and_insert_k_cache(*a, **k):\n    raise OSError\n"
    )
    path = tmp_path / "run.json"
    run(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, '.')\n"
        "from benchmarks.gpu import main\n"
        "main(['--device', 'cpu', '--compare', 'engine', '--op', 'insert_mxfp8', 'save_hca',"
        f" '--json', {str(path)!r}])",
    )
    errors = [row["other"]["error"] for row in json.loads(path.read_text())["results"]]
    assert errors == ["OSError: ", "LookupError: engine has no save_partial_states"]


# The oracle's benchmark


def test_cpu_runs_every_pair(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    options = ["--rows", "512", "--repeats", "1", "--markdown", "--json", str(path)]
    printed = run("benchmarks/cpu.py", *options).stdout
    found = json.loads(path.read_text())
    assert printed.strip() == cpu.markdown(found)
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == list(cpu.pairs(512))
    assert rows["insert_v4"]["values"] == rows["gather_v41_nvfp4"]["values"] == 512 * 512
    # 128 tokens: 32 groups of 8 rows; one group of 128 rows.
    assert rows["compress_csa"]["values"] == 32 * 8 * 512
    assert rows["compress_hca"]["values"] == 128 * 512
    assert all(row["share"] > 0 for row in rows.values())
    # At least the temporary of the codes: one byte per value.
    assert all(row["peak_bytes"] > row["values"] for row in rows.values())


@pytest.mark.parametrize("name", ["compress_csa", "compress_hca", "compress_indexer_fp8"])
def test_the_yardstick_pools_what_the_oracle_pools(name: str, monkeypatch: Any) -> None:
    """Plain NumPy gives the oracle's pooled rows, but for the last bits of exp and of the sums."""
    pooled = []
    norm = compressor.rms_norm
    monkeypatch.setattr(
        compressor, "rms_norm", lambda c, *rest: (pooled.append(c), norm(c, *rest))[1]
    )
    pair = cpu.pairs(1024)[name]()
    pair.oracle()
    # Not bytes: the yardstick uses np.exp and sums in another order, and must only do the same work.
    np.testing.assert_allclose(np.concatenate(pooled), pair.plain(), rtol=1e-4, atol=1e-5)
