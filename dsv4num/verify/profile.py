"""The contract of another project, as far as it is declared: a writer is judged by its own rules.

A profile is a TOML file:

    about = "what it is about"
    undefined = ["nonfinite", "out-of-range"]   # inputs for which the project promises nothing

    [layouts]                                   # what `layout=` is called there
    v4 = "fp8_ds_mla"

    [[writes]]                                  # how it writes caches; may be repeated
    operations = ["rope_quant_insert"]          # all that write caches, if left out
    layouts = ["v41_mxfp8"]                     # all in which the dialects can be seen, if left out
    dialects = ["floor-1e-4-on-scale"]          # names of `dsv4num.explain.DIALECTS`

The expected bytes of a cache then come from the encoder of these dialects. All else stays the oracle's.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dsv4num.errors import ArgumentError
from dsv4num.explain.call import CACHES, write_call
from dsv4num.explain.dialects import DIALECTS, Dialect, apply, clash
from dsv4num.formats import LAYOUTS, Layout, get_layout
from dsv4num.verify.case import BF16, Case, flat, rebase

__all__ = ["Profile", "Writes", "load_profile", "named_profiles"]

_FOLDER = Path(__file__).parent / "profiles"
#: Inputs for which a project may promise nothing, and what is done with the cases that have them.
UNDEFINED = {
    "nonfinite": "cases of operations that write caches hold no NaN and no infinity",
    "out-of-range": "cases with slots, pages, lengths or indices out of range are left out",
}


@dataclass(frozen=True)
class Writes:
    """Dialects and where they hold.

    Attributes:
        dialects: what the writer does otherwise.
        operations: of those that write caches.
        layouts: names of layouts; empty for all in which a dialect can be seen.
    """

    dialects: tuple[Dialect, ...]
    operations: tuple[str, ...] = tuple(CACHES)
    layouts: tuple[str, ...] = ()

    def of(self, operation: str, layout: Layout) -> Iterator[Dialect]:
        """The dialects of one operation over one layout."""
        if operation in self.operations and (not self.layouts or layout.name in self.layouts):
            yield from (dialect for dialect in self.dialects if dialect.suits(layout))


@dataclass(frozen=True)
class Profile:
    """A declared contract.

    Attributes:
        name: what to call it.
        about: a sentence.
        undefined: names of `UNDEFINED`.
        layouts: what `layout=` is called there, by our name.
        writes: the dialects.
    """

    name: str
    about: str = ""
    undefined: frozenset[str] = frozenset()
    layouts: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[Writes, ...] = ()

    def dialects(self, operation: str, layout: Layout) -> tuple[Dialect, ...]:
        """How caches of a layout are written by an operation, without repetitions."""
        found = (dialect for writes in self.writes for dialect in writes.of(operation, layout))
        return tuple({dialect.name: dialect for dialect in found}.values())

    def write(self, operation: str, call: Mapping[str, Any]) -> bool:
        """Writes into the cache of a call what the project would; False where the oracle decides."""
        if operation not in CACHES:
            return False
        dialects = self.dialects(operation, get_layout(call["layout"]))
        return bool(dialects) and write_call(operation, call, apply(*dialects))

    def cases(self, operation: str, cases: Iterator[Case]) -> Iterator[Case]:
        """The cases without inputs for which nothing is promised."""
        for case in cases:
            if "out-of-range" in self.undefined and case.reference:
                continue
            if "nonfinite" in self.undefined and operation in CACHES:
                case.arguments = {name: _finite(value) for name, value in case.arguments.items()}
            yield case


def _finite(value: Any) -> Any:
    """A placed array whose NaNs, infinities and neighbours have lost the highest bit of their exponent.

    Everything from 2**127 on has, so that nothing overflows when pairs are rotated.
    """
    if not isinstance(value, np.ndarray) or value.dtype not in (BF16, np.float32):
        return value
    found = rebase(value, flat(value).copy())
    bits = found.view(f"u{value.itemsize}")
    to_high = 8 * value.itemsize - 16
    large, highest = (bits.dtype.type(mask << to_high) for mask in (0x7F00, 0x4000))
    bits[(bits & large) == large] &= ~highest
    return found


@cache
def load_profile(name: str) -> Profile:
    """A named profile of this package, or a file.

    Args:
        name: one of `named_profiles()`, or the path of a file that ends in .toml.

    Raises:
        ArgumentError: no such profile, no TOML, or what a profile cannot say.
        OSError: a file that cannot be read.

    Example:
        >>> from dsv4num import get_layout
        >>> profile = load_profile("flashmla")
        >>> [d.name for d in profile.dialects("quantize_and_insert_k_cache", get_layout("v4"))]
        ['floor-1e-4-on-scale']
    """
    allowed = f"a file FILE.toml, or {', '.join(named_profiles())}"
    if not isinstance(name, str | os.PathLike):
        raise ArgumentError("--profile", repr(name), allowed, "8")
    path = Path(name)
    if path.suffix != ".toml":
        path = _FOLDER / f"{name}.toml"
        if name not in named_profiles():
            raise ArgumentError("--profile", repr(name), allowed, "8")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # TOML or UTF-8; lists in lists in lists
        given = f"no TOML ({str(error).splitlines()[0]})"
        raise ArgumentError(str(path), given, "a profile", "8") from None
    return _parse(path, data)


def named_profiles() -> list[str]:
    """The names of the profiles of this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def _parse(path: Path, data: dict[str, Any]) -> Profile:
    """A profile from what a file says."""
    where = str(path)
    keys = {"about": "a string", "undefined": "a list", "layouts": "a table", "writes": "a list"}
    _check_keys(where, "the file", data, keys)
    renamed = data.get("layouts", {})
    _known(where, "layouts", list(renamed), LAYOUTS)
    for ours, theirs in renamed.items():
        if not isinstance(theirs, str):
            raise ArgumentError(where, f"layouts.{ours} = {theirs!r}", "a name in quotes", "8")
    undefined = _known(where, "undefined", data.get("undefined", []), UNDEFINED)
    writes = tuple(_writes(where, entry) for entry in data.get("writes", []))
    profile = Profile(path.stem, data.get("about", ""), frozenset(undefined), renamed, writes)
    for operation in CACHES:
        for layout in LAYOUTS.values():
            _check_together(where, operation, layout, profile.dialects(operation, layout))
    return profile


