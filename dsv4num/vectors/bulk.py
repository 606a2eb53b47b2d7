"""Bulk vectors: many values from the generator, mixed with those that sit on decisions.

Every operation has a set of moderate size; `large` makes the same sets bigger, from other streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import Layout
from dsv4num.reference import build_cos_sin_cache, encode_records, write_records
from dsv4num.vectors.edge_operations import cache_of
from dsv4num.vectors.generator import Numbers, two_to
from dsv4num.vectors.vector import (
    LAYOUTS,
    RULES,
    SCALARS,
    Array,
    Parameter,
    Vector,
    bf16_bits,
    make,
)

_ANY = ("Any",)


def stream(name: str, large: bool) -> Numbers:
    """The stream of a vector."""
    return Numbers(f"{'large' if large else 'bulk'} {name}")


def as_bf16(values: NDArray[np.float32]) -> Array:
    """bf16 by cutting off the lower half: exact steps alone, and a NaN stays one."""
    upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.int64)
    return bf16_bits(np.where(np.isnan(values), 0x7FC0, upper))


def encode(large: bool) -> Iterator[Vector]:
    """`encode` and `decode`."""
    for fmt in SCALARS.values():
        numbers = stream(f"encode {fmt.name}", large)
        parameters: dict[str, Parameter] = {"fmt": fmt.name}
        nan = ("known_difference_1",) if fmt.name in ("e4m3fn", "e4m3fnuz", "e2m1") else ()
        many = 1 << (18 if large else 11)
        near = numbers.bell(many) * two_to(numbers.between(-12, 10, many))
        sets = {"any": numbers.any_fp32(many), "near": near}
        if large:
            sets["bf16"] = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        for name, x in sets.items():
            yield make(
                f"bulk.encode.{fmt.name}.{name}",
                "encode",
                {
                    "any": "any fp32 bits",
                    "near": "normal numbers near the format's range",
                    "bf16": "every bf16 number, widened",
                }[name],
                parameters,
                flags=_ANY if name == "near" else ("Any", "NaN"),
                policy=nan if name != "near" else (),
                clause=fmt.clause,
                x=x,
            )


def quantize(large: bool) -> Iterator[Vector]:
    """`encode_scale`, `quantize` and `dequantize`."""
    for rule in RULES.values():
        slug = rule.name.lower().replace("/", "-")
        numbers = stream(f"quantize {slug}", large)
        parameters: dict[str, Parameter] = {"rule": rule.name}
        many = 256 if large else 8
        inputs = {
            "any": ("any fp32 bits", numbers.any_fp32(many // 2, 512)),
            "wide": ("fp32 rows of 2^-40 to 2^40", numbers.wide(many // 2, 512)),
            "edges": ("bf16 on the decisions of every rule", as_bf16(numbers.edgy(2 * many, 512))),
        }
        for name, (comment, x) in inputs.items():
            yield make(
                f"bulk.quantize.{slug}.{name}",
                "quantize",
                comment,
                parameters,
                flags=_ANY if name == "wide" else ("Any", "NaN", "Infinity"),
                policy=() if name == "wide" else ("known_difference_1",),
                clause=rule.clause,
                x=x,
            )
        amax = np.abs(numbers.any_fp32(1 << (16 if large else 10)))
        yield make(
            f"bulk.encode_scale.{slug}",
            "encode_scale",
            "any amax",
            parameters,
            flags=_ANY,
            policy=("known_difference_5",) if rule.scale.name == "ue8m0" else (),
            clause=rule.clause,
            amax=np.where(np.isnan(amax), np.float32(0), amax),
        )
        rows = 256 if large else 4
        width = max(rule.group, 128)
        yield make(
            f"bulk.dequantize.{slug}",
            "dequantize",
            "any codes under any scale codes",
            parameters,
            flags=_ANY,
            policy=("known_difference_2", "known_difference_3")
            if rule.scale.name == "ue8m0"
            else ("known_difference_4",),
            codes=numbers.below(rule.element.codes, rows, width).astype(np.uint8),
            scale_codes=numbers.below(256, rows, width // rule.group).astype(np.uint8),
        )


def _slots(numbers: Numbers, tokens: int, slots: int) -> NDArray[np.int64]:
    """Distinct slots in another order; about one in eight below 0."""
    chosen = numbers.shuffled(slots)[:tokens]
    return np.where(numbers.below(8, tokens) == 0, -1 - numbers.below(9, tokens), chosen)


def insert(large: bool) -> Iterator[Vector]:
    """`quantize_and_insert_k_cache`."""
    for layout in LAYOUTS.values():
        numbers = stream(f"insert {layout.name}", large)
        dim, tokens, block = layout.head_dim, 512 if large else 10, 64 if large else 5
        pages = tokens * 5 // 4 // block + 1
        rows = numbers.edgy(tokens, dim)
        rows[::3] = numbers.wide(len(rows[::3]), dim, most=16)
        yield make(
            f"bulk.insert.{layout.name}",
            "quantize_and_insert_k_cache",
            "rows on the decisions of every rule, and normal ones, in slots out of order",
            {"block_size": block, "layout": layout.name},
            flags=("Any", "Skipped", "Unowned"),
            policy=("known_difference_1",),
            written=("k_cache",),
            k=as_bf16(rows),
            k_cache=cache_of(layout, pages, block, 7),
            slot_mapping=_slots(numbers, tokens, pages * block),
        )


def _filled(numbers: Numbers, layout: Layout, pages: int, block: int) -> NDArray[np.uint8]:
    """A cache of any bytes, every second row written by the encoder."""
    shape = pages, layout.page_bytes(block) + 7
    cache = numbers.below(256, *shape).astype(np.uint8)
    slots = np.arange(0, pages * block, 2)
    records = encode_records(as_bf16(numbers.edgy(len(slots), layout.head_dim)), layout)
    write_records(records, cache, slots, block, layout=layout)
    return cache


def gather(large: bool) -> Iterator[Vector]:
    """`dequantize_and_gather_k_cache`."""
    for layout in LAYOUTS.values():
        numbers = stream(f"gather {layout.name}", large)
        scale = 16 if large else 1
        block, pages, rows = 4 * scale, 3, 6 * scale
        lens = np.array([5, 9], np.int32) * scale
        yield make(
            f"bulk.gather.{layout.name}",
            "dequantize_and_gather_k_cache",
            "records and any bytes: the last rows of two sequences, behind an untouched row",
            {"block_size": block, "offset": 1, "layout": layout.name},
            flags=("Any", "NaN", "Unowned"),
            policy=("known_difference_2", "known_difference_3", "known_difference_4"),
            written=("out",),
            out=bf16_bits(np.full((2, rows, layout.head_dim), 0xA5A5)),
            k_cache=_filled(numbers, layout, pages, block),
            seq_lens=lens,
            gather_lens=np.array([5, 4], np.int32) * scale,
            block_table=numbers.below(pages, 2, 3).astype(np.int32),
        )


def _scores(numbers: Numbers, rows: int, columns: int) -> NDArray[np.float32]:
    """Normal scores; in some columns ties, far apart, or with -infinity among them."""
    values = numbers.bell(rows, columns) * np.float32(2)
    kind = numbers.below(6, columns)
    values[:, kind == 0] = 1
    values[:, kind == 1] *= np.float32(30)
    gone = (kind == 2) & (numbers.below(3, rows, columns) == 0)
    gone[-1] = False
    return np.where(gone, np.float32(-np.inf), values)


def _kv(numbers: Numbers, rows: int, columns: int) -> NDArray[np.float32]:
    """Normal rows; in some columns terms near +-2^27 that cancel, which show the order of a sum."""
    values = numbers.bell(rows, columns)
    kind = numbers.below(6, columns)
    signs = np.where(
        np.argsort(numbers.raw(rows), kind="stable") % 2, np.float32(1), np.float32(-1)
    )
    large = signs[:, None] * np.float32(2.0**27) + values * np.float32(100)
    return np.where(kind == 0, large, values).astype(np.float32)


def compress(large: bool) -> Iterator[Vector]:
    """`save_partial_states`, `compress_norm_rope_store` and `pool_ring_latent`."""
    scenes = [
        ("csa", "v4", 4, True, [7]),
        ("csa-fnuz", "v4_fnuz", 4, True, [3]),
        ("hca-8", "v4", 8, False, [7]),
        ("indexer-fp8", "indexer_fp8", 4, True, [3, 7, 15]),
        ("indexer-mxfp4", "indexer_mxfp4", 4, True, [3, 11]),
        ("indexer-16", "indexer_mxfp4", 16, False, [31]),
        ("indexer-128", "indexer_fp8", 128, False, [127]),
    ]
    if large:
        scenes = [
            ("csa", "v4", 4, True, [3, 7, 1023, 131, 51, 5, 63, 11]),
            ("csa-fnuz", "v4_fnuz", 4, True, [3, 7, 59]),
            ("hca", "v4", 128, False, [127, 511]),
            ("hca-fnuz", "v4_fnuz", 128, False, [255]),
            ("indexer-fp8", "indexer_fp8", 4, True, [3, 7, 1019, 130, 135]),
            ("indexer-mxfp4", "indexer_mxfp4", 4, True, [3, 7, 1019, 130, 135]),
        ]
    for name, layout, ratio, overlap, positions in scenes:
        yield _compression(name, layout, ratio, overlap, positions, large)
    numbers = stream("states", large)
    tokens = 256 if large else 9
    width = 128
    blocks = tokens // 4 + 2
    yield make(
        "bulk.states",
        "save_partial_states",
        "kv of any bits, scores with a bias",
        {"compress_ratio": 4},
        flags=("Any", "NaN", "Skipped"),
        written=("state_cache",),
        kv=numbers.any_fp32(tokens, width),
        score=_scores(numbers, tokens, width),
        ape=numbers.bell(4, width),
        positions=numbers.below(1 << 20, tokens),
        state_cache=np.full((blocks, 4, 2 * width), 7, np.float32),
        slot_mapping=_slots(numbers, tokens, blocks * 4),
    )
    yield from _ring(large)


def _compression(
    name: str, layout: str, ratio: int, overlap: bool, positions: list[int], large: bool
) -> Vector:
    """One request per position."""
    numbers = stream(f"compress {name}", large)
    found = LAYOUTS[layout]
    width = found.head_dim * (1 + overlap)
    window, tokens = ratio * (1 + overlap), len(positions)
    rows = 4 if overlap else 8
    columns = max(positions) // rows + 1
    table = np.full((tokens, columns), 2**31 - 1, np.int32)  # only looked at where it is filled
    used = [range(max(0, p - window + 1) // rows, p // rows + 1) for p in positions]
    blocks = numbers.shuffled(sum(map(len, used)) + (width < 512))  # one that nobody reads
    cache = np.full((len(blocks), rows, 2 * width), np.nan, np.float32)
    for request, pages in enumerate(used):
        chosen, blocks = blocks[: len(pages)], blocks[len(pages) :]
        table[request, pages.start : pages.stop] = chosen
        for block in chosen:
            cache[block, :, :width] = _kv(numbers, rows, width)
            cache[block, :, width:] = _scores(numbers, rows, width)
    return make(
        f"bulk.compress.{name}",
        "compress_norm_rope_store",
        f"ratio {ratio}{', overlapping' if overlap else ''}: one request for each of {tokens} tokens",
        {
            "rms_norm_eps": 1e-6,
            "compress_ratio": ratio,
            "overlap": overlap,
            "layout": layout,
            "kv_block_size": 4,
        },
        flags=("Any", "Order", "Overlap") if overlap else ("Any", "Order"),
        policy=("known_difference_6",),
        written=("kv_cache",),
        state_cache=cache,
        token_to_req_indices=np.arange(tokens, dtype=np.int32),
        positions=np.array(positions, np.int64),
        slot_mapping=np.arange(tokens, dtype=np.int64),
        block_table=table,
        cos_sin_cache=build_cos_sin_cache(max(positions) + 1, theta=160000.0, factor=16.0),
        kv_cache=cache_of(found, tokens // 4 + 1, 4),
        kv_slot_mapping=np.arange(tokens, dtype=np.int64)[::-1].copy(),
        rms_norm_weight=as_bf16(numbers.bell(found.head_dim)),
    )


def _ring(large: bool) -> Iterator[Vector]:
    """`pool_ring_latent`: chunks of several requests."""
    chunks = [(0, 33), (5, 64), (7, 1), (8, 1), (130, 9)] if large else [(3, 4), (6, 1), (9, 1)]
    numbers = stream("ring", large)
    capacity = 4 if large else 2
    counts = [count for _, count in chunks]
    owner = np.repeat(np.arange(len(chunks)), counts)
    at = np.concatenate([np.arange(first, first + count) for first, count in chunks])
    blocks = numbers.shuffled(len(chunks))[owner]
    tokens = len(at)
    ring = np.concatenate(
        [numbers.bell(len(chunks) * capacity, 512), _scores(numbers, len(chunks) * capacity, 512)],
        axis=1,
    )
    yield make(
        "bulk.ring",
        "pool_ring_latent",
        "chunks of several requests, predecessors in the chunk and in the ring",
        {"rms_norm_eps": 1e-6, "compress_ratio": 2},
        flags=("Any", "Order"),
        policy=("known_difference_6",),
        written=("state_cache", "latent_out"),
        kv_score=np.concatenate([numbers.bell(tokens, 512), _scores(numbers, tokens, 512)], axis=1),
        positions=at.astype(np.int64),
        state_cache=ring.reshape(len(chunks), capacity, 1024),
        slot_mapping=(blocks * capacity + at % capacity).astype(np.int64),
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        token_to_req_indices=owner.astype(np.int32),
        rms_norm_weight=as_bf16(numbers.bell(512)),
        latent_out=bf16_bits(np.full((tokens, 512), 0xA5A5)),
    )


def rope_quant(large: bool) -> Iterator[Vector]:
    """`rope_quant_insert`."""
    tokens = 256 if large else 6
    for layout in LAYOUTS.values():
        if layout.head_dim != 512:
            continue
        numbers = stream(f"rope_quant {layout.name}", large)
        for ratio, trip in ((1, False), (2, True)):
            limit = 4096 if large else 24
            latents = numbers.bell(tokens, 512)
            latents[-1] = numbers.edgy(1, 512)[0]
            pages = tokens * 5 // 4 // 4 + 1
            name = f"ratio-{ratio}{'.round-trip' if trip else ''}"
            yield make(
                f"bulk.rope_quant.{layout.name}.{name}",
                "rope_quant_insert",
                "normal rows, and one on the decisions of every rule",
                {
                    "compress_ratio": ratio,
                    "layout": layout.name,
                    "bf16_round_trip": trip,
                    "kv_block_size": 4,
                },
                flags=("Any", "Rounding", "Skipped"),
                policy=("known_difference_1",),
                written=("kv_cache",),
                latent=as_bf16(latents),
                positions=numbers.below(limit, tokens),
                cos_sin_cache=build_cos_sin_cache(limit, theta=160000.0),
                kv_cache=cache_of(layout, pages, 4),
                slot_mapping=_slots(numbers, tokens, pages * 4),
            )


def _holed(numbers: Numbers, end: int, *shape: int) -> NDArray[np.int32]:
    """Numbers below `end`; about one in five is below 0."""
    values = numbers.below(end, *shape)
    return np.where(numbers.below(5, *shape) == 0, -1 - numbers.below(3, *shape), values).astype(
        np.int32
    )


def indices(large: bool) -> Iterator[Vector]:
    """The sparse index builders."""
    scale = 16 if large else 1
    numbers = stream("indices", large)
    tokens, width = 6 * scale, 128 * scale
    yield make(
        "bulk.indices.global",
        "compute_global_topk_indices_and_lens",
        "top-k indices of several requests",
        {"block_size": 64},
        flags=("Any", "Length"),
        topk_indices=_holed(numbers, 9 * 64, tokens, width),
        token_to_req_indices=numbers.below(4, tokens).astype(np.int32),
        block_table=numbers.below(1 << 14, 4, 9).astype(np.int32),
        is_valid_token=numbers.below(5, tokens) > 0,
    )
    for ratio in (0, 1, 2, 4, 128):
        queries = [3 * scale, 1, 2 * scale]
        lens = np.array([700, 130, 6 * scale], np.int64)
        gathered = np.minimum(lens, np.array(queries) + 127)
        compressed = 700 // ratio if ratio else 0
        yield make(
            f"bulk.indices.combine.ratio-{ratio}",
            "combine_topk_swa_indices",
            "queries of several requests, all that their windows reach gathered",
            {
                "window_size": 128,
                "compress_ratio": ratio,
                "topk": width,
                "M": compressed + int(gathered.max()),
                "N": compressed,
            },
            flags=("Any", "Window"),
            topk_indices=_holed(numbers, compressed + 2, sum(queries), width),
            query_start_loc=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
            seq_lens=lens.astype(np.int32),
            gather_lens=gathered.astype(np.int32),
        )
    for mode in ("none", "slots", "local"):
        lengths = [1, 1, 3 * scale, 2]
        lens = np.array([300, 7, 200, 2], np.int64)
        given: dict[str, Any] = {}
        if mode != "none":
            given["decode_compressed_indices"] = _holed(numbers, 75, 2, 30)
        parameters: dict[str, Parameter] = {
            "decode_compressed_topk_lens": None,
            "swa_block_size": 64,
            "compressed_block_size": 16,
            "window_size": 32,
            "compress_ratio": 4,
            "topk": 33,
            "decode_compressed_indices_are_local": mode == "local",
            "swa_block_span": 72,
        }
        if mode == "none":
            parameters["decode_compressed_indices"] = None
        yield make(
            f"bulk.indices.mixed.{mode}",
            "build_flashinfer_mixed_sparse_indices",
            "two decode tokens and two queries",
            parameters,
            flags=("Any", "Window", "Alignment"),
            decode_swa_indices=_holed(numbers, 1 << 20, 2, 35),
            **given,
            prefill_topk_indices=_holed(numbers, 50, sum(lengths[2:]), 33),
            query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            seq_lens=lens.astype(np.int32),
            token_to_req_indices=np.repeat(np.arange(4), lengths).astype(np.int32),
            swa_block_table=numbers.below(1 << 14, 4, 5).astype(np.int32),
            compressed_block_table=numbers.below(1 << 14, 4, 5).astype(np.int32),
            replay_start=numbers.below(100, 4).astype(np.int32),
        )
