"""Forgetting content in all tiers: a prefix with all that stands behind it, or what came from a tenant, salt or model.

From then on no look-up finds it. What requests hold of it on a device stays theirs until they release it, but it is
private content of theirs, and so is what they compute behind it: whoever joined them computes anew. A copy that is
under way into a lower tier stores nothing; a load that is under way brings its blocks to a request that is private from
here on. The SSD's slots are erased, so that a restart does not find them.

A request that holds nothing of it yet, though it began before, is like one that begins after it. Of a prefix, what
stands behind it is followed from block to block through all tiers: where a block between is in none of them, what lies
behind the gap stays. It cannot be reached either, until somebody computes the very same prefix again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cache_svc.index import Index, Origin
from cache_svc.ledger import Ledger
from cache_svc.tiers import Tiers
from jitney.errors import InvalidRequest
from jitney.keys import Key


@dataclass(frozen=True, slots=True)
class What:
    """One of the four."""

    prefix_key: bytes = b""
    tenant: str = ""
    salt_digest: bytes = b""
    model_version: str = ""

    def __post_init__(self) -> None:
        named = [name for name in self.__dataclass_fields__ if getattr(self, name)]
        if len(named) != 1:
            what = "name one of prefix key, tenant, salt digest and model version"
            raise InvalidRequest(what, field="what", limit=1, value=len(named))

    def of(self, origin: Origin) -> bool:
        """Whether content of this origin is meant."""
        return any(
            wanted and wanted == found
            for wanted, found in (
                (self.tenant, origin.tenant),
                (self.salt_digest, origin.salt_digest),
                (self.model_version, origin.model_version),
            )
        )


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Blocks that were forgotten, by tier."""

    device: int
    cpu: int
    ssd: int


def invalidate(ledgers: Sequence[Ledger], tiers: Sequence[Tiers], what: What, also: Collection[Key] = ()) -> Forgotten:
    """Forgets it on all of these devices and in all of these tiers, and what stands behind the keys of `also`. Walks
    through all that there is."""
    indexes = [ledger.blocks.index for ledger in ledgers]
    indexes += [table.index for each in tiers for table in (each.lower.cpu, each.lower.ssd)]
    doomed = _doomed(indexes, [entry for each in tiers for entry in each.on_the_way()], what, also)
    device = sum(ledger.forget(doomed) for ledger in ledgers)
    counts = [each.forget(doomed) for each in tiers]
    return Forgotten(device, sum(cpu for cpu, _ in counts), sum(ssd for _, ssd in counts))


def _doomed(
    indexes: Iterable[Index], on_the_way: Iterable[tuple[Key, Key, Origin]], what: What, also: Collection[Key]
) -> set[Key]:
    """The keys that are meant, and those of all that stands behind them in any tier."""
    children: dict[Key, list[Key]] = {}
    wave: list[Key] = [*also, Key(what.prefix_key)] if what.prefix_key else [*also]
    known = [(key, parent, origin) for index in indexes for key, parent, origin in index.entries()]
    for key, parent, origin in [*known, *on_the_way]:
        children.setdefault(parent, []).append(key)
        if what.of(origin):
            wave.append(key)
    doomed: set[Key] = set()
    while wave:
        key = wave.pop()
        if key not in doomed:
            doomed.add(key)
            wave += children.get(key, ())
    return doomed
