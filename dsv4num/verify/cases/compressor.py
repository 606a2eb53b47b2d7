"""Cases of the compressor: states as an engine leaves them, and values that tell orders apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import get_layout
from dsv4num.reference import build_cos_sin_cache, exp32
from dsv4num.verify.case import (
    BF16,
    Array,
    Case,
    Level,
    any_bf16,
    edge_bf16,
    generator,
    place,
    shuffled_slots,
)
from dsv4num.verify.cases.paged_cache import blank_cache

#: A request in a batch: its first position, and how many tokens of it the batch holds.
Request = tuple[int, int]

_COS = build_cos_sin_cache(8192, theta=160000.0, factor=16.0)


def _normals(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _kv(rng: np.random.Generator, rows: int, columns: int, plain: bool) -> NDArray[np.float32]:
    """kv rows: normal columns, zeros, huge and tiny ones."""
    values = _normals(rng, (rows, columns))
    if plain:
        return values
    kind = rng.integers(0, 8, columns)
    values[:, kind == 0] = 0
    values[:, kind == 1] *= np.float32(1e15)
    values[:, kind == 2] *= np.float32(1e-30)
    return values


def _cancel(
    rng: np.random.Generator,
    at: NDArray[np.int64],
    states: NDArray[np.float32],
    ratio: int,
    step: int,
) -> None:
    """Makes every `step`-th column one whose mean shows how it was computed.

    As many terms of a group stand near +L as near -L, in random order. What is left after the large
    parts cancel depends on what each partial sum rounded off. In every second of these columns the
    scores tie, so that the sums alone decide. In the others the large terms weigh less than those
    that carry no large part, so that products and weights are rounded too.
    """
    width, span = states.shape[1] // 2, max(ratio, 4)
    groups = int(at.max()) // span + 1
    chosen = np.arange(int(rng.integers(0, step)), width, step)  # the same columns of both lanes
    kv, score = states[:, :width], states[:, width:]
    for first, signs in enumerate(([1, -1], [1, -1, 0, 0])):
        columns = chosen[first::2]
        order = rng.permuted(np.tile(np.resize(signs, span), (groups, 1)), axis=1)
        sign = order.ravel()[at].astype(np.float32)[:, None]
        small = _normals(rng, (len(at), len(columns))) * np.float32(100)
        kv[:, columns] = sign * np.float32(2.0**27) + small
        less = rng.random(len(columns), np.float32) * np.float32(first)
        score[:, columns] = 1 - np.abs(sign) * less


def _scores(rng: np.random.Generator, rows: int, columns: int, plain: bool) -> NDArray[np.float32]:
    """Score rows: normal columns, ties, +-1e4, far apart, and -infinity here and there."""
    values = _normals(rng, (rows, columns)) * np.float32(2)
    if plain:
        return values
    kind = rng.integers(0, 6, columns)
    values[:, kind == 0] = 1
    values[:, kind == 1] *= np.float32(5000)
    values[:, kind == 2] *= np.float32(30)
    gone = (kind == 3) & (rng.random((rows, columns)) < 0.5)
    return np.where(gone, np.float32(-np.inf), values)


def _scene(
    rng: np.random.Generator,
    layout_name: str,
    ratio: int,
    overlap: bool,
    requests: list[Request],
    *,
    plain: bool = False,
    padding: int = 0,
    skipped: float = 0.1,
    wide: bool = False,
    cancel: int = 8,
) -> Case:
    """A batch whose state cache holds the rows that its windows need, and NaN everywhere else."""
    layout = get_layout(layout_name)
    dim = layout.head_dim
    width = dim * (2 if overlap else 1)
    window = ratio * (2 if overlap else 1)
    rows = 4 if overlap else 8
    ends = [first + count for first, count in requests]
    columns = -(-max(ends) // rows)
    used = [
        range(max(0, first - window) // rows, -(-end // rows))
        for (first, _), end in zip(requests, ends, strict=True)
    ]
    needed = sum(len(blocks) for blocks in used)
    numbers = rng.permutation(needed + 5)
    state = np.full((needed + 5, rows, 2 * width), np.nan, np.float32)
    table = np.full((len(requests), columns), 2**31 - 1, np.int32)  # never looked at unless used
    for request, blocks in enumerate(used):
        chosen, numbers = numbers[: len(blocks)], numbers[len(blocks) :]
        table[request, blocks.start : blocks.stop] = chosen
        positions = np.arange(max(0, requests[request][0] - window), ends[request])
        states = np.concatenate(
            [_kv(rng, len(positions), width, plain), _scores(rng, len(positions), width, plain)],
            axis=1,
        )
        if not plain or cancel == 1:
            _cancel(rng, positions, states, ratio, cancel)
        state[table[request, positions // rows], positions % rows] = states
    at = np.concatenate(
        [np.arange(first, end) for (first, _), end in zip(requests, ends, strict=True)]
    )
    owner = np.repeat(np.arange(len(requests)), [count for _, count in requests])
    tokens = len(at)
    slots = np.where(rng.random(tokens) < skipped, -1, np.arange(tokens))
    pages = tokens // 16 + 2
    kv_slots = shuffled_slots(rng, tokens, pages * 16, skipped)
    slots = np.concatenate([slots, np.full(padding, -1)])
    weight = _normals(rng, (dim,))
    weight[rng.random(dim) < 0.05] = 0
    placed_state = place(state, (rows * 2 * width + 64, 2 * width, 1) if wide else None)
    arguments = {
        "state_cache": placed_state,
        "token_to_req_indices": place(np.resize(owner, tokens + padding).astype(np.int32)),
        "positions": place(np.resize(at, tokens + padding).astype(np.int64)),
        "slot_mapping": place(slots.astype(np.int64)),
        "block_table": place(table, (columns + 3, 1)),
        "cos_sin_cache": place(_COS[: max(ends) + 1]),
        "kv_cache": blank_cache(
            layout, pages, 16, planar=wide, extra=3 if wide else 0, shift=int(wide)
        ),
        "kv_slot_mapping": place(np.resize(kv_slots, tokens + padding)),
        "rms_norm_weight": place(weight.astype(BF16) if rng.random() < 0.5 else weight),
        "rms_norm_eps": 1e-6,
    }
    keywords: dict[str, Any] = {
        "compress_ratio": ratio,
        "overlap": overlap,
        "layout": layout_name,
        "kv_block_size": 16,
    }
    return Case("", arguments, keywords, ("kv_cache",))


def compress_cases(layout_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `compress_norm_rope_store`."""
    rng = generator(seed, "compress", layout_name)
    full = level == "full"

    def scene(
        name: str,
        ratio: int,
        overlap: bool,
        requests: list[Request],
        *,
        sweep: bool = False,
        **how: Any,
    ) -> Case:
        case = _scene(rng, layout_name, ratio, overlap, requests, **how)
        case.name, case.sweep = name, sweep
        return case

    phases = [(3, 1), (7, 1), (12, 1), (131, 1), (0, 1), (1023, 1), (5, 1), (6, 1)]
    yield scene("csa decode", 4, True, phases, plain=True, padding=3)
    yield scene("csa prefill", 4, True, [(0, 1), (0, 3), (0, 4), (0, 13)])
    yield scene("csa chunks", 4, True, [(5, 6), (2, 2)], wide=True, sweep=True, skipped=0.0)
    yield scene("ratio 1", 1, False, [(0, 3), (9, 1)])
    yield scene("ratio 2, overlap", 2, True, [(0, 5), (9, 2)])
    yield scene("ratio 16", 16, False, [(10, 7), (31, 1)], sweep=full)
    for ratio, overlap in ((4, True), (16, False), (128, False)):
        if ratio == 128 and layout_name != "v4":
            continue
        name = f"order of operations, ratio {ratio}"
        requests = [(ratio - 1, 1), (5 * ratio - 1, 1), (8 * ratio, ratio)]
        # Swept, since the split launches add rows of different threads, and the others of one thread.
        yield scene(name, ratio, overlap, requests, plain=True, skipped=0.0, cancel=1, sweep=True)
    if layout_name == "v4":
        decode = [(127, 1), (255, 1), (130, 1), (1023, 1)]
        yield scene("hca decode", 128, False, decode, skipped=0.0, sweep=True)
        yield scene("hca chunks", 128, False, [(100, 40), (0, 128)], skipped=0.0)

    # NaN and infinity: a column that holds one makes its whole row NaN.
    case = scene("special values", 4, True, [(3, 1), (7, 5), (0, 8)], skipped=0.0)
    state = case.arguments["state_cache"]
    places = rng.integers(0, state.size, state.size // 3000)
    state.reshape(-1)[places] = rng.choice(
        np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32), len(places)
    )
    yield case

    # What the reference refuses, the kernels skip.
    case = scene("values out of range", 4, True, [(3, 1)] * 10, skipped=0.0)
    wild = {
        name: case.arguments[name]
        for name in ("token_to_req_indices", "positions", "kv_slot_mapping")
    }
    wild["token_to_req_indices"][:3] = [10, -1, 2**31 - 1]
    wild["positions"][3:5] = [-1, (1 << 62) - 1]
    wild["kv_slot_mapping"][5:7] = [1 << 40, 32]
    wild_table = case.arguments["block_table"]
    wild_table[7, 0], wild_table[8, 0] = -1, 1 << 20
    tame_slots = place(np.where(np.arange(10) < 9, -1, 9).astype(np.int64))
    tame_positions = np.where(np.arange(10) < 9, 0, 3).astype(np.int64)
    case.reference = {"slot_mapping": tame_slots, "positions": place(tame_positions)}
    yield case

    if full:
        for batch in (1, 2, 16, 256):
            starts = rng.integers(0, 4000, batch)
            yield scene(
                f"csa decode of {batch}", 4, True, [(int(s), 1) for s in starts], plain=True
            )
        for length in (127, 128, 129, 4096):
            yield scene(f"csa prefill of {length}", 4, True, [(0, length)])
        for phase in range(8):
            requests = [(phase, 9), (40 + phase, 9 - phase)]
            yield scene(f"csa chunk at phase {phase}", 4, True, requests, skipped=0.0)
        for ratio, overlap in (
            (2, False),
            (4, False),
            (8, False),
            (8, True),
            (32, False),
            (64, False),
            (256, False),
        ):
            requests = [(0, 2 * ratio), (3 * ratio - 1, 1)]
            yield scene(
                f"ratio {ratio}, {'overlap' if overlap else 'alone'}", ratio, overlap, requests
            )
        if layout_name == "v4":
            for length in (127, 129, 4096):
                yield scene(f"hca prefill of {length}", 128, False, [(0, length)], skipped=0.0)
            starts = rng.integers(0, 4000, 256) | 127
            many = [(int(s), 1) for s in starts[:64]]
            yield scene("hca decode of 64", 128, False, many, skipped=0.0, sweep=True)


