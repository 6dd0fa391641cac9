"""priority: who displaces whom, against all choices of victims; inheritance and aging."""

from __future__ import annotations

import itertools
import random
from typing import Any

from jitney.decision import Decision, PreemptionMode, WaitReason
from jitney.snapshot import Blocks, PolicyChoice, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import candidates, ending, running, waiting

SETTINGS = Settings(max_step_tokens=64, max_rows=4)
LOW = {"prompt_tokens": 20, "computed_tokens": 20, "held_blocks": 2}


def snapshot(**fields: Any) -> Snapshot:
    base = {"policy": PolicyChoice("priority"), "settings": SETTINGS, "blocks": Blocks(100, 50)}
    return Snapshot(**{**base, **fields})


def decided(**fields: Any) -> Decision:
    shown = snapshot(**fields)
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def left(decision: Decision) -> dict[int, int]:
    """Victims, and for whom they left."""
    return dict(zip(decision.preempt.id.tolist(), decision.preempt.for_id.tolist(), strict=True))


def test_higher_first_ties_by_arrival_then_id() -> None:
    rand = random.Random(4)
    for _ in range(60):
        rows = [{"priority": rand.randint(-2, 2), "arrival_us": rand.randint(0, 2)} for _ in range(6)]
        keys = {101 + n: (-row["priority"], row["arrival_us"], 101 + n) for n, row in enumerate(rows)}
        decision = decided(settings=Settings(max_rows=6), waiting=waiting(*rows))
        assert decision.admit.id.tolist() == sorted(keys, key=lambda id_: keys[id_])


def test_for_a_row_the_lowest_cheapest_latest_one_leaves_and_nobody_else() -> None:
    rows = running(
        LOW | {"priority": 1, "arrival_us": 0},
        LOW | {"priority": 0, "arrival_us": 1},
        LOW | {"priority": 0, "arrival_us": 2},
        LOW | {"priority": 3, "arrival_us": 3},
    )
    urgent = waiting({"priority": 2}, {"priority": 0})
    decision = decided(running=rows, waiting=urgent)
    assert left(decision) == {3: 101} and decision.admit.id.tolist() == [101]
    assert decision.waiting_reasons == ((WaitReason.ROWS, 1),)
    assert decision.run.id.tolist() == [4, 1, 2]
    assert not left(decided(running=rows, waiting=waiting({"priority": 0})))
    told = explain(snapshot(running=rows, waiting=urgent), 3)
    assert told.state == "preempted" and "to request 101, which outranks it (its priority is 0" in told.sentence


def test_the_only_row_there_is_may_leave() -> None:
    decision = decided(
        settings=Settings(max_rows=1), running=running(LOW | {"priority": -1}), waiting=waiting({"priority": 0})
    )
    assert left(decision) == {1: 101} and decision.admit.id.tolist() == [101]


