"""What clause 6.1 allows of the arguments of an operation, checked once for both sides.

The reference and the GPU launchers describe their arrays as `Array` and call the same check, so that
bad input raises the same error with the same text on either side, before anything is written. Values
inside arrays are not seen here (clause 6.2): each side checks those itself.
"""

from dsv4num.arguments.array import INTEGERS, Array, epsilon, integer, positive_int, same_device
from dsv4num.arguments.compressor import (
    Compression,
    State,
    check_compress,
    check_pool_ring_latent,
    check_rope_quant_insert,
    check_save_partial_states,
)
from dsv4num.arguments.paged_cache import (
    Cache,
    check_cache,
    check_gather,
    check_insert,
    check_pools,
)
from dsv4num.arguments.sparse_index import (
    Combine,
    Mixed,
    check_combine,
    check_global_topk,
    check_mixed,
)

__all__ = [
    "INTEGERS",
    "Array",
    "Cache",
    "Combine",
    "Compression",
    "Mixed",
    "State",
    "check_cache",
    "check_combine",
    "check_compress",
    "check_gather",
    "check_global_topk",
    "check_insert",
    "check_pools",
    "check_mixed",
    "check_pool_ring_latent",
    "check_rope_quant_insert",
    "check_save_partial_states",
    "epsilon",
    "integer",
    "positive_int",
    "same_device",
]
