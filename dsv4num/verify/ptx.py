"""Runs the code that Triton generates for an older NVIDIA target on the GPU at hand.

The PTX of the older target is made by that target's own compilation, from the language down, and handed
to the driver, which compiles it for the device, as it does for a program that is older than its GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dsv4num.errors import UnsupportedError
from dsv4num.gpu._target import _ASSUMED, target_named

#: Targets whose PTX a newer GPU can run.
_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
#: From here on the PTX that Triton makes uses instructions of one architecture only.
_LAST_GENERIC = 89


def runnable() -> tuple[str, ...]:
    """The targets whose PTX the driver can compile for the current GPU: none that is newer.

    Raises:
        UnsupportedError: no NVIDIA GPU.
    """
    if torch.version.hip or not torch.cuda.is_available():
        raise UnsupportedError("PTX needs an NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    numbers = {name: int(name.removeprefix("sm_")) for name in _TARGETS}
    return tuple(n for n, at in numbers.items() if at == here or at <= min(here, _LAST_GENERIC))


def install(name: str) -> None:
    """Makes this process compile every kernel for a target and leave the last step to the driver.

    There is no way back: kernels that were compiled stay. A process serves one target.
    """
    target = target_named(name)
    _ASSUMED.set(target)
    active: Any = driver.active
    active.get_current_target = lambda: GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    knobs.runtime.add_stages_inspection_hook = _keep_ptx
    # Triton 3.6 leaves the hook out of the key of its cache on disk.
    knobs.cache.dir = str(Path(knobs.cache.dir) / f"ptx_{name}")


def _keep_ptx(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """Puts the PTX in place of machine code; without arguments, says how caches tell that apart."""
    if stages is None:
        return "ptx", "ptx"
    stages["cubin"] = lambda source, metadata: source.encode()
    return None
