"""Profiles: what projects declare, and how caches are judged by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4num import ArgumentError, get_layout
from dsv4num.cli import main
from dsv4num.explain import DIALECTS, Knobs
from dsv4num.explain.call import CACHES, write_call
from dsv4num.formats import LAYOUTS
from dsv4num.reference import quantize_and_insert_k_cache
from dsv4num.verify.call import expect
from dsv4num.verify.case import BF16, flat, place, rebase
from dsv4num.verify.operations import OPERATIONS
from dsv4num.verify.profile import load_profile, named_profiles

INSERT, LATENT, COMPRESS = CACHES
WRITERS = [(name, variant) for name in CACHES for variant in OPERATIONS[name].variants]


def profile_of(folder: Path, text: str) -> Any:
    """A profile from a file of this text."""
    path = folder / "mine.toml"
    path.write_text(text)
    load_profile.cache_clear()
    return load_profile(str(path))


def dialects(profile: Any, operation: str, layout: str) -> list[str]:
    """The names of the dialects with which a layout is written."""
    return [dialect.name for dialect in profile.dialects(operation, get_layout(layout))]


@pytest.mark.parametrize(("operation", "layout"), WRITERS)
def test_a_writer_without_dialects_is_the_oracle(operation: str, layout: str) -> None:
    """Every quick case: the whole buffer, guards and unowned bytes too."""
    for case in OPERATIONS[operation].cases(layout, "quick", 0):
        want = expect(OPERATIONS[operation], case, 0x5A).buffers[CACHES[operation]]
        call = {**case.arguments, **case.keywords, **case.reference}
        cache = call[CACHES[operation]]
        call[CACHES[operation]] = rebase(cache, np.full_like(flat(cache), 0x5A))
        assert write_call(operation, call, Knobs())
        np.testing.assert_array_equal(flat(call[CACHES[operation]]), want, case.name)


def test_other_operations_are_not_written() -> None:
    assert not write_call("dequantize_and_gather_k_cache", {}, Knobs())
    assert not load_profile("flashmla").write("pack", {})
    assert not load_profile("flashmla").write(INSERT, {"layout": "indexer_fp8"})


# --- the named ones -------------------------------------------------------------------


def inserted(profile: str, layout: str, row: Any) -> bytes:
    """The record of a row by the contract of a named profile, in a page of its own."""
    made = get_layout(layout)
    k = place(np.full((1, made.head_dim), row, BF16))
    cache = place(np.full((1, made.page_bytes(1)), 0xA5, np.uint8))
    call = {"k": k, "k_cache": cache, "slot_mapping": np.int64([0]), "block_size": 1}
    if not load_profile(profile).write(INSERT, {**call, "layout": layout}):
        quantize_and_insert_k_cache(*call.values(), layout=layout)
    return cache[0, : made.row_bytes].tobytes()


@pytest.mark.parametrize(
    ("profile", "layout", "value", "first", "tail"),
    [
        # What public writers leave for rows of zeros and of ones: the first code, the last bytes.
        ("vllm", "v4", 0, "00", "69 00"),
        ("vllm", "indexer_fp8", 0, "00", "00 00 80 34"),
        ("vllm-sm100", "indexer_fp8", 0, "00", "69 69 69 69"),
        ("vllm-sm100", "indexer_fp8", 1, "78", "77 77 77 77"),
        ("vllm-sm100", "v4", 0, "00", "69 00"),
        ("vllm-gfx942", "v4", 1, "78", "78 00"),  # FNUZ: 128 in units of 2^-7
        ("sglang", "v4", 0, "00", "69 a5"),
        ("sglang", "v41_mxfp8", 0, "00", "72 72"),
        ("sglang", "v41_mxfp8_inline", 0, "00", "72 72"),
        ("sglang", "indexer_mxfp4", 0, "00", "70 70"),
        ("flashmla", "v4", 0, "00", "72 00"),
        ("flashmla", "v4", 0.010009765625, "6a", "72 00"),
        ("vllm", "v4", 0.010009765625, "7a", "70 00"),
        ("flashinfer", "v41_mxfp8_inline", 0, "00", "72 72"),
        ("flashinfer", "v41_mxfp8", np.nan, "7f", "ff ff"),
        ("tensorrt-llm", "v4", 0, "00", "5c a5"),
        ("lmdeploy", "v4", 0, "00", "72 00"),
        ("atom", "v4", 0, "00", "72 00"),
        ("rtp-llm", "v41_mxfp8_inline", 0, "00", "69 69"),
        ("rtp-llm", "indexer_mxfp4", 0, "00", "01 01"),
        ("b12x", "v4", 0, "00", "7f 00"),
        ("b12x", "v41_nvfp4_inline", 1, "77", "23 23"),
    ],
)
def test_named_profiles(profile: str, layout: str, value: float, first: str, tail: str) -> None:
    record = inserted(profile, layout, value).hex(" ")
    assert (record[: len(first)], record[-len(tail) :]) == (first, tail)


def test_ties_and_zeros_of_a_named_profile() -> None:
    """A code of MXFP4 is taken only strictly above a midpoint there, and -0 is never written."""
    row = np.zeros(128, BF16)
    row[:6] = 6, 0.75, 1.25, 1.75, -0.1, -0.0
    assert inserted("sglang", "indexer_mxfp4", row)[:3].hex(" ") == "17 32 00"
    assert inserted("rtp-llm", "indexer_mxfp4", row)[:3].hex(" ") == "27 42 88"


def test_every_named_profile() -> None:
    assert "vllm" in named_profiles() and len(named_profiles()) == 11
    for name in named_profiles():
        profile = load_profile(name)
        assert profile.name == name and profile.about
    shown = {
        ("sglang", LATENT, "v41_nvfp4"): ["bf16-step-present"],
        ("sglang", LATENT, "v41_mxfp8"): ["floor-1e-4-on-scale", "bf16-step-present"],
        ("vllm-gfx942", COMPRESS, "v4"): [],
        ("flashmla", LATENT, "v41_mxfp8"): [],
    }
    for (name, operation, layout), names in shown.items():
        assert dialects(load_profile(name), operation, layout) == names


def test_the_list_of_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    judging = [d.name for d in DIALECTS.values() if any(map(d.suits, LAYOUTS.values()))]
    assert [line.split(":")[0] for line in lines] == [*named_profiles(), "", *judging]
    assert len(judging) > 70
    assert "floor-1e-4-on-scale: floor 1e-4 on the scale instead of on amax" in lines


# --- files ----------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    found = profile_of(
        tmp_path,
        """
