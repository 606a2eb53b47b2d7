"""The exhaustive level: that it leaves no input out and names what differs; the reference's record."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import slow_oracle

from dsv4num.cli import main
from dsv4num.formats import RULES, SCALARS, get_rule
from tools import exhaust_reference

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

import dsv4num.gpu  # noqa: E402  (only where torch is)
from dsv4num.verify import exhaustive, runner  # noqa: E402  (only where torch is)
from dsv4num.verify.operations import OPERATIONS  # noqa: E402  (only where torch is)
from dsv4num.verify.runner import Options  # noqa: E402  (only where torch is)

RECORD = Path(__file__).resolve().parent.parent / "proof" / "reference.json"
INFINITY = 0x7F800000


@pytest.fixture
def verify(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `verify --level exhaustive` in this process: exit code, output, errors."""
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")  # the command may set it
    monkeypatch.setattr(exhaustive, "PATTERNS", 1 << 14)  # what the interpreter does in no time
    monkeypatch.setattr(exhaustive, "AMAXES", 2)

    def run(*options: str) -> tuple[int, str, str]:
        start = ["verify", "--device", device, "--jobs", "1", "--level", "exhaustive"]
        code = main([*start, *options])
        return code, *capsys.readouterr()

    return run


# --- nothing is left out --------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "first", "last", "extra"),
    [
        ("encode", 0, 0xFFFFFFFF, []),
        ("encode_scale", 0, INFINITY, [0x80000000]),
        ("exp32", 0x80000000, 0xC2AE0000, [0]),
    ],
)
def test_every_pattern_is_in_one_block(
    operation: str, first: int, last: int, extra: list[int]
) -> None:
    for variant in OPERATIONS[operation].variants:
        blocks = list(runner.OPERATIONS[operation].exhaustive(variant))
        at = first
        for block in blocks:
            start, end = (int(text, 16) for text in re.findall(r"[0-9A-F]{8}", block.name))
            assert start == at and end >= start
            at = end + 1
        assert at == last + 1
    start, end = (int(text, 16) for text in re.findall(r"[0-9A-F]{8}", blocks[-1].name))
    arguments = blocks[-1].make().arguments
    bits = arguments.get("x", arguments.get("amax")).view(np.uint32)
    assert bits.tolist() == [*range(start, end + 1), *extra]
    assert {"encode": SCALARS, "encode_scale": RULES, "exp32": {"fp32": 0}}[
        operation
    ].keys() == set(OPERATIONS[operation].variants)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [0, 1, 0x7F, 0x80, 0x3F80, 0x43E0, 0x7F7F, 0x7F80])
def test_groups_hold_every_element_of_their_amax(rule: str, amax: int) -> None:
    groups = exhaustive.groups_of_amax(get_rule(rule), amax)
    assert groups.shape[1] == RULES[rule].group and groups.dtype == np.uint16
    magnitude = groups & 0x7FFF
    nan = magnitude > 0x7F80
    assert (np.where(nan, 0, magnitude).max(axis=1) == amax).all()
    every = np.arange(1 << 16)
    wanted = every[((every & 0x7FFF) <= amax) | ((every & 0x7FFF) > 0x7F80)]
    assert np.unique(groups).tolist() == wanted.tolist()


def test_every_bf16_amax_is_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        exhaustive,
        "groups_of_amax",
        lambda rule, amax: seen.append(amax) or np.zeros((1, 64), np.uint16),
    )
    for block in exhaustive.every_bf16_amax_and_element("P1/64"):
        block.make()
    assert seen == list(range(0x7F81))


def test_the_small_ones() -> None:
    """Decoding and packing: what the cases of any level hold is already everything."""

    def inputs(operation: str, variant: str) -> dict[str, Any]:
        (block,) = OPERATIONS[operation].exhaustive(variant)
        return block.make().arguments

    for fmt, facts in SCALARS.items():
        assert inputs("decode", fmt)["codes"].tolist() == list(range(facts.codes))
    for name, rule in RULES.items():
        given = inputs("dequantize", name)
        scales = given["scale_codes"].repeat(rule.group, axis=-1)
        pairs = set(zip(given["codes"].ravel().tolist(), scales.ravel().tolist(), strict=True))
        assert pairs == set(itertools.product(range(rule.element.codes), range(256)))
    codes = inputs("pack", "e2m1")["codes"].reshape(-1, 2)
    assert set(map(tuple, codes.tolist())) == set(itertools.product(range(16), range(16)))
    assert sorted(inputs("unpack", "e2m1")["packed"].ravel().tolist()) == list(range(256))


