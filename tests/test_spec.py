"""SPEC.md against the code: clause numbers, version, layouts, and every example."""

import re
from pathlib import Path

import numpy as np
import pytest

from dsv4num import LAYOUTS, RULES, SPEC_VERSION, get_layout, get_rule, get_scalar
from dsv4num.formats import WILD_LAYOUTS, WILD_RULES, layout_of_width
from dsv4num.reference import encode, encode_records, encode_scale, quantize

ROOT = Path(__file__).parent.parent
SPEC = (ROOT / "SPEC.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "dsv4num").rglob("*.py"))
HEADINGS = re.findall(r"^#{2,3} (\d+(?:\.\d+)?) ", SPEC, re.MULTILINE)

SCALARS = ("ue8m0", "e4m3fn", "e4m3fnuz", "e2m1", "bf16")

NUMBER = r"[1-9](?:\.[1-9]\d?(?!\d))?"
NUMBERS = rf"({NUMBER}(?:(?:\s+(?:and|to|or)|,)\s+{NUMBER})*)"
CITATIONS = (
    rf"[Cc]lauses?\s+{NUMBERS}",
    rf"SPEC(?:\s+(?:section|clause)s?)?\s+{NUMBERS}",
    r"""["']([1-9]\.[1-9]\d?)["']""",
)


def citations(text):
    """Every clause number that a source cites."""
    runs = [run for pattern in CITATIONS for run in re.findall(pattern, text)]
    return {cited for run in runs for cited in re.findall(NUMBER, run)}


def clause(number):
    """The text of one clause."""
    found = re.search(rf"^#+ {re.escape(number)} .*?\n(.*?)(?=^#|\Z)", SPEC, re.M | re.S)
    return found[1]


def tables(number):
    """The tables of a clause, each as rows of cells, without the heads."""
    for block in re.findall(r"(?:^\|.*\n)+", clause(number), re.MULTILINE):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        yield rows[2:]


def examples(names):
    """Every `left -> right` of the fences named `examples NAME`."""
    for name, body in re.findall(r"```examples (\S+)\n(.*?)```", SPEC, re.DOTALL):
        assert name in SCALARS or name in RULES
        if name in names:
            codes = r"[0-9A-F]+(?: \|(?: [0-9A-F]+(?![^ \n]))+)?"
            pairs = re.findall(rf"(\[[^]]+\]|\S+) -> ({codes})", body)
            assert len(pairs) == body.count("->")
            yield from ((name, left, right) for left, right in pairs)


def number(text):
    """A number as SPEC.md writes it."""
    return float.fromhex(text) if "0x" in text else float(text)


SCALAR_EXAMPLES = list(examples(SCALARS))
GROUP_EXAMPLES = list(examples(RULES))


def test_version_in_the_header():
    assert f"\nSPEC_VERSION {SPEC_VERSION}\n" in SPEC[:200]


def test_numbers_are_in_order_and_unique():
    keys = [tuple(map(int, heading.split("."))) for heading in HEADINGS]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_cited_clause_exists(path):
    assert citations(path.read_text(encoding="utf-8")) <= set(HEADINGS)


def test_citations_are_found():
    text = """clauses 3.1 to 3.4, 4.3; clause="2.2"; raise E(1, "5.1"); SPEC 6.2; SPEC section 4"""
    assert citations(text) == {"3.1", "3.4", "4.3", "2.2", "5.1", "6.2", "4"}


def test_every_format_and_rule_cites_its_clause():
    for thing in (*map(get_scalar, SCALARS), *RULES.values()):
        family = thing.name.split("/")[0]
        title = re.search(rf"^### {re.escape(thing.clause)} (.*)$", SPEC, re.MULTILINE)[1]
        assert title.lower() == family.lower()


def test_layout_table():
    (rows,) = tables("4.2")
    assert [row[0].strip("`") for row in rows] == list(LAYOUTS)
    for name, width, planes, multiple, owned, page in rows:
        layout = get_layout(name.strip("`"))
        assert int(width) == layout.row_bytes
        assert planes == " + ".join(str(plane.row_bytes) for plane in layout.planes)
        assert int(multiple) == layout.page_multiple
        assert int(owned) == layout.owned_bytes(64)
        assert int(page) == layout.page_bytes(64)


def test_record_tables():
    fields, ones = tables("4.1")
    described = {n.strip(" `"): row for row in fields for n in row[0].split(",")}
    assert set(described) == set(LAYOUTS)
    for name, row in described.items():
        assert int(row[1]) == get_layout(name).head_dim
    records = {n.strip(" `"): row[1] for row in ones for n in row[0].split(",")}
    assert set(records) == set(LAYOUTS)
    for name, text in records.items():
        runs = re.findall(r"(\d+) x `([0-9A-F ]+)`", text)
        expected = b"".join(bytes.fromhex(part) * int(count) for count, part in runs)
        row = np.ones((1, get_layout(name).head_dim), np.float32)
        assert encode_records(row, name).tobytes() == expected


def test_rule_table():
    (rows,) = tables("3")
    assert {row[0] for row in rows} == set(RULES)
    floors = {}
    for name, group, element, scale, qmax, floor in rows:
        rule = get_rule(name)
        assert (int(group), element, scale) == (rule.group, rule.element.name, rule.scale.name)
        assert float(qmax) == rule.qmax
        if floor != "the same":
            floors[name[:2]] = floor
        bits = int(re.search(r"`([0-9A-F]{8})`", floors[name[:2]])[1], 16)
        assert np.uint32(bits).view(np.float32) == np.float32(rule.floor)
        assert floors[name[:2]].endswith(rule.floor_place)


def test_table_of_other_rules():
    (rows,) = tables("3.6")
    named = [name.strip() for row in rows for name in row[0].split(",")]
    assert named == list(dict.fromkeys(named)) and set(named) == set(WILD_RULES)
    for names, _, zeros in rows:
        codes = re.findall(r"`([0-9A-F]+)`", zeros)
        rules = [get_rule(name.strip()) for name in names.split(",")]
        assert all(rule.clause == "3.6" for rule in rules)
        for rule, code in zip(rules, codes * len(rules) if len(codes) == 1 else codes, strict=False):
            assert encode_scale(np.zeros(1, np.float32), rule).tolist() == [int(code, 16)], rule.name
    for name, bits in re.findall(r"fp32\((1e-\d+)\) = `([0-9A-F]+)`", clause("3.6")):
        assert np.float32(float(name)).view(np.uint32) == int(bits, 16)


def test_layouts_in_the_wild():
    """The names of 4.6, its formulas in an example, and the fingerprint of 4.7."""
    text = clause("4.6") + clause("4.7")
    for name in re.findall(r"`(\w+(?:@\w+)?)`", text):
        assert name in ("NAME@RULE", "5e2cfde5841d6299") or get_layout(name)
    assert f"`{get_layout('v4').fingerprint()}`" in clause("4.7")
    tiles, permuted = get_layout("indexer_fp8_tiles"), get_layout("v32_nvfp4")
    for r, b in ((0, 17), (5, 3), (33, 127)):
        at = (r // 16 * 8 + b // 16) * 256 + r % 16 * 16 + b % 16
        assert tiles.byte_offset(r, "codes", 64, entry=b) == at
    for s in range(32):
        assert permuted.byte_offset(0, "scale", 64, entry=s) == 320 + 8 * (s % 4) + s // 4


def test_the_list_of_layouts_in_the_wild():
    """docs/layouts.md has a line for each, with its width and evidence."""
    text = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\w+) \| (.*?) \| ([STD]) \|$", text, re.M)
    listed = {name: (int(width), form, rule, seen) for name, width, form, rule, seen in rows}
    assert list(listed) == list(WILD_LAYOUTS)
    for name, (width, form, rules, seen) in listed.items():
        layout = get_layout(name)
        own = [layout.rule.family] if layout.rule else []
        families = [*own, *(r.family for r, _ in layout.writers if r != layout.rule)]
        assert (width, form, seen) == (layout.row_bytes, layout.form, layout.evidence)
        assert rules == (", ".join(families) or "none")


def test_widths():
    pairs = re.findall(r"(\d+)\s+`(\w+)`", clause("4.5"))
    assert len(pairs) == 5
    for width, name in pairs:
        assert layout_of_width(int(width)).name == name


def test_address_example():
    numbers = re.search(r"slot 700 .*? byte (\d+) .*?\bbyte (\d+)", clause("4.3"), re.DOTALL)
    layout = get_layout("v4")
    assert int(numbers[1]) == layout.byte_offset(700, "nope", 64)
    assert int(numbers[2]) == layout.byte_offset(700, "scale", 64)


@pytest.mark.parametrize(("name", "value", "code"), SCALAR_EXAMPLES)
def test_scalar_examples(name, value, code):
    x = np.array([number(value)], np.float32)
    assert int(encode(x, name)[0]) == int(code, 16)


@pytest.mark.parametrize(("name", "group", "codes"), GROUP_EXAMPLES)
def test_group_examples(name, group, codes):
    values = []
    for part in group.strip("[]").split(", "):
        count, _, value = part.rpartition(" x ")
        values += [number(value)] * int(count or 1)
    scale, _, elements = codes.partition(" | ")
    expected = [int(code, 16) for code in elements.split()]
    expected += expected[-1:] * (len(values) - len(expected))
    got, scale_codes = quantize(np.array([values], np.float32), name)
    assert scale_codes.tolist() == [[int(scale, 16)]]
    assert got.tolist() == [expected]


def test_examples_were_read():
    assert len(SCALAR_EXAMPLES) > 50
    assert len(GROUP_EXAMPLES) > 25
