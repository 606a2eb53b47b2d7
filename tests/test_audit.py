"""The audit finds what breaks a rule, on NVIDIA and on AMD, and nothing in what keeps them all.

The kernels below are compiled in a process of its own, with Triton's interpreter off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="kernels need torch")
triton = pytest.importorskip("triton", reason="kernels need triton")

import triton.language as tl  # noqa: E402  (only where torch is)
from triton.language.extra import libdevice  # noqa: E402  (only where torch is)

from dsv4num.audit.command import (  # noqa: E402  (only where torch is)
    Result,
    _found,
    _write_record,
    examine,
)
from dsv4num.audit.rules import RULES, inspect  # noqa: E402  (only where torch is)
from dsv4num.audit.specialization import (  # noqa: E402  (only where torch is)
    ARCHITECTURES,
    Specialization,
    choose,
    collect,
    compile_to_text,
)
from dsv4num.cli import main  # noqa: E402  (only where torch is)

HERE = Path(__file__).parent
NVIDIA, AMD = "sm_90", "gfx942"


@triton.jit
def load(x_ptr, y_ptr):
    at = tl.arange(0, 256)
    return at, tl.load(x_ptr + at), tl.load(y_ptr + at)


# Kernels that keep every rule


@triton.jit
def sums(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, (x * y + x) - y)


@triton.jit
def quotient(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.div_rn(x, y))


@triton.jit
def negative_reciprocal(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), -x))


@triton.jit
def root(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.sqrt_rn(x))


@triton.jit
def whole_16(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    a, b = x.to(tl.int32, bitcast=True), y.to(tl.int32, bitcast=True)
    signed = a.to(tl.int8).to(tl.int32) // b.to(tl.int8).to(tl.int32)
    total = (a & 0xFFFF) // (b & 0xFF) + (a & 255) % (b & 31) + signed
    tl.store(out_ptr + at, total.to(tl.float32, bitcast=True))


@triton.jit
def whole_32(x_ptr, y_ptr, out_ptr, n):
    at, x, y = load(x_ptr, y_ptr)
    a, b = x.to(tl.int32, bitcast=True), y.to(tl.int32, bitcast=True)
    tl.store(out_ptr + at, (a // b + b % n).to(tl.float32, bitcast=True))


@triton.jit
def whole_64(x_ptr, y_ptr, out_ptr, n):
    at, x, y = load(x_ptr, y_ptr)
    a, b = x.to(tl.int32, bitcast=True).to(tl.int64), y.to(tl.int32, bitcast=True).to(tl.int64)
    total = (a * a) // (b * n) + a % n
    tl.store(out_ptr + at, total.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def pair_sums(x_ptr, y_ptr, out_ptr):
    _, x, _ = load(x_ptr, y_ptr)
    sums = tl.sum(tl.reshape(x, (128, 2)), axis=1)
    tl.store(out_ptr + tl.arange(0, 128), sums)


@triton.jit
def maximum(x_ptr, y_ptr, out_ptr):
    _, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr, tl.max(tl.maximum(x, y), axis=0))


@triton.jit
def whole_numbers(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, x.to(tl.int32).to(tl.float32) * 0.5 + tl.abs(y))


# Kernels that break one


@triton.jit
def exponential(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.exp(x))


@triton.jit
def logarithm(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.log2(x))


@triton.jit
def sine(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.sin(x))


@triton.jit
def library(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, libdevice.tanh(x))


@triton.jit
def reciprocal_root(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.rsqrt(x))


@triton.jit
def plain_quotient(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, x / y)


@triton.jit
def plain_root(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.sqrt(x))


@triton.jit
def assembly(x_ptr, y_ptr, out_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    at, x, y = load(x_ptr, y_ptr)
    out = tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [x, y], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out_ptr + at, out)


@triton.jit
def fused(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.fma(x, y, x))


@triton.jit
def matrix(x_ptr, y_ptr, out_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def half(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, x.to(tl.float16).to(tl.float32))


@triton.jit
def bf16(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.float32))


@triton.jit
def double(x_ptr, y_ptr, out_ptr):
    at, x, y = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, (x.to(tl.float64) * y + y).to(tl.float32))


@triton.jit
def float8(x_ptr, y_ptr, out_ptr, FORMAT: tl.constexpr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, x.to(FORMAT).to(tl.int8, bitcast=True).to(tl.float32))


@triton.jit
def reduction(x_ptr, y_ptr, out_ptr):
    _, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr, tl.sum(x, axis=0))


@triton.jit
def reduction_of_four(x_ptr, y_ptr, out_ptr):
    _, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + tl.arange(0, 64), tl.sum(tl.reshape(x, (64, 4)), axis=1))


@triton.jit
def scan(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.store(out_ptr + at, tl.cumsum(x, axis=0))


@triton.jit
def atomic(x_ptr, y_ptr, out_ptr):
    at, x, _ = load(x_ptr, y_ptr)
    tl.atomic_add(out_ptr + at, x)


@triton.jit
def exp32_from_the_library(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.exp(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


CLEAN = (
    "sums", "quotient", "negative_reciprocal", "root", "whole_16", "whole_32", "whole_64", "maximum",
    "whole_numbers", "pair_sums",
)  # fmt: skip
CLEAN_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx1201")


class Fault(NamedTuple):
    """A kernel that breaks a rule: in which forms it is seen on a target."""

    kernel: str
    target: str
    rule: str
    stages: tuple[str, ...]
    constants: dict[str, Any] = {}  # noqa: RUF012  (read only)
    options: dict[str, Any] = {}  # noqa: RUF012  (read only)


def on_both(kernel: str, rule: str, nvidia: str, amd: str, **more: Any) -> list[Fault]:
    return [
        Fault(kernel, NVIDIA, rule, tuple(nvidia.split()), **more),
        Fault(kernel, AMD, rule, tuple(amd.split()), **more),
    ]


def asm(target: str, rule: str, text: str) -> Fault:
    constraints = "=r,r,r" if target == NVIDIA else "=v,v,v"
    constants = {"ASM": text, "CONSTRAINTS": constraints}
    return Fault("assembly", target, rule, ("ptx" if target == NVIDIA else "amdgcn",), constants)


FAULTS = [
    *on_both("exponential", "approximation", "ttir llir ptx", "ttir llir amdgcn"),
    *on_both("logarithm", "approximation", "ttir llir", "ttir llir amdgcn"),
    *on_both("sine", "approximation", "ttir llir", "ttir"),
    *on_both("library", "approximation", "ttir llir", "ttir llir amdgcn"),
    *on_both("reciprocal_root", "approximation", "ttir llir", "ttir llir amdgcn"),
    Fault("plain_quotient", NVIDIA, "approximation", ("llir", "ptx")),
    Fault("plain_root", NVIDIA, "flush", ("ptx",)),
    Fault("plain_root", AMD, "division", ("amdgcn",)),
    asm(NVIDIA, "approximation", "rcp.approx.f32 $0, $1;"),
    asm(NVIDIA, "approximation", "sqrt.approx.f32 $0, $1;"),
    asm(NVIDIA, "approximation", "tanh.approx.f32 $0, $1;"),
    asm(NVIDIA, "division", "rcp.rz.f32 $0, $1;"),
    asm(NVIDIA, "division", "div.rz.f32 $0, $1, $2;"),
    asm(NVIDIA, "division", "sqrt.rm.f32 $0, $1;"),
    asm(AMD, "division", "v_rcp_f32 $0, $1"),
    asm(AMD, "division", "v_rcp_iflag_f32 $0, $1"),
    asm(AMD, "division", "v_sqrt_f32 $0, $1"),
    asm(AMD, "approximation", "v_rsq_f32 $0, $1"),
    *on_both("fused", "contraction", "ttir llir ptx", "ttir llir amdgcn"),
    *on_both("sums", "contraction", "ptx", "amdgcn", options={"enable_fp_fusion": True}),
    *on_both("matrix", "contraction", "ttir ptx", "ttir llir amdgcn"),
    asm(NVIDIA, "contraction", "add.f32 $0, $1, $2;"),  # not .rn: ptxas may contract it
    asm(AMD, "contraction", "v_fma_f32 $0, $1, $2, $2"),
    asm(NVIDIA, "flush", "add.rn.ftz.f32 $0, $1, $2;"),
    asm(AMD, "flush", "v_mac_f32 $0, $1, $2"),
    asm(AMD, "flush", "s_denorm_mode 0\n\tv_add_f32 $0, $1, $2"),
    asm(AMD, "flush", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n\tv_add_f32 $0, $1, $2"),
    Fault("sums", AMD, "flush", ("llir", "amdgcn"), {}, {"allow_flush_denorm": True}),
    *on_both("half", "conversion", "ttir llir ptx", "ttir llir amdgcn"),
    *on_both("bf16", "conversion", "ttir", "ttir"),
    *on_both("double", "conversion", "ttir llir ptx", "ttir llir amdgcn"),
    *on_both("double", "unknown", "llir", "llir"),
    Fault("float8", NVIDIA, "float8", ("ttir", "ptx"), {"FORMAT": "float8e4nv"}),
    Fault("float8", AMD, "float8", ("ttir", "llir", "amdgcn"), {"FORMAT": "float8e4b8"}),
    *on_both("reduction", "order", "ttir", "ttir"),
    *on_both("reduction_of_four", "order", "ttir", "ttir"),
    *on_both("scan", "order", "ttir", "ttir"),
    *on_both("atomic", "order", "ttir ptx", "ttir llir amdgcn"),
    asm(NVIDIA, "unknown", "copysign.f32 $0, $1, $2; testp.finite.f32 %p0, $1;"),
    asm(AMD, "unknown", "v_ldexp_f32 $0, $1, $2"),
]  # fmt: skip


def specialization(
    kernel: str, target: str, constants: dict[str, Any], options: dict[str, Any]
) -> Specialization:
    """A kernel of this file, as the audit would compile it."""
    names = tuple(globals()[kernel].arg_names)
    pointer = {name: "constexpr" if name.isupper() else "i32" for name in names}
    pointer |= {name: "*fp32" for name in names if name.endswith("_ptr")}
    values = {
        name: getattr(tl, value) if name == "FORMAT" else value for name, value in constants.items()
    }
    return Specialization(
        target=target,
        module=__name__,
        kernel=kernel,
        names=names,
        signature=pointer,
        constants={(names.index(name),): value for name, value in values.items()},
        options={"enable_fp_fusion": False, **options},
    )


def print_findings() -> None:
    """In the other process: compiles every kernel above and prints what was found."""
    faults = []
    for kernel, target, _, _, constants, options in FAULTS:
        _, findings = examine(specialization(kernel, target, constants, options))
        faults.append([[*map(str, vars(finding).values())] for finding in findings])
    clean, texts = {}, {}
    for target in CLEAN_TARGETS:
        for kernel in CLEAN:
            stages = compile_to_text(specialization(kernel, target, {}, {}))
            key = f"{target} {kernel}"
            clean[key] = [vars(finding) for finding in inspect(stages, native=False)]
            texts[key] = stages
    _, slash = examine(specialization("plain_quotient", AMD, {}, {}))
    clean[f"{AMD} plain_quotient"] = [vars(finding) for finding in slash]
    _, broken = examine(specialization("assembly", AMD, {}, {}))  # without its constants
    json.dump({"faults": faults, "clean": clean, "texts": texts, "broken": str(broken)}, sys.stdout)


def print_collected() -> None:
    """In the other process: what some operations launch, and what the native path's code holds."""
    targets = ("sm_80", "sm_90", "gfx942")
    made = [
        found for name in ("quantize", "round_bf16") for found in collect(name, targets, "quick")
    ]
    native = {}
    for found in [*collect("encode", ("sm_90",), "quick"), *made]:
        name = found.constant.get("FORMAT") or str(getattr(found.constant.get("RULE"), "element", ""))
        halves = found.signature["x_ptr"] == "*i16"
        if found.native and (name in ("e4m3fn", "bf16") or (name == "e2m1" and halves)):
            stages = compile_to_text(found)
            native[name] = [
                sorted({finding.rule for finding in inspect(stages, native=path)})
                for path in (True, False)
            ]
    plain = [
        {
            "target": found.target,
            "kernel": found.kernel,
            "native": found.native,
            "default": found.default,
            "types": found.signature,
            "warps": found.options["num_warps"],
            "fusion": found.options["enable_fp_fusion"],
            "known": {found.names[path[0]]: value for path, value in found.attributes.items()},
            "text": str(found),
        }
        for found in made
    ]
    chosen = choose(made, "quick")
    kept = [(found.target, found.kernel, found.native, found.default) for found in chosen]
    json.dump({"made": plain, "native": native, "kept": kept}, sys.stdout)


