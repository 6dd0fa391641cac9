"""What a step gives to whom: single situations, each with its numbers."""

from __future__ import annotations

from typing import Any

from jitney.decision import Decision, RefusalReason, WaitReason
from jitney.snapshot import Blocks, Settings, Snapshot
from scheduler_svc.decide import decide
from tests.support.decision_checks import check_decision
from tests.support.situations import candidates, ending, running, waiting

ROOMY = Blocks(total=1000, free=1000)
SMALL = Settings(max_step_tokens=32, max_rows=8, chunk_cap_tokens=16)


def decided(**fields: Any) -> Decision:
    snapshot = Snapshot(**{"settings": SMALL, "blocks": ROOMY, **fields})
    decision = decide(snapshot)
    check_decision(snapshot, decision)
    return decision


def runs(decision: Decision) -> dict[int, int]:
    return dict(zip(decision.run.id.tolist(), decision.run.tokens.tolist(), strict=True))


def boards(decision: Decision) -> dict[int, tuple[int, int]]:
    admit = decision.admit
    rows = zip(admit.id.tolist(), admit.tokens.tolist(), admit.blocks.tolist(), strict=True)
    return {id_: (tokens, blocks) for id_, tokens, blocks in rows}


def test_nothing_to_do() -> None:
    decision = decided()
    assert not runs(decision) and not boards(decision) and decision.waiting_reasons == ()
    assert decision.horizon_steps == 1 and decision.chunk_cap_tokens == 16


def test_planned_on_what_is_in_flight() -> None:
    decision = decided(
        running=running(
            {"prompt_tokens": 40, "computed_tokens": 0, "in_flight_tokens": 16, "generated_tokens": 0},  # 24 left
            {"prompt_tokens": 16, "computed_tokens": 0, "in_flight_tokens": 16, "generated_tokens": 0},  # then decodes
            {"prompt_tokens": 16, "computed_tokens": 16, "in_flight_tokens": 1, "generated_tokens": 1},
            {
                "generated_tokens": 4,
                "computed_tokens": 19,
                "in_flight_tokens": 1,
                "max_new_tokens": 5,
                "held_blocks": 2,
            },
        )
    )
    assert runs(decision) == {1: 16, 2: 1, 3: 1}
    assert decision.needed_blocks == 2  # of 2 and 3, whose prompt filled its block


