"""`python -m scheduler_svc.shadow LOG --policy NAME`: another policy follows a decision log, live, and never acts.

At every recorded step it is asked what it would decide in the very situation that the other policy has made, and told
how often that is something else: whom it admits, whom it preempts, who comes next. What it remembers, its memory and
its columns of each request, is its own and comes from its own decisions; what was done is what the snapshots say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from jitney.columns import I64, U64, RunningTable, Table, WaitingPolicyTable, columns_of
from jitney.decision import Decision
from jitney.decision_log import Frame
from jitney.errors import JitneyError
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, decode_snapshot
from jitney.snapshot import PolicyChoice, PolicyMemory, Snapshot
from scheduler_svc.decide import decide
from scheduler_svc.offline import named, with_tables
from scheduler_svc.policies import PolicyBook
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS

POLL_S: Final = 0.2

T = TypeVar("T", bound=Table)


@dataclass(slots=True)
class Differences:
    """How often the other policy decides otherwise, in steps; the requests concerned are counted once."""

    steps: int = 0
    decided_by: str = ""
    admissions: int = 0
    preemptions: int = 0
    order: int = 0
    any_of_them: int = 0
    admitted_by_it_alone: set[int] = field(default_factory=set)
    preempted_by_it_alone: set[int] = field(default_factory=set)
    preempted_by_the_other_alone: set[int] = field(default_factory=set)
    columns_unknown: set[str] = field(default_factory=set)

    def summary(self) -> dict[str, object]:
        """For JSON: sets as counts, names as a list."""
        plain = dataclasses.asdict(self)
        for name in ("admitted_by_it_alone", "preempted_by_it_alone", "preempted_by_the_other_alone"):
            plain[name] = len(plain[name])
        plain["columns_unknown"] = sorted(self.columns_unknown)
        return plain

    def line(self) -> str:
        """In one line."""
        whole = max(1, self.steps)
        parts = [
            f"{name} {100 * count / whole:.1f} %"
            for name, count in (
                ("admissions", self.admissions),
                ("preemptions", self.preemptions),
                ("order", self.order),
                ("any", self.any_of_them),
            )
        ]
        return f"{self.steps} steps of {self.decided_by or 'nobody'}; otherwise in: {', '.join(parts)}"


class Shadow:
    """One policy that follows one executor."""

    def __init__(self, choice: PolicyChoice, policies: PolicyBook, tables: Mapping[bytes, bytes] | None = None) -> None:
        """InvalidRequest for a policy or parameter that is not in the book. `tables` are learned tables by digest,
        which may still grow: it predicts by those that the recorded policy names."""
        policies.choose(choice)
        self._tables = tables if tables is not None else {}
        self.found = Differences()
        self._choice, self._policies = choice, policies
        self._memory = PolicyMemory()
        self._own: dict[int, tuple[int, int]] = {}  # the policy's columns, by request
        self._incarnation = 0

    def follow(self, frame: Frame) -> Decision:
        """What it would have decided, after it was compared. InvalidRequest if it cannot decide there."""
        snapshot = with_tables(decode_snapshot(frame.snapshot), self._tables)
        recorded = decode_decision(frame.decision)
        if snapshot.incarnation != self._incarnation:
            self._incarnation, self._memory, self._own = snapshot.incarnation, PolicyMemory(), {}
        for ended in snapshot.ended.id.tolist():
            self._own.pop(ended, None)
        decided = decide(self._seen(snapshot), self._policies)
        self._memory = decided.memory
        updates = decided.policy_updates
        self._own |= zip(updates.id.tolist(), zip(updates.a.tolist(), updates.b.tolist(), strict=True), strict=True)
        self._compare(snapshot, recorded, decided)
        return decided

    def _seen(self, snapshot: Snapshot) -> Snapshot:
        """The situation as this policy would be shown it."""
        policy = self._policies.choose(self._choice)
        waiting = self._filled(snapshot.waiting, (*COMMON_WAITING_COLUMNS, *policy.waiting_columns))
        a, b = self._columns(snapshot.running.id)
        rows = snapshot.waiting_policy.policy_row
        waiting_a, waiting_b = self._columns(snapshot.waiting.id[rows])
        return replace(
            snapshot,
            policy=replace(self._choice, tables=snapshot.policy.tables),
            memory=self._memory,
            running=replace(snapshot.running, policy_a=a, policy_b=b) if len(a) else RunningTable(),
            waiting=waiting,
            waiting_policy=WaitingPolicyTable(policy_row=rows, policy_a=waiting_a, policy_b=waiting_b),
        )

    def _columns(self, ids: U64) -> tuple[I64, I64]:
        pairs = np.array([self._own.get(i, (0, 0)) for i in ids.tolist()], np.int64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def _filled(self, table: T, needed: Sequence[str]) -> T:
        """Columns that the recorded policy did not read are not in the log: they count as unknown."""
        missing = [name for name in needed if table.rows and not len(getattr(table, name))]
        if not missing:
            return table
        self.found.columns_unknown |= {f"waiting.{name}" for name in missing}
        unknown = {column.name: column.unknown or 0 for column in columns_of(type(table))}
        dtypes = {column.name: column.dtype for column in columns_of(type(table))}
        return replace(table, **{name: np.full(table.rows, unknown[name], dtypes[name]) for name in missing})

    def _compare(self, snapshot: Snapshot, recorded: Decision, decided: Decision) -> None:
        found = self.found
        found.steps += 1
        found.decided_by = snapshot.policy.name
        theirs, ours = set(recorded.admit.id.tolist()), set(decided.admit.id.tolist())
        admissions = theirs != ours
        found.admitted_by_it_alone |= ours - theirs
        theirs, ours = set(recorded.preempt.id.tolist()), set(decided.preempt.id.tolist())
        preemptions = theirs != ours
        found.preempted_by_it_alone |= ours - theirs
        found.preempted_by_the_other_alone |= theirs - ours
        order = recorded.next_candidates.tolist() != decided.next_candidates.tolist()
        found.admissions += admissions
        found.preemptions += preemptions
        found.order += order
        found.any_of_them += admissions or preemptions or order


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jitney shadow", description="Another policy follows a log and never acts.")
    parser.add_argument("log", type=Path, help="folder of a decision log")
    parser.add_argument("--policy", required=True, help="the policy that follows: a name, or path.py:ClassName")
    parser.add_argument("parameters", nargs="*", metavar="NAME=INTEGER", help="its parameters")
    parser.add_argument("--once", action="store_true", help="from the oldest frame to the end of the log, then stop")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two lines")
    options = parser.parse_intermixed_args(argv)
    try:
        choice, policies = named(options.policy, options.parameters)
        with LogReader(options.log, at_end=not options.once) as log:
            shadow = Shadow(choice, policies, log.tables)
            _follow(shadow, log, 0.0 if options.once else options.seconds, options.every)
    except JitneyError as error:
        print(f"shadow: {error.message}", file=sys.stderr)
        return 2
    found = shadow.found
    if found.columns_unknown:
        print(f"not in the log, so taken as unknown: {', '.join(sorted(found.columns_unknown))}")
    print(json.dumps({"policy": options.policy, **found.summary()}))
    return 0


def _follow(shadow: Shadow, log: LogReader, seconds: float, every_s: float) -> None:
    """Until the end of the log and of the time, or an interrupt."""
    end = time.monotonic() + seconds
    said = time.monotonic()
    try:
        while True:
            for frame in log:
                shadow.follow(frame)
                if time.monotonic() - said >= every_s:
                    said = time.monotonic()
                    print(shadow.found.line(), flush=True)
            if time.monotonic() >= end:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    print(shadow.found.line(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
