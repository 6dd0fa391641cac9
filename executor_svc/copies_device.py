"""CopyPort of a pool on a GPU: copies on streams of their own, beside the steps, towards and from the CPU tier.

Each direction has a stream and a thread, so that loads do not wait for stores. A thread keeps a few pieces on its
stream at a time: what goes before the rest waits for those at most. A job ends once the events of all its pieces have
come; until then nothing of it is told, so that nobody uses its blocks or slots while a copy may still touch them.

The order against compute is the loop's: a store is ordered once the step that wrote its blocks has ended, a load
starts once the step that may still read its targets has (copying.py), and a row runs once its load has. Stores are
hashed on the host when they have arrived. Loads are not: the CPU tier's memory is believed, what came from a disk was
hashed when it was read; a slot that was given away meanwhile is found by its generation.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from executor_svc.attention import Event
from executor_svc.copies import DEMOTION, LOAD, URGENT, Meter, SlotFiles, moved
from executor_svc.copies_streams import CopyStreams, Pair
from executor_svc.kernels.copying import block_copier
from executor_svc.ports import Clock, CopyRates, LoadCopied, Moved, StoreCopied
from jitney.block_ops import Block, Segment, block_id
from jitney.ticket_ops import Slot, slot_id

PIECE_BYTES = 8 << 20
"""Started at a time, but a block at least."""
PIECES_IN_FLIGHT = 3
"""On one stream: enough that it never runs dry, few enough that what is urgent need not wait long."""
HASH_THREADS = 8
"""One hashes some 10 GB/s, a piece at a time; a stream brings 50."""


class _Files:
    """The segments of one CPU tier; jobs wait until they are registered."""

    def __init__(self, segments: Sequence[Segment], block_bytes: int) -> None:
        self.slots = SlotFiles(segments, block_bytes)
        self.registered = threading.Event()


@dataclass(slots=True, eq=False)
class _Job:
    """Copies between device blocks and slots."""

    rank: int
    number: int
    files: _Files
    blocks: list[int]
    slots: Sequence[Slot]
    started: int = 0  # blocks whose copy was started
    ended: int = 0  # blocks whose copy has ended and was right
    flying: int = 0  # pieces on the stream, or being hashed
    bad: bool = False
    checksums: dict[int, list[int]] = field(default_factory=dict)  # by the first block of a piece

    def __lt__(self, other: _Job) -> bool:
        return (self.rank, self.number) < (other.rank, other.number)

    @property
    def to_start(self) -> bool:
        """Whether there is more to start."""
        return not self.bad and self.started < len(self.blocks)

    @property
    def left(self) -> int:
        """Blocks that have not arrived."""
        return 0 if self.bad else len(self.blocks) - self.ended


@dataclass(frozen=True, slots=True)
class _Piece:
    job: _Job
    first: int
    count: int
    event: Event


class DeviceCopies:
    """CopyPort. `pool` is the device's: `[blocks, ...]`, contiguous. The end of a job rings the clock's bell."""

    def __init__(self, pool: torch.Tensor, clock: Clock, streams: CopyStreams, *, bytes_per_s: int = 0) -> None:
        """`bytes_per_s` each way; 0: as fast as it goes."""
        self._pool = pool.view(len(pool), -1).view(torch.uint8)
        self.block_bytes = self._pool.shape[1]
        self._clock = clock
        self._streams = streams
        self._hashing = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash")
        self._hasher = block_copier()
        self._done: deque[StoreCopied | LoadCopied] = deque()
        self._failure: BaseException | None = None
        self._files = _Files((), self.block_bytes)
        self._lanes = {inward: _Lane(self, inward, bytes_per_s) for inward in (False, True)}

    def attach(self, segments: Sequence[Segment]) -> None:
        """See CopyPort. They are registered on a thread of their own, while jobs wait."""
        files = self._files = _Files(segments, self.block_bytes)

        def register() -> None:
            try:
                self._streams.register(files.slots)
            finally:
                files.registered.set()

        threading.Thread(target=register, name="register", daemon=True).start()

    def store(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], *, urgent: bool) -> None:
        """See CopyPort."""
        ids = [block_id(block) for block in blocks]
        self._lanes[False].put(_Job(URGENT if urgent else DEMOTION, job, self._files, ids, slots))

    def hurry(self, job: int) -> None:
        """See CopyPort."""
        self._lanes[False].hurry(job)

    def load(self, job: int, blocks: Sequence[Block], slots: Sequence[Slot], checksums: Sequence[int]) -> None:
        """See CopyPort. `checksums` are not looked at."""
        self._lanes[True].put(_Job(LOAD, job, self._files, [block_id(block) for block in blocks], slots))

    def poll(self) -> StoreCopied | LoadCopied | None:
        """See CopyPort. Raises what a copy raised: nobody can tell what is in its blocks."""
        if self._failure is not None:
            raise self._failure
        return self._done.popleft() if self._done else None

    def rates(self) -> CopyRates:
        """See CopyPort. Loads do not wait for stores, nor stores for loads."""
        outward, inward = self._lanes[False], self._lanes[True]
        out = outward.meter.bytes_per_s or inward.meter.bytes_per_s
        into = inward.meter.bytes_per_s or out
        if not out:
            return CopyRates()
        size = self.block_bytes * 1e6
        return CopyRates(
            int(out), int(into), int(inward.left(LOAD) * size / into), int(outward.left(URGENT) * size / out)
        )

    def moved(self) -> Moved:
        """See CopyPort."""
        return moved(self._lanes[False].meter, self._lanes[True].meter)

    def close(self) -> None:
        """Ends the threads when what is on the streams has arrived; jobs that have not begun are dropped."""
        for lane in self._lanes.values():
            lane.close()
        self._streams.close()
        self._hashing.shutdown()

    def start(self, job: _Job, first: int, count: int, inward: bool) -> Event:
        """Puts some of a job's blocks on the stream; neighbours on both sides go as one copy."""
        job.files.registered.wait()
        pairs: list[Pair] = []
        at = first
        while at < first + count:
            run = 1
            while at + run < first + count and self._adjacent(job, at + run):
                run += 1
            array, row = job.files.slots.rows.array_of(slot_id(job.slots[at]))
            slots = torch.from_numpy(array[row : row + run, : self.block_bytes])
            blocks = self._pool[job.blocks[at] : job.blocks[at] + run]
            pairs.append((slots, blocks) if inward else (blocks, slots))
            at += run
        return self._streams.start(pairs, inward)

    def _adjacent(self, job: _Job, at: int) -> bool:
        """Whether a block and its slot lie right behind the ones before, without a gap."""
        before, here = slot_id(job.slots[at - 1]), slot_id(job.slots[at])
        if job.blocks[at] != job.blocks[at - 1] + 1 or here != before + 1:
            return False
        array, row = job.files.slots.rows.array_of(here)
        return row > 0 and array.shape[1] == self.block_bytes

    def loaded(self, piece: _Piece) -> None:
        """A piece is on the device. What comes behind a slot that was given away meanwhile is not counted."""
        job = piece.job
        for slot in job.slots[piece.first : piece.first + piece.count]:
            job.bad = job.bad or not job.files.slots.current(slot)
            job.ended += not job.bad

    def hash(self, piece: _Piece, then: Callable[[_Piece], None]) -> None:
        """A piece is in its slots: hashes it on another thread, while the next ones arrive."""

        def work() -> None:
            try:
                job = piece.job
                slots = list(map(slot_id, job.slots[piece.first : piece.first + piece.count]))
                job.checksums[piece.first] = self._hasher.checksums(job.files.slots.rows, slots)
                then(piece)
            except BaseException as failure:  # whatever it is, the loop must hear of it
                self.fail(failure)

        self._hashing.submit(work)

    def fail(self, failure: BaseException) -> None:
        """No more copies are made."""
        self._failure = failure
        self._clock.ring()

    def tell(self, job: _Job) -> None:
        """The job is over."""
        if job.rank == LOAD:
            self._done.append(LoadCopied(job.number, len(job.blocks), job.ended))
        else:
            self._done.append(
                StoreCopied(job.number, [each for _, part in sorted(job.checksums.items()) for each in part])
            )
        self._clock.ring()


