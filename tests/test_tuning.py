"""The table of tiles: every architecture has every operation, and what is chosen can be launched."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")
pytest.importorskip("triton", reason="kernels need triton")

from dsv4num.audit.specialization import ARCHITECTURES  # noqa: E402  (only where torch is)
from dsv4num.gpu import _tuning  # noqa: E402  (only where torch is)
from dsv4num.gpu._target import assume, target_named  # noqa: E402  (only where torch is)

OPERATIONS = tuple(_tuning._SM_90)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuning, "interpreted", lambda: False)
    with assume(target_named(name)):
        tile = _tuning.tile_of(operation, torch.device("cpu"))
    for number in (tile.values, tile.warps, tile.rows(512), tile.rows(128)):
        assert number & (number - 1) == 0 and number > 0
    assert tile.rows(2 * tile.values) == 1
    assert tile.rows(128, _tuning.FEW_ROWS) == 1
    assert tile.rows(128, _tuning.FEW_ROWS + 1) == tile.rows(128) > 1
    # Triton for AMD refuses an option that it does not know.
    assert tile.limit == {} or name.startswith("sm_")


def test_entries_are_for_architectures_and_operations_that_there_are() -> None:
    assert set(_tuning._OTHERS) < set(ARCHITECTURES)
    assert all(set(tiles) <= set(OPERATIONS) for tiles in _tuning._OTHERS.values())


def test_registers_allow_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiprocessor has 65,536 registers, a thread at most 255."""
    monkeypatch.setattr(_tuning, "interpreted", lambda: False)
    with assume(target_named("sm_90")):
        tiles = [_tuning.tile_of(operation, torch.device("cpu")) for operation in OPERATIONS]
    limited = [tile for tile in tiles if tile.registers is not None]
    assert len(limited) == 3
    assert all(tile.limit["maxnreg"] * tile.warps * 32 <= 65536 for tile in limited)
    assert all(tile.limit["maxnreg"] <= 255 for tile in limited)