def _writes(where: str, entry: Any) -> Writes:
    """One table [[writes]]."""
    if not isinstance(entry, dict):
        raise ArgumentError(where, f"writes with {entry!r}", "tables [[writes]]", "8")
    keys = dict.fromkeys(("operations", "layouts", "dialects"), "a list")
    _check_keys(where, "[[writes]]", entry, keys)
    names = _known(where, "dialects", entry.get("dialects", []), DIALECTS)
    found = Writes(
        tuple(DIALECTS[name] for name in names),
        _known(where, "operations", entry.get("operations", list(CACHES)), CACHES),
        _known(where, "layouts", entry.get("layouts", []), LAYOUTS),
    )
    for dialect in found.dialects:
        if not any(map(dialect.suits, LAYOUTS.values())):
            given = f"{dialect.name}, which no layout that is verified can show"
            raise ArgumentError(where, given, "dialects of `dsv4num verify --profiles`", "8")
        for name in found.layouts:
            if not dialect.suits(LAYOUTS[name]):
                given = f"{dialect.name} in {name}, which cannot show it"
                raise ArgumentError(where, given, "layouts that the dialect is about", "8")
    return found


#: Kinds of values in TOML.
_KINDS = {"a string": str, "a list": list, "a table": dict}


def _check_keys(where: str, part: str, table: dict[str, Any], keys: dict[str, str]) -> None:
    """A table has these keys and no others, of these kinds."""
    for key, value in table.items():
        if key not in keys:
            raise ArgumentError(where, f"{part} with '{key}'", ", ".join(keys), "8")
        if not isinstance(value, _KINDS[keys[key]]):
            raise ArgumentError(where, f"{key} = {value!r}", keys[key], "8")


def _known(where: str, key: str, names: list[Any], allowed: Mapping[str, Any]) -> tuple[str, ...]:
    """Names, all of them known."""
    for name in names:
        if not isinstance(name, str) or name not in allowed:
            near = get_close_matches(str(name), allowed, n=3, cutoff=0.5)
            known = f"{', '.join(near)}, or others of" if near else "one of"
            listed = "`dsv4num verify --profiles`" if key == "dialects" else ", ".join(allowed)
            raise ArgumentError(where, f"{key} with {name!r}", f"{known} {listed}", "8")
    return tuple(names)


def _check_together(
    where: str, operation: str, layout: Layout, dialects: tuple[Dialect, ...]
) -> None:
    """No two dialects of one writer turn the same knob."""
    for index, one in enumerate(dialects):
        for other in dialects[index + 1 :]:
            if clash(one, other):
                given = f"both {one.name} and {other.name} for {operation} over {layout.name}"
                raise ArgumentError(where, given, "one of the two", "8")
