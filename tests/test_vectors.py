"""The golden vectors: the same files every time, right by a second oracle, deadly to every mutant."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mutants
import numpy as np
import pytest
import slow_oracle
from mutants import MUTANTS, Mutant, planted

from dsv4num.cli import main
from dsv4num.errors import ArgumentError
from dsv4num.reference.compressor import _pool
from dsv4num.vectors import (
    FLAGS,
    OPERATIONS,
    POLICIES,
    FileError,
    Vector,
    command,
    compute,
    differences,
)
from dsv4num.vectors.command import files, index
from dsv4num.vectors.generator import Numbers, two_to
from dsv4num.vectors.store import (
    array_text,
    from_json,
    from_raw,
    from_safetensors,
    text_array,
    to_json,
    to_raw,
    to_safetensors,
)
from dsv4num.vectors.vector import bits, fp32, make
from dsv4num.verify.case import place

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "vectors"
CHECKER = ROOT / "examples" / "check_encode.cpp"


@cache
def built() -> tuple[command.File, ...]:
    """The set, made anew."""
    return tuple(files())


@cache
def vectors() -> dict[str, tuple[Vector, ...]]:
    """All vectors by operation, the edges first."""
    found: dict[str, tuple[Vector, ...]] = dict.fromkeys(OPERATIONS, ())
    for file in built():
        for vector in file.vectors if not file.path.startswith("raw/") else ():
            found[vector.operation] += (vector,)
    return found


def every() -> list[Vector]:
    return [vector for group in vectors().values() for vector in group]


def same(left: Vector, right: Vector) -> bool:
    """Whether two vectors are equal, every bit of their arrays too."""

    def plain(vector: Vector) -> Any:
        groups = [vector.inputs, vector.expected, vector.reference]
        arrays = [
            {
                n: (v.dtype, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v
                for n, v in group.items()
            }
            for group in groups
        ]
        return replace(vector, inputs={}, expected={}, reference={}), arrays

    return bool(plain(left) == plain(right))


# --- the files in git -----------------------------------------------------------------


def test_the_files_are_those_that_a_build_makes() -> None:
    """A new build has the hashes of the committed files, and no file is left over."""
    committed = json.loads((FOLDER / "index.json").read_bytes())
    now = json.loads(index(built()))
    assert {entry["path"]: entry["sha256"] for entry in now["files"]} == {
        entry["path"]: entry["sha256"] for entry in committed["files"]
    }
    assert now["files"] == committed["files"] and now["spec_version"] == committed["spec_version"]
    for file in built():
        assert (FOLDER / file.path).read_bytes() == file.data
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert there == {"index.json", "README.md", *(file.path for file in built())}
    assert sum((FOLDER / name).stat().st_size for name in there) < 4_000_000


def test_building_twice_gives_the_same_bytes() -> None:
    assert [(f.path, f.data) for f in files()] == [(f.path, f.data) for f in built()]


def test_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", "check", str(FOLDER)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"1\d{3} vectors checked, 0 differ; 0 files are damaged", last)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", "list", str(FOLDER)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(built()) - len(command.RAW)
    assert any(line.startswith("edge/scalar.json: 275 vectors, ") for line in lines)
    assert main(["vectors", "list", "--ids", str(FOLDER)]) == 0
    assert "encode.e4m3fn.80000000  [SignedZero]  -0\n" in capsys.readouterr().out


def test_larger_sets_and_raw_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`build --large --raw`, of two operations, passes its own check."""
    monkeypatch.setattr(command, "EDGES", {"rope": command.EDGES["rope"]})
    few = {name: command.BULKS[name] for name in ("indices", "gather")}
    monkeypatch.setattr(command, "BULKS", few)
    assert main(["vectors", "build", "--large", "--raw", "--out", str(tmp_path)]) == 0
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert {"large/indices.safetensors", "raw/large-gather.bin", "raw/edge-rope.json"} <= names
    assert main(["vectors", "check", str(tmp_path)]) == 0
    assert "0 differ; 0 files are damaged" in capsys.readouterr().out


