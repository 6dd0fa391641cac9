"""A recorded load under the recorded policy behaves as recorded; under another one, as that one does."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from jitney.decision import Decision
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, decode_snapshot
from jitney.snapshot import Outcome, PolicyChoice, Rates, Settings, Snapshot
from scheduler_svc.policies import BUILT_IN
from simulator.measures import Measures, Targets, jain, measure
from simulator.observed import Observed
from simulator.recorded_load import arrivals, step_time
from simulator.simulation import Simulation
from simulator.what_if import carried, main, read
from tests.support.recorded import recorded, write_segment

SETTINGS = Settings(max_step_tokens=64, max_rows=4, block_tokens=16, context_tokens=1024, chunk_cap_tokens=32)
RATES = Rates(step_base_ns=10_000_000, step_per_token_ns=100_000, prefill_tokens_per_s=10_000)


@functools.cache
def busy() -> tuple[tuple[bytes, bytes], ...]:
    """Four rows, long answers of one tenant in front of short ones of another; one request gives up."""
    rng = random.Random(5)
    sim = Simulation(SETTINGS, pool_blocks=400, rates=RATES)
    sim.cache.audits = False
    sim.scheduler.log = []
    for number in range(60):
        long = number % 3 == 0
        sim.submit(
            rng.choices(range(1000), k=rng.randrange(10, 60)),
            rng.randrange(150, 200) if long else rng.randrange(4, 12),
            at_us=1 + 100_000 * number,
            tenant="long" if long else "short",
        )
    sim.abort(sim.watched[30], 3_500_000)
    sim.run_until_idle()
    return tuple(sim.scheduler.log)


def observed(pairs: tuple[tuple[bytes, bytes], ...]) -> Observed:
    seen = Observed()
    for snapshot, decision in pairs:
        seen.see(decode_snapshot(snapshot), decode_decision(decision))
    return seen


def under(policy: str, folder: Path) -> Measures:
    path = folder / "a.jlog"
    write_segment(path, busy(), round_trip_us=1000)
    with LogReader(path) as log:
        return measure(carried(read(log), PolicyChoice(policy), BUILT_IN), Targets())


def test_a_log_tells_arrivals_and_true_lengths() -> None:
    seen = observed(busy())
    ended = [life for life in seen.lives.values() if life.completed]
    assert len(seen.lives) == 60 and len(ended) >= 58
    load = {arrival.id: arrival for arrival in arrivals(seen)}
    for life in ended:
        arrival = load[life.id]
        assert arrival.output_tokens == life.generated_tokens == life.max_new_tokens == arrival.max_tokens
        assert len(arrival.prompt_ids) == life.prompt_tokens and arrival.prompt_ids.min() >= 1
        assert arrival.at_us == life.arrival_us - seen.first_us
    given_up = [life for life in seen.lives.values() if life.outcome is Outcome.ABORTED]
    assert len(given_up) == 1 and load[given_up[0].id].gives_up_after_us > 0


def test_the_recorded_policy_meets_what_was_recorded(tmp_path: Path) -> None:
    was, now = measure(observed(busy()), Targets()), under("fcfs", tmp_path)
    assert now.requests == was.requests == 60
    for name in ("ttft_ms_p50", "tpot_ms_p50", "completion_ms_mean", "tokens_per_s"):
        assert getattr(now, name) == pytest.approx(getattr(was, name), rel=0.1), name


def test_fair_sharing_is_fairer_to_those_who_ask_for_little(tmp_path: Path) -> None:
    first, fair = under("fcfs", tmp_path), under("fair", tmp_path)
    assert fair.requests == first.requests
    assert fair.completion_ms_p50 < first.completion_ms_p50


def test_lengths_are_hidden_from_the_policy_and_met_by_the_model(tmp_path: Path) -> None:
    """What a snapshot shows of a request is max_tokens; the answer stops where it stopped."""
    path = tmp_path / "a.jlog"
    write_segment(path, recorded(200))
    with LogReader(path) as log:
        recording = read(log)
    for life in recording.observed.lives.values():
        life.max_new_tokens += 40
    seen = carried(recording, PolicyChoice("sjf"), BUILT_IN)
    for arrival in arrivals(recording.observed):
        life = seen.lives[arrival.id]
        assert life.max_new_tokens == arrival.max_tokens > arrival.output_tokens
        if life.outcome is Outcome.STOP:
            assert life.generated_tokens == arrival.output_tokens
    assert sum(life.outcome is Outcome.STOP for life in seen.lives.values()) > 20


def test_step_times_come_from_the_rates_or_from_the_steps() -> None:
    seen = observed(busy())
    assert step_time(seen)[0] == RATES
    seen.rates = Rates()
    fitted, _ = step_time(seen)
    assert fitted.step_base_ns + 4 * fitted.step_per_row_ns == pytest.approx(10_400_000, rel=0.3)
    assert step_time(Observed())[0].step_base_ns > 0


def test_a_request_that_is_told_twice_or_late_ends_once() -> None:
    seen = observed(busy())
    again = decode_snapshot(busy()[-1][0])
    before = {i: life.ended_us for i, life in seen.lives.items()}
    seen.see(again, Decision())
    assert {i: life.ended_us for i, life in seen.lives.items() if before[i]} == {i: e for i, e in before.items() if e}


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_nothing_observed_measures_as_nothing() -> None:
    seen = Observed()
    seen.see(Snapshot(now_us=5), Decision())
    found = measure(seen, Targets())
    assert (found.requests, found.ttft_ms_p50, found.goodput_per_s) == (0, -1.0, 0.0)


def test_the_command_prints_three_columns_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jlog"
    write_segment(path, busy()[:150])
    assert main([str(path), "--policy=mlfq"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "recorded fcfs" in lines[0] and "simulated mlfq" in lines[0]
    found = json.loads(lines[-1])
    assert found["policy"] == "mlfq" and found["recorded"]["requests"] == found["other"]["requests"]
    for argv in (["--policy=nobody"], ["--policy=fcfs", "x=1"]):
        assert main([str(path), *argv]) == 2
    assert main([str(tmp_path), "--policy=fcfs"]) == 2
    assert capsys.readouterr().err.count("\n") == 3
