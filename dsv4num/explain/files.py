"""Arrays from files and into them: raw bytes, .npy, .npz, .safetensors and, from files, .pt.

Nothing in a file is executed.
"""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.errors import ArgumentError, UnsupportedError
from dsv4num.formats import Layout

__all__ = ["check_targets", "load_array", "pool_files", "save_array"]

#: A header may not be longer, an array in a compressed file not larger.
_MAX_HEADER, _MAX_MEMBER = 16 << 20, 2 << 30
#: What each dtype of safetensors becomes here: bytes for the formats of eight bits.
_SAFETENSORS: dict[str, Any] = {
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "BOOL"), np.uint8),
    **{"I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32, "U32": np.uint32},
    **{"I64": np.int64, "U64": np.uint64, "F16": np.float16, "F32": np.float32, "F64": np.float64},
    "BF16": ml_dtypes.bfloat16,
}


def load_array(name: str) -> NDArray[Any]:
    """The array in a file.

    The suffix says how it is read: `.npy`, `.npz`, `.safetensors`, `.pt` or `.pth`; anything else is
    raw bytes. Of a file with several arrays one is named behind a colon: `cache.npz:layer0`. Pickles
    are refused. bf16 comes back as `ml_dtypes.bfloat16`, floats of eight bits as uint8.

    Args:
        name: path, or path:array.

    Returns:
        The array. Raw bytes and `.npy` are mapped into memory, not read.

    Raises:
        ArgumentError: the file cannot be read, is damaged, holds a pickle, or not that array.
        UnsupportedError: a `.pt` file where torch is not installed.
    """
    path, key = _source(name)
    if path.is_dir():
        _refuse(path, "a directory", "a file")
    readers = {
        ".npy": _npy,
        ".npz": _npz,
        ".safetensors": _safetensors,
        ".pt": _torch,
        ".pth": _torch,
    }
    try:
        with warnings.catch_warnings():
            # What NumPy and torch have to say about a damaged file, the error says in one line.
            warnings.simplefilter("ignore")
            array = readers.get(path.suffix.lower(), _raw)(path, key)
    except OSError as error:
        _refuse(path, error.strerror or str(error), "a file that can be read")
    return _known_dtype(path, array)


def pool_files(text: str, layout: Layout) -> list[str]:
    """The file of a dump; of a layout with several pools (clause 4.6) theirs, joined by commas.

    Raises:
        ArgumentError: not as many names as pools.
    """
    names = text.split(",") if layout.pools > 1 else [text]
    if len(names) != layout.pools:
        given = f"{len(names)} file{'s' if len(names) > 1 else ''}"
        allowed = f"{layout.pools} joined by commas: {layout.name} has as many pools"
        raise ArgumentError(text, given, allowed, "4.6")
    return names


def check_targets(targets: list[str], sources: list[str]) -> None:
    """Refuses what `save_array` could not write, or would lose by it, before anything is written.

    Args:
        targets: names for `save_array`, each of a file of its own: writing one replaces the file.
        sources: names for `load_array` that must stay as they are.

    Raises:
        ArgumentError: a file of `sources`, or one that is named twice; a `.pt` file, which is a pickle;
            a directory, or a file in none.
    """
    paths = [_check_target(name) for name in targets]
    read = [_source(name)[0] for name in sources]
    for name, path in zip(targets, paths, strict=True):
        if any(_same_file(path, other) for other in read):
            raise ArgumentError("TARGET", name, "another file than SOURCE", "4.8")
        if sum(_same_file(path, other) for other in paths) > 1:
            raise ArgumentError(
                "TARGET", ",".join(targets), "a file of its own for each pool", "4.8"
            )


def _check_target(name: str) -> Path:
    """The file that a target means, which can be written as far as one can see."""
    path, key = _target(name)
    if not key or {"/", "\\"} & set(key):  # a name of a member, not a way out of where it is unpacked
        _refuse(path, f"an array called {key!r}", "a name that is not empty and has no slash")
    if {path.suffix.lower(), Path(name.rpartition(":")[0]).suffix.lower()} & {".pt", ".pth"}:
        _refuse(path, "a file of torch", "raw bytes, .npy, .npz or .safetensors")
    if path.is_dir() or not path.parent.is_dir():
        given = "a directory" if path.is_dir() else "no such directory"
        _refuse(path, given, "a file that can be written")
    return path


