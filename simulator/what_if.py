"""`python -m simulator.what_if LOG --policy NAME [key=value ...]`: a recorded load under another policy.

Recorded arrivals, lengths (which no policy sees) and the machine's speed are carried forward by the simulator, twice:
under the recorded policy, which shows how well the simulation meets what really happened, and under the other one.
Prints what was recorded and both runs side by side, and one JSON line.

What is not in a log is modelled: prompts are made up, and begin alike, tenant by tenant, as far as the cache was seen
to have them; a request that was live when the log began arrives then with all that it had.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from executor_svc.live_request import LiveRequest
from executor_svc.request import Submission
from executor_svc.situation import Policy, Reads
from executor_svc.tenants import TenantLimits, Tenants
from jitney.block_ops import RequestId
from jitney.columns import WaitingTable, columns_of
from jitney.decision import Decision
from jitney.errors import InvalidRequest, JitneyError
from jitney.keys import Root, salt_digest
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, decode_snapshot
from jitney.snapshot import PolicyChoice, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.offline import named, with_tables
from scheduler_svc.policies import PolicyBook
from simulator.clock import VirtualClock
from simulator.measures import Measures, Targets, measure
from simulator.observed import Observed
from simulator.recorded_load import END_TOKEN, Arrival, LengthModel, arrivals, step_time
from simulator.simulation import Simulation
from simulator.text import SilentText

ALL_COLUMNS: Final = frozenset(column.name for column in columns_of(WaitingTable))


@dataclass(frozen=True, slots=True)
class Recording:
    """A log, read once."""

    observed: Observed
    latency_us: int

    @property
    def policy(self) -> PolicyChoice:
        """The one that decided last."""
        return self.observed.policies[-1]


def read(log: LogReader, seconds: float = float("inf")) -> Recording:
    """The first so many seconds of a log. InvalidRequest if there is no decision in it."""
    observed, trips = Observed(), []
    for frame in log:
        snapshot = with_tables(decode_snapshot(frame.snapshot), log.tables)
        if observed.steps and snapshot.now_us < observed.last_us:  # the executor was started again: other ids
            break
        if observed.steps and snapshot.now_us - observed.first_us > seconds * 1e6:
            break
        observed.see(snapshot, decode_decision(frame.decision))
        trips.append(frame.round_trip_us)
    if not trips:
        raise InvalidRequest("the log has no decision", field="log", limit="at least 1", value=0)
    return Recording(observed, max(1, int(median(trips))))


class ObservedScheduler:
    """SchedulerPort on the virtual clock: the real `decide`, observed."""

    def __init__(self, clock: VirtualClock, policies: PolicyBook, latency_us: int) -> None:
        self._clock, self._policies, self._latency_us = clock, policies, latency_us
        self._asked = 0
        self._decision: Decision | None = None
        self.connected = True
        self.observed = Observed()

    def ask(self, snapshot: Snapshot) -> None:
        """Answers after the latency."""
        self._asked += 1
        asked = self._asked

        def answer() -> None:
            if asked == self._asked:
                self._decision = decide(snapshot, self._policies)
                self.observed.see(snapshot, self._decision)

        self._clock.after(self._latency_us, answer)

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision, self._decision = self._decision, None
        return decision


def carried(recording: Recording, choice: PolicyChoice, policies: PolicyBook) -> Observed:
    """The recorded load under a policy. InvalidRequest if it cannot decide by it."""
    policies.choose(choice)
    observed = recording.observed
    rates, step_time_us = step_time(observed)
    models: list[LengthModel] = []

    def model(clock: VirtualClock) -> LengthModel:
        models.append(LengthModel(clock, step_time_us))
        return models[0]

    sim = Simulation(
        observed.settings,
        observed.pool_blocks,
        policy=Policy(choice, reads=Reads(ALL_COLUMNS)),
        rates=rates,
        model=model,
    )
    sim.cache.audits = False
    scheduler = sim.loop.scheduler = ObservedScheduler(sim.clock, policies, recording.latency_us)
    models[0].running = lambda: sim.loop.registry.running
    sim.loop.situation.tenants = Tenants(
        {
            _tenant(number): TenantLimits(weight, observed.max_rows.get(number, 0))
            for number, weight in observed.weights.items()
        }
    )
    left = {arrival.id for arrival in arrivals(observed)}
    for arrival in arrivals(observed):
        models[0].lengths[arrival.id] = arrival.output_tokens
        _submit(sim, arrival, left)
    while left or sim.loop.registry.by_id or sim.model.busy:
        sim.loop.tick()
    end_us = sim.clock.now_us()
    scheduler.observed.see(sim.loop.situation.snapshot(sim.loop.step + 1, end_us), Decision())  # who ended last
    return scheduler.observed


def _tenant(number: int) -> str:
    return f"tenant-{number}"


def _submit(sim: Simulation, arrival: Arrival, left: set[int]) -> None:
    submission = Submission(
        client_id=str(arrival.id),
        prompt_ids=arrival.prompt_ids,
        max_tokens=arrival.max_tokens,
        text=SilentText(),
        stop_token_ids=frozenset({END_TOKEN}),
        priority=arrival.priority,
        tenant=_tenant(arrival.tenant),
        endpoint=f"endpoint-{arrival.endpoint}",
        ttft_deadline_us=arrival.ttft_deadline_us,
        deadline_us=arrival.deadline_us,
        features=arrival.features,
    )
    request = LiveRequest(RequestId(arrival.id), submission, Root("", "recorded"), salt_digest(""), None)

    def arrive() -> None:
        left.discard(arrival.id)
        sim.loop.intake.submit([request], sim.clock.now_us())

    start_us = sim.clock.now_us()
    sim.clock.at(start_us + arrival.at_us, arrive)
    if arrival.gives_up_after_us:
        gone_us = start_us + arrival.at_us + arrival.gives_up_after_us
        sim.clock.at(gone_us, lambda: sim.loop.intake.abort(request, "its client gives up"))


def table(columns: Sequence[tuple[str, Measures]]) -> str:
    """Side by side, one line a measure."""
    names = [field.name for field in dataclasses.fields(Measures)]
    lines = [["", *(title for title, _ in columns)]]
    lines += [[name, *(f"{getattr(measures, name):,}" for _, measures in columns)] for name in names]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jitney what-if", description="A recorded load under another policy.")
    parser.add_argument("log", type=Path, help="folder of a decision log, or one of its segments")
    parser.add_argument("--policy", required=True, help="the other policy: a name, or path.py:ClassName")
    parser.add_argument("parameters", nargs="*", metavar="NAME=INTEGER", help="its parameters")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="only the first so many of the log")
    parser.add_argument("--ttft-ms", type=float, default=Targets().ttft_ms, help="target that goodput counts by")
    parser.add_argument("--tpot-ms", type=float, default=Targets().tpot_ms, help="target that goodput counts by")
    options = parser.parse_intermixed_args(argv)
    targets = Targets(options.ttft_ms, options.tpot_ms)
    try:
        other, book = named(options.policy, options.parameters)
        with LogReader(options.log) as log:
            recording = read(log, options.seconds)
        other = replace(other, tables=recording.policy.tables)
        same = measure(carried(recording, recording.policy, book), targets)
        changed = measure(carried(recording, other, book), targets)
    except JitneyError as error:
        print(f"what-if: {error.message}", file=sys.stderr)
        return 2
    recorded = measure(recording.observed, targets)
    name = recording.policy.name
    print(table([(f"recorded {name}", recorded), (f"simulated {name}", same), (f"simulated {other.name}", changed)]))
    print(
        json.dumps(
            {
                "recorded_policy": name,
                "policy": other.name,
                "parameters": dict(other.parameters),
                "recorded": dataclasses.asdict(recorded),
                "same": dataclasses.asdict(same),
                "other": dataclasses.asdict(changed),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
