"""Records and pages as data. SPEC section 4.

A row of a cache is one token's record. A page holds `block_size` rows in one or more planes: each
plane stores its part of every row, plane after plane. A segregated page has a data plane and a scale
plane; an inline page has one plane that holds both. Adding a layout means adding a constant, here if
kernels are to write it, in `formats.wild` if it is read, written and explained only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from dsv4num.errors import ArgumentError
from dsv4num.formats.group import (
    F1_128,
    F5_128,
    M1,
    M2_32,
    M3_32,
    N1,
    N2,
    P1_32,
    P1_32_FNUZ,
    P1_64,
    P1_64_FNUZ,
    P1_128,
    P2_32,
    P2_64,
    P3_64,
    P4_64,
    F3z_128,
    GroupRule,
)
from dsv4num.formats.scalar import BF16, FP32, FloatFormat


@dataclass(frozen=True, slots=True)
class Field:
    """A run of bytes inside one plane's part of a row.

    Attributes:
        name: unique within the layout.
        kind: "codes" (quantized elements), "raw" (bf16 bits copied verbatim), "scale" (the scales of
            a "codes" field), "row_scale" (one more scale that all groups of a row share), "pad"
            (written with `pad_value`), or "gap" (owned by the row and not written).
        offset: first byte within the plane's row.
        nbytes: bytes per row.
        format: stored format of one entry; None for "pad" and "gap". A power-of-two scale in `FP32`
            or `BF16` is the number 2**e itself.
        dims: first and one past the last head dimension that the field describes; (0, 0) for padding.
        rule: the group rule of "codes" and of scales.
        pad_value: the byte of "pad".
        order: where each entry is stored among the entries; () for one after the other. Entries of
            whole bytes only.
        copies: how many times each entry is stored, side by side.
        run: bytes that lie together, for a field that is dealt out over the row; 0 for all of them.
        step: bytes from one run to the next.
    """

    name: str
    kind: Literal["codes", "raw", "scale", "row_scale", "pad", "gap"]
    offset: int
    nbytes: int
    format: FloatFormat | None = None
    dims: tuple[int, int] = (0, 0)
    rule: GroupRule | None = None
    pad_value: int = 0
    order: tuple[int, ...] = ()
    copies: int = 1
    run: int = 0
    step: int = 0

    @property
    def entries(self) -> int:
        """How many elements or scales there are; bytes of "pad" and "gap"."""
        width = self.format.width if self.format else 8
        return self.nbytes * 8 // width // self.copies

    @property
    def places(self) -> tuple[int, ...]:
        """Where each byte of the field lies in the plane's row, entry after entry (clause 4.6)."""
        return _places(self)