def test_vectors_say_what_they_are() -> None:
    """Ids are unique and plain; flags, policies and clauses exist; each flag and operation is used."""
    ids = [vector.id for vector in every()]
    assert len(set(ids)) == len(ids) > 900
    assert all(re.fullmatch(r"[a-z0-9_.-]+", text) for text in ids)
    headings = re.findall(r"^#{2,3} (\d+(?:\.\d+)?) ", (ROOT / "SPEC.md").read_text("utf-8"), re.M)
    for vector in every():
        assert vector.comment and vector.flags and vector.policy and vector.expected
        assert set(vector.flags) <= FLAGS.keys() and set(vector.policy) <= POLICIES.keys()
        assert vector.clause in headings
        assert ("may_refuse" in vector.policy) == ("OutOfRange" in vector.flags)
    assert {flag for vector in every() for flag in vector.flags} == FLAGS.keys()
    assert {policy for vector in every() for policy in vector.policy} == POLICIES.keys()
    assert all(vectors().values())


def test_values_out_of_range_are_refused_by_the_reference() -> None:
    """A vector says `reference` just where the call itself is refused."""
    refused = 0
    for vector in every():
        if vector.reference:
            with pytest.raises(ArgumentError):
                compute(replace(vector, reference={}))
            refused += 1
    assert refused > 30


# --- judged by a second oracle --------------------------------------------------------


def test_codes_by_fractions() -> None:
    """The codes of every edge of the scalar formats, by exact fractions."""
    count = 0
    for vector in vectors()["encode"]:
        if not vector.id.startswith("bulk."):
            fmt = str(vector.parameters["fmt"])
            x = vector.inputs["x"].astype(np.float32)
            for pattern, code in zip(bits(x), vector.expected["codes"], strict=True):
                number = slow_oracle.fp32_value(int(pattern))
                half = fmt == "bf16"
                want = slow_oracle.round_bf16(number) if half else slow_oracle.encode(number, fmt)
                assert int(code) == want, vector.id
                count += 1
    assert count > 10_000


def test_groups_by_fractions() -> None:
    """The codes and scale codes of every edge of the group rules, by exact fractions."""
    for vector in vectors()["quantize"]:
        if not vector.id.startswith("bulk."):
            rule = str(vector.parameters["rule"])
            codes = vector.expected["codes"].reshape(-1, slow_oracle.RULES[rule][1])
            groups = vector.inputs["x"].reshape(codes.shape)
            for row, want, scale in zip(
                groups, codes, vector.expected["scale_codes"].ravel(), strict=True
            ):
                numbers = [slow_oracle.fp32_value(int(pattern)) for pattern in bits(row)]
                assert slow_oracle.quantize_group(numbers, rule) == (want.tolist(), int(scale)), (
                    vector.id
                )


# --- mutants --------------------------------------------------------------------------


def killed(mutant: Mutant) -> str:
    """The first vector that tells a mutant from the reference; empty if none does."""
    for operation in mutant.operations:
        for vector in vectors()[operation]:
            with planted(mutant):
                try:
                    found = compute(vector, place=place, skips=mutant.skips)
                except ArgumentError:
                    continue  # a call that a faulty implementation refuses shows nothing
            if next(differences(vector, found), None):
                return vector.id
    return ""


@pytest.mark.parametrize("name", list(MUTANTS))
def test_vectors_kill(name: str) -> None:
    assert killed(MUTANTS[name]), f"no vector tells: {MUTANTS[name].fault}"


def test_what_has_no_fault_is_not_killed() -> None:
    restated = Mutant(
        "restated", "none", ((_pool, mutants._pooled),), (mutants.COMPRESS, mutants.RING)
    )
    assert not killed(restated)


# --- forms ----------------------------------------------------------------------------


def test_every_form_gives_back_the_vectors() -> None:
    whole = every()
    edges = [vector for vector in whole if not vector.id.startswith("bulk.")]
    for given, found in (
        (edges, from_json(to_json(edges, "all"))),
        (whole, from_safetensors(to_safetensors(whole))),
        (whole, from_raw(*to_raw(whole, "all.bin"))),
    ):
        assert all(same(left, right) for left, right in zip(given, found, strict=True))


