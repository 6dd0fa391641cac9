"""The step-time model, and what a target for the time per token leaves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jitney.decision import WaitReason
from jitney.snapshot import Blocks, Rates, Settings, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.step_time import StepTime
from tests.support.situations import running, waiting

RATES = Rates(
    step_base_ns=10_000_000, step_per_row_ns=1_000_000, step_per_token_ns=500_000, step_per_context_token_ps=1_000_000
)
"""10 ms a step, 1 ms a row, 0.5 ms a token, 1 us for each token of context."""
SETTINGS = Settings(max_step_tokens=256, max_rows=64, chunk_cap_tokens=128)
NS = st.integers(0, 10**8)


@given(NS, NS, NS, st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 1000), st.integers(0, 10**4))
def test_bounds_are_the_largest_that_fit(
    base: int, row: int, token: int, context_ps: int, target: int, context: int, rows: int
) -> None:
    model = StepTime(base, row, token, context_ps)
    most = model.rows_within(target, context)
    if most is not None and most > 0:
        assert model.ns(most, most, most * context) <= target < model.ns(most + 1, most + 1, (most + 1) * context) + 1
    tokens = model.tokens_within(target, rows, context)
    if tokens:
        assert model.ns(rows, tokens, context) <= target < model.ns(rows, tokens + 1, context)


def decided(target_us: int, rows: int, line: int = 0, rates: Rates = RATES, **row: int) -> tuple[int, int, int]:
    """Decodes that run, tokens of the step, requests that board."""
    table = running(*({"prompt_tokens": 100, "computed_tokens": 100} | row for _ in range(rows)))
    snapshot = Snapshot(
        settings=replace(SETTINGS, target_tpot_us=target_us),
        blocks=Blocks(total=10_000, free=9_000),
        rates=rates,
        running=table,
        waiting=waiting(*({"tokens": 100} for _ in range(line))),
    )
    decision = decide(snapshot)
    tokens = int(decision.run.tokens.sum()) + int(decision.admit.tokens.sum())
    return decision.run.rows, tokens, decision.admit.rows


def test_prefills_get_what_decodes_leave_of_the_target() -> None:
    """8 decodes over 100 tokens each take 10 + 8 + 4 + 0.8 ms; 37.2 ms are left of 60, 0.5 ms a token."""
    assert decided(60_000, 8, 3) == (8, 8 + 74, 1)
    assert decided(0, 8, 3) == (8, 256, 3)
    assert decided(60_000, 8, 3, rates=Rates()) == (8, 256, 3)


def test_rows_are_bounded_and_those_that_run_go_on() -> None:
    """A decode over 100 tokens takes 1.6 ms: 6 fit 20 ms, 31 fit 60."""
    assert decided(20_000, 8, 3) == (8, 8, 0)
    assert decided(60_000, 31, 3)[2] == 0 < decided(60_000, 30, 3)[2]
    assert decided(1, 0, 3) == (0, 16, 1)  # what cannot be met does not stand still
    snapshot = Snapshot(
        settings=replace(SETTINGS, target_tpot_us=20_000),
        blocks=Blocks(total=10_000, free=9_000),
        rates=RATES,
        running=running(*({} for _ in range(8))),
        waiting=waiting({}, {}),
    )
    assert decide(snapshot).waiting_reasons == ((WaitReason.ROWS, 2),)
