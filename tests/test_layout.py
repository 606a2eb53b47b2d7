"""`formats.layout`: offsets and page sizes, typed in from the contract and public reports."""

from __future__ import annotations

import dataclasses

import pytest
import slow_oracle as slow

from dsv4num import LAYOUTS, RULES, SCALARS, ArgumentError, get_layout, get_rule, get_scalar
from dsv4num.formats import layout_of_width

NAMES = tuple(slow.LAYOUTS)
DATA = {name: "nope" if name.startswith("v4_") or name == "v4" else "codes" for name in NAMES}


def test_registry_holds_the_layouts_of_the_contract() -> None:
    assert sorted(LAYOUTS) == sorted(NAMES)


@pytest.mark.parametrize(
    ("name", "row", "head", "inline"),
    [
        ("v4", 584, 512, False),
        ("v4_fnuz", 584, 512, False),
        ("v41_mxfp8", 528, 512, False),
        ("v41_mxfp8_inline", 528, 512, True),
        ("v41_mxfp8_fnuz", 528, 512, False),
        ("v41_nvfp4", 288, 512, False),
        ("v41_nvfp4_inline", 288, 512, True),
        ("indexer_fp8", 132, 128, False),
        ("indexer_mxfp4", 68, 128, False),
    ],
)
def test_row_width(name: str, row: int, head: int, inline: bool) -> None:
    layout = get_layout(name)
    assert (layout.row_bytes, layout.head_dim, layout.inline) == (row, head, inline)
    assert layout.name == name and get_layout(layout) is layout


@pytest.mark.parametrize("name", NAMES)
def test_fields_tile_every_plane(name: str) -> None:
    for plane in get_layout(name).planes:
        owner: list[str | None] = [None] * plane.row_bytes
        for field in plane.fields:
            for byte in range(field.offset, field.offset + field.nbytes):
                assert owner[byte] is None, f"byte {byte}: {owner[byte]} and {field.name}"
                owner[byte] = field.name
        assert None not in owner


@pytest.mark.parametrize("name", NAMES)
def test_field_widths_follow_from_their_dimensions(name: str) -> None:
    layout = get_layout(name)
    described = [0] * layout.head_dim
    names = [field.name for _, field in layout.fields()]
    assert len(names) == len(set(names))
    for _, field in layout.fields():
        count = field.dims[1] - field.dims[0]
        if field.kind in ("codes", "raw"):
            for dim in range(*field.dims):
                described[dim] += 1
            assert field.format is not None and field.nbytes * 8 == count * field.format.width
        if field.kind == "scale":
            assert field.rule is not None and field.format is not None
            assert field.nbytes * 8 == count // field.rule.group * field.format.width
        if field.kind == "pad":
            assert (field.pad_value, field.nbytes, field.offset) == (0, 1, 7)
    assert described == [1] * layout.head_dim


@pytest.mark.parametrize(
    ("name", "size", "scale_start"),
    [
        ("v4", 37440, 36864),
        ("v4_fnuz", 37440, 36864),
        ("v41_mxfp8", 33792, 32768),
        ("v41_mxfp8_inline", 33792, 512),
        ("v41_mxfp8_fnuz", 33792, 32768),
        ("v41_nvfp4", 18432, 16384),
        ("v41_nvfp4_inline", 18432, 256),
        ("indexer_fp8", 8448, 8192),
        ("indexer_mxfp4", 4352, 4096),
    ],
)
def test_page_of_64_rows(name: str, size: int, scale_start: int) -> None:
    layout = get_layout(name)
    assert layout.page_bytes(64) == size
    assert layout.byte_offset(0, "scale", 64) == scale_start
    assert layout.byte_offset(64, DATA[name], 64) == size


def test_v4_pages_are_padded_to_a_multiple_of_576() -> None:
    sizes = {1: 1152, 2: 1728, 16: 9792, 32: 19008, 64: 37440, 72: 42048, 128: 74880, 256: 149760}
    for rows, size in sizes.items():
        assert get_layout("v4").page_bytes(rows) == size
        assert get_layout("v4_fnuz").page_bytes(rows) == size
        assert get_layout("v4").owned_bytes(rows) == 584 * rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64, 100, 256])
