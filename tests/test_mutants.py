"""`verify`'s quick cases kill every mutant of `mutants.py`, and pass what has no fault."""

from __future__ import annotations

from typing import Any

import mutants
import numpy as np
import pytest
from mutants import MUTANTS, Mutant, expectations, killers, planted, report, run

from dsv4num import reference
from dsv4num.reference.compressor import _pool
from dsv4num.verify.operations import OPERATIONS

#: No faults: the same results by other means.
FAULTLESS = (
    Mutant(
        "pooling restated", "none", ((_pool, mutants._pooled),), (mutants.COMPRESS, mutants.RING)
    ),
    Mutant(
        "insert that skips",
        "none",
        ((reference.quantize_and_insert_k_cache, mutants.skipping_insert),),
        (mutants.INSERT,),
        skips=True,
    ),
    Mutant(
        "sums over both axes of a tile",
        "none",
        (
            (
                _pool,
                lambda *rows: mutants._pooled(
                    *rows,
                    total=lambda terms, axis: reference.tree_sum(
                        reference.tree_sum(mutants._tiles(terms), 1), 0
                    ),
                ),
            ),
        ),
        (mutants.COMPRESS,),
    ),
)


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_the_reference_passes(name: str) -> None:
    """Every quick case gives the same bytes twice, and leaves the arrays of the case as they were."""
    for variant in OPERATIONS[name].variants:
        for case, fill, want in expectations(name, variant):
            got = run(OPERATIONS[name], case, fill)
            assert list(got) == list(want)
            assert all(np.array_equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("faultless", FAULTLESS, ids=lambda mutant: mutant.name)
def test_what_has_no_fault_passes(faultless: Mutant) -> None:
    assert list(killers(faultless)) == []


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_quick_case_kills(name: str) -> None:
    assert next(killers(MUTANTS[name]), None), (
        f"no quick case of verify kills: {MUTANTS[name].fault}"
    )


def test_there_are_many() -> None:
    assert len(MUTANTS) >= 100
    assert {name for mutant in MUTANTS.values() for name in mutant.operations} == set(OPERATIONS)


def test_planting_leaves_nothing_behind() -> None:
    mutant = MUTANTS["nibbles swapped"]
    codes = np.array([1, 2], np.uint8)
    with planted(mutant):
        assert reference.pack(codes)[0] == 0x12
    assert reference.pack(codes)[0] == 0x21


def test_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the cases that killed each mutant, and the mutants that survive."""
    dead = ("nibbles swapped", "window over the compressed rows")
    some: dict[str, Any] = {name: MUTANTS[name] for name in dead}
    monkeypatch.setattr(mutants, "MUTANTS", some)
    lines = "\n".join(report())
    assert "    pack, 'every pair': e2m1" in lines
    assert (
        "combine_topk_swa_indices, 'last rows': ratio0, ratio1, ratio2, ratio4, ratio128" in lines
    )
    assert lines.endswith("2 of 2 mutants killed by quick cases") and "SURVIVES" not in lines

    some[FAULTLESS[0].name] = FAULTLESS[0]
    monkeypatch.setattr("sys.argv", ["mutants.py"])
    assert mutants.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "2 of 3 mutants killed by quick cases; these survive: pooling restated"
