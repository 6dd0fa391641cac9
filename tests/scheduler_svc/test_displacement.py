"""A reorganisation that pays, and no thrash."""

from __future__ import annotations

from typing import Any

import pytest

from jitney.decision import Decision, PreemptionMode, WaitReason
from jitney.snapshot import Blocks, PolicyChoice, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import running, waiting
from tests.support.toy_executor import Toy, ToyExecutor

MS = 1_000_000
SHARED = Rates(prefill_tokens_per_s=20_000, step_base_ns=20 * MS, step_per_row_ns=MS // 10)
"""A step costs nearly the same however many rows it has, so that more rows are more tokens per second."""
SMALL = {"prompt_tokens": 20, "computed_tokens": 20, "held_blocks": 2}
LONG = {"prompt_tokens": 500, "computed_tokens": 500, "held_blocks": 32}
LINE = waiting(*({"tokens": 28, "new_tokens": 100} for _ in range(12)))


def snapshot(**fields: Any) -> Snapshot:
    base = {"settings": Settings(max_rows=32, max_step_tokens=256), "blocks": Blocks(38, 2), "rates": SHARED}
    rows = running(SMALL | {"arrival_us": 0}, LONG | {"arrival_us": 1}, SMALL | {"arrival_us": 2})
    return Snapshot(**{**base, "running": rows, "waiting": LINE, **fields})


def decided(**fields: Any) -> Decision:
    shown = snapshot(**fields)
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def test_a_long_row_leaves_for_many_short_ones() -> None:
    decision = decided()
    assert decision.preempt.id.tolist() == [2] and decision.preempt.for_id.tolist() == [101]
    assert decision.preempt.recompute_us.tolist() == [501 * 50]
    assert decision.admit.rows >= 10
    told = explain(snapshot(), 2)
    assert told.state == "preempted" and "with others yields at least 20 % more tokens per second" in told.sentence


def test_not_for_less_than_a_fifth() -> None:
    by_row = Rates(prefill_tokens_per_s=20_000, step_per_row_ns=20 * MS)  # rows cost what they yield
    assert not decided(rates=by_row).preempt.rows
    assert not decided(rates=Rates(prefill_tokens_per_s=20_000)).preempt.rows  # nothing is known of steps
    assert not decided(rates=Rates(prefill_tokens_per_s=50, step_base_ns=20 * MS)).preempt.rows  # 10 s to come back
    large = waiting({"tokens": 500}, *({} for _ in range(12)))
    assert not decided(waiting=large).preempt.rows  # nobody overtakes the first, and for that alone it does not pay


def test_copies_are_reckoned_with() -> None:
    slow = Rates(10**7, 10**7, prefill_tokens_per_s=50, block_bytes=10**6, step_base_ns=20 * MS)
    room = TierRoom(free_blocks=99, pin_blocks=99)
    assert not decided(rates=slow, cpu=room).preempt.rows
    fast = Rates(10**9, 10**9, prefill_tokens_per_s=50, block_bytes=10**6, step_base_ns=20 * MS)
    decision = decided(rates=fast, cpu=room)
    assert decision.preempt.mode.tolist() == [PreemptionMode.SWAP_CPU] and decision.preempt.move_us.tolist() == [62_000]
    assert decision.preempt.recompute_us.tolist() == [501 * 20_000]


def test_never_against_the_policy_or_the_bound() -> None:
    rows = running(SMALL | {"priority": 1}, LONG | {"priority": 1}, SMALL)
    assert not decided(policy=PolicyChoice("priority"), running=rows).preempt.rows
    rows = running(SMALL, LONG | {"preemptions": 2}, SMALL)
    assert not decided(running=rows).preempt.rows
    rows = running(LONG, SMALL, SMALL)  # the first one stays
    assert not decided(running=rows).preempt.rows


def test_who_was_preempted_boards_again_only_with_a_block_to_spare_for_each_row() -> None:
    rows = running(SMALL, SMALL, SMALL)
    again = waiting({"tokens": 20, "preemptions": 1})
    settings = Settings(max_rows=8, max_preemptions=2)
    tight = decided(settings=settings, blocks=Blocks(20, 4), running=rows, waiting=again)
    assert not tight.admit.rows and tight.waiting_reasons == ((WaitReason.BLOCKS, 1),)
    assert decided(settings=settings, blocks=Blocks(20, 5), running=rows, waiting=again).admit.rows == 1
    new = waiting({"tokens": 20})
    assert decided(settings=settings, blocks=Blocks(20, 2), running=rows, waiting=new).admit.rows == 1
    assert decided(settings=settings, blocks=Blocks(20, 2), running=running(), waiting=again).admit.rows == 1


def grown(policy: str, **tiers: Any) -> ToyExecutor:
    """Answers that outgrow the pool, on a machine that prefills slowly, run to their end."""
    requests = [Toy(id_, 1000 * id_, 60, 90, 90, priority=id_ % 3) for id_ in range(1, 25)]
    rates = Rates(10**8, 10**8, prefill_tokens_per_s=500, block_bytes=10**5)
    settings = Settings(max_step_tokens=64, max_rows=8, chunk_cap_tokens=32)
    executor = ToyExecutor(requests, settings, 40, policy=PolicyChoice(policy), rates=rates, **tiers)
    while executor.busy:
        executor.turn(decide)
        assert executor.step < 3_000
    assert len(executor.ended) == 24 and max(r.preemptions for r in executor.ended) <= 2
    assert executor.preemptions
    return executor


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_where_copies_are_cheaper_victims_are_swapped_and_compute_nothing_again(policy: str) -> None:
    swapped = grown(policy, cpu_blocks=200, copy_us=1_000)
    assert swapped.swaps == swapped.preemptions
    assert swapped.prefilled <= 24 * 60 + swapped.preemptions * 16  # the unfinished last block is computed again
    assert grown(policy).swaps == 0  # no tier
    small = grown(policy, cpu_blocks=9, copy_us=1_000)
    assert small.swaps <= small.preemptions  # and the rest is recomputed
