"""The snapshot of this moment: everything that a decision may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from executor_svc.apply import Apply
from executor_svc.blocks import DeviceBlocks
from executor_svc.candidates import Candidates
from executor_svc.counters import Counters, Served
from executor_svc.course import Course
from executor_svc.histograms import Histograms
from executor_svc.live_request import LiveRequest, State
from executor_svc.ports import RatesPort
from executor_svc.registry import Registry
from executor_svc.tenants import Tenants
from jitney.block_ops import RequestId
from jitney.columns import EndedTable, HistogramTable, TenantTable
from jitney.snapshot import MAX_ENDED, Blocks, Outcome, PolicyChoice, PolicyMemory, Settings, Snapshot

DEFAULT_WAITING_COLUMNS = frozenset(
    {"id", "arrival_us", "tokens", "new_tokens", "priority", "preemptions", "tenant", "generated_tokens"}
)
"""38 bytes a row: what fcfs and its like read."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this executor is, to schedulers and to the cache."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended, as the next snapshot tells it."""

    id: RequestId
    tenant: int
    endpoint: int
    prompt_tokens: int
    generated_tokens: int
    predicted_p50: int
    outcome: Outcome
    features: int


@dataclass(slots=True)
class Policy:
    """The policy in force, with what it remembers; changed between two steps."""

    choice: PolicyChoice = field(default_factory=PolicyChoice)
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    waiting_columns: frozenset[str] = DEFAULT_WAITING_COLUMNS


class Situation:
    """Builds snapshots out of the registry's columns; keeps what ended until a snapshot that told it is answered."""

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        policy: Policy,
        registry: Registry,
        blocks: DeviceBlocks,
        apply: Apply,
        course: Course,
        candidates: Candidates,
        rates: RatesPort,
        counters: Counters,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._policy = policy
        self._registry = registry
        self._blocks = blocks
        self._apply = apply
        self._course = course
        self.padding: list[LiveRequest] = []  # ended rows that are computed on as padding
        self._candidates = candidates
        self._rates = rates
        self._counters = counters
        self.histograms = Histograms()
        self.tenants = Tenants()
        self._ended: list[EndedRequest] = []
        self._told = 0

    def predict(self, request: LiveRequest) -> tuple[int, int]:
        """p50 and p90 of a new request's output tokens by the history of its tenant and endpoint; -1 unknown."""
        tenant = self._registry.tenants.number(request.submission.tenant)
        endpoint = self._registry.endpoints.number(request.submission.endpoint)
        most = request.submission.max_tokens
        p50, p90 = (self.histograms.quantile(tenant, endpoint, percent) for percent in (50, 90))
        return min(p50, most), min(p90, most)

    def ended(self, request: LiveRequest, outcome: Outcome) -> None:
        """A request ended; schedulers are told with the next snapshot."""
        slot = request.slot
        self._ended.append(
            EndedRequest(
                request.id,
                int(self._registry.tenant[slot]),
                int(self._registry.endpoint[slot]),
                request.prompt_tokens,
                request.generated,
                int(self._registry.predicted_p50[slot]),
                outcome,
                request.submission.features,
            )
        )
        if outcome in (Outcome.STOP, Outcome.LENGTH):
            self.histograms.add(int(self._registry.tenant[slot]), int(self._registry.endpoint[slot]), request.generated)

    def answered(self) -> None:
        """The last snapshot was answered: what it told need not be told again."""
        del self._ended[: self._told]
        self._told = 0

    def shown(self) -> None:
        """A snapshot was sent: with its answer, what ended before it is told."""
        self._told = len(self._ended)

    def preview(self, choice: PolicyChoice, columns: frozenset[str], step: int, now_us: int) -> Snapshot:
        """The situation as another policy would be shown it, with an empty memory."""
        kept = self._policy
        self._policy = Policy(choice, waiting_columns=columns)
        try:
            return self.snapshot(step, now_us)
        finally:
            self._policy = kept

    def snapshot(self, step: int, now_us: int) -> Snapshot:
        """The situation, for the decision of `step`."""
        registry = self._registry
        running, ending = self._rows()
        waiting, own = registry.waiting_tables(self._policy.waiting_columns)
        counts = self._apply.counts
        promised = self._apply.promised_blocks
        free = max(0, counts.free - promised) + self._course.reserved_blocks()
        evictable = max(0, counts.evictable - max(0, promised - counts.free))
        return Snapshot(
            executor=self._identity.name,
            incarnation=self._identity.incarnation,
            step=step,
            now_us=now_us,
            policy=self._policy.choice,
            settings=self._settings,
            blocks=Blocks(
                total=self._blocks.pool_blocks,
                free=free,
                evictable=evictable,
                leaving=counts.leaving,
                granted=len(self._blocks.granted),
            ),
            rates=self._rates.current(),
            running=registry.running_table(running),
            ending=registry.ending_table([*ending, *self.padding]),
            waiting=waiting,
            waiting_policy=own,
            candidates=self._candidates.table(),
            ended=_ended_table(self._ended[:MAX_ENDED]),
            ended_unlisted=max(0, len(self._ended) - MAX_ENDED),
            tenants=self._tenants(),
            histograms=self._histograms([*running, *self._candidates.requests()]),
            memory=self._policy.memory,
        )

    def _rows(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Running rows, and those that the step in flight brings to max_tokens."""
        registry = self._registry
        running: list[LiveRequest] = []
        ending: list[LiveRequest] = []
        for request in registry.running:
            slot = request.slot
            last = registry.in_flight_tokens[slot] and request.generated + 1 >= request.submission.max_tokens
            if last and registry.computed_tokens[slot] + registry.in_flight_tokens[slot] == request.length:
                ending.append(request)
            else:
                running.append(request)
        if self._blocks.sharing_changed:
            self._blocks.sharing_changed = False
            opened = [r for r in registry.running if r.state is State.RUNNING]
            slots = np.fromiter((r.slot for r in opened), np.int64, len(opened))
            table_rows = np.fromiter((r.table_row for r in opened), np.int64, len(opened))
            registry.shared_blocks[slots] = self._blocks.shared(table_rows, registry.held_blocks[slots])
        return running, ending

    def _tenants(self) -> TenantTable:
        live = self._registry.live_tenants()
        served = [self._counters.served.get(t, Served()) for t in live]
        limits = [self.tenants.of(self._registry.tenants.name(t)) for t in live]
        held = self._held_bytes()
        return TenantTable(
            tenant=np.array(live, np.uint32),
            weight=np.array([each.weight for each in limits], np.uint32),
            max_rows=np.array([each.max_rows for each in limits], np.int32),
            max_waiting_tokens=np.array([each.max_waiting_tokens for each in limits], np.int64),
            served_prompt_tokens=np.array([s.prompt for s in served], np.int64),
            served_cached_tokens=np.array([s.cached for s in served], np.int64),
            served_generated_tokens=np.array([s.generated for s in served], np.int64),
            held_bytes=np.array([held.get(t, 0) for t in live], np.int64),
        )

    def _held_bytes(self) -> dict[int, int]:
        """Device bytes that the running rows of each tenant hold; a shared block counts for each."""
        held: dict[int, int] = {}
        block_bytes = self._rates.current().block_bytes
        for request in self._registry.running:
            tenant = int(self._registry.tenant[request.slot])
            held[tenant] = held.get(tenant, 0) + len(request.blocks) * block_bytes
        return held

    def _histograms(self, requests: list[LiveRequest]) -> HistogramTable:
        slots = np.fromiter((r.slot for r in requests), np.int64, len(requests))
        pairs = zip(self._registry.tenant[slots].tolist(), self._registry.endpoint[slots].tolist(), strict=True)
        return self.histograms.table(set(pairs))


def _ended_table(ended: list[EndedRequest]) -> EndedTable:
    return EndedTable(
        id=np.array([e.id for e in ended], np.uint64),
        tenant=np.array([e.tenant for e in ended], np.uint32),
        endpoint=np.array([e.endpoint for e in ended], np.uint32),
        prompt_tokens=np.array([e.prompt_tokens for e in ended], np.int32),
        generated_tokens=np.array([e.generated_tokens for e in ended], np.int32),
        predicted_p50=np.array([e.predicted_p50 for e in ended], np.int32),
        outcome=np.array([e.outcome for e in ended], np.uint8),
        features=np.array([e.features for e in ended], np.uint64),
    )
