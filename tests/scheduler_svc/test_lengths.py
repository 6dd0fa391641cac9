"""Predicted lengths: the scale, each source, their blend, and the columns that policies read."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.columns import HISTOGRAM_BUCKETS, EndedTable, HistogramTable
from jitney.errors import InvalidRequest
from jitney.features import Feature, count
from jitney.snapshot import Outcome, PolicyChoice, PolicyMemory, PolicyTable, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.lengths import with_lengths
from scheduler_svc.lengths.blend import Blend, Guess, Source
from scheduler_svc.lengths.history import History
from scheduler_svc.lengths.predict import Asked, guess
from scheduler_svc.lengths.scale import MAX_LOG, OCTAVE, length_of, log_of
from scheduler_svc.lengths.signals import Signals
from scheduler_svc.lengths.trees import INPUTS, LengthTable, Trees, inputs_of, read_table, write_table
from scheduler_svc.memory import LENGTHS, Memory
from tests.support.situations import candidates, rows_of, running, waiting


def test_the_scale_is_the_logarithm_rounded_down() -> None:
    lengths = np.arange(1, 5000)
    assert log_of(lengths).tolist() == [math.floor(OCTAVE * math.log2(n) + 1e-9) for n in lengths]
    assert length_of(np.arange(300)).tolist() == [math.floor(2 ** (i / OCTAVE) + 0.5) for i in range(300)]
    assert log_of(np.array([-3, 0, 1 << 40])).tolist() == [0, 0, MAX_LOG]


def histograms(*rows: tuple[int, int, dict[int, int]]) -> HistogramTable:
    """(tenant, endpoint, count by bucket) each."""
    counts = [counts.get(bucket, 0) for _, _, counts in rows for bucket in range(HISTOGRAM_BUCKETS)]
    tenants, endpoints = ([row[n] for row in rows] for n in (0, 1))
    return HistogramTable(np.array(tenants, np.uint32), np.array(endpoints, np.uint32), np.array(counts, np.uint32))


def test_quantiles_of_history() -> None:
    """100 answers of 33 to 45 tokens (bucket 11), 100 of 91 to 128 (bucket 14)."""
    history = History.of(histograms((7, 1, {}), (2, 0, {11: 100, 14: 100})))
    rows = history.rows(np.array([2, 7, 2], np.uint32), np.array([0, 1, 1], np.uint32))
    none = np.full(3, -1)
    p25, p50, p90 = (length_of(q).tolist() for q in history.quantiles(rows, none, (25, 50, 90)))
    assert (p25[0], p50[0], p90[0]) == (38, 45, 117)
    assert history.quantiles(rows, none, (50,))[0].tolist()[1:] == [-1, -1]
    beyond = log_of(np.array([64, 64, 64]))  # only the longer ones count from here on
    assert length_of(history.quantiles(rows, beyond, (50,))[0]).tolist()[0] == 108
    assert history.quantiles(rows, log_of(np.array([128] * 3)), (50,))[0].tolist() == [-1, -1, -1]


@given(st.dictionaries(st.integers(0, 31), st.integers(0, 500)), st.integers(0, 40_000), st.integers(1, 99))
def test_quantiles_are_beyond_what_was_answered_and_rise(counts: dict[int, int], answered: int, percent: int) -> None:
    history = History.of(histograms((1, 1, counts)))
    gone = log_of(np.array([answered])) if answered else np.array([-1])
    low, high = (int(q[0]) for q in history.quantiles(np.array([0]), gone, (percent, 100)))
    assert (low < 0) == (high < 0) and low <= high
    assert low < 0 or low >= gone[0] or answered > 2**15


def test_words_lengthen_and_shorten_before_any_answer() -> None:
    texts = ["What is the capital of France?", "In one word: yes or no?", "Explain in detail, step by step."]
    plain, brief, long = Signals.fresh().predict(np.array([count([text]) for text in texts], np.uint64)).tolist()
    assert brief < plain < long


def spoken(rand: random.Random) -> tuple[int, int]:
    """Features and length of an answer: briefly asked ones a quarter as long."""
    brief = rand.random() < 0.5
    features = int(brief) << 8 * Feature.BRIEF | 40 << 8 * Feature.LENGTH | 1 << 8 * Feature.TURNS
    return features, round(2 ** (7 - 2 * brief + rand.gauss(0, 0.4)))


def test_signals_follow_the_answers() -> None:
    rand, signals = random.Random(5), Signals.fresh()
    for _ in range(400):
        features, length = spoken(rand)
        signals.learn(np.array([features], np.uint64), log_of(np.array([length])))
    brief, plain = (40 << 8 * Feature.LENGTH | 1 << 8 * Feature.TURNS | brief for brief in (1, 0))
    short, long = length_of(signals.predict(np.array([brief, plain], np.uint64))).tolist()
    assert 24 <= short <= 42 and 100 <= long <= 165


def ended(rows: list[tuple[int, int, int]]) -> EndedTable:
    """(features, length, what history said) each."""
    table: EndedTable = rows_of(
        EndedTable,
        [
            {"id": n, "prompt_tokens": 9, "features": f, "generated_tokens": y, "predicted_p50": h, "outcome": 1}
            for n, (f, y, h) in enumerate(rows, 1)
        ],
    )
    return table


def test_the_blend_is_no_worse_than_the_best_and_its_p90_holds() -> None:
    """History knows nothing of the wording, and is off by half an octave."""
    rand, blend = random.Random(1), Blend()
    errors: dict[str, list[int]] = {"history": [], "signals": [], "blend": []}
    within = []
    for number in range(1500):
        features, length = spoken(rand)
        asked = Asked(np.array([features], np.uint64), np.array([9]), log_of(np.array([90])), np.array([-1]))
        said = blend.corrected(guess(asked, blend.signals, None))
        p50, p90 = (int(length_of(q)[0]) for q in blend.blended(said))
        if number >= 500:
            errors["history"].append(abs(int(length_of(said.p50[Source.HISTORY])[0]) - length))
            errors["signals"].append(abs(int(length_of(said.p50[Source.SIGNALS])[0]) - length))
            errors["blend"].append(abs(p50 - length))
            within.append(length <= p90)
        blend.learn(said, blend.blended(said)[1], np.array([length]))
        blend.signals.learn(asked.features, log_of(np.array([length])))
    mean = {name: sum(found) / len(found) for name, found in errors.items()}
    assert mean["blend"] <= 1.02 * min(mean["history"], mean["signals"]) < mean["history"]
    assert 0.85 <= sum(within) / len(within) <= 0.95


TOKENS = st.integers(-1, 2**31 - 1)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), TOKENS, TOKENS), max_size=40))
def test_whatever_ended_it_is_learned_from_within_bounds(rows: list[tuple[int, int, int]]) -> None:
    memory = Memory()
    for _ in range(3):
        with_lengths(snapshot(ended=ended(rows)), memory, wanted=("waiting",))
    blend = Blend.read(memory)
    assert len(memory.write("sjf").content) < 2048
    p50, p90 = blend.blended(blend.corrected(Guess(np.array([[300], [200], [-1]]), np.array([[-1], [-1], [-1]]))))
    assert 0 <= p50[0] <= p90[0]


def table(leaf: int = 0) -> LengthTable:
    """Depth 1: 64 tokens, or 1,024 of more than 10 prompt tokens (input 8)."""
    fine = 64
    logs = [6 * OCTAVE * fine + leaf, 10 * OCTAVE * fine + leaf]
    trees = Trees(1, 0, np.array([len(Feature)]), log_of(np.array([10])), np.array(logs))
    return LengthTable(trees, trees)


def test_a_learned_table_is_read_as_it_was_written() -> None:
    rand = np.random.default_rng(2)
    trees = [
        Trees(3, 7, rand.integers(0, INPUTS, 35), rand.integers(-1, 300, 35), rand.integers(-9999, 9999, 40))
        for _ in range(2)
    ]
    content = write_table(LengthTable(*trees))
    again = read_table(content)
    x = inputs_of(rand.integers(0, 2**63, 50, np.uint64), rand.integers(0, 500, 50), rand.integers(-1, 500, 50))
    assert np.array_equal(again.p50.predict(x), trees[0].predict(x))
    assert write_table(again) == content
    assert np.array_equal(again.p90.predict(x), _slowly(trees[1], x))


def _slowly(trees: Trees, x: np.ndarray) -> list[int]:
    found = []
    for row in x.tolist():
        total = trees.start
        for tree in range(len(trees.leaves) // 8):
            node = 0
            while node < 7:
                at = tree * 7 + node
                node = 2 * node + 1 + (row[int(trees.inputs[at])] > int(trees.thresholds[at]))
            total += int(trees.leaves[tree * 8 + node - 7])
        found.append(max(total // 64, 0))
    return found


@pytest.mark.parametrize("content", [b"", b"JTL1", b"ABCD\1\1" + bytes(40), b"JTL1\1\1" + bytes(3), b"JTL1\x09\1"])
def test_a_damaged_table_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        decide(Snapshot(policy=PolicyChoice(tables=(PolicyTable("lengths", b"x" * 16, content),))))
    assert error.value.field == "policy.tables.lengths" and error.value.limit and error.value.value


def snapshot(**fields: object) -> Snapshot:
    return Snapshot(**{"policy": PolicyChoice("sjf"), **fields})  # type: ignore[arg-type]


def test_predictions_stand_in_the_columns() -> None:
    brief = count(["Answer in one word, yes or no."])
    long = count(["Explain in detail, step by step, in an essay."])
    before = snapshot(
        running=running({"features": long, "predicted_p50": -1}, {"features": brief, "max_new_tokens": 5}),
        waiting=waiting(*({"new_tokens": 4000, "predicted_p50": 99} for _ in range(3))),
        candidates=candidates({"id": 103, "features": brief}, {"id": 102, "features": long}, {"id": 999}),
    )
    after = with_lengths(before, Memory(), wanted=("running", "waiting"))
    assert after.waiting.predicted_p50[0] == 99  # not a candidate: as the executor said
    assert after.waiting.predicted_p50[2] < after.waiting.predicted_p50[1]
    assert (after.waiting.predicted_p90[1:] >= after.waiting.predicted_p50[1:]).all()
    assert after.running.predicted_p50[0] > 90 and after.running.predicted_p50[1] == 5
    assert with_lengths(before, Memory(), wanted=()) is before


def test_a_row_past_its_prediction_is_predicted_longer() -> None:
    rows = running(*({"generated_tokens": n, "max_new_tokens": 4000, "predicted_p50": 50} for n in (1, 100, 1000)))
    after = with_lengths(snapshot(running=rows), Memory(), wanted=("running", "waiting"))
    assert (after.running.predicted_p50[1:] > rows.generated_tokens[1:]).all()


def test_what_was_learned_travels_in_the_memory_beside_the_policys_own() -> None:
    told = snapshot(ended=ended([(1, 30, 90)] * 20), waiting=waiting({}))
    memory = decide(told).memory
    assert memory.policy == "sjf" and Memory.read(memory).get(LENGTHS, 1)
    assert decide(replace(told, memory=memory)).memory != memory
    aborted = replace(told.ended, outcome=np.full(20, Outcome.ABORTED, np.uint8))
    assert Blend.read(Memory.read(decide(replace(told, ended=aborted)).memory)).seen.tolist() == [0, 0, 0]
    assert decide(replace(told, policy=PolicyChoice("fcfs"))).memory == PolicyMemory()


def test_the_learned_table_takes_over_when_it_is_right() -> None:
    """It says 64 tokens, history 500: all answers have 64."""
    known = PolicyTable("lengths", b"d" * 16, write_table(table()))
    memory = PolicyMemory()
    line = waiting({"tokens": 9, "new_tokens": 4000, "predicted_p50": 500})
    looked = {"waiting": line, "candidates": candidates({"id": 101})}
    for _ in range(20):
        told = snapshot(
            policy=PolicyChoice("sjf", tables=(known,)), memory=memory, ended=ended([(0, 64, 500)] * 20), **looked
        )
        memory = decide(told).memory
    after = with_lengths(told, Memory.read(memory), wanted=("running", "waiting"))
    assert 55 <= int(after.waiting.predicted_p50[0]) <= 75
