"""The rules that compiled kernels must keep, and the search for what breaks them.

Four forms of a kernel are read: Triton's IR (`ttir`), which still shows reductions and permissions;
LLVM IR (`llir`); and what the target runs, PTX (`ptx`) or AMDGCN (`amdgcn`). Each rule names what it
does not allow in each form. The last rule of the table is the other way round: a floating-point
instruction that no line of the table knows is a finding, too, so that a new instruction of a new
compiler does not pass unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dsv4num.audit.expansions import Listing, operation_of

Stage = Literal["ttir", "llir", "ptx", "amdgcn"]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: what a finding is called.
        why: what a break of it does to the bytes.
        patterns: what is not allowed, by form; see `_statement` for what the pattern is matched with.
        portable_only: whether the native path may break it.
    """

    name: str
    why: str
    patterns: dict[Stage, str]
    portable_only: bool = False


@dataclass(frozen=True, order=True)
class Finding:
    """One break of a rule.

    Attributes:
        rule: its name.
        stage: the form that it was found in.
        source: file and line of the kernel's source, or "" if the compiler did not say.
        text: the line of the compiled code.
    """

    rule: str
    stage: str
    source: str
    text: str


#: Element types of PTX that are floating point.
_PTX_FLOAT = r"(?:b?f16|f32|f64)(?:x2)?|tf32|e\dm\d(?:x[24])?|ue8m0(?:x2)?"
#: Conversions of PTX that both paths may use: whole numbers from and to fp32.
_PTX_CONVERSIONS = r"cvt\.rn\.f32\.[us](?:8|16|32)|cvt\.rzi\.[us]32\.f32"
#: Those of the native path: `cvt` of sm_89 and later, which round as SPEC section 2 says; the way back
#: from E4M3 through fp16, which is exact; and pairs of fp16 that E2M1 codes are taken from.
_PTX_NATIVE_CONVERSIONS = (
    r"cvt\.rn\.satfinite\.e4m3x2\.f32|cvt\.rn\.f16x2\.(?:e4m3x2|f32)|cvt\.f32\.f16"
    r"|cvt\.rn\.bf16(?:x2)?\.f32"
)
_PTX_EXACT = (
    r"(?:add|sub|mul|div|sqrt|rcp)\.rn\.f32(?:x2)?|(?:abs|neg|copysign)\.f32(?:x2)?"
    r"|(?:min|max)(?:\.NaN)?\.f32|setp?\.\w+(?:\.\w+)?\.f32|selp\.f32|redux\.sync\.(?:min|max)\S*\.f32"
    rf"|(?:abs|min)\.f16x2|{_PTX_CONVERSIONS}|{_PTX_NATIVE_CONVERSIONS}"
)

#: Operations of AMDGCN that are exact, or round once and to nearest. The prefixes and suffixes of the
#: encodings are taken off: v_add_f32_e32, v_dual_add_f32 and s_add_f32 are all add_f32.
_AMD_EXACT = (
    r"(?:pk_)?(?:add|sub|subrev|mul)_f32|(?:pk_)?(?:min|max|med|minimum|maximum)\w*_f32"
    r"|cmpx?_\w+_f32|trunc_f32|cvt_f32_(?:u32|i32|ubyte[0-3])|cvt_[ui]32_f32"
)

_LLVM_VALUE = r"(?:<\d+ x )?(?:float|half|bfloat|double|fp128)\b"
#: Calls of LLVM IR that may take or give floats.
_LLVM_EXACT = (
    r"llvm\.(?:fabs|sqrt|copysign|canonicalize|is\.fpclass|(?:max|min)(?:num|imum|imumnum)"
    r"|vector\.reduce\.f(?:add|max|min|maximum|minimum)"
    r"|nvvm\.(?:div|sqrt|add|mul)\.rn\.f|nvvm\.fabs\S*|nvvm\.fm(?:ax|in)\S*"
    r"|nvvm\.(?:shfl|redux|ldmatrix|stmatrix)\S*"
    r"|amdgcn\.(?:raw\.ptr\.buffer\.(?:load|store)|update\.dpp|ds\.bpermute|readlane|readfirstlane"
    r"|permlane\w*|mov\.dpp|ballot|set\.inactive|ds\.swizzle|fmed3))(?:[.\w]*)"
)