about = "mine"
undefined = ["nonfinite"]
[layouts]
v4 = "fp8_ds_mla"
[[writes]]
dialects = ["floor-1e-4-on-scale", "negative-zero-dropped"]
[[writes]]
operations = ["rope_quant_insert"]
layouts = ["v4"]
dialects = ["rope-halves", "floor-1e-4-on-scale"]
""",
    )
    assert (found.name, found.about, dict(found.layouts)) == ("mine", "mine", {"v4": "fp8_ds_mla"})
    both = ["floor-1e-4-on-scale", "negative-zero-dropped"]
    assert dialects(found, INSERT, "v4") == both
    assert dialects(found, LATENT, "v4") == [*both, "rope-halves"]  # each of them once
    assert dialects(found, INSERT, "v41_nvfp4") == ["negative-zero-dropped"]  # where it can be seen
    empty = profile_of(tmp_path, "")
    assert dialects(empty, INSERT, "v4") == []
    nothing = profile_of(tmp_path, "[[writes]]")
    assert dialects(nothing, INSERT, "v4") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "got no TOML (Invalid value"),
        ("\xff", "got no TOML ("),
        ("floor = 1e-4", "got the file with 'floor'; allowed: about, undefined, layouts, writes"),
        ("about = 5", "got about = 5; allowed: a string"),
        ("undefined = 'nan'", "got undefined = 'nan'; allowed: a list"),
        ("undefined = ['nan']", "got undefined with 'nan'; allowed: one of nonfinite, out-of-range"),
        ("undefined = [5]", "got undefined with 5; allowed: one of nonfinite"),
        ("[layouts]\nv5 = 'a'", "got layouts with 'v5'; allowed: "),
        ("[layouts]\nv4 = 4", "got layouts.v4 = 4; allowed: a name in quotes"),
        ("writes = 5", "got writes = 5; allowed: a list"),
        ("writes = ['v4']", "got writes with 'v4'; allowed: tables [[writes]]"),
        ("[[writes]]\nfloor = 'scale'", "got [[writes]] with 'floor'; allowed: operations, layouts"),
        ("[[writes]]\ndialects = 'no-floor'", "got dialects = 'no-floor'; allowed: a list"),
        (
            "[[writes]]\ndialects = ['floor-on-scale']",
            "got dialects with 'floor-on-scale'; allowed: floor-2^-6-on-scale, floor-1e-4-on-scale, ",
        ),
        (
            "[[writes]]\ndialects = ['\\u0000']",
            "allowed: one of `dsv4num verify --profiles`",
        ),
        (
            "[[writes]]\ndialects = ['rule-F3']",
            "got rule-F3, which no layout that is verified can show",
        ),
        ("[[writes]]\noperations = ['pack']", "got operations with 'pack'; allowed: one of quantize_"),
        (
            "[[writes]]\nlayouts = ['v4']\ndialects = ['nibbles-swapped']",
            "got nibbles-swapped in v4, which cannot show it; allowed: layouts that the dialect is",
        ),
        ("about = " + "[" * 5000 + "]" * 5000, "got no TOML ("),
        (
            "[[writes]]\ndialects = ['ties-up']\n[[writes]]\ndialects = ['ties-away']",
            "got both ties-up and ties-away for quantize_and_insert_k_cache over v4; allowed: one of",
        ),
    ],
)  # fmt: skip
def test_what_a_profile_cannot_say(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError) as error:
        load_profile(str(path))
    assert str(error.value).startswith(str(path)) and message in str(error.value), error.value


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    for name in ("nobody", "../vllm", "", "vllm.json"):
        with pytest.raises(ArgumentError, match=r"--profile: got .*a file FILE.toml, or atom"):
            load_profile(name)
    with pytest.raises(FileNotFoundError):
        load_profile(str(tmp_path / "nothing.toml"))
    with pytest.raises(ArgumentError, match="--profile: got 3; allowed: a file"):
        load_profile(3)  # type: ignore[arg-type]  # refused


# --- inputs for which nothing is promised ---------------------------------------------


def test_cases_without_what_is_undefined(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, 'undefined = ["nonfinite", "out-of-range"]')
    for operation, variant in (*WRITERS, ("save_partial_states", "csa")):
        every = list(OPERATIONS[operation].cases(variant, "quick", 0))
        kept = list(profile.cases(operation, OPERATIONS[operation].cases(variant, "quick", 0)))
        assert [c.name for c in kept] == [c.name for c in every if not c.reference]
        assert 0 < len(kept) < len(every)
        for case in kept:
            (same,) = [other for other in every if other.name == case.name]
            for name, value in case.arguments.items():
                if not isinstance(value, np.ndarray) or value.dtype not in (BF16, np.float32):
                    continue
                was = same.arguments[name]
                assert (value.shape, value.strides) == (was.shape, was.strides)
                with np.errstate(all="ignore"):  # NumPy says of some NaNs that they are invalid
                    tame, now_tame = (np.abs(x.astype(np.float32)) < 2.0**127 for x in (was, value))
                bits = np.dtype(f"u{value.itemsize}")
                assert bool((value.view(bits)[tame] == was.view(bits)[tame]).all())
                assert bool(now_tame.all()) or operation not in CACHES


def test_an_expectation_by_a_profile(tmp_path: Path) -> None:
    """The cache follows the dialects; what they do not write keeps its poison."""
    profile = profile_of(tmp_path, '[[writes]]\ndialects = ["rope-absent", "pad-not-written"]')
    operation = OPERATIONS[LATENT]
    case = next(c for c in operation.cases("v4", "quick", 0) if c.name == "ratio 1, fp32")
    found = [expect(operation, case, fill, profile) for fill in (0xA5, 0x5A)]
    plain = expect(operation, case, 0xA5)
    caches = [rebase(case.arguments["kv_cache"], each.buffers["kv_cache"]) for each in found]
    oracle = rebase(case.arguments["kv_cache"], plain.buffers["kv_cache"])
    kept = case.arguments["slot_mapping"] >= 0
    slot = int(case.arguments["slot_mapping"][kept][0])
    page, row = divmod(slot, 16)
    rope = slice(row * 576 + 448, row * 576 + 576)
    pages = [cache.reshape(len(cache), -1)[page] for cache in (*caches, oracle)]
    given = case.arguments["latent"][kept][0, 448:].view(np.uint8)
    np.testing.assert_array_equal(pages[0][rope], given)
    assert not np.array_equal(pages[2][rope], given)
    pad = 16 * 576 + row * 8 + 7
    assert [int(each[pad]) for each in pages] == [0xA5, 0x5A, 0]
