"""`dsv4num verify` and `targets`: what they print and return, and that they find planted faults."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import stale_records

import dsv4num
from dsv4num.cli import main
from dsv4num.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

import dsv4num.gpu  # noqa: E402  (only where torch is)
from dsv4num.verify import (  # noqa: E402  (only where torch is)
    command,
    devices,
    operations,
    report,
    runner,
)
from dsv4num.verify.merge import merge as merge_of  # noqa: E402  (only where torch is)
from dsv4num.verify.operations import OPERATIONS  # noqa: E402  (only where torch is)

PACKAGE = Path(dsv4num.__file__).parent
INSERT, GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
MAX_LINES = 20


@pytest.fixture
def verify(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `verify` in this process: exit code, output, errors."""
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")  # the command may set it

    def run(*options: str) -> tuple[int, str, str]:
        code = main(["verify", "--device", device, "--jobs", "1", *options])
        return code, *capsys.readouterr()

    return run


# --- the command ----------------------------------------------------------------------


def test_a_quick_run(verify: Any, device: str) -> None:
    code, out, err = verify("--op", "pack", "--op", "unpack")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    heads = ["operation", "variant", "path", "cases", "runs", "bytes", "mismatches", "seconds"]
    assert heads in lines
    assert any(line[:3] == ["pack", "e2m1", "portable"] and line[6] == "0" for line in lines)
    words = " ".join(out.split())
    assert (
        f"dsv4num {dsv4num.__version__}" in words and f"torch {metadata.version('torch')}" in words
    )
    assert ", 0 mismatches, " in out.splitlines()[-1]
    assert ("Triton's interpreter" in out) == (device == "cpu")


