"""One call of an operation: its arguments, the memory that it leaves behind, and what differs.

NumPy throughout; torch is imported only where tensors are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

import dsv4num.reference
from dsv4num.verify.case import BF16, Array, Case, flat, rebase, start_of
from dsv4num.verify.compare import differing_bytes, explain_mismatch
from dsv4num.verify.operations import Operation
from dsv4num.verify.profile import Profile

if TYPE_CHECKING:
    import torch

#: What outputs hold before a run. Two values, so that an unwritten byte cannot match twice.
FILLS = (0xA5, 0x5A)

#: What arrays a call may be given as.
Arrays = Literal["torch", "numpy"]


@dataclass
class Given:
    """The arguments of a call, every array in a buffer of its own.

    Attributes:
        values: by name, in the order of the call.
        buffers: whole buffers by name: NumPy arrays or tensors of bytes.
        starts: where each array starts in its buffer.
    """

    values: dict[str, Any]
    buffers: dict[str, Any] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)


@dataclass
class Result:
    """What a call left behind.

    Attributes:
        buffers: the bytes by name: whole buffers of arguments, the values that are returned.
        starts: where each array starts in its buffer.
        returned: the values that are returned, by name.
        wrong: returned values that cannot be compared, and what they are.
    """

    buffers: dict[str, NDArray[np.uint8]]
    starts: dict[str, int]
    returned: dict[str, Array] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """One array that is not as expected: how many bytes of it, and the report."""

    output: str
    count: int
    lines: list[str]


def fills_of(case: Case) -> tuple[int, ...]:
    """The poisons that a case is run with."""
    return FILLS if case.outputs else FILLS[:1]


def filled(case: Case, fill: int, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, `changed` ones in their place: copies, outputs poisoned."""
    call: dict[str, Any] = {**case.arguments, **case.keywords, **changed}
    for name, value in call.items():
        if isinstance(value, np.ndarray):
            buffer = flat(value).copy()
            if name in case.outputs:
                buffer[:] = fill
            call[name] = rebase(value, buffer)
    return call


def expect(operation: Operation, case: Case, fill: int, profile: Profile | None = None) -> Result:
    """What a call must leave behind: by the oracle, or for a cache by the contract of a profile."""
    call = filled(case, fill, case.reference)
    written = dict(call)
    if profile is not None and profile.write(operation.name, call):
        returned = None
    else:
        function = getattr(dsv4num.reference, operation.name)
        positional = [call.pop(name) for name in case.arguments]
        returned = function(*positional, **call)
    if case.restore is not None:
        blank = {
            name: rebase(written[name], np.full_like(flat(written[name]), fill))
            for name in case.outputs
        }
        case.restore({name: written[name] for name in case.outputs}, blank)
    result = Result({}, {})
    for name, value in {**case.arguments, **case.keywords}.items():
        if isinstance(value, np.ndarray):
            # An argument that is not written must come back as it was given to the other side.
            changed = name in case.outputs or name in case.updated
            result.buffers[name] = flat(written[name]) if changed else flat(value)
            result.starts[name] = start_of(value)
    values = returned if isinstance(returned, tuple) else (returned,)
    for name, value in zip(operation.returns, values, strict=False):
        _keep(result, name, value)
    return result


def give(case: Case, fill: int, arrays: Arrays, device: str) -> Given:
    """The arguments and keywords of a case, outputs filled with poison."""
    given = Given({**case.arguments, **case.keywords})
    for name, value in given.values.items():
        if not isinstance(value, np.ndarray):
            continue
        buffer: Any = flat(value).copy()
        if name in case.outputs:
            buffer[:] = fill
        if arrays == "torch":
            import torch

            buffer = torch.from_numpy(buffer).to(device)
            given.values[name] = tensor_of(value, buffer)
        else:
            given.values[name] = rebase(value, buffer)
        given.buffers[name], given.starts[name] = buffer, start_of(value)
    return given


