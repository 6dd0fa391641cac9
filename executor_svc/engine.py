"""The loop on its thread, and the calls that other threads make on it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from executor_svc.counters import StepRecord
from executor_svc.live_request import LiveRequest, State, link
from executor_svc.loop import Loop
from executor_svc.request import Answer, FinishReason, Submission
from executor_svc.situation import Reads
from jitney.block_ops import RequestId
from jitney.decision import WaitReason
from jitney.errors import Away, Duplicate, Missing, TooLarge
from jitney.keys import Root, salt_digest
from jitney.snapshot import Blocks, Outcome, PolicyChoice, Snapshot

log = structlog.get_logger()
_RETRY_US = 1_000_000
_LOOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What runs, what waits and why, and what was done; the fields of GetStatusResponse."""

    executor: str
    incarnation: int
    step: int
    num_running: int
    num_waiting: int
    blocks: Blocks
    scheduler_connected: bool
    cache_connected: bool
    decisions: int
    coasted_steps: int
    preemptions: int
    outcomes: dict[Outcome, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waiting_reasons: tuple[tuple[WaitReason, int], ...]
    history: tuple[StepRecord, ...]
    policy: PolicyChoice
    not_ready: str
    scheduler_build: str
    cache_reopenings: int
    decide_us_p50: int
    decide_us_p99: int


class Engine:
    """Runs the loop; submits, aborts and asks from any thread. `model_version` and `fingerprint` go into keys."""

    def __init__(
        self,
        loop: Loop,
        *,
        name: str,
        incarnation: int,
        model_version: str,
        fingerprint: bytes,
        adapter_version: str = "",
    ) -> None:
        self.loop = loop
        self._name = name
        self._incarnation = incarnation
        self._model_version = model_version
        self._adapter_version = adapter_version
        self._fingerprint = fingerprint
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._live: dict[str, Sequence[LiveRequest]] = {}  # the choices of each, until all have ended
        self._live_rows = 0
        self._draining = False
        self._stop = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def start(self) -> None:
        """Starts the loop's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop's thread; live requests end with an error."""
        self._stop = True
        self.loop.clock.ring()
        self._thread.join()

    def drain(self) -> None:
        """Refuses what is new from here on; what is live goes on."""
        self._draining = True

    @property
    def live(self) -> int:
        """Live requests, each choice for itself."""
        return self._live_rows

    @property
    def not_ready(self) -> str:
        """Why readiness is off; empty: ready."""
        if self.failure is not None:
            return f"the loop has stopped: {self.failure}"
        if self._draining:
            return "draining"
        return self.loop.watchdog.not_ready(self.loop.clock.now_us())

    def submit(self, choices: Sequence[Submission], on_change: Callable[[], None]) -> list[Answer]:
        """A new request, by its choices, which differ in nothing but what makes them choices. `on_change` is called
        from the loop's thread when an answer has grown or ended.

        Raises Away (draining or stopped), TooLarge (queue full), Duplicate (a live request has that id).
        """
        if self.failure is not None or self._draining or self._stop:
            raise Away(self.not_ready or "stopping")
        self._check_queue(choices)
        submission = choices[0]
        root = Root(submission.salt, self._model_version, self._adapter_version, self._fingerprint)

        salted = salt_digest(submission.salt)
        with self._lock:
            earlier = self._live.get(submission.client_id, ())
            if earlier and not (submission.takes_over and _same_answer(earlier[0], submission)):
                raise Duplicate(
                    "a live request has this id", field="request_id", value=submission.client_id, limit="unique"
                )
            rows = link([LiveRequest(RequestId(next(self._ids)), each, root, salted, None) for each in choices])
            for row in rows:
                row.on_change = partial(self._changed, row, rows, on_change)
            self._live[submission.client_id] = rows
            self._live_rows += len(rows)
        self._abort(earlier, "taken over by a resumed stream")
        self.loop.intake.submit(rows, self.loop.clock.now_us())
        return [row.answer for row in rows]

    def _changed(self, row: LiveRequest, rows: Sequence[LiveRequest], on_change: Callable[[], None]) -> None:
        """On the loop's thread: a row has new tokens, or has ended."""
        if row.answer.finish is not None:
            client_id = row.submission.client_id
            with self._lock:
                self._live_rows -= 1
                if all(r.answer.finish is not None for r in rows) and self._live.get(client_id) is rows:
                    del self._live[client_id]
        on_change()

    def _check_queue(self, choices: Sequence[Submission]) -> None:
        """Each choice waits for itself, and with the whole prompt."""
        settings, submission = self.loop.settings, choices[0]
        prompt = len(choices) * len(submission.prompt_ids)
        waiting = max(0, self._live_rows - len(self.loop.registry.running))
        if settings.max_waiting_requests and waiting + len(choices) > settings.max_waiting_requests:
            more = f", {len(choices)} would join them" if len(choices) > 1 else ""
            raise TooLarge(
                f"{waiting} requests wait already{more}, the limit is {settings.max_waiting_requests}",
                field="queue",
                limit=settings.max_waiting_requests,
                value=waiting,
                retry_after_us=_RETRY_US,
            )
        quota = self.loop.situation.tenants.of(submission.tenant).max_waiting_tokens
        mine = self.loop.registry.waiting_tokens_of(submission.tenant) + prompt
        if quota and mine > quota:
            raise TooLarge(
                f"{mine} tokens of tenant {submission.tenant} would wait, its quota is {quota}",
                field="tenant_queue_tokens",
                limit=quota,
                value=mine,
                retry_after_us=_RETRY_US,
            )
        tokens = self.loop.registry.waiting_tokens + prompt
        if settings.max_waiting_tokens and tokens > settings.max_waiting_tokens:
            raise TooLarge(
                f"{tokens} tokens would wait, the limit is {settings.max_waiting_tokens}",
                field="queue_tokens",
                limit=settings.max_waiting_tokens,
                value=tokens,
                retry_after_us=_RETRY_US,
            )

    def abort(self, client_id: str) -> None:
        """Ends a live request; Missing if there is none of that id."""
        self._abort(self._rows(client_id), "aborted by a call")

    def abort_rows(self, ids: Collection[int]) -> None:
        """Ends requests by their internal ids; silent about those that have ended."""
        with self._lock:
            found = [row for rows in self._live.values() for row in rows if row.id in ids]
        self._abort(found, "its client is gone")

    def _abort(self, rows: Sequence[LiveRequest], why: str) -> None:
        for row in rows:
            self.loop.intake.abort(row, why)

    def _rows(self, client_id: str) -> Sequence[LiveRequest]:
        with self._lock:
            rows = self._live.get(client_id)
        if rows is None:
            raise Missing("no live request has this id", field="request_id", value=client_id)
        return rows

    def status(self, history_steps: int = 0) -> EngineStatus:
        """A reading of the counters; not one moment's cut."""
        loop = self.loop
        counts = loop.apply.counts
        times = sorted(loop.counters.decide_us.copy())
        history = tuple(loop.counters.steps.copy())[-history_steps:] if history_steps else ()
        running = [r for r in list(loop.registry.running) if r.state is not State.ENDED]
        return EngineStatus(
            executor=self._name,
            incarnation=self._incarnation,
            step=loop.step,
            num_running=len(running),
            num_waiting=loop.registry.num_waiting,
            blocks=Blocks(
                total=loop.blocks.pool_blocks,
                free=counts.free,
                evictable=counts.evictable,
                leaving=counts.leaving,
                granted=len(loop.blocks.granted),
            ),
            scheduler_connected=loop.scheduler.connected,
            cache_connected=loop.cache.connected,
            decisions=loop.counters.decisions,
            coasted_steps=loop.counters.coasted_steps,
            preemptions=loop.counters.preemptions,
            outcomes=dict(loop.counters.outcomes),
            prompt_tokens=loop.counters.prompt_tokens,
            cached_tokens=loop.counters.cached_tokens,
            generated_tokens=loop.counters.generated_tokens,
            waiting_reasons=loop.waiting_reasons if loop.registry.num_waiting else (),
            history=history,
            policy=loop.policy.choice,
            not_ready=self.not_ready,
            scheduler_build=loop.course.decision.build,
            cache_reopenings=loop.counters.cache_reopenings,
            decide_us_p50=times[len(times) // 2] if times else 0,
            decide_us_p99=times[len(times) * 99 // 100] if times else 0,
        )

    def explain(self, client_id: str) -> tuple[int, Snapshot | None, list[str]]:
        """The internal id of a live request (of the first choice that is live), the last snapshot, and what happened
        to it, oldest first."""
        rows = self._rows(client_id)
        request = next((row for row in rows if row.state is not State.ENDED), rows[0])
        now_us = self.loop.clock.now_us()
        history = [f"{(now_us - at) / 1e6:.3f} s ago: {what}" for at, what in list(request.events)]
        return request.id, self.loop.last_snapshot, history

    def preview(self, choice: PolicyChoice, reads: Reads) -> Snapshot:
        """The situation of now as that policy would be shown it; blocks until the loop has made it."""
        found: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()

        def look(now_us: int) -> None:
            found.put(self.loop.situation.preview(choice, reads, self.loop.step + 1, now_us))

        self.loop.intake.run(look)
        try:
            return found.get(timeout=_LOOP_TIMEOUT_S)
        except queue.Empty:
            raise Away("the loop does not turn") from None

    def set_policy(self, choice: PolicyChoice, reads: Reads | None = None) -> int:
        """Changes the policy between two steps; returns the first step that it decides.

        `reads` is what it reads of a snapshot; None: as before.
        """
        done = threading.Event()

        def change(now_us: int) -> None:
            del now_us
            self.loop.policy.choice = choice
            if reads is not None:
                self.loop.policy.reads = reads
            registry = self.loop.registry  # its columns mean something else to each policy; its memory has sections
            registry.policy_a[:] = registry.policy_b[:] = 0
            done.set()

        self.loop.intake.run(change)
        done.wait(timeout=_LOOP_TIMEOUT_S)
        return self.loop.step + 2

    def _run(self) -> None:
        try:
            while not self._stop:
                self.loop.tick()
        except BaseException as failure:
            self.failure = failure
            log.exception("the loop has stopped")
        self._end_all()

    def _end_all(self) -> None:
        reason = str(self.failure) if self.failure is not None else "the executor stops"
        now_us = self.loop.clock.now_us()
        with self._lock:
            left = [row for rows in self._live.values() for row in rows]
        self.loop.intake.take(now_us, 0)
        for request in left:
            if request.state is not State.ENDED:
                self.loop.endings.end(request, FinishReason.ERROR, now_us, 0, message=reason)


def _same_answer(live: LiveRequest, submission: Submission) -> bool:
    """Whether both are of the same prompt and of the same owner: nobody ends another tenant's stream by its id."""
    ours = live.submission
    if (ours.tenant, ours.salt) != (submission.tenant, submission.salt):
        return False
    return len(ours.prompt_ids) == len(submission.prompt_ids) and bool((ours.prompt_ids == submission.prompt_ids).all())
