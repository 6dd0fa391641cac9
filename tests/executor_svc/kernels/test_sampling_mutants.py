"""Sampling kernels with one mistake each: what test_sampling.py holds the kernel against must see every one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.kernels import build
from executor_svc.kernels.elementwise import NativeElementwise, TorchElementwise
from executor_svc.kernels.library import Library, load
from executor_svc.philox import uniform
from executor_svc.sampling import NumpySampler
from executor_svc.sampling_native import NativeSampler
from tests.support.kernel_sources import built_with
from tests.support.sampling_cases import may_be, random_rows, some_logits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler"),
]

ROWS = 40
UNTOUCHED = ("#define BAND 64", "#define BAND 64")
MUTANTS = {
    "keeps one tie more": ("ids < v_set_int(cut.before)", "ids <= v_set_int(cut.before)"),
    "keeps one token more": ("if (reached >= target) break;", "if (reached > target) break;"),
    "forgets min_p": ("cut.min_p = step->min_p[r];", ""),
    "forgets the temperature": ("weigh(row, temperature, cut.at);", "weigh(row, 1.0f, cut.at);"),
    "takes the nucleus of all": ("if (few) sum_kept(row, cut);", ""),
    "picks from the other end": (
        "double target = number * total_of(row)",
        "double target = (1 - number) * total_of(row)",
    ),
    "counts tokens behind the vocabulary": (": -INFINITY;\n    vi odd", ": 0.0f;\n    vi odd"),
    "does not see NaN": ("odd |= value != value;", ""),
    "takes one round less of random numbers": ("round < 10", "round < 9"),
    "ranks zeros by their sign": ("logit += 0.0f;", ""),
    "passes over chunks on the edge": ("if (row->tops[c] < at) continue;", "if (row->tops[c] <= at) continue;"),
    "takes sums for their logarithms": ("total = row->top + log(total_of(row));", "total = row->top + total_of(row);"),
    "counts the range's upper edge twice": ("&& x[i] < high)) continue;", "&& x[i] <= high)) continue;"),
}


def is_right(library: Library) -> bool:
    """Whether the tokens of many rows are ones that a full sort allows, and log-probabilities those of numpy."""
    sampler, reference = NativeSampler(NativeElementwise(library)), NumpySampler(TorchElementwise())
    generator = np.random.default_rng(0)
    for vocabulary in (1, 5, 129, 3000):
        for spread in (0.5, 3.0, 20.0):
            logits = some_logits(generator, ROWS, vocabulary, spread)
            rows = replace(random_rows(generator, ROWS), logprobs=np.full(ROWS, 5, np.int32))
            logits[0, generator.integers(0, vocabulary)] = np.nan
            got, expected = (each.draw(0, torch.from_numpy(logits), rows) for each in (sampler, reference))
            numbers = uniform(rows.seed, rows.choice, rows.position)
            for row in np.flatnonzero(got.token_ids != expected.token_ids).tolist():
                how = float(rows.temperature[row]), int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
                if how[0] <= 0.0 or not np.isfinite(logits[row].max()):
                    return False
                if not may_be(logits[row], int(got.token_ids[row]), float(numbers[row]), *how):
                    return False
            assert got.top_ids is not None and expected.top_ids is not None
            assert got.top_logprobs is not None and expected.top_logprobs is not None
            close = np.allclose(got.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=2e-6, equal_nan=True)
            if not close or got.top_ids.tolist() != expected.top_ids.tolist():
                return False
    return True


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_mutant(mutant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched sources pass, mutants do not."""
    library = load()
    assert library is not None
    best = library.isas[0]
    flags = build.isa_flags()[best]
    monkeypatch.setattr(build, "isa_flags", lambda: {best: flags})
    monkeypatch.setattr(build, "PER_ISA", ("rows.c", "sampling.c"))
    old, new = (MUTANTS | {None: UNTOUCHED})[mutant]
    assert is_right(built_with(tmp_path, "sampling.c", old, new)) == (mutant is None)
