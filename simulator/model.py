"""A model that only counts, over a pool that remembers what was written where.

Its next token is a hash over the (token, position) pairs that the row's block table leads to, so that a wrong block, a
stale one, or a token written twice changes the output; like a real model's, it depends on nothing else. With a
temperature the hash is shifted by the number that the row draws. What a step writes is POISON to everybody else until
the step has ended: a copy that does not wait for it copies that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from executor_svc.philox import uniform
from executor_svc.step_plan import StepPlan, StepResult
from jitney.columns import I32, U64
from simulator.clock import VirtualClock
from simulator.slots import POISON

StepTime = Callable[[StepPlan], int]
_MIX = np.uint64(0x9E3779B97F4A7C15)


def default_step_time(plan: StepPlan) -> int:
    """10 ms a step and 0.1 ms a token, in microseconds."""
    return 10_000 + 100 * plan.tokens


class TimedModel(ABC):
    """ModelPort on the virtual clock: what `run` computes when a step begins is told after the time that it says. With
    `queues` a second step may wait for the first, and then begins when that ends, as on a device."""

    def __init__(self, clock: VirtualClock, *, queues: bool = False) -> None:
        self.queues = queues
        self._clock = clock
        self._plans: deque[StepPlan] = deque()  # launched, not ended
        self._results: deque[StepResult] = deque()  # not polled
        self._drawn: I32 = np.empty(0, np.int32)  # by the rows of the last step that began

    @abstractmethod
    def run(self, plan: StepPlan) -> tuple[StepResult, int]:
        """The result of the plan, and how many microseconds it takes."""

    @property
    def busy(self) -> bool:
        """Whether a launched step has not been polled yet."""
        return bool(self._plans or self._results)

    def launch(self, plan: StepPlan) -> None:
        """Computes at once, or once the step before has ended; tells later."""
        assert len(self._plans) < 1 + self.queues, "too many steps are in flight"
        self._plans.append(plan)
        if len(self._plans) == 1:
            self._begin(plan)

    def poll(self) -> StepResult | None:
        """The result of the oldest step, once."""
        return self._results.popleft() if self._results else None

    def _begin(self, plan: StepPlan) -> None:
        drawn_before = np.flatnonzero(plan.token_ids < 0)
        if len(drawn_before):
            token_ids = plan.token_ids.copy()
            token_ids[drawn_before] = self._drawn[-1 - token_ids[drawn_before]]
            plan = replace(plan, token_ids=token_ids)
        result, took_us = self.run(plan)
        self._drawn = np.full(plan.rows, -1, np.int32)
        self._drawn[plan.sample_rows] = result.token_ids

        def end() -> None:
            self._plans.popleft()
            self._results.append(result)
            if self._plans:
                self._begin(self._plans[0])

        self._clock.after(took_us, end)


class VirtualModel(TimedModel):
    """The model that counts."""

    def __init__(
        self,
        clock: VirtualClock,
        pool_blocks: int,
        block_tokens: int,
        vocabulary: int = 1000,
        step_time_us: StepTime = default_step_time,
        *,
        queues: bool = False,
    ) -> None:
        super().__init__(clock, queues=queues)
        self._led: dict[int, list[list[int]]] = {}  # the blocks of each launched step
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self.step_time_us = step_time_us
        self._pool: U64 = np.full(pool_blocks * block_tokens, POISON, np.uint64)

    @property
    def pool(self) -> U64:
        """Content [blocks, tokens of a block], for copies."""
        return self._pool.reshape(-1, self._block_tokens)

    def launch(self, plan: StepPlan) -> None:
        """See TimedModel."""
        self._led[plan.step] = self._led_to(plan)
        super().launch(plan)

    def run(self, plan: StepPlan) -> tuple[StepResult, int]:
        """See TimedModel."""
        tokens = plan.token_ids.astype(np.uint64)
        for source, target in plan.copies.tolist():
            self._block(target)[:] = self._block(source)
        written = plan.write_slots >= 0
        slots, content = plan.write_slots[written], _content(tokens, plan.positions)[written]
        self._pool[slots] = content
        drawn = plan.sampling
        numbers = uniform(drawn.seed, drawn.choice, drawn.position) * (drawn.temperature > 0)
        shifts = (numbers * self._vocabulary).astype(np.int64).tolist()
        sampled = [self._next(plan, row, shift) for row, shift in zip(plan.sample_rows.tolist(), shifts, strict=True)]
        took_us = self.step_time_us(plan)
        self._pool[slots] = POISON

        def end() -> None:
            self._pool[slots] = content
            led_to = self._led.pop(plan.step)
            assert self._led_to(plan) == led_to, f"the block table of step {plan.step} was changed while it ran"

        self._clock.after(took_us, end)
        return StepResult(plan.step, np.array(sampled, np.int32), compute_us=took_us), took_us

    def _led_to(self, plan: StepPlan) -> list[list[int]]:
        """The blocks that each row's context is read from."""
        used = -(-plan.context_tokens // self._block_tokens)
        return [
            plan.block_table[table_row, :count].tolist()
            for table_row, count in zip(plan.table_rows.tolist(), used.tolist(), strict=True)
        ]

    def _block(self, block: int) -> U64:
        return self._pool[block * self._block_tokens : (block + 1) * self._block_tokens]

    def _next(self, plan: StepPlan, row: int, shift: int) -> int:
        context = int(plan.context_tokens[row])
        positions = np.arange(context)
        table: I32 = plan.block_table[plan.table_rows[row]]
        slots = table[positions // self._block_tokens].astype(np.int64) * self._block_tokens
        read = self._pool[slots + positions % self._block_tokens]
        state = np.bitwise_xor.reduce(read * (positions.astype(np.uint64) * np.uint64(2) + np.uint64(1)))
        return ((int(state) ^ (int(state) >> 29)) + shift) % self._vocabulary


def _content(tokens: U64, positions: I32) -> U64:
    mixed: U64 = (tokens + np.uint64(1)) * _MIX ^ (positions.astype(np.uint64) << np.uint64(20))
    return mixed
