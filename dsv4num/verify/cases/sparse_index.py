"""Cases of the sparse index builders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsv4num.verify.case import Array, Case, Level, generator, int32, int64, place

#: What a kernel does where the reference refuses, for cases that hold such values.
SKIP = {"out_of_range": "skip"}

INT32_MAX = (1 << 31) - 1
WILD32 = (-5, -1, -(1 << 31), INT32_MAX, INT32_MAX - 63, 1 << 26, 700)
WILD64 = (*WILD32, 1 << 31, 1 << 32, 1 << 40, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63))


def holed(rng: np.random.Generator, values: Array, share: float = 0.2) -> Array:
    """Some entries -1, or another number below 0."""
    below = rng.choice(int64([-1, -1, -1, -7, -(1 << 31)]), values.shape)
    found: Array = np.where(rng.random(values.shape) < share, below, values).astype(values.dtype)
    return found


def wild(rng: np.random.Generator, values: Array, share: float) -> Array:
    """Some entries far out of range, of either sign."""
    kinds = np.array(WILD64 if values.dtype == np.int64 else WILD32, values.dtype)
    where = rng.random(values.shape) < share
    found: Array = np.where(where, rng.choice(kinds, values.shape), values)
    return found


def wider(values: Array, extra: int, shift: int = 0) -> Array:
    """Rows of a wider matrix, `extra` entries further apart; the first is off its alignment."""
    return place(values, (values.shape[1] + extra, 1), shift)


def starts_of(queries: Sequence[int], base: int = 0) -> Array:
    """`query_start_loc` of query lengths."""
    return base + np.concatenate([int64([0]), np.cumsum(int64(list(queries)))])


def requests_of(queries: Sequence[int]) -> Array:
    """The request of every token."""
    return np.repeat(np.arange(len(queries)), queries)


def global_topk_cases(variant: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `compute_global_topk_indices_and_lens`; a variant is a block size."""
    size = int(variant.removeprefix("bs"))
    rng = generator(seed, "global_topk", variant)

    def case(
        name: str,
        local: Array,
        requests: Array,
        table: Array,
        valid: Array | None = None,
        *,
        gap: int = 0,
        **more: Any,
    ) -> Case:
        if valid is None:
            valid = rng.random(len(local)) < 0.8
        shift = 8 * (gap > 0)
        arguments = {
            "topk_indices": wider(local, gap, shift),
            "token_to_req_indices": place(requests),
            "block_table": wider(table, gap // 2, shift),
            "block_size": size,
            "is_valid_token": place(valid),
        }
        return Case(name, arguments, **more)

    def inputs(tokens: int, width: int, requests: int, pages: int) -> tuple[Array, Array, Array]:
        local = holed(rng, rng.integers(0, pages * size, (tokens, width)).astype(np.int32))
        table = rng.integers(0, 1 << 14, (requests, pages)).astype(np.int32)
        return local, rng.integers(0, requests, tokens).astype(np.int32), table

    many = 4096 if level == "full" else 4
    yield case("top-k 512", *inputs(many, 512, 5, 9), sweep=True)
    yield case("top-k 2048", *inputs(many // 2, 2048, 3, 40))
    local, requests, table = inputs(5, 133, 4, 7)
    yield case(
        "views",
        local.astype(np.int64),
        np.append(requests, [99, -3]).astype(np.int64),
        table.astype(np.int64),
        np.append(rng.random(5) < 0.5, [True, False]),
        gap=11,
    )
    local, requests, table = inputs(4, 64, 4, 7)
    yield case("int32 and int64", local.astype(np.int64), requests, table, gap=3)
    yield case("nothing valid", *inputs(2, 64, 2, 3), np.zeros(2, np.bool_))
    yield case("all below 0", np.full((2, 70), -1, np.int32), int32([0, 1]), table)
    yield case("no tokens", *inputs(0, 64, 2, 3))
    yield case("no columns", *inputs(3, 0, 2, 3))
    yield case("one column", *inputs(3, 1, 2, 3))

    # Slots up to the last of int32, and those of one page more.
    top = (1 << 31) // size
    places = np.unique([page * size + row for page in range(3) for row in (0, 1 % size, size - 1)])
    pages = int64([top - 1, 0, min(top, INT32_MAX)])[None]
    yield case("last slots", places[None], int32([0]), pages, np.ones(1, np.bool_), reference=SKIP)

    # What the reference refuses is -1: requests, places beyond the table, pages, slots.
    local, requests, table = inputs(10, 96, 4, 5)
    for name, kind in (("wild int32", np.int32), ("wild int64", np.int64)):
        yield case(
            name,
            wild(rng, local.astype(kind), 0.3),
            wild(rng, requests.astype(kind), 0.3),
            wild(rng, table.astype(kind), 0.3),
            gap=4,
            reference=SKIP,
        )
    beyond = np.arange(-3, 5 * size + 6)[None, -300:].astype(np.int32)
    yield case("around the table's end", beyond, int32([3]), table, reference=SKIP)
    none = np.zeros((4, 0), np.int32)
    yield case("a table without columns", local, requests, none, reference=SKIP)
    yield case("no requests", local, requests, np.zeros((0, 5), np.int32), reference=SKIP)

    if level == "full":
        yield case("long sequences", *inputs(512, 2048, 64, (1 << 20) // size))
        for width in (1, 3, 127, 1023, 1024, 1025, 4100):
            yield case(f"width {width}", *inputs(257, width, 9, 33))


def combine_cases(variant: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `combine_topk_swa_indices`; a variant is a ratio."""
    ratio = int(variant.removeprefix("ratio"))
    rng = generator(seed, "combine", variant)

    def case(
        name: str,
        queries: Sequence[int],
        seq_lens: Array,
        *,
        gathered: Array | None = None,
        topk: int = 64,
        window: int = 128,
        base: int = 0,
        extra_tokens: int = 0,
        dtype: type = np.int32,
        starts: Array | None = None,
        rows: int | None = None,
        compressed: int | None = None,
        share: float = 0.0,
        shift: int = 0,
        **more: Any,
    ) -> Case:
        tokens = sum(queries) + extra_tokens
        if gathered is None:
            # Production gathers the query and what its windows reach back to.
            gathered = np.minimum(seq_lens, int64(list(queries)) + window - 1)
        if compressed is None:
            compressed = int(seq_lens.max(initial=0)) // ratio if ratio else 0
        if rows is None:
            rows = compressed + int(gathered.max(initial=0))
        local = holed(rng, rng.integers(0, compressed + 2, (tokens, topk + shift)).astype(dtype))
        local = wild(rng, local, share)
        arguments = {
            "topk_indices": wider(local, shift, 8 * (shift > 0)),
            "query_start_loc": place(starts_of(queries, base) if starts is None else starts),
            "seq_lens": place(seq_lens.astype(dtype)),
            "gather_lens": place(gathered.astype(dtype)),
            "window_size": window,
            "compress_ratio": ratio,
            "topk": topk,
            "M": rows,
            "N": compressed,
        }
        return Case(name, arguments, **more)

    long = 30 if level == "full" else 1
    lens = int64([700, 3, 260, 129])
    yield case("prefill", [2 * long, 2, 3 * long, 1], lens, topk=512, sweep=long > 1)
    decode = [1] * (300 if level == "full" else 7)
    positions = int64([1, 2, 4, 127, 128, 129, 4096])
    yield case("decode", decode, np.resize(positions, len(decode)), topk=64)
    # A query of the first tokens, over positions where the count of compressed rows steps.
    yield case("from the start", [9 * long], int64([9 * long]), topk=6, window=5)
    yield case(
        "chunk",
        [3, 0, 0, 4],
        int64([300, 0, 9, 40]),
        base=7777,
        extra_tokens=2,
        dtype=np.int64,
        topk=133,
        window=130,
        shift=3,
    )
    far = int32([1 << 30, (1 << 30) + 3])
    yield case("int32 starts", [3], int64([50]), starts=far, topk=6, window=3, sweep=True)
    yield case("window only", [4, 3], int64([4, 200]), topk=0, window=128, compressed=0)
    yield case("window of one", [4], int64([9]), topk=3, window=1)
    yield case("wide window", [3], int64([2000]), topk=2, window=1300)
    short = int64([1, 0, 2])
    yield case("queries longer than sequences", [3, 2, 4], short, gathered=short, topk=4, window=8)
    zero = int64([0, 0])
    yield case("nothing gathered", [2, 2], int64([9, 2]), gathered=zero, topk=4, window=8)
    yield case("no tokens", [], int64([]), topk=16)
    yield case("tokens of no request", [], int64([]), topk=16, extra_tokens=2)
    yield case("empty queries", [0, 0], int64([5, 6]), topk=16, extra_tokens=1)
    many = 20000 if level == "full" else 135
    queries = [0] * many
    queries[many // 2], queries[3], queries[-1] = 2, 2, 1
    yield case("many requests", queries, np.full(many, 40), topk=4, window=4)

    # Rows up to the last of int32, and beyond.
    half = (1 << 30) + 100
    lens, one = int64([40, 41, 42]), int64([30, 40, 20])
    yield case(
        "rows beyond int32", [2, 2, 2], lens, gathered=one, rows=half, topk=8, reference=SKIP
    )
    last = int64([5, 128])
    limit = (1 << 30) + 5  # the second request has its last rows beyond int32
    yield case(
        *("last rows", [1, 2], int64([5, 128])),
        gathered=last,
        rows=limit,
        compressed=limit - 128,
        topk=8,
        reference=SKIP,
    )
    # Lengths as they come: what does not exist is -1, and nothing outside is read.
    for name, kind in (("wild int32", np.int32), ("wild int64", np.int64)):
        for number in range(2):
            lens = int64([40, 90, 300, 7, 1])
            yield case(
                f"{name} {number}",
                [2, 3, 0, 1, 1],
                wild(rng, lens.astype(kind), 0.4),
                gathered=wild(rng, np.minimum(lens, 50).astype(kind), 0.4),
                rows=70,
                compressed=20,
                topk=9,
                window=17,
                dtype=kind,
                share=0.3,
                shift=1,
                reference=SKIP,
            )
    few = int64([9, 9])
    yield case(
        "rows fewer than gathered", [2, 2], few, gathered=few, rows=12, topk=4, compressed=6,
        window=8, reference=SKIP,
    )  # fmt: skip
    ends = int64([0, 2, 1 << 62])
    yield case("endless query", [2, 2], few, starts=ends, topk=4, window=8, reference=SKIP)
    ends = int64([-(1 << 63), 2 - (1 << 63), 1 << 62])
    yield case("endless after", [2, 2], few, starts=ends, topk=4, window=8, reference=SKIP)
    origin = -(1 << 63) + int64([5, 7, 8])
    yield case("starts near the last int64", [2, 1], few, starts=origin, topk=4, window=8)

    if level == "full":
        lens = int64([5000, 4100, 1000])
        for topk, window in ((512, 128), (2048, 128), (1023, 127), (2048, 4096)):
            yield case(
                f"top-k {topk}, window {window}", [300, 1, 211], lens, topk=topk, window=window
            )


def mixed_cases(variant: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `build_flashinfer_mixed_sparse_indices`; a variant is a mode of decode tokens.

    The modes: no compressed indices, slots, slots with lengths, local indices, and no compressed rows
    at all.
    """
    rng = generator(seed, "mixed", variant)
    given = variant in ("global", "global_lens", "local")
    local = variant == "local"
    ratios = (0,) if variant == "window_only" else (4, 1, 2, 128)

    def case(
        name: str,
        decode: int,
        queries: Sequence[int],
        *,
        most: int = 300,
        seq_lens: Array | None = None,
        ratio: int | None = None,
        window: int = 128,
        wide: int = 0,
        topk: int = 64,
        width: int = 64,
        size: int = 64,
        swa_size: int = 64,
        spans: tuple[int | None, int | None] = (None, None),
        replay: bool = False,
        base: int = 0,
        dtype: type = np.int32,
        shift: int = 0,
        share: float = 0.0,
        pages: int | None = None,
        **more: Any,
    ) -> Case:
        ratio = ratios[0] if ratio is None else ratio
        topk, width = (0, 0) if variant == "window_only" else (topk, width)
        lengths = [1] * decode + list(queries)
        requests, tokens = len(lengths), sum(lengths)
        if seq_lens is None:
            seq_lens = rng.integers(0, most, requests) + int64(lengths)
        longest = int(seq_lens.max(initial=1))
        rows = max(longest // (ratio or 1), 1)

        def numbers(end: int, *shape: int) -> Array:
            return wild(rng, rng.integers(0, end, shape).astype(dtype), share)

        def indices(end: int, *shape: int) -> Array:
            return wider(holed(rng, numbers(end, *shape)), shift, 8 * (shift > 0))

        def table(columns: int, extra: int) -> Array:
            columns = columns if pages is None else pages
            return wider(numbers(1 << 14, requests + extra, columns), 3, 8)

        of_request: Array = np.append(requests_of(lengths), [99] * shift).astype(dtype)
        count = place(numbers(width + 1, decode)) if variant in ("global_lens", "local") else None
        valid = place(rng.random(decode + shift) < 0.7) if variant in ("local", "global") else None
        arguments = {
            "decode_swa_indices": indices(1 << 20, decode, window + wide),
            "decode_compressed_indices": indices(rows if local else 1 << 20, decode, width)
            if given
            else None,
            "decode_compressed_topk_lens": count,
            "prefill_topk_indices": indices(rows, sum(queries), topk + shift),
            "query_start_loc": place(starts_of(lengths, base).astype(dtype)),
            "seq_lens": place(wild(rng, seq_lens.astype(dtype), share)),
            "token_to_req_indices": place(wild(rng, of_request, share)),
            "swa_block_table": table(-(-longest // swa_size), shift),
            "swa_block_size": swa_size,
            "compressed_block_table": table(-(-rows // size), 0),
            "compressed_block_size": size,
            "window_size": window,
            "compress_ratio": ratio,
            "topk": topk,
        }
        assert len(of_request) == tokens + shift
        keywords = {
            "decode_compressed_indices_are_local": local,
            "decode_is_valid_token": valid,
            "swa_block_span": spans[0],
            "compressed_block_span": spans[1],
            "replay_start": place(numbers(longest, requests)) if replay else None,
        }
        return Case(name, arguments, keywords, **more)

    long = 60 if level == "full" else 1
    for ratio in ratios:
        name = f"decode and prefill, ratio {ratio}"
        yield case(
            *(name, 2 * long, [2 * long, 1, 1]),
            ratio=ratio,
            topk=512,
            width=512,
            most=3000,
            sweep=long > 1,
        )
    yield case("decode", 4 * long, [])
    yield case("prefill", 0, [3 * long, 1, 2])
    yield case("from the start", 0, [9 * long], seq_lens=int64([9 * long]), window=5, topk=3)
    yield case("no tokens", 0, [])
    yield case("one row", 0, [1])
    yield case("packed pages", 2, [4], spans=(72, 80), size=16, swa_size=64, replay=True)
    yield case(
        "views",
        2,
        [3, 0, 4],
        dtype=np.int64,
        base=7777,
        shift=2,
        window=128,
        wide=5,
        topk=37,
        width=41,
        size=20,
        swa_size=4,
        spans=(5, 20),
        replay=True,
    )
    yield case(
        "int32 views", 2, [3], shift=1, window=3, wide=4, topk=7, width=6, size=1, swa_size=1
    )
    for columns in (1, 2, 3):
        yield case(
            *(f"{columns} columns", 1, [2]),
            window=columns,
            topk=columns,
            width=1,
            wide=1,
            sweep=columns == 3,
        )
    yield case("indices wider than top-k", 2, [2], topk=5, width=18, window=9)
    lens = int64([1, 2, 0])
    yield case(
        "queries longer than sequences", 0, [3, 4, 2], seq_lens=lens, window=4, ratio=ratios[-1]
    )
    yield case("wide window", 1, [2], most=2000, window=1100)
    replayed = int64([400, 300])
    yield case("replay", 0, [5, 6], seq_lens=replayed, window=64, replay=True, topk=4)

    # What the reference refuses is -1.
    kinds = (("wild int32", np.int32), ("wild int64", np.int64))
    for name, kind in kinds:
        for share in (0.1, 0.4):
            yield case(
                f"{name}, {share}",
                2,
                [2, 3],
                dtype=kind,
                shift=1,
                window=33,
                wide=2,
                topk=21,
                width=19,
                size=16,
                swa_size=8,
                spans=(9, 16) if share > 0.2 else (None, 17),
                replay=True,
                share=share,
                reference=SKIP,
            )
    counts = case("lengths out of range", 4, [], reference=SKIP)
    if variant == "global_lens":
        counts.arguments["decode_compressed_topk_lens"][:] = int32([-1, -(1 << 31), 65, INT32_MAX])
    yield counts
    yield case("tables without columns", 2, [3], pages=0, window=4, topk=4, width=4, reference=SKIP)
    yield case("tables too narrow", 2, [5], pages=1, seq_lens=int64([66, 80, 67]), reference=SKIP)
    huge = (1 << 31) - 70
    yield case("spans beyond int32", 2, [3], spans=(huge, 1 << 20), reference=SKIP)
    swapped = case("requests swapped", 1, [3, 3], window=6, topk=6, width=6, reference=SKIP)
    swapped.arguments["token_to_req_indices"][1:] = int32([2, 1, 0, 7, -1, 1])
    yield swapped

    if level == "full":
        for topk, window in ((2048, 128), (1023, 127), (512, 133)):
            yield case(
                f"top-k {topk}, window {window}", 64, [300, 1, 211], topk=topk, width=topk, wide=3,
                window=window, most=9000,
            )  # fmt: skip
