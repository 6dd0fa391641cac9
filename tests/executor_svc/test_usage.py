"""What a request costs: missed and generated tokens in full, hits in any tier at a fraction."""

from __future__ import annotations

import pytest

from executor_svc import wire
from executor_svc.request import Finish, FinishReason


@pytest.mark.parametrize(
    ("cached", "price_ppm", "microtokens", "tokens"),
    [
        ((0, 0, 0), 20_000, 130_000_000, 130),
        ((32, 0, 0), 20_000, 98_640_000, 99),
        ((32, 16, 48), 20_000, 35_920_000, 36),
        ((0, 0, 50), 20_000, 81_000_000, 81),
        ((32, 16, 48), 0, 34_000_000, 34),
        ((32, 16, 48), 1_000_000, 130_000_000, 130),
    ],
)
def test_the_price_of_hits(cached: tuple[int, int, int], price_ppm: int, microtokens: int, tokens: int) -> None:
    device, cpu, ssd = cached
    finish = Finish(
        FinishReason.STOP,
        prompt_tokens=100,
        generated_tokens=30,
        cached_device_tokens=device,
        cached_cpu_tokens=cpu,
        cached_ssd_tokens=ssd,
    )
    usage = wire.finished(finish, 30, price_ppm).usage
    assert (usage.billable_microtokens, usage.billable_tokens) == (microtokens, tokens)
    assert (usage.cached_device_tokens, usage.cached_cpu_tokens, usage.cached_ssd_tokens) == cached
