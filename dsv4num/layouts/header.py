"""A layout as a C header: constants, and functions that say where bytes lie. SPEC 4.3 and 4.6.

The header is C11 and C++17, and its functions run on the device under CUDA and HIP. A test compiles it
and compares every function with `Layout.byte_offset`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from dsv4num.formats import Field, Layout, Plane

__all__ = ["c_header"]

_COMMON = """\
#include <stdint.h>

#ifndef DSV4NUM_FUNCTION
#if defined(__CUDACC__) || defined(__HIPCC__)
#define DSV4NUM_FUNCTION static inline __host__ __device__
#else
#define DSV4NUM_FUNCTION static inline
#endif
#endif
"""


def c_header(layout: Layout) -> str:
    r"""The constants and byte offsets of a layout as a header for C, C++, CUDA and HIP.

    For a layout "v4" every macro begins with DSV4NUM_V4_ and every function with dsv4num_v4_; what is
    no letter, digit or underscore in a name becomes an underscore.

    - `..._page_bytes(block_size)` and `..._owned_bytes(block_size)`, for a layout with several pools
      `..._pool0_page_bytes` and so on;
    - `..._FIELD_offset(slot, entry, block_size, page_stride)`: the first byte of an entry, counted from
      the start of the cache or of its pool; of two packed E2M1 codes the byte that holds both.

    Bytes are int64_t. The functions check nothing: a block size that the tiles do not fill gives
    offsets of no meaning.

    Example:
        >>> from dsv4num.formats import get_layout
        >>> lines = c_header(get_layout("indexer_mxfp4")).splitlines()
        >>> print(*(line for line in lines if "FINGERPRINT" in line or "SCALE_GROUP" in line), sep="\n")
        #define DSV4NUM_INDEXER_MXFP4_FINGERPRINT "ed9fbae4052324b9"
        #define DSV4NUM_INDEXER_MXFP4_SCALE_GROUP 32
    """
    name = re.sub(r"\W", "_", layout.name).lower()
    macro = f"DSV4NUM_{name.upper()}"
    lines = [
        f"/* Layout {layout.name}: {layout.head_dim} values in {layout.row_bytes} bytes a row.",
        "   Written by `dsv4num layout --c-header`; the fingerprint stands for all of it. */",
        f"#ifndef {macro}_H",
        f"#define {macro}_H",
        "",
        _COMMON,
        f'#define {macro}_FINGERPRINT "{layout.fingerprint()}"',
        f"#define {macro}_HEAD_DIM {layout.head_dim}",
        f"#define {macro}_ROW_BYTES {layout.row_bytes}",
        f"#define {macro}_PAGE_MULTIPLE {layout.page_multiple}",
        f"#define {macro}_POOLS {layout.pools}",
        f"#define {macro}_TILE_ROWS {layout.tile_rows[0]}",
    ]
    for index, field in layout.fields():
        lines += ["", *_constants(f"{macro}_{field.name.upper()}", layout.planes[index], field)]
    for pool in range(layout.pools):
        lines += ["", *_pages(f"dsv4num_{name}", layout, pool)]
    for index, field in layout.fields():
        if field.format is not None:
            lines += ["", *_offset(f"dsv4num_{name}", layout, index, field)]
    return "\n".join([*lines, "", f"#endif /* {macro}_H */", ""])


def _constants(macro: str, plane: Plane, field: Field) -> Iterator[str]:
    """The facts of one field."""
    yield f"/* {field.name}: {field.kind} */"
    yield f"#define {macro}_OFFSET {field.offset} /* in the {plane.row_bytes} bytes of its plane */"
    yield f"#define {macro}_BYTES {field.nbytes}"
    yield f"#define {macro}_POOL {plane.pool}"
    if field.kind == "pad":
        yield f"#define {macro}_VALUE {field.pad_value}"
    if field.format is None:
        return
    yield f'#define {macro}_FORMAT "{field.format.name}"'
    yield f"#define {macro}_ENTRIES {field.entries}"
    yield f"#define {macro}_COPIES {field.copies}"
    yield f"#define {macro}_FIRST_DIM {field.dims[0]}"
    yield f"#define {macro}_END_DIM {field.dims[1]}"
    if field.rule is not None:
        floor = struct.unpack("<I", struct.pack("<f", field.rule.floor))[0]
        yield f'#define {macro}_RULE "{field.rule.name}"'
        yield f"#define {macro}_GROUP {field.rule.group}"
        yield f"#define {macro}_QMAX {field.rule.qmax:.1f}f"
        yield f"#define {macro}_FLOOR_BITS 0x{floor:08X}u /* fp32, {field.rule.floor_place} */"


def _pages(name: str, layout: Layout, pool: int) -> Iterator[str]:
    """The sizes of a page of one pool."""
    of = f"{name}_pool{pool}" if layout.pools > 1 else name
    row = sum(plane.row_bytes for plane in layout.planes if plane.pool == pool)
    multiple = layout.page_multiple
    yield f"DSV4NUM_FUNCTION int64_t {of}_owned_bytes(int64_t block_size) {{"
    yield f"  return block_size * {row};"
    yield "}"
    yield f"DSV4NUM_FUNCTION int64_t {of}_page_bytes(int64_t block_size) {{"
    yield f"  return (block_size * {row} + {multiple - 1}) / {multiple} * {multiple};"
    yield "}"


def _offset(name: str, layout: Layout, index: int, field: Field) -> Iterator[str]:
    """Where an entry of a field lies."""
    plane = layout.planes[index]
    before = sum(p.row_bytes for p in layout.planes[:index] if p.pool == plane.pool)
    width = field.nbytes // field.entries  # bytes of an entry with its copies; 0 for half a byte
    byte = f"entry * {width}" if width else "entry / 2"
    yield f"DSV4NUM_FUNCTION int64_t {name}_{field.name}_offset("
    yield "    int64_t slot, int64_t entry, int64_t block_size, int64_t page_stride) {"
    if field.order:
        order = ", ".join(map(str, field.order))
        yield f"  const int16_t order[{len(field.order)}] = {{{order}}};"
        byte = f"(int64_t)order[entry] * {width}"
    yield "  const int64_t page = slot / block_size, row = slot % block_size;"
    yield f"  const int64_t in_field = {byte};"
    dealt = "in_field"
    if field.run:
        dealt = f"in_field / {field.run} * {field.step} + in_field % {field.run}"
    yield f"  const int64_t byte = {field.offset} + {dealt};"
    yield f"  return page * page_stride + block_size * {before} + {_within(plane)};"
    yield "}"


def _within(plane: Plane) -> str:
    """The place of `byte` of `row` in its plane, as an expression."""
    if not plane.axes:
        return f"row * {plane.row_bytes} + byte"
    fixed = 1
    for axis in plane.axes:
        fixed *= (axis.count or 1) if axis.of == "row" else 1
    rest = f"(block_size / {fixed})"
    terms = []
    size, free = 1, ""
    for axis in reversed(plane.axes):
        digit = f"{axis.of} / {axis.step} % {axis.count or rest}"
        terms.append(f"({digit}) * {size}{free}")
        size, free = size * (axis.count or 1), free if axis.count else f" * {rest}"
    return " + ".join(reversed(terms))
