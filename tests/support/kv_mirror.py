"""What a router makes of KV events: which blocks can be found where. Reads the wire without any code of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

Where = tuple[int | None, str]
Known = dict[bytes, tuple[bytes | None, tuple[int, ...]]]
"""By hash: the hash before it, and its token ids."""


class Mirror:
    """Follows batches; fails where an event cannot be true."""

    def __init__(self) -> None:
        self.known: dict[Where, Known] = {}

    @property
    def nonempty(self) -> dict[Where, Known]:
        """Where something is."""
        return {where: known for where, known in self.known.items() if known}

    def follow(self, payload: bytes) -> None:
        """One batch."""
        _, events, *rest = msgspec.msgpack.decode(payload)
        self.follow_events(rest[0] if rest else None, events)

    def follow_events(self, rank: int | None, events: Iterable[dict[str, Any]]) -> None:
        """Events of one batch, as maps."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                continue
            known = self.known.setdefault((rank, event["medium"]), {})
            hashes: Sequence[bytes] = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                for each in hashes:
                    del known[each]
                continue
            before, size, ids = event["parent_block_hash"], event["block_size"], event["token_ids"]
            assert size * len(hashes) == len(ids)
            for at, each in enumerate(hashes):
                assert each not in known, "stored twice"
                known[each] = (before, tuple(ids[at * size : (at + 1) * size]))
                before = each
