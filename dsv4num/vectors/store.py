"""Vectors as bytes: JSON for people, safetensors for tools, raw little-endian bytes for the rest.

No form depends on anything but the vectors, so that a file built twice is the same file. Reading
trusts nothing: sizes are checked before memory is taken for them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from dsv4num import SPEC_VERSION
from dsv4num.errors import Dsv4numError
from dsv4num.vectors.vector import FLAGS, OPERATIONS, POLICIES, Array, Vector, bits

SCHEMA = 1
_MAX_ELEMENTS = 1 << 28
_MAX_HEADER = 1 << 26

#: Names of element types, and how they lie in memory.
DTYPES = {
    "u8": np.dtype(np.uint8),
    "u16": np.dtype("<u2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "bool": np.dtype(np.bool_),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype("<f4"),
}
#: Floating point goes into safetensors as bit patterns: no tool may canonicalize a NaN.
_SAFETENSORS = {
    "u8": "U8",
    "u16": "U16",
    "i32": "I32",
    "i64": "I64",
    "bool": "BOOL",
    "bf16": "U16",
    "fp32": "U32",
}


class FileError(Dsv4numError, ValueError):
    """A file of vectors cannot be read: it is torn, damaged, or of another version."""


def dtype_name(array: Array) -> str:
    """The name of an array's element type."""
    for name, dtype in DTYPES.items():
        if array.dtype == dtype:
            return name
    raise FileError(f"no vector holds elements of {array.dtype}")


# --- arrays as text -------------------------------------------------------------------


def array_text(array: Array) -> str:
    """An array as text: type, shape, and its elements in words.

    Elements of "u8", "u16", "bf16" and "fp32" are bit patterns in hexadecimal, most significant digit
    first; a word may hold several of them. Other elements are decimal, one in a word. WORD*N is the
    word N times.

    Example:
        >>> array_text(np.uint8([[0x78, 0x79, 0, 0, 0, 0]]))
        'u8[1,6] 7879 00*4'
        >>> array_text(np.int32([-1, -1, 448, 511]))
        'i32[4] -1*2 448 511'
    """
    name = dtype_name(array)
    hexadecimal = array.dtype.kind not in "ib"
    flat = bits(array).ravel()
    digits = 2 * array.itemsize
    starts = np.flatnonzero(np.append(flat.size > 0, flat[1:] != flat[:-1]))
    words: list[str] = []
    loose = ""
    least = 4 if hexadecimal else 2
    for start, count in zip(starts, np.diff(np.append(starts, flat.size)), strict=True):
        element = f"{int(flat[start]):0{digits}x}" if hexadecimal else str(int(flat[start]))
        if count >= least:
            words += [loose] * bool(loose) + [f"{element}*{count}"]
            loose = ""
        elif hexadecimal:
            loose += element * int(count)
        else:
            words += [element] * int(count)
    words += [loose] * bool(loose)
    shape = ",".join(map(str, array.shape))
    return " ".join([f"{name}[{shape}]", *words])


