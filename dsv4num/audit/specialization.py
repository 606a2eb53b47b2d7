"""Which kernels there are: every specialization that `verify` launches, collected and compiled.

The launchers run as they do on a GPU, with tensors on the CPU and a driver that only says which target
it is. Triton works out what it would have compiled, types, constants, alignments and options, and is
stopped there. So the list is what a launch makes, not what someone thought of.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

Level = Literal["quick", "full"]


class Architecture(NamedTuple):
    """A target as Triton's compiler takes it."""

    backend: str
    arch: int | str
    warp_size: int


ARCHITECTURES = {
    "sm_80": Architecture("cuda", 80, 32),
    "sm_86": Architecture("cuda", 86, 32),
    "sm_89": Architecture("cuda", 89, 32),
    "sm_90": Architecture("cuda", 90, 32),
    "sm_100": Architecture("cuda", 100, 32),
    "sm_103": Architecture("cuda", 103, 32),
    "sm_120": Architecture("cuda", 120, 32),
    "gfx90a": Architecture("hip", "gfx90a", 64),
    "gfx942": Architecture("hip", "gfx942", 64),
    "gfx950": Architecture("hip", "gfx950", 64),
    "gfx1201": Architecture("hip", "gfx1201", 32),
}


@dataclass(frozen=True)
class Specialization:
    """What is compiled once for a target.

    Attributes:
        target: a name of `ARCHITECTURES`.
        module, kernel: the jitted function.
        names: its parameters.
        signature: their types, by name.
        constants: the values of those that are compiled in, by path.
        attributes: what is known of the others, by path: alignments, ranges.
        options: the compiler's options, as the launch set them for the target.
        launched: the operation, variant, case and launch that it was first seen in.
        default: whether it was seen in a launch with the built-in choices, for few rows or for many.
    """

    target: str
    module: str
    kernel: str
    names: tuple[str, ...]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    launched: str = ""
    default: bool = True

    @property
    def constant(self) -> dict[str, Any]:
        """The constants by the name of their parameter."""
        return {self.names[path[0]]: value for path, value in self.constants.items()}

    @property
    def native(self) -> bool:
        """Whether it takes the native path."""
        return bool(self.constant.get("NATIVE", False))

    @property
    def family(self) -> tuple[Any, ...]:
        """What decides which arithmetic it does: names, switches, and which numbers are 0."""
        chosen = {name: _shape(value) for name, value in self.constant.items() if name.isupper()}
        return self.target, self.kernel, tuple(sorted(chosen.items()))

    @property
    def numbers(self) -> set[tuple[Any, ...]]:
        """Each number among its constants: whether it is 0, 1 or more, as kernels ask for no others."""
        place = (self.target, self.kernel, self.native)
        found = {name: value for name, value in self.constant.items() if name.isupper()}
        return {(*place, *path, min(number, 2)) for path, number in _numbers(found)}

    @property
    def size(self) -> int:
        """How large its constants are: those of tiles decide how long it takes to compile."""
        return _product(tuple(value for name, value in self.constant.items() if name.isupper()))

    def __str__(self) -> str:
        """One line: constants, then types."""
        constants = ", ".join(f"{name}={value}" for name, value in self.constant.items())
        types = ", ".join(t for t in self.signature.values() if t != "constexpr")
        warps = self.options.get("num_warps")
        return f"{self.kernel}[{constants}]({types}), {warps} warps; {self.launched}"


def _shape(value: Any) -> Any:
    """A constant without its sizes."""
    if isinstance(value, tuple):
        return tuple(_shape(part) for part in value)
    return value if isinstance(value, bool | str) or value is None else value != 0


