"""Cases of insert and gather."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsv4num.formats import Layout, get_layout
from dsv4num.reference import encode_records, write_records
from dsv4num.verify.case import (
    BF16,
    Array,
    Case,
    Level,
    any_bf16,
    edge_bf16,
    flat,
    generator,
    int32,
    int64,
    place,
    shuffled_slots,
    wide_bf16,
)


def blank_cache(
    layout: Layout, pages: int, block_size: int, *, planar: bool, extra: int = 0, shift: int = 0
) -> Array:
    """An unwritten cache: 3-D as engines pass it, or 2-D; pages padded by `extra` more bytes."""
    stride = layout.page_bytes(block_size) + extra
    if planar:
        return place(np.zeros((pages, stride), np.uint8), shift=shift)
    shape = (pages, block_size, layout.row_bytes)
    return place(np.zeros(shape, np.uint8), (stride, layout.row_bytes, 1), shift)


def insert_cases(layout_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `quantize_and_insert_k_cache`."""
    layout = get_layout(layout_name)
    dim = layout.head_dim
    rng = generator(seed, "insert", layout_name)

    def case(name: str, k: Array, slots: Array, cache: Array, block_size: int, **more: Any) -> Case:
        arguments = {"k": k, "k_cache": cache, "slot_mapping": slots, "block_size": block_size}
        return Case(name, arguments, {"layout": layout_name}, ("k_cache",), **more)

    def plain(name: str, rows: Array, block_size: int, **more: Any) -> Case:
        pages = -(-len(rows) * 5 // 4 // block_size) + 1
        slots = shuffled_slots(rng, len(rows), pages * block_size)
        cache = blank_cache(layout, pages, block_size, planar=False)
        return case(name, place(rows), place(slots), cache, block_size, **more)

    many = 4096 if level == "full" else 96
    yield plain("any bits", any_bf16(rng, (many, dim)), 64)
    yield plain("wide", wide_bf16(rng, (many, dim)), 16)
    yield plain("edges", edge_bf16(rng, (many, dim)), 64)
    yield plain("zeros", np.zeros((3, dim), BF16), 64)

    # Rows wider than needed, every second one; more rows than slots; int32; nothing aligned.
    slots: Array = shuffled_slots(rng, 33, 4 * 20).astype(np.int32)
    k = place(any_bf16(rng, (41, dim)), (2 * (dim + 24), 1))
    cache = blank_cache(layout, 4, 20, planar=True, extra=13, shift=3)
    yield case("views", k, place(slots), cache, 20, sweep=True)

    # Slots beyond the cache: the reference refuses them, the kernels skip them.
    wild = shuffled_slots(rng, 14, 2 * 7, 0.0)
    wild = np.concatenate([wild, [14, 15, 1 << 31, (1 << 62), -(1 << 63), (1 << 63) - 1]])
    tame = np.where(wild < 14, wild, -1)
    cache = blank_cache(layout, 2, 7, planar=True)
    k = place(wide_bf16(rng, (len(wild), dim)))
    skip = {"slot_mapping": place(tame)}
    yield case("slots out of range", k, place(wild), cache, 7, reference=skip)

    none = place(np.zeros(0, np.int64))
    cache = blank_cache(layout, 2, 64, planar=False)
    yield case("no tokens", place(any_bf16(rng, (2, dim))), none, cache, 64)

    if level == "full":
        for block_size in (1, 2, 3, 32, 128, 256):
            yield plain(f"block size {block_size}", edge_bf16(rng, (700, dim)), block_size)
        patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
        yield plain("every bf16 pattern", patterns.reshape(-1, dim), 64)
        one_by_one = np.zeros((1 << 16, dim), BF16) if dim == 128 else None
        if one_by_one is not None:
            one_by_one[:, 5] = patterns
            yield plain("every amax", one_by_one, 64)
        else:
            lanes = np.zeros((1 << 13, dim), BF16)
            lanes[:, np.arange(8) * 64 + 5] = patterns.reshape(-1, 8)
            yield plain("every amax", lanes, 64)
        pages = (1 << 31) // layout.page_bytes(64) + 40
        last = pages * 64
        near = np.arange(last - 39 * 64, last, 17)
        slots = np.concatenate([near, np.arange(0, 640, 9), last // 2 + np.arange(0, 640, 7)])
        cache = blank_cache(layout, pages, 64, planar=False)
        rows = wide_bf16(rng, (len(slots), dim))
        yield case(
            "beyond 2**31 bytes", place(rows), place(rng.permutation(slots)), cache, 64, large=True
        )


def filled_cache(
    rng: np.random.Generator, layout: Layout, pages: int, block_size: int, **how: Any
) -> Array:
    """A cache of random bytes, with every second row written by an encoder."""
    cache = blank_cache(layout, pages, block_size, **how)
    flat(cache)[:] = rng.integers(0, 256, flat(cache).size, dtype=np.uint8)
    slots = np.arange(0, pages * block_size, 2)
    rows = edge_bf16(rng, (len(slots), layout.head_dim))
    write_records(encode_records(rows, layout), cache, slots, block_size, layout=layout)
    return cache


def gather_cases(layout_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `dequantize_and_gather_k_cache`."""
    layout = get_layout(layout_name)
    dim = layout.head_dim
    rng = generator(seed, "gather", layout_name)

    def case(
        name: str,
        cache: Array,
        block_size: int,
        pages: int,
        seq_lens: Array,
        gather_lens: Array | None,
        *,
        rows: int,
        offset: int = 0,
        wide: int = 0,
        table: Array | None = None,
        **more: Any,
    ) -> Case:
        requests = len(seq_lens)
        out = np.zeros((requests, rows, dim), BF16)
        width = -(-int(max(seq_lens.max(initial=1), 1)) // block_size) + 2
        if table is None:
            table = rng.integers(0, pages, (requests, width)).astype(np.int32)
        arguments = {
            "out": place(out, ((rows + 1) * (dim + wide), dim + wide, 1)),
            "k_cache": cache,
            "seq_lens": place(seq_lens),
            "gather_lens": None if gather_lens is None else place(gather_lens),
            "block_table": place(table, (table.shape[1] + 3, 1)),
            "block_size": block_size,
            "offset": offset,
        }
        return Case(name, arguments, {"layout": layout_name}, ("out",), **more)

    scale = 24 if level == "full" else 1
    cache = filled_cache(rng, layout, 6, 64, planar=False)
    lens: Array = int32([70 * scale, 1, 0, 64, 65])
    yield case("whole sequences", cache, 64, 6, lens, None, rows=70 * scale + 3)
    tails = int32([7, 1, 0, 64, 33])
    yield case("tails at an offset", cache, 64, 6, lens, tails, rows=72, offset=5, wide=24)
    odd = filled_cache(rng, layout, 9, 5, planar=True, extra=13, shift=3)
    lens = int64([31, 12])
    yield case("views", odd, 5, 9, lens, int64([31, 11]), rows=33, offset=2, wide=8, sweep=True)
    none = np.zeros(0, np.int32)
    yield case("no requests", cache, 64, 6, none, none, rows=4)

    # What the reference refuses, the kernels leave untouched: pages that do not exist, lengths
    # beyond the sequence, rows beyond the output, columns beyond the table.
    lens = int32([20, 12, 9, 4, 18, -5])
    wild = rng.integers(0, 9, (6, 4)).astype(np.int32)
    wild[0, 1], wild[0, 2], wild[1, 0] = 9, -1, np.iinfo(np.int32).max
    ask = int32([20, 12, 14, -3, 18, 2])
    tame = np.where((wild >= 0) & (wild < 9), wild, 0)

    def restore(expected: dict[str, Array], untouched: dict[str, Array]) -> None:
        out, blank = expected["out"], untouched["out"]
        out[0, 5:15], out[1, 0:5] = blank[0, 5:15], blank[1, 0:5]  # pages 1, 2 of request 0; page 0
        out[2, 5:14], out[2, :5] = out[2, 0:9].copy(), blank[2, :5]  # 14 asked of 9: five before 0

    yield case(
        "values out of range",
        odd,
        5,
        9,
        lens,
        ask,
        rows=20,
        table=wild,
        reference={
            "seq_lens": place(int32([20, 12, 9, 4, 18, 0])),
            "gather_lens": place(int32([20, 12, 9, 0, 18, 0])),
            "block_table": place(tame),
        },
        restore=restore,
    )
    table: Array = rng.integers(0, 9, (2, 2)).astype(np.int64)
    yield case(
        "no room and no column",
        odd,
        5,
        9,
        int64([25, 25]),
        int64([25, 20]),
        rows=7,
        table=table,
        reference={"seq_lens": place(int64([7, 10])), "gather_lens": place(int64([7, 5]))},
    )

    if level == "full":
        for block_size in (1, 2, 16, 128, 256):
            cache = filled_cache(rng, layout, 12, block_size, planar=False)
            lens = int32([300, 7, 129])
            yield case(f"block size {block_size}", cache, block_size, 12, lens, None, rows=300)
        pages = (1 << 31) // layout.page_bytes(64) + 40
        cache = blank_cache(layout, pages, 64, planar=False)
        slots = np.concatenate([np.arange(640), np.arange((pages - 40) * 64, pages * 64)])
        records = encode_records(wide_bf16(rng, (len(slots), dim)), layout)
        write_records(records, cache, slots, 64, layout=layout)
        ends = np.concatenate([np.arange(10), np.arange(pages - 40, pages)])
        table = rng.permutation(ends).astype(np.int32)[None]
        lens = int32([50 * 64])
        yield case(
            "beyond 2**31 bytes", cache, 64, pages, lens, None, rows=3200, table=table, large=True
        )
