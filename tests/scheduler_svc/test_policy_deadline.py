"""deadline: if any order of up to six requests meets all deadlines, its order does; and hopeless work."""

from __future__ import annotations

import itertools
import random
from typing import Any

from jitney.decision import Decision, RefusalReason, WaitReason
from jitney.snapshot import Blocks, PolicyChoice, Rates, Settings, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from tests.support.decision_checks import check_decision
from tests.support.situations import candidates, running, waiting

MS = 1_000_000
RATES = Rates(step_base_ns=4 * MS, step_per_row_ns=1 * MS, step_per_token_ns=MS // 10)
"""A prompt of 100 tokens takes 15 ms in one chunk, each token of the answer 5.1 ms."""


def snapshot(parameters: dict[str, int] | None = None, **fields: Any) -> Snapshot:
    choice = PolicyChoice("deadline", tuple(sorted((parameters or {}).items())))
    base = {"policy": choice, "settings": Settings(max_rows=6, max_step_tokens=256), "blocks": Blocks(99, 99)}
    return Snapshot(**{**base, "rates": RATES, "now_us": 1_000_000, **fields})


def decided(parameters: dict[str, int] | None = None, **fields: Any) -> Decision:
    shown = snapshot(parameters, **fields)
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def test_whatever_order_meets_all_deadlines_this_one_does() -> None:
    rand = random.Random(5)
    met = 0
    for _ in range(150):
        tokens = [rand.randint(1, 128) for _ in range(rand.randint(1, 6))]
        took = [5_000 + 100 * count for count in tokens]
        due = [1_000_000 + rand.randint(took[n], 90_000) for n in range(len(tokens))]
        rows = [{"tokens": count, "ttft_deadline_us": at} for count, at in zip(tokens, due, strict=True)]

        def meets(order: tuple[int, ...], took: list[int] = took, due: list[int] = due) -> bool:
            ends = itertools.accumulate(took[n] for n in order)
            return all(1_000_000 + end <= due[n] for n, end in zip(order, ends, strict=True))

        if any(meets(order) for order in itertools.permutations(range(len(tokens)))):
            met += 1
            decision = decided(settings=Settings(max_rows=6, max_step_tokens=9999), waiting=waiting(*rows))
            assert meets(tuple(id_ - 101 for id_ in decision.admit.id.tolist()))
    assert met > 30


def test_the_first_token_counts_until_it_is_there() -> None:
    late, soon = 2_000_000, 1_500_000
    line = waiting({"ttft_deadline_us": late, "deadline_us": 9_000_000}, {"deadline_us": soon, "new_tokens": 4})
    assert decided(settings=Settings(max_rows=1), waiting=line).admit.id.tolist() == [102]
    rows = running(
        {"ttft_deadline_us": 1_000_001, "deadline_us": 3_000_000, "generated_tokens": 1},
        {"ttft_deadline_us": 1_900_000, "prompt_tokens": 40, "computed_tokens": 0, "generated_tokens": 0},
    )
    decision = decided(running=rows)
    assert decision.run.id.tolist() == [2, 1]
    assert decision.policy_updates.id.tolist() == [1] and decision.policy_updates.a.tolist() == [1]


def test_hopeless_work_comes_last_or_is_refused() -> None:
    """100 tokens take 15 ms; with ten tokens of answer 66."""
    line = waiting(
        {"tokens": 100, "ttft_deadline_us": 1_014_999},
        {"tokens": 100, "ttft_deadline_us": 1_015_000},
        {"tokens": 100, "deadline_us": 1_065_999, "new_tokens": 10},
        {"tokens": 100, "deadline_us": 1_066_000, "new_tokens": 10},
        {"tokens": 100},
    )
    few = Settings(max_rows=6, max_step_tokens=200)
    assert decided(settings=few, waiting=line).admit.id.tolist() == [102, 104]  # the step's tokens are spent
    assert decided(settings=few, waiting=line).next_candidates.tolist() == [105, 101, 103]
    looked = candidates({"id": 101}, {"id": 102}, {"id": 103})
    refuse = {"refuse_hopeless": 1}
    told = decided(refuse, waiting=line, candidates=looked).refusals
    assert [(r.id, r.reason, r.limit, r.value) for r in told] == [
        (101, RefusalReason.DEADLINE, 14_999, 15_000),
        (103, RefusalReason.DEADLINE, 65_999, 66_000),
    ]
    assert not decided(refuse, waiting=line).refusals  # the cache may have them: not looked up yet
    cached = candidates({"id": 101, "device_hit_blocks": 3})
    assert not decided(refuse, waiting=line, candidates=cached).refusals
    again = waiting({"tokens": 100, "ttft_deadline_us": 1_000_001, "preemptions": 1})
    assert not decided(refuse, waiting=again, candidates=looked).refusals
    assert (
        "needs 15000 us, its deadline leaves 14999"
        in explain(snapshot(refuse, waiting=line, candidates=looked), 101).sentence
    )


def test_feasible_work_takes_the_place_of_hopeless_work() -> None:
    base = {"prompt_tokens": 20, "computed_tokens": 20, "held_blocks": 2}
    rows = running(
        base | {"deadline_us": 1_001_000, "max_new_tokens": 100},
        base | {"deadline_us": 9_000_000, "max_new_tokens": 100},
    )
    urgent = waiting({"ttft_deadline_us": 1_100_000})
    decision = decided(settings=Settings(max_rows=2), running=rows, waiting=urgent)
    assert decision.preempt.id.tolist() == [1] and decision.admit.id.tolist() == [101]
    hopeless = waiting({"ttft_deadline_us": 1_000_100})
    assert not decided(settings=Settings(max_rows=2), running=rows, waiting=hopeless).preempt.rows


def test_it_is_woken_when_something_becomes_hopeless() -> None:
    full: dict[str, Any] = {"settings": Settings(max_rows=1), "running": running({})}
    line = waiting({"tokens": 100, "ttft_deadline_us": 1_500_000}, {"deadline_us": 9_000_000})
    assert decided(waiting=line, **full).wake_at_us == 1_500_000 - 15_000 + 1
    assert decided(waiting=waiting({}), **full).wake_at_us == 0


def test_without_a_deadline_a_request_is_due_a_while_after_its_arrival() -> None:
    """The waiting table tells no arrivals under this policy: marks in its memory do."""
    full: dict[str, Any] = {"settings": Settings(max_rows=1, max_step_tokens=64), "running": running({})}
    first = decided({"best_effort_ms": 1_000}, waiting=waiting({}), **full)
    line = waiting({}, {"deadline_us": 2_100_000, "new_tokens": 2}, {"deadline_us": 1_990_000, "new_tokens": 2})
    then = {"now_us": 1_900_000, "memory": first.memory, "waiting": line, **full}
    assert decided({"best_effort_ms": 1_000}, **then).next_candidates.tolist() == [103, 101, 102]
    assert decided({"best_effort_ms": 2_000}, **then).next_candidates.tolist() == [103, 102, 101]
    assert len(decided({"best_effort_ms": 1}, **then | {"now_us": 9_000_000}).memory.content) < 2_000


def test_nothing_is_hopeless_before_its_deadline_while_no_rate_is_known() -> None:
    line = waiting({"ttft_deadline_us": 1_000_001, "tokens": 900}, {"ttft_deadline_us": 999_999})
    decision = decided(
        {"refuse_hopeless": 1}, rates=Rates(), waiting=line, candidates=candidates({"id": 101}, {"id": 102})
    )
    assert [r.id for r in decision.refusals] == [102] and WaitReason.BEHIND not in dict(decision.waiting_reasons)
