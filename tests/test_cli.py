"""The command line, and the drawings it prints."""

import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest

import dsv4num.reference
from dsv4num import LAYOUTS, SPEC_VERSION, ArgumentError, __version__, get_layout
from dsv4num.cli import main
from dsv4num.formats import WILD_LAYOUTS
from dsv4num.reference import encode_records, write_records

ROOT = Path(__file__).parent.parent
BLOCK_SIZES = (1, 2, 3, 4, 5, 7, 64, 72, 100, 12_345)
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def readme_blocks(language):
    """The fenced blocks of README.md in one language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [block for lang, block in FENCE.findall(text) if lang == language]


def run(capsys, *argv):
    """Output of a command that succeeds."""
    assert main(argv) == 0
    return capsys.readouterr().out


def test_layout_draws_a_page(capsys):
    lines = run(capsys, "layout", "v4", "--block-size", "64").splitlines()
    last = "row 63  nope 36288..36735"
    assert f"  36288 │ {last:<61}│ rope 36736..36863 │" in lines
    padding = "64 bytes that no row owns: never written, never read"
    assert f"  37376 │ {padding:<81}│" in lines
    assert lines[-1] == "  37440"


def test_layout_draws_a_row(capsys):
    lines = run(capsys, "layout", "v41_nvfp4_inline").splitlines()
    start = lines.index("one row: 288 bytes")
    assert lines[start + 1].split() == ["0", "256"]
    assert [cell.strip() for cell in lines[start + 4].split("│")[1:-1]] == ["512 e2m1", "32 e4m3fn"]


def test_layout_json(capsys):
    facts = json.loads(run(capsys, "layout", "v4", "--block-size", "64", "--json"))
    assert (facts["owned_bytes"], facts["page_bytes"]) == (37_376, 37_440)
    assert [plane["page_offset"] for plane in facts["planes"]] == [0, 36_864]
    assert facts["planes"][1]["fields"][1] == {
        "name": "pad",
        "kind": "pad",
        "offset": 7,
        "nbytes": 1,
        "format": None,
        "dims": None,
        "rule": None,
        "pad_value": 0,
        "order": [],
        "copies": 1,
        "run": 0,
        "step": 0,
    }


def test_layout_list(capsys):
    lines = run(capsys, "layout", "--list").splitlines()
    every = {**LAYOUTS, **WILD_LAYOUTS}
    assert [line.split()[0] for line in lines[1:]] == list(every)
    assert lines[1].split()[:7] == ["v4", "512", "584", "37440", "segregated", "S", "yes"]
    for line, layout in zip(lines[1:], every.values(), strict=True):
        assert layout.source in line and all(alias in line for alias in layout.aliases)
        assert line.split()[4:7] == [
            layout.form,
            layout.evidence,
            "yes" if layout.name in LAYOUTS else "-",
        ]
    listed = json.loads(run(capsys, "layout", "--list", "--json"))
    assert [facts["name"] for facts in listed] == list(every)
    assert [facts["fingerprint"] for facts in listed] == [x.fingerprint() for x in every.values()]
    assert {f["name"]: f["page_bytes"] for f in listed}["indexer_mxfp4_slots8"] is None


def test_layout_facts_rebuild_the_layout(capsys):
    """The JSON has all that decides where bytes lie."""
    for name in ("v32_nvfp4", "ggml_fp8_b32_e8m0", "indexer_mxfp4_slots64", "v4_two_pools"):
        facts = json.loads(run(capsys, "layout", name, "--json"))
        layout = get_layout(name)
        for plane, found in zip(layout.planes, facts["planes"], strict=True):
            assert [tuple(axis) for axis in found["axes"]] == [
                (axis.of, axis.step, axis.count) for axis in plane.axes
            ]
            assert found["pool"] == plane.pool
            for field, stated in zip(plane.fields, found["fields"], strict=True):
                assert tuple(stated["order"]) == field.order
                assert (stated["copies"], stated["run"], stated["step"]) == (
                    field.copies,
                    field.run,
                    field.step,
                )
        rule = layout.rule
        assert facts["rules"][rule.name]["qmax"] == rule.qmax
        assert set(facts["writers"]) == {rule.name for rule, _ in layout.writers}


def test_encode(capsys):
    out = run(capsys, "encode", "e4m3fn", "-0.0", "-inf", "-1e-3", "nan", "465", "0x1.8p+3")
    codes = [line.split()[2] for line in out.splitlines()[1:]]
    assert codes == ["0x80", "0xFE", "0x81", "0x7F", "0x7E", "0x54"]
    out = run(capsys, "encode", "bf16", "nan", "1.01171875")
    assert [line.split()[2] for line in out.splitlines()[1:]] == ["0x7FFF", "0x3F82"]
    out = run(capsys, "encode", "e2m1", "0.75", "-5")
    assert [line.split()[2] for line in out.splitlines()[1:]] == ["0x2", "0xE"]


def test_decode(capsys):
    out = run(capsys, "decode", "ue8m0", "00", "0x7F", "FF")
    assert out == (
        "code  value         fp32\n"
        "0x00  5.877472e-39  0x00400000\n"
        "0x7F  1.0           0x3F800000\n"
        "0xFF  nan           0x7FC00000\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layout", "v5"], "layout: got 'v5'; allowed: v4, v4_fnuz, "),
        (["layout", "v4", "--block-size", "0"], "--block-size: got 0; allowed: 1 or more"),
        (["encode", "e4m3", "1"], "fmt: got 'e4m3'; allowed: ue8m0, e4m3fn, "),
        (["encode", "e4m3fn"], "VALUE: got none; allowed: one or more numbers (SPEC 2.2)"),
        (["encode", "e4m3fn", "one"], "VALUE: got 'one'; allowed: a number, inf or nan"),
        (["decode", "e2m1", "10"], "CODE: got '10'; allowed: hexadecimal 0..F (SPEC 2.4)"),
        (["decode", "e4m3fn", "x"], "CODE: got 'x'; allowed: hexadecimal 0..FF (SPEC 2.2)"),
        (["decode", "e4m3fn", "100"], "CODE: got '100'; allowed: hexadecimal 0..FF"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, argv, message):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dsv4num: {message}")
    assert captured.err.count("\n") == 1


def test_interrupted(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4num.cli.get_scalar", interrupt)
    assert main(["encode", "e2m1", "1"]) == 130
    assert capsys.readouterr() == ("", "")


def test_usage_errors_and_version(capsys):
    for argv in ([], ["layout"], ["layout", "v4", "--list"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"dsv4num {__version__}, SPEC {SPEC_VERSION}\n"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_drawn_offsets_are_where_bytes_are(name, block_size):
    """Every drawn range holds, in a page really written, the bytes of that row's field."""
    layout = get_layout(name)
    text = layout.describe(block_size)
    assert max(map(len, text.splitlines())) <= 100
    drawing = text[text.index("one page:") :].splitlines()
    assert len({len(line) for line in drawing[1:-1]}) == 1
    rng = np.random.default_rng(block_size)
    records = encode_records(rng.standard_normal((block_size, layout.head_dim), np.float32), layout)
    page = np.full((1, layout.page_bytes(block_size)), 0xA5, np.uint8)
    write_records(records, page, np.arange(block_size), block_size, layout=layout)

    columns = {}
    before = 0
    for plane in layout.planes:
        for field in plane.fields:
            columns[field.name] = (before + field.offset, field.nbytes)
        before += plane.row_bytes
    drawn = set()
    row = -1
    for cell in (cell for line in drawing if "│" in line for cell in line.split("│")[1:-1]):
        if label := re.search(r"row (\d+) ", cell):
            row = int(label[1])
        if found := re.search(r"(\w+) (\d+)(?:\.\.(\d+))?\s*$", cell):
            field, first = found[1], int(found[2])
            last = int(found[3] or first)
            start, nbytes = columns[field]
            assert first == layout.byte_offset(row, field, block_size)
            assert last - first + 1 == nbytes
            np.testing.assert_array_equal(
                page[0, first : last + 1], records[row, start : start + nbytes]
            )
            drawn.add((row, field))
    shown = range(block_size) if block_size <= 3 else (0, 1, block_size - 1)
    assert drawn == {(row, field) for row in shown for field in columns}
    unowned = layout.page_bytes(block_size) - layout.owned_bytes(block_size)
    assert (f"{unowned} bytes that no row owns" in text) == (unowned > 0)
    assert int(drawing[-1]) == page.shape[1]


