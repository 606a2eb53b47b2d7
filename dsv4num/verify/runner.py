"""Runs cases on a device and compares every byte with the oracle."""

from __future__ import annotations

import inspect
import multiprocessing
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch

import dsv4num.gpu
from dsv4num.errors import UnsupportedError
from dsv4num.gpu import Launch
from dsv4num.gpu._target import target_of
from dsv4num.verify.call import (
    FILLS,
    Arrays,
    Given,
    Result,
    differences,
    expect,
    fills_of,
    give,
    observe,
    written_bytes,
)
from dsv4num.verify.case import Block, Case, Level, ready
from dsv4num.verify.implementation import (
    IMPLEMENTATION,
    Implementation,
    NotOffered,
    load_implementation,
)
from dsv4num.verify.operations import OPERATIONS, Operation
from dsv4num.verify.profile import Profile, load_profile
from dsv4num.verify.rows import Row, add_up

#: About the built-in choice for large inputs; most cases have so few rows that each has a program.
MANY_ROWS = Launch(rows=4, num_warps=1)
#: The launch configurations of a case that sweeps, besides the default one.
SWEEP = (
    MANY_ROWS,
    Launch(rows=2, num_warps=8),
    Launch(rows=8, num_warps=2),
    Launch(rows=4, num_warps=4, columns=64),
)

#: Cases of the exhaustive level that a process takes at a time: a few seconds of work.
_BLOCKS_PER_TASK = 32
#: Failing runs of an operation, variant and path whose bytes are explained: those that are printed.
EXPLAINED = 3


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
        implementation: MODULE[:PREFIX] of what is held to the oracle in place of the kernels, or "".
        arrays: what that one takes, or "" for what it says itself.
        profile: a file or a name: the contract that it is held to, or "" for the oracle.
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
    implementation: str = ""
    arrays: str = ""
    profile: str = ""


@dataclass(frozen=True)
class Task:
    """What one process does at a time: part `part` of `parts` of one operation over one variant."""

    operation: str
    variant: str
    part: int = 0
    parts: int = 1


def paths_of(device: str) -> tuple[str, ...]:
    """The paths that the kernels can take on the device."""
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
    # Another's code may end its process, so that where there may be several it never runs in this one.
    alone = options.jobs <= 1 or (len(todo) <= 1 and not options.implementation)
    if alone and not options.ptx:
        for task in todo:
            progress(f"{task.operation} {task.variant}")
            found += run_task(options, task)
        return add_up(found)
    with _processes(options, options.jobs) as pool:
        # The registry ends with the operations that take longest: they start first.
        futures = {pool.submit(run_task, options, task): task for task in reversed(todo)}
        for future in as_completed(futures):
            task = futures[future]
            progress(f"{task.operation} {task.variant}")
    for future, task in reversed(futures.items()):
        found += _rows_of(future, options, task)
    return add_up(found)


