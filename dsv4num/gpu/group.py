"""Group rules on the GPU. The rules are in `dsv4num.reference.group` and SPEC section 3.

A power-of-two scale is read off the bits of amax: its exponent, one more if its significand exceeds
that of qmax.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4num.errors import ArgumentError, UnsupportedError
from dsv4num.formats import RULES, GroupRule, get_rule
from dsv4num.gpu._target import Launch, interpreted, use_native
from dsv4num.gpu.scalar import (
    bits_of,
    decode_bits,
    device_of,
    encode_bits,
    float_of,
    pack_codes,
    pack_e2m1_halves,
    pack_e2m1_quotient,
    unpack_codes,
)

__all__ = ["dequantize", "encode_scale", "quantize"]

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_TWO_14 = tl.constexpr(2.0**14)


@triton.jit
def amax_bits(bits, NATIVE: tl.constexpr):
    """fp32 bits of the largest magnitude in each row of [N, GROUP]; NaN counts as 0 (clause 1.6)."""
    if NATIVE:
        # The maximum of the hardware leaves a NaN out, unless there is nothing else.
        amax = bits_of(tl.max(tl.abs(float_of(bits)), axis=1))
        amax = tl.where(amax > _INFINITY, 0, amax)
    else:
        # As an unsigned number, how far a magnitude is below infinity: beyond that for a NaN.
        infinity = tl.full(bits.shape, _INFINITY, tl.uint32)
        nearest = tl.min(infinity - (bits & _MAGNITUDE), axis=1)
        amax = tl.where(nearest > _INFINITY, 0, tl.full(nearest.shape, _INFINITY, tl.uint32) - nearest)
    return amax


class Rule(NamedTuple):
    """The facts of a group rule, as one kernel constant. Numbers are fp32 bits.

    Triton 3.6 passes a member on to another jitted function only after it was given a name of its own.
    """

    group: int
    element: str
    scale: str
    qmax: int
    floor: int
    amax_factor: int
    largest_scale: int
    infinite_code: int


@triton.jit
def encode_scale_bits(amax, RULE: tl.constexpr):
    """uint32 scale codes of amax bits. Every rule's floor keeps the exponent field above 0."""
    if RULE.scale == "ue8m0":
        carry: tl.constexpr = 0x7FFFFF - (RULE.qmax & 0x7FFFFF)
        exponent: tl.constexpr = (RULE.qmax >> 23) - 127
        codes = ((tl.maximum(amax, RULE.floor) + carry) >> 23) - exponent
        codes = tl.where(amax == _INFINITY, RULE.infinite_code, codes)
    else:
        factor = float_of(tl.full(amax.shape, RULE.amax_factor, tl.uint32))
        scale = tl.maximum(bits_of(float_of(amax) * factor), RULE.floor)
        SCALE: tl.constexpr = RULE.scale
        codes = encode_bits(tl.minimum(scale, RULE.largest_scale), SCALE, False)
    return codes


@triton.jit
def encode_elements(
    bits, scale_codes, RULE: tl.constexpr, NATIVE: tl.constexpr, HALVES: tl.constexpr
):
    """Stored bytes of fp32 bits [N, GROUP], brought into the element format by scale codes [N].

    HALVES: the bits are those of bf16 values.
    """
    ELEMENT: tl.constexpr = RULE.element
    SCALE: tl.constexpr = RULE.scale
    if SCALE == "ue8m0":
        inverse = (254 - scale_codes) << 23
        # Code 254 has the subnormal inverse 2**-127; code 255 multiplies by 0.
        at_infinity: tl.constexpr = 0x00400000 if RULE.infinite_code == 254 else 0
        inverse = tl.where(scale_codes == RULE.infinite_code, at_infinity, inverse)
        if NATIVE and HALVES and ELEMENT == "e2m1":
            divisor = tl.full(inverse.shape, _TWO_14, tl.float32)
            stored = pack_e2m1_halves(bits, tl.div_rn(float_of(inverse), divisor))
        else:
            scaled = bits_of(float_of(bits) * float_of(inverse)[:, None])
            codes = encode_bits(scaled, ELEMENT, NATIVE)
            stored = pack_codes(codes) if ELEMENT == "e2m1" else codes.to(tl.uint8)
    else:
        tl.static_assert(ELEMENT == "e2m1")
        scale = float_of(decode_bits(scale_codes, SCALE, False))
        if NATIVE and HALVES:
            numerator = tl.full(scale.shape, 1.0 / _TWO_14, tl.float32)
            stored = pack_e2m1_halves(bits, tl.div_rn(numerator, scale))
        else:
            stored = pack_e2m1_quotient(bits, scale)
    return stored


