"""The registry: operations, what they are verified over, and where an output byte belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4num.arguments import check_cache
from dsv4num.arguments.compressor import COMPRESS_LAYOUTS, LATENT_LAYOUTS
from dsv4num.formats import FP32, LAYOUTS, RULES, SCALARS, FloatFormat, get_rule, get_scalar
from dsv4num.reference.record import describe
from dsv4num.verify import exhaustive
from dsv4num.verify.case import Array, Block, Case, Level
from dsv4num.verify.cases import arithmetic, compressor, group, paged_cache, scalar, sparse_index


@dataclass(frozen=True)
class Place:
    """Where a byte of an output belongs.

    Attributes:
        text: for people: page, slot, row, field, element.
        kind: "codes", "scale", "raw", "pad", "value", or "unowned" for a byte that the operation does
            not own.
        format: the format of the code that holds the byte, if it has one.
        first: the byte of the buffer where that code starts.
        nbytes: the bytes of that code.
        packed: whether the byte holds two codes of four bits.
    """

    text: str
    kind: str
    format: FloatFormat | None
    first: int
    nbytes: int
    packed: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: its public name in `dsv4num.reference` and `dsv4num.gpu`.
        variants: formats, rules or layouts that it is verified over.
        cases: makes the cases of a variant at the levels quick and full.
        returns: names of the values it returns; empty for operations that write in place.
        locate: finds the place of a byte: case, output name, byte within the output's buffer, byte
            where the output starts in it.
        clause: the SPEC clause.
        exhaustive: the cases of a variant that together are every input; None where an operation has
            too many inputs for that.
    """

    name: str
    variants: tuple[str, ...]
    cases: Callable[[str, Level, int], Iterator[Case]]
    locate: Callable[[Case, str, int, int], Place]
    clause: str
    returns: tuple[str, ...] = ()
    exhaustive: Callable[[str], Iterator[Block]] | None = None


