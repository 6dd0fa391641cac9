"""The sampler: exact filters, right frequencies, and rows that never feel each other."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor_svc.kernels.elementwise import select_elementwise
from executor_svc.philox import uniform
from executor_svc.sampling import Sampler, draw_row, top_ids
from executor_svc.step_plan import F32, SamplingRows
from tests.support.step_plans import sampling_rows

SAMPLER = Sampler(select_elementwise())


def frequencies(logits: F32, how: dict[str, float], draws: int = 20000) -> NDArray[np.float64]:
    """How often each token comes, over the positions 0 to `draws`, with seed 5."""
    zeros = np.zeros(draws, np.int32)
    numbers = uniform(np.full(draws, 5, np.uint64), zeros, np.arange(draws, dtype=np.int32))
    settings_of_row = {
        "temperature": how.get("temperature", 1.0),
        "top_k": int(how.get("top_k", 0)),
        "top_p": how.get("top_p", 1.0),
        "min_p": how.get("min_p", 0.0),
    }
    tokens = [draw_row(logits, number=float(number), **settings_of_row) for number in numbers]  # type: ignore[arg-type]
    counts: NDArray[np.float64] = np.bincount(tokens, minlength=len(logits)) / draws
    return counts


def expected_after(logits: F32, temperature: float, kept: list[int]) -> NDArray[np.float64]:
    """The softmax over `kept` tokens only, in float64."""
    likelihood: NDArray[np.float64] = np.zeros(len(logits))
    likelihood[kept] = np.exp((logits[kept].astype(np.float64) - logits.max()) / temperature)
    likelihood /= likelihood.sum()
    return likelihood


LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], np.float32))


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.7}, [1, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"top_k": 4, "top_p": 0.7}, [1, 3]),  # of 0.9 that are left, 0.65 are more than 0.7 times
        ({"top_k": 5, "top_p": 0.97, "min_p": 0.5}, [1, 3]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_draws_follow_the_filtered_softmax(how: dict[str, float], kept: list[int]) -> None:
    seen = frequencies(LOGITS, how)
    wanted = expected_after(LOGITS, how.get("temperature", 1.0), kept)
    assert set(np.flatnonzero(seen)) == set(kept)
    for token in kept:
        error = 4.5 * math.sqrt(wanted[token] * (1 - wanted[token]) / 20000)
        assert abs(seen[token] - wanted[token]) <= error + 1e-12, (token, seen[token], wanted[token])


def test_equal_logits_rank_by_token_id() -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0, 2.0], np.float32)
    assert top_ids(logits, 3).tolist() == [1, 2, 3]
    assert set(np.flatnonzero(frequencies(logits, {"top_k": 2}, draws=500))) == {1, 2}
    assert draw_row(logits, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, number=0.999) == 1
    greedy = SAMPLER.draw(0, torch.from_numpy(logits[None]), sampling_rows(1))
    assert greedy.token_ids.tolist() == [1]


def test_numbers_at_the_ends_pick_tokens_that_can_come() -> None:
    logits = np.array([-np.inf, 0.0, 1.0, -np.inf], np.float32)
    for number in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        assert draw_row(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, number=number) in (1, 2)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 10, 500).astype(np.float32)
    token = draw_row(logits, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, number=0.5)
    assert 0 <= token < 500
    if temperature < 0.01:
        assert token == int(np.argmax(logits))


def full_sort_reference(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What may come, by sorting everything."""
    likelihood = np.exp((logits - logits.max()) / np.float32(temperature))
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[:top_k] if top_k else order
    sums = np.cumsum(likelihood[order], dtype=np.float64)
    if top_p < 1.0:
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    return {int(token) for token in order if likelihood[token] >= min_p}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(2, 3000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 4000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_filters_equal_a_full_sort(
    seed: int, vocabulary: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(seed)
    logits = np.round(generator.normal(0, spread, vocabulary), 2).astype(np.float32)  # rounded: many ties
    allowed = full_sort_reference(logits, 0.8, top_k, top_p, min_p)
    seen = {
        draw_row(logits, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, number=float(number))
        for number in generator.random(20)
    }
    assert seen <= allowed


def random_rows(generator: np.random.Generator, rows: int) -> SamplingRows:
    """Any mix of settings."""
    return SamplingRows(
        temperature=generator.choice([0.0, 0.0, 0.3, 1.0, 2.5], rows).astype(np.float32),
        top_p=generator.choice([0.3, 0.95, 1.0], rows).astype(np.float32),
        top_k=generator.choice([0, 1, 40], rows).astype(np.int32),
        min_p=generator.choice([0.0, 0.1], rows).astype(np.float32),
        seed=generator.integers(0, 2**64, rows, dtype=np.uint64),
        choice=generator.integers(0, 4, rows).astype(np.int32),
        position=generator.integers(0, 9000, rows).astype(np.int32),
        logprobs=generator.choice([-1, 0, 3, 20], rows).astype(np.int32),
    )


def rows_of(rows: SamplingRows, index: NDArray[np.int64]) -> SamplingRows:
    """Some rows of a mix, in another order."""
    return replace(rows, **{item.name: getattr(rows, item.name)[index] for item in fields(rows)})


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), vocabulary=st.sampled_from([33, 512, 5001]))
def test_a_row_never_depends_on_the_others(seed: int, rows: int, vocabulary: int) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(0, 2, (rows, vocabulary)).astype(np.float32))
    mix = random_rows(generator, rows)
    together = SAMPLER.draw(9, logits, mix)
    order = generator.permutation(rows)
    shuffled = SAMPLER.draw(9, logits[torch.from_numpy(order)], rows_of(mix, order))
    assert (shuffled.token_ids == together.token_ids[order]).all()
    for row in range(min(rows, 5)):
        alone = SAMPLER.draw(9, logits[row : row + 1], rows_of(mix, np.array([row])))
        assert alone.token_ids[0] == together.token_ids[row]
        if mix.logprobs[row] < 0:
            continue
        assert alone.logprobs is not None and together.logprobs is not None
        assert alone.logprobs.tobytes() == together.logprobs[row : row + 1].tobytes()
        count = int(mix.logprobs[row])
        if count:
            assert alone.top_ids is not None and together.top_ids is not None
            assert alone.top_logprobs is not None and together.top_logprobs is not None
            assert alone.top_ids[0].tolist() == together.top_ids[row, :count].tolist()
            assert alone.top_logprobs[0].tobytes() == together.top_logprobs[row, :count].tobytes()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_a_row_that_is_no_number_harms_no_other(odd: float, whole: bool) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    one, two = (sampling_rows(n, temperature=0.5, top_k=3, seed=11, logprobs=20) for n in (1, 2))
    expected = SAMPLER.draw(0, torch.from_numpy(logits[1:].copy()), one)
    logits[0, slice(None) if whole else 7] = odd
    result = SAMPLER.draw(0, torch.from_numpy(logits), two)
    assert result.token_ids[1] == expected.token_ids[0]
    assert result.top_ids is not None and result.top_logprobs is not None and expected.top_logprobs is not None
    assert result.top_logprobs[1].tobytes() == expected.top_logprobs[0].tobytes()
    assert len(set(result.top_ids[0].tolist())) == 20


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 4
    rows = sampling_rows(3, temperature=0.5, top_k=3, seed=11, logprobs=20)
    result = SAMPLER.draw(0, logits, rows)
    reference = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    for row in range(3):
        assert abs(result.logprobs[row] - reference[row, result.token_ids[row]]) < 1e-5
        best = np.argsort(-reference[row], kind="stable")[:20]
        assert result.top_ids[row].tolist() == best.tolist()
        assert np.abs(result.top_logprobs[row] - reference[row, best]).max() < 1e-5


def test_only_rows_that_ask_get_logprobs() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert SAMPLER.draw(0, logits, sampling_rows(3)).logprobs is None
    rows = replace(sampling_rows(3), logprobs=np.array([-1, 0, 2], np.int32))
    result = SAMPLER.draw(0, logits, rows)
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    assert np.isnan(result.logprobs).tolist() == [True, False, False]
    assert result.top_ids[:2].tolist() == [[-1, -1], [-1, -1]]
    assert np.isneginf(result.top_logprobs[:2]).all()
    assert (result.top_ids[2] >= 0).all()


def test_no_row_gives_no_token() -> None:
    result = SAMPLER.draw(4, None, sampling_rows(0))
    assert result.step == 4
    assert len(result.token_ids) == 0
