"""One request from its arrival to its last answer: the part of its state that is no column.

Tokens are one growing int32 buffer, prompt first. Blocks are handles in the order of the chain; 0 stands for a
block that another request is still computing (a joined key).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

from executor_svc.load import Load
from executor_svc.request import Answer, Submission
from jitney.block_ops import Block, RequestId
from jitney.columns import I32
from jitney.keys import Key, Root, chain

UNKNOWN_BLOCK = Block(0)


class State(IntEnum):
    """WAITING -> BOARDING (its Acquire and Reserve are on the way) -> RUNNING -> ENDED.

    BOARDING and RUNNING go back to WAITING when the room was short or the request is preempted. A substitute that a
    decision named is STANDBY: it waits, at its place, with its blocks reserved; it goes on to RUNNING when a row ends
    within the horizon or a decision admits it, and back to WAITING when a decision does not name it again.
    """

    WAITING = 0
    BOARDING = 1
    RUNNING = 2
    ENDED = 3
    STANDBY = 4


class LiveRequest:
    """State of one request; `slot` is its place in the registry's columns."""

    __slots__ = (
        "answer",
        "blocks",
        "boarded_tokens",
        "boardings",
        "cached_tokens",
        "computed_prompt_tokens",
        "events",
        "first_row_us",
        "first_token_us",
        "hashed",
        "heir",
        "host",
        "id",
        "joined",
        "keys",
        "known_hits",
        "last_launched_step",
        "length",
        "load",
        "lower_tokens",
        "on_change",
        "prompt_tokens",
        "root",
        "salt_digest",
        "sealed",
        "siblings",
        "slot",
        "state",
        "steps",
        "stop_ids",
        "streamed",
        "submission",
        "table_row",
        "tokens",
    )

    def __init__(
        self,
        request_id: RequestId,
        submission: Submission,
        root: Root,
        salt_digest: bytes,
        on_change: Callable[[], None] | None,
    ) -> None:
        self.id = request_id
        self.submission = submission
        self.root = root
        self.salt_digest = salt_digest
        self.on_change = on_change
        self.answer = Answer(submission.client_id, request_id)
        resumed = np.asarray(submission.resumed_ids, np.int32)
        self.prompt_tokens = len(submission.prompt_ids)
        self.stop_ids = submission.stop_token_ids
        self.length = self.prompt_tokens + len(resumed)
        self.tokens: I32 = np.empty(self.length + min(submission.max_tokens, 256), np.int32)
        self.tokens[: self.length] = np.concatenate([submission.prompt_ids, resumed])
        self.slot = -1
        self.siblings: Sequence[LiveRequest] = ()  # all choices of its client's request, itself too; of one: none
        self.host: LiveRequest | None = None  # the sibling whose partly filled last prompt block it waits for
        self.heir = False  # of such a sibling, waiting or having got it: it fills none itself
        self.state = State.WAITING
        self.table_row = -1
        self.blocks: list[Block] = []
        self.joined: list[int] = []  # indices into blocks, rising: keys that another request computes
        self.keys: list[Key] = []  # of the full blocks so far
        self.hashed: list[Key] = []  # keys that the hasher computed; the loop's thread takes them over
        self.sealed = 0  # leading blocks whose key the cache knows
        self.last_launched_step = 0
        self.boardings = 0  # how often it got a row: tells a step in flight of an earlier boarding
        self.boarded_tokens = 0  # what it had when it last got a row: these it reserved blocks for
        self.known_hits = 0  # device blocks of its chain that the last look-up found; -1: they were not there any more
        self.cached_tokens = -1  # of the prompt, when it boarded before it first ran; -1: has not boarded
        self.lower_tokens = (0, 0)  # of the cached ones, loaded from the CPU tier and from the SSD
        self.load: Load | None = None  # until it has ended, the row runs no token
        self.computed_prompt_tokens = 0
        self.first_row_us = 0
        self.first_token_us = 0
        self.steps = 0
        self.streamed = len(resumed)  # generated tokens that were turned into text
        self.events: list[tuple[int, str]] = []  # (now_us, what happened), for explain

    @property
    def waits(self) -> bool:
        """Whether it stands in the waiting order."""
        return self.state is State.WAITING or self.state is State.STANDBY

    @property
    def host_id(self) -> RequestId:
        """Of the sibling whose tail it waits for; 0: none."""
        return self.host.id if self.host is not None else RequestId(0)

    @property
    def generated(self) -> int:
        """Tokens generated, those of an earlier stream included."""
        return self.length - self.prompt_tokens

    def grow(self) -> None:
        """Makes room for more tokens."""
        self.tokens = np.concatenate([self.tokens, np.empty(max(256, self.length), np.int32)])

    def hash_to(self, tokens: int, block_tokens: int) -> list[Key]:
        """Keys of the full blocks of the first `tokens` tokens; computes those that are missing."""
        wanted = min(tokens, self.length) // block_tokens
        if len(self.hashed) > len(self.keys):
            self.keys = list(self.hashed)
        if len(self.keys) < wanted:
            done = len(self.keys)
            parent = self.keys[-1] if self.keys else self.root.key()
            self.keys += chain(parent, self.tokens[done * block_tokens : wanted * block_tokens], block_tokens)
        return self.keys[:wanted]

    def parent_of(self, block_index: int) -> Key:
        """Key that stands before the block of that index."""
        return self.keys[block_index - 1] if block_index else self.root.key()

    def note(self, now_us: int, what: str) -> None:
        """Remembers what happened, for explain; the newest 32."""
        self.events.append((now_us, what))
        if len(self.events) > 32:
            del self.events[0]


def link(rows: Sequence[LiveRequest]) -> Sequence[LiveRequest]:
    """Makes the choices of one client's request siblings, if there are several."""
    if len(rows) > 1:
        for request in rows:
            request.siblings = rows
    return rows
