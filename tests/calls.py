"""Calls of `verify`'s cases: arrays in buffers of their own, as NumPy arrays or as torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsv4num.verify.case import BF16, Array, flat, rebase, start_of


def is_placed(value: Any) -> bool:
    """Whether it is an array in a guarded buffer."""
    base = getattr(value, "base", None)
    return isinstance(base, np.ndarray) and base.dtype == np.uint8 and base.ndim == 1


def copied(value: Any) -> Any:
    """A placed array in a buffer of its own; anything else as it is."""
    if not isinstance(value, np.ndarray) or not is_placed(value):
        return value
    found = rebase(value, flat(value).copy())
    found.flags.writeable = value.flags.writeable
    return found


def tensor_of(view: Any, device: str = "cpu") -> Any:
    """The tensor with the geometry of a placed array; None where torch has none; else the value.

    On the CPU it shares the array's buffer; on a GPU it lies in a copy of the whole buffer.
    """
    import torch

    if not isinstance(view, np.ndarray) or not is_placed(view):
        return view
    if view.dtype == BF16:
        dtype = torch.bfloat16
    elif view.dtype.isnative and view.dtype.kind in "biufc":
        dtype = torch.from_numpy(np.empty(0, view.dtype)).dtype
    else:
        return None
    start, strides = start_of(view), [stride // view.itemsize for stride in view.strides]
    if start % view.itemsize or any(stride < 0 for stride in strides):
        return None
    buffer = torch.from_numpy(flat(view)).to(device)
    return buffer.view(dtype).as_strided(view.shape, strides, start // view.itemsize)


def whole(tensor: Any) -> Any:
    """The bytes of the buffer that a tensor lies in, as uint8."""
    import torch

    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def bytes_of(value: Any) -> Array:
    """The bytes of a returned tensor."""
    import torch

    flat_value = value.contiguous().reshape(-1).view(torch.uint8)
    found: Array = flat_value.cpu().numpy()
    return found
