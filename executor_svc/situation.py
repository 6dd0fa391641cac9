"""The snapshot of this moment: everything that a decision may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from executor_svc.apply import Apply
from executor_svc.blocks import DeviceBlocks
from executor_svc.candidates import Candidates
from executor_svc.counters import Counters
from executor_svc.course import Course
from executor_svc.histograms import Histograms
from executor_svc.lately import CopiesLately
from executor_svc.live_request import LiveRequest, State
from executor_svc.ports import CopyPort, RatesPort
from executor_svc.registry import Registry, slots_of
from executor_svc.tenants import LimitColumns, Tenants
from jitney.block_ops import LowerTiers, RequestId
from jitney.columns import I64, EndedTable, HistogramTable, TenantTable
from jitney.snapshot import MAX_ENDED, Blocks, Outcome, PolicyChoice, PolicyMemory, Rates, Settings, Snapshot, TierRoom

DEFAULT_WAITING_COLUMNS = frozenset(
    {"id", "arrival_us", "tokens", "new_tokens", "priority", "preemptions", "tenant", "generated_tokens"}
)
"""38 bytes a row: what fcfs and its like read."""
OPTIONAL_TABLES = frozenset({"histograms", "tenants"})
"""Tables that are sent only where they are read: for 1,000 waiting requests nine tenths of a snapshot."""
_NO_TIERS = LowerTiers()


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


@dataclass(frozen=True, slots=True)
class Reads:
    """What a policy reads: columns of the waiting table, `id` among them, and which of OPTIONAL_TABLES."""

    columns: frozenset[str] = DEFAULT_WAITING_COLUMNS
    tables: frozenset[str] = OPTIONAL_TABLES


@dataclass(slots=True)
class Policy:
    """The policy in force, with what it remembers; changed between two steps."""

    choice: PolicyChoice = field(default_factory=PolicyChoice)
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    reads: Reads = field(default_factory=Reads)


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
        copies: CopyPort,
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
        self._copies = CopiesLately(copies)
        self._counters = counters
        self.histograms = Histograms()
        self.tenants = Tenants()
        self.shows_all = False  # OPTIONAL_TABLES go along, read or not: for what is tried on a log later
        self._limits: LimitColumns | None = None
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

    def preview(self, choice: PolicyChoice, reads: Reads, step: int, now_us: int) -> Snapshot:
        """The situation as another policy would be shown it, with an empty memory."""
        kept = self._policy
        self._policy = Policy(choice, reads=reads)
        try:
            return self.snapshot(step, now_us)
        finally:
            self._policy = kept

    def snapshot(self, step: int, now_us: int) -> Snapshot:
        """The situation, for the decision of `step`."""
        registry = self._registry
        running, ending = self._rows()
        waiting, own = registry.waiting_tables(self._policy.reads.columns)
        counts = self._apply.counts
        promised = self._apply.promised_blocks
        free = max(0, counts.free - promised) + self._course.reserved_blocks()
        evictable = max(0, counts.evictable - max(0, promised - counts.free))
        rates, cpu, ssd = self._lower_tiers(now_us)
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
                leaving=counts.leaving + self._apply.parting_blocks,
                granted=len(self._blocks.granted),
            ),
            cpu=cpu,
            ssd=ssd,
            rates=rates,
            running=registry.running_table(running),
            ending=registry.ending_table(np.concatenate((ending, slots_of(self.padding)))),
            waiting=waiting,
            waiting_policy=own,
            candidates=self._candidates.table(),
            ended=_ended_table(self._ended[:MAX_ENDED]),
            ended_unlisted=max(0, len(self._ended) - MAX_ENDED),
            tenants=self._tenants(whole=self._reads("tenants")),
            histograms=self._histograms(running) if self._reads("histograms") else HistogramTable(),
            memory=self._policy.memory,
        )

    def _lower_tiers(self, now_us: int) -> tuple[Rates, TierRoom, TierRoom]:
        """The rates with those of the copies, and the room of CPU tier and SSD."""
        rates, lower = self._rates.current(), self._apply.lower
        if lower == _NO_TIERS:
            return rates, TierRoom(), TierRoom()
        copies = self._copies.rates(now_us)
        write, read = lower.ssd_write_bytes_per_s, lower.ssd_read_bytes_per_s
        rates = replace(
            rates,
            to_host_bytes_per_s=copies.to_host_bytes_per_s,
            to_device_bytes_per_s=copies.to_device_bytes_per_s,
            ssd_write_bytes_per_s=write,
            ssd_read_bytes_per_s=read,
        )
        queue_us = lower.ssd.queue_blocks * rates.block_bytes * 1_000_000 // read if read else 0
        cpu = TierRoom(lower.cpu.free_blocks, lower.cpu.pin_blocks, copies.queue_us, copies.out_queue_us)
        return rates, cpu, TierRoom(lower.ssd.free_blocks, lower.ssd.pin_blocks, queue_us)

    def _rows(self) -> tuple[I64, I64]:
        """Slots of the running rows, and of those that the step in flight brings to max_tokens."""
        registry = self._registry
        slots = registry.running_slots()
        in_flight, generated = registry.in_flight_tokens[slots], registry.generated_tokens[slots]
        last = (in_flight > 0) & (generated + 1 >= registry.max_new_tokens[slots])
        last &= registry.computed_tokens[slots] + in_flight == registry.prompt_tokens[slots] + generated
        if self._blocks.sharing_changed or self._blocks.storing_changed:
            self._blocks.sharing_changed = self._blocks.storing_changed = False
            opened = [r for r in registry.running if r.state is State.RUNNING]
            with_blocks = slots_of(opened)
            table_rows = np.array([r.table_row for r in opened], np.int64)
            registry.shared_blocks[with_blocks] = self._blocks.shared(table_rows, registry.held_blocks[with_blocks])
            registry.lower_blocks[with_blocks] = self._blocks.stored_in(table_rows, registry.held_blocks[with_blocks])
        return slots[~last], slots[last]

    def _reads(self, table: str) -> bool:
        return self.shows_all or table in self._policy.reads.tables

    def _tenants(self, *, whole: bool) -> TenantTable:
        """Of the tenants that have a request here; not `whole`: of those that have a quota."""
        registry, served = self._registry, self._counters.served
        served.reach(len(registry.tenants))
        live, limits = registry.live_tenants(), self._limits_by_tenant()
        if not whole:
            live = live[(limits.max_rows[live] > 0) | (limits.max_waiting_tokens[live] > 0)]
            if len(live) == 0:
                return TenantTable()
        slots = registry.running_slots()
        held = np.zeros(len(live), np.int64)
        block_bytes = self._rates.current().block_bytes
        blocks = np.array([len(r.blocks) for r in registry.running], np.int64)
        tenants = registry.tenant[slots].astype(np.int64)
        here = np.isin(tenants, live)
        np.add.at(held, np.searchsorted(live, tenants[here]), blocks[here] * block_bytes)
        return TenantTable(
            tenant=live.astype(np.uint32),
            weight=limits.weight[live],
            max_rows=limits.max_rows[live],
            max_waiting_tokens=limits.max_waiting_tokens[live],
            served_prompt_tokens=served.prompt[live],
            served_cached_tokens=served.cached[live],
            served_generated_tokens=served.generated[live],
            held_bytes=held,  # a shared block counts for each of its holders
        )

    def _limits_by_tenant(self) -> LimitColumns:
        """Of all tenants that were ever here, by number."""
        names = self._registry.tenants
        if self._limits is None or self._limits.tenants is not self.tenants:
            self._limits = LimitColumns(self.tenants)
        self._limits.reach(names)
        return self._limits

    def _histograms(self, running: I64) -> HistogramTable:
        """Of the running rows and of the candidates."""
        slots = np.concatenate((running, slots_of(self._candidates.requests())))
        pairs = self._registry.tenant[slots].astype(np.int64) << 32 | self._registry.endpoint[slots]
        return self.histograms.table(np.unique(pairs))


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