def _numbers(constants: dict[Any, Any]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The whole numbers in constants, each with its path of names and places."""
    for name, value in constants.items():
        if isinstance(value, tuple):
            yield from (((name, *path), n) for path, n in _numbers(dict(enumerate(value))))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (name,), value


def _product(value: Any) -> int:
    """The product of the whole numbers in a constant, those above 1."""
    if isinstance(value, tuple):
        return math.prod(map(_product, value))
    return value if isinstance(value, int) and value > 1 else 1


class _Driver:
    """A driver that launches nothing: it says what the device would be."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> Any:
        """The target, as Triton's binder and compiler want it."""
        return gpu_target(self.name)

    def get_current_device(self) -> str:
        """A key of Triton's caches, one per target."""
        return self.name

    def get_current_stream(self, device: str) -> int:
        """No stream."""
        return 0


def gpu_target(name: str) -> Any:
    """The target as Triton's compiler takes it."""
    from triton.backends.compiler import GPUTarget

    target = ARCHITECTURES[name]
    return GPUTarget(target.backend, target.arch, target.warp_size)


def collect(operation_name: str, targets: tuple[str, ...], level: Level) -> list[Specialization]:
    """Every specialization that an operation's cases launch on some targets.

    Triton's driver and its hook stay replaced, so this belongs into a process of its own, with the
    interpreter off.

    Args:
        operation_name: a name of `dsv4num.verify.operations.OPERATIONS`.
        targets: names of `ARCHITECTURES`.
        level: quick takes `verify`'s quick cases, full those of its level full.

    Returns:
        Each once, in the order of the launches.
    """
    import triton
    from triton.runtime import driver

    from dsv4num.gpu._target import Launch, assume, target_named
    from dsv4num.verify.operations import OPERATIONS
    from dsv4num.verify.runner import MANY_ROWS

    operation = OPERATIONS[operation_name]
    found: dict[tuple[str, str, str], Specialization] = {}
    launched, built_in = "", True

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        place = (driver.active.name, f"{fn.module}.{fn.name}", key)
        if place not in found or (built_in and not found[place].default):
            # The options are read back as Triton's own preloading reads them.
            options = json.loads(compile["specialization_data"])["options"]
            found[place] = Specialization(
                target=driver.active.name,
                module=fn.module,
                kernel=fn.name,
                names=tuple(fn.jit_function.arg_names),
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                options={k: tuple(v) if isinstance(v, list) else v for k, v in options.items()},
                launched=launched,
                default=built_in,
            )
        return True  # do not compile, do not launch

    triton.knobs.runtime.jit_cache_hook = record
    for variant in operation.variants:
        for case in operation.cases(variant, level, 0):
            call = _Call(operation.name, case)
            for name in targets:
                target = target_named(name)
                driver.set_active(_Driver(name))
                with assume(target):
                    for launch in call.launches(target.native):
                        built_in = replace(launch, path="auto") in (Launch(), MANY_ROWS)
                        launched = (
                            f"{operation.name} {variant}, case '{case.name}', {launch.path} path"
                        )
                        call(launch)
    return list(found.values())


class _Call:
    """A case, with its arrays as tensors: every launch of it takes the same ones."""

    def __init__(self, operation: str, case: Any) -> None:
        import numpy as np
        import torch

        import dsv4num.gpu
        from dsv4num.verify.call import tensor_of
        from dsv4num.verify.case import flat

        self.case = case
        self.function = getattr(dsv4num.gpu, operation)
        self.takes_launch = "launch" in inspect.signature(self.function).parameters
        given = {**case.arguments, **case.keywords}
        for name, value in given.items():
            if isinstance(value, np.ndarray):
                given[name] = tensor_of(value, torch.from_numpy(flat(value)))
        self.positional = [given.pop(name) for name in case.arguments]
        self.keywords = given

    def launches(self, native: bool) -> Iterator[Any]:
        """The launches that `verify` makes of the case."""
        from dsv4num.gpu import Launch
        from dsv4num.verify.runner import SWEEP

        for path in ("native", "portable") if native else ("portable",):
            yield Launch(path=path)
            if self.case.sweep:
                yield from (replace(launch, path=path) for launch in SWEEP)

    def __call__(self, launch: Any) -> None:
        """Runs the launcher."""
        more = {"launch": launch} if self.takes_launch else {}
        self.function(*self.positional, **self.keywords, **more)


def choose(found: list[Specialization], level: Level) -> list[Specialization]:
    """Those to compile: all at level full; at level quick the smallest that show every family.

    A family is one kernel on one target, launched with the built-in choices, with the same names and
    switches among its constants, and the same of them 0. Its members do the same arithmetic on tiles
    of other sizes and at other addresses; but 1 is no size, as code is left out for it. So a number
    that is 1, and one that is more, is shown too, once for each path of a kernel.
    """
    if level == "full":
        return found
    chosen: list[Specialization] = []
    seen: set[tuple[Any, ...]] = set()
    for specialization in sorted(found, key=lambda made: made.size):
        shown = {specialization.family, *specialization.numbers}
        if specialization.default and not shown <= seen:
            chosen.append(specialization)
            seen |= shown
    return chosen


def compile_to_text(specialization: Specialization) -> dict[str, str]:
    """The forms of a compiled kernel that `rules.inspect` reads, by name.

    Stops at assembly: neither ptxas nor AMD's linker runs.
    """
    import triton
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(specialization.module), specialization.kernel)
    source = ASTSource(
        function,
        specialization.signature,
        specialization.constants,
        specialization.attributes,
    )
    target = gpu_target(specialization.target)
    last = "ptx" if target.backend == "cuda" else "amdgcn"
    triton.knobs.runtime.add_stages_inspection_hook = _without_binary
    # Triton's cache would keep gigabytes of what is read once.
    folder = tempfile.TemporaryDirectory(prefix="dsv4num-audit-")
    with folder as triton.knobs.cache.dir:
        made = triton.compile(source, target=target, options=specialization.options)
    return {stage: made.asm[stage] for stage in ("ttir", "llir", last)}


def _without_binary(
    backend: Any = None, stages: dict[str, Any] | None = None, *_: Any
) -> tuple[str, str] | None:
    """Triton's hook on the stages of a compilation: the last one, which makes a binary, does nothing.

    Newer versions also call it without arguments, for what it adds to the key of their cache.
    """
    if stages is None:
        return "assembly only", "assembly only"
    for binary in ("cubin", "hsaco"):
        if binary in stages:
            stages[binary] = lambda source, metadata: b""
    return None
