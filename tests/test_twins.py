"""`reference` and `gpu` are twins: same files, same names, same parameters."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import dsv4num

pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

PACKAGE = Path(dsv4num.__file__).parent
#: Keyword-only parameters that one side may have alone.
GPU_ONLY = {"validate", "launch"}
REFERENCE_ONLY = {"out_of_range"}
#: Functions that make inputs on the host: kernels are given what they return.
HOST_ONLY = {"build_cos_sin_cache"}
#: Modules that call the kernels and define no operation of their own.
CALLERS = {"library", "seed_api", "warmup"}


def stems(side: str) -> set[str]:
    """The names of a side's modules."""
    return {path.stem for path in (PACKAGE / side).glob("*.py")} - {"__init__"}


TWINS = sorted(stems("reference") & stems("gpu"))


def module(side: str, stem: str) -> ModuleType:
    """One module of a side."""
    return importlib.import_module(f"dsv4num.{side}.{stem}")


def names(stem: str) -> list[str]:
    """What both twins must offer, in the order of the reference."""
    return [name for name in module("reference", stem).__all__ if name not in HOST_ONLY]


FUNCTIONS = [(stem, name) for stem in TWINS for name in names(stem)]


def parameters(function: object, alone: set[str]) -> list[tuple[str, object, object]]:
    """Name, kind and default of every parameter that the twin must have too."""
    signature = inspect.signature(function)  # type: ignore[arg-type]  # any callable
    for name in alone & set(signature.parameters):
        found = signature.parameters[name]
        assert found.kind is inspect.Parameter.KEYWORD_ONLY, f"{name} is not keyword-only"
        assert found.default is not inspect.Parameter.empty, f"{name} has no default"
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in signature.parameters.values()
        if parameter.name not in alone
    ]


def test_there_are_twins() -> None:
    assert {"scalar", "group", "paged_cache"} <= set(TWINS)
    private = {stem for stem in stems("gpu") if stem.startswith("_")}
    assert stems("gpu") - private - CALLERS == set(TWINS), "a kernel without a reference"


@pytest.mark.parametrize("stem", TWINS)
def test_same_names(stem: str) -> None:
    assert list(module("gpu", stem).__all__) == names(stem)


@pytest.mark.parametrize(("stem", "name"), FUNCTIONS)
def test_same_parameters(stem: str, name: str) -> None:
    oracle = getattr(module("reference", stem), name)
    kernel = getattr(module("gpu", stem), name)
    assert oracle is not kernel
    assert parameters(kernel, GPU_ONLY) == parameters(oracle, REFERENCE_ONLY)


@pytest.mark.parametrize(("stem", "name"), FUNCTIONS)
def test_docstring_points_to_the_reference(stem: str, name: str) -> None:
    doc = inspect.getdoc(getattr(module("gpu", stem), name)) or ""
    first = doc.splitlines()[0]
    assert f"`dsv4num.reference.{name}`" in first or f"`dsv4num.reference.{stem}.{name}`" in first
    oracle = inspect.getdoc(getattr(module("reference", stem), name)) or ""
    assert "Rule" in oracle or len(oracle) > len(doc)


@pytest.mark.parametrize("stem", TWINS)
def test_modules_share_no_code(stem: str) -> None:
    """Facts come from `formats`; what is done with them is written twice."""
    for value in vars(module("gpu", stem)).values():
        home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
        assert not str(home).startswith("dsv4num.reference"), value


def test_the_package_offers_the_twins() -> None:
    public = {name for _, name in FUNCTIONS}
    gpu, reference = (importlib.import_module(f"dsv4num.{s}") for s in ("gpu", "reference"))
    assert set(gpu.__all__) - {"Launch"} == public
    assert public | HOST_ONLY <= set(reference.__all__)
    for stem, name in FUNCTIONS:
        assert getattr(gpu, name) is getattr(module("gpu", stem), name)
        assert getattr(reference, name) is getattr(module("reference", stem), name)
