"""The cases of `dsv4num verify` for a test of one's own, in any test runner: `dsv4num.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsv4num.errors import ArgumentError, MismatchError
from dsv4num.verify.call import (
    Arrays,
    Difference,
    Given,
    Result,
    as_array,
    describe,
    differences,
    expect,
    fills_of,
    fits,
    give,
    memory_of,
    take_returned,
)
from dsv4num.verify.case import Array, Case, Level, rebase
from dsv4num.verify.compare import MAX_LINES
from dsv4num.verify.operations import OPERATIONS, Operation
from dsv4num.verify.profile import Profile, load_profile

__all__ = ["CheckedCase", "cases"]


def cases(
    operation: str,
    layout: str | None = None,
    *,
    level: Level = "quick",
    seed: int = 0,
    arrays: Arrays = "numpy",
    device: str = "cpu",
    profile: str | None = None,
) -> Iterator[CheckedCase]:
    r"""The cases of an operation: its inputs, and a check of what an implementation makes of them.

    They are those of `dsv4num verify`: arrays lie in larger buffers, often strided, shifted and longer
    than needed; some slots are negative or beyond the cache (clause 6.2); what an operation only
    writes holds a poison, and every case comes with two of them, so that a byte that is not written
    shows.

    Args:
        operation: a name of `dsv4num.reference.__all__` that `dsv4num verify` lists (SPEC 1 to 5).
        layout: its layout; or the format, rule or mode that the table of `verify` calls a variant.
            None for all of them.
        level: "quick" or "full".
        seed: of the random inputs.
        arrays: what the inputs are: "numpy", bf16 as `ml_dtypes.bfloat16`; or "torch".
        device: where tensors lie, as torch calls it.
        profile: a name or a FILE.toml: the contract that caches are held to, instead of SPEC.

    Yields:
        Cases in the order of `verify`.

    Raises:
        ArgumentError: a name, level, seed, kind of arrays, device or profile that does not exist.
        OSError: a FILE.toml that cannot be read.

    Example:
        >>> import dsv4num
        >>> from dsv4num.reference import pack
        >>> for case in dsv4num.cases("pack"):
        ...     case.check(packed=pack(**case.inputs))
        >>> def swapped(codes):
        ...     return codes[..., 0::2] << 4 | codes[..., 1::2]
        >>> (case,) = dsv4num.cases("pack")
        >>> print(case, case.inputs["codes"].shape, case.outputs)
        pack e2m1, case 'every pair' (16, 32) ('packed',)
        >>> try:
        ...     case.check(packed=swapped(**case.inputs))
        ... except AssertionError as error:
        ...     lines = str(error).splitlines()
        >>> print("\n".join([*lines[:3], *lines[-2:]]))
        pack e2m1, case 'every pair'
        packed: 240 bytes differ
          packed[1]: expected 0x01 = (0.5, 0), got 0x10 = (0, 0.5)
          likely: nibbles swapped
          reproduce: dsv4num.cases('pack', 'e2m1', level='quick', seed=0), case 'every pair'
    """
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ArgumentError("operation", repr(operation), ", ".join(OPERATIONS), "5")
    found = OPERATIONS[operation]
    if layout is not None and layout not in found.variants:
        raise ArgumentError("layout", repr(layout), ", ".join(found.variants), found.clause)
    if level not in ("quick", "full"):
        raise ArgumentError("level", repr(level), "'quick' or 'full'", found.clause)
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ArgumentError("seed", repr(seed), "an integer of 0 or more", found.clause)
    if arrays not in ("numpy", "torch"):
        raise ArgumentError("arrays", repr(arrays), "'numpy' or 'torch'", found.clause)
    if arrays == "numpy" and device != "cpu":
        raise ArgumentError("device", repr(device), "'cpu' for NumPy arrays", found.clause)
    if device != "cpu":
        _check_device(device, found.clause)
    contract = None if profile is None else load_profile(profile)
    variants = found.variants if layout is None else (layout,)
    where = f"level={level!r}, seed={seed}"
    where += "" if profile is None else f", profile={profile!r}"
    return _cases(found, variants, level, seed, arrays, device, contract, where)


def _check_device(device: str, clause: str) -> None:
    """torch itself knows which devices there are.

    What it raises for another would pass for a failed check, where it is an AssertionError.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        given = f"{device!r} ({str(error).partition(chr(10))[0][:160]})"
        raise ArgumentError("device", given, "a device that torch has here", clause) from None


def _cases(
    operation: Operation,
    variants: tuple[str, ...],
    level: Level,
    seed: int,
    arrays: Arrays,
    device: str,
    profile: Profile | None,
    where: str,
) -> Iterator[CheckedCase]:
    """The cases, one after the other."""
    for variant in variants:
        made = operation.cases(variant, level, seed)
        for case in made if profile is None else profile.cases(operation.name, made):
            if case.large and device == "cpu":
                continue
            for fill in fills_of(case):
                yield CheckedCase(operation, variant, case, fill, arrays, device, profile, where)


