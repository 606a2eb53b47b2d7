"""`gpu.seed_api`: the engine's names and lists of arguments, the bytes of the core operations."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_sparse_index import COMBINE, MAKE, MIXED, MIXED_KEYWORDS

from dsv4num import ArgumentError, get_layout

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from test_gpu_paged_cache import as_tensor, as_tensors  # noqa: E402  (only where torch is)

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import seed_api  # noqa: E402  (only where torch is)

VECTORS = np.load(Path(__file__).parent / "vectors" / "h200_triton36.npz", allow_pickle=False)

INSERT = ["k", "k_cache", "slot_mapping", "block_size", "is_ue8m0", "use_fnuz", "bytes_per_token"]
GATHER = ["out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset"]
GLOBAL = ["topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token"]
COMPRESS = [
    *("state_cache", "num_actual", "token_to_req_indices", "positions", "slot_mapping"),
    *("block_table", "block_size", "state_width", "cos_sin_cache", "kv_cache", "k_cache_metadata"),
    *("pdl_kwargs", "head_dim", "rope_head_dim", "compress_ratio", "overlap", "use_fp4_cache"),
    *("rms_norm_weight", "rms_norm_eps", "quant_block", "token_stride", "scale_dim"),
]
#: The lists of arguments that the engine's calls have, by name and in order.
SIGNATURES = {
    "quantize_and_insert_k_cache": INSERT,
    "dequantize_and_gather_k_cache": [*GATHER, "use_fnuz"],
    "compute_global_topk_indices_and_lens": GLOBAL,
    "combine_topk_swa_indices": [*COMBINE, "out"],
    "build_flashinfer_mixed_sparse_indices": [*MIXED, *MIXED_KEYWORDS],
    "compress_norm_rope_store_triton": COMPRESS,
    "compress_norm_rope_store_two_stage_triton": [
        *COMPRESS,
        "num_decode_tokens",
        "compress_scratch",
    ],
}
DEFAULTS = {
    "quantize_and_insert_k_cache": (64, True, False, 584),
    "dequantize_and_gather_k_cache": (False,),
    "compute_global_topk_indices_and_lens": (),
    "combine_topk_swa_indices": (None,),
    "build_flashinfer_mixed_sparse_indices": (False, None, None, None, None),
    "compress_norm_rope_store_triton": (),
    "compress_norm_rope_store_two_stage_triton": (),
}
#: head_dim, use_fp4_cache, quant_block, token_stride, scale_dim of a layout.
NUMBERS = {
    "v4": (512, False, 64, 576, 8),
    "indexer_fp8": (128, False, 128, 128, 4),
    "indexer_mxfp4": (128, True, 32, 64, 4),
}


def case(name: str, device: str) -> dict[str, Any]:
    """A recorded case as tensors and numbers; bf16 under its own name."""
    found: dict[str, Any] = {}
    for key in VECTORS.files:
        if key.split("/")[0] != name:
            continue
        value, short = VECTORS[key], key.split("/")[1]
        if value.ndim == 0:
            found[short] = value.item()
        elif short.endswith("_bf16"):
            bits = as_tensor(value.view(np.int16), device)
            found[short.removesuffix("_bf16")] = bits.view(torch.bfloat16)
        else:
            found[short] = as_tensor(value, device)
    return found


def filled(like: Any, fill: int) -> Any:
    """A tensor of one value, with the shape of another."""
    return torch.full_like(like, fill)


def same(got: Any, want: Any) -> None:
    """Equal in type, shape and every bit."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype == torch.bfloat16:
        got, want = got.view(torch.int16), want.view(torch.int16)
    assert torch.nonzero(got != want).tolist() == []


def by_position(name: str, call: dict[str, Any]) -> Any:
    """The function with every argument by position, in the engine's order."""
    return getattr(seed_api, name)(*(call[argument] for argument in SIGNATURES[name]))


