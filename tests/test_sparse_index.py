"""`reference.sparse_index`: recorded bytes, a plain-loop oracle, public reports, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4num import ArgumentError, ValueRangeError
from dsv4num.arguments import Array, check_combine, check_global_topk, check_mixed
from dsv4num.reference import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
)

FILE = np.load(Path(__file__).parent / "vectors" / "h200_triton36.npz", allow_pickle=False)
INT32_MAX = 2**31 - 1

Arguments = dict[str, Any]
Rows = tuple[list[list[int]], list[int]]


# --- the contract again, in loops over Python integers ---------------------------------


class Loops:
    """One run of the oracle; `faults` counts the values that clause 6.2 refuses."""

    def __init__(self) -> None:
        self.faults = 0

    def ok(self, holds: bool) -> bool:
        """Counts a fault where something does not hold."""
        self.faults += not holds
        return holds

    def place(self, index: int, table: list[int], size: int, span: int) -> int:
        """The slot of one place of a sequence."""
        if index < 0:
            return -1
        page, row = divmod(index, size)
        if not self.ok(page < len(table)) or not self.ok(table[page] >= 0):
            return -1
        slot = table[page] * span + row
        return slot if self.ok(slot <= INT32_MAX) else -1

    def spread(self, slot: int, size: int, span: int) -> int:
        """A given slot, its pages `span` apart."""
        if slot < 0:
            return -1
        moved = slot // size * span + slot % size
        return moved if self.ok(moved <= INT32_MAX) else -1

    def topk(self, a: Arguments) -> Rows:
        """Clause 5.7."""
        table, size = a["block_table"].tolist(), a["block_size"]
        rows, lens = [], []
        for t, local in enumerate(a["topk_indices"].tolist()):
            q, valid = int(a["token_to_req_indices"][t]), bool(a["is_valid_token"][t])
            before = self.faults
            row = [-1] * len(local)
            if self.ok(0 <= q < len(table)):
                row = [self.place(i, table[q], size, size) for i in local]
            rows.append(row)
            lens.append(sum(s >= 0 for s in row) if valid else 0)
            if not valid:
                self.faults = before
        return rows, lens

    def combine(self, a: Arguments) -> Rows:
        """Clause 5.8."""
        tokens = len(a["topk_indices"])
        topk, window, ratio, m, n = (
            a[name] for name in ("topk", "window_size", "compress_ratio", "M", "N")
        )
        width = topk + window
        while width % 128:
            width += 1
        rows, lens = [[-1] * width for _ in range(tokens)], [0] * tokens
        starts = [start - int(a["query_start_loc"][0]) for start in a["query_start_loc"].tolist()]
        self.ok(starts[-1] <= tokens)
        for b, (seq, gathered) in enumerate(
            zip(a["seq_lens"].tolist(), a["gather_lens"].tolist(), strict=True)
        ):
            self.ok(seq >= 0 and 0 <= gathered <= seq and gathered + n <= m)
            query = starts[b + 1] - starts[b]
            self.ok(query >= 0)
            for j in range(query):
                t, pos = starts[b] + j, seq - query + j
                if not 0 <= t < tokens:
                    continue
                out = []
                for c in range(topk):
                    if ratio and (c + 1) * ratio <= pos + 1:
                        i = int(a["topk_indices"][t, c])
                        out.append(m * b + i if 0 <= i < n else -1)
                for p in range(max(pos - window + 1, 0), pos + 1):
                    if p >= seq - gathered:
                        row = n + p - (seq - gathered)
                        out.append(m * b + row if row < m else -1)
                out = [row if self.ok(row <= INT32_MAX) else -1 for row in out]
                rows[t][: len(out)] = out
                lens[t] = len(out)
        return rows, lens

    def mixed(self, a: Arguments) -> Rows:
        """Clause 5.9."""
        swa, topk = a["decode_swa_indices"].tolist(), a["topk"]
        given_, counts = a["decode_compressed_indices"], a["decode_compressed_topk_lens"]
        prefill = a["prefill_topk_indices"].tolist()
        swa_width = a["decode_swa_indices"].shape[1]
        width = 0 if given_ is None else given_.shape[1]
        padded = max(topk, width)
        while padded % 4:
            padded += 1
        swa_size, size = a["swa_block_size"], a["compressed_block_size"]
        swa_span = a["swa_block_span"] or swa_size
        span = a["compressed_block_span"] or size
        swa_table, table = a["swa_block_table"].tolist(), a["compressed_block_table"].tolist()
        starts, seq_lens = a["query_start_loc"].tolist(), a["seq_lens"].tolist()
        self.ok(all(seq >= 0 for seq in seq_lens))
        self.ok(all(starts[b] <= starts[b + 1] for b in range(len(seq_lens))))
        rows, lens = [], []
        for t, slots in enumerate(swa):
            row = [self.spread(s, swa_size, swa_span) for s in slots]
            count = 0
            if given_ is not None and a["decode_compressed_indices_are_local"]:
                before = self.faults
                valid = a["decode_is_valid_token"]
                valid = True if valid is None else bool(valid[t])
                q = int(a["token_to_req_indices"][t])
                if self.ok(0 <= q < len(seq_lens)):
                    row += [self.place(int(i), table[q], size, span) for i in given_[t]]
                count = sum(s >= 0 for s in row[swa_width:]) if valid else 0
                if not valid:
                    self.faults = before
            elif given_ is not None:
                row += [self.spread(int(s), size, span) for s in given_[t]]
                count = width
                if counts is not None:
                    self.ok(0 <= counts[t] <= width)
                    count = sorted((0, int(counts[t]), width))[1]
            rows.append(row)
            lens.append(swa_width + count)
        for t, local in enumerate(prefill, start=len(swa)):
            q = int(a["token_to_req_indices"][t])
            row, k = [], 0
            if self.ok(0 <= q < len(seq_lens)):
                begin, end = starts[q] - starts[0], starts[q + 1] - starts[0]
                self.ok(begin <= t < end)
                pos = seq_lens[q] - (end - begin) + t - begin
                for p in range(pos - a["window_size"] + 1, pos + 1):
                    if p >= 0 and (a["replay_start"] is None or p >= a["replay_start"][q]):
                        row.append(self.place(p, swa_table[q], swa_size, swa_span))
                row += [-1] * (swa_width - len(row))
                while k < topk and a["compress_ratio"] and (k + 1) * a["compress_ratio"] <= pos + 1:
                    row.append(self.place(local[k], table[q], size, span))
                    k += 1
            rows.append(row)
            lens.append(swa_width + k)
        return [row + [-1] * (swa_width + padded - len(row)) for row in rows], lens


def topk_call(a: Arguments, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """The reference, called by position as the signature promises."""
    names = "topk_indices token_to_req_indices block_table block_size is_valid_token"
    return compute_global_topk_indices_and_lens(*(a[name] for name in names.split()), **more)


COMBINE = [
    "topk_indices",
    "query_start_loc",
    "seq_lens",
    "gather_lens",
    "window_size",
    "compress_ratio",
    "topk",
    "M",
    "N",
]


def combine_call(a: Arguments, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same."""
    return combine_topk_swa_indices(*(a[name] for name in COMBINE), **more)


