"""Which waiting requests board, in the policy's order and by the whole prompt; and why the first that does not, waits.

A request boards when there is a row for it, all blocks of its prompt fit beside what is kept for others, and at least
one token of the step is left. Nobody overtakes one that does not fit, so everything that fits an empty pool boards in
the end: rows end, and a pool without rows keeps nothing back.

A request at its preemption bound boards only with blocks for its whole remaining length, which stay kept for it: it
is not thrown out again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64, AdmitColumns
from jitney.decision import Refusal, RefusalReason, WaitReason
from jitney.snapshot import Settings, Snapshot
from scheduler_svc.budget import Budget, Reserve, growth_tokens
from scheduler_svc.candidates import NO_HITS, hits_by_request
from scheduler_svc.chunking import long_share
from scheduler_svc.running import Flags, RunningRows


@dataclass(frozen=True, slots=True)
class Wait:
    """Why the first request that did not board waits. `needed` and `available` are blocks, rows or tokens, as the
    reason says; `kept` are blocks that are there, but kept for others."""

    row: int  # of the waiting table
    reason: WaitReason
    needed: int
    available: int
    kept: int = 0


@dataclass(slots=True)
class Boarding:
    """Requests that board, as rows of the waiting table, and the first that does not."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the first chunk; 0: it joins
    blocks: list[int] = field(default_factory=list)  # beside its hits
    wanted: list[int] = field(default_factory=list)  # tokens to compute before its first new one; 0: it joins
    wait: Wait | None = None
    kept: int = 0  # blocks for what they will generate

    def add(self, row: int, tokens: int, blocks: int, wanted: int) -> None:
        """One more."""
        self.rows.append(row)
        self.tokens.append(tokens)
        self.blocks.append(blocks)
        self.wanted.append(wanted)

    def top_up(self, left: int, chunk_cap: int) -> int:
        """Deals `left` tokens to the first chunks that could be larger; returns what nobody took."""
        for place, wanted in enumerate(self.wanted):
            more = min(min(wanted, chunk_cap) - self.tokens[place], left)
            if more > 0:
                self.tokens[place] += more
                left -= more
        return left

    def without_joiners(self) -> Boarding:
        """Only those that compute something themselves."""
        computes = [place for place, wanted in enumerate(self.wanted) if wanted]
        rows, tokens, blocks, wanted = (
            [column[place] for place in computes] for column in (self.rows, self.tokens, self.blocks, self.wanted)
        )
        return Boarding(rows, tokens, blocks, wanted)

    def columns(self, snapshot: Snapshot) -> AdmitColumns:
        """As the decision tells it."""
        return AdmitColumns(
            id=snapshot.waiting.id[self.rows] if self.rows else snapshot.waiting.id[:0],
            tokens=np.array(self.tokens, np.int32),
            blocks=np.array(self.blocks, np.int32),
        )


def hopeless(snapshot: Snapshot) -> Flags | None:
    """Waiting requests [W] whose tokens do not fit the pool, None if there are none; a pool of no blocks is one that
    is not known yet."""
    pool = snapshot.blocks.total * snapshot.settings.block_tokens
    tokens = snapshot.waiting.tokens
    if pool == 0 or len(tokens) == 0 or int(tokens.max()) <= pool:
        return None
    return tokens > pool


def refusals(snapshot: Snapshot, waiting: Flags | None) -> tuple[Refusal, ...]:
    """Of `waiting` [W], requests that need more blocks than the pool has."""
    if waiting is None:
        return ()
    table, total, size = snapshot.waiting, snapshot.blocks.total, snapshot.settings.block_tokens
    rows = zip(table.id[waiting].tolist(), table.tokens[waiting].tolist(), strict=True)
    return tuple(Refusal(id_, RefusalReason.NEVER_FITS, limit=total, value=-(-tokens // size)) for id_, tokens in rows)


def board(
    snapshot: Snapshot, order: I64, rows: RunningRows, budget: Budget, reserve: Reserve, *, closed: bool
) -> Boarding:
    """Boards waiting requests in `order` and takes what they need from `budget`; nobody if `closed`, which a step is
    in which running rows went short of blocks. `rows` are those that stay."""
    out = Boarding()
    settings, table = snapshot.settings, snapshot.waiting
    first = order[: max(budget.rows, 0) + 1]
    lists = (a[first].tolist() for a in (table.id, table.tokens, table.new_tokens, table.preemptions))
    hits = hits_by_request(snapshot, rows.id)
    for row, id_, tokens, new, times in zip(first.tolist(), *lists, strict=True):
        hit = hits.get(id_, NO_HITS)
        now = max(-(-tokens // settings.block_tokens) - hit.blocks, 0)
        bound = times >= settings.max_preemptions
        later = _later(snapshot, tokens, new, whole=bound)
        empty = rows.count == 0 and not out.rows
        needed = now + hit.unheld + (0 if empty else later)
        room = 0 if closed else budget.blocks - (0 if empty else reserve.blocks + out.kept)
        wanted = tokens - min(hit.blocks * settings.block_tokens, tokens - 1)
        if budget.rows <= 0:
            out.wait = Wait(row, WaitReason.ROWS, 1, 0)
        elif needed > room or closed:
            reason = WaitReason.BOUND if bound and not closed else WaitReason.BLOCKS
            out.wait = Wait(row, reason, needed, max(room, 0), budget.blocks - max(room, 0))
        elif budget.tokens <= 0 and not hit.joins:
            out.wait = Wait(row, WaitReason.TOKENS, wanted, 0)
        if out.wait is not None:
            break
        others = len(out.rows) + 1 < len(order)
        chunk = 0 if hit.joins else _chunk(settings, wanted, budget.tokens, others=others)
        out.add(row, chunk, now, 0 if hit.joins else wanted)
        budget.rows -= 1
        budget.blocks -= now + hit.unheld
        budget.tokens -= chunk
        out.kept += later
    return out


def _chunk(settings: Settings, wanted: int, left: int, *, others: bool) -> int:
    """Tokens of a first chunk."""
    share = long_share(left) if others and wanted > settings.chunk_cap_tokens else left
    return min(wanted, settings.chunk_cap_tokens, share)


def _later(snapshot: Snapshot, tokens: int, new: int, *, whole: bool) -> int:
    """Blocks kept for what a request will generate: all of it, or a step into the next block if that is near."""
    size = snapshot.settings.block_tokens
    prompt = -(-tokens // size)
    last = min(-(-(tokens + new - 1) // size), snapshot.blocks.total)
    if whole:
        return max(last - prompt, 0)
    return int(last > prompt and prompt * size - tokens < growth_tokens(snapshot.settings))