def error(name: str, call: dict[str, Any]) -> ArgumentError:
    """What a call is refused with; nothing that it would write may have changed."""
    written = [call[key] for key in ("k_cache", "out", "kv_cache") if key in call]
    tensors = [one for one in written if isinstance(one, torch.Tensor)]
    before = [one.clone() for one in tensors]
    with pytest.raises(ArgumentError) as caught:
        getattr(seed_api, name)(**call)
    for one, old in zip(tensors, before, strict=True):
        same(one, old)
    return caught.value


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(seed_api, name)).parameters.values()
    assert [p.name for p in parameters] == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    given = tuple(p.default for p in parameters if p.default is not inspect.Parameter.empty)
    assert given == DEFAULTS[name]


def test_names() -> None:
    assert sorted(seed_api.__all__) == sorted(SIGNATURES)


# --- insert and gather -----------------------------------------------------------------


def insert_call(
    device: str, *, nbytes: int = 584, use_fnuz: bool = False, axes: int = 2
) -> dict[str, Any]:
    """Three tokens, one of them skipped, into two pages of four rows."""
    generator = torch.Generator().manual_seed(nbytes)
    k = torch.randn((4, 512), generator=generator).to(torch.bfloat16).to(device)
    shape = (2, 4, nbytes) if axes == 3 else (2, 4 * nbytes)
    return {
        "k": k,
        "k_cache": torch.full(shape, 0xA5, dtype=torch.uint8, device=device),
        "slot_mapping": torch.tensor([6, -1, 1], device=device),
        "block_size": 4,
        "is_ue8m0": True,
        "use_fnuz": use_fnuz,
        "bytes_per_token": nbytes,
    }


RECORDS = [
    (584, False, "v4"),
    (584, True, "v4_fnuz"),
    (528, False, "v41_mxfp8"),
    (528, True, "v41_mxfp8_fnuz"),
    (288, False, "v41_nvfp4"),
]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize(("nbytes", "use_fnuz", "layout"), RECORDS)
def test_insert_and_gather(
    nbytes: int, use_fnuz: bool, layout: str, axes: int, device: str
) -> None:
    call = insert_call(device, nbytes=nbytes, use_fnuz=use_fnuz, axes=axes)
    want = call["k_cache"].clone()
    gpu.quantize_and_insert_k_cache(call["k"], want, call["slot_mapping"], 4, layout=layout)
    named = call | {"k_cache": call["k_cache"].clone()}
    assert by_position("quantize_and_insert_k_cache", call) is None
    same(call["k_cache"], want)
    seed_api.quantize_and_insert_k_cache(**named)
    same(named["k_cache"], want)

    lens, table = torch.tensor([7, 3], device=device), torch.tensor([[0, 1], [1, 0]], device=device)
    gather = {
        "seq_lens": lens.int(),
        "gather_lens": torch.tensor([2, 3], dtype=torch.int32, device=device),
        "block_table": table.int(),
    }
    outs = [torch.full((2, 5, 512), -7.0, dtype=torch.bfloat16, device=device) for _ in range(3)]
    gpu.dequantize_and_gather_k_cache(
        outs[0], want, *gather.values(), block_size=4, offset=1, layout=layout
    )
    seed_api.dequantize_and_gather_k_cache(outs[1], want, *gather.values(), 4, 1, use_fnuz)
    seed_api.dequantize_and_gather_k_cache(
        out=outs[2], k_cache=want, **gather, block_size=4, offset=1, use_fnuz=use_fnuz
    )
    same(outs[1], outs[0])
    same(outs[2], outs[0])


@pytest.mark.parametrize(
    ("name", "nbytes"), [("v4_insert", 584), ("v4_insert_bs16", 584), ("v41_mxfp8_insert", 528)]
)
def test_recorded_insert(name: str, nbytes: int, device: str) -> None:
    c = case(name, device)
    cache = filled(c["cache"], c["fill"])
    seed_api.quantize_and_insert_k_cache(
        c["k"], cache, c["slot_mapping"], c["block_size"], True, False, nbytes
    )
    same(cache, c["cache"])


