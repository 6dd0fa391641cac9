"""The samplers: exact filters, right frequencies, and rows that never feel each other."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor_svc.kernels.elementwise import NativeElementwise, TorchElementwise, select_elementwise
from executor_svc.kernels.library import load
from executor_svc.philox import uniform
from executor_svc.sampling import NumpySampler, Sampler, draw_row, select_sampler, top_ids
from executor_svc.sampling_native import NativeSampler
from executor_svc.step_plan import F32, SamplingRows, StepResult
from tests.support.sampling_cases import may_be, random_rows, some_logits
from tests.support.step_plans import sampling_rows

REFERENCE = NumpySampler(TorchElementwise())
LIBRARY = load()
NATIVE = {isa: NativeSampler(NativeElementwise(LIBRARY, isa)) for isa in LIBRARY.isas} if LIBRARY is not None else {}
SAMPLERS: dict[str, Sampler] = {"numpy": REFERENCE, **NATIVE}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def test_native_kernels_draw_where_there_are_any() -> None:
    assert isinstance(select_sampler(select_elementwise()), NativeSampler if NATIVE else NumpySampler)
    assert isinstance(select_sampler(TorchElementwise()), NumpySampler)


def frequencies(sampler: Sampler, logits: F32, how: dict[str, float], draws: int = 20000) -> NDArray[np.float64]:
    """How often each token comes, over the positions 0 to `draws`, with seed 5."""
    settings_of_row = {"temperature": 1.0, **how, "top_k": int(how.get("top_k", 0))}
    rows = sampling_rows(draws, seed=5, **settings_of_row)  # type: ignore[arg-type]
    rows = replace(rows, position=np.arange(draws, dtype=np.int32))
    tokens = sampler.draw(0, torch.from_numpy(logits).expand(draws, -1), rows).token_ids
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
@each_sampler
def test_draws_follow_the_filtered_softmax(sampler: Sampler, how: dict[str, float], kept: list[int]) -> None:
    seen = frequencies(sampler, LOGITS, how)
    wanted = expected_after(LOGITS, how.get("temperature", 1.0), kept)
    assert set(np.flatnonzero(seen)) == set(kept)
    for token in kept:
        error = 4.5 * math.sqrt(wanted[token] * (1 - wanted[token]) / 20000)
        assert abs(seen[token] - wanted[token]) <= error + 1e-12, (token, seen[token], wanted[token])


@each_sampler
def test_equal_logits_rank_by_token_id(sampler: Sampler) -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0, 2.0], np.float32)
    assert top_ids(logits, 3).tolist() == [1, 2, 3]
    assert set(np.flatnonzero(frequencies(sampler, logits, {"top_k": 2}, draws=500))) == {1, 2}
    assert set(np.flatnonzero(frequencies(sampler, logits, {"top_k": 1}, draws=500))) == {1}
    greedy = sampler.draw(0, torch.from_numpy(logits[None]), sampling_rows(1))
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


@each_sampler
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([1, 2, 5, 127, 128, 129, 3000, 49152]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    temperature=st.sampled_from([1e-4, 0.1, 0.8, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 600, 49151, 49152, 2**31 - 1]),
    top_p=st.sampled_from([1e-6, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_tokens_are_those_of_a_full_sort(
    sampler: Sampler,
    seed: int,
    vocabulary: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    generator = np.random.default_rng(seed)
    logits = some_logits(generator, 4, vocabulary, spread)
    rows = sampling_rows(4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    rows = replace(rows, position=np.arange(4, dtype=np.int32))
    tokens = sampler.draw(0, torch.from_numpy(logits), rows).token_ids
    numbers = uniform(rows.seed, rows.choice, rows.position)
    how = temperature, top_k, float(rows.top_p[0]), float(rows.min_p[0])
    for row in range(4):
        assert may_be(logits[row], int(tokens[row]), float(numbers[row]), *how), (row, tokens[row])


@each_sampler
def test_random_numbers_are_those_of_philox(sampler: Sampler) -> None:
    generator = np.random.default_rng(1)
    rows = random_rows(generator, 300)
    plain = sampling_rows(300, temperature=1.0)
    rows = replace(plain, seed=rows.seed, choice=rows.choice, position=rows.position)
    tokens = sampler.draw(0, torch.zeros(1, 1 << 15).expand(300, -1), rows).token_ids  # sums without rounding
    numbers = uniform(rows.seed, rows.choice, rows.position)
    assert tokens.tolist() == np.floor(numbers * (1 << 15)).astype(int).tolist()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 6),
    vocabulary=st.sampled_from([1, 5, 127, 128, 700, 49152]),
    spread=st.sampled_from([0.0, 2.0, 20.0]),
    odd=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
def test_native_samplers_agree_with_each_other_and_with_numpy(
    seed: int, rows: int, vocabulary: int, spread: float, odd: float | None
) -> None:
    """Bit for bit among instruction sets and numbers of threads; beside numpy but for rounding."""
    generator = np.random.default_rng(seed)
    values = some_logits(generator, rows, vocabulary, spread)
    mix = random_rows(generator, rows)
    if odd is not None:
        values[
            generator.integers(0, rows), generator.integers(0, vocabulary, generator.integers(1, vocabulary + 1))
        ] = odd
    logits = torch.from_numpy(values)
    expected = REFERENCE.draw(0, logits, mix)
    numbers = uniform(mix.seed, mix.choice, mix.position)
    first = None
    for sampler in NATIVE.values():
        for threads in (1, torch.get_num_threads()):
            result = with_threads(threads, sampler, logits, mix)
            first = first or result
            for one, other in zip(parts_of(result), parts_of(first), strict=True):
                assert one is other is None or (one is not None and other is not None and same_bits(one, other))
        for row in np.flatnonzero(result.token_ids != expected.token_ids).tolist():
            how = (float(column[row]) for column in (mix.temperature, mix.top_k, mix.top_p, mix.min_p))
            temperature, top_k, top_p, min_p = how
            assert temperature > 0.0 and np.isfinite(values[row].max())
            token = int(result.token_ids[row])
            assert may_be(values[row], token, float(numbers[row]), temperature, int(top_k), top_p, min_p)
        if expected.logprobs is None:
            assert result.logprobs is None
            continue
        same = result.token_ids == expected.token_ids
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs[same], expected.logprobs[same], rtol=1e-6, atol=2e-6)
        assert (result.top_ids is None) == (expected.top_ids is None)
        if result.top_ids is not None and expected.top_ids is not None:
            assert result.top_logprobs is not None and expected.top_logprobs is not None
            assert result.top_ids.tolist() == expected.top_ids.tolist()
            np.testing.assert_allclose(result.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=2e-6)


def with_threads(threads: int, sampler: Sampler, logits: torch.Tensor, rows: SamplingRows) -> StepResult:
    """What it draws on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return sampler.draw(0, logits, rows)
    finally:
        torch.set_num_threads(before)


