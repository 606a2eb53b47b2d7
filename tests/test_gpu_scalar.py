"""`gpu.scalar` and `gpu.group` against the reference: boundaries, views, empty inputs, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import slow_oracle as slow
from test_scalar import around, boundaries

from dsv4num import RULES, SCALARS, ArgumentError, Dsv4numError, UnsupportedError
from dsv4num import reference as oracle

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num import gpu  # noqa: E402  (only where torch is)
from dsv4num.gpu import Launch  # noqa: E402  (only where torch is)
from dsv4num.gpu.scalar import _PTX_PACK_E2M1  # noqa: E402  (only where torch is)

BF16 = ml_dtypes.bfloat16
SMALL = ("e4m3fn", "e4m3fnuz", "e2m1", "ue8m0")
PATHS = ("auto", "portable") if torch.cuda.is_available() else ("portable",)
SPECIAL = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]


def tensor(values: np.ndarray, device: str) -> Any:
    """A contiguous tensor of the same values; uint16 comes as int16."""
    kinds = {np.dtype(BF16): torch.bfloat16, np.dtype(np.float32): torch.float32}
    raw = {2: np.int16, 4: np.int32}.get(values.itemsize)
    if raw is None:
        return torch.from_numpy(values.copy()).to(device)
    plain = torch.from_numpy(np.ascontiguousarray(values).view(raw).reshape(values.shape).copy())
    kind = kinds.get(values.dtype)
    return plain.to(device) if kind is None else plain.view(kind).to(device)


def bits(values: Any) -> np.ndarray:
    """The bit patterns of an array or a tensor, with its shape."""
    if isinstance(values, torch.Tensor):
        held = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        array = held.cpu().numpy()
    else:
        array = np.asarray(values)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize]
    return np.ascontiguousarray(array).view(kind).reshape(array.shape)


def same(got: Any, want: Any) -> None:
    """Equal in shape and in every bit."""
    ours, theirs = bits(got), bits(want)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert np.argwhere(ours != theirs).tolist() == []


def boundary_values(fmt: str) -> np.ndarray:
    """fp32 within two steps of every rounding boundary, both signs, and the special patterns."""
    if fmt == "bf16":
        middles = (np.arange(0, 0x7F81, 7, dtype=np.uint32) << 16) | 0x8000
        patterns = [int(m) + step for m in middles for step in (-0x8000, -1, 0, 1)]
    else:
        patterns = [found for x in boundaries(fmt) for found in around(x)]
    both = np.array(patterns + SPECIAL, np.uint32)
    return np.concatenate([both, both | np.uint32(0x80000000)]).view(np.float32)


# --- values ---------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", list(SCALARS))
@pytest.mark.parametrize("path", PATHS)
def test_encode(fmt: str, path: Any, device: str) -> None:
    x = boundary_values(fmt)
    same(gpu.encode(tensor(x, device), fmt, launch=Launch(path)), oracle.encode(x, fmt))
    halves = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    same(gpu.encode(tensor(halves, device), fmt, launch=Launch(path)), oracle.encode(halves, fmt))


def test_encode_against_the_slow_oracle(device: str) -> None:
    """Not only equal to the reference: right."""
    for fmt in SMALL:
        x = boundary_values(fmt)[::5]
        want = [slow.encode(slow.fp32_value(int(pattern)), fmt) for pattern in x.view(np.uint32)]
        assert gpu.encode(tensor(x, device), fmt).tolist() == want


@pytest.mark.parametrize("fmt", list(SCALARS))
@pytest.mark.parametrize("path", PATHS)
def test_decode(fmt: str, path: Any, device: str) -> None:
    count = SCALARS[fmt].codes
    codes = np.arange(count, dtype=np.uint32).astype(np.uint16 if count > 256 else np.uint8)
    same(gpu.decode(tensor(codes, device), fmt, launch=Launch(path)), oracle.decode(codes, fmt))


def test_pack_and_unpack(device: str) -> None:
    pairs = np.stack(np.divmod(np.arange(256), 16), axis=-1).astype(np.uint8)
    same(gpu.pack(tensor(pairs, device)), oracle.pack(pairs))
    every = np.arange(256, dtype=np.uint8).reshape(2, 4, 32)
    same(gpu.unpack(tensor(every, device)), oracle.unpack(every))
    same(gpu.pack(gpu.unpack(tensor(every, device))), every)


@pytest.mark.parametrize("rule", list(RULES))
def test_encode_scale(rule: str, device: str) -> None:
    chosen = RULES[rule]
    edges = [chosen.floor, 448.0, 224.0, 240.0, 6.0, 2688.0, 1.0, 2.0**-126, 2.0**127]
    near = np.array(edges, np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    scales = np.ldexp(np.float32(chosen.qmax), np.arange(-140, 119)).astype(np.float32)
    steps = scales.view(np.int32)[:, None] + np.arange(-1, 2, dtype=np.int32)
    patterns = np.concatenate([near.ravel(), steps.ravel(), [0, 1, 0x7F7FFFFF, 0x7F800000]])
    amax = np.clip(patterns, 0, 0x7F800000).astype(np.uint32).view(np.float32)
    same(gpu.encode_scale(tensor(amax, device), rule), oracle.encode_scale(amax, rule))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("path", PATHS)
def test_quantize_and_dequantize(rule: str, path: Any, device: str) -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(0, 1, (3, 5, 128)) * np.exp2(rng.integers(-20, 20, (3, 5, 1)))).astype(np.float32)
    x[0, 0], x[0, 1, :4], x[1, 0, 7], x[1, 1, 9] = 0, [np.nan, -0.0, 1, 2], np.inf, np.nan
    x[1, 2], x[1, 3], x[2, 0] = -np.inf, np.nan, np.float32(2**-149)
    for values in (x, x.astype(BF16)):
        codes, scale_codes = gpu.quantize(tensor(values, device), rule, launch=Launch(path))
        want, want_scales = oracle.quantize(values, rule)
        same(codes, want)
        same(scale_codes, want_scales)
        found = gpu.dequantize(codes, scale_codes, rule, launch=Launch(path))
        same(found, oracle.dequantize(want, want_scales, rule))
    every = rng.integers(0, min(256, RULES[rule].element.codes), (4, 256), dtype=np.uint16)
    scales = rng.integers(0, 256, (4, 256 // RULES[rule].group), dtype=np.uint16)
    codes, scale_codes = every.astype(np.uint8), scales.astype(np.uint8)
    scale_codes[:, 0] = [0, 1, 254, 255]
    found = gpu.dequantize(tensor(codes, device), tensor(scale_codes, device), rule)
    same(found, oracle.dequantize(codes, scale_codes, rule))


# --- views, shapes, nothing at all ----------------------------------------------------


def views(x: Any) -> list[Any]:
    """Views of a [6, 256] array or tensor whose elements are not side by side."""
    return [x[::2], x[:, 128:], x[1:5, ::2], x.T[:128].T, x[None, :, None], x[3]]


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_views_of_values(dtype: type, device: str) -> None:
    x = np.random.default_rng(2).normal(0, 2, (6, 256)).astype(dtype)
    t = tensor(x, device)
    for there, here in zip(views(x), views(t), strict=True):
        for fmt in SCALARS:
            same(gpu.encode(here, fmt), oracle.encode(there, fmt))
        for got, want in zip(
            gpu.quantize(here, "P1/64"), oracle.quantize(there, "P1/64"), strict=True
        ):
            same(got, want)
        if dtype is np.float32:
            same(gpu.encode_scale(here.abs(), "N2/16"), oracle.encode_scale(np.abs(there), "N2/16"))
    expanded = np.broadcast_to(x[:, :1], (6, 256))
    same(gpu.encode(t[:, :1].expand(6, 256), "e4m3fn"), oracle.encode(expanded, "e4m3fn"))
    same(t, x)


def test_views_of_codes(device: str) -> None:
    codes = np.random.default_rng(3).integers(0, 16, (6, 256), dtype=np.uint8)
    scales = np.random.default_rng(4).integers(0, 256, (6, 16), dtype=np.uint8)
    t, u = tensor(codes, device), tensor(scales, device)
    for there, here in zip(views(codes), views(t), strict=True):
        for fmt in SMALL:
            same(gpu.decode(here, fmt), oracle.decode(there, fmt))
        same(gpu.pack(here), oracle.pack(there))
        same(gpu.unpack(here), oracle.unpack(there))
    same(
        gpu.dequantize(t[::2, 64:], u[::2, 4:], "N2/16"),
        oracle.dequantize(codes[::2, 64:], scales[::2, 4:], "N2/16"),
    )
    wide = np.random.default_rng(5).integers(0, 1 << 16, (6, 256), dtype=np.uint16)
    for there, here in zip(views(wide), views(tensor(wide, device)), strict=True):
        same(gpu.decode(here, "bf16"), oracle.decode(there, "bf16"))


def test_a_single_value(device: str) -> None:
    for fmt in SCALARS:
        x = np.array(-1.5, np.float32)
        same(gpu.encode(tensor(x, device), fmt), oracle.encode(x, fmt))
    code = np.array(3, np.uint8)
    for fmt in SMALL:
        same(gpu.decode(tensor(code, device), fmt), oracle.decode(code, fmt))
    one = np.array(1.5, np.float32)
    same(gpu.encode_scale(tensor(one, device), "M1/32"), oracle.encode_scale(one, "M1/32"))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 128), (2, 0, 64)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    x, codes = np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
    for fmt in SCALARS:
        same(gpu.encode(tensor(x, device), fmt), oracle.encode(x, fmt))
    for fmt in SMALL:
        same(gpu.decode(tensor(codes, device), fmt), oracle.decode(codes, fmt))
    same(gpu.pack(tensor(codes, device)), oracle.pack(codes))
    same(gpu.unpack(tensor(codes, device)), oracle.unpack(codes))
    for rule in RULES:
        if shape[-1] % RULES[rule].group:
            continue
        same(gpu.encode_scale(tensor(x, device), rule), oracle.encode_scale(x, rule))
        found, want = gpu.quantize(tensor(x, device), rule), oracle.quantize(x, rule)
        same(found[0], want[0])
        same(found[1], want[1])
        same(gpu.dequantize(*found, rule), oracle.dequantize(*want, rule))


# --- errors ---------------------------------------------------------------------------

Call = Callable[[Any, Callable[[np.ndarray], Any]], Any]
F32, U8 = np.zeros((2, 64), np.float32), np.zeros((2, 64), np.uint8)
SCALE = np.zeros((2, 1), np.uint8)

ERRORS: list[tuple[str, Call]] = [
    ("x", lambda side, of: side.encode(of(np.zeros(4, np.float64)), "e4m3fn")),
    ("x", lambda side, of: side.encode(of(np.zeros(4, np.int32)), "e4m3fn")),
    ("x", lambda side, of: side.encode([1.0], "e4m3fn")),
    ("x", lambda side, of: side.encode(None, "bf16")),
    ("fmt", lambda side, of: side.encode(of(F32), "e5m2")),
    ("codes", lambda side, of: side.decode(of(np.zeros(4, np.int8)), "e4m3fn")),
    ("codes", lambda side, of: side.decode(of(F32), "ue8m0")),
    ("codes", lambda side, of: side.decode([1], "e2m1")),
    ("codes", lambda side, of: side.decode(of(U8), "bf16")),
    ("fmt", lambda side, of: side.decode(of(U8), "")),
    ("codes", lambda side, of: side.pack(of(U8)[:, :63])),
    ("codes", lambda side, of: side.pack(of(np.array(1, np.uint8)))),
    ("codes", lambda side, of: side.pack(of(np.zeros(4, np.int32)))),
    ("codes", lambda side, of: side.pack([1, 2])),
    ("packed", lambda side, of: side.unpack(of(np.array(1, np.uint8)))),
    ("packed", lambda side, of: side.unpack(of(F32))),
    ("packed", lambda side, of: side.unpack(None)),
    ("amax", lambda side, of: side.encode_scale(of(np.zeros(4, np.float64)), "P1/64")),
    ("amax", lambda side, of: side.encode_scale(of(np.zeros(4, BF16)), "P1/64")),
    ("amax", lambda side, of: side.encode_scale(1.0, "P1/64")),
    ("rule", lambda side, of: side.encode_scale(of(F32), "P1/16")),
    ("x", lambda side, of: side.quantize(of(np.zeros((2, 64), np.float16)), "P1/64")),
    ("x", lambda side, of: side.quantize(of(F32)[:, :63], "P1/64")),
    ("x", lambda side, of: side.quantize(of(F32), "P1/128")),
    ("x", lambda side, of: side.quantize(of(np.array(1, np.float32)), "N2/16")),
    ("x", lambda side, of: side.quantize([1.0] * 16, "N2/16")),
    ("rule", lambda side, of: side.quantize(of(F32), None)),
    ("codes", lambda side, of: side.dequantize(of(F32), of(SCALE), "P1/64")),
    ("scale_codes", lambda side, of: side.dequantize(of(U8), of(F32), "P1/64")),
    ("codes", lambda side, of: side.dequantize(of(U8), of(np.zeros((2, 2), np.uint8)), "P1/64")),
    ("codes", lambda side, of: side.dequantize(of(U8), of(np.zeros((1, 1), np.uint8)), "P1/64")),
    ("codes", lambda side, of: side.dequantize(of(U8[0, 0]), of(SCALE[0]), "P1/64")),
    ("codes", lambda side, of: side.dequantize(of(U8[0]), of(np.array(1, np.uint8)), "P1/64")),
    ("rule", lambda side, of: side.dequantize(of(U8), of(SCALE), "P9/64")),
]


@pytest.mark.parametrize(("name", "call"), ERRORS)
def test_errors(name: str, call: Call, device: str) -> None:
    """Both sides refuse with one class, naming the same argument and what is allowed."""
    found = []
    for side, of in ((oracle, np.asarray), (gpu, lambda a: tensor(np.asarray(a), device))):
        with pytest.raises(Dsv4numError) as caught:
            call(side, of)
        error = caught.value
        assert type(error) is ArgumentError
        assert str(error).startswith(f"{error.name}: got ")
        assert "; allowed: " in str(error) and "(SPEC " in str(error)
        found.append(error.name)
    assert found[0] == found[1]
    assert found[0] == name


@pytest.mark.parametrize(
    "call",
    [
        lambda t, launch: gpu.encode(t, "e4m3fn", launch=launch),
        lambda t, launch: gpu.decode(t.to(torch.uint8), "e4m3fn", launch=launch),
        lambda t, launch: gpu.quantize(t, "P1/64", launch=launch),
        lambda t, launch: gpu.dequantize(
            t.to(torch.uint8), t[:, :1].to(torch.uint8), "P1/64", launch=launch
        ),
    ],
)
def test_paths(call: Any, device: str) -> None:
    values = tensor(F32, device)
    with pytest.raises(ArgumentError, match=r"launch.path: got 'quick'; allowed: auto, native"):
        call(values, Launch(path="quick"))
    call(values, Launch(path="portable"))
    if device == "cpu":
        with pytest.raises(UnsupportedError, match="interpreter"):
            call(values, Launch(path="native"))


def test_dequantize_device_mismatch(device: str) -> None:
    codes, scale_codes = tensor(U8, device), tensor(SCALE, device)
    for call in ((codes.to("meta"), scale_codes), (codes, scale_codes.to("meta"))):
        with pytest.raises(ArgumentError, match="device "):
            gpu.dequantize(*call, "P1/64")


def test_what_the_kernels_do_not_refuse(device: str) -> None:
    """The docstrings' promises where a look at the device would be needed (clause 6.2)."""
    every = np.arange(256, dtype=np.uint8)
    want = oracle.decode(every & 15, "e2m1")
    same(gpu.decode(tensor(every, device), "e2m1"), want)
    same(gpu.pack(tensor(every, device)), oracle.pack(every & 15))
    for rule in RULES:
        odd = np.float32([-1, np.nan, -np.inf, -0.0])
        assert gpu.encode_scale(tensor(odd, device), rule).shape == (4,)