def locate_in_cache(case: Case, name: str, byte: int, start: int) -> Place:
    """The place of a byte of a paged cache."""
    cache = check_cache(
        describe(name, case.arguments[name]),
        case.keywords.get("kv_block_size") or case.arguments["block_size"],
        case.keywords["layout"],
        written=False,
    )
    within = byte - start
    page, offset = divmod(within, cache.page_stride) if within >= 0 else (-1, 0)
    if not 0 <= page < cache.num_blocks:
        return Place(f"byte {within} outside the cache", "unowned", None, byte, 1)
    for index, plane in enumerate(cache.layout.planes):
        first = cache.layout.plane_offset(index, cache.block_size)
        row, column = divmod(offset - first, plane.row_bytes)
        if not 0 <= row < cache.block_size:
            continue
        slot = page * cache.block_size + row
        for field in plane.fields:
            into = column - field.offset
            if not 0 <= into < field.nbytes:
                continue
            size = max(1, field.format.width // 8) if field.format else 1
            per_byte = 2 if field.format and field.format.width == 4 else 1
            element = into // size * per_byte
            meaning = f"{field.name}[{element}]"
            if field.kind in ("codes", "raw"):
                meaning += f" (dim {field.dims[0] + element})"
            text = f"page {page} slot {slot} row {row} {meaning}"
            return Place(text, field.kind, field.format, byte - into % size, size, per_byte == 2)
    return Place(f"page {page} byte {offset}, owned by no row", "unowned", None, byte, 1)


#: What the axes of an output that is no paged cache are.
_AXES = {
    "out": ("request", "row", "dim"),
    "latent_out": ("token", "dim"),
    "state_cache": ("block", "row", "column"),
}


def locate_in_view(case: Case, name: str, byte: int, start: int) -> Place:
    """The place of a byte of a bf16 or fp32 output, by the strides of its axes."""
    view = case.arguments[name]
    within = byte - start
    texts = []
    for axis, size, stride in zip(_AXES[name], view.shape, view.strides, strict=True):
        index = within // stride if within >= 0 else size
        if index >= size:
            return Place(f"byte {byte - start}, owned by no row", "unowned", None, byte, 1)
        within -= index * stride
        texts.append(f"{axis} {index}")
    fmt = get_scalar("bf16") if view.itemsize == 2 else FP32
    return Place(" ".join(texts), "value", fmt, byte - within, view.itemsize)


def locate_in_output(case: Case, name: str, byte: int, start: int) -> Place:
    """The place of a byte of whatever the operation writes."""
    locate = locate_in_cache if name in ("k_cache", "kv_cache") else locate_in_view
    return locate(case, name, byte, start)


def locate_in_array(case: Case, name: str, byte: int, start: int) -> Place:
    """The place of a byte of a returned array, which is contiguous; with its input, if it has one."""
    fmt, rule = case.arguments.get("fmt"), case.arguments.get("rule")
    half = get_scalar("bf16")
    if name == "scale_codes":
        text = f"{name}[{byte}]{_input_of(case, name, byte)}"
        return Place(text, "scale", get_rule(case.arguments["rule"]).scale, byte, 1)
    if name in ("x", "y"):
        kind, element, size = "value", half if case.half else FP32, 2 if case.half else 4
    elif fmt == "bf16":
        kind, element, size = "value", half, 2
    else:
        kind, size = "codes", 1
        element = get_rule(rule).element if rule else get_scalar(fmt or "e2m1")
    index = byte // size
    text = f"{name}[{index}]{_input_of(case, name, index)}"
    return Place(text, kind, element, byte - byte % size, size, packed=name == "packed")


def _input_of(case: Case, output: str, index: int) -> str:
    """The input that an element of an output was made from, bits and value, if there is just one."""
    given = case.arguments
    if not ("fmt" in given or "rule" in given or set(given) == {"x"}):
        return ""  # sums, rotations, packing
    name = next(iter(given))
    values = given[name].ravel()
    if name == "x" and "rule" in given:
        group = get_rule(given["rule"]).group
        first = index * group if output == "scale_codes" else index // group * group
        amax = _number(_amax(values[first : first + group]))
        if output == "scale_codes":
            return f" of amax = {amax}"
        return f" of x = {_number(values[index : index + 1])} with amax = {amax}"
    text = f" of {name} = {_number(values[index : index + 1])}"
    if "scale_codes" in given:
        scale = index // get_rule(given["rule"]).group
        text += f", scale code {_number(given['scale_codes'].ravel()[scale : scale + 1])}"
    return text


def _number(element: Array) -> str:
    """The bits of an array of one element, and its value if it is not a code."""
    bits = int(element.view(f"u{element.itemsize}")[0])
    text = f"0x{bits:0{2 * element.itemsize}X}"
    return text if element.dtype.kind == "u" else f"{text} = {float(element[0]):.9g}"


def _amax(values: Array) -> Array:
    """The largest magnitude that is not NaN (clause 1.6), as an array of one element."""
    bits = values.view(f"u{values.itemsize}")
    half = 1 << (8 * values.itemsize - 1)
    infinity = 0x7F80 << (8 * values.itemsize - 16)
    sizes = bits & bits.dtype.type(half - 1)
    sizes[sizes > infinity] = 0
    largest: Array = sizes.max(keepdims=True).view(values.dtype)
    return largest


def locate_in_indices(case: Case, name: str, byte: int, start: int) -> Place:
    """The place of a byte of the rows of indices, or of the lengths, of a sparse index builder."""
    entry = byte // 4
    if name == "lens":
        return Place(f"token {entry} length", "value", None, 4 * entry, 4)
    given = case.arguments
    if "M" in given:  # SPEC 5.8
        columns = -(-(given["topk"] + given["window_size"]) // 128) * 128
        token, column = divmod(entry, columns)
        meaning = "compressed or window"
    elif "swa_block_size" in given:  # SPEC 5.9
        decode = given["decode_compressed_indices"]
        width = max(given["topk"], 0 if decode is None else decode.shape[1])
        window = given["decode_swa_indices"].shape[1]
        token, column = divmod(entry, window - (-width // 4) * 4)
        kind = "decode" if token < len(given["decode_swa_indices"]) else "prefill"
        part = f"window[{column}]" if column < window else f"compressed[{column - window}]"
        meaning = f"{kind} {part}"
    else:  # SPEC 5.7
        token, column = divmod(entry, given["topk_indices"].shape[1])
        meaning = f"index {given['topk_indices'][token, column]}"
    return Place(f"token {token} column {column}, {meaning}", "value", None, 4 * entry, 4)


_LAYOUTS = tuple(LAYOUTS)
_SCALARS = tuple(SCALARS)
_RULES = tuple(RULES)

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "encode",
            _SCALARS,
            scalar.encode_cases,
            locate_in_array,
            "2",
            ("codes",),
            exhaustive.every_fp32,
        ),
        Operation(
            "decode",
            _SCALARS,
            scalar.decode_cases,
            locate_in_array,
            "2",
            ("x",),
            exhaustive.all_of(scalar.decode_cases),
        ),
        Operation(
            "pack",
            ("e2m1",),
            scalar.pack_cases,
            locate_in_array,
            "2.6",
            ("packed",),
            exhaustive.all_of(scalar.pack_cases),
        ),
        Operation(
            "unpack",
            ("e2m1",),
            scalar.unpack_cases,
            locate_in_array,
            "2.6",
            ("codes",),
            exhaustive.all_of(scalar.unpack_cases),
        ),
        Operation(
            "encode_scale",
            _RULES,
            group.encode_scale_cases,
            locate_in_array,
            "3",
            ("scale_codes",),
            exhaustive.every_amax,
        ),
        Operation(
            "quantize",
            _RULES,
            group.quantize_cases,
            locate_in_array,
            "3",
            ("codes", "scale_codes"),
            exhaustive.every_bf16_amax_and_element,
        ),
        Operation(
            "dequantize",
            _RULES,
            group.dequantize_cases,
            locate_in_array,
            "3.5",
            ("x",),
            exhaustive.all_of(group.dequantize_cases),
        ),
        Operation(
            "quantize_and_insert_k_cache",
            _LAYOUTS,
            paged_cache.insert_cases,
            locate_in_output,
            "5.1",
        ),
        Operation(
            "dequantize_and_gather_k_cache",
            _LAYOUTS,
            paged_cache.gather_cases,
            locate_in_output,
            "5.2",
        ),
        Operation(
            "exp32",
            ("fp32",),
            arithmetic.exp32_cases,
            locate_in_array,
            "1.3",
            ("y",),
            exhaustive.every_exponent,
        ),
        Operation("tree_sum", ("fp32",), arithmetic.tree_sum_cases, locate_in_array, "1.2", ("y",)),
        Operation("inv_rms", ("fp32",), arithmetic.inv_rms_cases, locate_in_array, "1.4", ("y",)),
        Operation("rms_norm", ("fp32",), arithmetic.rms_norm_cases, locate_in_array, "1.4", ("y",)),
        Operation(
            "round_bf16", ("fp32",), arithmetic.round_bf16_cases, locate_in_array, "1.5", ("y",)
        ),
        Operation(
            "rotate_gptj", ("fp32",), arithmetic.rotate_cases, locate_in_array, "5.5", ("y",)
        ),
        Operation(
            "save_partial_states",
            ("csa", "hca", "indexer"),
            compressor.save_states_cases,
            locate_in_output,
            "5.3",
        ),
        Operation(
            "compress_norm_rope_store",
            COMPRESS_LAYOUTS,
            compressor.compress_cases,
            locate_in_output,
            "5.4",
        ),
        Operation(
            "rope_quant_insert",
            LATENT_LAYOUTS,
            compressor.rope_quant_cases,
            locate_in_output,
            "5.6",
        ),
        Operation(
            "pool_ring_latent",
            ("ratio1", "ratio2"),
            compressor.ring_cases,
            locate_in_output,
            "5.10",
        ),
        Operation(
            "compute_global_topk_indices_and_lens",
            ("bs1", "bs16", "bs20", "bs64", "bs128"),
            sparse_index.global_topk_cases,
            locate_in_indices,
            "5.7",
            ("indices", "lens"),
        ),
        Operation(
            "combine_topk_swa_indices",
            ("ratio0", "ratio1", "ratio2", "ratio4", "ratio128"),
            sparse_index.combine_cases,
            locate_in_indices,
            "5.8",
            ("indices", "lens"),
        ),
        Operation(
            "build_flashinfer_mixed_sparse_indices",
            ("absent", "global", "global_lens", "local", "window_only"),
            sparse_index.mixed_cases,
            locate_in_indices,
            "5.9",
            ("indices", "lens"),
        ),
    )
}
