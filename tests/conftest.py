"""What all tests share: where kernels run, and a word on the records of proof."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

HAS_KERNELS = find_spec("torch") is not None and find_spec("triton") is not None


def gpu_is_there() -> bool:
    """Whether torch sees a GPU."""
    if not HAS_KERNELS:
        return False
    import torch

    return bool(torch.cuda.is_available())


HAS_GPU = gpu_is_there()
if not HAS_GPU:
    # Read by triton when it is imported, which no test module has done yet.
    os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises where a call waits for the device. The mode must not outlive a failure."""
    import torch

    try:
        with warnings.catch_warnings():
            # It warns of itself, after it was set: a warning that is an error would leave it set.
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter computes with NumPy, which reports the overflows that clause 3 defines."""
    for text in ("overflow", "invalid value", "underflow", "divide by zero"):
        line = f"ignore:{text}.*:RuntimeWarning:triton.runtime.interpreter"
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session: "cuda", or "cpu" for Triton's interpreter."""
    if not HAS_KERNELS:
        pytest.skip("needs torch and triton")
    return "cuda" if HAS_GPU else "cpu"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says which records of proof are older than the sources. A warning, never a failure."""
    for line in stale_records():
        terminalreporter.write_line(line, yellow=True)


def stale_records() -> list[str]:
    """One line for every record of proof whose sources have changed, or that cannot be read."""
    if not HAS_KERNELS:
        return []
    from dsv4num.verify.report import proof_folder, stale_sources

    lines = []
    for path in sorted(proof_folder().glob("*.json")):
        try:
            stale = stale_sources(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            lines.append(f"proof/{path.name} cannot be read: {type(error).__name__}: {error}")
            continue
        if stale:
            lines.append(f"proof/{path.name} is STALE; changed since: {', '.join(stale)}")
    return lines