def test_the_library_reads_the_bulk_files() -> None:
    """Names, types, shapes and bytes by the library that defines the form."""
    library = pytest.importorskip("safetensors", reason="the library is not a dependency")
    file = next(file for file in built() if file.path == "bulk/gather.safetensors")
    found = dict(library.deserialize(file.data))
    stored = {"bfloat16": "U16", "float32": "U32", "uint8": "U8", "int32": "I32", "int64": "I64"}
    count = 0
    for vector in file.vectors:
        for group in ("inputs", "expected"):
            for name, array in getattr(vector, group).items():
                tensor = found[f"{vector.id}/{group}/{name}"]
                assert tensor["shape"] == list(array.shape)
                assert tensor["dtype"] == stored[array.dtype.name]
                assert bytes(tensor["data"]) == array.tobytes()
                count += 1
    assert count == len(found)


def test_arrays_as_text() -> None:
    """By hand, and back."""
    for array, text in (
        (fp32(1, -0.0), "fp32[2] 3f80000080000000"),
        (fp32(1, 1, 1, 1, 2), "fp32[5] 3f800000*4 40000000"),
        (np.int64([[-1, -1], [5, -(1 << 63)]]), "i64[2,2] -1*2 5 -9223372036854775808"),
        (np.array([True, False]), "bool[2] 1 0"),
        (np.zeros((0, 3), np.int32), "i32[0,3]"),
        (np.array(1, np.uint8), "u8[] 01"),
    ):
        assert array_text(array) == text
        back = text_array(text)
        assert back.shape == array.shape and back.dtype == array.dtype
        assert back.tobytes() == array.tobytes()
    assert text_array("u8[4] 0102*2").tolist() == [1, 2, 1, 2]


