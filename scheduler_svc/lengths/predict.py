"""The lengths of answers that a decision goes by: three sources, blended, in the columns where policies read them.

History is the histogram of a request's tenant and endpoint: of running rows as it is now, beyond what they have
answered; of waiting ones the p50 that the executor's column says, and as p90 what answers were lately longer than that,
since few answers make a poor tail. Signals are the counted wording of the prompt. Learned is the table that the
operator gave, if there is one. The blend is kept in the policy memory and learns from the requests that end while a
policy that reads lengths decides.

Predicted anew are running rows, if the policy reads their lengths, and candidates, which the first of the line are
among; other waiting requests keep the executor's prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U64, EndedTable, RunningTable, WaitingTable
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
_NOBODY = Snapshot()


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests [N] whose length is wanted. `history50` and `history90` are logarithms, UNKNOWN without a history."""

    features: U64
    prompt_tokens: NDArray[np.integer]
    history50: I64
    history90: I64

    @classmethod
    def joined(cls, *parts: Asked) -> Asked:
        """One after another."""
        return cls(
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.prompt_tokens for part in parts]),
            np.concatenate([part.history50 for part in parts]),
            np.concatenate([part.history90 for part in parts]),
        )


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


def with_lengths(snapshot: Snapshot, memory: Memory, *, wanted: tuple[str, ...]) -> Snapshot:
    """The snapshot with predictions in the columns of the `wanted` tables ("running", "waiting"), after what ended was
    learned from; as it is, if the policy wants none."""
    if not wanted:
        return snapshot
    blend, table = Blend.read(memory), table_of(snapshot.policy)
    line = _Line.of(snapshot if "waiting" in wanted else _NOBODY)
    running = _running(snapshot if "running" in wanted else _NOBODY)
    waiting, ended = _waiting(snapshot, line), _ended(snapshot.ended)
    if len(running.answered) + len(line.rows) + len(ended.lengths) == 0:
        return snapshot
    corrected = blend.corrected(guess(Asked.joined(running.asked, waiting, ended.asked), blend.signals, table))
    p50, p90 = blend.blended(corrected)
    first, second = len(running.asked.features), len(running.asked.features) + len(line.rows)
    if len(ended.lengths):
        of_ended = Guess(corrected.p50[:, second:], corrected.p90[:, second:])
        blend.learn(of_ended, p90[second:], ended.lengths)
        blend.signals.learn(ended.asked.features, log_of(ended.lengths))
        blend.write(memory)
    return replace(
        snapshot,
        running=running.filled(snapshot, p50[:first], p90[:first]),
        waiting=line.filled(snapshot, p50[first:second], p90[first:second]),
    )


@dataclass(frozen=True, slots=True)
class _Running:
    asked: Asked
    answered: I64  # logarithms, far below all lengths for none

    def filled(self, snapshot: Snapshot, p50: I64, p90: I64) -> RunningTable:
        table, lowest = snapshot.running, self.answered + OCTAVE // 4
        if len(p50) == 0:
            return table
        told = _tokens(np.maximum(p50, lowest), np.maximum(p90, lowest), table.max_new_tokens)
        return table.with_columns({"predicted_p50": told[0], "predicted_p90": told[1]})


@dataclass(frozen=True, slots=True)
class _Ended:
    asked: Asked
    lengths: I64


@dataclass(frozen=True, slots=True)
class _Line:
    """Candidates: `rows` of the waiting table, and which rows of the candidates' table they are."""

    rows: I64
    places: I64

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Line:
        rows = rows_with(snapshot.waiting.id, snapshot.candidates.id)
        places = np.flatnonzero(rows >= 0)
        return cls(rows[places], places)

    def filled(self, snapshot: Snapshot, p50: I64, p90: I64) -> WaitingTable:
        waiting, rows = snapshot.waiting, self.rows
        if len(rows) == 0:
            return waiting
        most = waiting.new_tokens[rows]
        if len(waiting.generated_tokens):
            most = most + waiting.generated_tokens[rows]
        filled = []
        for column, told in zip(_columns(waiting), _tokens(p50, p90, most), strict=True):
            new = column.copy() if len(column) else np.full(waiting.rows, UNKNOWN, np.int32)
            new[rows] = told
            filled.append(new)
        return waiting.with_columns({"predicted_p50": filled[0], "predicted_p90": filled[1]})


def _running(snapshot: Snapshot) -> _Running:
    """What history says beyond what each row has answered; the executor's columns where it has no histogram."""
    table = snapshot.running
    if table.rows == 0:
        none = np.empty(0, np.int64)
        return _Running(Asked(table.features, table.prompt_tokens, none, none), none)
    answered = np.where(table.generated_tokens > 0, log_of(table.generated_tokens), UNKNOWN)
    history = History.of(snapshot.histograms)
    places = history.rows(_or_zeros(table.tenant, table.rows), _or_zeros(table.endpoint, table.rows))
    known50, known90 = history.quantiles(places, answered, (50, 90))
    told50 = _logs(_or_unknown(table.predicted_p50, table.rows))
    asked = Asked(
        _or_zeros(table.features, table.rows),
        table.prompt_tokens,
        np.where(known50 >= 0, known50, told50),
        np.where((known50 >= 0) & (answered >= 0), known90, UNKNOWN),
    )
    return _Running(asked, np.where(answered >= 0, answered, -OCTAVE))


def _waiting(snapshot: Snapshot, line: _Line) -> Asked:
    candidates, waiting = snapshot.candidates, snapshot.waiting
    unknown, told = np.full(len(line.rows), UNKNOWN), waiting.predicted_p50
    features = _or_zeros(candidates.features, candidates.rows)[line.places]
    return Asked(features, waiting.tokens[line.rows], _logs(told[line.rows]) if len(told) else unknown, unknown)


def _ended(table: EndedTable) -> _Ended:
    """Requests that ended by themselves, the newest; of history what was predicted on their arrival."""
    whole = (table.outcome == Outcome.STOP) | (table.outcome == Outcome.LENGTH)
    rows = np.flatnonzero(whole & (table.generated_tokens > 0))[-LEARN_MOST:]
    features = _or_zeros(table.features, table.rows)[rows]
    none = np.full(len(rows), UNKNOWN)
    asked = Asked(features, table.prompt_tokens[rows], _logs(table.predicted_p50[rows]), none)
    return _Ended(asked, table.generated_tokens[rows].astype(np.int64))


def _columns(table: object) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return table.predicted_p50, table.predicted_p90  # type: ignore[attr-defined]


def _logs(tokens: NDArray[np.integer]) -> I64:
    return np.where(tokens >= 0, log_of(tokens), UNKNOWN)


def _tokens(p50: I64, p90: I64, most: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths for logarithms, -1 for what is unknown."""
    found = (np.where(logs >= 0, np.minimum(length_of(logs), most), UNKNOWN).astype(np.int32) for logs in (p50, p90))
    low, high = found
    return low, high


def _or_unknown(column: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    return column if len(column) == rows else np.full(rows, UNKNOWN, np.int32)


def _or_zeros(column: NDArray[np.unsignedinteger], rows: int) -> NDArray[np.unsignedinteger]:
    return column if len(column) == rows else np.zeros(rows, column.dtype)
