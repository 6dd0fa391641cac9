"""Checks the lower tiers against themselves: every slot in exactly one state, copies and pins counted right.

Read only; cost grows with the number of slots. Finds, never repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from cache_svc.audit import MAX_FINDINGS
from cache_svc.disk_jobs import DiskRead, DiskWrite
from cache_svc.index import NO_BLOCK
from cache_svc.slots import BUSY, FILLING, FREE, RESTING, RETIRED, SlotTable
from cache_svc.tickets import Load, Store
from cache_svc.tiers import Tiers
from jitney.keys import Key, block_key
from jitney.ticket_ops import slot_id


def audit_tiers(tiers: Tiers, *, contents: bool = True) -> list[str]:
    """What is wrong, in sentences; empty when all is well. `contents`: also that keys are digests of the token ids."""
    lower = tiers.lower
    parts = [_users(tiers), _flights(tiers), _pins(tiers), _tickets(tiers)]
    for name, table in (("CPU", lower.cpu), ("SSD", lower.ssd)):
        parts += [_states(name, table), _index(name, table), _order(name, table)]
        if contents:
            parts.append(_contents(name, table))
    return list(islice(chain.from_iterable(parts), MAX_FINDINGS))


def _states(name: str, table: SlotTable) -> Iterator[str]:
    states = Counter(table.state)
    if set(table.free) != {slot for slot, state in enumerate(table.state) if state is FREE}:
        yield f"{name}: free list and FREE slots differ"
    if states[RETIRED] != table.retired:
        yield f"{name}: {table.retired} retired slots are counted, {states[RETIRED]} are RETIRED"
    tenants: Counter[str] = Counter()
    for slot, state in enumerate(table.state):
        entry, users = table.entry[slot], table.users[slot]
        if (entry is None) != (state in (FREE, RETIRED)):
            yield f"{name}: slot {slot} is {state.name} and has an entry, or lacks one"
        if entry is not None:
            tenants[entry.tenant] += 1
        pinned = entry is not None and entry.key in table.pinned
        if (users > 0) != (state in (FILLING, RETIRED) or (state is BUSY and (users > 0 or not pinned))):
            yield f"{name}: slot {slot} is {state.name} with {users} users"
        if state is RESTING and pinned:
            yield f"{name}: slot {slot} is pinned and could be evicted"
        if users < 0:
            yield f"{name}: slot {slot} has {users} users"
    if dict(tenants) != table.tenants:
        yield f"{name}: slots of tenants are counted wrong"
    if any(count > table.tenant_most for count in table.tenants.values()):
        yield f"{name}: a tenant has more than {table.tenant_most} slots"


def _index(name: str, table: SlotTable) -> Iterator[str]:
    index = table.index
    stored = {slot for slot, state in enumerate(table.state) if state in (BUSY, RESTING)}
    if set(index.sealed.values()) != stored:
        yield f"{name}: slots in the index are not just those that are stored"
    for key, slot in index.sealed.items():
        entry = table.entry[slot]
        if index.key[slot] != key or entry is None or entry.key != key or entry.parent != index.parent_key[slot]:
            yield f"{name}: slot {slot} is found under a key that is not its own"
            continue
        if index.content_of(slot) != entry.content:
            yield f"{name}: slot {slot} holds something else than what the index says of it"
        parent = index.sealed.get(entry.parent, NO_BLOCK)
        if index.parent[slot] != parent or (slot in index.orphans.get(entry.parent, {})) != (parent == NO_BLOCK):
            yield f"{name}: slot {slot} stands behind slot {index.parent[slot]}, its parent key is in {parent}"
    if {slot for family in index.orphans.values() for slot in family} - stored:
        yield f"{name}: an orphan is not stored"


def _order(name: str, table: SlotTable) -> Iterator[str]:
    children: dict[int, list[int]] = {}
    for slot in table.index.sealed.values():
        children.setdefault(table.index.parent[slot], []).append(slot)
    seen: set[int] = set()
    for slot in table.order.next(len(table.order)):
        if table.state[slot] is not RESTING:
            yield f"{name}: slot {slot} is {table.state[slot].name} and in the eviction order"
        if any(child not in seen for child in children.get(slot, ())):
            yield f"{name}: slot {slot} would be evicted before a child"
        seen.add(slot)
    for slot in table.index.sealed.values():
        ready = all(child in seen for child in children.get(slot, ()))
        if table.state[slot] is RESTING and ready and slot not in seen:
            yield f"{name}: slot {slot} could be evicted and is not in the order"


def _contents(name: str, table: SlotTable) -> Iterator[str]:
    for slot in table.index.sealed.values():
        entry = table.entry[slot]
        if entry is not None and block_key(entry.parent, entry.content.token_ids) != entry.key:
            yield f"{name}: the key of slot {slot} is not the digest of its parent key and token ids"


def _users(tiers: Tiers) -> Iterator[str]:
    """Every copy counts once, on both of its ends."""
    lower = tiers.lower
    cpu: Counter[int] = Counter()
    ssd: Counter[int] = Counter(lower.disk.reserved.values())
    ssd.update(lower.disk.written_slots)
    for below in tiers.belows.values():
        for ticket in below.tickets.open.values():
            cpu.update(ticket.slots[: ticket.end] if isinstance(ticket, Load) else ticket.slots)
    for job in lower.disk.jobs.values():
        cpu[slot_id(job.cpu_slot)] += 1
        ssd[job.disk_slot] += 1
    for name, table, users in (("CPU", lower.cpu, cpu), ("SSD", lower.ssd, ssd)):
        for slot in range(table.total):
            if table.users[slot] != users[slot]:
                yield f"{name}: slot {slot} counts {table.users[slot]} users, there are {users[slot]}"


def _flights(tiers: Tiers) -> Iterator[str]:
    """What is on its way is known by its key, once."""
    lower, disk = tiers.lower, tiers.lower.disk
    coming = [*lower.storing.items(), *disk.reading.items()]
    filling = {slot for slot, state in enumerate(lower.cpu.state) if state is FILLING}
    if {slot for _, slot in coming} != filling or len(coming) != len(filling):
        yield "CPU: FILLING slots are not just those that are stored or read into"
    going = [*disk.reserved.items(), *disk.writing.items()]
    filling = {slot for slot, state in enumerate(lower.ssd.state) if state is FILLING}
    if {slot for _, slot in going} != filling or len(going) != len(filling):
        yield "SSD: FILLING slots are not just those that are reserved or written"
    for table, flights in ((lower.cpu, coming), (lower.ssd, going)):
        for key, slot in flights:
            entry = table.entry[slot]
            if entry is None or entry.key != key:
                yield f"slot {slot} is on its way under a key that is not its own"
    writes = {job.disk_slot for job in disk.jobs.values() if isinstance(job, DiskWrite)}
    if not set(disk.writing.values()) <= writes:
        yield "SSD: a slot is written and no write is open"
    reads = {slot_id(job.cpu_slot) for job in disk.jobs.values() if isinstance(job, DiskRead)}
    if not set(disk.reading.values()) <= reads:
        yield "CPU: a slot is read into and no read is open"
    wanted = {key for below in tiers.belows.values() for _, key in below.stores.wanted}
    for key in disk.kept:
        known = lower.has(key) or disk.has(key) or key in wanted
        if not known:
            yield "the SSD shall have a block that is nowhere"
    if any(lower.cpu.find(key) is None or key not in disk.kept for key in disk.queue):
        yield "a block waits to be written that is not kept, or not in the CPU tier"


def _pins(tiers: Tiers) -> Iterator[str]:
    lower = tiers.lower
    for name, table in (("CPU", lower.cpu), ("SSD", lower.ssd)):
        pins: Counter[Key] = Counter()
        for pinned in lower.pins.requests.values():
            if pinned.table is table:
                pins.update(pinned.keys)
        if dict(pins) != table.pinned:
            yield f"{name}: pins and the keys of swapped requests differ"
        if len(table.pinned) > table.total * lower.limits.pin_permille // 1000:
            yield f"{name}: {len(table.pinned)} keys are pinned, more than the budget"
    for owner, _ in lower.pins.requests:
        if owner not in tiers.belows or tiers.belows[owner].fenced:
            yield f"something is pinned for a request of {owner[0]!r}, epoch {owner[1]}, which is over"


def _tickets(tiers: Tiers) -> Iterator[str]:
    filling = {}
    waiting = set()
    for owner, below in tiers.belows.items():
        if below.fenced and any(isinstance(ticket, Load) for ticket in below.tickets.open.values()):
            yield f"{owner[0]!r} still loads in epoch {owner[1]}, which is over"
        stored = 0
        for number, ticket in below.tickets.open.items():
            if isinstance(ticket, Store):
                stored += len(ticket.slots)
                filling.update({slot: (number, at) for at, slot in enumerate(ticket.slots)})
            else:
                waiting |= {
                    (slot, number, at) for at, slot in enumerate(ticket.slots[: ticket.end]) if not ticket.ready[at]
                }
        if stored != below.stores.in_flight:
            yield f"{owner[0]!r} counts {below.stores.in_flight} blocks in flight, {stored} are"
    if filling != {slot: (store.ticket, at) for slot, (_, store, at) in tiers.filling.items()}:
        yield "open stores and the slots that they fill differ"
    if waiting != {(slot, load.ticket, at) for slot, loads in tiers.waiting.items() for _, load, at in loads}:
        yield "open loads and those that wait for a read differ"
