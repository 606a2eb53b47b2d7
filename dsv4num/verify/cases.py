"""Cases: one call of one operation, with arrays placed in memory as hostile callers place them.

Every array is a view into its own flat byte buffer with guard bytes around it, so that the runner can
compare a whole buffer: bytes that an operation does not own must keep what was there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsv4num.formats import GroupRule, Layout, get_layout, get_rule, get_scalar
from dsv4num.reference import encode_records, write_records

Level = Literal["quick", "full"]
Array = NDArray[Any]
BF16 = ml_dtypes.bfloat16

_GUARD = 256  # bytes before and after every array


@dataclass
class Case:
    """One call.

    Attributes:
        name: unique within operation and layout.
        arguments: positional arguments by name, in call order.
        keywords: keyword-only arguments.
        outputs: names of arguments that are written and hold nothing before (filled with poison).
        reference: arguments that differ for the reference, where the kernels must skip what the
            reference refuses.
        restore: rows of outputs that the kernels skip: called with the expected views after the
            reference ran and with the untouched ones, to put the poison back.
        sweep: run under every launch configuration, not only the default one.
        large: needs several gigabytes; runs on a GPU at level full only.
    """

    name: str
    arguments: dict[str, Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    reference: dict[str, Any] = field(default_factory=dict)
    restore: Callable[[dict[str, Array], dict[str, Array]], None] | None = None
    sweep: bool = False
    large: bool = False


def generator(seed: int, *names: str) -> np.random.Generator:
    """A random generator that depends on the seed and the names only."""
    return np.random.default_rng([seed, zlib.crc32("/".join(names).encode())])


def int32(values: list[int]) -> NDArray[np.int32]:
    """An int32 array."""
    return np.array(values, np.int32)


def int64(values: list[int]) -> NDArray[np.int64]:
    """An int64 array."""
    return np.array(values, np.int64)


def place(values: Array, strides: tuple[int, ...] | None = None, shift: int = 0) -> Array:
    """A copy of `values` inside a guarded buffer, with the given strides in elements.

    Args:
        values: the contents.
        strides: in elements; contiguous if not given.
        shift: bytes by which the first element is moved off its alignment of 16.
    """
    if strides is None:
        counts = [int(np.prod(values.shape[axis + 1 :])) for axis in range(values.ndim)]
        strides = tuple(counts)
    last = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    extent = (last + 1) * values.itemsize if values.size else 0
    size = -(-(_GUARD + shift + extent + _GUARD) // 16) * 16
    buffer = np.full(size, 0xC3, np.uint8)
    steps = tuple(s * values.itemsize for s in strides)
    view: Array = np.ndarray(values.shape, values.dtype, buffer, _GUARD + shift, steps)
    view[...] = values
    return view


def flat(view: Array) -> NDArray[np.uint8]:
    """The whole buffer that a placed array lies in."""
    base = view.base
    assert isinstance(base, np.ndarray) and base.dtype == np.uint8 and base.ndim == 1
    return base


def start_of(view: Array) -> int:
    """The byte of the buffer at which a placed array starts."""
    start: int = view.__array_interface__["data"][0]
    origin: int = flat(view).__array_interface__["data"][0]
    return start - origin


def rebase(view: Array, buffer: NDArray[np.uint8]) -> Array:
    """The same view into another buffer of the same size."""
    return np.ndarray(view.shape, view.dtype, buffer, start_of(view), view.strides)


# Values


def any_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Every bit pattern is as likely as any other: NaN, infinities and subnormals among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(BF16)


def wide_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal numbers, each row at its own magnitude between 2**-40 and 2**40."""
    scales = np.ldexp(np.float32(1), rng.integers(-40, 41, (*shape[:-1], 1)))
    rows: Array = (rng.standard_normal(shape).astype(np.float32) * scales).astype(BF16)
    return rows