@pytest.mark.parametrize("jobs", [1, 4])
def test_shards_and_tasks_split_everything_once(jobs: int) -> None:
    """Whatever the number of shards and processes, each case is in one of them; none is much larger."""
    for operation, variant in (("encode", "bf16"), ("quantize", "N2/16"), ("decode", "bf16")):
        only = {"operations": (operation,), "variants": (variant,), "level": "exhaustive"}
        every = [block.name for block in OPERATIONS[operation].exhaustive(variant)]
        sizes, found = [], []
        for shard in range(7):
            options = Options("cpu", **only, jobs=jobs, shard=(shard, 7))
            names = []
            for task in runner.tasks(options):
                blocks = runner._blocks(OPERATIONS[operation], variant, options)
                names += [b.name for i, b in enumerate(blocks) if i % task.parts == task.part]
            sizes.append(len(names))
            found += names
        assert sorted(found) == sorted(every) and max(sizes) - min(sizes) <= 1
    if jobs > 1:
        assert len(runner.tasks(Options("cpu", level="exhaustive", jobs=jobs))) > 300


def test_which_operations(verify: Any, device: str) -> None:
    countable = {
        "encode",
        "decode",
        "pack",
        "unpack",
        "encode_scale",
        "quantize",
        "dequantize",
        "exp32",
    }
    chosen = runner.selected(Options("cpu", level="exhaustive"))
    assert {operation.name for operation, _ in chosen} == countable
    if device == "cpu":
        code, _, err = verify("--op", "encode")
        assert code == 2 and "without a GPU it takes days" in err and err.count("\n") == 1


# --- it runs, and finds faults --------------------------------------------------------

PART = "patterns 3F9FC000 to 3F9FFFFF"  # just below 1.25
EXP32_PART = "patterns C0A58000 to C0A5BFFF"
AMAX_PART = "amax 43E0 to 43E1"  # 448, and the next bf16


