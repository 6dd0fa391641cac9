"""THE loop of the executor: the step clock.

    wait for step N; take its tokens and stop flags; drop rows that ended
    launch N+1 with the decision made while N ran
      meanwhile: stream the tokens of N; take in arrivals, aborts and deadlines;
                 snapshot -> Decide for N+2; Apply (seals, releases, boarding) as soon as the decision is there

A model that queues steps gets N+1 as soon as its decision is there, while N computes: what N draws is named, not
known. Nothing else changes. One step is queued at most, and nobody decides about the next before N is over; so a stop
that N turns out to have met is to N+1 what an abort is to a step in flight: its row's token is dropped, its blocks are
let go, unsealed behind the stop, when N+1 is over.

Nothing here blocks but `clock.wait`: every turn hears what has come (a step's result, a decision, the cache's
answers), launches if it can, tells what is new, and asks for the next decision. The loop takes its clock, rates,
scheduler, cache and model as arguments: the simulator runs this very loop with virtual ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from executor_svc.apply import Apply
from executor_svc.blocks import DeviceBlocks
from executor_svc.candidates import Candidates
from executor_svc.copying import Copying
from executor_svc.counters import Counters, StepRecord
from executor_svc.course import Boarding, Course
from executor_svc.endings import Endings
from executor_svc.intake import Intake
from executor_svc.lately import RatesLately
from executor_svc.live_request import LiveRequest, State
from executor_svc.planning import build_plan, fit
from executor_svc.ports import CachePort, Clock, CopyPort, Fenced, Hasher, ModelPort, RatesPort, Reopened, SchedulerPort
from executor_svc.registry import Registry, slots_of
from executor_svc.request import FinishReason
from executor_svc.rest import Rest
from executor_svc.situation import Identity, Policy, Situation
from executor_svc.step_plan import StepResult
from executor_svc.steps import Got, InFlight, Steps
from executor_svc.watchdog import Watchdog
from jitney.columns import PolicyColumnUpdates
from jitney.decision import Decision, WaitReason
from jitney.errors import Conflict
from jitney.snapshot import Settings, Snapshot
from jitney.ticket_ops import Prefetch

MAX_UNANSWERED = 7
_IDLE_WAIT_US = 1_000_000
_STALLED_WAIT_US = 1_000
"""Until rows that coast are tried again, after none of them had a block."""
_LEAVING_WAIT_US = 10_000
"""Until the cache is asked whether blocks that were leaving have come free: it tells that with the next batch only."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop needs beside the scheduler's settings. `pool_blocks` is the size of the device pool."""

    pool_blocks: int
    coast_after_us: int = 50_000
    ask_again_after_us: int = 1_000_000
    rests: bool = False
    """Where there is nothing to decide, nobody is asked (rest.py)."""


