"""Timing on a GPU: rotated inputs, graph replay, and the copy rate of the same run."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.scenes import SCENES, Call, Maker, Scene, bind
from dsv4num import gpu
from dsv4num.gpu import Launch

Timed = Callable[[], object]

#: How many times the L2 the inputs of one round have, so that none of it is left for the next.
ROUND_OF_L2 = 4
#: Most input sets of one round, which is enough for all but the small sizes.
MOST_SETS = 32
#: Microseconds that one replay should last at least, so that its own start does not count.
LONG_ENOUGH = 1000.0
#: Most samples of one figure.
MOST_SAMPLES = 200


@dataclass(frozen=True)
class Times:
    """Microseconds per call."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        """Of samples."""
        p10, median, p90 = (float(np.quantile(samples, q)) for q in (0.1, 0.5, 0.9))
        return cls(median, p10, p90, len(samples))


class Clock:
    """Times calls on the device; on the CPU it only makes them, once each, so that all is exercised."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dry = device == "cpu"
        self.l2 = 0
        if not self.dry:
            self.l2 = torch.cuda.get_device_properties(0).L2_cache_size
            # Larger than the L2; read, so that nothing dirty stays, before replays from memory.
            self.flush = torch.ones(self.l2, dtype=torch.int32, device=device)

    def sets(self, footprint: int, *, small: bool) -> int:
        """How many input sets a round needs."""
        if self.dry:
            return 1
        if small:
            return MOST_SETS
        return min(MOST_SETS, max(2, math.ceil(ROUND_OF_L2 * self.l2 / footprint)))

    def warm(self, call: Timed) -> None:
        """Compiles what a call needs, before it is captured."""
        if not self.dry:
            call()
            torch.cuda.synchronize()

    def replay(self, calls: Sequence[Timed], seconds: float, *, cold: bool = False) -> Times:
        """Time of one call when a graph of all of them is replayed.

        Args:
            calls: a round; each has its own inputs.
            seconds: how long to measure.
            cold: whether the L2 is flushed before every replay.
        """
        if self.dry:
            return Times.of([0.0 if cold else _wall(call) for call in calls])
        rounds = 1
        graph, keep = _captured(calls)
        once = self._samples(graph, len(calls), 0.0, cold)
        if not cold and once[-1] * len(calls) < LONG_ENOUGH:
            rounds = math.ceil(LONG_ENOUGH / max(once[-1] * len(calls), 1.0))
            rounds = min(rounds, max(1, 1024 // len(calls)))  # what is in a graph is kept alive
            del graph, keep
            graph, keep = _captured(list(calls) * rounds)
        times = Times.of(self._samples(graph, len(calls) * rounds, seconds, cold))
        del graph, keep
        return times

    def _samples(
        self, graph: torch.cuda.CUDAGraph, calls: int, seconds: float, cold: bool
    ) -> list[float]:
        """At least five samples after two that are thrown away."""
        samples: list[float] = []
        deadline = time.perf_counter() + seconds
        while not samples or (time.perf_counter() < deadline and len(samples) < MOST_SAMPLES):
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(7)
            ]
            for start, end in events:
                if cold:
                    self.flush.sum()
                start.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            found = [1000 * start.elapsed_time(end) / calls for start, end in events]
            samples += found if samples else found[2:]
        return samples

    def eager(self, calls: Sequence[Timed], seconds: float) -> float:
        """Microseconds per call when Python launches one after another, waiting only at the end."""
        if self.dry:
            return 0.0
        samples: list[float] = []
        deadline = time.perf_counter() + seconds
        rounds = max(1, 16 // len(calls))
        while len(samples) < 3 or (time.perf_counter() < deadline and len(samples) < 100):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                for call in calls:
                    call()
            torch.cuda.synchronize()
            samples.append(1e6 * (time.perf_counter() - start) / (rounds * len(calls)))
        return float(np.median(samples))

    def copy(self, nbytes: int, seconds: float) -> Times:
        """Time of a copy that reads and writes `nbytes` in all, rotated as the operations are."""
        size = max(16, nbytes // 2)
        rounds = self.sets(nbytes, small=False)
        calls = []
        for _ in range(rounds):
            # Not zeros: a device may move those faster.
            source = torch.randint(256, (size,), dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            calls.append(lambda source=source, target=target: target.copy_(source))
        return self.replay(calls, seconds)


def _wall(call: Timed) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _captured(calls: Sequence[Timed]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """A graph of calls; what they return is kept, so that each writes to memory of its own."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = [call() for call in calls]
    torch.cuda.synchronize()
    return graph, keep


@triton.jit
def _empty_kernel():
    pass


def launch_empty() -> None:
    """A kernel that does nothing."""
    _empty_kernel[(1,)](num_warps=4)


def release() -> None:
    """Gives device memory back between scenes."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


# Compiling


def compiled() -> dict[int, Any]:
    """Every kernel of `dsv4num.gpu` that is compiled in this process, by its identity."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(gpu.__name__ + "."):
            continue
        for kernel in vars(module).values():
            for caches in list(getattr(kernel, "device_caches", {}).values()):
                found.update({id(each): each for each in caches[0].values()})
    return found


def resources(before: dict[int, Any]) -> str:
    """Registers and spills of the kernels that were compiled since, for a table."""
    texts = []
    for key, kernel in compiled().items():
        if key not in before:
            spills = f" spills {kernel.n_spills}" if kernel.n_spills else ""
            shared = kernel.metadata.shared
            texts.append(f"{kernel.n_regs} regs{spills}, {shared} B shared")
    return "; ".join(sorted(texts))


#: Resources of the kernels of an operation and launch, from when they were first compiled.
KNOWN: dict[tuple[str, Launch], str] = {}


def _compile(key: str, launch: Launch) -> None:
    """Compiles in a worker; Triton's cache on disk brings it to the process that measures."""
    scene = next(scene for scene in SCENES if scene.key == key)
    bind(gpu, scene.make(Maker("cuda")), launch)()
    torch.cuda.synchronize()


def compile_all(tasks: Sequence[tuple[Scene, Launch]]) -> float:
    """Compiles kernels in several processes at once; the seconds that it took."""
    start = time.perf_counter()
    workers = min(8, os.cpu_count() or 1, len(tasks))
    if workers > 1:
        context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            done = [pool.submit(_compile, scene.key, launch) for scene, launch in tasks]
            wait(
                done
            )  # what a worker could not compile is compiled, or fails, where it is measured
    return time.perf_counter() - start


# Scenes


class Inputs:
    """The rotated input sets of a scene."""

    def __init__(self, scene: Scene, clock: Clock) -> None:
        self.scene = scene
        maker = Maker(clock.device)
        first = scene.make(maker, tiny=clock.dry)
        count = clock.sets(first.traffic.total, small=scene.small)
        self.calls: list[Call] = [first, *(scene.make(maker) for _ in range(count - 1))]
        self.traffic = first.traffic

    def bound(self, module: ModuleType, launch: Launch | None) -> list[Timed]:
        """The calls of a module on each set."""
        return [bind(module, call, launch) for call in self.calls]


def sweep(
    scene: Scene, launches: Sequence[Launch], clock: Clock, seconds: float
) -> Iterator[dict[str, Any]]:
    """Times a scene with each launch."""
    inputs = Inputs(scene, clock)
    for launch in launches:
        choice = scene.name, launch
        row: dict[str, Any] = {
            "name": scene.name,
            "size": scene.size,
            "launch": describe_launch(launch),
        }
        before = compiled()
        try:
            calls = inputs.bound(gpu, launch)
            clock.warm(calls[0])
            row["resources"] = KNOWN.setdefault(choice, resources(before))
            row |= _timed(calls, scene, clock, seconds)
            row |= {"bytes": inputs.traffic.total}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        yield row


def _timed(calls: list[Timed], scene: Scene, clock: Clock, seconds: float) -> dict[str, Any]:
    """Times of a round of calls, for a report."""
    share = seconds / 2 if scene.small else seconds
    times = clock.replay(calls, share)
    row: dict[str, Any] = {
        "us": times.median,
        "p10_us": times.p10,
        "p90_us": times.p90,
        "samples": times.samples,
        "sets": len(calls),
    }
    if scene.small:
        row["cold_us"] = clock.replay(calls, share, cold=True).median
    return row


def measure(scene: Scene, clock: Clock, seconds: float, other: ModuleType | None) -> dict[str, Any]:
    """Times a scene, and another module's operation on the same inputs beside it."""
    row: dict[str, Any] = {
        "name": scene.name,
        "size": scene.size,
        "operation": None,
        "small": scene.small,
        "goal": scene.goal,
        "in_all": scene.in_all,
        "launch": describe_launch(scene.launch),
    }
    inputs = Inputs(scene, clock)
    row |= {
        "operation": inputs.calls[0].operation,
        "bytes_read": inputs.traffic.read,
        "bytes_written": inputs.traffic.written,
        "bytes": inputs.traffic.total,
    }
    calls = inputs.bound(gpu, scene.launch)
    clock.warm(calls[0])
    row |= _timed(calls, scene, clock, seconds)
    row["eager_us"] = clock.eager(calls, seconds / 4)
    if other is not None:
        try:
            calls = inputs.bound(other, None)
            clock.warm(calls[0])
            found = _timed(calls, scene, clock, seconds)
            row["other"] = found | {"eager_us": clock.eager(calls, seconds / 4)}
        except Exception as error:  # another module may lack it, or break on it
            row["other"] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            if not clock.dry:
                torch.cuda.synchronize()
    del calls, inputs
    release()
    if not scene.small:
        row["copy_us"] = clock.copy(row["bytes"], seconds / 2).median
        release()
    return row


def baseline(clock: Clock, seconds: float) -> dict[str, Any]:
    """The copy rate of large buffers, and the time of an empty kernel in a graph.

    The rate is the best of several sizes, bytes read plus bytes written; all sizes are far beyond the
    L2.
    """
    sizes = [1 << 12] if clock.dry else [1 << 28, 1 << 30, 1 << 32]
    copies = {}
    for size in sizes:
        copies[size] = clock.copy(size, seconds / len(sizes)).median
        release()
    launch_empty()
    empty = clock.replay([launch_empty] * 64, seconds / 4)
    return {
        "copy_us": {str(size): us for size, us in copies.items()},
        "bytes_per_s": max(size / us * 1e6 for size, us in copies.items()),
        "empty_us": empty.median,
    }


def describe_launch(launch: Launch) -> str:
    """What is chosen, for a table."""
    names = ("path", "rows", "num_warps", "columns")
    given = [(name, getattr(launch, name)) for name in names]
    chosen = [f"{name}={value}" for name, value in given if value not in (None, "auto")]
    return " ".join(chosen) or "built-in"


def launches_of(choices: dict[str, list[Any]]) -> list[Launch]:
    """Every combination of the given values of the fields of `Launch`."""
    names = list(choices)
    return [
        Launch(**dict(zip(names, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]


def environment(device: str) -> dict[str, Any]:
    """Where the figures come from."""
    from dsv4num import __version__

    found: dict[str, Any] = {
        "dsv4num": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "dry": device == "cpu",
    }
    if device == "cpu":
        return found | {"device": "cpu", "architecture": "interpreter"}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "device": properties.name,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "clocks": _clocks(),
    }


def _clocks() -> dict[str, str] | None:
    """Clocks while there is work, read only; None where nvidia-smi does not answer."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "driver_version")
    spin = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):
        spin @ spin
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        torch.cuda.synchronize()
    values = answer.stdout.strip().split(",")
    return dict(zip(fields, (value.strip() for value in values), strict=False))