def edge_bf16(rng: np.random.Generator, shape: tuple[int, ...], group: int = 16) -> Array:
    """Rows that sit on the decisions of every rule.

    Groups whose amax is the largest that a scale may serve, or one step beyond; midpoints of the
    element formats; zeros of both signs; single infinities and NaNs; and rows of one value.
    """
    rows = np.empty(shape, np.float32)
    groups = rows.reshape(-1, group)
    qmax = rng.choice(np.array([448, 240, 224, 6], np.float32), len(groups))
    exponent = rng.integers(-24, 25, len(groups))
    amax = np.ldexp(qmax, exponent).astype(BF16)
    step = rng.integers(-1, 2, len(groups)).astype(np.int16)
    amax = (amax.view(np.int16) + step).view(BF16).astype(np.float32)
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1.0625, 17, 0.001953125, 136, 6, 0]
    fractions = rng.choice(np.array(middles, np.float32), groups.shape)
    fractions *= rng.choice(np.array([-1, 1], np.float32), groups.shape)
    groups[:] = np.ldexp(fractions, exponent[:, None])
    np.clip(groups, -amax[:, None], amax[:, None], out=groups)
    groups[np.arange(len(groups)), rng.integers(0, group, len(groups))] = amax
    kinds = rng.integers(0, 12, len(groups))
    groups[kinds == 0] = np.float32(-0.0)
    groups[kinds == 1, 3] = np.inf
    groups[kinds == 2, 5] = np.nan
    groups[kinds == 3] = np.nan
    groups[kinds == 4] = -np.inf
    groups[kinds == 5] = amax[kinds == 5][:, None]
    return rows.astype(BF16)


def shuffled_slots(
    rng: np.random.Generator, tokens: int, slots: int, skipped: float = 0.1
) -> NDArray[np.int64]:
    """Distinct slots in random order, some of them -1 or another negative number."""
    chosen = rng.permutation(slots)[:tokens].astype(np.int64)
    chosen[rng.random(tokens) < skipped] = rng.choice([-1, -1, -7, -(1 << 31)])
    return chosen


# Paged caches


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


# Scalars and groups


def _boundaries(fmt_name: str) -> NDArray[np.float32]:
    """Every rounding boundary of a format, and the two fp32 on either side of each."""
    from dsv4num.reference import decode

    fmt = get_scalar(fmt_name)
    if fmt.width == 16:
        codes = np.arange(0, 1 << 16, 3, dtype=np.uint32)
        middles = (codes << 16) | 0x8000
    else:
        values = decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
        middles = np.concatenate([values, (values[1:] + values[:-1]) / 2, [464, 480, 256, 7]])
        middles = middles.astype(np.float32).view(np.uint32)
    near = middles[:, None].astype(np.int64) + np.arange(-2, 3)
    bits = np.clip(near, 0, 0x7FFFFFFF).astype(np.uint32).ravel()
    both: NDArray[np.float32] = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(
        np.float32
    )
    return both


