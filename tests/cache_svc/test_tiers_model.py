"""Ledgers and lower tiers against the naive ones, driven by Hypothesis: two executors, a disk, every fault and restart.

Bytes are real: a block that can be found has the bytes of its key, unless a rule has spoiled them, and then its reader
must notice. Copies are made when a rule says so, and answered later, twice, in any order, or never.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_svc.disk_jobs import DiskHeader, DiskJob, DiskRead, DiskWrite
from cache_svc.invalidate import What, invalidate
from cache_svc.redeclare import restored
from cache_svc.slots import BUSY, RESTING
from cache_svc.tiers import TierLimits
from jitney.block_ops import (
    Acquire,
    BatchAnswer,
    BlockState,
    Chain,
    Release,
    RequestId,
    Reserve,
    ReserveResult,
    Return,
    Seal,
    Swap,
    Tier,
    Withdraw,
    block_id,
)
from jitney.keys import Key
from jitney.ticket_ops import LoadDone, Prefetch, StoreDone, StoreOrder, Ticket, slot_id
from tests.support.ledger_rig import BLOCK_TOKENS, Prompt, prompt
from tests.support.naive_ledger import NaiveLedger
from tests.support.naive_tiers import NaiveTiers
from tests.support.tier_rig import GARBAGE, DeviceRig, TierRig

REQUESTS = st.integers(1, 3)
WHICH = st.integers(0, 1)
PATHS = st.sampled_from(
    [prompt(*path) for path in ((0,), (0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (0, 1), (1, 0, 0), (1,), (0, 0, 0, 0, 1, 1))]
)
LOOKED_UP = [prompt(*path) for path in ((0, 0, 0, 0, 1, 1), (0, 0, 1, 0), (0, 1), (1, 0, 0))]
PARENTS = {
    key: parent
    for wanted in [*LOOKED_UP, prompt(0, 0, 0, 0, 0), prompt(0, 1, 0), prompt(0, 1, 1)]
    for parent, key in zip([wanted.root, *wanted.keys], wanted.keys, strict=False)
}
LIMITS = st.builds(
    TierLimits,
    cpu_slots=st.sampled_from([0, 1, 2, 4, 8, 8, 12, 12]),
    ssd_slots=st.sampled_from([0, 1, 4, 12, 12, 12]),
    pin_permille=st.sampled_from([0, 500, 1000, 1000]),
    pin_limit_us=st.just(50),
    stores_in_flight=st.sampled_from([1, 4, 64]),
    disk_jobs_in_flight=st.sampled_from([1, 4, 64]),
    interval_blocks=st.sampled_from([1, 2, 32]),
    tenant_permille=st.sampled_from([1000, 1000, 400]),
)


def tenant_of(key: Key) -> str:
    """Whose chain it is: there are two, told apart by their first block."""
    while PARENTS[key] in PARENTS:
        key = PARENTS[key]
    return "x" if key == prompt(0).keys[0] else "y"


@dataclass
class Executor:
    """A device, its naive twin, what its requests boarded with, and copies that are made and not answered."""

    device: DeviceRig
    naive: NaiveLedger
    plans: dict[RequestId, Prompt] = field(default_factory=dict)
    copied: list[tuple[StoreOrder, StoreDone]] = field(default_factory=list)
    told: list[StoreDone] = field(default_factory=list)


class TiersMachine(RuleBasedStateMachine):
    """`zombies` are devices of fenced epochs that have orders."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = TierLimits()
        self.rig: TierRig
        self.naive: NaiveTiers
        self.executors: list[Executor] = []
        self.zombies: list[Executor] = []
        self.epochs = 0
        self.spoiled: set[tuple[Tier, int]] = set()

    @initialize(limits=LIMITS, blocks=st.integers(5, 10), ring=st.integers(0, 3))
    def open(self, limits: TierLimits, blocks: int, ring: int) -> None:
        staging = limits.cpu_slots if ring == 3 else 0
        values = {name: getattr(limits, name) for name in limits.__dataclass_fields__}
        self.limits = TierLimits(**{**values, "staging_slots": staging})
        self.blocks = blocks
        self.rig = TierRig(self.limits)
        self.naive = NaiveTiers(self.limits)
        self.naive.parents = dict(PARENTS)
        self.executors = [self.new_executor("a"), self.new_executor("b")]

    def new_executor(self, name: str) -> Executor:
        self.epochs += 1
        device = self.rig.device(self.blocks, name, self.epochs)
        return Executor(device, NaiveLedger(self.blocks))

    # What is seen after every step.

    def follow(self) -> None:
        """New orders and jobs are lawful; pins on devices are as they are; the tiers are as foretold."""
        for executor in self.executors:
            for order in executor.device.stores.values():
                self.ordered(executor, order)
        for job in self.rig.jobs:
            if isinstance(job, DiskRead):
                self.naive.cpu_filling.setdefault(slot_id(job.cpu_slot), job.entry.key) if self.reads(job) else None
            elif isinstance(job, DiskWrite) and self.writes(job):
                self.naive.ssd_filling.setdefault(job.disk_slot, job.entry.key)
        lower = self.rig.tiers.lower
        self.naive.pins = {
            (*owner, request): self.naive.pins[(*owner, request)] for owner, request in lower.pins.requests
        }
        self.naive.observe(self.rig.tiers)
        for executor in self.executors:
            executor.naive.set_pins(executor.device.ledger.blocks.pins)

    def reads(self, job: DiskRead) -> bool:
        """Whether the read still counts."""
        return self.rig.tiers.lower.disk.reading.get(job.entry.key) == slot_id(job.cpu_slot)

    def writes(self, job: DiskWrite) -> bool:
        """Whether the write still counts."""
        return self.rig.tiers.lower.disk.writing.get(job.entry.key) == job.disk_slot

    def ordered(self, executor: Executor, order: StoreOrder) -> None:
        for block, slot in zip(order.blocks, order.slots, strict=True):
            number, key = slot_id(slot), self.rig.tiers.lower.cpu.entry[slot_id(slot)]
            if number in self.naive.cpu_filling or key is None:
                continue
            if self.rig.tiers.lower.storing.get(key.key) == number:
                assert executor.naive.blocks[block_id(block)].handle == block
                assert executor.naive.blocks[block_id(block)].key == key.key
                if self.rig.tiers.lower.cpu.find(key.key) is None:
                    self.naive.cpu.pop(key.key, None)  # evicted first, and then ordered anew
                assert key.key not in self.naive.cpu
                self.naive.cpu_filling[number] = key.key
                self.spoiled.discard((Tier.CPU, number))

    def apply(self, executor: Executor, **operations: Any) -> BatchAnswer:
        """A batch, followed by both naive ones."""
        device, before = executor.device, list(executor.device.ledger.blocks.pins)
        swaps = operations.get("swaps", ())
        chains = [executor.naive.chain_of(swap.request) for swap in swaps]
        reserve = next(iter(operations.get("reserves", ())), None)
        places = self.rig.tiers.lower.ssd.place[:]
        stored = dict(self.naive.cpu), dict(self.naive.ssd)
        answer = device.apply(**operations)
        for swap, chain, result in zip(swaps, chains, answer.swaps, strict=True):
            self.naive.swap((*device.owner, swap.request), swap.tier, chain, result)
        if swaps:
            after = device.ledger.blocks.pins
            executor.naive.pin(b for b in range(self.blocks) for _ in range(after[b] - before[b]))
        executor.naive.follow(device.last, answer, check_counts=False)
        if reserve is not None and answer.reserves[0].ticket:
            self.loading(executor, answer.reserves[0], reserve.load_blocks, stored, places)
        self.follow()
        assert answer.counts == executor.naive.counts()
        return answer

    def loading(
        self,
        executor: Executor,
        opened: ReserveResult,
        most: int,
        stored: tuple[dict[Key, int], dict[Key, int]],
        places: list[bool],
    ) -> None:
        """A load was opened. `stored` and `places` are as they were before the batch."""
        count = opened.cpu_blocks + opened.ssd_blocks
        executor.naive.pin(block_id(block) for block in opened.blocks[:count])
        names = [executor.naive.blocks[block_id(block)].name for block in opened.blocks]
        now = self.naive.cpu, self.naive.ssd
        self.naive.cpu, self.naive.ssd = stored
        run = self.naive.run([name for name in names if name is not None], places)
        self.naive.cpu, self.naive.ssd = now
        lower = self.rig.tiers.lower
        self.naive.check_load(opened, run, most, lower.cpu, len(lower.pins.requests) < len(self.naive.pins))

    # What executors do.

    @rule(which=WHICH, request=REQUESTS, wanted=PATHS, extra=st.integers(0, 1), load=st.integers(0, 6))
    def board(self, which: int, request: int, wanted: Prompt, extra: int, load: int) -> None:
        executor = self.executors[which]
        executor.plans[RequestId(request)] = wanted
        self.apply(
            executor,
            acquires=[Acquire(RequestId(request), wanted.keys)],
            reserves=[Reserve(RequestId(request), wanted.keys, len(wanted.keys) + extra, load)],
        )

    @rule(
        which=WHICH,
        request=REQUESTS,
        wanted=PATHS,
        load=st.integers(0, 6),
        end=st.sampled_from(["", "", "release", "cpu", "ssd"]),
        copies=st.booleans(),
    )
    def serve(self, which: int, request: int, wanted: Prompt, load: int, end: str, copies: bool) -> None:
        """A request's life in one go: admitted, loaded, computed, and what comes then."""
        executor = self.executors[which]
        self.end(which, request, False)
        self.board(which, request, wanted, 1, load)
        for ticket in self.open_loads(executor):
            self.finish_disk()
            self.load_done(executor, ticket)
            self.follow()
        self.compute(which, request, 6, "")
        if end == "release":
            self.apply(executor, releases=[Release(RequestId(request))])
        elif end:
            self.swap(which, request, Tier.CPU if end == "cpu" else Tier.SSD)
        if copies:
            self.all_copies(which)

    @rule(
        which=WHICH,
        wanted=PATHS,
        end=st.sampled_from(["release", "cpu", "ssd"]),
        spoiled=st.integers(0, 9),
        fails=st.integers(0, 9),
    )
    def come_back(self, which: int, wanted: Prompt, end: str, spoiled: int, fails: int) -> None:
        """What was computed goes down, is evicted, and is wanted again; now and then a byte or a read goes wrong."""
        self.serve(which, 1, wanted, 0, "", True)
        executor = self.executors[which]
        self.squeeze(which)
        self.serve(which, 1, wanted, 0, end, True)
        self.evict_all(which)
        slots = [(Tier.CPU, self.naive.cpu[key]) for key in wanted.keys if key in self.naive.cpu]
        slots += [(Tier.SSD, self.naive.ssd[key]) for key in wanted.keys if key in self.naive.ssd]
        for at, (tier, slot) in enumerate(slots):
            if at == spoiled:
                self.spoil_this(tier, slot)
        self.board(which, 1, wanted, 1, 6)
        self.board(1 - which, 2, wanted, 1, 6)
        reads = [job for job in self.rig.jobs if isinstance(job, DiskRead)]
        if fails < len(reads):
            self.do(reads[fails], False)
        if spoiled % 2:
            for ticket in self.open_loads(executor):
                self.load_done(executor, ticket)
                self.follow()

    @rule(which=WHICH)
    def all_copies(self, which: int) -> None:
        """The executor stores all that it was asked to, and the disk does all it has to."""
        executor = self.executors[which]
        while executor.device.stores or executor.copied:
            while executor.device.stores:
                order = executor.device.stores.pop(min(executor.device.stores))
                executor.copied.append((order, executor.device.copy_out(order)))
            self.answer(executor, 0)
        self.finish_disk()

    @rule(which=WHICH)
    def squeeze(self, which: int) -> None:
        """Decoding takes what is free, so that cached blocks are evicted next."""
        free = len(self.executors[which].device.ledger.blocks.free)
        self.apply(self.executors[which], grant=free)

    @rule(which=WHICH)
    def evict_all(self, which: int) -> None:
        """Decoding takes all there is, and gives all back that was ever taken."""
        executor = self.executors[which]
        self.apply(executor, grant=self.blocks)
        granted = [b.handle for b in executor.naive.blocks if b.state is BlockState.GRANTED]
        self.apply(executor, returns=[Return(granted)])

    @rule(which=WHICH, request=REQUESTS, blocks=st.integers(1, 6), also=st.sampled_from(["", "", "release"]))
    def compute(self, which: int, request: int, blocks: int, also: str) -> None:
        executor = self.executors[which]
        seal = self.next_seal(executor, RequestId(request), blocks)
        releases = [Release(RequestId(request))] if also else []
        if seal is not None:
            for block, key in zip(seal.blocks, seal.keys, strict=True):
                executor.device.bytes[block_id(block)] = key
            self.apply(executor, seals=[seal], releases=releases)

    def next_seal(self, executor: Executor, request: RequestId, blocks: int) -> Seal | None:
        """Of the next blocks that the request reserved for its prompt; the last block of a load is not among them."""
        plan = executor.plans.get(request)
        by_name = {b.name: b for b in executor.naive.held(request) if b.name is not None and not b.pins}
        if plan is None:
            return None
        first = next((at for at, key in enumerate(plan.keys) if key in by_name), 0)
        run = []
        for key in plan.keys[first : first + blocks]:
            if key not in by_name:
                break
            run.append(by_name[key].handle)
        return plan.seal(request, run, first, tenant=tenant_of(plan.keys[0])) if run else None

    @rule(which=WHICH, request=REQUESTS, step=st.integers(0, 1))
    def decode(self, which: int, request: int, step: int) -> None:
        """The block that is not of the prompt is full."""
        executor, who = self.executors[which], RequestId(request)
        plan = executor.plans.get(who)
        spare = [b for b in executor.naive.held(who) if b.state is BlockState.WRITING and not b.name and not b.pins]
        if plan is None or not spare or executor.naive.named(who) or who in executor.naive.private:
            return
        longer = prompt(*(int(t) // 10 for t in plan.tokens[::BLOCK_TOKENS]), step)
        if longer.keys[-1] not in PARENTS or len(spare[0].holders) > 1:
            return
        executor.device.bytes[spare[0].id] = longer.keys[-1]
        tenant = tenant_of(longer.keys[0])
        self.apply(executor, seals=[longer.seal(request, [spare[0].handle], len(plan.keys), tenant)])

    @rule(which=WHICH, request=REQUESTS, withdraw=st.booleans())
    def end(self, which: int, request: int, withdraw: bool) -> None:
        executor, who = self.executors[which], RequestId(request)
        had_pins = (executor.device.owner, who) in self.rig.tiers.lower.pins.requests
        if withdraw:
            self.apply(executor, withdraws=[Withdraw(who)])
        elif had_pins and not executor.naive.knows(who):
            executor.device.release(who)
            self.follow()
        else:
            self.apply(executor, releases=[Release(who)])

    @rule(which=WHICH, request=REQUESTS, tier=st.sampled_from([Tier.CPU, Tier.SSD]))
    def swap(self, which: int, request: int, tier: Tier) -> None:
        self.apply(self.executors[which], swaps=[Swap(RequestId(request), tier)])

    @rule(which=WHICH, wanted=PATHS, blocks=st.integers(0, 6))
    def prefetch(self, which: int, wanted: Prompt, blocks: int) -> None:
        self.executors[which].device.tell(Prefetch(RequestId(9), wanted.keys, blocks))
        self.follow()

    # Copies.

    @rule(which=WHICH, data=st.data())
    def copy_out(self, which: int, data: st.DataObject) -> None:
        executor = self.executors[which]
        if executor.device.stores:
            order = executor.device.stores.pop(data.draw(st.sampled_from(sorted(executor.device.stores))))
            executor.copied.append((order, executor.device.copy_out(order)))

    @rule(which=WHICH, data=st.data(), how=st.sampled_from(["done", "done", "done", "abort", "again"]))
    def answer_store(self, which: int, data: st.DataObject, how: str) -> None:
        executor = self.executors[which]
        if how == "again" and executor.told:
            executor.device.tell(data.draw(st.sampled_from(executor.told)))
        elif executor.copied:
            at = data.draw(st.integers(0, len(executor.copied) - 1))
            if how == "abort":
                order, _ = executor.copied.pop(at)
                for slot in order.slots:
                    self.naive.cpu_filling.pop(slot_id(slot), None)
                executor.device.abort(order.ticket)
            else:
                self.answer(executor, at)
        self.follow()

    def answer(self, executor: Executor, at: int) -> None:
        """One of the copies that were made is told; void for a block that is another one by now."""
        order, done = executor.copied.pop(at)
        for block, slot in zip(order.blocks, order.slots, strict=True):
            if executor.naive.blocks[block_id(block)].handle == block:
                self.naive.stored(Tier.CPU, slot_id(slot))
            else:
                self.naive.cpu_filling.pop(slot_id(slot), None)
        executor.device.tell(done)
        executor.told = [*executor.told, done][-3:]
        self.follow()

    @rule(which=WHICH, data=st.data(), how=st.sampled_from(["done", "done", "abort"]))
    def answer_load(self, which: int, data: st.DataObject, how: str) -> None:
        executor = self.executors[which]
        loads = self.open_loads(executor)
        if not loads:
            return
        ticket = data.draw(st.sampled_from(loads))
        if how == "abort":
            executor.device.abort(ticket)
        else:
            self.load_done(executor, ticket)
        self.follow()

    def open_loads(self, executor: Executor) -> list[Ticket]:
        """Loads that are not answered."""
        below = executor.device.ledger.below
        assert below is not None
        return [ticket for ticket in executor.device.results if ticket in below.tickets.open]

    def load_done(self, executor: Executor, ticket: Ticket) -> None:
        """What was offered is good, unless it was spoiled."""
        device = executor.device
        load = device.loads.pop(ticket, None)
        ready = [slot_id(slot) for slot, _ in load.ready] if load is not None else []
        good = 0
        if load is not None:
            device.loads[ticket] = load
            good = device.copy_in(ticket)
            del device.loads[ticket]
        if good < len(ready):
            assert (Tier.CPU, ready[good]) in self.spoiled
            target = device.results[ticket].blocks[good]
            open_load: Any = device.ledger.below.tickets.open[ticket]  # type: ignore[union-attr]
            assert target is not None
            self.naive.bad(Tier.CPU, open_load.keys[good], ready[good])
        else:
            assert all((Tier.CPU, slot) not in self.spoiled for slot in ready)
        device.tell(LoadDone(ticket, good))

    # The disk.

    @rule(data=st.data(), how=st.sampled_from(["ok", "ok", "ok", "fails"]))
    def disk_works(self, data: st.DataObject, how: str) -> None:
        if not self.rig.jobs:
            return
        slot = self.rig.jobs[data.draw(st.integers(0, len(self.rig.jobs) - 1))].disk_slot
        self.do(next(job for job in self.rig.jobs if job.disk_slot == slot), how == "ok")  # those of one slot in order

    def finish_disk(self) -> None:
        """The disk does all it has to."""
        while self.rig.jobs:
            self.do(self.rig.jobs[0], True)

    def do(self, job: DiskJob, ok: bool) -> None:
        """The disk does this job."""
        self.rig.jobs.remove(job)
        match job:
            case DiskRead():
                self.read(job, ok)
            case DiskWrite():
                if ok:
                    self.copy_spoiled((Tier.CPU, slot_id(job.cpu_slot)), (Tier.SSD, job.disk_slot))
                    self.naive.stored(Tier.SSD, job.disk_slot)
                else:
                    self.naive.ssd_filling.pop(job.disk_slot, None)
                self.rig.do(job, ok=ok)
            case DiskHeader():
                self.rig.do(job)
        self.follow()

    def read(self, job: DiskRead, ok: bool) -> None:
        good = ok and (Tier.SSD, job.disk_slot) not in self.spoiled
        slot = slot_id(job.cpu_slot)
        if good:
            self.spoiled.discard((Tier.CPU, slot))
            self.naive.stored(Tier.CPU, slot)
        else:
            self.naive.cpu_filling.pop(slot, None)
            self.naive.bad(Tier.SSD, job.entry.key, job.disk_slot)
        self.rig.do(job, ok=good)

    def copy_spoiled(self, source: tuple[Tier, int], target: tuple[Tier, int]) -> None:
        if source in self.spoiled:
            self.spoiled.add(target)
        else:
            self.spoiled.discard(target)

    @precondition(lambda self: self.naive.cpu or self.naive.ssd)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        where = [(Tier.CPU, slot) for slot in self.naive.cpu.values()]
        where += [(Tier.SSD, slot) for slot in self.naive.ssd.values() if slot in self.rig.disk]
        if not where:
            return
        self.spoil_this(*data.draw(st.sampled_from(sorted(where))))

    def spoil_this(self, tier: Tier, slot: int) -> None:
        """What stands in a slot is something else."""
        self.spoiled.add((tier, slot))
        if tier is Tier.CPU:
            self.rig.slots[slot] = GARBAGE
        else:
            self.rig.disk[slot] = (self.rig.disk[slot][0], GARBAGE)

    # Ends and restarts.

    @rule(which=WHICH)
    def fence(self, which: int) -> None:
        """The executor is started anew; the old process may still copy."""
        old = self.executors[which]
        name = old.device.owner[0]
        for order in [*old.device.stores.values(), *(order for order, _ in old.copied)]:
            for slot in order.slots:
                self.naive.cpu_filling.pop(slot_id(slot), None)
        self.rig.tiers.fence(old.device.owner)
        self.rig.devices.remove(old.device)
        if old.device.owner in self.rig.tiers.belows:
            self.zombies.append(old)
        self.executors[which] = self.new_executor(name)
        self.rig.settle()
        self.follow()

    @precondition(lambda self: self.zombies)
    @rule(how=st.sampled_from(["writes", "answers", "goes"]))
    def zombie(self, how: str) -> None:
        old = self.zombies[0]
        orders = [*old.device.stores.values(), *(order for order, _ in old.copied)]
        if how == "goes":
            self.rig.tiers.gone(old.device.owner)
        else:
            for order in orders:
                for slot in order.slots:
                    assert slot_id(slot) not in self.naive.cpu.values()
                    self.rig.slots[slot_id(slot)] = b"zombie"
                if how == "answers":
                    old.device.tell(StoreDone(order.ticket, [0] * len(order.slots)))
        if how != "writes":
            self.zombies.pop(0)
            assert old.device.owner not in self.rig.tiers.belows
        self.rig.settle()
        self.follow()

    @rule(
        chance=st.integers(0, 3),
        what=st.sampled_from(
            [What(tenant="x"), What(tenant="y"), What(prefix_key=prompt(0, 0).keys[1]), What(model_version="model")]
        ),
    )
    def forget(self, chance: int, what: What) -> None:
        if chance:
            return
        ledgers = [executor.device.ledger for executor in self.executors]
        sealed = [{b.key for b in executor.naive.blocks if b.key is not None} for executor in self.executors]
        doomed = self.doomed(what)
        gone = invalidate(ledgers, [self.rig.tiers], what)
        counts = self.naive.forget(doomed)
        assert (gone.cpu, gone.ssd) == counts, (gone, counts, what)
        assert gone.device == sum(len(keys & doomed) for keys in sealed)
        for executor in self.executors:
            executor.naive.forget(doomed)
        self.rig.settle()
        self.follow()

    def doomed(self, what: What) -> set[Key]:
        tiers = self.naive
        known = {*tiers.cpu, *tiers.ssd, *tiers.cpu_filling.values(), *tiers.ssd_filling.values()}
        known |= {b.key for executor in self.executors for b in executor.naive.blocks if b.key is not None}
        if what.prefix_key:
            return tiers.behind([Key(what.prefix_key)], known)
        return tiers.behind((key for key in known if what.model_version or tenant_of(key) == what.tenant), known)

    @rule(chance=st.integers(0, 2))
    def restart(self, chance: int) -> None:
        """The cache begins anew: the CPU tier is empty, tickets are void, headers are read, blocks are declared."""
        if chance:
            return
        old = self.rig
        self.rig = TierRig(self.limits, old.disk)
        self.naive = NaiveTiers(self.limits)
        self.naive.parents = dict(PARENTS)
        self.spoiled = {(tier, slot) for tier, slot in self.spoiled if tier is Tier.SSD and slot in old.disk}
        self.zombies = []
        for slot, (entry, _) in old.disk.items():
            known = [key for key in self.naive.ssd if key == entry.key]
            tenant = sum(1 for e, _ in old.disk.values() if e.content.origin == entry.content.origin)
            if not known and (self.limits.tenant_permille == 1000 or tenant <= 1):
                self.naive.ssd[entry.key] = slot
        if self.limits.tenant_permille != 1000:
            self.rig.scan()
            self.naive.ssd = dict(self.rig.tiers.lower.ssd.index.sealed)
        else:
            self.rig.scan()
        for executor in self.executors:
            self.redeclare(executor)
        self.follow()

    def redeclare(self, executor: Executor) -> None:
        self.epochs += 1
        executor.naive.private.clear()
        executor.naive.set_pins([0] * self.blocks)
        declared = [
            replace(block, tenant=tenant_of(Key(block.key)), model_version="model") if block.key else block
            for block in executor.naive.declare()
        ]
        executor.naive.restarted()
        device = self.rig.device(self.blocks, executor.device.owner[0], self.epochs)
        device.bytes = executor.device.bytes
        device.ledger = restored(self.blocks, BLOCK_TOKENS, declared, self.rig.tiers, device.owner, b"print")
        executor.device, executor.copied, executor.told = device, [], []

    @rule(us=st.sampled_from([1, 30, 100]))
    def time_goes_on(self, us: int) -> None:
        self.rig.tiers.now_us += us

    @rule(which=WHICH)
    def reopen_stream(self, which: int) -> None:
        """All that is open is told again, and is what the executor knew."""
        executor = self.executors[which]
        again = self.rig.tiers.open_events(executor.device.owner)
        orders = [event for event in again if isinstance(event, StoreOrder)]
        copied = {order.ticket: order for order, _ in executor.copied}
        orders = [copied.get(order.ticket, order) for order in orders]  # one that was copied may be urgent since
        known = [*executor.device.stores.values(), *copied.values()]
        assert sorted(orders, key=lambda order: order.ticket) == sorted(known, key=lambda order: order.ticket)
        assert self.rig.tiers.take_events(executor.device.owner) == []

    # What holds always.

    @invariant()
    def sound(self) -> None:
        if self.executors:
            self.rig.settle()

    @invariant()
    def agrees(self) -> None:
        places = self.rig.tiers.lower.ssd.place if self.executors else []
        for executor in self.executors:
            assert executor.device.right()
            table, naive = executor.device.ledger.blocks, executor.naive
            assert table.counts() == naive.counts()
            for b in naive.blocks:
                assert (table.state[b.id], table.handle[b.id]) == (b.state, b.handle)
            for wanted in LOOKED_UP:
                hits = executor.device.ledger.lookup(Chain(RequestId(3), wanted.keys))
                assert hits.device_blocks == naive.hits(Chain(RequestId(3), wanted.keys)).device_blocks
                self.naive.check_hits(hits, wanted.keys, places)

    @invariant()
    def bytes_are_right(self) -> None:
        if not self.executors:
            return
        cpu, ssd = self.rig.tiers.lower.cpu, self.rig.tiers.lower.ssd
        for key, slot in cpu.index.sealed.items():
            assert cpu.state[slot] in (BUSY, RESTING)
            assert (self.rig.slots[slot] == key) == ((Tier.CPU, slot) not in self.spoiled)
        for key, slot in ssd.index.sealed.items():
            assert (self.rig.disk[slot][1] == key) == ((Tier.SSD, slot) not in self.spoiled)

    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        """What waits to be stored or written is either under way, or waits for what is."""
        if not self.executors:
            return
        self.rig.settle()
        lower = self.rig.tiers.lower
        assert not lower.disk.queue or lower.disk.writing
        if not lower.storing and not lower.disk.jobs and lower.cpu.available:
            for below in self.rig.tiers.belows.values():
                assert below.fenced or below.stores.in_flight or not (below.stores.wanted or below.stores.waiting)

    def teardown(self) -> None:
        """When all is answered, nothing is pinned or on its way."""
        if not self.executors:
            return
        self.rig.tiers.now_us += 1000
        for executor in self.executors:
            for _, done in executor.copied:
                executor.device.tell(done)
            for request in (1, 2, 3):
                executor.device.release(request)
        for old in self.zombies:
            self.rig.tiers.gone(old.device.owner)
        self.rig.settle()
        self.rig.idle()
        for executor in self.executors:
            for ticket in list(executor.device.ledger.below.tickets.open):  # type: ignore[union-attr]
                executor.device.abort(ticket)
        self.rig.idle()
        for executor in self.executors:
            counts = executor.device.apply().counts
            assert (counts.leaving, counts.free + counts.evictable + counts.granted) == (0, self.blocks)
        self.rig.idle()
        usage = self.rig.tiers.usage()
        assert (usage.cpu.retired, usage.cpu.pinned, usage.ssd.retired, usage.ssd.pinned) == (0, 0, 0, 0)
        assert not self.rig.tiers.lower.disk.jobs and not self.rig.tiers.lower.storing


TiersMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTiersMachine = TiersMachine.TestCase


class DeepTiersMachine(TiersMachine):
    """The same for longer."""


DeepTiersMachine.TestCase.settings = settings(TiersMachine.TestCase.settings, max_examples=600, stateful_step_count=60)
TestDeepTiersMachine = pytest.mark.slow(pytest.mark.timeout(1800)(DeepTiersMachine.TestCase))
