"""Runs cases on a device and compares every byte with the oracle."""

from __future__ import annotations

import inspect
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import dsv4num.gpu
import dsv4num.reference
from dsv4num.gpu import Launch
from dsv4num.gpu._target import Path, target_of
from dsv4num.verify.case import Array, Block, Case, Level, flat, ready, rebase, start_of
from dsv4num.verify.compare import differing_bytes, explain_mismatch
from dsv4num.verify.operations import OPERATIONS, Operation
from dsv4num.verify.rows import Row, add_up

#: What outputs hold before a run. Two values, so that an unwritten byte cannot match twice.
FILLS = (0xA5, 0x5A)

#: The launch configurations of a case that sweeps, besides the default one.
SWEEP = (
    Launch(rows=1, num_warps=1),
    Launch(rows=2, num_warps=8),
    Launch(rows=8, num_warps=2),
    Launch(rows=4, num_warps=4, columns=64),
)

#: Cases of the exhaustive level that a process takes at a time: a few seconds of work.
_BLOCKS_PER_TASK = 32


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        device: "cuda" or "cpu".
        level: "quick", "full" or "exhaustive".
        operations, variants, cases, paths: names to run; empty means all.
        seed: of the random inputs.
        jobs: processes to spread the operations and variants over.
        shard: (I, N): of the cases that are selected, only every Nth, those of the shard I in 0..N-1.
        ptx: an older NVIDIA architecture whose PTX is run in place of the device's own code, or "".
    """

    device: str
    level: Level = "quick"
    operations: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    seed: int = 0
    jobs: int = 1
    shard: tuple[int, int] = (0, 1)
    ptx: str = ""


@dataclass(frozen=True)
class Task:
    """What one process does at a time: part `part` of `parts` of one operation over one variant."""

    operation: str
    variant: str
    part: int = 0
    parts: int = 1


def paths_of(device: str) -> tuple[Path, ...]:
    """The paths that the device can take."""
    return ("native", "portable") if target_of(torch.device(device)).native else ("portable",)


def selected(options: Options) -> Iterator[tuple[Operation, str]]:
    """The operations and variants to run, in registry order."""
    for operation in OPERATIONS.values():
        if options.operations and operation.name not in options.operations:
            continue
        if options.level == "exhaustive" and operation.exhaustive is None:
            continue
        for variant in operation.variants:
            if not options.variants or variant in options.variants:
                yield operation, variant


def tasks(options: Options) -> list[Task]:
    """Everything selected, in registry order, cut into pieces where there are many cases."""
    found = []
    for operation, variant in selected(options):
        parts = 1
        if options.level == "exhaustive" and options.jobs > 1:
            parts = -(-sum(1 for _ in _blocks(operation, variant, options)) // _BLOCKS_PER_TASK)
        found += [Task(operation.name, variant, part, parts) for part in range(max(1, parts))]
    return found


def run(options: Options, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Runs everything selected and returns one row per operation, variant and path.

    Args:
        options: what to run.
        progress: called once for each of `tasks(options)`, with what has ended, or begins.
    """
    todo = tasks(options)
    found = []
    if (options.jobs <= 1 or len(todo) <= 1) and not options.ptx:
        for task in todo:
            progress(f"{task.operation} {task.variant}")
            found += run_task(options, task)
        return add_up(found)
    # Each process imports triton anew, with the environment that chose the interpreter or the GPU.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, _begin_process, (options.ptx,)) as pool:
        # The registry ends with the operations that take longest: they start first.
        futures = {pool.submit(run_task, options, task): task for task in reversed(todo)}
        for future in as_completed(futures):
            task = futures[future]
            progress(f"{task.operation} {task.variant}")
        for future in reversed(futures):
            found += future.result()
    return add_up(found)


def _begin_process(ptx: str) -> None:
    """What a process does before its first task."""
    if ptx:
        from dsv4num.verify.ptx import install

        install(ptx)


def run_pair(options: Options, name: str, variant: str) -> list[Row]:
    """Runs the cases of one operation over one variant: one row per path."""
    return run_task(options, Task(name, variant))


def run_task(options: Options, task: Task) -> list[Row]:
    """Runs the cases of a task: one row per path."""
    operation, variant = OPERATIONS[task.operation], task.variant
    paths = [p for p in paths_of(options.device) if not options.paths or p in options.paths]
    rows = {path: Row(operation.name, variant, path) for path in paths}
    for index, block in enumerate(_blocks(operation, variant, options)):
        if index % task.parts != task.part:
            continue
        case = block.make()
        if case.large and options.device != "cuda":
            continue
        try:
            run_case(operation, variant, case, options, rows)
        except Exception:  # one case that cannot run must not hide the others
            lines = traceback.format_exc().splitlines()[-3:]
            for row in rows.values():
                row.mismatches += 1
                row.failures.append(
                    [f"{operation.name} {variant}, case '{case.name}' did not run", *lines]
                )
    return list(rows.values())


def _blocks(operation: Operation, variant: str, options: Options) -> Iterator[Block]:
    """The cases of a pair that are selected and belong to the shard.

    Case k of the pair p of the registry belongs to shard (p + k) % N: shards are of nearly one size,
    also where pairs have few cases, and a case stays in its shard whatever else is selected.
    """
    shard, shards = options.shard
    pairs = [(each.name, of) for each in OPERATIONS.values() for of in each.variants]
    place = pairs.index((operation.name, variant))
    if options.level == "exhaustive":
        assert operation.exhaustive is not None  # `selected` leaves the others out
        blocks = operation.exhaustive(variant)
    else:
        blocks = map(ready, operation.cases(variant, options.level, options.seed))
    for index, block in enumerate(blocks, start=place):
        if index % shards == shard and (not options.cases or block.name in options.cases):
            yield block


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
                f"--path {launch.path} --seed {options.seed}"
                + (f" --ptx {options.ptx}" if options.ptx else ""),
            ]
        )
