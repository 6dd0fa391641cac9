"""The files of a decision log: a ring of segments that is written in one place and read, or followed, in any."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from jitney.decision_log import (
    MAGIC,
    MAX_FRAME_BYTES,
    RECORD,
    SUFFIX,
    Frame,
    FrameDecoder,
    FrameEncoder,
    Kind,
    tables_of,
    tables_record,
)
from jitney.errors import InvalidRequest, Missing

SEGMENTS: Final = 16
"""How many segments a full ring has; when the cap is reached, the oldest one goes."""


class LogWriter:
    """Appends frames, one writer a folder. OSError of the disk is the caller's; after one, `close` and begin anew."""

    def __init__(self, folder: Path, cap_bytes: int, tables: Mapping[bytes, bytes] | None = None) -> None:
        """`cap_bytes` bounds all segments together; `tables` are learned tables that snapshots name by digest."""
        self._folder = folder
        self._cap_bytes = cap_bytes
        self._segment_bytes = max(cap_bytes // SEGMENTS, 1)
        self._encoder = FrameEncoder()
        self._encoder.tables |= tables or {}
        self._tables_written = 0
        self._file: BinaryIO | None = None
        self._size = 0
        self.bytes_written = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes = {_number(path): path.stat().st_size for path in segments(folder)}

    def append(self, snapshot: bytes, decision: bytes, round_trip_us: int, *, gap: bool = False) -> None:
        """One frame. `gap`: frames before it were dropped."""
        if gap:
            self._encoder.begin(gap=True)
        if self._file is None or self._size >= self._segment_bytes:
            self._next_segment()
        record = self._encoder.encode(snapshot, decision, round_trip_us)
        if len(self._encoder.tables) != self._tables_written:
            self._tables_written = len(self._encoder.tables)
            self._write(tables_record(self._encoder.tables))
        self._write(record)

    def close(self) -> None:
        """Ends the segment."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _next_segment(self) -> None:
        self.close()
        self._encoder.begin()
        number = max(self._sizes, default=0) + 1
        self._file = (self._folder / f"{number:012d}{SUFFIX}").open("xb", buffering=0)
        self._sizes[number] = self._size = 0
        self._tables_written = 0
        self._write(MAGIC)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        current = max(self._sizes)
        while len(self._sizes) > 1 and sum(self._sizes.values()) + len(data) > self._cap_bytes:
            oldest = min(self._sizes)
            (self._folder / f"{oldest:012d}{SUFFIX}").unlink(missing_ok=True)
            del self._sizes[oldest]
        view = memoryview(data)
        while view:
            written = self._file.write(view) or 0
            self._size += written
            self._sizes[current] = self._size
            self.bytes_written += written
            view = view[written:]


class LogReader:
    """Reads a folder or one segment, from its oldest frame on.

    Iterating ends where the log ends now, and can be taken up again: a log that is being written is followed by
    iterating over it again and again. Damage is skipped to the next full frame.
    """

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """Missing if there is nothing of that name; InvalidRequest if it is no log. `at_end`: only what comes new,
        from the newest segment on."""
        self._path = path
        self.tables: dict[bytes, bytes] = {}
        self.frames = 0
        self.gaps = 0
        self.damaged = 0  # records that could not be read
        self.torn = 0  # segments before the last one that end inside a record
        self.bytes_read = 0
        self._number = 0
        self._file: BinaryIO | None = None
        self._decoder = FrameDecoder()
        self._after_gap = False
        if not path.exists():
            raise Missing(f"there is no decision log at {path}", field="log", value=path)
        if not path.is_dir():
            _check_magic(path)
        elif at_end and (there := segments(path)):
            self._number = _number(there[-1]) - 1

    def __iter__(self) -> Iterator[Frame]:
        """What there is, on from where it was left."""
        while True:
            later = self._later()  # asked first: of a segment that has a next one, all is written
            while (record := self._next_record()) is not None:
                if (frame := self._decoded(*record)) is not None:
                    yield frame
            if later is None or not self._next_file(later):
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_record(self) -> tuple[Kind, int, bytes] | None:
        """The next whole record; None at the end, and then the place is kept."""
        if self._file is None:
            return None
        start = self._file.tell()
        head = self._file.read(RECORD.size)
        if len(head) == RECORD.size:
            size, kind, check = RECORD.unpack(head)
            if size <= MAX_FRAME_BYTES and kind in tuple(Kind):
                payload = self._file.read(size)
                if len(payload) == size:
                    self.bytes_read += RECORD.size + size
                    return Kind(kind), check, payload
        self._file.seek(start)
        return None

    def _decoded(self, kind: Kind, check: int, payload: bytes) -> Frame | None:
        try:
            if kind is Kind.TABLES:
                self.tables |= tables_of(check, payload)
                return None
            if kind is Kind.DELTA and self._decoder.lost:
                return None
            frame = self._decoder.decode(kind, check, payload)
        except InvalidRequest:
            self.damaged += 1
            self._after_gap = True
            return None
        self.frames += 1
        gap, self._after_gap = frame.gap or self._after_gap, False
        self.gaps += gap
        return Frame(frame.snapshot, frame.decision, frame.round_trip_us, gap)

    def _later(self) -> Path | None:
        """The segment after this one."""
        if not self._path.is_dir():
            return None if self._number else self._path
        return next((path for path in segments(self._path) if _number(path) > self._number), None)

    def _next_file(self, path: Path) -> bool:
        """Goes on to a segment; what is left of this one is torn. False if it is only just being made."""
        if self._file is not None and os.fstat(self._file.fileno()).st_size > self._file.tell():
            self.torn += 1
            self._after_gap = True
        number = _number(path) if self._path.is_dir() else 1
        self._after_gap |= self._number > 0 and number != self._number + 1
        try:
            file = path.open("rb")
        except FileNotFoundError:  # the ring has moved on
            self._after_gap, self._number = True, number
            return True
        magic = file.read(len(MAGIC))
        if len(magic) < len(MAGIC) and self._path.is_dir() and segments(self._path)[-1] == path:
            file.close()
            return False
        self.close()
        self._number = number
        if magic != MAGIC:
            file.close()
            self.damaged += 1
            self._after_gap = True
            return True
        self._file, self._decoder = file, FrameDecoder()
        self.bytes_read += len(MAGIC)
        return True


def segments(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit()), key=_number)


def _number(path: Path) -> int:
    return int(path.stem)


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidRequest(f"{path} is no decision log", field="log", value=path)
