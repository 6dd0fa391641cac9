"""The model of the GPU backends, with a CPU as its device, against transformers and against itself run otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.model.device_steps import DecodeSteps
from executor_svc.model.model import CpuModel
from executor_svc.sampling_device import Way
from executor_svc.step_plan import SamplingRows, drawn_by
from jitney.errors import InvalidRequest
from tests.support.device_models import torch_cuda_model
from tests.support.random_models import random_hf_model
from tests.support.step_plans import Chunk, Sequences, sampling_rows
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import make_tiny_llama

LENGTHS = (1, 7, 16, 40, 100)
KINDS = ("Llama", "Llama-3", "Mistral", "Qwen2", "Qwen3")
TEXTS = [np.random.default_rng(3).integers(0, 512, length).tolist() for length in LENGTHS]


def oracle(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities `[tokens, vocabulary]` by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(dim=1)
    return found


def check(directory: Path, path: Path, arithmetic: str, tolerance: float) -> None:
    """Prompts in two mixed steps, then decodes beside each other: what was drawn, and how likely it was."""
    sequences = Sequences(len(TEXTS), 128)
    model = torch_cuda_model(path, arithmetic, blocks=sequences.blocks)
    wanted = sampling_rows(len(TEXTS), logprobs=20)
    first = [Chunk(row, text[: len(text) // 2], sample=False) for row, text in enumerate(TEXTS) if len(text) > 1]
    assert len(model.run(sequences.plan(first)).token_ids) == 0
    rest = [Chunk(row, text[len(text) // 2 :], len(text) // 2) for row, text in enumerate(TEXTS)]
    results = [model.run(sequences.plan(rest, wanted))]
    said = [[int(token)] for token in results[0].token_ids]
    for _ in range(3):
        decode = [Chunk(row, said[row][-1:], len(text) + len(said[row]) - 1) for row, text in enumerate(TEXTS)]
        results.append(model.run(sequences.plan(decode, wanted)))
        for row, token in enumerate(results[-1].token_ids.tolist()):
            said[row].append(token)
    for row, text in enumerate(TEXTS):
        expected = oracle(directory, [*text, *said[row]])
        for step, result in enumerate(results):
            here = expected[len(text) - 1 + step]
            assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
            assert abs(result.logprobs[row] - here[said[row][step]]) < tolerance
            assert here.max() - here[said[row][step]] < tolerance
            assert (
                np.abs(result.top_logprobs[row] - here[torch.from_numpy(result.top_ids[row])].numpy()).max() < tolerance
            )


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_transformers(tmp_path: Path, kind: str) -> None:
    directory = random_hf_model(tmp_path / kind, kind)
    check(directory, directory, "fp32", 1e-3)


@pytest.mark.parametrize(("arithmetic", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_from_shards_is_close(tmp_path: Path, arithmetic: str, dtype: torch.dtype) -> None:
    """Of a model whose logits are small enough for its few bits."""
    directory = random_hf_model(tmp_path / "model", "Mistral", dtype=dtype, shard_bytes=50_000, scale=1.0)
    check(directory, directory, arithmetic, 0.05)


def test_gguf_is_transformers(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    check(directory, write_gguf(directory, tmp_path / "tiny.gguf"), "fp32", 1e-3)


def test_it_draws_what_the_cpu_model_draws(tmp_path: Path) -> None:
    """All ways of sampling side by side, in mixed and in decode steps."""
    directory = make_tiny_llama(tmp_path / "model")
    sequences = Sequences(6, 128)
    ours = torch_cuda_model(directory, blocks=sequences.blocks)
    theirs = CpuModel.load(directory, arithmetic="fp32", kv="fp32", pool_blocks=sequences.blocks)
    texts = [np.random.default_rng(row).integers(0, 512, 9 + row).tolist() for row in range(6)]

    def sampling(position: int) -> SamplingRows:
        return SamplingRows(
            temperature=np.array([0, 0.8, 1.2, 0.7, 1.5, 0.9], np.float32),
            top_p=np.array([1, 1, 0.9, 1, 0.8, 1], np.float32),
            top_k=np.array([0, 0, 0, 40, 30, 0], np.int32),
            min_p=np.array([0, 0, 0, 0, 0.01, 0.05], np.float32),
            seed=np.arange(6, dtype=np.uint64) * 7,
            choice=np.zeros(6, np.int32),
            position=np.full(6, position, np.int32),
            logprobs=np.array([-1, 0, 5, -1, 20, 1], np.int32),
        )

    chunks = [Chunk(row, text) for row, text in enumerate(texts)]
    for step in range(8):
        plan = sequences.plan(chunks, sampling(step))
        mine, other = ours.run(plan), theirs.run(plan)
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        for a, b in ((mine.logprobs, other.logprobs), (mine.top_logprobs, other.top_logprobs)):
            assert a is not None and b is not None
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
        assert mine.top_ids is not None and other.top_ids is not None
        assert mine.top_ids.tolist() == other.top_ids.tolist()
        chunks = [Chunk(row, [token], len(texts[row]) + step) for row, token in enumerate(mine.token_ids.tolist())]


def test_a_step_may_be_queued_behind_the_one_that_draws_its_tokens(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    sequences = Sequences(3, 64)
    model = torch_cuda_model(directory, blocks=sequences.blocks)
    texts = [[5, 6, 7], [8], [9, 10]]
    one_by_one = []
    for queued in (False, True):
        plan = sequences.plan([Chunk(row, text) for row, text in enumerate(texts)])
        tokens = [model.run(plan).token_ids]
        for step in range(0, 6, 2):
            named = drawn_by(np.arange(3))
            plans = []
            for ahead in range(2):
                ids = [[int(i)] for i in (named if queued or ahead else tokens[-1])]
                plans.append([Chunk(row, ids[row], len(texts[row]) + step + ahead) for row in range(3)])
            if queued:
                under_way = [model.submit(sequences.plan(chunks)) for chunks in plans]
                tokens += [model.collect(each).token_ids for each in under_way]
            else:
                tokens.append(model.run(sequences.plan(plans[0])).token_ids)
                again = [Chunk(row, [int(tokens[-1][row])], len(texts[row]) + step + 1) for row in range(3)]
                tokens.append(model.run(sequences.plan(again)).token_ids)
        one_by_one.append([each.tolist() for each in tokens])
    assert one_by_one[0] == one_by_one[1]


def test_rows_of_padding_change_nothing(tmp_path: Path) -> None:
    """Batches of every size up to a bucket: the same tokens, and nothing written outside of the rows' own blocks."""
    directory = make_tiny_llama(tmp_path / "model")
    sequences = Sequences(8, 64)
    model = torch_cuda_model(directory, blocks=sequences.blocks)
    model.run(sequences.plan([Chunk(row, [row + 3, 11]) for row in range(8)]))
    pool = model.backend.pool.clone()
    alone = [int(model.run(sequences.plan([Chunk(row, [13], 2)])).token_ids[0]) for row in range(8)]
    for count in (3, 5, 7, 8):
        model.backend.pool.copy_(pool)
        plan = sequences.plan([Chunk(row, [13], 2) for row in range(count)])
        assert model.run(plan).token_ids.tolist() == alone[:count]
        changed = (model.backend.pool != pool).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert changed == sorted(sequences.table[:count, 0].tolist())


