"""Group rules on the GPU. The rules are in `dsv4num.reference.group` and SPEC section 3.

A power-of-two scale is read off the bits of amax: its exponent, one more if its significand exceeds
that of qmax.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4num.errors import ArgumentError
from dsv4num.formats import GroupRule, get_rule
from dsv4num.gpu._target import Launch, interpreted, use_native
from dsv4num.gpu.scalar import bits_of, decode_bits, device_of, encode_bits, float_of

__all__ = ["dequantize", "encode_scale", "quantize"]

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def amax_bits(bits):
    """fp32 bits of the largest magnitude in each row of [N, GROUP]; NaN counts as 0 (clause 1.6)."""
    magnitude = bits & _MAGNITUDE
    return tl.max(tl.where(magnitude > _INFINITY, 0, magnitude), axis=1)


@triton.jit
def encode_scale_bits(
    amax,
    SCALE: tl.constexpr,
    QMAX_BITS: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    FACTOR_BITS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    INFINITE_CODE: tl.constexpr,
):
    """uint32 scale codes of amax bits. Every rule's floor keeps the exponent field above 0."""
    if SCALE == "ue8m0":
        carry: tl.constexpr = 0x7FFFFF - (QMAX_BITS & 0x7FFFFF)
        exponent: tl.constexpr = (QMAX_BITS >> 23) - 127
        codes = ((tl.maximum(amax, FLOOR_BITS) + carry) >> 23) - exponent
        codes = tl.where(amax == _INFINITY, INFINITE_CODE, codes)
    else:
        factor = float_of(tl.full(amax.shape, FACTOR_BITS, tl.uint32))
        scale = tl.maximum(bits_of(float_of(amax) * factor), FLOOR_BITS)
        codes = encode_bits(tl.minimum(scale, LIMIT_BITS), SCALE, False)
    return codes


@triton.jit
def scale_elements(bits, scale_codes, SCALE: tl.constexpr, INFINITE_CODE: tl.constexpr):
    """fp32 bits [N, GROUP] brought into the range of the element format by scale codes [N]."""
    if SCALE == "ue8m0":
        inverse = (254 - scale_codes) << 23
        # Code 254 has the subnormal inverse 2**-127; code 255 multiplies by 0.
        at_infinity: tl.constexpr = 0x00400000 if INFINITE_CODE == 254 else 0
        inverse = tl.where(scale_codes == INFINITE_CODE, at_infinity, inverse)
        scaled = float_of(bits) * float_of(inverse)[:, None]
    else:
        scale = float_of(decode_bits(scale_codes, SCALE, False))
        scaled = tl.div_rn(float_of(bits), tl.broadcast_to(scale[:, None], bits.shape))
    return bits_of(scaled)


@triton.jit
def quantize_groups(
    bits,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    QMAX_BITS: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    FACTOR_BITS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    INFINITE_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes [N, GROUP] and uint32 scale codes [N] of fp32 bits [N, GROUP]."""
    amax = amax_bits(bits)
    scale_codes = encode_scale_bits(
        amax, SCALE, QMAX_BITS, FLOOR_BITS, FACTOR_BITS, LIMIT_BITS, INFINITE_CODE
    )
    scaled = scale_elements(bits, scale_codes, SCALE, INFINITE_CODE)
    return encode_bits(scaled, ELEMENT, NATIVE), scale_codes


@triton.jit
def _encode_scale_kernel(
    amax_ptr,
    codes_ptr,
    n,
    SCALE: tl.constexpr,
    QMAX_BITS: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    FACTOR_BITS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    INFINITE_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0).to(tl.uint32, bitcast=True) & _MAGNITUDE
    codes = encode_scale_bits(
        amax, SCALE, QMAX_BITS, FLOOR_BITS, FACTOR_BITS, LIMIT_BITS, INFINITE_CODE
    )
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=at < n)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_codes_ptr,
    groups,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    QMAX_BITS: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    FACTOR_BITS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    INFINITE_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (row < groups)[:, None]
    bits = tl.load(x_ptr + at, mask=inside, other=0)
    if bits.dtype == tl.int16:
        bits = bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    codes, scale_codes = quantize_groups(
        bits.to(tl.uint32, bitcast=True),
        ELEMENT,
        SCALE,
        QMAX_BITS,
        FLOOR_BITS,
        FACTOR_BITS,
        LIMIT_BITS,
        INFINITE_CODE,
        NATIVE,
    )
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=inside)
    tl.store(scale_codes_ptr + row, scale_codes.to(tl.uint8), mask=row < groups)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scale_codes_ptr,
    x_ptr,
    groups,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (row < groups)[:, None]
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    scale_codes = tl.load(scale_codes_ptr + row, mask=row < groups, other=0)
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


def scale_constants(rule: GroupRule) -> dict[str, Any]:
    """The facts of a rule that choose a scale, as kernel constants."""
    return {
        "SCALE": rule.scale.name,
        "QMAX_BITS": fp32_bits(rule.qmax),
        "FLOOR_BITS": fp32_bits(rule.floor),
        "FACTOR_BITS": fp32_bits(rule.amax_factor),
        "LIMIT_BITS": fp32_bits(rule.scale.max_value) if rule.amax_factor else 0,
        "INFINITE_CODE": rule.infinite_code,
    }


def rule_constants(rule: GroupRule) -> dict[str, Any]:
    """The facts of a rule, as kernel constants."""
    return {"ELEMENT": rule.element.name, **scale_constants(rule)}


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
                **scale_constants(chosen),
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
                GROUP=chosen.group,
                **rule_constants(chosen),
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
    scaled = (*scale_codes.shape[:-1], scale_codes.shape[-1] * chosen.group) if scale_codes.dim() else ()
    if codes.dim() == 0 or codes.shape != scaled:
        given = f"shapes {list(codes.shape)} and {list(scale_codes.shape)}"
        allowed = f"codes of shape scale_codes.shape with the last axis times {chosen.group}"
        raise ArgumentError("codes", given, allowed, "3.5")
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
                GROUP=chosen.group,
                ELEMENT=chosen.element.name,
                SCALE=chosen.scale.name,
                NATIVE=native,
                ROWS=rows,
                num_warps=launch.num_warps or 4,
                enable_fp_fusion=False,
            )
    return x
