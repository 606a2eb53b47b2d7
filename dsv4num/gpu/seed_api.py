"""The functions of the engine's two modules, under its names and with its lists of arguments.

Change the import, and calls stay as they are, by position or by name. Each function only translates
its arguments and calls the operation of `dsv4num.gpu` that SPEC section 5 describes; no byte is made
here. What differs on purpose from the engine's functions:

* Bad input raises `ArgumentError`, a `ValueError`, before anything is written; theirs assert, or
  read outside. Values on the device are never looked at: a slot, a page or an index out of range is
  skipped or becomes -1 (clause 6.2).
* FNUZ is a property of a cache, not of a machine: `use_fnuz=True` works on every target, and False
  works on those whose own format is FNUZ.
* Slots, positions, request numbers and block tables may be int32 or int64.
* Bytes that SPEC section 7 lists: NaN stays visible, a scale code 0 is 2**-127, an E2M1 -0 keeps its
  sign, and exp and the root are correctly defined rather than approximate.
* Options that choose how something runs there (`pdl_kwargs`, `compress_scratch`, `num_decode_tokens`)
  are accepted and have no effect: the bytes are the same.

Only OCP and FNUZ records with their scales after all data rows have names here. For the inline forms,
call `dsv4num.gpu` with `layout=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dsv4num.arguments import integer, positive_int
from dsv4num.errors import ArgumentError
from dsv4num.formats import LAYOUTS, Layout
from dsv4num.gpu import compressor, paged_cache, sparse_index

__all__ = [
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compress_norm_rope_store_triton",
    "compress_norm_rope_store_two_stage_triton",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "quantize_and_insert_k_cache",
]

#: Records of K rows by their bytes, without and with FNUZ.
_K_RECORDS: dict[int, tuple[str, str | None]] = {
    584: ("v4", "v4_fnuz"),
    528: ("v41_mxfp8", "v41_mxfp8_fnuz"),
    288: ("v41_nvfp4", None),
}
#: Records that the compressor writes, by head_dim and use_fp4_cache.
_COMPRESSED = {(512, False): "v4", (128, False): "indexer_fp8", (128, True): "indexer_mxfp4"}
_ROPE_DIM = 64


class CacheMetadata(Protocol):
    """What is read of `k_cache_metadata`."""

    slot_mapping: torch.Tensor


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    is_ue8m0: bool = True,
    use_fnuz: bool = False,
    bytes_per_token: int = 584,
) -> None:
    """Quantizes rows and writes their records into a paged cache (clause 5.1).

    Args:
        k: bf16 [>= T, 512]; rows beyond the length of slot_mapping are not read.
        k_cache: uint8 [num_blocks, page bytes] or [num_blocks, block_size, bytes_per_token].
        slot_mapping: int32 or int64 [T]; negative slots skip their token.
        block_size: rows per page.
        is_ue8m0: True. No record of this package has fp32 scales for K rows; the format of the
            scales follows from bytes_per_token (NVFP4 has E4M3 scales).
        use_fnuz: E4M3 FNUZ codes; 584 and 528 bytes only.
        bytes_per_token: 584 (`v4`), 528 (`v41_mxfp8`) or 288 (`v41_nvfp4`).

    Raises:
        ArgumentError: options that name no record, or what clause 6.1 refuses.
    """
    if is_ue8m0 is not True:
        allowed = "True: the format of the scales follows from bytes_per_token"
        raise ArgumentError("is_ue8m0", repr(is_ue8m0), allowed, "5.1")
    nbytes = positive_int("bytes_per_token", bytes_per_token, "4.5")
    layout = _k_record("bytes_per_token", nbytes, use_fnuz)
    paged_cache.quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, layout=layout)


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    use_fnuz: bool = False,
) -> None:
    """Decodes the last rows of every sequence into `out` (clause 5.2).

    The record is read off the cache: off the width of its rows where it has three axes, and off the
    bytes of its pages, with or without their tail padding, where it has two.

    Args:
        out: bf16 [num_reqs, M, 512]; rows that are not gathered stay as they are.
        k_cache: uint8 [num_blocks, block_size, 584 | 528 | 288] or [num_blocks, page bytes].
        seq_lens: int32 or int64 [num_reqs].
        gather_lens: how many of the last positions, or None for all.
        block_table: int32 or int64 [num_reqs, pages].
        block_size: rows per page.
        offset: the first row of `out` that is written.
        use_fnuz: the cache has E4M3 FNUZ codes.

    Raises:
        ArgumentError: a cache that shows no record, or what clause 6.1 refuses.
    """
    rows = positive_int("block_size", block_size, "5.2")
    layout = _k_record_of(k_cache, rows, use_fnuz)
    paged_cache.dequantize_and_gather_k_cache(
        out, k_cache, seq_lens, gather_lens, block_table, rows, offset, layout=layout
    )


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of local top-k indices, and how many a token has (clause 5.7).

    Here an index beyond the block table, or a page below 0, becomes -1 and is not counted; the engine
    reads outside its table, and counts it.
    """
    return sparse_index.compute_global_topk_indices_and_lens(
        topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
    )


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the gathered buffer that each query reads: compressed, then window (clause 5.8).

    Args:
        topk_indices: int32 or int64 [T, >= topk], local.
        query_start_loc: [requests + 1]; its first entry need not be 0.
        seq_lens: [requests].
        gather_lens: [requests].
        window_size: positions of a full window.
        compress_ratio: positions per compressed row; 0 for a window only.
        topk: compressed columns.
        M: rows of a request in the gathered buffer.
        N: how many of those are compressed.
        out: where the result goes: the tensor of indices, or both tensors (indices, lens), int32. The
            first T rows are written, every column of them; more rows may follow. Indices have exactly
            topk + window_size columns rounded up to 128. One copy of the result more than without.

    Returns:
        Indices int32 [T, columns] and lens int32 [T]; of what `out` gives, its first T rows.

    Raises:
        ArgumentError: `out` has the wrong type, size or place, or what clause 6.1 refuses.
    """
    width = integer("topk", topk, 0, "5.8") + positive_int("window_size", window_size, "5.8")
    buffers = _out_buffers(out, topk_indices, -(-width // 128) * 128)
    indices, lens = sparse_index.combine_topk_swa_indices(
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        window_size,
        compress_ratio,
        topk,
        M,
        N,
    )
    if buffers[0] is not None:
        indices = buffers[0][: indices.shape[0]].copy_(indices)
    if buffers[1] is not None:
        lens = buffers[1][: lens.shape[0]].copy_(lens)
    return indices, lens


def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    swa_block_table: torch.Tensor,
    swa_block_size: int,
    compressed_block_table: torch.Tensor,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: torch.Tensor | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    replay_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots for a batch of decode and prefill tokens, and their lengths (clause 5.9).

    The options after `topk` may be given by position too, in this order; by name is safer. Rows begin
    at multiples of 16 bytes. An index, page or slot out of range becomes -1.

    Returns:
        sparse_indices int32 [T, columns] and sparse_topk_lens int32 [T].
    """
    return sparse_index.build_flashinfer_mixed_sparse_indices(
        decode_swa_indices,
        decode_compressed_indices,
        decode_compressed_topk_lens,
        prefill_topk_indices,
        query_start_loc,
        seq_lens,
        token_to_req_indices,
        swa_block_table,
        swa_block_size,
        compressed_block_table,
        compressed_block_size,
        window_size,
        compress_ratio,
        topk,
        decode_compressed_indices_are_local=decode_compressed_indices_are_local,
        decode_is_valid_token=decode_is_valid_token,
        swa_block_span=swa_block_span,
        compressed_block_span=compressed_block_span,
        replay_start=replay_start,
    )


