"""The oracle: every operation in NumPy, plain and bit-exact. Needs no torch."""

from dsv4num.reference.group import dequantize, encode_scale, quantize
from dsv4num.reference.paged_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from dsv4num.reference.record import decode_records, encode_records, read_records, write_records
from dsv4num.reference.scalar import decode, encode, pack, unpack

__all__ = [
    "decode",
    "decode_records",
    "dequantize",
    "dequantize_and_gather_k_cache",
    "encode",
    "encode_records",
    "encode_scale",
    "pack",
    "quantize",
    "quantize_and_insert_k_cache",
    "read_records",
    "unpack",
    "write_records",
]
