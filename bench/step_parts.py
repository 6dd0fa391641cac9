"""Where the time of a forward pass goes: the model's parts, each behind a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch

from executor_svc.attention import AttentionBackend
from executor_svc.kernels.elementwise import Elementwise
from executor_svc.model.linear import Linear
from executor_svc.model.llama import Layer, Llama
from executor_svc.model.native_layers import NativeLayers
from executor_svc.sampling import select_sampler
from executor_svc.step_plan import StepPlan

PARTS = ("gemm", "attention", "norms", "head", "sampling", "host")
"""Layers' products; attention; norms, rotary and the writing of KV, the activation where it is by itself; the rest is
Python. In a model that is not native throughout the writing of KV counts as attention."""
_ATTENTION = ("attend", "write_kv")
_NORMS = ("rms_norm", "rotary", "silu_mul")
_LAYERS = ("qkv", "output", "gate_up", "down")


class Stopwatch:
    """Seconds of each part since they were last taken away."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, its time added to `part`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = perf_counter()
            result = work(*arguments, **named)
            self.seconds[part] += perf_counter() - started
            return result

        return timed


class _Timed:
    """An object some of whose methods have a clock; everything else is its own."""

    def __init__(self, whole: object, watch: Stopwatch, part: str, names: tuple[str, ...]) -> None:
        self._whole = whole
        for name in names:
            setattr(self, name, watch.around(part, getattr(whole, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _TimedLinear:
    """A layer with a clock."""

    def __init__(self, layer: Linear, watch: Stopwatch, part: str) -> None:
        self.inputs, self.outputs = layer.inputs, layer.outputs
        self._call = watch.around(part, layer)
        self.add_to = watch.around(part, layer.add_to)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return cast(torch.Tensor, self._call(x))


class TimedModel:
    """The same network over the same weights and pool, with a clock at each part of it. Where all layers are one native
    call the clocks are in there."""

    def __init__(self, plain: Llama) -> None:
        self._watch = watch = Stopwatch()
        self._sampler = select_sampler(plain.elementwise)
        if plain.native is not None:
            self._llama = plain.with_parts(plain.backend, plain.elementwise)
            self._native: NativeLayers | None = self._llama.native
        else:
            backend = _Timed(plain.backend, watch, "attention", _ATTENTION)
            elementwise = _Timed(plain.elementwise, watch, "norms", _NORMS)
            self._llama = plain.with_parts(cast(AttentionBackend, backend), cast(Elementwise, elementwise))
            self._llama.layers = [replace(layer, **self._timed_layers(layer)) for layer in plain.layers]
            self._native = None
        self._llama.head = _TimedLinear(plain.head, watch, "head")

    def _timed_layers(self, layer: Layer) -> dict[str, Any]:
        return {name: _TimedLinear(getattr(layer, name), self._watch, "gemm") for name in _LAYERS}

    def run(self, plan: StepPlan) -> dict[str, float]:
        """Seconds of each of PARTS in one step."""
        self._watch.seconds.clear()
        times = self._native.time_parts() if self._native is not None else ()
        started = perf_counter()
        logits = self._llama.forward(plan)
        sampling = perf_counter()
        self._sampler.draw(plan.step, logits, plan.sampling)
        ended = perf_counter()
        found = dict(self._watch.seconds) | dict(
            zip(("gemm", "attention", "norms"), [1e-9 * t for t in times], strict=False)
        )
        return {**found, "sampling": ended - sampling, "host": sampling - started - sum(found.values())}
