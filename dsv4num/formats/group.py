"""Group quantization rules as data. SPEC section 3.

A group is a run of elements that share one scale. A scale always multiplies on decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dsv4num.errors import ArgumentError
from dsv4num.formats.scalar import E2M1, E4M3FN, E4M3FNUZ, UE8M0, FloatFormat

#: fp32(1e-4) = 0x38D1B717, the floor of the FP8 rules, applied to amax.
P1_FLOOR = float.fromhex("0x1.a36e2ep-14")
#: 6 * 2**-126 = 0x01C00000, the floor of the MXFP4 rule, applied to amax.
M1_FLOOR = float.fromhex("0x1.8p-124")
#: 2**-9, the smallest positive E4M3 value: the floor of the NVFP4 rule, applied to the scale.
N2_FLOOR = float.fromhex("0x1.0p-9")
#: fp32(1/6) = 0x3E2AAAAB.
ONE_SIXTH = float.fromhex("0x1.555556p-3")


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
        floor_place: whether `floor` bounds amax or the scale.
        scale_rounding: "up_to_power_of_two" (smallest power of two that avoids overflow) or
            "nearest_even" (nearest code of the scale format).
        scaling: "multiply" by the exact inverse of the scale, or "divide" by it, correctly rounded.
        infinite_code: the scale code of a group whose amax is infinite.
        clause: the SPEC clause.
        amax_factor: fp32(1 / qmax), by which a "nearest_even" rule multiplies amax.
    """

    name: str
    element: FloatFormat
    scale: FloatFormat
    group: int
    qmax: float
    floor: float
    floor_place: Literal["amax", "scale"]
    scale_rounding: Literal["up_to_power_of_two", "nearest_even"]
    scaling: Literal["multiply", "divide"]
    infinite_code: int
    clause: str
    amax_factor: float = 0.0


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


def get_rule(rule: str | GroupRule) -> GroupRule:
    """The rule of that name; a `GroupRule` is returned as it is.

    Raises:
        ArgumentError: no rule has that name.
    """
    if isinstance(rule, GroupRule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ArgumentError("rule", repr(rule), ", ".join(RULES), "3")
    return RULES[rule]
