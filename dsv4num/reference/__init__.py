"""The oracle: every operation in NumPy, plain and bit-exact. Needs no torch."""

from dsv4num.reference.arithmetic import exp32, inv_rms, rms_norm, round_bf16, tree_sum
from dsv4num.reference.compressor import (
    compress_norm_rope_store,
    pool_ring_latent,
    rope_quant_insert,
    save_partial_states,
)
from dsv4num.reference.group import dequantize, encode_scale, quantize
from dsv4num.reference.paged_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from dsv4num.reference.record import decode_records, encode_records, read_records, write_records
from dsv4num.reference.rope import build_cos_sin_cache, rotate_gptj
from dsv4num.reference.scalar import decode, encode, pack, unpack
from dsv4num.reference.sparse_index import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
)

__all__ = [
    "build_cos_sin_cache",
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compress_norm_rope_store",
    "compute_global_topk_indices_and_lens",
    "decode",
    "decode_records",
    "dequantize",
    "dequantize_and_gather_k_cache",
    "encode",
    "encode_records",
    "encode_scale",
    "exp32",
    "inv_rms",
    "pack",
    "pool_ring_latent",
    "quantize",
    "quantize_and_insert_k_cache",
    "read_records",
    "rms_norm",
    "rope_quant_insert",
    "rotate_gptj",
    "round_bf16",
    "save_partial_states",
    "tree_sum",
    "unpack",
    "write_records",
]
