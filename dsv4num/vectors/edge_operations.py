"""Edge vectors of the operations: records and pages, the compressor, sparse indices. SPEC 4 and 5."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import Layout
from dsv4num.reference import build_cos_sin_cache, encode_records, write_records
from dsv4num.vectors.generator import Numbers
from dsv4num.vectors.vector import (
    LAYOUTS,
    Array,
    Parameter,
    Vector,
    bf16,
    bf16_bits,
    fp32,
    from_bits,
    make,
)

_BEFORE = 0xA5  # what caches hold before a call
_INSERT, _GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
_SAVE, _COMPRESS = "save_partial_states", "compress_norm_rope_store"
_LATENT, _RING = "rope_quant_insert", "pool_ring_latent"
_GLOBAL, _COMBINE = "compute_global_topk_indices_and_lens", "combine_topk_swa_indices"
_MIXED = "build_flashinfer_mixed_sparse_indices"
_SKIP: dict[str, Array | Parameter] = {"out_of_range": "skip"}


def int32(*values: int) -> NDArray[np.int32]:
    """An int32 array."""
    return np.array(values, np.int32)


def int64(*values: int) -> NDArray[np.int64]:
    """An int64 array."""
    return np.array(values, np.int64)


def cache_of(layout: Layout, pages: int, block_size: int, extra: int = 0) -> NDArray[np.uint8]:
    """A cache [pages, bytes] that nobody has written, its pages padded by `extra` more bytes."""
    return np.full((pages, layout.page_bytes(block_size) + extra), _BEFORE, np.uint8)


# --- records and pages ----------------------------------------------------------------


def _rows(layout: Layout) -> Iterator[tuple[str, str, tuple[str, ...], Array]]:
    """Rows: a name, a comment, flags and the row."""
    dim = layout.head_dim
    yield "ones", "the example of clause 4.1", ("Page",), bf16(np.ones((1, dim), np.float32))
    yield (
        "zeros",
        "+0: the scales of a zero group",
        ("Floor",),
        bf16(np.zeros((1, dim), np.float32)),
    )
    minus = np.full((1, dim), -0.0, np.float32)
    yield (
        "minus-zeros",
        "-0: codes keep their signs, where the format has -0",
        ("SignedZero",),
        bf16(minus),
    )
    steps = np.tile(fp32(1, -2, 3, -4), dim // 4)[None] * np.repeat(
        fp32(*(2.0 ** (e % 12 - 6) for e in range(dim // 16))), 16
    )
    yield (
        "steps",
        "another magnitude in every group of 16: each scale is its own",
        ("Packing",),
        bf16(steps),
    )
    special = np.ones((1, dim), np.float32)
    special[0, 0], special[0, dim // 2] = np.nan, np.inf
    comment = "a NaN in the first group, an infinity in the middle one"
    yield "nan-infinity", comment, ("NaN", "Infinity"), bf16(special)
    payload = np.full((1, dim), 0x3F80, np.int64)
    payload[0, -3:] = 0x7F81, 0xFFC1, 0x0001
    comment = "NaN payloads and a subnormal in the last elements: a raw field keeps their bits"
    yield "payload", comment, ("NaN", "Subnormal"), bf16_bits(payload)
    tiny = np.full((1, dim), 2.0**-20, np.float32)
    yield "small", "amax below the floor of FP8", ("Floor",), bf16(tiny)


def record() -> Iterator[Vector]:
    """Insert and gather, for every layout."""
    for layout in LAYOUTS.values():
        for name, comment, flags, row in _rows(layout):
            yield make(
                f"insert.{layout.name}.{name}",
                _INSERT,
                comment,
                {"block_size": 1, "layout": layout.name},
                flags=flags,
                policy=("known_difference_1",) if "NaN" in flags else (),
                written=("k_cache",),
                k=row,
                k_cache=cache_of(layout, 1, 1),
                slot_mapping=int64(0),
            )
        yield from _pages(layout)
        yield from _reads(layout)


def _pages(layout: Layout) -> Iterator[Vector]:
    """Where records lie."""
    dim = layout.head_dim
    rows = np.repeat(fp32(1, 2, 3, -4, 5, 6), dim).reshape(6, dim)
    parameters: dict[str, Parameter] = {"block_size": 3, "layout": layout.name}

    def insert(
        name: str, comment: str, flags: tuple[str, ...], slots: Array, extra: int = 0, **more: Any
    ) -> Vector:
        return make(
            f"insert.{layout.name}.{name}",
            _INSERT,
            comment,
            parameters,
            flags=flags,
            written=("k_cache",),
            k=bf16(rows[: len(slots)]),
            k_cache=cache_of(layout, 2, 3, extra),
            slot_mapping=slots,
            **more,
        )

    yield insert(
        "pages",
        "slots of two pages, out of order; what no row owns keeps its bytes",
        ("Page", "Unowned"),
        int64(5, 0, 3, 2),
    )
    yield insert(
        "stride",
        "pages 13 bytes further apart than their size",
        ("Page", "Unowned"),
        int32(4, 1),
        extra=13,
    )
    yield insert(
        "skipped",
        "slots below 0 skip their tokens; slot 0 is not written",
        ("Skipped", "Unowned"),
        int64(-1, 4, -7, -(1 << 63)),
    )
    beyond = int64(6, 1, 1 << 32, (1 << 62) + 2)
    yield insert(
        "beyond",
        "slots beyond the cache: no token is written to a slot that is cut or wrapped",
        ("OutOfRange", "Unowned"),
        beyond,
        reference={"slot_mapping": np.where(beyond < 6, beyond, -1)},
    )


def _reads(layout: Layout) -> Iterator[Vector]:
    """Gathers from pages that hold records and any bytes."""
    dim = layout.head_dim
    numbers = Numbers(f"edge gather {layout.name}")
    kinds = np.repeat(fp32(1, -0.0, 300, 2.0**-20), dim).reshape(4, dim)
    kinds[2, ::3] = -0.5
    kinds[3, 5] = np.inf
    cache = cache_of(layout, 2, 3)
    write_records(encode_records(kinds, layout), cache, int64(0, 2, 3, 4), 3, layout=layout)
    cache.reshape(-1)[: layout.planes[0].row_bytes][:8] = numbers.below(256, 8)

    def gather(
        name: str,
        comment: str,
        flags: tuple[str, ...],
        lens: Array,
        tails: Array | None,
        table: Array,
        rows: int,
        offset: int = 0,
        given: Array = cache,
        **more: Any,
    ) -> Vector:
        inputs: dict[str, Any] = {"seq_lens": lens, "block_table": table, "k_cache": given}
        parameters: dict[str, Parameter] = {
            "block_size": 3,
            "offset": offset,
            "layout": layout.name,
        }
        if tails is None:
            parameters["gather_lens"] = None
        else:
            inputs["gather_lens"] = tails
        return make(
            f"gather.{layout.name}.{name}",
            _GATHER,
            comment,
            parameters,
            flags=flags,
            written=("out",),
            out=bf16_bits(np.full((len(lens), rows, dim), 0xA5A5)),
            **inputs,
            **more,
        )

    table = int32(1, 0, 0, 1).reshape(2, 2)
    yield gather(
        "whole",
        "two sequences through their own rows of the block table; other rows are untouched",
        ("Page", "Unowned"),
        int32(2, 3),
        None,
        table,
        4,
    )
    yield gather(
        "tails",
        "the last rows of each sequence, at an offset",
        ("Window", "Unowned"),
        int64(4, 5),
        int64(2, 3),
        table,
        5,
        offset=1,
    )
    below = int32(3, -2)
    yield gather(
        "negative",
        "a sequence of negative length reads nothing",
        ("OutOfRange",),
        below,
        None,
        table,
        3,
        reference={"seq_lens": np.maximum(below, 0)},
    )
    anything = numbers.below(256, *cache.shape).astype(np.uint8)
    power = any(
        f.kind == "scale" and f.format and f.format.name == "ue8m0" for _, f in layout.fields()
    )
    known = ("4",) if layout.name.startswith("v41_nvfp4") else ("2", "3") if power else ()
    for _, field in layout.fields():
        if field.kind == "scale" and power:  # scale codes that no encoder of these values writes
            start = layout.plane_offset(len(layout.planes) - 1, 3) + field.offset
            anything[0, start : start + 3] = 0x00, 0xFF, 0x86
    yield gather(
        "any-bytes",
        "bytes that no encoder wrote",
        ("Any", "NaN"),
        int32(3),
        None,
        int32(0).reshape(1, 1),
        3,
        given=anything,
        policy=tuple(f"known_difference_{number}" for number in known),
    )


# --- the compressor -------------------------------------------------------------------


def compressor() -> Iterator[Vector]:
    """Partial states, compression, latents and rings."""
    yield from _states()
    yield from _compressed()
    yield from _latents()
    yield from _rings()


def _states() -> Iterator[Vector]:
    def save(
        name: str, comment: str, flags: tuple[str, ...], kv: Array, score: Array, **more: Any
    ) -> Vector:
        return make(
            f"states.{name}",
            _SAVE,
            comment,
            {"compress_ratio": 2},
            flags=flags,
            written=("state_cache",),
            kv=kv,
            score=score,
            **{
                "ape": fp32(0.1, 1000, 3, -1).reshape(2, 2),
                "positions": int64(4, 5, 7)[: len(kv)],
                "state_cache": np.full((2, 2, 4), 7, np.float32),
                "slot_mapping": int64(3, 0, 1)[: len(kv)],
                **more,
            },
        )

    kv = fp32(1, 2, 3, 4, 1 / 3, 6).reshape(3, 2)
    yield save(
        "rows",
        "kv bit for bit, the score plus the bias of its phase",
        ("Position",),
        kv,
        kv / 3,
    )
    yield save(
        "skipped",
        "slots below 0 skip their tokens",
        ("Skipped", "Unowned"),
        kv,
        kv,
        slot_mapping=int32(-1, 2, -5),
    )
    yield save(
        "payload",
        "kv keeps NaN payloads, -0 and subnormals; a NaN sum is 7fffffff",
        ("NaN", "SignedZero", "Subnormal"),
        from_bits(0x7F800001, 0xFFC12345, 0x80000000, 1).reshape(2, 2),
        from_bits(0x7F800001, 0xFF800000, 0x3F800000, 1).reshape(2, 2),
    )
    yield save(
        "beyond",
        "slots beyond the state cache and a position below 0 are skipped",
        ("OutOfRange", "Unowned"),
        kv,
        kv,
        positions=int64(4, -3, 7),
        slot_mapping=int64(1 << 32, 1, 2),
        reference={"slot_mapping": int64(-1, -1, 2)},
    )


_WIDTH = 128


def _compress(
    name: str,
    comment: str,
    flags: tuple[str, ...],
    kv: Array,
    score: Array,
    *,
    positions: Array,
    ratio: int = 4,
    overlap: bool = True,
    layout: str = "indexer_mxfp4",
    weight: Array | None = None,
    policy: tuple[str, ...] = ("known_difference_6",),
    **more: Any,
) -> Vector:
    """One request per token; kv and score are [positions, W] of every request."""
    tokens = len(positions)
    states = np.concatenate(np.broadcast_arrays(kv, score), axis=-1)
    states = np.broadcast_to(states, (tokens, *states.shape[-2:]))
    length, rows = states.shape[1], 4
    pages = -(-length // rows)
    cache = np.full((tokens * pages + 1, rows, states.shape[2]), np.nan, np.float32)
    table = np.arange(tokens * pages, dtype=np.int32).reshape(tokens, pages)[:, ::-1] + 1
    for request in range(tokens):
        for position in range(length):
            place = table[request, position // rows], position % rows
            cache[place] = states[request, position]
    found = LAYOUTS[layout]
    block = int(more.pop("block", 2))
    inputs: dict[str, Any] = {
        "token_to_req_indices": np.arange(tokens, dtype=np.int32),
        "slot_mapping": np.arange(tokens, dtype=np.int64),
        "kv_slot_mapping": np.arange(tokens, dtype=np.int64)[::-1].copy(),
        "block_table": np.ascontiguousarray(table),
        "cos_sin_cache": build_cos_sin_cache(length),
        "kv_cache": cache_of(found, -(-tokens // block), block, 5),
        "rms_norm_weight": np.ones(found.head_dim, np.float32) if weight is None else weight,
        **more,
    }
    return make(
        f"compress.{name}",
        _COMPRESS,
        comment,
        {
            "rms_norm_eps": 1e-6,
            "compress_ratio": ratio,
            "overlap": overlap,
            "layout": layout,
            "kv_block_size": block,
        },
        flags=flags,
        policy=("known_difference_1", *policy) if "NaN" in flags else policy,
        written=("kv_cache",),
        state_cache=cache,
        positions=positions,
        **inputs,
    )


def _lanes(*values: float) -> NDArray[np.float32]:
    """One number per lane of 128 columns, in every position: [1, W]."""
    return np.repeat(fp32(*values), _WIDTH)[None]


def _ramp(rows: int, lanes: int = 1) -> NDArray[np.float32]:
    """A kv that differs from position to position and from group of columns to group: [rows, W]."""
    columns = np.repeat(fp32(1, -2, 4, 0.5), _WIDTH // 4)
    heights = fp32(*(row % 7 - 2.5 for row in range(rows)))[:, None]
    lane = np.repeat(fp32(1, 3)[:lanes], _WIDTH)
    return heights * np.tile(columns, lanes) * lane


def _compressed() -> Iterator[Vector]:
    for layout in ("indexer_mxfp4", "indexer_fp8"):
        yield _compress(
            f"{layout}.ones",
            "all kv 1 and all scores equal: the pooled row is 1",
            ("Any",),
            np.broadcast_to(_lanes(1, 1), (4, 256)),
            np.zeros((4, 256), np.float32),
            positions=int64(3),
            layout=layout,
            policy=(),
        )
    ramp, flat = _ramp(12, 2), np.zeros((12, 256), np.float32)
    steps = np.arange(12, dtype=np.float32)[:, None] % 5 * np.ones(256, np.float32)
    yield _compress(
        "overlap",
        "the older group is read from the first lane, the newer from the second",
        ("Overlap", "Window"),
        ramp,
        flat,
        positions=int64(11, 7, 3),
    )
    yield _compress(
        "scores",
        "weights fall with the distance from the largest score",
        ("Overlap",),
        ramp,
        steps,
        positions=int64(11, 7, 3),
    )
    yield _compress(
        "missing",
        "the first group has no older one: nothing stands in for it",
        ("Missing", "Overlap"),
        ramp,
        np.repeat(fp32(0, -3, -1, 2), 64) + steps,
        positions=int64(3, 0, 3),
    )
    yield _compress(
        "missing-low",
        "nor does a row of low score: the others have scores of -30,000",
        ("Missing", "Overlap"),
        ramp,
        steps - 30000,
        positions=int64(3),
    )
    yield _compress(
        "group-ends",
        "only the last position of a group publishes",
        ("Window", "Unowned"),
        ramp,
        flat,
        positions=int64(4, 5, 6, 7),
    )
    yield _compress(
        "skipped",
        "a token without a slot, or without a slot of the cache, publishes nothing",
        ("Skipped", "Unowned"),
        ramp,
        flat,
        positions=int64(3, 7, 11),
        slot_mapping=int64(-1, 5, 3),
        kv_slot_mapping=int64(0, -1, 2),
    )
    beyond = int64(0, 1 << 33, 1)
    yield _compress(
        "beyond",
        "a slot beyond the cache is skipped",
        ("OutOfRange", "Unowned"),
        ramp,
        flat,
        positions=int64(3, 7, 11),
        kv_slot_mapping=beyond,
        reference={"kv_slot_mapping": int64(0, -1, 1)},
    )
    yield _compress(
        "position",
        "the entry is rotated with the first position of its group",
        ("Position",),
        _ramp(12),
        np.zeros((12, 128), np.float32),
        positions=int64(11, 3),
        overlap=False,
        layout="indexer_fp8",
    )
    weight = bf16(np.tile(fp32(1, 2, -1, 0), 32))
    yield _compress(
        "weight",
        "the weight is applied before the rotation",
        ("Position", "SignedZero"),
        ramp,
        flat,
        positions=int64(11, 7),
        weight=weight,
        layout="indexer_fp8",
    )
    yield from _odd_scores()
    yield from _orders()


def _odd_scores() -> Iterator[Vector]:
    """Scores that are not ordinary numbers."""
    kv = _ramp(4)

    def one(
        name: str, comment: str, flags: tuple[str, ...], score: Array, kv: Array = kv
    ) -> Vector:
        return _compress(
            name, comment, flags, kv, score, positions=int64(3), overlap=False, layout="indexer_fp8"
        )

    score = np.zeros((4, 128), np.float32)
    masked = score.copy()
    masked[:3, ::2] = -np.inf
    yield one(
        "masked", "-infinity masks a row while another score is above it", ("Infinity",), masked
    )
    gone = score.copy()
    gone[:, 7] = -np.inf
    yield one(
        "nothing-weighs",
        "every score of a column -infinity: its row is NaN",
        ("NaN", "Infinity"),
        gone,
    )
    bad = score.copy()
    bad[1, 9] = np.nan
    yield one("nan-score", "a NaN score makes its column NaN, and so the row", ("NaN",), bad)
    high = score.copy()
    high[1, 9] = np.inf
    yield one("infinite-score", "so does a score of +infinity", ("NaN", "Infinity"), high)
    hidden = kv.copy()
    hidden[0, 3] = np.inf
    away = score.copy()
    away[0, 3] = -200
    yield one(
        "hidden-infinity",
        "a weight of 0 does not hide an infinity",
        ("NaN", "Infinity"),
        away,
        hidden,
    )
    large = score.copy()
    large[:] = fp32(1e4, 1e4 - 1, 9000, 1e4 - 2)[:, None]
    yield one(
        "large-scores", "scores of 10,000: the largest is subtracted first", ("Saturation",), large
    )
    low = score - np.float32(3e4)
    yield one("low-scores", "scores of -30,000", ("Saturation",), low)
    apart = score.copy()
    apart[:, ::2] = fp32(-60, -100, -160, -90)[:, None]
    yield one("columns-apart", "each column has its own largest score", ("Window",), apart)
    yield one("zeros", "kv 0: the scale of a zero group", ("Floor",), score, np.zeros_like(kv))
    huge = kv * np.float32(1e30)
    yield one(
        "overflow", "a mean square beyond fp32: finite columns become 0", ("Infinity",), score, huge
    )


def _orders() -> Iterator[Vector]:
    """Windows whose sum shows its order: terms near +-2^27 that cancel, and what is left of them."""
    signs = {
        2: (1, -1),
        8: (1, -1, -1, 1, -1, 1, 1, -1),
        16: (1, 1, -1, -1, 1, -1, 1, -1) * 2,
        32: ((1,) * 16 + (-1,) * 16),
    }
    for ratio, sign in signs.items():
        numbers = Numbers(f"edge order {ratio}")
        kv = fp32(*sign)[:, None] * np.float32(2.0**27) + np.rint(numbers.bell(ratio, 128) * 100)
        yield _compress(
            f"order.{ratio}",
            f"{ratio} rows of equal scores: a tree of adjacent pairs",
            ("Order",),
            kv.astype(np.float32),
            np.zeros((ratio, 128), np.float32),
            positions=int64(ratio - 1),
            ratio=ratio,
            overlap=False,
            layout="indexer_fp8",
        )


def _latents() -> Iterator[Vector]:
    """`rope_quant_insert`."""
    table = build_cos_sin_cache(12)

    def latents(
        name: str,
        comment: str,
        flags: tuple[str, ...],
        latent: Array,
        positions: Array,
        *,
        ratio: int = 1,
        layout: str = "v41_mxfp8",
        slots: Array | None = None,
        trip: bool = False,
        **more: Any,
    ) -> Vector:
        count = len(positions)
        return make(
            f"rope_quant.{name}",
            _LATENT,
            comment,
            {
                "compress_ratio": ratio,
                "layout": layout,
                "bf16_round_trip": trip,
                "kv_block_size": 2,
            },
            flags=flags,
            written=("kv_cache",),
            latent=latent,
            positions=positions,
            cos_sin_cache=table,
            kv_cache=cache_of(LAYOUTS[layout], -(-count // 2), 2, 3),
            slot_mapping=np.arange(count, dtype=np.int64)[::-1].copy() if slots is None else slots,
            **more,
        )

    row = np.tile(fp32(1, -0.5, 3, 0.125), 128)[None]
    three = bf16(np.concatenate([row, row * 2, -row]))
    for layout in LAYOUTS.values():
        if layout.head_dim == 512:
            yield latents(
                f"{layout.name}.row",
                "a row at position 5",
                ("Position",),
                three[:1],
                int64(5),
                layout=layout.name,
            )
    bits = Numbers("edge latents").between(0x3F00, 0x4080, 2, 512)
    for trip in (False, True):
        yield latents(
            "round-trip" if trip else "no-round-trip",
            f"the rotated row is {'' if trip else 'not '}rounded to bf16 before it is quantized",
            ("Rounding",),
            bf16_bits(bits),
            int64(7, 11),
            trip=trip,
        )
    yield latents(
        "ratio-2",
        "odd positions alone publish, rotated with the even position before them",
        ("Position", "Unowned"),
        three,
        int64(3, 4, 9),
        ratio=2,
    )
    yield latents(
        "skipped",
        "slots below 0 skip their tokens",
        ("Skipped", "Unowned"),
        three,
        int32(3, 4, 9),
        slots=int32(2, -1, -9),
    )
    yield latents(
        "beyond",
        "slots beyond the cache, and positions below 0 or beyond the table, are skipped",
        ("OutOfRange", "Unowned"),
        three,
        int64(12, -1, 5),
        slots=int64(0, 1, 1 << 32),
        reference={"slot_mapping": int64(-1, -1, -1)},
    )


def _rings() -> Iterator[Vector]:
    """`pool_ring_latent`. Rows hold two numbers, one in the first 128 columns and one in the others."""

    def rows(kv: Sequence[float], score: Sequence[float]) -> NDArray[np.float32]:
        pattern = np.where(np.arange(512) < 128, np.float32(-3), np.float32(1))
        left = fp32(*kv)[:, None] * pattern
        right = np.repeat(fp32(*score), 512).reshape(-1, 512)
        return np.concatenate([left, right], axis=1)

    ring = np.stack(
        [
            rows((11, 12, 13, 14), (0, 0.5, 1, 1.5)),
            rows((-21, -22, -23, -24), (0.25, 0.75, -1, 2)),
        ]
    )
    blank = bf16_bits(np.full((5, 512), 0xA5A5))

    def pooled(
        name: str,
        comment: str,
        flags: tuple[str, ...],
        positions: Array,
        slots: Array,
        starts: Array,
        owner: Array,
        *,
        score: Sequence[float] = (1, 0, 2, -1, 0.5),
        **more: Any,
    ) -> Vector:
        count = len(slots)
        return make(
            f"ring.{name}",
            _RING,
            comment,
            {"rms_norm_eps": 1e-6, "compress_ratio": 2},
            flags=flags,
            policy=("known_difference_6",),
            written=("state_cache", "latent_out"),
            kv_score=rows((1, -2, 3, 5, 0.25)[:count], score[:count]),
            positions=positions,
            state_cache=ring,
            slot_mapping=slots,
            query_start_loc=starts,
            token_to_req_indices=owner,
            rms_norm_weight=np.repeat(fp32(1, 2), 256),
            latent_out=blank[: count + 1] if count < 5 else blank,
            **more,
        )

    yield pooled(
        "chunk",
        "pairs within a chunk; a token that closes no pair leaves its row",
        ("Window", "Unowned"),
        int64(4, 5, 6),
        int64(0, 1, 2),
        int32(0, 3),
        int32(0, 0, 0),
    )
    yield pooled(
        "decode",
        "the predecessor is in the ring",
        ("Window",),
        int64(7, 5),
        int64(3, 5),
        int32(0, 1, 2),
        int32(0, 1),
    )
    yield pooled(
        "borders",
        "the token before belongs to another request",
        ("Window",),
        int64(4, 7, 1),
        int64(0, 7, 1)[:2],
        int32(0, 1, 2),
        int32(0, 1, 1),
    )
    yield pooled(
        "long",
        "more tokens than the ring has rows: the last ones stay, and are read before they are written",
        ("Window",),
        int64(3, 4, 5, 6, 7),
        int64(7, 4, 5, 6, 7),
        int32(0, 5),
        int32(0, 0, 0, 0, 0),
    )
    yield pooled(
        "hidden",
        "skipped tokens are no predecessors and are not stored",
        ("Skipped", "Unowned"),
        int64(4, 5, 6, 7),
        int64(-1, 1, 2, 3),
        int32(0, 4),
        int32(0, 0, 0, 0),
    )
    yield make(
        "ring.ratio-1",
        _RING,
        "no ring: every token is normed by itself",
        {"rms_norm_eps": 1e-6, "compress_ratio": 1, "state_cache": None},
        flags=("Unowned", "Skipped"),
        policy=("known_difference_6",),
        written=("latent_out",),
        kv_score=np.ascontiguousarray(rows((1, 2, 3), (0, 0, 0))[:, :512]),
        positions=int64(0, 1, 2),
        slot_mapping=int64(0, -1, 0),
        query_start_loc=int32(0, 3),
        token_to_req_indices=int32(0, 0, 0),
        rms_norm_weight=np.repeat(fp32(1, 2), 256),
        latent_out=blank[:4],
    )


# --- sparse indices -------------------------------------------------------------------


def sparse_index() -> Iterator[Vector]:
    """The three index builders."""
    yield from _globals()
    yield from _combined()
    yield from _mixtures()


def _matrix(*rows: Sequence[int], dtype: type = np.int32) -> Array:
    """Rows of integers."""
    return np.array(rows, dtype)


def _globals() -> Iterator[Vector]:
    def one(
        name: str,
        comment: str,
        flags: tuple[str, ...],
        local: Array,
        *,
        size: int = 64,
        **more: Any,
    ) -> Vector:
        tokens = len(local)
        return make(
            f"global.{name}",
            _GLOBAL,
            comment,
            {"block_size": size},
            flags=flags,
            topk_indices=local,
            **{
                "token_to_req_indices": np.zeros(tokens, np.int32),
                "block_table": _matrix([7, 3]),
                "is_valid_token": np.ones(tokens, np.bool_),
                **more,
            },
        )

    yield one("spec-1", "an example of the clause", ("Page",), _matrix([0, 63, 64, -1]))
    yield one("spec-2", "holes keep their columns", ("Length",), _matrix([-1, 5, -1, 127]))
    yield one(
        "requests",
        "each token through the row of its own request",
        ("Page",),
        _matrix([0, 64], [0, 64], [1, -1]),
        token_to_req_indices=int64(1, 0, 1),
        block_table=_matrix([7, 3], [2, 9]),
    )
    yield one(
        "invalid",
        "an invalid token has length 0; its entries are mapped all the same",
        ("Length",),
        _matrix([0, 1], [0, -1]),
        is_valid_token=np.array([False, True]),
    )
    yield one(
        "int64",
        "int64 indices, a block size that is no power of two",
        ("Page",),
        _matrix([0, 19, 20, 39], dtype=np.int64),
        size=20,
    )
    yield one("below-0", "every number below 0 is -1", ("Length",), _matrix([-1, -7, -(1 << 31)]))
    yield one(
        "beyond",
        "a column beyond the table",
        ("OutOfRange",),
        _matrix([127, 128, 1 << 30]),
        reference=_SKIP,
    )
    yield one(
        "pages",
        "a page below 0 gives -1, and nothing else below 0",
        ("OutOfRange",),
        _matrix([0, 64, 128]),
        block_table=_matrix([-1, -5, 4]),
        reference=_SKIP,
    )
    yield one(
        "last-slots",
        "slots up to the last of int32; one more is -1, not a wrapped number",
        ("OutOfRange",),
        _matrix([0, 63, 64, 127, 128]),
        block_table=_matrix([(1 << 25) - 1, 1 << 25, 1 << 26]),
        reference=_SKIP,
    )
    yield one(
        "wide",
        "pages that wrap to small slots in 32 bits",
        ("OutOfRange",),
        _matrix([3, 64, 130], dtype=np.int64),
        block_table=_matrix([1 << 32, (1 << 58) + 1, 5], dtype=np.int64),
        reference=_SKIP,
    )
    yield one(
        "request-beyond",
        "requests that do not exist",
        ("OutOfRange",),
        _matrix([0], [0], [0]),
        token_to_req_indices=int32(1, -1, 0),
        reference=_SKIP,
    )


def _combined() -> Iterator[Vector]:
    def one(
        name: str,
        comment: str,
        flags: tuple[str, ...],
        local: Array,
        starts: Array,
        lens: Array,
        gathered: Array | None = None,
        *,
        window: int = 3,
        ratio: int = 2,
        rows: int = 8,
        compressed: int = 3,
        **more: Any,
    ) -> Vector:
        return make(
            f"combine.{name}",
            _COMBINE,
            comment,
            {
                "window_size": window,
                "compress_ratio": ratio,
                "topk": local.shape[1],
                "M": rows,
                "N": compressed,
            },
            flags=flags,
            topk_indices=local,
            query_start_loc=starts,
            seq_lens=lens,
            gather_lens=lens if gathered is None else gathered,
            **more,
        )

    examples = ((0, [2, 0]), (1, [2, 0]), (4, [2, 0]), (4, [-1, 3]))
    for number, (pos, local) in enumerate(examples, 1):
        yield one(
            f"spec-{number}",
            "an example of the clause",
            ("Window", "Length"),
            _matrix(local),
            int32(0, 1),
            int32(pos + 1),
        )
    yield one(
        "query",
        "a query of five from the first position: the count of compressed rows steps",
        ("Window",),
        _matrix(*[[0, 1]] * 5),
        int32(0, 5),
        int32(5),
    )
    yield one(
        "requests",
        "the rows of request 1 lie M further; starts need not begin at 0",
        ("Window",),
        _matrix([1, 0], [0, 1], [2, 1]),
        int64(700, 701, 703),
        int64(5, 4),
    )
    yield one(
        "gathered",
        "a window that begins before the first gathered row",
        ("Window",),
        _matrix([1, 0], [0, 1]),
        int32(0, 2),
        int32(9),
        int32(3),
    )
    yield one(
        "ratio-0",
        "no compressed rows",
        ("Window",),
        _matrix([1, 0]),
        int32(0, 1),
        int32(5),
        ratio=0,
        compressed=0,
    )
    yield one(
        "below-0",
        "a query longer than its sequence: positions below 0 have length 0",
        ("Missing", "Length"),
        _matrix([0, 1], [0, 1], [0, 1]),
        int32(0, 3),
        int32(1),
    )
    yield one(
        "columns",
        "128 columns and one more: 256",
        ("Alignment",),
        _matrix([0] * 2),
        int32(0, 1),
        int32(4),
        window=127,
    )
    yield one(
        "outside-n",
        "an index of N or more is -1, and counted",
        ("Length",),
        _matrix([3, 2], [-5, 0]),
        int32(0, 2),
        int32(5),
    )
    yield one(
        "no-request",
        "tokens of no request have length 0",
        ("Length",),
        _matrix([0, 1], [0, 1]),
        int32(0, 1),
        int32(4),
    )
    yield one(
        "fewer-rows",
        "more rows are gathered than M has room for",
        ("OutOfRange",),
        _matrix([0, 1]),
        int32(0, 1),
        int32(6),
        rows=6,
        window=5,
        reference=_SKIP,
    )
    yield one(
        "beyond-int32",
        "the second request has rows beyond int32",
        ("OutOfRange",),
        _matrix([0, 1], [0, 1], [0, 1]),
        int32(0, 1, 3),
        int32(6, 6),
        rows=(1 << 30) + 1,
        compressed=(1 << 30) - 5,
        reference={**_SKIP},
    )


def _mixtures() -> Iterator[Vector]:
    base: dict[str, Any] = {
        "decode_swa_indices": np.zeros((0, 3), np.int32),
        "prefill_topk_indices": _matrix([1, 0]),
        "query_start_loc": int32(0, 1),
        "seq_lens": int32(1),
        "token_to_req_indices": int32(0),
        "swa_block_table": _matrix([5, 6]),
        "compressed_block_table": _matrix([9, 4]),
    }

    def one(
        name: str, comment: str, flags: tuple[str, ...], reference: Any = None, **changed: Any
    ) -> Vector:
        given: dict[str, Any] = {
            "decode_compressed_indices": None,
            "decode_compressed_topk_lens": None,
            "swa_block_size": 4,
            "compressed_block_size": 2,
            "window_size": 3,
            "compress_ratio": 2,
            "topk": 2,
            **base,
            **changed,
        }
        arrays: dict[str, Any] = {n: v for n, v in given.items() if isinstance(v, np.ndarray)}
        parameters = {n: v for n, v in given.items() if n not in arrays}
        return make(
            f"mixed.{name}", _MIXED, comment, parameters, flags=flags, reference=reference, **arrays
        )

    for number, (pos, top) in enumerate(((0, [1, 0]), (1, [1, 0]), (4, [2, -1])), 1):
        yield one(
            f"spec-{number}",
            "an example of the clause",
            ("Window", "Alignment"),
            prefill_topk_indices=_matrix(top),
            seq_lens=int32(pos + 1),
        )
    query: dict[str, Any] = {
        "prefill_topk_indices": _matrix([0, 1], [1, 0], [1, -1]),
        "query_start_loc": int32(0, 3),
        "seq_lens": int32(6),
        "token_to_req_indices": int32(0, 0, 0),
    }
    yield one("query", "three tokens of one query", ("Window", "Length"), **query)
    yield one(
        "replay",
        "the window begins at the replayed position",
        ("Window",),
        **query,
        replay_start=int64(4),
    )
    yield one(
        "spans",
        "pages that lie further apart than they have rows",
        ("Page",),
        **query,
        swa_block_span=7,
        compressed_block_span=3,
    )
    yield one("ratio-0", "no compressed rows", ("Window",), **query, compress_ratio=0)
    decode: dict[str, Any] = {
        "decode_swa_indices": _matrix([8, -1, 9], [3, 4, -6]),
        "prefill_topk_indices": np.zeros((0, 2), np.int32),
        "query_start_loc": int32(0, 1, 2),
        "seq_lens": int32(6, 3),
        "token_to_req_indices": int32(1, 0),
        "compressed_block_table": _matrix([9, 4], [1, 2]),
        "swa_block_table": _matrix([5, 6], [7, 8]),
    }
    local = _matrix([1, -1, 3, 0, 2], [0, 1, -1, -1, -4])
    yield one("decode-none", "decode tokens without compressed indices", ("Length",), **decode)
    yield one(
        "decode-slots",
        "slots as given; the length is the full width",
        ("Length", "Alignment"),
        **decode,
        decode_compressed_indices=local,
    )
    yield one(
        "decode-slots-lens",
        "slots as given, with lengths; the valid flags have no effect",
        ("Length",),
        **decode,
        decode_compressed_indices=local,
        decode_compressed_topk_lens=int32(2, 5),
        decode_is_valid_token=np.array([False, True]),
    )
    yield one(
        "decode-local",
        "local indices are mapped; an invalid token counts none",
        ("Length", "Page"),
        **decode,
        decode_compressed_indices=local,
        decode_compressed_indices_are_local=True,
        decode_is_valid_token=np.array([True, False]),
    )
    yield one(
        "decode-prefill",
        "one decode token before a query of two; rows of 16 bytes",
        ("Alignment",),
        decode_swa_indices=_matrix([8, -1, 9]),
        decode_compressed_indices=local[:1],
        decode_compressed_indices_are_local=True,
        prefill_topk_indices=_matrix([0, 1], [1, 0]),
        query_start_loc=int64(50, 51, 53),
        seq_lens=int64(6, 5),
        token_to_req_indices=int64(0, 1, 1),
        swa_block_table=_matrix([5, 6], [7, 8]),
        compressed_block_table=_matrix([9, 4], [1, 2]),
    )
    yield one(
        "below-0",
        "a query longer than its sequence",
        ("Missing", "Length"),
        **{**query, "seq_lens": int32(1)},
    )
    yield one(
        "beyond",
        "columns beyond the tables, and pages that do not exist",
        ("OutOfRange",),
        _SKIP,
        **{**query, "prefill_topk_indices": _matrix([9, 1], [1, 4], [0, 3])},
        swa_block_table=_matrix([5]),
        compressed_block_table=_matrix([-3, 1 << 30]),
    )
    yield one(
        "wide",
        "pages that wrap to small slots in 32 bits",
        ("OutOfRange",),
        _SKIP,
        **query,
        swa_block_table=_matrix([1 << 32, (1 << 32) + 1], dtype=np.int64),
        compressed_block_table=_matrix([1 << 31, 4], dtype=np.int64),
    )
    yield one(
        "request-beyond",
        "requests that do not exist",
        ("OutOfRange",),
        _SKIP,
        **{**query, "token_to_req_indices": int32(1, -1, 0)},
    )