def test_defaults_mean_v4(device: str) -> None:
    c = case("v4_insert", device)
    cache = filled(c["cache"], c["fill"])
    seed_api.quantize_and_insert_k_cache(c["k"], cache, c["slot_mapping"])
    same(cache, c["cache"])


@pytest.mark.parametrize("name", ["v4_gather", "v4_gather_lens", "v41_mxfp8_gather"])
def test_recorded_gather(name: str, device: str) -> None:
    """Pages of 64 rows, which for V4 have tail padding."""
    c = case(name, device)
    out = torch.full_like(c["out"], c["out_fill"])
    arguments = [
        c["seq_lens"],
        c.get("gather_lens"),
        c["block_table"],
        c["block_size"],
        c["offset"],
    ]
    seed_api.dequantize_and_gather_k_cache(out, c["cache"], *arguments)
    same(out, c["out"])
    nbytes = 584 if name.startswith("v4_") else 528
    pages, page_bytes = c["cache"].shape
    rows = c["cache"].as_strided((pages, 64, nbytes), (page_bytes, nbytes, 1))
    out = torch.full_like(c["out"], c["out_fill"])
    seed_api.dequantize_and_gather_k_cache(out, rows, *arguments)
    same(out, c["out"])


@pytest.mark.parametrize(
    ("changes", "blames", "text"),
    [
        ({"is_ue8m0": False}, "is_ue8m0", "True"),
        ({"is_ue8m0": 1}, "is_ue8m0", "True"),
        ({"use_fnuz": 1}, "use_fnuz", "True or False"),
        ({"use_fnuz": True, "bytes_per_token": 288}, "use_fnuz", "no E4M3"),
        ({"bytes_per_token": 132}, "bytes_per_token", "584, 528, 288"),
        ({"bytes_per_token": 0}, "bytes_per_token", "1 or more"),
        ({"bytes_per_token": None}, "bytes_per_token", "1 or more"),
        ({"block_size": 5}, "k_cache", "2920"),
    ],
)
def test_insert_refuses(changes: dict[str, Any], blames: str, text: str, device: str) -> None:
    refused = error("quantize_and_insert_k_cache", insert_call(device) | changes)
    assert refused.name == blames and text in str(refused)


@pytest.mark.parametrize(
    ("shape", "use_fnuz", "blames", "text"),
    [
        ((2, 4, 600), False, "k_cache", "584, 528, 288"),
        ((2, 2400), False, "k_cache", "view [num_blocks, 4, bytes per row]"),
        ((2, 4, 288), True, "use_fnuz", "no E4M3"),
        ((2, 4 * 288), True, "use_fnuz", "no E4M3"),
        ((2, 4 * 584), "gfx942", "use_fnuz", "True or False"),
        ((2, 1, 4, 584), False, "k_cache", "page_bytes"),
    ],
)
def test_gather_refuses(
    shape: tuple[int, ...], use_fnuz: Any, blames: str, text: str, device: str
) -> None:
    numbers = torch.zeros(1, dtype=torch.int32, device=device)
    call = {
        "out": torch.zeros((1, 4, 512), dtype=torch.bfloat16, device=device),
        "k_cache": torch.zeros(shape, dtype=torch.uint8, device=device),
        "seq_lens": numbers,
        "gather_lens": None,
        "block_table": numbers[:, None],
        "block_size": 4,
        "offset": 0,
        "use_fnuz": use_fnuz,
    }
    refused = error("dequantize_and_gather_k_cache", call)
    assert refused.name == blames and text in str(refused)
    assert error("dequantize_and_gather_k_cache", call | {"k_cache": None}).name == "k_cache"
    assert error("dequantize_and_gather_k_cache", call | {"block_size": 0}).name == "block_size"


