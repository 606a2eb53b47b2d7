"""Compiles, before the first request, every kernel that a model configuration needs.

A kernel is compiled once for each set of its constants (layout, page size, ratio, window, top-k), of
its pointer types, and of what is left out (lengths, replay starts). What changes from one request to
the next (counts of tokens, requests and pages, lengths, tables and where they lie) is not specialised
on, so a launch on one token is enough.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from dsv4num import gpu
from dsv4num.errors import ArgumentError
from dsv4num.formats import E2M1, get_layout
from dsv4num.gpu._target import Launch, use_native
from dsv4num.gpu._tuning import tile_of
from dsv4num.gpu.compressor import Plan, plans

__all__ = [
    "CompressedCache",
    "IndexPlan",
    "KCache",
    "LatentCache",
    "WarmupConfig",
    "WarmupReport",
    "WarmupStep",
    "compiled_count",
    "warmup",
]

#: What the compressed indices of decode tokens may be (SPEC 5.9).
DECODE_MODES = ("absent", "global", "global_lens", "local")
_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class KCache:
    """A cache that K rows are inserted into and gathered from.

    Attributes:
        layout: its record.
        block_size: rows per page.
        page_stride: bytes from one page to the next; None for those of a page.
        three_axes: whether it is given as [num_blocks, block_size, row bytes]; the kernels are the
            same, the checks are not.
    """

    layout: str
    block_size: int = 64
    page_stride: int | None = None
    three_axes: bool = True


@dataclass(frozen=True, slots=True)
class CompressedCache:
    """A cache that the compressor writes, and the state cache that it reads.

    Attributes:
        layout: its record.
        compress_ratio: tokens per group.
        overlap: whether a group is pooled together with the one before it.
        state_block_size: rows per block of the state cache.
        block_size: rows per page.
        page_stride: bytes from one page to the next; None for those of a page.
        gathered: whether its rows are gathered, too.
    """

    layout: str
    compress_ratio: int
    overlap: bool
    state_block_size: int
    block_size: int = 64
    page_stride: int | None = None
    gathered: bool = True


@dataclass(frozen=True, slots=True)
class LatentCache:
    """A V4.1 cache: pooled in a ring, rotated, quantized.

    Attributes:
        layout: its record.
        compress_ratio: 1 or 2.
        ring_capacity: rows per block of the ring; has no effect for ratio 1.
        block_size: rows per page.
        page_stride: bytes from one page to the next; None for those of a page.
        bf16_round_trip: as `rope_quant_insert` has it.
        gathered: whether its rows are gathered, too.
    """

    layout: str
    compress_ratio: int
    ring_capacity: int = 4
    block_size: int = 64
    page_stride: int | None = None
    bf16_round_trip: bool = False
    gathered: bool = True


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The sparse indices of one kind of attention layer.

    Attributes:
        compress_ratio: positions per compressed row; 0 for a window only.
        topk: compressed rows of a prefill token; 0 for a window only.
        window_size: positions of a full window.
        block_size: rows per page of the compressed cache.
        swa_block_size: rows per page of the window cache.
        block_span: slots from one compressed page to the next; None for the block size.
        swa_block_span: the same of the window cache.
        swa_width: columns of the decode tokens' window indices; None for window_size.
        decode_width: columns of their compressed indices; None for topk.
        decode_modes: which of `DECODE_MODES` occur.
        replay_start: whether replay starts are given.
        valid_tokens: whether local decode indices come with a mask of valid tokens.
        builders: which builders are used: "global", "combine", "mixed".
    """

    compress_ratio: int
    topk: int
    window_size: int = 128
    block_size: int = 64
    swa_block_size: int = 64
    block_span: int | None = None
    swa_block_span: int | None = None
    swa_width: int | None = None
    decode_width: int | None = None
    decode_modes: tuple[str, ...] = DECODE_MODES
    replay_start: bool = False
    valid_tokens: bool = True
    builders: tuple[str, ...] = ("global", "combine", "mixed")


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """What a model needs. Numbers of tokens, requests and pages do not matter.

    Attributes:
        k_caches: caches for insert and gather.
        compressed: caches that the compressor writes.
        latents: caches of V4.1.
        indices: kinds of sparse indices.
        slots: the type of slot mappings, "int32" or "int64".
        positions: the type of positions.
        tables: the type of block tables, lengths, starts, request numbers and top-k indices.
        weight: the type of the norm's weights, "bfloat16" or "float32".
        launch: how the engine launches.
    """

    k_caches: tuple[KCache, ...] = ()
    compressed: tuple[CompressedCache, ...] = ()
    latents: tuple[LatentCache, ...] = ()
    indices: tuple[IndexPlan, ...] = ()
    slots: str = "int64"
    positions: str = "int64"
    tables: str = "int32"
    weight: str = "bfloat16"
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        """Refuses types and names that do not exist.

        Raises:
            ArgumentError: one of them.
        """
        for name in ("slots", "positions", "tables"):
            if getattr(self, name) not in ("int32", "int64"):
                raise ArgumentError(name, repr(getattr(self, name)), "int32 or int64")
        if self.weight not in ("bfloat16", "float32"):
            raise ArgumentError("weight", repr(self.weight), "bfloat16 or float32")
        for plan in self.indices:
            for mode in plan.decode_modes:
                if mode not in DECODE_MODES:
                    raise ArgumentError("decode_modes", repr(mode), ", ".join(DECODE_MODES))
            for builder in plan.builders:
                if builder not in ("global", "combine", "mixed"):
                    raise ArgumentError("builders", repr(builder), "global, combine, mixed")


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """One call: what it was, how many kernels it compiled, and how long it took."""

    name: str
    built: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up did.

    Attributes:
        device: where.
        steps: every call, in order.
    """

    device: str
    steps: tuple[WarmupStep, ...]

    @property
    def built(self) -> int:
        """Kernels compiled, or loaded from Triton's cache on disk."""
        return sum(step.built for step in self.steps)

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        """A line per step, and the sum."""
        lines = [f"{step.seconds:8.3f} s  {step.built:3}  {step.name}" for step in self.steps]
        total = f"{self.seconds:8.3f} s  {self.built:3}  on {self.device}"
        return "\n".join([*lines, total])


