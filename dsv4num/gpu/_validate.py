"""Values on the device, looked at before a launch: `validate=True` (clause 6.2).

Every check waits for the device, and raises the error that the reference raises.
"""

from __future__ import annotations

import torch

from dsv4num.arguments import Cache, Compression
from dsv4num.arguments.compressor import State
from dsv4num.errors import ArgumentError, ValueRangeError


def asked(validate: object) -> bool:
    """Whether a launcher was asked to look at values.

    Raises:
        ArgumentError: neither True nor False.
    """
    if not isinstance(validate, bool):
        raise ArgumentError("validate", repr(validate), "True or False")
    return validate


def cache_slots(name: str, slot_mapping: torch.Tensor, cache: Cache) -> None:
    """Slots of 0 or more are within a paged cache and given once."""
    _within(
        name, slot_mapping, cache.num_slots, f"{cache.num_blocks} pages of {cache.block_size} rows"
    )
    _once(name, slot_mapping[slot_mapping >= 0])


def slots(name: str, chosen: torch.Tensor, store: Cache | State) -> None:
    """Slots, none below 0, are within their store and given once."""
    _within(name, chosen, store.num_slots, _blocks(store))
    _once(name, chosen)


def positions(at: torch.Tensor) -> None:
    """Positions of tokens that are not skipped are 0 or more."""
    if bool((at < 0).any()):
        raise ValueRangeError("positions", int(at.min()), "0 or more for a token not skipped")


def entries(at: torch.Tensor, ratio: int, max_position: int) -> None:
    """The first position of every group has a row in the cosine table."""
    found = at // ratio * ratio
    if found.numel() and int(found.max()) >= max_position:
        given = f"{int(at[found.argmax()])}, rotated at {int(found.max())}"
        allowed = f"rotated below {max_position}, the rows of cos_sin_cache"
        raise ValueRangeError("positions", given, allowed)


def compression(
    token_to_req_indices: torch.Tensor,
    all_positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    call: Compression,
) -> None:
    """The values of `compress_norm_rope_store`."""
    at = all_positions[: call.tokens].long()
    kept = (slot_mapping >= 0) & (kv_slot_mapping[: call.tokens] >= 0)
    positions(at[kept])
    ends = kept & ((at + 1) % call.ratio == 0)
    slots("kv_slot_mapping", kv_slot_mapping[: call.tokens][ends], call.cache)
    entries(at[ends], call.ratio, call.max_position)
    requests, at = token_to_req_indices[: call.tokens][ends].long(), at[ends]
    _below("token_to_req_indices", requests, call.num_reqs)
    rows = call.state.block_size
    beyond = at[at // rows >= call.table_columns]
    if beyond.numel():
        last = int(beyond[0])
        given = f"position {last}, column {last // rows}"
        raise ValueRangeError("block_table", given, f"columns below {call.table_columns}")
    if at.numel():
        window = at[:, None] + torch.arange(1 - call.window, 1, device=at.device)
        blocks = block_table[requests[:, None], window.clamp(min=0) // rows]
        _below("block_table", blocks, call.state.num_blocks)


def ring(
    all_positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    state: State | None,
) -> None:
    """The values of `pool_ring_latent`; without a `state`, those of ratio 1."""
    tokens = slot_mapping.shape[0]
    kept = slot_mapping >= 0
    at = all_positions[:tokens].long()
    positions(at[kept])
    if state is None:
        return
    starts = query_start_loc.long()
    if int(starts[0]) < 0 or int(starts[-1]) > tokens or bool((starts[1:] < starts[:-1]).any()):
        given = f"{int(starts[0])} to {int(starts[-1])}, or a step down"
        raise ValueRangeError("query_start_loc", given, f"not falling, within 0..{tokens}")
    live = torch.nonzero(kept).flatten()
    requests = token_to_req_indices[:tokens].long()[live]
    _below("token_to_req_indices", requests, len(starts) - 1)
    first, end = starts[requests], starts[requests + 1]
    outside = torch.nonzero((live < first) | (live >= end)).flatten()
    if outside.numel():
        index = int(outside[0])
        token = int(live[index])
        given = f"request {int(requests[index])} for token {token}"
        chunk = f"{int(first[index])}..{int(end[index]) - 1}"
        allowed = f"the request whose chunk, {chunk}, holds it"
        raise ValueRangeError("token_to_req_indices", given, allowed)
    where = slot_mapping.long()[live]
    _within("slot_mapping", where, state.num_slots, _blocks(state))
    moved = torch.nonzero(where % state.block_size != at[live] % state.block_size).flatten()
    if moved.numel():
        index = int(moved[0])
        position = int(at[live[index]])
        given = f"row {int(where[index]) % state.block_size} for position {position}"
        allowed = f"row {position % state.block_size}, position % capacity"
        raise ValueRangeError("slot_mapping", given, allowed)
    here, before = live[1:], live[:-1]
    together = first[1:] <= before
    apart = torch.nonzero(together & (here != before + 1)).flatten()
    if apart.numel():
        index = int(apart[0])
        given = f"a skipped token between tokens {int(before[index])} and {int(here[index])}"
        allowed = "skipped tokens only before and after the others of a chunk"
        raise ValueRangeError("slot_mapping", given, allowed)
    jump = torch.nonzero(together & (at[here] != at[before] + 1)).flatten()
    if jump.numel():
        index = int(jump[0])
        given = f"{int(at[before[index]])}, then {int(at[here[index]])} in one chunk"
        raise ValueRangeError("positions", given, "consecutive positions within a chunk")
    later = live + state.block_size
    replaced = (later < end) & kept[later.clamp(max=tokens - 1)]
    _once("slot_mapping", where[~replaced])


def _blocks(store: Cache | State) -> str:
    return f"{store.num_blocks} blocks of {store.block_size} rows"


def _within(name: str, chosen: torch.Tensor, num_slots: int, what: str) -> None:
    if chosen.numel() and int(chosen.max()) >= num_slots:
        raise ValueRangeError(name, int(chosen.max()), f"below {num_slots} ({what})")


def _once(name: str, chosen: torch.Tensor) -> None:
    values, counts = torch.unique(chosen, return_counts=True)
    repeated = values[counts > 1]
    if repeated.numel():
        raise ValueRangeError(name, f"slot {int(repeated[0])} more than once", "each slot once")


def _below(name: str, values: torch.Tensor, end: int) -> None:
    wrong = values[(values < 0) | (values >= end)]
    if wrong.numel():
        raise ValueRangeError(name, int(wrong[0]), f"0..{end - 1}")
