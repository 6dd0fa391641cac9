"""Who has opened the cache: one Session per executor name, fenced by incarnation and epoch, numbered by op_seq.

Of one name the higher incarnation wins. Every Open begins a new epoch with an empty ledger; calls of an older epoch,
or of another start of the cache (boot id), are refused with Conflict, whose `field` says why: "incarnation", "epoch",
"boot_id", "op_seq" or "redeclare". Between an Open that redeclares and the end of the declaration no batch is
answered: it is refused, not held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_svc.blocks import BlockTable
from cache_svc.eviction import EvictionOrder, OrderOf
from cache_svc.index import Index
from cache_svc.ledger import Ledger
from cache_svc.redeclare import restored
from cache_svc.tiers import Owner, Tiers
from jitney.block_ops import Batch, BatchAnswer, DeclaredBlock, Opened
from jitney.errors import Conflict, InvalidRequest, Missing, TooLarge

ANSWERS_KEPT = 8
MAX_BLOCKS = 1 << 20
MAX_BLOCKS_IN_ALL = 1 << 22
"""Of all pools together: their metadata is some 140 bytes a block."""
MAX_BLOCK_BYTES = 1 << 28
"""Some 256 tokens of the largest models; a few blocks are in memory for the SSD's sake whatever the CPU tier's size."""
MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class DevicePool:
    """What an executor opens the cache with."""

    executor: str
    incarnation: int
    fingerprint: bytes
    blocks: int
    block_bytes: int
    block_tokens: int

    def __post_init__(self) -> None:
        limits = (
            ("blocks", self.blocks, MAX_BLOCKS),
            ("block_bytes", self.block_bytes, MAX_BLOCK_BYTES),
            ("block_tokens", self.block_tokens, 1 << 16),
        )
        for name, value, limit in limits:
            if not 1 <= value <= limit:
                raise InvalidRequest(f"{name} is {value}, must be 1 to {limit}", field=name, limit=limit, value=value)
        if not 1 <= len(self.executor.encode()) <= MAX_NAME_BYTES:
            size = len(self.executor.encode())
            raise InvalidRequest(
                f"the executor's name has {size} bytes, must be 1 to {MAX_NAME_BYTES}",
                field="executor",
                limit=MAX_NAME_BYTES,
                value=size,
            )
        if (size := len(self.fingerprint)) > MAX_NAME_BYTES:
            what = f"the fingerprint has {size} bytes, at most {MAX_NAME_BYTES} are allowed"
            raise InvalidRequest(what, field="fingerprint", limit=MAX_NAME_BYTES, value=size)


IndexOf = Callable[[DevicePool], Index]


def plain_index(pool: DevicePool) -> Index:
    """One that nobody watches."""
    return Index(pool.blocks)


class Session:
    """One epoch of one executor. `ledger` is empty, and of no use, while `redeclaring`. `tiers`: what lies below.

    `index_of` makes the index of its blocks, and again when a declaration has come. `before` are earlier epochs of the
    same process: who declares has made sure that no copy of these is under way any more.
    """

    def __init__(
        self,
        pool: DevicePool,
        epoch: int,
        *,
        redeclares: bool,
        tiers: Tiers | None = None,
        index_of: IndexOf = plain_index,
        order: OrderOf = EvictionOrder,
    ) -> None:
        self.pool = pool
        self._index_of = index_of
        self._order = order
        self.epoch = epoch
        self.redeclaring = redeclares
        self.tiers = tiers
        table = BlockTable(pool.blocks, index=index_of(pool), order=order)
        self.ledger = Ledger(table, pool.block_tokens, tiers, self.owner, pool.fingerprint)
        self.before: list[Owner] = []
        self.op_seq = 0
        self._answered: deque[tuple[Batch, BatchAnswer]] = deque(maxlen=ANSWERS_KEPT)

    @property
    def owner(self) -> Owner:
        """Who has tickets of the tiers below."""
        return (self.pool.executor, self.epoch)

    def apply(self, batch: Batch) -> BatchAnswer:
        """The answer to the next batch, or the first answer to a repeated one.

        Conflict for a gap, for a repeat whose answer is gone or that says something else than the first time (two
        send under one name: the true one opens again and declares), and before the declaration is complete;
        InvalidRequest for a malformed batch, whose number is still the next one then.
        """
        if self.redeclaring:
            raise Conflict("the declaration of this epoch is not complete", field="redeclare")
        if batch.op_seq == self.op_seq + 1:
            answer = self.ledger.apply(batch)
            self.op_seq = batch.op_seq
            self._answered.append((batch, answer))
            return answer
        for first, answer in self._answered:
            if first.op_seq == batch.op_seq:
                if first != batch:
                    what = f"batch {batch.op_seq} is not the one that was answered under this number"
                    raise Conflict(what, field="op_seq", limit="the same batch", value=batch.op_seq)
                return answer
        raise Conflict(
            f"batch {batch.op_seq} is neither the next one, {self.op_seq + 1}, nor one of the last {ANSWERS_KEPT}",
            field="op_seq",
            limit=self.op_seq + 1,
            value=batch.op_seq,
        )

    def redeclare(self, declared: Sequence[DeclaredBlock]) -> None:
        """Takes the whole declaration. Conflict if none is awaited, InvalidRequest for one that cannot be true."""
        if not self.redeclaring:
            raise Conflict("this epoch awaits no declaration", field="redeclare")
        pool = self.pool
        index = self._index_of(pool)
        self.ledger = restored(
            pool.blocks, pool.block_tokens, declared, self.tiers, self.owner, pool.fingerprint, index, self._order
        )
        self.redeclaring = False
        if self.tiers is not None:
            for owner in self.before:
                self.tiers.gone(owner)
        self.before.clear()


class Epochs:
    """All sessions of one start of the cache. `index_of` makes the indexes of device blocks: for who watches them.

    `order` makes their orders of eviction.
    """

    def __init__(self, boot_id: bytes, index_of: IndexOf = plain_index, order: OrderOf = EvictionOrder) -> None:
        self.boot_id = boot_id
        self._order = order
        self._index_of = index_of
        self.sessions: dict[str, Session] = {}

    def open(self, pool: DevicePool, *, redeclares: bool, tiers: Tiers | None = None) -> Opened:
        """Begins an epoch; what the name had on its device before is forgotten, its open tickets are void. `tiers` are
        those below this pool.

        Conflict for a lower incarnation, TooLarge if all pools together would have too many blocks.
        """
        known = self.sessions.get(pool.executor)
        if known is not None and known.pool.incarnation > pool.incarnation:
            raise Conflict(
                f"{pool.executor!r} was opened by incarnation {known.pool.incarnation}, this is {pool.incarnation}",
                field="incarnation",
                limit=known.pool.incarnation,
                value=pool.incarnation,
            )
        others = sum(session.pool.blocks for name, session in self.sessions.items() if name != pool.executor)
        if (blocks := others + pool.blocks) > MAX_BLOCKS_IN_ALL:
            raise TooLarge(
                f"all pools together would have {blocks} blocks, the limit is {MAX_BLOCKS_IN_ALL}",
                field="blocks",
                limit=MAX_BLOCKS_IN_ALL,
                value=blocks,
            )
        epoch = 1 if known is None else known.epoch + 1
        if known is not None and known.tiers is not None:
            known.tiers.fence(known.owner)
        session = Session(pool, epoch, redeclares=redeclares, tiers=tiers, index_of=self._index_of, order=self._order)
        if known is not None and known.tiers is not None and known.pool.incarnation == pool.incarnation:
            open_still = known.tiers.retired()
            session.before = [owner for owner in (*known.before, known.owner) if owner in open_still]
        self.sessions[pool.executor] = session
        return Opened(epoch, self.boot_id)

    def session(self, executor: str, epoch: int, boot_id: bytes) -> Session:
        """The session that a call belongs to. Conflict if the cache or the epoch is another one by now."""
        if boot_id != self.boot_id:
            raise Conflict(
                "the cache was restarted: open it again",
                field="boot_id",
                limit=self.boot_id.hex(),
                value=boot_id.hex(),
            )
        session = self.of(executor)
        if session.epoch != epoch:
            raise Conflict(
                f"epoch {epoch} of {executor!r} is fenced by {session.epoch}",
                field="epoch",
                limit=session.epoch,
                value=epoch,
            )
        return session

    def of(self, executor: str) -> Session:
        """The session of a name. Missing if it has not opened the cache."""
        session = self.sessions.get(executor)
        if session is None:
            raise Missing(f"no executor {executor!r} has opened this cache", field="executor", value=executor)
        return session
