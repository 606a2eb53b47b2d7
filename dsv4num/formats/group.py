"""Group quantization rules as data. SPEC section 3.

A group is a run of elements that share one scale. A scale always multiplies on decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dsv4num.errors import ArgumentError
from dsv4num.formats.scalar import BF16, E2M1, E4M3FN, E4M3FNUZ, FP32, UE8M0, FloatFormat

#: fp32(1e-4) = 0x38D1B717, the floor of the FP8 rules, applied to amax.
P1_FLOOR = float.fromhex("0x1.a36e2ep-14")
#: 6 * 2**-126 = 0x01C00000, the floor of the MXFP4 rule, applied to amax.
M1_FLOOR = float.fromhex("0x1.8p-124")
#: 2**-9, the smallest positive E4M3 value: the floor of the NVFP4 rule, applied to the scale.
N2_FLOOR = float.fromhex("0x1.0p-9")
#: fp32(1/6) = 0x3E2AAAAB.
ONE_SIXTH = float.fromhex("0x1.555556p-3")
#: fp32(1/448) = 0x3B124925.
ONE_448TH = float.fromhex("0x1.24924ap-9")


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How one group of elements becomes codes and one scale code.

    Attributes:
        name: registry name, family and group size ("P1/64").
        element: format of the elements.
        scale: format of the scale code.
        group: elements per group.
        qmax: the magnitude that the largest element is scaled to, at most.
        floor: the smallest value allowed, an fp32 number.
        floor_place: whether `floor` bounds amax or the scale, or is "added" to amax.
        scale_rounding: "up_to_power_of_two" (smallest power of two that avoids overflow),
            "nearest_even" (nearest code of the scale format), "up" (the next code that is not
            smaller), "none" (the fp32 quotient itself), "down_to_power_of_two" (the power of two of
            amax less that of qmax), "unit" (always 1) or "given" (one scale from outside for all).
        scaling: "multiply" by the exact inverse of the scale; "divide" by it, correctly rounded;
            "reciprocal", multiply by fp32(1 / scale); "reciprocal_or_zero", the same with 0 for the
            scale 0; "amax_reciprocal", multiply by fp32(qmax / amax), by 1 for amax 0.
        infinite_code: the scale code of a group whose amax is infinite, where it is of 8 bits.
        clause: the SPEC clause.
        amax_factor: what amax is multiplied by, fp32(1 / qmax); 0 to divide amax by qmax.
        zero_scale: the scale of a group with amax 0; None where the floor gives it.
    """

    name: str
    element: FloatFormat
    scale: FloatFormat
    group: int
    qmax: float
    floor: float
    floor_place: Literal["amax", "scale", "added"]
    scale_rounding: Literal[
        "up_to_power_of_two",
        "nearest_even",
        "up",
        "none",
        "down_to_power_of_two",
        "unit",
        "given",
    ]
    scaling: Literal["multiply", "divide", "reciprocal", "reciprocal_or_zero", "amax_reciprocal"]
    infinite_code: int
    clause: str
    amax_factor: float = 0.0
    zero_scale: float | None = None

    @property
    def family(self) -> str:
        """The name without the group size."""
        return self.name.split("/")[0]


P1_64 = GroupRule(
    name="P1/64",
    element=E4M3FN,
    scale=UE8M0,
    group=64,
    qmax=448.0,
    floor=P1_FLOOR,
    floor_place="amax",
    scale_rounding="up_to_power_of_two",
    scaling="multiply",
    infinite_code=0xFF,
    clause="3.1",
)
P1_32 = replace(P1_64, name="P1/32", group=32)
P1_128 = replace(P1_64, name="P1/128", group=128)

#: The production FNUZ writers scale to 224, although 240 is the largest FNUZ value.
P1_64_FNUZ = replace(P1_64, name="P1/64-fnuz", element=E4M3FNUZ, qmax=224.0)
P1_32_FNUZ = replace(P1_64_FNUZ, name="P1/32-fnuz", group=32)

M1 = GroupRule(
    name="M1/32",
    element=E2M1,
    scale=UE8M0,
    group=32,
    qmax=6.0,
    floor=M1_FLOOR,
    floor_place="amax",
    scale_rounding="up_to_power_of_two",
    scaling="multiply",
    infinite_code=0xFE,
    clause="3.2",
)

N2 = GroupRule(
    name="N2/16",
    element=E2M1,
    scale=E4M3FN,
    group=16,
    qmax=6.0,
    floor=N2_FLOOR,
    floor_place="scale",
    scale_rounding="nearest_even",
    scaling="divide",
    infinite_code=0x7E,
    clause="3.3",
    amax_factor=ONE_SIXTH,
)

RULES = {r.name: r for r in (P1_64, P1_32, P1_128, P1_64_FNUZ, P1_32_FNUZ, M1, N2)}

# Rules of other writers (clause 3.6).

