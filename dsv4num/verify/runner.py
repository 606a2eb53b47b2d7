"""Runs cases on a device and compares every byte with the oracle."""

from __future__ import annotations

import inspect
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import dsv4num.gpu
import dsv4num.reference
from dsv4num.gpu import Launch
from dsv4num.gpu._target import Path, target_of
from dsv4num.verify.case import Array, Case, Level, flat, rebase, start_of
from dsv4num.verify.compare import differing_bytes, explain_mismatch
from dsv4num.verify.operations import OPERATIONS, Operation

#: What outputs hold before a run. Two values, so that an unwritten byte cannot match twice.
FILLS = (0xA5, 0x5A)

#: The launch configurations of a case that sweeps, besides the default one.
SWEEP = (
    Launch(rows=1, num_warps=1),
    Launch(rows=2, num_warps=8),
    Launch(rows=8, num_warps=2),
    Launch(rows=4, num_warps=4, columns=64),
)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        device: "cuda" or "cpu".
        level: "quick" or "full".
        operations, variants, cases, paths: names to run; empty means all.
        seed: of the random inputs.
        jobs: processes to spread the operations and variants over.
    """

    device: str
    level: Level = "quick"
    operations: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seed: int = 0
    jobs: int = 1


@dataclass
class Row:
    """The result of one operation over one variant on one path."""

    operation: str
    variant: str
    path: str
    cases: int = 0
    runs: int = 0
    bytes: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    names: list[str] = field(default_factory=list)
    failures: list[list[str]] = field(default_factory=list)


def paths_of(device: str) -> tuple[Path, ...]:
    """The paths that the device can take."""
    return ("native", "portable") if target_of(torch.device(device)).native else ("portable",)


def selected(options: Options) -> Iterator[tuple[Operation, str]]:
    """The operations and variants to run, in registry order."""
    for operation in OPERATIONS.values():
        if options.operations and operation.name not in options.operations:
            continue
        for variant in operation.variants:
            if not options.variants or variant in options.variants:
                yield operation, variant


def run(options: Options, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Runs everything selected and returns one row per operation, variant and path."""
    pairs = [(operation.name, variant) for operation, variant in selected(options)]
    if options.jobs <= 1 or len(pairs) <= 1:
        found = []
        for pair in pairs:
            progress(" ".join(pair))
            found.append(run_pair(options, *pair))
        return [row for rows in found for row in rows]
    # Each process imports triton anew, with the environment that chose the interpreter or the GPU.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        # The registry ends with the operations that take longest: they start first.
        futures = {pool.submit(run_pair, options, *pair): pair for pair in reversed(pairs)}
        for future in as_completed(futures):
            progress(" ".join(futures[future]))
        return [row for future in reversed(futures) for row in future.result()]


def run_pair(options: Options, name: str, variant: str) -> list[Row]:
    """Runs the cases of one operation over one variant: one row per path."""
    operation = OPERATIONS[name]
    paths = [p for p in paths_of(options.device) if not options.paths or p in options.paths]
    rows = {path: Row(name, variant, path) for path in paths}
    for case in operation.cases(variant, options.level, options.seed):
        if options.cases and case.name not in options.cases:
            continue
        if case.large and options.device != "cuda":
            continue
        try:
            run_case(operation, variant, case, options, rows)
        except Exception:  # one case that cannot run must not hide the others
            lines = traceback.format_exc().splitlines()[-3:]
            for row in rows.values():
                row.mismatches += 1
                row.failures.append([f"{name} {variant}, case '{case.name}' did not run", *lines])
    return list(rows.values())


def run_case(
    operation: Operation, variant: str, case: Case, options: Options, rows: dict[Path, Row]
) -> None:
    """Runs one case on every path, under every launch and fill."""
    for fill in FILLS if case.outputs else FILLS[:1]:
        expected = _run_reference(operation, case, fill)
        for path, row in rows.items():
            began = time.perf_counter()
            if fill == FILLS[0]:
                row.cases += 1
                row.names.append(case.name)
            for launch in (Launch(path=path), *_sweep(case, path)):
                observed = _run_device(operation, case, fill, options.device, launch)
                row.runs += 1
                _compare(operation, variant, case, options, launch, fill, expected, observed, row)
            row.seconds += time.perf_counter() - began


def _sweep(case: Case, path: Path) -> list[Launch]:
    if not case.sweep:
        return []
    return [replace(launch, path=path) for launch in SWEEP]


@dataclass
class _Result:
    """The buffers after a run, by name, and where each array starts in its buffer."""

    buffers: dict[str, NDArray[np.uint8]]
    starts: dict[str, int]


