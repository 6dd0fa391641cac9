"""Streams that copy beside the compute stream, one a direction: CUDA's, or threads of this machine that play them.

Whoever starts a copy gets the event of its end; nothing is to touch either side before that, and nothing here says so
again. Memory of the CPU tier is registered with CUDA, so that copies run beside the host.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from executor_svc.attention import Event
from executor_svc.copies import SlotFiles
from executor_svc.copies_guard import InUse

log = structlog.get_logger()
Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target, uint8 `[n, block_bytes]`, one of them on the device."""


class CopyStreams(Protocol):
    """One stream to the device, one from it; what is started on one ends in order."""

    def register(self, files: SlotFiles) -> None:
        """Makes copies from and to these segments fast, for as long as they live. Takes a while."""

    def start(self, pairs: Sequence[Pair], inward: bool) -> Event:
        """Queues copies; the event of their end. `inward`: to the device."""

    def close(self) -> None:
        """Ends what was queued."""


class CudaStreams:
    """CUDA's copy engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {inward: torch.cuda.Stream(device) for inward in (False, True)}

    def register(self, files: SlotFiles) -> None:
        """See CopyStreams. Where CUDA refuses, one line says so and copies are slower."""
        runtime = torch.cuda.cudart()
        for address, size in files.memory():
            status = int(runtime.cudaHostRegister(address, size, 0))
            if status != 0:
                log.warning("CUDA does not register the CPU tier's memory: copies are slower", status=status)
                return
            weakref.finalize(files, runtime.cudaHostUnregister, address).atexit = False

    def start(self, pairs: Sequence[Pair], inward: bool) -> Event:
        """See CopyStreams."""
        stream = self._streams[inward]
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            end = torch.cuda.Event(blocking=True)
            end.record(stream)
        return CudaEvent(end)

    def close(self) -> None:
        """See CopyStreams."""
        for stream in self._streams.values():
            stream.synchronize()


class CudaEvent:
    """See Event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """See Event."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Event. Other threads of Python run meanwhile."""
        self._event.synchronize()


class EmulatedStreams:
    """Each stream is a thread. A copy begins late, and ends late, in two pieces: whoever counts on less than its event
    finds bytes that are not there."""

    def __init__(self, pool: torch.Tensor, in_use: InUse, delay_s: float = 0.0) -> None:
        """`pool` is the device's, `in_use` watches its blocks; `delay_s` before each half of what is started at a
        time."""
        self._pool_address, self._block_bytes = pool.data_ptr(), pool[0].nbytes
        self._in_use = in_use
        self._delay_s = delay_s
        self._queues: dict[bool, queue.SimpleQueue[_Started | None]] = {
            inward: queue.SimpleQueue() for inward in (False, True)
        }
        self._threads = [
            threading.Thread(target=self._work, args=(inward,), name="copy-stream", daemon=True)
            for inward in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def register(self, files: SlotFiles) -> None:
        """See CopyStreams: nothing is to be done."""

    def start(self, pairs: Sequence[Pair], inward: bool) -> Event:
        """See CopyStreams. BlockInFlight: what they touch is in use."""
        blocks = [block for pair in pairs for block in self._blocks_of(pair[inward])]
        self._in_use.begin("a copy", *(((), blocks) if inward else (blocks, ())))
        started = _Started(pairs, blocks, threading.Event())
        self._queues[inward].put(started)
        return EmulatedEvent(started.end)

    def close(self) -> None:
        """See CopyStreams."""
        for each in self._queues.values():
            each.put(None)
        for thread in self._threads:
            thread.join()

    def _blocks_of(self, memory: torch.Tensor) -> range:
        first = (memory.data_ptr() - self._pool_address) // self._block_bytes
        return range(first, first + len(memory))

    def _work(self, inward: bool) -> None:
        while (started := self._queues[inward].get()) is not None:
            for half in (0, 1):
                time.sleep(self._delay_s)
                for source, target in started.pairs:
                    middle = source.shape[-1] // 2
                    part = slice(middle, None) if half else slice(0, middle)
                    target[..., part].copy_(source[..., part])
            self._in_use.end(*(((), started.blocks) if inward else (started.blocks, ())))
            started.end.set()


@dataclass(frozen=True, slots=True)
class _Started:
    pairs: Sequence[Pair]
    blocks: Sequence[int]
    end: threading.Event


class EmulatedEvent:
    """See Event."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """See Event."""
        return self._event.is_set()

    def wait(self) -> None:
        """See Event."""
        self._event.wait()
