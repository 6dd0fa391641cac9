"""All layers of a step in one native call (kernels/layers.c): no Python between two products, one region of threads.

The same operations in the same order as the loop of llama.py with native parts, so the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from executor_svc.attention import Planned
from executor_svc.attention_native import NativeAttention
from executor_svc.kernels.elementwise import NativeElementwise
from executor_svc.model.config import LlamaConfig
from executor_svc.model.linear import Linear
from executor_svc.model.native_linear import WORTH_THREADS_PRODUCTS, Matrix, NativeLinear, groups_of
from executor_svc.step_plan import StepPlan
from jitney.columns import I64

if TYPE_CHECKING:
    from executor_svc.model.llama import Layer, Llama

_CACHE_LINE = 64
_pointer, _i64 = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    """`Layer` of kernels/layers.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("attention_norm", "q_norm", "k_norm", "ffn_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Network(ctypes.Structure):
    """`Network` of kernels/layers.c, field by field."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _i64) for name in ("count", "hidden", "heads", "kv_heads", "head_size", "ffn")),
        *(("cosines", _pointer), ("sines", _pointer), ("epsilon", ctypes.c_float)),
    )


class _Step(ctypes.Structure):
    """`Step` of kernels/layers.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "normed", "wide", "attended", "activated", "quantised", "scale")),
        *(("positions", _pointer), ("slots", _pointer), ("tokens", _i64), ("sampled", _pointer), ("samples", _i64)),
        *(("attention", _pointer), ("layer_bytes", _i64), ("phases", _pointer), ("threads", _i64), ("times", _pointer)),
    )


class NativeLayers:
    """The layers over one pool, one step at a time."""

    def __init__(self, llama: Llama) -> None:
        """Of a network for which `fits` is true."""
        self._config = llama.config
        self._backend = cast(NativeAttention, llama.backend)
        self._kernel = self._backend.library.kernel("layers", self._backend.isa)
        self._keeps = (llama.layers, llama.cosines, llama.sines)
        self._network = _network(llama)
        products = _products(llama.layers[0])
        self._weights = sum(item.inputs * item.outputs for item in products)
        self._most_inputs = max(item.inputs for item in products)
        self._widest = max(item.outputs for item in products)
        phases = llama.config.layers * self._backend.library.kernel("layer_phases", self._backend.isa)()
        self._phases = torch.zeros(phases + _CACHE_LINE, dtype=torch.uint8)
        self._times: I64 | None = None
        self._capacity = 0
        self._make_room(64)

    def run(self, plan: StepPlan, planned: Planned, x: torch.Tensor, sampled: I64) -> None:
        """x `[tokens, hidden]` float32, embeddings; its first rows then are those of the tokens `sampled`."""
        tokens, config = plan.tokens, self._config
        if tokens > self._capacity:
            self._make_room(tokens + tokens // 2)
        job = self._backend.job(planned, config.heads)
        step = self._step
        step.x, step.tokens = x.data_ptr(), tokens
        step.positions, step.slots = plan.positions.ctypes.data, plan.write_slots.ctypes.data
        step.sampled, step.samples = sampled.ctypes.data, len(sampled)
        step.attention = ctypes.addressof(job)
        step.threads = torch.get_num_threads() if tokens * self._weights >= WORTH_THREADS_PRODUCTS else 1
        self._kernel(ctypes.byref(self._network), ctypes.byref(step))

    def time_parts(self) -> I64:
        """Nanoseconds that steps spend from now on: in products, in attention, and in what goes row by row."""
        self._times = np.zeros(3, np.int64)
        self._step.times = self._times.ctypes.data
        return self._times

    def _make_room(self, tokens: int) -> None:
        config = self._config
        floats = {
            "normed": config.hidden,
            "wide": self._widest,
            "attended": config.heads * config.head_size,
            "activated": config.ffn,
            "scale": groups_of(self._most_inputs),
        }
        self._capacity = tokens
        self._buffers = {name: torch.zeros(tokens * width) for name, width in floats.items()}
        self._buffers["quantised"] = torch.zeros(tokens * (self._most_inputs + 1), dtype=torch.int16)
        self._step = _Step(layer_bytes=self._backend.layer_bytes)
        self._step.phases = self._phases.data_ptr() + -self._phases.data_ptr() % _CACHE_LINE
        for name, buffer in self._buffers.items():
            setattr(self._step, name, buffer.data_ptr())
        self._step.times = self._times.ctypes.data if self._times is not None else None


def fits(llama: Llama) -> bool:
    """Whether all parts of the network are native, of one instruction set."""
    backend, elementwise = llama.backend, llama.elementwise
    return (
        isinstance(backend, NativeAttention)
        and isinstance(elementwise, NativeElementwise)
        and elementwise.isa == backend.isa
        and llama.row_multiple == 1
        and all(isinstance(item, NativeLinear) and item.isa == backend.isa for item in _products(llama.layers[0]))
    )


def _products(layer: Layer) -> Sequence[Linear]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _network(llama: Llama) -> _Network:
    config: LlamaConfig = llama.config
    layers = (_Layer * config.layers)()
    for into, layer in zip(layers, llama.layers, strict=True):
        for name in ("attention_norm", "q_norm", "k_norm", "ffn_norm"):
            norm = getattr(layer, name)
            setattr(into, name, norm.data_ptr() if norm is not None else None)
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(into, name, getattr(layer, name).matrix)
    return _Network(
        layers=layers,
        count=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        ffn=config.ffn,
        cosines=llama.cosines.data_ptr(),
        sines=llama.sines.data_ptr(),
        epsilon=config.norm_epsilon,
    )
