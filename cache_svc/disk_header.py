"""The header of a slot on the SSD: what stands behind it, and whose it is.

    magic 8, version u32, header bytes u32, block bytes u64, checksum of the block u64, key 32, parent 32,
    lengths u32 of (fingerprint, salt digest, tenant, model version, token ids), place u8, then these five, then
    xxh3_64 of all before it. Little-endian; what is left of the header says nothing.

A header that is torn, foreign or of another version, or whose key is not that of its token ids, is None: the slot is
empty.
"""

from __future__ import annotations

import struct

import xxhash

from cache_svc.disk_jobs import DiskEntry
from cache_svc.disk_layout import VERSION
from cache_svc.index import Content, Origin
from jitney.keys import Key, block_key

MAGIC = b"jitneyKV"
_FIXED = struct.Struct("<8sIIQQ32s32s5IB")
_CHECKSUM = struct.Struct("<Q")


def encode_header(entry: DiskEntry, header_bytes: int, block_bytes: int) -> bytes | None:
    """The header, without what is left of its `header_bytes`; None if the entry's names are too long for it."""
    origin = entry.content.origin
    parts = (
        entry.fingerprint,
        origin.salt_digest,
        origin.tenant.encode(),
        origin.model_version.encode(),
        entry.content.token_ids,
    )
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header_bytes,
        block_bytes,
        entry.checksum,
        entry.key,
        entry.parent,
        *map(len, parts),
        entry.place,
    )
    body = b"".join((fixed, *parts))
    if len(body) > header_bytes - _CHECKSUM.size:
        return None
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(data: memoryview, block_bytes: int) -> DiskEntry | None:
    """What a header of `len(data)` bytes says; None if it is none, or not for blocks of that size."""
    if len(data) < _FIXED.size or bytes(data[: len(MAGIC)]) != MAGIC:
        return None
    _, version, header, block, checksum, key, parent, *lengths, place = _FIXED.unpack_from(data)
    end = _FIXED.size + sum(lengths)
    if (version, header, block) != (VERSION, len(data), block_bytes) or end + _CHECKSUM.size > len(data):
        return None
    body = bytes(data[:end])
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    parts: list[bytes] = []
    start = _FIXED.size
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    fingerprint, salt_digest, tenant, model_version, token_ids = parts
    try:
        origin = Origin(tenant.decode(), salt_digest, model_version.decode())
    except UnicodeDecodeError:
        return None
    if block_key(Key(parent), token_ids) != key:
        return None
    return DiskEntry(Key(key), Key(parent), Content(token_ids, origin), fingerprint, checksum, bool(place))
