"""A call of an operation that writes a cache, and why its bytes differ: for `verify` and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import check_cache
from dsv4num.explain.pages import Dump
from dsv4num.explain.search import Explanation, explain_rows
from dsv4num.explain.sources import Latents, Rows, Source, States
from dsv4num.reference.record import describe

__all__ = ["explain_call"]


def explain_call(
    operation: str, arguments: Mapping[str, Any], observed: NDArray[np.uint8]
) -> Explanation | None:
    """Why a cache is not as an operation of SPEC 5.1, 5.4 or 5.6 leaves it.

    Args:
        operation: its name in `dsv4num.reference`.
        arguments: all its arguments by name, NumPy arrays, as the reference takes them.
        observed: the cache after the call, of the shape of the argument.

    Returns:
        The explanation; None for another operation.

    Example:
        >>> import ml_dtypes
        >>> k, slots = np.zeros((1, 512), ml_dtypes.bfloat16), np.int64([0])
        >>> cache = np.zeros((1, 1, 584), np.uint8)
        >>> cache[0, 0, 576:583] = 114
        >>> given = dict(k=k, k_cache=cache, slot_mapping=slots, block_size=1, layout="v4")
        >>> found = explain_call("quantize_and_insert_k_cache", given, cache)
        >>> found.hypotheses[0].names
        ('floor-1e-4-on-scale',)
    """
    given = dict(arguments)
    if operation == "quantize_and_insert_k_cache":
        slots = given["slot_mapping"].astype(np.int64)
        source: Source = Rows(given["k"][: len(slots)], slots)
        rows = given.get("block_size", 64)
    elif operation == "rope_quant_insert":
        source, rows = _latents(given), given.get("kv_block_size")
    elif operation == "compress_norm_rope_store":
        names = ("state_cache", "token_to_req_indices", "positions", "slot_mapping", "block_table")
        more = ("cos_sin_cache", "kv_slot_mapping", "rms_norm_weight", "rms_norm_eps")
        shape = {name: given[name] for name in ("compress_ratio", "overlap")}
        source = States.gathered(*(given[name] for name in (*names, *more)), **shape)
        rows = given.get("kv_block_size")
    else:
        return None
    return explain_rows(_dump(observed, rows, given.get("layout", "v4")), source)


def _latents(given: dict[str, Any]) -> Latents:
    """The tokens of a call of `rope_quant_insert` that it stores."""
    slots = given["slot_mapping"].astype(np.int64)
    tokens, ratio = len(slots), given["compress_ratio"]
    at = given["positions"][:tokens].astype(np.int64)
    kept = np.flatnonzero((slots >= 0) & ((at + 1) % ratio == 0))
    return Latents(
        given["latent"][kept],
        at[kept],
        given["cos_sin_cache"],
        slots[kept],
        ratio,
        bool(given.get("bf16_round_trip", False)),
    )


def _dump(cache: NDArray[np.uint8], rows: int | None, layout: Any) -> Dump:
    """A cache as a dump, with its own page stride."""
    block = cache.shape[1] if cache.ndim == 3 else rows
    checked = check_cache(describe("k_cache", cache), block, layout, written=False)
    size = (checked.num_blocks - 1) * checked.page_stride + checked.layout.owned_bytes(
        checked.block_size
    )
    flat = np.lib.stride_tricks.as_strided(cache, (max(size, 0),), (1,))
    return Dump(np.array(flat), checked.layout, checked.block_size, checked.page_stride)