#: Instructions that only a known expansion may contain: `Listing.explained` says which do.
_AMD_EXPANSION = r"(?:fma|fmac|fmamk|fmaak|rcp|rcp_iflag|sqrt|div_scale|div_fmas|div_fixup)_f32"

RULES = (
    Rule(
        "flush",
        "a subnormal becomes zero",
        {
            "llir": r"(?i).*(\bdenormal\S*(preserve-?sign|positive-?zero)|f32ftz\W+true"
            r"|@llvm\.\S*\bftz\b)",
            "ptx": r"\S*\.ftz\b",
            "amdgcn": r"float_denorm_mode_(32|16_64) [012]|denorm_mode|setreg\w* hwreg\(HW_REG_MODE"
            r"|setreg\w* hwreg\(1\b|(?:mac|mad)(?:_legacy|mk|ak)?_f32",
        },
    ),
    Rule(
        "fast-math",
        "the compiler may assume what does not hold, or reorder",
        {
            "ttir": r".*\bfastmath<(?!none)",
            "llir": r"[^!]*(?<![.\w])(fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)\b"
            r'|.*"(unsafe-fp-math|no-(infs|nans|signed-zeros)-fp-math|approx-func-fp-math)"="true"',
        },
    ),
    Rule(
        "contraction",
        "a product is not rounded before it is added",
        {
            "ttir": r".*\b(math\.fma|tt\.dot\w*)\b",
            "llir": r".*@llvm\.(fma|fmuladd|nvvm\.(fma|w?g?mma)"
            r"|amdgcn\.(s?w?mfma\w*|wmma|fdot|fma|fmad))\b",
            "ptx": rf"(fma|mad)\.\S*({_PTX_FLOAT})\b|w?g?mma\.|tcgen05\.mma|(add|sub|mul)\.f(32|64)\b",
            "amdgcn": r"(?:pk_)?(?:fma|fmac|mac|mad)\w*_(?:f16|f32|f64|bf16)|fma_mix\w*|dot\d\w*f\w*"
            r"|(?:mfma|smfmac|wmma|swmmac)_\w+",
        },
    ),
    Rule(
        "approximation",
        "a result that is not the nearest number, and differs from target to target",
        {
            "ttir": r".*\b(math\.(?!absf|absi|fma|floor|ceil|trunc|round)\w+|tt\.extern_elementwise)\b",
            "llir": r".*@(__\w+|llvm\.(exp|exp2|exp10|log|log2|log10|a?sinh?|a?cosh?|a?tanh?|atan2"
            r"|pow|powi|nvvm\.\S*(approx|full|ex2|lg2)\S*|nvvm\.(sin|cos|tanh|rsqrt)\S*"
            r"|amdgcn\.(rcp|rsq|sqrt|sin|cos|log|exp2|tanh|fdiv\.fast)\w*))\b",
            "ptx": r"\S*\.(approx|full)\b|(ex2|lg2|sin|cos|tanh|rsqrt)\.|call\b",
            "amdgcn": r"(?:exp|log|sin|cos|rsq|tanh|rsq_clamp|rcp_clamp|rcp_legacy|log_clamp)_f\w+",
        },
    ),
    Rule(
        "division",
        "a quotient or a root that is not rounded to nearest",
        {
            "llir": r".*(\bfdiv|@llvm\.sqrt)\b.*!fpmath|.*\bfrem\b"
            r"|.*@llvm\.nvvm\.(div|sqrt|rcp)\.(?!rn\.f\b)",
            "ptx": r"(div|sqrt|rcp)\.(?!rn\.)\S*f(32|64|16)",
            "amdgcn": r"(?:rcp|rcp_iflag|sqrt|div_scale|div_fmas|div_fixup)_(?:f16|f32|f64)"
            r"|float_round_mode_(32|16_64) [123]|round_mode",
        },
    ),
    Rule(
        "float8",
        "a conversion that only some targets have, or a type that they read differently",
        {
            "ttir": r".*(\b|x)f[468]E\d",
            "llir": r".*@llvm\.\S*(e4m3|e5m2|fp8|bf8|e2m1|f8f6f4)",
            "ptx": r"\S*\.(e4m3|e5m2|e2m1|e3m2|e2m3|ue8m0)",
            "amdgcn": r"\w*(fp8|bf8|fp4|fp6|bf6)\w*",
        },
        portable_only=True,
    ),
    Rule(
        "conversion",
        "a rounding that the path does not declare for this target",
        {
            "ttir": r".*\b(tt\.fp_to_fp|arith\.extf|arith\.truncf)\b",
            "llir": r".*\b(fptrunc|fpext)\b"
            r"|.*\b(fptosi|fptoui|sitofp|uitofp) .*\b(half|bfloat|double)\b",
            "ptx": rf"(?!(?:{_PTX_CONVERSIONS})\s)cvt\.\S*\b({_PTX_FLOAT})\b",
            "amdgcn": r"(?!cvt_f32_(?:u32|i32|ubyte[0-3])\b|cvt_[ui]32_f32\b)cvt_\w*f\d\w*",
        },
    ),
    Rule(
        "order",
        "the order of the additions is not fixed",
        {
            "ttir": r".*\b(tt\.atomic_rmw fadd|(tt\.reduce|tt\.scan) of arith\.(addf|mulf|subf))\b",
            "llir": r".*\batomicrmw (volatile )?f(add|sub)\b|.*@llvm\.\S*atomic\S*(fadd|add\.f)\S*"
            r"|.*\breassoc\b.*@llvm\.vector\.reduce\.f(add|mul)",
            "ptx": rf"(atom|red)\.\S*add\S*\.({_PTX_FLOAT})\b",
            "amdgcn": r"\w*atomic_(?:pk_)?(?:add|sub)_(?:f|bf)\w+|ds_(?:pk_)?add_(?:rtn_)?b?f\w+",
        },
    ),
    Rule(
        "unknown",
        "a floating-point instruction that this table does not know",
        {
            "llir": rf".*\b(fadd|fsub|fmul|fdiv|fneg|frem)\b.* (<\d+ x )?(half|bfloat|double|fp128)\b"
            rf"|.*\bcall\b(?!.*@(?:{_LLVM_EXACT})\()(.*\bcall\b.*{_LLVM_VALUE}.*@"
            rf"|.*@(?!llvm\.(?:dbg|lifetime|assume))[^(]+\(.*{_LLVM_VALUE})",
            "ptx": rf"(?!(?:{_PTX_EXACT})\s)(?!(?:ld|st|mov)\.)\S*\.({_PTX_FLOAT})\b",
            "amdgcn": rf"(?!(?:{_AMD_EXACT}|{_AMD_EXPANSION})\b)\w*_b?f(?:16|32|64)\w*",
        },
    ),
)
_COMPILED = {
    stage: [(rule, re.compile(rule.patterns[stage])) for rule in RULES if stage in rule.patterns]
    for stage in ("ttir", "llir", "ptx", "amdgcn")
}
_NATIVE_PTX = re.compile(_PTX_NATIVE_CONVERSIONS + r"(?!\S)")
_NATIVE_IR = re.compile(r".*\b(fptrunc .*float.* to .*bfloat|arith\.truncf .*f32.* to .*bf16)")


