"""Scalar formats on the GPU. The rules are in `dsv4num.reference.scalar` and SPEC section 2.

Everything here works on the bits of fp32 values, held as uint32. Rounding to a small format is an
integer addition and a shift; values below the smallest normal one are rounded by adding a power of
two so large that one unit in its last place is the spacing of the subnormals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4num.errors import ArgumentError
from dsv4num.formats import BF16, E2M1, E4M3FN, E4M3FNUZ, FloatFormat, get_scalar
from dsv4num.gpu._target import Launch, interpreted, use_native

__all__ = ["decode", "encode", "pack", "unpack"]

_ONE = tl.constexpr(1)  # the interpreter shifts a constexpr, but not an int by a constexpr
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_QUIET_NAN = tl.constexpr(0x7FC00000)
_ALL = tl.constexpr(0xFFFFFFFF)  # x ^ _ALL, since the interpreter of Triton 3.6 makes ~x with a -1

_E4M3FN_BIAS = tl.constexpr(E4M3FN.bias)
_E4M3FN_MAX = tl.constexpr(E4M3FN.max_code)
_E4M3FN_NAN = tl.constexpr(E4M3FN.encoded_nan)
_E4M3FNUZ_BIAS = tl.constexpr(E4M3FNUZ.bias)
_E4M3FNUZ_MAX = tl.constexpr(E4M3FNUZ.max_code)
_E4M3FNUZ_NAN = tl.constexpr(E4M3FNUZ.encoded_nan)
_E4M3_MANTISSA = tl.constexpr(E4M3FN.mantissa_bits)
_E2M1_BIAS = tl.constexpr(E2M1.bias)
_E2M1_MAX = tl.constexpr(E2M1.max_code)
_E2M1_NAN = tl.constexpr(E2M1.encoded_nan)
_E2M1_MANTISSA = tl.constexpr(E2M1.mantissa_bits)
_BF16_NAN = tl.constexpr(BF16.encoded_nan)

# sm_89 and later: four fp32 to four E4M3 codes, nearest even, saturated, NaN to 0x7F.
_PTX_ENCODE_E4M3 = tl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)
# sm_89 and later: four E4M3 codes to four fp32, through fp16, both steps exact.
_PTX_DECODE_E4M3 = tl.constexpr(
    """{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 pair0, pair1;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair0, low;
    cvt.rn.f16x2.e4m3x2 pair1, high;
    mov.b32 {h0, h1}, pair0;
    mov.b32 {h2, h3}, pair1;
    cvt.f32.f16 $0, h0;
    cvt.f32.f16 $1, h1;
    cvt.f32.f16 $2, h2;
    cvt.f32.f16 $3, h3;
    }"""
)

# Two bf16 to two fp32: the compiler would take the upper one to the lower half first.
_PTX_WIDEN_BF16 = tl.constexpr(
    """{
    .reg .b32 both;
    mov.b32 both, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xFFFF0000;
    }"""
)


def _ptx_pack_e2m1() -> str:
    """Eight fp32, four even and four odd ones, to E2M1 codes in four bytes.

    Nearest even, saturated, NaN to 7. The fp32 are 2**-14 of what is encoded, so that the subnormals of
    E2M1 are those of fp16, and a code is the upper bits, rounded, of an fp16. Two share a word.
    """
    words = "".join(
        f"""
    cvt.rn.f16x2.f32 w{i}, ${2 * i + 2}, ${2 * i + 1};
    abs.f16x2 m{i}, w{i};
    min.f16x2 m{i}, m{i}, six;
    shr.u32 last, m{i}, 9;
    and.b32 last, last, 0x00010001;
    add.u32 m{i}, m{i}, last;
    add.u32 m{i}, m{i}, 0x00FF00FF;"""
        for i in range(4)
    )
    # Of words 0 and 1 the even elements, of 2 and 3 the odd ones: codes and signs to bits 8 to 15.
    halves = "".join(
        f"""
    shr.u32 m{i}, m{i}, 1;
    shl.b32 m{i + 2}, m{i + 2}, 3;
    shr.u32 sign, w{i}, 4;
    and.b32 m{i}, m{i}, 0x07000700;
    lop3.b32 m{i}, m{i + 2}, 0x70007000, m{i}, {_AND_OR};
    lop3.b32 m{i}, sign, 0x08000800, m{i}, {_AND_OR};
    lop3.b32 m{i}, w{i + 2}, 0x80008000, m{i}, {_AND_OR};"""
        for i in range(2)
    )
    return f"""{{
    .reg .b32 w<4>, m<4>, last, sign, six;
    mov.b32 six, 0x0E000E00;{words}{halves}
    prmt.b32 $0, m0, m1, 0x7531;
    }}"""


_AND_OR = "0xEA"  # the table of (a & b) | c
_PTX_PACK_E2M1 = tl.constexpr(_ptx_pack_e2m1())


@triton.jit
def bits_of(x):
    """The bits of fp32 values."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    """The fp32 values of bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen_bf16(halves, NATIVE: tl.constexpr):
    """fp32 bits of bf16 codes, given as int16."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            _PTX_WIDEN_BF16, "=r,=r,r", [halves], dtype=tl.uint32, is_pure=True, pack=2
        )
    else:
        bits = halves.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits


@triton.jit
def _round_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr):
    """Nearest-even code of a magnitude, saturated; NaN gives `MAX_CODE`."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    REBIAS: tl.constexpr = 127 - BIAS
    largest: tl.constexpr = (MAX_CODE + (REBIAS << MANTISSA)) << SHIFT
    smallest_normal: tl.constexpr = (REBIAS + 1) << 23
    aligner: tl.constexpr = (REBIAS + 24 - MANTISSA) << 23
    limited = tl.minimum(magnitude, largest)
    odd = (limited >> SHIFT) & 1
    normal = ((limited + ((_ONE << (SHIFT - 1)) - 1) + odd) >> SHIFT) - (REBIAS << MANTISSA)
    aligner_bits = tl.full(limited.shape, aligner, tl.uint32)
    subnormal = bits_of(float_of(limited) + float_of(aligner_bits)) - aligner
    return tl.where(limited < smallest_normal, subnormal, normal)


