"""What is remembered between two decisions: named sections in the snapshot's policy memory, each with a version.

A policy keeps its section under its own name, the length predictor under LENGTHS; neither reads the other's. A section
whose version its reader does not know counts as absent, and one that nobody reads is carried on as it is, so that a
policy that is chosen again finds what it knew. Equal sections give equal bytes.

    content = for each section, by name: u8 length of the name, name, u16 version, u32 length, bytes (little-endian)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from jitney.errors import InvalidRequest
from jitney.snapshot import MAX_POLICY_MEMORY_BYTES, PolicyMemory

VERSION = 1
"""Of this format; stands as the version of the PolicyMemory."""
LENGTHS = "lengths"
_HEAD = struct.Struct("<HI")


@dataclass(slots=True)
class Memory:
    """Read once at the start of a decision, written back at its end. `lost`: there was one, in a format that this
    build does not know, so that everybody starts empty."""

    lost: bool = False
    _sections: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    @classmethod
    def read(cls, memory: PolicyMemory) -> Memory:
        """The sections of a snapshot's memory; none if it is absent or in another format."""
        if not memory.content:
            return cls()
        if memory.version != VERSION:
            return cls(lost=True)
        sections, data, at = {}, memory.content, 0
        while at < len(data):
            start = at + 1 + data[at]
            if start + _HEAD.size > len(data):
                return cls(lost=True)
            version, size = _HEAD.unpack_from(data, start)
            end = start + _HEAD.size + size
            if end > len(data):
                return cls(lost=True)
            sections[data[at + 1 : start].decode("ascii", "replace")] = (version, data[start + _HEAD.size : end])
            at = end
        return cls(_sections=sections)

    def get(self, name: str, version: int) -> bytes:
        """What was kept under `name`; empty if nothing was, or by another version."""
        kept, content = self._sections.get(name, (version, b""))
        return content if kept == version else b""

    def put(self, name: str, version: int, content: bytes) -> None:
        """Keeps `content` in place of what was there; nothing, if it is empty. `name` is short and ASCII."""
        if content:
            self._sections[name] = (version, content)
        else:
            self._sections.pop(name, None)

    def write(self, policy: str) -> PolicyMemory:
        """As the decision returns it, tagged with the policy that decided. InvalidRequest if it is too large."""
        parts = []
        for name, (version, content) in sorted(self._sections.items()):
            label = name.encode("ascii", "replace")
            parts += [bytes([len(label)]), label, _HEAD.pack(version, len(content)), content]
        packed = b"".join(parts)
        if len(packed) > MAX_POLICY_MEMORY_BYTES:
            raise InvalidRequest(
                f"policy {policy} wants to remember {len(packed)} bytes, allowed are {MAX_POLICY_MEMORY_BYTES}",
                field="memory.content",
                limit=MAX_POLICY_MEMORY_BYTES,
                value=len(packed),
            )
        return PolicyMemory(policy, VERSION, packed) if packed else PolicyMemory()