@pytest.mark.parametrize(
    ("operation", "variant", "case", "size"),
    [
        *(("encode", fmt, PART, 16384 * (2 if fmt == "bf16" else 1)) for fmt in SCALARS),
        *(
            ("encode_scale", rule, PART, 16384)
            for rule in ("P1/64", "P1/64-fnuz", "M1/32", "N2/16")
        ),
        ("encode_scale", "P1/64", "patterns 7F800000 to 7F800000", 2),
        ("exp32", "fp32", EXP32_PART, 4 * 16384),
        ("exp32", "fp32", "patterns C2AE0000 to C2AE0000", 8),
        ("dequantize", "N2/16", "every pair", 4 * 16 * 256),
        *(("quantize", rule, AMAX_PART, None) for rule in ("P1/64", "M1/32", "N2/16")),
    ],
)
def test_a_block_of_each(
    operation: str, variant: str, case: str, size: int | None, verify: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    options = ("--op", operation, "--variant", variant, "--case", case, "--json", str(file))
    code, out, err = verify(*options)
    assert (code, err) == (0, ""), out
    row = json.loads(file.read_text())["rows"][-1]
    if size is None:  # codes and scale codes
        rule = get_rule(variant)
        groups = sum(len(exhaustive.groups_of_amax(rule, amax)) for amax in (0x43E0, 0x43E1))
        size = groups * (rule.group + 1)
    assert (row["cases"], row["runs"], row["bytes"], row["mismatches"]) == (1, 1, size, 0)


def spoil(change: Callable[[Any, Any], Any], operation: str) -> Callable[..., Any]:
    """The operation with a change of what it returns, given also its first argument."""
    good = getattr(dsv4num.gpu, operation)

    def bad(first: Any, *arguments: Any, **keywords: Any) -> Any:
        return change(good(first, *arguments, **keywords), first)

    return bad


def one_wrong(bits: int) -> Callable[[Any, Any], Any]:
    """Adds 1 to the code of one pattern."""

    def change(codes: Any, x: Any) -> Any:
        return codes + (x.view(torch.int32) == bits).to(codes.dtype)

    return change


def test_one_wrong_pattern_is_named(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--op", "encode", "--variant", "e4m3fn", "--case", PART, "--path", "portable")
    monkeypatch.setattr(dsv4num.gpu, "encode", spoil(one_wrong(0x3F9FFEDC), "encode"))
    code, out, _ = verify(*options)
    assert code == 1
    lines = out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line == "codes: 1 bytes differ")
    named = "codes[16092] of x = 0x3F9FFEDC = 1.24996519: expected 0x3A = 1.25, got 0x3B = 1.375"
    assert lines[at + 1] == "  " + named
    reproduce = next(line for line in lines if line.startswith("  reproduce: "))
    assert f"--level exhaustive --op encode --variant e4m3fn --case '{PART}'" in reproduce


def test_other_faults_are_named(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nan_of_last(y: Any, x: Any) -> Any:
        y[-1] = float("nan")
        return y

    def last_code(result: Any, x: Any) -> Any:
        result[0][-1, -1] += 1
        return result

    def last_scale(result: Any, x: Any) -> Any:
        result[1].view(-1)[-1] += 1
        return result

    def one_zero(y: Any, codes: Any) -> Any:
        y.view(-1)[999] = 0
        return y

    in_scale, in_exp32 = ("encode_scale", "M1/32", PART), ("exp32", "fp32", EXP32_PART)
    in_n2, in_p1 = ("quantize", "N2/16", AMAX_PART), ("quantize", "P1/64", AMAX_PART)
    in_pairs = ("dequantize", "M1/32", "every pair")
    for (operation, variant, case), change, pattern in (
        (
            in_scale,
            one_wrong(0x3F9FF001),
            r"scale_codes\[\d+\] of amax = 0x3F9FF001 = 1\.249\d*: exp",
        ),
        (in_exp32, nan_of_last, r"y\[16383\] of x = 0xC0A5BFFF = -5\.\d+: expected"),
        (
            in_n2,
            last_code,
            r"codes\[\d+\] of x = 0xFFFF = nan with amax = 0x43E1 = 450: expected 0x07",
        ),
        (
            in_p1,
            last_scale,
            r"scale_codes\[\d+\] of amax = 0x43E1 = 450: expected 0x80 = 2, got 0x81",
        ),
        (in_pairs, one_zero, r"x\[999\] of codes = 0x07, scale code 0x1F: .*, got 0x00000000 = 0$"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(dsv4num.gpu, operation, spoil(change, operation))
            chosen = ("--op", operation, "--variant", variant, "--case", case)
            code, out, _ = verify(*chosen, "--path", "portable")
        assert code == 1 and re.search(pattern, out, re.MULTILINE), out


# --- the reference, exhausted ---------------------------------------------------------


def bf16_runs() -> exhaust_reference.Runs:
    """The runs of bf16 by their definition: half way between two codes the even one begins or ends."""
    runs = exhaust_reference.Runs(end=1 << 32)
    for sign in (0, 0x8000):
        for code in range(sign, sign + 0x7F81):
            middle = ((code - 1) << 16) + 0x8000
            runs.firsts.append(code << 16 if code == sign else middle + (code % 2))
            runs.codes.append(code)
        runs.firsts.append((sign << 16) + INFINITY + 1)
        runs.codes.append(0x7FFF)
    return runs


@pytest.mark.parametrize("name", exhaust_reference.ENCODERS)
def test_the_record_is_what_the_slow_oracle_says(name: str) -> None:
    """The runs that the reference was found to have, and those of the Fraction oracle: one hash."""
    make, of = exhaust_reference.ENCODERS[name]
    encoder = make(of)
    if of == "bf16":  # bisection would take a minute: the oracle judges some of the ends
        runs = bf16_runs()
        for bits, code in itertools.islice(runs.ends(), 0, None, 37):
            assert encoder.slow(bits) == code
    else:
        runs = exhaust_reference.runs_by_bisection(encoder.slow, encoder.end)
    found = json.loads(RECORD.read_text())["found"][name]
    assert found["inputs"] == encoder.end and found["mismatches"] == 0
    assert (found["runs"], found["runs_sha256"]) == (len(runs.firsts), runs.digest())
    ends = np.array(list(runs.ends()))
    assert np.array_equal(encoder.reference(ends[:, 0].astype(np.uint32)), ends[:, 1])


def test_the_record_is_complete() -> None:
    record = json.loads(RECORD.read_text())
    assert set(record["found"]) == set(exhaust_reference.NAMES)
    assert record["inputs"] == sum(found["inputs"] for found in record["found"].values())
    assert record["found"]["exp32"]["inputs"] == 1_118_699_521
    assert record["mismatches"] == 0
    assert set(record["sources"]) == set(exhaust_reference.SOURCES)


def test_the_tool_sees_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Over a small domain: a wrong code by the casts, and by the oracle, and where there is no cast."""
    good = exhaust_reference.scalar_encoder("e4m3fn")

    def wrong(bits: Any) -> Any:
        return good.reference(bits) + (bits == 0x12345).astype(np.uint8)

    small = {"end": 1 << 20, "slow": good.slow}
    judged = exhaust_reference.Encoder(
        reference=wrong, cast=good.cast, agrees=good.agrees, excepted="", **small
    )
    assert exhaust_reference.exhaust_encoder(judged)["mismatches"] == 3  # the cast, and both ends
    assert "00012345: reference 01, oracle 00" in capsys.readouterr().out
    alone = exhaust_reference.exhaust_encoder(exhaust_reference.Encoder(reference=wrong, **small))
    assert alone["mismatches"] == 2 and alone["runs"] == 3
    right = exhaust_reference.exhaust_encoder(
        exhaust_reference.Encoder(
            reference=good.reference, cast=good.cast, agrees=good.agrees, excepted="", **small
        )
    )
    assert right["mismatches"] == 0 and right["ml_dtypes_compared"] == 1 << 20


@pytest.mark.parametrize("rule", RULES)
def test_quantize_by_casts(rule: str) -> None:
    """The judge of `quantize` agrees at some amax, and is judged by the Fraction oracle itself."""
    from dsv4num.reference import quantize

    for amax in (0, 1, 0x0080, 0x38D1, 0x3F9F, 0x43E1, 0x7F7F, 0x7F80):
        x = exhaustive.groups_of_amax(get_rule(rule), amax).view(ml_dtypes.bfloat16)
        wanted, scale = exhaust_reference.quantize_by_casts(x, amax, rule)
        codes, scales = quantize(x, rule)
        assert np.array_equal(codes, wanted) and (scales == scale).all()
        for index in (0, len(x) // 3, len(x) - 1):
            numbers = [slow_oracle.bf16_value(int(bits)) for bits in x[index].view(np.uint16)]
            assert slow_oracle.quantize_group(numbers, rule) == (wanted[index].tolist(), scale)


def test_a_fault_of_quantize_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Any, rule: Any) -> Any:
        codes, scales = good(x, rule)
        scales[0] += 1
        return codes + (x.view(np.uint16) == 0x8003), scales

    good = exhaust_reference.quantize
    monkeypatch.setattr(exhaust_reference, "quantize", wrong)
    found = exhaust_reference.exhaust_quantize("N2/16", (1, 3, 5))
    assert found["inputs"] == 3 * 16 * 18  # 258, 262 and 266 elements, 15 to a group
    assert found["mismatches"] == 3 + 2  # -3 is an element of two of the three


def test_exp32_in_float64() -> None:
    """The judge of exp32 agrees on a sample."""
    from dsv4num.reference import exp32

    bits = np.arange(0x80000000, 0xC2AE0001, 99_991, dtype=np.uint32)
    x = bits.view(np.float32)
    judged = exhaust_reference.exp32_in_float64(x)
    assert np.array_equal(judged.view(np.uint32), exp32(x).view(np.uint32)) and len(x) > 11_000