def parts_of(result: StepResult) -> tuple[NDArray[np.generic] | None, ...]:
    return result.token_ids, result.logprobs, result.top_ids, result.top_logprobs


def same_bits(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def rows_of(rows: SamplingRows, index: NDArray[np.int64]) -> SamplingRows:
    """Some rows of a mix, in another order."""
    return replace(rows, **{item.name: getattr(rows, item.name)[index] for item in fields(rows)})


@each_sampler
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), vocabulary=st.sampled_from([33, 512, 5001]))
def test_a_row_never_depends_on_the_others(sampler: Sampler, seed: int, rows: int, vocabulary: int) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(0, 2, (rows, vocabulary)).astype(np.float32))
    mix = random_rows(generator, rows)
    together = sampler.draw(9, logits, mix)
    order = generator.permutation(rows)
    shuffled = sampler.draw(9, logits[torch.from_numpy(order)], rows_of(mix, order))
    assert (shuffled.token_ids == together.token_ids[order]).all()
    for row in range(min(rows, 5)):
        alone = sampler.draw(9, logits[row : row + 1], rows_of(mix, np.array([row])))
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


@each_sampler
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_a_row_that_is_no_number_harms_no_other(sampler: Sampler, odd: float, whole: bool) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    one, two = (sampling_rows(n, temperature=0.5, top_k=3, seed=11, logprobs=20) for n in (1, 2))
    expected = sampler.draw(0, torch.from_numpy(logits[1:].copy()), one)
    logits[0, slice(None) if whole else 7] = odd
    result = sampler.draw(0, torch.from_numpy(logits), two)
    assert result.token_ids[1] == expected.token_ids[0]
    assert result.top_ids is not None and result.top_logprobs is not None and expected.top_logprobs is not None
    assert result.top_logprobs[1].tobytes() == expected.top_logprobs[0].tobytes()
    assert len(set(result.top_ids[0].tolist())) == 20


@each_sampler
def test_logprobs_are_the_models_own(sampler: Sampler) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 4
    rows = sampling_rows(3, temperature=0.5, top_k=3, seed=11, logprobs=20)
    result = sampler.draw(0, logits, rows)
    reference = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    for row in range(3):
        assert abs(result.logprobs[row] - reference[row, result.token_ids[row]]) < 1e-5
        best = np.argsort(-reference[row], kind="stable")[:20]
        assert result.top_ids[row].tolist() == best.tolist()
        assert np.abs(result.top_logprobs[row] - reference[row, best]).max() < 1e-5


@each_sampler
def test_only_rows_that_ask_get_logprobs(sampler: Sampler) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert sampler.draw(0, logits, sampling_rows(3)).logprobs is None
    rows = replace(sampling_rows(3), logprobs=np.array([-1, 0, 2], np.int32))
    result = sampler.draw(0, logits, rows)
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    assert np.isnan(result.logprobs).tolist() == [True, False, False]
    assert result.top_ids[:2].tolist() == [[-1, -1], [-1, -1]]
    assert np.isneginf(result.top_logprobs[:2]).all()
    assert (result.top_ids[2] >= 0).all()


@each_sampler
def test_no_row_gives_no_token(sampler: Sampler) -> None:
    result = sampler.draw(4, None, sampling_rows(0))
    assert result.step == 4
    assert len(result.token_ids) == 0