def _same_file(a: Path, b: Path) -> bool:
    """Whether two names are of one file, which may not exist yet; links count."""
    return a.samefile(b) if a.exists() and b.exists() else a.resolve() == b.resolve()


def _source(name: str) -> tuple[Path, str | None]:
    """The file that a name of `load_array` means, and which array in it."""
    path = Path(name)
    if path.exists() or ":" not in name:
        return path, None
    head, _, key = name.rpartition(":")
    return Path(head), key


def _target(name: str) -> tuple[Path, str]:
    """The file that a name of `save_array` means, and what the array in it is called."""
    for suffix in (".npz", ".safetensors"):
        head, found, tail = name.rpartition(f"{suffix}:")
        if found:
            return Path(head + suffix), tail
    return Path(name), "pages"


def save_array(name: str, array: NDArray[np.uint8]) -> None:
    """Writes bytes to a file: `.npy`, `.npz:NAME`, `.safetensors:NAME`, or raw bytes.

    Without a name the array of a `.npz` or `.safetensors` file is called "pages".

    Args:
        name: path, or path:array.
        array: uint8.

    Raises:
        ArgumentError: a `.pt` file, which is a pickle, or a file that cannot be written.
    """
    _check_target(name)
    path, key = _target(name)
    suffix = path.suffix.lower()
    try:
        with path.open("wb") as file:
            if suffix == ".npy":
                np.save(file, array, allow_pickle=False)
            elif suffix == ".npz":
                with (
                    zipfile.ZipFile(file, "w") as archive,
                    archive.open(f"{key}.npy", "w", force_zip64=True) as member,
                ):
                    np.lib.format.write_array(member, array, allow_pickle=False)
            elif suffix == ".safetensors":
                entry = {"dtype": "U8", "shape": list(array.shape), "data_offsets": [0, array.size]}
                header = json.dumps({key: entry}).encode()
                header += b" " * (-len(header) % 8)
                file.write(len(header).to_bytes(8, "little") + header + array.tobytes())
            else:
                file.write(array.tobytes())
    except OSError as error:
        _refuse(path, error.strerror or str(error), "a file that can be written")


def _refuse(path: Path, given: str, allowed: str) -> NoReturn:
    raise ArgumentError(str(path), given, allowed, "8") from None


def _known_dtype(path: Path, array: NDArray[Any]) -> NDArray[Any]:
    """NumPy has no names for bf16 and FP8: it stores them as bytes without a type."""
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize in (1, 2):
        return array.view(np.uint8 if array.dtype.itemsize == 1 else ml_dtypes.bfloat16)
    if array.dtype.kind not in "uif" and array.dtype not in (np.bool_, ml_dtypes.bfloat16):
        _refuse(path, f"dtype {array.dtype}", "integers, floats, bf16 or bytes")
    return array


def _one(path: Path, names: list[str], key: str | None) -> str:
    """The array that is meant."""
    if key is None and len(names) == 1:
        return names[0]
    if key is None or key not in names:
        shown = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        given = "no array named" if key is None else f"array {key!r}"
        _refuse(path, given, f"{path}:NAME with NAME one of: {shown or 'nothing, it is empty'}")
    return key


def _raw(path: Path, key: str | None) -> NDArray[Any]:
    if key is not None:
        _refuse(path, f"array {key!r}", "no name: the file is raw bytes")
    if path.stat().st_size == 0:
        _refuse(path, "an empty file", "bytes")
    return np.memmap(path, np.uint8, "r")


def _npy(path: Path, key: str | None) -> NDArray[Any]:
    if key is not None:
        _refuse(path, f"array {key!r}", "no name: the file holds one array")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # of a damaged header NumPy raises what its tokenizer does
        _refuse(path, _short(error), "a whole .npy file without objects")


