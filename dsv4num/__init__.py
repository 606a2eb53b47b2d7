"""dsv4num: what the bytes of a DeepSeek-V4 / V4.1 paged K cache must be.

`dsv4num.reference` is the NumPy oracle, `dsv4num.gpu` the Triton kernels held to it byte for byte.
Importing this package needs neither torch nor triton.
"""

from dsv4num.errors import ArgumentError, Dsv4numError, UnsupportedError, ValueRangeError
from dsv4num.formats import LAYOUTS, RULES, SCALARS, get_layout, get_rule, get_scalar

__version__ = "0.1.0"
#: Changes whenever a clause of SPEC.md changes a byte.
SPEC_VERSION = "1.0"

__all__ = [
    "LAYOUTS",
    "RULES",
    "SCALARS",
    "SPEC_VERSION",
    "ArgumentError",
    "Dsv4numError",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "get_layout",
    "get_rule",
    "get_scalar",
]
