"""The lengths of answers that a decision goes by: three sources, blended, in the columns where policies read them.

History is the histogram of a request's tenant and endpoint: of running rows as it is now, beyond what they have
answered; of waiting ones as the executor's column says it. Signals are the counted wording of the prompt. Learned is
the table that the operator gave, if there is one. The blend is kept in the policy memory and learns from the requests
that end while a policy that reads lengths decides.

Predicted anew are running rows and candidates, which the first of the line are among; other waiting requests keep the
executor's prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U64, EndedTable, RunningTable
from jitney.snapshot import Outcome, PolicyChoice, Snapshot
from scheduler_svc.lengths.blend import UNKNOWN, Blend, Guess
from scheduler_svc.lengths.history import History
from scheduler_svc.lengths.scale import OCTAVE, length_of, log_of
from scheduler_svc.lengths.signals import Signals
from scheduler_svc.lengths.trees import LengthTable, inputs_of, read_table
from scheduler_svc.lookups import rows_with
from scheduler_svc.memory import LENGTHS, Memory

TABLE = LENGTHS
"""Name of the policy table that holds the learned model."""
LEARN_MOST = 512
"""Ended requests of one snapshot that are learned from: the newest."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests [N] whose length is wanted. `history50` and `history90` are logarithms, UNKNOWN without a history."""

    features: U64
    prompt_tokens: NDArray[np.integer]
    history50: I64
    history90: I64


def guess(asked: Asked, signals: Signals, table: LengthTable | None) -> Guess:
    """What each source says, before any correction."""
    unknown = np.full(len(asked.features), UNKNOWN, np.int64)
    said = signals.predict(asked.features)
    if table is None:
        return Guess(np.stack((asked.history50, said, unknown)), np.stack((asked.history90, unknown, unknown)))
    x = inputs_of(asked.features, log_of(asked.prompt_tokens), asked.history50)
    p50, p90 = table.p50.predict(x), table.p90.predict(x)
    return Guess(np.stack((asked.history50, said, p50)), np.stack((asked.history90, unknown, np.maximum(p50, p90))))


def table_of(choice: PolicyChoice) -> LengthTable | None:
    """The learned model of a policy's tables. InvalidRequest if its content is none."""
    return next((read_table(table.content) for table in choice.tables if table.name == TABLE), None)


def with_lengths(snapshot: Snapshot, memory: Memory, *, wanted: bool) -> Snapshot:
    """The snapshot with predictions in its columns, after what ended was learned from; as it is, if the policy does not
    want them."""
    if not wanted:
        return snapshot
    blend, table = Blend.read(memory), table_of(snapshot.policy)
    if snapshot.ended.rows:
        learn(snapshot.ended, blend, table)
        blend.write(memory)
    return _candidates(_running(snapshot, blend, table), blend, table)


def learn(ended: EndedTable, blend: Blend, table: LengthTable | None) -> None:
    """From requests that ended by themselves; of history it judges what was predicted on their arrival."""
    whole = (ended.outcome == Outcome.STOP) | (ended.outcome == Outcome.LENGTH)
    rows = np.flatnonzero(whole & (ended.generated_tokens > 0))[-LEARN_MOST:]
    if len(rows) == 0:
        return
    lengths = ended.generated_tokens[rows].astype(np.int64)
    features = _or_zeros(ended.features, ended.rows)[rows]
    asked = Asked(
        features,
        ended.prompt_tokens[rows],
        _logs(ended.predicted_p50[rows]),
        np.full(len(rows), UNKNOWN, np.int64),
    )
    blend.learn(guess(asked, blend.signals, table), lengths)
    blend.signals.learn(features, log_of(lengths))


def _running(snapshot: Snapshot, blend: Blend, table: LengthTable | None) -> Snapshot:
    rows: RunningTable = snapshot.running
    if rows.rows == 0:
        return snapshot
    history = History.of(snapshot.histograms)
    answered = np.where(rows.generated_tokens > 0, log_of(rows.generated_tokens), UNKNOWN)
    places = history.rows(_or_zeros(rows.tenant, rows.rows), _or_zeros(rows.endpoint, rows.rows))
    p50, p90 = history.quantiles(places, answered, (50, 90))
    told = [_logs(column) if len(column) else np.full(rows.rows, UNKNOWN) for column in _columns(rows)]
    asked = Asked(
        _or_zeros(rows.features, rows.rows),
        rows.prompt_tokens,
        np.where(p50 >= 0, p50, told[0]),
        np.where(p50 >= 0, p90, told[1]),
    )
    corrected = blend.corrected(guess(asked, blend.signals, table))
    beyond = np.where(answered >= 0, answered + OCTAVE // 4, 0)
    corrected = Guess(*(np.where(c >= 0, np.maximum(c, beyond), UNKNOWN) for c in (corrected.p50, corrected.p90)))
    new50, new90 = _tokens(*blend.blended(corrected), rows.max_new_tokens)
    return replace(snapshot, running=replace(rows, predicted_p50=new50, predicted_p90=new90))


def _candidates(snapshot: Snapshot, blend: Blend, table: LengthTable | None) -> Snapshot:
    candidates, waiting = snapshot.candidates, snapshot.waiting
    if candidates.rows == 0 or waiting.rows == 0:
        return snapshot
    places = rows_with(waiting.id, candidates.id)
    rows, shown = places[places >= 0], places >= 0
    old50, old90 = (np.full(waiting.rows, UNKNOWN, np.int32) if not len(c) else c for c in _columns(waiting))
    asked = Asked(
        _or_zeros(candidates.features, candidates.rows)[shown],
        waiting.tokens[rows],
        _logs(old50[rows]),
        _logs(old90[rows]),
    )
    most = waiting.new_tokens[rows]
    if len(waiting.generated_tokens):
        most = most + waiting.generated_tokens[rows]
    new50, new90 = old50.copy(), old90.copy()
    blended = blend.blended(blend.corrected(guess(asked, blend.signals, table)))
    new50[rows], new90[rows] = _tokens(*blended, most)
    return replace(snapshot, waiting=replace(waiting, predicted_p50=new50, predicted_p90=new90))


def _columns(table: object) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return table.predicted_p50, table.predicted_p90  # type: ignore[attr-defined]


def _logs(tokens: NDArray[np.integer]) -> I64:
    return np.where(tokens >= 0, log_of(tokens), UNKNOWN)


def _tokens(p50: I64, p90: I64, most: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths for logarithms, -1 for what is unknown."""
    found = (np.where(logs >= 0, np.minimum(length_of(logs), most), UNKNOWN).astype(np.int32) for logs in (p50, p90))
    low, high = found
    return low, high


def _or_zeros(column: NDArray[np.unsignedinteger], rows: int) -> NDArray[np.unsignedinteger]:
    return column if len(column) == rows else np.zeros(rows, column.dtype)