class CheckedCase:
    """One call of an operation, with one poison.

    Attributes:
        operation: name of the operation.
        variant: its layout, or format, rule or mode.
        name: of the case; unique among those of an operation and variant with the same poison.
        poison: the byte that outputs hold before, 0xA5 or 0x5A; None where nothing is only written.
        outputs: names that `check` takes: the arguments that are written, then what is returned.
    """

    def __init__(
        self,
        operation: Operation,
        variant: str,
        case: Case,
        fill: int,
        arrays: Arrays,
        device: str,
        profile: Profile | None,
        where: str,
    ) -> None:
        self.operation, self.variant, self.name = operation.name, variant, case.name
        self.poison = fill if case.outputs else None
        self.outputs = (*case.outputs, *case.updated, *operation.returns)
        self._operation, self._case, self._fill = operation, case, fill
        self._arrays, self._device, self._profile = arrays, device, profile
        self._where = where
        self._given: Given | None = None
        self._taken = 0  # times since the last check

    def __repr__(self) -> str:
        poison = "" if self.poison is None else f", poison {self.poison:02X}"
        return f"{self.operation} {self.variant}, case '{self.name}'{poison}"

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name, in the order of the call; fresh arrays each time.

        `check` looks at those that were taken last.
        """
        self._taken += 1
        self._given = give(self._case, self._fill, self._arrays, self._device)
        values = dict(self._given.values)
        if self._profile is not None and values.get("layout") in self._profile.layouts:
            values["layout"] = self._profile.layouts[values["layout"]]
        return values

    def check(self, **outputs: Any) -> None:
        """Compares every byte of what a call left behind, those that it must not touch too.

        Args:
            outputs: by name what the call returned. Of an argument that is written in place it may be
                the array itself, another one with the same contents, or None, or be left out: then
                what the array of `inputs` holds is looked at.

        Raises:
            MismatchError: an `AssertionError`: a byte differs, an input has changed, or an output has
                another type or shape. At most 20 lines say where and, for caches, why.
            ArgumentError: a name that is no output, a returned value that is missing, or `inputs` that
                were not taken before.
        """
        operation, case, given = self._operation, self._case, self._given
        for name in outputs:
            if name not in self.outputs:
                allowed = ", ".join(self.outputs)
                raise ArgumentError("outputs", f"'{name}'", allowed, operation.clause)
        for name in operation.returns:
            if name not in outputs:
                raise ArgumentError("outputs", f"no '{name}'", "what the call returned", "5")
        taken, self._taken = self._taken, 0
        if given is None:
            raise ArgumentError("inputs", "not taken", "check() after a call with .inputs", "5")
        expected = expect(operation, case, self._fill, self._profile)
        observed = memory_of(given)
        for name in operation.returns:
            take_returned(observed, name, outputs[name], expected)
        found = []
        for name in (*case.outputs, *case.updated):
            if outputs.get(name) is not None:
                found += self._put(name, outputs[name], observed)
        options: dict[str, Any] = {"profile": self._profile}
        found += differences(operation, case, self._fill, expected, observed, **options)
        if found:
            raise MismatchError("\n".join(self._report(found, taken)))

    def _put(self, name: str, value: Any, observed: Result) -> list[Difference]:
        """Puts an output that was returned in its place in the memory that was given."""
        want: Array = self._case.arguments[name]
        got = as_array(value)
        if got is None or not fits(got, want):
            what = type(value).__name__ if got is None else describe(got)
            text = f"{name}: {what} given; expected: {describe(want)}"
            return [Difference(name, 1, [text])]
        buffer = observed.buffers[name].copy()
        rebase(want, buffer).view(f"u{want.itemsize}")[...] = got.view(f"u{want.itemsize}")
        observed.buffers[name] = buffer
        return []

    def _report(self, found: list[Difference], taken: int) -> list[str]:
        """The first difference in full, and what else differs as far as there is room."""
        head = [str(self), *found[0].lines]
        last = f"  reproduce: dsv4num.cases({self.operation!r}, {self.variant!r}, {self._where})"
        more = [f"also {difference.lines[0]}" for difference in found[1:]]
        if taken > 1 and (self._case.outputs or self._case.updated):
            more.insert(
                0, f"note: .inputs was taken {taken} times, fresh each; the last are looked at"
            )
        room = MAX_LINES - 1 - len(head)
        if len(more) > room:
            more = [*more[: room - 1], f"also {len(more) - room + 1} more arrays"]
        return [*head, *more, f"{last}, case '{self.name}'"]