def test_the_generator() -> None:
    """SplitMix64 by Python's integers; and the start of its published sequence for seed 0."""
    mask = (1 << 64) - 1

    def mixed(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    seed = int.from_bytes(hashlib.sha256(b"name").digest()[:8], "little")
    numbers = Numbers("name")
    parts = [*numbers.raw(3), *numbers.raw(2)]
    assert parts == [mixed((seed + i * 0x9E3779B97F4A7C15) & mask) for i in range(1, 6)]
    assert Numbers("name").below(10, 5).tolist() == [((int(p) >> 32) * 10) >> 32 for p in parts]
    fields = [[int(p) >> 16 * k & 0xFFFF for k in range(4)] for p in parts]
    assert Numbers("name").bell(5).tolist() == [(sum(f) - 131070) / 32768 for f in fields]
    assert sorted(Numbers("name").shuffled(50).tolist()) == list(range(50))
    assert two_to(np.int64([-126, 0, 127])).tolist() == [2.0**-126, 1.0, 2.0**127]


def test_differences() -> None:
    x = fp32(0.3, 1)
    vector = make("a", "encode", "two", {"fmt": "e4m3fn"}, flags=("Any",), x=x)
    assert not list(differences(vector, {"codes": np.uint8([0x2A, 0x38])}))
    for found, line in (
        ({"codes": np.uint8([0x2A])}, "codes: expected uint8 [2], got uint8 [1]"),
        ({"codes": np.int32([0x2A, 0x38])}, "codes: expected uint8 [2], got int32 [2]"),
        ({}, "codes: not given"),
        ({"codes": np.uint8([1, 2])}, "codes[0]: expected 2a, got 01 (2 of 2 elements differ)"),
    ):
        assert list(differences(vector, found)) == [line]
    nan = make("b", "exp32", "NaN", flags=("NaN",), x=fp32(float("nan"), 0))
    assert nan.policy == ("any_nan",)
    other = np.uint32([0xFFC00001, 0x3F800000]).view(np.float32)
    assert not list(differences(nan, {"y": other}))
    exact = replace(nan, policy=("exact",))
    assert list(differences(exact, {"y": other})) == [
        "y[0]: expected 7fc00000, got ffc00001 (1 of 2 elements differ)"
    ]


# --- files that cannot be trusted -----------------------------------------------------


def small(path: str = "edge/a.json", **changed: Any) -> tuple[Vector, dict[str, bytes]]:
    """A vector and a folder that holds it in one form."""
    vector = make("a", "encode", "two", {"fmt": "e4m3fn"}, flags=("Any",), x=fp32(0.3, 1))
    vector = replace(vector, **changed)
    if path.startswith("edge/"):
        return vector, {path: to_json([vector], "a")}
    if path.startswith("raw/"):
        text, body = to_raw([vector], "a.bin")
        return vector, {path: text, "raw/a.bin": body}
    return vector, {path: to_safetensors([vector])}


def write(folder: Path, contents: dict[str, bytes]) -> None:
    """Files and an index whose sizes and hashes are right."""
    entries = []
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        count = 0 if name.endswith(".bin") else 1
        entries.append({"path": name, "bytes": len(data), "sha256": digest, "vectors": count})
    whole = {"schema": 1, "spec_version": "1.0", "files": entries}
    (folder / "index.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("path", ["edge/a.json", "bulk/a.safetensors", "raw/a.json"])
def test_a_small_folder_passes(path: str, tmp_path: Path) -> None:
    write(tmp_path, small(path)[1])
    assert main(["vectors", "check", str(tmp_path)]) == 0


@pytest.mark.parametrize("path", ["edge/a.json", "bulk/a.safetensors", "raw/a.json"])
def test_another_result_is_named(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that the reference does not give: exit code 1."""
    write(tmp_path, small(path, expected={"codes": np.uint8([0x2A, 0x39])})[1])
    assert main(["vectors", "check", str(tmp_path)]) == 1
    line = "a: codes[1]: expected 39, got 38 (1 of 2 elements differ)"
    assert f"DIFFERS  {path}: {line}" in capsys.readouterr().out


def test_a_call_that_the_reference_refuses_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changed in ({"parameters": {"fmt": "e9m9"}}, {"parameters": {}}, {"inputs": {}}):
        write(tmp_path, small(**changed)[1])
        assert main(["vectors", "check", str(tmp_path)]) == 1
        assert "a: the reference refuses it: " in capsys.readouterr().out


Change = Callable[[dict[str, bytes]], None]


def edited(path: str, old: str, new: str) -> Change:
    """A file with a word replaced; the index follows."""

    def change(contents: dict[str, bytes]) -> None:
        assert old.encode() in contents[path]
        contents[path] = contents[path].replace(old.encode(), new.encode(), 1)

    return change


def header(change: Callable[[dict[str, Any]], None]) -> Change:
    """A safetensors file with another header over the same body."""

    def changed(contents: dict[str, bytes]) -> None:
        data = contents["bulk/a.safetensors"]
        size = int.from_bytes(data[:8], "little")
        whole = json.loads(data[8 : 8 + size])
        change(whole)
        text = json.dumps(whole).encode()
        contents["bulk/a.safetensors"] = len(text).to_bytes(8, "little") + text + data[8 + size :]

    return changed


def body(path: str, change: Callable[[bytes], bytes]) -> Change:
    def changed(contents: dict[str, bytes]) -> None:
        contents[path] = change(contents[path])

    return changed


EDGE, BULK, RAW, BIN = "edge/a.json", "bulk/a.safetensors", "raw/a.json", "raw/a.bin"

HOSTILE: dict[str, tuple[str, Change, str]] = {
    "not JSON": (EDGE, body(EDGE, lambda data: data[:-9]), "not JSON"),
    "not text": (EDGE, body(EDGE, lambda data: b"\xff" + data), "not JSON"),
    "deep": (EDGE, body(EDGE, lambda data: b"[" * 200_000), "nested too deep"),
    "NaN": (EDGE, edited(EDGE, '"schema": 1', '"schema": NaN'), "JSON has no NaN"),
    "key twice": (EDGE, edited(EDGE, '"schema"', '"id": 1, "id": 2, "schema"'), "stands twice"),
    "huge integer": (EDGE, edited(EDGE, '"schema": 1', f'"schema": {"9" * 5000}'), "not JSON"),
    "schema": (EDGE, edited(EDGE, '"schema": 1', '"schema": 2'), "schema is '2', this is 1"),
    "true is no 1": (EDGE, edited(EDGE, '"schema": 1', '"schema": true'), "schema is 'True'"),
    "version": (EDGE, edited(EDGE, '"1.0"', '"0.9"'), "spec_version is '0.9', this is '1.0'"),
    "a list": (EDGE, body(EDGE, lambda data: b"[]"), "no list of vectors"),
    "no vector": (EDGE, edited(EDGE, '"id"', '"ident"'), "not a vector"),
    "operation": (EDGE, edited(EDGE, '"encode"', '"__class__"'), "no operation '__class__'"),
    "flag": (EDGE, edited(EDGE, '    "Any"', '    "Other"'), "flags ['Other']"),
    "argument": (EDGE, edited(EDGE, '"x":', '"y":'), "inputs {'y'"),
    "parameter": (EDGE, edited(EDGE, '"fmt": "e4m3fn"', '"fmt": []'), "parameters {'fmt': []}"),
    "expected": (EDGE, edited(EDGE, '"codes":', '"x_":'), "expected {'x_'"),
    "no array": (EDGE, edited(EDGE, "u8[2]", "u9[2]"), "not an array"),
    "word": (EDGE, edited(EDGE, "2a38", "2a3"), "not a word of u8"),
    "too few": (EDGE, edited(EDGE, "u8[2] ", "u8[3] "), "2 of the 3 elements"),
    "too many": (EDGE, edited(EDGE, "u8[2] ", "u8[1] "), "more than the 1 elements"),
    "bomb": (EDGE, edited(EDGE, "2a38", "2a*9999999999"), "more than the 2 elements"),
    "huge shape": (
        EDGE,
        edited(EDGE, "u8[2] ", "u8[268435456,2] "),
        "more than 268435456 elements",
    ),
    "huge extent": (EDGE, edited(EDGE, "u8[2] ", "u8[99999999999] "), "not a shape"),
    "empty safetensors": (BULK, body(BULK, lambda data: b""), "a header of 0 bytes in a file of 0"),
    "huge header": (
        BULK,
        body(BULK, lambda data: (1 << 60).to_bytes(8, "little") + data[8:]),
        f"a header of {1 << 60} bytes",
    ),
    "torn": (BULK, body(BULK, lambda data: data[:-1]), "the file is torn"),
    "longer": (BULK, body(BULK, lambda data: data + b"0"), "the file is torn"),
    "metadata": (BULK, header(lambda h: h.pop("__metadata__")), "no metadata"),
    "metadata of numbers": (
        BULK,
        header(lambda h: h.update(__metadata__={"vectors": 1})),
        "no vectors",
    ),
    "NaN metadata": (BULK, header(lambda h: h.update(x=float("nan"))), "JSON has no NaN"),
    "no tensor": (BULK, header(lambda h: h["a/inputs/x"].pop("shape")), "not a tensor"),
    "negative": (BULK, header(lambda h: h["a/inputs/x"].update(data_offsets=[-8, 8])), "offsets"),
    "gap": (
        BULK,
        header(lambda h: h["a/expected/codes"].update(data_offsets=[9, 10])),
        "starts at byte 9, the one before ends at 8",
    ),
    "overlap": (
        BULK,
        header(lambda h: h["a/expected/codes"].update(data_offsets=[0, 10])),
        "starts at byte 0, the one before ends at 8",
    ),
    "shape": (BULK, header(lambda h: h["a/inputs/x"].update(shape=[3])), "fp32[3] in 8 bytes"),
    "type": (BULK, header(lambda h: h["a/inputs/x"].update(dtype="I64")), "I64 for fp32"),
    "stranger": (
        BULK,
        header(lambda h: h.update(b={"dtype": "U8", "shape": [0], "data_offsets": [10, 10]})),
        "a tensor of no vector",
    ),
    "lost": (BULK, edited(BULK, '"a/inputs/x"', '"a/inputs/z"'), "no tensor 'a/inputs/x'"),
    "order of bytes": (RAW, edited(RAW, '"little"', '"big"'), "byte_order is not little"),
    "another size": (RAW, body(BIN, lambda data: data + b"0"), "bytes are said"),
    "beyond": (RAW, edited(RAW, '"offset":0', '"offset":30'), "ends at byte 38 of 32"),
    "below": (RAW, edited(RAW, '"offset":0', '"offset":-4'), "offset -4"),
    "entry": (RAW, edited(RAW, '"offset":0,', ""), "not an array"),
    "element": (RAW, edited(RAW, '"dtype":"u8"', '"dtype":"u3"'), "no element type 'u3'"),
    "no bytes": (RAW, lambda contents: contents.pop(BIN) and None, "raw/a.bin is not in the index"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clear line and exit code 2, from `check` and from `list`."""
    path, change, words = HOSTILE[name]
    contents = small(path)[1]
    change(contents)
    write(tmp_path, contents)
    for action in ("check", "list"):
        assert main(["vectors", action, str(tmp_path)]) == 2
        out = capsys.readouterr().out
        assert f"DAMAGED  {tmp_path / path}: " in out and words in out


def spoil(change: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path], None]:
    """An index changed in place."""

    def spoiled(folder: Path) -> None:
        whole = json.loads((folder / "index.json").read_text())
        change(folder, whole)
        (folder / "index.json").write_text(json.dumps(whole))

    return spoiled


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (lambda folder: (folder / "index.json").unlink(), "no index"),
    "torn index": (lambda folder: (folder / "index.json").write_text('{"files": ['), "not JSON"),
    "NaN": (lambda folder: (folder / "index.json").write_text('{"files": NaN}'), "JSON has no NaN"),
    "no list": (spoil(lambda _, w: w.update(files=3)), "no list of files"),
    "version": (spoil(lambda _, w: w.update(spec_version="0.9")), "spec_version is '0.9'"),
    "entry": (spoil(lambda _, w: w["files"][0].update(bytes="9")), "not an entry"),
    "true": (spoil(lambda _, w: w["files"][0].update(bytes=True)), "not an entry"),
    "escape": (spoil(lambda _, w: w["files"][0].update(path="../edge/a.json")), "not a path"),
    "twice": (spoil(lambda _, w: w["files"].append(w["files"][0])), "stands twice"),
    "hash": (spoil(lambda _, w: w["files"][0].update(sha256="0" * 63)), "no SHA-256"),
    "other hash": (
        spoil(lambda _, w: w["files"][0].update(sha256="0" * 64)),
        "SHA-256 of edge/a.json",
    ),
    "size": (spoil(lambda _, w: w["files"][0].update(bytes=7)), "bytes, the index says 7"),
    "count": (spoil(lambda _, w: w["files"][0].update(vectors=7)), "1 vectors, the index says 7"),
    "lost": (lambda folder: (folder / EDGE).unlink(), "edge/a.json is not there"),
    "cut": (lambda folder: (folder / EDGE).write_bytes(b"{"), "has 1 bytes, the index says"),
}


@pytest.mark.parametrize("name", list(BAD_FOLDERS))
def test_bad_folders(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = BAD_FOLDERS[name]
    write(tmp_path, small()[1])
    change(tmp_path)
    assert main(["vectors", "check", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert words in output.out + output.err and str(tmp_path) in output.out + output.err


def test_one_id_for_two_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vector, _ = small()
    write(tmp_path, {EDGE: to_json([vector, vector], "a")})
    spoil(lambda _, w: w["files"][0].update(vectors=2))(tmp_path)
    assert main(["vectors", "check", str(tmp_path)]) == 2
    assert "two vectors have one id" in capsys.readouterr().out


def test_flipped_bytes_never_pass(tmp_path: Path) -> None:
    """Any byte changed under a right hash: an error of ours or another vector, never a crash."""
    vector, _ = small()
    readers: list[tuple[bytes, Callable[[bytes], list[Vector]]]] = [
        (to_json([vector], "a"), from_json),
        (to_safetensors([vector]), from_safetensors),
        (to_raw([vector], "a.bin")[0], lambda data: from_raw(data, to_raw([vector], "a.bin")[1])),
    ]
    for data, reader in readers:
        assert same(reader(data)[0], vector)
        refused = 0
        for at in range(len(data)):
            spoiled = bytearray(data)
            spoiled[at] ^= 1 + at % 255
            try:
                reader(bytes(spoiled))
            except FileError:
                refused += 1
        assert refused > len(data) // 4


def test_an_output_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["vectors", "build", "--out", str(tmp_path / "file")]) == 2
    assert "--out: got" in capsys.readouterr().err


# --- the checker in C++ ---------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path, *options: str) -> str:
    """The checker, with every warning an error."""
    program = str(folder / "check_encode")
    strict = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["g++", *strict, *options, "-o", program, str(CHECKER)], check=True)
    return program


def run(program: str, *given: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, given)], capture_output=True, text=True, timeout=60)


