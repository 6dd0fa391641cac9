"""What is loaded from lower tiers and what is computed anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitney.decision import Decision
from jitney.snapshot import Blocks, LowerTiers, Rates, Settings, Snapshot, TierRoom
from scheduler_svc.decide import decide
from tests.support.decision_checks import check_decision
from tests.support.situations import candidates, running, waiting

RATES = Rates(
    to_device_bytes_per_s=10**9,  # a block in 1 ms
    ssd_read_bytes_per_s=10**8,  # a block in 10 ms more
    prefill_tokens_per_s=1000,  # a block in 16 ms
    block_bytes=10**6,
)


def decided(**fields: Any) -> Decision:
    settings = Settings(max_step_tokens=64, max_rows=8, chunk_cap_tokens=32)
    base: dict[str, Any] = {"settings": settings, "blocks": Blocks(total=1000, free=900), "rates": RATES}
    snapshot = Snapshot(**base | fields)
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def loads(on_cpu: int, on_ssd: int, tokens: int = 640, device: int = 0, **fields: Any) -> tuple[int, int]:
    """Blocks that a request of so many hits loads, and those that it computes though a lower tier has them."""
    hits = {"device_hit_blocks": device, "cpu_hit_blocks": on_cpu, "ssd_hit_blocks": on_ssd}
    decision = decided(waiting=waiting({"tokens": tokens}), candidates=candidates({"id": 101} | hits), **fields)
    return int(decision.admit.load_blocks[0]), decision.skipped_load_blocks


def test_whatever_is_faster() -> None:
    assert loads(10, 0) == (10, 0)
    assert loads(10, 10) == (20, 0)
    assert loads(0, 10) == (10, 0)
    fast = replace(RATES, prefill_tokens_per_s=5000)  # a block in 3.2 ms: faster than by way of the SSD
    assert loads(10, 10, rates=fast) == (10, 10)
    assert loads(0, 10, rates=fast) == (0, 10)
    assert loads(10, 10, rates=replace(RATES, prefill_tokens_per_s=20_000)) == (0, 20)


def test_always_or_never_whatever_the_rates() -> None:
    for use, expected in ((LowerTiers.ALWAYS, (20, 0)), (LowerTiers.NEVER, (0, 20))):
        settings = Settings(max_step_tokens=64, max_rows=8, chunk_cap_tokens=32, lower_tiers=use)
        for rates in (
            RATES,
            Rates(block_bytes=10**6),
            replace(RATES, to_device_bytes_per_s=10**6, ssd_read_bytes_per_s=10**6),
        ):
            assert loads(10, 10, settings=settings, rates=rates) == expected


def test_waits_in_the_queues_count() -> None:
    assert loads(10, 0, cpu=TierRoom(queue_us=149_000)) == (10, 0)
    assert loads(10, 0, cpu=TierRoom(queue_us=150_000)) == (0, 10)
    assert loads(10, 10, ssd=TierRoom(queue_us=49_000)) == (20, 0)
    assert loads(10, 10, ssd=TierRoom(queue_us=51_000)) == (10, 10)


def test_those_that_board_together_queue_behind_each_other() -> None:
    """At 2 ms a block of 16 ms the first gets its 10 in 20 ms, the seventh in 140; the eighth computes."""
    looked = candidates(*({"id": 101 + n, "cpu_hit_blocks": 10} for n in range(8)))
    line = waiting(*({"tokens": 161} for _ in range(8)))
    found = decided(waiting=line, candidates=looked, rates=replace(RATES, to_device_bytes_per_s=5 * 10**8))
    assert found.admit.load_blocks.tolist() == [10] * 7 + [0] and found.skipped_load_blocks == 10


def test_rates_that_are_not_known() -> None:
    """A copy is taken to be faster than a prefill, the SSD is not."""
    assert loads(10, 10, rates=Rates()) == (10, 10)
    assert loads(10, 10, rates=Rates(ssd_read_bytes_per_s=10**8, block_bytes=10**6)) == (20, 0)
    assert loads(10, 10, rates=replace(RATES, prefill_tokens_per_s=0)) == (20, 0)


def test_a_load_takes_blocks_but_no_tokens_and_the_rest_is_computed_later() -> None:
    """2 of 40 blocks are on the device, 30 come: it takes 38 and runs none; the next one gets all tokens."""
    hits = {"id": 101, "device_hit_blocks": 2, "unheld_hit_blocks": 2, "cpu_hit_blocks": 30}
    line = waiting({"tokens": 640}, {"tokens": 640})
    found = decided(waiting=line, candidates=candidates(hits), running=running({}))
    assert found.admit.id.tolist() == [101, 102]
    assert found.admit.tokens.tolist() == [0, 32] and found.admit.blocks.tolist() == [38, 40]
    assert found.admit.load_blocks.tolist() == [30, 0]


def test_it_boards_when_the_tokens_of_the_step_are_spent() -> None:
    busy = running(*({} for _ in range(4)))
    settings = Settings(max_step_tokens=4, max_rows=8)
    line = waiting({"tokens": 640})
    assert not decided(settings=settings, running=busy, waiting=line).admit.rows
    looked = candidates({"id": 101, "cpu_hit_blocks": 1})
    assert decided(settings=settings, running=busy, waiting=line, candidates=looked).admit.rows == 1


def test_no_more_than_the_whole_blocks_of_the_prompt() -> None:
    assert loads(90, 0, tokens=640) == (40, 0)
    assert loads(90, 9, tokens=639, device=30) == (9, 0)
    assert loads(90, 9, tokens=15) == (0, 0)


def test_who_joins_a_prefix_loads_nothing() -> None:
    owner = {"id": 5, "prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0, "held_blocks": 25}
    hits = {"id": 101, "pending_blocks": 1, "pending_owner": 5, "cpu_hit_blocks": 10}
    found = decided(running=running(owner), waiting=waiting({"tokens": 640}), candidates=candidates(hits))
    assert found.admit.load_blocks.tolist() == [0]