def compress_norm_rope_store_triton(
    state_cache: torch.Tensor,
    num_actual: int,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    state_width: int,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    k_cache_metadata: CacheMetadata,
    pdl_kwargs: Mapping[str, Any] | None,
    head_dim: int,
    rope_head_dim: int,
    compress_ratio: int,
    overlap: bool | int,
    use_fp4_cache: bool,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    quant_block: int,
    token_stride: int,
    scale_dim: int,
) -> None:
    """Pools, norms, rotates and stores the groups that end among the tokens (clause 5.4).

    The record follows from head_dim and use_fp4_cache: `v4`, `indexer_fp8` or `indexer_mxfp4`. The
    numbers that describe it again must agree with it.

    Args:
        state_cache: fp32 [blocks, block_size, >= 2 * state_width].
        num_actual: tokens that are real; entries behind them, which engines pad, are not read.
        token_to_req_indices: int32 or int64 [>= num_actual].
        positions: int32 or int64 [>= num_actual].
        slot_mapping: state slots [>= num_actual]; a negative one skips its token.
        block_table: blocks of the state cache, [num_reqs, columns].
        block_size: rows per block of the state cache.
        state_width: kv columns of a state row, (1 + overlap) * head_dim.
        cos_sin_cache: fp32 [positions, 64].
        kv_cache: uint8 [num_blocks, rows per page, bytes], or [num_blocks, page bytes] where the
            bytes of a page, with or without tail padding, tell how many rows it has.
        k_cache_metadata: its `slot_mapping` [>= num_actual] has the slots of kv_cache.
        pdl_kwargs: not used.
        head_dim: 512 or 128.
        rope_head_dim: 64.
        compress_ratio: tokens per group, a power of two.
        overlap: whether a group is pooled together with the one before it.
        use_fp4_cache: MXFP4; head_dim 128 only.
        rms_norm_weight: bf16 or fp32 [head_dim].
        rms_norm_eps: added to the mean square.
        quant_block: 64 for `v4`, 128 for `indexer_fp8`, 32 for `indexer_mxfp4`.
        token_stride: bytes of a data row: 576, 128, 64.
        scale_dim: bytes of a scale row: 8, 4, 4.

    Raises:
        ArgumentError: numbers that contradict each other, or what clause 6.1 refuses.
    """
    tokens = integer("num_actual", num_actual, 0, "5.4")
    layout = _compressed_record(head_dim, use_fp4_cache, quant_block, token_stride, scale_dim)
    if rope_head_dim != _ROPE_DIM:
        raise ArgumentError("rope_head_dim", repr(rope_head_dim), _ROPE_DIM, "5.5")
    width = positive_int("state_width", state_width, "5.4")
    if overlap in (0, 1) and width != (1 + overlap) * layout.head_dim:
        allowed = f"{(1 + overlap) * layout.head_dim}, (1 + overlap) * head_dim"
        raise ArgumentError("state_width", width, allowed, "5.4")
    if isinstance(state_cache, torch.Tensor) and state_cache.dim() == 3:
        if block_size != state_cache.shape[1]:
            allowed = f"{state_cache.shape[1]}, the rows per block of state_cache"
            raise ArgumentError("block_size", repr(block_size), allowed, "5.4")
        if state_cache.shape[2] > 2 * width:
            state_cache = state_cache[:, :, : 2 * width]
    kv_slots = getattr(k_cache_metadata, "slot_mapping", None)
    if not isinstance(kv_slots, torch.Tensor):
        given = f"{type(k_cache_metadata).__name__} with slot_mapping {type(kv_slots).__name__}"
        raise ArgumentError(
            "k_cache_metadata", given, "an object with a tensor slot_mapping", "5.4"
        )
    if isinstance(slot_mapping, torch.Tensor) and slot_mapping.dim() == 1:
        if slot_mapping.shape[0] < tokens:
            given, allowed = f"{slot_mapping.shape[0]} entries", f"at least {tokens}, num_actual"
            raise ArgumentError("slot_mapping", given, allowed, "5.4")
        slot_mapping = slot_mapping[:tokens]
    compressor.compress_norm_rope_store(
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        cos_sin_cache,
        kv_cache,
        kv_slots,
        rms_norm_weight,
        rms_norm_eps,
        compress_ratio=compress_ratio,
        overlap=overlap,
        layout=layout,
        kv_block_size=_rows_of_page(kv_cache, layout),
    )


