"""What is timed: an operation on inputs of one size, and the bytes that it cannot avoid moving.

The bytes of a call are each input element that its result depends on, read once, and each output
element, written once. Scratch, second looks and padding that nobody reads are not counted, so that
bytes over time is what a caller gets, and its share of the copy rate says how much is left to gain.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from dsv4num.formats import LAYOUTS, Layout
from dsv4num.gpu import Launch

BUILT_IN = Launch()
PAGE = 64  # rows per page of every cache here
ROPE_ENTRY = 64 * 4  # bytes of a row of the cosine table


class Traffic(NamedTuple):
    """Bytes read once and bytes written once."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both."""
        return self.read + self.written


@dataclass(frozen=True)
class Call:
    """One call of an operation.

    Attributes:
        operation: its name in `dsv4num.gpu`.
        arguments: by position.
        keywords: by name.
        traffic: the bytes that it cannot avoid moving.
    """

    operation: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    traffic: Traffic


class Maker:
    """Random inputs on a device; the same seed gives the same inputs."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal values."""
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.random)

    def codes(self, layout: Layout, pages: int) -> torch.Tensor:
        """A cache of random bytes, [pages, PAGE, row bytes]: every byte is some record's."""
        stride = layout.page_bytes(PAGE)
        raw = torch.randint(
            256, (pages, stride), dtype=torch.uint8, device=self.device, generator=self.random
        )
        return raw.as_strided((pages, PAGE, layout.row_bytes), (stride, layout.row_bytes, 1))

    def integers(self, end: int, *shape: int) -> torch.Tensor:
        """Int32 values below `end`."""
        return torch.randint(
            end, shape, dtype=torch.int32, device=self.device, generator=self.random
        )

    def order(self, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """0..count-1 in random order."""
        return torch.randperm(count, device=self.device, generator=self.random).to(dtype)

    def full(self, value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """One value."""
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def span(self, start: int, end: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """start..end-1."""
        return torch.arange(start, end, device=self.device, dtype=dtype)


# Insert and gather


def insert_traffic(layout: Layout, tokens: int) -> Traffic:
    """bf16 rows and int64 slots in, records out."""
    return Traffic(tokens * (2 * layout.head_dim + 8), tokens * layout.row_bytes)


def insert(make: Maker, *, layout: str, tokens: int) -> Call:
    """Rows into random slots of a cache that has just room for them."""
    chosen = LAYOUTS[layout]
    pages = math.ceil(tokens / PAGE)
    return Call(
        "quantize_and_insert_k_cache",
        (
            make.normal(tokens, chosen.head_dim, dtype=torch.bfloat16),
            make.codes(chosen, pages),
            make.order(pages * PAGE)[:tokens],
            PAGE,
        ),
        {"layout": layout},
        insert_traffic(chosen, tokens),
    )


def gather_traffic(layout: Layout, requests: int, rows: int) -> Traffic:
    """Records without their pad, a length per request and a table entry per page in, rows out."""
    pad = layout.field("pad")
    record = layout.row_bytes - (pad.nbytes if pad else 0)
    pages = requests * math.ceil(rows / PAGE)
    return Traffic(
        requests * rows * record + 4 * (requests + pages), requests * rows * 2 * layout.head_dim
    )


def gather(make: Maker, *, layout: str, requests: int, rows: int) -> Call:
    """Whole sequences, their pages scattered over the cache."""
    chosen = LAYOUTS[layout]
    pages = math.ceil(rows / PAGE)
    table = make.order(requests * pages, torch.int32).view(requests, pages)
    return Call(
        "dequantize_and_gather_k_cache",
        (
            make.normal(requests, rows, chosen.head_dim, dtype=torch.bfloat16),
            make.codes(chosen, requests * pages),
            make.full(rows, requests),
            None,
            table,
            PAGE,
            0,
        ),
        {"layout": layout},
        gather_traffic(chosen, requests, rows),
    )


# The compressor


def compress_traffic(
    layout: Layout,
    ratio: int,
    overlap: bool,
    state_rows: int,
    requests: int,
    first: int,
    count: int,
) -> Traffic:
    """What the windows that end here read, and their records.

    A state element belongs to one window only, also with overlap: a row's first half is read by the
    group after its own, its second half by its own. Rows before position 0 are not there.

    Args:
        layout: the records that are written.
        ratio: tokens per group.
        overlap: whether the group before is pooled too.
        state_rows: rows per block of the state cache.
        requests: all alike.
        first: the first position of a request in this call.
        count: its tokens in this call.
    """
    window = ratio * (2 if overlap else 1)
    ends = [p for p in range(first, first + count) if (p + 1) % ratio == 0]
    state = sum(min(p + 1, window) for p in ends) * 2 * layout.head_dim * 4
    blocks = ends[-1] // state_rows - max(0, ends[0] + 1 - window) // state_rows + 1 if ends else 0
    per_token = count * 3 * 8  # position, state slot, kv slot
    per_group = len(ends) * 4  # request
    read = requests * (state + blocks * 4 + per_token + per_group)
    read += len(ends) * ROPE_ENTRY + 2 * layout.head_dim  # the requests share these
    return Traffic(read, requests * len(ends) * layout.row_bytes)


def compress(
    make: Maker,
    *,
    layout: str,
    ratio: int,
    overlap: bool,
    requests: int,
    count: int,
    first: int = 0,
) -> Call:
    """Requests alike, `count` tokens each from position `first` on, states scattered over blocks."""
    chosen = LAYOUTS[layout]
    state_rows = 4 if overlap else 8
    width = chosen.head_dim * (2 if overlap else 1)
    window = ratio * (2 if overlap else 1)
    end = first + count
    columns = math.ceil(end / state_rows)
    used = range(max(0, first + 1 - window) // state_rows, columns)
    table = make.full(0, requests, columns)
    table[:, used.start :] = make.order(requests * len(used), torch.int32).view(requests, -1)
    positions = make.span(first, end).repeat(requests)
    groups = (positions + 1) % ratio == 0
    number = int(groups.sum())
    pages = math.ceil(number / PAGE)
    kv_slots = make.full(-1, len(positions), dtype=torch.int64)
    kv_slots[groups] = make.order(pages * PAGE)[:number]
    return Call(
        "compress_norm_rope_store",
        (
            make.normal(requests * len(used), state_rows, 2 * width),
            make.span(0, requests, torch.int32).repeat_interleave(count),
            positions,
            make.span(0, requests * count),
            table,
            make.normal(end, 64),
            make.codes(chosen, pages),
            kv_slots,
            make.normal(chosen.head_dim, dtype=torch.bfloat16),
            1e-6,
        ),
        {"compress_ratio": ratio, "overlap": overlap, "layout": layout},
        compress_traffic(chosen, ratio, overlap, state_rows, requests, first, count),
    )


def save_states_traffic(width: int, ratio: int, tokens: int) -> Traffic:
    """kv, score, position and slot per token and the biases in; kv and score out."""
    return Traffic(tokens * (2 * width * 4 + 16) + ratio * width * 4, tokens * 2 * width * 4)


def save_states(make: Maker, *, width: int, ratio: int, state_rows: int, tokens: int) -> Call:
    """States into random blocks, the rows of a block in order."""
    blocks = math.ceil(tokens / state_rows)
    slots = make.order(blocks)[:, None] * state_rows + make.span(0, state_rows)
    return Call(
        "save_partial_states",
        (
            make.normal(tokens, width),
            make.normal(tokens, width),
            make.normal(ratio, width),
            make.span(0, tokens),
            make.normal(blocks, state_rows, 2 * width),
            slots.flatten()[:tokens],
        ),
        {"compress_ratio": ratio},
        save_states_traffic(width, ratio, tokens),
    )


def rope_quant_traffic(layout: Layout, ratio: int, requests: int, count: int) -> Traffic:
    """Latents that end a group, positions, slots and cosine rows in; records out."""
    groups = count // ratio
    read = requests * (groups * 2 * layout.head_dim + count * 16) + groups * ROPE_ENTRY
    return Traffic(read, requests * groups * layout.row_bytes)


def rope_quant(make: Maker, *, layout: str, ratio: int, requests: int, count: int) -> Call:
    """Requests alike, from position 0 on; only tokens that end a group have a slot."""
    chosen = LAYOUTS[layout]
    positions = make.span(0, count).repeat(requests)
    groups = (positions + 1) % ratio == 0
    number = int(groups.sum())
    pages = math.ceil(number / PAGE)
    slots = make.full(-1, len(positions), dtype=torch.int64)
    slots[groups] = make.order(pages * PAGE)[:number]
    return Call(
        "rope_quant_insert",
        (
            make.normal(len(positions), chosen.head_dim, dtype=torch.bfloat16),
            positions,
            make.normal(count, 64),
            make.codes(chosen, pages),
            slots,
        ),
        {"compress_ratio": ratio, "layout": layout},
        rope_quant_traffic(chosen, ratio, requests, count),
    )


def pool_ring_traffic(ratio: int, capacity: int, requests: int, count: int) -> Traffic:
    """Rows, positions and slots in; latents, and of ratio 2 the last rows of a chunk, out."""
    row = 512 * 4 * ratio
    per_token = row + 8 + 8 + (4 if ratio == 2 else 0)  # position, slot, request
    written = count // ratio * 1024 + (min(count, capacity) * row if ratio == 2 else 0)
    starts = 4 * (requests + 1) if ratio == 2 else 0
    return Traffic(requests * count * per_token + starts + 1024, requests * written)


def pool_ring(make: Maker, *, ratio: int, requests: int, count: int) -> Call:
    """Chunks alike, from position 0 on."""
    capacity = 4
    positions = make.span(0, count).repeat(requests)
    owner = make.span(0, requests).repeat_interleave(count)
    return Call(
        "pool_ring_latent",
        (
            make.normal(requests * count, 512 * ratio),
            positions,
            make.normal(requests, capacity, 1024) if ratio == 2 else None,
            owner * capacity + positions % capacity,
            make.span(0, requests + 1, torch.int32) * count,
            owner.to(torch.int32),
            make.normal(512, dtype=torch.bfloat16),
            1e-6,
            make.normal(requests * count, 512, dtype=torch.bfloat16),
        ),
        {"compress_ratio": ratio},
        pool_ring_traffic(ratio, capacity, requests, count),
    )


# Sparse indices: every token is far enough into its sequence to have all of its indices.


def global_topk_traffic(tokens: int, topk: int, requests: int, pages: int) -> Traffic:
    """Indices, request and validity per token and the table in; slots and a length out."""
    return Traffic(tokens * (4 * topk + 5) + 4 * requests * pages, tokens * (4 * topk + 4))


def global_topk(make: Maker, *, topk: int, requests: int, count: int) -> Call:
    """Each token names `topk` of 16,384 compressed rows."""
    pages = 256
    tokens = requests * count
    return Call(
        "compute_global_topk_indices_and_lens",
        (
            make.integers(pages * PAGE, tokens, topk),
            make.span(0, requests, torch.int32).repeat_interleave(count),
            make.order(requests * pages, torch.int32).view(requests, pages),
            PAGE,
            make.full(1, tokens, dtype=torch.bool),
        ),
        {},
        global_topk_traffic(tokens, topk, requests, pages),
    )


def combine_traffic(tokens: int, topk: int, window: int, requests: int) -> Traffic:
    """Indices, starts and two lengths per request in; rows and a length out."""
    columns = math.ceil((topk + window) / 128) * 128
    return Traffic(tokens * 4 * topk + 4 * (3 * requests + 1), tokens * 4 * (columns + 1))


def combine(make: Maker, *, topk: int, window: int, requests: int, count: int) -> Call:
    """The last `count` tokens of long sequences."""
    ratio, compressed = 4, 2 * topk
    gathered = count + window - 1
    return Call(
        "combine_topk_swa_indices",
        (
            make.integers(compressed, requests * count, topk),
            make.span(0, requests + 1, torch.int32) * count,
            make.full(ratio * compressed + count, requests),
            make.full(gathered, requests),
            window,
            ratio,
            topk,
            compressed + gathered,
            compressed,
        ),
        {},
        combine_traffic(requests * count, topk, window, requests),
    )


def mixed_traffic(
    decode: int, requests: int, count: int, topk: int, window: int, pages: int
) -> Traffic:
    """All that `mixed` reads.

    A decode token reads its window slots and its local indices, a prefill token its indices; every
    token its request. Tables are read where windows and indices are: the compressed pages of all
    requests, the window pages of the prefill ones.
    """
    tokens = decode + requests * count
    read = decode * 4 * window + tokens * (4 * topk + 4) + decode  # and a validity per decode token
    read += 4 * (decode + requests) * pages
    read += 4 * requests * (math.ceil((count + window - 1) / PAGE) + 1)
    read += 4 * (requests + 1 + 1 + requests)  # starts and lengths of the prefill ones, the origin
    return Traffic(read, tokens * 4 * (window + topk + 1))


def mixed(make: Maker, *, topk: int, window: int, decode: int, requests: int, count: int) -> Call:
    """Decode tokens with local indices, then the last `count` tokens of long prompts."""
    ratio = 4
    compressed = 2 * topk  # rows that may be named
    pages = compressed // PAGE
    length = ratio * compressed + count
    every = decode + requests
    owner = make.span(0, every, torch.int32)
    counts = torch.cat([make.full(1, decode), make.full(count, requests)])
    starts = torch.cat([make.full(0, 1), counts.cumsum(0).to(torch.int32)])
    swa_pages = math.ceil(length / PAGE)
    return Call(
        "build_flashinfer_mixed_sparse_indices",
        (
            make.integers(every * swa_pages * PAGE, decode, window),
            make.integers(compressed, decode, topk),
            None,
            make.integers(compressed, requests * count, topk),
            starts,
            make.full(length, every),
            owner.repeat_interleave(counts),
            make.order(every * swa_pages, torch.int32).view(every, swa_pages),
            PAGE,
            make.order(every * pages, torch.int32).view(every, pages),
            PAGE,
            window,
            ratio,
            topk,
        ),
        {
            "decode_compressed_indices_are_local": True,
            "decode_is_valid_token": make.full(1, decode, dtype=torch.bool),
        },
        mixed_traffic(decode, requests, count, topk, window, pages),
    )


# The list


@dataclass(frozen=True)
class Scene:
    """An operation at one size.

    Attributes:
        name: what `--op` selects.
        size: for people.
        small: whether launching dominates: timed in graphs only, and compared with an empty kernel.
        build: makes a call.
        sizes: its keywords.
        few: the keywords that make it tiny, for the interpreter.
        goal: the share of the copy rate to reach; for small sizes, microseconds above an empty
            kernel and the time of the bytes, or in all where `in_all`.
        in_all: see goal.
        launch: how it is launched.
    """

    name: str
    size: str
    small: bool
    build: Callable[..., Call]
    sizes: dict[str, Any]
    few: dict[str, Any]
    goal: float | None = None
    in_all: bool = False
    launch: Launch = BUILT_IN

    @property
    def key(self) -> str:
        """The name with the size."""
        return f"{self.name}, {self.size}"

    def make(self, maker: Maker, *, tiny: bool = False) -> Call:
        """A call on inputs of its own."""
        return self.build(maker, **(self.sizes | self.few if tiny else self.sizes))


CSA = {"layout": "v4", "ratio": 4, "overlap": True}
HCA = {"layout": "v4", "ratio": 128, "overlap": False}
FP8 = {"layout": "indexer_fp8", "ratio": 4, "overlap": True}
MXFP4 = {"layout": "indexer_mxfp4", "ratio": 4, "overlap": True}


def _large() -> list[Scene]:
    scenes = []

    def add(
        name: str,
        size: str,
        build: Callable[..., Call],
        sizes: dict[str, Any],
        few: dict[str, Any],
        goal: float | None = None,
        launch: Launch = BUILT_IN,
    ) -> None:
        scenes.append(Scene(name, size, False, build, sizes, few, goal, launch=launch))

    some = {"tokens": 3}
    for name, layout, goal, launch in (
        ("insert_v4", "v4", 0.90, BUILT_IN),
        ("insert_v4_portable", "v4", 0.80, Launch(path="portable")),
        ("insert_mxfp8", "v41_mxfp8", 0.90, BUILT_IN),
        ("insert_nvfp4", "v41_nvfp4", None, BUILT_IN),
    ):
        sizes = {"layout": layout, "tokens": 131072}
        add(name, "131,072 rows", insert, sizes, some, goal, launch)
    for name, layout, goal in (
        ("gather_v4", "v4", 0.88),
        ("gather_mxfp8", "v41_mxfp8", 0.88),
        ("gather_nvfp4", "v41_nvfp4", 0.85),
    ):
        sizes = {"layout": layout, "requests": 64, "rows": 2048}
        add(name, "64 x 2,048 rows", gather, sizes, {"requests": 2, "rows": 3}, goal)
    chunk = {"requests": 16, "count": 4096}
    for name, kind, goal in (
        ("compress_csa", CSA, 0.87),
        ("compress_hca", HCA, 0.82),
        ("compress_indexer_fp8", FP8, 0.80),
        ("compress_indexer_mxfp4", MXFP4, 0.80),
    ):
        few = {"requests": 1, "count": 2 * kind["ratio"]}
        add(name, "65,536 tokens", compress, kind | chunk, few, goal)
    few = {"requests": 1, "count": 8}
    add("compress_csa", "2,048 tokens", compress, CSA | {"requests": 1, "count": 2048}, few)
    few = {"requests": 1, "count": 256}
    add("compress_hca", "8,192 tokens", compress, HCA | chunk | {"requests": 2}, few, 0.50)
    for name, layout in (("rope_quant_mxfp8", "v41_mxfp8"), ("rope_quant_nvfp4", "v41_nvfp4")):
        for ratio in (1, 2):
            sizes = {"layout": layout, "ratio": ratio, "requests": 64, "count": 2048}
            few = {"requests": 2, "count": 4}
            add(name, f"131,072 tokens, ratio {ratio}", rope_quant, sizes, few, 0.85)
    sizes = {"topk": 2048, "requests": 4, "count": 2048}
    few = {"requests": 2, "count": 2}
    add("global_topk", "8,192 x 2,048", global_topk, sizes, few, 0.88)
    add("combine", "8,192 x 2,048 + 128", combine, sizes | {"window": 128}, few, 0.75)
    sizes = {"topk": 2048, "window": 128, "decode": 128, "requests": 4, "count": 2016}
    add("mixed", "8,192 x 2,048 + 128", mixed, sizes, {"decode": 2} | few, 0.75)
    for name, width, ratio, rows in (("save_csa", 1024, 4, 4), ("save_hca", 512, 128, 8)):
        sizes = {"width": width, "ratio": ratio, "state_rows": rows, "tokens": 65536}
        add(name, "65,536 tokens", save_states, sizes, some)
    for ratio in (1, 2):
        sizes = {"ratio": ratio, "requests": 16, "count": 4096}
        add("pool_ring", f"65,536 tokens, ratio {ratio}", pool_ring, sizes, few)
    return scenes


def _small() -> list[Scene]:
    scenes = []
    for n in (1, 8, 64):
        tokens = f"{n} token{'s' if n > 1 else ''}"
        sizes = {"layout": "v4", "tokens": n}
        scenes.append(Scene("insert_v4", tokens, True, insert, sizes, {"tokens": 1}, 1.0))
        sizes = {"layout": "v4", "requests": n, "rows": 1}
        scenes.append(Scene("gather_v4", tokens, True, gather, sizes, {"requests": 1}, 1.0))
        for name, kind, goal in (("compress_csa", CSA, 1.0), ("compress_hca", HCA, 12.0)):
            sizes = kind | {"requests": n, "first": 1023, "count": 1}
            in_all = name == "compress_hca"
            scenes.append(
                Scene(
                    name,
                    f"{tokens}, ending",
                    True,
                    compress,
                    sizes,
                    {"requests": 1},
                    goal if n == 1 or not in_all else None,
                    in_all,
                )
            )
    return sorted(scenes, key=lambda scene: scene.name)


SCENES = tuple(_large() + _small())


# Calls of this package, and of another module


def bind(module: ModuleType, call: Call, launch: Launch | None = None) -> Callable[[], object]:
    """The call of a module: one with this package's names and keywords, or the seeds' (`seed_api`).

    Raises:
        LookupError: the module has no such operation.
    """
    function = getattr(module, call.operation, None)
    if function is not None and call.keywords.keys() <= _parameters(function):
        more = {} if launch is None else {"launch": launch}
        return partial(function, *call.arguments, **call.keywords, **more)
    layout = LAYOUTS[call.keywords["layout"]] if "layout" in call.keywords else None
    if function is not None and call.operation == "quantize_and_insert_k_cache":
        assert layout is not None
        return partial(function, *call.arguments, bytes_per_token=layout.row_bytes)
    if function is not None and call.operation == "dequantize_and_gather_k_cache":
        return partial(function, *call.arguments)
    if layout is not None and call.operation == "compress_norm_rope_store":
        return _bind_seed_compress(module, call, layout)
    raise LookupError(f"{module.__name__} has no {call.operation}")


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _bind_seed_compress(module: ModuleType, call: Call, layout: Layout) -> Callable[[], object]:
    """The seeds' compressor: two stages for windows of more than eight rows, where there are two."""
    state, requests, positions, slots, table, cos, cache, kv_slots, weight, eps = call.arguments
    ratio, overlap = call.keywords["compress_ratio"], call.keywords["overlap"]
    tokens = len(positions)
    one = getattr(module, "compress_norm_rope_store_triton", None)
    two = getattr(module, "compress_norm_rope_store_two_stage_triton", None)
    function, more = one, ()
    if two is not None and (one is None or ratio * (1 + overlap) > 8):
        scratch = torch.empty((tokens, layout.head_dim), device=state.device)
        function, more = two, (0, scratch)
    if function is None:
        raise LookupError(f"{module.__name__} has no {call.operation}")
    rule = layout.planes[0].fields[0].rule
    assert rule is not None
    return partial(
        function,
        state,
        tokens,
        requests,
        positions,
        slots,
        table,
        state.shape[1],
        state.shape[2] // 2,
        cos,
        cache,
        SimpleNamespace(slot_mapping=kv_slots),
        {},
        layout.head_dim,
        64,
        ratio,
        overlap,
        layout.name == "indexer_mxfp4",
        weight,
        eps,
        rule.group,
        layout.planes[0].row_bytes,
        layout.planes[1].row_bytes,
        *more,
    )
