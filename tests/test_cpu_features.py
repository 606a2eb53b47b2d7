"""The oracle gives the same bytes whatever CPU instructions NumPy chooses to use (SPEC 1.1)."""

from __future__ import annotations

import copy
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4num.verify.operations import OPERATIONS

TOOL = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "try_numpy.py"))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What three runs give: NumPy as it comes, without its newest instructions, without any."""
    groups = TOOL["dispatched"]()
    return [TOOL["run_in"](sys.executable, disabled) for disabled in TOOL["settings"](groups)]


def test_the_same_bytes_without_instructions(found: list[dict[str, Any]]) -> None:
    groups = [run["versions"]["instructions"] for run in found]
    assert groups[0] == TOOL["dispatched"]() and groups[1] == groups[0][:-1] and groups[2] == []
    assert list(found[0]["operations"]) == list(OPERATIONS)
    assert TOOL["compare"](found) == []


def test_another_byte_is_named(found: list[dict[str, Any]]) -> None:
    other = copy.deepcopy(found[0])
    other["operations"]["exp32"]["outputs"] = "0"
    other["operations"]["pack"]["inputs"] = "0"
    lines = TOOL["compare"]([*found, other])
    assert lines == ["pack: 2 different inputs", "exp32: 2 different outputs"]


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="NoSuchFeature"):
        TOOL["run_in"](sys.executable, "NoSuchFeature X86_V2 SSE SSE2 ASIMD NEON")


def test_the_oldest_versions_are_those_of_the_package() -> None:
    oldest, newest = TOOL["supported"]()
    assert oldest == "2.1.0:0.5.0" and newest == ":"