def tensor_of(view: Array, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor with the geometry of a placed array, inside a buffer of bytes."""
    import torch

    if view.dtype == BF16:
        dtype = torch.bfloat16
    else:
        kinds = {np.dtype(np.uint8): torch.uint8, np.dtype(np.uint16): torch.int16}
        dtype = kinds.get(view.dtype) or torch.from_numpy(np.empty(0, view.dtype)).dtype
    typed = buffer.view(dtype)
    strides = [stride // view.itemsize for stride in view.strides]
    return typed.as_strided(view.shape, strides, start_of(view) // view.itemsize)


def memory_of(given: Given) -> Result:
    """What a call left behind in its arguments."""
    buffers = {
        name: buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
        for name, buffer in given.buffers.items()
    }
    return Result(buffers, dict(given.starts))


def observe(operation: Operation, given: Given, returned: Any, expected: Result) -> Result:
    """What a call left behind, its returned values held to the expected types and shapes."""
    result = memory_of(given)
    names = operation.returns
    values: Sequence[Any] = returned if isinstance(returned, tuple | list) else (returned,)
    if names and len(values) != len(names):
        count = "nothing was" if returned is None else f"{len(values)} values were"
        text = f"{count} returned; expected: {' and '.join(names)}"
        result.wrong = dict.fromkeys(names, text)
        return result
    for name, value in zip(names, values, strict=False):
        take_returned(result, name, value, expected)
    return result


def take_returned(result: Result, name: str, value: Any, expected: Result) -> None:
    """Adds a returned value to a result, among those that are wrong unless it fits."""
    want = expected.returned[name]
    got = as_array(value)
    if got is None:
        result.wrong[name] = f"{type(value).__name__} returned; expected: {describe(want)}"
    elif not fits(got, want):
        result.wrong[name] = f"{describe(got)} returned; expected: {describe(want)}"
    else:
        _keep(result, name, got)


def _keep(result: Result, name: str, value: Array) -> None:
    """Adds a returned array and its bytes."""
    result.returned[name] = value
    result.buffers["-> " + name] = np.ascontiguousarray(value).view(np.uint8).ravel()
    result.starts["-> " + name] = 0


def describe(array: Array) -> str:
    """The type and shape of an array."""
    return f"{array.dtype} {list(array.shape)}"


def fits(got: Array, want: Array) -> bool:
    """Whether an array has the shape and type of another; a code of 8 or 16 bits is any such type."""
    same = got.dtype == want.dtype or (want.itemsize < 4 and got.itemsize == want.itemsize)
    return same and got.shape == want.shape


def as_array(value: Any) -> Array | None:
    """The NumPy array of what an implementation returned: an array, a tensor, or anything with DLPack.

    None where it is nothing of these, or in memory that cannot be read. Types that NumPy lacks come
    as their bytes.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and not isinstance(value, torch.Tensor):
            value = torch.from_dlpack(value)
        if torch is None:
            return np.from_dlpack(value)
        tensor = value.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            halves: Array = tensor.view(torch.int16).numpy().view(BF16)
            return halves
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            tensor = tensor.view(torch.uint8)
        array: Array = tensor.numpy()
        return array
    except Exception:  # whatever its makers raise, it is no array
        return None


def differences(
    operation: Operation,
    case: Case,
    fill: int,
    expected: Result,
    observed: Result,
    *,
    profile: Profile | None = None,
    explained: bool = True,
) -> list[Difference]:
    """Everything in which two results differ.

    Args:
        operation: what was called.
        case: on what.
        fill: the poison that outputs held before.
        expected: of `expect`.
        observed: of the implementation.
        profile: whose contract the expected result keeps.
        explained: whether to look for the dialect of a cache's writer.
    """
    found = []
    for name, want in expected.buffers.items():
        output = name.removeprefix("-> ")
        if name.startswith("-> ") and output in observed.wrong:
            text = f"{output}: {observed.wrong[output]}"
            found.append(Difference(output, max(1, len(want)), [text]))
            continue
        got = observed.buffers[name]
        if np.array_equal(want, got):
            continue
        count = len(differing_bytes(want, got))
        if output == name and name not in case.outputs + case.updated:
            lines = [f"{name}: the operation changed its input"]
        else:
            lines = explain_mismatch(
                operation,
                case,
                output,
                expected.starts[name],
                want,
                got,
                fill if name in case.outputs else None,
                profile=profile,
                explained=explained,
            )
        found.append(Difference(output, count, lines))
    return found


def written_bytes(case: Case, expected: Result) -> int:
    """How many bytes of a result the operation may write, and are compared."""
    return sum(
        len(want)
        for name, want in expected.buffers.items()
        if name in case.outputs + case.updated or name.startswith("-> ")
    )
