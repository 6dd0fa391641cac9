"""A model that only counts, over a pool that remembers what was written where.

Its next token is a hash over the (token, position) pairs that the row's block table leads to, so that a wrong block, a
stale one, or a token written twice changes the output; like a real model's, it depends on nothing else. With a
temperature the hash is shifted by the number that the row draws. What a step writes is POISON to everybody else until
the step has ended: a copy that does not wait for it copies that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

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
    """ModelPort on the virtual clock: what `run` computes at launch is told after the time that it says."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._result: StepResult | None = None
        self._busy = False

    @abstractmethod
    def run(self, plan: StepPlan) -> tuple[StepResult, int]:
        """The result of the plan, and how many microseconds it takes."""

    @property
    def busy(self) -> bool:
        """Whether a launched step has not been polled yet."""
        return self._busy

    def launch(self, plan: StepPlan) -> None:
        """Computes at once, tells later."""
        self._busy = True
        result, took_us = self.run(plan)

        def end() -> None:
            self._result = result

        self._clock.after(took_us, end)

    def poll(self) -> StepResult | None:
        """The result, once."""
        result, self._result = self._result, None
        if result is not None:
            self._busy = False
        return result


class VirtualModel(TimedModel):
    """The model that counts."""

    def __init__(
        self,
        clock: VirtualClock,
        pool_blocks: int,
        block_tokens: int,
        vocabulary: int = 1000,
        step_time_us: StepTime = default_step_time,
    ) -> None:
        super().__init__(clock)
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self.step_time_us = step_time_us
        self._pool: U64 = np.full(pool_blocks * block_tokens, POISON, np.uint64)

    @property
    def pool(self) -> U64:
        """Content [blocks, tokens of a block], for copies."""
        return self._pool.reshape(-1, self._block_tokens)

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
        led_to = self._led_to(plan)

        def end() -> None:
            self._pool[slots] = content
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
