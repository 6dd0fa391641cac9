"""The pure parts of the comparison with other engines: loads, trials, ratios, what the table and last line say."""

from __future__ import annotations

import itertools
import json

import pytest

from bench.peers import figures, measuring
from bench.peers.figures import OURS, Absent, Capacity, Left, Measured, Range, Results, Tried
from bench.peers.loads import LOADS, Ask, asks, climb, trial

VOCABULARY = 49_152


def measured(load: str, peer: str, number: int, tokens_per_s: float, precision: figures.Precision = "fp16") -> Measured:
    return Measured(number, load, peer, precision, 16, 64, tokens_per_s, 100.0, 200.0, 10.0, 20.0, 900.0, 30.0, 0.1)


@pytest.mark.parametrize("name", LOADS)
def test_every_round_asks_for_the_same_lengths_with_other_prompts(name: str) -> None:
    load = LOADS[name]
    first, second = (asks(load, number, VOCABULARY, per_s=2.0) for number in (0, 1))
    assert [(len(a.prompt_ids), a.new_tokens, a.arrival_s) for a in first] == [
        (len(a.prompt_ids), a.new_tokens, a.arrival_s) for a in second
    ]
    assert [a.prompt_ids for a in first] != [a.prompt_ids for a in second]
    assert first == asks(load, 0, VOCABULARY, per_s=2.0)
    for ask in first:
        assert load.prompt_tokens[0] <= len(ask.prompt_ids) <= load.prompt_tokens[1]
        assert load.new_tokens[0] <= ask.new_tokens <= load.new_tokens[1]
        assert len(ask.prompt_ids) + ask.new_tokens <= load.longest
        assert max(ask.prompt_ids) < VOCABULARY


def test_a_smaller_run_has_the_same_means() -> None:
    for scale in (1.0, 0.25):
        got = asks(LOADS["decode_heavy"], 0, VOCABULARY, scale)
        assert len(got) == 64 * scale
        assert sum(ask.new_tokens for ask in got) / len(got) == pytest.approx(136, abs=1)
        assert sum(len(ask.prompt_ids) for ask in got) / len(got) == pytest.approx(40, abs=1)


def test_poisson_arrivals_come_at_the_rate() -> None:
    times = [ask.arrival_s for ask in asks(LOADS["poisson"], 3, VOCABULARY, per_s=0.5)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(64 / 0.5)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) < 0.5 < 4 < max(gaps)


def test_a_trial_is_shorter_and_all_at_once() -> None:
    got = trial(LOADS["poisson"], 9, VOCABULARY)
    assert len(got) == 64
    assert max(len(ask.prompt_ids) for ask in got) == 128
    assert max(ask.new_tokens for ask in got) == 64
    assert {ask.arrival_s for ask in got} == {0.0}


@pytest.mark.parametrize("best", [4, 8, 16, 32, 64])
def test_the_best_slots_are_climbed_to(best: int) -> None:
    candidates = (4, 8, 16, 32, 64)
    tried: dict[int, float] = {}
    while (slots := climb(tried, candidates)) is not None:
        assert slots not in tried
        tried[slots] = 100.0 - abs(candidates.index(slots) - candidates.index(best))
    assert max(tried, key=lambda count: tried[count]) == best
    at = candidates.index(best)
    assert set(candidates[max(0, at - 1) : at + 2]) <= set(tried)


def test_one_candidate_is_tried_once() -> None:
    assert climb({}, (16,)) == 16
    assert climb({16: 1.0}, (16,)) is None


