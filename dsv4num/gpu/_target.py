"""What a target can do by itself; everything else is integer work.

The *native* path converts with the hardware's own E4M3, bf16 and fp16 instructions where the target
has them and where they are known to round as SPEC section 2 says. The *portable* path uses integers
only and runs anywhere. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal

try:
    import torch
    import triton
except ModuleNotFoundError as error:
    hint = f"dsv4num.gpu needs {error.name}: pip install 'dsv4num[gpu]'"
    raise ModuleNotFoundError(hint, name=error.name) from None

from dsv4num.errors import ArgumentError, UnsupportedError

Path = Literal["auto", "native", "portable"]


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device.

    Attributes:
        name: "sm_90", "gfx942", ... or "interpreter".
        native: whether the E4M3 OCP, bf16 and fp16 instructions of sm_89 and later are there.
    """

    name: str
    native: bool

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may begin before the one ends that it waits for: sm_90 and later."""
        return self.name.startswith("sm_") and int(self.name[3:]) >= 90


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch a kernel. Bytes never depend on it.

    Attributes:
        path: "native", "portable", or "auto": native where the target has it.
        rows: rows per program, a power of two; None takes the built-in choice.
        num_warps: None takes the built-in choice.
        columns: columns of a pooled row per program of the compressor, a power of two; fewer than the
            row has splits it over programs. None takes the built-in choice.
    """

    path: Path = "auto"
    rows: int | None = None
    num_warps: int | None = None
    columns: int | None = None


@cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target(properties.gcnArchName.split(":")[0], native=False)
    major, minor = properties.major, properties.minor
    return Target(f"sm_{major}{minor}", native=has_native(major, minor))


def has_native(major: int, minor: int) -> bool:
    """Whether an NVIDIA compute capability has `cvt.rn.satfinite.e4m3x2.f32`."""
    return (major, minor) >= (8, 9)


_ASSUMED: ContextVar[Target | None] = ContextVar("assumed", default=None)


def target_named(name: str) -> Target:
    """The target of an architecture's name: "sm_90", "gfx942"."""
    if name.startswith("sm_"):
        return Target(name, native=has_native(*divmod(int(name[3:]), 10)))
    return Target(name, native=False)


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Launchers take every device for this target: for code that is made for one, wherever it runs."""
    token = _ASSUMED.set(target)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return bool(triton.knobs.runtime.interpret)


def target_of(device: torch.device) -> Target:
    """The target behind a torch device.

    Raises:
        UnsupportedError: no kernel can run there.
    """
    assumed = _ASSUMED.get()
    if assumed is not None:
        return assumed
    if interpreted():
        return Target("interpreter", native=False)
    if device.type != "cuda":
        raise UnsupportedError(
            f"device {device}: kernels need a GPU; on a CPU they run in Triton's interpreter, "
            "which must be chosen before triton is imported: TRITON_INTERPRET=1"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_target(index)


def use_native(launch: Launch, device: torch.device) -> bool:
    """Whether the launch takes the native path.

    Raises:
        ArgumentError: an unknown path.
        UnsupportedError: the native path was asked for on a target without it.
    """
    if not isinstance(launch, Launch):
        raise ArgumentError("launch", type(launch).__name__, "Launch", "6.1")
    if launch.path not in ("auto", "native", "portable"):
        raise ArgumentError("launch.path", repr(launch.path), "auto, native, portable", "6.1")
    for name in ("rows", "num_warps", "columns"):
        value = getattr(launch, name)
        if value is not None and (not isinstance(value, int) or value < 1 or value & (value - 1)):
            raise ArgumentError(f"launch.{name}", repr(value), "a power of two, or None", "6.1")
    target = target_of(device)
    if launch.path == "native" and not target.native:
        raise UnsupportedError(f"the native path needs sm_89 or later; this is {target.name}")
    return target.native and launch.path != "portable"