def compress_norm_rope_store_two_stage_triton(
    state_cache: torch.Tensor,
    num_actual: int,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    state_width: int,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    k_cache_metadata: CacheMetadata,
    pdl_kwargs: Mapping[str, Any] | None,
    head_dim: int,
    rope_head_dim: int,
    compress_ratio: int,
    overlap: bool | int,
    use_fp4_cache: bool,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    quant_block: int,
    token_stride: int,
    scale_dim: int,
    num_decode_tokens: int,
    compress_scratch: torch.Tensor | None,
) -> None:
    """The same operation and the same bytes as `compress_norm_rope_store_triton`.

    Whether pooling is a launch of its own is decided here by the window, not by the caller.

    Args:
        state_cache: see `compress_norm_rope_store_triton`, here and up to `scale_dim`.
        num_actual: as there.
        token_to_req_indices: as there.
        positions: as there.
        slot_mapping: as there.
        block_table: as there.
        block_size: as there.
        state_width: as there.
        cos_sin_cache: as there.
        kv_cache: as there.
        k_cache_metadata: as there.
        pdl_kwargs: as there.
        head_dim: as there.
        rope_head_dim: as there.
        compress_ratio: as there.
        overlap: as there.
        use_fp4_cache: as there.
        rms_norm_weight: as there.
        rms_norm_eps: as there.
        quant_block: as there.
        token_stride: as there.
        scale_dim: as there.
        num_decode_tokens: 0..num_actual; has no effect.
        compress_scratch: not read and not written.
    """
    decode = integer("num_decode_tokens", num_decode_tokens, 0, "5.4")
    if decode > integer("num_actual", num_actual, 0, "5.4"):
        allowed = f"at most {num_actual}, num_actual"
        raise ArgumentError("num_decode_tokens", decode, allowed, "5.4")
    compress_norm_rope_store_triton(
        state_cache,
        num_actual,
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        block_size,
        state_width,
        cos_sin_cache,
        kv_cache,
        k_cache_metadata,
        pdl_kwargs,
        head_dim,
        rope_head_dim,
        compress_ratio,
        overlap,
        use_fp4_cache,
        rms_norm_weight,
        rms_norm_eps,
        quant_block,
        token_stride,
        scale_dim,
    )