def _npz(path: Path, key: str | None) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {
                info.filename.removesuffix(".npy"): info.file_size
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
        chosen = _one(path, list(sizes), key)
        if sizes[chosen] > _MAX_MEMBER:
            _refuse(path, f"an array of {sizes[chosen]} bytes", f"at most {_MAX_MEMBER}")
        with np.load(path, allow_pickle=False) as arrays:
            found: Any = arrays[chosen]
    except (ArgumentError, OSError):
        raise
    except Exception as error:  # zipfile, zlib and NumPy each have their own
        _refuse(path, _short(error), "a whole .npz file without objects")
    if not isinstance(found, np.ndarray):  # NumPy hands over as bytes what is no .npy file
        _refuse(path, f"array {chosen!r}, which is no .npy file", "a file of np.savez")
    return found


def _safetensors(path: Path, key: str | None) -> NDArray[Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            allowed = f"at most {_MAX_HEADER} and within the file of {size} bytes"
            _refuse(path, f"a header of {length} bytes", allowed)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"a header that is no JSON: {_short(error)}", "a .safetensors file")
    if not isinstance(header, dict):
        _refuse(path, "a header that is no object", "a .safetensors file")
    header.pop("__metadata__", None)
    chosen = _one(path, list(header), key)
    dtype, shape, (start, end) = _entry(path, chosen, header[chosen])
    if end > size - 8 - length:
        allowed = f"within the {size - 8 - length} bytes of data"
        _refuse(path, f"array {chosen!r} at {start}..{end}", allowed)
    if math.prod(shape) * np.dtype(dtype).itemsize != end - start:
        _refuse(path, f"array {chosen!r}: {end - start} bytes", f"those of {dtype} {shape}")
    if end == start:
        return np.zeros(shape, dtype)
    data = np.memmap(path, np.uint8, "r", offset=8 + length + start, shape=(end - start,))
    found: NDArray[Any] = data.view(dtype).reshape(shape)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names must differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} in place of a number")


def _entry(path: Path, name: str, entry: Any) -> tuple[Any, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and offsets of an entry of the header."""
    if isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= entry.keys():
        shape, offsets = entry["shape"], entry["data_offsets"]
        counts = isinstance(shape, list) and len(shape) <= 32 and all(map(_is_count, shape))
        places = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
        if counts and places and offsets[0] <= offsets[1] and isinstance(entry["dtype"], str):
            if entry["dtype"] not in _SAFETENSORS:
                _refuse(path, f"dtype {entry['dtype']!r}", ", ".join(_SAFETENSORS))
            return _SAFETENSORS[entry["dtype"]], tuple(shape), (offsets[0], offsets[1])
    _refuse(path, f"array {name!r} without a sound dtype, shape and place", "a .safetensors file")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _torch(path: Path, key: str | None) -> NDArray[Any]:
    try:
        import torch
    except ImportError:
        text = f"{path}: reading .pt needs torch, which is not installed; save .npy or .safetensors"
        raise UnsupportedError(text) from None
    with path.open("rb"):
        pass  # a missing file is an OSError here, not whatever torch makes of it
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what it raises of a damaged file has no common base
        _refuse(path, _short(error), "a whole .pt file of tensors alone (weights_only)")
    if isinstance(found, dict):
        tensors = {str(k): v for k, v in found.items() if isinstance(v, torch.Tensor)}
        found = tensors[_one(path, list(tensors), key)]
    elif key is not None:
        _refuse(path, f"array {key!r}", "no name: the file holds one tensor")
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or found.is_meta:
        _refuse(path, f"a {type(found).__name__}", "a dense tensor, or a dict of tensors")
    tensor = found.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    if tensor.dtype.itemsize == 1:
        return np.asarray(tensor.view(torch.uint8).numpy())
    try:
        return np.asarray(tensor.numpy())
    except TypeError as error:
        _refuse(path, _short(error), "integers, floats, bf16 or bytes")


def _short(error: BaseException) -> str:
    """The first line of an error, not too long."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
