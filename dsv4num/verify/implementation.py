"""Another implementation of the operations: which functions it offers, and how they are called.

A module offers an operation by a function of its name, with a prefix if it has one. Its arguments are
those of SPEC 5 or those of the engine's own functions (`dsv4num.gpu.seed_api`). Two attributes of the
module say what it takes, where that is not everything:

    DSV4NUM_ARRAYS = "numpy"                # NumPy arrays; without it torch tensors
    DSV4NUM_LAYOUTS = ("v4", "v41_mxfp8")   # layouts that it offers; without it all

A function that has no parameter for the layout is taken for `v4`, or for those of DSV4NUM_LAYOUTS.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

import dsv4num.reference
from dsv4num.errors import ArgumentError
from dsv4num.explain.call import CACHES
from dsv4num.formats import LAYOUTS, Layout
from dsv4num.verify.call import Arrays, Given
from dsv4num.verify.case import Array, Case, flat, start_of
from dsv4num.verify.operations import OPERATIONS, Operation

#: What the column of paths says of an implementation, but for the engine's two forms of one operation.
IMPLEMENTATION = "impl"
#: Why an operation has no function.
_ABSENT = "no function of this name"

_INSERT, _GATHER = "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"
_COMPRESS = "compress_norm_rope_store"
#: The engine's names of the compressor.
_STAGES = {"one stage": f"{_COMPRESS}_triton", "two stages": f"{_COMPRESS}_two_stage_triton"}
#: The layouts that the engine's functions have names for: by the bytes of a row and `use_fnuz`.
_K_RECORDS = {
    "v4": (584, False),
    "v4_fnuz": (584, True),
    "v41_mxfp8": (528, False),
    "v41_mxfp8_fnuz": (528, True),
    "v41_nvfp4": (288, False),
}
_COMPRESSED = ("v4", "indexer_fp8", "indexer_mxfp4")
_CACHE_NAMES = {**CACHES, _GATHER: "k_cache"}


class NotOffered(Exception):
    """A call that an implementation does not offer. Not a fault: it is listed."""


@dataclass(frozen=True)
class Offer:
    """A function that does an operation.

    Attributes:
        name: of the function, with its module.
        function: the function.
        path: how reports call it.
        parameters: names of its parameters; None where it takes any.
        seed: whether it takes the engine's arguments, not those of SPEC 5.
    """

    name: str
    function: Callable[..., Any]
    path: str
    parameters: frozenset[str] | None
    seed: bool

    def takes(self, name: str) -> bool:
        """Whether the function has a parameter of that name."""
        return self.parameters is None or name in self.parameters

    def adapted(self, case: Case) -> Case:
        """The case, its cache with three axes where the function cannot be told the rows of a page."""
        name = next((name for name in _CACHE_NAMES.values() if name in case.arguments), None)
        told = self.takes("kv_block_size") if "kv_block_size" in case.keywords else not self.seed
        if name is None or told or case.arguments[name].ndim == 3:
            return case
        layout = LAYOUTS[case.keywords["layout"]]
        rows = case.keywords.get("kv_block_size") or case.arguments["block_size"]
        arguments = {**case.arguments, name: _three_axes(case.arguments[name], rows, layout)}
        return replace(case, arguments=arguments)

    def call(
        self, operation: Operation, case: Case, given: Given, rename: Mapping[str, str]
    ) -> Any:
        """Calls the function.

        Args:
            operation: what it does.
            case: the case, adapted.
            given: its arguments.
            rename: names of layouts by ours.

        Raises:
            NotOffered: it has no parameter for what the case asks for.
            Exception: whatever it raises.
        """
        values = dict(given.values)
        if self.seed and operation.name == _COMPRESS:
            return self._compress(values)
        positional = {name: values.pop(name) for name in case.arguments}
        if self.seed:
            values = {**self._seed_keywords(operation.name, values.pop("layout")), **values}
        keywords = self._keywords(operation.name, values)
        if "layout" in keywords:
            keywords["layout"] = rename.get(keywords["layout"], keywords["layout"])
        if self.parameters is not None and positional.keys() <= self.parameters:
            return self.function(**positional, **keywords)
        return self.function(*positional.values(), **keywords)

    def _keywords(self, operation: str, values: dict[str, Any]) -> dict[str, Any]:
        """The keywords that the function has parameters for; the others must be what is usual."""
        usual = inspect.signature(getattr(dsv4num.reference, operation)).parameters
        kept = {}
        for name, value in values.items():
            if self.takes(name):
                kept[name] = value
            elif name not in ("layout", "kv_block_size") and not _is_usual(value, usual[name]):
                raise NotOffered(f"no parameter {name}")
        return kept

    def _seed_keywords(self, operation: str, layout: str) -> dict[str, Any]:
        """How the engine's insert and gather are told the record."""
        nbytes, fnuz = _K_RECORDS[layout]
        keywords: dict[str, Any] = {"use_fnuz": True} if fnuz else {}
        if operation == _INSERT and self.takes("bytes_per_token"):
            keywords["bytes_per_token"] = nbytes
        return keywords

    def _compress(self, values: dict[str, Any]) -> Any:
        """The engine's compressor: what it is told follows from the arguments of SPEC 5.4."""
        layout = LAYOUTS[values.pop("layout")]
        slots, state = values["slot_mapping"], values["state_cache"]
        kv_slots = values.pop("kv_slot_mapping")
        del values["kv_block_size"]
        data, scales = layout.planes
        rule = data.fields[0].rule
        assert rule is not None
        values |= {
            "num_actual": len(slots),
            "block_size": state.shape[1],
            "state_width": state.shape[2] // 2,
            "k_cache_metadata": SimpleNamespace(slot_mapping=kv_slots),
            "pdl_kwargs": {},
            "head_dim": layout.head_dim,
            "rope_head_dim": 64,
            "use_fp4_cache": layout.name == "indexer_mxfp4",
            "quant_block": rule.group,
            "token_stride": data.row_bytes,
            "scale_dim": scales.row_bytes,
        }
        if self.path == "two stages":
            shape = (len(slots), layout.head_dim)
            empty = getattr(state, "new_empty", None)
            scratch = empty(shape) if empty else np.empty(shape, np.float32)
            values |= {"num_decode_tokens": 0, "compress_scratch": scratch}
        return self.function(**{name: v for name, v in values.items() if self.takes(name)})


