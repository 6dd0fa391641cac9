"""No row feels how it was batched, chunked or cached: logits bit-equal to those of a sequence computed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_svc.kernels.library import load
from executor_svc.model.model import CpuModel
from tests.support.step_plans import Chunk, Sequences
from tests.support.tiny_llama import make_tiny_llama

SEQUENCES = 7
TOKENS = 70
VARIANTS = (
    *(("fp16", "fp16", True), ("fp32", "fp32", True), ("fp32", "fp16", True), ("fp16", "fp16", False)),
    *([("int8", "fp16", True), ("int16", "fp16", True)] if load() is not None else []),
)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: f"{variant[0]}-kv-{variant[1]}-{variant[2]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    """A tiny model in one arithmetic, with native kernels or torch's."""
    arithmetic, kv, native = request.param
    directory = make_tiny_llama(tmp_path_factory.mktemp("model"), heads=6, hidden=96)
    return CpuModel.load(
        directory,
        arithmetic=arithmetic,
        kv=kv,
        pool_blocks=Sequences(SEQUENCES, TOKENS).blocks,
        cache_dir=directory / "cache",
        native=native,
    )


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """The tokens of every sequence."""
    return np.random.default_rng(1).integers(0, 512, (SEQUENCES, TOKENS)).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(model: CpuModel, texts: list[list[int]]) -> torch.Tensor:
    """Logits `[sequences, tokens, vocabulary]` of every position, one token a step, one sequence a step."""
    sequences = Sequences(SEQUENCES, TOKENS)
    rows = [
        torch.cat([_logits(model, sequences, [Chunk(row, [token], at)]) for at, token in enumerate(text)])
        for row, text in enumerate(texts)
    ]
    return torch.stack(rows)


def _logits(model: CpuModel, sequences: Sequences, chunks: list[Chunk]) -> torch.Tensor:
    logits = model.llama.forward(sequences.plan(chunks))
    assert logits is not None
    return logits.clone()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(
    model: CpuModel, texts: list[list[int]], alone: torch.Tensor, data: st.DataObject
) -> None:
    sequences = Sequences(SEQUENCES, TOKENS, seed=data.draw(st.integers(0, 1000), label="block order"))
    computed = [0] * SEQUENCES
    for _ in range(12):
        rows = data.draw(st.lists(st.integers(0, SEQUENCES - 1), min_size=1, unique=True), label="rows")
        chunks = []
        for row in rows:
            start = computed[row]
            if start == TOKENS or (start and data.draw(st.integers(0, 9), label="back") == 0):
                start = data.draw(st.integers(0, start - 1), label="recomputed from")
            size = data.draw(st.integers(1, TOKENS - start), label="chunk")
            chunks.append(Chunk(row, texts[row][start : start + size], start))
            computed[row] = start + size
        logits = _logits(model, sequences, chunks)
        for index, chunk in enumerate(chunks):
            last = chunk.start + len(chunk.token_ids) - 1
            assert torch.equal(logits[index], alone[chunk.sequence, last]), (chunk.sequence, last)


def test_a_wholly_cached_prompt_runs_its_last_token_unwritten(
    model: CpuModel, texts: list[list[int]], alone: torch.Tensor
) -> None:
    sequences = Sequences(SEQUENCES, TOKENS)
    _logits(model, sequences, [Chunk(0, texts[0][:64])])
    pool = model.backend.pool.clone()
    logits = _logits(model, sequences, [Chunk(0, texts[0][63:64], 63, write=False)])
    assert torch.equal(logits[0], alone[0, 63])
    assert torch.equal(model.backend.pool, pool)


def test_all_prompts_in_one_step(model: CpuModel, texts: list[list[int]], alone: torch.Tensor) -> None:
    sequences = Sequences(SEQUENCES, TOKENS)
    logits = _logits(model, sequences, [Chunk(row, text) for row, text in enumerate(texts)])
    assert torch.equal(logits, alone[:, -1])
    assert model.info.bit_invariant
