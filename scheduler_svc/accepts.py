"""What a decision needs to see: columns that are missing are refused by name."""

from __future__ import annotations

from jitney.columns import Table
from jitney.errors import InvalidRequest
from jitney.snapshot import Snapshot
from scheduler_svc.lengths import table_of
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS, Policy

RUNNING_COLUMNS = (
    "arrival_us",
    "prompt_tokens",
    "generated_tokens",
    "max_new_tokens",
    "computed_tokens",
    "in_flight_tokens",
    "held_blocks",
    "shared_blocks",
    "lower_blocks",
    "preemptions",
    "waits_for",
    "loading",
    "priority",
    "tenant",
    "admitted_us",
    "ttft_deadline_us",
    "deadline_us",
    "predicted_p50",
    "policy_a",
    "policy_b",
)
CANDIDATE_COLUMNS = ("device_hit_blocks", "unheld_hit_blocks", "pending_blocks", "pending_owner")


def accept(snapshot: Snapshot, policy: Policy) -> None:
    """InvalidRequest for a column that is not sent, or a learned table that is none."""
    table_of(snapshot.policy)
    _require(snapshot.running, "running", RUNNING_COLUMNS)
    _require(snapshot.waiting, "waiting", COMMON_WAITING_COLUMNS + policy.waiting_columns)
    _check_own(snapshot)
    _require(snapshot.candidates, "candidates", CANDIDATE_COLUMNS)


def _check_own(snapshot: Snapshot) -> None:
    """The policy's own columns belong to waiting rows."""
    own, rows = snapshot.waiting_policy, snapshot.waiting.rows
    if own.rows and (most := int(own.policy_row.max())) >= rows:
        raise InvalidRequest(
            f"waiting.policy_row is {most}, there are {rows} waiting rows",
            field="waiting.policy_row",
            limit=rows - 1,
            value=most,
        )


def _require(table: Table, field: str, names: tuple[str, ...]) -> None:
    rows = table.rows
    for name in names:
        if len(getattr(table, name)) != rows:
            raise InvalidRequest(
                f"{field}.{name} has {len(getattr(table, name))} entries, {rows} are needed",
                field=f"{field}.{name}",
                limit=rows,
                value=len(getattr(table, name)),
            )
