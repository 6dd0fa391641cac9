"""sjf against all orders there are, and what aging means."""

from __future__ import annotations

import itertools
import random

from jitney.snapshot import Blocks, PolicyChoice, Settings, Snapshot
from scheduler_svc.decide import decide
from tests.support.situations import running, waiting


def order(rows: list[dict[str, int]], **parameters: int) -> list[int]:
    """In which the requests board, one row after the other."""
    choice = PolicyChoice("sjf", tuple(sorted(parameters.items())))
    settings = Settings(max_rows=len(rows), max_step_tokens=1000)
    snapshot = Snapshot(policy=choice, settings=settings, blocks=Blocks(99, 99), waiting=waiting(*rows))
    ids: list[int] = decide(snapshot).admit.id.tolist()
    return ids


def test_no_order_of_up_to_six_has_a_smaller_mean_completion() -> None:
    rand = random.Random(1)
    for _ in range(40):
        lengths = {101 + n: rand.randint(1, 60) for n in range(rand.randint(1, 6))}
        rows = [{"predicted_p50": length, "new_tokens": 100, "arrival_us": 0} for length in lengths.values()]

        def total(ids: tuple[int, ...], lengths: dict[int, int] = lengths) -> int:
            return sum(itertools.accumulate(lengths[id_] for id_ in ids))

        best = min(total(ids) for ids in itertools.permutations(lengths))
        assert total(tuple(order(rows))) == best


def test_a_token_weighs_as_much_as_so_much_waiting() -> None:
    rand = random.Random(2)
    for _ in range(100):
        rows = [{"arrival_us": rand.randint(0, 9), "predicted_p50": rand.randint(1, 9)} for _ in range(6)]
        keys = {101 + n: (row["arrival_us"] + 2 * row["predicted_p50"], 101 + n) for n, row in enumerate(rows)}
        assert order(rows, aging_us_per_token=2) == sorted(keys, key=lambda id_: keys[id_])
    assert order([{"predicted_p50": 9}, {"predicted_p50": 1}], aging_us_per_token=0) == [101, 102]


def test_what_is_left_counts() -> None:
    long_but_nearly_done = {"predicted_p50": 90, "generated_tokens": 85, "preemptions": 1, "arrival_us": 0}
    assert order([long_but_nearly_done, {"predicted_p50": 4, "arrival_us": 0}]) == [102, 101]
    assert order([long_but_nearly_done, {"predicted_p50": 6, "arrival_us": 0}]) == [101, 102]
    past_its_prediction = {
        "predicted_p50": 5,
        "generated_tokens": 40,
        "arrival_us": 0,
        "new_tokens": 60,
    }  # 11 are reckoned
    assert order([past_its_prediction, {"predicted_p50": 10, "arrival_us": 0}]) == [102, 101]


def test_an_unknown_length_is_the_configured_one_and_never_above_what_is_allowed() -> None:
    rows = [{"new_tokens": 500, "arrival_us": 0}, {"predicted_p50": 50, "new_tokens": 500, "arrival_us": 0}]
    assert order(rows, unknown_tokens=51) == [102, 101]
    assert order(rows, unknown_tokens=49) == [101, 102]
    assert order([{"new_tokens": 3, "arrival_us": 0}, {"predicted_p50": 4, "arrival_us": 0}]) == [101, 102]


def test_running_rows_stand_by_what_is_left_too() -> None:
    rows = running(
        {"predicted_p50": 90, "generated_tokens": 1, "prompt_tokens": 16},
        {"predicted_p50": 5, "generated_tokens": 1, "prompt_tokens": 16},
    )
    snapshot = Snapshot(
        policy=PolicyChoice("sjf"), settings=Settings(max_step_tokens=1), blocks=Blocks(9, 9), running=rows
    )
    assert decide(snapshot).run.id.tolist() == [2]
