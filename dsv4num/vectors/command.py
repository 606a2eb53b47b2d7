"""The command `vectors`: builds the files, lists them, and checks them against the reference.

A folder of vectors has an `index.json` that names every file with its size and SHA-256. `edge/` holds
JSON, `bulk/` and `large/` safetensors, and `raw/` pairs of JSON and little-endian bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4num import __version__
from dsv4num.errors import ArgumentError
from dsv4num.vectors import bulk, edge_numbers, edge_operations
from dsv4num.vectors.store import (
    FileError,
    check_heading,
    dump,
    from_json,
    from_raw,
    from_safetensors,
    heading,
    parse_json,
    to_json,
    to_raw,
    to_safetensors,
)
from dsv4num.vectors.vector import Vector, compute, differences

_FOLDER = Path("vectors")
_INDEX = "index.json"
_MAX_FILE = 1 << 31
_PATH = (
    r"(?:edge|raw)/[a-z0-9_-]+\.json|(?:bulk|large)/[a-z0-9_-]+\.safetensors|raw/[a-z0-9_-]+\.bin"
)

#: Edge files: what makes the vectors, and a word about them.
EDGES: dict[str, tuple[Callable[[], Iterator[Vector]], str]] = {
    "scalar": (edge_numbers.scalar, "Scalar formats: encode, decode, packing. SPEC section 2."),
    "group": (edge_numbers.group, "Group rules: scales, quantize, dequantize. SPEC section 3."),
    "arithmetic": (
        edge_numbers.arithmetic,
        "exp32, tree_sum, inv_rms, norm, bf16. SPEC section 1.",
    ),
    "rope": (edge_numbers.rope, "Rotation and its cosine table. SPEC 5.5."),
    "record": (
        edge_operations.record,
        "Records and pages: insert, gather. SPEC section 4, 5.1, 5.2.",
    ),
    "compressor": (edge_operations.compressor, "The compressor. SPEC 5.3, 5.4, 5.6, 5.10."),
    "sparse_index": (edge_operations.sparse_index, "Sparse indices. SPEC 5.7 to 5.9."),
}
BULKS: dict[str, Callable[[bool], Iterator[Vector]]] = {
    "encode": bulk.encode,
    "quantize": bulk.quantize,
    "insert": bulk.insert,
    "gather": bulk.gather,
    "compress": bulk.compress,
    "rope_quant": bulk.rope_quant,
    "indices": bulk.indices,
}
#: What is always there in raw form: enough for an encoder in another language.
RAW = ("edge-scalar", "edge-group")


@dataclass(frozen=True)
class File:
    """A file of vectors: where it is, its bytes, what it holds, and what made it."""

    path: str
    data: bytes
    vectors: tuple[Vector, ...]
    source: str
    stream: str

    def entry(self) -> dict[str, Any]:
        """What the index says of it."""
        operations = dict.fromkeys(vector.operation for vector in self.vectors)
        return {
            "path": self.path,
            "bytes": len(self.data),
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "vectors": len(self.vectors),
            "expected_elements": sum(a.size for v in self.vectors for a in v.expected.values()),
            "operations": list(operations),
            "provenance": {"generator": self.source, "random": self.stream},
        }


def files(*, large: bool = False, raw: bool = False) -> Iterator[File]:
    """Every file of a set.

    Args:
        large: with the sets that are too large for git.
        raw: everything in raw form too, not only `RAW`.
    """
    made: dict[str, tuple[tuple[Vector, ...], str, str]] = {}
    for name, (source, about) in EDGES.items():
        vectors = tuple(source())
        made[f"edge-{name}"] = vectors, _name(source), _stream("edge")
        yield File(f"edge/{name}.json", to_json(vectors, about), *made[f"edge-{name}"])
    for kind in ("bulk", "large") if large else ("bulk",):
        for name, maker in BULKS.items():
            vectors = tuple(maker(kind == "large"))
            made[f"{kind}-{name}"] = vectors, _name(maker), _stream(kind)
            data = to_safetensors(vectors)
            yield File(f"{kind}/{name}.safetensors", data, *made[f"{kind}-{name}"])
    for name, about_it in made.items():
        if raw or name in RAW:
            text, body = to_raw(about_it[0], f"{name}.bin")
            yield File(f"raw/{name}.json", text, *about_it)
            yield File(f"raw/{name}.bin", body, (), *about_it[1:])


def _stream(kind: str) -> str:
    return f"SplitMix64, where not chosen by hand; seeds are the SHA-256 of '{kind} ...'"


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


def index(made: Iterable[File]) -> bytes:
    """The index of files."""
    reference = f"dsv4num.reference {__version__}"
    whole = {**heading(), "expected_by": reference, "files": [file.entry() for file in made]}
    return dump(whole)


def load(folder: Path) -> Iterator[tuple[dict[str, Any], list[Vector] | FileError]]:
    """Every file of a folder: its entry in the index, and its vectors or why there are none.

    The bytes of a raw pair count as one file with its JSON.

    Raises:
        FileError: the index itself cannot be read.
    """
    for entry in _entries(folder):
        if not entry["path"].endswith(".bin"):
            try:
                yield entry, _load(folder, entry)
            except FileError as error:
                yield entry, error


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What the index says, checked for form."""
    path = folder / _INDEX
    if not path.is_file():
        raise FileError(f"{path}: no index; `dsv4num vectors build` makes one")
    try:
        whole = parse_json(_read(path, 1 << 24))
        if not isinstance(whole, dict) or not isinstance(whole.get("files"), list):
            raise FileError("no list of files")
        check_heading(whole)
        seen: set[str] = set()
        for entry in whole["files"]:
            _check_entry(entry)
            if entry["path"] in seen:
                raise FileError(f"{entry['path']} stands twice")
            seen.add(entry["path"])
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    entries: list[dict[str, Any]] = whole["files"]
    return entries