def test_blocks_are_taken_at_least_cost_from_the_lowest() -> None:
    """Against every set of victims: as many as needed, none of a higher class than must be, near the least cost."""
    rand = random.Random(7)
    seen = 0
    for _ in range(150):
        count = rand.randint(1, 6)
        rows = []
        for n in range(count):
            blocks = rand.randint(1, 5)
            rows.append(
                {
                    "priority": rand.randint(0, 2),
                    "arrival_us": n,
                    "prompt_tokens": 16 * blocks - 8,
                    "computed_tokens": 16 * blocks - 8,
                    "held_blocks": blocks,
                    "max_new_tokens": 4,
                }
            )
        tokens = rand.randint(1, 120)
        urgent = {"priority": rand.randint(1, 3), "tokens": tokens, "new_tokens": 1}
        decision = decided(
            settings=Settings(max_step_tokens=64, max_rows=8),
            blocks=Blocks(100, 1),
            running=running(*rows),
            waiting=waiting(urgent),
            rates=Rates(prefill_tokens_per_s=1_000_000),
        )
        need = -(-tokens // 16) - 1
        lower = [n for n, row in enumerate(rows) if row["priority"] < urgent["priority"]]
        feasible = [
            picked
            for size in range(1, len(lower) + 1)
            for picked in itertools.combinations(lower, size)
            if sum(rows[n]["held_blocks"] for n in picked) >= need
        ]
        chosen = [id_ - 1 for id_ in left(decision)]
        if need <= 0 or not feasible:
            assert not chosen and bool(decision.admit.rows) == (need <= 0)
            continue
        seen += 1
        assert sum(rows[n]["held_blocks"] for n in chosen) >= need and decision.admit.rows == 1
        lowest = min(max(rows[n]["priority"] for n in picked) for picked in feasible)
        assert max(rows[n]["priority"] for n in chosen) == lowest

        def cost(picked: list[int], rows: list[dict[str, int]] = rows) -> int:
            return sum(rows[n]["prompt_tokens"] + 1 for n in picked)

        best = min(cost(list(p)) for p in feasible if max(rows[n]["priority"] for n in p) == lowest)
        assert cost(chosen) <= 2 * best
    assert seen > 40


def test_nobody_leaves_if_that_does_not_suffice() -> None:
    rows = running(LOW | {"priority": 0}, LOW | {"priority": 9})
    decision = decided(blocks=Blocks(100, 1), running=rows, waiting=waiting({"priority": 5, "tokens": 80}))
    assert not left(decision) and decision.waiting_reasons == ((WaitReason.BLOCKS, 1),)


def test_blocks_that_are_coming_are_waited_for() -> None:
    rows = running(LOW, LOW)
    urgent = waiting({"priority": 5, "tokens": 30})
    decision = decided(blocks=Blocks(100), running=rows, waiting=urgent, ending=ending({"id": 9, "held_blocks": 3}))
    assert not left(decision)
    assert left(decided(blocks=Blocks(100), running=rows, waiting=urgent))


def test_who_never_leaves() -> None:
    rows = running(
        LOW | {"preemptions": 2},
        LOW | {"loading": 1},
        LOW | {"id": 3},
        LOW | {"waits_for": 3},
    )
    decision = decided(running=rows, waiting=waiting({"priority": 100}))
    assert not left(decision) and decision.waiting_reasons[0] == (WaitReason.ROWS, 1)


def test_a_joined_prefix_inherits() -> None:
    """3 computes what 4, of high priority, waits for: it stands before 2, and a middling request cannot take it."""
    rows = running(
        LOW | {"priority": 1},
        LOW | {"priority": 1},
        {"priority": -9, "prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0},
        {"priority": 9, "waits_for": 3, "prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0},
    )
    decision = decided(running=rows, waiting=waiting({"priority": 5}))
    assert left(decision) == {2: 101}
    assert decision.run.id.tolist() == [3, 1]


def test_what_a_waiting_request_would_join_inherits() -> None:
    owner = {
        "id": 3,
        "priority": -9,
        "prompt_tokens": 400,
        "computed_tokens": 0,
        "generated_tokens": 0,
        "held_blocks": 25,
    }
    rows = running(LOW | {"id": 1}, owner, LOW | {"id": 2})
    looked = candidates({"id": 101, "pending_blocks": 2, "pending_owner": 3})
    both = waiting({"priority": 9, "tokens": 400}, {"priority": 5, "arrival_us": 0})
    settings = Settings(max_step_tokens=64, max_rows=3)
    decision = decided(settings=settings, running=rows, waiting=both, candidates=looked)
    assert left(decision) == {2: 101, 1: 102}
    assert dict(zip(decision.admit.id.tolist(), decision.admit.tokens.tolist(), strict=True))[101] == 0


def test_a_row_in_need_of_a_block_takes_it_from_the_lowest() -> None:
    grows = {"prompt_tokens": 64, "computed_tokens": 64, "held_blocks": 4}
    rows = running(grows | {"priority": 0, "arrival_us": 0}, LOW | {"priority": 9}, grows | {"priority": -1})
    decision = decided(blocks=Blocks(100), running=rows, rates=Rates(prefill_tokens_per_s=1_000))
    assert left(decision) == {3: 0}  # the cheaper row 2 stays
    assert decision.coast_victims.tolist() == [1]


def test_a_step_that_went_short_still_boards_what_outranks_those_that_did() -> None:
    grows = {"prompt_tokens": 64, "computed_tokens": 64, "held_blocks": 4, "priority": 0}
    rows = running(grows, grows | {"arrival_us": 5})
    decision = decided(blocks=Blocks(100), running=rows, waiting=waiting({"priority": 1, "tokens": 20}))
    assert left(decision) == {2: 0} and decision.admit.id.tolist() == [101]
    same = decided(blocks=Blocks(100), running=rows, waiting=waiting({"priority": 0, "tokens": 20}))
    assert left(same) == {2: 0} and not same.admit.rows


def test_swap_where_it_is_cheaper() -> None:
    rates = Rates(10**9, 10**9, prefill_tokens_per_s=1_000, block_bytes=10**6)
    room = TierRoom(free_blocks=50, pin_blocks=50, queue_us=10)
    rows = running(*(LOW | {"priority": 0} for _ in range(4)))
    decision = decided(running=rows, waiting=waiting({"priority": 1}), rates=rates, cpu=room)
    assert left(decision) == {4: 101} and decision.preempt.mode.tolist() == [PreemptionMode.SWAP_CPU]
    assert decision.preempt.recompute_us.tolist() == [21_000] and decision.preempt.move_us.tolist() == [2_010]
    assert decision.admit.id.tolist() == [101]  # blocks were there, only a row was short
    decision = decided(blocks=Blocks(100), running=rows, waiting=waiting({"priority": 1}), rates=rates, cpu=room)
    assert len(left(decision)) == 1 and not decision.admit.rows  # the victim's blocks are still leaving
    after = decided(
        blocks=Blocks(100, leaving=2),
        running=running(*(LOW | {"priority": 0} for _ in range(3))),
        waiting=waiting({"priority": 1}, {"preemptions": 1, "id": 4, "tokens": 21}),
        rates=rates,
        cpu=room,
    )
    assert not left(after)


def test_aging_raises_by_one_for_each_so_much_time() -> None:
    aging = PolicyChoice("priority", (("aging_us_per_level", 1_000),))
    line = waiting({"priority": 0, "arrival_us": 1_000}, {"priority": 3, "arrival_us": 5_000})
    at = {"policy": aging, "settings": Settings(max_rows=1), "waiting": line}
    assert decided(now_us=5_000, **at).admit.id.tolist() == [101]  # counts as 4
    assert decided(now_us=3_999, **at).admit.id.tolist() == [102]
    rows = running(LOW | {"priority": 3, "arrival_us": 5_000, "admitted_us": 5_000})
    assert not left(decided(now_us=4_500, running=rows, **at))
    told = decided(now_us=5_400, running=rows, **at | {"waiting": line.take(line.id == 101)})
    assert left(told) == {1: 101}
    assert decided(now_us=4_500, running=rows, **at).wake_at_us == 5_000
    raised = running(LOW | {"priority": 0, "arrival_us": 0, "admitted_us": 5_000})  # got its row as a 5
    assert not left(
        decided(
            now_us=9_000,
            policy=aging,
            settings=Settings(max_rows=1),
            running=raised,
            waiting=waiting({"priority": 5, "arrival_us": 9_000}),
        )
    )
