"""The real `decide` behind a virtual wire: every snapshot and decision goes through the codec's bytes."""

from __future__ import annotations

from collections.abc import Callable

from jitney.decision import Decision
from jitney.scheduler_codec import decode_decision, decode_snapshot, encode_decision, encode_snapshot
from jitney.snapshot import Snapshot
from scheduler_svc.decide import decide
from simulator.clock import VirtualClock

Away = Callable[[int], int]


def never_away(now_us: int) -> int:
    """Always there."""
    return now_us


class VirtualScheduler:
    """SchedulerPort on the virtual clock. `away(now)` gives the time from which on a snapshot is answered."""

    def __init__(self, clock: VirtualClock, latency_us: int = 1000, away: Away = never_away) -> None:
        self._clock = clock
        self.latency_us = latency_us
        self.away = away
        self._asked = 0
        self._decision: Decision | None = None
        self.log: list[tuple[bytes, bytes]] | None = None  # (snapshot, decision), if set to a list
        self.asked_us: list[int] = []  # when each snapshot was shown
        self.undecided = False  # whether the last snapshot is

    @property
    def connected(self) -> bool:
        """Whether a snapshot would be answered now."""
        now_us = self._clock.now_us()
        return self.away(now_us) <= now_us

    def ask(self, snapshot: Snapshot) -> None:
        """Answers after the latency, once the scheduler is there."""
        self._asked += 1
        asked = self._asked
        self.asked_us.append(self._clock.now_us())
        self.undecided = True
        shown = encode_snapshot(snapshot)

        def answer() -> None:
            if asked != self._asked:
                return
            decided = encode_decision(decide(decode_snapshot(shown)))
            if self.log is not None:
                self.log.append((shown, decided))
            self._decision = decode_decision(decided)
            self.undecided = False

        self._clock.at(self.away(self._clock.now_us()) + self.latency_us, answer)

    @property
    def unheard(self) -> bool:
        """Whether there is a decision that was not polled yet."""
        return self._decision is not None

    def poll(self) -> Decision | None:
        """The decision, once."""
        decision, self._decision = self._decision, None
        return decision
