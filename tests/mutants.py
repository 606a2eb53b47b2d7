"""Faulty implementations, each with one fault that the field has met, for the cases of `verify`.

A mutant is the reference with one function replaced by a faulty one, wherever the reference calls it.
A case kills it if a byte of an output differs. `python tests/mutants.py` lists the cases that killed
each one; `--all` runs every operation, not only those that the fault can touch.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import dsv4num.reference
from dsv4num.errors import ArgumentError
from dsv4num.formats import (
    BF16,
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    FP32,
    UE8M0,
    get_layout,
    get_rule,
    get_scalar,
)
from dsv4num.formats.arithmetic import LOG2E
from dsv4num.reference import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compress_norm_rope_store,
    compute_global_topk_indices_and_lens,
    decode,
    dequantize_and_gather_k_cache,
    encode,
    encode_scale,
    exp32,
    inv_rms,
    pack,
    pool_ring_latent,
    quantize,
    quantize_and_insert_k_cache,
    read_records,
    rms_norm,
    rope_quant_insert,
    rotate_gptj,
    round_bf16,
    save_partial_states,
    tree_sum,
    unpack,
    write_records,
)
from dsv4num.reference.compressor import (
    _check_ring,
    _chunk_borders,
    _pool,
    _read_states,
    _rotate_tail,
    _window,
)
from dsv4num.reference.group import apply_scales
from dsv4num.reference.record import _bf16_bits, _columns, _planes, _store_scales, load_scales
from dsv4num.reference.sparse_index import _compressed_count, _mapped, _rounded_up
from dsv4num.verify.call import filled
from dsv4num.verify.case import Case, flat, rebase
from dsv4num.verify.operations import OPERATIONS, Operation

Function = Callable[..., Any]
Array = Any

ENCODE, DECODE, PACK, UNPACK = "encode", "decode", "pack", "unpack"
SCALE, QUANTIZE, DEQUANTIZE = "encode_scale", "quantize", "dequantize"
INSERT, GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
SAVE, COMPRESS = "save_partial_states", "compress_norm_rope_store"
LATENT, RING = "rope_quant_insert", "pool_ring_latent"
GLOBAL, COMBINE = "compute_global_topk_indices_and_lens", "combine_topk_swa_indices"
MIXED = "build_flashinfer_mixed_sparse_indices"
FILLS = (0xA5, 0x5A)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: for lists.
        fault: what is wrong, in a sentence.
        replaced: pairs of a function of the reference and the faulty one.
        operations: the operations that the fault can touch, the likeliest to show it first.
        skips: it takes the arguments of a kernel, which skips what the reference refuses.
    """

    name: str
    fault: str
    replaced: tuple[tuple[Function, Function], ...]
    operations: tuple[str, ...]
    skips: bool = False


MUTANTS: dict[str, Mutant] = {}


def instead_of(
    right: Function, *operations: str, skips: bool = False, also: tuple[Any, ...] = ()
) -> Callable[[Function], Function]:
    """Registers the function below as the faulty one that stands in for `right`."""

    def register(wrong: Function) -> Function:
        name = wrong.__name__.strip("_").replace("_", " ")
        assert wrong.__doc__ and name not in MUTANTS
        pairs = ((right, wrong), *also)
        MUTANTS[name] = Mutant(name, " ".join(wrong.__doc__.split()), pairs, operations, skips)
        return wrong

    return register


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The reference with the fault in it: every module that names the right function gets the other."""
    changed = []
    prefix = "dsv4num.reference"
    for module in [m for n, m in sys.modules.items() if n == prefix or n.startswith(prefix + ".")]:
        for attribute, value in list(vars(module).items()):
            for right, wrong in mutant.replaced:
                if value is right:
                    changed.append((module, attribute, right))
                    setattr(module, attribute, wrong)
    assert changed, f"{mutant.name}: nothing replaced"
    try:
        yield
    finally:
        for module, attribute, right in changed:
            setattr(module, attribute, right)


# --- elements -------------------------------------------------------------------------


def _rounded(x: Array, fmt: Any, choose: Callable[[Array, Array], Array]) -> Array:
    """Codes of a format whose magnitudes `choose` picks among the values of the format."""
    chosen = get_scalar(fmt)
    right = encode(x, chosen)
    values = decode(np.arange(chosen.max_code + 1, dtype=np.uint8), chosen)
    magnitude = np.abs(x.astype(np.float32))
    codes = choose(values, magnitude).astype(np.uint8)
    signed = (right & np.uint8(chosen.sign_code)) | codes
    return np.where(np.isnan(magnitude), right, signed).astype(np.uint8)


def _middles(values: Array) -> Array:
    return (values[1:] + values[:-1]) / 2


def _away(values: Array, magnitude: Array) -> Array:
    return np.searchsorted(_middles(values), magnitude, side="right")


def _toward(values: Array, magnitude: Array) -> Array:
    return np.searchsorted(_middles(values), magnitude, side="left")


def _cut(values: Array, magnitude: Array) -> Array:
    return np.searchsorted(values, magnitude, side="right") - 1


@instead_of(encode, ENCODE, QUANTIZE)
def fp4_ties_away(x: Array, fmt: Any) -> Array:
    """E2M1 midpoints go away from zero: 0.25 becomes 0.5."""
    return _rounded(x, fmt, _away) if get_scalar(fmt) is E2M1 else encode(x, fmt)


@instead_of(encode, ENCODE, QUANTIZE)
def fp4_ties_toward_zero(x: Array, fmt: Any) -> Array:
    """E2M1 midpoints go toward zero: 0.75 becomes 0.5."""
    return _rounded(x, fmt, _toward) if get_scalar(fmt) is E2M1 else encode(x, fmt)


@instead_of(encode, ENCODE, QUANTIZE)
def fp8_ties_away(x: Array, fmt: Any) -> Array:
    """E4M3 midpoints go away from zero: 17 becomes 18."""
    return _rounded(x, fmt, _away) if get_scalar(fmt) is E4M3FN else encode(x, fmt)


@instead_of(encode, ENCODE, QUANTIZE)
def fp8_truncated(x: Array, fmt: Any) -> Array:
    """E4M3 mantissas are cut off, not rounded."""
    return _rounded(x, fmt, _cut) if get_scalar(fmt) is E4M3FN else encode(x, fmt)


@instead_of(encode, ENCODE, QUANTIZE)
def fp8_through_truncated_fp16(x: Array, fmt: Any) -> Array:
    """E4M3 by way of fp16 that was cut off: 400.2 becomes a tie and goes to 384."""
    if get_scalar(fmt) is not E4M3FN:
        return encode(x, fmt)
    wide = x.astype(np.float32)
    half = wide.astype(np.float16)
    beyond = np.abs(half.astype(np.float32)) > np.abs(wide)
    half = np.where(beyond, np.nextafter(half, np.float16(0)), half)
    return encode(half.astype(np.float32), fmt)


@instead_of(encode, ENCODE)
def overflow_is_nan(x: Array, fmt: Any) -> Array:
    """E4M3 above 464 becomes NaN, as in libraries that do not saturate."""
    codes = encode(x, fmt)
    if get_scalar(fmt) is E4M3FN:
        codes[np.abs(x.astype(np.float32)) > 464] |= 0x7F
    return codes


@instead_of(encode, ENCODE, QUANTIZE)
def subnormals_flushed(x: Array, fmt: Any) -> Array:
    """E4M3 subnormals become zero."""
    codes = encode(x, fmt)
    if get_scalar(fmt) is E4M3FN:
        codes[(codes & 0x78) == 0] &= 0x80
    return codes


@instead_of(encode, ENCODE, QUANTIZE)
def zero_loses_its_sign(x: Array, fmt: Any) -> Array:
    """-0, and what rounds to it, is stored as +0."""
    codes = encode(x, fmt)
    chosen = get_scalar(fmt)
    return np.where(codes == chosen.sign_code, codes.dtype.type(0), codes)


@instead_of(encode, ENCODE, QUANTIZE)
def nan_is_zero(x: Array, fmt: Any) -> Array:
    """NaN is encoded as zero."""
    codes = encode(x, fmt)
    return np.where(np.isnan(x.astype(np.float32)), codes.dtype.type(0), codes)


@instead_of(encode, ENCODE, QUANTIZE)
def fnuz_negative_zero(x: Array, fmt: Any) -> Array:
    """What rounds to zero from below is 0x80 in FNUZ, where that is NaN."""
    codes = encode(x, fmt)
    if get_scalar(fmt) is E4M3FNUZ:
        codes[(codes == 0) & np.signbit(x.astype(np.float32))] = 0x80
    return codes


@instead_of(encode, ENCODE, QUANTIZE)
def fnuz_with_the_ocp_bias(x: Array, fmt: Any) -> Array:
    """An FNUZ cache is filled with OCP bytes."""
    return encode(x, E4M3FN if get_scalar(fmt) is E4M3FNUZ else fmt)


@instead_of(encode, ENCODE)
def fnuz_saturates_early(x: Array, fmt: Any) -> Array:
    """FNUZ from 128 on becomes 0x7F, because the exponent was compared before its bias changed."""
    codes = encode(x, fmt)
    if get_scalar(fmt) is E4M3FNUZ:
        codes[np.abs(x.astype(np.float32)) >= 128] |= 0x7F
    return codes


@instead_of(decode, DECODE, DEQUANTIZE, GATHER)
def ocp_read_as_fnuz(codes: Array, fmt: Any) -> Array:
    """OCP bytes are read as FNUZ: half of every value."""
    return decode(codes, E4M3FNUZ if get_scalar(fmt) is E4M3FN else fmt)


@instead_of(decode, DECODE, GATHER)
def every_code_is_normal(codes: Array, fmt: Any) -> Array:
    """E4M3 codes all have a hidden one: 0x01 is not 2**-9."""
    if get_scalar(fmt) is not E4M3FN:
        return decode(codes, fmt)
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    value = np.ldexp(1 + fraction / 8, exponent - 7).astype(np.float32)
    return np.where(codes & 0x80, -value, value)


@instead_of(decode, DECODE, GATHER)
def fp8_nan_is_480(codes: Array, fmt: Any) -> Array:
    """0x7F and 0xFF are read as 480."""
    values = decode(codes, fmt)
    if get_scalar(fmt) is E4M3FN:
        values[codes == 0x7F], values[codes == 0xFF] = 480, -480
    return values


@instead_of(decode, DECODE, GATHER)
def fp4_zero_is_half(codes: Array, fmt: Any) -> Array:
    """E2M1 code 0 is read by the rule of normal numbers, as 0.5."""
    values = decode(codes, fmt)
    if get_scalar(fmt) is E2M1:
        values[(codes & 7) == 0] += np.float32(0.5)
    return values


@instead_of(encode, ENCODE, GATHER, "round_bf16")
def bf16_half_up(x: Array, fmt: Any) -> Array:
    """bf16 ties go up: half of the last place is added and the rest cut off."""
    right = encode(x, fmt)
    if get_scalar(fmt) is not BF16:
        return right
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), right, ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16))


@instead_of(encode, ENCODE, GATHER, "round_bf16")
def bf16_truncated(x: Array, fmt: Any) -> Array:
    """bf16 is the upper half of fp32."""
    if get_scalar(fmt) is not BF16:
        return encode(x, fmt)
    cut = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), encode(x, fmt), cut)


@instead_of(encode, "round_bf16", ENCODE)
def bf16_nan_keeps_its_payload(x: Array, fmt: Any) -> Array:
    """A NaN is rounded like a number, so that some become infinity and some zero."""
    if get_scalar(fmt) is not BF16:
        return encode(x, fmt)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@instead_of(encode, "round_bf16", ENCODE)
def bf16_subnormals_flushed(x: Array, fmt: Any) -> Array:
    """fp32 subnormals are flushed to zero on their way to bf16."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return encode(np.where(tiny & ~np.isnan(x), x * 0, x), fmt)