def text_array(text: Any) -> Array:
    """The array of a text that `array_text` made.

    Raises:
        FileError: it is not such a text.
    """
    match = (
        re.fullmatch(r"(\w+)\[([0-9,]*)\]((?: [^ ]+)*)", text) if isinstance(text, str) else None
    )
    if match is None or match[1] not in DTYPES:
        raise FileError(f"not an array: {str(text)[:60]!r}")
    dtype = DTYPES[match[1]]
    shape = _shape([int(n) for n in match[2].split(",") if len(n) < 12] if match[2] else [])
    size = math.prod(shape)
    hexadecimal = dtype.kind not in "ib"
    parts: list[Array] = []
    count = 0
    for word in match[3].split():
        body, _, times = word.partition("*")
        digits = 2 * dtype.itemsize
        form = rf"(?:[0-9a-f]{{{digits}}})+" if hexadecimal else r"-?[0-9]{1,19}"
        if not re.fullmatch(form, body) or not re.fullmatch(r"[0-9]{1,10}", times or "1"):
            raise FileError(f"not a word of {match[1]}: {word[:40]!r}")
        repeat = int(times or 1)
        count += repeat * (len(body) // digits if hexadecimal else 1)
        if count > size:
            raise FileError(f"more than the {size} elements of {match[1]}[{match[2]}]")
        if hexadecimal:
            unsigned = np.frombuffer(bytes.fromhex(body), f">u{dtype.itemsize}")
            part = unsigned.astype(f"<u{dtype.itemsize}").view(dtype)
        else:
            part = _integer(int(body), dtype)
        parts.append(np.tile(part, repeat))
    if count != size:
        raise FileError(f"{count} of the {size} elements of {match[1]}[{match[2]}]")
    return np.concatenate(parts).reshape(shape) if parts else np.empty(shape, dtype)


def _integer(value: int, dtype: np.dtype[Any]) -> Array:
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not least <= value <= most:
        raise FileError(f"{value} is no {dtype}")
    return np.array([value], dtype)


def _shape(shape: Any) -> tuple[int, ...]:
    """A shape whose elements can be held."""
    if not isinstance(shape, list) or len(shape) > 4:
        raise FileError(f"not a shape: {str(shape)[:60]}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MAX_ELEMENTS:
            raise FileError(f"not a shape: {str(shape)[:60]}")
    if math.prod(shape) > _MAX_ELEMENTS:
        raise FileError(f"shape {shape}: more than {_MAX_ELEMENTS} elements")
    return tuple(shape)


# --- vectors without their arrays ------------------------------------------------------

_GROUPS = ("inputs", "expected", "reference")


def heading() -> dict[str, Any]:
    """What every file of vectors says first."""
    return {"schema": SCHEMA, "spec_version": SPEC_VERSION}


def _head(vector: Vector, array: Callable[[str, str, Array], Any]) -> dict[str, Any]:
    """A vector as plain data; `array` says what stands in place of an array."""
    head: dict[str, Any] = {
        "id": vector.id,
        "operation": vector.operation,
        "comment": vector.comment,
        "flags": list(vector.flags),
        "clause": vector.clause,
        "policy": list(vector.policy),
        "parameters": vector.parameters,
    }
    for group in _GROUPS:
        values = getattr(vector, group)
        if values or group != "reference":
            head[group] = {
                name: array(f"{vector.id}/{group}/{name}", group, value)
                if isinstance(value, np.ndarray)
                else {"value": value}
                for name, value in values.items()
            }
    return head


def _vector(head: Any, array: Callable[[str, Any], Array]) -> Vector:
    """The vector of `_head`; `array` turns what stands there into an array."""
    text = ("id", "operation", "comment", "clause")
    known = {*text, "flags", "policy", "parameters", *_GROUPS}
    if not isinstance(head, dict) or not known - {"reference"} <= head.keys() <= known:
        raise FileError(f"not a vector: {str(head)[:60]!r}")
    if not all(isinstance(head[key], str) for key in text):
        raise FileError(f"not a vector: {str(head['id'])[:60]!r}")
    where = f"vector {head['id'][:60]!r}"
    operation = OPERATIONS.get(head["operation"])
    if operation is None:
        raise FileError(f"{where}: no operation {head['operation'][:60]!r}")
    for key, allowed in (("flags", FLAGS), ("policy", POLICIES)):
        if not isinstance(head[key], list) or not all(
            isinstance(word, str) and word in allowed for word in head[key]
        ):
            raise FileError(f"{where}: {key} {str(head[key])[:60]}")
    arguments = {*operation.positional, *operation.keywords}
    groups: dict[str, dict[str, Any]] = {}
    for group in _GROUPS:
        given = head.get(group, {})
        allowed_names = arguments | set(operation.returns) if group == "expected" else arguments
        if not isinstance(given, dict) or not given.keys() <= allowed_names:
            raise FileError(f"{where}: {group} {str(given)[:60]}")
        groups[group] = {}
        for name, value in given.items():
            plain = isinstance(value, dict) and value.keys() == {"value"} and group == "reference"
            read = value["value"] if plain else array(f"{head['id']}/{group}/{name}", value)
            groups[group][name] = read
    parameters = head["parameters"]
    if not isinstance(parameters, dict) or not all(
        name in arguments and (value is None or isinstance(value, str | int | float))
        for name, value in parameters.items()
    ):
        raise FileError(f"{where}: parameters {str(parameters)[:60]}")
    given = parameters.keys() | groups["inputs"].keys()
    if not groups["expected"].keys() <= given | set(operation.returns) or not groups["expected"]:
        raise FileError(f"{where}: expected {list(groups['expected'])}")
    return Vector(
        id=head["id"],
        operation=head["operation"],
        comment=head["comment"],
        clause=head["clause"],
        flags=tuple(head["flags"]),
        policy=tuple(head["policy"]),
        parameters=parameters,
        **groups,
    )


def _vectors(whole: Any, array: Callable[[str, Any], Array]) -> list[Vector]:
    """The vectors of a file whose heading is of this version."""
    if not isinstance(whole, dict) or not isinstance(whole.get("vectors"), list):
        raise FileError("no list of vectors")
    check_heading(whole)
    return [_vector(head, array) for head in whole["vectors"]]


def check_heading(whole: dict[str, Any]) -> None:
    """Raises FileError where a file is of another schema or another SPEC."""
    for key, value in heading().items():
        if whole.get(key) != value or isinstance(whole.get(key), bool):
            raise FileError(f"{key} is {str(whole.get(key))[:40]!r}, this is {value!r}")


def parse_json(data: bytes) -> Any:
    """JSON, strictly: no NaN, no key twice."""

    def refuse(text: str) -> NoReturn:
        raise FileError(f"JSON has no {text}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FileError("a key stands twice in one object")
        return found

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)
    except FileError:
        raise
    except RecursionError:
        raise FileError("JSON is nested too deep") from None
    except ValueError as error:
        raise FileError(f"not JSON: {error}") from None


def dump(whole: dict[str, Any], indent: int | None = 1) -> bytes:
    """JSON, one entry on a line, or in one line without a break at its end."""
    separators = None if indent else (",", ":")
    text = json.dumps(whole, indent=indent, separators=separators, allow_nan=False)
    return (text + "\n" * bool(indent)).encode("utf-8")


# --- the three forms -------------------------------------------------------------------


def to_json(vectors: Sequence[Vector], about: str) -> bytes:
    """An edge file: vectors as text, and the meaning of the flags and policies that they use."""
    flags = {flag for vector in vectors for flag in vector.flags}
    policies = {policy for vector in vectors for policy in vector.policy}
    whole = {
        **heading(),
        "about": about,
        "flags": {name: text for name, text in FLAGS.items() if name in flags},
        "policies": {name: text for name, text in POLICIES.items() if name in policies},
        "vectors": [
            _head(vector, lambda path, group, array: array_text(array)) for vector in vectors
        ],
    }
    return dump(whole)


def from_json(data: bytes) -> list[Vector]:
    """The vectors of `to_json`.

    Raises:
        FileError: the bytes are not such a file.
    """
    return _vectors(parse_json(data), lambda path, text: text_array(text))


def to_safetensors(vectors: Sequence[Vector]) -> bytes:
    """A bulk file: one tensor named ID/inputs/NAME, ID/expected/NAME for every array.

    The entry "vectors" of the metadata is JSON: the vectors, with element types in place of arrays.
    """
    tensors: list[tuple[str, Array]] = []

    def stand_in(path: str, group: str, array: Array) -> str:
        tensors.append((path, array))
        return dtype_name(array)

    heads = [_head(vector, stand_in) for vector in vectors]
    # Readers want no tensor off its alignment: the widest elements come first.
    tensors.sort(key=lambda tensor: -tensor[1].itemsize)
    plain = {**heading(), "vectors": heads}
    header: dict[str, Any] = {"__metadata__": {"vectors": dump(plain, None).decode("utf-8")}}
    end = 0
    for path, array in tensors:
        header[path] = {
            "dtype": _SAFETENSORS[dtype_name(array)],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = dump(header, None)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + _bytes(array for _, array in tensors)


def from_safetensors(data: bytes) -> list[Vector]:
    """The vectors of `to_safetensors`.

    Raises:
        FileError: the bytes are not such a file.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER):
        raise FileError(f"a header of {length} bytes in a file of {len(data)}")
    header = parse_json(data[8 : 8 + length])
    body = memoryview(data)[8 + length :]
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise FileError("no metadata in the header")
    text = header.pop("__metadata__").get("vectors")
    if not isinstance(text, str):
        raise FileError("no vectors in the metadata")
    ranges = []
    for path, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise FileError(f"not a tensor: {path[:60]!r}")
        ranges.append(_range(path, entry["data_offsets"]))
    _check_cover(ranges, len(body))

    def array(path: str, name: Any) -> Array:
        entry = header.pop(path, None)
        if entry is None:
            raise FileError(f"no tensor {path[:60]!r}")
        if not isinstance(name, str) or _SAFETENSORS.get(name) != entry["dtype"]:
            raise FileError(f"{path[:60]!r}: {str(entry['dtype'])[:20]} for {str(name)[:20]}")
        first, last = entry["data_offsets"]
        return _array(path, body[first:last], name, entry["shape"])

    vectors = _vectors(parse_json(text.encode("utf-8", "replace")), array)
    if header:
        raise FileError(f"a tensor of no vector: {next(iter(header))[:60]!r}")
    return vectors


def to_raw(vectors: Sequence[Vector], binary: str) -> tuple[bytes, bytes]:
    """A raw pair: JSON that says what lies where, and the little-endian bytes of all arrays.

    Args:
        vectors: what to write.
        binary: the name that the second file will have.

    Returns:
        The JSON and the bytes. Every array starts at a multiple of 16.
    """
    parts: list[bytes] = []
    end = 0

    def stand_in(path: str, group: str, array: Array) -> dict[str, Any]:
        nonlocal end
        entry = {
            "dtype": dtype_name(array),
            "shape": list(array.shape),
            "offset": end,
            "bytes": array.nbytes,
        }
        padded = _bytes([array]) + bytes(-array.nbytes % 16)
        parts.append(padded)
        end += len(padded)
        return entry

    lines = b",\n".join(dump(_head(vector, stand_in), None) for vector in vectors)
    whole = {**heading(), "binary": binary, "byte_order": "little", "bytes": end, "vectors": []}
    return dump(whole, None).removesuffix(b"]}") + b"\n" + lines + b"\n]}\n", b"".join(parts)


def from_raw(data: bytes, body: bytes) -> list[Vector]:
    """The vectors of `to_raw`.

    Raises:
        FileError: the bytes are not such a pair.
    """
    whole = parse_json(data)
    if not isinstance(whole, dict) or whole.get("byte_order") != "little":
        raise FileError("byte_order is not little")
    if whole.get("bytes") != len(body):
        raise FileError(f"{str(whole.get('bytes'))[:20]} bytes are said, {len(body)} are there")

    def array(path: str, entry: Any) -> Array:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "offset", "bytes"}:
            raise FileError(f"{path[:60]!r}: not an array: {str(entry)[:60]}")
        first, size = entry["offset"], entry["bytes"]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (first, size)):
            raise FileError(f"{path[:60]!r}: offset {str(first)[:20]}, bytes {str(size)[:20]}")
        if first + size > len(body):
            raise FileError(f"{path[:60]!r} ends at byte {first + size} of {len(body)}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise FileError(f"{path[:60]!r}: no element type {str(entry['dtype'])[:20]!r}")
        return _array(path, memoryview(body)[first : first + size], entry["dtype"], entry["shape"])

    return _vectors(whole, array)


def _bytes(arrays: Iterable[Array]) -> bytes:
    """Elements of arrays one after the other, little-endian."""
    return b"".join(
        np.ascontiguousarray(array, DTYPES[dtype_name(array)]).tobytes() for array in arrays
    )


def _range(path: str, offsets: Any) -> tuple[int, int]:
    """First byte and end of a tensor."""
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) for n in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise FileError(f"{path[:60]!r}: offsets {str(offsets)[:60]}")
    return offsets[0], offsets[1]


def _check_cover(ranges: list[tuple[int, int]], size: int) -> None:
    """Tensors follow each other without a gap and fill the file."""
    end = 0
    for first, last in sorted(ranges):
        if first != end:
            raise FileError(f"a tensor starts at byte {first}, the one before ends at {end}")
        end = last
    if end != size:
        raise FileError(f"tensors of {end} bytes in a body of {size}: the file is torn")


def _array(path: str, data: memoryview, name: str, shape: Any) -> Array:
    """An array from its bytes."""
    sizes = _shape(shape)
    dtype = DTYPES[name]
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise FileError(f"{path[:60]!r}: {name}{list(sizes)} in {len(data)} bytes")
    if name == "bool" and bool((np.frombuffer(data, np.uint8) > 1).any()):
        raise FileError(f"{path[:60]!r}: a bool that is neither 0 nor 1")
    return np.frombuffer(data, dtype).reshape(sizes)
