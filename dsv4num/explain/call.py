"""A call of an operation that writes a cache: why its bytes differ, and what other writers leave there.

For `verify` and for tests: SPEC 5.1, 5.4 and 5.6, their arguments as the reference takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4num.arguments import check_cache
from dsv4num.explain.encoder import Knobs, encode_under
from dsv4num.explain.pages import Dump
from dsv4num.explain.search import Explanation, explain_rows
from dsv4num.explain.sources import Latents, Rows, Source, States
from dsv4num.reference.record import describe

__all__ = ["CACHES", "explain_call", "write_call"]

#: The operations that write records, and what they call the cache.
CACHES = {
    "quantize_and_insert_k_cache": "k_cache",
    "rope_quant_insert": "kv_cache",
    "compress_norm_rope_store": "kv_cache",
}


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
    if operation not in CACHES:
        return None
    dump = _dump(observed, operation, arguments)
    return explain_rows(dump, _source(operation, arguments))


def write_call(operation: str, arguments: Mapping[str, Any], knobs: Knobs) -> bool:
    """Writes into the cache of a call what a writer with these knobs leaves there.

    Args:
        operation: its name in `dsv4num.reference`.
        arguments: all its arguments by name, as `explain_call` takes them; the cache is written.
        knobs: the writer's.

    Returns:
        Whether it is an operation of SPEC 5.1, 5.4 or 5.6; False for another one, which writes nothing.

    Example:
        >>> import ml_dtypes
        >>> k, slots = np.zeros((1, 512), ml_dtypes.bfloat16), np.int64([0])
        >>> cache = np.full((1, 1, 584), 0xA5, np.uint8)
        >>> given = dict(k=k, k_cache=cache, slot_mapping=slots, block_size=1, layout="v4")
        >>> write_call("quantize_and_insert_k_cache", given, Knobs(floor=1e-8, pad_written=False))
        True
        >>> cache[0, 0, 574:].tobytes().hex(" ")
        '00 00 5c 5c 5c 5c 5c 5c 5c a5'
    """
    if operation not in CACHES:
        return False
    dump = _dump(arguments[CACHES[operation]], operation, arguments)
    source = _source(operation, arguments)
    source = source.part(np.flatnonzero(source.slots >= 0))
    records = encode_under(source.values(knobs), dump.layout, knobs, bf16=source.bf16)
    where = dump.offsets(source.slots, knobs)
    dump.data[where[where >= 0]] = records[where >= 0]
    return True


def _source(operation: str, given: Mapping[str, Any]) -> Source:
    """The rows of a call, where they come from and where they go."""
    if operation == "quantize_and_insert_k_cache":
        slots = given["slot_mapping"].astype(np.int64)
        return Rows(given["k"][: len(slots)], slots)
    if operation == "rope_quant_insert":
        return _latents(given)
    names = ("state_cache", "token_to_req_indices", "positions", "slot_mapping", "block_table")
    more = ("cos_sin_cache", "kv_slot_mapping", "rms_norm_weight", "rms_norm_eps")
    shape = {name: given[name] for name in ("compress_ratio", "overlap")}
    return States.gathered(*(given[name] for name in (*names, *more)), **shape)


def _latents(given: Mapping[str, Any]) -> Latents:
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


def _dump(cache: NDArray[np.uint8], operation: str, given: Mapping[str, Any]) -> Dump:
    """A cache as a dump of its own memory, with its own page stride."""
    insert = operation == "quantize_and_insert_k_cache"
    rows = given.get("block_size", 64) if insert else given.get("kv_block_size")
    block = cache.shape[1] if cache.ndim == 3 else rows
    described = describe(CACHES[operation], cache)
    checked = check_cache(described, block, given.get("layout", "v4"), written=False)
    owned = checked.layout.owned_bytes(checked.block_size)
    size = max((checked.num_blocks - 1) * checked.page_stride + owned, 0)
    flat = np.lib.stride_tricks.as_strided(cache, (size,), (1,))
    return Dump(flat, checked.layout, checked.block_size, checked.page_stride)