def test_quotients_at_every_midpoint_of_every_scale(device: str) -> None:
    """NVFP4: the kernel takes no quotient, so x is put beside every midpoint times every scale."""
    scales = oracle.decode(np.arange(1, 127, dtype=np.uint8), "e4m3fn")
    midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    products = (scales[:, None] * midpoints).view(np.uint32)
    beside = products[..., None] + np.arange(-7, 8).astype(np.uint32)  # 15 neighbours: one group each
    x = np.concatenate([beside.view(np.float32), -beside.view(np.float32)], axis=1)
    amax = np.broadcast_to(6 * scales[:, None, None], (*x.shape[:2], 1))
    groups = np.concatenate([amax, x], axis=2).reshape(-1, 16)
    codes, scale_codes = oracle.quantize(groups, "N2/16")
    assert np.array_equal(scale_codes[:, 0], np.repeat(np.arange(1, 127), 14))
    assert {*range(8), *range(9, 16)} <= set(codes.ravel().tolist())
    found, found_scales = gpu.quantize(torch.from_numpy(groups).to(device), "N2/16")
    assert np.array_equal(found_scales.cpu().numpy(), scale_codes)
    assert np.array_equal(found.cpu().numpy(), codes)


def test_bf16_at_every_midpoint_of_every_scale(device: str) -> None:
    """NVFP4 of bf16 values, which the native path takes through fp16: beside every midpoint, too."""
    scales = oracle.decode(np.arange(1, 127, dtype=np.uint8), "e4m3fn")
    midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    products = ((scales[:, None] * midpoints).view(np.uint32) >> 16).astype(np.uint16)
    beside = products[..., None] + np.arange(-7, 8).astype(np.uint16)
    x = np.concatenate([beside, beside | 0x8000], axis=1)
    amax = (6 * scales).astype(BF16).view(np.uint16)
    first = np.broadcast_to(amax[:, None, None], (*x.shape[:2], 1))
    groups = np.concatenate([first, x], axis=2).reshape(-1, 16).view(BF16)
    codes, scale_codes = oracle.quantize(groups, "N2/16")
    assert np.array_equal(scale_codes[:, 0], np.repeat(np.arange(1, 127), 14))
    found, found_scales = gpu.quantize(tensor(groups, device), "N2/16")
    assert np.array_equal(found_scales.cpu().numpy(), scale_codes)
    assert np.array_equal(found.cpu().numpy(), codes)


