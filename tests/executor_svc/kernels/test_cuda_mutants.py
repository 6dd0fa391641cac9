"""CUDA kernels with one mistake each: the conformance checks must see every one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cuda_mutants import MUTANTS, Mutant, apply, survives


@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda mutant: "none" if mutant is None else mutant.name)
def test_mutant(mutant: Mutant | None, tmp_path: Path) -> None:
    """Untouched sources pass, mutants do not."""
    apply(mutant, tmp_path)
    assert survives(tmp_path) == (mutant is None)
