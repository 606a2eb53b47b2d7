"""The operations of `dsv4num.reference` as Triton kernels on torch tensors, with the same bytes."""

from dsv4num.gpu._target import Launch
from dsv4num.gpu.group import dequantize, encode_scale, quantize
from dsv4num.gpu.paged_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from dsv4num.gpu.scalar import decode, encode, pack, unpack

__all__ = [
    "Launch",
    "decode",
    "dequantize",
    "dequantize_and_gather_k_cache",
    "encode",
    "encode_scale",
    "pack",
    "quantize",
    "quantize_and_insert_k_cache",
    "unpack",
]
