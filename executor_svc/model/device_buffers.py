"""Buffers of fixed place for what a step sends to a device: filled on the host, sent in one copy.

A captured graph reads the same addresses whenever it is replayed, so each size of step has buffers of its own. On the
host there are as many copies as steps may be in flight, since one is read until its step has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.step_plan import STEPS_IN_FLIGHT

ALIGNMENT = 16
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
Field = tuple[np.dtype[np.generic], tuple[int, ...]]
HostArrays = dict[str, np.ndarray]


class StaticInputs:
    """Named arrays in one piece of memory. `device`: the tensors, always the same ones."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (dtype, shape) in fields.items():
            places[name] = size, size + dtype.itemsize * prod(shape)
            size = -(-places[name][1] // ALIGNMENT) * ALIGNMENT
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(STEPS_IN_FLIGHT)]
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._turn = 0
        self._arrays: list[HostArrays] = []
        for host in self._hosts:
            room: NDArray[np.uint8] = host.numpy()
            self._arrays.append(
                {name: room[slice(*places[name])].view(dtype).reshape(shape) for name, (dtype, shape) in fields.items()}
            )
        self.device = {
            name: self._target[slice(*places[name])].view(_TORCH_TYPES[dtype]).view(shape)
            for name, (dtype, shape) in fields.items()
        }

    def next(self) -> HostArrays:
        """The host's arrays for the next step, as some earlier step left them."""
        self._turn = (self._turn + 1) % STEPS_IN_FLIGHT
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copies them to the device, behind what the current stream has to do."""
        self._target.copy_(self._hosts[self._turn], non_blocking=True)
