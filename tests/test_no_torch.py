"""The oracle stands alone: no torch, no triton, no NumPy routine whose bits may vary."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy
import pytest

import dsv4num

PACKAGE = Path(dsv4num.__file__).parent
ORACLE = sorted([*(PACKAGE / "formats").glob("*.py"), *(PACKAGE / "reference").glob("*.py")])
#: Bits that change with the SIMD tier or the memory order (contract 1.1).
BANNED = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "power"),
    *("float_power", "sum", "nansum", "mean", "nanmean", "average", "dot", "vdot", "inner"),
    *("matmul", "tensordot", "einsum", "cumsum", "cumprod", "prod", "var", "std", "linalg"),
}
BANNED_METHODS = BANNED | {"reduce", "accumulate", "reduceat"}

HOOK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
try:
    import torch
except ImportError as error:
    assert "refused" in str(error)
else:
    raise AssertionError("the hook does not work")

import ml_dtypes
import numpy as np
import dsv4num
from dsv4num.reference import quantize_and_insert_k_cache

cache = np.full((1, 37440), 0xA5, np.uint8)
row = np.ones((1, 512), ml_dtypes.bfloat16)
quantize_and_insert_k_cache(row, cache, np.int64([63]))
assert cache[0, 36288] == 0x78 and cache[0, 37368:37376].tolist() == [0x77] * 7 + [0]
assert not {"torch", "triton"} & {name.split(".")[0] for name in sys.modules}
print("served", dsv4num.SPEC_VERSION)
"""


def test_insert_in_an_environment_without_torch(tmp_path: Path) -> None:
    """An interpreter that has NumPy, ml_dtypes and this package to import, and nothing else."""
    for package in (numpy, ml_dtypes):
        home = Path(str(package.__file__)).parent
        for part in (home, home.with_name(f"{home.name}.libs")):
            if part.exists():
                (tmp_path / part.name).symlink_to(part)
    (tmp_path / "dsv4num").symlink_to(PACKAGE)
    there = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    absent = "import importlib.util as u; assert not (u.find_spec('torch') or u.find_spec('rich'))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", there + absent + HOOK],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("served")


def test_insert_without_torch_and_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"served {dsv4num.SPEC_VERSION}\n"


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def banned_uses(tree: ast.AST) -> Iterator[str]:
    """NumPy names and method calls that are not allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            numpy = node.value.id in ("np", "numpy")
            if numpy and node.attr in BANNED:
                yield f"line {node.lineno}: {node.value.id}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in ("math", "np", "numpy"):
                continue
            if node.func.attr in BANNED_METHODS:
                yield f"line {node.lineno}: .{node.func.attr}("
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "numpy":
            for alias in node.names:
                if alias.name in BANNED or alias.name == "*":
                    yield f"line {node.lineno}: from numpy import {alias.name}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield f"line {node.lineno}: @"


def test_there_is_something_to_check() -> None:
    assert {"scalar.py", "group.py", "layout.py", "record.py"} <= {path.name for path in ORACLE}


@pytest.mark.parametrize("path", ORACLE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_oracle_imports(path: Path) -> None:
    names = set(imports(ast.parse(path.read_text(encoding="utf-8"))))
    for name in names:
        assert name.split(".")[0] not in ("torch", "triton"), name
        assert not name.startswith("dsv4num.gpu"), name
    if path.parent.name == "formats":
        for name in names:
            top = name.split(".")[0]
            allowed = name.startswith(("dsv4num.errors", "dsv4num.formats"))
            assert allowed or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", ORACLE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_oracle_uses_no_banned_routine(path: Path) -> None:
    assert list(banned_uses(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "line",
    [
        "y = np.exp(x)",
        "y = numpy.einsum('i,i', x, x)",
        "y = x.sum(axis=-1)",
        "y = x.mean()",
        "y = x.dot(x)",
        "y = x.cumsum()",
        "y = np.add.reduce(x)",
        "from numpy import exp2",
        "y = x @ x",
        "f = np.log2",
    ],
)
def test_the_check_sees(line: str) -> None:
    assert len(list(banned_uses(ast.parse(line)))) == 1


@pytest.mark.parametrize("line", ["y = np.sqrt(x)", "y = x.max()", "y = np.maximum(x, 0)"])
def test_the_check_allows(line: str) -> None:
    assert list(banned_uses(ast.parse(line))) == []
