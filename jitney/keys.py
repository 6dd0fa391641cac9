"""Block keys: what a block of KV holds, as a 256-bit digest that no two contents share.

A key is sha256 over (parent key, token ids as little-endian int32). The root of a chain is sha256 over the
length-prefixed digest of the salt, model version, adapter version and fingerprint, so that tenants with different
salts, other weights or other arithmetic never share a block. An absent salt is the empty salt. The cache, which knows
the digest and never the salt, can tell a root by it. Loads without gRPC.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NewType

import numpy as np

from jitney.columns import I32

Key = NewType("Key", bytes)
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Root:
    """What stands at the root of a chain besides tokens."""

    salt: str = ""
    model_version: str = ""
    adapter_version: str = ""
    fingerprint: bytes = b""

    def key(self) -> Key:
        """The parent of a first block."""
        return root_key(salt_digest(self.salt), self.model_version, self.adapter_version, self.fingerprint)


def root_key(salt: bytes, model_version: str, adapter_version: str, fingerprint: bytes) -> Key:
    """The parent of a first block; `salt` is the digest of the salt."""
    digest = hashlib.sha256()
    for part in (salt, model_version.encode(), adapter_version.encode(), fingerprint):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Key(digest.digest())


def salt_digest(salt: str) -> bytes:
    """What the cache may know of a salt: 32 bytes."""
    return hashlib.sha256(salt.encode()).digest()


def block_key(parent: Key, token_ids: bytes) -> Key:
    """Of the block with these token ids, int32 little-endian, behind `parent`."""
    return Key(hashlib.sha256(parent + token_ids).digest())


def chain(parent: Key, token_ids: I32, block_tokens: int) -> list[Key]:
    """Keys of the full blocks of `token_ids` (int32, any length) behind `parent`; a partial block has no key."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    size = 4 * block_tokens
    keys: list[Key] = []
    for start in range(0, len(data) - size + 1, size):
        parent = Key(hashlib.sha256(parent + data[start : start + size]).digest())
        keys.append(parent)
    return keys
