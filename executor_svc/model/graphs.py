"""Work of fixed shape that is recorded once and replayed: CUDA graphs on a GPU, plain calls elsewhere.

Whatever is recorded reads and writes the same tensors each time. Only the recording is CUDA's; sizes, padding and
buffers are those of device_steps.py on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], None]

ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batches up to the last one are padded to the next of these."""
BEYOND = 64
"""Larger ones to a multiple of this."""
LEAST_WIDTH = 16
"""Blocks of a context in the narrowest table."""


def bucket_of(rows: int) -> int:
    """Rows to which so many are padded."""
    for size in ROW_BUCKETS:
        if rows <= size:
            return size
    return -(-rows // BEYOND) * BEYOND


def buckets_up_to(rows: int) -> list[int]:
    """All sizes that batches of up to so many rows are padded to."""
    return sorted({bucket_of(count) for count in range(1, rows + 1)})


def width_of(blocks: int, growth: int, most: int) -> int:
    """Blocks to which tables of so many are widened: 16 times a power of `growth`, at most `most`."""
    width = LEAST_WIDTH
    while width < blocks:
        width *= growth
    return min(width, most)


class Recorder(Protocol):
    """Records work, so that it can be done again."""

    def record(self, work: Work) -> Work:
        """Does the work at least once; what it returns does it again."""


class PlainCalls:
    """Where there are no graphs: the same work is called again."""

    def record(self, work: Work) -> Work:
        """See Recorder."""
        work()
        return work


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, work: Work) -> Work:
        """See Recorder. Works once outside of a capture first: kernels are loaded and libraries get their memory."""
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Copies run on other threads meanwhile: what they call is no part of the capture, and no fault of it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        replay: Work = graph.replay
        return replay


def recorder_for(device: torch.device) -> Recorder:
    """What records on this device."""
    return CudaGraphs(device) if device.type == "cuda" else PlainCalls()
