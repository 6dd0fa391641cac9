"""The textbook's figures come out of the simulator, and Jitney's are never worse."""

from __future__ import annotations

import pytest

from bench.exercises import run


def test_the_textbook_is_reproduced() -> None:
    table, figures = run()
    swap = figures.pop("swap_1gb_ms")
    assert figures == {
        "overhead_every_step_pct": pytest.approx(3.33),
        "overhead_every_5_pct": pytest.approx(0.67),
        "overhead_1ms_of_10ms_pct": pytest.approx(10),
        "extra_wait_ms": pytest.approx(60),
        "new_request_wait_ms": pytest.approx(75),
        "extra_wait_pct": pytest.approx(0.8),
        "short_static_ms": 10_000,
        "short_continuous_ms": 1000,
        "long_ms": 10_000,
        "tail_idle_pct": pytest.approx(81),
        "recompute_2000_tokens_ms": 500,
    }
    assert swap == {"pcie4": pytest.approx(62.5), "pcie5": pytest.approx(31.25)}
    assert all(
        row.jitney <= row.textbook for row in table if row.unit != "GB/s" and "only its prompt" not in row.question
    )
