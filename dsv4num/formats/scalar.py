"""Scalar formats as data. SPEC section 2.

A code is the bit pattern of one element as an unsigned integer. In every format here the finite
positive codes, read as integers, are in the order of their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4num.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """What one scalar format is.

    Attributes:
        name: as ml_dtypes spells it, without the ``float8_`` prefix.
        width: bits in a code.
        exponent_bits, mantissa_bits, bias: the usual three.
        max_code: the largest finite positive code; encoders saturate to it.
        nan_codes: ranges of the codes that decode to NaN (empty: the format has no NaN).
        encoded_nan: the one code that an encoder writes for any NaN.
        signed: whether the top bit is a sign.
        zero: whether an all-zero code is zero (it is 2**-127 in UE8M0).
        negative_zero: whether a negative value that rounds to zero keeps its sign.
        infinity_code: the code of +infinity, or None where the format has no infinity.
        clause: the SPEC clause.
    """

    name: str
    width: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_codes: tuple[range, ...]
    encoded_nan: int
    signed: bool
    zero: bool
    negative_zero: bool
    infinity_code: int | None
    clause: str

    @property
    def sign_code(self) -> int:
        """The sign bit in place, 0 for an unsigned format."""
        return 1 << (self.width - 1) if self.signed else 0

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return 1 << self.width

    @property
    def max_value(self) -> float:
        """The value of `max_code`."""
        exponent = self.max_code >> self.mantissa_bits
        fraction = self.max_code & ((1 << self.mantissa_bits) - 1)
        return float((1 << self.mantissa_bits) + fraction) * 2.0 ** (
            exponent - self.bias - self.mantissa_bits
        )

    def is_nan(self, code: int) -> bool:
        """Whether `code` decodes to NaN."""
        return any(code in codes for codes in self.nan_codes)


#: Exponent only: code c is 2**(c - 127). No sign, no zero; 255 is NaN.
UE8M0 = FloatFormat(
    name="ue8m0",
    width=8,
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max_code=0xFE,
    nan_codes=(range(0xFF, 0x100),),
    encoded_nan=0xFF,
    signed=False,
    zero=False,
    negative_zero=False,
    infinity_code=None,
    clause="2.1",
)

#: OCP E4M3: largest 448 = 0b0_1111_110, smallest subnormal 2**-9, no infinity.
E4M3FN = FloatFormat(
    name="e4m3fn",
    width=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_code=0x7E,
    nan_codes=(range(0x7F, 0x80), range(0xFF, 0x100)),
    encoded_nan=0x7F,
    signed=True,
    zero=True,
    negative_zero=True,
    infinity_code=None,
    clause="2.2",
)

#: FNUZ E4M3: largest 240 = 0b0_1111_111, smallest subnormal 2**-10; 0x80 is the only NaN.
E4M3FNUZ = FloatFormat(
    name="e4m3fnuz",
    width=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    max_code=0x7F,
    nan_codes=(range(0x80, 0x81),),
    encoded_nan=0x80,
    signed=True,
    zero=True,
    negative_zero=False,
    infinity_code=None,
    clause="2.3",
)

#: 0 .5 1 1.5 2 3 4 6 and their negatives; neither NaN nor infinity.
E2M1 = FloatFormat(
    name="e2m1",
    width=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max_code=0x7,
    nan_codes=(),
    encoded_nan=0x7,
    signed=True,
    zero=True,
    negative_zero=True,
    infinity_code=None,
    clause="2.4",
)

#: The upper half of an fp32.
BF16 = FloatFormat(
    name="bf16",
    width=16,
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    max_code=0x7F7F,
    nan_codes=(range(0x7F81, 0x8000), range(0xFF81, 0x10000)),
    encoded_nan=0x7FFF,
    signed=True,
    zero=True,
    negative_zero=True,
    infinity_code=0x7F80,
    clause="2.5",
)

#: IEEE binary32, as a storage format of scales.
FP32 = FloatFormat(
    name="fp32",
    width=32,
    exponent_bits=8,
    mantissa_bits=23,
    bias=127,
    max_code=0x7F7FFFFF,
    nan_codes=(range(0x7F800001, 0x80000000), range(0xFF800001, 0x100000000)),
    encoded_nan=0x7FFFFFFF,
    signed=True,
    zero=True,
    negative_zero=True,
    infinity_code=0x7F800000,
    clause="4.1",
)

#: The formats that `encode` and `decode` know, by name.
SCALARS = {f.name: f for f in (UE8M0, E4M3FN, E4M3FNUZ, E2M1, BF16)}


def get_scalar(fmt: str | FloatFormat) -> FloatFormat:
    """The format of that name; a `FloatFormat` is returned as it is.

    Raises:
        ArgumentError: no format has that name.
    """
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str) or fmt not in SCALARS:
        raise ArgumentError("fmt", repr(fmt), ", ".join(SCALARS), "2")
    return SCALARS[fmt]