@pytest.mark.parametrize("block_size", [0, -1, True, 1.0, "64", None])
def test_describe_refuses_a_bad_block_size(block_size):
    with pytest.raises(ArgumentError, match=r"block_size: got .*1 or more"):
        get_layout("v4").describe(block_size)


def test_readme_shows_what_the_command_prints(capsys):
    """Every `$ dsv4num ...` block of README.md is the command's whole output."""
    shown = [block.split("\n", 1) for block in readme_blocks("console")]
    commands = [command.removeprefix("$ dsv4num ").split() for command, _ in shown]
    assert ["layout", "v4", "--block-size", "64"] in commands
    for argv, (_, output) in zip(commands, shown, strict=True):
        assert run(capsys, *argv) == output


def test_readme_examples():
    """The Python blocks with prompts run from top to bottom and answer what they show."""
    text = "".join(block for block in readme_blocks("python") if ">>>" in block)
    examples = doctest.DocTestParser().get_doctest(text, {}, "README.md", "README.md", 0)
    assert len(examples.examples) > 10
    assert doctest.DocTestRunner(verbose=False).run(examples).failed == 0


def test_readme_code_for_a_gpu():
    """Blocks without prompts need a GPU; but what they import exists, and what they make is valid."""
    pytest.importorskip("torch", reason="kernels need torch")
    pytest.importorskip("triton", reason="kernels need triton")
    blocks = [block for block in readme_blocks("python") if ">>>" not in block]
    assert len(blocks) == 2
    for block in blocks:
        exec("".join(line for line in block.splitlines(True) if not line.startswith("print(")), {})


def test_readme_names_every_operation():
    """The table of operations has those of SPEC section 5, with their clauses."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## The operations")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|.*\| (5\.\d+) \|$", table, re.MULTILINE)
    assert [clause for _, clause in rows] == [f"5.{i}" for i in range(1, 11)]
    spec = (ROOT / "SPEC.md").read_text(encoding="utf-8")
    for names, clause in rows:
        section = spec.split(f"\n### {clause} ")[1].split("\n### ")[0]
        for name in re.findall(r"`(\w+)`", names):
            assert callable(getattr(dsv4num.reference, name))
            assert f"`{name}" in section