def test_json(verify: Any, tmp_path: Path, device: str) -> None:
    file = tmp_path / "run.json"
    code, _, _ = verify("--op", "decode", "--variant", "e2m1", "--seed", "7", "--json", str(file))
    found = json.loads(file.read_text())
    assert code == 0
    assert set(found) == {
        *("environment", "date", "level", "seed", "seconds", "bytes", "mismatches", "rows"),
        *("selection", "shard", "sources"),
    }
    assert found["sources"] == report.source_hashes() and found["shard"] == "0/1"
    assert found["selection"] == {
        **{"operations": ["decode"], "variants": ["e2m1"], "cases": [], "paths": []}
    }
    assert (found["level"], found["seed"], found["mismatches"]) == ("quick", 7, 0)
    versions = {"dsv4num", "spec", "python", "numpy", "torch", "triton"}
    assert versions | {"arch"} <= set(found["environment"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    row = found["rows"][-1]
    assert set(row) == {
        *("operation", "variant", "path", "cases", "names", "runs", "bytes", "mismatches"),
        *("seconds", "failures", "not_offered"),
    }
    assert (row["operation"], row["variant"], row["path"]) == ("decode", "e2m1", "portable")
    assert row["cases"] == row["runs"] == 1 and row["bytes"] == 16 * 4 and row["failures"] == []
    assert found["bytes"] == sum(row["bytes"] for row in found["rows"])


def test_every_case_of_one_layout(verify: Any, tmp_path: Path) -> None:
    """Both fills and the sweep of launch configurations, counted."""
    file = tmp_path / "run.json"
    options = ("--op", INSERT, "--layout", "indexer_mxfp4", "--path", "portable")
    code, _, _ = verify(*options, "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert code == 0 and row["cases"] == 7
    assert row["runs"] == 2 * (6 + 5)  # two fills; one of the seven cases under five launches


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--op", "packs"), "--op: got 'packs'; allowed: encode, decode, pack,"),
        (("--variant", "e5m2"), "--variant: got 'e5m2'; allowed: "),
        (("--layout", "v5"), "got 'v5'; allowed: "),
        (("--op", "pack", "--layout", "v4"), "--op: got 'pack'; allowed: an operation that has"),
        (("--op", INSERT, "--op", "pack", "--layout", "v4"), "--op: got 'pack'; allowed: "),
        (("--op", "pack", "--case", "every pair", "--case", "no"), "--case: got 'no'; allowed: "),
        (("--op", "pack", "--seed", "-1"), "--seed: got -1; allowed: 0 or more"),
        (("--op", "pack", "--jobs", "-1"), "--jobs: got -1; allowed: 0"),
        (
            ("--op", "pack", "--json", "/no such folder/x"),
            "--json: got /no such folder/x; allowed: ",
        ),
        (("--op", "pack", "--case", "no such case"), "selection: got no case; allowed: "),
        (("--op", "pack", "--shard", "2/2"), "--shard: got '2/2'; allowed: I/N with 0 <= I < N"),
        (("--op", "pack", "--shard", "x/2"), "--shard: got 'x/2'; allowed: I/N"),
        (("--op", "pack", "--shard", "1"), "--shard: got '1'; allowed: I/N"),
        (("--op", "tree_sum", "--level", "exhaustive"), "variants at level exhaustive"),
    ],
)
def test_bad_selections(options: tuple[str, ...], text: str, verify: Any) -> None:
    code, _, err = verify(*options)
    assert code == 2
    assert err.startswith("dsv4num: ") and text in err and err.count("\n") == 1


def test_an_empty_selection_proves_nothing(verify: Any, tmp_path: Path) -> None:
    """It may not replace a record of proof, nor leave a report that says 0 mismatches."""
    folder, file = tmp_path / "proof", tmp_path / "run.json"
    options = ("--op", "pack", "--layout", "v4", "--record", str(folder), "--json", str(file))
    assert verify(*options)[0] == 2
    assert not file.exists() and not list(tmp_path.glob("proof/*.json"))


def test_a_device_that_is_not_there(
    verify: Any, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda":
        pytest.skip("there is a GPU")
    assert main(["verify", "--device", "cuda", "--op", "pack"]) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err
    code, _, err = verify("--op", "pack", "--path", "native")
    assert code == 2 and "selection" in err


def test_every_operation_is_verified() -> None:
    assert set(OPERATIONS) == set(dsv4num.gpu.__all__) - {"Launch"}
    for operation in OPERATIONS.values():
        for variant in operation.variants:
            names = [case.name for case in operation.cases(variant, "quick", 0)]
            assert names and len(names) == len(set(names))


# --- the record of proof --------------------------------------------------------------


def test_record_and_targets(
    verify: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "proof"
    monkeypatch.setattr(report, "proof_folder", lambda: folder)

    def targets() -> str:
        assert main(["targets"]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "no record of proof" in targets()
    assert stale_records() == []

    code, _, err = verify("--op", "pack", "--record", str(folder))  # a part is no proof
    assert code == 2 and "--record" in err and not folder.exists()
    only = {"pack": OPERATIONS["pack"]}
    monkeypatch.setattr(operations, "OPERATIONS", only)
    monkeypatch.setattr(runner, "OPERATIONS", only)
    code, out, _ = verify("--record", str(folder))
    (path,) = folder.glob("*.json")
    assert code == 0 and "recorded in" in out
    record = json.loads(path.read_text())
    assert path.stem == record["environment"]["arch"]
    files = [*PACKAGE.glob("formats/*.py"), *PACKAGE.glob("gpu/*.py")]
    assert record["sources"] == {
        f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    assert record["ran"][-1] == {
        **{"operation": "pack", "variant": "e2m1", "path": "portable"},
        **{"cases": 1, "runs": 1, "bytes": 256, "mismatches": 0},
    }
    text = targets()
    assert record["environment"]["arch"] in text and "current" in text and "STALE" not in text
    assert f"{record['bytes']:,} bytes compared" in text and record["date"][:10] in text
    assert stale_records() == []

    (folder / "torn.json").write_text('{"environment": ')
    text = targets()  # one bad file hides no other
    assert "torn.json is no record of proof" in text and "current" in text
    (folder / "torn.json").unlink()

    then = record["sources"]
    changed = {**then, "gpu/scalar.py": "0" * 64}
    gone = {**then, "gpu/gone.py": "0" * 64}
    came = {name: hash_ for name, hash_ in then.items() if name != "formats/layout.py"}
    for sources, name in (
        (changed, "gpu/scalar.py"),
        (gone, "gpu/gone.py"),
        (came, "formats/layout.py"),
    ):
        path.write_text(json.dumps({**record, "sources": sources}))
        text = targets()
        assert "STALE" in text and f"changed since: {name}" in text and "current" not in text
        (line,) = stale_records()
        assert path.name in line and "STALE" in line and line.endswith(name)

    path.write_text("{")
    (line,) = stale_records()
    assert path.name in line and "cannot be read" in line


# --- how far each architecture is proven ----------------------------------------------


def executed(**environment: str) -> dict[str, Any]:
    """A record as `verify --record` writes it."""
    versions = {"triton": "3.6.0", "torch": "2.11.0", "driver": "580.1", "gpu": "NVIDIA H200"}
    rows = [{"operation": "pack", "variant": "e2m1", "path": "native"}]
    return {
        "date": "2026-12-01T10:00:00Z",
        "environment": {**versions, **environment},
        **{"level": "full", "seed": 0, "seconds": 300, "bytes": 1234567, "mismatches": 0},
        **{"sources": report.source_hashes(), "ran": rows},
    }


def test_targets_say_for_each_architecture_how_far_it_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "proof_folder", lambda: tmp_path)

    def parts() -> dict[str, str]:
        """What is printed, by architecture."""
        assert main(["targets"]) == 0
        blocks: dict[str, list[str]] = {}
        for line in capsys.readouterr().out.splitlines():
            name = line if not line.startswith(" ") else list(blocks)[-1]
            blocks.setdefault(name, []).append(line)
        return {name: " ".join(" ".join(lines[1:]).split()) for name, lines in blocks.items()}

    def write(name: str, record: dict[str, Any]) -> None:
        (tmp_path / name).write_text(json.dumps(record))

    full = executed(arch="sm_90")
    write("sm_90.json", full)
    write(
        "sm_90.exhaustive.json", {**full, "level": "exhaustive", "date": "2026-12-02", "bytes": 77}
    )
    write("sm_80.ptx.json", executed(arch="sm_90", ptx="sm_80"))
    audit = {
        "date": "2026-12-03T00:00:00Z",
        "environment": {"triton": "3.9.0", "torch": "2.13.0"},
        **{"level": "quick", "sources": report.source_hashes()},
        "targets": {
            name: {
                "portable": 1500,
                "native": 40 * (name == "sm_90"),
                "findings": 2 * (name == "gfx942"),
            }
            for name in report.ARCHITECTURES
            if name != "gfx950"
        },
    }
    write("audit.json", audit)
    found = parts()
    assert list(found)[: len(report.ARCHITECTURES)] == list(report.ARCHITECTURES)
    assert len(report.ARCHITECTURES) == 11
    on_hardware = (
        "executed on hardware: NVIDIA H200, 2026-12-01, triton 3.6.0, torch 2.11.0, driver 580.1"
    )
    assert on_hardware in found["sm_90"]
    assert "level full: 1,234,567 bytes compared on the native path, 0 mismatches" in found["sm_90"]
    assert "2026-12-02" in found["sm_90"] and "level exhaustive: 77 bytes" in found["sm_90"]
    audited = "compiled and audited: 2026-12-03, triton 3.9.0, torch 2.13.0 level quick: "
    assert found["sm_90"].index("executed") < found["sm_90"].index(audited)
    assert "executed as PTX: NVIDIA H200" in found["sm_80"] and "hardware" not in found["sm_80"]
    assert found["gfx1201"] == audited + "1,500 portable specializations, 0 findings; current"
    assert "40 native and 1,500 portable specializations" in found["sm_90"]
    assert "2 findings" in found["gfx942"]
    assert found["gfx950"].startswith("no record")

    (tmp_path / "audit.json").unlink()
    write(
        "sm_80.ptx.json", {**executed(arch="sm_90", ptx="sm_80"), "sources": {"gpu/gone.py": "0"}}
    )
    found = parts()
    assert found["gfx942"].startswith("no record") and "STALE" in found["sm_80"]
    assert "gpu/gone.py" in found["sm_80"] and "STALE" not in found["sm_90"]

    write("audit.json", {**audit, "targets": {"sm_80": 5}})
    write("reference.json", {"sources": []})
    text = " ".join(parts())  # one bad file hides no other
    assert "audit.json is no record of proof" in text
    assert "reference.json is no record of proof" in text


def test_targets_of_this_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no record of proof" not in out and "executed on hardware: NVIDIA H200" in out
    assert "reference held to other oracles" in out and "0 mismatches" in out


def test_a_record_about_the_reference_is_stale_by_its_own_files(tmp_path: Path) -> None:
    then = {
        name: report.source_hashes()[name] for name in ("formats/group.py", "formats/scalar.py")
    }
    assert report.stale_sources({"sources": then}) == []
    changed = {**then, "formats/group.py": "0", "reference/gone.py": "0"}
    assert report.stale_sources({"sources": changed}) == ["formats/group.py", "reference/gone.py"]


@pytest.mark.parametrize(
    ("environment", "level", "name"),
    [
        ({"arch": "sm_90"}, "full", "sm_90.json"),
        ({"arch": "gfx942"}, "quick", "gfx942.json"),
        ({"arch": "sm_90"}, "exhaustive", "sm_90.exhaustive.json"),
        ({"arch": "sm_90", "ptx": "sm_80"}, "full", "sm_80.ptx.json"),
    ],
)
def test_names_of_records(environment: dict[str, str], level: str, name: str) -> None:
    assert report.record_name(environment, level) == name


# --- shards ---------------------------------------------------------------------------

SOME = ("--op", "decode", "--op", "pack", "--op", "unpack", "--path", "portable")


@pytest.fixture
def merge(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `report merge` in this process: exit code, output, errors."""

    def run(*options: str | Path) -> tuple[int, str, str]:
        code = main(["report", "merge", *map(str, options)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def three(device: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The reports of three shards."""
    folder = tmp_path_factory.mktemp("shards")
    files = [folder / f"{index}.json" for index in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")
        for index, file in enumerate(files):
            options = (
                "--device",
                device,
                "--jobs",
                "1",
                "--shard",
                f"{index}/3",
                "--json",
                str(file),
            )
            assert main(["verify", *SOME, *options]) == 0
    return files


def without_time(file: Path) -> dict[str, Any]:
    """A report without what differs from run to run."""
    found: dict[str, Any] = json.loads(file.read_text())
    for part in (found, *found["rows"]):
        del part["seconds"]
    for row in found["rows"]:
        row["names"].sort()
    del found["date"]
    return found


def test_shards_together_are_the_whole(
    verify: Any, merge: Any, three: list[Path], tmp_path: Path
) -> None:
    whole, joined = tmp_path / "whole.json", tmp_path / "joined.json"
    code, expected, _ = verify(*SOME, "--json", str(whole))
    assert code == 0
    code, out, err = merge(three[2], three[0], three[1], "--json", joined)
    assert (code, err) == (0, "")
    assert without_time(joined) == without_time(whole)

    def table(text: str) -> list[list[str]]:
        lines = [line.split() for line in text.splitlines()]
        return [words[:7] for words in lines if len(words) == 8 and words[2] == "portable"]

    assert table(out) == table(expected) != []
    cases = [json.loads(file.read_text()) for file in three]
    sizes = [sum(row["cases"] for row in found["rows"]) for found in cases]
    assert sum(sizes) == sum(row["cases"] for row in without_time(whole)["rows"])
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 3


def test_an_empty_shard_is_no_error(verify: Any, merge: Any, device: str, tmp_path: Path) -> None:
    """More shards than cases: a job of an array may have nothing to do."""
    files = [tmp_path / f"{index}.json" for index in range(50)]
    for index, file in enumerate(files):
        options = ("--op", "pack", "--shard", f"{index}/50", "--json", str(file))
        assert verify(*options)[0] == 0
    code, out, _ = merge(*files)
    each = len(runner.paths_of(device))
    assert code == 0 and f"{each} runs, {256 * each} bytes" in out


def edited(file: Path, change: Any) -> Path:
    """A report with a change, beside it."""
    found = json.loads(file.read_text())
    change(found)
    copy = file.with_name("edited.json")
    copy.write_text(json.dumps(found))
    return copy


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.update(level="full"), "got level full; allowed: quick, as in "),
        (lambda r: r.update(seed=3), "got seed 3; allowed: 0, as in "),
        (lambda r: r["environment"].update(triton="2.0"), "got environment.triton 2.0; allowed: "),
        (lambda r: r["environment"].update(gpu="A"), "got environment.gpu A; allowed: "),
        (lambda r: r["sources"].update({"gpu/a.py": "0"}), "got sources.gpu/a.py 0; allowed: None"),
        (lambda r: r["selection"].update(cases=["a"]), "got selection.cases ['a']; allowed: []"),
        (lambda r: r.update(shard="0/3"), "got shard 0/3 again, after "),
        (lambda r: r.update(shard="2/4"), "got shard 2/4; allowed: one of 3, as "),
        (lambda r: r.update(shard="3/3"), "got '3/3'; allowed: I/N"),
        (lambda r: r.update(shard=2), "'shard' of the whole of another kind"),
        (lambda r: r.pop("sources"), "the whole without 'sources'"),
        (lambda r: r.update(more=1), "the whole with 'more'"),
        (lambda r: r.update(mismatches=1), "mismatches that are not the sum of the rows"),
        (lambda r: r.update(bytes=-1), "'bytes' of the whole of another kind"),
        (lambda r: r.update(seconds=float("inf")), "'seconds' of the whole of another kind"),
        (lambda r: r.update(rows={}), "'rows' of the whole of another kind"),
        (lambda r: r["rows"].append(5), "] not an object"),
        (lambda r: r["rows"][0].update(bytes=True), "'bytes' of rows[0] of another kind"),
        (lambda r: r["rows"][0].update(failures=["a"]), "'failures' of rows[0] of another kind"),
        (lambda r: r["rows"][0]["names"].append("a"), "rows[0] with other names than cases"),
        (lambda r: r["selection"].pop("paths"), "'selection' of the whole of another kind"),
    ],
)
def test_reports_that_do_not_belong_together(
    change: Any, text: str, three: list[Path], merge: Any, tmp_path: Path
) -> None:
    joined = tmp_path / "joined.json"
    code, _, err = merge(*three[:2], edited(three[2], change), "--json", joined)
    assert code == 2 and not joined.exists()
    assert err.startswith("dsv4num: ") and text in err and err.count("\n") == 1, err


def test_shards_that_are_missing_or_overlap(three: list[Path], merge: Any) -> None:
    with pytest.raises(ArgumentError, match="reports: got none"):
        merge_of({})
    code, _, err = merge(three[0], three[2])
    assert code == 2 and "got no shard 1 of 3; allowed: all shards of one run" in err
    code, _, err = merge(three[0], three[0], three[2])
    assert code == 2 and "twice; allowed: each report once" in err

    def same_cases(found: dict[str, Any]) -> None:
        found["shard"] = "2/3"

    code, _, err = merge(three[0], three[1], edited(three[1], same_cases))
    assert code == 2 and "twice; allowed: shards that do not overlap" in err


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "5", "null", '{"rows": []}', "[" * 100_000, "\0", "NaN", b"\xff\xfe"],
)
def test_files_that_are_no_reports(content: str | bytes, merge: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = merge(file)
    assert code == 2 and "a report of `verify --json`" in err and err.count("\n") == 1
    assert merge(tmp_path / "absent.json")[0] == 2


def test_a_mismatch_in_one_shard(three: list[Path], merge: Any, tmp_path: Path) -> None:
    def worse(found: dict[str, Any]) -> None:
        row = next(row for row in found["rows"] if row["cases"])
        row["mismatches"] = found["mismatches"] = 3
        row["failures"] = [["decode e2m1, case 'x'", "codes: 3 bytes differ"]]

    code, out, _ = merge(edited(three[0], worse), *three[1:], "--json", tmp_path / "joined.json")
    assert code == 1 and "codes: 3 bytes differ" in out and "3 mismatches" in out.splitlines()[-1]
    assert json.loads((tmp_path / "joined.json").read_text())["mismatches"] == 3


def test_only_the_whole_can_be_recorded(
    verify: Any, merge: Any, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "proof"
    code, _, err = merge(*three, "--record", folder)  # all shards, but of a selection
    assert code == 2 and "--record: got a part of the cases" in err and not folder.exists()
    code, _, err = verify("--shard", "0/2", "--record", str(folder))
    assert code == 2 and "--record: got a part of the cases" in err

    only = {"pack": OPERATIONS["pack"], "unpack": OPERATIONS["unpack"]}
    monkeypatch.setattr(operations, "OPERATIONS", only)
    monkeypatch.setattr(runner, "OPERATIONS", only)
    files = [tmp_path / f"half{index}.json" for index in range(2)]
    for index, file in enumerate(files):
        assert verify("--shard", f"{index}/2", "--json", str(file))[0] == 0
    code, out, _ = merge(*files, "--record", folder)
    assert code == 0 and "recorded in" in out
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text())
    assert {row["operation"]: row["cases"] for row in record["ran"]} == {"pack": 1, "unpack": 1}
    assert record["sources"] == report.source_hashes() and record["mismatches"] == 0


def test_reports_are_joined_and_printed_where_there_is_no_torch(
    three: list[Path], tmp_path: Path
) -> None:
    joined = tmp_path / "joined.json"
    code = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from dsv4num.cli import main
sys.exit(main(["report", "merge", *sys.argv[1:]]) or main(["targets"]))
"""
    command = (sys.executable, "-c", code, *map(str, three), "--json", str(joined))
    done = run_in(PACKAGE.parent, *command)
    assert done.returncode == 0, done.stderr
    assert json.loads(joined.read_text())["mismatches"] == 0 and "sm_90" in done.stdout


# --- several devices ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "count", "visible", "chosen"),
    [
        ("all", 2, None, ["0", "1"]),
        ("1,0", 2, None, ["1", "0"]),
        ("all", 2, "5,7", ["5", "7"]),
        ("1", 2, "GPU-a,GPU-b", ["GPU-b"]),
    ],
)
def test_devices(
    asked: str, count: int, visible: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.choose_devices(asked, count) == chosen


@pytest.mark.parametrize("asked", ["2", "0,0", "", "one", "0,", "-1", "all,0"])
def test_devices_that_are_not_there(asked: str) -> None:
    with pytest.raises(ArgumentError, match="--devices"):
        devices.choose_devices(asked, 2)
    with pytest.raises(UnsupportedError, match="torch sees no GPU"):
        devices.choose_devices(asked, 0)


def test_devices_need_a_gpu(verify: Any, device: str) -> None:
    if device == "cpu":
        code, _, err = verify("--op", "pack", "--devices", "all")
        assert code == 2 and "--devices: there is no GPU in use" in err


def test_what_the_command_asks_of_devices(
    verify: Any, merge: Any, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options go to every process, the shard is split, and the joined report is printed and judged."""
    file, asked = tmp_path / "run.json", []
    assert merge(*three, "--json", file)[0] == 0

    def answer(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments[:3])
        return {**json.loads(file.read_text()), "shard": "1/2", "mismatches": 5}

    monkeypatch.setattr(command, "_choose_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "run_on_devices", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    chosen = ("--op", "pack", "--layout", "e2m1", "--case", "every pair", "--path", "portable")
    code, out, _ = verify(*chosen, "--seed", "3", "--shard", "1/2", "--devices", "all")
    assert code == 1 and "shard 1/2: " in out and "5 mismatches" in out.splitlines()[-1]
    options = ["--device", "cuda", "--level", "quick", "--jobs", "1", "--seed", "3", "--op", "pack"]
    options += ["--variant", "e2m1", "--case", "every pair", "--path", "portable"]
    assert asked == [(["4", "6"], options, (1, 2))]


def test_a_process_for_each_device(tmp_path: Path) -> None:
    """The devices of one shard out of two do together what that shard does alone.

    On the CPU, in processes of their own: this one may have chosen a GPU.
    """
    options = ("--op", "unpack", "--op", "decode", "--path", "portable")
    given = ("--device", "cpu", "--jobs", "1", *options)
    ended: list[str] = []
    joined, alone = tmp_path / "joined.json", tmp_path / "alone.json"
    found = devices.run_on_devices(["0", "1"], given, (1, 2), ended.append)
    joined.write_text(json.dumps(found))
    assert sorted(ended) == ["device 0", "device 1"]
    command = (sys.executable, "-m", "dsv4num", "verify", *given, "--shard", "1/2")
    assert run_in(PACKAGE.parent, *command, "--json", str(alone)).returncode == 0
    assert without_time(joined) == without_time(alone)
    assert found["shard"] == "1/2" and found["bytes"] > 0


def test_a_device_that_fails(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"device 0: exit code 2: dsv4num: --op: got 'no'"):
        devices.run_on_devices(["0"], ("--device", "cpu", "--op", "no"), (0, 1))


# --- planted faults -------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One textual change of the kernels, and what `verify` must say about it.

    Attributes:
        name: of the test.
        old, new: the text that is replaced; it must be there once.
        run: what is verified.
        likely: the reason that must be given.
        place: a pattern that some line about a difference must match.
        guard: bytes around every array, where the fault writes farther than usual.
    """

    name: str
    old: str
    new: str
    run: tuple[str, ...]
    likely: str
    place: str = ""
    guard: int = 0


def insert_of(layout: str, case: str) -> tuple[str, ...]:
    """One case of insert."""
    return ("--op", INSERT, "--layout", layout, "--case", case)


CODE = r"expected 0x[0-9A-F]{2} = -?[\d.e+-]+, got 0x[0-9A-F]{2} = -?[\d.e+-]+$"

FAULTS = [
    Fault(
        "ties",
        "((_ONE << (SHIFT - 1)) - 1) + odd)",
        "((_ONE << (SHIFT - 1)) - 1))",
        insert_of("v4", "wide"),
        "differing nope bytes is explained by: ties go toward zero instead of to even",
        rf"page \d+ slot \d+ row \d+ \w+\[\d+\] \(dim \d+\): {CODE}",
    ),
    Fault(
        "nibbles",
        "((codes >> 12) & 0x0F) | ((codes >> 24) & 0xF0)",
        "((codes >> 8) & 0xF0) | ((codes >> 28) & 0x0F)",
        insert_of("v41_nvfp4", "wide"),
        "is explained by: nibbles swapped",
        r"page \d+ slot \d+ row \d+ \w+\[\d+\] \(dim \d+\): "
        r"expected 0x(.)(.) = \(-?[\d.]+, -?[\d.]+\), got 0x\2\1 = \(-?[\d.]+, -?[\d.]+\)$",
    ),
    Fault(
        "padding",
        "tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=kept)",
        "tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=coded)",
        insert_of("v4", "zeros"),
        "never written",
        r"page \d+ slot \d+ row \d+ pad\[0\]: expected 0x00, got 0x(A5|5A)$",
    ),
    Fault(
        "stored scale",
        "tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=kept)",
        "tl.store(cache_ptr + at + group, (scale_codes + 1).to(tl.uint8), mask=kept)",
        insert_of("v41_mxfp8", "wide"),
        "or: the scale is chosen differently, always by +1, and the elements do not follow it",
        rf"page \d+ slot \d+ row \d+ \w+\[\d+\]: {CODE}",
    ),
    Fault(
        "chosen scale",
        "RULE.floor) + carry) >> 23) - exponent",
        "RULE.floor) + carry) >> 23) - exponent + 1",
        insert_of("v41_mxfp8", "wide"),
        "is explained by: qmax 224 instead of 448",  # which makes every scale one step larger
        r"page \d+ slot \d+ row \d+ \w+\[\d+\]",
    ),
    Fault(
        "one slot too many",
        "    kept = (slot >= 0) & (slot < num_slots)\n"
        "    page, row = page_and_row(slot, page_stride, RECORD)\n"
        "    # Also",
        "    kept = (slot >= 0) & (slot <= num_slots)\n"
        "    page, row = page_and_row(slot, page_stride, RECORD)\n"
        "    # Also",
        insert_of("v41_mxfp8_inline", "slots out of range"),
        "a write outside the rows that the operation owns",
        r"byte 7392 outside the cache: expected 0x(A5|5A), got 0x",  # 2 pages of 7 rows of 528
        guard=1 << 16,
    ),
    Fault(
        "page stride",
        "slot // RECORD.block_size * page_stride",
        "slot // RECORD.block_size * (page_stride - 64)",  # 64 bytes of padding
        insert_of("v4", "any bits"),
        "",
        r"page [12] (slot|byte \d+, owned by no row)",
    ),
    Fault(
        "raw offset",
        "raw = tl.load(cache_ptr + at[:, None] + byte",
        "raw = tl.load(cache_ptr + at[:, None] + 2 + byte",
        ("--op", GATHER, "--layout", "v4", "--case", "tails at an offset"),
        "",
        r"request \d row \d+ dim (44[89]|4[5-9]\d|5\d\d): expected 0x[0-9A-F]{4} = .*, got 0x",
    ),
    Fault(
        "input",
        "    tokens = slot_mapping.shape[0]\n    if tokens == 0 or cache.num_blocks",
        "    slot_mapping.clamp_(min=-1)\n"
        "    tokens = slot_mapping.shape[0]\n    if tokens == 0 or cache.num_blocks",
        insert_of("v41_nvfp4", "slots out of range"),
        "",
        r"^slot_mapping: the operation changed its input$",
    ),
]

#: Runs `verify`, then what its first `reproduce:` line says, in one process to be quick.
TWICE = """
import contextlib, io, shlex, sys
from dsv4num.cli import main

written = io.StringIO()
with contextlib.redirect_stdout(written):
    first = main(["verify", *sys.argv[1:]])
print(written.getvalue(), end="")
lines = [line for line in written.getvalue().splitlines() if line.startswith("  reproduce: ")]
command = shlex.split(lines[0].removeprefix("  reproduce: ")) if lines else []
print("== again", flush=True)
second = main(command[3:]) if command[:3] == ["python", "-m", "dsv4num"] else None
print("== codes", first, second)
"""


def broken_copy(fault: Fault, folder: Path) -> None:
    """The package in `folder`, with the fault."""
    copy = folder / "dsv4num"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    holders = [file for file in copy.glob("gpu/*.py") if fault.old in file.read_text()]
    assert len(holders) == 1, f"'{fault.old}' is in {[file.name for file in holders]}"
    source = holders[0].read_text()
    assert source.count(fault.old) == 1
    holders[0].write_text(source.replace(fault.old, fault.new))
    if fault.guard:
        pattern, count = re.compile(r"^_GUARD = \d+", re.MULTILINE), 0
        for file in copy.glob("verify/**/*.py"):
            text, found = pattern.subn(f"_GUARD = {fault.guard}", file.read_text())
            file.write_text(text)
            count += found
        assert count == 1


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees only the package in `folder`."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def failing_runs(out: str) -> list[list[str]]:
    """The text of every failing run: from its heading to its `reproduce:` line."""
    runs: list[list[str]] = []
    inside = False
    for line in out.splitlines():
        if re.match(rf"({'|'.join(OPERATIONS)}) \S+, case '", line):
            runs.append([])
            inside = True
        if inside:
            runs[-1].append(line)
            inside = not line.startswith("  reproduce: ")
    assert not inside, "the last run has no reproduce line"
    return runs


def judge(fault: Fault, out: str) -> list[list[str]]:
    """Checks the output of a run that must fail because of the fault."""
    runs = failing_runs(out)
    assert runs, out
    options = dict(zip(fault.run[::2], fault.run[1::2], strict=True))
    heading = (
        f"{options['--op']} {options['--layout']}, case '{options['--case']}', portable path, "
    )
    for lines in runs:
        assert len(lines) <= MAX_LINES, "\n".join(lines)
        assert lines[0].startswith(heading), lines[0]
        assert re.search(r"rows (default|\d+), warps (default|\d+)$", lines[0])
        assert any(re.search(fault.place, line) for line in lines[1:-1]), "\n".join(lines)
        assert any(fault.likely in line for line in lines[1:-1]), "\n".join(lines)
        assert lines[-1].startswith("  reproduce: python -m dsv4num verify --device cpu "), lines[
            -1
        ]
        words = shlex.split(lines[-1])
        for option in ("--op", "--case", "--level", "--path", "--seed"):
            assert option in words
    assert re.search(r"runs, [\d,]+ bytes compared, [1-9][\d,]* mismatches", out)
    return runs


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(fault: Fault, tmp_path: Path) -> None:
    broken_copy(fault, tmp_path)
    command = ("--device", "cpu", "--jobs", "1", *fault.run)
    done = run_in(tmp_path, sys.executable, "-c", TWICE, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "== codes 1 1", done.stdout + done.stderr
    first, again = done.stdout.split("== again")
    runs = judge(fault, first)
    assert runs[0] == judge(fault, again)[0]


def test_the_reproduce_line_as_a_shell_command(tmp_path: Path) -> None:
    """As a person would: run the module, paste the line."""
    fault = FAULTS[0]
    broken_copy(fault, tmp_path)
    command = ("verify", "--device", "cpu", "--jobs", "1", *fault.run)
    done = run_in(tmp_path, sys.executable, "-m", "dsv4num", *command)
    assert done.returncode == 1, done.stdout + done.stderr
    runs = judge(fault, done.stdout)
    line = runs[0][-1].removeprefix("  reproduce: python ")
    again = run_in(tmp_path, "sh", "-c", f"{shlex.quote(sys.executable)} {line}")
    assert again.returncode == 1, again.stdout + again.stderr
    assert judge(fault, again.stdout)[0] == runs[0]


# --- what a message may not say -------------------------------------------------------


def spoil_gather(out: Any, *arguments: Any, **keywords: Any) -> None:
    """Loses every sign."""
    GOOD[GATHER](out, *arguments, **keywords)
    lens, offset = arguments[2], arguments[5]
    for request, length in enumerate(lens.tolist()):
        out[request, offset : offset + length].abs_()


def spoil_decode(codes: Any, fmt: str, **keywords: Any) -> Any:
    """Doubles every value."""
    return GOOD["decode"](codes, fmt, **keywords) * 2


def spoil_insert(k: Any, k_cache: Any, slots: Any, block_size: int, **keywords: Any) -> None:
    """Doubles every fp32 scale, or shifts every code where scales are bytes."""
    GOOD[INSERT](k, k_cache, slots, block_size, **keywords)
    for slot in slots.tolist():
        if slot < 0:
            continue
        page = k_cache.as_strided((len(k_cache), k_cache.stride(0)), (k_cache.stride(0), 1))[
            slot // block_size
        ]
        if keywords["layout"] == "indexer_fp8":
            at = block_size * 128 + slot % block_size * 4
            page[at : at + 4] = (page[at : at + 4].view(torch.float32) * 2).view(torch.uint8)
        else:
            at = slot % block_size * 512
            page[at : at + 512] += 3


GOOD = {name: getattr(dsv4num.gpu, name) for name in (INSERT, GATHER, "decode")}


def spoiled(verify: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """The text of the first failing run, with a kernel that does not do what it should."""
    for name, bad in ((INSERT, spoil_insert), (GATHER, spoil_gather), ("decode", spoil_decode)):
        monkeypatch.setattr(dsv4num.gpu, name, bad)
    code, out, _ = verify("--path", "portable", *options)
    assert code == 1
    return failing_runs(out)[0]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--op", GATHER, "--layout", "v41_mxfp8", "--case", "tails at an offset"), "rounding"),
        (("--op", "decode", "--variant", "e4m3fn"), "rounding"),
        (insert_of("indexer_fp8", "wide"), "always by +0"),
    ],
)
def test_a_reason_looks_at_whole_codes(
    options: tuple[str, ...], wrong: str, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost sign and a doubled value change no low byte; they are not rounding."""
    text = "\n".join(spoiled(verify, monkeypatch, *options))
    assert wrong not in text, text


def test_a_report_says_how_many_bytes_differ(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = spoiled(verify, monkeypatch, *insert_of("v41_mxfp8", "wide"))
    assert re.search(r": [\d,]{5,} bytes differ", lines[1]), lines[1]
    assert "  ... and more" in lines and len(lines) <= 20


@pytest.mark.parametrize("error", [NotImplementedError, UnsupportedError, RuntimeError])
def test_a_kernel_that_raises(
    error: type[Exception], verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernels offer everything: whatever they raise is a failure, and hides no other run."""

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise error("broken")

    monkeypatch.setattr(dsv4num.gpu, "pack", fail)
    code, out, _ = verify("--op", "pack", "--op", "unpack", "--path", "portable")
    assert code == 1 and "1 mismatches" in out.splitlines()[-1]
    where = "pack e2m1, case 'every pair', portable path, rows default, warps default"
    assert f"{where}\ndid not run" in out and f"{error.__name__}: broken" in out


def test_a_case_that_breaks_before_a_kernel_runs(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("no answer")

    monkeypatch.setattr(runner, "expect", broken)
    code, out, _ = verify("--op", "pack", "--path", "portable")
    assert code == 1 and "pack e2m1, case 'every pair' did not run" in out
    assert "ValueError: no answer" in out and out.splitlines()[-1].startswith("0 runs, ")


def test_a_launch_that_does_not_compile(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other launches of the sweep run all the same."""
    original, refused = dsv4num.gpu.rope_quant_insert, []

    def rope_quant_insert(*arguments: Any, launch: Any, **keywords: Any) -> None:
        if launch.num_warps == 8:
            refused.append(launch)
            raise RuntimeError("PassManager::run failed")
        original(*arguments, launch=launch, **keywords)

    options = ("--op", "rope_quant_insert", "--variant", "v4", "--case", "views")
    whole = verify(*options, "--path", "portable")[1].splitlines()[-1]
    monkeypatch.setattr(dsv4num.gpu, "rope_quant_insert", rope_quant_insert)
    code, out, _ = verify(*options, "--path", "portable")
    runs = int(whole.split()[0])
    assert code == 1 and "warps 8\ndid not run" in out and 0 < len(refused) < runs
    assert out.splitlines()[-1].startswith(f"{runs - len(refused)} runs, ")
    assert f" {len(refused)} mismatches" in out.splitlines()[-1]


def test_a_process_of_ours_that_dies_ends_the_run() -> None:
    options = runner.Options("cpu", operations=("pack",))
    future: Future[Any] = Future()
    future.set_exception(BrokenProcessPool("dead"))
    with pytest.raises(BrokenProcessPool, match="dead"):
        runner._rows_of(future, options, runner.Task("pack", "e2m1"))


def test_ptx_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--ptx", "sm_80", "--op", "exp32"]) == 2
    assert "--ptx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "hip", "names"),
    [
        ((9, 0), None, ["sm_80", "sm_86", "sm_89", "sm_90"]),
        ((8, 6), None, ["sm_80", "sm_86"]),
        ((12, 0), None, ["sm_80", "sm_86", "sm_89", "sm_120"]),
        ((9, 0), "6.4", None),
        (None, None, None),
    ],
)
def test_targets_whose_ptx_a_gpu_runs(
    capability: Any, hip: Any, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older ones; none that is newer, and none whose PTX is for one architecture alone."""
    from dsv4num.verify import ptx

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if names is None:
        with pytest.raises(UnsupportedError, match="PTX needs an NVIDIA GPU"):
            ptx.runnable()
    else:
        assert list(ptx.runnable()) == names


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--ptx", "sm_90"), "--ptx: got 'sm_90'; allowed: different ones of sm_80, sm_89"),
        (("--ptx", "sm_80,sm_80"), "--ptx: got 'sm_80,sm_80'; allowed: different ones"),
        (("--ptx", "sm_80,sm_89", "--json", "x"), "--json: got one file for 2 targets"),
    ],
)
def test_ptx_that_cannot_run(
    options: tuple[str, ...], text: str, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4num.verify import ptx

    monkeypatch.setattr(command, "_choose_device", lambda asked: "cuda")
    monkeypatch.setattr(ptx, "runnable", lambda: ("sm_80", "sm_89"))
    code, _, err = verify("--op", "pack", *options)
    assert code == 2 and text in err


def test_the_environment_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for its version; a machine that has no such command has an unknown one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    answer = subprocess.CompletedProcess([], 0, stdout="580.1\n580.1\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **keywords: answer)
    found = report.environment("cuda")
    assert (found["gpu"], found["driver"]) == ("NVIDIA H200", "580.1") and "cuda" in found

    def absent(*arguments: Any, **keywords: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    assert report.environment("cuda")["driver"] == "unknown"


def test_a_machine_without_triton(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    assert main(["verify", "--op", "pack"]) == 2
    assert "verify needs triton: pip install" in capsys.readouterr().err


def test_the_exhaustive_level_needs_a_gpu_or_a_part(verify: Any, device: str) -> None:
    if device == "cpu":
        code, _, err = verify("--level", "exhaustive")
        assert code == 2 and "without a GPU it takes days" in err
    case = ("--case", "every code", "--op", "decode", "--layout", "e2m1")
    code, out, _ = verify("--level", "exhaustive", *case)
    assert code == 0 and "0 mismatches" in out


def test_variants_that_no_chosen_operation_has(verify: Any) -> None:
    code, _, err = verify("--op", "pack", "--layout", "e2m1", "--variant", "v4")
    assert code == 2 and "--variant: got 'v4'; allowed: a variant of the chosen operations" in err


PTX = """
import triton, triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dsv4num.gpu.arithmetic import _exp32_kernel as kernel
from dsv4num.verify.ptx import _keep_ptx

knobs.runtime.add_stages_inspection_hook = _keep_ptx
signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(kernel, signature, {(3,): 1024})
made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
assert made.asm["cubin"].decode() == made.asm["ptx"]
print(".target sm_80" in made.asm["ptx"], ".entry _exp32_kernel" in made.asm["ptx"])
"""


def test_the_ptx_of_an_older_target_is_what_the_driver_gets(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PTX],
        capture_output=True,
        text=True,
        cwd=Path(dsv4num.__file__).parent.parent,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True\n"


def test_processes_share_a_run(verify: Any) -> None:
    code, out, err = verify("--op", "pack", "--op", "unpack", "--jobs", "2")
    assert (code, err) == (0, "")
    assert "unpack" in out and "0 mismatches" in out
