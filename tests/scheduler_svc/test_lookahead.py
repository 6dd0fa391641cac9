"""Who stands by for whom, whose blocks count as about to be free, and which prefixes are brought up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitney.decision import Decision
from jitney.snapshot import Blocks, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.decide import decide
from tests.support.decision_checks import check_decision
from tests.support.situations import candidates, running, waiting

ROOMY = Blocks(total=1000, free=900)
DECODE = {"prompt_tokens": 10, "computed_tokens": 10, "max_new_tokens": 2000}


def decided(rows: int, steps: int = 1, **fields: Any) -> Decision:
    settings = Settings(max_step_tokens=64, max_rows=rows, chunk_cap_tokens=16, horizon_steps=steps)
    snapshot = Snapshot(**{"settings": settings, "blocks": ROOMY, **fields})
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def standby(decision: Decision) -> list[tuple[int, int, int]]:
    """(id, tokens of the first chunk, blocks) of each substitute."""
    named = decision.substitutes
    return list(zip(named.id.tolist(), named.tokens.tolist(), named.blocks.tolist(), strict=True))


def line(count: int, tokens: int = 40) -> Any:
    return waiting(*({"tokens": tokens} for _ in range(count)))


def test_at_least_one_stands_by_while_rows_are_short() -> None:
    long = DECODE | {"predicted_p50": 1900}
    assert standby(decided(2, running=running(long, long), waiting=line(3))) == [(101, 16, 3)]
    assert not standby(decided(3, running=running(long, long), waiting=line(1)))  # it boards


def test_as_many_as_are_expected_to_end() -> None:
    """8 rows with a median of 20 tokens to come: 0.28 are expected to end in a step, 2.8 in ten; with one standard
    deviation one and five."""
    rows = running(*[DECODE | {"generated_tokens": 20, "computed_tokens": 29, "predicted_p50": 40}] * 8)
    assert [len(standby(decided(8, steps, running=rows, waiting=line(20)))) for steps in (1, 10)] == [1, 5]
    assert len(standby(decided(8, 10, running=rows, waiting=line(2)))) == 2


def test_certain_ends_within_the_horizon() -> None:
    """A row with 3 tokens to go leaves its row for the last two of five steps, and for none of three."""
    sure = {"prompt_tokens": 10, "computed_tokens": 16, "generated_tokens": 7, "max_new_tokens": 10}
    sure |= {"predicted_p50": 1900}
    far = DECODE | {"predicted_p50": 1900}
    rows = running(sure, sure, far)
    assert len(standby(decided(3, 5, running=rows, waiting=line(9)))) == 3
    assert len(standby(decided(3, 3, running=rows, waiting=line(9)))) == 1


def test_only_with_blocks_that_nobody_needs() -> None:
    far = DECODE | {"prompt_tokens": 2, "computed_tokens": 2}
    rows = running(far, far)
    enough = Blocks(total=20, free=4)
    assert standby(decided(2, blocks=enough, running=rows, waiting=line(3))) == [(101, 16, 3)]
    assert not standby(decided(2, blocks=Blocks(total=20, free=2), running=rows, waiting=line(3)))
    near = DECODE | {"prompt_tokens": 15, "computed_tokens": 15}  # each is about to need a block
    assert not standby(decided(2, blocks=enough, running=running(near, near), waiting=line(3)))


def test_not_who_joins_a_prefix() -> None:
    owner = {"id": 5, "prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0, "held_blocks": 25}
    looked = candidates({"id": 101, "device_hit_blocks": 1, "pending_blocks": 1, "pending_owner": 5})
    found = decided(2, running=running(owner, DECODE | {"id": 6}), waiting=line(3), candidates=looked)
    assert not standby(found)


def test_tokens_that_are_left() -> None:
    """Six decodes leave 58 of 64 tokens; a substitute takes the token of the row that it replaces, and of these."""
    rows = running(*[DECODE | {"generated_tokens": 20, "computed_tokens": 29, "predicted_p50": 22}] * 6)
    found = standby(decided(6, 20, running=rows, waiting=line(9)))
    assert [tokens for _, tokens, _ in found] == [16, 16, 16, 14, 1, 1]


def test_a_row_that_ends_in_this_step_is_waited_for() -> None:
    """Its block is free a step later: nobody is preempted for the one that needs it."""
    last = {"prompt_tokens": 10, "computed_tokens": 14, "generated_tokens": 5, "max_new_tokens": 6}
    full = {"prompt_tokens": 16, "computed_tokens": 16}
    decision = decided(4, blocks=Blocks(total=2), running=running(full, last))
    assert decision.run.id.tolist() == [2] and decision.preempt.rows == 0
    going_on = last | {"max_new_tokens": 60}
    assert decided(4, blocks=Blocks(total=2), running=running(full, going_on)).preempt.id.tolist() == [2]


RATES = Rates(to_device_bytes_per_s=10**9, ssd_read_bytes_per_s=10**8, prefill_tokens_per_s=1000, block_bytes=10**6)


def test_a_substitute_loads_while_it_stands_by() -> None:
    looked = candidates({"id": 101, "cpu_hit_blocks": 20})
    found = decided(1, rates=RATES, running=running(DECODE), waiting=line(1, 400), candidates=looked).substitutes
    assert (found.id.tolist(), found.tokens.tolist(), found.load_blocks.tolist()) == ([101], [16], [20])


def prefetched(**fields: Any) -> dict[int, int]:
    on_ssd = [{"id": id_, "ssd_hit_blocks": 20} for id_ in (104, 105)]
    looked = candidates({"id": 102, "cpu_hit_blocks": 20}, {"id": 103}, *on_ssd)
    fields = {"rates": RATES, "running": running(DECODE), "waiting": line(6, 400), "candidates": looked, **fields}
    fields = {"cpu": TierRoom(free_blocks=50), **fields}
    return dict(zip(*(c.tolist() for _, c in decided(1, **fields).prefetch.columns()), strict=True))


def test_what_the_next_have_on_the_ssd_is_read_while_reads_keep_up() -> None:
    """A block takes 10 ms to read; half a second is the most."""
    assert prefetched() == {104: 20, 105: 20}
    assert prefetched(ssd=TierRoom(queue_us=200_000)) == {104: 20}
    assert prefetched(ssd=TierRoom(queue_us=490_000)) == {}
    assert prefetched(cpu=TierRoom(free_blocks=39)) == {104: 20}
    assert prefetched(rates=Rates()) == {}


def test_nothing_is_read_that_is_faster_computed() -> None:
    """16 tokens in 16 ms, by a copy into the device in 1 ms; then in 0.8 ms."""
    assert prefetched(rates=replace(RATES, prefill_tokens_per_s=20_000)) == {}
