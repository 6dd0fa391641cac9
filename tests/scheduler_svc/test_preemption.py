"""Who gives way, how, and at what cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np

from jitney.decision import Decision, PreemptionMode, WaitReason
from jitney.snapshot import Blocks, LowerTiers, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.costs import cheapest_cover
from scheduler_svc.decide import decide
from tests.support.decision_checks import check_decision
from tests.support.situations import ending, running, waiting

FULL = Blocks(total=100)
GROWS = {"prompt_tokens": 64, "computed_tokens": 64, "held_blocks": 4}  # its next token needs a block
RATES = Rates(
    to_host_bytes_per_s=10**9,
    to_device_bytes_per_s=2 * 10**9,
    ssd_write_bytes_per_s=5 * 10**8,
    ssd_read_bytes_per_s=10**9,
    prefill_tokens_per_s=4_000,
    block_bytes=10**6,
)


def decided(**fields: Any) -> Decision:
    snapshot = Snapshot(**{"settings": Settings(max_step_tokens=64, max_rows=16), "blocks": FULL, **fields})
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def victims(decision: Decision) -> list[int]:
    ids: list[int] = decision.preempt.id.tolist()
    return ids


def test_a_cover_is_feasible_lean_and_near_the_best() -> None:
    rand = random.Random(5)
    for _ in range(600):
        n = rand.randint(1, 7)
        cost = np.array([rand.randint(0, 50) for _ in range(n)], np.int64)
        gain = np.array([rand.randint(1, 9) for _ in range(n)], np.int64)
        allowed = np.array([rand.random() < 0.8 for _ in range(n)], np.bool_)
        need = rand.randint(0, 20)
        chosen = cheapest_cover(cost, gain, allowed, need).tolist()
        assert len(set(chosen)) == len(chosen) and allowed[chosen].all()
        sets = [
            subset
            for size in range(n + 1)
            for subset in itertools.combinations(np.flatnonzero(allowed).tolist(), size)
            if gain[list(subset)].sum() >= need
        ]
        if not sets:
            assert sorted(chosen) == np.flatnonzero(allowed).tolist()
            continue
        best = min(int(cost[list(subset)].sum()) for subset in sets)
        spent = int(cost[chosen].sum())
        assert int(gain[chosen].sum()) >= need
        assert spent <= 2 * best
        assert all(int(gain[chosen].sum() - gain[row]) < need for row in chosen)
        if best in {int(cost[row]) for (row,) in (s for s in sets if len(s) == 1)}:
            assert spent == best


def test_nobody_leaves_while_there_are_blocks() -> None:
    decision = decided(blocks=Blocks(total=100, free=1, evictable=1, granted=1), running=running(GROWS, GROWS, GROWS))
    assert not victims(decision) and decision.needed_blocks == 3


def test_the_cheapest_row_leaves_and_nobody_boards() -> None:
    rows = running(
        GROWS | {"arrival_us": 1},
        {"prompt_tokens": 200, "computed_tokens": 200, "held_blocks": 13, "arrival_us": 2},
        {"prompt_tokens": 100, "computed_tokens": 100, "held_blocks": 7, "arrival_us": 3},
        {"prompt_tokens": 900, "computed_tokens": 900, "held_blocks": 57, "arrival_us": 4},
    )
    decision = decided(running=rows, waiting=waiting({"tokens": 4}, {}), rates=Rates(prefill_tokens_per_s=4_000))
    assert victims(decision) == [3]
    assert decision.preempt.mode.tolist() == [PreemptionMode.RECOMPUTE]
    assert decision.preempt.recompute_us.tolist() == [101 * 1_000_000 // 4_000]
    assert decision.preempt.move_us.tolist() == [-1] and decision.preempt.for_id.tolist() == [0]
    assert decision.run.id.tolist() == [1, 2, 4] and decision.admit.rows == 0
    assert decision.waiting_reasons == ((WaitReason.BLOCKS, 1), (WaitReason.BEHIND, 1))


def test_shared_blocks_are_neither_freed_nor_lost() -> None:
    small = {"prompt_tokens": 32, "computed_tokens": 32, "held_blocks": 3}
    shares = {"prompt_tokens": 320, "computed_tokens": 320, "held_blocks": 21, "shared_blocks": 20}
    decision = decided(running=running(GROWS, small, shares), rates=Rates(prefill_tokens_per_s=1_000))
    assert victims(decision) == [3] and decision.preempt.recompute_us.tolist() == [1_000]  # 321 less 320 tokens
    all_shared = small | {"shared_blocks": 3}
    assert not victims(decided(running=running(GROWS, all_shared)))


def test_a_row_in_its_prefill_loses_only_what_it_has_computed() -> None:
    begun = {"prompt_tokens": 900, "computed_tokens": 32, "generated_tokens": 0, "held_blocks": 57}
    other = {"prompt_tokens": 64, "computed_tokens": 64, "held_blocks": 5}
    decision = decided(running=running(GROWS, other, begun), rates=Rates(prefill_tokens_per_s=1_000))
    assert victims(decision) == [3] and decision.preempt.recompute_us.tolist() == [32_000]


def test_who_never_leaves() -> None:
    spare = {"prompt_tokens": 30, "computed_tokens": 30, "held_blocks": 2}
    protected = (
        {"id": 1, "arrival_us": 0, **spare},  # the oldest
        {"id": 2, "arrival_us": 1, **spare},  # computes a prefix that 3 waits for
        {"id": 3, "arrival_us": 2, "waits_for": 2, **spare},
        {"id": 4, "arrival_us": 3, "loading": 1, **spare},
        {"id": 5, "arrival_us": 4, "preemptions": 2, **spare},  # at its bound
    )
    decision = decided(running=running(*protected, {"id": 6, "arrival_us": 5, **GROWS}))
    assert victims(decision) == [6]
    decision = decided(running=running(*protected, {"id": 6, "arrival_us": 5, "preemptions": 2, **GROWS}))
    assert victims(decision) == [] and 6 not in decision.run.id
    assert (WaitReason.BLOCKS, 1) in decision.waiting_reasons
    assert decision.coast_victims.tolist() == []


def test_the_bound_gives_way_when_otherwise_nothing_could_run() -> None:
    bound = GROWS | {"preemptions": 2}
    decision = decided(running=running(bound | {"arrival_us": 1}, bound | {"arrival_us": 2}, bound | {"arrival_us": 3}))
    assert victims(decision) == [3] and decision.run.id.tolist() == [1, 2]
    alone = decided(running=running(bound))
    assert not victims(alone) and alone.run.rows == 0


def test_blocks_that_are_coming_are_waited_for() -> None:
    for coming in ({"ending": ending({"id": 9, "held_blocks": 4})}, {"blocks": Blocks(total=100, leaving=4)}):
        decision = decided(running=running(GROWS, {}), **coming)
        assert not victims(decision)
        assert decision.run.rows == 0 and decision.waiting_reasons == ((WaitReason.BLOCKS, 2),)


def test_swap_when_it_is_cheaper_and_there_is_room() -> None:
    big = {"prompt_tokens": 160, "computed_tokens": 160, "held_blocks": 10}
    rows = running(GROWS | {"arrival_us": 0}, big | {"arrival_us": 1, "generated_tokens": 0, "computed_tokens": 159})
    room = TierRoom(free_blocks=50, pin_blocks=50, queue_us=100)
    decision = decided(running=rows, rates=RATES, cpu=room)
    assert victims(decision) == [2] and decision.preempt.mode.tolist() == [PreemptionMode.SWAP_CPU]
    assert decision.preempt.recompute_us.tolist() == [160 * 250]
    assert decision.preempt.move_us.tolist() == [100 + 9 * 1_000 + 9 * 500]  # nine full blocks out and back
    assert decision.run.id.tolist() == [1]  # its last block is free at once, the others are leaving

    lower = running(
        GROWS | {"arrival_us": 0},
        big | {"arrival_us": 1, "lower_blocks": 9, "computed_tokens": 159, "generated_tokens": 0},
    )
    decision = decided(running=lower, rates=RATES, cpu=room)
    assert decision.preempt.move_us.tolist() == [100 + 9 * 500]

    decision = decided(running=rows, rates=replace(RATES, prefill_tokens_per_s=2_000), ssd=room)
    assert decision.preempt.mode.tolist() == [PreemptionMode.SWAP_SSD]
    assert decision.preempt.move_us.tolist() == [100 + 9 * 3_000 + 9 * 1_500]

    for none in (TierRoom(), TierRoom(free_blocks=8, pin_blocks=50), TierRoom(free_blocks=50, pin_blocks=8)):
        decision = decided(running=rows, rates=RATES, cpu=none)
        assert decision.preempt.mode.tolist() == [PreemptionMode.RECOMPUTE]
        assert decision.preempt.move_us.tolist() == [-1]


def test_recompute_when_it_is_cheaper() -> None:
    rows = running(
        GROWS | {"arrival_us": 0}, {"prompt_tokens": 31, "computed_tokens": 31, "held_blocks": 2, "arrival_us": 1}
    )
    slow = Rates(1_000_000, 1_000_000, prefill_tokens_per_s=4_000, block_bytes=10**6)
    decision = decided(running=rows, rates=slow, cpu=TierRoom(free_blocks=50, pin_blocks=50))
    assert decision.preempt.mode.tolist() == [PreemptionMode.RECOMPUTE]
    assert decision.preempt.recompute_us.tolist() == [8_000] and decision.preempt.move_us.tolist() == [2_000_000]


def test_always_or_never_whatever_the_rates() -> None:
    big = {"prompt_tokens": 160, "computed_tokens": 159, "held_blocks": 10, "generated_tokens": 0, "arrival_us": 1}
    rows, room = running(GROWS | {"arrival_us": 0}, big), TierRoom(free_blocks=50, pin_blocks=50)
    slow = replace(RATES, to_host_bytes_per_s=10**6, to_device_bytes_per_s=10**6)
    for use, rates, mode in (
        (LowerTiers.MEASURED, slow, PreemptionMode.RECOMPUTE),
        (LowerTiers.ALWAYS, slow, PreemptionMode.SWAP_CPU),
        (LowerTiers.MEASURED, RATES, PreemptionMode.SWAP_CPU),
        (LowerTiers.NEVER, RATES, PreemptionMode.RECOMPUTE),
    ):
        settings = Settings(max_step_tokens=64, max_rows=16, lower_tiers=use)
        decision = decided(running=rows, rates=rates, cpu=room, settings=settings)
        assert victims(decision) == [2] and decision.preempt.mode.tolist() == [mode], use
    settings = Settings(max_step_tokens=64, max_rows=16, lower_tiers=LowerTiers.ALWAYS)
    decision = decided(running=rows, rates=slow, settings=settings)
    assert decision.preempt.mode.tolist() == [PreemptionMode.RECOMPUTE]  # there is no room


def test_coasting_preempts_the_least_loss_first() -> None:
    rows = running(
        {"arrival_us": 0},
        {"arrival_us": 1, "prompt_tokens": 90, "computed_tokens": 90, "held_blocks": 6},
        {"arrival_us": 2, "prompt_tokens": 30, "computed_tokens": 30, "held_blocks": 2},
        {"arrival_us": 3, "prompt_tokens": 30, "computed_tokens": 30, "held_blocks": 2},
    )
    assert decided(blocks=Blocks(total=100, free=90), running=rows).coast_victims.tolist() == [4, 3, 2]
