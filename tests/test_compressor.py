"""`reference.compressor` against loops over exact fractions, float64, and recorded H200 bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import mpmath  # type: ignore[import-untyped]
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
    published: list[tuple[int, int]] = field(default_factory=list)

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
    return list(zip(edges, edges[1:], strict=False))


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
        plain.rope_insert(
            rows, at, bits(table), want, stride, slots, 4, ratio, layout, round_trip
        )
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
    differs = caches[0] != caches[1]
    assert not differs[:, 0, :448].any()
    assert 0.02 < differs[:, 0, 448:512].mean() < 0.045
    assert differs.sum() == (np.abs(np.int16(caches[0]) - np.int16(caches[1])) == 1).sum()


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
    """Request 1 owns no row of its own: its block is the one that request 0 is about to fill."""
    rows = np.ones((3, 1024), np.float32)
    rows[:, :512] = np.float32([5, 6, 7])[:, None]
    ring, out = np.full((1, 2, 1024), 3, np.float32), np.full((3, 512), -7, BF16)
    ring[0, 0, :512] = -3
    pool_ring_latent(
        rows,
        np.int64([2, 3, 1]),
        ring,
        np.int64([0, 1, 1]),
        np.int32([0, 2, 2]),
        np.int32([0, 0, 0]),
        np.ones(512, np.float32),
        0.0,
        out,
        compress_ratio=2,
    ) if False else pool_ring_latent(
        rows[[0, 2]],
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
    assert (out[1] == 1).all() and (out[0] == -7).all()  # (e**3 * -3 + e * 7) / ... is negative?
    assert (ring[0, 0, :512] == 5).all() and (ring[0, 1, :512] == 7).all()


def test_ring_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (Rings([14, 9], 3) for _ in range(2))
    whole.launch((0, 0, 14), (1, 0, 9))
    monkeypatch.setattr(compressor, "CHUNK", 4)
    parts.launch((0, 0, 14), (1, 0, 9))
    same_rings(whole, parts)
