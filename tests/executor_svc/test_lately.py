"""Rates that are told, corrected by what is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cache_svc.tiers import TierLimits
from executor_svc.lately import COPIES_DRAW_US, FADES_US, CopiesLately, Lately, RatesLately
from executor_svc.ports import CopyRates
from executor_svc.rates import FixedRates
from jitney.block_ops import Block
from jitney.snapshot import Rates
from jitney.ticket_ops import Slot
from simulator.clock import VirtualClock
from simulator.copies import VirtualCopies
from simulator.slots import Slots
from simulator.tiers import MB, Link, TierModel
from tests.support.step_plans import Chunk, Sequences

TRUE = 10 * MB
STEP = Rates(prefill_tokens_per_s=50_000, step_base_ns=1_000_000, step_per_token_ns=20_000)


def test_what_is_not_told_is_not_guessed() -> None:
    lately = Lately(1000)
    lately.saw(100, 1_000_000, 0, 5)
    assert lately.rate(0, 5) == 0
    assert lately.rate(77, 5) == 77


def test_what_is_seen_draws_and_fades() -> None:
    lately = Lately(1000)
    lately.saw(1000, 1000, 4_000_000, 0)  # a million a second
    assert lately.rate(4_000_000, 0) == pytest.approx(2_000_000, rel=0.01)  # half of the way, in octaves
    for _ in range(20):
        lately.saw(1000, 1000, 4_000_000, 0)
    assert lately.rate(4_000_000, 0) == pytest.approx(1_000_000, rel=0.01)
    assert lately.rate(4_000_000, FADES_US) == pytest.approx(2_000_000, rel=0.01)
    assert lately.rate(4_000_000, 30 * FADES_US) == pytest.approx(4_000_000, rel=0.01)


def test_rates_that_are_right_stay_as_they_are_told() -> None:
    lately = Lately(1000)
    for now, rate in enumerate((1_000_000, 9_000_000, 1_000_000)):
        lately.saw(rate, 1_000_000, rate, now)
        assert lately.rate(rate, now) == pytest.approx(rate, rel=0.001)


@pytest.mark.parametrize("factor", [0.1, 1.0, 8.0])
def test_copies_are_taken_for_as_fast_as_they_went(factor: float) -> None:
    clock = VirtualClock()
    links = [Link(TRUE, measured=TRUE) for _ in range(2)]
    copies = VirtualCopies(clock, np.zeros((64, 4), np.uint64), TierModel(TierLimits(), MB, *links))
    copies.put_in(Slots(64, 4))
    copies.believed = lambda measured: replace(measured, to_host_bytes_per_s=int(TRUE * factor))
    lately = CopiesLately(copies)
    assert lately.rates(clock.now_us()).to_host_bytes_per_s == int(TRUE * factor)
    for number in range(8):
        copies.store(number, [Block(number)], [Slot(number)], urgent=True)
    while copies.busy:
        clock.wait(None)
        while copies.poll() is not None:
            pass
    rates = lately.rates(clock.now_us())
    assert rates.to_host_bytes_per_s == pytest.approx(TRUE, rel=0.05)
    assert rates.to_device_bytes_per_s == TRUE  # nothing was loaded
    assert lately.rates(clock.now_us() + 30 * FADES_US).to_host_bytes_per_s == pytest.approx(TRUE * factor, rel=0.05)
    assert COPIES_DRAW_US < 8 * MB * 1_000_000 // TRUE


def test_waits_are_in_the_measure_of_the_rates() -> None:
    class Told(VirtualCopies):
        """Waits for eight blocks each way."""

        def rates(self) -> CopyRates:
            return CopyRates(4 * TRUE, 4 * TRUE, 200_000, 200_000)

    clock = VirtualClock()
    links = [Link(TRUE) for _ in range(2)]
    copies = Told(clock, np.zeros((64, 4), np.uint64), TierModel(TierLimits(), MB, *links))
    lately = CopiesLately(copies)
    for _ in range(20):
        links[0].learn(MB, 1_000_000 * MB // TRUE)
    rates = lately.rates(clock.now_us())
    assert rates.to_host_bytes_per_s == pytest.approx(TRUE, rel=0.01)
    assert rates.out_queue_us == pytest.approx(800_000, rel=0.01)
    assert rates.queue_us == 200_000


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_prefill_takes_what_its_steps_took_beside_the_rest(factor: float) -> None:
    told = replace(STEP, prefill_tokens_per_s=int(STEP.prefill_tokens_per_s * factor))
    rates = RatesLately(FixedRates(told))
    for _ in range(2000):
        plan = Sequences(4, 256).plan([Chunk(0, [1], start=9), Chunk(1, [1], start=30), Chunk(2, [1] * 100)])
        rates.observe(plan, (STEP.step_base_ns + STEP.step_per_token_ns * plan.tokens) // 1000)
    assert rates.current().prefill_tokens_per_s == pytest.approx(STEP.prefill_tokens_per_s, rel=0.1)
    assert rates.current().step_per_token_ns == STEP.step_per_token_ns


def test_decodes_say_nothing_of_prefills() -> None:
    rates = RatesLately(FixedRates(STEP))
    rates.observe(Sequences(2, 64).plan([Chunk(0, [1], start=9), Chunk(1, [1], start=30)]), 1_000_000)
    assert rates.current() == STEP
