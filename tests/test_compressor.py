"""`reference.compressor` against loops over exact fractions, float64, and recorded H200 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import mpmath  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest
import slow_compressor as plain
import slow_oracle as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4num import ArgumentError, Dsv4numError, ValueRangeError, get_layout
from dsv4num.reference import (
    compress_norm_rope_store,
    compressor,
    decode_records,
    pool_ring_latent,
    read_records,
    rope_quant_insert,
    save_partial_states,
)
from dsv4num.reference.arithmetic import rms_norm
from dsv4num.reference.rope import build_cos_sin_cache

BF16 = ml_dtypes.bfloat16
FILLS = (0xA5, 0x5A)
EPS = 1e-6
LAW = settings(max_examples=25, deadline=None, derandomize=True)
LATENT_LAYOUTS = tuple(name for name, facts in slow.LAYOUTS.items() if facts[0] == 512)
NAN, INF = float("nan"), float("inf")
FILE = np.load(Path(__file__).parent / "vectors" / "h200_triton36.npz", allow_pickle=False)


def case(name: str) -> dict[str, np.ndarray]:
    """The arrays of one recorded case."""
    return {key.split("/")[1]: FILE[key] for key in FILE.files if key.split("/")[0] == name}


def bits(x: np.ndarray) -> list[Any]:
    """fp32 bit patterns as nested lists."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32).tolist()


def numbers(x: np.ndarray) -> list[slow.Number]:
    """Exact values of an fp32 or bf16 vector."""
    return [slow.fp32_value(b) for b in bits(x.astype(np.float32))]