MIXED = [
    "decode_swa_indices",
    "decode_compressed_indices",
    "decode_compressed_topk_lens",
    "prefill_topk_indices",
    "query_start_loc",
    "seq_lens",
    "token_to_req_indices",
    "swa_block_table",
    "swa_block_size",
    "compressed_block_table",
    "compressed_block_size",
    "window_size",
    "compress_ratio",
    "topk",
]
MIXED_KEYWORDS = [
    "decode_compressed_indices_are_local",
    "decode_is_valid_token",
    "swa_block_span",
    "compressed_block_span",
    "replay_start",
]


def mixed_call(a: Arguments, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same."""
    keywords = {name: a[name] for name in MIXED_KEYWORDS}
    return build_flashinfer_mixed_sparse_indices(*(a[name] for name in MIXED), **keywords, **more)


Call = Callable[..., tuple[np.ndarray, np.ndarray]]
CALLS: dict[str, tuple[Call, Callable[[Loops, Arguments], Rows]]] = {
    "topk": (topk_call, Loops.topk),
    "combine": (combine_call, Loops.combine),
    "mixed": (mixed_call, Loops.mixed),
}


def check(operation: str, a: Arguments) -> int:
    """The reference against the loops, in both treatments of values out of range; the faults."""
    call, oracle = CALLS[operation]
    before = {name: np.copy(v) for name, v in a.items() if isinstance(v, np.ndarray)}
    loops = Loops()
    rows, lens = oracle(loops, a)
    got, got_lens = call(a, out_of_range="skip")
    assert got.dtype == got_lens.dtype == np.int32 and len(got) == len(rows)
    assert got.tolist() == rows and got_lens.tolist() == lens
    if loops.faults:
        with pytest.raises(ValueRangeError):
            call(a)
    else:
        got, got_lens = call(a)
        assert got.tolist() == rows and got_lens.tolist() == lens
    for name, value in before.items():
        assert np.array_equal(a[name], value), name
    if operation == "mixed":
        check_alignment(got)
    return loops.faults


def check_alignment(matrix: np.ndarray) -> None:
    """Rows 16 bytes apart or a multiple of that; -1 between them."""
    whole = matrix if matrix.base is None else matrix.base
    assert whole.shape[1] % 4 == 0 and whole.flags.c_contiguous
    assert 0 <= whole.shape[1] - matrix.shape[1] < 4
    assert matrix.strides[0] % 16 == 0 or len(matrix) == 0
    assert (whole[:, matrix.shape[1] :] == -1).all()


# --- recorded on an H200 ---------------------------------------------------------------


def case(name: str) -> Arguments:
    """The arrays of one recorded case; scalars as Python numbers."""
    found = {key.split("/")[1]: FILE[key] for key in FILE.files if key.split("/")[0] == name}
    return {key: value if value.ndim else value.item() for key, value in found.items()}


@pytest.mark.parametrize("name", ["topk_global", "topk_global_wide"])
def test_recorded_topk(name: str) -> None:
    a = case(name)
    got, lens = topk_call(a)
    assert np.array_equal(got, a["global_topk_indices"]) and np.array_equal(lens, a["topk_lens"])
    assert not a["is_valid_token"].all() and (got[~a["is_valid_token"]] >= 0).any()
    assert check("topk", a) == 0


@pytest.mark.parametrize("name", ["combine_c4", "combine_swa_only", "combine_c128_base"])
def test_recorded_combine(name: str) -> None:
    a = case(name)
    got, lens = combine_call(a)
    assert np.array_equal(got, a["combined_indices"]) and np.array_equal(lens, a["combined_lens"])
    assert check("combine", a) == 0


@pytest.mark.parametrize("mode", ["none", "global", "lens", "local", "swa_only"])
def test_recorded_mixed(mode: str) -> None:
    a = case(f"mixed_{mode}")
    a = {name: a.get(name) for name in (*MIXED, *MIXED_KEYWORDS)} | a
    got, lens = mixed_call(a)
    assert np.array_equal(got, a["sparse_indices"]) and np.array_equal(lens, a["sparse_topk_lens"])
    assert check("mixed", a) == 0


# --- the examples of SPEC.md -----------------------------------------------------------

SPEC = (Path(__file__).parent.parent / "SPEC.md").read_text(encoding="utf-8")
EXAMPLES = [
    (name, int(pos or 0), [int(i) for i in local.split()], want.split(), int(length))
    for name, body in re.findall(r"```indices (\w+)\n(.*?)```", SPEC, re.DOTALL)
    for pos, local, want, length in re.findall(
        r"^(?:(\d+) )?\[([^]]*)\] -> \[([^]]*)\] \| (\d+)$", body, re.MULTILINE
    )
]


def test_examples_were_read() -> None:
    fences = re.findall(r"```indices \w+\n(.*?)```", SPEC, re.DOTALL)
    assert len(EXAMPLES) == sum(body.count("->") for body in fences) >= 9
    assert {example[0] for example in EXAMPLES} == {"global", "combine", "mixed"}


@pytest.mark.parametrize(("name", "pos", "local", "want", "length"), EXAMPLES)
def test_examples(name: str, pos: int, local: list[int], want: list[str], length: int) -> None:
    indices, starts, request = np.int32([local]), np.int32([0, 1]), np.int32([0])
    seq_lens = np.int32([pos + 1])
    if name == "global":
        got, lens = compute_global_topk_indices_and_lens(
            indices, request, np.int32([[7, 3]]), 64, np.array([True])
        )
    elif name == "combine":
        got, lens = combine_topk_swa_indices(
            indices, starts, seq_lens, seq_lens, window_size=3, compress_ratio=2, topk=2, M=8, N=3
        )
        assert (got[:, length:] == -1).all()
        got = got[:, :length]
    else:
        tables = np.int32([[5, 6]]), 4, np.int32([[9, 4]]), 2
        no_decode = np.zeros((0, 3), np.int32)
        got, lens = build_flashinfer_mixed_sparse_indices(
            no_decode, None, None, indices, starts, seq_lens, request, *tables, 3, 2, 2
        )
    assert got.tolist() == [[int(slot) for slot in want]] and lens.tolist() == [length]


# --- laws ------------------------------------------------------------------------------

RATIOS = (0, 1, 2, 4, 128)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.int32, np.int64])


def holed(rng: np.random.Generator, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Some entries -1."""
    return np.where(rng.random(array.shape) < 0.25, -1, array).astype(dtype)


def spoiled(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """One entry far out of range, of either sign."""
    array = np.array(array)
    if array.size:
        bad = [-5, -1, -(2**31), INT32_MAX, INT32_MAX - 63, 1 << 26, 700]
        array.flat[rng.integers(array.size)] = rng.choice(bad)
    return array


@settings(max_examples=120, deadline=None)
@given(seeds, dtypes, st.sampled_from([1, 16, 64, 100]), st.sampled_from([0, 1, 7, 40]), st.data())
def test_topk_is_the_loops(
    seed: int, dtype: Any, size: int, width: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    tokens, requests, pages = data.draw(st.integers(0, 6)), rng.integers(1, 4), rng.integers(1, 5)
    a = {
        "topk_indices": holed(rng, rng.integers(0, pages * size, (tokens, width)), dtype),
        "token_to_req_indices": rng.integers(0, requests, tokens + rng.integers(3)).astype(dtype),
        "block_table": rng.integers(0, 1 << 20, (requests, pages + 2)).astype(dtype)[:, :pages],
        "block_size": size,
        "is_valid_token": rng.random(tokens + rng.integers(3)) < 0.8,
    }
    assert check("topk", a) == 0
    name = data.draw(st.sampled_from(["topk_indices", "token_to_req_indices", "block_table"]))
    check("topk", a | {name: spoiled(rng, a[name])})


def starts_of(rng: np.random.Generator, lengths: list[int], base: int, dtype: Any) -> np.ndarray:
    """`query_start_loc` of query lengths."""
    return np.array([base + sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype)


@settings(max_examples=200, deadline=None)
@given(
    seeds,
    dtypes,
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from(RATIOS),
    st.sampled_from([1, 3, 128, 130]),
    st.sampled_from([0, 1, 5, 64]),
    st.sampled_from([0, 77]),
    st.data(),
)
def test_combine_is_the_loops(
    seed: int,
    dtype: Any,
    queries: list[int],
    ratio: int,
    window: int,
    topk: int,
    base: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    most = int(rng.choice([4, 40, 700]))
    seq_lens = np.array([rng.integers(0, most) for _ in queries], dtype)
    gathers = np.array([rng.integers(0, seq + 1) for seq in seq_lens], dtype)
    n = int(rng.integers(0, 30))
    tokens = sum(queries) + int(rng.integers(3))
    a = {
        "topk_indices": holed(rng, rng.integers(0, n + 5, (tokens, topk + rng.integers(3))), dtype),
        "query_start_loc": starts_of(rng, queries, base, dtype),
        "seq_lens": seq_lens,
        "gather_lens": gathers,
        "window_size": window,
        "compress_ratio": ratio,
        "topk": topk,
        "M": n + max(gathers.tolist(), default=0) + int(rng.integers(3)),
        "N": n,
    }
    assert check("combine", a) == 0
    name = data.draw(st.sampled_from(["topk_indices", "seq_lens", "gather_lens", "M"]))
    changed = INT32_MAX - 3 if name == "M" else spoiled(rng, a[name])
    check("combine", a | {name: changed})


MODES = ("none", "global", "lens", "local", "local_valid")


@settings(max_examples=250, deadline=None)
@given(
    seeds,
    dtypes,
    st.sampled_from(MODES),
    st.integers(0, 4),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(RATIOS),
    st.sampled_from([1, 3, 128]),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([0, 1, 6, 13]),
    st.sampled_from([0, 0, 1, 77]),
    st.data(),
)
def test_mixed_is_the_loops(
    seed: int,
    dtype: Any,
    mode: str,
    decode: int,
    queries: list[int],
    ratio: int,
    window: int,
    wider: int,
    topk: int,
    base: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    swa_size, size = (int(rng.choice([1, 4, 64])) for _ in range(2))
    lengths = [1] * decode + queries
    requests, tokens, prefill = len(lengths), sum(lengths), sum(queries)
    most = int(rng.choice([3, 300]))
    pages = -(-most // swa_size)
    compressed_pages = 3
    width = int(rng.choice([0, 1, 9, 12]))
    given_ = mode != "none"
    local = mode.startswith("local")
    bound = compressed_pages * size if local else 5000
    replays = rng.integers(-2, most, requests).astype(dtype)
    a: Arguments = {
        "decode_swa_indices": holed(rng, rng.integers(0, 5000, (decode, window + wider)), dtype),
        "decode_compressed_indices": holed(rng, rng.integers(0, bound, (decode, width)), dtype)
        if given_
        else None,
        "decode_compressed_topk_lens": rng.integers(0, width + 1, decode).astype(dtype)
        if mode == "lens"
        else None,
        "prefill_topk_indices": holed(
            rng, rng.integers(0, compressed_pages * size, (prefill, topk + rng.integers(3))), dtype
        ),
        "query_start_loc": starts_of(rng, lengths, base, dtype),
        "seq_lens": rng.integers(0, most + 1, requests).astype(dtype),
        "token_to_req_indices": np.array(
            [q for q, n in enumerate(lengths) for _ in range(n)] + [99], dtype
        )[: tokens + int(rng.integers(2))],
        "swa_block_table": rng.integers(0, 1000, (requests + rng.integers(2), pages)).astype(dtype),
        "swa_block_size": swa_size,
        "compressed_block_table": rng.integers(0, 1000, (requests, compressed_pages)).astype(dtype),
        "compressed_block_size": size,
        "window_size": window,
        "compress_ratio": ratio,
        "topk": topk,
        "decode_compressed_indices_are_local": local,
        "decode_is_valid_token": rng.random(tokens) < 0.7 if mode == "local_valid" else None,
        "swa_block_span": data.draw(st.sampled_from([None, swa_size, swa_size + 6])),
        "compressed_block_span": data.draw(st.sampled_from([None, size, size + 1])),
        "replay_start": data.draw(st.sampled_from([None, replays])),
    }
    assert check("mixed", a) == 0
    arrays = [name for name, value in a.items() if isinstance(value, np.ndarray)]
    unspoilable = ("decode_is_valid_token", "query_start_loc")
    name = data.draw(st.sampled_from([name for name in arrays if name not in unspoilable]))
    check("mixed", a | {name: spoiled(rng, a[name])})


def test_queries_out_of_order() -> None:
    """Starts that fall, or tokens beyond the rows, are refused; a kernel stays inside."""
    a = combine_arguments() | {"query_start_loc": np.int32([0, 3, 1])}
    with pytest.raises(ValueRangeError, match="query_start_loc"):
        combine_call(a)
    combine_call(a, out_of_range="skip")
    huge = combine_arguments() | {"query_start_loc": np.int64([0, 2**40, 2**60])}
    got, lens = combine_call(huge, out_of_range="skip")
    assert (got == -1).all() and not lens.any()


# --- public reports --------------------------------------------------------------------


def global_of(local: list[int], table: list[int], size: int, **more: Any) -> tuple[list[int], int]:
    """Slots and length of one valid token."""
    got, lens = compute_global_topk_indices_and_lens(
        np.int32([local]), np.int32([0]), np.int32([table]), size, np.array([True]), **more
    )
    return got[0].tolist(), int(lens[0])


def counts_at(positions: list[int], ratio: int, topk: int) -> list[int]:
    """Compressed entries of single queries at these positions, by both builders."""
    a = {
        "topk_indices": np.zeros((len(positions), topk), np.int32),
        "query_start_loc": np.arange(len(positions) + 1, dtype=np.int32),
        "seq_lens": np.int32(positions) + 1,
        "gather_lens": np.int32([0] * len(positions)),
        "window_size": 8,
        "compress_ratio": ratio,
        "topk": topk,
        "M": 1,
        "N": 1,
    }
    rows, lens = combine_call(a)
    table = np.zeros((len(positions), 100), np.int32)
    mixed, mixed_lens = build_flashinfer_mixed_sparse_indices(
        *(np.zeros((0, 8), np.int32), None, None, a["topk_indices"], a["query_start_loc"]),
        *(a["seq_lens"], np.arange(len(positions)), table, 64, table, 64, 8, ratio, topk),
    )
    counts: list[int] = lens.tolist()
    assert (rows >= 0).sum(axis=1).tolist() == counts
    assert (mixed_lens - 8).tolist() == (mixed[:, 8:] >= 0).sum(axis=1).tolist() == counts
    return counts


def windows_at(positions: list[int], window: int) -> list[list[int]]:
    """Window entries of single queries at these positions."""
    rows, lens = combine_topk_swa_indices(
        np.zeros((len(positions), 0), np.int32),
        np.arange(len(positions) + 1, dtype=np.int32),
        np.int32(positions) + 1,
        np.int32(positions) + 1,
        *(window, 0, 0, 1000, 0),
    )
    kept = [row[:n].tolist() for row, n in zip(rows, lens, strict=True)]
    assert all((row[n:] == -1).all() for row, n in zip(rows, lens, strict=True))
    return [[row - 1000 * b for row in window] for b, window in enumerate(kept)]


def test_B51_short_prompts_after_long_ones() -> None:
    """Prompts of 130, 5, 127 and 128 tokens at ratio 128, each counted on its own."""
    assert counts_at([129, 4, 126, 127], 128, 8) == [1, 0, 0, 1]


def test_B54_ratio_0_is_no_compressor() -> None:
    """Ratio 0 reads its window alone; ratio 1 is a real compressor."""
    assert [counts_at([5], ratio, 64)[0] for ratio in RATIOS] == [0, 6, 3, 1, 0]
    assert windows_at([5], 128) == [[0, 1, 2, 3, 4, 5]]


def test_B63_rows_and_columns_of_the_table() -> None:
    """Beyond the table nothing is read. Entries keep their columns here: no compaction."""
    got = global_of([0, 63, 64, -1, 130], [7, 3], 64, out_of_range="skip")
    assert got == ([448, 511, 192, -1, -1], 3)
    assert global_of([130, 5], [7, 3], 64, out_of_range="skip") == ([-1, 453], 1)
    assert global_of([0, 64], [-1, 3], 64, out_of_range="skip") == ([-1, 192], 1)
    with pytest.raises(ValueRangeError, match=r"^topk_indices: got place 130 for token 0; .*127"):
        global_of([0, 63, 64, -1, 130], [7, 3], 64)
    with pytest.raises(ValueRangeError, match=r"^block_table: got page -1 for token 0; "):
        global_of([0, 64], [-1, 3], 64)
    a = topk_arguments() | {"token_to_req_indices": np.int32([1, 2])}
    got_rows, lens = topk_call(a, out_of_range="skip")
    assert got_rows[1].tolist() == [-1, -1, -1] and lens[1] == 0
    with pytest.raises(ValueRangeError, match=r"^token_to_req_indices: got 2 for token 1; "):
        topk_call(a)


def test_B65_a_valid_0_beside_padding() -> None:
    """-1 stays -1 and takes nothing away from index 0."""
    for local, want in (
        ([0, -1, -1], {0}),
        ([2, 0, -1], {0, 2}),
        ([-1, -1, -1], set()),
        ([3, 3, -1], {3}),
    ):
        slots, count = global_of(local, [0], 4)
        assert set(slots) - {-1} == want and count == sum(i >= 0 for i in local)


@pytest.mark.parametrize("query", [2, 4])
def test_B67_no_negative_length(query: int) -> None:
    """A request shorter than its query: positions below 0 read nothing."""
    seq_len = {2: 0, 4: 2}[query]
    want = {2: [0, 0], 4: [0, 0, 1, 2]}[query]
    lens = combine_topk_swa_indices(
        np.zeros((query, 0), np.int32),
        np.int32([0, query]),
        *(np.int32([seq_len]), np.int32([seq_len]), 128, 0, 0, 128, 0),
    )[1]
    assert lens.tolist() == want
    table = np.int32([[0]])
    slots, lens = build_flashinfer_mixed_sparse_indices(
        *(np.zeros((0, 4), np.int32), None, None, np.zeros((query, 4), np.int32)),
        *(np.int32([0, query]), np.int32([seq_len]), np.zeros(query, np.int32)),
        *(table, 64, table, 64, 4, 1, 4),
    )
    assert (lens - 4).tolist() == want
    assert (slots[:, :4] >= 0).sum(axis=1).tolist() == want


def test_B69_topk_limits_the_count() -> None:
    """512 from position 2047 on, never 513."""
    assert counts_at([2043, 2047, 2050, 2051, 4095], 4, 512) == [511, 512, 512, 512, 512]


def test_B70_ids_beyond_the_request() -> None:
    """Id 120 of request 0 is not row 20 of request 1."""
    local = np.int32([[99, 100, 120, 199, 200]] * 2)
    rows, lens = combine_topk_swa_indices(
        *(local, np.int32([0, 1, 2]), np.int32([5, 5]), np.int32([0, 0]), 1, 1, 5, 100, 100)
    )
    assert rows[0, :5].tolist() == [99, -1, -1, -1, -1]
    assert rows[1, :5].tolist() == [199, -1, -1, -1, -1]
    assert lens.tolist() == [5, 5]


@pytest.mark.parametrize(("window", "entries"), [(128, 640), (133, 648), (192, 704)])
def test_B71_rows_are_16_bytes_apart(window: int, entries: int) -> None:
    """Window columns, then top-k columns, then -1 up to the next row."""
    a = mixed_arguments()
    a |= {
        "decode_swa_indices": np.arange(2 * window, dtype=np.int32).reshape(2, window),
        "window_size": 128,
        "topk": 512,
        "prefill_topk_indices": np.zeros((3, 512), np.int32),
    }
    got, _ = mixed_call(a)
    assert got.shape == (5, window + 512) and got.strides == (entries * 4, 4)
    assert got.strides[0] % 16 == 0
    whole = got if got.base is None else got.base
    assert whole.shape == (5, entries) and (whole[:, window + 512 :] == -1).all()
    assert got[0, :window].tolist() == list(range(window))


def test_B72_the_window_before_it_is_full() -> None:
    """pos + 1 entries up to the window, then the window."""
    rows = windows_at([0, 5, 127, 128], 128)
    assert [len(row) for row in rows] == [1, 6, 128, 128]
    assert rows[1] == [0, 1, 2, 3, 4, 5] and rows[3][0] == 1 and rows[3][-1] == 128


def test_slots_beyond_int32() -> None:
    """64-bit inside: the last slot of int32 is right, the next one is none."""
    top = (2**31) // 64 - 1
    assert global_of([63, 64], [top, 0], 64) == ([INT32_MAX, 0], 2)
    assert global_of([0], [top + 1], 64, out_of_range="skip") == ([-1], 0)
    assert global_of([0], [INT32_MAX], 2**31 - 1, out_of_range="skip") == ([-1], 0)
    with pytest.raises(ValueRangeError, match=f"^block_table: got slot {2**31} for token 0; "):
        global_of([0], [top + 1], 64)


# --- bad input -------------------------------------------------------------------------


def topk_arguments() -> Arguments:
    """Two tokens of two requests."""
    return {
        "topk_indices": np.int32([[0, 3, -1], [5, -1, 1]]),
        "token_to_req_indices": np.int32([0, 1]),
        "block_table": np.int32([[4, 2], [1, 0]]),
        "block_size": 4,
        "is_valid_token": np.array([True, True]),
    }


def combine_arguments() -> Arguments:
    """Three tokens of two requests."""
    return {
        "topk_indices": np.int32([[0, 3], [1, -1], [0, 1]]),
        "query_start_loc": np.int32([7, 9, 10]),
        "seq_lens": np.int32([9, 4]),
        "gather_lens": np.int32([6, 4]),
        "window_size": 4,
        "compress_ratio": 4,
        "topk": 2,
        "M": 9,
        "N": 3,
    }


def mixed_arguments() -> Arguments:
    """Two decode tokens with local indices, then three tokens of a third request."""
    return {
        "decode_swa_indices": np.int32([[5, 6, 7, -1], [1, 2, -1, -1]]),
        "decode_compressed_indices": np.int32([[0, 5, -1], [2, -1, 3]]),
        "decode_compressed_topk_lens": np.int32([1, 3]),
        "prefill_topk_indices": np.int32([[0, 1], [1, -1], [0, 2]]),
        "query_start_loc": np.int32([0, 1, 2, 5]),
        "seq_lens": np.int32([9, 4, 6]),
        "token_to_req_indices": np.int32([0, 1, 2, 2, 2]),
        "swa_block_table": np.int32([[4, 2, 1], [1, 0, 3], [7, 6, 5]]),
        "swa_block_size": 4,
        "compressed_block_table": np.int32([[4, 2], [1, 0], [3, 5]]),
        "compressed_block_size": 4,
        "window_size": 4,
        "compress_ratio": 2,
        "topk": 2,
        "decode_compressed_indices_are_local": True,
        "decode_is_valid_token": np.array([True, True]),
        "swa_block_span": None,
        "compressed_block_span": None,
        "replay_start": np.int32([0, 0, 1]),
    }


MAKE = {"topk": topk_arguments, "combine": combine_arguments, "mixed": mixed_arguments}
FLAGS = ("is_valid_token", "decode_is_valid_token")
OPTIONAL = [
    "decode_compressed_indices",
    "decode_compressed_topk_lens",
    "decode_is_valid_token",
    "swa_block_span",
    "compressed_block_span",
    "replay_start",
]
# These say how many tokens or requests there are, so that no number of rows is wrong.
FREE_ROWS = ("topk_indices", "prefill_topk_indices", "block_table")


def wrong_arrays(name: str, value: np.ndarray) -> list[tuple[Any, str]]:
    """Every wrong form of an array argument, with a piece of the message."""
    wrong: list[tuple[Any, str]] = [
        (value.tolist(), "list"),
        (value.astype(np.float32), "float32"),
        (value.astype(np.uint32), "uint32"),
        (value.astype(np.int16), "int16"),
        (value[None], f"{value.ndim + 1} axes"),
        (value[0], f"{value.ndim - 1} axes" if value.ndim > 1 else "got "),
        (np.repeat(value, 2, axis=-1)[..., ::2], "stride 2"),
        (np.flip(value, -1), "stride -1"),
    ]
    wrong.append((value.astype(np.int32), "int32") if name in FLAGS else (value > 0, "bool"))
    if name not in OPTIONAL:
        wrong.append((None, "NoneType"))
    if name not in FREE_ROWS:
        wrong.append((value[:-1], str(len(value) - 1)))
    return wrong


def wrong_integers(name: str, value: Any) -> list[tuple[Any, str]]:
    """Every wrong form of an integer option."""
    least = 0 if name in ("compress_ratio", "topk", "M", "N") else 1
    least = 4 if name.endswith("span") else least
    wrong: list[tuple[Any, str]] = [(bad, repr(bad)) for bad in (least - 1, True, 1.5, "4")]
    wrong += [(-1, "-1"), (2**31, str(2**31))]
    return wrong if name in OPTIONAL else [*wrong, (None, "None")]


WRONG = [
    (operation, name, bad, text)
    for operation, make in MAKE.items()
    for name, value in make().items()
    if name != "decode_compressed_indices_are_local"
    for bad, text in (
        wrong_arrays(name, value) if isinstance(value, np.ndarray) else wrong_integers(name, value)
    )
]
WRONG += [
    ("combine", "topk_indices", np.zeros((3, 1), np.int32), "1 columns"),
    ("combine", "N", 10, "10"),
    ("combine", "query_start_loc", np.int32([0, 1, 2, 3]), "[4]"),
    ("combine", "gather_lens", np.int32([1, 2, 3]), "[3]"),
    ("mixed", "prefill_topk_indices", np.zeros((3, 1), np.int32), "1 columns"),
    ("mixed", "decode_swa_indices", np.zeros((2, 3), np.int32), "3 columns"),
    ("mixed", "decode_compressed_indices", np.zeros((3, 3), np.int32), "[3, 3]"),
    ("mixed", "query_start_loc", np.int32([0, 1, 2, 5, 5]), "[5]"),
    ("mixed", "replay_start", np.int32([0, 0, 0, 0]), "[4]"),
    ("mixed", "decode_compressed_indices_are_local", 1, "1"),
    ("mixed", "decode_compressed_indices_are_local", None, "None"),
]
# Where a length decides what others must be, the message names the others.
BLAMED = {
    ("combine", "seq_lens"): "query_start_loc",
    ("mixed", "seq_lens"): "query_start_loc",
    ("mixed", "decode_swa_indices"): "decode_compressed_indices",
}


@pytest.mark.parametrize(("operation", "name", "bad", "text"), WRONG)
def test_wrong_argument(operation: str, name: str, bad: Any, text: str) -> None:
    a = MAKE[operation]()
    shorter = (
        isinstance(bad, np.ndarray) and len(bad) == len(a[name]) - 1 and bad.ndim == a[name].ndim
    )
    with pytest.raises(ArgumentError) as caught:
        CALLS[operation][0](a | {name: bad})
    message = str(caught.value)
    blamed = BLAMED.get((operation, name), name) if shorter else name
    assert message.startswith(f"{blamed}: got "), message
    assert shorter or text in message.split("; allowed: ")[0], message
    assert "(SPEC " in message and not isinstance(caught.value, ValueRangeError)


@pytest.mark.parametrize("operation", MAKE)
def test_arguments_are_good_as_they_are(operation: str) -> None:
    assert check(operation, MAKE[operation]()) == 0
    with pytest.raises(ArgumentError, match=r"^out_of_range: got 'drop'; "):
        CALLS[operation][0](MAKE[operation](), out_of_range="drop")


VALUES = [
    ("topk", "topk_indices", np.int32([[0, 8, -1], [5, -1, 1]]), "place 8 for token 0"),
    ("topk", "token_to_req_indices", np.int32([0, -1]), "-1 for token 1"),
    ("topk", "token_to_req_indices", np.int32([2, 0]), "2 for token 0"),
    ("topk", "block_table", np.int32([[4, 2], [1, -2]]), "page -2 for token 1"),
    ("topk", "block_table", np.int64([[2**40, 2], [1, 0]]), f"page {2**40} for token 0"),
    ("combine", "query_start_loc", np.int32([7, 6, 8]), "6 after 7"),
    ("combine", "query_start_loc", np.int32([7, 9, 11]), "4 tokens"),
    ("combine", "seq_lens", np.int32([9, -4]), "-4 for request 1"),
    ("combine", "gather_lens", np.int32([6, 5]), "5 for request 1"),
    ("combine", "gather_lens", np.int32([7, 4]), "7 for request 0"),
    ("combine", "gather_lens", np.int32([6, -1]), "-1 for request 1"),
    ("combine", "M", INT32_MAX, f"M = {INT32_MAX}"),
    ("mixed", "decode_swa_indices", np.full((2, 4), 2**31), f"slot {2**31} for token 0"),
    ("mixed", "decode_compressed_indices", np.int32([[0, 8, 1], [2, 1, 3]]), "place 8 for token 0"),
    ("mixed", "prefill_topk_indices", np.int32([[0, 1], [9, 1], [0, 2]]), "place 9 for token 3"),
    ("mixed", "query_start_loc", np.int32([0, 1, 0, 5]), "0 after 1"),
    ("mixed", "seq_lens", np.int32([9, 4, -6]), "-6 for request 2"),
    ("mixed", "seq_lens", np.int32([9, 4, 99]), "place 93 for token 2"),
    ("mixed", "token_to_req_indices", np.int32([0, 1, 2, 3, 2]), "3 for token 3"),
    ("mixed", "token_to_req_indices", np.int32([0, 1, 2, 1, 2]), "request 1 for token 3"),
    ("mixed", "token_to_req_indices", np.int32([-1, 1, 2, 2, 2]), "-1 for token 0"),
    ("mixed", "swa_block_table", np.int32([[4, 2, 1], [1, 0, 3], [-1, 6, 5]]), "page -1 for token"),
    ("mixed", "compressed_block_table", np.int32([[4, 2], [1, 0], [-3, 5]]), "page -3 for token 2"),
]


@pytest.mark.parametrize(("operation", "name", "bad", "text"), VALUES)
def test_value_out_of_range(operation: str, name: str, bad: Any, text: str) -> None:
    a = MAKE[operation]() | {name: bad}
    with pytest.raises(ValueRangeError) as caught:
        CALLS[operation][0](a)
    message = str(caught.value)
    assert message.startswith(f"{name}: got ") and text in message and "(SPEC 6.2)" in message
    assert check(operation, a) > 0


def test_given_lengths_out_of_range() -> None:
    a = mixed_arguments() | {"decode_compressed_indices_are_local": False}
    for lens, kept in (([-1, 3], [0, 3]), ([1, 4], [1, 3])):
        a["decode_compressed_topk_lens"] = np.int32(lens)
        with pytest.raises(ValueRangeError, match=r"^decode_compressed_topk_lens: got "):
            mixed_call(a)
        assert (mixed_call(a, out_of_range="skip")[1][:2] - 4).tolist() == kept


def test_what_a_mode_does_not_use_has_no_effect() -> None:
    a = mixed_arguments()
    want = mixed_call(a)
    got = mixed_call(a | {"decode_compressed_topk_lens": None})
    assert all(np.array_equal(x, y) for x, y in zip(want, got, strict=True))
    a |= {"decode_compressed_indices_are_local": False}
    a |= {"token_to_req_indices": np.int32([-7, 99, 2, 2, 2])}
    want = mixed_call(a | {"decode_is_valid_token": None})
    got = mixed_call(a | {"decode_is_valid_token": np.array([False, False])})
    assert all(np.array_equal(x, y) for x, y in zip(want, got, strict=True))
    assert (want[1][:2] - 4).tolist() == [1, 3]


def test_an_invalid_token_is_never_an_error() -> None:
    """What padding holds is no fault; what can be mapped is, and its length is 0."""
    a = topk_arguments() | {"is_valid_token": np.array([True, False])}
    got, lens = topk_call(a | {"topk_indices": np.int32([[0, 3, -1], [5, 99, 1]])})
    assert got.tolist() == [[16, 19, -1], [1, -1, 5]] and lens.tolist() == [2, 0]
    got, lens = topk_call(a | {"token_to_req_indices": np.int32([0, 77])})
    assert got[1].tolist() == [-1, -1, -1] and lens.tolist() == [2, 0]


def described(a: Arguments, device: str, name: str) -> Arguments:
    """Arguments as the shared checks see them, one on another device."""
    found: Arguments = {}
    for key, value in a.items():
        found[key] = value
        if isinstance(value, np.ndarray):
            strides = tuple(stride // value.itemsize for stride in value.strides)
            found[key] = Array(key, value.shape, strides, value.dtype.name, "cuda:0")
    found[name] = replace(found[name], device=device)
    return found


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, make in MAKE.items()
        for name, value in make().items()
        if isinstance(value, np.ndarray)
    ],
)
def test_devices(operation: str, name: str) -> None:
    checks = {"topk": check_global_topk, "combine": check_combine, "mixed": check_mixed}
    found = checks[operation](**described(MAKE[operation](), "cuda:0", name))
    assert found
    with pytest.raises(ArgumentError, match="device cuda:"):
        checks[operation](**described(MAKE[operation](), "cuda:1", name))
