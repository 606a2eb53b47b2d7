"""A vector: one call of one operation, its inputs, and what must come out of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num import reference
from dsv4num.formats import get_layout, get_rule, get_scalar

Array = NDArray[Any]
Parameter = str | int | float | bool | None


# Named one by one: what is added elsewhere makes no file of vectors another one.
SCALARS = {name: get_scalar(name) for name in ("ue8m0", "e4m3fn", "e4m3fnuz", "e2m1", "bf16")}
RULES = {
    name: get_rule(name)
    for name in ("P1/64", "P1/32", "P1/128", "P1/64-fnuz", "P1/32-fnuz", "M1/32", "N2/16")
}
LAYOUTS = {
    name: get_layout(name)
    for name in (
        "v4",
        "v4_fnuz",
        "v41_mxfp8",
        "v41_mxfp8_inline",
        "v41_mxfp8_fnuz",
        "v41_nvfp4",
        "v41_nvfp4_inline",
        "indexer_fp8",
        "indexer_mxfp4",
    )
}


@dataclass(frozen=True)
class Operation:
    """An operation that vectors are about.

    Attributes:
        clause: the SPEC clause.
        returns: names of the values that it returns; empty where it writes into its arguments.
        any_nan: whether SPEC 1.1 leaves open which NaN it gives.
        positional: names of its positional arguments, in order.
        keywords: names of its keyword arguments.
    """

    clause: str
    returns: tuple[str, ...]
    any_nan: bool
    positional: tuple[str, ...]
    keywords: tuple[str, ...]


def cos_sin_rows(positions: Array, theta: float, factor: float) -> Array:
    """Rows of the table of clause 5.5, as `build_cos_sin_cache` makes it."""
    table = reference.build_cos_sin_cache(int(positions.max()) + 1, theta=theta, factor=factor)
    return table[positions]


def _function(name: str) -> Callable[..., Any]:
    """Looked up at every call, so that a test may put a faulty one in its place."""
    found: Callable[..., Any] = cos_sin_rows if name == "cos_sin_rows" else getattr(reference, name)
    return found


def _operation(name: str, clause: str, *returns: str, any_nan: bool = False) -> Operation:
    parameters = inspect.signature(_function(name)).parameters.values()
    keywords = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return Operation(clause, returns, any_nan, positional, keywords)


OPERATIONS = {
    "encode": _operation("encode", "2", "codes"),
    "decode": _operation("decode", "2", "x"),
    "pack": _operation("pack", "2.6", "packed"),
    "unpack": _operation("unpack", "2.6", "codes"),
    "encode_scale": _operation("encode_scale", "3", "scale_codes"),
    "quantize": _operation("quantize", "3", "codes", "scale_codes"),
    "dequantize": _operation("dequantize", "3.5", "x", any_nan=True),
    "exp32": _operation("exp32", "1.3", "y", any_nan=True),
    "tree_sum": _operation("tree_sum", "1.2", "y", any_nan=True),
    "inv_rms": _operation("inv_rms", "1.4", "y", any_nan=True),
    "rms_norm": _operation("rms_norm", "1.4", "y", any_nan=True),
    "round_bf16": _operation("round_bf16", "1.5", "y"),
    "rotate_gptj": _operation("rotate_gptj", "5.5", "y", any_nan=True),
    "cos_sin_rows": _operation("cos_sin_rows", "5.5", "rows"),
    "quantize_and_insert_k_cache": _operation("quantize_and_insert_k_cache", "5.1"),
    "dequantize_and_gather_k_cache": _operation("dequantize_and_gather_k_cache", "5.2"),
    "save_partial_states": _operation("save_partial_states", "5.3"),
    "compress_norm_rope_store": _operation("compress_norm_rope_store", "5.4"),
    "rope_quant_insert": _operation("rope_quant_insert", "5.6"),
    "pool_ring_latent": _operation("pool_ring_latent", "5.10"),
    "compute_global_topk_indices_and_lens": _operation(
        "compute_global_topk_indices_and_lens", "5.7", "slots", "lens"
    ),
    "combine_topk_swa_indices": _operation("combine_topk_swa_indices", "5.8", "rows", "lens"),
    "build_flashinfer_mixed_sparse_indices": _operation(
        "build_flashinfer_mixed_sparse_indices", "5.9", "slots", "lens"
    ),
}

#: What an implementation may choose.
POLICIES = {
    "exact": "These bytes and no others.",
    "any_nan": "An fp32 NaN of the result, written 7fc00000, may be any NaN (SPEC 1.1).",
    "may_refuse": "A value is out of range (SPEC 6.2): refuse and write nothing, or give these bytes.",
    "known_difference_1": "Exact here; production makes NaN elements the largest code (SPEC 7, 1).",
    "known_difference_2": "Exact here; production reads UE8M0 code 00 as zero (SPEC 7, 2).",
    "known_difference_3": "Exact here; production reads UE8M0 code ff as infinity (SPEC 7, 3).",
    "known_difference_4": "Exact here; production reads NVFP4 code 8 as +0 (SPEC 7, 4).",
    "known_difference_5": "Exact here; production may choose a scale one step smaller (SPEC 7, 5).",
    "known_difference_6": "Exact here; production approximates exp and 1/sqrt (SPEC 7, 6).",
}

#: What a vector is there to show.
FLAGS = {
    "Alignment": "Columns are rounded up; what is added is -1.",
    "Any": "Values from the generator: no edge in particular, many at once.",
    "Boundary": "Every value of a format, every middle between two, and the fp32 numbers beside them.",
    "EveryCode": "Every code there is.",
    "Floor": "At, above or below the floor of a rule.",
    "Infinity": "An infinity goes in.",
    "Length": "A length that counts, or does not count, entries that are -1.",
    "Missing": "Positions before the first of a sequence.",
    "NaN": "A NaN goes in.",
    "NearTie": "One fp32 step beside a middle: shows rounding twice.",
    "Octave": "At or beside the amax where the scale steps.",
    "Order": "Shows the order in which a sum is added.",
    "OutOfRange": "Values that the reference refuses and a kernel skips.",
    "Overlap": "Two groups in one window, each in its own lane.",
    "Packing": "Two elements in a byte, or the order of bytes.",
    "Page": "Where a record lies: planes, strides, borders of pages.",
    "Position": "The row of the cosine table that an entry is rotated with.",
    "Rounding": "Shows an operation that is fused, replaced by a reciprocal, or not rounded.",
    "Saturation": "Larger than the largest value.",
    "SignedZero": "-0, or a negative value that rounds to zero.",
    "Skipped": "Tokens whose slot is below 0.",
    "Subnormal": "Subnormal in fp32 or in the format.",
    "Tie": "Half way between two codes.",
    "Unowned": "Bytes, rows or columns that must keep what they held.",
    "Window": "Where a window begins and ends.",
}


@dataclass(frozen=True)
class Vector:
    """One call and its result.

    Attributes:
        id: unique among all vectors, and never given to another one.
        operation: a key of `OPERATIONS`.
        comment: what it is about.
        clause: the SPEC clause.
        flags: keys of `FLAGS`.
        policy: keys of `POLICIES`.
        parameters: arguments that are no arrays.
        inputs: arrays; one that is written holds what it held before the call.
        expected: arrays that are returned, and arrays of `inputs` after the call, every byte of them.
        reference: arguments that differ for the reference, which refuses what kernels skip.
    """

    id: str
    operation: str
    comment: str
    clause: str
    flags: tuple[str, ...]
    policy: tuple[str, ...]
    parameters: dict[str, Parameter]
    inputs: dict[str, Array]
    expected: dict[str, Array] = field(default_factory=dict)
    reference: dict[str, Array | Parameter] = field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the call writes."""
        return tuple(name for name in self.expected if name in self.inputs)