def compiled_count() -> int:
    """How many kernels of `dsv4num.gpu` are compiled in this process, on all devices together.

    0 in Triton's interpreter, which compiles nothing.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(gpu.__name__ + "."):
            kernels = [v for v in vars(module).values() if isinstance(v, triton.JITFunction)]
            found.update({id(kernel): kernel for kernel in kernels})
    return sum(
        len(caches[0])
        for function in found.values()
        for caches in list(getattr(function, "device_caches", {}).values())
    )


def warmup(config: WarmupConfig, device: torch.device | str = "cuda") -> WarmupReport:
    """Launches every kernel of a configuration on tiny inputs of its own, and waits for them.

    Call it once per device, and not while a graph is being captured.

    Args:
        config: what the model needs.
        device: where it runs.

    Returns:
        What was compiled, and how long it took.

    Raises:
        ArgumentError: the configuration holds what an operation refuses.
        UnsupportedError: no kernel can run there.
    """
    if not isinstance(config, WarmupConfig):
        raise ArgumentError("config", type(config).__name__, "WarmupConfig")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("device", repr(device), "a torch device") from error
    use_native(config.launch, place)
    steps = []
    for name, call in _calls(config, place):
        before, start = compiled_count(), time.perf_counter()
        call()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds = time.perf_counter() - start
        steps.append(WarmupStep(name, compiled_count() - before, seconds))
    return WarmupReport(str(place), tuple(steps))


def _calls(
    config: WarmupConfig, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every call with its name; its inputs are made when it runs."""
    make = _Inputs(config, device)
    for k in config.k_caches:
        for rows in _row_choices("insert", make, k):
            kind = f"{k.layout}, {k.block_size} rows{_many(rows)}"
            yield f"insert {kind}", partial(_insert, make, k, rows)
        yield from _gathers(f"{k.layout}, {k.block_size} rows", make, k)
    for c in config.compressed:
        kind = f"{c.layout}, ratio {c.compress_ratio}{', overlap' if c.overlap else ''}"
        yield f"save states {kind}", partial(_save_states, make, c)
        for plan in dict.fromkeys(_compress_plans(c)):
            name = f"compress {kind}: {plan.tokens} tokens, {plan.columns} columns"
            yield name, partial(_compress, make, c, plan)
        if c.gathered and get_layout(c.layout).head_dim == 512:
            yield from _gathers(f"{c.layout}, {c.block_size} rows", make, c)
    for latent in config.latents:
        kind = f"{latent.layout}, ratio {latent.compress_ratio}"
        yield f"pool latent {kind}", partial(_pool_latent, make, latent)
        for rows in _row_choices("rope_quant", make, latent):
            yield f"rotate and insert {kind}{_many(rows)}", partial(_rope_quant, make, latent, rows)
        if latent.gathered:
            yield from _gathers(f"{latent.layout}, {latent.block_size} rows", make, latent)
    for index in config.indices:
        kind = f"ratio {index.compress_ratio}, top {index.topk}, window {index.window_size}"
        if "global" in index.builders and index.topk:
            yield f"global indices {kind}", partial(_global, make, index)
        if "combine" in index.builders:
            yield f"combined indices {kind}", partial(_combine, make, index)
        if "mixed" in index.builders:
            for mode in index.decode_modes:
                yield f"mixed indices {kind}, {mode}", partial(_mixed, make, index, mode)