def test_a_page_shows_one_record() -> None:
    """No number of rows lets the bytes of a page mean two records."""
    layouts = [get_layout(name) for name in ("v4", "v41_mxfp8", "v41_nvfp4")]
    for rows in range(1, 600):
        sizes = [{one.owned_bytes(rows), one.page_bytes(rows)} for one in layouts]
        assert not sizes[0] & sizes[1] and not sizes[1] & sizes[2] and not sizes[0] & sizes[2]


# --- the compressor --------------------------------------------------------------------

RECORDED = {
    "compress_csa": "v4",
    "compress_hca": "v4",
    "compress_hca2": "v4",
    "compress_idx8": "indexer_fp8",
}


def compress_call(name: str, layout: str, device: str) -> dict[str, Any]:
    """A recorded case as the engine calls it: padded tokens, a 3-D cache with padded pages."""
    c = case(name, device)
    head_dim, fp4, quant_block, token_stride, scale_dim = NUMBERS[layout]
    assert c["head_dim"] == head_dim
    tokens = c["slot_mapping"].shape[0]
    padding = torch.full((5,), 3, device=device)

    def padded(values: Any) -> Any:
        return torch.cat([values, padding.to(values.dtype)])

    return {
        "state_cache": c["state_cache"],
        "num_actual": tokens,
        "token_to_req_indices": padded(c["token_to_req_indices"]),
        "positions": padded(c["positions"]),
        "slot_mapping": padded(c["slot_mapping"]),
        "block_table": c["block_table"],
        "block_size": c["state_block_size"],
        "state_width": c["state_width"],
        "cos_sin_cache": c["cos_sin_cache"],
        "kv_cache": filled(c["cache"], c["fill"]),
        "k_cache_metadata": SimpleNamespace(slot_mapping=padded(c["kv_slot_mapping"])),
        "pdl_kwargs": {"launch_pdl": True},
        "head_dim": head_dim,
        "rope_head_dim": 64,
        "compress_ratio": c["compress_ratio"],
        "overlap": bool(c["overlap"]),
        "use_fp4_cache": fp4,
        "rms_norm_weight": c["rms_norm_weight"],
        "rms_norm_eps": c["rms_norm_eps"],
        "quant_block": quant_block,
        "token_stride": token_stride,
        "scale_dim": scale_dim,
    }


@pytest.mark.parametrize(("name", "layout"), list(RECORDED.items()))
def test_recorded_compress(name: str, layout: str, device: str) -> None:
    """By position and by name, one stage and two, 2-D and 3-D."""
    want = case(name, device)["cache"]
    call = compress_call(name, layout, device)
    assert by_position("compress_norm_rope_store_triton", call) is None
    same(call["kv_cache"], want)

    call = compress_call(name, layout, device)
    cache = call["kv_cache"]
    nbytes = get_layout(layout).row_bytes
    call["kv_cache"] = cache.as_strided((cache.shape[0], 64, nbytes), (cache.stride(0), nbytes, 1))
    call |= {"num_decode_tokens": 3, "compress_scratch": None}
    seed_api.compress_norm_rope_store_two_stage_triton(**call)
    same(cache, want)

    call |= {"kv_cache": filled(cache, 0xA5), "compress_scratch": torch.zeros(9, device=device)}
    by_position("compress_norm_rope_store_two_stage_triton", call)
    same(call["kv_cache"], want)


