"""What each running row stands at once its launched steps have ended, and what it wants next."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U64
from jitney.snapshot import Snapshot

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RunningRows:
    """Running rows in the policy's order, [R] each. Token counts are as of the end of the launched steps."""

    id: U64
    rank_class: I64  # a waiting request of a lower class may take the row's place
    planned: I64  # tokens whose KV will be in the pool
    known: I64  # tokens that will exist: prompt and generated; the last one has no KV yet
    wanted: I64  # tokens that the row can compute, at most to the end of its next block; 0: it sits out
    final: I64  # tokens in KV when it has generated all that it may
    answered: I64  # tokens of the answer that will exist
    p50: I64  # predicted tokens of the answer, -1 unknown
    held: I64  # blocks
    shared: I64  # of these, blocks that others hold too
    lower: I64  # of these, blocks stored in a lower tier
    growth: I64  # blocks, 0 or 1, that it must get before it computes anything
    decodes: Flags  # wants its next token, which yields another one at once
    preemptions: I64
    waits_for: U64
    joined: Flags  # waits for a prefix that another row computes
    loading: Flags
    bound: Flags  # was preempted as often as a request may be
    block_tokens: int

    @property
    def count(self) -> int:
        """R."""
        return len(self.id)

    @property
    def private(self) -> I64:
        """Blocks that come free when the row leaves."""
        return self.held - self.shared

    def growth_of(self, tokens: I64) -> I64:
        """Blocks that rows take for `tokens` [R] more."""
        return np.where(tokens > 0, self.growth, 0)

    def keep(self, mask: Flags) -> RunningRows:
        """The rows of a mask."""
        picked: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return RunningRows(**{k: v if k == "block_tokens" else v[mask] for k, v in picked.items()})

    def without(self, positions: I64) -> RunningRows:
        """All but the rows at these positions."""
        if len(positions) == 0:
            return self
        stays = np.ones(self.count, np.bool_)
        stays[positions] = False
        return self.keep(stays)


def plan_rows(snapshot: Snapshot, order: I64, classes: I64) -> RunningRows:
    """The running rows in `order`; `classes` [R] are those of the table's rows.

    A launched step that reaches the end of what is known samples one more token; so a row always wants at least one,
    until the token that completes its answer is in flight. A chunk ends with its row's last block, since a prompt's
    blocks were all reserved when it boarded; one block more is taken only where there is no room for one token.
    """
    table, size = snapshot.running, snapshot.settings.block_tokens

    def column(values: NDArray[Any]) -> I64:
        return values[order].astype(np.int64)

    prompt, preemptions = column(table.prompt_tokens), column(table.preemptions)
    held = column(table.held_blocks)
    planned = column(table.computed_tokens) + column(table.in_flight_tokens)
    known = np.maximum(prompt + column(table.generated_tokens), planned + 1)
    final = prompt + column(table.max_new_tokens) - 1
    waits_for, loading = table.waits_for[order], table.loading[order] != 0
    joined = waits_for != 0
    left = known - planned
    growth = (planned >= held * size).astype(np.int64)
    room = (held + growth) * size - planned
    idle = joined | loading | (planned >= final)
    return RunningRows(
        id=table.id[order],
        rank_class=classes[order],
        planned=planned,
        known=known,
        wanted=np.where(idle, 0, np.minimum(left, np.maximum(room, 0))),
        final=final,
        answered=known - prompt,
        p50=column(table.predicted_p50) if len(table.predicted_p50) else np.full(len(order), -1, np.int64),
        held=held,
        shared=column(table.shared_blocks),
        lower=column(table.lower_blocks),
        growth=growth,
        decodes=~idle & (left <= 1),
        preemptions=preemptions,
        waits_for=waits_for,
        joined=joined,
        loading=loading,
        bound=preemptions >= snapshot.settings.max_preemptions,
        block_tokens=size,
    )