def weights(dim: int, seed: int, *, bf16: bool = False) -> np.ndarray:
    """Weights around one, some zero, some negative."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(1, 0.4, dim).astype(np.float32)
    weight[3::17], weight[5::13] = 0, -weight[5::13]
    return weight.astype(BF16) if bf16 else weight


def turns(rows: int) -> np.ndarray:
    """A cosine table whose rows differ a lot, quickly made."""
    angles = np.arange(rows)[:, None] * 1.37 ** -np.arange(32.0)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


# --- a world of requests --------------------------------------------------------------


@dataclass
class World:
    """Requests with their data, their blocks and their slots; launches fill state and cache."""

    layout: str
    ratio: int
    overlap: bool
    lengths: Sequence[int]
    state_block: int = 4
    page_rows: int = 4
    seed: int = 0
    fill: int = 0xA5
    stale: float = NAN
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.dim = get_layout(self.layout).head_dim
        self.width = self.dim * (2 if self.overlap else 1)
        longest = max(self.lengths)
        self.kv = [rng.normal(0, 1, (n, self.width)).astype(np.float32) for n in self.lengths]
        self.score = [rng.normal(0, 2, (n, self.width)).astype(np.float32) for n in self.lengths]
        self.ape = rng.normal(0, 1, (self.ratio, self.width)).astype(np.float32)
        columns = -(-longest // self.state_block) + 1
        blocks = rng.permutation(len(self.lengths) * columns + 2)[: len(self.lengths) * columns]
        self.table = blocks.reshape(len(self.lengths), columns).astype(np.int32)
        shape = (len(self.lengths) * columns + 2, self.state_block, 2 * self.width)
        self.state = np.full(shape, self.stale, np.float32)
        groups = longest // self.ratio + 1
        pages = -(-len(self.lengths) * groups // self.page_rows) + 1
        slots = rng.permutation(pages * self.page_rows)[: len(self.lengths) * groups]
        self.kv_slots = slots.reshape(len(self.lengths), groups)
        stride = get_layout(self.layout).page_bytes(self.page_rows) + 64
        self.cache = np.full((pages, stride), self.fill, np.uint8)
        self.cos_sin = turns(longest + 1)
        if self.weight is None:
            self.weight = weights(self.dim, self.seed)

    def launch(self, *chunks: tuple[int, int, int], padding: int = 0, store: bool = True) -> None:
        """One call of both operations over (request, first, end) chunks, then padding tokens."""
        request = np.concatenate([[q] * (end - first) for q, first, end in chunks] or [[]])
        at = np.concatenate([np.arange(first, end) for _, first, end in chunks] or [[]])
        request, at = request.astype(np.int64), at.astype(np.int64)
        junk = np.full((padding, self.width), NAN, np.float32)
        kv = np.concatenate([self.kv[q][first:end] for q, first, end in chunks] + [junk])
        score = np.concatenate([self.score[q][first:end] for q, first, end in chunks] + [junk])
        slots = self.table[request, at // self.state_block].astype(np.int64) * self.state_block
        slots = np.concatenate([slots + at % self.state_block, np.full(padding, -1)])
        kv_slots = np.concatenate([self.kv_slots[request, at // self.ratio], np.full(padding, 3)])
        request = np.concatenate([request, np.full(padding, -9)]).astype(np.int32)
        at = np.concatenate([at, np.full(padding, -77)])
        if store:
            save_partial_states(
                kv, score, self.ape, at, self.state, slots, compress_ratio=self.ratio
            )
        compress_norm_rope_store(
            self.state,
            request,
            at,
            slots,
            self.table,
            self.cos_sin,
            self.cache,
            kv_slots,
            self.weight,
            EPS,
            compress_ratio=self.ratio,
            overlap=self.overlap,
            layout=self.layout,
            kv_block_size=self.page_rows,
        )

    def records(self, request: int, count: int) -> np.ndarray:
        """The first records of a request."""
        return read_records(
            self.cache, self.kv_slots[request, :count], self.page_rows, layout=self.layout
        )

    def state_rows(self, request: int, first: int, end: int) -> np.ndarray:
        """State rows of positions, as bit patterns."""
        at = np.arange(first, end)
        rows = self.state[self.table[request, at // self.state_block], at % self.state_block]
        return rows.view(np.uint32)

    def expect(self, request: int, group: int) -> bytes:
        """The record of one group by the slow oracle."""
        position = group * self.ratio + self.ratio - 1
        width = get_layout(self.layout).row_bytes
        buffer = bytearray(width)
        plain.compress(
            bits(self.state),
            [request],
            [position],
            [0],
            self.table.tolist(),
            bits(self.cos_sin),
            buffer,
            width,
            [0],
            1,
            numbers(self.weight),
            plain.from_bits(bits(np.float32([EPS]))[0]),
            self.ratio,
            self.overlap,
            self.layout,
        )
        return bytes(buffer)


def same(one: World, other: World) -> None:
    """Caches and states are equal, bit for bit."""
    assert np.array_equal(one.cache, other.cache)
    assert np.array_equal(one.state.view(np.uint32), other.state.view(np.uint32))


# --- recorded bytes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "owned"),
    [
        ("compress_csa", "v4", 12 * 584),
        ("compress_hca", "v4", 584),
        ("compress_hca2", "v4", 2 * 584),
        ("compress_idx8", "indexer_fp8", 15 * 132),
    ],
)
def test_recorded_compress(name: str, layout: str, owned: int) -> None:
    c = case(name)
    cache = np.full(c["cache"].shape, c["fill"].item(), np.uint8)
    state = c["state_cache"].copy()
    compress_norm_rope_store(
        state,
        c["token_to_req_indices"],
        c["positions"],
        c["slot_mapping"],
        c["block_table"],
        c["cos_sin_cache"],
        cache,
        c["kv_slot_mapping"],
        c["rms_norm_weight_bf16"].view(BF16),
        c["rms_norm_eps"].item(),
        compress_ratio=c["compress_ratio"].item(),
        overlap=c["overlap"].item(),
        layout=layout,
        kv_block_size=c["kv_block_size"].item(),
    )
    assert np.argwhere(cache != c["cache"]).tolist() == []
    assert owned - 40 < int((cache != c["fill"]).sum()) <= owned
    assert np.array_equal(state, c["state_cache"])


@pytest.mark.parametrize("name", ["save_states_csa", "save_states_hca"])
def test_recorded_states(name: str) -> None:
    c = case(name)
    state = np.full(c["state_cache"].shape, c["fill"].item(), np.float32)
    save_partial_states(
        c["kv"],
        c["score"],
        c["ape"],
        c["positions"],
        state,
        c["slot_mapping"],
        compress_ratio=c["compress_ratio"].item(),
    )
    assert np.array_equal(state.view(np.uint32), c["state_cache"].view(np.uint32))
    assert (c["slot_mapping"] < 0).any() and (state != c["fill"]).any()


# --- save_partial_states --------------------------------------------------------------


@pytest.mark.parametrize("fill", [9.0, -3.0])
def test_states_by_loops(fill: float) -> None:
    rng = np.random.default_rng(1)
    width, ratio, slots, at = 6, 4, [7, -1, 0, 11, -5], [5, 2, 3, 1024, 9]
    kv, score = rng.normal(0, 1, (2, 7, width)).astype(np.float32)
    ape = rng.normal(0, 1, (ratio, width)).astype(np.float32)
    score[0, 1], score[2, 2], score[3, 3] = INF, -INF, NAN
    kv.view(np.uint32)[0, 0] = 0xFF812345  # a NaN whose payload must survive
    ape[0, 1], ape[1, 1] = 1, -INF
    want = np.full((3, 4, 2 * width), fill, np.float32).view(np.uint32).tolist()
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        row = want[slot // 4][slot % 4]
        row[:width] = bits(kv[token])
        biased = zip(numbers(score[token]), numbers(ape[at[token] % ratio]), strict=True)
        sums = [plain.add(a, b) for a, b in biased]
        row[width:] = [0x7FFFFFFF if slow.is_nan(x) else slow.fp32_bits(x) for x in sums]
    for dtype in (np.int32, np.int64):
        state = np.full((3, 4, 2 * width), fill, np.float32)
        inputs = kv.copy(), score.copy(), ape.copy()
        positions, slot_mapping = np.array([*at, 3], dtype), np.array(slots, dtype)
        save_partial_states(*inputs, positions, state, slot_mapping, compress_ratio=ratio)
        assert bits(state) == want
        assert [bits(x) for x in inputs] == [bits(x) for x in (kv, score, ape)]


def test_states_strided_inputs_and_state() -> None:
    rng = np.random.default_rng(2)
    wide = rng.normal(0, 1, (5, 40)).astype(np.float32)
    kv, score = wide[:, 3:11], wide[::2, 20:28]
    ape = rng.normal(0, 1, (2, 16)).astype(np.float32)[:, :8]
    want = np.full((3, 2, 16), 9, np.float32)
    arguments = np.int64([4, 5, 6]), np.int64([5, 0, 3])
    save_partial_states(
        kv.copy(), score.copy(), ape.copy(), arguments[0], want, arguments[1], compress_ratio=2
    )
    for view in (
        np.full((3, 2, 24), 9, np.float32)[:, :, :16],  # a row stride
        np.full((3, 3, 16), 9, np.float32)[:, :2],  # a block stride
        np.full((2, 3, 16), 9, np.float32).transpose(1, 0, 2),  # blocks inside rows
    ):
        save_partial_states(kv, score, ape, arguments[0], view, arguments[1], compress_ratio=2)
        assert np.array_equal(view, want)


# --- compress_norm_rope_store against the slow oracle ---------------------------------


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("layout", "ratio", "overlap", "length"),
    [
        ("indexer_fp8", 4, True, 9),
        ("indexer_mxfp4", 4, True, 8),
        ("indexer_fp8", 1, False, 2),
        ("indexer_fp8", 1, True, 3),
        ("indexer_mxfp4", 16, False, 16),
        ("v4", 2, True, 4),
        ("v4_fnuz", 2, False, 4),
    ],
)
def test_compress_by_loops(layout: str, ratio: int, overlap: bool, length: int, fill: int) -> None:
    w = World(layout, ratio, overlap, [length], seed=ratio, fill=fill)
    w.launch((0, 0, length), padding=2)
    groups = length // ratio
    got = w.records(0, groups)
    for group in range(groups):
        assert got[group].tobytes() == w.expect(0, group)
    written = np.full_like(w.cache, 0)
    slots = w.kv_slots[0, :groups]
    rows = np.full((groups, got.shape[1]), 1, np.uint8)
    compressor.write_records(rows, written, slots, w.page_rows, layout=layout)
    assert (w.cache[written == 0] == fill).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (2, 200), (8, 100), (128, 12)])
def test_pooled_bits_by_loops(rows: int, columns: int) -> None:
    """Bytes show few of the bits of a pooled value; here all 32 are compared."""
    rng = np.random.default_rng(rows)
    kv = rng.normal(0, 1, (rows, columns)).astype(np.float32)
    score = rng.normal(0, 4, (rows, columns)).astype(np.float32)
    for missing in {0, rows // 2}:
        present = np.arange(rows) >= missing
        pairs = [list(zip(numbers(kv[r]), numbers(score[r]), strict=True)) for r in range(rows)]
        want = [
            plain.pool([pairs[r][column] if present[r] else None for r in range(rows)])
            for column in range(columns)
        ]
        got = compressor._pool(kv[None], score[None], present[None])
        assert bits(got[0]) == [slow.fp32_bits(x) for x in want]


def special_columns(w: World) -> None:
    """Scores and kv of request 0, tokens 0 to 3, that rounding alone does not explain."""
    kv, score = w.kv[0], w.score[0]
    w.ape[:] = 0
    score[:, 0] = 1e4
    score[:, 1] = -1e4
    score[:2, 2], score[2:, 2] = 1e4, -1e4
    score[:3, 3] = -INF
    score[:, 4] = 7.25  # ties
    score[:, 5] = [0.0, -0.0, 0.0, -0.0]
    score[:, 6] = [0, -87, np.nextafter(np.float32(-87), np.float32(-88)), -86.99]
    score[:, 7] = [3e38, -3e38, 3e38, 0]  # differences beyond fp32
    kv[:, 8] = 0
    kv[:, 9] = -0.0
    kv[:, 10] = [1e-45, -1e-45, 3e-39, 0]
    score[:, 10] = [0, 0, -1, 2]
    kv[:, 11] = 2.0**20
    kv[:, 12] = [1e6, -1e6, 1e6, -1e6]
    score[:, 12] = 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("layout", ["indexer_fp8", "indexer_mxfp4"])
def test_special_values(layout: str, bf16: bool) -> None:
    w = World(layout, 4, False, [4], seed=5, weight=weights(128, 6, bf16=bf16))
    special_columns(w)
    w.launch((0, 0, 4))
    assert w.records(0, 1)[0].tobytes() == w.expect(0, 0)


@pytest.mark.parametrize(
    ("kv", "score"),
    [
        (None, NAN),
        (None, INF),
        (None, -INF),  # in all rows: nothing to weigh
        (NAN, None),
        (NAN, -INF),  # weight 0, still not hidden
        (INF, None),
        (INF, -INF),
    ],
)
@pytest.mark.parametrize("layout", ["v4", "indexer_fp8", "indexer_mxfp4"])
def test_poison_in_one_column_fills_the_row(
    layout: str, kv: float | None, score: float | None
) -> None:
    w = World(layout, 2, False, [2])
    rows = slice(0, 2) if score == -INF and kv is None else slice(1, 2)
    if kv is not None:
        w.kv[0][rows, 9] = kv
    if score is not None:
        w.score[0][rows, 9] = score
    w.launch((0, 0, 2))
    got = w.records(0, 1)[0].tobytes()
    values = decode_records(np.frombuffer(got, np.uint8)[None], layout)[0]
    if kv == INF and score is None:  # inv_rms is 0: the others are zeros, infinity becomes NaN
        assert np.isnan(values[9].astype(np.float32)) or layout == "indexer_mxfp4"
        assert (values[10:64].astype(np.float32) == 0).all()
        return
    if layout == "v4":
        assert got == b"\x7f" * 448 + b"\xff\x7f" * 64 + b"\x69" * 7 + b"\0"
    elif layout == "indexer_fp8":
        assert got == b"\x7f" * 128 + np.float32([2.0**-22]).tobytes()
    else:
        assert got == b"\x77" * 64 + b"\x01" * 4
    assert got == w.expect(0, 0) or layout == "v4"


@pytest.mark.parametrize("layout", ["v4", "indexer_fp8", "indexer_mxfp4"])
def test_zero_and_huge_rows(layout: str) -> None:
    w = World(layout, 2, False, [4])
    w.kv[0][:2] = 0
    w.kv[0][2:] = 1e30  # squares overflow, so inv_rms is 0
    w.launch((0, 0, 4))
    values = decode_records(w.records(0, 2), layout).astype(np.float32)
    assert (values == 0).all()


def test_zero_row_without_eps_is_nan() -> None:
    """0 times infinity: eps 0 does not hide an empty row."""
    state, cache = np.zeros((1, 2, 256), np.float32), np.zeros((1, 1, 132), np.uint8)
    compress_norm_rope_store(
        state,
        np.int32([0]),
        np.int64([1]),
        np.int64([1]),
        np.int32([[0]]),
        turns(1),
        cache,
        np.int64([0]),
        np.ones(128, np.float32),
        0.0,
        compress_ratio=2,
        overlap=0,
        layout="indexer_fp8",
    )
    assert (cache[0, 0, :128] == 0x7F).all()


def test_poisoned_rows_outside_the_window_are_not_read() -> None:
    """Every state element that group 1 does not use is a NaN."""
    clean, poisoned = (World("indexer_fp8", 4, True, [12], seed=8) for _ in range(2))
    for w in (clean, poisoned):
        w.launch((0, 0, 12))
    dim, width = 128, 256
    used = np.zeros_like(poisoned.state, bool)
    for p in range(8):
        row = used[poisoned.table[0, p // 4], p % 4]
        first = dim if p >= 4 else 0
        row[first : first + dim] = row[width + first : width + first + dim] = True
    poisoned.state[~used] = NAN
    poisoned.cache[:] = 0xFF
    poisoned.launch((0, 7, 8), store=False)
    assert poisoned.records(0, 2)[1].tobytes() == clean.records(0, 2)[1].tobytes()
    assert not np.isnan(poisoned.state[used]).any()


def test_missing_rows_hide_what_the_state_holds() -> None:
    """Positions below 0 take no part, whatever lies in the block that they would fall into."""
    for stale in (NAN, INF, 1e38):
        w = World("indexer_mxfp4", 8, True, [8], state_block=16, stale=stale)
        w.launch((0, 0, 8))
        assert w.records(0, 1)[0].tobytes() == w.expect(0, 0)


@pytest.mark.parametrize("state_block", [1, 2, 4, 8, 16])
def test_block_sizes_do_not_matter(state_block: int) -> None:
    first = World("indexer_fp8", 4, True, [17, 9], seed=3)
    other = World("indexer_fp8", 4, True, [17, 9], seed=3, state_block=state_block, page_rows=3)
    for w in (first, other):
        w.launch((0, 0, 17), (1, 0, 9))
    for request, groups in ((0, 4), (1, 2)):
        assert np.array_equal(first.records(request, groups), other.records(request, groups))


def test_three_axes_strided_state_and_wide_integers() -> None:
    w = World("v4", 4, True, [8], seed=4)
    w.launch((0, 0, 8))
    wide = np.full((w.state.shape[0], 5, 2 * w.width + 8), NAN, np.float32)
    wide[:, :4, : 2 * w.width] = w.state
    for dtype in (np.int32, np.int64):
        cache = np.full((2, 3, 584), 0xA5, np.uint8)
        compress_norm_rope_store(
            wide[:, :4, : 2 * w.width],
            np.array([0, 0, 5], dtype),
            np.array([3, 7, -1], dtype),
            np.array([0, 2**20, -1], dtype),  # only the sign counts
            w.table.astype(dtype),
            w.cos_sin,
            cache,
            np.array([4, 1, 0, 0], dtype),
            w.weight,
            np.float32(EPS),
            compress_ratio=np.int64(4),
            overlap=1,
            layout=get_layout("v4"),
        )
        got = read_records(cache, np.int64([4, 1]), 3, layout="v4")
        assert np.array_equal(got, w.records(0, 2))


def test_chunks_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (World("indexer_fp8", 4, True, [40, 21], seed=9) for _ in range(2))
    whole.launch((0, 0, 40), (1, 0, 21))
    monkeypatch.setattr(compressor, "POOLED", 3 * 8 * 128)
    monkeypatch.setattr(compressor, "CHUNK", 7)
    parts.launch((0, 0, 40), (1, 0, 21))
    same(whole, parts)


def test_every_token_is_checked_before_the_first_chunk_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = World("indexer_fp8", 4, False, [16], seed=9)
    w.launch((0, 0, 16))
    monkeypatch.setattr(compressor, "POOLED", 1)
    w.table[0, 3] = 99
    before = w.cache.copy()
    w.score[0][:] = 0
    with pytest.raises(ValueRangeError, match="block_table: got 99"):
        w.launch((0, 0, 16), store=False)
    assert np.array_equal(w.cache, before)


# --- schedules ------------------------------------------------------------------------


def cut(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The runs between cuts."""
    edges = [0, *sorted({c for c in cuts if 0 < c < length}), length]
    return list(pairwise(edges))