@lru_cache(256)
def _places(field: Field) -> tuple[int, ...]:
    """See `Field.places`."""
    width = (field.format.width if field.format else 8) * field.copies // 8
    run = field.run or field.nbytes
    found = []
    for byte in range(field.nbytes):
        at = byte
        if field.order:
            at = field.order[byte // width] * width + byte % width
        found.append(field.offset + at // run * field.step + at % run)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plane whose rows do not lie one after the other.

    Attributes:
        of: what runs along it: rows of the page, or bytes of a row.
        step: the place along the axis is (row or byte) // step % count.
        count: its length; 0 for what the rows of the page leave.
    """

    of: Literal["row", "byte"]
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of a page: `row_bytes` bytes for every row.

    Attributes:
        name: unique within the layout.
        row_bytes: bytes per row.
        fields: what they hold.
        axes: how bytes lie, outermost axis first; () for rows one after the other.
        pool: which allocation it lies in, for a layout that keeps several.
    """

    name: str
    row_bytes: int
    fields: tuple[Field, ...]
    axes: tuple[Axis, ...] = ()
    pool: int = 0

    def row_offset(self, row: int, block_size: int) -> int:
        """First byte of a row, counted from the start of the plane (clause 4.6)."""
        return self._along("row", row, block_size) if self.axes else row * self.row_bytes

    def byte_offset(self, byte: int, block_size: int) -> int:
        """How far a byte of a row lies behind the row's first one (clause 4.6)."""
        return self._along("byte", byte, block_size) if self.axes else byte

    def _along(self, of: str, index: int, block_size: int) -> int:
        """The part of an offset that the axes of rows, or those of bytes, give."""
        rows = prod(axis.count or 1 for axis in self.axes if axis.of == "row")
        offset, size = 0, 1
        for axis in reversed(self.axes):
            count = axis.count or block_size // rows
            if axis.of == of:
                offset += index // axis.step % count * size
            size *= count
        return offset


@dataclass(frozen=True, slots=True)
class Layout:
    """A record and the page that holds it.

    Attributes:
        name: registry name.
        head_dim: values per row.
        planes: in page order, those of one pool after those of the one before.
        page_multiple: a page is rounded up to a multiple of this many bytes.
        aliases: other names that mean this layout, most of them "project:its name".
        writers: group rules that writers of this record use, and who they are; `name@P2` is the layout
            under such a rule.
        source: where the bytes were read.
        evidence: "S" if the source of a writer or reader was read, "T" if a test or a reference
            encoder alone, "D" if part of it is known from documents alone.
    """

    name: str
    head_dim: int
    planes: tuple[Plane, ...]
    page_multiple: int = 1
    aliases: tuple[str, ...] = ()
    writers: tuple[tuple[GroupRule, str], ...] = ()
    source: str = ""
    evidence: Literal["S", "T", "D"] = "S"

    @property
    def row_bytes(self) -> int:
        """Bytes per row, all planes together."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def inline(self) -> bool:
        """Whether a row's scales follow its own data."""
        return len(self.planes) == 1 and not self.planes[0].axes

    @property
    def form(self) -> str:
        """How pages are arranged: "inline", "segregated", "tiled" (clause 4.6) or "pools"."""
        if self.pools > 1:
            return "pools"
        if any(plane.axes for plane in self.planes):
            return "tiled"
        return "inline" if self.inline else "segregated"

    @property
    def pools(self) -> int:
        """How many allocations hold the planes; each has its own pages, with the same numbers."""
        return self.planes[-1].pool + 1 if self.planes else 1

    @property
    def rule(self) -> GroupRule | None:
        """The rule of the first quantized field; None where nothing is quantized."""
        return next((f.rule for _, f in self.fields() if f.kind == "codes"), None)

    def fields(self) -> Iterator[tuple[int, Field]]:
        """Every field with the index of its plane, in page order."""
        for index, plane in enumerate(self.planes):
            for field in plane.fields:
                yield index, field

    def field(self, kind: str) -> Field | None:
        """The only field of that kind, or None."""
        found = [f for _, f in self.fields() if f.kind == kind]
        return found[0] if len(found) == 1 else None

    def scale_of(self, codes: Field) -> Field | None:
        """The field that holds the scales of a "codes" field; None where they are not stored."""
        found = (f for _, f in self.fields() if f.kind == "scale" and f.dims == codes.dims)
        return next(found, None)

    def owned_bytes(self, block_size: int, *, pool: int | None = None) -> int:
        """Bytes of a page that rows own; what follows them is never written (clause 4.4).

        Args:
            block_size: rows per page.
            pool: the pool whose page is meant; None for all of them together.

        Raises:
            ArgumentError: a `block_size` that is no integer of 1 or more, or that the tiles of the
                layout do not fill.
        """
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ArgumentError("block_size", repr(block_size), "an integer of 1 or more", "4.2")
        rows, several = self.tile_rows
        if block_size % rows or (block_size > rows and not several):
            allowed = f"{rows}" if not several else f"a multiple of {rows}"
            raise ArgumentError("block_size", block_size, f"{allowed} in {self.name}", "4.6")
        return block_size * sum(p.row_bytes for p in self.planes if pool in (None, p.pool))

    @property
    def tile_rows(self) -> tuple[int, bool]:
        """Rows of a tile, 1 if there is none; and whether a page may have several tiles."""
        rows, several = 1, True
        for plane in self.planes:
            counts = [axis.count for axis in plane.axes if axis.of == "row"]
            rows = max(rows, prod(count or 1 for count in counts))
            several &= not counts or 0 in counts
        return rows, several

    def page_bytes(self, block_size: int, *, pool: int | None = None) -> int:
        """Bytes of a page with its tail padding (clause 4.2)."""
        if pool is None and self.pools > 1:
            return sum(self.page_bytes(block_size, pool=index) for index in range(self.pools))
        owned = self.owned_bytes(block_size, pool=pool)
        return -(-owned // self.page_multiple) * self.page_multiple

    def plane_offset(self, plane: int, block_size: int) -> int:
        """First byte of a plane within its page (clause 4.2), which is that of its own pool."""
        before = (p for p in self.planes[:plane] if p.pool == self.planes[plane].pool)
        return block_size * sum(p.row_bytes for p in before)

    def byte_offset(
        self,
        slot: int,
        field: str,
        block_size: int,
        *,
        page_stride: int | None = None,
        entry: int = 0,
    ) -> int:
        """Where an entry of a row's field lies, counted from the start of the cache or pool.

        Rule (clauses 4.3 and 4.6): page = slot // block_size, row = slot % block_size; page * stride +
        plane offset + the row's place in the plane + the entry's place in the row. `page_stride` is
        `page_bytes` if not given. Of an entry stored several times the first one is meant, of a packed
        E2M1 code the byte that holds it.

        Raises:
            ArgumentError: the slot is negative, or the layout has no such field or entry.

        Example:
            >>> get_layout("v4").byte_offset(700, "nope", 64)
            408960
            >>> get_layout("v4").byte_offset(700, "scale", 64, entry=2)
            411746
            >>> get_layout("indexer_fp8_tiles").byte_offset(1, "codes", 64, entry=16)
            272
        """
        if slot < 0:
            raise ArgumentError("slot", slot, "0 or more", "4.3")
        found = {candidate.name: (index, candidate) for index, candidate in self.fields()}
        if field not in found:
            raise ArgumentError("field", repr(field), ", ".join(found), "4.1")
        index, candidate = found[field]
        if not 0 <= entry < candidate.entries:
            raise ArgumentError("entry", entry, f"0..{candidate.entries - 1}", "4.1")
        plane = self.planes[index]
        own_page = self.page_bytes(block_size, pool=plane.pool)
        stride = own_page if page_stride is None else page_stride
        page, row = divmod(slot, block_size)
        byte = candidate.places[entry * candidate.nbytes // candidate.entries]
        within = plane.row_offset(row, block_size) + plane.byte_offset(byte, block_size)
        return page * stride + self.plane_offset(index, block_size) + within

    def under(self, rule: GroupRule) -> Layout:
        """The same record by a writer with another group rule: `name@P2`.

        Raises:
            ArgumentError: no known writer of this record has that rule.
        """
        if rule == self.rule:
            return self
        if rule not in (known for known, _ in self.writers):
            names = ", ".join(known.name for known, _ in self.writers) or "no other rule"
            raise ArgumentError("rule", rule.name, f"{names} in {self.name}", "4.6")

        def changed(field: Field) -> Field:
            if field.rule != self.rule:
                return field
            fmt = rule.element if field.kind == "codes" else field.format
            return replace(field, rule=rule, format=fmt)

        planes = tuple(
            replace(plane, fields=tuple(map(changed, plane.fields))) for plane in self.planes
        )
        name = f"{self.name.split('@')[0]}@{rule.family}"
        return replace(self, name=name, planes=planes, aliases=())

    def fingerprint(self) -> str:
        """16 hexadecimal digits that two layouts share if they give the same bytes (clause 4.7).

        Example:
            >>> get_layout("v4").fingerprint()
            '5e2cfde5841d6299'
        """
        from dsv4num.formats.fingerprint import fingerprint

        return fingerprint(self)

    def describe(self, block_size: int = 64) -> str:
        """The byte map of a row and of a page, with a drawn picture. Text for people."""
        from dsv4num.formats.picture import describe

        return describe(self, block_size)


def uniform(
    name: str,
    rule: GroupRule,
    head_dim: int,
    *,
    inline: bool = False,
    scale: FloatFormat | None = None,
) -> Layout:
    """A layout whose every dimension is quantized by one rule; `scale` is how scales are stored."""
    nbytes = head_dim * rule.element.width // 8
    stored = scale or rule.scale
    scale_bytes = head_dim // rule.group * stored.width // 8
    dims = (0, head_dim)
    codes = Field("codes", "codes", 0, nbytes, rule.element, dims, rule)
    scales = Field("scale", "scale", 0, scale_bytes, stored, dims, rule)
    if inline:
        row = Plane("row", nbytes + scale_bytes, (codes, replace(scales, offset=nbytes)))
        return Layout(name, head_dim, (row,))
    data = Plane("data", nbytes, (codes,))
    return Layout(name, head_dim, (data, Plane("scales", scale_bytes, (scales,))))


def footer(name: str, rule: GroupRule, scale_row: int, page_multiple: int) -> Layout:
    """448 NoPE codes and 64 raw RoPE values; behind all rows their scales, and pad bytes to fill up."""
    nope = (0, 448)
    codes = 448 * rule.element.width // 8
    scale_bytes = 448 // rule.group * rule.scale.width // 8
    data = Plane(
        "data",
        codes + 128,
        (
            Field("nope", "codes", 0, codes, rule.element, nope, rule),
            Field("rope", "raw", codes, 128, BF16, (448, 512)),
        ),
    )
    scales = Plane(
        "scales",
        scale_row,
        (
            Field("scale", "scale", 0, scale_bytes, rule.scale, nope, rule),
            Field("pad", "pad", scale_bytes, scale_row - scale_bytes, pad_value=0),
        ),
    )
    return Layout(name, 512, (data, scales), page_multiple)


_V4_WRITERS = (
    (P1_64, "vLLM, SGLang, rtp-llm, TokenSpeed, LightLLM"),
    (P2_64, "FlashMLA's tests, ATOM, LMDeploy"),
    (P3_64, "TensorRT-LLM, whose pages are v4_trtllm"),
    (P4_64, "b12x's reference packer"),
)
_MXFP8_WRITERS = (
    (P1_32, "vLLM, rtp-llm, TokenSpeed, b12x, vllm-gaudi"),
    (P2_32, "SGLang, FlashMLA, FlashInfer"),
)
_NVFP4_WRITERS = (
    (N2, "vLLM"),
    (N1, "FlashMLA, SGLang, FlashInfer, rtp-llm, TokenSpeed, b12x, vllm-gaudi"),
)
_INDEXER_WRITERS = (
    (P1_128, "vLLM, ATOM, LMDeploy's V4 indexer"),
    (F1_128, "DeepGEMM's helper, SGLang's indexer, vLLM without ue8m0"),
    (F3z_128, "TensorRT-LLM"),
    (F5_128, "TokenSpeed"),
)
MXFP4_WRITERS = (
    (M1, "vLLM, rtp-llm, TokenSpeed V4.1, b12x, TensorRT-LLM, vllm-gaudi"),
    (M2_32, "DeepGEMM's helper, TokenSpeed V4, SGLang's fused C4 kernel"),
    (M3_32, "SGLang's Triton store"),
)

V4 = replace(
    footer("v4", P1_64, 8, 576),
    aliases=("flashmla:MODEL1", "vllm:fp8_ds_mla@v4", "sglang:V4", "tokenspeed:v4"),
    writers=_V4_WRITERS,
    source="FlashMLA, vLLM, SGLang, LightLLM, b12x: pages padded to 576 bytes",
)
V4_FNUZ = replace(
    footer("v4_fnuz", P1_64_FNUZ, 8, 576),
    aliases=("vllm:fp8_ds_mla@v4-gfx942",),
    source="vLLM's C++ writer and SGLang on gfx942, qmax 224",
)
V41_MXFP8 = replace(
    uniform("v41_mxfp8", P1_32, 512),
    aliases=("flashinfer:ue8m0_g32",),
    writers=_MXFP8_WRITERS,
    source="FlashInfer (pages of any multiple of 16), TokenSpeed",
)
V41_MXFP8_INLINE = replace(
    uniform("v41_mxfp8_inline", P1_32, 512, inline=True),
    aliases=(
        *("sglang:V41_NEW", "flashinfer:ue8m0_g32_inline"),
        *("b12x:deepseek_v41", "gaudi:pack_swa"),
    ),
    writers=_MXFP8_WRITERS,
    source="FlashMLA since 2026-09-30, SGLang, FlashInfer, b12x, rtp-llm, vllm-gaudi",
)
V41_MXFP8_FNUZ = replace(
    uniform("v41_mxfp8_fnuz", P1_32_FNUZ, 512),
    source="vLLM's choice of qmax 224, applied to this record",
    evidence="D",
)
V41_NVFP4 = replace(
    uniform("v41_nvfp4", N2, 512),
    writers=_NVFP4_WRITERS,
    source="FlashInfer (pages of any multiple of 16), TokenSpeed",
)
V41_NVFP4_INLINE = replace(
    uniform("v41_nvfp4_inline", N2, 512, inline=True),
    aliases=("sglang:V41_FP4_NEW", "gaudi:pack_fp4"),
    writers=_NVFP4_WRITERS,
    source="FlashMLA since 2026-09-30, SGLang, FlashInfer, b12x, rtp-llm, vllm-gaudi",
)
INDEXER_FP8 = replace(
    uniform("indexer_fp8", P1_128, 128, scale=FP32),
    writers=_INDEXER_WRITERS,
    source="DeepGEMM, SGLang, TensorRT-LLM, LightLLM's V4 indexer, TokenSpeed, b12x",
)
INDEXER_MXFP4 = replace(
    uniform("indexer_mxfp4", M1, 128),
    writers=MXFP4_WRITERS,
    source="DeepGEMM, SGLang, TensorRT-LLM, rtp-llm, TokenSpeed, b12x",
)

#: What the operations, the kernels, verification and the vectors run over.
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

    `LAYOUTS` and `formats.WILD_LAYOUTS` are looked through. A name with the family of a rule behind an
    @ is the layout as a writer with that rule fills it (`Layout.under`).

    Raises:
        ArgumentError: no layout has that name, or no writer of it that rule.

    Example:
        >>> get_layout("flashmla:MODEL1").name
        'v4'
        >>> get_layout("v4@P2").rule.floor_place
        'scale'
    """
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return LAYOUTS[layout]
        from dsv4num.formats.wild import WILD_LAYOUTS

        known = {**LAYOUTS, **WILD_LAYOUTS}
        names = {alias: found for found in known.values() for alias in found.aliases} | known
        if layout in names:
            return names[layout]
        base, at, family = layout.rpartition("@")
        if at and base in names:
            for rule, _ in names[base].writers:
                if rule.family == family:
                    return names[base].under(rule)
            families = (rule.family for rule, _ in names[base].writers)
            allowed = ", ".join(families) or "no rule but its own"
            raise ArgumentError("layout", repr(layout), f"{base}@RULE with {allowed}", "4.6")
    allowed = f"{', '.join(LAYOUTS)}, or what `dsv4num layout --list` names"
    raise ArgumentError("layout", repr(layout), allowed, "4")


def layout_of_width(row_bytes: int) -> Layout:
    """The layout that a row width means when no name is given (clause 4.5).

    Raises:
        ArgumentError: no layout has rows of that width.
    """
    if row_bytes not in _BY_WIDTH:
        allowed = ", ".join(str(width) for width in _BY_WIDTH)
        raise ArgumentError("bytes per row", row_bytes, f"{allowed}, or a layout name", "4.5")
    return _BY_WIDTH[row_bytes]