def inspect(stages: dict[str, str], *, native: bool) -> list[Finding]:
    """What breaks a rule in the forms of one compiled kernel.

    Args:
        stages: its text by form: `ttir`, `llir`, and `ptx` or `amdgcn`.
        native: whether it takes the native path, which may use the conversions that it declares.

    Returns:
        The findings, without repetition.

    Example:
        >>> inspect({"ptx": "  fma.rn.f32 %f1, %f2, %f3, %f4;"}, native=False)
        [Finding(rule='contraction', stage='ptx', source='', text='fma.rn.f32 %f1, %f2, %f3, %f4')]
    """
    readers = {"ttir": _read_ttir, "llir": _read_llir, "ptx": _read_ptx, "amdgcn": _read_amdgcn}
    found: dict[Finding, None] = {}
    for stage, text in stages.items():
        for finding in readers[stage](text, native):
            found.setdefault(finding)
    return list(found)


def _broken(stage: Stage, statement: str, native: bool) -> Rule | None:
    """The first rule that a statement breaks."""
    for rule, pattern in _COMPILED[stage]:
        if native and rule.portable_only:
            continue
        if pattern.match(statement):
            return rule
    return None


# Triton's IR

_TTIR_LOCATION = re.compile(r"loc\((#\w+)\)\s*$")
_TTIR_SOURCE = re.compile(r'"([^"]+)":(\d+)')


