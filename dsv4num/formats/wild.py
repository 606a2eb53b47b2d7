"""Layouts in the wild: records that public engines use and that have no kernels here. SPEC 4.6.

They are read and written by the reference, drawn, compared, converted and explained like the others. A
record is here only if its bytes are certain; what was left out, and why, stands in `docs/layouts.md`.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4num.formats.group import (
    F1_128,
    F2_128,
    F3_128,
    F4_128,
    F5_128,
    F6_64,
    F6_128,
    M1,
    M4_32,
    M5_64,
    N1,
    N2,
    N3,
    N4,
    N6,
    P1_32,
    P1_64,
    P1_128,
    P1_128_FNUZ,
    P1_128_FNUZ_240,
    P2_32,
    P2_64,
    P2_128,
    P3_64,
    ROW_512,
    S1_16,
    S1_32,
    TENSOR_512,
    UNIT_64,
    GroupRule,
)
from dsv4num.formats.layout import (
    INDEXER_FP8,
    INDEXER_MXFP4,
    V4,
    V41_MXFP8,
    V41_MXFP8_INLINE,
    V41_NVFP4,
    V41_NVFP4_INLINE,
    Axis,
    Field,
    Layout,
    Plane,
    footer,
    uniform,
)
from dsv4num.formats.scalar import BF16, E4M3FN, FP32, UE8M0, FloatFormat

_ALL, _NOPE, _ROPE, _TAIL = (0, 512), (0, 448), (448, 512), (512, 576)


def _row(name: str, head_dim: int, nbytes: int, *fields: Field) -> Layout:
    """An inline layout."""
    return Layout(name, head_dim, (Plane("row", nbytes, fields),))


def _codes(nbytes: int, rule: GroupRule, dims: tuple[int, int] = _ALL) -> Field:
    """The codes at the start of a row."""
    return Field("codes", "codes", 0, nbytes, rule.element, dims, rule)


def _scale(
    offset: int,
    nbytes: int,
    rule: GroupRule,
    dims: tuple[int, int] = _ALL,
    fmt: FloatFormat | None = None,
) -> Field:
    """Their scales, stored in the rule's format or in `fmt`."""
    return Field("scale", "scale", offset, nbytes, fmt or rule.scale, dims, rule)


def _rope(offset: int, dims: tuple[int, int]) -> Field:
    """64 bf16 values, copied."""
    return Field("rope", "raw", offset, 128, BF16, dims)


def _zeros(name: str, offset: int, nbytes: int) -> Field:
    """Bytes that are written 0."""
    return Field(name, "pad", offset, nbytes)


def _gap(offset: int, nbytes: int) -> Field:
    """Bytes that are not written, or not known to be."""
    return Field("gap", "gap", offset, nbytes)


def _paged(layout: Layout, multiple: int, source: str, *aliases: str) -> Layout:
    """The same record in pages rounded up to another multiple."""
    name = f"{layout.name}_page{multiple}"
    return replace(layout, name=name, page_multiple=multiple, aliases=aliases, source=source)


def _tiled(
    layout: Layout, name: str, data: tuple[Axis, ...], scales: tuple[Axis, ...], source: str
) -> Layout:
    """A segregated layout with its planes in other orders."""
    axes = data, scales
    planes = (replace(p, axes=a) for p, a in zip(layout.planes, axes, strict=True))
    return replace(layout, name=name, planes=tuple(planes), aliases=(), source=source)


def _leading(name: str, rule: GroupRule, head_dim: int) -> Layout:
    """Each group's scale byte, then its codes (GGML blocks)."""
    size = rule.group * rule.element.width // 8
    groups = head_dim // rule.group
    dims = (0, head_dim)
    scale = Field("scale", "scale", 0, groups, rule.scale, dims, rule, run=1, step=1 + size)
    codes = Field(
        *("codes", "codes", 1, groups * size, rule.element, dims, rule), run=size, step=1 + size
    )
    layout = _row(name, head_dim, groups * (1 + size), scale, codes)
    alias = f"ik_llama.cpp:{name.removeprefix('ggml_').upper()}"
    return replace(layout, aliases=(alias,), source="ik_llama.cpp, pull request 2499 (open)")


# V3.2, 512 latent values and 64 RoPE values.