def test_decodes_come_before_chunks() -> None:
    decode = {"prompt_tokens": 8, "computed_tokens": 8}
    prefill = {"prompt_tokens": 40, "computed_tokens": 0, "generated_tokens": 0}
    settings = Settings(max_step_tokens=4, max_rows=8, chunk_cap_tokens=16)
    decision = decided(settings=settings, running=running(prefill, decode, decode, decode))
    assert runs(decision) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_several_prefills_at_once_and_long_ones_take_half() -> None:
    long = {"prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0}
    short = {"prompt_tokens": 10, "computed_tokens": 0, "generated_tokens": 0}
    assert runs(decided(running=running(long, long, short))) == {1: 16, 3: 10, 2: 6}
    assert runs(decided(running=running(long, long, long))) == {1: 16, 2: 16}
    decision = decided(running=running(long), waiting=waiting({"tokens": 10}, {"tokens": 200}))
    assert runs(decision) == {1: 16}
    assert boards(decision) == {101: (10, 1), 102: (6, 13)}


def test_a_whole_prompt_must_fit() -> None:
    blocks = Blocks(total=20, free=3, evictable=2)
    decision = decided(blocks=blocks, running=running({}), waiting=waiting({"tokens": 16}, {"tokens": 70}, {}))
    assert boards(decision) == {101: (16, 1)}
    assert decision.waiting_reasons == ((WaitReason.BLOCKS, 1), (WaitReason.BEHIND, 1))
    assert decision.next_candidates.tolist() == [102, 103]


def test_what_is_kept_for_running_rows_does_not_board() -> None:
    near = {"prompt_tokens": 15, "computed_tokens": 15}  # writes the last slot of its block in this step
    decision = decided(blocks=Blocks(total=20, free=2), running=running(near, near), waiting=waiting({"tokens": 4}))
    assert not boards(decision) and decision.waiting_reasons == ((WaitReason.BLOCKS, 1),)
    far = {"prompt_tokens": 2, "computed_tokens": 2}
    decision = decided(blocks=Blocks(total=20, free=2), running=running(far, far), waiting=waiting({"tokens": 4}))
    assert boards(decision) == {101: (4, 1)}


def test_the_configured_reserve_yields_only_to_an_empty_pool() -> None:
    settings = Settings(max_step_tokens=64, max_rows=8, block_reserve=5)
    whole = waiting({"tokens": 160})
    assert boards(decided(settings=settings, blocks=Blocks(total=10, free=10), waiting=whole)) == {101: (64, 10)}
    both = decided(settings=settings, blocks=Blocks(total=10, free=10), waiting=waiting({"tokens": 64}, {"tokens": 32}))
    assert boards(both).keys() == {101}


def test_hits_are_not_computed_again_and_unheld_ones_are_not_free_any_more() -> None:
    looked = candidates({"id": 101, "device_hit_blocks": 3, "unheld_hit_blocks": 3})
    fits = decided(blocks=Blocks(total=9, evictable=4, free=1), waiting=waiting({"tokens": 70}), candidates=looked)
    assert boards(fits) == {101: (16, 2)}
    short = decided(
        blocks=Blocks(total=9, evictable=4), running=running({}), waiting=waiting({"tokens": 70}), candidates=looked
    )
    assert not boards(short)


def test_a_wholly_cached_prompt_computes_its_last_token() -> None:
    looked = candidates({"id": 101, "device_hit_blocks": 4})
    assert boards(decided(waiting=waiting({"tokens": 64}), candidates=looked)) == {101: (1, 0)}


def test_joining_a_prefix_that_is_being_computed() -> None:
    owner = {"id": 5, "prompt_tokens": 400, "computed_tokens": 0, "generated_tokens": 0, "held_blocks": 25}
    looked = candidates({"id": 101, "device_hit_blocks": 1, "pending_blocks": 2, "pending_owner": 5})
    joins = decided(running=running(owner), waiting=waiting({"tokens": 64}), candidates=looked)
    assert boards(joins) == {101: (0, 3)}
    gone = decided(running=running(owner | {"id": 6}), waiting=waiting({"tokens": 64}), candidates=looked)
    assert boards(gone)[101][0] > 0


def test_rows_that_wait_run_no_token() -> None:
    rows = running({"id": 1}, {"id": 2, "waits_for": 1}, {"id": 3, "loading": 1})
    decision = decided(running=rows)
    assert runs(decision) == {1: 1}
    assert decision.waiting_reasons == ((WaitReason.PREFIX, 1), (WaitReason.LOAD, 1))


def test_rows_and_tokens_run_out() -> None:
    settings = Settings(max_step_tokens=32, max_rows=2)
    decision = decided(settings=settings, running=running({}, {}), waiting=waiting({}, {}, {}))
    assert decision.waiting_reasons == ((WaitReason.ROWS, 3),)
    settings = Settings(max_step_tokens=3, max_rows=20, chunk_cap_tokens=2)
    decision = decided(settings=settings, running=running({}, {}), waiting=waiting({}, {}, {}))
    assert boards(decision) == {101: (1, 1)} and decision.waiting_reasons == ((WaitReason.TOKENS, 2),)


def test_ending_rows_hold_no_row_but_their_blocks() -> None:
    settings = Settings(max_step_tokens=32, max_rows=1)
    last = ending({"id": 9, "held_blocks": 8})
    assert boards(
        decided(settings=settings, blocks=Blocks(total=10, free=2), ending=last, waiting=waiting({"tokens": 32}))
    )
    assert not boards(
        decided(settings=settings, blocks=Blocks(total=10, free=2), ending=last, waiting=waiting({"tokens": 33}))
    )


def test_what_can_never_fit_is_refused_and_holds_up_nobody() -> None:
    """Case 1."""
    pool = Blocks(total=50, free=50)
    line = waiting({"tokens": 51 * 16}, {"tokens": 16}, {"tokens": 50 * 16 + 1})
    decision = decided(blocks=pool, waiting=line)
    assert [(r.id, r.reason, r.limit, r.value, r.retry_after_us) for r in decision.refusals] == [
        (101, RefusalReason.NEVER_FITS, 50, 51, 0),
        (103, RefusalReason.NEVER_FITS, 50, 51, 0),
    ]
    assert boards(decision) == {102: (16, 1)} and decision.waiting_reasons == ()
    for tokens in (50 * 16, 50 * 16 - 1):
        assert boards(decided(blocks=pool, waiting=waiting({"tokens": tokens, "new_tokens": 1})))[101][1] == 50


def test_a_pool_that_is_not_known_yet_refuses_nobody() -> None:
    decision = decided(blocks=Blocks(), waiting=waiting({}))
    assert not decision.refusals and not boards(decision)


def test_a_row_that_holds_the_whole_pool_leaves_when_it_needs_more() -> None:
    row = {"prompt_tokens": 48, "computed_tokens": 48, "held_blocks": 3}
    decision = decided(blocks=Blocks(total=3), running=running(row), waiting=waiting({"tokens": 1}))
    assert decision.preempt.id.tolist() == [1] and not boards(decision)
    back = decided(blocks=Blocks(total=3, free=3), waiting=waiting({"tokens": 49}))
    assert back.refusals[0].reason is RefusalReason.NEVER_FITS


def test_many_equal_arrivals_board_in_the_order_of_submission() -> None:
    """Case 10: ties are broken by id, and nothing else."""
    settings = Settings(max_step_tokens=2000, max_rows=120)
    same = [{"arrival_us": 7, "priority": 5, "id": 1000 - n} for n in range(200)]
    decision = decided(settings=settings, waiting=waiting(*same))
    assert decision.admit.id.tolist() == list(range(801, 921))
    assert decision.next_candidates.tolist() == list(range(921, 985))


def test_at_the_bound_only_with_the_whole_length() -> None:
    settings = Settings(max_step_tokens=64, max_rows=8, max_preemptions=2)
    again = {"tokens": 32, "new_tokens": 33, "preemptions": 2}  # 64 tokens in KV at its end
    rows = running({"prompt_tokens": 4, "computed_tokens": 4})
    decision = decided(settings=settings, blocks=Blocks(total=9, free=3), running=rows, waiting=waiting(again))
    assert not boards(decision) and decision.waiting_reasons == ((WaitReason.BOUND, 1),)
    decision = decided(settings=settings, blocks=Blocks(total=9, free=4), running=rows, waiting=waiting(again, {}))
    assert boards(decision) == {101: (32, 2)}  # the other two blocks stay kept for it
    running_again = {"prompt_tokens": 32, "computed_tokens": 32, "max_new_tokens": 33, "preemptions": 2}
    decision = decided(
        settings=settings,
        blocks=Blocks(total=9, free=3),
        running=running(running_again),
        waiting=waiting({"tokens": 4}, {"tokens": 4}),
    )
    assert decision.needed_blocks == 1 and boards(decision) == {101: (4, 1)}


def test_next_candidates_are_the_first_64_that_did_not_board() -> None:
    line = waiting(*({"tokens": 1} for _ in range(100)))
    decision = decided(waiting=line)
    first = len(decision.admit.id)
    assert first == 8 and decision.next_candidates.tolist() == list(range(101 + first, 101 + first + 64))