@pytest.mark.parametrize("layout", ["v4", "indexer_fp8", "indexer_mxfp4"])
def test_compress_is_the_core_operation(layout: str, device: str) -> None:
    name = "compress_csa" if layout == "v4" else "compress_idx8"
    call = compress_call(name, layout, device)
    nbytes = get_layout(layout).page_bytes(64)
    call["kv_cache"] = torch.full((2, nbytes), 0x5A, dtype=torch.uint8, device=device)
    # Rows wider than needed, as where states of two kinds share a cache.
    wide = torch.full((*call["state_cache"].shape[:2], 2100), torch.nan, device=device)
    wide[:, :, : call["state_cache"].shape[2]] = call["state_cache"]
    tokens = call["num_actual"] - 7
    want = call["kv_cache"].clone()
    gpu.compress_norm_rope_store(
        call["state_cache"],
        call["token_to_req_indices"],
        call["positions"],
        call["slot_mapping"][:tokens],
        call["block_table"],
        call["cos_sin_cache"],
        want,
        call["k_cache_metadata"].slot_mapping,
        call["rms_norm_weight"],
        call["rms_norm_eps"],
        compress_ratio=4,
        overlap=True,
        layout=layout,
        kv_block_size=64,
    )
    seed_api.compress_norm_rope_store_triton(
        **call | {"state_cache": wide, "num_actual": tokens, "pdl_kwargs": None, "overlap": 1}
    )
    same(call["kv_cache"], want)
    assert bool((want != 0x5A).any())


def test_no_token(device: str) -> None:
    call = compress_call("compress_csa", "v4", device) | {"num_actual": 0}
    before = call["kv_cache"].clone()
    by_position("compress_norm_rope_store_triton", call)
    same(call["kv_cache"], before)


@pytest.mark.parametrize(
    ("changes", "blames"),
    [
        ({"num_actual": 60}, "slot_mapping"),
        ({"num_actual": -1}, "num_actual"),
        ({"num_actual": 3.0}, "num_actual"),
        ({"block_size": 8}, "block_size"),
        ({"state_width": 2048}, "state_width"),
        ({"state_width": 512}, "state_width"),
        ({"overlap": False}, "state_width"),
        ({"overlap": 2}, "overlap"),
        ({"state_cache": torch.zeros((29, 4, 1024))}, "state_cache"),
        ({"head_dim": 256}, "head_dim"),
        ({"head_dim": 128}, "quant_block"),
        ({"use_fp4_cache": True}, "head_dim"),
        ({"use_fp4_cache": 1}, "use_fp4_cache"),
        ({"rope_head_dim": 32}, "rope_head_dim"),
        ({"quant_block": 128}, "quant_block"),
        ({"token_stride": 584}, "token_stride"),
        ({"scale_dim": 7}, "scale_dim"),
        ({"compress_ratio": 3}, "compress_ratio"),
        ({"k_cache_metadata": None}, "k_cache_metadata"),
        ({"k_cache_metadata": SimpleNamespace(slot_mapping=[1])}, "k_cache_metadata"),
        ({"k_cache_metadata": SimpleNamespace(slot_mapping=torch.zeros(3))}, "kv_slot_mapping"),
        ({"kv_cache": torch.zeros((2, 37441), dtype=torch.uint8)}, "kv_cache"),
        ({"kv_cache": torch.zeros((2, 64, 528), dtype=torch.uint8)}, "kv_cache"),
        ({"kv_cache": None}, "kv_cache"),
        ({"slot_mapping": None}, "slot_mapping"),
        ({"state_cache": None}, "state_cache"),
    ],
)
def test_compress_refuses(changes: dict[str, Any], blames: str, device: str) -> None:
    call = compress_call("compress_csa", "v4", device) | changes
    assert error("compress_norm_rope_store_triton", call).name == blames


@pytest.mark.parametrize("count", [-1, 55, None])
def test_two_stage_refuses(count: Any, device: str) -> None:
    call = compress_call("compress_csa", "v4", device)
    call |= {"num_decode_tokens": count, "compress_scratch": None}
    name = "compress_norm_rope_store_two_stage_triton"
    assert error(name, call).name == "num_decode_tokens"


# --- index builders --------------------------------------------------------------------

RESULTS = {
    "compute_global_topk_indices_and_lens": ("global_topk_indices", "topk_lens"),
    "combine_topk_swa_indices": ("combined_indices", "combined_lens"),
    "build_flashinfer_mixed_sparse_indices": ("sparse_indices", "sparse_topk_lens"),
}
RECORDED_INDICES = [
    *(("compute_global_topk_indices_and_lens", n) for n in ("topk_global", "topk_global_wide")),
    *(("combine_topk_swa_indices", f"combine_{n}") for n in ("c4", "swa_only", "c128_base")),
    *(
        ("build_flashinfer_mixed_sparse_indices", f"mixed_{n}")
        for n in ("none", "global", "lens", "local", "swa_only")
    ),
]


