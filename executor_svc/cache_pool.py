"""What the cache is told of this executor when it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CachePool:
    """The device pool, as the cache is told of it."""

    executor: str
    incarnation: int
    fingerprint: bytes
    blocks: int
    block_bytes: int
    block_tokens: int
    lock_path: Path | None = None