@needs_compiler
def test_the_checker_passes_its_own_encoder(tmp_path: Path) -> None:
    """And says clearly what is wrong with a file."""
    program = compiled(tmp_path)
    done = run(program, FOLDER / "raw/edge-scalar.json", FOLDER / "raw/edge-group.json")
    known = [v for file in built() if file.path.startswith("raw/edge") for v in file.vectors]
    count = sum(v.operation in ("encode", "encode_scale", "quantize") for v in known)
    assert done.returncode == 0 and count > 400
    left_out = f"{len(known) - count} are about other operations"
    assert done.stdout == f"{count} vectors checked, 0 differ; {left_out}\n"
    for words, change in (
        ("a .bin of another size", body(BIN, lambda data: data[:-1])),
        ("not JSON at byte", body(RAW, lambda data: data[:-5])),
        ("not JSON at byte", body(RAW, lambda data: b"[" * 100_000)),
        ("ends behind the file", edited(RAW, '"offset":0', '"offset":30')),
        ("not a size", edited(RAW, '"offset":0', '"offset":-1')),
        ("a huge shape", edited(RAW, '"shape":[2]', '"shape":[99999999999,9999999]')),
        ("no format e9", edited(RAW, '"e4m3fn"', '"e9"')),
        ("another schema", edited(RAW, '"schema":1', '"schema":2')),
    ):
        contents = small(RAW)[1]
        change(contents)
        write(tmp_path, contents)
        done = run(program, tmp_path / RAW)
        assert done.returncode == 2 and words in done.stderr
    assert run(program).returncode == 2
    assert "cannot be opened" in run(program, tmp_path / "none.json").stderr