def test_ratios_are_taken_within_a_round() -> None:
    results = Results(
        [
            measured("mixed", OURS, 0, 200.0),
            measured("mixed", "a", 0, 100.0),
            measured("mixed", "b", 0, 90.0, "quantised"),
            measured("mixed", OURS, 1, 100.0),
            measured("mixed", "a", 1, 40.0),
            measured("mixed", "b", 1, 120.0, "quantised"),
            measured("mixed", OURS, 2, 150.0),
        ]
    )
    assert results.best_peer("mixed") == "b"  # a median of 105 over one of 70
    ratio = results.ratio("mixed")
    assert ratio is not None and ratio[1] == "b"
    assert (ratio[0].low, ratio[0].high, ratio[0].rounds) == (100 / 120, 200 / 90, 2)
    at_full = results.ratio("mixed", precisions=("fp16",))
    assert at_full is not None and at_full == (Range(2.25, 2.0, 2.5, 2), "a")
    assert results.ratio("batch1") is None


def test_ranges() -> None:
    assert Range.of([]) is None
    found = Range.of([3.0, 1.0, 2.0])
    assert found == Range(2.0, 1.0, 3.0, 3)
    assert found is not None and found.text(1) == "2.0 (1.0-3.0)"
    assert Range(2.0, 2.0, 2.0, 1).text(1) == "2.0"


def test_a_slow_peer_is_left_out_and_ours_never_is() -> None:
    results = Results(
        [measured("mixed", OURS, 0, 10.0), measured("mixed", "a", 0, 100.0), measured("mixed", "b", 0, 40.0)]
    )
    assert results.too_slow("mixed", 0.5) == [Left("mixed", "b", 0.4, 0.5)]
    results.records += results.too_slow("mixed", 0.5)
    assert results.is_left("mixed", "b")
    assert not results.is_left("decode_heavy", "b")
    assert results.too_slow("mixed", 0.5) == []


def test_records_come_back_from_their_lines() -> None:
    records: list[figures.Record] = [
        measured("mixed", OURS, 0, 200.0),
        Tried("mixed", "a", 8, 50.0),
        Capacity(0, 17.5, 120.0),
        Absent("b", "no compiler"),
        Left("mixed", "a", 0.25, 0.5),
    ]
    back = [figures.from_json(json.loads(json.dumps(figures.to_json(record)))) for record in records]
    assert back == records
    results = Results(back)
    assert results.has("mixed", OURS, 0) and not results.has("mixed", OURS, 1)
    assert results.tried("mixed", "a") == {8: 50.0}
    assert results.is_absent("mixed", "b") and not results.is_absent("mixed", "a")


def test_the_last_line_says_null_for_what_is_missing() -> None:
    empty = figures.last_line(Results(), None)
    assert set(empty.values()) == {None}
    results = Results(
        [
            measured("batch1", OURS, 0, 40.0),
            measured("batch1", "a", 0, 32.0),
            measured("batch1", "b", 0, 64.0, "quantised"),
            measured("prefill_512", OURS, 0, 400.0),
            measured("prefill_512", "a", 0, 400.0),
            measured("prefill_2048", OURS, 0, 300.0),
            measured("prefill_2048", "a", 0, 400.0),
            measured("decode_heavy", OURS, 0, 210.0),
            measured("decode_heavy", "a", 0, 70.0),
            measured("batch32", OURS, 0, 209.0),
        ]
    )
    line = figures.last_line(results, 418.0)
    assert line["ratio_batch1"] == 1.25
    assert line["ratio_batch1_int8"] is None
    assert line["ratio_prefill"] == 0.75
    assert line["ratio_decode_heavy"] == 3.0
    assert line["best_peer"] == "a"
    assert line["ours_tokens_per_s"] == 210.0
    assert line["fraction_of_roofline_b32"] == 0.5
    assert any("prefill_2048" in row and "0.75" in row for row in figures.table(results))


def test_gaps_of_tokens_that_came_together_share_the_time() -> None:
    course = measuring.Course(Ask((1, 2), 4), sent_s=1.0, came=[(1.5, 1), (2.0, 1), (3.0, 2)])
    assert course.tokens == 4
    assert course.ttft_s == 0.5
    assert course.gaps_s() == [0.5, 0.5, 0.5]
