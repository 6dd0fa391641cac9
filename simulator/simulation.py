"""The real loop, decide and ledger on a virtual clock: hours and thousands of requests in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

import numpy as np

from executor_svc.hasher import InlineHasher
from executor_svc.live_request import LiveRequest, link
from executor_svc.loop import Loop, LoopSettings
from executor_svc.no_copies import NoCopies
from executor_svc.ports import ModelPort
from executor_svc.rates import FixedRates
from executor_svc.request import Answer, Sampling, Submission
from executor_svc.situation import Identity, Policy
from jitney.block_ops import RequestId
from jitney.keys import Root, salt_digest
from jitney.snapshot import Rates, Settings
from simulator.cache import VirtualCache
from simulator.clock import VirtualClock
from simulator.copies import VirtualCopies
from simulator.model import StepTime, VirtualModel, default_step_time
from simulator.scheduler import VirtualScheduler
from simulator.text import NumberText
from simulator.tiers import TierModel


@dataclass(slots=True)
class Watched:
    """A submitted request and when its tokens came."""

    request: LiveRequest
    token_times_us: list[int] = field(default_factory=list)
    arrived_us: int = 0

    @property
    def answer(self) -> Answer:
        """What the client would read."""
        return self.request.answer

    @property
    def finished_us(self) -> int:
        """When it ended. AssertionError if it has not."""
        assert self.answer.finish is not None, f"request {self.request.id} is live"
        return self.arrived_us + self.answer.finish.total_us

    @property
    def gaps_us(self) -> list[int]:
        """Times between tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times_us)]


class Asked(TypedDict, total=False):
    """What a simulated request may ask for."""

    at_us: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    priority: int
    tenant: str
    salt: str
    ttft_deadline_us: int
    deadline_us: int
    model_version: str
    sampling: Sampling | None
    logprobs: int