@triton.jit
def quantize_groups(bits, RULE: tl.constexpr, NATIVE: tl.constexpr, HALVES: tl.constexpr):
    """Stored bytes [N, bytes of GROUP codes] and uint32 scale codes [N] of fp32 bits [N, GROUP].

    HALVES: the bits are those of bf16 values.
    """
    scale_codes = encode_scale_bits(amax_bits(bits, NATIVE), RULE)
    return encode_elements(bits, scale_codes, RULE, NATIVE, HALVES), scale_codes


@triton.jit
def _encode_scale_kernel(amax_ptr, codes_ptr, n, RULE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0).to(tl.uint32, bitcast=True) & _MAGNITUDE
    tl.store(codes_ptr + at, encode_scale_bits(amax, RULE).to(tl.uint8), mask=at < n)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_codes_ptr,
    groups,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * RULE.group + tl.arange(0, RULE.group)[None, :]
    inside = (row < groups)[:, None]
    bits = tl.load(x_ptr + at, mask=inside, other=0)
    HALVES: tl.constexpr = bits.dtype == tl.int16
    if HALVES:
        bits = bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    stored, scale_codes = quantize_groups(bits.to(tl.uint32, bitcast=True), RULE, NATIVE, HALVES)
    codes = unpack_codes(stored) if RULE.element == "e2m1" else stored
    tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(scale_codes_ptr + row, scale_codes.to(tl.uint8), mask=row < groups)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scale_codes_ptr,
    x_ptr,
    groups,
    RULE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * RULE.group + tl.arange(0, RULE.group)[None, :]
    inside = (row < groups)[:, None]
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    scale_codes = tl.load(scale_codes_ptr + row, mask=row < groups, other=0)
    ELEMENT: tl.constexpr = RULE.element
    SCALE: tl.constexpr = RULE.scale
    values = float_of(decode_bits(codes, ELEMENT, NATIVE))
    scales = float_of(decode_bits(scale_codes, SCALE, False))
    bits = bits_of(values * scales[:, None])
    bits = tl.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC00000, bits)
    tl.store(x_ptr + at, bits.to(tl.int32, bitcast=True), mask=inside)