_V32_WRITERS = (
    (P2_128, "F7: FlashMLA's tests, vLLM's Triton writer, LightLLM"),
    (F2_128, "vLLM's CUDA writer"),
    (F3_128, "SGLang"),
    (F4_128, "FastDeploy's helper"),
    (F5_128, "LMDeploy"),
)
V32_FP8 = replace(
    _row(
        *("v32_fp8", 576, 656),
        _codes(512, P2_128),
        _scale(512, 16, P2_128, fmt=FP32),
        _rope(528, _TAIL),
    ),
    aliases=("flashmla:V32_FP8Sparse", "vllm:fp8_ds_mla@v3.2", "b12x:GLM_NSA"),
    writers=_V32_WRITERS,
    source="FlashMLA, vLLM, SGLang, FlashInfer, b12x, LightLLM, LMDeploy, FastDeploy",
)
V32_FP8_PLANES = replace(
    Layout(
        "v32_fp8_planes",
        576,
        (
            Plane(
                *("data", 512, (_codes(512, P2_128),)),
                axes=(Axis("byte", 16, 32), Axis("row", 1, 0), Axis("byte", 1, 16)),
            ),
            Plane(
                *("scales", 16, (_scale(0, 16, P2_128, fmt=FP32),)),
                axes=(Axis("byte", 4, 4), Axis("row", 1, 0), Axis("byte", 1, 4)),
            ),
            Plane("rope", 128, (_rope(0, _TAIL),)),
        ),
    ),
    source="sgl-project's FlashMLA, dense decoding tests",
    evidence="T",
)
V32_FP8_NOROPE = replace(
    _row("v32_fp8_norope", 512, 528, _codes(512, P2_128), _scale(512, 16, P2_128, fmt=FP32)),
    aliases=("sgl-flash-mla:V32_NO_ROPE", "flashinfer:GLM53_NOPE", "b12x:GLM_NEXT"),
    writers=(
        (P2_128, "F7: sgl-flash-mla's tests"),
        (F3_128, "SGLang"),
        (F6_128, "b12x"),
    ),
    source="sgl-flash-mla, FlashInfer, b12x, SGLang",
)
V32_NVFP4 = replace(
    _row(
        *("v32_nvfp4", 576, 352),
        _codes(256, N2),
        Field("rope", "codes", 256, 64, E4M3FN, _TAIL, UNIT_64),
        # Scale s is stored at 8 * (s % 4) + s // 4.
        replace(_scale(320, 32, N2), order=tuple(8 * (s % 4) + s // 4 for s in range(32))),
    ),
    aliases=("vllm:nvfp4_ds_mla@v3.2", "flashinfer:nvfp4.fp8rope"),
    writers=((N2, "vLLM's Triton writer"), (N3, "vLLM's CUDA writer")),
    source="vLLM, vllm-project's FlashMLA, FlashInfer",
)

# GLM records of b12x.

_N6_SOURCE = "b12x; its kernels take 1 / 6 and 1 / scale from approximate instructions"
GLM_NVFP4 = replace(
    _row(
        *("glm_nvfp4", 576, 432),
        _codes(256, N6),
        _scale(256, 32, N6),
        _gap(288, 16),
        _rope(304, _TAIL),
    ),
    aliases=("b12x:nvfp4_ds_mla@432",),
    source=_N6_SOURCE,
)
_GLM_FP8_ROPE = (
    Field("rope_scale", "scale", 288, 4, FP32, _TAIL, F6_64),
    Field("rope", "codes", 304, 64, E4M3FN, _TAIL, F6_64),
)
_TOKEN_SCALE = Field("outer", "row_scale", 292, 4, FP32, _ALL, ROW_512)
GLM_NVFP4_FP8ROPE = replace(
    _row(
        *("glm_nvfp4_fp8rope", 576, 368),
        _codes(256, N6),
        _scale(256, 32, N6),
        _GLM_FP8_ROPE[0],
        _zeros("pad", 292, 12),
        _GLM_FP8_ROPE[1],
    ),
    aliases=("b12x:nvfp4_ds_mla@368",),
    source=_N6_SOURCE,
)
GLM_NVFP4_FP8ROPE_TOKEN = replace(
    _row(
        *("glm_nvfp4_fp8rope_token", 576, 368),
        _codes(256, N6),
        _scale(256, 32, N6),
        _GLM_FP8_ROPE[0],
        _TOKEN_SCALE,
        _zeros("pad", 296, 8),
        _GLM_FP8_ROPE[1],
    ),
    aliases=("b12x:nvfp4_ds_mla@368-token",),
    source=_N6_SOURCE,
)
GLM_NVFP4_NOROPE = replace(
    _row(
        *("glm_nvfp4_norope", 512, 304),
        _codes(256, N6),
        _scale(256, 32, N6),
        _zeros("pad", 288, 4),
        _TOKEN_SCALE,
        _zeros("pad2", 296, 8),
    ),
    aliases=("b12x:nvfp4_ds_mla@304",),
    source=_N6_SOURCE,
)

# V4, 448 NoPE and 64 RoPE values.

V4_UNPADDED = replace(
    V4,
    name="v4_unpadded",
    page_multiple=1,
    aliases=("rtp-llm:584",),
    source="rtp-llm",
)
V4_PAGE16 = _paged(V4, 16, "FlashInfer on SM120", "flashinfer:584")
V4_TRTLLM = replace(
    V4.under(P3_64),
    name="v4_trtllm",
    page_multiple=1,
    planes=tuple(
        replace(
            plane,
            fields=tuple(_gap(7, 1) if f.kind == "pad" else f for f in plane.fields),
        )
        for plane in V4.under(P3_64).planes
    ),
    aliases=("trtllm:footer_scale_kv",),
    writers=(),
    source="TensorRT-LLM: unpadded pages of 64 rows, the last byte of a row not written",
)
_POOLS_WRITERS = ((P1_64, "SGLang on gfx950"), (P2_64, "ATOM"))


def _two_pools(name: str, rule: GroupRule, copies: int) -> Layout:
    """NoPE with 14 scale bytes in one pool, RoPE in another."""
    scale = replace(_scale(448, 14, rule, _NOPE), copies=copies)
    nope = replace(_codes(448, rule, _NOPE), name="nope")
    return Layout(
        name,
        512,
        (
            Plane("nope", 512, (nope, scale, _gap(462, 50))),
            Plane("rope", 128, (_rope(0, _ROPE),), pool=1),
        ),
    )


V4_TWO_POOLS = replace(
    _two_pools("v4_two_pools", P1_64, 2),
    aliases=("sglang:kFp8TwoPool", "atom:512+128"),
    writers=_POOLS_WRITERS,
    source="ATOM, SGLang on gfx950: each scale stored twice",
)
V4_TWO_POOLS_G32 = replace(
    _two_pools("v4_two_pools_g32", P1_32, 1),
    aliases=("aiter:opus",),
    writers=((P1_32, "SGLang on gfx950"), (P2_32, "ATOM")),
    source="aiter's opus path",
)
V4_NVFP4_G64 = replace(
    footer("v4_nvfp4_g64", M5_64, 8, 16),
    aliases=("flashinfer:360",),
    source="FlashInfer, pull request 3937 (open): its test helper",
    evidence="T",
)
V4_NVFP4 = replace(
    footer("v4_nvfp4", N4, 32, 16),
    aliases=("flashinfer:384",),
    source="FlashInfer, SGLang's pull request 38646 (open)",
)
V4_MXFP4 = replace(
    _row(
        *("v4_mxfp4", 512, 368),
        replace(_codes(224, M4_32, _NOPE), name="nope"),
        _scale(224, 14, M4_32, _NOPE),
        _gap(238, 2),
        _rope(240, _ROPE),
    ),
    aliases=("sglang:fp4_e2m1@v4",),
    source="SGLang on SM90, pull requests 32741 and 37136 (open)",
)
V4_ASCEND = replace(
    _row(
        *("v4_ascend", 512, 640),
        replace(_codes(448, P1_64, _NOPE), name="nope"),
        _rope(448, _ROPE),
        _scale(576, 7, P1_64, _NOPE),
        _gap(583, 57),
    ),
    aliases=("vllm-ascend:640", "sglang:npu-a5"),
    source="vllm-ascend and SGLang on Ascend A5: the size from source, the order from documents",
    evidence="D",
)

# V4.1, 512 values.

_VLLM_41 = "vLLM 0.33.0 on SM100: blocks a multiple of lcm(528, 288)"
V41_MXFP8_PAGE512 = _paged(
    *(V41_MXFP8, 512, "FlashMLA before 2026-09-30, SGLang, vLLM pull request 56893"),
    *("sglang:V41", "flashmla:V41", "sgl-flash-mla:V41"),
)
V41_MXFP8_INLINE_PAGE3168 = _paged(V41_MXFP8_INLINE, 3168, _VLLM_41, "vllm:fp8_ds_mla@v4.1")
V41_NVFP4_PAGE256 = _paged(V41_NVFP4, 256, "SGLang", "sglang:V41_FP4")
V41_NVFP4_PAGE512 = _paged(
    *(V41_NVFP4, 512, "FlashMLA before 2026-09-30, its tests"),
    *("flashmla:V41_FP4", "sgl-flash-mla:V41_FP4"),
)
V41_NVFP4_INLINE_PAGE3168 = _paged(V41_NVFP4_INLINE, 3168, _VLLM_41, "vllm:nvfp4_ds_mla@v4.1")
_CANN = "CANN's kv_compress_epilog_v2, vllm-ascend on A5"
V41_MXFP8_ASCEND = replace(
    uniform("v41_mxfp8_ascend", P1_32, 512, inline=True, scale=BF16),
    aliases=("cann:mxfp8_bf16",),
    source=_CANN,
)
V41_MXFP4_ASCEND = replace(
    uniform("v41_mxfp4_ascend", S1_16, 512, inline=True),
    aliases=("cann:mxfp4_bf16",),
    source=_CANN,
)
V41_MXFP4_ASCEND_G32 = replace(
    uniform("v41_mxfp4_ascend_g32", S1_32, 512, inline=True),
    aliases=("cann:mxfp4_bf16@32",),
    source=_CANN,
)
GGML_FP8_B32 = _leading("ggml_fp8_b32_e8m0", P1_32, 512)
GGML_FP4_B16 = _leading("ggml_fp4_b16_e4m3", N1, 512)
GGML_FP4_B32 = _leading("ggml_fp4_b32_e8m0", M1, 128)

# Rows without scales of their own.

PLAIN_BF16 = replace(
    _row("plain_bf16", 512, 1024, Field("values", "raw", 0, 1024, BF16, _ALL)),
    aliases=("vllm-ascend:bf16",),
    source="FlashInfer, vLLM, SGLang, TensorRT-LLM, Ascend A2 and A3",
)
PLAIN_FP8 = replace(
    _row("plain_fp8", 512, 512, _codes(512, TENSOR_512)),
    page_multiple=512,
    aliases=("sglang:UNIFORM_FP8",),
    source="vLLM, FlashInfer, SGLang and TensorRT-LLM (both with scale 1)",
)

# The indexer, 128 values.

_VLLM_INDEXER = "vLLM, with the page multiple of its main cache"
INDEXER_FP8_PAGE576 = _paged(INDEXER_FP8, 576, _VLLM_INDEXER, "vllm:indexer@v4")
INDEXER_FP8_PAGE512 = _paged(INDEXER_FP8, 512, _VLLM_INDEXER, "vllm:indexer@v4.1")
INDEXER_FP8_MX = replace(
    INDEXER_FP8,
    name="indexer_fp8_mx",
    planes=(
        INDEXER_FP8.planes[0],
        Plane(
            *("scales", 4),
            (Field("scale", "scale", 0, 4, UE8M0, (0, 128), P1_128, copies=4),),
        ),
    ),
    aliases=("vllm:indexer-mx",),
    writers=(),
    source="vLLM 0.33.0 on SM100: the UE8M0 byte four times",
)
INDEXER_FP8_INLINE = replace(
    uniform("indexer_fp8_inline", F1_128, 128, inline=True),
    aliases=("lightllm:v3.2-indexer",),
    source="LightLLM's V3.2 indexer",
)
_TILES = (Axis("row", 16, 0), Axis("byte", 16, 8), Axis("row", 1, 16), Axis("byte", 1, 16))
_ROCM = "vLLM on ROCm, aiter, ATOM, SGLang on gfx95: tiles of 16 rows by 16 bytes"
INDEXER_FP8_TILES = replace(
    _tiled(INDEXER_FP8, "indexer_fp8_tiles", _TILES, (), _ROCM),
    aliases=("aiter:preshuffle",),
    writers=(),
)
INDEXER_FP8_TILES_FNUZ = replace(
    _tiled(
        *(uniform("", P1_128_FNUZ, 128, scale=FP32), "indexer_fp8_tiles_fnuz", _TILES, ()),
        "vLLM on gfx942 with qmax 224, ATOM with 240",
    ),
    writers=((P1_128_FNUZ, "vLLM on gfx942"), (P1_128_FNUZ_240, "ATOM")),
)
INDEXER_MXFP4_PAGE576 = _paged(INDEXER_MXFP4, 576, _VLLM_INDEXER, "vllm:indexer-mxfp4@v4")
INDEXER_MXFP4_PAGE512 = _paged(INDEXER_MXFP4, 512, _VLLM_INDEXER, "vllm:indexer-mxfp4@v4.1")
INDEXER_MXFP4_INLINE = replace(
    uniform("indexer_mxfp4_inline", M1, 128, inline=True),
    aliases=("rtp-llm:compact", "gaudi:pack_fp4@68"),
    source="rtp-llm's compact writer, vllm-gaudi",
)
INDEXER_MXFP4_POOLS = replace(
    INDEXER_MXFP4,
    name="indexer_mxfp4_pools",
    planes=(INDEXER_MXFP4.planes[0], replace(INDEXER_MXFP4.planes[1], pool=1)),
    aliases=("vllm-ascend:64+4",),
    writers=(),
    source="vllm-ascend on A5: two tensors",
)
INDEXER_MXFP4_CHUNKS = _tiled(
    *(INDEXER_MXFP4, "indexer_mxfp4_chunks"),
    (Axis("byte", 16, 4), Axis("row", 1, 0), Axis("byte", 1, 16)),
    (Axis("byte", 1, 4), Axis("row", 1, 0)),
    "ATOM",
)
INDEXER_MXFP4_SLOTS64 = _tiled(
    *(INDEXER_MXFP4, "indexer_mxfp4_slots64"),
    (Axis("byte", 16, 4), Axis("row", 1, 64), Axis("byte", 1, 16)),
    # The scale of row r is at place 4 * (r % 16) + r // 16.
    (Axis("byte", 1, 4), Axis("row", 1, 16), Axis("row", 16, 4)),
    "SGLang and aiter's FlyDSL on gfx950: pages of 64 rows",
)
INDEXER_MXFP4_SLOTS8 = _tiled(
    *(INDEXER_MXFP4, "indexer_mxfp4_slots8"),
    # 16 bytes of row r and chunk c are at ((r % 4) * 4 + c) * 32 + (r // 4) * 16.
    (Axis("row", 1, 4), Axis("byte", 16, 4), Axis("row", 4, 2), Axis("byte", 1, 16)),
    (Axis("byte", 1, 4), Axis("row", 1, 8)),
    "SGLang on gfx950: pages of 8 rows",
)


def _runs(rows: int) -> Layout:
    """Runs of rows: values [chunk, row, byte], scales [scale % lanes, row, scale // lanes]."""
    lanes = 64 // rows
    return _tiled(
        *(INDEXER_MXFP4, f"indexer_mxfp4_runs{rows}"),
        (Axis("row", rows, 0), Axis("byte", 16, 4), Axis("row", 1, rows), Axis("byte", 1, 16)),
        (
            *(Axis("row", rows, 0), Axis("byte", 1, lanes)),
            *(Axis("row", 1, rows), Axis("byte", lanes, 4 // lanes)),
        ),
        f"vLLM on gfx950: runs of {rows} rows",
    )


#: The layouts that have no kernels here, by name.
WILD_LAYOUTS = {
    layout.name: layout
    for layout in (
        V4_UNPADDED,
        V4_PAGE16,
        V4_TRTLLM,
        V4_TWO_POOLS,
        V4_TWO_POOLS_G32,
        V4_NVFP4,
        V4_NVFP4_G64,
        V4_MXFP4,
        V4_ASCEND,
        V41_MXFP8_PAGE512,
        V41_MXFP8_INLINE_PAGE3168,
        V41_NVFP4_PAGE256,
        V41_NVFP4_PAGE512,
        V41_NVFP4_INLINE_PAGE3168,
        V41_MXFP8_ASCEND,
        V41_MXFP4_ASCEND,
        V41_MXFP4_ASCEND_G32,
        V32_FP8,
        V32_FP8_PLANES,
        V32_FP8_NOROPE,
        V32_NVFP4,
        GLM_NVFP4,
        GLM_NVFP4_FP8ROPE,
        GLM_NVFP4_FP8ROPE_TOKEN,
        GLM_NVFP4_NOROPE,
        GGML_FP8_B32,
        GGML_FP4_B16,
        GGML_FP4_B32,
        PLAIN_BF16,
        PLAIN_FP8,
        INDEXER_FP8_PAGE576,
        INDEXER_FP8_PAGE512,
        INDEXER_FP8_MX,
        INDEXER_FP8_INLINE,
        INDEXER_FP8_TILES,
        INDEXER_FP8_TILES_FNUZ,
        INDEXER_MXFP4_PAGE576,
        INDEXER_MXFP4_PAGE512,
        INDEXER_MXFP4_INLINE,
        INDEXER_MXFP4_POOLS,
        INDEXER_MXFP4_CHUNKS,
        INDEXER_MXFP4_SLOTS64,
        INDEXER_MXFP4_SLOTS8,
        _runs(16),
        _runs(32),
        _runs(64),
    )
}
