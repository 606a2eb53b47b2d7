"""The operations as `torch.library` operators of the namespace `dsv4num`, for `torch.compile`.

Importing this module registers them; nothing else does. An operator calls the launcher of
`dsv4num.gpu` and never the other way, so a call that is not compiled pays for none of this. Each
operator says which arguments it writes, and the index builders have a fake implementation that gives
shapes and strides. The meaning is that of the operation of the same name, layouts are names, and
values on the device are not looked at.
"""

# No postponed annotations here: torch reads the types to make each operator's schema.

import torch

from dsv4num import gpu

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compress_norm_rope_store",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "pool_ring_latent",
    "quantize_and_insert_k_cache",
    "rope_quant_insert",
    "save_partial_states",
]


@torch.library.custom_op("dsv4num::quantize_and_insert_k_cache", mutates_args=("k_cache",))
def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    *,
    layout: str = "v4",
) -> None:
    """`dsv4num.gpu.quantize_and_insert_k_cache` as an operator."""
    gpu.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, layout=layout)


@torch.library.custom_op("dsv4num::dequantize_and_gather_k_cache", mutates_args=("out",))
def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    *,
    layout: str | None = None,
) -> None:
    """`dsv4num.gpu.dequantize_and_gather_k_cache` as an operator."""
    gpu.dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, layout=layout
    )


@torch.library.custom_op("dsv4num::save_partial_states", mutates_args=("state_cache",))
def save_partial_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_ratio: int,
) -> None:
    """`dsv4num.gpu.save_partial_states` as an operator."""
    gpu.save_partial_states(
        kv, score, ape, positions, state_cache, slot_mapping, compress_ratio=compress_ratio
    )


@torch.library.custom_op("dsv4num::compress_norm_rope_store", mutates_args=("kv_cache",))
def compress_norm_rope_store(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    *,
    compress_ratio: int,
    overlap: bool,
    layout: str,
    kv_block_size: int | None = None,
) -> None:
    """`dsv4num.gpu.compress_norm_rope_store` as an operator."""
    gpu.compress_norm_rope_store(
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        cos_sin_cache,
        kv_cache,
        kv_slot_mapping,
        rms_norm_weight,
        rms_norm_eps,
        compress_ratio=compress_ratio,
        overlap=overlap,
        layout=layout,
        kv_block_size=kv_block_size,
    )


@torch.library.custom_op("dsv4num::rope_quant_insert", mutates_args=("kv_cache",))
def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_ratio: int,
    layout: str,
    bf16_round_trip: bool = False,
    kv_block_size: int | None = None,
) -> None:
    """`dsv4num.gpu.rope_quant_insert` as an operator."""
    gpu.rope_quant_insert(
        latent,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        compress_ratio=compress_ratio,
        layout=layout,
        bf16_round_trip=bf16_round_trip,
        kv_block_size=kv_block_size,
    )


@torch.library.custom_op("dsv4num::pool_ring_latent", mutates_args=("state_cache", "latent_out"))
def pool_ring_latent(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    latent_out: torch.Tensor,
    *,
    compress_ratio: int,
) -> None:
    """`dsv4num.gpu.pool_ring_latent` as an operator."""
    gpu.pool_ring_latent(
        kv_score,
        positions,
        state_cache,
        slot_mapping,
        query_start_loc,
        token_to_req_indices,
        rms_norm_weight,
        rms_norm_eps,
        latent_out,
        compress_ratio=compress_ratio,
    )


@torch.library.custom_op("dsv4num::compute_global_topk_indices_and_lens", mutates_args=())
def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dsv4num.gpu.compute_global_topk_indices_and_lens` as an operator."""
    return gpu.compute_global_topk_indices_and_lens(
        topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
    )


@torch.library.custom_op("dsv4num::combine_topk_swa_indices", mutates_args=())
def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dsv4num.gpu.combine_topk_swa_indices` as an operator."""
    return gpu.combine_topk_swa_indices(
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        window_size,
        compress_ratio,
        topk,
        M,
        N,
    )


@torch.library.custom_op("dsv4num::build_flashinfer_mixed_sparse_indices", mutates_args=())
def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    swa_block_table: torch.Tensor,
    swa_block_size: int,
    compressed_block_table: torch.Tensor,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: torch.Tensor | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    replay_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dsv4num.gpu.build_flashinfer_mixed_sparse_indices` as an operator.

    The options may come by position too: torch has no operators with tensors by name only.
    """
    return gpu.build_flashinfer_mixed_sparse_indices(
        decode_swa_indices,
        decode_compressed_indices,
        decode_compressed_topk_lens,
        prefill_topk_indices,
        query_start_loc,
        seq_lens,
        token_to_req_indices,
        swa_block_table,
        swa_block_size,
        compressed_block_table,
        compressed_block_size,
        window_size,
        compress_ratio,
        topk,
        decode_compressed_indices_are_local=decode_compressed_indices_are_local,
        decode_is_valid_token=decode_is_valid_token,
        swa_block_span=swa_block_span,
        compressed_block_span=compressed_block_span,
        replay_start=replay_start,
    )


def _nothing_returned(*arguments, **keywords) -> None:
    """The fake of an operator that only writes its arguments."""


for _operator in (
    quantize_and_insert_k_cache,
    dequantize_and_gather_k_cache,
    save_partial_states,
    compress_norm_rope_store,
    rope_quant_insert,
    pool_ring_latent,
):
    _operator.register_fake(_nothing_returned)


def _int32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A fake int32 tensor on the device of another."""
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@compute_global_topk_indices_and_lens.register_fake
def _fake_global(topk_indices, token_to_req_indices, block_table, block_size, is_valid_token):
    tokens, width = topk_indices.shape
    return _int32(topk_indices, tokens, width), _int32(topk_indices, tokens)


@combine_topk_swa_indices.register_fake
def _fake_combine(
    topk_indices,
    query_start_loc,
    seq_lens,
    gather_lens,
    window_size,
    compress_ratio,
    topk,
    M,
    N,
):
    tokens = topk_indices.shape[0]
    columns = (topk + window_size + 127) // 128 * 128
    return _int32(topk_indices, tokens, columns), _int32(topk_indices, tokens)


@build_flashinfer_mixed_sparse_indices.register_fake
def _fake_mixed(
    decode_swa_indices,
    decode_compressed_indices,
    decode_compressed_topk_lens,
    prefill_topk_indices,
    query_start_loc,
    seq_lens,
    token_to_req_indices,
    swa_block_table,
    swa_block_size,
    compressed_block_table,
    compressed_block_size,
    window_size,
    compress_ratio,
    topk,
    *options,
    **named_options,
):
    tokens = decode_swa_indices.shape[0] + prefill_topk_indices.shape[0]
    width = topk
    if decode_compressed_indices is not None:
        width = torch.sym_max(topk, decode_compressed_indices.shape[1])
    columns = decode_swa_indices.shape[1] + (width + 3) // 4 * 4
    rows = _int32(decode_swa_indices, tokens, (columns + 3) // 4 * 4)
    return rows[:, :columns], _int32(decode_swa_indices, tokens)
