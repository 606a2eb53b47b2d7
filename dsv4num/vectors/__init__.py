"""Golden vectors: calls, their inputs, and the bytes that must come out. For implementations elsewhere.

`edge_numbers` and `edge_operations` make vectors by hand, each with a comment; `bulk` makes many
values by a generator. `store` writes and reads them as JSON, safetensors and raw bytes; `command` is
the command line.
"""

from dsv4num.vectors.store import FileError
from dsv4num.vectors.vector import FLAGS, OPERATIONS, POLICIES, Vector, compute, differences

__all__ = ["FLAGS", "OPERATIONS", "POLICIES", "FileError", "Vector", "compute", "differences"]