@instead_of(pack, PACK, INSERT)
def nibbles_swapped(codes: Array) -> Array:
    """The even element is in the high nibble."""
    packed = pack(codes)
    return (packed << 4) | (packed >> 4)


@instead_of(pack, PACK, INSERT)
def nibbles_of_split_halves(codes: Array) -> Array:
    """Byte i holds elements i and i + n/2, not 2i and 2i + 1."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


@instead_of(unpack, UNPACK, GATHER)
def nibbles_read_swapped(packed: Array) -> Array:
    """The reader takes the high nibble first."""
    return unpack((packed << 4) | (packed >> 4))


# --- scales ---------------------------------------------------------------------------


def _scale_like(choose: Callable[[Array, Any], Array]) -> Function:
    """`encode_scale` of the power-of-two rules with another exponent: `choose` of amax and rule."""

    def wrong(amax: Array, rule: Any) -> Array:
        chosen = get_rule(rule)
        right = encode_scale(amax, chosen)
        if chosen.scale is not UE8M0:
            return right
        limited = np.maximum(amax, np.float32(chosen.floor))
        exponent = choose(limited, chosen)
        codes = np.clip(np.nan_to_num(exponent) + 127, 0, 254)
        return np.where(np.isinf(amax), right, codes).astype(np.uint8)

    return wrong


def _log2(x: Array) -> Array:
    """The logarithm as fp32, correctly rounded."""
    return np.log2(x.astype(np.float64)).astype(np.float32)


@instead_of(encode_scale, SCALE, QUANTIZE)
def ceil_of_log2(amax: Array, rule: Any) -> Array:
    """ceil(log2(amax / qmax)) in fp32: just above a power of two, log2 rounds down to the integer."""
    choose = _scale_like(lambda a, r: np.ceil(_log2(a / np.float32(r.qmax))))
    return choose(amax, rule)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def floor_of_log2(amax: Array, rule: Any) -> Array:
    """The exponent is rounded down: the largest element saturates."""
    return _scale_like(lambda a, r: np.floor(_log2(a / np.float32(r.qmax))))(amax, rule)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def log2_truncated(amax: Array, rule: Any) -> Array:
    """The exponent is converted to an integer, which cuts toward zero."""
    return _scale_like(lambda a, r: np.trunc(_log2(a / np.float32(r.qmax))))(amax, rule)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def nearest_exponent(amax: Array, rule: Any) -> Array:
    """The exponent is rounded to the nearest."""
    return _scale_like(lambda a, r: np.rint(_log2(a / np.float32(r.qmax))))(amax, rule)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def exponent_of_amax(amax: Array, rule: Any) -> Array:
    """floor(log2(amax)) less the exponent of the largest value, the rule of the MX standard."""
    return _scale_like(
        lambda a, r: np.floor(_log2(a)) - np.floor(np.log2(r.qmax)).astype(np.float32)
    )(amax, rule)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def floor_on_the_scale(amax: Array, rule: Any) -> Array:
    """1e-4 bounds the scale, not amax: an all-zero tile has code 114, not 105."""
    chosen = get_rule(rule)
    if chosen.scale is not UE8M0:
        return encode_scale(amax, chosen)
    return encode_scale(amax, replace(chosen, floor=chosen.floor * chosen.qmax))


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def no_floor(amax: Array, rule: Any) -> Array:
    """amax has no floor: an all-zero tile has the smallest scale there is."""
    return encode_scale(amax, replace(get_rule(rule), floor=0.0))


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def fp4_with_the_floor_of_fp8(amax: Array, rule: Any) -> Array:
    """The floor of MXFP4 blocks is 1e-4: a block of zeros has code 112, not 1."""
    chosen = get_rule(rule)
    floor = 1e-4 if chosen.element is E2M1 and chosen.scale is UE8M0 else chosen.floor
    return encode_scale(amax, replace(chosen, floor=float(np.float32(floor))))


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def fnuz_scaled_to_240(amax: Array, rule: Any) -> Array:
    """FNUZ rows are scaled to its largest value, 240, not to 224."""
    chosen = get_rule(rule)
    return encode_scale(amax, replace(chosen, qmax=240.0) if chosen.qmax == 224 else chosen)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def fnuz_scaled_to_448(amax: Array, rule: Any) -> Array:
    """FNUZ rows are scaled to the largest value of OCP."""
    chosen = get_rule(rule)
    return encode_scale(amax, replace(chosen, qmax=448.0) if chosen.qmax == 224 else chosen)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def infinite_scale_capped(amax: Array, rule: Any) -> Array:
    """An infinity in a tile gives code 254, not 255."""
    codes = encode_scale(amax, rule)
    return np.minimum(codes, np.uint8(254)) if get_rule(rule).scale is UE8M0 else codes


@instead_of(encode_scale, SCALE, QUANTIZE)
def nvfp4_divided_by_6(amax: Array, rule: Any) -> Array:
    """The NVFP4 scale is amax / 6, not amax * fp32(1/6)."""
    chosen = get_rule(rule)
    if chosen.scale is UE8M0:
        return encode_scale(amax, chosen)
    return encode(np.clip(amax / np.float32(6), np.float32(chosen.floor), np.float32(448)), E4M3FN)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def nvfp4_scale_rounded_up(amax: Array, rule: Any) -> Array:
    """The NVFP4 scale is rounded up, so that the largest element never saturates."""
    chosen = get_rule(rule)
    right = encode_scale(amax, chosen)
    if chosen.scale is UE8M0:
        return right
    small = decode(right, E4M3FN) < amax * np.float32(chosen.amax_factor)
    return np.minimum(right + small, 0x7E).astype(np.uint8)


@instead_of(encode_scale, SCALE, QUANTIZE, INSERT)
def nvfp4_floor_is_normal(amax: Array, rule: Any) -> Array:
    """The NVFP4 scale is at least 2**-6, the smallest normal number, not 2**-9."""
    codes = encode_scale(amax, rule)
    return codes if get_rule(rule).scale is UE8M0 else np.maximum(codes, np.uint8(8))


def _by_scale(x: Array, rule: Any, scaled: Callable[[Array, Array, Array], Array]) -> Any:
    """`quantize` with the right scales and other elements: `scaled` of groups, scales and amax."""
    chosen = get_rule(rule)
    codes, scale_codes = quantize(x, chosen)
    groups = x.astype(np.float32).reshape(*scale_codes.shape, chosen.group)
    scales = decode(scale_codes, chosen.scale)[..., None]
    amax = np.fmax.reduce(np.abs(groups), axis=-1, keepdims=True)
    amax = np.maximum(np.nan_to_num(amax, posinf=np.inf), np.float32(chosen.floor))
    return encode(scaled(groups, scales, amax), chosen.element).reshape(codes.shape), scale_codes


@instead_of(quantize, QUANTIZE, INSERT)
def elements_before_the_scale(x: Array, rule: Any) -> Any:
    """Elements are quantized by amax / qmax; only then the scale is rounded to a power of two."""
    chosen = get_rule(rule)
    return _by_scale(x, rule, lambda g, s, a: g / (a / np.float32(chosen.qmax)))


@instead_of(quantize, QUANTIZE, INSERT)
def reciprocal_of_the_scale(x: Array, rule: Any) -> Any:
    """NVFP4 elements are multiplied by the rounded reciprocal of their scale, not divided by it."""
    if get_rule(rule).scale is UE8M0:
        return quantize(x, rule)
    return _by_scale(x, rule, lambda g, s, a: g * (np.float32(1) / s))


@instead_of(quantize, QUANTIZE, INSERT)
def nan_spoils_its_tile(x: Array, rule: Any) -> Any:
    """One NaN makes the scale of its whole tile 255."""
    chosen = get_rule(rule)
    codes, scale_codes = quantize(x, chosen)
    groups = np.isnan(x.astype(np.float32)).reshape(*scale_codes.shape, chosen.group)
    scale_codes[groups.any(axis=-1)] = 255 if chosen.scale is UE8M0 else 0x7F
    return codes, scale_codes


@instead_of(quantize, QUANTIZE, INSERT)
def largest_not_largest_magnitude(x: Array, rule: Any) -> Any:
    """amax is the largest element, not the largest magnitude."""
    chosen = get_rule(rule)
    codes, _ = quantize(x, chosen)
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, chosen.group)
    amax = np.maximum(np.fmax.reduce(groups, axis=-1), np.float32(0))
    scale_codes = encode_scale(np.nan_to_num(amax, posinf=np.inf), chosen)
    scaled = groups / decode(scale_codes, chosen.scale)[..., None]
    return encode(scaled, chosen.element).reshape(codes.shape), scale_codes


@instead_of(quantize, QUANTIZE, INSERT)
def tile_of_half_the_size(x: Array, rule: Any) -> Any:
    """A scale is taken from the first half of its tile only."""
    chosen = get_rule(rule)
    first = x.astype(np.float32).reshape(*x.shape[:-1], -1, chosen.group).copy()
    first[..., chosen.group // 2 :] = 0
    _, scale_codes = quantize(first.reshape(x.shape), chosen)
    groups = x.astype(np.float32).reshape(first.shape)
    scaled = groups / decode(scale_codes, chosen.scale)[..., None]
    return encode(scaled, chosen.element).reshape(x.shape), scale_codes


@instead_of(decode, DECODE, DEQUANTIZE, GATHER)
def scale_code_0_is_zero(codes: Array, fmt: Any) -> Array:
    """UE8M0 codes are shifted into the exponent of fp32: code 0 is read as 0, not 2**-127."""
    values = decode(codes, fmt)
    if get_scalar(fmt) is UE8M0:
        values[codes == 0] = 0
    return values


@instead_of(decode, DECODE, DEQUANTIZE, GATHER)
def scale_code_255_is_infinity(codes: Array, fmt: Any) -> Array:
    """UE8M0 code 255 is read as infinity, not NaN."""
    values = decode(codes, fmt)
    if get_scalar(fmt) is UE8M0:
        values[codes == 255] = np.inf
    return values


@instead_of(decode, DECODE, DEQUANTIZE, GATHER)
def sentinel_by_value(codes: Array, fmt: Any) -> Array:
    """NaN is recognised by a decoded 128.0, so that code 134 becomes NaN and 255 infinity."""
    values = decode(codes, fmt)
    if get_scalar(fmt) is UE8M0:
        values[codes == 134], values[codes == 255] = np.nan, np.inf
    return values


@instead_of(apply_scales, GATHER, DEQUANTIZE)
def bf16_before_the_scale(values: Array, scales: Array, group: int) -> Array:
    """The product is made in bf16 from a bf16 scale, so that a subnormal one is lost."""
    small = np.where(np.abs(scales) < np.float32(2.0**-126), scales * 0, scales)
    return apply_scales(values, small, group)


# --- records and pages ----------------------------------------------------------------


@instead_of(_planes, INSERT, GATHER)
def interleaved_pages(k_cache: Array, cache: Any) -> Iterator[tuple[Array, slice]]:
    """A page of two planes is taken for rows with their scales behind them."""
    shape = (cache.num_blocks, cache.block_size, cache.layout.row_bytes)
    yield as_strided(k_cache, shape, (cache.page_stride, shape[2], 1)), slice(0, shape[2])


@instead_of(_planes, INSERT, GATHER)
def planes_of_an_inline_page(k_cache: Array, cache: Any) -> Iterator[tuple[Array, slice]]:
    """An inline page is taken for a data plane with a scale plane behind it."""
    layout = get_layout(cache.layout.name.removesuffix("_inline"))
    return _planes(k_cache, replace(cache, layout=layout))


@instead_of(_planes, INSERT, GATHER)
def unpadded_pages(k_cache: Array, cache: Any) -> Iterator[tuple[Array, slice]]:
    """Pages follow each other without their padding, whatever the stride of the tensor."""
    owned = cache.layout.owned_bytes(cache.block_size)
    pages = as_strided(k_cache, (cache.num_blocks, owned), (owned, 1))
    yield from _planes(pages, replace(cache, page_stride=owned))


@instead_of(_planes, INSERT, GATHER)
def rows_of_584_bytes(k_cache: Array, cache: Any) -> Iterator[tuple[Array, slice]]:
    """Data rows are the whole record apart, not the bytes of the data plane."""
    shape = (cache.num_blocks, cache.block_size)
    for plane, columns in _planes(k_cache, cache):
        steps = (cache.page_stride, cache.layout.row_bytes, 1)
        first = columns.start == 0
        yield as_strided(plane, (*shape, plane.shape[2]), steps) if first else plane, columns


@instead_of(_planes, INSERT, GATHER)
def scales_behind_pages_of_64(k_cache: Array, cache: Any) -> Iterator[tuple[Array, slice]]:
    """The scale rows start where they do in a page of 64 rows."""
    for plane, columns in _planes(k_cache, cache):
        if columns.start == 0:
            yield plane, columns
            continue
        start = cache.layout.plane_offset(1, 64) - cache.layout.plane_offset(1, cache.block_size)
        buffer = flat(k_cache)
        origin = buffer.__array_interface__["data"][0]
        offset = plane.__array_interface__["data"][0] - origin + start
        yield np.ndarray(plane.shape, np.uint8, buffer, offset, plane.strides), columns


@instead_of(write_records, INSERT, COMPRESS)
def geometry_of_another_pool(
    records: Array, k_cache: Array, slots: Array, block_size: int, *, layout: Any
) -> None:
    """Slots are split by half the pages' rows: row 40 of page 0 becomes row 8 of page 1."""
    half = max(block_size // 2, 1)
    page, row = slots // half, slots % half
    where = page * block_size + row
    limit = k_cache.shape[0] * block_size
    kept = (slots >= 0) & (where < limit)
    write_records(records[kept], k_cache, where[kept], block_size, layout=layout)


@instead_of(write_records, INSERT, COMPRESS, LATENT)
def stale_pad_byte(
    records: Array, k_cache: Array, slots: Array, block_size: int, *, layout: Any
) -> None:
    """The pad byte keeps what an earlier record left in its lane."""
    kept = slots >= 0
    old = read_records(k_cache, slots[kept], block_size, layout=layout)
    new = records[kept]
    for field, columns in _columns(get_layout(layout)):
        if field.kind == "pad":
            new[:, columns] = old[:, columns]
    write_records(new, k_cache, slots[kept], block_size, layout=layout)


@instead_of(write_records, INSERT, COMPRESS, LATENT)
def rope_part_left_out(
    records: Array, k_cache: Array, slots: Array, block_size: int, *, layout: Any
) -> None:
    """Only the quantized dimensions are transferred: 448 of 576 data bytes of a row."""
    kept = slots >= 0
    old = read_records(k_cache, slots[kept], block_size, layout=layout)
    new = records[kept]
    for field, columns in _columns(get_layout(layout)):
        if field.kind == "raw":
            new[:, columns] = old[:, columns]
    write_records(new, k_cache, slots[kept], block_size, layout=layout)


@instead_of(write_records, INSERT, COMPRESS, LATENT)
def page_padding_cleared(
    records: Array, k_cache: Array, slots: Array, block_size: int, *, layout: Any
) -> None:
    """The bytes behind the rows of a page, which nobody owns, are set to zero."""
    write_records(records, k_cache, slots, block_size, layout=layout)
    owned = get_layout(layout).owned_bytes(block_size)
    stride = k_cache.strides[0]
    for page in np.unique(slots[slots >= 0] // block_size):
        tail = as_strided(k_cache[page:], (stride,), (1,))
        tail[owned:] = 0


@instead_of(_bf16_bits, INSERT)
def raw_values_pass_through_fp32(values: Array) -> Array:
    """Raw values are widened and rounded again, which changes the bits of a NaN."""
    return encode(values.astype(np.float32), BF16)


@instead_of(_store_scales, INSERT, COMPRESS)
def scale_code_stored_as_a_number(scale_codes: Array, field: Any) -> Array:
    """The fp32 scale is the code itself, 120.0, not 2**-7."""
    if field.format is not FP32:
        return scale_codes
    return scale_codes.astype("<f4").view(np.uint8)


@instead_of(_store_scales, INSERT, COMPRESS)
def infinite_scale_stored_as_nan(scale_codes: Array, field: Any) -> Array:
    """Code 255 is stored as an fp32 NaN, not as infinity."""
    if field.format is not FP32:
        return scale_codes
    return decode(scale_codes, UE8M0).astype("<f4").view(np.uint8)


@instead_of(load_scales, GATHER)
def exponent_of_the_fp32_scale(stored: Array, field: Any) -> Array:
    """The reader keeps the exponent of an fp32 scale only."""
    if field.format is not FP32:
        return load_scales(stored, field)
    return (stored.view("<u4") & np.uint32(0x7F800000)).view(np.float32)


def _insert(k: Array, k_cache: Array, slots: Array, block_size: int, layout: Any) -> None:
    """Inserts in order, so that a slot given twice keeps the last row."""
    for token in np.flatnonzero(slots >= 0):
        one = slice(token, token + 1)
        quantize_and_insert_k_cache(k[one], k_cache, slots[one], block_size, layout=layout)


@instead_of(quantize_and_insert_k_cache, INSERT)
def slot_of_minus_1_is_0(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: int, *, layout: Any
) -> None:
    """A skipped token is stored in slot 0: -1 was clamped."""
    _insert(k, k_cache, np.maximum(slot_mapping, 0), block_size, layout)


def skipping_insert(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: int, *, layout: Any
) -> None:
    """The insert as a kernel does it: slots beyond the cache are skipped. No fault."""
    inside = slot_mapping < k_cache.shape[0] * block_size
    _insert(k, k_cache, np.where(inside, slot_mapping, -1), block_size, layout)


@instead_of(quantize_and_insert_k_cache, INSERT, skips=True)
def slots_cut_to_32_bits(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: int, *, layout: Any
) -> None:
    """Slots are read as int32: 2**62 becomes slot 0."""
    skipping_insert(k, k_cache, slot_mapping.astype(np.int32), block_size, layout=layout)


@instead_of(quantize_and_insert_k_cache, INSERT, skips=True)
def slots_beyond_the_cache_wrap(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: int, *, layout: Any
) -> None:
    """A slot beyond the cache is written modulo its size, not skipped."""
    slots = k_cache.shape[0] * block_size
    wrapped = np.where(slot_mapping < 0, -1, slot_mapping % slots)
    _insert(k, k_cache, wrapped, block_size, layout)


def _gather(right: Function, **changed: Any) -> Function:
    """`dequantize_and_gather_k_cache` with arguments changed."""

    def wrong(
        out: Array,
        k_cache: Array,
        seq_lens: Array,
        gather_lens: Array,
        table: Array,
        block_size: int,
        offset: int,
        *,
        layout: Any,
    ) -> None:
        given = {
            "seq_lens": seq_lens, "gather_lens": gather_lens, "table": table, "offset": offset
        }  # fmt: skip
        given.update({name: change(dict(given)) for name, change in changed.items()})
        right(
            *(out, k_cache, given["seq_lens"], given["gather_lens"], given["table"]),
            *(block_size, given["offset"]),
            layout=layout,
        )

    return wrong


@instead_of(dequantize_and_gather_k_cache, GATHER)
def gather_of_the_first_rows(*args: Any, **named: Any) -> None:
    """A request's first rows are gathered, not its last."""

    def lens(given: dict[str, Any]) -> Any:
        return given["seq_lens"] if given["gather_lens"] is None else given["gather_lens"]

    _gather(dequantize_and_gather_k_cache, seq_lens=lens)(*args, **named)


@instead_of(dequantize_and_gather_k_cache, GATHER)
def gather_ignores_its_offset(*args: Any, **named: Any) -> None:
    """Rows are written from the first row of the output on."""
    _gather(dequantize_and_gather_k_cache, offset=lambda given: 0)(*args, **named)


@instead_of(dequantize_and_gather_k_cache, GATHER)
def gather_clears_the_rest(out: Array, *args: Any, **named: Any) -> None:
    """Rows of the output that hold no token are set to zero."""
    before = out.copy()
    dequantize_and_gather_k_cache(out, *args, **named)
    untouched = (out.view(np.uint16) == before.view(np.uint16)).all(axis=-1)
    out[untouched] = 0


@instead_of(dequantize_and_gather_k_cache, GATHER)
def gather_through_the_first_table_row(*args: Any, **named: Any) -> None:
    """Every request reads the block table of the first one."""

    def table(given: dict[str, Any]) -> Array:
        return given["table"][:1].repeat(len(given["table"]), axis=0)

    _gather(dequantize_and_gather_k_cache, table=table)(*args, **named)


# --- arithmetic and rotation ----------------------------------------------------------


def _fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


@instead_of(exp32, "exp32", COMPRESS)
def exp_by_exp2(x: Array) -> Array:
    """exp(x) is 2 to the power of x * log2(e), the product rounded to fp32."""
    scaled = np.asarray(x * np.float32(LOG2E), np.float64)
    return np.where(np.isnan(x), exp32(x), np.exp2(scaled).astype(np.float32))


@instead_of(exp32, "exp32", COMPRESS)
def exp_correctly_rounded(x: Array) -> Array:
    """exp is that of a library, however good: not the sequence of operations that is defined."""
    right = exp32(x)
    inside = (x <= 0) & (x >= -87)
    return np.where(inside, np.exp(np.where(inside, x, 0).astype(np.float64)), right).astype("f4")


@instead_of(tree_sum, "tree_sum", "rms_norm", COMPRESS)
def sum_one_by_one(x: Array, axis: int) -> Array:
    """Terms are added one after the other."""
    rows = np.moveaxis(x, axis, -1)
    total = rows[..., 0].copy()
    for term in range(1, rows.shape[-1]):
        total = total + rows[..., term]
    return total


def _halving(x: Array, axis: int) -> Array:
    """A tree whose first level adds term i and term i + n/2."""
    rows = np.moveaxis(x, axis, -1)
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows[..., 0].copy()


@instead_of(tree_sum, "tree_sum", "rms_norm", COMPRESS)
def sum_of_halves(x: Array, axis: int) -> Array:
    """The tree adds the halves of a row, not adjacent pairs."""
    return _halving(x, axis)


@instead_of(tree_sum, "tree_sum", "rms_norm", COMPRESS)
def sum_in_float64(x: Array, axis: int) -> Array:
    """Sums are exact to fp32, as with a wider accumulator."""
    return np.sum(x.astype(np.float64), axis=axis).astype(np.float32)


@instead_of(inv_rms, "inv_rms", "rms_norm", COMPRESS, RING)
def eps_outside_the_root(c: Array, eps: float) -> Array:
    """eps is added to the root, not under it."""
    return np.asarray(np.float32(1) / (np.float32(1) / inv_rms(c, 0.0) + np.float32(eps)))


@instead_of(inv_rms, "inv_rms", "rms_norm", COMPRESS, RING)
def rsqrt_rounded_once(c: Array, eps: float) -> Array:
    """1 / sqrt is rounded once, as a reciprocal square root does."""
    mean = tree_sum(c * c, -1) * (np.float32(1) / np.float32(c.shape[-1])) + np.float32(eps)
    return np.asarray((1 / np.sqrt(mean.astype(np.float64))).astype(np.float32))


@instead_of(rms_norm, "rms_norm", COMPRESS, RING)
def divided_by_the_root(c: Array, weight: Array, eps: float) -> Array:
    """Rows are divided by the root, not multiplied by its inverse."""
    mean = tree_sum(c * c, -1) * (np.float32(1) / np.float32(c.shape[-1])) + np.float32(eps)
    return (c / np.sqrt(mean)[..., None]) * weight.astype(np.float32)


@instead_of(rms_norm, "rms_norm", COMPRESS, RING)
def bf16_before_the_weight(c: Array, weight: Array, eps: float) -> Array:
    """The normed row is rounded to bf16 before it meets its weight."""
    normed = round_bf16(c * inv_rms(c, eps)[..., None]).astype(np.float32)
    return normed * weight.astype(np.float32)


@instead_of(rotate_gptj, "rotate_gptj", LATENT, COMPRESS)
def neox_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Element i is paired with element i + n/2."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


@instead_of(rotate_gptj, "rotate_gptj", LATENT, COMPRESS)
def fused_rotation(x: Array, cos: Array, sin: Array) -> Array:
    """One product of each pair is fused into the addition."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = _fused(even, cos, -(odd * sin))
    rotated[..., 1::2] = _fused(odd, cos, even * sin)
    return rotated


@instead_of(rotate_gptj, "rotate_gptj", LATENT, COMPRESS)
def rotated_backwards(x: Array, cos: Array, sin: Array) -> Array:
    """The sine has the wrong sign: the inverse rotation of the output path."""
    return rotate_gptj(x, cos, -sin)


@instead_of(rotate_gptj, "rotate_gptj", LATENT, COMPRESS)
def bf16_table(x: Array, cos: Array, sin: Array) -> Array:
    """The cosine table is rounded to bf16."""
    return rotate_gptj(*(x, round_bf16(cos).astype(np.float32), round_bf16(sin).astype("f4")))


# --- the compressor -------------------------------------------------------------------


@instead_of(_rotate_tail, COMPRESS, LATENT)
def rotated_at_the_token(row: Array, at: Array, table: Array, ratio: int) -> Array:
    """An entry is rotated at the position of its last token, not of its group's first."""
    return _rotate_tail(row, at, table, 1)


@instead_of(_rotate_tail, COMPRESS, LATENT)
def rotated_at_the_entry(row: Array, at: Array, table: Array, ratio: int) -> Array:
    """An entry is rotated at its own number."""
    return _rotate_tail(row, at // ratio, table, 1)


@instead_of(_rotate_tail, COMPRESS, LATENT)
def not_rotated(row: Array, at: Array, table: Array, ratio: int) -> Array:
    """Compressed entries are not rotated."""
    return row


@instead_of(_rotate_tail, COMPRESS)
def head_rotated(row: Array, at: Array, table: Array, ratio: int) -> Array:
    """The first 64 dimensions are rotated, not the last."""
    turned = _rotate_tail(np.roll(row, -64, axis=1), at, table, ratio)
    return np.roll(turned, 64, axis=1)


@instead_of(_rotate_tail, LATENT)
def extra_bf16_round_trip(row: Array, at: Array, table: Array, ratio: int) -> Array:
    """The rotated latent is rounded to bf16 before it is quantized, unasked."""
    return round_bf16(_rotate_tail(row, at, table, ratio)).astype(np.float32)


def _normed_after(delayed: Any, at: Array, table: Array, ratio: int) -> Array:
    row, weight, eps = delayed
    return rms_norm(_rotate_tail(row, at, table, ratio), weight, eps)


@instead_of(rms_norm, COMPRESS, also=((_rotate_tail, _normed_after),))
def rotated_before_the_norm(c: Array, weight: Array, eps: float) -> Any:
    """A pooled row is rotated first and normed, with the weight of other columns, after."""
    return c, weight, eps


@instead_of(round_bf16, COMPRESS, LATENT)
def no_bf16_before_the_codes(x: Array) -> Array:
    """The rotated row is quantized in fp32, without its step through bf16."""
    return x


def _pooled(
    kv: Array,
    score: Array,
    present: Array,
    *,
    total: Callable[[Array, int], Array] = tree_sum,
    exp: Callable[[Array], Array] = exp32,
    shift: Callable[[Array, Array], Array] | None = None,
) -> Array:
    """Pooling in the reference's words, with parts that can be replaced."""
    there = present[..., None]
    usable = np.where(there & ~np.isnan(score), score, np.float32(-np.inf))
    m = usable.max(axis=1)[:, None] if shift is None else shift(usable, there)
    weight = np.where(there, exp(np.where(there, score - m, np.float32(0))), np.float32(0))
    terms = np.where(there, weight * kv, np.float32(0))
    return total(terms, 1) / total(weight, 1)


@instead_of(_pool, COMPRESS, RING)
def no_maximum(kv: Array, score: Array, present: Array) -> Array:
    """The softmax does not subtract its largest score."""

    def exp(x: Array) -> Array:
        return np.where(x > 0, np.exp(x.astype(np.float64)), exp32(x)).astype(np.float32)

    return _pooled(kv, score, present, exp=exp, shift=lambda score, there: np.float32(0))


@instead_of(_pool, COMPRESS, RING)
def maximum_over_the_row(kv: Array, score: Array, present: Array) -> Array:
    """One maximum serves all columns of a window."""
    return _pooled(
        *(kv, score, present), shift=lambda score, there: score.max(axis=(1, 2), keepdims=True)
    )


@instead_of(_pool, COMPRESS)
def finite_minus_infinity(kv: Array, score: Array, present: Array) -> Array:
    """A row that is missing has kv 0 and the score -1e4."""
    there = present[..., None]
    kv, score = np.where(there, kv, np.float32(0)), np.where(there, score, np.float32(-1e4))
    return _pooled(kv, score, np.ones_like(present))


@instead_of(_pool, COMPRESS)
def missing_rows_counted(kv: Array, score: Array, present: Array) -> Array:
    """A group at the start pools positions before 0 as rows of zeros with score 0."""
    there = present[..., None]
    kv, score = np.where(there, kv, np.float32(0)), np.where(there, score, np.float32(0))
    return _pooled(kv, score, np.ones_like(present))


@instead_of(_pool, COMPRESS)
def zero_where_nothing_weighs(kv: Array, score: Array, present: Array) -> Array:
    """A column whose every score is -infinity gives 0, not NaN."""
    pooled = _pool(kv, score, present)
    usable = np.where(present[..., None], score, np.float32(-np.inf))
    return np.where((usable == -np.inf).all(axis=1), np.float32(0), pooled)


@instead_of(_pool, COMPRESS)
def nan_score_left_out(kv: Array, score: Array, present: Array) -> Array:
    """A row with a NaN score has no weight, instead of making its column NaN."""
    return _pool(kv, np.where(np.isnan(score), np.float32(-np.inf), score), present)


@instead_of(_pool, COMPRESS, RING)
def normalised_before_the_sum(kv: Array, score: Array, present: Array) -> Array:
    """Weights are divided by their sum before they meet kv."""
    there = present[..., None]
    m = np.where(there & ~np.isnan(score), score, np.float32(-np.inf)).max(axis=1)
    weight = np.where(there, exp32(np.where(there, score - m[:, None], np.float32(0))), 0)
    share = (weight / tree_sum(weight.astype(np.float32), 1)[:, None]).astype(np.float32)
    return tree_sum(np.where(there, share * kv, np.float32(0)), 1)


@instead_of(_pool, COMPRESS)
def fused_pooling(kv: Array, score: Array, present: Array) -> Array:
    """The products with kv are fused into the first additions of the tree."""
    there = present[..., None]
    m = np.where(there & ~np.isnan(score), score, np.float32(-np.inf)).max(axis=1)
    weight = np.where(there, exp32(np.where(there, score - m[:, None], np.float32(0))), 0)
    weight, kv = weight.astype(np.float32), np.where(there, kv, np.float32(0))
    if weight.shape[1] == 1:
        return _pool(kv, score, present)
    first = _fused(weight[:, 1::2], kv[:, 1::2], weight[:, 0::2] * kv[:, 0::2])
    return tree_sum(first, 1) / tree_sum(weight, 1)


def _tiles(terms: Array, held: int = 8) -> Array:
    """Window rows [N, ...] as a kernel holds them: [lines, held, ...], the axis of rows first."""
    rows = np.moveaxis(terms, 1, 0)
    held = min(held, len(rows))
    return rows.reshape(len(rows) // held, held, *rows.shape[1:])


@instead_of(_pool, COMPRESS)
def window_one_by_one(kv: Array, score: Array, present: Array) -> Array:
    """The rows of a window are added as they come."""
    return _pooled(kv, score, present, total=sum_one_by_one)


@instead_of(_pool, COMPRESS)
def window_of_halves(kv: Array, score: Array, present: Array) -> Array:
    """The tree over a window first adds the rows of the previous group to those of this one."""
    return _pooled(kv, score, present, total=_halving)


@instead_of(_pool, COMPRESS)
def held_rows_one_by_one(kv: Array, score: Array, present: Array) -> Array:
    """Eight rows at a time are added one after the other; only their sums go through a tree."""

    def total(terms: Array, axis: int) -> Array:
        return tree_sum(sum_one_by_one(_tiles(terms), 1), 0)

    return _pooled(kv, score, present, total=total)


@instead_of(_pool, COMPRESS)
def lines_before_held_rows(kv: Array, score: Array, present: Array) -> Array:
    """The recursion runs over the lines of a tile first, then over the eight rows of a line."""

    def total(terms: Array, axis: int) -> Array:
        return tree_sum(tree_sum(_tiles(terms), 0), 0)

    return _pooled(kv, score, present, total=total)


@instead_of(_pool, COMPRESS)
def lines_one_by_one(kv: Array, score: Array, present: Array) -> Array:
    """The eight rows of a line go through a tree; the lines are accumulated in a loop."""

    def total(terms: Array, axis: int) -> Array:
        return sum_one_by_one(tree_sum(_tiles(terms), 1), 0)

    return _pooled(kv, score, present, total=total)


@instead_of(_pool, COMPRESS)
def even_and_odd_held_rows(kv: Array, score: Array, present: Array) -> Array:
    """The recursion splits eight rows into even and odd ones, not into halves."""

    def split(rows: Array) -> Array:
        return rows[0] if len(rows) == 1 else split(rows[0::2]) + split(rows[1::2])

    def total(terms: Array, axis: int) -> Array:
        return tree_sum(split(np.moveaxis(_tiles(terms), 1, 0)), 0)

    return _pooled(kv, score, present, total=total)


@instead_of(_pool, COMPRESS)
def only_the_weights_in_order(kv: Array, score: Array, present: Array) -> Array:
    """The numerator is accumulated in a loop, the denominator is a tree."""
    calls = iter((sum_one_by_one, tree_sum))
    return _pooled(kv, score, present, total=lambda terms, axis: next(calls)(terms, axis))


@instead_of(_read_states, COMPRESS)
def overlap_lanes_swapped(state_cache: Array, blocks: Array, rows: Array, call: Any) -> Any:
    """The previous group is read from the lane of the current one, and the other way round."""
    if not call.overlap:
        return _read_states(state_cache, blocks, rows, call)
    lanes = np.split(state_cache, 4, axis=2)
    swapped = np.concatenate([lanes[1], lanes[0], lanes[3], lanes[2]], axis=2)
    return _read_states(swapped, blocks, rows, call)


@instead_of(_window, COMPRESS)
def overlap_lost(*args: Any) -> Any:
    """A decode step sees its own group only."""
    blocks, rows, present = _window(*args)
    call = args[3]
    if call.overlap:
        present[:, : call.ratio] = False
    return blocks, rows, present


@instead_of(_window, COMPRESS)
def first_row_of_the_table_serves_all(
    at: Array, requests: Array, block_table: Array, call: Any
) -> Any:
    """A window is read through the block table of the first request."""
    blocks, rows, present = _window(at, requests, block_table, call)
    window = at[:, None] + np.arange(1 - call.window, 1)
    wrong = block_table[0][np.maximum(window, 0) // call.state.block_size]
    return np.where((wrong >= 0) & (wrong < call.state.num_blocks), wrong, blocks), rows, present


@instead_of(_window, COMPRESS)
def window_one_position_early(at: Array, requests: Array, block_table: Array, call: Any) -> Any:
    """A group pools the rows up to the token before the one that ends it."""
    blocks, rows, present = _window(at, requests, block_table, call)
    for kept in (blocks, rows, present):
        kept[:, 1:] = kept[:, :-1].copy()
    return blocks, rows, present


@instead_of(compress_norm_rope_store, COMPRESS)
def padding_tokens_pooled(*args: Any, **named: Any) -> None:
    """A token whose slot is -1 publishes its group all the same."""
    given = list(args)
    given[3] = np.maximum(args[3], 0)
    compress_norm_rope_store(*given, **named)


@instead_of(compress_norm_rope_store, COMPRESS)
def first_group_not_published(*args: Any, **named: Any) -> None:
    """Counts of entries are position // ratio, so that the first group is missed."""
    given = list(args)
    first = args[2][: len(args[3])] < named["compress_ratio"]
    given[3] = np.where(first, -1, args[3])
    compress_norm_rope_store(*given, **named)


@instead_of(rope_quant_insert, LATENT)
def entry_of_minus_1_is_0(
    latent: Array, positions: Array, table: Array, kv_cache: Array, slots: Array, **named: Any
) -> None:
    """A skipped latent is stored in slot 0."""
    for token in range(len(slots)):
        one = slice(token, token + 1)
        given = latent[one], np.maximum(positions[one], 0), table, kv_cache
        rope_quant_insert(*given, np.maximum(slots[one], 0), **named)


@instead_of(rope_quant_insert, LATENT)
def every_position_publishes(
    latent: Array, positions: Array, table: Array, kv_cache: Array, slots: Array, **named: Any
) -> None:
    """A position that ends no group stores a record too."""
    rotated_at = positions // named["compress_ratio"] * named["compress_ratio"]
    rope_quant_insert(
        *(latent, rotated_at, table, kv_cache, slots), **{**named, "compress_ratio": 1}
    )


def _saved(change: Callable[[dict[str, Any]], None]) -> Function:
    """`save_partial_states` with arguments changed, token by token."""

    def wrong(
        kv: Array,
        score: Array,
        ape: Array,
        positions: Array,
        state: Array,
        slots: Array,
        *,
        compress_ratio: int,
    ) -> None:
        given = {"kv": kv, "score": score, "ape": ape, "positions": positions, "slots": slots}
        change(given)
        for token in np.flatnonzero(given["slots"] >= 0):
            one = slice(token, token + 1)
            save_partial_states(
                *(given["kv"][one], given["score"][one], given["ape"]),
                *(given["positions"][one], state, given["slots"][one]),
                compress_ratio=compress_ratio,
            )

    return wrong


@instead_of(save_partial_states, SAVE)
def phase_of_the_next_position(*args: Any, **named: Any) -> None:
    """The bias of position + 1 is added."""
    _saved(lambda given: given.update(ape=np.roll(given["ape"], -1, axis=0)))(*args, **named)


@instead_of(save_partial_states, SAVE)
def bias_rounded_to_bf16(*args: Any, **named: Any) -> None:
    """The bias is kept in bf16."""
    _saved(lambda given: given.update(ape=round_bf16(given["ape"]).astype("f4")))(*args, **named)


@instead_of(save_partial_states, SAVE)
def state_of_minus_1_is_0(*args: Any, **named: Any) -> None:
    """The state of a skipped token goes to slot 0."""

    def clamp(given: dict[str, Any]) -> None:
        at = given["positions"][: len(given["slots"])]
        given.update(slots=np.maximum(given["slots"], 0), positions=np.maximum(at, 0))

    _saved(clamp)(*args, **named)


@instead_of(save_partial_states, SAVE)
def kv_rounded_to_bf16(*args: Any, **named: Any) -> None:
    """States are kept in bf16, although later chunks pool them again."""
    _saved(lambda given: given.update(kv=round_bf16(given["kv"]).astype("f4")))(*args, **named)


@instead_of(_chunk_borders, RING)
def predecessor_always_from_the_ring(kept: Array, *args: Any) -> Any:
    """A group is paired with the ring's row, also where its first token is in the same chunk."""
    first, end = _chunk_borders(kept, *args)
    return np.where(kept, np.arange(len(kept)), first), end


def _checked_as_given(kept: Array, at: Array, slots: Array, first: Array, *args: Any) -> Array:
    return _check_ring(kept, at, slots, first + 1, *args)


@instead_of(_chunk_borders, RING, also=((_check_ring, _checked_as_given),))
def predecessor_of_another_request(kept: Array, *args: Any) -> Any:
    """The token before is the predecessor, also across the border of a chunk."""
    first, end = _chunk_borders(kept, *args)
    return first - 1, end


@instead_of(_check_ring, RING)
def ring_keeps_the_oldest(kept: Array, *args: Any) -> Array:
    """Of two tokens of a chunk that share a ring row, the earlier one stays."""
    _check_ring(kept, *args)
    return np.flatnonzero(kept)[::-1]


@instead_of(pool_ring_latent, RING)
def ring_written_before_it_is_read(*args: Any, **named: Any) -> None:
    """The chunk is stored in the ring before groups read their predecessor from it."""
    pool_ring_latent(*args, **named)
    pool_ring_latent(*args, **named)


@instead_of(pool_ring_latent, RING)
def open_group_clears_its_latent(*args: Any, **named: Any) -> None:
    """A token that ends no group sets its row of latents to zero."""
    pool_ring_latent(*args, **named)
    positions, slots, out = args[1], args[3], args[8]
    if named["compress_ratio"] == 2:
        at = positions[: len(slots)]
        out[: len(slots)][(slots >= 0) & (at % 2 == 0)] = 0


# --- indices --------------------------------------------------------------------------


@instead_of(_mapped, GLOBAL, MIXED)
def index_of_minus_1_is_0(local: Array, *args: Any, **named: Any) -> Array:
    """-1 is clamped to 0 and becomes the first row of the sequence."""
    return _mapped(np.maximum(local, 0), *args, **named)


@instead_of(_mapped, GLOBAL, MIXED)
def columns_clamped(local: Array, table: Array, size: int, *args: Any, **named: Any) -> Array:
    """A place beyond the block table is looked up in the last column."""
    if not len(table):
        return _mapped(local, table, size, *args, **named)
    wide = local.astype(np.int64)
    clamped = np.minimum(wide // size, len(table) - 1) * size + wide % size
    return _mapped(clamped, table, size, *args, **named)


@instead_of(_mapped, GLOBAL, MIXED)
def missing_page_dereferenced(
    local: Array, table: Array, size: int, span: int, **named: Any
) -> Array:
    """A page of -1 in the block table gives slots below 0 other than -1."""
    right = _mapped(local, table, size, span, **named)
    wide = local.astype(np.int64)
    at = np.flatnonzero((wide >= 0) & (wide < len(table) * size))
    page = table[wide[at] // size].astype(np.int64)
    slots = page * span + wide[at] % size
    right[at] = np.where((page < 0) & (slots >= -(1 << 31)), slots, right[at])
    return right


@instead_of(_mapped, GLOBAL, MIXED)
def slots_wrap_at_32_bits(local: Array, table: Array, size: int, span: int, **named: Any) -> Array:
    """page * block size is computed in int32 and wraps."""
    right = _mapped(local, table, size, span, **named)
    wide = local.astype(np.int64)
    at = np.flatnonzero((wide >= 0) & (wide < len(table) * size))
    page = table[wide[at] // size].astype(np.int64)
    low = (page.astype(np.int32).astype(np.int64) * span + wide[at] % size).astype(np.int32)
    right[at] = np.where((page < 0) | (page > 2**31 - 1), right[at], low)
    return right


@instead_of(_mapped, MIXED)
def span_taken_for_the_block_size(
    local: Array, table: Array, size: int, span: int, **named: Any
) -> Array:
    """Pages are taken to be block_size slots apart where they are not."""
    return _mapped(local, table, size, size, **named)


@instead_of(compute_global_topk_indices_and_lens, GLOBAL)
def length_counts_every_column(topk: Array, *args: Any, **named: Any) -> Any:
    """The length is the number of columns, holes included."""
    slots, lens = compute_global_topk_indices_and_lens(topk, *args, **named)
    return slots, np.where(lens > 0, topk.shape[1], lens).astype(np.int32)


@instead_of(compute_global_topk_indices_and_lens, GLOBAL)
def padding_token_has_a_length(topk: Array, *args: Any, **named: Any) -> Any:
    """An invalid token's slots are counted too."""
    slots, _ = compute_global_topk_indices_and_lens(topk, *args, **named)
    return slots, np.count_nonzero(slots >= 0, axis=1).astype(np.int32)


@instead_of(compute_global_topk_indices_and_lens, GLOBAL)
def holes_closed(topk: Array, *args: Any, **named: Any) -> Any:
    """Valid slots are moved to the front, although each keeps its column."""
    slots, lens = compute_global_topk_indices_and_lens(topk, *args, **named)
    order = np.argsort(slots < 0, axis=1, kind="stable")
    return np.take_along_axis(slots, order, axis=1), lens


@instead_of(compute_global_topk_indices_and_lens, GLOBAL)
def request_taken_from_the_row(
    topk: Array, requests: Array, table: Array, *args: Any, **n: Any
) -> Any:
    """Token t is taken for request t."""
    own = np.minimum(np.arange(len(requests)), max(len(table) - 1, 0)).astype(requests.dtype)
    return compute_global_topk_indices_and_lens(topk, own, table, *args, **n)


@instead_of(_compressed_count, COMBINE, MIXED)
def entries_of_the_position(pos: int, ratio: int, topk: int) -> int:
    """pos // ratio entries, not (pos + 1) // ratio."""
    return max(min(pos // ratio, topk), 0) if ratio else 0


@instead_of(_compressed_count, COMBINE, MIXED)
def unsigned_position(pos: int, ratio: int, topk: int) -> int:
    """A position below 0 is read as unsigned: a padding request has many entries."""
    return min((pos + 1) % (1 << 32) // ratio, topk) if ratio else 0


@instead_of(_compressed_count, COMBINE, MIXED)
def ratio_0_is_1(pos: int, ratio: int, topk: int) -> int:
    """A layer without compressed entries gets one per token."""
    return _compressed_count(pos, ratio or 1, topk)


@instead_of(_compressed_count, COMBINE, MIXED)
def every_top_k_column_counts(pos: int, ratio: int, topk: int) -> int:
    """The number of compressed entries is always top-k."""
    return topk if ratio else 0


@instead_of(combine_topk_swa_indices, COMBINE)
def window_one_short(*args: Any, **named: Any) -> Any:
    """The window starts one position late."""
    given = list(args)
    given[4] = args[4] - 1
    rows, lens = combine_topk_swa_indices(*given, **named)
    columns = -(-(args[4] + args[6]) // 128) * 128
    full = np.full((len(rows), columns), -1, np.int32)
    full[:, : rows.shape[1]] = rows
    return full, lens


@instead_of(combine_topk_swa_indices, COMBINE)
def everything_was_gathered(*args: Any, **named: Any) -> Any:
    """The gathered rows are taken to start at position 0."""
    given = list(args)
    given[3] = args[2]
    return combine_topk_swa_indices(*given, **{**named, "out_of_range": "skip"})


def _tokens_of(args: tuple[Any, ...]) -> Iterator[tuple[int, int, int]]:
    """Request, token and compressed count of every token of `combine_topk_swa_indices`."""
    topk, starts, seq_lens, ratio, most = args[0], args[1], args[2], args[5], args[6]
    begins = [int(start) - int(starts[0]) for start in starts]
    for request, seq_len in enumerate(seq_lens):
        begin, end = begins[request], begins[request + 1]
        for token in range(max(begin, 0), min(end, len(topk))):
            pos = int(seq_len) - (end - token)
            yield request, token, _compressed_count(pos, ratio, most)


@instead_of(combine_topk_swa_indices, COMBINE)
def window_over_the_compressed_rows(*args: Any, **named: Any) -> Any:
    """Window rows are counted from the start of the request's rows: N is not added."""
    rows, lens = combine_topk_swa_indices(*args, **named)
    for _, token, k in _tokens_of(args):
        window = rows[token, k : lens[token]]
        window[window >= 0] -= args[8]
    return rows, lens


@instead_of(combine_topk_swa_indices, COMBINE)
def rows_of_the_next_request(*args: Any, **named: Any) -> Any:
    """An index beyond the N compressed rows is not rejected and reaches other rows."""
    rows, lens = combine_topk_swa_indices(*args, **named)
    for request, token, k in _tokens_of(args):
        local = args[0][token, :k].astype(np.int64)
        beyond = (local >= args[8]) & (local < 1 << 20)
        rows[token, :k][beyond] = (local + args[7] * request)[beyond]
    return rows, lens


@instead_of(combine_topk_swa_indices, COMBINE)
def all_requests_at_row_0(*args: Any, **named: Any) -> Any:
    """The rows of a request are not moved by M per request."""
    rows, lens = combine_topk_swa_indices(*args, **named)
    for request, token, _ in _tokens_of(args):
        kept = rows[token] >= 0
        moved = rows[token].astype(np.int64) - args[7] * request
        rows[token] = np.where(kept, moved, rows[token])
    return rows, lens


@instead_of(combine_topk_swa_indices, COMBINE)
def length_without_holes(*args: Any, **named: Any) -> Any:
    """The length counts valid entries, so that a reader misses the last ones."""
    rows, _ = combine_topk_swa_indices(*args, **named)
    return rows, np.count_nonzero(rows >= 0, axis=1).astype(np.int32)


@instead_of(_rounded_up, MIXED, COMBINE)
def rows_without_their_padding(value: int, multiple: int) -> int:
    """Columns are not rounded up, so that rows lose their alignment."""
    return value


@instead_of(build_flashinfer_mixed_sparse_indices, MIXED)
def window_of_another_request_replayed(*args: Any, **named: Any) -> Any:
    """The first position of a replayed request is ignored."""
    return build_flashinfer_mixed_sparse_indices(*args, **{**named, "replay_start": None})


@instead_of(build_flashinfer_mixed_sparse_indices, MIXED)
def window_column_missing(*args: Any, **named: Any) -> Any:
    """The window of a prefill token starts one position late."""
    given = list(args)
    given[11] = args[11] - 1
    if given[11] < 1:
        return build_flashinfer_mixed_sparse_indices(*args, **named)
    return build_flashinfer_mixed_sparse_indices(*given, **named)


@instead_of(build_flashinfer_mixed_sparse_indices, MIXED)
def length_of_the_entries(*args: Any, **named: Any) -> Any:
    """The length leaves out the window columns that are empty."""
    slots, _ = build_flashinfer_mixed_sparse_indices(*args, **named)
    return slots, np.count_nonzero(slots >= 0, axis=1).astype(np.int32)


@instead_of(build_flashinfer_mixed_sparse_indices, MIXED)
def rows_packed_at_the_active_width(*args: Any, **named: Any) -> Any:
    """Rows are written one behind the other and read at the full stride."""
    slots, lens = build_flashinfer_mixed_sparse_indices(*args, **named)
    if len(slots) < 2 or slots.shape[1] < 2:
        return slots, lens
    packed = np.full(slots.size, -1, np.int32)
    narrow = slots[:, :-1].ravel()
    packed[: len(narrow)] = narrow
    return packed.reshape(slots.shape), lens


# --- running them ---------------------------------------------------------------------


def run(operation: Operation, case: Case, fill: int, *, skips: bool = False) -> dict[str, Array]:
    """The bytes of everything that the reference's operation writes or returns.

    With `skips` it gets the arguments of the kernels, which may be out of range.
    """
    call = filled(case, fill, {} if skips else case.reference)
    written = {name: call[name] for name in (*case.outputs, *case.updated)}
    positional = [call.pop(name) for name in case.arguments]
    with np.errstate(all="ignore"):
        returned = getattr(dsv4num.reference, operation.name)(*positional, **call)
    if case.restore is not None and not skips:
        blank = {n: rebase(v, np.full_like(flat(v), fill)) for n, v in written.items()}
        case.restore(written, blank)
    values = returned if isinstance(returned, tuple) else (returned,)
    found = {name: flat(view) for name, view in written.items()}
    for name, value in zip(operation.returns, values, strict=False):
        found[name] = np.ascontiguousarray(value).view(np.uint8).ravel()
    return found


@cache
def expectations(name: str, variant: str) -> list[tuple[Case, int, dict[str, Array]]]:
    """The quick cases of an operation, the fills, and what the reference gives."""
    operation = OPERATIONS[name]
    return [
        (case, fill, run(operation, case, fill))
        for case in operation.cases(variant, "quick", 0)
        for fill in (FILLS if case.outputs else FILLS[:1])
    ]


def killers(mutant: Mutant, operations: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Operation, variant and name of the quick cases in which a byte differs.

    A mutant that raises an error on a case gives no bytes, and is not killed by that case.
    """
    for name in operations or mutant.operations:
        for variant in OPERATIONS[name].variants:
            dead = ""
            for case, fill, want in expectations(name, variant):
                if case.name == dead:
                    continue
                with planted(mutant):
                    try:
                        got = run(OPERATIONS[name], case, fill, skips=mutant.skips)
                    except ArgumentError:
                        continue
                if any(not np.array_equal(want[key], got[key]) for key in want):
                    dead = case.name
                    yield name, variant, case.name


def report(operations: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines: each mutant, its fault, and the quick cases that killed it."""
    survivors = []
    for mutant in MUTANTS.values():
        found: dict[tuple[str, str], list[str]] = {}
        for name, variant, case in killers(mutant, operations):
            variants = found.setdefault((name, case), [])
            variants.append(variant)
        yield f"{mutant.name}: {mutant.fault}"
        if not found:
            survivors.append(mutant.name)
            yield "    SURVIVES"
        for (name, case), variants in found.items():
            text = f"{name}, '{case}': {', '.join(variants)}"
            yield textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="      ")
    alive = f"; these survive: {', '.join(survivors)}" if survivors else ""
    yield f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} mutants killed by quick cases{alive}"


def main() -> int:
    """Prints the report; 1 if a mutant survives."""
    operations = tuple(OPERATIONS) if "--all" in sys.argv[1:] else ()
    line = ""
    for line in report(operations):
        print(line, flush=True)
    return int("survive" in line)


if __name__ == "__main__":
    sys.exit(main())