def save_states_cases(shape: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `save_partial_states`; the variant is the name of a shape."""
    width, ratio, rows = {"csa": (1024, 4, 4), "hca": (512, 128, 8), "indexer": (256, 4, 4)}[shape]
    rng = generator(seed, "save", shape)
    tokens = 2000 if level == "full" else 37

    def case(name: str, count: int, slots: Array, at: Array, *, wide: int = 0, **more: Any) -> Case:
        blocks = tokens // rows + 3
        bits = rng.integers(0, 1 << 32, (count + 3, width), dtype=np.uint32)
        arguments = {
            "kv": place(bits.view(np.float32), (width + wide, 1)),
            "score": place(_scores(rng, count + 1, width, False), (width + 2 * wide, 1)),
            "ape": place(_normals(rng, (ratio, width)), (width + wide, 1)),
            "positions": place(at),
            "state_cache": place(
                np.zeros((blocks, rows, 2 * width), np.float32),
                (rows * (2 * width + wide) + 5 * wide, 2 * width + wide, 1),
            ),
            "slot_mapping": place(slots),
        }
        return Case(name, arguments, {"compress_ratio": ratio}, ("state_cache",), **more)

    limit = (tokens // rows + 3) * rows
    at = rng.integers(0, 1 << 20, tokens)
    yield case("plain", tokens, shuffled_slots(rng, tokens, limit), at)
    slots = shuffled_slots(rng, 9, limit).astype(np.int32)
    yield case("views", 9, slots, at[:12].astype(np.int32), wide=8, sweep=True)
    yield case("no tokens", 0, np.zeros(0, np.int64), at[:2])
    wild = np.array([0, limit, 1 << 40, 5, 7], np.int64)
    skip = {"slot_mapping": place(np.array([0, -1, -1, -1, 7], np.int64))}
    positions = np.array([1, 2, 3, -1, 4], np.int64)
    yield case("values out of range", 5, wild, positions, reference=skip)


def rope_quant_cases(layout_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `rope_quant_insert`."""
    layout = get_layout(layout_name)
    rng = generator(seed, "rope_quant", layout_name)
    many = 4000 if level == "full" else 60

    def case(
        name: str, latent: Array, at: Array, ratio: int, *, wide: bool = False, **keywords: Any
    ) -> Case:
        tokens = len(at)
        pages = tokens // 16 + 2
        arguments = {
            "latent": place(latent, (512 + 24, 1) if wide else None),
            "positions": place(at),
            "cos_sin_cache": place(_COS, (80, 1) if wide else None),
            "kv_cache": blank_cache(
                layout, pages, 16, planar=wide, extra=3 if wide else 0, shift=int(wide)
            ),
            "slot_mapping": place(shuffled_slots(rng, tokens, pages * 16)),
        }
        named = {"compress_ratio": ratio, "layout": layout_name, "kv_block_size": 16, **keywords}
        return Case(name, arguments, named, ("kv_cache",))

    for ratio in (1, 2):
        for bf16_round_trip in (False, True):
            name = f"ratio {ratio}, {'bf16' if bf16_round_trip else 'fp32'}"
            rows = _normals(rng, (many, 512)).astype(BF16)
            at = rng.integers(0, 8192, many)
            yield case(name, rows, at, ratio, bf16_round_trip=bf16_round_trip)
    yield case("edges", edge_bf16(rng, (many, 512)), rng.integers(0, 8192, many), 1)
    yield case("any bits", any_bf16(rng, (many, 512)), rng.integers(0, 8192, many), 1)
    views = case(
        "views", any_bf16(rng, (20, 512)), rng.integers(0, 8192, 20).astype(np.int32), 2, wide=True
    )
    views.sweep = True
    yield views
    wild = case("values out of range", any_bf16(rng, (8, 512)), rng.integers(0, 8192, 8), 1)
    slots = wild.arguments["slot_mapping"]
    slots[:] = [0, 1, 2, 3, 32, 1 << 33, -1, 7]
    wild.arguments["positions"][:2] = [-1, 8192]
    wild.reference = {
        "slot_mapping": place(np.array([-1, -1, 2, 3, -1, -1, -1, 7], np.int64)),
    }
    yield wild


def ring_cases(variant: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `pool_ring_latent`; the variant is "ratio1" or "ratio2"."""
    ratio = int(variant.removeprefix("ratio"))
    rng = generator(seed, "ring", variant)
    capacity = 4

    def case(
        name: str, chunks: list[Request], *, capacity: int = capacity, hidden: int = 0
    ) -> Case:
        counts = [count for _, count in chunks]
        owner = np.repeat(np.arange(len(chunks)), counts)
        at = np.concatenate([np.arange(first, first + count) for first, count in chunks])
        blocks = rng.permutation(len(chunks) + 2)[owner]
        slots = (blocks * capacity + at % capacity).astype(np.int64)
        slots[:hidden] = -1
        tokens = len(owner)
        kv = _kv(rng, tokens + 1, 512, False)
        score = _scores(rng, tokens + 1, 512, False)
        ring = _normals(rng, (len(chunks) + 2, capacity, 1024))
        # Every eighth column: a light first row and a heavy second one cancel, but for what the
        # product and the weights rounded off.
        chosen = np.arange(3, 512, 8)
        less, odd = rng.random(len(chosen), np.float32), np.resize(at, tokens + 1)[:, None] % 2 == 1
        large = np.where(odd, -exp32(-less), np.float32(1)) * np.float32(2.0**27)
        kv[:, chosen] = large + _normals(rng, large.shape) * np.float32(100)
        score[:, chosen] = np.where(odd, np.float32(1), 1 - less)
        ring[..., chosen] += np.float32(2.0**27)
        ring[..., 512 + chosen] = 1 - less
        rows = np.concatenate([kv, score], axis=1) if ratio == 2 else kv
        ring[0] = np.nan
        arguments = {
            "kv_score": place(rows, (rows.shape[1] + 8, 1)),
            "positions": place(at.astype(np.int64)),
            "state_cache": place(ring, (capacity * 1040 + 16, 1040, 1)),
            "slot_mapping": place(slots),
            "query_start_loc": place(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            "token_to_req_indices": place(owner.astype(np.int32)),
            "rms_norm_weight": place(_normals(rng, (512,)).astype(BF16)),
            "rms_norm_eps": 1e-6,
            "latent_out": place(np.zeros((tokens + 1, 512), BF16), (520, 1)),
        }
        updated = ("state_cache",)
        return Case(name, arguments, {"compress_ratio": ratio}, ("latent_out",), updated)

    yield case("decode", [(7, 1), (8, 1), (1, 1), (1001, 1)])
    yield case("chunks", [(0, 5), (5, 3), (7, 8), (3, 1), (2, 2)])
    yield case("one row of ring", [(1, 1), (2, 4), (0, 0), (5, 3)], capacity=1)
    yield case("hidden prefix", [(4, 9)], hidden=3)
    yield case("no tokens", [(0, 0)])
    if level == "full":
        for first in range(5):
            for count in (1, 2, 3, 4, 5, 8, 9):
                yield case(f"chunk {first}+{count}", [(first, count), (first + 2, count)])
        yield case("prefill", [(0, 4096), (17, 333)], capacity=8)
    if ratio == 2:
        wild = case("values out of range", [(1, 1), (3, 1), (5, 1), (7, 1), (9, 1)])
        wild.arguments["slot_mapping"][1] = 1 << 40
        wild.arguments["token_to_req_indices"][2] = 5
        wild.arguments["token_to_req_indices"][3] = -1
        wild.arguments["positions"][4] = -3
        tame = wild.arguments["slot_mapping"].copy()
        tame[1:] = -1
        wild.reference = {"slot_mapping": place(tame)}
        yield wild
