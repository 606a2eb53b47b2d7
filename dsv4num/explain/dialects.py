"""The dialects by name: what other writers do, in a sentence and as knobs. SPEC section 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as member
from typing import Any

from dsv4num.explain.encoder import Knobs
from dsv4num.formats import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    FP32,
    UE8M0,
    WILD_RULES,
    Field,
    GroupRule,
    Layout,
)
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
    needs: frozenset[str] = member(default=frozenset())
    alone: Suits = lambda layout: True

    def describe(self, layout: Layout) -> str:
        """The text, with the floor, qmax and element of the layout's rule.

        Example:
            >>> from dsv4num.formats import get_layout
            >>> DIALECTS["floor-1e-4-on-scale"].describe(get_layout("v4"))
            'floor 1e-4 on the scale instead of on amax'
        """
        rule = layout.rule
        if rule is None:  # no floor, qmax or element to speak of
            return self.text
        floor = _PLACES[rule.floor_place]
        if not rule.floor:
            floor = "none"
        elif abs(rule.floor - self.knobs.get("floor", 0)) > 1e-9:
            floor = f"{_FLOORS.get(rule.floor, f'{rule.floor:g}')} {floor}"
        return self.text.format(floor=floor, qmax=f"{rule.qmax:g}", element=rule.element.name)


#: How people write the floors of the contract.
_FLOORS = {P1_FLOOR: "1e-4", M1_FLOOR: "6 * 2^-126", N2_FLOOR: "2^-9"}
_PLACES = {"amax": "on amax", "scale": "on the scale", "added": "added to amax"}


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


def _every(layout: Layout) -> bool:
    return True


def _any(layout: Layout) -> bool:
    return bool(_rules(layout))


def _some(test: Callable[[GroupRule], bool]) -> Suits:
    """Layouts with a rule that passes a test."""
    return lambda layout: any(test(rule) for rule in _rules(layout))


def _is_power(rule: GroupRule) -> bool:
    return rule.scale_rounding == "up_to_power_of_two"


def _is_nearest(rule: GroupRule) -> bool:
    return rule.scale_rounding in ("nearest_even", "up")


def _is_scaled(rule: GroupRule) -> bool:
    return rule.scale_rounding not in ("unit", "given")


_power = _some(_is_power)
_nearest = _some(_is_nearest)
_rounded = _some(lambda rule: _is_power(rule) or _is_nearest(rule))
_floored = _some(lambda rule: _is_scaled(rule) and rule.floor >= 2.0**-126)
_divides = _some(lambda rule: _is_nearest(rule) and rule.scaling == "divide")
_factored = _some(lambda rule: _is_nearest(rule) and rule.amax_factor != 0)
_fp8 = _some(lambda rule: rule.element.width == 8)
_fp4 = _some(lambda rule: rule.element.width == 4)
_fp8_power = _some(lambda rule: _is_power(rule) and rule.element.width == 8)
_unscaled_fp8 = _some(lambda rule: not _is_scaled(rule) and rule.element.width == 8)
_has_nan = _some(lambda rule: bool(rule.element.nan_codes))
_negative_zero = _some(lambda rule: rule.element.negative_zero)


def _scales(layout: Layout) -> list[Field]:
    return [f for _, f in layout.fields() if f.kind == "scale"]


def _fp32_power(layout: Layout) -> bool:
    """Scales that are 2**e as fp32."""
    return any(
        f.format is FP32 and f.rule is not None and _is_power(f.rule) for f in _scales(layout)
    )


def _four_codes(layout: Layout) -> bool:
    return any(f.format is UE8M0 and f.copies == 4 for f in _scales(layout))


def _permuted(layout: Layout) -> bool:
    return any(f.order for _, f in layout.fields())


def _words(layout: Layout) -> bool:
    return any(f.format in (BF16, FP32) for _, f in layout.fields())


def _raw(layout: Layout) -> bool:
    return any(f.kind == "raw" for _, f in layout.fields())


def _values(layout: Layout) -> bool:
    return _any(layout) or _raw(layout)


def _code_scale(layout: Layout) -> bool:
    return _nearest(layout) or (_fp8_power(layout) and not _fp32_power(layout))


def _both(a: Suits, b: Suits) -> Suits:
    return lambda layout: a(layout) and b(layout)


def _element(name: str) -> Suits:
    return _some(lambda rule: rule.element.name == name)


def _floor_is_not(value: float, place: str) -> Suits:
    """Power-of-two rules with another floor."""
    return _some(
        lambda rule: (
            _is_power(rule) and (abs(rule.floor - value) > 1e-9 or rule.floor_place != place)
        )
    )


def _qmax(value: float) -> Suits:
    return _some(lambda rule: _is_scaled(rule) and rule.element.width == 8 and rule.qmax != value)


def _scaled_element(name: str) -> Suits:
    return _some(lambda rule: _is_scaled(rule) and rule.element.name == name)


def _multiple_is_not(value: int) -> Suits:
    """Layouts that have pages of another size where they are padded to this multiple."""

    def differs(layout: Layout) -> bool:
        rows, several = layout.tile_rows
        sizes = (rows * count * layout.row_bytes for count in (range(1, 10) if several else (1,)))
        multiples = value, layout.page_multiple
        padded = ([-(-size // multiple) * multiple for multiple in multiples] for size in sizes)
        return layout.pools == 1 and any(mine != own for mine, own in padded)

    return differs


def _other_rows(layout: Layout) -> bool:
    """Layouts in which the rows per page show, and may be others."""
    fixed = layout.pools > 1 or not layout.tile_rows[1]
    return not fixed and (not layout.inline or _multiple_is_not(1)(layout))


def _form(form: str) -> Suits:
    return lambda layout: layout.form == form


def _scales_last(layout: Layout) -> bool:
    """Inline layouts whose scales follow all that they scale."""
    ends = [max(f.places) for _, f in layout.fields() if f.kind in ("codes", "raw")]
    starts = [min(f.places) for f in _scales(layout)]
    return layout.inline and bool(starts) and min(starts) > max(ends)


def _writer(family: str) -> Suits:
    """Layouts that a writer with this rule fills, and whose own rule it is not."""

    def suits(layout: Layout) -> bool:
        own = layout.rule.family if layout.rule else None
        return own != family and any(rule.family == family for rule, _ in layout.writers)

    return suits


_FP32 = frozenset({"fp32"})
_ROPE = frozenset({"rope"})

_LIST = (
    # The scale: its floor.
    Dialect(
        "floor-1e-4-on-scale",
        "floor 1e-4 on the scale instead of {floor}",
        {"floor": 1e-4, "floor_place": "scale"},
        _floor_is_not(1e-4, "scale"),
    ),
    Dialect(
        "floor-1e-4-on-amax",
        "floor 1e-4 on amax instead of {floor}",
        {"floor": 1e-4, "floor_place": "amax"},
        _floor_is_not(1e-4, "amax"),
    ),
    Dialect(
        "floor-1e-6-on-amax",
        "floor 1e-6 on amax instead of {floor}",
        {"floor": 1e-6, "floor_place": "amax"},
        _floor_is_not(1e-6, "amax"),
    ),
    Dialect(
        "floor-1e-8-on-amax",
        "floor 1e-8 on amax instead of {floor}",
        {"floor": 1e-8, "floor_place": "amax"},
        _floor_is_not(1e-8, "amax"),
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
        _floored,
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
        _rounded,
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
        _factored,
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
        _fp32_power,
    ),
    Dialect(
        "scale-word-code-number",
        "the fp32 scale holds the number of the UE8M0 code instead of 2^e",
        {"scale_word": "number"},
        _fp32_power,
    ),
    Dialect(
        "scale-word-code-repeated",
        "the four scale bytes hold the UE8M0 code four times instead of an fp32 number",
        {"scale_word": "repeated"},
        _fp32_power,
    ),
    Dialect(
        "scale-word-fp32",
        "the four scale bytes hold the fp32 number 2^e instead of the UE8M0 code four times",
        {"scale_word": "power"},
        _four_codes,
    ),
    Dialect(
        "scales-in-order",
        "scales lie one after the other instead of permuted",
        {"in_order": True},
        _permuted,
    ),
    *(
        Dialect(
            f"rule-{family}",
            f"the fp32 scale is {text}, not a power of two (rule {family})",
            {"rule": WILD_RULES[f"{family}/128"]},
            _writer(family),
        )
        for family, text in (
            ("F2", "amax / 448 with the floor 2^-126"),
            ("F3", "amax / 448 without a floor, and elements are multiplied by its reciprocal"),
            ("F3z", "amax / 448 without a floor, and elements are multiplied by 448 / amax"),
            ("F4", "(amax + 1e-5) / 448"),
            ("F5", "amax * fp32(1/448) with the floor 1e-6 on amax"),
            ("F6", "amax * fp32(1/448), and 1 for a group of zeros"),
        )
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
        _divides,
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
    Dialect("nan-to-negative-zero", "a NaN becomes -0", {"nan": "-zero"}, _fp4),
    Dialect("raw-nan-to-zero", "a NaN in a bf16 field becomes zero", {"raw_nan": "zero"}, _raw),
    Dialect(
        "overflow-to-nan",
        "an element beyond the largest value becomes NaN instead of saturating",
        {"overflow": "nan"},
        _fp8,
        alone=_unscaled_fp8,  # else, by the contract's scale, nothing is beyond the largest value
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
        _scaled_element("e4m3fn"),
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
        _values,
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
        "rope-position-entry",
        "RoPE takes the number of the entry as its position instead of that of its first token",
        {"position": "entry"},
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
    Dialect(
        "hadamard",
        "rows go through a Walsh-Hadamard transform of 128 values before they are quantized",
        {"hadamard": True},
        lambda layout: layout.head_dim == 128,
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
        _form("segregated"),
    ),
    Dialect(
        "segregated-read-as-inline",
        "rows are segregated, you read them as inline",
        {"arrangement": "segregated"},
        _scales_last,
    ),
    Dialect(
        "rows-in-order-read-as-tiles",
        "rows lie one after the other, you read them as tiles",
        {"arrangement": "segregated"},
        _form("tiled"),
    ),
    Dialect(
        "page-unpadded",
        "pages follow each other without padding",
        {"page_multiple": 1},
        _multiple_is_not(1),
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
            _other_rows,
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
    Dialect("slot-plus-one", "every row lies one slot too far", {"slot_shift": 1}, _every),
    Dialect("slot-minus-one", "every row lies one slot too early", {"slot_shift": -1}, _every),
)

#: Every dialect by name; those that are likelier come first.
DIALECTS = {dialect.name: dialect for dialect in _LIST}
