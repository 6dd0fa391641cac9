"""The ledger against the naive one, driven by Hypothesis: every operation, sensible and not, with restarts, repeats
and gaps. The audit runs after every batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_svc.audit import audit
from cache_svc.cost_order import CostOrder
from cache_svc.epochs import DevicePool, Session
from cache_svc.eviction import EvictionOrder, OrderOf
from jitney.block_ops import (
    Acquire,
    Batch,
    BatchAnswer,
    Bind,
    Block,
    BlockState,
    Chain,
    Fork,
    Release,
    RequestId,
    Reserve,
    Return,
    Seal,
    Share,
    Withdraw,
)
from jitney.errors import Conflict
from tests.support.ledger_rig import BLOCK_TOKENS, Prompt, prompt
from tests.support.naive_ledger import NaiveLedger

REQUESTS = st.integers(1, 4).map(RequestId)
FAMILY = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 1), (0, 0, 1, 0), (0, 1), (1,), (1, 0, 0))
PATHS = st.sampled_from([prompt(*path) for path in FAMILY])
LOOKED_UP = [prompt(*path) for path in ((0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1, 1))]


class LedgerMachine(RuleBasedStateMachine):
    """`naive` follows the session's ledger; `plans` are the prompts that requests boarded with."""

    order: OrderOf = EvictionOrder

    def __init__(self) -> None:
        super().__init__()
        self.session: Session
        self.naive: NaiveLedger
        self.kept: list[tuple[Batch, BatchAnswer]] = []
        self.plans: dict[RequestId, Prompt] = {}

    @initialize(total=st.integers(2, 12))
    def open(self, total: int) -> None:
        self.session = Session(DevicePool("e", 1, b"", total, 1, BLOCK_TOKENS), 1, redeclares=False, order=self.order)
        self.naive = NaiveLedger(total, foretells=self.order is EvictionOrder)

    def apply(self, **operations: Any) -> BatchAnswer:
        batch = Batch(self.session.op_seq + 1, **operations)
        answer = self.session.apply(batch)
        self.kept = [*self.kept, (batch, answer)][-8:]
        self.naive.follow(batch, answer)
        return answer

    def handles(self, draw: st.DataObject) -> Block:
        """Any block: now and then with an old or a future handle."""
        block = draw.draw(st.sampled_from(self.naive.blocks))
        return Block(block.handle + (draw.draw(st.sampled_from([0, 0, 0, 0, -1, 1])) << 32))

    # What executors do.

    @rule(
        boarding=st.lists(st.tuples(REQUESTS, PATHS, st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
        leaving=st.lists(REQUESTS, max_size=2),
        computing=st.one_of(st.none(), REQUESTS),
    )
    def board(
        self,
        boarding: list[tuple[RequestId, Prompt, int, bool]],
        leaving: list[RequestId],
        computing: RequestId | None,
    ) -> None:
        seals = [] if computing is None else self.next_seals(computing, 2)
        unique = {request: (wanted, extra, acquires) for request, wanted, extra, acquires in boarding}
        for request, (wanted, _, _) in unique.items():
            self.plans[request] = wanted
        self.apply(
            seals=seals,
            releases=[Release(request) for request in leaving],
            acquires=[Acquire(request, wanted.keys) for request, (wanted, _, acquires) in unique.items() if acquires],
            reserves=[
                Reserve(request, wanted.keys, len(wanted.keys) + extra)
                for request, (wanted, extra, _) in unique.items()
            ],
        )

    @rule(request=REQUESTS, blocks=st.integers(1, 3), also=st.sampled_from(["", "release", "withdraw"]))
    def compute(self, request: RequestId, blocks: int, also: str) -> None:
        self.apply(
            seals=self.next_seals(request, blocks),
            releases=[Release(request)] if also == "release" else (),
            withdraws=[Withdraw(request)] if also == "withdraw" else (),
        )

    def next_seals(self, request: RequestId, blocks: int) -> list[Seal]:
        """Of the next blocks that the request reserved for its prompt, if there are any."""
        plan = self.plans.get(request)
        by_name = {b.name: b for b in self.naive.held(request) if b.name is not None}
        if plan is None:
            return []
        first = next((at for at, key in enumerate(plan.keys) if key in by_name), 0)
        run = []
        for key in plan.keys[first : first + blocks]:
            if key not in by_name:
                break
            run.append(by_name[key].handle)
        return [plan.seal(request, run, first)] if run else []

    @rule(request=REQUESTS, count=st.integers(1, 2), step=st.integers(0, 1))
    def decode(self, request: RequestId, count: int, step: int) -> None:
        """Takes granted blocks, fills them, and seals them behind its prompt."""
        granted = self.apply(grant=count).granted
        self.apply(binds=[Bind(request, granted)])
        plan = self.plans.get(request)
        if plan is None or not granted:
            return
        last = int(plan.tokens[-1]) // 10
        longer = prompt(*(int(t) // 10 for t in plan.tokens[::BLOCK_TOKENS]), *([step] * len(granted)))
        assert last in (0, 1)
        self.apply(seals=[longer.seal(request, granted, len(plan.keys))])

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def end(self, requests: list[RequestId]) -> None:
        self.apply(releases=[Release(request) for request in requests])

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=2), grant=st.integers(0, 2))
    def withdraw(self, requests: list[RequestId], grant: int) -> None:
        self.apply(withdraws=[Withdraw(request) for request in requests], grant=grant)

    @precondition(lambda self: any(b.state is BlockState.GRANTED for b in self.naive.blocks))
    @rule(data=st.data(), grant=st.integers(0, 2))
    def give_back(self, data: st.DataObject, grant: int) -> None:
        granted = [b.handle for b in self.naive.blocks if b.state is BlockState.GRANTED]
        self.apply(returns=[Return(data.draw(st.lists(st.sampled_from(granted), min_size=1, max_size=3)))], grant=grant)

    @precondition(lambda self: any(b.state is BlockState.WRITING and not b.name for b in self.naive.blocks))
    @rule(data=st.data(), others=st.lists(REQUESTS, min_size=1, max_size=3))
    def share_and_fork(self, data: st.DataObject, others: list[RequestId]) -> None:
        private = [b for b in self.naive.blocks if b.state is BlockState.WRITING and not b.name]
        block = data.draw(st.sampled_from(private)).handle
        self.apply(shares=[Share(block, others)])
        if data.draw(st.booleans()):
            self.apply(forks=[Fork(request, block) for request in others])
        if data.draw(st.booleans()):
            self.apply(seals=[data.draw(PATHS).seal(others[0], [block])])

    # What no executor should do.

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        draw = data.draw
        wanted, request = draw(PATHS), draw(REQUESTS)
        handles = [self.handles(data) for _ in range(draw(st.integers(1, 3)))]
        first = draw(st.integers(0, len(wanted.keys) - 1))
        sealed = handles[: len(wanted.keys) - first]
        chosen = draw(st.sets(st.integers(0, 9), min_size=1, max_size=3))
        operations: list[tuple[str, Any]] = [
            ("seals", wanted.seal(request, sealed, first)),
            ("withdraws", Withdraw(request)),
            ("releases", Release(request, handles)),
            ("binds", Bind(request, handles)),
            ("returns", Return(handles)),
            ("shares", Share(handles[0], [request, draw(REQUESTS)])),
            ("forks", Fork(request, handles[0])),
            ("acquires", Acquire(request, wanted.keys, draw(st.integers(0, 2)))),
            ("reserves", Reserve(request, wanted.keys, draw(st.integers(0, 14)))),
            ("releases", Release(draw(REQUESTS))),
        ]
        batch: dict[str, list[Any]] = {}
        for number in sorted(chosen):
            batch.setdefault(operations[number][0], []).append(operations[number][1])
        self.apply(**batch)

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(1, 8))
    def repeat(self, back: int) -> None:
        batch, answer = self.kept[-min(back, len(self.kept))]
        assert self.session.apply(batch) is answer

    @rule(ahead=st.integers(2, 5))
    def skip_a_number(self, ahead: int) -> None:
        with pytest.raises(Conflict):
            self.session.apply(Batch(self.session.op_seq + ahead, grant=1))

    @rule()
    def restart(self) -> None:
        declared = self.naive.declare()
        session = Session(self.session.pool, self.session.epoch + 1, redeclares=True, order=self.order)
        with pytest.raises(Conflict):
            session.apply(Batch(1))
        session.redeclare(declared)
        self.session, self.kept = session, []
        self.naive.restarted()

    # What holds always.

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "session"):
            assert audit(self.session.ledger) == []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "session"):
            return
        table, naive = self.session.ledger.blocks, self.naive
        assert table.counts() == naive.counts()
        for b in naive.blocks:
            assert (table.state[b.id], table.handle[b.id]) == (b.state, b.handle)
            holders = {r for r, holding in self.session.ledger.requests.items() if b.id in holding.blocks}
            assert holders == set(b.holders)
        for wanted in LOOKED_UP:
            chain = Chain(RequestId(3), wanted.keys)
            assert self.session.ledger.lookup(chain) == naive.hits(chain)


LedgerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


class CostLedgerMachine(LedgerMachine):
    """With the cost-aware order, whose choice is its own as long as leaves go first."""

    order = CostOrder


CostLedgerMachine.TestCase.settings = settings(LedgerMachine.TestCase.settings, max_examples=50)
TestCostLedgerMachine = CostLedgerMachine.TestCase


class DeepLedgerMachine(LedgerMachine):
    """The same for longer."""


DeepLedgerMachine.TestCase.settings = settings(
    LedgerMachine.TestCase.settings, max_examples=600, stateful_step_count=50
)
TestDeepLedgerMachine = pytest.mark.slow(pytest.mark.timeout(1800)(DeepLedgerMachine.TestCase))
