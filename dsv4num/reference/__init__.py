"""The oracle: every operation in NumPy, plain and bit-exact. Needs no torch."""

from dsv4num.reference.compressor import (
    compress_norm_rope_store,
    pool_ring_latent,
    rope_quant_insert,
    save_partial_states,
)
from dsv4num.reference.group import dequantize, encode_scale, quantize
from dsv4num.reference.paged_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from dsv4num.reference.record import decode_records, encode_records, read_records, write_records
from dsv4num.reference.scalar import decode, encode, pack, unpack
from dsv4num.reference.sparse_index import (
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
)

__all__ = [
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
    "pack",
    "pool_ring_latent",
    "quantize",
    "quantize_and_insert_k_cache",
    "read_records",
    "rope_quant_insert",
    "save_partial_states",
    "unpack",
    "write_records",
]
