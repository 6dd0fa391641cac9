"""Where on the SSD which slot is: arithmetic only.

A slot is a header and a block, both of whole pages. Files have `file_slots` slots each, the last one fewer. A file's
name says all of this, so that a restart knows what it finds:
`v1-<header bytes>-<block bytes>-<file slots>-<number>.kv`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from cache_svc.pages import PAGE_BYTES, paged

VERSION = 1
DIRECTORY_RESERVE_BYTES = 64 << 10
"""Of the limit: the directory, its lock."""
FILE_RESERVE_BYTES = 64 << 10
"""Of the limit, for each file: what the file system keeps to find its parts."""
HEADER_FIXED_BYTES = 2048
"""Room in a header for all but the token ids."""
_NAME = re.compile(r"v(\d+)-(\d+)-(\d+)-(\d+)-(\d+)\.kv")


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Slots of one size, spread over files."""

    block_bytes: int
    header_bytes: int
    file_slots: int
    slots: int = 0

    @classmethod
    def of_block(cls, block_bytes: int, block_tokens: int, file_bytes: int) -> Self:
        """For blocks of that size, in files of about `file_bytes`; without slots yet."""
        header = paged(HEADER_FIXED_BYTES + 4 * block_tokens)
        return cls(block_bytes, header, max(1, file_bytes // (header + paged(block_bytes))))

    @property
    def slot_bytes(self) -> int:
        """Of header and block."""
        return self.header_bytes + paged(self.block_bytes)

    @property
    def files(self) -> int:
        """How many there are."""
        return -(-self.slots // self.file_slots)

    def fitting(self, limit_bytes: int) -> Self:
        """With as many slots as never take more than `limit_bytes`, all that is around them included."""
        room = limit_bytes - DIRECTORY_RESERVE_BYTES
        whole, rest = divmod(max(0, room), self.file_slots * self.slot_bytes + FILE_RESERVE_BYTES)
        slots = whole * self.file_slots + max(0, rest - FILE_RESERVE_BYTES) // self.slot_bytes
        return replace(self, slots=slots)

    def place(self, slot: int) -> tuple[int, int]:
        """File number and offset of a slot."""
        number, index = divmod(slot, self.file_slots)
        return number, index * self.slot_bytes

    def file_bytes(self, number: int) -> int:
        """Size of a file."""
        return max(0, min(self.file_slots, self.slots - number * self.file_slots)) * self.slot_bytes

    def name(self, number: int) -> str:
        """Of a file."""
        return f"v{VERSION}-{self.header_bytes}-{self.block_bytes}-{self.file_slots}-{number:05}.kv"

    def same_slots(self, other: DiskLayout) -> bool:
        """Whether slots of equal numbers lie at the same place."""
        return replace(self, slots=0) == replace(other, slots=0)


def parsed(name: str) -> tuple[DiskLayout, int] | None:
    """The layout (without a number of slots) and the file number that a file's name says; None: no file of ours, or of
    another version."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    version, header, block, file_slots, number = map(int, found.groups())
    if version != VERSION or not header or header % PAGE_BYTES or not block or not file_slots:
        return None
    return DiskLayout(block, header, file_slots), number
