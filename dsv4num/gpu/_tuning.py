"""How large a tile a program takes, by operation and architecture, and why. Bytes never depend on it.

A table and no autotuner: start-up costs nothing, and two runs launch the same kernels. What is measured
stands in `benchmarks/RESULTS.md`; `benchmarks/gpu.py --sweep` measures again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4num.gpu._target import interpreted, target_of

#: Up to here a row has a program of its own, and all start at once: 0.2 to 1.5 us less on an H200, as
#: 132 multiprocessors hold 32 programs each. 4,096 rows take longer so.
FEW_ROWS = 2048


class Tile(NamedTuple):
    """The share of one program.

    Attributes:
        values: of the rows that it takes.
        warps: that it runs in.
        registers: most of a thread; None leaves it to the compiler. Only NVIDIA's has the option.
    """

    values: int
    warps: int
    registers: int | None = None

    def rows(self, width: int, count: int | None = None) -> int:
        """Rows of that many values, one at least; and no more where programs of one row start at once.

        Args:
            width: values per row.
            count: of all rows; None for many.
        """
        if count is not None and count <= FEW_ROWS and not interpreted():
            return 1
        return max(1, self.values // width)

    @property
    def limit(self) -> dict[str, int]:
        """The registers as the option of a launch."""
        return {} if self.registers is None else {"maxnreg": self.registers}


#: Measured on an H200 (sm_90). One warp needs no barrier, and four rows of 512 in it are 64 values a
#: thread: 4 KiB of loads in flight each. A program with less ends sooner than the next one starts.
_SM_90 = {
    "insert": Tile(2048, 1),
    "gather": Tile(2048, 2),
    "gather_packed": Tile(2048, 1),  # half the bytes: more values a thread for the same loads in flight
    "rope_quant": Tile(2048, 1),
    # Of eight rows as many groups are rotated as a warp has threads. Left alone, it takes 109 registers
    # and 57 us in place of 54.
    "rope_quant_packed": Tile(4096, 1, 96),
    "save_states": Tile(2048, 4),
    "pool_ring": Tile(512, 4),
    # With 96 registers five programs share a multiprocessor: 151 us with 120, 147 with these.
    "compress": Tile(512, 4, 96),
    "pool": Tile(4096, 4, 96),
    "finish": Tile(512, 4),
}

#: Not measured. A multiprocessor holds 48 warps but 16 (sm_86) or 24 programs: of one warp each, they
#: would leave it half empty. The same tile per warp, two warps to a program: 1 % slower on an H200.
_TWO_WARPS = {
    **{name: Tile(4096, 2) for name in ("insert", "gather_packed", "rope_quant")},
    "rope_quant_packed": Tile(8192, 2, 96),
}

#: Not measured. 64 lanes to a warp: half the values a thread for the same tile, which suits programs
#: that wait for memory. No option for registers.
_AMD = {
    "compress": Tile(512, 4),
    "pool": Tile(4096, 4),
    "rope_quant_packed": Tile(4096, 1),
}

#: What differs from sm_90. sm_80 and sm_100 do not, as far as reasoning goes: they hold as many warps,
#: programs and registers. 32 warps with 4 KiB each have 128 KiB in flight, and Little's law asks for 16
#: of an A100 (2.0 TB/s, 108 multiprocessors, 0.8 us) and for 43 of a B200 (8 TB/s, 148).
_OTHERS = {
    "sm_86": _TWO_WARPS,
    "sm_89": _TWO_WARPS,
    "sm_120": _TWO_WARPS,
    "gfx90a": _AMD,
    "gfx942": _AMD,
    "gfx950": _AMD,
    "gfx1201": _AMD,
}


def tile_of(operation: str, device: torch.device, *, packed: bool = False) -> Tile:
    """The tile of an operation on a device.

    Args:
        operation: a name of the table.
        device: where it is launched.
        packed: whether elements have four bits; some operations have an entry of their own for them.
    """
    if interpreted():
        return Tile(65536, 1)  # the interpreter pays per program
    name = f"{operation}_packed" if packed and f"{operation}_packed" in _SM_90 else operation
    return _OTHERS.get(target_of(device).name, {}).get(name, _SM_90[name])
