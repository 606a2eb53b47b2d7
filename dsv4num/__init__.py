"""dsv4num: what the bytes of a DeepSeek-V4 / V4.1 paged K cache must be.

`dsv4num.reference` is the NumPy oracle, `dsv4num.gpu` the Triton kernels held to it byte for byte.
Importing this package needs neither torch nor triton. `dsv4num.cases` gives the cases of
`dsv4num verify` to any test runner; it is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from dsv4num.errors import (
    ArgumentError,
    Dsv4numError,
    MismatchError,
    UnsupportedError,
    ValueRangeError,
)
from dsv4num.formats import LAYOUTS, RULES, SCALARS, get_layout, get_rule, get_scalar

if TYPE_CHECKING:
    from dsv4num.verify.testing import cases

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
    "MismatchError",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "cases",
    "get_layout",
    "get_rule",
    "get_scalar",
]


def __getattr__(name: str) -> Any:
    """Loads `cases`, which brings the oracle along."""
    if name == "cases":
        from dsv4num.verify.testing import cases

        globals()["cases"] = cases
        return cases
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
