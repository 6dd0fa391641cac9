"""Events as msgpack, in the shape of vLLM 0.33 (`vllm.distributed.kv_events`): what reads its events reads ours.

A batch is the array [time, events, rank]; an event is a map with its `type`. Hashes are our keys, 32 bytes each.
`extra_keys` of a first block of a chain holds the hex digest of the salt, where there is one (vLLM: the salt).
Needs the extra `events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from cache_svc.kv_events import NO_SALT, Cleared, Event, Removed, Stored


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened together, seconds since 1970."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _Tagged(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """An event."""


class BlockStored(_Tagged):
    """Blocks of a chain; the fields behind `medium` are those of vLLM that have a meaning here."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(_Tagged):
    """Blocks that are gone."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(_Tagged):
    """Nothing is left."""


_ENCODER = msgspec.msgpack.Encoder()


def encode(ts: float, events: Sequence[Event], rank: int | None) -> bytes:
    """One batch."""
    return _ENCODER.encode(EventBatch(ts, [_wire(event) for event in events], rank))


def _wire(event: Event) -> _Tagged:
    match event:
        case Stored():
            return _stored(event)
        case Removed():
            return BlockRemoved(list(event.keys), event.medium.value)
        case Cleared():
            return AllBlocksCleared()


def _stored(event: Stored) -> BlockStored:
    tokens: list[int] = np.frombuffer(event.token_ids, "<i4").tolist()
    salted = event.parent is None and event.origin.salt_digest != NO_SALT
    extra = [(event.origin.salt_digest.hex(),), *(None for _ in event.keys[1:])] if salted else None
    return BlockStored(
        block_hashes=list(event.keys),
        parent_block_hash=event.parent,
        token_ids=tokens,
        block_size=len(tokens) // len(event.keys),
        lora_id=None,
        medium=event.medium.value,
        lora_name=None,
        extra_keys=extra,
    )
