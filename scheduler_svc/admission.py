"""Which waiting requests board, in the policy's order and by the whole prompt; and why the first that does not, waits.

A request boards when there is a row for it, all blocks of its prompt fit beside what is kept for others, and at least
one token of the step is left. Nobody overtakes one that does not fit, so everything that fits an empty pool boards in
the end: rows end, and a pool without rows keeps nothing back.

A request at its preemption bound boards only with blocks for its whole remaining length, which stay kept for it: it
is not thrown out again. One that was preempted less often boards again only with a block to spare for each running
row, so that it does not leave again at the next one's need; unless it outranks those rows.

What lies in a lower tier and is faster loaded than computed (see loading) counts as a hit for the tokens to compute,
but takes device blocks as if it were computed. Such a request gets its row at once and its first tokens when the load
has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jitney.columns import I64, AdmitColumns
from jitney.decision import WaitReason
from jitney.snapshot import MAX_CANDIDATES, Settings, Snapshot
from scheduler_svc.budget import Budget, Reserve, growth_tokens
from scheduler_svc.candidates import Hits, HitsOf
from scheduler_svc.chunking import long_share
from scheduler_svc.costs import rows_at_once
from scheduler_svc.displacement import Displacement
from scheduler_svc.loading import NO_LOAD, Load, LoadCosts
from scheduler_svc.running import RunningRows


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
    tokens: list[int] = field(default_factory=list)  # of the first chunk; 0: it joins or loads
    blocks: list[int] = field(default_factory=list)  # beside its hits
    wanted: list[int] = field(default_factory=list)  # tokens to compute before its first new one; 0: it joins
    loads: list[Load] = field(default_factory=list)
    wait: Wait | None = None
    kept: int = 0  # blocks for what they will generate

    @property
    def lacks_rows(self) -> bool:
        """Whether rows are what is short."""
        return self.wait is not None and self.wait.reason is WaitReason.ROWS

    def add(self, row: int, tokens: int, blocks: int, wanted: int, load: Load) -> None:
        """One more."""
        self.rows.append(row)
        self.tokens.append(tokens)
        self.blocks.append(blocks)
        self.wanted.append(wanted)
        self.loads.append(load)

    def top_up(self, left: int, chunk_cap: int) -> int:
        """Deals `left` tokens to the first chunks that could be larger; returns what nobody took."""
        for place, wanted in enumerate(self.wanted):
            more = min(min(wanted, chunk_cap) - self.tokens[place], left)
            if more > 0 and self.tokens[place]:
                self.tokens[place] += more
                left -= more
        return left

    def without_joiners(self) -> Boarding:
        """Only those that compute something themselves."""
        computes = [place for place, wanted in enumerate(self.wanted) if wanted]
        rows, tokens, blocks, wanted = (
            [column[place] for place in computes] for column in (self.rows, self.tokens, self.blocks, self.wanted)
        )
        return Boarding(rows, tokens, blocks, wanted, [self.loads[place] for place in computes])

    @property
    def skipped_load_blocks(self) -> int:
        """Blocks in lower tiers that are computed anew."""
        return sum(max(load.found - load.blocks, 0) for load in self.loads)

    def columns(self, snapshot: Snapshot) -> AdmitColumns:
        """As the decision tells it."""
        return AdmitColumns(
            id=snapshot.waiting.id[self.rows] if self.rows else snapshot.waiting.id[:0],
            tokens=np.array(self.tokens, np.int32),
            blocks=np.array(self.blocks, np.int32),
            load_blocks=np.array([load.blocks for load in self.loads], np.int32),
        )


def board(
    snapshot: Snapshot,
    order: I64,
    rows: RunningRows,
    budget: Budget,
    reserve: Reserve,
    *,
    closed: bool,
    displacement: Displacement | None = None,
) -> Boarding:
    """Boards waiting requests in `order` and takes what they need from `budget`. `rows` are those that stay; some of
    them leave all the same, if a `displacement` finds that they should.

    If `closed`, which a step is in which running rows went short of blocks, only those board that outrank these.
    """
    out = Boarding()
    settings, table = snapshot.settings, snapshot.waiting
    more = MAX_CANDIDATES if displacement is not None and displacement.by_rank else 0
    first = order[: max(budget.rows, 0) + 1 + more]
    lists = (a[first].tolist() for a in (table.id, table.tokens, table.new_tokens, table.preemptions))
    hits = HitsOf(snapshot, rows.id)
    spare, costs = max(rows.count - reserve.growing, 0), LoadCosts.of(snapshot)
    at_once = rows_at_once(rows)
    for place, (row, id_, tokens, new, times) in enumerate(zip(first.tolist(), *lists, strict=True)):
        hit = hits[id_]
        if displacement is not None and displacement.has_left(hit.owner):
            hit = hit._replace(owner=0)
        empty = rows.count == 0 and not out.rows
        need = _need(snapshot, hit, costs, tokens, new, times, 0 if empty else spare, at_once + len(out.rows) + 1)
        kept = 0 if empty else reserve.blocks + out.kept
        blocks = need.now + hit.unheld + (0 if empty else need.later + need.again)
        shut = closed
        if displacement is not None and (closed or budget.rows <= 0 or blocks > budget.blocks - kept):
            shut = closed and not displacement.comes_first(row)
            if not shut and displacement.for_rank(row, blocks - need.again - (budget.blocks - kept), budget):
                blocks -= need.again
            elif not closed and budget.rows > 0 and times == 0:
                displacement.for_gain(order[place:], budget.blocks - kept, budget)
        out.wait = _wait(row, need, blocks, budget, kept, shut=shut)
        if out.wait is not None:
            break
        others = len(out.rows) + 1 < len(order)
        idle = hit.owner or need.load.blocks
        chunk = 0 if idle else _chunk(settings, need.wanted, budget.tokens, others=others)
        out.add(row, chunk, need.now, need.wanted, need.load)
        costs.take(need.load)
        if hit.owner and displacement is not None:
            displacement.keep(hit.owner)
        budget.rows -= 1
        budget.blocks -= need.now + hit.unheld
        budget.tokens -= chunk
        out.kept += need.later
    return out


class _Need(NamedTuple):
    """What a request needs to board: blocks `now`, and kept for `later`; `again`: more that must be free, so that one
    that was preempted is not thrown out at once; tokens `wanted`, 0 if it joins; whether it is at its `bound`; and what
    it loads."""

    now: int
    later: int
    again: int
    wanted: int
    bound: bool
    load: Load


def _need(
    snapshot: Snapshot, hit: Hits, costs: LoadCosts, tokens: int, new: int, times: int, spare: int, at_once: int
) -> _Need:
    """Of a request that was preempted `times` times; `spare`: a block for each running row that has none kept;
    `at_once`: rows of a step, this one among them."""
    size = snapshot.settings.block_tokens
    bound = times >= snapshot.settings.max_preemptions
    load, wait = NO_LOAD, at_once if times else 1
    if not hit.known:
        load = costs.unseen(tokens // size, wait)
    elif hit.cpu + hit.ssd and not hit.owner:
        behind = max(tokens // size - hit.blocks, 0)
        cpu = min(hit.cpu, behind)
        load = costs.best(hit.blocks, cpu, min(hit.ssd, behind - cpu), wait)
    there = hit.blocks + min(load.blocks, load.found)
    return _Need(
        now=max(-(-tokens // size) - hit.blocks, 0),
        later=_later(snapshot, tokens, new, whole=bound),
        again=spare if times and not bound else 0,
        wanted=0 if hit.owner else tokens - min(there * size, tokens - 1),
        bound=bound,
        load=load,
    )


def _wait(row: int, need: _Need, blocks: int, budget: Budget, kept: int, *, shut: bool) -> Wait | None:
    """Why a request that needs so many `blocks` does not board; None if it does."""
    room = 0 if shut else budget.blocks - kept
    if budget.rows <= 0:
        return Wait(row, WaitReason.ROWS, 1, 0)
    if shut or blocks > room:
        reason = WaitReason.BOUND if need.bound and not shut else WaitReason.BLOCKS
        return Wait(row, reason, blocks, max(room, 0), budget.blocks - max(room, 0))
    if budget.tokens <= 0 and need.wanted and not need.load.blocks:
        return Wait(row, WaitReason.TOKENS, need.wanted, 0)
    return None


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
