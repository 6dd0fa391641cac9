"""Scheduling never changes a token: on a real model, whatever a request was batched with, however it was chunked,
cached or preempted, its tokens and log-probabilities are bit for bit those of running alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.kernels.library import load
from executor_svc.model.model import CpuModel
from executor_svc.request import FinishReason, Sampling, TokenLogprobs
from jitney.snapshot import Settings
from simulator.simulation import Simulation, Watched
from tests.support.modelled import ComputedModel
from tests.support.tiny_llama import make_tiny_llama

VOCABULARY = 512
POOL_BLOCKS = 160
BLOCK_TOKENS = 8
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """One drawn request."""

    stem: int
    stem_tokens: int
    own_tokens: int
    max_tokens: int
    seed: int
    temperature: float
    at_ms: int

    @property
    def prompt(self) -> list[int]:
        stem = [(self.stem * 97 + 13 * i) % (VOCABULARY - 3) + 3 for i in range(self.stem_tokens)]
        return [*stem, *((self.seed * 31 + 7 * i) % (VOCABULARY - 3) + 3 for i in range(self.own_tokens))]


asks = st.builds(
    Ask,
    stem=st.integers(0, 2),
    stem_tokens=st.sampled_from([0, 7, 8, 16, 40, 41]),
    own_tokens=st.integers(1, 30),
    max_tokens=st.integers(1, 16),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    at_ms=st.integers(0, 200),
)


@pytest.fixture(scope="module", params=["fp16", "fp32", *(["int8", "int16"] if load() is not None else [])])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuModel]:
    folder: Path = tmp_path_factory.mktemp("model")
    arithmetic: Literal["fp16", "int16", "int8", "fp32"] = request.param
    yield CpuModel.load(
        make_tiny_llama(folder / "llama", vocab=VOCABULARY, context=CONTEXT),
        arithmetic=arithmetic,
        kv="fp32" if arithmetic == "fp32" else "fp16",
        pool_blocks=POOL_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        max_step_tokens=CONTEXT,
        max_step_rows=16,
        cache_dir=folder / "cache",
    )


def run(model: CpuModel, asked: list[Ask], *, step: int, chunk: int, rows: int, blocks: int) -> list[Watched]:
    """All of them through the loop, with `blocks` of the pool to use."""
    sim = Simulation(
        Settings(
            max_step_tokens=step,
            max_rows=rows,
            block_tokens=BLOCK_TOKENS,
            context_tokens=CONTEXT,
            chunk_cap_tokens=chunk,
        ),
        blocks,
        model=lambda clock: ComputedModel(clock, model),
    )
    sim.cache.audits = False
    watched = [
        sim.submit(
            ask.prompt,
            ask.max_tokens,
            at_us=1000 * ask.at_ms,
            sampling=Sampling(temperature=ask.temperature, top_p=0.95, seed=ask.seed),
            logprobs=3,
        )
        for ask in asked
    ]
    sim.run_until_idle()
    sim.check_clean()
    return watched


def said(watched: Watched) -> tuple[list[int], list[TokenLogprobs]]:
    finish = watched.answer.finish
    assert finish is not None and finish.reason is FinishReason.LENGTH
    return watched.answer.token_ids, watched.answer.logprobs


few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
mixes = given(
    asked=st.lists(asks, min_size=2, max_size=6),
    step=st.sampled_from([12, 40, 128]),
    chunk=st.sampled_from([3, 8, 17, 64]),
    rows=st.sampled_from([2, 5, 12]),
    blocks=st.sampled_from([12, 16, 120]),
)


@few
@mixes
def test_tokens_and_logprobs_are_those_of_running_alone(
    model: CpuModel, asked: list[Ask], step: int, chunk: int, rows: int, blocks: int
) -> None:
    check(model, asked, step, chunk, rows, blocks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@many
@mixes
def test_tokens_and_logprobs_are_those_of_running_alone_over_many_mixes(
    model: CpuModel, asked: list[Ask], step: int, chunk: int, rows: int, blocks: int
) -> None:
    check(model, asked, step, chunk, rows, blocks)


def check(model: CpuModel, asked: list[Ask], step: int, chunk: int, rows: int, blocks: int) -> None:
    together = run(model, asked, step=step, chunk=chunk, rows=rows, blocks=blocks)
    for ask, watched in zip(asked, together, strict=True):
        (alone,) = run(model, [ask], step=CONTEXT, chunk=CONTEXT, rows=1, blocks=POOL_BLOCKS)
        assert said(watched) == said(alone)


def test_the_mixes_drawn_do_preempt_and_hit(model: CpuModel) -> None:
    """The property above would hold of nothing if nothing of the kind happened."""
    asked = [Ask(1, 40, 3 + i, 24, i, 0.0, 0) for i in range(8)]
    together = run(model, asked, step=40, chunk=17, rows=8, blocks=20)
    finishes = [watched.answer.finish for watched in together]
    assert any(finish is not None and finish.preemptions for finish in finishes)
    assert any(finish is not None and finish.cached_device_tokens for finish in finishes)
    for ask, watched in zip(asked, together, strict=True):
        (alone,) = run(model, [ask], step=CONTEXT, chunk=CONTEXT, rows=1, blocks=POOL_BLOCKS)
        assert said(watched) == said(alone)


@pytest.mark.parametrize("blocks", [20, POOL_BLOCKS])
def test_each_choice_of_a_prompt_says_what_it_would_say_alone(model: CpuModel, blocks: int) -> None:
    """Tokens and log-probabilities, with the partly filled block of the prompt shared and copied; with few blocks,
    preempted too."""
    prompt = Ask(1, 40, 4, 24, 7, 0.0, 0).prompt
    drawn = Sampling(temperature=0.9, top_p=0.95, seed=7)

    def simulation(blocks: int) -> Simulation:
        limits = Settings(
            max_step_tokens=256, max_rows=8, block_tokens=BLOCK_TOKENS, context_tokens=CONTEXT, chunk_cap_tokens=17
        )
        sim = Simulation(limits, blocks, model=lambda clock: ComputedModel(clock, model))
        sim.cache.audits = False
        return sim

    sim = simulation(blocks)
    choices = sim.submit_choices(prompt, 24, 5, sampling=drawn, logprobs=3)
    sim.run_until_idle()
    sim.check_clean()
    for choice, watched in enumerate(choices):
        alone = simulation(POOL_BLOCKS)
        (same,) = alone.submit_choices(prompt, 24, 1, first_choice=choice, sampling=drawn, logprobs=3)
        alone.run_until_idle()
        assert said(watched) == said(same)
    assert len({tuple(watched.answer.token_ids) for watched in choices}) == 5
    preemptions = sum(watched.answer.finish.preemptions for watched in choices if watched.answer.finish)
    assert (preemptions > 0) == (blocks < POOL_BLOCKS)
