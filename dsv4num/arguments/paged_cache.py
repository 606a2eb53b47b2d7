"""What clause 6.1 allows of a paged cache, and of the arguments of insert and gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4num.arguments.array import INTEGERS, Array, integer, positive_int, same_device
from dsv4num.errors import ArgumentError
from dsv4num.formats import Layout, get_layout, layout_of_width


@dataclass(frozen=True, slots=True)
class Cache:
    """A paged cache whose geometry was checked: where its rows are, in numbers.

    Attributes:
        layout: the record.
        block_size: rows per page.
        num_blocks: pages.
        page_stride: bytes from one page to the next.
        pool: which of the layout's pools this is.
    """

    layout: Layout
    block_size: int
    num_blocks: int
    page_stride: int
    pool: int = 0

    @property
    def num_slots(self) -> int:
        """Rows in the whole cache; slots run from 0 to one below."""
        return self.num_blocks * self.block_size


def check_cache(
    cache: Array,
    block_size: Any,
    layout: str | Layout | None,
    *,
    written: bool,
    pool: int | None = None,
) -> Cache:
    """Clause 4.3: a uint8 cache [num_blocks, block_size, row bytes] or [num_blocks, page bytes].

    Of a layout that keeps several pools (clause 4.6), `pool` says which one this is.

    Raises:
        ArgumentError: dtype, rank, width, block size, page stride or layout does not fit.
    """
    rows = positive_int("block_size", block_size, "4.3")
    if layout is not None:
        chosen = get_layout(layout)
    elif len(cache.shape) == 3:
        try:
            chosen = layout_of_width(cache.shape[2])
        except ArgumentError as error:
            given = f"rows of {cache.shape[2]} bytes"
            raise ArgumentError(cache.name, given, error.allowed, "4.5") from None
    else:
        allowed = "a layout name: only a 3-D cache shows its row width"
        raise ArgumentError("layout", None, allowed, "4.5")
    if pool is None and chosen.pools > 1:
        allowed = f"{chosen.pools} arrays for {chosen.name}, one for each pool"
        raise ArgumentError(cache.name, "one array", allowed, "4.6")
    owned = chosen.owned_bytes(rows, pool=pool or 0)
    row_bytes = owned // rows
    enough = f"at least {owned} for {rows} {chosen.name} rows"
    if len(cache.shape) == 3:
        shape: tuple[int | str, ...] = ("num_blocks", rows, row_bytes)
    else:
        shape = ("num_blocks", f"page_bytes >= {owned}")
    cache.require(dtype="uint8", shape=shape, clause="4.3", written=written)
    num_blocks = cache.shape[0]
    if len(cache.shape) == 3 and rows > 1 and num_blocks and cache.strides[1] != row_bytes:
        given = f"stride {cache.strides[1]} along axis 1"
        raise ArgumentError(cache.name, given, f"{row_bytes}, the bytes per row", "4.3")
    if len(cache.shape) == 2 and cache.shape[1] < owned:
        given = f"pages of {cache.shape[1]} bytes"
        raise ArgumentError(cache.name, given, enough, "4.3")
    stride = cache.strides[0] if num_blocks > 1 else max(cache.strides[0], owned)
    if stride < owned:
        given = f"page stride {stride}"
        raise ArgumentError(cache.name, given, enough, "4.3")
    return Cache(chosen, rows, num_blocks, stride, pool or 0)


def check_pools(
    caches: Array | Sequence[Array],
    block_size: Any,
    layout: str | Layout | None,
    *,
    written: bool,
) -> tuple[Cache, ...]:
    """One cache, or for a layout with several pools (clause 4.6) one for each of them.

    Raises:
        ArgumentError: as `check_cache`, or not one array for each pool, or not as many pages in each.
    """
    if isinstance(caches, Array):
        return (check_cache(caches, block_size, layout, written=written),)
    wanted = 1 if layout is None else get_layout(layout).pools
    if len(caches) != wanted or wanted == 1:
        allowed = "one array" if wanted == 1 else f"{wanted} arrays, one for each pool"
        raise ArgumentError("k_cache", f"a sequence of {len(caches)} arrays", allowed, "4.6")
    found = tuple(
        check_cache(cache, block_size, layout, written=written, pool=pool)
        for pool, cache in enumerate(caches)
    )
    for cache, pool in zip(caches, found, strict=True):
        if pool.num_blocks != found[0].num_blocks:
            allowed = f"{found[0].num_blocks}, as in {caches[0].name}"
            raise ArgumentError(cache.name, f"{pool.num_blocks} pages", allowed, "4.6")
    return found


def check_insert(
    k: Array,
    k_cache: Array | Sequence[Array],
    slot_mapping: Array,
    block_size: Any,
    layout: str | Layout,
) -> Cache:
    """The arguments of `quantize_and_insert_k_cache` (clause 5.1)."""
    if layout is None:
        raise ArgumentError("layout", None, "a layout name", "5.1")
    cache = check_pools(k_cache, block_size, layout, written=True)[0]
    k.require(dtype="bfloat16", shape=("tokens", cache.layout.head_dim), clause="5.1")
    slot_mapping.require(dtype=INTEGERS, shape=("tokens",), clause="5.1")
    if k.shape[0] < slot_mapping.shape[0]:
        allowed = f"at least {slot_mapping.shape[0]}, the length of slot_mapping"
        raise ArgumentError("k", f"{k.shape[0]} rows", allowed, "5.1")
    pools = (k_cache,) if isinstance(k_cache, Array) else tuple(k_cache)
    same_device(*pools, k, slot_mapping)
    return cache


def check_gather(
    out: Array,
    k_cache: Array | Sequence[Array],
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    block_size: Any,
    offset: Any,
    layout: str | Layout | None,
) -> tuple[Cache, int]:
    """The arguments of `dequantize_and_gather_k_cache` (clause 5.2): the cache, and `offset`."""
    cache = check_pools(k_cache, block_size, layout, written=False)[0]
    seq_lens.require(dtype=INTEGERS, shape=("num_reqs",), clause="5.2")
    requests = seq_lens.shape[0]
    head_dim = cache.layout.head_dim
    out.require(dtype="bfloat16", shape=(requests, "M", head_dim), clause="5.2", written=True)
    block_table.require(dtype=INTEGERS, shape=(requests, "pages"), clause="5.2")
    if gather_lens is not None:
        gather_lens.require(dtype=INTEGERS, shape=(requests,), clause="5.2")
    first = integer("offset", offset, 0, "5.2")
    pools = (k_cache,) if isinstance(k_cache, Array) else tuple(k_cache)
    same_device(out, *pools, seq_lens, block_table, *([gather_lens] if gather_lens else []))
    return cache, first