def make(
    id: str,
    operation: str,
    comment: str,
    parameters: dict[str, Parameter] | None = None,
    *,
    flags: tuple[str, ...],
    policy: tuple[str, ...] = (),
    clause: str = "",
    written: tuple[str, ...] = (),
    reference: dict[str, Array | Parameter] | None = None,
    **inputs: Array,
) -> Vector:
    """A vector, its results computed by the reference.

    Arguments are as in `Vector`; `written` names the inputs that the call writes. The clause is that
    of the operation if none is given. What values out of range and NaN allow is added to the policy.
    """
    about = OPERATIONS[operation]
    blank = Vector(
        id,
        operation,
        comment,
        clause or about.clause,
        flags,
        policy,
        parameters or {},
        inputs,
        dict.fromkeys(written or about.returns, np.empty(0)),
        reference or {},
    )
    results = compute(blank)
    more = list(policy)
    if "OutOfRange" in flags:
        more.append("may_refuse")
    if about.any_nan and any(bool(np.isnan(array).any()) for array in results.values()):
        more.append("any_nan")
    return replace(blank, policy=tuple(more) or ("exact",), expected=results)


def compute(
    vector: Vector, *, place: Callable[[Array], Array] = np.array, skips: bool = False
) -> dict[str, Array]:
    """What the reference gives.

    Args:
        vector: whose inputs to use; they stay as they are.
        place: copies each input array to where the call finds it.
        skips: call with the arguments of a kernel, values out of range among them.

    Returns:
        The arrays of `expected`, by name. A NaN that SPEC 1.1 leaves open is 7fc00000.

    Raises:
        ArgumentError: the reference refuses the call.
    """
    about = OPERATIONS[vector.operation]
    given: dict[str, Any] = {**vector.parameters, **vector.inputs}
    if not skips:
        given.update(vector.reference)
    call = {n: place(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    results = {name: call[name] for name in vector.written}
    positional = [call.pop(name) for name in about.positional if name in call]
    with np.errstate(all="ignore"):
        returned = _function(vector.operation)(*positional, **call)
    values = returned if isinstance(returned, tuple) else (returned,)
    results.update(zip(about.returns, values, strict=False))
    found = {name: np.array(results[name]) for name in vector.expected}
    if about.any_nan:
        for array in found.values():
            array[np.isnan(array)] = np.float32(np.nan)
    return found


def bits(array: Array) -> Array:
    """The elements as unsigned integers of their size."""
    if array.dtype.kind in "iub":
        return array
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def differences(vector: Vector, found: dict[str, Array]) -> Iterator[str]:
    """One line for each array that is not as the vector expects.

    Args:
        vector: what is expected, and by which policy.
        found: what an implementation gave, by the names of `expected`.

    Example:
        >>> from dsv4num.vectors.vector import differences, make
        >>> x = np.float32([0.3, 1])
        >>> vector = make("a", "encode", "two", {"fmt": "e4m3fn"}, flags=("Any",), x=x)
        >>> list(differences(vector, {"codes": np.uint8([0x2A, 0x39])}))
        ['codes[1]: expected 38, got 39 (1 of 2 elements differ)']
    """
    for name, want in vector.expected.items():
        if name not in found:
            yield f"{name}: not given"
            continue
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            yield f"{name}: expected {_kind(want)}, got {_kind(got)}"
            continue
        wrong = bits(got) != bits(want)
        if "any_nan" in vector.policy and want.dtype == np.float32:
            wrong &= ~(np.isnan(got) & np.isnan(want))
        if bool(wrong.any()):
            first = int(np.flatnonzero(wrong)[0])
            place = ", ".join(str(int(n)) for n in np.unravel_index(first, want.shape))
            pair = f"expected {_word(want.flat[first])}, got {_word(got.flat[first])}"
            count = f"{int(wrong.sum())} of {want.size} elements differ"
            yield f"{name}[{place}]: {pair} ({count})"


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _word(element: Any) -> str:
    """Bits of an element in hexadecimal; integers that may be negative in decimal."""
    if element.dtype.kind in "ib":
        return str(int(element))
    return f"{int(bits(np.array([element]))[0]):0{2 * element.itemsize}x}"


def fp32(*values: float) -> NDArray[np.float32]:
    """An fp32 array."""
    with np.errstate(over="ignore", under="ignore"):
        return np.array(values, np.float64).astype(np.float32)


def from_bits(*values: int) -> NDArray[np.float32]:
    """An fp32 array from bit patterns."""
    return np.array(values, np.uint32).view(np.float32)


def bf16(values: Array) -> Array:
    """Fp32 values that are bf16, as bf16."""
    rounded: Array = reference.round_bf16(np.ascontiguousarray(values, np.float32))
    assert bool(np.array_equal(rounded.astype(np.float32), values, equal_nan=True))
    return rounded


def bf16_bits(values: Array) -> Array:
    """bf16 numbers from bit patterns."""
    return np.ascontiguousarray(values).astype(np.uint16).view(ml_dtypes.bfloat16)
