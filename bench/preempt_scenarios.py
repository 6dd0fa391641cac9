"""The simulated scenarios of bench/preempt.py: how fast copies are, and what is believed of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executor_svc.ports import CopyRates
from simulator.tiers import MB

EVEN = 25 * MB
"""Bytes per second at which somewhat more is lost by always swapping than by always recomputing."""
LAG_US = 2_000_000

Speed = Callable[[int], float]
"""True bytes per second at a time."""


def even(_: int) -> float:
    """Neither way is much better."""
    return EVEN


def fast(_: int) -> float:
    """Swapping is better."""
    return 3 * EVEN


def slow(_: int) -> float:
    """Computing again is better."""
    return EVEN / 3


def in_turns(now_us: int) -> float:
    """Fast for five seconds, slow for five."""
    return 3 * EVEN if now_us // 5_000_000 % 2 == 0 else EVEN / 3


def shared(now_us: int) -> float:
    """Half of the time others have most of the link."""
    return 2 * EVEN if now_us // 400_000 % 2 == 0 else EVEN / 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """`believes` makes of the rates measured those that are told."""

    name: str
    copy: Speed = even
    believes: Callable[[CopyRates, int], CopyRates] = lambda rates, now_us: rates
    prefill: float = 1.0  # what is believed of the prefill rate, in parts of the truth
    mixed: bool = False


def _scaled(factor: float) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, _: int) -> CopyRates:
        return CopyRates(
            int(rates.to_host_bytes_per_s * factor),
            int(rates.to_device_bytes_per_s * factor),
            int(rates.queue_us / factor),
            int(rates.out_queue_us / factor),
        )

    return believes


def _of_the_past(copy: Speed) -> Callable[[CopyRates, int], CopyRates]:
    def believes(rates: CopyRates, now_us: int) -> CopyRates:
        rate = copy(max(now_us - LAG_US, 0))
        return CopyRates(int(rate), int(rate), rates.queue_us, rates.out_queue_us)

    return believes


def _alone(rates: CopyRates, _: int) -> CopyRates:
    return CopyRates(2 * EVEN, 2 * EVEN, rates.queue_us, rates.out_queue_us)


SCENARIOS: Sequence[Scenario] = (
    Scenario("copies are fast", fast),
    Scenario("copies are slow", slow),
    Scenario("copies are even"),
    Scenario("fast, believed half", fast, _scaled(0.5)),
    Scenario("slow, believed double", slow, _scaled(2.0)),
    Scenario("fast, prefill believed double", fast, prefill=2.0),
    Scenario("slow, prefill believed half", slow, prefill=0.5),
    Scenario("in turns, told two seconds late", in_turns, _of_the_past(in_turns)),
    Scenario("others on the link", shared, _alone),
    Scenario("in turns", in_turns, _of_the_past(lambda now_us: in_turns(now_us + LAG_US)), mixed=True),
)
