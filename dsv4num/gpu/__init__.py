"""The operations of `dsv4num.reference` as Triton kernels on torch tensors, with the same bytes."""

from dsv4num.gpu._target import Launch
from dsv4num.gpu.arithmetic import exp32, inv_rms, rms_norm, round_bf16, tree_sum
from dsv4num.gpu.compressor import (
    compress_norm_rope_store,
    pool_ring_latent,
    rope_quant_insert,
    save_partial_states,
)
from dsv4num.gpu.group import dequantize, encode_scale, quantize
from dsv4num.gpu.paged_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from dsv4num.gpu.rope import rotate_gptj
from dsv4num.gpu.scalar import decode, encode, pack, unpack
from dsv4num.gpu.sparse_index import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
)

__all__ = [
    "Launch",
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compress_norm_rope_store",
    "compute_global_topk_indices_and_lens",
    "decode",
    "dequantize",
    "dequantize_and_gather_k_cache",
    "encode",
    "encode_scale",
    "exp32",
    "inv_rms",
    "pack",
    "pool_ring_latent",
    "quantize",
    "quantize_and_insert_k_cache",
    "rms_norm",
    "rope_quant_insert",
    "rotate_gptj",
    "round_bf16",
    "save_partial_states",
    "tree_sum",
    "unpack",
]
