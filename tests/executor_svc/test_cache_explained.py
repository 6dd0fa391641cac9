"""Where a prompt leaves the cached prefix, in one sentence."""

from __future__ import annotations

import pytest

from executor_svc.cache_explained import explained, sentence
from jitney.block_ops import ChainHits, RequestId
from jitney.keys import Key

ROOT = Key(b"root")


@pytest.mark.parametrize(
    ("tokens", "hits", "part"),
    [
        (9, ChainHits(), "only whole blocks of 16 are cached"),
        (100, ChainHits(), "at token 0: its first block was never computed here"),
        (100, ChainHits(device_blocks=2), "at token 32: what stands behind was never computed here"),
        (100, ChainHits(device_blocks=1, cpu_blocks=1, ssd_blocks=1), "at token 48: "),
        (100, ChainHits(device_blocks=6), "at token 96, where its last, unfilled block begins"),
        (96, ChainHits(device_blocks=6), "all of it is cached; its last token is computed all the same"),
        (
            100,
            ChainHits(device_blocks=2, pending_blocks=3, pending_owner=RequestId(7)),
            "at token 32: another request computes the next 48 tokens now",
        ),
    ],
)
def test_the_sentence(tokens: int, hits: ChainHits, part: str) -> None:
    assert part in sentence(tokens, 16, hits)


def test_a_hit_leaves_a_token_to_compute() -> None:
    answer = explained(96, 16, ChainHits(device_blocks=4, cpu_blocks=2), [ROOT], "v")
    assert (answer.device_tokens, answer.cpu_tokens, answer.ssd_tokens, answer.hit_tokens) == (64, 32, 0, 95)
    assert (answer.prefix_key, list(answer.keys), answer.model_version) == (b"", [ROOT], "v")
    assert explained(17, 16, ChainHits(), [ROOT, Key(b"k")], "v").prefix_key == b"k"
