"""mlfq: levels, quanta and boosts, and on small cases against a machine that is told in ten lines."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jitney.columns import HISTOGRAM_BUCKETS, HistogramTable, WaitingPolicyTable
from jitney.decision import Decision
from jitney.snapshot import Blocks, PolicyChoice, Settings, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from scheduler_svc.policies.mlfq import Mlfq
from tests.support.decision_checks import check_decision
from tests.support.situations import running, waiting
from tests.support.toy_executor import Toy, ToyExecutor

BOOST_US = 30_000_000


def mlfq(**parameters: int) -> PolicyChoice:
    return PolicyChoice("mlfq", tuple(sorted(parameters.items())))


def snapshot(**fields: Any) -> Snapshot:
    base = {"policy": mlfq(quantum_1=10, quantum_2=20, quantum_3=40), "settings": Settings(max_rows=6)}
    return Snapshot(**{"blocks": Blocks(100, 100), **base, **fields})


def decided(**fields: Any) -> Decision:
    shown = snapshot(**fields)
    decision = decide(shown)
    check_decision(shown, decision)
    return decision


def ran(*rows: tuple[int, int, int]) -> WaitingPolicyTable:
    """(row, what it had generated at its boost, which boost)."""
    row, a, b = zip(*rows, strict=True)
    return WaitingPolicyTable(np.array(row, np.uint32), np.array(a, np.int64), np.array(b, np.int64))


def levels(generated: list[int], **fields: Any) -> list[int]:
    shown = snapshot(waiting=waiting(*({"generated_tokens": g} for g in generated)), **fields)
    ranking = Mlfq(shown.policy).rank(shown, b"")
    assert ranking.waiting_class is not None
    found: list[int] = ranking.waiting_class.tolist()
    return found


def test_a_level_ends_with_its_quantum() -> None:
    boost = 1
    generated = [0, 9, 10, 29, 30, 69, 70, 500]
    own = ran(*((n, 0, boost) for n in range(len(generated))))
    assert levels(generated, waiting_policy=own) == [0, 0, 1, 1, 2, 2, 3, 3]
    three = mlfq(levels=3, quantum_1=10, quantum_2=20)
    assert levels(generated, waiting_policy=own, policy=three) == [0, 0, 1, 1, 2, 2, 2, 2]


def test_a_boost_counts_from_what_was_there() -> None:
    assert levels([50, 50, 50], waiting_policy=ran((0, 45, 1), (1, 20, 1), (2, 0, 0))) == [0, 2, 0]
    later = {"now_us": BOOST_US, "waiting_policy": ran((0, 0, 1), (1, 0, 2))}
    assert levels([50, 50], **later) == [0, 2]


def test_running_rows_are_told_once_a_boost_where_they_stand() -> None:
    rows = running({"generated_tokens": 7}, {"generated_tokens": 9, "policy_a": 3, "policy_b": 2}, {})
    told = decided(now_us=BOOST_US, running=rows).policy_updates
    assert list(zip(told.id.tolist(), told.a.tolist(), told.b.tolist(), strict=True)) == [(1, 7, 2), (3, 1, 2)]


def test_without_quanta_half_of_all_answers_end_on_the_top_level() -> None:
    lengths = np.random.default_rng(1).geometric(0.01, 5_000)
    counts = np.zeros(HISTOGRAM_BUCKETS, np.uint32)
    for length in lengths.tolist():
        counts[int(np.ceil(2 * np.log2(length))) if length > 1 else 0] += 1
    table = HistogramTable(np.array([1], np.uint32), np.array([0], np.uint32), counts)
    ends = Mlfq(mlfq(levels=5)).level_ends(Snapshot(histograms=table)).tolist()
    assert ends == sorted(set(ends)) and len(ends) == 4
    for end, percent in zip(ends, (50, 80, 95, 99), strict=True):
        assert percent <= 100 * np.mean(lengths <= end) <= percent + 14  # a bucket is half an octave
    assert Mlfq(mlfq(levels=3)).level_ends(Snapshot()).tolist() == [128, 384]


def test_a_waiting_one_takes_the_place_of_the_lowest_level() -> None:
    base = {"prompt_tokens": 20, "computed_tokens": 20, "held_blocks": 2, "policy_b": 1}
    rows = running(
        base | {"generated_tokens": 40, "computed_tokens": 59, "held_blocks": 4},
        base | {"generated_tokens": 15, "computed_tokens": 34, "held_blocks": 3},
        base | {"generated_tokens": 1},
    )
    full = {"settings": Settings(max_rows=3), "running": rows, "waiting": waiting({})}
    decision = decided(**full)
    assert decision.preempt.id.tolist() == [1] and decision.admit.id.tolist() == [101]
    assert decision.wake_at_us == 0
    assert not decided(**full | {"policy": mlfq(quantum_1=10, preempt=0)}).preempt.rows
    told = explain(snapshot(**full), 1)
    assert "which outranks it (it is on level 3 of 4, " in told.sentence


def test_it_is_woken_for_the_next_boost_if_somebody_waits_below_the_top() -> None:
    shown = {
        "waiting": waiting({"generated_tokens": 50}),
        "waiting_policy": ran((0, 0, 1)),
        "settings": Settings(max_rows=1),
    }
    assert decided(now_us=5, running=running({}), **shown).wake_at_us == BOOST_US


def three_queues(outputs: dict[int, int], ends: tuple[int, int]) -> list[int]:
    """One token after the other for who holds the row, until somebody on a higher level waits."""
    used, out, holder = dict.fromkeys(outputs, 0), [], 0

    def level(id_: int) -> int:
        return sum(used[id_] >= end for end in ends)

    while used:
        first = min(used, key=lambda id_: (level(id_), id_))
        if holder not in used or level(first) < level(holder):
            holder = first
        used[holder] += 1
        if used[holder] == outputs[holder]:
            del used[holder]
            out.append(holder)
    return out


def test_small_cases_end_as_the_textbook_says() -> None:
    """One row, against three queues. Lengths keep off the quanta's ends, which are seen two steps late."""
    rand = random.Random(3)
    for _ in range(25):
        outputs = {id_: rand.choice([1, 3, 6, 11, 16, 24, 30]) for id_ in range(1, rand.randint(2, 7))}
        requests = [Toy(id_, 0, 4, output, 40) for id_, output in outputs.items()]
        choice = mlfq(levels=3, quantum_1=6, quantum_2=12, boost_s=3600)
        settings = Settings(max_step_tokens=64, max_rows=1, max_preemptions=9)
        executor = ToyExecutor(requests, settings, 100, policy=choice)
        while executor.busy:
            executor.turn(decide)
            assert executor.step < 2_000
        ends = [r.id for r in sorted(executor.ended, key=lambda r: r.ended_step)]
        assert ends == three_queues(outputs, (6, 18)), outputs
