"""Who boards a static batch, and which ended rows are computed on."""

from __future__ import annotations

from typing import Any

from jitney.decision import Decision, WaitReason
from jitney.snapshot import Batching, Blocks, Settings, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import ending, running, waiting

PADDED = Settings(max_step_tokens=32, max_rows=8, chunk_cap_tokens=16, batching=Batching.STATIC_PADDED)
DROPPING = Settings(max_step_tokens=32, max_rows=8, chunk_cap_tokens=16, batching=Batching.STATIC_DROPPING)


def situation(settings: Settings, **fields: Any) -> Snapshot:
    return Snapshot(**{"settings": settings, "blocks": Blocks(total=1000, free=1000), **fields})


def decided(settings: Settings, **fields: Any) -> Decision:
    snapshot = situation(settings, **fields)
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def test_a_batch_is_what_waits_when_nothing_runs() -> None:
    decision = decided(PADDED, waiting=waiting(*({"tokens": 100} for _ in range(5))))
    assert decision.admit.id.tolist() == [101, 102, 103, 104, 105]
    assert decision.admit.tokens.tolist() == [16, 13, 1, 1, 1]  # all begin, the first ones with more
    decision = decided(PADDED, waiting=waiting(*({} for _ in range(12))))
    assert decision.admit.rows == 8 and decision.waiting_reasons == ((WaitReason.ROWS, 4),)


def test_nobody_boards_while_it_runs_or_ends() -> None:
    for settings in (PADDED, DROPPING):
        line = waiting({}, {})
        for fields in ({"running": running({})}, {"ending": ending({"id": 9, "held_blocks": 1})}):
            snapshot = situation(settings, waiting=line, **fields)
            decision = decide(snapshot)
            check_decision(snapshot, decision)
            assert not decision.admit.rows and decision.waiting_reasons == ((WaitReason.BATCH, 2),)
            assert "until the batch that runs has ended, 1 rows are left" in explain(snapshot, 102).sentence


def test_ended_rows_are_padding_while_the_batch_runs() -> None:
    ended = ending({"id": 8, "held_blocks": 2}, {"id": 9, "held_blocks": 2})
    assert decided(PADDED, running=running({}), ending=ended).padding_rows.tolist() == [8, 9]
    assert not len(decided(DROPPING, running=running({}), ending=ended).padding_rows)
    assert not len(decided(PADDED, ending=ended).padding_rows)
    joiner = {"waits_for": 8, "computed_tokens": 0, "generated_tokens": 0}  # is served when row 8 leaves
    assert decided(PADDED, running=running({}, joiner), ending=ended).padding_rows.tolist() == [9]


def test_padding_takes_tokens_and_gives_way_when_blocks_are_short() -> None:
    ended = ending(*({"id": 50 + n, "held_blocks": 1} for n in range(4)))
    prefill = {"prompt_tokens": 100, "computed_tokens": 0, "generated_tokens": 0}
    wide = Settings(max_step_tokens=8, max_rows=8, chunk_cap_tokens=16, batching=Batching.STATIC_PADDED)
    assert decided(wide, running=running(prefill), ending=ended).run.tokens.tolist() == [4]
    full = {"prompt_tokens": 16, "computed_tokens": 16}
    decision = decided(PADDED, blocks=Blocks(total=6, free=1), running=running(full, full), ending=ended)
    assert decision.run.rows == 1 and not decision.preempt.rows  # the padding's blocks are free a step later
    assert not len(decision.padding_rows)
