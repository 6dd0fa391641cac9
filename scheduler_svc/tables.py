"""The learned tables that this replica holds, by digest: snapshots name them, and carry one only to who lacks it.

A memory of what was seen, no state: a replica that has lost it says so and is sent the table again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from jitney.errors import Conflict, InvalidRequest
from jitney.scheduler_codec import digest_of
from jitney.snapshot import PolicyTable, Snapshot

MAX_TABLE_BYTES: Final = 4 << 20
MAX_HELD_BYTES: Final = 64 << 20


class Tables:
    """Forgets the one that was longest not named when they become too large together."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def fill(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the content of all its tables. Conflict if one is not held, InvalidRequest if the content
        that came is not what its digest says."""
        if not snapshot.policy.tables:
            return snapshot
        filled = tuple(replace(table, content=self._content(table)) for table in snapshot.policy.tables)
        return replace(snapshot, policy=replace(snapshot.policy, tables=filled))

    def _content(self, table: PolicyTable) -> bytes:
        field = f"policy.tables.{table.name}"
        held = self._held.get(table.digest)
        if held is not None:
            self._held.move_to_end(table.digest)
            return held
        if not table.content:
            raise Conflict(
                f"table {table.name!r} of digest {table.digest.hex()} is not held here: send it along",
                field=field,
                value=table.digest.hex(),
            )
        if len(table.content) > MAX_TABLE_BYTES:
            raise InvalidRequest(
                f"{field} has {len(table.content)} bytes, allowed are {MAX_TABLE_BYTES}",
                field=field,
                limit=MAX_TABLE_BYTES,
                value=len(table.content),
            )
        if digest_of(table.content) != table.digest:
            raise InvalidRequest(
                f"{field} is not what its digest says",
                field=field,
                limit=digest_of(table.content).hex(),
                value=table.digest.hex(),
            )
        self._held[table.digest] = table.content
        self._bytes += len(table.content)
        while self._bytes > MAX_HELD_BYTES:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= len(oldest)
        return table.content
