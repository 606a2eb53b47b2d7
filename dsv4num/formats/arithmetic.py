"""Constants of the fp32 arithmetic. SPEC section 1. Constants, no algorithm.

Every value is an fp32 number written as a hex float, with its bit pattern beside it. The reference
and the kernels read the same facts and each write their own sequence of operations. The polynomial
is derived, and the error measured over every input, by ``tools/derive_exp32.py``.
"""

from __future__ import annotations

#: log2(e), rounded to fp32 = 0x3FB8AA3B.
LOG2E = float.fromhex("0x1.715476p+0")

#: 1.5 * 2**23 = 0x4B400000. Adding it and subtracting it again rounds |v| < 2**22 to an integer,
#: ties to even.
ROUND_MAGIC = float.fromhex("0x1.8p+23")

#: ln(2) cut to 15 significant bits = 0x3F317200: its product with any |n| <= 512 is exact in fp32.
LN2_HI = float.fromhex("0x1.62e4p-1")

#: ln(2) - LN2_HI, rounded to fp32 = 0x35BFBE8E.
LN2_LO = float.fromhex("0x1.7f7d1cp-20")

#: p in exp(r) = 1 + r + r**2 * p(r) for |r| <= ln(2)/2, the coefficient of r**0 first
#: = 0x3EFFFFFE, 0x3E2AAA49, 0x3D2AAC5A, 0x3C091CCC, 0x3AB5245E.
EXP32_POLYNOMIAL = (
    float.fromhex("0x1.fffffcp-2"),
    float.fromhex("0x1.555492p-3"),
    float.fromhex("0x1.5558b4p-5"),
    float.fromhex("0x1.123998p-7"),
    float.fromhex("0x1.6a48bcp-10"),
)

#: Below -87 = 0xC2AE0000 the result of exp32 is +0; at it, the result is still a normal number.
EXP32_LOWER_LIMIT = -87.0
