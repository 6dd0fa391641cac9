"""`python -m scheduler_svc.replay LOG`: decides every recorded snapshot again and compares the bytes.

Prints how many decisions are equal, the first that is not, and one JSON line. Exit status 0: all are equal; 1: one is
not; 2: LOG is none, or was decided by another build.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jitney.decision import Decision
from jitney.errors import Conflict, JitneyError
from jitney.log_segments import LogReader
from jitney.scheduler_codec import decode_decision, decode_snapshot, encode_decision
from jitney.snapshot_checks import check
from scheduler_svc.decide import decide
from scheduler_svc.offline import with_tables
from scheduler_svc.policies import PolicyBook
from scheduler_svc.policies.custom import with_custom


@dataclass(slots=True)
class Replayed:
    """Of one log. `first_different` names the step and the fields of the first decision that was not the same."""

    frames: int = 0
    equal: int = 0
    different: int = 0
    gaps: int = 0
    damaged: int = 0
    torn: int = 0
    builds: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    first_different: str = ""


def replay(log: LogReader, policies: PolicyBook, *, any_build: bool = False) -> Replayed:
    """Decides all of `log` again. Conflict for a frame of another build, unless `any_build` lets them pass."""
    result = Replayed()
    for frame in log:
        recorded = decode_decision(frame.decision)
        if recorded.build not in result.builds:
            if recorded.build != policies.build and not any_build:
                raise Conflict(
                    f"step {recorded.step} was decided by build {recorded.build}, this is {policies.build}: "
                    "replay it there, or give --any-build",
                    field="build",
                    limit=policies.build,
                    value=recorded.build,
                )
            result.builds.append(recorded.build)
        snapshot = with_tables(decode_snapshot(frame.snapshot), log.tables)
        if snapshot.policy.name not in result.policies:
            result.policies.append(snapshot.policy.name)
        result.frames += 1
        try:
            check(snapshot)
            decided = decide(snapshot, replace(policies, build=recorded.build))
        except JitneyError as error:
            difference = error.message
        else:
            same = encode_decision(decided) == frame.decision
            difference = "" if same else ", ".join(differences(recorded, decided)) or "the bytes"
        result.equal += not difference
        result.different += bool(difference)
        if difference and not result.first_different:
            result.first_different = f"step {recorded.step}: {difference}"
    result.gaps, result.damaged, result.torn = log.gaps, log.damaged, log.torn
    return result


def differences(one: Decision, other: Decision) -> list[str]:
    """Names of the fields in which two decisions differ."""
    found = []
    for described in dataclasses.fields(Decision):
        name = described.name
        first, second = (encode_decision(Decision(**{name: getattr(d, name)})) for d in (one, other))
        if first != second:
            found.append(name)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jitney replay", description="Decide a recorded log again; compare the bytes."
    )
    parser.add_argument("log", type=Path, help="folder of a decision log, or one of its segments")
    parser.add_argument("--any-build", action="store_true", help="replay what another build decided, too")
    parser.add_argument("--policy-file", default="", metavar="PATH.py:NAME", help="the policy of your own that decided")
    options = parser.parse_args(argv)
    try:
        with LogReader(options.log) as log:
            policies = with_custom(options.policy_file)
            result = replay(log, policies, any_build=options.any_build)
    except JitneyError as error:
        print(f"replay: {error.message}", file=sys.stderr)
        return 2
    if not result.frames:
        print(f"replay: there is no decision in {options.log}", file=sys.stderr)
        return 2
    print(f"{result.frames} decisions of {', '.join(result.policies)}: {result.equal} equal, {result.different} not")
    if result.first_different:
        print(f"first at {result.first_different}")
    if result.damaged or result.gaps:
        print(f"{result.damaged} records are damaged, {result.gaps} gaps")
    print(json.dumps({**dataclasses.asdict(result), "build": policies.build}))
    return 0 if result.equal == result.frames else 1


if __name__ == "__main__":
    sys.exit(main())