@needs_compiler
def test_the_checker_finds_broken_ties(tmp_path: Path) -> None:
    done = run(compiled(tmp_path, "-DBROKEN_TIES"), FOLDER / "raw/edge-scalar.json")
    assert done.returncode == 1
    assert "DIFFERS encode.e2m1.3e800000 codes[0]: expected 00, got 01 (the middle" in done.stdout


@needs_compiler
def test_the_checker_takes_another_object(tmp_path: Path) -> None:
    """`-DUSER_ENCODER` and an object with the functions; here all of them give 0."""
    names = ("e4m3fn", "e4m3fnuz", "e2m1", "ue8m0")
    lines = [f'extern "C" uint8_t encode_{name}(float) {{ return 0; }}' for name in names]
    lines += [
        "#include <cstdint>",
        "struct Rule;",
        'extern "C" uint16_t encode_bf16(float) { return 0; }',
        "uint8_t scale_code(const Rule&, float) { return 0; }",
        "uint8_t quantize(const Rule&, const float*, uint8_t*) { return 0; }",
    ]
    (tmp_path / "mine.cpp").write_text("\n".join(sorted(lines, key=lambda line: line[0] != "#")))
    program = compiled(tmp_path, "-DUSER_ENCODER", str(tmp_path / "mine.cpp"))
    done = run(program, FOLDER / "raw/edge-scalar.json")
    assert done.returncode == 1 and "encode.e4m3fn.3f800000 codes[0]: expected 38" in done.stdout