class _Lane:
    """One direction: jobs, the first first, a few pieces at a time."""

    def __init__(self, copies: DeviceCopies, inward: bool, bytes_per_s: int) -> None:
        self.meter = Meter()
        self._copies, self._inward, self._limit = copies, inward, bytes_per_s
        self._block_bytes = copies.block_bytes
        self._piece = max(1, PIECE_BYTES // self._block_bytes)
        self._waiting: list[_Job] = []  # a heap: those of which there is more to start
        self._flying: deque[_Piece] = deque()
        self._more = threading.Condition()
        self._closed = False
        self._arrived_at = 0.0
        name = "copies-in" if inward else "copies-out"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        """Another job."""
        with self._more:
            heapq.heappush(self._waiting, job)
            self._more.notify()

    def hurry(self, number: int) -> None:
        """That job is urgent from here on."""
        with self._more:
            for job in self._waiting:
                if job.number == number and job.rank == DEMOTION:
                    job.rank = URGENT
            heapq.heapify(self._waiting)

    def left(self, rank: int) -> int:
        """Blocks of that rank that have not arrived."""
        with self._more:
            jobs = {id(job): job for job in (*self._waiting, *(piece.job for piece in self._flying))}
        return sum(job.left for job in jobs.values() if job.rank == rank)

    def close(self) -> None:
        """Ends the thread when nothing flies."""
        with self._more:
            self._closed = True
            self._more.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._work_on()
        except BaseException as failure:  # whatever it is, the loop must hear of it
            self._copies.fail(failure)

    def _work_on(self) -> None:
        while True:
            with self._more:
                while not (self._waiting or self._flying or self._closed):
                    self._more.wait()
                if self._closed and not self._flying:
                    return
                job = None
                if self._waiting and not self._closed and len(self._flying) < PIECES_IN_FLIGHT:
                    job = heapq.heappop(self._waiting)
            if job is not None:
                self._start(job)
            else:
                self._land()
            del job  # with its segments, which may be those of a cache that is gone

    def _start(self, job: _Job) -> None:
        first, count = job.started, min(self._piece, len(job.blocks) - job.started)
        if not self._flying:
            self._arrived_at = time.perf_counter()
        event = self._copies.start(job, first, count, self._inward)
        with self._more:
            job.started += count
            job.flying += 1
            self._flying.append(_Piece(job, first, count, event))
            if job.to_start:
                heapq.heappush(self._waiting, job)

    def _land(self) -> None:
        """Waits for the oldest piece."""
        piece = self._flying[0]
        piece.event.wait()
        size, now = piece.count * self._block_bytes, time.perf_counter()
        if self._limit:
            time.sleep(max(0.0, size / self._limit - (now - self._arrived_at)))
            now = time.perf_counter()
        self.meter.add(size, now - self._arrived_at)
        self._arrived_at = now
        with self._more:
            self._flying.popleft()
        if self._inward:
            self._copies.loaded(piece)
            self._settle(piece)
        else:
            self._copies.hash(piece, self._settle)

    def _settle(self, piece: _Piece) -> None:
        """Nothing more is to be done for a piece."""
        job = piece.job
        with self._more:
            if not self._inward:
                job.ended += piece.count
            job.flying -= 1
            if job.bad and job in self._waiting:
                self._waiting.remove(job)
                heapq.heapify(self._waiting)
            over = not job.flying and not job.to_start
        if over:
            self._copies.tell(job)