def _flag(name: str, value: Any, clause: str) -> bool:
    """True or False.

    Raises:
        ArgumentError: anything else.
    """
    if not isinstance(value, bool):
        raise ArgumentError(name, repr(value), "True or False", clause)
    return value


def _k_record(name: str, nbytes: int, use_fnuz: Any) -> str:
    """The layout of K rows of so many bytes.

    Raises:
        ArgumentError: there is none, or it has no FNUZ form.
    """
    fnuz = _flag("use_fnuz", use_fnuz, "4.5")
    if nbytes not in _K_RECORDS:
        allowed = ", ".join(str(known) for known in _K_RECORDS)
        raise ArgumentError(name, f"{nbytes} bytes per row", allowed, "4.5")
    layout = _K_RECORDS[nbytes][fnuz]
    if layout is None:
        allowed = f"False for {nbytes} bytes per row: they have no E4M3 elements"
        raise ArgumentError("use_fnuz", True, allowed, "4.5")
    return layout


def _k_record_of(k_cache: Any, rows: int, use_fnuz: Any) -> str | None:
    """The layout that a cache shows; None leaves it to the operation to refuse what is no cache."""
    if not isinstance(k_cache, torch.Tensor) or k_cache.dim() not in (2, 3):
        return "v4"
    width = k_cache.shape[-1]
    if k_cache.dim() == 3:
        return _k_record("k_cache", width, use_fnuz)
    for nbytes, (name, _) in _K_RECORDS.items():
        layout = LAYOUTS[name]
        if width in (layout.owned_bytes(rows), layout.page_bytes(rows)):
            return _k_record("k_cache", nbytes, use_fnuz)
    pages = ", ".join(str(LAYOUTS[name].page_bytes(rows)) for name, _ in _K_RECORDS.values())
    allowed = f"{pages} for {rows} rows; a view [num_blocks, {rows}, bytes per row] for other pages"
    raise ArgumentError("k_cache", f"pages of {width} bytes", allowed, "4.5")


