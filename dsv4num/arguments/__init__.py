"""What clause 6.1 allows of the arguments of an operation, checked once for both sides.

The reference and the GPU launchers describe their arrays as `Array` and call the same check, so that
bad input raises the same error with the same text on either side, before anything is written. Values
inside arrays are not seen here (clause 6.2): each side checks those itself.
"""

from dsv4num.arguments.array import INTEGERS, Array, positive_int, same_device
from dsv4num.arguments.paged_cache import Cache, check_cache, check_gather, check_insert

__all__ = [
    "INTEGERS",
    "Array",
    "Cache",
    "check_cache",
    "check_gather",
    "check_insert",
    "positive_int",
    "same_device",
]
