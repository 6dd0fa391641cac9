"""Which rows run at the next boundary: those of a fresh decision, those of one whose horizon has not ended, or, with
neither, all that run.

A decision holds for its horizon: at its first boundary the rows and token counts are those that it names, at the later
ones what it named goes on (a decode by one token, a prefill by a chunk). At any boundary a substitute that stands by
may take the row of one that ended. Without a decision the executor coasts, which is no policy: nobody new boards but
substitutes that were named, and where blocks run out the decision's own victims make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from executor_svc.apply import Apply
from executor_svc.counters import Counters
from executor_svc.live_request import LiveRequest, State
from executor_svc.moves import Admission, Victim
from executor_svc.registry import Registry, slots_of
from jitney.block_ops import Tier
from jitney.columns import PreemptColumns
from jitney.decision import Decision, PreemptionMode
from jitney.snapshot import HorizonKind, Settings

UNTIL_EVENT_STEPS = 1 << 30
Chosen = tuple[LiveRequest, int]
_TIERS = {int(PreemptionMode.SWAP_CPU): Tier.CPU, int(PreemptionMode.SWAP_SSD): Tier.SSD}


@dataclass(frozen=True, slots=True)
class Boarding:
    """What a decision wants of the cache."""

    victims: Sequence[Victim] = ()
    admitted: Sequence[Admission] = ()
    substitutes: Sequence[Admission] = ()


@dataclass(slots=True)
class Course:
    """The decision in force. `steps_left`: boundaries that it still holds for."""

    settings: Settings
    registry: Registry
    apply: Apply
    counters: Counters
    decision: Decision = field(default_factory=Decision)
    fresh: bool = False
    steps_left: int = 0
    coasting: bool = False
    _admitted: list[Chosen] = field(default_factory=list)
    _standby: list[Chosen] = field(default_factory=list)

    def heed(self, decision: Decision, now_us: int, *, cache_open: bool) -> Boarding:
        """A new decision: who boards and who leaves is returned. Substitutes of the last one that it names again stand
        by as they are, or take their row if it admits them; the others go back.

        While the cache takes no batches (`cache_open` false) nobody boards and nobody is sent off.
        """
        stood_by = [request for request, _ in self._standby if request.state is State.STANDBY]
        self.decision, self.fresh, self.coasting = decision, True, False
        self._admitted, self._standby = [], []
        until_event = decision.horizon_kind is HorizonKind.UNTIL_EVENT
        self.steps_left = UNTIL_EVENT_STEPS if until_event else max(1, decision.horizon_steps)
        if not cache_open:
            self._dismiss(stood_by)
            return Boarding()
        victims: list[Victim] = []
        for row, victim_id in enumerate(decision.preempt.id.tolist()):
            victim = self.registry.by_id.get(victim_id)
            if victim is not None and victim.state is State.RUNNING and victim.load is None:
                victims.append(Victim(victim, _TIERS.get(int(decision.preempt.mode[row]))))
                victim.note(now_us, self._why_preempted(decision.preempt, row, victim))
        self.counters.preemptions += len(victims)
        room = self.settings.max_rows - len(self.registry.running) + len(victims)
        self._admitted = self._waiting(decision.admit.id.tolist(), decision.admit.tokens.tolist())[: max(0, room)]
        named = {request.id for request, _ in self._admitted}
        substitutes = self._waiting(decision.substitutes.id.tolist(), decision.substitutes.tokens.tolist())
        self._standby = [each for each in substitutes if each[0].id not in named][: self.settings.max_rows]
        named |= {request.id for request, _ in self._standby}
        self._dismiss([request for request in stood_by if request.id not in named])
        loads = _loads(decision)
        new = [r for r, _ in self._admitted if r.state is State.WAITING]
        self._seat([r for r, _ in self._admitted if r.state is State.STANDBY])
        substitutes = [each for each in self._standby if each[0].state is State.WAITING]
        admitted, standby = (
            [Admission(r, loads.get(r.id, 0)) for r in chosen] for chosen in (new, [r for r, _ in substitutes])
        )
        return Boarding(victims, admitted, standby)

    def _dismiss(self, stood_by: Sequence[LiveRequest]) -> None:
        """These stand by no more; one whose load is being copied stays until that has ended."""
        for request in stood_by:
            if request.load is None:
                self.apply.dismiss(request)
            else:
                self._standby.append((request, 1))

    def _seat(self, admitted: Sequence[LiveRequest]) -> None:
        """Substitutes that are admitted: their blocks are there, or on the way."""
        for request in admitted:
            if request.blocks:
                self.registry.promote(request)
            else:
                self.registry.board(request)

    def _why_preempted(self, table: PreemptColumns, row: int, victim: LiveRequest) -> str:
        """For `explain`: for whom, how, and what each way would have cost."""
        other = int(table.for_id[row])  # by number: names are its client's own
        cause = f"for request number {other}" if other else "because no block was left"
        how = PreemptionMode(int(table.mode[row])).name.lower().replace("_", " ")
        move_us = int(table.move_us[row])
        moving = f"moving {move_us} us" if move_us >= 0 else "moving is not possible"
        costs = f"recomputing costs {int(table.recompute_us[row])} us, {moving}"
        return f"preempted ({how}) {cause}, with {len(victim.blocks)} blocks: {costs}"

    def _waiting(self, ids: list[int], tokens: list[int]) -> list[Chosen]:
        found = [(self.registry.by_id.get(i), n) for i, n in zip(ids, tokens, strict=True)]
        return [(r, n) for r, n in found if r is not None and r.state in (State.WAITING, State.STANDBY)]

    def named(self) -> list[Chosen]:
        """The rows of the decision that run, with the token counts that it gave."""
        run, find, running = self.decision.run, self.registry.by_id.get, State.RUNNING
        named = zip(run.id.tolist(), run.tokens.tolist(), strict=True)
        return [(r, n) for i, n in named if (r := find(i)) is not None and r.state is running]

    def runs_any(self) -> bool:
        """Whether `named` names any."""
        rows = (self.registry.by_id.get(i) for i in self.decision.run.id.tolist())
        return any(request is not None and request.state is State.RUNNING for request in rows)

    def goes_on(self) -> bool:
        """Whether a row that `named` names has something to compute behind what is in flight."""
        return any(tokens > 0 for _, tokens in self._wanted([request for request, _ in self.named()]))

    def names_all(self) -> bool:
        """Whether every row that runs is one of the decision's."""
        running = self.registry.running
        boarded = sum(request.state is State.RUNNING for request, _ in self._admitted)
        return len(self.named()) + boarded == len(running)

    def go_on(self) -> None:
        """The decision holds for one more boundary."""
        self.steps_left = max(1, self.steps_left)

    @property
    def holds(self) -> bool:
        """Whether the next boundary can be passed with the decision there is."""
        return self.fresh or self.steps_left > 0

    def end_horizon(self) -> None:
        """Something happened that the decision did not foresee: it holds no longer."""
        if self.decision.horizon_kind is HorizonKind.UNTIL_EVENT:
            self.steps_left = 0

    def rows(self, now_us: int) -> tuple[list[Chosen], list[Victim]]:
        """The rows of this boundary with their tokens, and the victims of coasting, still to be told to the cache."""
        named = self.named()
        boarded = self._boarded()
        vacancies = len(self.decision.run.id) + len(self._admitted) - len(named) - len(boarded)
        victims: list[Victim] = []
        if self.fresh:
            chosen = named + boarded
        elif self.steps_left > 0:
            chosen = self._go_on([r for r, _ in named + boarded])
        else:
            self.coasting = True
            self.counters.coasted_steps += 1
            victims = self._make_room(now_us)
            gone = {victim.request.id for victim in victims}
            running = [r for r in self.registry.running if r.state is State.RUNNING and r.id not in gone]
            chosen = self._go_on(running)
        chosen += self._substitutes(vacancies)
        self.fresh = False
        self.steps_left = max(0, self.steps_left - 1)
        return chosen, victims

    def _boarded(self) -> list[Chosen]:
        """Those that the decision let in. One that boarded to wait for a prefix or a load was given no tokens: it takes
        what the step has left, as soon as it waits no more."""
        boarded = [(r, n) for r, n in self._admitted if r.state is State.RUNNING]
        left = self.settings.max_step_tokens - int(self.decision.run.tokens.sum()) - sum(n for _, n in boarded)
        cap = self.decision.chunk_cap_tokens or self.settings.chunk_cap_tokens
        chosen: list[Chosen] = []
        for request, tokens in boarded:
            if not tokens and not request.joined and request.load is None:
                ((_, wanted),) = self._wanted([request])
                tokens = max(1, min(wanted, cap, left))
                left -= tokens
            chosen.append((request, tokens or 1))
        return chosen

    def _go_on(self, rows: Sequence[LiveRequest]) -> list[Chosen]:
        """Each row goes on by what it wants, decodes first in effect: a prefill gets a chunk of what is left."""
        cap = self.decision.chunk_cap_tokens or self.settings.chunk_cap_tokens
        wanted = self._wanted(rows)
        left = self.settings.max_step_tokens - sum(1 for _, n in wanted if n == 1)
        chosen: list[Chosen] = []
        for request, tokens in wanted:
            if tokens > 1:
                tokens = min(cap, left, tokens)
                left -= tokens
            if tokens > 0:
                chosen.append((request, tokens))
        return chosen

    def _wanted(self, rows: Sequence[LiveRequest]) -> list[Chosen]:
        """Each row with all that it has left to compute behind what is in flight."""
        start, length = self.registry.planned(slots_of(rows))
        return list(zip(rows, (length - start).tolist(), strict=True))

    def _substitutes(self, vacancies: int) -> list[Chosen]:
        """Substitutes whose blocks are there take the rows of those that ended."""
        chosen: list[Chosen] = []
        for request, tokens in self._standby:
            if len(chosen) >= vacancies or len(self.registry.running) >= self.settings.max_rows:
                break
            if request.state is State.STANDBY and request.blocks and not request.joined and request.load is None:
                self.registry.promote(request)
                self.counters.substituted += 1
                chosen.append((request, max(1, tokens)))
        self._admitted += chosen
        self._standby = [each for each in self._standby if each[0].state is State.STANDBY]
        return chosen

    def _make_room(self, now_us: int) -> list[Victim]:
        """While coasting: the victims that the last decision named, as long as blocks are short."""
        running = sum(r.state is State.RUNNING for r in self.registry.running)
        short = self.apply.blocks_short()
        victims: list[Victim] = []
        for victim_id in self.decision.coast_victims.tolist():
            if short <= 0 or len(victims) + 1 >= running:
                break
            request = self.registry.by_id.get(victim_id)
            if request is not None and request.state is State.RUNNING and request.load is None:
                short -= len(request.blocks)
                victims.append(Victim(request))
                request.note(now_us, "preempted while coasting: no block was left")
        self.counters.preemptions += len(victims)
        return victims

    def reserved_blocks(self) -> int:
        """Blocks that substitutes hold for themselves: free again when they are not needed."""
        return sum(len(r.blocks) - r.sealed for r, _ in self._standby if r.state is State.STANDBY)


def _loads(decision: Decision) -> dict[int, int]:
    """Blocks that each request that boards or stands by loads from lower tiers at most."""
    loads: dict[int, int] = {}
    for table in (decision.admit, decision.substitutes):
        loads |= zip(table.id.tolist(), table.load_blocks.tolist(), strict=True)
    return loads