@dataclass(frozen=True)
class Implementation:
    """A module whose functions are held to the oracle.

    Attributes:
        module: the module.
        prefix: of the names of its functions.
        arrays: what they take.
        layouts: names of the layouts that it offers; None for all.
    """

    module: ModuleType
    prefix: str
    arrays: Arrays
    layouts: tuple[str, ...] | None

    def offers(self, operation: str, variant: str) -> list[Offer]:
        """The functions that do an operation over a variant."""
        offers = [self._offer(operation, self.prefix + operation, IMPLEMENTATION)]
        if operation == _COMPRESS:
            stages = _STAGES.items()
            offers += [self._offer(operation, self.prefix + name, path) for path, name in stages]
        return [offer for offer in offers if offer and not self._refuses(offer, operation, variant)]

    def why_not(self, operation: str, variant: str) -> str:
        """Why an operation over a variant is not offered."""
        names = [operation, *(_STAGES.values() if operation == _COMPRESS else ())]
        offers = [self._offer(operation, self.prefix + name, "") for name in names]
        reasons = [self._refuses(offer, operation, variant) for offer in offers if offer]
        return next(filter(None, reasons), _ABSENT)

    def _offer(self, operation: str, name: str, path: str) -> Offer | None:
        """The function of a name, if there is one."""
        function = getattr(self.module, name, None)
        if not callable(function):
            return None
        parameters = _parameters(function)
        offer = Offer(f"{self.module.__name__}.{name}", function, path, parameters, seed=False)
        engine = operation in (_INSERT, _GATHER) and not offer.takes("layout")
        return replace(offer, seed=engine or name != self.prefix + operation)

    def _refuses(self, offer: Offer, operation: str, variant: str) -> str | None:
        """Why a function does not do an operation over a layout, if it does not."""
        if variant not in LAYOUTS or variant not in OPERATIONS[operation].variants:
            return None
        if self.layouts is not None and variant not in self.layouts:
            return "not among DSV4NUM_LAYOUTS"
        if offer.seed and operation == _COMPRESS:
            return None if variant in _COMPRESSED else "the engine's arguments cannot name it"
        if offer.takes("layout"):
            return None
        nbytes, fnuz = _K_RECORDS.get(variant, (0, False))
        if offer.seed and nbytes and (offer.takes("use_fnuz") or not fnuz):
            told = "bytes_per_token" if operation == _INSERT else "use_fnuz"
            if offer.takes(told):
                return None
        if variant in (self.layouts or ("v4",)):
            return None
        return "no parameter layout"


@cache
def load_implementation(spec: str, arrays: str = "") -> Implementation:
    """The implementation that MODULE[:PREFIX] names.

    Modules in the current directory are found too.

    Args:
        spec: what `--impl` was given.
        arrays: "torch", "numpy", or "" for what the module says.

    Raises:
        ArgumentError: no module, one that cannot be imported, one without any of the operations, or
            attributes that say nothing that is known.
    """
    name, _, prefix = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        said = str(error).splitlines() or ["no message"]
        given = f"{spec!r} ({type(error).__name__}: {said[0]})"
        allowed = "MODULE[:PREFIX], a module that can be imported from here"
        raise ArgumentError("--impl", given, allowed, "5") from None
    kind = arrays or getattr(module, "DSV4NUM_ARRAYS", "torch")
    if kind not in ("torch", "numpy"):
        raise ArgumentError("DSV4NUM_ARRAYS", repr(kind), "'torch' or 'numpy'", "5")
    layouts = getattr(module, "DSV4NUM_LAYOUTS", None)
    if layouts is not None:
        layouts = tuple(layouts) if isinstance(layouts, list | tuple) else (layouts,)
        for layout in layouts:
            if not isinstance(layout, str) or layout not in LAYOUTS:
                raise ArgumentError("DSV4NUM_LAYOUTS", repr(layout), ", ".join(LAYOUTS), "4")
    found = Implementation(module, prefix, cast(Arrays, kind), layouts)
    names = [*OPERATIONS, *_STAGES.values()]
    if not any(callable(getattr(module, prefix + each, None)) for each in names):
        allowed = f"a module with a function such as {prefix}{_INSERT}"
        raise ArgumentError("--impl", repr(spec), allowed, "5")
    return found


def described(spec: str, found: Implementation) -> str:
    """An implementation as reports name it: with the start of the SHA-256 of its source, if it has one.

    Reports of two versions of it are not of one run.
    """
    source = getattr(found.module, "__file__", None)
    if source is None or not Path(source).is_file():
        return spec
    return f"{spec}@{hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]}"


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a function's parameters; None where it takes any, or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, or a binding
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return frozenset(p.name for p in named)


def _is_usual(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a keyword has the value that it has when it is left out."""
    default = parameter.default
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def _three_axes(view: Array, rows: int, layout: Layout) -> Array:
    """A cache of pages as one of [pages, rows, row bytes] over the same memory."""
    shape = (len(view), rows, layout.row_bytes)
    strides = (view.strides[0], layout.row_bytes, 1)
    return np.ndarray(shape, np.uint8, flat(view), start_of(view), strides)
