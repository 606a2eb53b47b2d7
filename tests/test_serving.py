"""Life inside an engine, on a GPU: graphs, streams, threads, devices, types, warm-up.

Whatever the circumstances, the bytes are those of a plain call, which `dsv4num verify` holds to the
reference. Runs by itself: `python3 -m pytest tests/test_serving.py -q -p no:xdist`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import HAS_GPU, no_waiting

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import get_layout, gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import seed_api  # noqa: E402  (only where torch is)
from dsv4num.gpu.warmup import (  # noqa: E402  (only where torch is)
    CompressedCache,
    IndexPlan,
    KCache,
    LatentCache,
    WarmupConfig,
    compiled_count,
    warmup,
)

pytestmark = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One operation on tensors of fixed places, whose contents can be filled again.

    `fill` writes new inputs for a seed into the tensors, and the fill byte into what is written;
    `launch` runs the operation, and gives what it wrote or returned.
    """

    tensors: Tensors
    fill: Callable[[Tensors, int], None]
    launch: Callable[[Tensors], tuple[Any, ...]]
    written: tuple[str, ...] = field(default=())


def random(like: Any, seed: int) -> Any:
    """Normal values of a tensor's shape, made on its device."""
    generator = torch.Generator(like.device).manual_seed(seed)
    shape, device = like.shape, like.device
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def shuffled(count: int, device: Any, seed: int) -> Any:
    """Each number below `count` once."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randperm(count, generator=generator, device=device)


def padded_pages(layout: str, rows: int, pages: int, device: Any) -> Any:
    """A cache as engines pass it: a 3-D view whose pages are farther apart than they are long."""
    record = get_layout(layout)
    stride = -(-(record.page_bytes(rows) + 1000) // 64) * 64
    held = torch.empty(pages * stride, dtype=torch.uint8, device=device)
    return held.as_strided((pages, rows, record.row_bytes), (stride, record.row_bytes, 1))


def insert(device: Any, index: Any = torch.int64, tokens: int = 300, layout: str = "v4") -> Work:
    """Rows of a wider matrix, fewer slots than rows, some of them skipped."""
    tensors = {
        "k": torch.empty((tokens + 5, 640), dtype=torch.bfloat16, device=device)[:, :512],
        "k_cache": padded_pages(layout, 64, tokens // 64 + 2, device),
        "slots": torch.empty(tokens, dtype=index, device=device),
    }

    def fill(t: Tensors, seed: int) -> None:
        t["k"].copy_(random(t["k"], seed))
        slots = shuffled(t["k_cache"].shape[0] * 64, device, seed)[:tokens]
        t["slots"].copy_(torch.where(slots % 7 == seed % 7, -1, slots))
        t["k_cache"].fill_(0xA5 if seed % 2 else 0x5A)

    def launch(t: Tensors) -> tuple[Any, ...]:
        gpu.quantize_and_insert_k_cache(t["k"], t["k_cache"], t["slots"], 64, layout=layout)
        return (t["k_cache"],)

    return Work(tensors, fill, launch, ("k_cache",))


def gather(device: Any, index: Any = torch.int32, requests: int = 5) -> Work:
    """From a sliced block table, the last rows of sequences of any length."""
    pages = requests * 4
    tensors = {
        "out": torch.empty((requests, 210, 512), dtype=torch.bfloat16, device=device),
        "k_cache": padded_pages("v4", 64, pages, device),
        "seq_lens": torch.empty(requests, dtype=index, device=device),
        "gather_lens": torch.empty(requests, dtype=index, device=device),
        "table": torch.empty((requests + 1, 9), dtype=index, device=device)[1:, 2:6],
    }

    def fill(t: Tensors, seed: int) -> None:
        codes = random(t["k_cache"], seed) * 40 + 100
        t["k_cache"].copy_(codes.clamp(0, 126).to(torch.uint8))
        t["table"].copy_(shuffled(pages, device, seed).reshape(requests, 4))
        t["seq_lens"].copy_(shuffled(257, device, seed)[:requests])
        t["gather_lens"].copy_((t["seq_lens"] - seed % 3).clamp(0, 200))
        t["out"].fill_(-7.0 - seed % 2)

    def launch(t: Tensors) -> tuple[Any, ...]:
        gpu.dequantize_and_gather_k_cache(
            t["out"], t["k_cache"], t["seq_lens"], t["gather_lens"], t["table"], 64, 3, layout="v4"
        )
        return (t["out"],)

    return Work(tensors, fill, launch, ("out",))


def compress(
    device: Any, index: Any = torch.int64, *, ratio: int = 4, layout: str = "v4", chunk: int = 0
) -> Work:
    """Three requests of a chunk each, which starts anywhere; every state row is in the cache."""
    overlap, requests, rows = ratio == 4, 3, 4 if ratio == 4 else 8
    chunk = chunk or 2 * ratio + 3
    dim = get_layout(layout).head_dim
    width, tokens = dim * (2 if overlap else 1), requests * chunk
    columns = -(-(chunk + 3 * ratio) // rows)
    tensors = {
        "state": torch.empty((requests * columns, rows, 2 * width), device=device),
        "requests": torch.empty(tokens, dtype=torch.int32, device=device),
        "positions": torch.empty(tokens, dtype=index, device=device),
        "slots": torch.empty(tokens, dtype=index, device=device),
        "table": torch.empty((requests, columns + 3), dtype=torch.int32, device=device)[
            :, :columns
        ],
        "cos": torch.empty((chunk + 4 * ratio, 64), device=device),
        "cache": padded_pages(layout, 16, tokens // 16 + 1, device),
        "kv_slots": torch.empty(tokens, dtype=index, device=device),
        "weight": torch.empty(dim, dtype=torch.bfloat16, device=device),
    }

    def fill(t: Tensors, seed: int) -> None:
        for step, name in enumerate(("state", "cos", "weight")):
            t[name].copy_(random(t[name], 10 * seed + step))
        t["table"].copy_(shuffled(requests * columns, device, seed).reshape(requests, columns))
        token = torch.arange(tokens, device=device)
        t["requests"].copy_(token // chunk)
        t["positions"].copy_(token % chunk + (seed * 37) % (2 * ratio))
        t["slots"].copy_(torch.where(token % 11 == seed % 11, -1, token))
        t["kv_slots"].copy_(shuffled(t["cache"].shape[0] * 16, device, seed)[:tokens])
        t["cache"].fill_(0xA5 if seed % 2 else 0x5A)

    def launch(t: Tensors) -> tuple[Any, ...]:
        gpu.compress_norm_rope_store(
            t["state"],
            t["requests"],
            t["positions"],
            t["slots"],
            t["table"],
            t["cos"],
            t["cache"],
            t["kv_slots"],
            t["weight"],
            1e-6,
            compress_ratio=ratio,
            overlap=overlap,
            layout=layout,
        )
        return (t["cache"],)

    return Work(tensors, fill, launch, ("cache",))


def save_states(device: Any, index: Any = torch.int64, tokens: int = 77) -> Work:
    """kv and score as halves of one matrix."""
    both = torch.empty((tokens, 2048), device=device)
    tensors = {
        "kv": both[:, :1024],
        "score": both[:, 1024:],
        "ape": torch.empty((4, 1024), device=device),
        "positions": torch.empty(tokens, dtype=index, device=device),
        "state": torch.empty((tokens // 4 + 2, 4, 2048), device=device),
        "slots": torch.empty(tokens, dtype=index, device=device),
    }

    def fill(t: Tensors, seed: int) -> None:
        for step, name in enumerate(("kv", "score", "ape")):
            t[name].copy_(random(t[name], 10 * seed + step))
        t["positions"].copy_(torch.arange(tokens, device=device) + seed)
        slots = shuffled(t["state"].shape[0] * 4, device, seed)[:tokens]
        t["slots"].copy_(torch.where(slots % 5 == 0, -1, slots))
        t["state"].fill_(9.0 - seed % 2)

    def launch(t: Tensors) -> tuple[Any, ...]:
        names = ("kv", "score", "ape", "positions", "state", "slots")
        gpu.save_partial_states(*(t[name] for name in names), compress_ratio=4)
        return (t["state"],)

    return Work(tensors, fill, launch, ("state",))


def latent(device: Any, index: Any = torch.int64, tokens: int = 41) -> Work:
    """V4.1, ratio 2: pooled in a ring, then rotated and inserted."""
    tensors = {
        "kv_score": torch.empty((tokens, 1024), device=device),
        "positions": torch.empty(tokens, dtype=index, device=device),
        "ring": torch.empty((3, 4, 1024), device=device),
        "slots": torch.empty(tokens, dtype=index, device=device),
        "starts": torch.empty(3, dtype=torch.int32, device=device),
        "requests": torch.empty(tokens, dtype=torch.int32, device=device),
        "weight": torch.empty(512, dtype=torch.bfloat16, device=device),
        "latent": torch.empty((tokens, 512), dtype=torch.bfloat16, device=device),
        "cos": torch.empty((tokens + 20, 64), device=device),
        "cache": padded_pages("v41_mxfp8", 16, tokens // 16 + 1, device),
    }

    def fill(t: Tensors, seed: int) -> None:
        for step, name in enumerate(("kv_score", "ring", "weight", "cos")):
            t[name].copy_(random(t[name], 10 * seed + step))
        token, first = torch.arange(tokens, device=device), 9 + seed % 5
        t["starts"].copy_(torch.tensor([0, first, tokens]))
        t["requests"].copy_(token >= first)
        t["positions"].copy_(torch.where(token < first, token + seed % 3, token - first + 5))
        block = torch.where(token < first, 2, seed % 2)
        t["slots"].copy_(block * 4 + t["positions"] % 4)
        t["latent"].fill_(-7.0)
        t["cache"].fill_(0xA5 if seed % 2 else 0x5A)

    def launch(t: Tensors) -> tuple[Any, ...]:
        names = ("kv_score", "positions", "ring", "slots", "starts", "requests", "weight")
        pooled = t["latent"]
        gpu.pool_ring_latent(*(t[name] for name in names), 1e-6, pooled, compress_ratio=2)
        where = torch.where(t["positions"] % 2 == 1, torch.arange(tokens, device=device), -1)
        gpu.rope_quant_insert(
            pooled,
            t["positions"],
            t["cos"],
            t["cache"],
            where.to(index),
            compress_ratio=2,
            layout="v41_mxfp8",
        )
        return t["ring"], pooled, t["cache"]

    return Work(tensors, fill, launch, ("ring", "latent", "cache"))


def indices(device: Any, index: Any = torch.int32, decode: int = 6, prefill: int = 50) -> Work:
    """All three builders on one batch: decode tokens, then two prefill chunks."""
    tokens, requests, topk = decode + prefill, decode + 2, 64
    tensors = {
        "topk": torch.empty((tokens, topk + 16), dtype=index, device=device)[:, :topk],
        "requests": torch.empty(tokens, dtype=index, device=device),
        "starts": torch.empty(requests + 1, dtype=index, device=device),
        "seq_lens": torch.empty(requests, dtype=index, device=device),
        "gather_lens": torch.empty(requests, dtype=index, device=device),
        "swa_table": torch.empty((requests, 12), dtype=index, device=device)[:, 1:],
        "table": torch.empty((requests, 9), dtype=index, device=device)[:, :7],
        "valid": torch.empty(tokens, dtype=torch.bool, device=device),
        "swa": torch.empty((decode, 128), dtype=index, device=device),
    }

    def fill(t: Tensors, seed: int) -> None:
        token = torch.arange(tokens, device=device)
        first = decode + prefill // 2 + seed % 9
        t["requests"].copy_(torch.where(token < decode, token, decode + (token >= first).int()))
        ends = torch.tensor([*range(decode + 1), first, tokens])
        t["starts"].copy_(ends)
        lengths = torch.arange(requests, device=device) * 31 + 60 + seed
        t["seq_lens"].copy_(lengths)
        t["gather_lens"].copy_(lengths.clamp(max=200))
        for step, name in enumerate(("topk", "swa")):
            t[name].copy_((random(t[name], 10 * seed + step).abs() * 90).long() - 9)
        for step, name in enumerate(("swa_table", "table")):
            numbers = shuffled(t[name].numel(), device, seed + step)
            t[name].copy_(numbers.reshape(t[name].shape))
        t["valid"].copy_(token % 5 != seed % 5)

    def launch(t: Tensors) -> tuple[Any, ...]:
        lens = (t["starts"], t["seq_lens"])
        return (
            *gpu.compute_global_topk_indices_and_lens(
                t["topk"], t["requests"], t["table"], 64, t["valid"]
            ),
            *gpu.combine_topk_swa_indices(
                t["topk"], *lens, t["gather_lens"], 128, 4, topk, 600, 300
            ),
            *gpu.build_flashinfer_mixed_sparse_indices(
                t["swa"],
                t["topk"][:decode],
                None,
                t["topk"][decode:],
                *lens,
                t["requests"],
                t["swa_table"],
                64,
                t["table"],
                64,
                128,
                4,
                topk,
                decode_compressed_indices_are_local=True,
                decode_is_valid_token=t["valid"],
                compressed_block_span=65,
                replay_start=t["gather_lens"] // 2,
            ),
        )

    return Work(tensors, fill, launch)


def hca(device: Any, index: Any = torch.int64) -> Work:
    """Ratio 128: pooling and finishing are two kernels."""
    return compress(device, index, ratio=128)


def indexer(device: Any, index: Any = torch.int64) -> Work:
    """MXFP4 rows of the indexer."""
    return compress(device, index, layout="indexer_mxfp4")


WORKS: dict[str, Callable[..., Work]] = {
    "insert": insert,
    "gather": gather,
    "csa": compress,
    "hca": hca,
    "indexer": indexer,
    "save_states": save_states,
    "latent": latent,
    "indices": indices,
}


def plain(work: Work, seed: int) -> list[Any]:
    """What a plain call gives on the current stream."""
    work.fill(work.tensors, seed)
    found = [one.clone() for one in work.launch(work.tensors)]
    torch.cuda.synchronize()
    return found


def assert_equal(got: Any, want: Any) -> None:
    """The same bits, and more than one value among them."""
    for one, other in zip(got, want, strict=True):
        if one.dtype == torch.bfloat16:
            one, other = one.view(torch.int16), other.view(torch.int16)
        if one.dtype == torch.float32:
            one, other = one.view(torch.int32), other.view(torch.int32)
        assert torch.equal(one, other)
        assert bool((one != one.flatten()[0]).any())


@pytest.mark.parametrize("name", list(WORKS))
def test_graph(name: str) -> None:
    """One capture; each replay sees what its tensors hold by then."""
    work = WORKS[name]("cuda")
    seeds = (1, 2, 3)
    wants = [plain(work, seed) for seed in seeds]
    assert any(not torch.equal(a, b) for a, b in zip(wants[0], wants[1], strict=True))
    graph = torch.cuda.CUDAGraph()
    work.fill(work.tensors, 9)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outputs = work.launch(work.tensors)
    for seed, want in zip((*seeds, seeds[0]), (*wants, wants[0]), strict=True):
        work.fill(work.tensors, seed)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(outputs, want)


def test_graph_of_all() -> None:
    """One layer's operations in one graph, with a host that never waits."""
    works = [make("cuda") for make in WORKS.values()]
    wants = [plain(work, 4) for work in works]
    for work in works:
        work.fill(work.tensors, 5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [work.launch(work.tensors) for work in works]
    for work in works:
        work.fill(work.tensors, 4)
    graph.replay()
    torch.cuda.synchronize()
    for output, want in zip(outputs, wants, strict=True):
        assert_equal(output, want)


def test_no_call_waits_for_the_device() -> None:
    works = [make("cuda") for make in WORKS.values()]
    for work in works:
        plain(work, 1)
    with no_waiting():
        for work in works:
            work.launch(work.tensors)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", list(WORKS))
def test_two_streams(name: str) -> None:
    """Two batches at once, each on a stream of its own, behind work that keeps the stream busy."""
    works = [WORKS[name]("cuda") for _ in range(2)]
    wants = [plain(work, 1 + i) for i, work in enumerate(works)]
    streams = [torch.cuda.Stream() for _ in works]
    busy = torch.ones((2048, 2048), device="cuda")
    torch.cuda.synchronize()
    outputs: list[Any] = []
    for i, (work, stream) in enumerate(zip(works, streams, strict=True)):
        with torch.cuda.stream(stream):
            for _ in range(5):
                busy = busy @ busy * 1e-4
            work.fill(work.tensors, 1 + i)
            outputs.append(work.launch(work.tensors))
    torch.cuda.synchronize()
    for output, want in zip(outputs, wants, strict=True):
        assert_equal(output, want)


def run_in_threads(jobs: list[Callable[[], None]]) -> None:
    """Runs all at once and raises what one of them raises."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_rounds(device: str, wants: dict[str, list[Any]], rounds: int = 5) -> Callable[[], None]:
    """A job: every operation again and again, on a stream of its own."""

    def job() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            works = {name: make(device) for name, make in WORKS.items()}
            for _ in range(rounds):
                for name, work in works.items():
                    work.fill(work.tensors, 3)
                    output = work.launch(work.tensors)
                    torch.cuda.current_stream().synchronize()
                    assert_equal(output, [want.to(device) for want in wants[name]])

    return job


def test_two_threads() -> None:
    wants = {name: plain(make("cuda:0"), 3) for name, make in WORKS.items()}
    run_in_threads([in_rounds("cuda:0", wants)] * 2)


@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    """A device that is not the current one; then both at once, from two threads."""
    wants = {name: plain(make("cuda:0"), 3) for name, make in WORKS.items()}
    for name, make in WORKS.items():
        assert torch.cuda.current_device() == 0
        work = make("cuda:1")
        work.fill(work.tensors, 3)
        output = work.launch(work.tensors)
        torch.cuda.synchronize("cuda:1")
        assert_equal([one.to("cuda:0") for one in output], wants[name])
    run_in_threads([in_rounds("cuda:0", wants), in_rounds("cuda:1", wants)])


@pytest.mark.parametrize("name", list(WORKS))
def test_int32_and_int64(name: str) -> None:
    narrow, wide = (WORKS[name]("cuda", index) for index in (torch.int32, torch.int64))
    assert_equal(plain(narrow, 6), plain(wide, 6))


def moved_off_16_bytes(tensors: Tensors) -> Tensors:
    """The same, but lists of integers begin anywhere, as slices of an engine's buffers do."""
    moved = dict(tensors)
    for key, tensor in tensors.items():
        if tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1:
            longer = torch.empty(len(tensor) + 1, dtype=tensor.dtype, device=tensor.device)
            moved[key] = longer[1:]
    return moved


@pytest.mark.parametrize("name", list(WORKS))
def test_lists_off_16_bytes(name: str) -> None:
    work = WORKS[name]("cuda")
    want = plain(work, 2)
    moved = moved_off_16_bytes(work.tensors)
    work.fill(moved, 2)
    assert_equal(work.launch(moved), want)


def test_no_tokens() -> None:
    """Nothing is launched, nothing is written, and what is returned is empty."""
    cache = torch.full((2, 64, 584), 0xA5, dtype=torch.uint8, device="cuda")
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    k = torch.ones((3, 512), dtype=torch.bfloat16, device="cuda")
    before = compiled_count()
    seed_api.quantize_and_insert_k_cache(k, cache, none)
    got = seed_api.combine_topk_swa_indices(
        torch.zeros((0, 64), dtype=torch.int32, device="cuda"), none.new_zeros(1), none, none, 128, 4,
        64, 10, 5,
    )  # fmt: skip
    assert compiled_count() == before
    assert bool((cache == 0xA5).all()) and [one.shape[0] for one in got] == [0, 0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["insert", "csa", "indices"])
def test_compiled_by_torch(name: str) -> None:
    """The operators inside `torch.compile`, which may capture a graph of its own."""
    import dsv4num.gpu.library  # noqa: F401  (registers the operators)

    work = WORKS[name]("cuda")
    want = plain(work, 7)
    t = work.tensors

    def step() -> Any:
        if name == "insert":
            torch.ops.dsv4num.quantize_and_insert_k_cache(
                t["k"] * 1, t["k_cache"], t["slots"], 64, layout="v4"
            )
            return (t["k_cache"],)
        if name == "csa":
            torch.ops.dsv4num.compress_norm_rope_store(
                t["state"], t["requests"], t["positions"], t["slots"], t["table"], t["cos"],
                t["cache"], t["kv_slots"], t["weight"], 1e-6, compress_ratio=4, overlap=True,
                layout="v4",
            )  # fmt: skip
            return (t["cache"],)
        return torch.ops.dsv4num.combine_topk_swa_indices(
            t["topk"], t["starts"], t["seq_lens"], t["gather_lens"], 128, 4, 64, 600, 300
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        work.fill(t, 7)
        got = compiled()
        torch.cuda.synchronize()
        assert_equal(got, want if name != "indices" else want[2:4])


#: What the calls of `serve` need.
CONFIG = WarmupConfig(
    k_caches=(KCache("v4", 64),),
    compressed=(
        CompressedCache("v4", 4, True, state_block_size=4, block_size=16),
        CompressedCache("v4", 128, False, state_block_size=8, block_size=16),
        CompressedCache("indexer_mxfp4", 4, True, state_block_size=4, block_size=16),
    ),
    latents=(LatentCache("v41_mxfp8", 2, ring_capacity=4, block_size=16),),
    indices=(IndexPlan(4, 64, block_span=65, decode_modes=("local",), replay_start=True),),
)


def serve(tokens: int) -> None:
    """Every operation on batches of a size that no warm-up knew."""
    works = [
        insert("cuda", tokens=tokens),
        gather("cuda", requests=min(tokens, 40)),
        save_states("cuda", tokens=tokens),
        compress("cuda", chunk=tokens),
        compress("cuda", chunk=tokens, ratio=128),
        compress("cuda", chunk=tokens, layout="indexer_mxfp4"),
        latent("cuda", tokens=max(tokens, 20)),
        indices("cuda", decode=min(tokens, 30), prefill=tokens + 20),
    ]
    for seed, work in enumerate(works):
        work.fill(work.tensors, seed)
        work.launch(work.tensors)
        moved = moved_off_16_bytes(work.tensors)
        work.fill(moved, seed)
        work.launch(moved)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 160])
def test_nothing_is_compiled_after_warmup(tokens: int) -> None:
    """The caches of compiled kernels are as long after a request as before it."""
    report = warmup(CONFIG, "cuda")
    assert compiled_count() > 0
    before = compiled_count()
    assert warmup(CONFIG, "cuda").built == 0
    serve(tokens)
    assert compiled_count() == before, f"compiled after a warm-up of\n{report}"