#: The floor 1e-4 on the scale.
P2_64 = replace(P1_64, name="P2/64", floor_place="scale", clause="3.6")
P2_32 = replace(P2_64, name="P2/32", group=32)
P2_128 = replace(P2_64, name="P2/128", group=128)
#: fp32(1e-8) = 0x322BCC77 on amax.
P3_64 = replace(P1_64, name="P3/64", floor=float.fromhex("0x1.5798eep-27"), clause="3.6")
#: No floor; the scale of a group of zeros is 1.
P4_64 = replace(P1_64, name="P4/64", floor=0.0, clause="3.6", zero_scale=1.0)
P1_128_FNUZ = replace(P1_64_FNUZ, name="P1/128-fnuz", group=128, clause="3.6")
P1_128_FNUZ_240 = replace(P1_128_FNUZ, name="P1_240/128-fnuz", qmax=240.0)

M2_32 = replace(M1, name="M2/32", floor=P1_FLOOR, clause="3.6")
M3_32 = replace(M2_32, name="M3/32", floor_place="scale")
#: fp32(1e-40) = 0x000116C2, a subnormal: codes go down to 0.
M4_32 = replace(M2_32, name="M4/32", floor=float.fromhex("0x1.16c2p-133"), infinite_code=0xFF)
#: fp32(1e-30) = 0x0DA24260.
M5_64 = replace(M2_32, name="M5/64", group=64, floor=float.fromhex("0x1.4484cp-100"))

N1 = replace(N2, name="N1/16", clause="3.6", amax_factor=0.0)
N3 = replace(N1, name="N3/16", scale_rounding="up")
N4 = replace(N1, name="N4/16", floor=0.0, scaling="reciprocal_or_zero")
N6 = replace(N4, name="N6/16", amax_factor=ONE_SIXTH)
#: bf16 scale 2**(exponent of amax - 2); smaller than 2**-126 becomes 0.
S1_16 = replace(
    N4,
    name="S1/16",
    scale=BF16,
    scale_rounding="down_to_power_of_two",
    infinite_code=0,
)
S1_32 = replace(S1_16, name="S1/32", group=32)

#: amax / 448 as an fp32 number, not rounded to a power of two.
F1_128 = replace(
    P1_128,
    name="F1/128",
    scale=FP32,
    scale_rounding="none",
    scaling="divide",
    infinite_code=0,
    clause="3.6",
)
#: The smallest normal fp32 number on the scale.
F2_128 = replace(F1_128, name="F2/128", floor=2.0**-126, floor_place="scale")
F3_128 = replace(F1_128, name="F3/128", floor=0.0, scaling="reciprocal")
F3z_128 = replace(F3_128, name="F3z/128", scaling="amax_reciprocal")
#: fp32(1e-5) = 0x3727C5AC is added to amax.
F4_128 = replace(F1_128, name="F4/128", floor=float.fromhex("0x1.4f8b58p-17"), floor_place="added")
#: fp32(1e-6) = 0x358637BD on amax.
F5_128 = replace(
    F1_128, name="F5/128", floor=float.fromhex("0x1.0c6f7ap-20"), amax_factor=ONE_448TH
)
F6_128 = replace(F3_128, name="F6/128", amax_factor=ONE_448TH, zero_scale=1.0)
F6_64 = replace(F6_128, name="F6/64", group=64)

#: What all groups of a row are divided by before N6 looks at them: amax / (448 * 6).
ROW_512 = replace(F1_128, name="R/512", group=512, qmax=2688.0, floor=0.0, zero_scale=1.0)
UNIT_64 = replace(F1_128, name="unit/64", group=64, floor=0.0, scale_rounding="unit")
TENSOR_512 = replace(
    UNIT_64, name="tensor/512", group=512, scale_rounding="given", scaling="reciprocal"
)

#: The rules of other writers, by name. The kernels know none of them.
WILD_RULES = {
    r.name: r
    for r in (
        *(P2_64, P2_32, P2_128, P3_64, P4_64, P1_128_FNUZ, P1_128_FNUZ_240),
        *(M2_32, M3_32, M4_32, M5_64, N1, N3, N4, N6, S1_16, S1_32),
        *(F1_128, F2_128, F3_128, F3z_128, F4_128, F5_128, F6_128, F6_64),
        *(ROW_512, UNIT_64, TENSOR_512),
    )
}


def get_rule(rule: str | GroupRule) -> GroupRule:
    """The rule of that name; a `GroupRule` is returned as it is.

    Raises:
        ArgumentError: no rule has that name.
    """
    if isinstance(rule, GroupRule):
        return rule
    found = {**RULES, **WILD_RULES}.get(rule) if isinstance(rule, str) else None
    if found is None:
        raise ArgumentError("rule", repr(rule), ", ".join((*RULES, *WILD_RULES)), "3")
    return found
