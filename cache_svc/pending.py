"""Keys that are being computed: who does, and who waits for them.

A key is *pending* while its owner, a request that reserved a block for it, has neither sealed nor withdrawn it. Other
requests of the same prefix join it instead of computing it again. A pending key is never sealed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitney.block_ops import RequestId
from jitney.keys import Key


class Pending:
    """`owner[key]` computes it; `joiners[key]`, in the order of joining, wait for it (no entry: nobody does)."""

    __slots__ = ("joiners", "owner")

    def __init__(self) -> None:
        self.owner: dict[Key, RequestId] = {}
        self.joiners: dict[Key, dict[RequestId, None]] = {}

    def run(self, keys: Sequence[Key], request: RequestId) -> list[Key]:
        """The pending keys at the start of `keys` that others than `request` compute."""
        owner = self.owner
        found: list[Key] = []
        for key in keys:
            if owner.get(key, request) == request:
                break
            found.append(key)
        return found

    def join(self, keys: Iterable[Key], request: RequestId) -> None:
        """The request waits for these pending keys."""
        for key in keys:
            self.joiners.setdefault(key, {})[request] = None

    def leave(self, keys: Iterable[Key], request: RequestId) -> None:
        """The request waits for these keys no more."""
        for key in keys:
            waiting = self.joiners[key]
            del waiting[request]
            if not waiting:
                del self.joiners[key]

    def settle(self, key: Key) -> Iterable[RequestId]:
        """The key was sealed, or withdrawn: it is pending no more. Returns who waited for it."""
        self.owner.pop(key, None)
        return self.joiners.pop(key, ())