class _Inputs:
    """Tensors of the types that a configuration has."""

    def __init__(self, config: WarmupConfig, device: torch.device) -> None:
        self.device, self.launch = device, config.launch
        self.slot_type, self.position_type = _DTYPES[config.slots], _DTYPES[config.positions]
        self.table_type, self.weight_type = _DTYPES[config.tables], _DTYPES[config.weight]

    def slots(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=self.slot_type, device=self.device)

    def positions(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=self.position_type, device=self.device)

    def numbers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=self.table_type, device=self.device)

    def table(self, columns: int) -> torch.Tensor:
        return torch.arange(columns, device=self.device).to(self.table_type)[None, :]

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)

    def weight(self, width: int) -> torch.Tensor:
        return self.floats(width, dtype=self.weight_type)

    def cache(self, plan: KCache | CompressedCache | LatentCache) -> torch.Tensor:
        """Two pages, the configured bytes apart."""
        layout, rows = get_layout(plan.layout), plan.block_size
        stride = layout.page_bytes(rows) if plan.page_stride is None else plan.page_stride
        if stride < layout.owned_bytes(rows):
            allowed = f"at least {layout.owned_bytes(rows)}"
            raise ArgumentError("page_stride", stride, allowed, "4.3")
        pages = torch.zeros(2 * stride, dtype=torch.uint8, device=self.device)
        if isinstance(plan, KCache) and not plan.three_axes:
            return pages.view(2, stride)
        return pages.as_strided((2, rows, layout.row_bytes), (stride, layout.row_bytes, 1))


def _insert(make: _Inputs, plan: KCache, rows: int) -> None:
    gpu.quantize_and_insert_k_cache(
        make.floats(1, get_layout(plan.layout).head_dim, dtype=torch.bfloat16),
        make.cache(plan),
        make.slots(0),
        plan.block_size,
        layout=plan.layout,
        launch=replace(make.launch, rows=rows),
    )