def run_ptx(text: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """$0 of inline PTX, run in NumPy over arrays of fp32: the few instructions that packing takes."""
    held: dict[str, Any] = dict(inputs)

    def value(name: str) -> Any:
        return np.uint32(int(name, 16)) if name.startswith("0x") else held[name]

    def half(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FFF), bits)  # the NaN that cvt makes

    def smaller(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (np.ascontiguousarray(np.broadcast_to(v, x.shape)).view(np.float16) for v in (x, y))
        return np.fmin(x, y).view(np.uint32)

    def bytes_of(x: np.ndarray, y: np.ndarray, places: int) -> np.ndarray:
        both = [x >> (8 * i) & 0xFF for i in range(4)] + [y >> (8 * i) & 0xFF for i in range(4)]
        chosen = [both[places >> (4 * i) & 7] << (8 * i) for i in range(4)]
        return np.bitwise_or.reduce(chosen)

    for statement in text.strip().strip("{}").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = operands.split(", ")
        if name == "lop3.b32":
            assert sources.pop() == "0xEA"  # (a & b) | c
        given = [int(v) if v.isdigit() else value(v) for v in sources]
        held[target] = {
            "mov.b32": lambda a: a,
            "cvt.rn.f16x2.f32": lambda upper, lower: half(upper) << 16 | half(lower),
            "abs.f16x2": lambda a: a & 0x7FFF7FFF,
            "min.f16x2": smaller,
            "shr.u32": lambda a, b: a >> b,
            "shl.b32": lambda a, b: a << b,
            "and.b32": lambda a, b: a & b,
            "add.u32": lambda a, b: a + b,
            "lop3.b32": lambda a, b, c: a & b | c,
            "prmt.b32": lambda a, b, c: bytes_of(a, b, int(c)),
        }[name](*given)
    return np.asarray(held["$0"])


def test_the_ptx_that_packs_e2m1_codes_of_bf16_values() -> None:
    """The native path's own text, and what it rests on: every bf16 value over every scale.

    fp16 keeps a product on the side of a midpoint that the quotient is on.
    """
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(-1, 8)
    for scale in oracle.decode(np.arange(1, 127, dtype=np.uint8), "e4m3fn"):
        with np.errstate(over="ignore", invalid="ignore"):
            products = values * (np.float32(2.0**-14) / scale)
            quotients = values / scale
        # The even elements of a thread's four bytes come first, then the odd ones.
        columns = [*products[:, 0::2].T, *products[:, 1::2].T]
        found = run_ptx(_PTX_PACK_E2M1.value, {f"${i + 1}": x for i, x in enumerate(columns)})
        want = oracle.pack(oracle.encode(quotients, "e2m1"))
        assert found.astype("<u4").tobytes() == want.tobytes(), scale