def print_red_run() -> None:
    """In the other process: the command, over an exp32 that calls the library's exponential."""
    from concurrent.futures import ThreadPoolExecutor

    import dsv4num.gpu.arithmetic
    from dsv4num.audit import command

    dsv4num.gpu.arithmetic._exp32_kernel = exp32_from_the_library
    command.ProcessPoolExecutor = lambda *_: ThreadPoolExecutor(1)
    sys.exit(main(["audit", "--op", "exp32", "--arch", NVIDIA, "--arch", AMD, "--jobs", "1"]))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the interpreter off."""
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600
    )


@pytest.fixture(scope="module")
def compiled() -> Any:
    done = run("-c", "import test_audit; test_audit.print_findings()")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def collected() -> Any:
    done = run("-c", "import test_audit; test_audit.print_collected()")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Rules


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda i: "-".join(FAULTS[i][:3]))
def test_a_fault_is_found_in_every_form_that_shows_it(compiled: Any, index: int) -> None:
    fault = FAULTS[index]
    seen = {stage for rule, stage, _, _ in compiled["faults"][index] if rule == fault.rule}
    assert set(fault.stages) <= seen, compiled["faults"][index]


@pytest.mark.parametrize("target", CLEAN_TARGETS)
@pytest.mark.parametrize("kernel", CLEAN)
def test_nothing_is_found_in_a_kernel_that_keeps_the_rules(
    compiled: Any, target: str, kernel: str
) -> None:
    found = compiled["clean"][f"{target} {kernel}"]
    if kernel == "root" and "v_rsq_f32" in compiled["texts"][f"{target} root"].get("amdgcn", ""):
        # Triton 3.6 on AMD does not scale the operand of its square root, and so rounds roots of
        # numbers below about 2**-104 otherwise than to nearest: rightly found. No kernel takes it.
        assert {"approximation", "contraction"} == {finding["rule"] for finding in found}
    else:
        assert found == []


def test_amd_divides_correctly_without_being_told(compiled: Any) -> None:
    assert compiled["clean"][f"{AMD} plain_quotient"] == []


def test_every_rule_has_a_fault_on_both_vendors() -> None:
    texts = {"fast-math"}  # no kernel can ask for it: tested on LLVM IR below
    for target in (NVIDIA, AMD):
        assert {fault.rule for fault in FAULTS if fault.target == target} | texts == {
            rule.name for rule in RULES
        }


def test_a_finding_names_the_line_of_the_kernel(compiled: Any) -> None:
    lines = Path(__file__).read_text().splitlines()
    for target in (NVIDIA, AMD):
        index = next(i for i, f in enumerate(FAULTS) if f[:2] == ("fused", target))
        for _, _, source, text in compiled["faults"][index]:
            name, number = source.split(":")
            assert name == Path(__file__).name and "tl.fma" in lines[int(number) - 1], (
                source,
                text,
            )


def test_what_does_not_compile_is_a_finding(compiled: Any) -> None:
    assert "no code" in compiled["broken"]


# What a kernel cannot express: the text of a clean one, changed


def rules_of(stage: str, text: str, *, native: bool = False) -> set[str]:
    return {finding.rule for finding in inspect({stage: text}, native=native)}


@pytest.mark.parametrize(
    "flag", ["fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn", "reassoc"]
)
@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_fast_math_flags(compiled: Any, target: str, flag: str) -> None:
    text = compiled["texts"][f"{target} sums"]["llir"]
    assert rules_of("llir", text) == set()
    assert rules_of("llir", text.replace(" = fsub ", f" = fsub {flag} ", 1)) == {"fast-math"}


@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_fast_math_attributes(compiled: Any, target: str) -> None:
    text = compiled["texts"][f"{target} sums"]["llir"]
    for name in ("unsafe-fp-math", "no-nans-fp-math", "approx-func-fp-math"):
        changed = text.replace("attributes #0 = {", f'attributes #0 = {{ "{name}"="true"', 1)
        assert rules_of("llir", changed) == {"fast-math"}
    changed = text.replace(
        "attributes #0 = {", 'attributes #0 = { "denormal-fp-math"="preserve-sign,preserve-sign"', 1
    )
    assert rules_of("llir", changed) == {"flush"}


def test_fast_math_in_tritons_ir(compiled: Any) -> None:
    text = compiled["texts"][f"{NVIDIA} sums"]["ttir"]
    changed = re.sub(r"(arith\.addf [^:]*) :", r"\1 fastmath<contract> :", text, count=1)
    assert rules_of("ttir", changed) == {"fast-math"}


@pytest.mark.parametrize(
    ("product", "clean"),
    [
        ("%a = uitofp i8 %0 to float\n  %b = fmul nnan float %a, 5.000000e-01", True),
        ("%a = sitofp i32 %0 to float\n  %b = fmul nnan float %a, 0x3FE0000000000000", True),
        (
            "%a = uitofp <4 x i8> %0 to <4 x float>\n"
            "  %b = fmul nnan <4 x float> %a, splat (float f0x3B000000), !dbg !7",
            True,
        ),
        (
            "%a = shl nuw nsw i32 %0, 20\n  %b = and i32 %a, 133169152\n"
            "  %c = bitcast i32 %b to float\n  %d = fmul nnan float %c, f0x7B800000",
            True,
        ),
        (
            "%a = zext nneg <2 x i8> %0 to <2 x i32>\n  %b = shl nuw <2 x i32> %a, splat (i32 20)\n"
            "  %c = bitcast <2 x i32> %b to <2 x float>\n"
            "  %d = fmul nnan <2 x float> %c, splat (float f0x7B000000)",
            True,
        ),
        (
            "%a = and <2 x i32> %0, splat (i32 127)\n  %b = extractelement <2 x i32> %a, i64 1\n"
            "  %c = shl nuw nsw i32 %b, 20\n  %d = insertelement <2 x i32> poison, i32 %c, i64 0\n"
            "  %e = select <2 x i1> %1, <2 x i32> %d, <2 x i32> <i32 3, i32 5>\n"
            "  %f = bitcast <2 x i32> %e to <2 x float>\n"
            "  %g = fmul nnan <2 x float> %f, splat (float f0x7B800000)",
            True,
        ),
        (
            "%a = and i32 %0, 127\n  %b = insertelement <2 x i32> %1, i32 %a, i64 0\n"
            "  %c = bitcast <2 x i32> %b to <2 x float>\n"
            "  %d = fmul nnan <2 x float> %c, splat (float f0x7B800000)",
            False,
        ),
        (
            "%a = select i1 %0, i32 7, i32 -1\n"
            "  %b = bitcast i32 %a to float\n  %c = fmul nnan float %b, f0x7B800000",
            False,
        ),
        (
            "%a = zext i8 %0 to i32\n  %b = shl nuw i32 %a, 23\n"
            "  %c = bitcast i32 %b to float\n  %d = fmul nnan float %c, f0x7B800000",
            False,  # 255 << 23 is infinite
        ),
        ("%a = bitcast i32 %0 to float\n  %b = fmul nnan float %a, f0x7B800000", False),
        ("%a = fadd float %0, %1\n  %b = fmul nnan float %a, 5.000000e-01", False),
        ("%a = uitofp i8 %0 to float\n  %b = fmul nnan float %a, %1", False),
        ("%a = uitofp i8 %0 to float\n  %b = fmul nnan float %a, f0x7F800000", False),
        ("%a = uitofp i8 %0 to float\n  %b = fmul nnan float %a, 0x7FF0000000000000", False),
        ("%a = uitofp i8 %0 to float\n  %b = fmul nnan nsz float %a, 5.000000e-01", False),
    ],
)
def test_what_llvm_proved_is_no_permission(product: str, clean: bool) -> None:
    assert rules_of("llir", f"  {product}\n") == (set() if clean else {"fast-math"})


@pytest.mark.parametrize(
    ("stage", "line", "rule"),
    [
        ("llir", "  %1 = call float @llvm.vector.reduce.fadd.v4f32(float %0, <4 x float> %2)", ""),
        (
            "llir",
            "  %1 = call reassoc float @llvm.vector.reduce.fadd.v4f32(float %0, <4 x float> %2)",
            "fast-math",
        ),
        ("llir", "  %1 = atomicrmw fadd ptr addrspace(1) %0, float %2 monotonic, align 4", "order"),
        ("llir", "  %1 = atomicrmw add ptr addrspace(1) %0, i32 %2 monotonic, align 4", ""),
        ("llir", "  %1 = fdiv float %0, %2, !fpmath !3", "division"),
        ("llir", "  %1 = fdiv float %0, %2", ""),
        ("llir", "  %1 = frem float %0, %2", "division"),
        ("llir", "  %1 = call float @llvm.sqrt.f32(float %0), !fpmath !3", "division"),
        ("llir", "  %1 = call float @llvm.nvvm.div.rz.f(float %0, float %2)", "division"),
        ("llir", "  %1 = call float @llvm.amdgcn.rcp.f32(float %0)", "approximation"),
        ("llir", "  %1 = call float @llvm.amdgcn.fdiv.fast(float %0, float %2)", "approximation"),
        ("llir", "  %1 = call float @__nv_expf(float %0)", "approximation"),
        ("llir", "  %1 = call float @__ocml_exp_f32(float %0)", "approximation"),
        (
            "llir",
            "  %1 = call float @llvm.fmuladd.f32(float %0, float %2, float %3)",
            "contraction",
        ),
        ("llir", "  %1 = call float @llvm.nearbyint.f32(float %0)", "unknown"),
        ("llir", "  %1 = call i32 @somewhere(float %0)", "unknown"),
        ("llir", "  %1 = fadd half %0, %2", "unknown"),
        ("llir", "  %1 = fptrunc float %0 to bfloat", "conversion"),
        (
            "llir",
            '  %1 = call i32 asm "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r"(i32 %0, i32 %2)',
            "",
        ),
        ("ptx", "  @%p1 red.global.add.f32 [%rd1], %f1;", "order"),
        ("ptx", "  red.global.add.s32 [%rd1], %r1;", ""),
        ("ptx", "  @!%p2 fma.rn.f32 %f1, %f2, %f3, %f4;", "contraction"),
        ("ptx", "  mad.lo.s32 %r1, %r2, %r3, %r4;", ""),
        ("ptx", "  mul.f32 %f1, %f2, %f3;", "contraction"),
        ("ptx", "  mul.rn.f32x2 %rd1, %rd2, %rd3;", ""),
        ("ptx", "  div.full.f32 %f1, %f2, %f3;", "approximation"),
        ("ptx", "  div.rn.f32 %f1, %f2, %f3;", ""),
        ("ptx", "  call.uni (retval0), helper, (param0);", "approximation"),
        ("ptx", "  cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "conversion"),
        ("ptx", "  cvt.rn.f16x2.f32 %r1, %f1, %f2;", "conversion"),
        ("ptx", "  { cvt.rn.satfinite.e4m3x2.f32 low, %f1, %f2;", "float8"),
        ("ptx", "  ld.global.f32 %f1, [%rd1];", ""),
        ("ptx", "  fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "contraction"),
        ("amdgcn", "\tglobal_atomic_add_f32 v0, v1, s[0:1]", "order"),
        ("amdgcn", "\tglobal_atomic_add_u32 v0, v1, s[0:1]", ""),
        ("amdgcn", "\tds_add_rtn_f32 v0, v1, v2", "order"),
        ("amdgcn", "\tv_dual_add_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6", "contraction"),
        ("amdgcn", "\tv_dual_add_f32 v1, v2, v3 :: v_dual_mul_f32 v4, v5, v6", ""),
        ("amdgcn", "\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", "contraction"),
        ("amdgcn", "\tv_pk_add_f32 v[0:1], v[2:3], v[4:5]", ""),
        ("amdgcn", "\tv_fma_mix_f32 v0, v1, v2, v3", "contraction"),
        ("amdgcn", "\tv_cvt_pk_bf16_f32 v0, v1, v2", "conversion"),
        ("amdgcn", "\tv_cvt_pk_fp8_f32 v0, v1, v2", "float8"),
        ("amdgcn", "\tv_cvt_f32_ubyte0_e32 v0, v1", ""),
        ("amdgcn", "\tv_mad_u64_u32 v[0:1], s[2:3], v2, v3, v[4:5]", ""),
        ("amdgcn", "\ts_round_mode 0x3", "division"),
        ("amdgcn", "\t\t.amdhsa_float_round_mode_32 3", "division"),
        ("amdgcn", "\t\t.amdhsa_float_denorm_mode_32 3", ""),
        ("amdgcn", "\t\t.amdhsa_float_denorm_mode_16_64 0", "flush"),
        ("amdgcn", "\tv_log_f32_e32 v0, v1", "approximation"),
        ("amdgcn", "\tv_s_rcp_f32 s0, s1", "division"),
        ("amdgcn", "\tv_div_fixup_f32 v0, v1, v2, v3", "division"),
    ],
)
def test_a_line(stage: str, line: str, rule: str) -> None:
    assert rules_of(stage, line) == ({rule} if rule else set())


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;", ""),
        ("cvt.rn.f16x2.e4m3x2 %r1, %rs1;", ""),
        ("cvt.f32.f16 %f1, %rs1;", ""),
        ("cvt.rn.f16x2.f32 %r1, %f1, %f2;", ""),
        ("abs.f16x2 %r1, %r2;", ""),
        ("min.f16x2 %r1, %r2, %r3;", ""),
        ("cvt.rz.f16x2.f32 %r1, %f1, %f2;", "conversion"),
        ("mul.f16x2 %r1, %r2, %r3;", "unknown"),
        ("cvt.rn.bf16.f32 %rs1, %f1;", ""),
        ("cvt.rn.bf16x2.f32 %r1, %f1, %f2;", ""),
        ("cvt.rn.satfinite.e5m2x2.f32 %rs1, %f1, %f2;", "conversion"),
        ("cvt.rn.satfinite.relu.e4m3x2.f32 %rs1, %f1, %f2;", "conversion"),
        ("cvt.rz.bf16.f32 %rs1, %f1;", "conversion"),
        ("cvt.rn.f16.f32 %rs1, %f1;", "conversion"),
        ("cvt.rn.satfinite.e2m1x2.f32 %rs1, %f1, %f2;", "conversion"),
        ("cvt.rp.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;", "conversion"),
    ],
)
def test_the_native_path_has_its_conversions_and_no_others(line: str, rule: str) -> None:
    assert rules_of("ptx", line, native=True) == ({rule} if rule else set())


# Expansions


AMD_TARGETS = [target for target in CLEAN_TARGETS if target.startswith("gfx")]


def changed(text: str, pattern: str, replacement: str) -> str:
    """The text with the first match replaced; there is one."""
    result, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert count == 1, pattern
    return result


def instructions(text: str, name: str) -> int:
    return len(re.findall(rf"\bv_(?:s_|dual_)?{name}\b", text))


@pytest.mark.parametrize("target", AMD_TARGETS)
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"^\tv_div_fixup_f32.*$", ""),
        (r"^\tv_div_fmas_f32.*$", ""),
        (r"(\tv_div_fixup_f32 v\d+, v\d+), (\S+), (\S+)$", r"\1, \3, \2"),
        (r"(\tv_fma_f32 v\d+), -(v\d+)", r"\1, \2"),
        (r"(\tv_fma_f32 .*), 1.0", r"\1, 2.0"),
        (r"(\tv_div_scale_f32 v\d+, \S+), (v\d+), (v\d+), (v\d+)", r"\1, \2, \4, \4"),
    ],
)
def test_a_quotient_that_lacks_a_step_is_no_quotient(
    compiled: Any, target: str, pattern: str, replacement: str
) -> None:
    text = compiled["texts"][f"{target} quotient"]["amdgcn"]
    assert instructions(text, "div_fixup_f32") >= 1
    assert rules_of("amdgcn", text) == set()
    assert "division" in rules_of("amdgcn", changed(text, pattern, replacement))


@pytest.mark.parametrize("target", AMD_TARGETS)
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"0x4f800000", "0x4f000000"),
        (r"0x37800000", "0x38000000"),
        (r"0x0?f800000", "0x1f800000"),
        (r"(\tv_add_(?:nc_)?u32_e32 v\d+), -1,", r"\1, -2,"),
        (r"v_cmp_ge_f32", "v_cmp_gt_f32"),
        (r"(\tv_fma_f32 v\d+, )(-?)(v\d+), (v\d+), (v\d+)", r"\1\2\3, \4, \4"),
    ],
)
def test_a_root_that_is_corrected_otherwise_is_no_root(
    compiled: Any, target: str, pattern: str, replacement: str
) -> None:
    text = compiled["texts"][f"{target} root"]["amdgcn"]
    if "v_rsq_f32" in text:
        pytest.skip("this Triton's square root is a finding as it stands")
    assert instructions(text, r"sqrt_f32(?:_e32)?") >= 1
    assert rules_of("amdgcn", text) == set()
    assert "division" in rules_of("amdgcn", changed(text, pattern, replacement))


@pytest.mark.parametrize("target", AMD_TARGETS)
@pytest.mark.parametrize(
    ("kernel", "pattern", "replacement"),
    [
        ("whole_64", r"0x5f7ffffc", "0x5f800000"),
        ("whole_64", r"0xcf800000", "0xcf000000"),
        ("whole_64", r"0x2f800000", "0x2f000000"),
        ("whole_32", r"0x4f7ffffe", "0x4f800000"),
        ("whole_16", r"\tv_trunc_f32_e32", "\tv_max_f32_e32"),
        ("whole_16", r"\tv_cvt_f32_ubyte0_e32", "\tv_mov_b32_e32"),
    ],
)
def test_an_estimate_elsewhere_is_no_whole_quotient(
    compiled: Any, target: str, kernel: str, pattern: str, replacement: str
) -> None:
    text = compiled["texts"][f"{target} {kernel}"]["amdgcn"]
    assert instructions(text, r"rcp(?:_iflag)?_f32(?:_e32)?") >= 1
    assert rules_of("amdgcn", text) == set()
    assert "division" in rules_of("amdgcn", changed(text, pattern, replacement))


@pytest.mark.parametrize("target", AMD_TARGETS)
def test_an_estimate_beside_a_quotient_is_found(compiled: Any, target: str) -> None:
    text = compiled["texts"][f"{target} quotient"]["amdgcn"]
    beside = changed(text, r"(^\tv_div_fixup_f32.*$)", r"\1\n\tv_rcp_f32_e32 v9, v9")
    (finding,) = inspect({"amdgcn": beside}, native=False)
    assert (finding.rule, finding.text) == ("division", "v_rcp_f32_e32 v9, v9")


# What is collected


def test_collected_specializations_are_those_of_a_launch(collected: Any) -> None:
    made = [found for found in collected["made"] if found["kernel"] == "_quantize_kernel"]
    for target in ("sm_80", "sm_90", "gfx942"):
        mine = [found for found in made if found["target"] == target]
        assert {found["native"] for found in mine} == (
            {True, False} if target == "sm_90" else {False}
        )
        assert {found["warps"] for found in mine} == {1, 2, 4, 8}  # those of verify's sweep
        assert {found["types"]["x_ptr"] for found in mine} == {"*i32", "*i16"}
        assert not any(found["fusion"] for found in mine)
        known = [["tt.divisibility", 16]]
        known += [["tt.pointer_range", 32]] if target == "gfx942" else []
        assert all(found["known"]["codes_ptr"] == known for found in mine)
        assert len({found["text"].split(";")[0] + str(found["known"]) for found in mine}) == len(
            mine
        )
        by_default = [found for found in mine if found["default"]]
        assert {found["warps"] for found in by_default} == {4, 1}  # for few rows and for many


def test_quick_takes_one_of_each_family_in_its_default_launch(collected: Any) -> None:
    made, kept = collected["made"], collected["kept"]
    assert all(default for *_, default in kept) and len(kept) < len(made)
    everything = {(found["target"], found["kernel"], found["native"]) for found in made}
    assert {tuple(found[:3]) for found in kept} == everything


def test_the_native_path_of_the_kernels_holds_what_it_declares(collected: Any) -> None:
    assert collected["native"] == {
        "e4m3fn": [[], ["float8"]],
        "bf16": [[], ["conversion"]],
        "e2m1": [[], ["conversion"]],
    }


def test_the_smallest_that_show_every_family_and_every_number_that_is_1() -> None:
    names = ("x_ptr", "ROWS", "RULE", "NATIVE")

    def made(
        target: str, rows: int, rule: tuple[Any, ...], native: bool, **more: Any
    ) -> Specialization:
        constants = {(1,): rows, (2,): rule, (3,): native}
        return Specialization(target, "m", "k", names, {}, constants, **more)

    found = [
        made("sm_90", 4, (64, "e4m3fn", 0, False), True),
        made("sm_90", 2, (64, "e4m3fn", 0, False), True),  # of the same family, smaller
        made("sm_90", 2, (32, "e4m3fn", 0, False), True),  # and smaller still
        made("sm_90", 1, (16, "e4m3fn", 0, False), True, default=False),
        made("sm_90", 4, (64, "e2m1", 0, False), True),  # another name
        made("sm_90", 4, (64, "e4m3fn", 7, False), True),  # no longer 0
        made("sm_90", 8, (64, "e4m3fn", 1, False), True),  # 1, in a tuple
        made("sm_90", 1, (64, "e4m3fn", 1, False), True),  # smaller, and shows another 1 as well
        made("sm_90", 1, (128, "e4m3fn", 1, False), True),  # both were shown
        made("sm_90", 4, (64, "e4m3fn", 0, True), True),  # a switch in a tuple
        made("sm_90", 4, (64, "e4m3fn", 0, False), False),  # another path
        made("sm_90", 4, (64, "e4m3fn", 1, False), False),  # 1, on that path
        made("sm_80", 4, (64, "e4m3fn", 0, False), False),  # another target
    ]
    kept = {id(specialization) for specialization in choose(found, "quick")}
    assert [i for i, one in enumerate(found) if id(one) in kept] == [2, 4, 5, 7, 9, 10, 11, 12]
    assert choose(found, "full") == found


# The command


def test_green(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    command = ["audit", "--op", "exp32", "--op", "encode", "--json", str(file)]
    done = run("-m", "dsv4num", *command, "--arch", "sm_90", "--arch", "gfx942", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    rows = {(row["target"], row["kernel"]): row for row in report["rows"]}
    assert set(rows) == {
        (target, kernel)
        for target in ("sm_90", "gfx942")
        for kernel in ("_encode_kernel", "_exp32_kernel")
    }
    assert (
        rows["sm_90", "_encode_kernel"]["native"]
        == rows["sm_90", "_encode_kernel"]["portable"]
        == 5
    )
    assert rows["gfx942", "_encode_kernel"] == {
        "target": "gfx942", "kernel": "_encode_kernel", "portable": 5, "native": 0, "findings": 0,
    }  # fmt: skip
    assert report["findings"] == 0 and report["found"] == []
    assert report["specializations"] == sum(r["portable"] + r["native"] for r in report["rows"])
    assert report["launched"] > report["specializations"]
    assert f"{report['specializations']} of {report['launched']} specializations" in done.stdout
    assert "5+5" in done.stdout


def test_red() -> None:
    done = run("-c", "import test_audit; test_audit.print_red_run()")
    assert done.returncode == 1, done.stdout + done.stderr
    for target in (NVIDIA, AMD):
        assert f"{target} exp32_from_the_library: approximation" in done.stdout
    assert "test_audit.py:" in done.stdout and "math.exp" in done.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--arch", "sm_75"], "--arch"),
        (["--op", "encod"], "--op"),
        (["--jobs", "-1"], "--jobs"),
        (["--json", "/nowhere/at/all.json"], "--json"),
        (["--record", __file__], "--record"),
        (["--record", "folder", "--arch", "sm_80"], "a run of everything"),
        (["--record", "folder", "--op", "encode"], "a run of everything"),
    ],
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    before = os.environ.get("TRITON_INTERPRET")
    assert main(["audit", *options]) == 2
    assert complaint in capsys.readouterr().err
    assert os.environ.get("TRITON_INTERPRET") == before


def test_the_record_is_small_and_says_what_was_audited(tmp_path: Path) -> None:
    rows = [
        {"target": target, "kernel": kernel, "portable": 2, "native": 1, "findings": 0}
        for target in ARCHITECTURES
        for kernel in ("a", "b")
    ]
    whole = {
        "environment": {"triton": "3.9"}, "date": "2026-01-01T00:00:00Z", "level": "full",
        "seconds": 1.0, "launched": 66, "specializations": 66, "findings": 0,
        "rules": {rule.name: rule.why for rule in RULES}, "rows": rows, "found": [],
    }  # fmt: skip
    path = _write_record(tmp_path / "new", whole)
    record = json.loads(path.read_text())
    assert path.name == "audit.json" and path.stat().st_size < 100_000
    assert record["targets"]["gfx950"] == {"portable": 4, "native": 2, "findings": 0}
    assert list(record["targets"]) == list(ARCHITECTURES)
    assert "gpu/arithmetic.py" in record["sources"] and len(record["rules"]) == len(RULES)


def test_findings_as_plain_data() -> None:
    made = Specialization("sm_80", "m", "k", ("N",), {"N": "constexpr"}, {(0,): 3})
    findings = inspect({"ptx": "  ex2.approx.ftz.f32 %f1, %f2;"}, native=False)
    (found,) = _found([Result(made, findings)])
    assert found["rule"] == "flush" and found["stage"] == "ptx" and found["target"] == "sm_80"
    assert "N=3" in found["specialization"] and found["text"] == "ex2.approx.ftz.f32 %f1, %f2"
