"""Records and pages as data. SPEC section 4.

A row of a cache is one token's record. A page holds `block_size` rows in one or more planes: each
plane stores its part of every row, plane after plane. A segregated page has a data plane and a scale
plane; an inline page has one plane that holds both. Adding a layout means adding a constant here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dsv4num.errors import ArgumentError
from dsv4num.formats.group import M1, N2, P1_32, P1_32_FNUZ, P1_64, P1_64_FNUZ, P1_128, GroupRule
from dsv4num.formats.scalar import BF16, FP32, FloatFormat


@dataclass(frozen=True, slots=True)
class Field:
    """A run of bytes inside one plane's part of a row.

    Attributes:
        name: unique within the layout.
        kind: "codes" (quantized elements), "raw" (bf16 bits copied verbatim), "scale" (the scales of
            a "codes" field), or "pad" (written with `pad_value`).
        offset: first byte within the plane's row.
        nbytes: bytes per row.
        format: stored format of one entry; None for padding. A power-of-two scale in `FP32` is the
            number 2**e itself.
        dims: first and one past the last head dimension that the field describes; (0, 0) for padding.
        rule: the group rule of "codes" and "scale".
        pad_value: the byte of "pad".
    """

    name: str
    kind: Literal["codes", "raw", "scale", "pad"]
    offset: int
    nbytes: int
    format: FloatFormat | None = None
    dims: tuple[int, int] = (0, 0)
    rule: GroupRule | None = None
    pad_value: int = 0


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a page: `row_bytes` bytes for every row, rows one after the other."""

    name: str
    row_bytes: int
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A record and the page that holds it.

    Attributes:
        name: registry name.
        head_dim: values per row.
        planes: in page order.
        page_multiple: a page is rounded up to a multiple of this many bytes.
        aliases: other names that mean this layout.
    """

    name: str
    head_dim: int
    planes: tuple[Plane, ...]
    page_multiple: int = 1
    aliases: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes per row, all planes together."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def inline(self) -> bool:
        """Whether a row's scales follow its own data."""
        return len(self.planes) == 1

    def fields(self) -> Iterator[tuple[int, Field]]:
        """Every field with the index of its plane, in page order."""
        for index, plane in enumerate(self.planes):
            for field in plane.fields:
                yield index, field

    def field(self, kind: str) -> Field | None:
        """The only field of that kind, or None."""
        found = [f for _, f in self.fields() if f.kind == kind]
        return found[0] if len(found) == 1 else None

    def owned_bytes(self, block_size: int) -> int:
        """Bytes of a page that rows own; what follows them is never written (clause 4.4).

        Raises:
            ArgumentError: a `block_size` that is no integer of 1 or more.
        """
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ArgumentError("block_size", repr(block_size), "an integer of 1 or more", "4.2")
        return block_size * self.row_bytes

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page with its tail padding (clause 4.2)."""
        return -(-self.owned_bytes(block_size) // self.page_multiple) * self.page_multiple

    def plane_offset(self, plane: int, block_size: int) -> int:
        """First byte of a plane within its page (clause 4.2)."""
        return block_size * sum(p.row_bytes for p in self.planes[:plane])

    def byte_offset(
        self, slot: int, field: str, block_size: int, *, page_stride: int | None = None
    ) -> int:
        """Where the first byte of a row's field lies, counted from the start of the cache.

        Rule (clause 4.3): page = slot // block_size, row = slot % block_size; page * stride + plane
        offset + row * plane row bytes + field offset. `page_stride` is `page_bytes` if not given.

        Raises:
            ArgumentError: the slot is negative or the layout has no such field.

        Example:
            >>> get_layout("v4").byte_offset(700, "nope", 64)
            408960
            >>> get_layout("v4").byte_offset(700, "scale", 64)
            411744
        """
        if slot < 0:
            raise ArgumentError("slot", slot, "0 or more", "4.3")
        stride = self.page_bytes(block_size) if page_stride is None else page_stride
        page, row = divmod(slot, block_size)
        for plane, candidate in self.fields():
            if candidate.name == field:
                within = row * self.planes[plane].row_bytes + candidate.offset
                return page * stride + self.plane_offset(plane, block_size) + within
        names = ", ".join(f.name for _, f in self.fields())
        raise ArgumentError("field", repr(field), names, "4.1")

    def describe(self, block_size: int = 64) -> str:
        """The byte map of a row and of a page, with a drawn picture. Text for people."""
        from dsv4num.formats.picture import describe

        return describe(self, block_size)


def _segregated(
    name: str, rule: GroupRule, head_dim: int, *, inline: bool = False, fp32_scale: bool = False
) -> Layout:
    """A layout whose every dimension is quantized by one rule."""
    nbytes = head_dim * rule.element.width // 8
    scale_format = FP32 if fp32_scale else rule.scale
    scale_bytes = head_dim // rule.group * scale_format.width // 8
    dims = (0, head_dim)
    codes = Field("codes", "codes", 0, nbytes, rule.element, dims, rule)
    scale = Field("scale", "scale", 0, scale_bytes, scale_format, dims, rule)
    if inline:
        row = Plane("row", nbytes + scale_bytes, (codes, replace(scale, offset=nbytes)))
        return Layout(name, head_dim, (row,))
    data = Plane("data", nbytes, (codes,))
    return Layout(name, head_dim, (data, Plane("scales", scale_bytes, (scale,))))


def _v4(name: str, rule: GroupRule) -> Layout:
    """448 NoPE codes and 64 raw RoPE values; 7 scale codes and a pad byte; pages of 576 k bytes."""
    nope = (0, 448)
    data = Plane(
        "data",
        576,
        (
            Field("nope", "codes", 0, 448, rule.element, nope, rule),
            Field("rope", "raw", 448, 128, BF16, (448, 512)),
        ),
    )
    scales = Plane(
        "scales",
        8,
        (
            Field("scale", "scale", 0, 7, rule.scale, nope, rule),
            Field("pad", "pad", 7, 1, pad_value=0),
        ),
    )
    return Layout(name, 512, (data, scales), page_multiple=576)


V4 = _v4("v4", P1_64)
V4_FNUZ = _v4("v4_fnuz", P1_64_FNUZ)
V41_MXFP8 = _segregated("v41_mxfp8", P1_32, 512)
V41_MXFP8_INLINE = _segregated("v41_mxfp8_inline", P1_32, 512, inline=True)
V41_MXFP8_FNUZ = _segregated("v41_mxfp8_fnuz", P1_32_FNUZ, 512)
V41_NVFP4 = _segregated("v41_nvfp4", N2, 512)
V41_NVFP4_INLINE = _segregated("v41_nvfp4_inline", N2, 512, inline=True)
INDEXER_FP8 = _segregated("indexer_fp8", P1_128, 128, fp32_scale=True)
INDEXER_MXFP4 = _segregated("indexer_mxfp4", M1, 128)

LAYOUTS = {
    layout.name: layout
    for layout in (
        V4,
        V4_FNUZ,
        V41_MXFP8,
        V41_MXFP8_INLINE,
        V41_MXFP8_FNUZ,
        V41_NVFP4,
        V41_NVFP4_INLINE,
        INDEXER_FP8,
        INDEXER_MXFP4,
    )
}

#: The layout meant by a bare row width; 528 and 288 mean the segregated form (clause 4.5).
_BY_WIDTH = {584: V4, 528: V41_MXFP8, 288: V41_NVFP4, 132: INDEXER_FP8, 68: INDEXER_MXFP4}


def get_layout(layout: str | Layout) -> Layout:
    """The layout of that name or alias; a `Layout` is returned as it is.

    Raises:
        ArgumentError: no layout has that name.
    """
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return LAYOUTS[layout]
        for known in LAYOUTS.values():
            if layout in known.aliases:
                return known
    raise ArgumentError("layout", repr(layout), ", ".join(LAYOUTS), "4")


def layout_of_width(row_bytes: int) -> Layout:
    """The layout that a row width means when no name is given (clause 4.5).

    Raises:
        ArgumentError: no layout has rows of that width.
    """
    if row_bytes not in _BY_WIDTH:
        allowed = ", ".join(str(width) for width in _BY_WIDTH)
        raise ArgumentError("bytes per row", row_bytes, f"{allowed}, or a layout name", "4.5")
    return _BY_WIDTH[row_bytes]