def _processes(options: Options, jobs: int) -> ProcessPoolExecutor:
    """Processes that import triton anew, with the environment that chose the interpreter or the GPU."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, spawn, _begin_process, (options.ptx,))


def _rows_of(future: Future[list[Row]], options: Options, task: Task) -> list[Row]:
    """The rows of a task. Where a process died, all that had not ended run again, each in its own."""
    try:
        return future.result()
    except BrokenProcessPool:
        if not options.implementation:
            raise
    with _processes(options, 1) as pool:
        try:
            return pool.submit(run_task, options, task).result()
        except BrokenProcessPool:
            text = f"{task.operation} {task.variant}: the process died while it ran its cases"
            hint = "  --jobs 1 --case NAME runs one of them in the process of the command"
            row = Row(task.operation, task.variant, IMPLEMENTATION, mismatches=1)
            row.failures.append([text, hint])
            return [row]


def _begin_process(ptx: str) -> None:
    """What a process does before its first task."""
    if ptx:
        from dsv4num.verify.ptx import install

        install(ptx)


def run_task(options: Options, task: Task) -> list[Row]:
    """Runs the cases of a task: one row per path."""
    operation, variant = OPERATIONS[task.operation], task.variant
    judge = _Judge(options, operation, variant)
    for index, block in enumerate(_blocks(operation, variant, options)):
        if index % task.parts != task.part or not judge.rows:
            continue
        case = block.make()
        if case.large and options.device != "cuda":
            continue
        try:
            judge.run(case)
        except Exception:  # one case that cannot run must not hide the others
            lines = traceback.format_exc().splitlines()[-3:]
            for row in judge.rows.values():
                row.mismatches += 1
                row.failures.append(
                    [f"{operation.name} {variant}, case '{case.name}' did not run", *lines]
                )
    return judge.found


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
        cases = operation.cases(variant, options.level, options.seed)
        profile = _profile_of(options)
        blocks = map(ready, profile.cases(operation.name, cases) if profile else cases)
    for index, block in enumerate(blocks, start=place):
        if index % shards == shard and (not options.cases or block.name in options.cases):
            yield block


def _profile_of(options: Options) -> Profile | None:
    return load_profile(options.profile) if options.profile else None


@dataclass
class _Run:
    """One call of what is judged.

    Attributes:
        heading: completes "operation variant, case 'name', ...".
        arrays: what it takes.
        call: calls it, and returns what it returned.
        case: the case, its caches in the form that the function takes.
    """

    heading: str
    arrays: Arrays
    call: Callable[[Given], Any]
    case: Case


class _Judge:
    """Holds the kernels, or an implementation, to what must be there: an operation over a variant.

    Attributes:
        found: all rows.
        rows: those of the paths that can run, by name.
    """

    def __init__(self, options: Options, operation: Operation, variant: str) -> None:
        self.options, self.operation, self.variant = options, operation, variant
        self.profile = _profile_of(options)
        self.other: Implementation | None = None
        if options.implementation:
            self.other = load_implementation(options.implementation, options.arrays)
            self.offers = {each.path: each for each in self.other.offers(operation.name, variant)}
            paths: Iterable[str] = self.offers
        else:
            paths = (p for p in paths_of(options.device) if p in (options.paths or (p,)))
        self.rows = {path: Row(operation.name, variant, path) for path in paths}
        self.found = list(self.rows.values())
        if not self.rows and self.other is not None:
            reason = self.other.why_not(operation.name, variant)
            self.found = [Row(operation.name, variant, IMPLEMENTATION, not_offered=[reason])]

    def run(self, case: Case) -> None:
        """Runs one case on every path, under every launch and fill."""
        refused: set[str] = set()
        for fill in fills_of(case):
            expected = expect(self.operation, case, fill, self.profile)
            for path, row in self.rows.items():
                if path in refused:
                    continue
                began = time.perf_counter()
                if fill == FILLS[0]:
                    row.cases += 1
                    row.names.append(case.name)
                try:
                    for run in self._runs(case, path):
                        self._compare(run, fill, expected, row)
                except NotOffered as reason:
                    refused.add(path)
                    row.not_offered.append(str(reason))
                    row.cases -= 1
                    row.names.remove(case.name)
                row.seconds += time.perf_counter() - began

    def _runs(self, case: Case, path: str) -> Iterator[_Run]:
        """The calls of a case on a path."""
        if self.other is not None:
            offer = self.offers[path]
            adapted = offer.adapted(case)
            rename = self.profile.layouts if self.profile else {}
            yield _Run(
                offer.name,
                self.other.arrays,
                lambda given: offer.call(self.operation, adapted, given, rename),
                adapted,
            )
            return
        for launch in (Launch(), *(SWEEP if case.sweep else ())):
            heading = f"{path} path, rows {launch.rows or 'default'}, "
            heading += f"warps {launch.num_warps or 'default'}"
            call = _kernel(self.operation, case, replace(launch, path=path))
            yield _Run(heading, "torch", call, case)

    def _compare(self, run: _Run, fill: int, expected: Result, row: Row) -> None:
        options, operation, case = self.options, self.operation, run.case
        given = give(case, fill, run.arrays, options.device)
        try:
            returned = run.call(given)
            if options.device == "cuda":
                torch.cuda.synchronize()
        except (Exception, SystemExit) as error:
            if self.other is None:
                if not isinstance(error, Exception):
                    raise
                # One launch that cannot run, or not be compiled, must not hide the others.
                lines = traceback.format_exc().splitlines()[-3:]
                self._fail(run, 1, ["did not run", *lines], row)
                return
            if isinstance(error, NotOffered):
                raise
            if isinstance(error, NotImplementedError | UnsupportedError):
                raise NotOffered(_say(error)) from None
            row.runs += 1
            self._fail(run, 1, [f"raised {_say(error)}", self._place_of(error)], row)
            return
        observed = observe(operation, given, returned, expected)
        row.runs += 1
        row.bytes += written_bytes(case, expected)
        found = differences(
            operation,
            case,
            fill,
            expected,
            observed,
            profile=self.profile,
            explained=len(row.failures) < EXPLAINED,
        )
        for difference in found:
            self._fail(run, difference.count, difference.lines, row)

    def _place_of(self, error: BaseException) -> str:
        """Where an implementation raised: the innermost line of its own module, if there is one."""
        frames = traceback.extract_tb(error.__traceback__)
        source = self.other and getattr(self.other.module, "__file__", None)
        frame = next((f for f in reversed(frames) if f.filename == source), frames[-1])
        return f"  in {frame.name}, {PurePath(frame.filename).name} line {frame.lineno}"

    def _fail(self, run: _Run, count: int, lines: list[str], row: Row) -> None:
        """Adds a failure."""
        row.mismatches += count
        heading = f"{self.operation.name} {self.variant}, case '{run.case.name}', {run.heading}"
        row.failures.append([heading, *lines, self._reproduce(run.case, row.path)])

    def _reproduce(self, case: Case, path: str) -> str:
        """The command that runs a case again."""
        options = self.options
        text = (
            f"  reproduce: python -m dsv4num verify --device {options.device} --level {options.level} "
            f"--op {self.operation.name} --variant {self.variant} --case '{case.name}' "
        )
        if self.other is None:
            text += f"--path {path} "
        text += f"--seed {options.seed}"
        for option, value in (
            ("--ptx", options.ptx),
            ("--impl", options.implementation),
            ("--arrays", options.arrays),
            ("--profile", options.profile),
        ):
            text += f" {option} {shlex.quote(value)}" if value else ""
        return text


def _say(error: BaseException) -> str:
    """The name of an error and the first line of its message."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _kernel(operation: Operation, case: Case, launch: Launch) -> Callable[[Given], Any]:
    """The call of a kernel under a launch."""

    def call(given: Given) -> Any:
        function = getattr(dsv4num.gpu, operation.name)
        values = dict(given.values)
        if "launch" in inspect.signature(function).parameters:
            values["launch"] = launch
        positional = [values.pop(name) for name in case.arguments]
        return function(*positional, **values)

    return call