class Simulation:
    """One executor with its scheduler and cache, all virtual but for their logic."""

    def __init__(
        self,
        settings: Settings,
        pool_blocks: int,
        *,
        policy: Policy | None = None,
        rates: Rates | None = None,
        step_time_us: StepTime = default_step_time,
        scheduler_latency_us: int = 1000,
        cache_latency_us: int = 500,
        model: Callable[[VirtualClock], ModelPort] | None = None,
        tiers: TierModel | None = None,
        queues: bool = False,
        rests: bool = False,
    ) -> None:
        """`model` makes another model than the one that counts; with that there can be no `tiers`. `queues`: the one
        that counts takes a second step while one is in flight. `rests`: nobody is asked where there is nothing to
        decide."""
        self.clock = VirtualClock()
        self.scheduler = VirtualScheduler(self.clock, scheduler_latency_us)
        self.cache = VirtualCache(self.clock, pool_blocks, settings.block_tokens, cache_latency_us, tiers)
        self.model: ModelPort = (
            model(self.clock)
            if model is not None
            else VirtualModel(self.clock, pool_blocks, settings.block_tokens, step_time_us=step_time_us, queues=queues)
        )
        self.copies: VirtualCopies | None = None
        if tiers is not None:
            assert isinstance(self.model, VirtualModel), "only the counting model has bytes"
            self.copies = VirtualCopies(self.clock, self.model.pool, tiers)
            self.cache.connect(self.copies)
            rates = replace(rates or Rates(), block_bytes=tiers.block_bytes)
        self.loop = Loop(
            Identity("simulated", 1),
            settings,
            LoopSettings(pool_blocks, rests=rests),
            policy or Policy(),
            clock=self.clock,
            rates=FixedRates(rates or Rates()),
            scheduler=self.scheduler,
            cache=self.cache,
            model=self.model,
            copies=self.copies or NoCopies(),
            hasher=InlineHasher(),
        )
        self.cache.state = self.loop.apply
        self._ids = itertools.count(1)
        self.watched: list[Watched] = []

    def submit(self, prompt_ids: Sequence[int], max_tokens: int, **asked: Unpack[Asked]) -> Watched:
        """A request that arrives at `at_us` (now, if not given)."""
        return self.submit_choices(prompt_ids, max_tokens, 1, **asked)[0]

    def submit_choices(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        n: int,
        *,
        first_choice: int = 0,
        at_us: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        priority: int = 0,
        tenant: str = "default",
        salt: str = "",
        ttft_deadline_us: int = 0,
        deadline_us: int = 0,
        model_version: str = "counting",
        sampling: Sampling | None = None,
        logprobs: int = -1,
    ) -> list[Watched]:
        """The `n` answers of a request that arrives at `at_us` (now, if not given)."""
        asked = Submission(
            client_id="",
            prompt_ids=np.asarray(prompt_ids, np.int32),
            max_tokens=max_tokens,
            text=NumberText(),
            sampling=sampling or Sampling(),
            logprobs=logprobs,
            stop_token_ids=frozenset(stop_token_ids),
            priority=priority,
            tenant=tenant,
            salt=salt,
            ttft_deadline_us=ttft_deadline_us,
            deadline_us=deadline_us,
        )

        arrival = self.clock.now_us() if at_us is None else max(at_us, self.clock.now_us())
        root, salted, first = Root(salt, model_version), salt_digest(salt), next(self._ids)
        numbers = [first, *(next(self._ids) for _ in range(n - 1))]
        choices = [
            self._watch(
                replace(asked, client_id=f"r{first}", text=NumberText(stop), choice=first_choice + at),
                number,
                root,
                salted,
                arrival,
            )
            for at, number in enumerate(numbers)
        ]
        rows = link([watched.request for watched in choices])

        def arrive() -> None:
            self.loop.intake.submit(rows, self.clock.now_us())

        if arrival > self.clock.now_us():
            self.clock.at(arrival, arrive)
        else:
            arrive()
        return choices

    def _watch(self, submission: Submission, number: int, root: Root, salted: bytes, arrived_us: int) -> Watched:
        def changed() -> None:
            new = len(watched.answer.token_ids) - len(watched.token_times_us)
            watched.token_times_us.extend([self.clock.now_us()] * new)

        watched = Watched(LiveRequest(RequestId(number), submission, root, salted, changed), arrived_us=arrived_us)
        self.watched.append(watched)
        return watched

    def abort(self, watched: Watched, at_us: int) -> None:
        """The client of a request goes away at that time."""
        self.clock.at(at_us, lambda: self.loop.intake.abort(watched.request, "its client is gone"))

    def run_until_idle(self, limit_us: int = 3_600_000_000) -> None:
        """Until every submitted request has ended and what they held is released."""
        end = self.clock.now_us() + limit_us
        while not self.idle:
            if self.clock.now_us() > end:
                live = [w.request.id for w in self.watched if w.answer.finish is None]
                raise TimeoutError(f"not idle after {limit_us} us: requests {live[:10]} are live")
            self.loop.tick()

    def run(self, until_us: int) -> None:
        """Until that time."""
        while self.clock.now_us() < until_us:
            self.loop.tick()

    @property
    def idle(self) -> bool:
        """Nothing live, nothing held, nothing on its way."""
        return (
            all(w.answer.finish is not None for w in self.watched)
            and not self.loop.registry.by_id
            and not self.model.busy
            and not self.cache.unanswered
            and not self.cache.copying
        )

    def check_clean(self) -> None:
        """IDLE-CLEAN: no row, no block held, free + cached = pool, no ticket open, nothing pinned or retired in a lower
        tier. Raises AssertionError with what is left."""
        counts = self.cache.ledger.blocks.counts()
        registry = self.loop.registry
        assert not registry.running and not registry.num_waiting and not registry.by_id
        assert not self.cache.ledger.requests, self.cache.ledger.requests
        assert counts.free + counts.evictable + counts.granted == counts.total, counts
        assert not self.loop.blocks.holders.any() and self.loop.blocks.writable.all() and not self.loop.blocks.guarded
        assert registry.waiting_tokens == 0
        assert counts.granted == len(self.loop.blocks.granted) == 0, counts
        self.cache.check_clean()