def encode_cases(fmt_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `encode`."""
    rng = generator(seed, "encode", fmt_name)
    many = 1 << (24 if level == "full" else 16)
    patterns = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    random = rng.integers(0, 1 << 32, many, dtype=np.uint32).view(np.float32)
    yield Case("every bf16 pattern", {"x": place(patterns), "fmt": fmt_name})
    yield Case("bf16 input", {"x": place(any_bf16(rng, (5, 1000))), "fmt": fmt_name})
    yield Case("boundaries", {"x": place(_boundaries(fmt_name)), "fmt": fmt_name})
    yield Case("any fp32 bits", {"x": place(random), "fmt": fmt_name})
    near_one = np.ldexp(rng.standard_normal(many).astype(np.float32), rng.integers(-12, 12, many))
    yield Case("near one", {"x": place(near_one.astype(np.float32)), "fmt": fmt_name})
    yield Case("empty", {"x": place(np.zeros((3, 0), np.float32)), "fmt": fmt_name})


def decode_cases(fmt_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `decode`."""
    fmt = get_scalar(fmt_name)
    dtype = np.uint16 if fmt.width == 16 else np.uint8
    codes = np.arange(fmt.codes, dtype=np.uint32).astype(dtype)
    yield Case("every code", {"codes": place(codes), "fmt": fmt_name})


def pack_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `pack`: every pair of codes."""
    pairs = np.stack(np.meshgrid(np.arange(16), np.arange(16)), axis=-1).reshape(16, 32)
    yield Case("every pair", {"codes": place(pairs.astype(np.uint8))})


def unpack_cases(_: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `unpack`: every byte."""
    yield Case("every byte", {"packed": place(np.arange(256, dtype=np.uint8).reshape(8, 32))})


def _octave_borders(rule: GroupRule) -> NDArray[np.float32]:
    """fp32 amax within two steps of qmax * 2**e for every e, and of the floor."""
    borders = np.concatenate(
        [
            np.ldexp(np.float64(rule.qmax), np.arange(-157, 126)),
            np.ldexp(1.0, np.arange(-149, 128)),
            [rule.floor, rule.floor * rule.qmax, 2688.0, 2800.0],
        ]
    )
    with np.errstate(over="ignore", under="ignore"):
        bits = borders.astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.clip(bits[:, None] + np.arange(-2, 3), 0, 0x7F800000)
    amax: NDArray[np.float32] = near.astype(np.uint32).ravel().view(np.float32)
    return amax


def encode_scale_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `encode_scale`."""
    rng = generator(seed, "encode_scale", rule_name)
    many = 1 << (24 if level == "full" else 16)
    bf16 = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32)
    yield Case("every bf16 amax", {"amax": place(bf16), "rule": rule_name})
    borders = _octave_borders(get_rule(rule_name))
    yield Case("octave borders", {"amax": place(borders), "rule": rule_name})
    random = rng.integers(0, 0x7F800001, many, dtype=np.uint32).view(np.float32)
    yield Case("any amax", {"amax": place(random), "rule": rule_name})


def quantize_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `quantize`."""
    rng = generator(seed, "quantize", rule_name)
    rule = get_rule(rule_name)
    rows = 4096 if level == "full" else 64
    patterns = rng.integers(0, 1 << 32, (rows, 512), dtype=np.uint32).view(np.float32)
    yield Case("any fp32 bits", {"x": place(patterns), "rule": rule_name})
    yield Case("few rows", {"x": place(patterns[:3].copy()), "rule": rule_name}, sweep=True)
    scales = np.ldexp(np.float32(1), rng.integers(-100, 100, (rows, 1)))
    wide = rng.standard_normal((rows, 512)).astype(np.float32) * scales
    yield Case("wide fp32", {"x": place(wide.astype(np.float32)), "rule": rule_name})
    yield Case("edges", {"x": place(edge_bf16(rng, (rows, 512))), "rule": rule_name})
    borders = _octave_borders(rule)
    single = np.zeros((len(borders), rule.group), np.float32)  # one group each
    single[:, 1], single[:, 3] = borders, -borders
    yield Case("octave borders", {"x": place(single), "rule": rule_name})


def dequantize_cases(rule_name: str, level: Level, seed: int) -> Iterator[Case]:
    """Cases of `dequantize`: every pair of code and scale code."""
    rule = get_rule(rule_name)
    codes = np.arange(rule.element.codes, dtype=np.uint32).astype(np.uint8)
    codes = np.resize(codes, max(len(codes), rule.group))
    rows = np.tile(codes, (256, 1))
    every = np.arange(256, dtype=np.uint32).astype(np.uint8)
    scales = np.repeat(every[:, None], len(codes) // rule.group, axis=1)
    arguments = {"codes": place(rows), "scale_codes": place(scales), "rule": rule_name}
    yield Case("every pair", arguments)