@triton.jit
def encode_bits(bits, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """uint32 codes of fp32 bits in an element format or in bf16; uint8 on the native E4M3 path."""
    magnitude = bits & _MAGNITUDE
    if FORMAT == "e4m3fn":
        if NATIVE:
            codes = tl.inline_asm_elementwise(
                _PTX_ENCODE_E4M3,
                "=r,f,f,f,f",
                [float_of(bits)],
                dtype=tl.uint8,
                is_pure=True,
                pack=4,
            )
        else:
            rounded = _round_magnitude(magnitude, _E4M3_MANTISSA, _E4M3FN_BIAS, _E4M3FN_MAX)
            signed = rounded | ((bits >> 24) & 0x80)
            codes = tl.where(magnitude > _INFINITY, _E4M3FN_NAN, signed)
    elif FORMAT == "e4m3fnuz":
        rounded = _round_magnitude(magnitude, _E4M3_MANTISSA, _E4M3FNUZ_BIAS, _E4M3FNUZ_MAX)
        signed = tl.where(rounded == 0, rounded, rounded | ((bits >> 24) & 0x80))
        codes = tl.where(magnitude > _INFINITY, _E4M3FNUZ_NAN, signed)
    elif FORMAT == "e2m1":
        rounded = _round_magnitude(magnitude, _E2M1_MANTISSA, _E2M1_BIAS, _E2M1_MAX)
        signed = rounded | ((bits >> 28) & 0x8)
        codes = tl.where(magnitude > _INFINITY, _E2M1_NAN, signed)
    elif FORMAT == "ue8m0":
        # Adding all ones below the exponent carries into it unless they were all zero.
        up = tl.minimum((tl.minimum(magnitude, _INFINITY) + 0x7FFFFF) >> 23, 254)
        up = tl.where(magnitude <= 0x00400000, 0, up)
        refused = (magnitude >= _INFINITY) | ((bits > 0x80000000) & (magnitude > 0))
        codes = tl.where(refused, 255, up)
    else:
        tl.static_assert(FORMAT == "bf16")
        codes = round_bf16_bits(bits, NATIVE)
    return codes


@triton.jit
def _twice(bits):
    """The upper halves of fp32 bits, in both halves of a word."""
    return (bits & 0xFFFF0000) | (bits >> 16)


@triton.jit
def pack_e2m1_quotient(bits, scale):
    """E2M1 codes of fp32 bits [N, 2M] over positive scales [N] of four significant bits, packed [N, M].

    No quotient is taken. A midpoint of two values times the scale is exact in fp32, and x lies beyond
    the product, on it, or before it, exactly where the quotient, rounded to fp32, does with the
    midpoint: the fp32 numbers next to the product are further off than half an ulp of the midpoint
    times the scale. A quotient on a midpoint goes to the even code.

    The products t have seven significant bits, so that they are even bf16 codes. The upper half of x
    tells whether x >= t, and with its last bit set where the lower half is not 0, whether x > t. Two
    elements share a word, and one addition compares both: bit 15 of a half of m + 0x8000 - t is m >= t.
    """
    even, odd = tl.split(tl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2)))
    sign = (even >> 16) | (odd & 0xFFFF0000)
    down = sign & 0x7FFF7FFF
    up = down | (((even & 0xFFFF) + 0xFFFF) >> 16) | (((odd & 0xFFFF) + 0xFFFF) & 0x10000)

    # What to add for t = scale times 0.5, 0.75, 0.625 and 0.875; a power of two more is 0x80 less.
    half = 0x80008000 - _twice(bits_of(0.5 * scale))[:, None]
    three = 0x80008000 - _twice(bits_of(0.75 * scale))[:, None]
    five = 0x80008000 - _twice(bits_of(0.625 * scale))[:, None]
    seven = 0x80008000 - _twice(bits_of(0.875 * scale))[:, None]
    beyond_025 = up + (half + (0x00800080 - 0x00010001))
    from_075 = down + three
    beyond_125 = up + (five - (0x00800080 + 0x00010001))
    from_175 = down + (seven - 0x00800080)
    beyond_250 = up + (five - (0x01000100 + 0x00010001))
    from_350 = down + (seven - 0x01000100)
    beyond_500 = up + (five - (0x01800180 + 0x00010001))
    number = (up + (0x80008000 - 0x7F817F81)) ^ _ALL

    # A quotient is beyond all midpoints before the last that it is beyond.
    middle = (from_175 & from_350) | ((from_175 ^ _ALL) & from_075)
    low = beyond_500 | (beyond_250 & (from_350 ^ _ALL))
    low = low | (beyond_125 & (from_175 ^ _ALL))
    low = low | (beyond_025 & (from_075 ^ _ALL))
    codes = ((sign & number) & 0x80008000) | ((from_175 >> 1) & 0x40004000)
    codes |= ((middle >> 2) & 0x20002000) | ((low >> 3) & 0x10001000)
    return (((codes >> 12) & 0x0F) | ((codes >> 24) & 0xF0)).to(tl.uint8)


