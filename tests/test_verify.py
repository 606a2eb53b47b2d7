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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import stale_records

import dsv4num
from dsv4num.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import dsv4num.gpu  # noqa: E402  (only where torch is)
from dsv4num.verify import operations, report, runner  # noqa: E402
from dsv4num.verify.operations import OPERATIONS  # noqa: E402

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
    assert f"dsv4num {dsv4num.__version__}" in words and f"torch {torch.__version__}" in words
    assert ", 0 mismatches, " in out.splitlines()[-1]
    assert ("Triton's interpreter" in out) == (device == "cpu")


def test_json(verify: Any, tmp_path: Path, device: str) -> None:
    file = tmp_path / "run.json"
    code, _, _ = verify("--op", "decode", "--variant", "e2m1", "--seed", "7", "--json", str(file))
    found = json.loads(file.read_text())
    assert code == 0
    assert set(found) == {
        *("environment", "date", "level", "seed", "seconds", "bytes", "mismatches", "rows")
    }
    assert (found["level"], found["seed"], found["mismatches"]) == ("quick", 7, 0)
    versions = {"dsv4num", "spec", "python", "numpy", "torch", "triton"}
    assert versions | {"arch"} <= set(found["environment"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    row = found["rows"][-1]
    assert set(row) == {
        *("operation", "variant", "path", "cases", "names", "runs", "bytes", "mismatches"),
        *("seconds", "failures"),
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
        (("--op", "pack", "--jobs", "-1"), "--jobs: got -1; allowed: 0"),
        (("--op", "pack", "--json", "/no such folder/x"), "--json: got /no such folder/x; allowed: "),
        (("--op", "pack", "--case", "no such case"), "selection: got no case; allowed: "),
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
        "rounding: every difference is one code",
        rf"page \d+ slot \d+ row \d+ \w+\[\d+\] \(dim \d+\): {CODE}",
    ),
    Fault(
        "nibbles",
        "(low | (high << 4)).to(tl.uint8)",
        "(high | (low << 4)).to(tl.uint8)",
        insert_of("v41_nvfp4", "wide"),
        "nibbles swapped",
        r"page \d+ slot \d+ row \d+ \w+\[\d+\] \(dim \d+\): "
        r"expected 0x(.)(.) = \(-?[\d.]+, -?[\d.]+\), got 0x\2\1 = \(-?[\d.]+, -?[\d.]+\)$",
    ),
    Fault(
        "padding",
        "tl.store(cache_ptr + at, tl.full(row.shape, RECORD.pad_value, tl.uint8), mask=kept)",
        "pass",
        insert_of("v4", "zeros"),
        "never written",
        r"page \d+ slot \d+ row \d+ pad\[0\]: expected 0x00, got 0x(A5|5A)$",
    ),
    Fault(
        "stored scale",
        "tl.store(cache_ptr + at + group, scale_codes.to(tl.uint8), mask=kept)",
        "tl.store(cache_ptr + at + group, (scale_codes + 1).to(tl.uint8), mask=kept)",
        insert_of("v41_mxfp8", "wide"),
        "the scale is chosen differently, always by +1, and the elements do not follow it",
        rf"page \d+ slot \d+ row \d+ \w+\[\d+\]: {CODE}",
    ),
    Fault(
        "chosen scale",
        "RULE.floor) + carry) >> 23) - exponent",
        "RULE.floor) + carry) >> 23) - exponent + 1",
        insert_of("v41_mxfp8", "wide"),
        "the scale is chosen differently, and the elements follow it",
        r"page \d+ slot \d+ row \d+ \w+\[\d+\]",
    ),
    Fault(
        "one slot too many",
        "    kept = (slot >= 0) & (slot < num_slots)\n"
        "    page, row = page_and_row(slot, page_stride, RECORD)\n"
        "    coded",
        "    kept = (slot >= 0) & (slot <= num_slots)\n"
        "    page, row = page_and_row(slot, page_stride, RECORD)\n"
        "    coded",
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
    heading = f"{options['--op']} {options['--layout']}, case '{options['--case']}', portable path, "
    for lines in runs:
        assert len(lines) <= MAX_LINES, "\n".join(lines)
        assert lines[0].startswith(heading), lines[0]
        assert re.search(r"rows (default|\d+), warps (default|\d+)$", lines[0])
        assert any(re.search(fault.place, line) for line in lines[1:-1]), "\n".join(lines)
        assert any(fault.likely in line for line in lines[1:-1]), "\n".join(lines)
        assert lines[-1].startswith("  reproduce: python -m dsv4num verify --device cpu "), lines[-1]
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


def test_a_report_says_how_many_bytes_differ(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = spoiled(verify, monkeypatch, *insert_of("v41_mxfp8", "wide"))
    assert re.search(r": [\d,]{5,} bytes differ", lines[1]), lines[1]
    assert "  ... and more" in lines and len(lines) <= 20