def _gathers(
    kind: str, make: _Inputs, plan: KCache | CompressedCache | LatentCache
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Gathers of the last rows and of whole sequences, which are kernels of their own."""
    for rows in _row_choices("gather", make, plan):
        yield f"gather {kind}{_many(rows)}", partial(_gather, make, plan, rows, whole=False)
        yield f"gather whole {kind}{_many(rows)}", partial(_gather, make, plan, rows, whole=True)


def _row_choices(
    operation: str, make: _Inputs, plan: KCache | CompressedCache | LatentCache
) -> tuple[int, ...]:
    """The rows per program that a launcher may choose: for few rows, and for many."""
    if make.launch.rows is not None:
        return (make.launch.rows,)
    layout = get_layout(plan.layout)
    codes = layout.field("codes")
    packed = codes is not None and codes.format is E2M1
    tile = tile_of(operation, make.device, packed=packed)
    return tuple(dict.fromkeys((tile.rows(layout.head_dim, 1), tile.rows(layout.head_dim))))


def _many(rows: int) -> str:
    """What tells the steps of both choices apart."""
    return "" if rows == 1 else f", {rows} per program"


def _gather(
    make: _Inputs, plan: KCache | CompressedCache | LatentCache, rows: int, *, whole: bool
) -> None:
    gpu.dequantize_and_gather_k_cache(
        make.floats(1, 1, get_layout(plan.layout).head_dim, dtype=torch.bfloat16),
        make.cache(plan),
        make.numbers(1),
        None if whole else make.numbers(1),
        make.table(1),
        plan.block_size,
        0,
        layout=plan.layout,
        launch=replace(make.launch, rows=rows),
    )


def _state_width(plan: CompressedCache) -> int:
    return get_layout(plan.layout).head_dim * (2 if plan.overlap else 1)


def _save_states(make: _Inputs, plan: CompressedCache) -> None:
    width = _state_width(plan)
    gpu.save_partial_states(
        make.floats(1, width),
        make.floats(1, width),
        make.floats(plan.compress_ratio, width),
        make.positions(0),
        make.floats(1, plan.state_block_size, 2 * width),
        make.slots(0),
        compress_ratio=plan.compress_ratio,
        launch=make.launch,
    )


def _compress_plans(plan: CompressedCache) -> tuple[Plan, ...]:
    """Every way in which the compressor's launcher may spread the work."""
    ratio = plan.compress_ratio
    return plans(ratio * (2 if plan.overlap else 1), ratio, get_layout(plan.layout).head_dim)


def _compress(make: _Inputs, plan: CompressedCache, spread: Plan) -> None:
    ratio, rows, width = plan.compress_ratio, plan.state_block_size, _state_width(plan)
    blocks = triton.cdiv(ratio, rows)
    gpu.compress_norm_rope_store(
        make.floats(blocks, rows, 2 * width),
        make.numbers(0),
        make.positions(ratio - 1),
        make.slots(0),
        make.table(blocks),
        make.floats(1, 64),
        make.cache(plan),
        make.slots(0),
        make.weight(get_layout(plan.layout).head_dim),
        1e-6,
        compress_ratio=ratio,
        overlap=plan.overlap,
        layout=plan.layout,
        launch=replace(
            make.launch,
            rows=make.launch.rows or spread.tokens,
            columns=make.launch.columns or spread.columns,
        ),
    )


def _pool_latent(make: _Inputs, plan: LatentCache) -> None:
    ratio = plan.compress_ratio
    gpu.pool_ring_latent(
        make.floats(1, ratio * 512),
        make.positions(1),
        make.floats(1, plan.ring_capacity, 1024) if ratio == 2 else None,
        make.slots(1 % plan.ring_capacity),
        make.numbers(0, 1),
        make.numbers(0),
        make.weight(512),
        1e-6,
        make.floats(1, 512, dtype=torch.bfloat16),
        compress_ratio=ratio,
        launch=make.launch,
    )


def _rope_quant(make: _Inputs, plan: LatentCache, rows: int) -> None:
    gpu.rope_quant_insert(
        make.floats(1, 512, dtype=torch.bfloat16),
        make.positions(plan.compress_ratio - 1),
        make.floats(1, 64),
        make.cache(plan),
        make.slots(0),
        compress_ratio=plan.compress_ratio,
        layout=plan.layout,
        bf16_round_trip=plan.bf16_round_trip,
        launch=replace(make.launch, rows=rows),
    )


def _indices(make: _Inputs, width: int) -> torch.Tensor:
    """One row of local indices, none of them named."""
    return torch.full((1, width), -1, dtype=make.table_type, device=make.device)


def _global(make: _Inputs, plan: IndexPlan) -> None:
    gpu.compute_global_topk_indices_and_lens(
        _indices(make, plan.topk),
        make.numbers(0),
        make.table(1),
        plan.block_size,
        torch.ones(1, dtype=torch.bool, device=make.device),
        launch=make.launch,
    )


def _combine(make: _Inputs, plan: IndexPlan) -> None:
    gpu.combine_topk_swa_indices(
        _indices(make, plan.topk),
        make.numbers(0, 1),
        make.numbers(1),
        make.numbers(1),
        plan.window_size,
        plan.compress_ratio,
        plan.topk,
        2,
        1,
        launch=make.launch,
    )


def _mixed(make: _Inputs, plan: IndexPlan, mode: str) -> None:
    width = plan.topk if plan.decode_width is None else plan.decode_width
    given = None if mode == "absent" else _indices(make, width)
    valid = torch.ones(1, dtype=torch.bool, device=make.device)
    gpu.build_flashinfer_mixed_sparse_indices(
        _indices(make, plan.window_size if plan.swa_width is None else plan.swa_width),
        given,
        make.numbers(0) if mode == "global_lens" else None,
        _indices(make, plan.topk),
        make.numbers(0, 1, 2),
        make.numbers(1, 1),
        make.numbers(0, 1),
        make.table(1).expand(2, 1).contiguous(),
        plan.swa_block_size,
        make.table(1).expand(2, 1).contiguous(),
        plan.block_size,
        plan.window_size,
        plan.compress_ratio,
        plan.topk,
        decode_compressed_indices_are_local=mode == "local",
        decode_is_valid_token=valid if mode == "local" and plan.valid_tokens else None,
        swa_block_span=plan.swa_block_span,
        compressed_block_span=plan.block_span,
        replay_start=make.numbers(0, 0) if plan.replay_start else None,
        launch=make.launch,
    )