def test_a_row_that_does_not_sample_or_write_rides_along(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    sequences = Sequences(3, 64)
    model = torch_cuda_model(directory, blocks=sequences.blocks)
    model.run(sequences.plan([Chunk(row, [row + 3, 11]) for row in range(3)]))
    whole = model.run(sequences.plan([Chunk(row, [13], 2) for row in range(3)], sampling_rows(3, logprobs=2)))
    pool = model.backend.pool.clone()
    plan = sequences.plan(
        [Chunk(0, [13], 2, sample=False, write=False), Chunk(2, [13], 2, write=False)], sampling_rows(1, logprobs=2)
    )
    one = model.run(plan)
    assert one.token_ids.tolist() == whole.token_ids[2:].tolist()
    assert torch.equal(model.backend.pool, pool)
    with pytest.raises(ValueError, match="9 rows"):
        model.run(Sequences(9, 16).plan([Chunk(row, [1]) for row in range(9)]))


def test_a_pool_that_leaves_no_room_for_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, not when the first request of that kind comes."""
    asked = []

    def sample(self: DecodeSteps, way: Way, logprobs: bool) -> None:
        asked.append((way, logprobs))
        if way is Way.FILTERED:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(DecodeSteps, "_sample", sample)
    with pytest.raises(InvalidRequest, match="no room for steps of 8 rows: CUDA out of memory") as refused:
        torch_cuda_model(make_tiny_llama(tmp_path / "model"), blocks=4)
    assert (refused.value.field, refused.value.value) == ("pool_blocks", "4")
    assert asked == [(Way.GREEDY, False), (Way.FILTERED, True)]