@pytest.mark.parametrize(("name", "recorded"), RECORDED_INDICES)
def test_recorded_indices(name: str, recorded: str, device: str) -> None:
    c = case(recorded, device)
    names = SIGNATURES[name]
    call = {key: c[key] for key in names if key in c}
    want = [c[key] for key in RESULTS[name]]
    required = names[: len(names) - len(DEFAULTS[name])]
    for got in (
        getattr(seed_api, name)(**{key: None for key in required} | call),
        by_position(name, dict.fromkeys(names) | call),
    ):
        assert isinstance(got, tuple)
        for one, other in zip(got, want, strict=True):
            same(one, other)


@pytest.mark.parametrize(
    ("key", "name"), list(zip(("topk", "combine", "mixed"), RESULTS, strict=True))
)
def test_indices_are_the_core_operation(key: str, name: str, device: str) -> None:
    call = as_tensors(MAKE[key](), device)
    defaults = dict(zip(reversed(SIGNATURES[name]), reversed(DEFAULTS[name]), strict=False))
    for got in (
        getattr(seed_api, name)(**call),
        by_position(name, defaults | call),
    ):
        for one, other in zip(got, getattr(gpu, name)(**call), strict=True):
            same(one, other)
            assert one.stride() == other.stride()


def combine_call(device: str) -> dict[str, Any]:
    """The recorded call with 133 tokens and 256 columns."""
    return {key: value for key, value in case("combine_c4", device).items() if key in COMBINE}


def test_out_is_filled(device: str) -> None:
    call = combine_call(device)
    want = gpu.combine_topk_swa_indices(**call)
    indices = torch.full((140, 256), 77, dtype=torch.int32, device=device)
    lens = torch.full((150,), 77, dtype=torch.int32, device=device)
    got = seed_api.combine_topk_swa_indices(*call.values(), (indices, lens))
    for one, other, buffer in zip(got, want, (indices, lens), strict=True):
        same(one, other)
        assert one.data_ptr() == buffer.data_ptr()
        assert bool((buffer[133:] == 77).all())
    # Indices alone, rows apart.
    apart = torch.full((133, 300), 77, dtype=torch.int32, device=device)
    got = seed_api.combine_topk_swa_indices(**call, out=apart[:, :256])
    same(apart[:, :256].clone(), want[0])
    same(got[1], want[1])
    assert got[0].data_ptr() == apart.data_ptr() and bool((apart[:, 256:] == 77).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: "out",
        lambda: (torch.zeros((133, 256), dtype=torch.int32),),
        lambda: torch.zeros((132, 256), dtype=torch.int32),
        lambda: torch.zeros((133, 255), dtype=torch.int32),
        lambda: torch.zeros((133, 256), dtype=torch.int64),
        lambda: torch.zeros(133, dtype=torch.int32),
        lambda: torch.zeros((133, 256), dtype=torch.int32, device="meta"),
        lambda: (None, torch.zeros(133, dtype=torch.int32)),
        lambda: (torch.zeros((133, 256), dtype=torch.int32), torch.zeros(132, dtype=torch.int32)),
        lambda: (torch.zeros((133, 256), dtype=torch.int32), torch.zeros(133)),
    ],
)
def test_out_is_refused(make: Any, device: str) -> None:
    with pytest.raises(ArgumentError, match="out") as caught:
        seed_api.combine_topk_swa_indices(**combine_call(device), out=make())
    assert caught.value.name.startswith("out")


def test_bad_numbers_keep_their_own_error(device: str) -> None:
    call = combine_call(device)
    for name in ("topk", "window_size"):
        assert error("combine_topk_swa_indices", call | {name: "64"}).name == name