def _read_ttir(text: str, native: bool) -> Iterator[Finding]:
    """Statements are lines; the region of a reduction is read as one operation on each of its own."""
    sources = dict(re.findall(r"^(#\w+) = loc\((.*)\)$", text, re.MULTILINE))
    lines = text.splitlines()
    region = ""
    for number, line in enumerate(lines):
        opened = re.search(r'"(tt\.reduce|tt\.scan)".*axis = (\d+)', line)
        if opened and not _is_one_operation(opened[1], int(opened[2]), lines[number:]):
            region = opened[1]
        operation = re.search(r"\barith\.\w+", line)
        statement = f"{region} of {operation[0]}" if region and operation else line
        if "})" in line:
            region = ""
        if line.startswith("#") or (native and _NATIVE_IR.match(line)):
            continue
        rule = _broken("ttir", statement, native)
        if rule is not None:
            place = _TTIR_LOCATION.search(line)
            source = _ttir_source(place[1], sources) if place else ""
            yield Finding(rule.name, "ttir", source, _TTIR_LOCATION.sub("", line).strip())


def _is_one_operation(name: str, axis: int, lines: list[str]) -> bool:
    """Whether a reduction has an axis of two elements, so that there is one operation and no order."""
    closing = next((line for line in lines if "})" in line), "")
    shape = re.search(r"\}\) : \(tensor<((?:\d+x)+)", closing)
    lengths = shape[1].split("x")[:-1] if shape else []
    return name == "tt.reduce" and axis < len(lengths) and int(lengths[axis]) <= 2


def _ttir_source(name: str, sources: dict[str, str]) -> str:
    """The innermost place of a location."""
    for _ in range(9):
        text = sources.get(name, "")
        place = _TTIR_SOURCE.search(text)
        if place:
            return f"{place[1].rsplit('/', 1)[-1]}:{place[2]}"
        inner = re.search(r"#\w+", text)
        if inner is None:
            break
        name = inner[0]
    return ""


# LLVM IR

_QUOTED = re.compile(r'asm (sideeffect )?"[^"]*", "[^"]*"')
_DEFINITION = re.compile(r"\s+(%[\w.]+) = (.*)")
_NAN_FREE = re.compile(
    r"\s+%[\w.]+ = fmul nnan (?:<\d+ x float>|float) (%[\w.]+), (.*?)(?:, !dbg .*)?$"
)


def _read_llir(text: str, native: bool) -> Iterator[Finding]:
    """Statements are lines of functions and of attributes; declarations and inline assembly are not."""
    definitions: dict[str, str] = {}
    for line in text.splitlines():
        statement = _QUOTED.sub("asm", line)
        if not line.startswith((" ", "attributes", "!")) or line.startswith("!"):
            continue
        defined = _DEFINITION.match(line)
        if defined:
            definitions[defined[1]] = defined[2]
        if native and _NATIVE_IR.match(line):
            continue
        if "nnan" in line and _cannot_be_nan(line, definitions):
            statement = statement.replace(" nnan", "")
        rule = _broken("llir", statement, native)
        if rule is not None:
            mark = re.search(r", !dbg (!\d+)", line)
            source = _llir_source(mark[1], text) if mark else ""
            yield Finding(rule.name, "llir", source, re.sub(r", !dbg !\d+", "", line).strip())


def _cannot_be_nan(line: str, definitions: dict[str, str]) -> bool:
    """Whether a product is of a finite constant and of what was a whole number, or small bits.

    LLVM writes down what it proved, that such a product is no NaN. It is a fact, not a permission.
    """
    product = _NAN_FREE.match(line)
    if product is None:
        return False
    made = definitions.get(product[1], "")
    if made.startswith("bitcast"):
        operand = re.search(r"%[\w.]+", made)
        if operand is None or _largest(operand[0], definitions) >= 0x7F800000:
            return False
    elif not made.startswith(("uitofp", "sitofp")):
        return False
    numbers = re.findall(r"f?0x[0-9A-Fa-f]+|[-+]?\d+\.\d+e[-+]\d+", product[2])
    return bool(numbers) and all(_is_finite(number) for number in numbers)


