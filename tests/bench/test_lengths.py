"""The blend keeps its promises on the model's own answers."""

from __future__ import annotations

from bench.answers import ANSWERS
from bench.lengths import read_answers, run


def test_the_blend_is_as_good_as_its_best_source() -> None:
    figures = {each.name: each for each in run(read_answers(ANSWERS), None)}
    errors = {name: each.mae_tokens for name, each in figures.items() if each.mae_tokens is not None}
    assert set(errors) == {"history", "signals", "learned", "blend"}
    assert errors["blend"] <= 1.01 * min(errors.values())
    coverage = figures["blend"].p90_coverage
    assert coverage is not None and 0.85 <= coverage <= 0.95