@triton.jit
def pack_e2m1_halves(bits, factor):
    """E2M1 codes of the products of bf16 values, as fp32 bits [N, 2M], and factors [N], packed [N, M].

    A factor is 2**-14 over the scale, rounded to fp32; a scale has four significant bits at most. The
    product is then so near the quotient, and a quotient that is not a midpoint so far from all of them,
    that fp16 keeps both on the same side, and takes what is near a midpoint onto it.
    """
    even, odd = tl.split(tl.reshape(bits, (bits.shape[0], bits.shape[1] // 2, 2)))
    return tl.inline_asm_elementwise(
        _PTX_PACK_E2M1,
        "=r,f,f,f,f,f,f,f,f",
        [float_of(even) * factor[:, None], float_of(odd) * factor[:, None]],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def round_bf16_bits(bits, NATIVE: tl.constexpr):
    """bf16 codes of fp32 bits as uint16: nearest even, every NaN 0x7FFF (clause 1.5)."""
    if NATIVE:
        codes = float_of(bits).to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        limited = tl.minimum(bits & _MAGNITUDE, _INFINITY)
        rounded = (limited + 0x7FFF + ((limited >> 16) & 1)) >> 16
        signed = rounded | ((bits >> 16) & 0x8000)
        codes = tl.where((bits & _MAGNITUDE) > _INFINITY, _BF16_NAN, signed).to(tl.uint16)
    return codes


@triton.jit
def _widen_magnitude(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 bits of the value of a positive code, which read as an fp32 is 2**(127 - BIAS) too small."""
    RAISE: tl.constexpr = (254 - BIAS) << 23
    factor = tl.full(magnitude.shape, RAISE, tl.uint32)
    return bits_of(float_of(magnitude << (23 - MANTISSA)) * float_of(factor))


@triton.jit
def decode_bits(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 bits of uint8 codes. On the native path the payload of a NaN is not defined."""
    if FORMAT == "e4m3fn":
        if NATIVE:
            values = tl.inline_asm_elementwise(
                _PTX_DECODE_E4M3,
                "=f,=f,=f,=f,r",
                [codes.to(tl.uint8)],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
            bits = bits_of(values)
        else:
            wide = codes.to(tl.uint32)
            magnitude = wide & 0x7F
            bits = _widen_magnitude(magnitude, _E4M3_MANTISSA, _E4M3FN_BIAS)
            bits |= (wide & 0x80) << 24
            bits = tl.where(magnitude == _E4M3FN_NAN, _QUIET_NAN, bits)
    elif FORMAT == "e4m3fnuz":
        wide = codes.to(tl.uint32)
        bits = _widen_magnitude(wide & 0x7F, _E4M3_MANTISSA, _E4M3FNUZ_BIAS)
        bits |= (wide & 0x80) << 24
        bits = tl.where(wide == _E4M3FNUZ_NAN, _QUIET_NAN, bits)
    elif FORMAT == "e2m1":
        wide = codes.to(tl.uint32)
        bits = _widen_magnitude(wide & 0x7, _E2M1_MANTISSA, _E2M1_BIAS)
        bits |= (wide & 0x8) << 28
    else:
        tl.static_assert(FORMAT == "ue8m0")
        wide = codes.to(tl.uint32)
        bits = tl.where(wide == 0, 0x00400000, wide << 23)
        bits = tl.where(wide == 255, _QUIET_NAN, bits)
    return bits


@triton.jit
def pack_codes(codes):
    """Packs E2M1 codes [N, 2M] into bytes [N, M], the even element low."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_codes(packed):
    """Unpacks bytes [N, M] into E2M1 codes [N, 2M], the low nibble first."""
    return tl.interleave(packed & 0xF, packed >> 4)


@triton.jit
def unpack_e2m1_bits(packed):
    """fp32 bits [N, 2M] of the E2M1 codes in bytes [N, M], the low nibble first."""
    wide = packed.to(tl.uint32)
    magnitude = tl.interleave((wide & 0x07) << 22, (wide & 0x70) << 18)
    sign = tl.interleave((wide & 0x08) << 28, (wide & 0x80) << 24)
    # As fp32 bits a magnitude is 2**-126 times the value.
    RAISE: tl.constexpr = (254 - _E2M1_BIAS) << 23
    factor = float_of(tl.full(magnitude.shape, RAISE, tl.uint32))
    return bits_of(float_of(magnitude) * factor) | sign


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, n, FORMAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + at, mask=at < n, other=0)
    if bits.dtype == tl.int16:
        bits = bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    codes = encode_bits(bits.to(tl.uint32, bitcast=True), FORMAT, NATIVE)
    if FORMAT == "bf16":
        tl.store(codes_ptr + at, codes.to(tl.uint16).to(tl.int16, bitcast=True), mask=at < n)
    else:
        tl.store(codes_ptr + at, codes.to(tl.uint8), mask=at < n)


@triton.jit
def _decode_kernel(
    codes_ptr, x_ptr, n, FORMAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + at, mask=at < n, other=0)
    if FORMAT == "bf16":
        bits = codes.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    else:
        bits = decode_bits(codes, FORMAT, NATIVE)
        bits = tl.where((bits & _MAGNITUDE) > _INFINITY, _QUIET_NAN, bits)
    tl.store(x_ptr + at, bits.to(tl.int32, bitcast=True), mask=at < n)


@triton.jit
def _pack_kernel(codes_ptr, packed_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(codes_ptr + 2 * at, mask=at < n, other=0)
    high = tl.load(codes_ptr + 2 * at + 1, mask=at < n, other=0)
    tl.store(packed_ptr + at, (low & 0xF) | (high << 4), mask=at < n)


@triton.jit
def _unpack_kernel(packed_ptr, codes_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.load(packed_ptr + at, mask=at < n, other=0)
    tl.store(codes_ptr + 2 * at, packed & 0xF, mask=at < n)
    tl.store(codes_ptr + 2 * at + 1, packed >> 4, mask=at < n)


_BLOCK = 1024  # elements per program of the elementwise kernels: 8 per thread of 4 warps


def encode(x: torch.Tensor, fmt: str | FloatFormat, *, launch: Launch = Launch()) -> torch.Tensor:
    """See `dsv4num.reference.encode`: the same codes, from an fp32 or bf16 tensor.

    bf16 codes come as int16, since torch has little support for uint16.
    """
    chosen = get_scalar(fmt)
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.bfloat16):
        given = getattr(x, "dtype", type(x).__name__)
        raise ArgumentError("x", given, "float32 or bfloat16", "2")
    native = use_native(launch, x.device)
    bits = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    codes = torch.empty(
        x.shape, dtype=torch.int16 if chosen is BF16 else torch.uint8, device=x.device
    )
    if x.numel():
        _launch(_encode_kernel, bits, codes, FORMAT=chosen.name, NATIVE=native)
    return codes


def decode(
    codes: torch.Tensor, fmt: str | FloatFormat, *, launch: Launch = Launch()
) -> torch.Tensor:
    """See `dsv4num.reference.decode`: the same values, from a uint8 tensor (bf16: int16).

    E2M1 codes of 16 or more are not refused, since that would need a look at the device: their low
    three bits and bit 3 count.
    """
    chosen = get_scalar(fmt)
    dtype = torch.int16 if chosen is BF16 else torch.uint8
    if not isinstance(codes, torch.Tensor) or codes.dtype != dtype:
        given = getattr(codes, "dtype", type(codes).__name__)
        raise ArgumentError("codes", given, dtype, chosen.clause)
    native = use_native(launch, codes.device)
    x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        _launch(
            _decode_kernel,
            codes.contiguous(),
            x.view(torch.int32),
            FORMAT=chosen.name,
            NATIVE=native,
        )
    return x


def pack(codes: torch.Tensor) -> torch.Tensor:
    """See `dsv4num.reference.pack`: two E2M1 codes per byte; only the low four bits of each count."""
    if not isinstance(codes, torch.Tensor) or codes.dtype != torch.uint8:
        given = getattr(codes, "dtype", type(codes).__name__)
        raise ArgumentError("codes", given, "uint8", "2.6")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ArgumentError("codes", f"shape {list(codes.shape)}", "an even last axis", "2.6")
    use_native(Launch(), codes.device)
    packed = torch.empty(
        (*codes.shape[:-1], codes.shape[-1] // 2), dtype=torch.uint8, device=codes.device
    )
    if packed.numel():
        _launch(_pack_kernel, codes.contiguous(), packed, count=packed.numel())
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """See `dsv4num.reference.unpack`: the two E2M1 codes of every byte."""
    if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.dim() == 0:
        given = getattr(packed, "dtype", type(packed).__name__)
        raise ArgumentError("packed", given, "uint8 with at least one axis", "2.6")
    use_native(Launch(), packed.device)
    codes = torch.empty(
        (*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.uint8, device=packed.device
    )
    if packed.numel():
        _launch(_unpack_kernel, packed.contiguous(), codes)
    return codes


def _launch(
    kernel, source: torch.Tensor, target: torch.Tensor, count: int | None = None, **constants
) -> None:
    """Launches an elementwise kernel over `count` elements, those of `source` if not given."""
    n = source.numel() if count is None else count
    block = 65536 if interpreted() else _BLOCK  # the interpreter pays per program
    with device_of(source):
        kernel[(triton.cdiv(n, block),)](
            source, target, n, BLOCK=block, num_warps=4, enable_fp_fusion=False, **constants
        )


def device_of(tensor: torch.Tensor):
    """Makes the tensor's device the current one, as a launch needs."""
    return torch.cuda.device_of(tensor)
