"""The dialects by name: what other writers do, in a sentence and as knobs. SPEC section 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4num.explain.encoder import Knobs
from dsv4num.formats import BF16, E4M3FN, E4M3FNUZ, FP32, GroupRule, Layout
from dsv4num.formats.group import M1_FLOOR, N2_FLOOR, P1_FLOOR

__all__ = ["DIALECTS", "Dialect", "apply", "clash", "dialects_of"]

Suits = Callable[[Layout], bool]


@dataclass(frozen=True)
class Dialect:
    """One thing that a writer does otherwise.

    Attributes:
        name: short, stable, for programs.
        text: what the writer does, for people; completes "is explained by: ...".
        knobs: the knobs that it turns.
        suits: the layouts that it can be seen in.
        needs: kinds of source without which it cannot be seen (`Source.kinds`).
        alone: the layouts in which it shows alone, and not only in a pair with another dialect.
    """

    name: str
    text: str
    knobs: Mapping[str, Any]
    suits: Suits
    needs: frozenset[str] = field(default=frozenset())
    alone: Suits = lambda layout: True

    def describe(self, layout: Layout) -> str:
        """The text, with the floor, qmax and element of the layout's rule.

        Example:
            >>> from dsv4num.formats import get_layout
            >>> DIALECTS["floor-1e-4-on-scale"].describe(get_layout("v4"))
            'floor 1e-4 on the scale instead of on amax'
        """
        rule = _rules(layout)[0]
        floor = "on amax" if rule.floor_place == "amax" else "on the scale"
        if abs(rule.floor - self.knobs.get("floor", 0)) > 1e-9:
            floor = f"{_FLOORS.get(rule.floor, f'{rule.floor:g}')} {floor}"
        return self.text.format(floor=floor, qmax=f"{rule.qmax:g}", element=rule.element.name)


#: How people write the floors of the contract.
_FLOORS = {P1_FLOOR: "1e-4", M1_FLOOR: "6 * 2^-126", N2_FLOOR: "2^-9"}


def dialects_of(layout: Layout, kinds: frozenset[str] = frozenset()) -> list[Dialect]:
    """The dialects that rows of such a source can show in this layout.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> [d.name for d in dialects_of(get_layout("indexer_mxfp4")) if "nibble" in d.name]
        ['nibbles-swapped', 'nibbles-halves', 'nibbles-group-halves']
    """
    return [d for d in DIALECTS.values() if d.needs <= kinds and d.suits(layout)]


def apply(*dialects: Dialect) -> Knobs:
    """The knobs of a writer that has all of these dialects."""
    return replace(Knobs(), **{knob: v for d in dialects for knob, v in d.knobs.items()})


def clash(a: Dialect, b: Dialect) -> bool:
    """Whether two dialects turn the same knob."""
    return bool(a.knobs.keys() & b.knobs.keys())


# Which layouts.


def _rules(layout: Layout) -> list[GroupRule]:
    return [f.rule for _, f in layout.fields() if f.kind == "codes" and f.rule is not None]


def _any(layout: Layout) -> bool:
    return bool(_rules(layout))


def _power(layout: Layout) -> bool:
    return any(rule.scale_rounding == "up_to_power_of_two" for rule in _rules(layout))


def _nearest(layout: Layout) -> bool:
    return any(rule.scale_rounding == "nearest_even" for rule in _rules(layout))


def _fp8(layout: Layout) -> bool:
    return any(rule.element.width == 8 for rule in _rules(layout))


def _fp4(layout: Layout) -> bool:
    return any(rule.element.width == 4 for rule in _rules(layout))


def _has_nan(layout: Layout) -> bool:
    return any(rule.element.nan_codes for rule in _rules(layout))


def _negative_zero(layout: Layout) -> bool:
    return any(rule.element.negative_zero for rule in _rules(layout))


def _fp32_scale(layout: Layout) -> bool:
    return any(f.kind == "scale" and f.format is FP32 for _, f in layout.fields())


def _words(layout: Layout) -> bool:
    return any(f.format in (BF16, FP32) for _, f in layout.fields())


def _raw(layout: Layout) -> bool:
    return any(f.kind == "raw" for _, f in layout.fields())


def _fp8_power(layout: Layout) -> bool:
    return _fp8(layout) and _power(layout)


def _code_scale(layout: Layout) -> bool:
    return _nearest(layout) or (_fp8(layout) and not _fp32_scale(layout))


def _both(a: Suits, b: Suits) -> Suits:
    return lambda layout: a(layout) and b(layout)


def _element(name: str) -> Suits:
    return lambda layout: any(rule.element.name == name for rule in _rules(layout))


def _floor_is_not(value: float) -> Suits:
    return lambda layout: any(abs(rule.floor - value) > 1e-9 for rule in _rules(layout))


def _qmax(value: float) -> Suits:
    return lambda layout: any(r.element.width == 8 and r.qmax != value for r in _rules(layout))


def _multiple_is_not(value: int) -> Suits:
    return lambda layout: layout.page_multiple != value


_FP32 = frozenset({"fp32"})
_ROPE = frozenset({"rope"})

_LIST = (
    # The scale: its floor.
    Dialect(
        "floor-1e-4-on-scale",
        "floor 1e-4 on the scale instead of {floor}",
        {"floor": 1e-4, "floor_place": "scale"},
        _power,
    ),
    Dialect(
        "floor-1e-4-on-amax",
        "floor 1e-4 on amax instead of {floor}",
        {"floor": 1e-4, "floor_place": "amax"},
        _both(_power, _floor_is_not(1e-4)),
    ),
    Dialect(
        "floor-1e-6-on-amax",
        "floor 1e-6 on amax instead of {floor}",
        {"floor": 1e-6, "floor_place": "amax"},
        _power,
    ),
    Dialect(
        "floor-1e-8-on-amax",
        "floor 1e-8 on amax instead of {floor}",
        {"floor": 1e-8, "floor_place": "amax"},
        _power,
    ),
    Dialect(
        "floor-2^-6-on-scale",
        "floor 2^-6, the smallest normal scale, instead of {floor}",
        {"floor": 2.0**-6},
        _nearest,
    ),
    Dialect(
        "no-floor",
        "no floor instead of {floor}: a group of zeros has the scale code 00",
        {"floor": 0.0, "floor_place": "amax"},
        _any,
    ),
    Dialect(
        "no-floor-zero-is-one",
        "no floor instead of {floor}: a group of zeros has the scale 1",
        {"floor": 0.0, "floor_place": "amax", "zero_is_one": True},
        _power,
    ),
    # The scale: how it becomes a power of two, or a code.
    Dialect(
        "exponent-down",
        "amax / {qmax} is rounded down to a power of two instead of up",
        {"exponent": "down"},
        _power,
    ),
    Dialect(
        "exponent-ocp",
        "the OCP rule: the exponent of amax less that of {qmax}, the significand dropped, instead of "
        "rounding up",
        {"exponent": "ocp"},
        _power,
    ),
    Dialect(
        "exponent-even",
        'the "even" rule: amax is rounded to the mantissa bits of {element}, then the OCP rule, '
        "instead of rounding up",
        {"exponent": "even"},
        _power,
    ),
    Dialect(
        "exponent-log2-nearest",
        "log2(amax / {qmax}) is rounded to the nearest integer instead of up",
        {"exponent": "log2_nearest"},
        _power,
    ),
    Dialect(
        "exponent-cast-nearest",
        "amax / {qmax} is cast to UE8M0, which rounds to the nearest power of two instead of up",
        {"exponent": "nearest"},
        _power,
    ),
    Dialect(
        "exponent-log2-cut",
        "log2(amax / {qmax}) is cut toward zero instead of rounded up",
        {"exponent": "log2_cut"},
        _power,
    ),
    Dialect(
        "exponent-log2-ceil",
        "log2 in fp32, then ceil: just above a power of two the scale is one step too small",
        {"exponent": "log2_ceil"},
        _power,
        _FP32,
    ),
    Dialect("qmax-240", "qmax 240 instead of {qmax}", {"qmax": 240.0}, _qmax(240.0)),
    Dialect("qmax-224", "qmax 224 instead of {qmax}", {"qmax": 224.0}, _qmax(224.0)),
    Dialect("qmax-448", "qmax 448 instead of {qmax}", {"qmax": 448.0}, _qmax(448.0)),
    Dialect(
        "scale-rounded-after-use",
        "the elements are divided by the unrounded scale, and the scale is rounded when it is stored",
        {"unrounded": True},
        _any,
    ),
    Dialect(
        "scale-mantissa-dropped",
        "the elements are divided by the unrounded scale, of which only the exponent is stored",
        {"truncated": True},
        _power,
    ),
    Dialect(
        "scale-rounded-up",
        "the scale code is rounded up instead of to nearest",
        {"exponent": "up"},
        _nearest,
    ),
    Dialect(
        "amax-divided",
        "amax is divided by 6 instead of multiplied by fp32(1/6)",
        {"amax_division": True},
        _nearest,
        _FP32,
    ),
    Dialect(
        "infinite-code-254",
        "a group with an infinity has the scale code FE instead of FF",
        {"infinite_code": 254},
        _fp8_power,
    ),
    Dialect(
        "infinite-as-largest",
        "a group with an infinity has the scale of the largest fp32 number",
        {"infinite_as_largest": True},
        _power,
    ),
    Dialect(
        "nan-poisons-group",
        "a NaN makes its whole group NaN instead of itself alone",
        {"poisoned": True},
        _code_scale,
    ),
    Dialect(
        "scale-word-unrounded",
        "the fp32 scale is amax / {qmax} itself, not rounded to a power of two",
        {"scale_word": "unrounded"},
        _fp32_scale,
    ),
    Dialect(
        "scale-word-code-number",
        "the fp32 scale holds the number of the UE8M0 code instead of 2^e",
        {"scale_word": "number"},
        _fp32_scale,
    ),
    Dialect(
        "scale-word-code-repeated",
        "the four scale bytes hold the UE8M0 code four times instead of an fp32 number",
        {"scale_word": "repeated"},
        _fp32_scale,
    ),
    # The elements.
    Dialect("ties-to-zero", "ties go toward zero instead of to even", {"ties": "zero"}, _any),
    Dialect("ties-away", "ties go away from zero instead of to even", {"ties": "away"}, _any),
    Dialect("ties-up", "ties go up (half up) instead of to even", {"ties": "up"}, _any),
    Dialect("elements-cut", "elements are cut toward zero, not rounded", {"ties": "cut"}, _any),
    Dialect(
        "carry-lost",
        "an element that rounds up to a power of two loses the carry into its exponent",
        {"carry": "lost"},
        _fp8,
    ),
    Dialect(
        "fp16-step",
        "elements go through fp16, cut off, before they are rounded (two roundings)",
        {"fp16_step": True},
        _fp8,
        _FP32,
    ),
    Dialect(
        "reciprocal",
        "elements are multiplied by 1 / scale instead of divided by the scale",
        {"reciprocal": True},
        _nearest,
    ),
    Dialect(
        "negative-zero-dropped",
        "the sign of an element that rounds to zero is dropped",
        {"negative_zero": "dropped"},
        _any,
        alone=_negative_zero,
    ),
    Dialect(
        "negative-zero-input-lost",
        "the sign of -0.0 is lost, that of negative values which round to zero is kept",
        {"negative_zero": "input"},
        _any,
        alone=_negative_zero,
    ),
    Dialect(
        "negative-zero-is-nan",
        "a negative element that rounds to zero is written as 80, the NaN of FNUZ",
        {"negative_zero": "nan"},
        _fp8,
        alone=_element("e4m3fnuz"),
    ),
    Dialect("nan-to-largest", "a NaN becomes the largest value", {"nan": "max"}, _has_nan),
    Dialect("nan-to-smallest", "a NaN becomes the most negative value", {"nan": "-max"}, _any),
    Dialect("nan-to-zero", "a NaN becomes zero", {"nan": "zero"}, _any),
    Dialect(
        "overflow-to-nan",
        "an element beyond the largest value becomes NaN instead of saturating",
        {"overflow": "nan"},
        _fp8,
        alone=lambda layout: False,  # by the contract's scale nothing is beyond the largest value
    ),
    Dialect(
        "fnuz-early-saturation",
        "everything from 128 on saturates to 240 (7F)",
        {"overflow": "early"},
        _element("e4m3fnuz"),
    ),
    Dialect(
        "fnuz-read-as-ocp",
        "FNUZ bytes (qmax 224) read as OCP",
        {"element": E4M3FNUZ, "qmax": 224.0},
        _element("e4m3fn"),
    ),
    Dialect(
        "fnuz-240-read-as-ocp",
        "FNUZ bytes (qmax 240) read as OCP",
        {"element": E4M3FNUZ, "qmax": 240.0},
        _element("e4m3fn"),
    ),
    Dialect(
        "ocp-read-as-fnuz",
        "OCP bytes (qmax 448) read as FNUZ",
        {"element": E4M3FN, "qmax": 448.0},
        _element("e4m3fnuz"),
    ),
    Dialect(
        "nibbles-swapped",
        "nibbles swapped: the even element is in the high one",
        {"nibbles": "high_first"},
        _fp4,
    ),
    Dialect(
        "nibbles-halves",
        "split halves: low nibbles hold the first half of the row, high ones the second",
        {"nibbles": "halves"},
        _fp4,
    ),
    Dialect(
        "nibbles-group-halves",
        "split halves: low nibbles hold the first half of each group, high ones the second",
        {"nibbles": "group_halves"},
        _fp4,
    ),
    Dialect(
        "big-endian",
        "bf16 and fp32 entries have their high byte first",
        {"big_endian": True},
        _words,
    ),
    # Rounding of rows to bf16.
    Dialect(
        "bf16-step-absent",
        "the row is not rounded to bf16 before it is quantized",
        {"bf16_step": False},
        _any,
        frozenset({"bf16_step"}),
    ),
    Dialect(
        "bf16-step-present",
        "the row is rounded to bf16 before it is quantized",
        {"bf16_step": True},
        _any,
        frozenset({"no_bf16_step"}),
    ),
    Dialect(
        "bf16-half-up",
        "fp32 becomes bf16 by rounding half up instead of to even",
        {"bf16_rounding": "half_up"},
        _raw,
        _FP32,
    ),
    Dialect(
        "bf16-cut",
        "fp32 becomes bf16 by cutting the lower half off",
        {"bf16_rounding": "cut"},
        _any,
        _FP32,
    ),
    # RoPE.
    Dialect(
        "rope-halves",
        "RoPE turns halves (NeoX) instead of neighbouring pairs (GPT-J)",
        {"rotation": "halves"},
        _any,
        _ROPE,
    ),
    Dialect("rope-inverse", "RoPE turns the other way", {"rotation": "inverse"}, _any, _ROPE),
    Dialect("rope-absent", "RoPE is not applied", {"rotation": "none"}, _any, _ROPE),
    Dialect(
        "rope-position-last",
        "RoPE takes the position of the last token of a group instead of the first",
        {"position": "last"},
        _any,
        _ROPE | {"group"},
    ),
    Dialect(
        "rope-table-bf16", "the cosine table is rounded to bf16", {"table": "bf16"}, _any, _ROPE
    ),
    Dialect(
        "rope-table-in-turn",
        "a row of the cosine table is read as cosine and sine in turn",
        {"table": "in_turn"},
        _any,
        _ROPE,
    ),
    Dialect(
        "rope-fma-cos",
        "fused multiply-add in RoPE: the product with the cosine is not rounded",
        {"fused": "cos"},
        _any,
        _ROPE,
    ),
    Dialect(
        "rope-fma-sin",
        "fused multiply-add in RoPE: the product with the sine is not rounded",
        {"fused": "sin"},
        _any,
        _ROPE,
    ),
    # Pooling.
    Dialect(
        "overlap-lanes-swapped",
        "older and newer states use each other's columns",
        {"lanes": "swapped"},
        _any,
        frozenset({"overlap"}),
    ),
    Dialect(
        "overlap-lost",
        "the group before is not pooled",
        {"lanes": "lost"},
        _any,
        frozenset({"overlap"}),
    ),
    # The page.
    Dialect(
        "inline-read-as-segregated",
        "rows are inline, you read them as segregated",
        {"arrangement": "inline"},
        lambda layout: not layout.inline,
    ),
    Dialect(
        "segregated-read-as-inline",
        "rows are segregated, you read them as inline",
        {"arrangement": "segregated"},
        lambda layout: layout.inline,
    ),
    Dialect(
        "page-unpadded",
        "pages follow each other without padding",
        {"page_multiple": 1},
        lambda layout: layout.page_multiple != 1,
    ),
    *(
        Dialect(
            f"page-padded-to-{multiple}",
            f"pages are padded to a multiple of {multiple} bytes",
            {"page_multiple": multiple},
            _multiple_is_not(multiple),
        )
        for multiple in (256, 512, 576)
    ),
    *(
        Dialect(
            f"rows-per-page-{name}",
            f"the writer's pages have {text} as many rows",
            {"pages": factor},
            lambda layout: not layout.inline or layout.page_multiple > 1,
        )
        for name, text, factor in (
            ("twice", "twice", 2.0),
            ("four-times", "four times", 4.0),
            ("half", "half", 0.5),
        )
    ),
    Dialect(
        "pad-not-written",
        "pad bytes are not written",
        {"pad_written": False},
        lambda layout: any(f.kind == "pad" for _, f in layout.fields()),
        alone=lambda layout: False,  # then a fact about the bytes says what they hold
    ),
    Dialect("slot-plus-one", "every row lies one slot too far", {"slot_shift": 1}, _any),
    Dialect("slot-minus-one", "every row lies one slot too early", {"slot_shift": -1}, _any),
)

#: Every dialect by name; those that are likelier come first.
DIALECTS = {dialect.name: dialect for dialect in _LIST}
