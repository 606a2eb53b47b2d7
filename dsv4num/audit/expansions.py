"""The instruction sequences that AMD targets divide and take roots with, recognised in a listing.

AMD has no instruction that divides, neither floats nor whole numbers, and none whose square root is
rounded to nearest. The compiler writes known sequences instead, of a hardware estimate and fused steps
that correct it. An estimate or a fused step is in order only as a part of one of them, so each is
followed here through the values that it reads, whatever else the scheduler put in between:

* quotients of fp32: `v_div_scale` twice, `v_rcp`, five fused steps, `v_div_fmas`, `v_div_fixup`;
* roots of fp32: the operand scaled where it is small, `v_sqrt`, the neighbour on either side tried;
* quotients of 64-bit and 32-bit whole numbers, whose first guess is a reciprocal in fp32.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_MODE = re.compile(r"\s*\.amdhsa_(float_(?:denorm|round)_mode_\w+) (\d)")
_PREFIX = re.compile(r"^(?:v_dual_|v_s_|v_|s_)")
_SUFFIX = re.compile(r"(?:_e32|_e64|_dpp8|_dpp|_sdwa)+$")


def operation_of(text: str) -> str:
    """An instruction without the marks of its encoding, or a mode of the kernel; "" for the rest.

    Example:
        >>> operation_of("v_dual_fmac_f32 v1, v2, v3")
        'fmac_f32 v1, v2, v3'
    """
    mode = _MODE.match(text)
    if mode:
        return f"{mode[1]} {mode[2]}"
    name, _, rest = text.strip().partition(" ")
    if not name or not name[0].isalpha() or name.endswith(":"):
        return ""
    bare = _SUFFIX.sub("", _PREFIX.sub("", name)).replace("_num_f", "_f")
    return f"{bare} {rest.strip()}".strip()


@dataclass(frozen=True)
class Instruction:
    """One instruction: where it stands, and what it writes and reads, register by register.

    A fused multiply-add reads a, b and c of a * b + c, in this order: `fma`, `fmamk` and `fmaak` do as
    they are written, and `fmac` adds what it overwrites.
    """

    line: int
    name: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    modified: bool  # clamped or scaled on the way out


#: What an operand holds: whether its sign is flipped, and where it comes from: the bits of a constant,
#: or the instruction that made it and which of its results it is.
Value = tuple[bool, Any]

_RANGE = re.compile(r"([sva]|ttmp)\[(\d+):(\d+)\]$")
_REGISTER = re.compile(r"(?:[sva]|ttmp)\d+$|(?:vcc|exec)_(?:lo|hi)$|slot\d+$")
_NO_RESULT = re.compile(
    r"(?:global|buffer|flat|scratch|ds|image|s)_(?:store|write|atomic|wait|barrier|wb|inv)|ds_add|cmpx"
    r"|(?:nop|cmp|bitcmp|branch|cbranch|endpgm|sendmsg|delay|clause|setprio|sleep|setreg|denorm|trap)"
)
_TWO_RESULTS = re.compile(
    r"div_scale|(?:add|sub(?:rev)?|addc|subb(?:rev)?)_co|mad(?:_co)?_[ui]64|swap"
)
_COPIES = re.compile(r"mov_b32$|mov_b64$|accvgpr_(?:read|write|mov)_b32$|readfirstlane_b32$")
_FUSED = ("fma_f32", "fmac_f32", "fmamk_f32", "fmaak_f32")
#: gfx90a makes the first guess of a whole quotient with those that round twice and flush.
_MULTIPLY_ADD = (*_FUSED, "mad_f32", "mac_f32", "madmk_f32", "madak_f32")
_FROM_WHOLE = ("cvt_f32_u32", "cvt_f32_i32", *(f"cvt_f32_ubyte{byte}" for byte in range(4)))
_TO_WHOLE = ("cvt_u32_f32", "cvt_i32_f32")
_ADDITIONS = ("add_u32", "add_nc_u32", "add_i32", "add_co_i32")

_ONE, _SIGN, _MINUS_ONE = 0x3F800000, 0x80000000, 0xFFFFFFFF  # the last is a whole number
_TWO_32, _TWO_M16, _TWO_M32, _TWO_M96 = 0x4F800000, 0x37800000, 0x2F800000, 0x0F800000
# A little less, so that a guess is never too high.
_BELOW_TWO_32, _BELOW_TWO_64 = 0x4F7FFFFE, 0x5F7FFFFC


def _parse(text: str, line: int, comment: str) -> Instruction | None:
    """An instruction with its operands, or None."""
    name, _, rest = operation_of(text).partition(" ")
    if not name:
        return None
    operands = re.split(r",\s*", rest) if rest else []
    modified = False
    if operands:
        operands[-1], _, marks = operands[-1].partition(" ")
        modified = bool(re.search(r"clamp|mul:|div:", marks))
        if "Folded" in comment and re.search(r"store|load", name):
            return _spill(name, operands, marks, line)
    if name in ("fmac_f32", "mac_f32"):
        operands.append(operands[0])
    elif name == "div_fmas_f32" or (name == "cndmask_b32" and len(operands) == 3):
        operands.append("vcc_lo")
    count = 0 if _no_result(text, name) else 2 if _TWO_RESULTS.match(name) else 1
    writes = [register for operand in operands[:count] for register in _expand(operand)]
    reads = [register for operand in operands[count:] for register in _expand(operand)]
    return Instruction(line, name, tuple(writes), tuple(reads), modified)


def _no_result(text: str, name: str) -> bool:
    """Whether the first operand is read; a comparison of the vector unit does write its first one."""
    if name.startswith("cmp_"):
        return text.strip().startswith("s_")
    return bool(_NO_RESULT.match(name))


def _expand(operand: str) -> list[str]:
    """The registers of an operand."""
    wide = _RANGE.match(operand)
    if wide:
        return [f"{wide[1]}{number}" for number in range(int(wide[2]), int(wide[3]) + 1)]
    return [f"{operand}_lo", f"{operand}_hi"] if operand in ("vcc", "exec") else [operand]


def _spill(name: str, operands: list[str], marks: str, line: int) -> Instruction:
    """A register put into memory or taken back, as a copy."""
    offset = re.search(r"offset:(\d+)", marks)
    first = int(offset[1]) if offset else 0
    registers = next(_expand(o) for o in operands if re.match(r"[va](\d|\[)", o))
    slots = tuple(f"slot{first + 4 * number}" for number in range(len(registers)))
    given = (tuple(registers), slots) if "load" in name else (slots, tuple(registers))
    return Instruction(line, "mov_b32", *given, modified=False)


def _constant(text: str) -> int | None:
    """The 32 bits of a literal."""
    if re.match(r"-?\d+\.\d+$", text):
        return int.from_bytes(struct.pack("<f", float(text)), "little")
    if re.match(r"-?(0x[0-9a-f]+|\d+)$", text):
        return int(text, 0) & 0xFFFFFFFF
    return None


class Listing:
    """The instructions of a kernel in AMDGCN, with the values that they read."""

    def __init__(self, text: str) -> None:
        self._code: list[Instruction] = []
        self._blocks: list[tuple[int, int]] = []  # first instruction, one past the last
        self._before: dict[int, list[int]] = defaultdict(list)  # blocks that lead to a block
        self._read(text)
        self._block_of = [0] * len(self._code)
        self._writes: dict[tuple[int, str], list[int]] = defaultdict(list)
        for block, (first, end) in enumerate(self._blocks):
            for index in range(first, end):
                self._block_of[index] = block
                for register in self._code[index].writes:
                    self._writes[block, register].append(index)
        self._values: dict[tuple[int, int], Value] = {}

    def _read(self, text: str) -> None:
        """Finds instructions and blocks."""
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        first, falls = 0, False
        lines = text.splitlines()
        for number, line in enumerate([*lines, ".LBB_end:"]):
            bare, _, comment = line.partition(";")
            label = re.match(r"(\.?L?BB\w+):", bare)
            if bare.startswith("\t") and not bare.startswith("\t."):
                parts = (_parse(part, number, comment) for part in bare.split("::"))
                self._code += [instruction for instruction in parts if instruction is not None]
            jump = re.match(r"\ts_(c?branch|endpgm|setpc)\w*\s*(\S*)", bare)
            if not (label or jump):
                continue
            if jump or len(self._code) > first:  # a label at the start of a block ends none
                if falls and self._blocks:
                    self._before[len(self._blocks)].append(len(self._blocks) - 1)
                if jump:
                    jumps.append((len(self._blocks), jump[2]))
                self._blocks.append((first, len(self._code)))
                first, falls = len(self._code), not jump or jump[1] == "cbranch"
            if label:
                labels[label[1]] = len(self._blocks)
        for block, name in jumps:
            if name in labels:
                self._before[labels[name]].append(block)

    # Values

    def _value(self, index: int, operand: int) -> Value:
        """What an operand holds, seen through copies and changes of sign."""
        key = (index, operand)
        if key not in self._values:
            self._values[key] = (False, ("loop", key))  # while it is looked up: made from itself
            self._values[key] = self._look_up(index, self._code[index].reads[operand])
        return self._values[key]

    def _look_up(self, index: int, text: str) -> Value:
        constant = _constant(text)
        if constant is not None:
            return False, constant
        negative, text = text.startswith("-"), text.removeprefix("-")
        if text.startswith("|"):
            return negative, ("magnitude", self._look_up(index, text.strip("|"))[1])
        if not _REGISTER.match(text):
            return negative, ("unknown", index, text)
        makers = self._makers(self._block_of[index], text, index, set())
        found = {self._through(maker, text) for maker in makers}
        flipped, source = found.pop()
        if found:
            return negative, ("one of", *sorted(makers))
        if isinstance(source, int) and negative:
            return False, source ^ _SIGN
        return flipped != negative, source

    def _makers(self, block: int, register: str, before: int, seen: set[int]) -> set[int]:
        """The instructions that may have written a register last; -1 for what the kernel began with."""
        written = self._writes.get((block, register), [])
        at = bisect_left(written, before)
        # Both halves of a dual instruction read before either writes.
        if at and self._same_line(written[at - 1], before):
            at -= 1
        if at:
            return {written[at - 1]}
        if not self._before[block]:
            return {-1}
        found: set[int] = set()
        for previous in self._before[block]:
            if previous not in seen:
                seen.add(previous)
                found |= self._makers(previous, register, self._blocks[previous][1], seen)
        return found

    def _same_line(self, first: int, second: int) -> bool:
        return second < len(self._code) and self._code[first].line == self._code[second].line

    def _through(self, maker: int, register: str) -> Value:
        """What an instruction put into a register: its own result, or what it copied."""
        if maker < 0:
            return False, ("given", register)
        instruction = self._code[maker]
        place = instruction.writes.index(register)
        if _COPIES.match(instruction.name) and len(instruction.reads) == len(instruction.writes):
            return self._value(maker, place)
        if instruction.name == "xor_b32" and len(instruction.reads) == 2:
            for sign, other in ((0, 1), (1, 0)):
                if self._value(maker, sign) == (False, _SIGN):
                    flipped, source = self._value(maker, other)
                    return not flipped, source
        return False, (maker, place)

    def _values_of(self, index: int) -> tuple[Value, ...]:
        return tuple(self._value(index, operand) for operand in range(len(self._code[index].reads)))

    def _made_by(self, value: Value, *names: str) -> int | None:
        """The instruction of one of these names whose first result a value is."""
        negative, source = value
        if negative or not isinstance(source, tuple) or not isinstance(source[0], int) or source[1]:
            return None
        found = self._code[source[0]]
        return source[0] if found.name in names and not found.modified else None

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The instructions that read a result of an instruction, copies left out."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, instruction in enumerate(self._code):
            if _COPIES.match(instruction.name):
                continue
            for _, value in self._values_of(index):
                source = value
                while isinstance(source, tuple) and source[0] == "magnitude":
                    source = source[1]
                if isinstance(source, tuple):
                    makers = source[1:] if source[0] == "one of" else source[:1]
                    for maker in makers:
                        if isinstance(maker, int):
                            found[maker].append(index)
        return found

    # Expansions

    @cached_property
    def explained(self) -> set[tuple[int, str]]:
        """Line and operation of every instruction that is part of a known expansion."""
        found: set[int] = set()
        for index, instruction in enumerate(self._code):
            for expansion in _EXPANSIONS.get(instruction.name, ()):
                with suppress(_OtherwiseError):
                    found |= expansion(self, index)
                    break
        return {(self._code[index].line, self._code[index].name) for index in found}

    def _need(self, value: Value, *names: str) -> int:
        """The instruction of one of these names that made a value."""
        made = self._made_by(value, *names)
        if made is None:
            raise _OtherwiseError
        return made

    def _fused(
        self, value: Value, names: tuple[str, ...] = _FUSED
    ) -> tuple[int, Value, Value, Value]:
        """The multiply-add that made a value, and a, b and c of its a * b + c."""
        index = self._need(value, *names)
        a, b, c = self._values_of(index)
        return index, a, b, c

    def _product(self, value: Value, factor: Value) -> tuple[int, Value]:
        """The product that made a value, and its other factor."""
        index = self._need(value, "mul_f32")
        a, b = self._values_of(index)
        _check(factor in (a, b))
        return index, b if a == factor else a

    def _quotient(self, fixup: int) -> set[int]:
        """A quotient of fp32 that ends in this `v_div_fixup`."""
        estimate, divisor, dividend = self._values_of(fixup)
        last = self._need(estimate, "div_fmas_f32")
        remainder, reciprocal, quotient, scaled = self._values_of(last)
        f4, a4, b4, numerator = self._fused(remainder)
        f1, a1, b1, guess = self._fused(reciprocal)
        f3, a3, b3, first = self._fused(quotient)
        rcp = self._need(guess, "rcp_f32")
        denominator = self._value(rcp, 0)
        below = self._need(denominator, "div_scale_f32")
        above = self._need(numerator, "div_scale_f32")
        _check(self._values_of(below) == (divisor, divisor, dividend))
        _check(self._values_of(above) == (dividend, divisor, dividend))
        _check(scaled[1] == (above, 1))
        f0, a0, b0, one = self._fused(a1 if b1 == guess else b1)
        _check(_is_product((a1, b1), ((False, (f0, 0)), guess)))
        _check(_is_product((a0, b0), (_negated(denominator), guess)) and one == (False, _ONE))
        mul, factor = self._product(first, reciprocal)
        _check(factor == numerator)
        f2, a2, b2, c2 = self._fused(a3 if b3 == reciprocal else b3)
        _check(_is_product((a3, b3), ((False, (f2, 0)), reciprocal)))
        _check(_is_product((a2, b2), (_negated(denominator), first)) and c2 == numerator)
        _check(_is_product((a4, b4), (_negated(denominator), quotient)))
        return {fixup, last, f0, f1, f2, f3, f4, mul, rcp, below, above}

    def _root(self, root: int) -> set[int]:
        """A root of fp32 around this `v_sqrt`."""
        guess: Value = (False, (root, 0))
        operand = self._value(root, 0)
        given, scaled, small = self._selected(operand)
        self._product_of(scaled, given, _TWO_32)
        self._compared(small, (False, _TWO_M96), given, "gt", "lt")
        steps: dict[int, tuple[int, Value]] = {}
        for index in self._readers[root]:
            if self._code[index].name in _ADDITIONS:
                a, b = self._values_of(index)[:2]
                step = (b if a == guess else a)[1]
                for fused in self._readers[index]:
                    if self._code[fused].name in _FUSED and step in (1, _MINUS_ONE):
                        x, y, c = self._values_of(fused)
                        neighbour: Value = (False, (index, 0))
                        _check(_is_product((x, y), (_negated(neighbour), guess)) and c == operand)
                        steps[step] = fused, neighbour
        _check(len(steps) == 2)
        (down, below), (up, above) = steps[_MINUS_ONE], steps[1]
        lower = self._choice(guess, below, (False, (down, 0)), "ge", "le")
        upper = self._choice(lower, above, (False, (up, 0)), "lt", "gt")
        for index in self._readers[upper[1][0]]:
            if self._code[index].name == "cndmask_b32" and self._value(index, 0) == upper:
                _, back, condition = self._values_of(index)[:3]
                self._product_of(back, upper, _TWO_M16)
                _check(condition == small)
                break
        else:
            raise _OtherwiseError
        return {root, down, up}

    def _selected(self, value: Value) -> tuple[Value, Value, Value]:
        """The choice that made a value: otherwise, then, condition."""
        otherwise, then, condition, *_ = self._values_of(self._need(value, "cndmask_b32"))
        return otherwise, then, condition

    def _product_of(self, value: Value, factor: Value, constant: int) -> int:
        """The product of a value and a constant."""
        index, other = self._product(value, (False, constant))
        _check(other == factor)
        return index

    def _compared(
        self, condition: Value, left: Value, right: Value, name: str, turned: str
    ) -> None:
        """Whether a condition compares two values: left `name` right, or right `turned` left."""
        made = self._need(condition, f"cmp_{name}_f32", f"cmp_{turned}_f32")
        order = (left, right) if self._code[made].name == f"cmp_{name}_f32" else (right, left)
        _check(self._values_of(made)[:2] == order)

    def _choice(self, otherwise: Value, then: Value, error: Value, name: str, turned: str) -> Value:
        """The choice between two values by the sign of an error."""
        for index in self._readers[then[1][0]]:
            if self._code[index].name == "cndmask_b32":
                chosen: Value = (False, (index, 0))
                first, second, condition = self._selected(chosen)
                if (first, second) == (otherwise, then):
                    self._compared(condition, (False, 0), error, name, turned)
                    return chosen
        raise _OtherwiseError

    def _whole_64(self, rcp: int) -> set[int]:
        """The first guess of a quotient of 64-bit whole numbers: 2**64 / divisor in two halves."""
        divisor, high, factor, low = self._fused(self._value(rcp, 0), _MULTIPLY_ADD)
        if factor != (False, _TWO_32):
            high, factor = factor, high
        _check(factor == (False, _TWO_32))
        self._need(high, "cvt_f32_u32")
        self._need(low, "cvt_f32_u32")
        scaled = self._only_reader(rcp, "mul_f32")
        self._product_of((False, (scaled, 0)), (False, (rcp, 0)), _BELOW_TWO_64)
        readers = sorted(
            self._readers[scaled], key=lambda index: self._code[index].name != "mul_f32"
        )
        _check(len(readers) == 2)
        half, rest = readers
        self._product_of((False, (half, 0)), (False, (scaled, 0)), _TWO_M32)
        whole = self._only_reader(half, "trunc_f32")
        _, a, b, c = self._fused((False, (rest, 0)), _MULTIPLY_ADD)
        _check(_is_product((a, b), ((False, (whole, 0)), (False, _TWO_32 | _SIGN))))
        _check(c == (False, (scaled, 0)))
        ends = {*self._readers[whole], *self._readers[rest]} - {rest}
        _check(all(self._code[end].name == "cvt_u32_f32" for end in ends))
        return {rcp, divisor, rest}

    def _whole_32(self, rcp: int) -> set[int]:
        """The first guess of a quotient of 32-bit whole numbers: 2**32 / divisor."""
        self._check_whole(self._value(rcp, 0))
        for scaled in self._readers[rcp]:
            self._product_of((False, (scaled, 0)), (False, (rcp, 0)), _BELOW_TWO_32)
            _check(all(self._code[end].name == "cvt_u32_f32" for end in self._readers[scaled]))
        return {rcp}

    def _whole_24(self, rcp: int) -> set[int]:
        """A quotient of whole numbers that fp32 holds: an estimate, cut off, and its remainder."""
        divisor = self._value(rcp, 0)
        self._check_whole(divisor)
        found = {rcp}
        for product in self._readers[rcp]:
            _, dividend = self._product((False, (product, 0)), (False, (rcp, 0)))
            above = self._made_by(dividend, *_ADDITIONS)  # one unit in the last place more
            if above is not None:
                a, b, *_ = self._values_of(above)
                _check((False, 1) in (a, b))
                dividend = b if a == (False, 1) else a
            self._check_whole(dividend)
            whole = self._only_reader(product, "trunc_f32")
            for end in self._readers[whole]:
                if self._code[end].name in _TO_WHOLE:
                    continue
                remainder, a, b, c = self._fused((False, (end, 0)), _MULTIPLY_ADD)
                _check(_is_product((a, b), ((True, (whole, 0)), divisor)) and c == dividend)
                _check(all(self._code[last].name.startswith("cmp_") for last in self._readers[end]))
                found.add(remainder)
        return found

    def _only_reader(self, index: int, name: str) -> int:
        """The one instruction that reads a result, which must be of this name."""
        readers = self._readers[index]
        _check(len(readers) == 1 and self._code[readers[0]].name == name)
        return readers[0]

    def _check_whole(self, value: Value) -> None:
        """Whether a value was a whole number, at least for the lanes that one maker wrote.

        The two sides of a branch follow each other in a listing, each for its own lanes; so a register
        that the first of them reuses seems to have two makers in the second.
        """
        source = value[1]
        _check(isinstance(source, tuple))
        makers = source[1:] if source[0] == "one of" else source[:1]
        _check(
            any(isinstance(made, int) and self._code[made].name in _FROM_WHOLE for made in makers)
        )


#: What an instruction may be the heart of.
_EXPANSIONS: dict[str, tuple[Callable[[Listing, int], set[int]], ...]] = {
    "div_fixup_f32": (Listing._quotient,),
    "sqrt_f32": (Listing._root,),
    "rcp_f32": (Listing._whole_64, Listing._whole_32, Listing._whole_24),
    "rcp_iflag_f32": (Listing._whole_32, Listing._whole_24),
}


class _OtherwiseError(Exception):
    """What is looked at is no known expansion."""


def _check(holds: bool) -> None:
    if not holds:
        raise _OtherwiseError


def _negated(value: Value) -> Value:
    return not value[0], value[1]


def _is_product(given: tuple[Value, Value], wanted: tuple[Value, Value]) -> bool:
    """Whether two factors are two others, in either order, with the same sign of their product."""
    sources = [value[1] for value in given]
    same_sign = given[0][0] ^ given[1][0] == wanted[0][0] ^ wanted[1][0]
    return same_sign and (wanted[0][1], wanted[1][1]) in (tuple(sources), tuple(reversed(sources)))
