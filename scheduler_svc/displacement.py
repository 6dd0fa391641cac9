"""Running rows that give their place to a request that waits. Two reasons, beside a running row's need of a block:

- The request *outranks* them: the policy puts it into a lower class, and it lacks a row or blocks. Rows of the highest
  class leave first, of these the cheapest, of equally cheap ones the latest; and nobody leaves unless it suffices.
- It *pays*: blocks are short, and with one row less so many waiting ones board that, by the step-time model, at least
  MIN_GAIN_PERCENT more tokens per second come out until they have answered, what it costs to bring the row back
  included; they must have the blocks for that, or others would have to leave for them soon. One row a step, which
  decodes, is not the first, and is of no lower class than they are.

No thrash: a request that was preempted boards again only with a block to spare for each row that runs (see admission),
nobody is preempted more often than the bound says, and a row never leaves for one of its own class for rank's sake.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jitney.columns import I64
from jitney.snapshot import MAX_CANDIDATES, Snapshot
from scheduler_svc.budget import Budget, blocks_of
from scheduler_svc.costs import Costs, cover_by_class
from scheduler_svc.policies.base import Ranking
from scheduler_svc.preemption import Relief, movable
from scheduler_svc.running import Flags, RunningRows
from scheduler_svc.step_time import StepTime

MIN_GAIN_PERCENT = 20
USUAL_ANSWER_TOKENS = 128
"""A gain is reckoned over answers of at most so many tokens."""
_PICO = 10**12


@dataclass(slots=True)
class Displacement:
    """Who may leave, and who has left: positions in the order of `rows`, in the order of preemption."""

    snapshot: Snapshot
    ranking: Ranking
    rows: RunningRows
    tokens: I64  # [R] as dealt, less those of rows that have left
    free: Flags  # [R] those that may still leave
    short_class: int | None  # lowest class of the rows that went short of blocks in this step
    coming: int  # blocks that are free as soon as launched steps and copies have ended
    slack: int  # rows that the step could hold beyond those that its target allows
    victims: list[int] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    move_us: list[int] = field(default_factory=list)
    for_id: list[int] = field(default_factory=list)
    _costs: Costs | None = None

    @classmethod
    def of(
        cls, snapshot: Snapshot, ranking: Ranking, rows: RunningRows, relief: Relief, budget: Budget
    ) -> Displacement:
        """With the victims of `relief` gone already, which `budget` knows."""
        free = movable(rows)
        free[relief.victims] = False
        short = relief.starved.copy()
        short[relief.victims] = True
        least = int(rows.rank_class[short].min()) if np.count_nonzero(short) else None
        coming = snapshot.blocks.leaving + int(snapshot.ending.held_blocks.sum(dtype=np.int64))
        slack = snapshot.settings.max_rows - rows.count + len(relief.victims) - budget.rows
        return cls(snapshot, ranking, rows, relief.tokens.copy(), free, least, coming, slack)

    @property
    def costs(self) -> Costs:
        """Reckoned when somebody might leave."""
        if self._costs is None:
            self._costs = Costs.of(self.snapshot, self.rows)
        return self._costs

    @property
    def by_rank(self) -> bool:
        """Whether the policy lets waiting requests outrank running rows at all."""
        return self.ranking.waiting_class is not None and self.rows.count > 0

    def comes_first(self, row: int) -> bool:
        """Whether waiting `row` boards even though running rows went short of blocks: it outranks all of these."""
        classes = self.ranking.waiting_class
        return classes is not None and self.short_class is not None and int(classes[row]) < self.short_class

    def has_left(self, request: int) -> bool:
        """Whether a request is among the victims."""
        return bool(self.victims) and request != 0 and request in self.rows.id[self.victims].tolist()

    def keep(self, request: int) -> None:
        """A request that another one now waits for does not leave."""
        self.free &= self.rows.id != request

    def for_rank(self, row: int, missing: int, budget: Budget) -> bool:
        """Rows that waiting `row` outranks leave, so that it gets a row and the blocks that it is `missing`; whether
        any did. Blocks that are coming are waited for, where nothing else is short."""
        if not self.by_rank or self.ranking.waiting_class is None or budget.rows + self.slack < 0:
            return False
        if budget.rows > 0 and missing <= self.coming:
            return False
        allowed = self.free & (self.rows.rank_class > int(self.ranking.waiting_class[row]))
        if not allowed.any():
            return False
        cost, classes = self.costs.least_lost_us, self.rows.rank_class
        gain = self.rows.private + self.rows.growth_of(self.tokens)
        chosen = cover_by_class(cost, gain, allowed, missing, classes)
        if int(gain[chosen].sum()) < missing:
            return False
        if len(chosen) == 0:
            rest = np.flatnonzero(allowed)[::-1]
            chosen = rest[np.lexsort((cost[rest], -classes[rest]))[:1]]
        return self._leave(chosen, int(self.snapshot.waiting.id[row]), budget)

    def for_gain(self, behind: I64, room: int, budget: Budget) -> bool:
        """If it pays, one row leaves so that the first of the waiting rows `behind` board, which have `room` blocks."""
        model, rows = StepTime.of(self.snapshot.rates), self.rows
        decodes = rows.decodes & (self.tokens > 0)
        count, read = int(np.count_nonzero(decodes)), int(rows.planned[decodes].sum())
        if self.victims or not model.known or count < 2 or self.coming > 0:
            return False
        behind = behind[:MAX_CANDIDATES]
        allowed = self.free & decodes & (rows.private > 0)
        allowed[0] = False
        if (classes := self.ranking.waiting_class) is not None:
            behind = behind[classes[behind] == classes[behind[0]]]
            allowed &= rows.rank_class >= int(classes[behind[0]])
        tokens = self.snapshot.waiting.tokens[behind].astype(np.int64)
        last = self._answer_tokens(behind)
        needs = np.cumsum(blocks_of(tokens + last, rows.block_tokens) + 1)
        boards = np.searchsorted(needs, room + rows.private, side="right")
        boards = np.minimum(boards, max(budget.rows, 0) + 1)
        now = _PICO * count // max(model.ns(count, count, read), 1)
        context = read - rows.planned + np.append(0, np.cumsum(tokens))[boards]
        then = count - 1 + boards
        each = (model.per_row_ns + model.per_token_ns) * then
        step_ns = np.maximum(model.base_ns + each + model.per_context_ps * context // 1000, 1)
        rate = then * last * _PICO // (step_ns * last + self.costs.least_us * 1000)
        rate = np.where(allowed & (boards > 0), rate, 0)
        best = rows.count - 1 - int(np.argmax(rate[::-1]))
        if int(rate[best]) * 100 < now * (100 + MIN_GAIN_PERCENT) or not rate[best]:
            return False
        return self._leave(np.array([best], np.int64), int(self.snapshot.waiting.id[behind[0]]), budget)

    def _answer_tokens(self, behind: I64) -> int:
        """What the rows that would board generate, on average, as far as one can know."""
        table = self.snapshot.waiting
        tokens = np.minimum(table.new_tokens[behind], USUAL_ANSWER_TOKENS).astype(np.int64)
        if len(table.predicted_p50):
            predicted = table.predicted_p50[behind]
            tokens = np.where(predicted > 0, np.minimum(predicted, tokens), tokens)
        return max(int(tokens.sum()) // len(tokens), 1)

    def _leave(self, chosen: I64, request: int, budget: Budget) -> bool:
        """They leave, unless that still leaves no token for the request."""
        if budget.tokens + int(self.tokens[chosen].sum()) <= 0:
            return False
        modes, moves = self.costs.settle(chosen)
        at_once = self.costs.freed(chosen, modes)
        budget.rows = max(budget.rows + len(chosen), 1)
        budget.tokens += int(self.tokens[chosen].sum())
        budget.blocks += int(self.rows.growth_of(self.tokens)[chosen].sum()) + int(at_once.sum())
        self.coming += int((self.rows.private[chosen] - at_once).sum())
        self.tokens[chosen] = 0
        self.free[chosen] = False
        self.victims += chosen.tolist()
        self.modes += modes.tolist()
        self.move_us += moves.tolist()
        self.for_id += [request] * len(chosen)
        return True

    def told(self, relief: Relief) -> Relief:
        """`relief` with the rows that left here, and without their tokens."""
        if not self.victims:
            return relief
        new = np.array(self.victims, np.int64)
        return Relief(
            tokens=self.tokens,
            starved=relief.starved,
            victims=np.append(relief.victims, new),
            modes=np.append(relief.modes, self.modes),
            recompute_us=np.append(relief.recompute_us, self.costs.recompute.us[new]),
            move_us=np.append(relief.move_us, self.move_us),
            for_id=np.append(relief.for_id, np.array(self.for_id, np.uint64)),
            freed=relief.freed,
        )