class Loop:
    """Steps, decisions and batches, one turn at a time, on one thread."""

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        loop_settings: LoopSettings,
        policy: Policy,
        *,
        clock: Clock,
        rates: RatesPort,
        scheduler: SchedulerPort,
        cache: CachePort,
        model: ModelPort,
        hasher: Hasher,
        copies: CopyPort,
    ) -> None:
        self.clock, self.scheduler, self.cache, self.model = clock, scheduler, cache, model
        self.copies, self.rates = copies, RatesLately(rates)
        self.settings, self.loop_settings, self.policy = settings, loop_settings, policy
        self.counters = Counters()
        self.registry = Registry()
        longest = min(-(-settings.context_tokens // settings.block_tokens), loop_settings.pool_blocks)
        self.blocks = DeviceBlocks(loop_settings.pool_blocks, settings.max_rows, longest, settings.block_tokens)
        self.copying = Copying(self.blocks, cache, copies)
        self.apply = Apply(self.registry, self.blocks, self.copying)
        self.course = Course(settings, self.registry, self.apply, self.counters)
        rests = loop_settings.rests and not model.queues  # a queued step is decided ahead: nobody waits for that
        self.rest = Rest(settings, self.registry, self.apply, self.course, allowed=rests)
        self.candidates = Candidates(self.registry, cache, hasher, settings.block_tokens)
        self.situation = Situation(
            identity,
            settings,
            policy,
            self.registry,
            self.blocks,
            self.apply,
            self.course,
            self.candidates,
            self.rates,
            copies,
            self.counters,
        )
        self.endings = Endings(settings, self.registry, self.apply, self.situation, self.counters)
        self.situation.padding = self.endings.padding
        self.intake = Intake(clock, self.registry, self.endings, self.situation.predict)
        self.steps = Steps(self.registry, self.endings, self.counters)
        self.watchdog = Watchdog()
        self.step = 0  # the last launched one
        self.last_snapshot: Snapshot | None = None
        self.waiting_reasons: tuple[tuple[WaitReason, int], ...] = ()
        self._flights: deque[InFlight] = deque()  # the step in flight, and one that is queued behind it
        self._over: tuple[InFlight, int, int] | None = None  # a step, what it and its results took: not recorded
        self._over_us = 0  # when the last step was over
        self._ran: list[LiveRequest] = []  # rows that ran or were loaded, whose seals are not told
        self._got = Got()  # rows whose new token is not streamed
        self._asked_us = 0  # when the outstanding snapshot was sent; 0: none is
        self._counted_us = 0  # when the cache told its counts last
        self._changed = True  # something that a decision depends on has changed since the last snapshot

    def tick(self) -> None:
        """One turn; returns after it has waited for something to happen, if there was nothing to do."""
        self._hear()
        if self._may_queue() if self._flights else self._may_launch():
            self._launch()
        self._record()
        now_us = self.clock.now_us()
        self.steps.stream(self._got, now_us, self._in_flight_step)
        self._got = Got()
        arrived = self.intake.take(now_us, self._in_flight_step)
        if arrived or self.candidates.hashing:
            self.candidates.refresh(self.step)
        if arrived:
            self._changed = True
            self.course.end_horizon()
            self.rest.disturb()
        if not self._flights and not self.registry.running:
            self.endings.keep_padding(set(), 0)  # nothing runs: what ended leaves without a decision
            self._tell_cache(Boarding(), now_us)
        if 0 < self._recount_us <= now_us:
            self._tell_cache(Boarding(), now_us, anyway=True)
        self._ask()
        self.watchdog.ticked(now_us, self)
        self.clock.wait(self._wake_us(now_us))

    @property
    def _in_flight_step(self) -> int:
        """The oldest one; 0: none."""
        return self._flights[0].plan.step if self._flights else 0

    @property
    def _reading_step(self) -> int:
        """The last step that may read blocks which are free now; 0: none."""
        if self.blocks.forks_wait:
            return self.step + 1
        return self.step if self._flights else 0

    @property
    def _recount_us(self) -> int:
        """When the cache is to be asked for its counts, because blocks are leaving that somebody may need; 0: never."""
        due = self.apply.counts.leaving and self.registry.by_id and self.cache.connected and not self.cache.unanswered
        return self._counted_us + _LEAVING_WAIT_US if due else 0

    def _hear(self) -> None:
        """Takes what has come: the step's result, the cache's answers, look-ups, the decision."""
        now_us = self.clock.now_us()
        if self._flights and (result := self.model.poll()) is not None:
            self._take(self._flights.popleft(), result, now_us)
        while (event := self.cache.poll()) is not None:
            if isinstance(event, Fenced):
                raise Conflict(event.reason, field="incarnation")
            if isinstance(event, Reopened):
                self.counters.cache_reopenings += 1
                self.rest.disturb()
                self.copying.attach(event.segments)
                self.apply.reopened(event.counts, event.lower, now_us)
            else:
                self.apply.answered(event, now_us, self._reading_step)
            self._changed, self._counted_us = True, now_us
        held_back = self.step if self.blocks.forks_wait else 0  # the next step begins with copies
        for request, load in self.copying.turn(self._in_flight_step or held_back, now_us):
            self.apply.load_ended(request, load, now_us)
            self._ran.append(request)
            self._changed = True
        self._changed |= self.candidates.take_hits(self.step)
        if not self.course.fresh and (decision := self.scheduler.poll()) is not None:
            self._heed(decision, now_us)

    def _take(self, flight: InFlight, result: StepResult, now_us: int) -> None:
        """A step is over: its tokens, and the ends of those that it finished."""
        self._got = self.steps.taken(flight, result, now_us)
        if self.steps.end_finished(self._got, now_us, self._in_flight_step):
            self.course.end_horizon()
        self.endings.step_over(self._in_flight_step)
        self.blocks.boundary(queued=bool(self._flights))
        self._ran += flight.rows
        began_us, self._over_us = max(flight.launched_us, self._over_us), now_us
        self._over = (flight, result.compute_us or now_us - began_us, now_us - began_us)
        self._changed = True

    def _heed(self, decision: Decision, now_us: int) -> None:
        """A decision has come: what it needs of the cache goes out at once, its rows run from the next boundary."""
        self.counters.decisions += 1
        if self._asked_us:
            self.counters.decide_us.append(now_us - self._asked_us)
        self._asked_us = 0
        self.situation.answered()
        self.rest.decided(now_us)
        self.waiting_reasons = decision.waiting_reasons
        self.policy.memory = decision.memory
        self.candidates.follow(decision.next_candidates)
        updates = decision.policy_updates
        if self.last_snapshot is not None and self.last_snapshot.policy != self.policy.choice:
            updates = PolicyColumnUpdates()  # of a policy that was changed meanwhile
        for request_id, a, b in zip(*(c.tolist() for _, c in updates.columns()), strict=True):
            if request := self.registry.by_id.get(request_id):
                self.registry.policy_a[request.slot], self.registry.policy_b[request.slot] = a, b
        for refusal in decision.refusals:
            request = self.registry.by_id.get(refusal.id)
            if request is not None and request.state is State.WAITING:
                message = f"{refusal.reason.name.lower()}: limit {refusal.limit}, value {refusal.value}"
                self.endings.end(request, FinishReason.REFUSED, now_us, 0, message=message)
        cache_open = self.cache.unanswered < MAX_UNANSWERED
        boarding = self.course.heed(decision, now_us, cache_open=cache_open)
        self.endings.keep_padding({int(i) for i in decision.padding_rows}, self._in_flight_step)
        if cache_open:
            self._tell_cache(boarding, now_us)
            self._prefetch(decision)

    def _prefetch(self, decision: Decision) -> None:
        """What the decision wants read from the SSD, before its requests board."""
        size = self.settings.block_tokens
        for request_id, blocks in zip(decision.prefetch.id.tolist(), decision.prefetch.blocks.tolist(), strict=True):
            request = self.registry.by_id.get(request_id)
            if request is not None and request.waits:
                self.cache.tell(Prefetch(request.id, request.hash_to(request.length, size), blocks))

    def _tell_cache(self, boarding: Boarding, now_us: int, *, anyway: bool = False) -> None:
        if self.cache.unanswered >= MAX_UNANSWERED:
            return
        if not self._flights:
            self.blocks.boundary()  # table rows that were given back since are read by no step
        batch = self.apply.compose(
            self.step,
            self._reading_step,
            boarding.victims,
            boarding.admitted,
            boarding.substitutes,
            self._ran,
            now_us,
            anyway,
        )
        self._ran = []
        if batch is not None:
            self.cache.send(batch)

    def _may_launch(self) -> bool:
        """Whether the next boundary can be passed: a decision holds for it, or it is time to coast."""
        if self.course.fresh:
            # A decision that only boards waits for the blocks; one that runs others does not.
            return self.course.runs_any() or not (self.apply.boarding and self.cache.connected)
        if not self.registry.running:
            return False
        if not (self.course.holds or self._asked_us) and self.rest.holds():
            self.course.go_on()
            return True
        now_us = self.clock.now_us()
        late = self._asked_us > 0 and now_us - self._asked_us >= self.loop_settings.coast_after_us
        return self.course.holds or self.course.coasting or late

    def _may_queue(self) -> bool:
        """Whether the next step can be queued behind the one in flight: a decision holds for it, the blocks that its
        rows will write are there, and nothing is on its way that it would have to wait for."""
        if not self.model.queues or len(self._flights) > 1 or not self.course.holds or self.apply.boarding:
            return False
        if self.blocks.forks_wait or self.blocks.guarded or self.endings.padding:
            return False  # tails are shared, or computed again, between two steps
        return self.course.goes_on() and self.apply.next_blocks() <= len(self.blocks.granted)

    def _launch(self) -> None:
        """Builds the plan of the next step out of the decision, or coasts, and launches it."""
        now_us = self.clock.now_us()
        decided_us = self.counters.decide_us[-1] if self.course.fresh and self.counters.decide_us else 0
        chosen, victims = self.course.rows(now_us)
        if self.course.coasting:
            self._tell_cache(Boarding(victims), now_us)
        rows = [request for request, _ in chosen]
        slots, wanted = slots_of(rows), np.array([tokens for _, tokens in chosen], np.int64)
        held = self.registry.held_blocks[slots]
        tokens = fit(self.registry, self.blocks, rows, slots, wanted)
        for i in np.flatnonzero(self.registry.held_blocks[slots] > held).tolist():
            self.apply.bind(rows[i], rows[i].blocks[held[i] :])
        runs = tokens > 0
        if not runs.all():
            waiting = [row.joined or row.host is not None or row.load is not None for row in rows]
            stalled = sum(not waiting[i] for i in np.flatnonzero(~runs).tolist())
            if stalled:
                self.counters.stalled_rows += stalled
                self.course.end_horizon()
                self.rest.disturb()
            rows = [rows[i] for i in np.flatnonzero(runs).tolist()]
            slots, tokens = slots[runs], tokens[runs]
        if not rows:
            self.course.steps_left = 0
            return
        self.step += 1
        behind = self._flights[0].slots if self._flights else None
        plan = build_plan(self.step, self.registry, self.blocks, rows, slots, tokens, self.endings.padding, behind)
        self.counters.computed_tokens += plan.tokens
        self.steps.launched(plan, rows, slots, tokens, now_us)
        boardings, departures = [r.boardings for r in rows], self.registry.departures
        self._flights.append(InFlight(plan, rows, slots, boardings, departures, now_us, decided_us))
        self.model.launch(plan)
        self._changed = True
        if self.course.steps_left > 0:
            self._tell_cache(Boarding(), now_us)  # no decision will: the next boundary is this one's too

    def _ask(self) -> None:
        """Shows the situation, once for each boundary, and again when nobody has answered for long."""
        now_us = self.clock.now_us()
        if len(self._flights) > 1:
            return  # of one step more nobody knows yet what it finishes
        if self.course.fresh or (self.course.steps_left > 0 and self.registry.running):
            return
        if self._asked_us and now_us - self._asked_us < self.loop_settings.ask_again_after_us:
            return
        due = 0 < self.course.decision.wake_at_us <= now_us
        if not (self._changed or due or self._asked_us):
            return
        if not (self.registry.running or self.registry.num_waiting):
            return
        if self._flights and not self._asked_us and not self.rest.overdue(now_us) and self.rest.holds():
            self._changed = False
            self._tell_cache(Boarding(), now_us)  # no decision will
            return
        self.candidates.refresh(self.step)
        if not self.registry.running and self.candidates.looked_up_after(now_us):
            return  # what it waits for is quicker than a step, and says what may be loaded
        self.last_snapshot = self.situation.snapshot(self.step + 1, now_us)
        self.situation.shown()
        self.scheduler.ask(self.last_snapshot)
        self._asked_us = now_us
        self._changed = False

    def _wake_us(self, now_us: int) -> int:
        """When the next turn is due even if nothing comes."""
        times = [now_us + _IDLE_WAIT_US]
        if self._asked_us:
            times.append(self._asked_us + self.loop_settings.ask_again_after_us)
            if not self._flights and self.registry.running:
                times.append(max(self._asked_us + self.loop_settings.coast_after_us, now_us + _STALLED_WAIT_US))
        if self.course.decision.wake_at_us > now_us:
            times.append(self.course.decision.wake_at_us)
        if deadline := self.registry.next_deadline_us():
            times.append(deadline)
        times += [due for due in (self.candidates.looked_up_after(now_us), self._recount_us) if due]
        return min(times)

    def _record(self) -> None:
        """Keeps what the step that is over took: nobody waits for it, so the next one is launched before."""
        if self._over is None:
            return
        flight, compute_us, step_us = self._over
        self._over = None
        self.rates.observe(flight.plan, compute_us)
        self.counters.steps.append(
            StepRecord(
                step=flight.plan.step,
                at_us=flight.launched_us,
                rows=flight.plan.rows,
                tokens=flight.plan.tokens,
                prefill_tokens=int(flight.tokens[flight.tokens > 1].sum()),
                step_us=step_us,
                decide_us=flight.decide_us,
                waiting=self.registry.num_waiting,
                free_blocks=self.apply.counts.free + self.apply.counts.evictable,
            )
        )
