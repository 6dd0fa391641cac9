"""How long decisions hold, and the blocks that are kept for it."""

from __future__ import annotations

from typing import Any

from jitney.decision import Decision, WaitReason
from jitney.snapshot import Blocks, HorizonKind, Settings, Snapshot
from scheduler_svc.decide import decide
from tests.support.decision_checks import check_decision
from tests.support.situations import running, waiting

DECODE = {"prompt_tokens": 10, "computed_tokens": 10}


def decided(steps: int, free: int, **fields: Any) -> Decision:
    settings = Settings(
        max_step_tokens=32,
        max_rows=8,
        chunk_cap_tokens=16,
        horizon_steps=steps,
        horizon_kind=fields.pop("kind", HorizonKind.STEPS),
    )
    snapshot = Snapshot(settings=settings, blocks=Blocks(total=100, free=free), **fields)
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def test_it_is_answered_as_configured() -> None:
    for kind in (HorizonKind.STEPS, HorizonKind.UNTIL_EVENT):
        decision = decided(5, 50, kind=kind, running=running(DECODE))
        assert (decision.horizon_kind, decision.horizon_steps) == (kind, 5)


def test_blocks_for_all_its_steps() -> None:
    """A decode at 10 of 16 tokens: the 7th step from now writes into the next block, the 23rd into the one behind."""
    needed = {steps: decided(steps, 50, running=running(DECODE)).needed_blocks for steps in (1, 6, 7, 22, 23)}
    assert needed == {1: 0, 6: 0, 7: 1, 22: 1, 23: 2}
    few = {**DECODE, "max_new_tokens": 3}
    assert decided(40, 50, running=running(few)).needed_blocks == 0


def test_a_prefill_decodes_once_it_is_through() -> None:
    """48 tokens to come in three chunks of 16, three blocks held: the fourth step needs a block."""
    prefill = {"prompt_tokens": 48, "computed_tokens": 0, "generated_tokens": 0}
    needed = {steps: decided(steps, 50, running=running(prefill)).needed_blocks for steps in (1, 3, 4, 19, 20)}
    assert needed == {1: 0, 3: 0, 4: 1, 19: 1, 20: 2}


def test_it_is_shorter_when_blocks_are() -> None:
    rows = running(DECODE, DECODE, DECODE)
    assert decided(30, 50, running=rows).horizon_steps == 30
    assert decided(30, 5, running=rows).horizon_steps == 22  # three blocks at the 7th step, three more at the 23rd
    assert decided(30, 2, running=rows).horizon_steps == 6


def test_nobody_boards_into_them() -> None:
    """Two blocks for the prompt and one for its answer, beside one for each of the rows that run."""
    line = waiting({"tokens": 32})
    assert decided(7, 4, running=running(DECODE, DECODE), waiting=line).waiting_reasons == ((WaitReason.BLOCKS, 1),)
    assert decided(7, 5, running=running(DECODE, DECODE), waiting=line).admit.rows == 1
    far = {"prompt_tokens": 2, "computed_tokens": 2}
    assert decided(1, 3, running=running(far, far), waiting=line).admit.rows == 1
    assert decided(15, 3, running=running(far, far), waiting=line).admit.rows == 0