def _compressed_record(
    head_dim: Any, use_fp4_cache: Any, quant_block: Any, token_stride: Any, scale_dim: Any
) -> Layout:
    """The layout that the compressor writes.

    Raises:
        ArgumentError: there is none of that kind, or a number contradicts it.
    """
    fp4 = _flag("use_fp4_cache", use_fp4_cache, "5.4")
    width = positive_int("head_dim", head_dim, "5.4")
    if (width, fp4) not in _COMPRESSED:
        allowed = "128 with use_fp4_cache" if fp4 else "512 or 128"
        raise ArgumentError("head_dim", width, allowed, "5.4")
    layout = LAYOUTS[_COMPRESSED[width, fp4]]
    data, scales = layout.planes
    codes = data.fields[0]
    group = codes.rule.group if codes.rule else 0
    for name, value, want in (
        ("quant_block", quant_block, group),
        ("token_stride", token_stride, data.row_bytes),
        ("scale_dim", scale_dim, scales.row_bytes),
    ):
        if value != want:
            raise ArgumentError(name, repr(value), f"{want} for {layout.name}", "5.4")
    return layout


def _rows_of_page(kv_cache: Any, layout: Layout) -> int | None:
    """Rows of a page: None where an axis shows them, else what its bytes tell.

    Raises:
        ArgumentError: no whole number of rows makes such a page.
    """
    if not isinstance(kv_cache, torch.Tensor) or kv_cache.dim() != 2:
        return None
    nbytes = kv_cache.shape[1]
    rows = nbytes // layout.row_bytes
    if rows < 1 or nbytes not in (layout.owned_bytes(rows), layout.page_bytes(rows)):
        allowed = f"{layout.name} pages, or a view [num_blocks, rows, {layout.row_bytes}]"
        raise ArgumentError("kv_cache", f"pages of {nbytes} bytes", allowed, "4.3")
    return rows


def _out_buffers(
    out: Any, topk_indices: Any, columns: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The buffers of indices and of lens that a caller gives, each None where it gives none.

    Raises:
        ArgumentError: one of them cannot take its result.
    """
    if out is None or not isinstance(topk_indices, torch.Tensor):
        return None, None  # the operation refuses what is no tensor
    buffers = (out, None) if isinstance(out, torch.Tensor) else out
    if not isinstance(buffers, tuple | list) or len(buffers) != 2:
        allowed = "a tensor of indices, or a pair (indices, lens)"
        raise ArgumentError("out", type(out).__name__, allowed, "5.8")
    tokens, device = topk_indices.shape[0], topk_indices.device
    indices, lens = buffers
    _check_out("out", indices, tokens, (columns,), device)
    if lens is not None:
        _check_out("out[1]", lens, tokens, (), device)
    return indices, lens


def _check_out(
    name: str, buffer: Any, tokens: int, inner: tuple[int, ...], device: torch.device
) -> None:
    """A buffer that takes a result: int32 [>= tokens, *inner].

    Raises:
        ArgumentError: it does not.
    """
    sizes = ", ".join([f"{tokens} or more", *map(str, inner)])
    allowed = f"int32 [{sizes}] on {device}"
    if not isinstance(buffer, torch.Tensor):
        raise ArgumentError(name, type(buffer).__name__, allowed, "5.8")
    fits = buffer.dim() == 1 + len(inner) and tuple(buffer.shape[1:]) == inner
    if not fits or buffer.shape[0] < tokens:
        raise ArgumentError(name, f"shape {list(buffer.shape)}", allowed, "5.8")
    if buffer.dtype != torch.int32 or buffer.device != device:
        given = f"{str(buffer.dtype).removeprefix('torch.')} on {buffer.device}"
        raise ArgumentError(name, given, allowed, "5.8")