@LAW
@given(
    layout=st.sampled_from(["indexer_fp8", "indexer_mxfp4"]),
    ratio=st.sampled_from([1, 2, 4, 8]),
    overlap=st.booleans(),
    lengths=st.lists(st.integers(1, 26), min_size=1, max_size=3),
    state_block=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_schedule_does_not_matter(
    layout: str,
    ratio: int,
    overlap: bool,
    lengths: list[int],
    state_block: int,
    data: st.DataObject,
) -> None:
    """At once, token by token, or in any chunks of any packing: the same caches and states."""
    once, single, mixed = (
        World(layout, ratio, overlap, lengths, state_block=state_block, seed=7) for _ in range(3)
    )
    once.launch(*((q, 0, n) for q, n in enumerate(lengths)))
    for q, n in enumerate(lengths):
        for p in range(n):
            single.launch((q, p, p + 1), padding=p % 3)
    left = [
        [(q, *run) for run in cut(n, data.draw(st.lists(st.integers(1, 25), max_size=5)))]
        for q, n in enumerate(lengths)
    ]
    while any(left):
        ready = [q for q, runs in enumerate(left) if runs]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        mixed.launch(*(left[q].pop(0) for q in chosen), padding=data.draw(st.integers(0, 2)))
    same(once, single)
    same(once, mixed)


@pytest.mark.parametrize("layout", ["v4", "v4_fnuz"])
@pytest.mark.parametrize("border", range(1, 12))
def test_chunk_border_at_every_phase(layout: str, border: int) -> None:
    once, two = (World(layout, 4, True, [12], seed=border) for _ in range(2))
    once.launch((0, 0, 12))
    two.launch((0, 0, border))
    two.launch((0, border, 12))
    same(once, two)


@pytest.mark.parametrize("border", [1, 64, 127, 128, 129, 200])
def test_hca_chunk_borders(border: int) -> None:
    once, two = (World("v4", 128, False, [257], state_block=8, seed=1) for _ in range(2))
    once.launch((0, 0, 257))
    two.launch((0, 0, border))
    two.launch((0, border, 257))
    same(once, two)
    assert (once.cache != 0xA5).sum() > 1100


# --- errors against float64 -----------------------------------------------------------


def test_pooled_and_normed_against_float64() -> None:
    """Errors in ulp of the result, over columns that do not cancel."""
    rng = np.random.default_rng(12)
    for rows, pooled_limit, normed_limit in ((8, 4.0, 8.0), (128, 8.0, 12.0)):
        kv = rng.normal(2, 0.3, (24, rows, 512)).astype(np.float32)
        score = rng.normal(0, 2, (24, rows, 512)).astype(np.float32)
        weight = weights(512, 3)
        pooled = compressor._pool(kv, score, np.ones((24, rows), bool))
        normed = rms_norm(pooled, weight, EPS)
        for i in range(24):
            present = np.ones(rows, bool)
            exact, exact_normed, _ = plain.float64_row(
                kv[i], score[i], present, weight, EPS, np.zeros(64)
            )
            for got, want, limit in (
                (pooled[i], exact, pooled_limit),
                (normed[i], exact_normed, normed_limit),
            ):
                ulp = np.spacing(np.maximum(np.abs(want), 1e-30).astype(np.float32))
                assert (np.abs(got - want) / ulp).max() < limit


def test_small_case_against_mpmath() -> None:
    rng = np.random.default_rng(13)
    kv, score = rng.normal(1, 0.2, (2, 4, 8)).astype(np.float32)
    weight = rng.normal(1, 0.2, 8).astype(np.float32)
    got = rms_norm(compressor._pool(kv[None], score[None], np.ones((1, 4), bool)), weight, EPS)[0]
    with mpmath.workprec(200):
        exact = plain.mpmath_row(kv.tolist(), score.tolist(), weight.tolist(), EPS)
        for value, want in zip(got.tolist(), exact, strict=True):
            ulp = float(np.spacing(np.float32(float(abs(want)))))
            assert abs(value - want) < 4 * ulp


@pytest.mark.parametrize("layout", ["v4", "v4_fnuz", "indexer_fp8", "indexer_mxfp4"])
def test_few_bytes_differ_from_a_float64_pipeline(layout: str) -> None:
    w = World(layout, 4, True, [256], seed=31)
    w.launch((0, 0, 256))
    rows = np.empty((64, w.dim), np.uint16)
    at = np.arange(256)
    stored = w.state[w.table[0, at // 4], at % 4]
    for group in range(64):
        p = np.arange(group * 4 - 4, group * 4 + 4)
        lanes = np.repeat([0, w.dim], 4)[:, None] + np.arange(w.dim)
        kv = np.take_along_axis(stored[p], lanes, 1)
        score = np.take_along_axis(stored[p], lanes + w.width, 1)
        _, _, row = plain.float64_row(kv, score, p >= 0, w.weight, EPS, w.cos_sin[group * 4])
        rows[group] = plain.bf16_of_float64(row)
    want = compressor.encode_records(rows.view(BF16), layout)
    assert (w.records(0, 64) != want).mean() < 1e-4


# --- rope_quant_insert ----------------------------------------------------------------


@pytest.mark.parametrize("round_trip", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_rope_insert_by_loops(layout: str, ratio: int, round_trip: bool) -> None:
    rng = np.random.default_rng(ratio)
    at, slots = [5, 2, 7, 0, 3, 9], [3, -1, 0, 8, 11, 1]
    latent = rng.normal(0, 1, (8, 512)).astype(BF16)
    latent.view(np.uint16)[4, ::37] = rng.integers(0, 1 << 16, len(range(0, 512, 37)))
    latent[4, 450] = latent[4, 451] = BF16(0)
    table = turns(10)
    stride = slow.page_bytes(layout, 4) + 32
    for fill in FILLS:
        want = bytearray([fill]) * (3 * stride)
        rows = [numbers(row) for row in latent]
        plain.rope_insert(rows, at, bits(table), want, stride, slots, 4, ratio, layout, round_trip)
        cache, before = np.full((3, stride), fill, np.uint8), latent.view(np.uint16).copy()
        rope_quant_insert(
            latent,
            np.int64([*at, 2]),
            table,
            cache,
            np.int32(slots),
            compress_ratio=ratio,
            layout=layout,
            bf16_round_trip=round_trip,
            kv_block_size=4,
        )
        assert cache.tobytes() == bytes(want)
        assert np.array_equal(latent.view(np.uint16), before)


def test_rope_insert_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = np.random.default_rng(3).normal(0, 1, (20, 512)).astype(BF16)
    caches = np.zeros((2, 5, 4, 528), np.uint8)
    for cache, size in zip(caches, (100, 3), strict=True):
        monkeypatch.setattr(compressor, "CHUNK", size)
        rope_quant_insert(
            latent,
            np.arange(20),
            turns(20),
            cache,
            np.arange(20)[::-1].copy(),
            compress_ratio=1,
            layout="v41_mxfp8_inline",
        )
    assert np.array_equal(*caches)


def test_round_trip_changes_about_three_percent_of_rope_bytes() -> None:
    rng = np.random.default_rng(77)
    latent = rng.normal(0, 1, (256, 512)).astype(BF16)
    caches = np.zeros((2, 256, 1, 528), np.uint8)
    for cache, round_trip in zip(caches, (False, True), strict=True):
        rope_quant_insert(
            latent,
            np.arange(256),
            turns(256),
            cache,
            np.arange(256),
            compress_ratio=1,
            layout="v41_mxfp8",
            bf16_round_trip=round_trip,
        )
    codes, scales = caches[:, :, 0, :512].astype(np.int16), caches[:, :, 0, 512:]
    differs = codes[0] != codes[1]
    assert not differs[:, :448].any() and not (scales[0, :, :14] != scales[1, :, :14]).any()
    assert 0.02 < differs[:, 448:].mean() < 0.045
    same_scale = np.repeat(scales[0] == scales[1], 32, axis=1)
    assert (np.abs(codes[0] - codes[1])[differs & same_scale] == 1).all()


# --- pool_ring_latent -----------------------------------------------------------------


@dataclass
class Rings:
    """Requests that decode and prefill into rings, one block each."""

    lengths: Sequence[int]
    capacity: int
    ratio: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        width = 512 * self.ratio
        self.rows = [rng.normal(0, 2, (n, width)).astype(np.float32) for n in self.lengths]
        self.blocks = rng.permutation(len(self.lengths) + 1)[: len(self.lengths)]
        self.ring = np.full((len(self.lengths) + 1, self.capacity, 1024), NAN, np.float32)
        self.latents: dict[tuple[int, int], bytes] = {}
        self.weight = weights(512, 8, bf16=True)

    def launch(
        self, *chunks: tuple[int, int, int], before: int = 0, after: int = 0, rest: int = 0
    ) -> None:
        """One call; every chunk has skipped rows before and after, the call has some behind."""
        requests, at, slots, rows, starts = [], [], [], [], [0]
        junk = np.full((1, 512 * self.ratio), NAN, np.float32)
        for index, (q, first, end) in enumerate(chunks):
            skipped = [-5] * before, [-5] * after
            p = np.arange(first, end)
            requests += [index] * (before + end - first + after)
            at += [*skipped[0], *p, *skipped[1]]
            own = self.blocks[q] * self.capacity + p % self.capacity
            slots += [*([-1] * before), *own, *([-1] * after)]
            rows += [junk] * before + [self.rows[q][first:end]] + [junk] * after
            starts.append(len(slots))
        requests, at, slots = requests + [99] * rest, at + [-9] * rest, slots + [-1] * rest
        out = np.full((len(slots) + 1, 512), -7, BF16)
        pool_ring_latent(
            np.concatenate([*rows, *[junk] * rest]),
            np.int64(at),
            self.ring if self.ratio == 2 else None,
            np.int64(slots),
            np.int32(starts),
            np.int32(requests),
            self.weight,
            EPS,
            out,
            compress_ratio=self.ratio,
        )
        for token, slot in enumerate(slots):
            if slot >= 0 and (self.ratio == 1 or at[token] % 2 == 1):
                key = chunks[requests[token]][0], int(at[token])
                self.latents[key] = out[token].tobytes()
            else:
                assert (out[token] == -7).all()
        assert (out[len(slots)] == -7).all()


def same_rings(one: Rings, other: Rings) -> None:
    """Latents and rings are equal, bit for bit."""
    assert one.latents == other.latents
    assert np.array_equal(one.ring.view(np.uint32), other.ring.view(np.uint32))


@LAW
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    capacity=st.integers(1, 9),
    data=st.data(),
)
def test_ring_schedule_does_not_matter(
    lengths: list[int], capacity: int, data: st.DataObject
) -> None:
    once, single, mixed = (Rings(lengths, capacity) for _ in range(3))
    once.launch(*((q, 0, n) for q, n in enumerate(lengths)), rest=2)
    for q, n in enumerate(lengths):
        for p in range(n):
            single.launch((q, p, p + 1), before=p % 2, after=p % 3)
    left = [
        [(q, *run) for run in cut(n, data.draw(st.lists(st.integers(1, 13), max_size=4)))]
        for q, n in enumerate(lengths)
    ]
    while any(left):
        ready = [q for q, runs in enumerate(left) if runs]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        mixed.launch(*(left[q].pop(0) for q in chosen), before=data.draw(st.integers(0, 2)))
    same_rings(once, single)
    same_rings(once, mixed)
    assert sorted(once.latents) == [(q, p) for q, n in enumerate(lengths) for p in range(1, n, 2)]
    for q, n in enumerate(lengths):  # the ring holds the last rows, and nothing else changed
        ring = once.ring[once.blocks[q]]
        for p in range(max(n - capacity, 0), n):
            assert bits(ring[p % capacity]) == bits(once.rows[q][p])
        assert np.isnan(ring[n:]).all()


def test_ring_latents_by_loops() -> None:
    r = Rings([5, 2], 4, seed=6)
    r.rows[0][:4, 512:520] = [
        [0, 0, -INF, 1e4, 7, NAN, 0, -INF],
        [0, -0.0, 3, -1e4, 7, 0, -100, -INF],
        [0, 0, 3, 1e4, -87, 1, 0, 0],
        [0, -0.0, -INF, 1e4, 0, 1, -86, 1],
    ]
    r.launch((0, 0, 3), (1, 0, 2))
    r.launch((0, 3, 5))
    eps = plain.from_bits(bits(np.float32([EPS]))[0])
    for (q, p), got in r.latents.items():
        older, newer = bits(r.rows[q][p - 1]), bits(r.rows[q][p])
        want = plain.latent_of_pair(older, newer, numbers(r.weight), eps)
        assert np.frombuffer(got, np.uint16).tolist() == want
    assert np.isnan(np.frombuffer(r.latents[0, 1], BF16).astype(np.float32)).all()
    assert not np.isnan(np.frombuffer(r.latents[0, 3], BF16).astype(np.float32)).any()


def test_ring_ratio_1_needs_no_ring() -> None:
    r = Rings([5], 2, ratio=1)
    r.launch((0, 0, 3), before=1)
    r.launch((0, 3, 5), after=2)
    assert sorted(r.latents) == [(0, p) for p in range(5)]
    eps = plain.from_bits(bits(np.float32([EPS]))[0])
    row = plain.norm(numbers(r.rows[0][2]), numbers(r.weight), eps)
    got = np.frombuffer(r.latents[0, 2], np.uint16).tolist()
    assert got == [slow.round_bf16(x) for x in row]
    assert np.isnan(r.ring).all()


def test_ring_reads_come_before_writes() -> None:
    """Request 1 closes a group with the very ring row that request 0 overwrites in this call."""
    rows = np.ones((2, 1024), np.float32)
    rows[0, :512], rows[1, :512] = 5, 7
    ring, out = np.full((1, 2, 1024), 3, np.float32), np.full((2, 512), -7, BF16)
    ring[0, 0, :512] = -3  # pooled with 7: negative; 5 in its place would be positive
    pool_ring_latent(
        rows,
        np.int64([2, 1]),
        ring,
        np.int64([0, 1]),
        np.int32([0, 1, 2]),
        np.int32([0, 1]),
        np.ones(512, np.float32),
        0.0,
        out,
        compress_ratio=2,
    )
    assert (out[0] == -7).all() and (out[1] == -1).all()
    assert (ring[0, 0, :512] == 5).all() and (ring[0, 1, :512] == 7).all()


def test_ring_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (Rings([14, 9], 3) for _ in range(2))
    whole.launch((0, 0, 14), (1, 0, 9))
    monkeypatch.setattr(compressor, "CHUNK", 4)
    parts.launch((0, 0, 14), (1, 0, 9))
    same_rings(whole, parts)


# --- public reports -------------------------------------------------------------------


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The pooled rows of every call, taken where the norm would be; the norm does nothing."""
    seen: list[np.ndarray] = []

    def norm(c: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        seen.extend(c.copy())
        return c

    monkeypatch.setattr(compressor, "rms_norm", norm)
    return seen


SCHEDULES = {
    "8": [(0, 8)],
    "4 + 4": [(0, 4), (4, 8)],
    "8 x 1": [(p, p + 1) for p in range(8)],
    "3 + 5": [(0, 3), (3, 8)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_B47_overlap_survives_every_schedule(name: str, pooled: list[np.ndarray]) -> None:
    w = World("indexer_fp8", 4, True, [8])
    w.kv[0][:, :128] = 1000 + 10 * np.arange(8)[:, None]
    w.kv[0][:, 128:] = np.arange(8)[:, None]
    w.score[0][:], w.ape[:] = 0, 0
    for first, end in SCHEDULES[name]:
        w.launch((0, first, end))
    assert [row.tolist() for row in pooled] == [[1.5] * 128, [510.25] * 128]


@pytest.mark.parametrize("layout", ["v4", "indexer_fp8", "indexer_mxfp4"])
def test_B47_bytes_of_four_schedules(layout: str) -> None:
    worlds = [World(layout, 4, True, [8], seed=47) for _ in SCHEDULES]
    for w, runs in zip(worlds, SCHEDULES.values(), strict=True):
        for first, end in runs:
            w.launch((0, first, end))
        same(worlds[0], w)


def test_B49_a_verify_batch_keeps_every_row() -> None:
    """Positions 6 to 12 in one call, two survive; then 8 onward again, with other tokens."""
    serial, batched = (World("v4", 4, True, [16], seed=49) for _ in range(2))
    draft = World("v4", 4, True, [16], seed=50)
    for w in (serial, batched):
        w.launch((0, 0, 6))
    for p in (6, 7):
        serial.launch((0, p, p + 1))
    kept = batched.kv[0].copy(), batched.score[0].copy()
    batched.kv[0][8:13], batched.score[0][8:13] = draft.kv[0][8:13], draft.score[0][8:13]
    batched.launch((0, 6, 13))
    assert np.array_equal(serial.state_rows(0, 0, 8), batched.state_rows(0, 0, 8))
    batched.kv[0][:], batched.score[0][:] = kept
    serial.launch((0, 8, 16))
    batched.launch((0, 8, 16))
    same(serial, batched)


@pytest.mark.parametrize(("length", "count"), [(3, 0), (4, 1), (5, 1), (7, 1), (8, 2)])
def test_B52_rows_published_and_the_last_column(length: int, count: int) -> None:
    w = World("v4", 4, True, [length], seed=52)
    w.launch((0, 0, length))
    written = {
        slot
        for slot in range(w.cache.shape[0] * w.page_rows)
        if (read_records(w.cache, np.int64([slot]), w.page_rows, layout="v4") != 0xA5).any()
    }
    assert written == set(w.kv_slots[0, :count].tolist())
    rows = w.state_rows(0, 0, length)
    for column in (511, 1023):
        assert rows[:, column].tolist() == bits(w.kv[0][:, column])
        with_ape = w.score[0][:, column] + w.ape[np.arange(length) % 4, column]
        assert rows[:, 1024 + column].tolist() == bits(with_ape)


def test_B53_padding_is_not_pooled() -> None:
    padded, alone = (World("indexer_fp8", 4, True, [3, 4, 6], seed=53) for _ in range(2))
    for q, n in enumerate((3, 4, 6)):
        padded.launch((q, 0, n), padding=8 - n)
        alone.launch((q, 0, n))
    same(padded, alone)
    assert (padded.records(0, 1) == 0xA5).all()
    assert (padded.records(1, 1) != 0xA5).any() and (padded.records(2, 1) != 0xA5).any()


@pytest.mark.parametrize("score", [0, -9990, -9999, -10000, -10010, -20000, -3e38])
def test_B55_missing_rows_weigh_nothing(score: float, pooled: list[np.ndarray]) -> None:
    w = World("indexer_fp8", 4, True, [4])
    w.kv[0][:], w.score[0][:], w.ape[:] = 1, score, 0
    w.launch((0, 0, 4))
    assert [row.tolist() for row in pooled] == [[1.0] * 128]


def test_B55_a_masked_half_before_a_real_one_is_finite(pooled: list[np.ndarray]) -> None:
    """Real rows of score -inf are masked too; only a column without any other is NaN."""
    w = World("indexer_fp8", 4, True, [8])
    w.kv[0][:], w.ape[:] = 3, 0
    w.score[0][:] = 2
    w.score[0][:4, :128] = -INF  # the older half of group 1
    w.score[0][4:, 128] = -INF  # and the newer one in one column
    w.launch((0, 0, 8))
    assert pooled[1][1:].tolist() == [3.0] * 127
    assert np.isnan(pooled[1][0])


@pytest.mark.parametrize("runs", [[(0, 5)], [(p, p + 1) for p in range(5)], [(0, 2), (2, 5)]])
def test_B57_only_odd_positions_publish(runs: list[tuple[int, int]]) -> None:
    """Rings.launch checks that every other row of latent_out keeps its fill."""
    r, once = Rings([5], 2, seed=57), Rings([5], 2, seed=57)
    once.launch((0, 0, 5))
    for first, end in runs:
        r.launch((0, first, end))
    assert sorted(r.latents) == [(0, 1), (0, 3)]
    same_rings(r, once)


def test_B57_an_incomplete_step_leaves_the_cache_alone() -> None:
    cache = np.full((1, 4, 528), 0xA5, np.uint8)
    latent = np.ones((1, 512), BF16)
    for p in range(5):
        before = cache.copy()
        rope_quant_insert(
            latent,
            np.int64([p]),
            turns(5),
            cache,
            np.int64([p // 2]),
            compress_ratio=2,
            layout="v41_mxfp8",
        )
        assert np.array_equal(cache, before) == (p % 2 == 0)


@pytest.mark.parametrize(
    ("ratio", "entries"), [(2, (0, 2, 4)), (4, (0, 4, 8)), (128, (0, 128, 256))]
)
def test_B59_entries_turn_at_their_first_token(
    ratio: int, entries: tuple[int, ...], pooled: list[np.ndarray]
) -> None:
    """Row p of this table multiplies by p, so that the stored tail is the position itself."""
    w = World("v4", ratio, False, [3 * ratio], state_block=8)
    w.kv[0][:], w.score[0][:], w.ape[:] = 1, 0, 0
    w.cos_sin = np.zeros((3 * ratio, 64), np.float32)
    w.cos_sin[:, :32] = np.arange(3 * ratio)[:, None]
    w.launch((0, 0, 3 * ratio))
    tails = w.records(0, 3)[:, 448:576].copy().view("<u2")
    assert (tails == np.array(entries, np.float32).astype(BF16).view(np.uint16)[:, None]).all()
    if ratio == 2:
        latent, cache = np.ones((6, 512), BF16), np.zeros((1, 3, 584), np.uint8)
        at = np.arange(6)
        rope_quant_insert(
            latent, at, w.cos_sin, cache, at // 2 + 0 * at, compress_ratio=2, layout="v4"
        )
        tails = read_records(cache, np.arange(3), 3, layout="v4")[:, 448:576].copy().view("<u2")
        assert tails[:, 0].tolist() == [0x0000, 0x4000, 0x4080]


def test_B59_bytes_of_the_group_4_to_7(pooled: list[np.ndarray]) -> None:
    w = World("v4", 4, False, [8])
    w.kv[0][:], w.kv[0][:, 448] = 0, 1
    w.cos_sin = build_cos_sin_cache(8)
    w.launch((0, 0, 8))
    assert w.records(0, 2)[1, 448:452].copy().view("<u2").tolist() == [0xBF27, 0xBF42]


def test_B59_packed_rows_use_their_own_group() -> None:
    packed, alone = (World("v4", 4, True, [16, 9, 13], seed=59) for _ in range(2))
    packed.launch((2, 0, 13), (0, 0, 16), (1, 0, 9))
    for q, n in enumerate((16, 9, 13)):
        alone.launch((q, 0, n))
    same(packed, alone)


def test_A07_fp32_rotation_or_a_bf16_step() -> None:
    """Times 128 the pair is -107.858, 34.101; a bf16 step makes it -108, 34, two ties."""
    table = np.zeros((715, 64), np.float32)
    table[:, :32] = 1
    table[714, [6, 38]] = build_cos_sin_cache(715, theta=160000.0)[714, [6, 38]]
    latent = np.zeros((1, 512), BF16)
    latent[0, 448], latent[0, 460], latent[0, 461] = 3, -0.8125, 0.34765625
    found = []
    for round_trip in (False, True):
        cache = np.zeros((1, 1, 528), np.uint8)
        rope_quant_insert(
            latent,
            np.int64([714]),
            table,
            cache,
            np.int64([0]),
            compress_ratio=1,
            layout="v41_mxfp8",
            bf16_round_trip=round_trip,
        )
        assert cache[0, 0, 512 + 14] == 120
        found.append(cache[0, 0, 460:462].tolist())
    assert found == [[0xED, 0x61], [0xEE, 0x60]]  # the odd element of the pair differs too


def test_B19_with_and_without_the_bf16_step() -> None:
    """Five pairs turn to 1.0625 plus a little; 300 in the group keeps the scale at 1."""
    steps = [-(2.0**-12), 0, 2.0**-12, 2.0**-9, 2.0**-7]
    table = np.zeros((1, 64), np.float32)
    table[0, :32], table[0, 32:37] = 1, [-step for step in steps]
    latent = np.zeros((1, 512), BF16)
    latent[0, 448:458], latent[0, 448:458:2], latent[0, 470] = 1, 1.0625, 300
    found = []
    for round_trip in (False, True):
        cache = np.zeros((1, 1, 528), np.uint8)
        rope_quant_insert(
            latent,
            np.int64([0]),
            table,
            cache,
            np.int64([0]),
            compress_ratio=1,
            layout="v41_mxfp8",
            bf16_round_trip=round_trip,
        )
        assert cache[0, 0, 512 + 14] == 127
        found.append(cache[0, 0, 448:458:2].tobytes().hex(" "))
    assert found == ["38 38 39 39 39", "38 38 38 38 39"]


# --- bad input: nothing may be written ------------------------------------------------

Change = Callable[[dict[str, Any]], Any]
Errors = list[tuple[str, Change, type, str]]


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, not writable."""
    array.flags.writeable = False
    return array


def strided(*shape: int, dtype: Any, strides: tuple[int, ...]) -> np.ndarray:
    """Zeros of a shape with strides in elements."""
    size = np.dtype(dtype).itemsize
    buffer = np.zeros(1 << 17, dtype)
    return np.lib.stride_tricks.as_strided(buffer, shape, tuple(s * size for s in strides))


def check_error(
    operation: Callable[..., None],
    arguments: dict[str, Any],
    outputs: Sequence[str],
    name: str,
    change: Change,
    kind: type,
    text: str,
) -> None:
    """The error's kind and text, and that no output changed."""
    arguments[name] = change(arguments)
    kept = {o: arguments[o] for o in outputs if isinstance(arguments[o], np.ndarray)}
    before = {o: array.tobytes() for o, array in kept.items()}
    with pytest.raises(kind) as caught:
        operation(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{name}: got "), message
    given, allowed = message.split("; allowed: ")
    assert text in given, message
    assert len(allowed.split(" (SPEC ")[0]) > 3 and "(SPEC " in allowed, message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, Dsv4numError)
    assert {o: array.tobytes() for o, array in kept.items()} == before


def integer_errors(name: str, good: list[int]) -> Errors:
    """What no array of integers may be."""
    return [
        (name, lambda a: np.float32(good), ArgumentError, "float32"),
        (name, lambda a: np.uint64(good), ArgumentError, "uint64"),
        (name, lambda a: np.int16(good), ArgumentError, "int16"),
        (name, lambda a: np.int64([good]), ArgumentError, f"[1, {len(good)}]"),
        (name, lambda a: np.int64(good + good)[::2], ArgumentError, "stride 2"),
        (name, lambda a: good, ArgumentError, "list"),
        (name, lambda a: None, ArgumentError, "NoneType"),
    ]


def float_errors(name: str, shape: tuple[int, ...], other: Any = np.float64) -> Errors:
    """What no array of numbers may be."""
    good = np.zeros(shape, np.float32 if other != np.float32 else BF16)
    doubled = (*shape[:-1], 2 * shape[-1])
    return [
        (name, lambda a: good.astype(other), ArgumentError, np.dtype(other).name),
        (name, lambda a: good.astype(np.float16), ArgumentError, "float16"),
        (name, lambda a: good[..., :-1], ArgumentError, str(shape[-1] - 1)),
        (name, lambda a: good[None], ArgumentError, str([1, *shape])),
        (name, lambda a: np.zeros(doubled, good.dtype)[..., ::2], ArgumentError, "stride 2"),
        (name, lambda a: good.tolist(), ArgumentError, "list"),
    ]


def ratio_errors(clause_small: bool, *, constant: bool = True) -> Errors:
    """What no ratio may be; a constant of kernels is no NumPy integer, either."""
    given: list[Any] = [0, -2, 3, 6, True, 2.0, None, "4", 2**63]
    given += [*([4] if clause_small else []), *([np.int64(2)] if constant else [])]
    return [("compress_ratio", lambda a, g=g: g, ArgumentError, repr(g)) for g in given]


def eps_errors() -> Errors:
    """What no eps may be."""
    given = [-1e-6, NAN, INF, True, None, "1e-6", 1e39, 10**400]
    return [("rms_norm_eps", lambda a, g=g: g, ArgumentError, str(g)) for g in given]


def length_error(name: str, part: Callable[[Any], Any], text: str = "1 rows") -> Errors:
    """One row fewer than tokens."""
    return [(name, lambda a: part(a[name]), ArgumentError, text)]


def states_arguments() -> dict[str, Any]:
    """Two tokens, two blocks of two rows, W = 4."""
    return {
        "kv": np.ones((2, 4), np.float32),
        "score": np.ones((2, 4), np.float32),
        "ape": np.ones((2, 4), np.float32),
        "positions": np.int64([2, 3]),
        "state_cache": np.full((2, 2, 8), 9, np.float32),
        "slot_mapping": np.int64([0, 3]),
        "compress_ratio": 2,
    }


STATES_ERRORS: Errors = [
    *float_errors("score", (2, 4)),
    *float_errors("ape", (2, 4)),
    *float_errors("state_cache", (2, 2, 8)),
    *integer_errors("positions", [2, 3]),
    *integer_errors("slot_mapping", [0, 3]),
    *ratio_errors(False)[:3],
    *ratio_errors(False)[4:],
    *length_error("kv", lambda x: x[:1]),
    *length_error("score", lambda x: x[:1]),
    *length_error("positions", lambda x: x[:1]),
    ("kv", lambda a: np.ones((2, 4), np.float64), ArgumentError, "float64"),
    ("kv", lambda a: np.ones((2, 4), BF16), ArgumentError, "bfloat16"),
    ("kv", lambda a: np.ones(4, np.float32), ArgumentError, "[4]"),
    ("kv", lambda a: np.ones((2, 0), np.float32), ArgumentError, "[2, 0]"),
    ("kv", lambda a: np.ones((2, 8), np.float32)[:, ::2], ArgumentError, "stride 2"),
    ("kv", lambda a: [[1.0]], ArgumentError, "list"),
    ("ape", lambda a: np.ones((4, 4), np.float32), ArgumentError, "[4, 4]"),
    ("state_cache", lambda a: np.zeros((2, 0, 8), np.float32), ArgumentError, "[2, 0, 8]"),
    ("state_cache", lambda a: read_only(a["state_cache"]), ArgumentError, "read-only"),
    (
        "state_cache",
        lambda a: strided(2, 2, 8, dtype=np.float32, strides=(16, 7, 1)),
        ArgumentError,
        "strides",
    ),
    (
        "state_cache",
        lambda a: strided(2, 2, 8, dtype=np.float32, strides=(12, 12, 1)),
        ArgumentError,
        "strides",
    ),
    (
        "state_cache",
        lambda a: strided(2, 2, 8, dtype=np.float32, strides=(0, 8, 1)),
        ArgumentError,
        "strides",
    ),
    ("slot_mapping", lambda a: np.int64([0, 4]), ValueRangeError, "4"),
    ("slot_mapping", lambda a: np.int64([2**40, 4]), ValueRangeError, str(2**40)),
    ("slot_mapping", lambda a: np.int64([3, 3]), ValueRangeError, "slot 3"),
    ("positions", lambda a: np.int64([2, -1]), ValueRangeError, "-1"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), STATES_ERRORS)
def test_states_errors(name: str, change: Change, kind: type, text: str) -> None:
    outputs = ["state_cache"]
    check_error(save_partial_states, states_arguments(), outputs, name, change, kind, text)


def compress_arguments() -> dict[str, Any]:
    """Two boundary tokens of two requests, ratio 2 with overlap, state blocks of two rows."""
    return {
        "state_cache": np.ones((4, 2, 512), np.float32),
        "token_to_req_indices": np.int32([0, 1]),
        "positions": np.int64([1, 3]),
        "slot_mapping": np.int64([1, 7]),
        "block_table": np.int32([[0, 1], [2, 3]]),
        "cos_sin_cache": turns(4),
        "kv_cache": np.full((2, 2, 132), 0xA5, np.uint8),
        "kv_slot_mapping": np.int64([0, 3]),
        "rms_norm_weight": np.ones(128, np.float32),
        "rms_norm_eps": EPS,
        "compress_ratio": 2,
        "overlap": True,
        "layout": "indexer_fp8",
        "kv_block_size": None,
    }


COMPRESS_ERRORS: Errors = [
    *float_errors("state_cache", (4, 2, 512)),
    *float_errors("cos_sin_cache", (4, 64)),
    *float_errors("rms_norm_weight", (128,)),
    *integer_errors("token_to_req_indices", [0, 1]),
    *integer_errors("positions", [1, 3]),
    *integer_errors("slot_mapping", [1, 7]),
    *integer_errors("kv_slot_mapping", [0, 3]),
    *ratio_errors(False, constant=False),
    *eps_errors(),
    *length_error("token_to_req_indices", lambda x: x[:1]),
    *length_error("positions", lambda x: x[:1]),
    *length_error("kv_slot_mapping", lambda x: x[:1]),
    ("state_cache", lambda a: np.ones((4, 2, 256), np.float32), ArgumentError, "[4, 2, 256]"),
    ("state_cache", lambda a: np.ones((4, 0, 512), np.float32), ArgumentError, "[4, 0, 512]"),
    (
        "state_cache",
        lambda a: strided(4, 2, 512, dtype=np.float32, strides=(1024, 511, 1)),
        ArgumentError,
        "row stride 511",
    ),
    ("block_table", lambda a: np.int8([[0, 1], [2, 3]]), ArgumentError, "int8"),
    ("block_table", lambda a: np.int32([0, 1]), ArgumentError, "[2]"),
    ("block_table", lambda a: np.int32([[0, 1], [2, 3]])[:, ::-1], ArgumentError, "stride -1"),
    ("block_table", lambda a: None, ArgumentError, "NoneType"),
    ("kv_cache", lambda a: np.zeros((2, 2, 132), np.int8), ArgumentError, "int8"),
    ("kv_cache", lambda a: np.zeros((2, 2, 131), np.uint8), ArgumentError, "[2, 2, 131]"),
    ("kv_cache", lambda a: np.zeros((2, 0, 132), np.uint8), ArgumentError, "[2, 0, 132]"),
    ("kv_cache", lambda a: np.zeros(264, np.uint8), ArgumentError, "[264]"),
    ("kv_cache", lambda a: np.zeros((2, 2, 1, 132), np.uint8), ArgumentError, "[2, 2, 1, 132]"),
    ("kv_cache", lambda a: read_only(a["kv_cache"]), ArgumentError, "read-only"),
    ("kv_cache", lambda a: np.zeros((2, 2, 264), np.uint8)[:, :, ::2], ArgumentError, "stride 2"),
    ("kv_cache", lambda a: [], ArgumentError, "list"),
    ("kv_block_size", lambda a: 0, ArgumentError, "0"),
    ("kv_block_size", lambda a: True, ArgumentError, "True"),
    ("kv_block_size", lambda a: 2.0, ArgumentError, "2.0"),
    ("overlap", lambda a: 2, ArgumentError, "2"),
    ("overlap", lambda a: -1, ArgumentError, "-1"),
    ("overlap", lambda a: None, ArgumentError, "None"),
    ("overlap", lambda a: 1.0, ArgumentError, "1.0"),
    ("layout", lambda a: "v41_mxfp8", ArgumentError, "'v41_mxfp8'"),
    ("layout", lambda a: "nope", ArgumentError, "'nope'"),
    ("layout", lambda a: None, ArgumentError, "None"),
    ("token_to_req_indices", lambda a: np.int32([0, 2]), ValueRangeError, "2"),
    ("token_to_req_indices", lambda a: np.int32([-1, 1]), ValueRangeError, "-1"),
    ("positions", lambda a: np.int64([1, -1]), ValueRangeError, "-1"),
    ("positions", lambda a: np.int64([1, -4]), ValueRangeError, "-4"),
    ("positions", lambda a: np.int64([1, 5]), ValueRangeError, "5, rotated at 4"),
    ("cos_sin_cache", lambda a: None, ArgumentError, "NoneType"),
    ("block_table", lambda a: np.int32([[0], [1]]), ValueRangeError, "column 1"),
    ("block_table", lambda a: np.int32([[0, 1], [2, 4]]), ValueRangeError, "4"),
    ("block_table", lambda a: np.int32([[0, 1], [-1, 3]]), ValueRangeError, "-1"),
    ("block_table", lambda a: np.zeros((2, 0), np.int32), ValueRangeError, "column 0"),
    ("kv_slot_mapping", lambda a: np.int64([0, 4]), ValueRangeError, "4"),
    ("kv_slot_mapping", lambda a: np.int64([3, 3]), ValueRangeError, "slot 3"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), COMPRESS_ERRORS)
def test_compress_errors(name: str, change: Change, kind: type, text: str) -> None:
    arguments, outputs = compress_arguments(), ["kv_cache", "state_cache"]
    check_error(compress_norm_rope_store, arguments, outputs, name, change, kind, text)


def test_two_axes_need_a_block_size() -> None:
    arguments = compress_arguments()
    arguments["kv_cache"] = np.full((2, 264), 0xA5, np.uint8)
    check_error(
        compress_norm_rope_store,
        arguments,
        ["kv_cache"],
        "kv_block_size",
        lambda a: None,
        ArgumentError,
        "None",
    )
    for size, name in ((3, "kv_cache"), (2, "")):
        arguments["kv_block_size"] = size
        if name:
            with pytest.raises(ArgumentError, match=rf"^{name}: got "):
                compress_norm_rope_store(**arguments)
        else:
            compress_norm_rope_store(**arguments)
    arguments["kv_cache"], arguments["kv_block_size"] = np.zeros((2, 2, 132), np.uint8), 3
    with pytest.raises(ArgumentError, match=r"^kv_cache: got shape \[2, 2, 132\]"):
        compress_norm_rope_store(**arguments)


def test_values_of_tokens_that_are_not_used_are_not_looked_at() -> None:
    arguments = compress_arguments()
    compress_norm_rope_store(**arguments)
    expected = arguments["kv_cache"].copy()
    more = {
        "token_to_req_indices": [99, -1, 99],
        "positions": [2**40, -5, 2**40 - 2],  # skipped, skipped, no boundary
        "slot_mapping": [-1, 2, 2**40],
        "kv_slot_mapping": [2**40, -1, 0],
    }
    arguments = compress_arguments()
    for name, values in more.items():
        arguments[name] = np.concatenate([arguments[name].astype(np.int64), np.int64(values)])
    arguments["block_table"] = np.int32([[0, -7, 99], [2, 3, -7]])
    compress_norm_rope_store(**arguments)
    assert np.array_equal(arguments["kv_cache"], expected)


def rope_arguments() -> dict[str, Any]:
    """Two boundary tokens of ratio 2."""
    return {
        "latent": np.ones((2, 512), BF16),
        "positions": np.int64([1, 3]),
        "cos_sin_cache": turns(4),
        "kv_cache": np.full((2, 2, 528), 0xA5, np.uint8),
        "slot_mapping": np.int64([0, 3]),
        "compress_ratio": 2,
        "layout": "v41_mxfp8",
        "bf16_round_trip": False,
        "kv_block_size": None,
    }


ROPE_ERRORS: Errors = [
    *float_errors("latent", (2, 512), np.float32),
    *float_errors("cos_sin_cache", (4, 64)),
    *integer_errors("positions", [1, 3]),
    *integer_errors("slot_mapping", [0, 3]),
    *ratio_errors(True),
    *length_error("latent", lambda x: x[:1]),
    *length_error("positions", lambda x: x[:1]),
    ("kv_cache", lambda a: np.zeros((2, 2, 584), np.uint8), ArgumentError, "[2, 2, 584]"),
    ("kv_cache", lambda a: read_only(a["kv_cache"]), ArgumentError, "read-only"),
    ("kv_cache", lambda a: np.zeros((2, 2, 528), np.int8), ArgumentError, "int8"),
    ("kv_cache", lambda a: None, ArgumentError, "NoneType"),
    ("kv_block_size", lambda a: -1, ArgumentError, "-1"),
    ("layout", lambda a: "indexer_fp8", ArgumentError, "'indexer_fp8'"),
    ("layout", lambda a: None, ArgumentError, "None"),
    ("bf16_round_trip", lambda a: 1, ArgumentError, "1"),
    ("bf16_round_trip", lambda a: None, ArgumentError, "None"),
    ("positions", lambda a: np.int64([1, -1]), ValueRangeError, "-1"),
    ("positions", lambda a: np.int64([5, 3]), ValueRangeError, "5, rotated at 4"),
    ("slot_mapping", lambda a: np.int64([0, 4]), ValueRangeError, "4"),
    ("slot_mapping", lambda a: np.int64([3, 3]), ValueRangeError, "slot 3"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), ROPE_ERRORS)
def test_rope_errors(name: str, change: Change, kind: type, text: str) -> None:
    check_error(rope_quant_insert, rope_arguments(), ["kv_cache"], name, change, kind, text)


def ring_arguments() -> dict[str, Any]:
    """Chunks of three tokens and one, rings of two rows."""
    return {
        "kv_score": np.ones((4, 1024), np.float32),
        "positions": np.int64([1, 2, 3, 7]),
        "state_cache": np.full((2, 2, 1024), 9, np.float32),
        "slot_mapping": np.int64([1, 0, 1, 3]),
        "query_start_loc": np.int32([0, 3, 4]),
        "token_to_req_indices": np.int32([0, 0, 0, 1]),
        "rms_norm_weight": np.ones(512, np.float32),
        "rms_norm_eps": EPS,
        "latent_out": np.full((4, 512), -7, BF16),
        "compress_ratio": 2,
    }


RING_ERRORS: Errors = [
    *float_errors("kv_score", (4, 1024)),
    *float_errors("state_cache", (2, 2, 1024)),
    *float_errors("rms_norm_weight", (512,)),
    *float_errors("latent_out", (4, 512), np.float32),
    *integer_errors("positions", [1, 2, 3, 7]),
    *integer_errors("slot_mapping", [1, 0, 1, 3]),
    *integer_errors("query_start_loc", [0, 3, 4]),
    *integer_errors("token_to_req_indices", [0, 0, 0, 1]),
    *ratio_errors(True),
    *eps_errors(),
    *length_error("kv_score", lambda x: x[:3], "3 rows"),
    *length_error("positions", lambda x: x[:3], "3 rows"),
    *length_error("token_to_req_indices", lambda x: x[:3], "3 rows"),
    *length_error("latent_out", lambda x: x[:3], "3 rows"),
    ("kv_score", lambda a: np.ones((4, 512), np.float32), ArgumentError, "[4, 512]"),
    ("state_cache", lambda a: None, ArgumentError, "None"),
    ("state_cache", lambda a: read_only(a["state_cache"]), ArgumentError, "read-only"),
    ("latent_out", lambda a: read_only(a["latent_out"]), ArgumentError, "read-only"),
    (
        "latent_out",
        lambda a: strided(4, 512, dtype=BF16, strides=(500, 1)),
        ArgumentError,
        "strides",
    ),
    ("query_start_loc", lambda a: np.int32([]), ArgumentError, "no entries"),
    ("query_start_loc", lambda a: np.int32([-1, 3, 4]), ValueRangeError, "-1 to 4"),
    ("query_start_loc", lambda a: np.int32([0, 3, 5]), ValueRangeError, "0 to 5"),
    ("query_start_loc", lambda a: np.int32([0, 5, 4]), ValueRangeError, "step down"),
    ("token_to_req_indices", lambda a: np.int32([0, 0, 0, 2]), ValueRangeError, "2"),
    ("token_to_req_indices", lambda a: np.int32([0, 0, 0, -1]), ValueRangeError, "-1"),
    ("token_to_req_indices", lambda a: np.int32([0, 0, 1, 1]), ValueRangeError, "request 1"),
    ("query_start_loc", lambda a: np.int32([0, 3, 3]), ValueRangeError, "request 1"),
    ("positions", lambda a: np.int64([1, 2, 3, -1]), ValueRangeError, "-1"),
    ("positions", lambda a: np.int64([1, 4, 3, 7]), ValueRangeError, "1, then 4"),
    ("slot_mapping", lambda a: np.int64([1, 0, 1, 4]), ValueRangeError, "4"),
    ("slot_mapping", lambda a: np.int64([1, 0, 1, 2]), ValueRangeError, "row 0 for position 7"),
    ("slot_mapping", lambda a: np.int64([1, 0, 1, 1]), ValueRangeError, "slot 1"),
    ("slot_mapping", lambda a: np.int64([1, -1, 1, 3]), ValueRangeError, "between tokens 0 and 2"),
]


@pytest.mark.parametrize(("name", "change", "kind", "text"), RING_ERRORS)
def test_ring_errors(name: str, change: Change, kind: type, text: str) -> None:
    if name == "query_start_loc" and text == "request 1":  # either of the two may be the wrong one
        arguments = ring_arguments() | {name: change({})}
        with pytest.raises(kind, match=r"^token_to_req_indices: got request 1 for token 3"):
            pool_ring_latent(**arguments)
        return
    outputs = ["state_cache", "latent_out"]
    check_error(pool_ring_latent, ring_arguments(), outputs, name, change, kind, text)


@pytest.mark.parametrize(
    ("operation", "make"),
    [
        (save_partial_states, states_arguments),
        (compress_norm_rope_store, compress_arguments),
        (rope_quant_insert, rope_arguments),
        (pool_ring_latent, ring_arguments),
    ],
)
def test_arguments_are_valid_without_a_change_and_nothing_is_valid(
    operation: Callable[..., None], make: Callable[[], dict[str, Any]]
) -> None:
    operation(**make())
    arguments = make() | {"slot_mapping": np.int64([])}
    if "query_start_loc" in arguments:
        arguments["query_start_loc"] = np.int32([0])
    before = {k: v.tobytes() for k, v in arguments.items() if isinstance(v, np.ndarray)}
    operation(**arguments)
    assert {k: v.tobytes() for k, v in arguments.items() if isinstance(v, np.ndarray)} == before
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and name not in ("ape", "rms_norm_weight"):
            keep = 1 if name == "query_start_loc" else 0
            arguments[name] = value[:keep]
    operation(**arguments)


@pytest.mark.parametrize("make", [states_arguments, compress_arguments, rope_arguments])
def test_optional_arguments_are_keyword_only(make: Callable[[], dict[str, Any]]) -> None:
    operations = {
        states_arguments: save_partial_states,
        compress_arguments: compress_norm_rope_store,
        rope_arguments: rope_quant_insert,
    }
    with pytest.raises(TypeError, match="positional"):
        operations[make](*make().values())