def test_offsets_of_every_row_against_the_slow_oracle(name: str, block_size: int) -> None:
    layout = get_layout(name)
    assert layout.page_bytes(block_size) == slow.page_bytes(name, block_size)
    for stride in (None, slow.page_bytes(name, block_size) + 13):
        taken = slow.page_bytes(name, block_size) if stride is None else stride
        for slot in {0, 1, block_size - 1, block_size, 3 * block_size + block_size // 2, 10**10}:
            data, scales = slow.places(name, block_size, taken, slot)
            assert layout.byte_offset(slot, DATA[name], block_size, page_stride=stride) == data
            assert layout.byte_offset(slot, "scale", block_size, page_stride=stride) == scales


def test_v4_rope_and_pad() -> None:
    v4 = get_layout("v4")
    assert v4.byte_offset(0, "rope", 64) == 448
    assert v4.byte_offset(5, "rope", 64) == 2880 + 448
    assert v4.byte_offset(5, "pad", 64) == 36904 + 7
    assert v4.byte_offset(64, "pad", 64) == 37440 + 36864 + 7


def test_offsets_pass_32_bits() -> None:
    v4 = get_layout("v4")
    assert v4.byte_offset(64 * 57359, "nope", 64) == 2147520960 > 2**31
    assert v4.byte_offset(64 * 200000 + 1, "nope", 64) == 7488000576 > 2**32


@pytest.mark.parametrize(
    ("width", "name"),
    [
        (584, "v4"),
        (528, "v41_mxfp8"),
        (288, "v41_nvfp4"),
        (132, "indexer_fp8"),
        (68, "indexer_mxfp4"),
    ],
)
def test_width_without_a_name(width: int, name: str) -> None:
    assert layout_of_width(width).name == name


@pytest.mark.parametrize("width", [0, 512, 576, 585, 656])
def test_width_of_no_layout(width: int) -> None:
    with pytest.raises(ArgumentError, match=rf"got {width};.*584.*528.*SPEC 4\.5"):
        layout_of_width(width)


@pytest.mark.parametrize("name", ["", "V4", "v41", "v4 ", None, 584, ("v4",)])
def test_unknown_layout(name: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        get_layout(name)  # type: ignore[arg-type]  # refused
    text = str(caught.value)
    assert text.startswith(f"layout: got {name!r}") and "(SPEC 4" in text
    assert "v41_nvfp4_inline" in text


def test_aliases_mean_their_layout_and_nothing_twice() -> None:
    seen = set(LAYOUTS)
    for layout in LAYOUTS.values():
        for alias in layout.aliases:
            assert alias not in seen
            seen.add(alias)
            assert get_layout(alias) is layout


def test_byte_offset_errors() -> None:
    with pytest.raises(ArgumentError, match=r"^slot: got -1;.*SPEC 4\.3"):
        get_layout("v4").byte_offset(-1, "nope", 64)
    with pytest.raises(ArgumentError, match=r"^field: got 'codes';.*nope, rope, scale.*SPEC 4"):
        get_layout("v4").byte_offset(0, "codes", 64)


def test_facts_cannot_be_changed() -> None:
    layout = LAYOUTS["v4"]
    facts = [layout, layout.planes[0], layout.planes[0].fields[0], RULES["M1/32"], SCALARS["e2m1"]]
    for fact in facts:
        for member in dataclasses.fields(fact):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(fact, member.name, None)
        hash(fact)


def test_rules_of_the_layouts() -> None:
    for name, (_, _, _, rule, _) in slow.LAYOUTS.items():
        rules = {field.rule for _, field in get_layout(name).fields() if field.rule is not None}
        assert rules == {get_rule(rule)}
    assert get_scalar(get_scalar("bf16")) is SCALARS["bf16"]


def test_field_by_kind() -> None:
    v4 = get_layout("v4")
    assert v4.field("codes").name == "nope" and v4.field("raw").dims == (448, 512)
    assert get_layout("v41_nvfp4").field("raw") is None


@pytest.mark.parametrize("rows", [0, -1, 64.0, True, "64"])
def test_a_page_has_rows(rows: object) -> None:
    for measure in (get_layout("v4").owned_bytes, get_layout("v4").page_bytes):
        with pytest.raises(ArgumentError, match="block_size"):
            measure(rows)  # type: ignore[arg-type]  # refused
