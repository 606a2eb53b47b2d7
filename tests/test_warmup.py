"""`gpu.warmup`: every kernel of a configuration is launched, and what is compiled is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HAS_GPU

import dsv4num
from dsv4num import ArgumentError

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch  # noqa: E402  (only where torch is)
from dsv4num.gpu.warmup import (  # noqa: E402  (only where torch is)
    CompressedCache,
    IndexPlan,
    KCache,
    LatentCache,
    WarmupConfig,
    compiled_count,
    warmup,
)

CONFIG = WarmupConfig(
    k_caches=(KCache("v4"), KCache("v41_nvfp4", 4, page_stride=1200, three_axes=False)),
    compressed=(
        CompressedCache("v4", 4, True, state_block_size=4),
        CompressedCache("v4", 128, False, state_block_size=8, block_size=2),
        CompressedCache("indexer_fp8", 4, True, state_block_size=4),
    ),
    latents=(LatentCache("v41_mxfp8", 1), LatentCache("v41_mxfp8", 2, bf16_round_trip=True)),
    indices=(
        IndexPlan(4, 512, replay_start=True),
        IndexPlan(128, 8, block_size=2, block_span=3, decode_width=12, decode_modes=("local",)),
        IndexPlan(0, 0, decode_modes=("absent",)),
    ),
)
OPERATIONS = (
    "quantize_and_insert_k_cache",
    "dequantize_and_gather_k_cache",
    "save_partial_states",
    "compress_norm_rope_store",
    "pool_ring_latent",
    "rope_quant_insert",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "build_flashinfer_mixed_sparse_indices",
)
#: Those that give few rows a program each.
CHOOSING_ROWS = ("quantize_and_insert_k_cache", "dequantize_and_gather_k_cache", "rope_quant_insert")

#: What changes from one request to the next, or lies anywhere: a kernel must not specialise on it.
VARYING = {
    ("paged_cache", "_insert_kernel"): "slots_ptr tokens num_slots",
    ("paged_cache", "_gather_kernel"): (
        "seq_lens_ptr gather_lens_ptr table_ptr table_stride table_width num_blocks room offset "
        "requests"
    ),
    ("compressor", "_compress_kernel"): (
        "requests_ptr positions_ptr slots_ptr table_ptr kv_slots_ptr tokens num_requests "
        "table_stride table_width num_state_blocks max_position num_slots"
    ),
    ("compressor", "_save_states_kernel"): "positions_ptr slots_ptr tokens num_slots",
    ("compressor", "_rope_quant_kernel"): "positions_ptr slots_ptr tokens max_position num_slots",
    ("compressor", "_publish_kernel"): (
        "positions_ptr slots_ptr starts_ptr requests_ptr tokens num_requests num_slots"
    ),
    ("compressor", "_remember_kernel"): (
        "positions_ptr slots_ptr starts_ptr requests_ptr tokens num_requests num_slots"
    ),
    ("sparse_index", "_global_kernel"): (
        "request_ptr table_ptr valid_ptr table_stride requests pages"
    ),
    ("sparse_index", "_combine_kernel"): ("starts_ptr seq_lens_ptr gather_lens_ptr requests M N"),
    ("sparse_index", "_mixed_kernel"): (
        "given_lens_ptr valid_ptr starts_ptr seq_lens_ptr replay_ptr request_ptr swa_table_ptr "
        "table_ptr swa_table_stride table_stride decode_tokens requests swa_pages pages"
    ),
}


def compiled_here(code: str) -> str:
    """Runs code where Triton compiles rather than interprets; no GPU is needed to look at kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(dsv4num.__file__).parent.parent,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_operation_is_launched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
    spread: set[tuple[int, int]] = set()
    taken: dict[str, set[int]] = {name: set() for name in CHOOSING_ROWS}
    whole: list[bool] = []

    def counting(name: str, original: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            called[name] += 1
            if name == "dequantize_and_gather_k_cache":
                whole.append(arguments[3] is None)
            if name == "compress_norm_rope_store":
                spread.add((options["launch"].rows, options["launch"].columns))
            elif name in taken:
                taken[name].add(options["launch"].rows)
                assert replace(options["launch"], rows=None) == CONFIG.launch
            else:
                assert options["launch"] == CONFIG.launch
            # The inputs are valid, so that no kernel only skips.
            looking = {} if name == "pool_ring_latent" else {"validate": True}
            return original(*arguments, **options, **looking)

        return launch

    for name in OPERATIONS:
        monkeypatch.setattr(gpu, name, counting(name, getattr(gpu, name)))
    report = warmup(CONFIG, device)
    # A row per program, or several; the interpreter has but one choice.
    each = 2 if HAS_GPU else 1
    assert taken == dict.fromkeys(CHOOSING_ROWS, {1, 4} if HAS_GPU else {128})
    assert whole.count(True) == whole.count(False) == 6 * each  # whole sequences, and last rows
    assert list(called.values()) == [2 * each, 12 * each, 3, 10, 2, 2 * each, 2, 3, 6]
    assert spread == {
        *((tokens, 512) for tokens in (16, 4, 1)),
        *((tokens, 128) for tokens in (32, 4, 1)),
        *((tokens, columns) for tokens in (128, 1) for columns in (32, 16)),
    }
    assert len(report.steps) == sum(called.values())
    assert report.device == device and report.seconds > 0
    assert report.built == sum(step.built for step in report.steps)
    assert str(report).endswith(f"on {device}") and "ratio 128" in str(report)
    if not HAS_GPU:
        assert report.built == compiled_count() == 0


def test_other_types(device: str) -> None:
    config = replace(
        CONFIG,
        compressed=CONFIG.compressed[:1],
        slots="int32",
        positions="int32",
        tables="int64",
        weight="float32",
        launch=Launch("portable", num_warps=8),
    )
    assert len(warmup(config, device).steps) > 10


def test_nothing_to_do(device: str) -> None:
    report = warmup(WarmupConfig(), device)
    assert report.steps == () and report.built == 0 and report.seconds == 0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WarmupConfig(slots="int16"), "slots"),
        (lambda: WarmupConfig(tables="uint8"), "tables"),
        (lambda: WarmupConfig(weight="float16"), "weight"),
        (lambda: WarmupConfig(indices=(IndexPlan(4, 8, decode_modes=("far",)),)), "decode_modes"),
        (lambda: WarmupConfig(indices=(IndexPlan(4, 8, builders=("none",)),)), "builders"),
    ],
)
def test_bad_configuration(make: Any, name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.name == name


def test_what_an_operation_refuses(device: str) -> None:
    for config, name in (
        (WarmupConfig(k_caches=(KCache("v5"),)), "layout"),
        (WarmupConfig(k_caches=(KCache("v4", 4, page_stride=2335),)), "page_stride"),
        (WarmupConfig(compressed=(CompressedCache("v4", 3, True, 4),)), "compress_ratio"),
    ):
        with pytest.raises(ArgumentError) as caught:
            warmup(config, device)
        assert caught.value.name == name


def test_bad_call(device: str) -> None:
    for config, place, name in ((None, device, "config"), (CONFIG, "nowhere", "device")):
        with pytest.raises(ArgumentError) as caught:
            warmup(config, place)  # type: ignore[arg-type]  # refused
        assert caught.value.name == name


def test_configuration_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.slots = "int32"  # type: ignore[misc]  # refused: frozen
    assert hash(CONFIG) == hash(replace(CONFIG))


def test_compiled_kernels_are_counted() -> None:
    """Every kernel once, on all devices, whatever module it is imported into."""
    code = (
        "from dsv4num.gpu import paged_cache, compressor\n"
        "from dsv4num.gpu.warmup import compiled_count\n"
        "assert compiled_count() == 0\n"
        "rest = ({}, None, None, None)\n"
        "paged_cache._insert_kernel.device_caches[0] = ({1: 'a', 2: 'b'}, *rest)\n"
        "paged_cache._insert_kernel.device_caches[1] = ({1: 'a'}, *rest)\n"
        "compressor.exp_nonpositive.device_caches[0] = ({1: 'a'}, *rest)\n"
        "print(compiled_count())\n"
    )
    assert compiled_here(code) == "4\n"


def test_kernels_do_not_specialise_on_what_varies() -> None:
    """A count of 1 or 16, or a table that lies off 16 bytes, must not compile a kernel again."""
    code = (
        "import importlib, sys\n"
        f"for (module, name), varying in {VARYING!r}.items():\n"
        "    kernel = getattr(importlib.import_module(f'dsv4num.gpu.{module}'), name)\n"
        "    free = {p.name for p in kernel.params if p.do_not_specialize}\n"
        "    unknown = set(varying.split()) - {p.name for p in kernel.params}\n"
        "    assert not unknown, (name, unknown)\n"
        "    for wrong in sorted(set(varying.split()) - free):\n"
        "        print(name, wrong)\n"
    )
    assert compiled_here(code) == ""
