"""Which copies a pool needs: by the processor where it lies in memory, on streams where it lies on a device."""

from __future__ import annotations

from executor_svc.attention import AttentionBackend
from executor_svc.attention_device import DeviceAttention
from executor_svc.copies import MemoryCopies
from executor_svc.copies_device import DeviceCopies
from executor_svc.copies_streams import CopyStreams, CudaStreams, EmulatedStreams
from executor_svc.ports import Clock


def copies_for(backend: AttentionBackend, clock: Clock, bytes_per_s: int) -> MemoryCopies | DeviceCopies:
    """Copies of the backend's pool; `bytes_per_s` 0: as fast as it goes."""
    if not isinstance(backend, DeviceAttention):
        return MemoryCopies(backend.pool, clock, bytes_per_s=bytes_per_s)
    streams: CopyStreams
    if backend.in_use is not None:
        streams = EmulatedStreams(backend.pool, backend.in_use)
    else:
        streams = CudaStreams(backend.device)
    return DeviceCopies(backend.pool, clock, streams, bytes_per_s=bytes_per_s)