def groups_per_program(group: int) -> int:
    """2,048 values on a GPU; the interpreter pays per program, so more there."""
    return max(1, (65536 if interpreted() else 2048) // group)


def fp32_bits(value: float) -> int:
    """The bits of a number that fp32 can hold."""
    return int.from_bytes(struct.pack("<f", value), "little")


def rule_constant(rule: GroupRule) -> Rule:
    """The facts of a rule, as a kernel constant.

    Raises:
        UnsupportedError: a rule of another writer (clause 3.6), which the kernels do not follow.
    """
    if rule not in RULES.values():
        raise UnsupportedError(f"rule {rule.name}: the kernels know {', '.join(RULES)}")
    return Rule(
        group=rule.group,
        element=rule.element.name,
        scale=rule.scale.name,
        qmax=fp32_bits(rule.qmax),
        floor=fp32_bits(rule.floor),
        amax_factor=fp32_bits(rule.amax_factor),
        largest_scale=fp32_bits(rule.scale.max_value),
        infinite_code=rule.infinite_code,
    )


def encode_scale(amax: torch.Tensor, rule: str | GroupRule) -> torch.Tensor:
    """See `dsv4num.reference.encode_scale`: the same scale codes, from an fp32 tensor.

    A negative or NaN amax is not refused, since that would need a look at the device.
    """
    chosen = get_rule(rule)
    if not isinstance(amax, torch.Tensor) or amax.dtype != torch.float32:
        given = getattr(amax, "dtype", type(amax).__name__)
        raise ArgumentError("amax", given, "float32", chosen.clause)
    use_native(Launch(), amax.device)
    codes = torch.empty(amax.shape, dtype=torch.uint8, device=amax.device)
    if amax.numel():
        with device_of(amax):
            _encode_scale_kernel[(triton.cdiv(amax.numel(), 1024),)](
                amax.contiguous().view(torch.int32),
                codes,
                amax.numel(),
                RULE=rule_constant(chosen),
                BLOCK=1024,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return codes


def quantize(
    x: torch.Tensor, rule: str | GroupRule, *, launch: Launch = Launch()
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dsv4num.reference.quantize`: the same codes and scale codes, from an fp32 or bf16 tensor."""
    chosen = get_rule(rule)
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.bfloat16):
        given = getattr(x, "dtype", type(x).__name__)
        raise ArgumentError("x", given, "float32 or bfloat16", chosen.clause)
    if x.dim() == 0 or x.shape[-1] % chosen.group:
        allowed = f"a last axis that is a multiple of {chosen.group}"
        raise ArgumentError("x", f"shape {list(x.shape)}", allowed, chosen.clause)
    native = use_native(launch, x.device)
    groups = x.numel() // chosen.group
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = (*x.shape[:-1], x.shape[-1] // chosen.group)
    scale_codes = torch.empty(scales, dtype=torch.uint8, device=x.device)
    if groups:
        rows = launch.rows or groups_per_program(chosen.group)
        with device_of(x):
            _quantize_kernel[(triton.cdiv(groups, rows),)](
                x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16),
                codes,
                scale_codes,
                groups,
                RULE=rule_constant(chosen),
                NATIVE=native,
                ROWS=rows,
                num_warps=launch.num_warps or 4,
                enable_fp_fusion=False,
            )
    return codes, scale_codes


def dequantize(
    codes: torch.Tensor,
    scale_codes: torch.Tensor,
    rule: str | GroupRule,
    *,
    launch: Launch = Launch(),
) -> torch.Tensor:
    """See `dsv4num.reference.dequantize`: the same values."""
    chosen = get_rule(rule)
    for name, tensor in (("codes", codes), ("scale_codes", scale_codes)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
            given = getattr(tensor, "dtype", type(tensor).__name__)
            raise ArgumentError(name, given, "uint8", "3.5")
    scaled = (
        (*scale_codes.shape[:-1], scale_codes.shape[-1] * chosen.group) if scale_codes.dim() else ()
    )
    if codes.dim() == 0 or codes.shape != scaled:
        given = f"shapes {list(codes.shape)} and {list(scale_codes.shape)}"
        allowed = f"codes of shape scale_codes.shape with the last axis times {chosen.group}"
        raise ArgumentError("codes", given, allowed, "3.5")
    if codes.device != scale_codes.device:
        allowed = f"{codes.device}, where codes is"
        raise ArgumentError("scale_codes", f"device {scale_codes.device}", allowed)
    native = use_native(launch, codes.device)
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    groups = codes.numel() // chosen.group
    if groups:
        rows = launch.rows or groups_per_program(chosen.group)
        with device_of(codes):
            _dequantize_kernel[(triton.cdiv(groups, rows),)](
                codes.contiguous(),
                scale_codes.contiguous(),
                x.view(torch.int32),
                groups,
                RULE=rule_constant(chosen),
                NATIVE=native,
                ROWS=rows,
                num_warps=launch.num_warps or 4,
                enable_fp_fusion=False,
            )
    return x
