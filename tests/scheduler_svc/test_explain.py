"""One sentence with numbers about one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jitney.decision import WaitReason
from jitney.errors import Missing
from jitney.snapshot import Blocks, Rates, Settings, Snapshot
from scheduler_svc.explain import Explanation, explain
from tests.support.situations import candidates, ending, running, waiting


def said(request: int, **fields: Any) -> Explanation:
    base = {"settings": Settings(max_step_tokens=32, max_rows=4, chunk_cap_tokens=16), "blocks": Blocks(100, 40)}
    return explain(Snapshot(**{**base, **fields}), request)


def test_waiting_for_blocks() -> None:
    settings = Settings(max_rows=4, block_reserve=25)
    told = said(101, settings=settings, blocks=Blocks(100, 37), running=running({}), waiting=waiting({"tokens": 580}))
    assert told.state == "waiting" and told.reason is WaitReason.BLOCKS
    assert "needs 37 blocks, 11 free after 25 reserved" in told.sentence
    assert (told.needed, told.available, told.ahead) == (37, 11, 0)


def test_standing_behind() -> None:
    line = waiting({"tokens": 900}, {}, {})
    told = said(103, blocks=Blocks(100, 10), running=running({}), waiting=line)
    assert told.reason is WaitReason.BEHIND and told.ahead == 2
    assert told.sentence.startswith("stands behind request 101, 2 are ahead of it (fcfs: it arrived ")
    assert "; the first needs 57 blocks, " in told.sentence


def test_waiting_for_a_row_or_tokens_or_its_whole_length() -> None:
    told = said(102, running=running({}, {}, {}, {}), waiting=waiting({}, {}))
    assert (told.reason, told.ahead) == (WaitReason.ROWS, 1) and "all 4 are taken" in told.sentence
    few = Settings(max_step_tokens=1, max_rows=9)
    assert "1 are spent" in said(101, settings=few, running=running({}), waiting=waiting({})).sentence
    again = waiting({"tokens": 32, "new_tokens": 500, "preemptions": 2})
    told = said(101, blocks=Blocks(100, 20), running=running({}), waiting=again)
    assert told.reason is WaitReason.BOUND and "preempted 2 times" in told.sentence


def test_boarding_running_ending_refused() -> None:
    assert said(101, waiting=waiting({"tokens": 40})).sentence == "boards with 16 tokens, takes 3 blocks"
    assert said(1, running=running({})).sentence == "computes its next token, with 1 blocks"
    begun = {"prompt_tokens": 400, "computed_tokens": 100, "generated_tokens": 0}
    assert said(1, running=running(begun)).sentence == "computes 16 of 300 tokens to come, with 25 blocks"
    assert "waits for request 1," in said(2, running=running({}, {"waits_for": 1})).sentence
    assert "frees 3 blocks" in said(9, ending=ending({"id": 9, "held_blocks": 3})).sentence
    told = said(101, waiting=waiting({"tokens": 1601}))
    assert told.state == "refused" and "needs 101 blocks, the pool has 100" in told.sentence


def test_loading_and_what_does_not_pay() -> None:
    rates = Rates(to_device_bytes_per_s=10**9, prefill_tokens_per_s=2000, block_bytes=340_000)
    looked = candidates({"id": 101, "device_hit_blocks": 2, "cpu_hit_blocks": 12})
    fields = {"waiting": waiting({"tokens": 640}), "candidates": looked, "blocks": Blocks(100, 90)}
    assert said(101, rates=rates, **fields).sentence == (
        "boards and waits for its blocks, takes 38 blocks; "
        "12 of its 38 blocks are loaded from the CPU tier, 4.0 ms instead of 96.0 ms of prefill"
    )
    slow = replace(rates, to_device_bytes_per_s=10**7)
    assert said(101, rates=slow, **fields).sentence == (
        "boards with 16 tokens, takes 38 blocks; "
        "12 of its blocks lie in lower tiers, to compute them is faster, at best 408.0 ms instead of 96.0 ms"
    )


def test_preempted() -> None:
    grows = {"prompt_tokens": 64, "computed_tokens": 64, "held_blocks": 4}
    told = said(2, blocks=Blocks(100), running=running(grows, grows))
    assert told.state == "preempted" and "gives 4 blocks to rows that need one (recompute)" in told.sentence
    assert "moving is not possible" in told.sentence


def test_who_is_not_there() -> None:
    with pytest.raises(Missing) as error:
        said(77, running=running({}))
    assert (error.value.field, error.value.value) == ("id", "77")