_MASKED = re.compile(r"(and|shl|lshr) .*?(%[\w.]+), (?:splat \(i\d+ )?(\d+)\)?")
_WIDENED = re.compile(r"zext (nneg )?(?:<\d+ x )?i(\d+)")
_MOVED = re.compile(r"(?:insertelement|extractelement|shufflevector|select|freeze) ")


def _largest(name: str, definitions: dict[str, str]) -> int:
    """The most that an unsigned number of 32 bits can be, by the masks and shifts that made it."""
    made = definitions.get(name, "")
    widened = _WIDENED.match(made)
    if widened:
        return int((1 << (int(widened[2]) - bool(widened[1]))) - 1)
    masked = _MASKED.match(made)
    if masked:
        constant = int(masked[3])
        if masked[1] == "and":
            return constant
        below = _largest(masked[2], definitions)
        return below << constant if masked[1] == "shl" else below >> constant
    if _MOVED.match(made) and "i32 -" not in made:
        operands = re.findall(r"i32>? (%[\w.]+)", made)
        constants = map(int, re.findall(r"i32 (\d+)", made))
        known = (*constants, *(_largest(operand, definitions) for operand in operands))
        return max(known, default=0xFFFFFFFF)
    return 0xFFFFFFFF


def _is_finite(number: str) -> bool:
    """Whether a constant of LLVM IR is finite: decimal, fp32 bits (f0x) or fp64 bits (0x)."""
    if "0x" not in number:
        return True
    exponent = 0x7F800000 if number.startswith("f") else 0x7FF << 52
    return int(number.removeprefix("f"), 16) & exponent != exponent


def _llir_source(mark: str, text: str) -> str:
    """File and line of a debug location."""
    place = re.search(rf"^{mark} = .*DILocation\(line: (\d+),.* scope: (!\d+)", text, re.MULTILINE)
    if place is None:
        return ""
    scope = re.search(rf"^{place[2]} = .*\bfile: (!\d+)", text, re.MULTILINE)
    name = scope and re.search(rf'^{scope[1]} = .*filename: "([^"]*)"', text, re.MULTILINE)
    return f"{name[1]}:{place[1]}" if name else f":{place[1]}"


# PTX

_PTX_PREDICATE = re.compile(r"@!?%?[\w$]+\s+")
_PTX_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LINE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")


def _read_ptx(text: str, native: bool) -> Iterator[Finding]:
    """Statements are instructions without their predicate."""
    files = {number: name.rsplit("/", 1)[-1] for number, name in _PTX_FILE.findall(text)}
    source = ""
    for line in text.splitlines():
        place = _LINE.match(line)
        if place:
            source = f"{files.get(place[1], '')}:{place[2]}"
        # Inline assembly may hold several on a line. What is left of a list of registers is none.
        for part in re.split(r"[;{}]", line.split("//")[0]):
            statement = _PTX_PREDICATE.sub("", part.strip())
            if not statement[:1].isalpha() or (native and _NATIVE_PTX.match(statement)):
                continue
            rule = _broken("ptx", statement, native)
            if rule is not None:
                yield Finding(rule.name, "ptx", source, statement)


# AMDGCN

_AMD_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"[^"]*"\s+"([^"]*)"')


def _read_amdgcn(text: str, native: bool) -> Iterator[Finding]:
    """Statements are operations without the marks of their encoding, and the modes of the kernel."""
    files = dict(_AMD_FILE.findall(text))
    listing: Listing | None = None
    source = ""
    for number, line in enumerate(text.splitlines()):
        place = _LINE.match(line)
        if place:
            source = f"{files.get(place[1], '')}:{place[2]}"
        for part in line.split(";")[0].split("::") if "\t" in line else ():
            statement = operation_of(part)
            rule = statement and _broken("amdgcn", statement, native)
            if not rule:
                continue
            if rule.name in ("contraction", "division", "flush"):
                listing = listing or Listing(text)
                if (number, statement.split()[0]) in listing.explained:
                    continue
            yield Finding(rule.name, "amdgcn", source, part.strip())
