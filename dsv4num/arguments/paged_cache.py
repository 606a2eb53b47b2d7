"""What clause 6.1 allows of a paged cache, and of the arguments of insert and gather."""

from __future__ import annotations

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
    """

    layout: Layout
    block_size: int
    num_blocks: int
    page_stride: int

    @property
    def num_slots(self) -> int:
        """Rows in the whole cache; slots run from 0 to one below."""
        return self.num_blocks * self.block_size


def check_cache(
    cache: Array, block_size: Any, layout: str | Layout | None, *, written: bool
) -> Cache:
    """Clause 4.3: a uint8 cache [num_blocks, block_size, row bytes] or [num_blocks, page bytes].

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
    owned = chosen.owned_bytes(rows)
    enough = f"at least {owned} for {rows} {chosen.name} rows"
    if len(cache.shape) == 3:
        shape: tuple[int | str, ...] = ("num_blocks", rows, chosen.row_bytes)
    else:
        shape = ("num_blocks", f"page_bytes >= {owned}")
    cache.require(dtype="uint8", shape=shape, clause="4.3", written=written)
    num_blocks = cache.shape[0]
    if len(cache.shape) == 3 and rows > 1 and num_blocks and cache.strides[1] != chosen.row_bytes:
        given = f"stride {cache.strides[1]} along axis 1"
        raise ArgumentError(cache.name, given, f"{chosen.row_bytes}, the bytes per row", "4.3")
    if len(cache.shape) == 2 and cache.shape[1] < owned:
        given = f"pages of {cache.shape[1]} bytes"
        raise ArgumentError(cache.name, given, enough, "4.3")
    stride = cache.strides[0] if num_blocks > 1 else max(cache.strides[0], owned)
    if stride < owned:
        given = f"page stride {stride}"
        raise ArgumentError(cache.name, given, enough, "4.3")
    return Cache(chosen, rows, num_blocks, stride)


def check_insert(
    k: Array, k_cache: Array, slot_mapping: Array, block_size: Any, layout: str | Layout
) -> Cache:
    """The arguments of `quantize_and_insert_k_cache` (clause 5.1)."""
    if layout is None:
        raise ArgumentError("layout", None, "a layout name", "5.1")
    cache = check_cache(k_cache, block_size, layout, written=True)
    k.require(dtype="bfloat16", shape=("tokens", cache.layout.head_dim), clause="5.1")
    slot_mapping.require(dtype=INTEGERS, shape=("tokens",), clause="5.1")
    if k.shape[0] < slot_mapping.shape[0]:
        allowed = f"at least {slot_mapping.shape[0]}, the length of slot_mapping"
        raise ArgumentError("k", f"{k.shape[0]} rows", allowed, "5.1")
    same_device(k_cache, k, slot_mapping)
    return cache


def check_gather(
    out: Array,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    block_size: Any,
    offset: Any,
    layout: str | Layout | None,
) -> tuple[Cache, int]:
    """The arguments of `dequantize_and_gather_k_cache` (clause 5.2): the cache, and `offset`."""
    cache = check_cache(k_cache, block_size, layout, written=False)
    seq_lens.require(dtype=INTEGERS, shape=("num_reqs",), clause="5.2")
    requests = seq_lens.shape[0]
    head_dim = cache.layout.head_dim
    out.require(dtype="bfloat16", shape=(requests, "M", head_dim), clause="5.2", written=True)
    block_table.require(dtype=INTEGERS, shape=(requests, "pages"), clause="5.2")
    if gather_lens is not None:
        gather_lens.require(dtype=INTEGERS, shape=(requests,), clause="5.2")
    first = integer("offset", offset, 0, "5.2")
    same_device(out, k_cache, seq_lens, block_table, *([gather_lens] if gather_lens else []))
    return cache, first