def _check_entry(entry: Any) -> None:
    form = {"path": str, "sha256": str, "bytes": int, "vectors": int}
    if not isinstance(entry, dict) or not all(
        type(entry.get(key)) is kind for key, kind in form.items()
    ):
        raise FileError(f"not an entry: {str(entry)[:60]}")
    if not re.fullmatch(_PATH, entry["path"]):
        raise FileError(f"not a path of vectors: {entry['path'][:60]!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]) or not 0 <= entry["bytes"] <= _MAX_FILE:
        raise FileError(f"{entry['path']}: no SHA-256, or {entry['bytes']} bytes")


def _load(folder: Path, entry: dict[str, Any]) -> list[Vector]:
    """The vectors of one file."""
    path = entry["path"]
    try:
        data = _verified(folder, entry)
        if path.startswith("edge/"):
            vectors = from_json(data)
        elif path.startswith("raw/"):
            binary = path.removesuffix("json") + "bin"
            others = [other for other in _entries(folder) if other["path"] == binary]
            if not others:
                raise FileError(f"{binary} is not in the index")
            vectors = from_raw(data, _verified(folder, others[0]))
        else:
            vectors = from_safetensors(data)
        if len(vectors) != entry["vectors"]:
            raise FileError(f"{len(vectors)} vectors, the index says {entry['vectors']}")
        if len({vector.id for vector in vectors}) != len(vectors):
            raise FileError("two vectors have one id")
    except FileError as error:
        raise FileError(f"{folder / path}: {error}") from None
    return vectors


def _verified(folder: Path, entry: dict[str, Any]) -> bytes:
    """The bytes of a file, if they are those of the index."""
    path = folder / entry["path"]
    if not path.is_file():
        raise FileError(f"{entry['path']} is not there")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise FileError(f"{entry['path']} has {size} bytes, the index says {entry['bytes']}")
    data = _read(path, _MAX_FILE)
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        raise FileError(f"SHA-256 of {entry['path']} is {found}, the index says {entry['sha256']}")
    return data


def _read(path: Path, most: int) -> bytes:
    if path.stat().st_size > most:
        raise FileError(f"{path.stat().st_size} bytes; at most {most} are read")
    return path.read_bytes()


# --- command line ---------------------------------------------------------------------


def add_vectors(subparsers: Any) -> None:
    """Adds the `vectors` command to a command line."""
    parser = subparsers.add_parser("vectors", help="golden vectors for implementations elsewhere")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    action = actions.add_parser("build", help="write the files and their index")
    action.add_argument(
        "--out", type=Path, default=_FOLDER, metavar="DIR", help="(default: vectors)"
    )
    action.add_argument("--large", action="store_true", help="with larger sets, 80 MB more")
    action.add_argument("--raw", action="store_true", help="everything in raw form too")
    action.set_defaults(func=build)
    action = actions.add_parser("check", help="compare hashes, and compute every result again")
    _add_folder(action)
    action.set_defaults(func=check)
    action = actions.add_parser("list", help="name the files, or the vectors")
    _add_folder(action)
    action.add_argument("--ids", action="store_true", help="every vector: id, flags, comment")
    action.set_defaults(func=show)


def _add_folder(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=_FOLDER,
        metavar="DIR",
        help="(default: vectors)",
    )


def build(arguments: argparse.Namespace) -> int:
    """Writes a set of vectors."""
    folder: Path = arguments.out
    if folder.exists() and not folder.is_dir():
        raise ArgumentError("--out", str(folder), "a folder", "6.1")
    made = list(files(large=arguments.large, raw=arguments.raw))
    for file in made:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    text = index(made)
    (folder / _INDEX).write_bytes(text)
    total = sum(len(file.data) for file in made) + len(text)
    count = sum(len(file.vectors) for file in made if not file.path.startswith("raw/"))
    print(f"{count} vectors in {len(made)} files, {total} bytes, in {folder}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    """0 if every file is as the index says and the reference gives what it expects."""
    damaged = differing = total = 0
    for entry, vectors in load(arguments.folder):
        if isinstance(vectors, FileError):
            damaged += 1
            print(f"DAMAGED  {vectors}")
            continue
        lines = [line for vector in vectors for line in _judged(vector)]
        differing += len(lines)
        total += len(vectors)
        for line in lines[:20]:
            print(f"DIFFERS  {entry['path']}: {line}")
        if len(lines) > 20:
            print(f"         ... and {len(lines) - 20} more in {entry['path']}")
        if not lines:
            print(f"ok       {entry['path']}: {len(vectors)} vectors")
    print(f"{total} vectors checked, {differing} differ; {damaged} files are damaged")
    return 2 if damaged else int(differing > 0)


def _judged(vector: Vector) -> list[str]:
    """What the reference gives otherwise than a vector expects: at most one line."""
    try:
        lines = list(differences(vector, compute(vector)))
    except (ArgumentError, TypeError, KeyError) as error:
        lines = [f"the reference refuses it: {error}"]
    return [f"{vector.id}: {lines[0]}"] if lines else []


def show(arguments: argparse.Namespace) -> int:
    """Prints what a folder holds."""
    status = 0
    for entry, vectors in load(arguments.folder):
        if isinstance(vectors, FileError):
            print(f"DAMAGED  {vectors}")
            status = 2
        elif arguments.ids:
            for vector in vectors:
                print(f"{vector.id}  [{' '.join(vector.flags)}]  {vector.comment}")
        else:
            text = ", ".join(dict.fromkeys(vector.operation for vector in vectors))
            print(f"{entry['path']}: {len(vectors)} vectors, {entry['bytes']} bytes: {text}")
    return status
