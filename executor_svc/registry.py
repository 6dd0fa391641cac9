"""All live requests: their columns, updated in place, and the two orders (running by admission, waiting by arrival).

Invariants: a slot belongs to one live request; `running` and `waiting` are disjoint; `waiting` rises by id, which
is the order of arrival, so that a preempted request finds its place again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_svc.live_request import LiveRequest, State
from executor_svc.names import Names
from jitney.columns import I32, I64, EndingTable, RunningTable, WaitingPolicyTable, WaitingTable, columns_of

_NEVER_US = 1 << 62
_CASTS = {"priority": np.int8, "preemptions": np.uint8, "endpoint": np.uint16}


class Registry:
    """Columns by slot, requests by id."""

    def __init__(self, capacity: int = 64) -> None:
        self._columns: dict[str, NDArray[Any]] = {c.name: np.zeros(capacity, c.dtype) for c in columns_of(RunningTable)}
        self.__dict__.update(self._columns)
        self.newest_token: I32 = np.zeros(capacity, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self.by_id: dict[int, LiveRequest] = {}
        self.running: list[LiveRequest] = []
        self._waiting_slots: I64 = np.empty(0, np.int64)
        self._waiting_ids: I64 = np.empty(0, np.int64)
        self._ran: set[int] = set()  # ids of waiting requests that have run
        self.tenants = Names(1 << 20)
        self.endpoints = Names(1 << 16)
        self.waiting_tokens = 0
        self._waiting_of_tenant: Counter[str] = Counter()
        self._with_deadline = 0
        self._live_of_tenant: I64 = np.zeros(64, np.int64)
        self._next_due_us = _NEVER_US  # no deadline that counts passes before it
        self.sampling = _sampling_columns(capacity)
        self.stop_ids: Counter[int] = Counter()  # of all live requests
        self.waiting_changes = 0  # how many times a request came into the waiting order, left it, or got a token there
        self._shown: WaitingTable | None = None  # until that changes
        self._shown_for: tuple[frozenset[str], int] = (frozenset(), 0)
        self.departures = 0  # how many times a request has left its row
        self._running_slots: I64 | None = None  # of `running`, until that changes

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Columns are plain attributes, for speed; this tells type checkers so."""
        raise AttributeError(name)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting_ids)

    def waiting_requests(self) -> Iterable[LiveRequest]:
        """In the order of arrival."""
        return [self.by_id[int(i)] for i in self._waiting_ids]

    def add(self, request: LiveRequest, now_us: int, predicted: tuple[int, int] = (-1, -1)) -> None:
        """A new request, waiting; `predicted` are p50 and p90 of its output tokens, -1 unknown."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        request.slot = slot
        asked = request.submission
        for column in self._columns.values():
            column[slot] = 0
        self.id[slot] = request.id
        self.arrival_us[slot] = now_us
        self.priority[slot] = asked.priority
        self.tenant[slot] = self.tenants.number(asked.tenant)
        self.endpoint[slot] = self.endpoints.number(asked.endpoint)
        self.prompt_tokens[slot] = request.prompt_tokens
        self.generated_tokens[slot] = request.generated
        self.max_new_tokens[slot] = asked.max_tokens
        self.ttft_deadline_us[slot] = now_us + asked.ttft_deadline_us if asked.ttft_deadline_us else 0
        self.deadline_us[slot] = now_us + asked.deadline_us if asked.deadline_us else 0
        self.predicted_p50[slot], self.predicted_p90[slot] = predicted
        self.features[slot] = asked.features
        self.newest_token[slot] = request.tokens[request.length - 1]
        if asked.ttft_deadline_us > 0 or asked.deadline_us > 0:
            self._with_deadline += 1
            due = min(int(due) for due in (self.ttft_deadline_us[slot], self.deadline_us[slot]) if due)
            self._next_due_us = min(self._next_due_us, due)
        drawn = asked.sampling
        for name, value in (
            ("temperature", drawn.temperature),
            ("top_p", drawn.top_p),
            ("top_k", drawn.top_k),
            ("min_p", drawn.min_p),
            ("seed", drawn.seed),
            ("choice", asked.choice),
            ("logprobs", asked.logprobs),
        ):
            self.sampling[name][slot] = value
        tenant = int(self.tenant[slot])
        if tenant >= len(self._live_of_tenant):
            grown = np.zeros(max(tenant + 1, 2 * len(self._live_of_tenant)), np.int64)
            grown[: len(self._live_of_tenant)] = self._live_of_tenant
            self._live_of_tenant = grown
        self._live_of_tenant[tenant] += 1
        self.stop_ids.update(request.stop_ids)
        self.by_id[request.id] = request
        self._insert_waiting(request)

    def board(self, request: LiveRequest) -> None:
        """WAITING or STANDBY -> BOARDING: it holds a row from here on."""
        self._leave_waiting(request)
        request.state = State.BOARDING
        self.loading[request.slot] = 1
        self._seat(request)

    def promote(self, request: LiveRequest) -> None:
        """STANDBY -> RUNNING: it takes the row of one that ended, or that a decision gives it."""
        self._leave_waiting(request)
        request.state = State.RUNNING
        self.loading[request.slot] = request.load is not None
        self._seat(request)

    def _seat(self, request: LiveRequest) -> None:
        self.running.append(request)
        self._running_slots = None

    def _unseat(self, request: LiveRequest) -> None:
        self.running.remove(request)
        self._running_slots = None
        self.departures += 1

    def running_slots(self) -> I64:
        """Of the running rows, in their order; not to be changed."""
        if self._running_slots is None:
            self._running_slots = slots_of(self.running)
        return self._running_slots

    def planned(self, slots: I64) -> tuple[I64, I64]:
        """Tokens that are computed, and how many are to be, once what is in flight has ended, `[rows]` each. A step
        that reaches the end of what is known draws one more; the last one of an answer is not to be computed."""
        prompt = self.prompt_tokens[slots].astype(np.int64)
        start = self.computed_tokens[slots] + self.in_flight_tokens[slots].astype(np.int64)
        known = np.maximum(prompt + self.generated_tokens[slots], start + 1)
        return start, np.minimum(known, prompt + self.max_new_tokens[slots] - 1)

    def dismiss(self, request: LiveRequest) -> None:
        """STANDBY -> WAITING: it holds nothing."""
        request.state = State.WAITING
        self._reset(request.slot)

    def back_to_waiting(self, request: LiveRequest) -> None:
        """BOARDING or RUNNING -> WAITING, at its place; it holds nothing."""
        self._unseat(request)
        request.state = State.WAITING
        self._reset(request.slot)
        self._insert_waiting(request)

    def end(self, request: LiveRequest) -> None:
        """Takes a request out of its order; its slot lives on until `forget`."""
        if request.waits:
            self._leave_waiting(request)
        else:
            self._unseat(request)
        request.state = State.ENDED
        self.in_flight_tokens[request.slot] = 0  # dropped, whatever comes of them
        self._with_deadline -= request.submission.ttft_deadline_us > 0 or request.submission.deadline_us > 0
        self.ttft_deadline_us[request.slot] = self.deadline_us[request.slot] = 0

    def forget(self, request: LiveRequest) -> None:
        """Frees the slot of an ended request, once its blocks are released."""
        del self.by_id[request.id]
        for stop in request.stop_ids:
            self.stop_ids[stop] -= 1
            if not self.stop_ids[stop]:
                del self.stop_ids[stop]
        tenant = int(self.tenant[request.slot])
        self._live_of_tenant[tenant] -= 1
        if not self._live_of_tenant[tenant]:
            del self._waiting_of_tenant[request.submission.tenant]
        self._free.append(request.slot)
        request.slot = -1

    def _reset(self, slot: int) -> None:
        self.computed_tokens[slot] = self.in_flight_tokens[slot] = 0
        self.held_blocks[slot] = self.shared_blocks[slot] = self.lower_blocks[slot] = 0
        self.waits_for[slot] = self.loading[slot] = 0

    def _leave_waiting(self, request: LiveRequest) -> None:
        self.waiting_changes += 1
        at = int(np.searchsorted(self._waiting_ids, request.id))
        self._waiting_ids = np.delete(self._waiting_ids, at)
        self._waiting_slots = np.delete(self._waiting_slots, at)
        self._ran.discard(request.id)
        self.waiting_tokens -= request.length
        self._waiting_of_tenant[request.submission.tenant] -= request.length

    def _insert_waiting(self, request: LiveRequest) -> None:
        self.waiting_changes += 1
        at = int(np.searchsorted(self._waiting_ids, request.id))
        self._waiting_ids = np.insert(self._waiting_ids, at, request.id)
        self._waiting_slots = np.insert(self._waiting_slots, at, request.slot)
        self.waiting_tokens += request.length
        self._waiting_of_tenant[request.submission.tenant] += request.length
        if request.first_row_us:
            self._ran.add(request.id)

    def _grow(self) -> None:
        old = len(self.id)
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros(old, column.dtype)])
        self.__dict__.update(self._columns)
        self.newest_token = np.concatenate([self.newest_token, np.zeros(old, np.int32)])
        for name, column in _sampling_columns(old).items():
            self.sampling[name] = np.concatenate([self.sampling[name], column])
        self._free = list(range(2 * old - 1, old - 1, -1))

    def running_table(self, slots: I64) -> RunningTable:
        """The columns of these slots, copied."""
        return RunningTable(**{name: column[slots] for name, column in self._columns.items()})

    def ending_table(self, slots: I64) -> EndingTable:
        """Rows that reach max_tokens in the step in flight."""
        return EndingTable(id=self.id[slots], held_blocks=self.held_blocks[slots])

    def waiting_tables(self, names: frozenset[str]) -> tuple[WaitingTable, WaitingPolicyTable]:
        """The waiting rows with the columns that the policy reads (id always), and its own of those that have run."""
        if self._shown is None or self._shown_for != (names, self.waiting_changes):
            self._shown, self._shown_for = self._waiting_table(names), (names, self.waiting_changes)
        slots = self._waiting_slots
        ran = np.fromiter(sorted(self._ran), np.int64, len(self._ran))
        rows = np.searchsorted(self._waiting_ids, ran)
        own = WaitingPolicyTable(
            policy_row=rows.astype(np.uint32), policy_a=self.policy_a[slots[rows]], policy_b=self.policy_b[slots[rows]]
        )
        return self._shown, own

    def _waiting_table(self, names: frozenset[str]) -> WaitingTable:
        slots = self._waiting_slots
        columns = {"id": self.id[slots]}
        for name in names - {"id"}:
            if name == "tokens":
                columns[name] = self.prompt_tokens[slots] + self.generated_tokens[slots]
            elif name == "new_tokens":
                columns[name] = self.max_new_tokens[slots] - self.generated_tokens[slots]
            else:
                columns[name] = self._columns[name][slots].astype(_CASTS.get(name, self._columns[name].dtype))
        return WaitingTable(**columns)

    def newest_waiting(self, count: int) -> list[LiveRequest]:
        """The newest arrivals among the waiting, newest first."""
        return [self.by_id[int(i)] for i in self._waiting_ids[: -count - 1 : -1]]

    def waiting_tokens_of(self, tenant: str) -> int:
        """Tokens of a tenant that wait."""
        return self._waiting_of_tenant[tenant]

    def waiting_token_added(self, request: LiveRequest) -> None:
        """A request that waits got the token of the step in which it was preempted."""
        self.waiting_tokens += 1
        self.waiting_changes += 1
        self._waiting_of_tenant[request.submission.tenant] += 1

    def live_tenants(self) -> I64:
        """Numbers of the tenants that have a request here, rising."""
        return np.flatnonzero(self._live_of_tenant)

    def next_deadline_us(self) -> int:
        """Before when no deadline of a live request passes; 0: there is none."""
        return self._next_due_us if self._with_deadline and self._next_due_us < _NEVER_US else 0

    def expired(self, now_us: int) -> list[LiveRequest]:
        """Live requests whose deadline has passed, by id."""
        if not self._with_deadline or now_us < self._next_due_us:
            return []
        due = self._due_us()
        later = due[due > now_us]
        self._next_due_us = int(later.min()) if len(later) else _NEVER_US
        ids = self.id[np.flatnonzero((due > 0) & (due <= now_us))]
        return [r for i in sorted(ids.tolist()) if (r := self.by_id.get(i)) is not None and r.state is not State.ENDED]

    def _due_us(self) -> I64:
        """The earlier of the deadlines that still count, by slot; 0: none, or not live."""
        first = np.where(self.generated_tokens == 0, self.ttft_deadline_us, 0)
        total = self.deadline_us
        return np.where((first > 0) & ((total == 0) | (first < total)), first, total)


def slots_of(requests: Sequence[LiveRequest]) -> I64:
    """Their places in the columns."""
    return np.array([request.slot for request in requests], np.int64)


def _sampling_columns(rows: int) -> dict[str, NDArray[Any]]:
    """How each request draws, by slot; the columns of SamplingRows that do not change."""
    return {
        "temperature": np.zeros(rows, np.float32),
        "top_p": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "min_p": np.zeros(rows, np.float32),
        "seed": np.zeros(rows, np.uint64),
        "choice": np.zeros(rows, np.int32),
        "logprobs": np.full(rows, -1, np.int32),
    }