def _run_reference(operation: Operation, case: Case, fill: int) -> _Result:
    given = {**case.arguments, **case.keywords}
    call: dict[str, Any] = {**given, **case.reference}
    for name, value in call.items():
        if isinstance(value, np.ndarray):
            buffer = flat(value).copy()
            if name in case.outputs:
                buffer[:] = fill
            call[name] = rebase(value, buffer)
    function = getattr(dsv4num.reference, operation.name)
    positional = [call.pop(name) for name in case.arguments]
    returned = function(*positional, **call)
    written = dict(zip(case.arguments, positional, strict=True))
    if case.restore is not None:
        blank = {
            name: rebase(written[name], np.full_like(flat(written[name]), fill))
            for name in case.outputs
        }
        case.restore({name: written[name] for name in case.outputs}, blank)
    result = _Result({}, {})
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            # An argument that is not written must come back as it was given to the kernels.
            changed = name in case.outputs or name in case.updated
            result.buffers[name] = flat(written[name]) if changed else flat(value)
            result.starts[name] = start_of(value)
    return _with_returned(result, operation, returned)


def _run_device(
    operation: Operation, case: Case, fill: int, device: str, launch: Launch
) -> _Result:
    buffers: dict[str, torch.Tensor] = {}
    starts: dict[str, int] = {}
    call: dict[str, Any] = {**case.arguments, **case.keywords}
    for name, value in call.items():
        if isinstance(value, np.ndarray):
            buffers[name] = torch.from_numpy(flat(value).copy()).to(device)
            if name in case.outputs:
                buffers[name].fill_(fill)
            starts[name] = start_of(value)
            call[name] = _tensor(value, buffers[name])
    function = getattr(dsv4num.gpu, operation.name)
    if "launch" in inspect.signature(function).parameters:
        call["launch"] = launch
    positional = [call.pop(name) for name in case.arguments]
    returned = function(*positional, **call)
    if device == "cuda":
        torch.cuda.synchronize()
    result = _Result({name: buffer.cpu().numpy() for name, buffer in buffers.items()}, starts)
    return _with_returned(result, operation, returned)


def _with_returned(result: _Result, operation: Operation, returned: Any) -> _Result:
    values = returned if isinstance(returned, tuple) else (returned,)
    for name, value in zip(operation.returns, values, strict=False):
        if isinstance(value, torch.Tensor):
            value = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
            value = value.cpu().numpy()
        result.buffers["-> " + name] = np.ascontiguousarray(value).view(np.uint8).ravel()
        result.starts["-> " + name] = 0
    return result


def _tensor(view: Array, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor with the geometry of a placed array, inside a buffer on the device."""
    if view.dtype == ml_dtypes.bfloat16:
        dtype = torch.bfloat16
    else:
        kinds = {np.dtype(np.uint8): torch.uint8, np.dtype(np.uint16): torch.int16}
        dtype = kinds.get(view.dtype) or torch.from_numpy(np.empty(0, view.dtype)).dtype
    typed = buffer.view(dtype)
    strides = [stride // view.itemsize for stride in view.strides]
    return typed.as_strided(view.shape, strides, start_of(view) // view.itemsize)


def _compare(
    operation: Operation,
    variant: str,
    case: Case,
    options: Options,
    launch: Launch,
    fill: int,
    expected: _Result,
    observed: _Result,
    row: Row,
) -> None:
    for name, want in expected.buffers.items():
        got = observed.buffers[name]
        written = name in case.outputs or name in case.updated or name.startswith("-> ")
        if written:
            row.bytes += len(want)
        if len(want) == len(got) and np.array_equal(want, got):
            continue
        if not written:
            row.mismatches += len(differing_bytes(want, got))
            lines = [f"{name}: the operation changed its input"]
        elif len(want) != len(got):
            row.mismatches += abs(len(want) - len(got))
            lines = [f"{name}: {len(got)} bytes returned, {len(want)} expected"]
        else:
            row.mismatches += len(differing_bytes(want, got))
            poison = fill if name in case.outputs else None
            output = name.removeprefix("-> ")
            lines = explain_mismatch(
                operation, case, output, expected.starts[name], want, got, poison
            )
        row.failures.append(
            [
                f"{operation.name} {variant}, case '{case.name}', {launch.path} path, "
                f"rows {launch.rows or 'default'}, warps {launch.num_warps or 'default'}",
                *lines,
                f"  reproduce: python -m dsv4num verify --device {options.device} --level "
                f"{options.level} --op {operation.name} --variant {variant} --case '{case.name}' "
                f"--path {launch.path} --seed {options.seed}",
            ]
        )
