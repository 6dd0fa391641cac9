"""The forward pass: tokens of a step in, logits of the rows that sample out.

Everything but attention treats tokens one by one, so a step is one matrix of rows whatever requests they belong to.
Where all parts are native the layers run in one call (native_layers.py); otherwise in a loop here, whose row count is
padded to the multiple at which no row feels the others (probe.py); the rows of padding hold whatever an earlier step
left there. In the last layer, what follows attention runs only for rows that sample.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch

from executor_svc.attention import AttentionBackend, Planned
from executor_svc.kernels.elementwise import Elementwise
from executor_svc.model.linear import Linear, Packer, pad_rows
from executor_svc.model.native_layers import NativeLayers, fits
from executor_svc.model.weights import EMBEDDING, FINAL_NORM, Weights
from executor_svc.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms are float32 `[hidden]`, those of query and key heads `[head_size]`."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class _Buffers:
    """Activations of one step, for `capacity` rows; zeroed once, so that padding is never anything but finite."""

    def __init__(self, capacity: int, hidden: int, attention: int, ffn: int) -> None:
        self.capacity = capacity
        self.x = torch.zeros(capacity, hidden)
        self.normed = torch.zeros(capacity, hidden)
        self.attended = torch.zeros(capacity, attention)
        self.activated = torch.zeros(capacity, ffn)


class Llama:
    """The packed network over one attention backend. One step at a time."""

    def __init__(
        self,
        weights: Weights,
        packer: Packer,
        backend: AttentionBackend,
        elementwise: Elementwise,
        row_multiple: int = 1,
    ) -> None:
        config = weights.config
        self.config = config
        self.backend = backend
        self.elementwise = elementwise
        self.row_multiple = row_multiple
        self.embedding = weights.tensors[EMBEDDING]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing runs on one core a layer
            self.layers = list(pool.map(lambda layer: pack_layer(weights, layer, packer), range(config.layers)))
        self.final_norm = _float(weights.tensors[FINAL_NORM])
        self.head = packer.pack(weights.head)
        positions = min(config.context_tokens, backend.shape.blocks * backend.shape.block_tokens)
        self.cosines, self.sines = rotary_tables(config.rope_base, config.rope_divisors, positions)
        self.begun = Event()  # set where the arithmetic of a step begins, which needs the interpreter little
        self._buffers = self._new_buffers(64)
        self.native = NativeLayers(self) if fits(self) else None

    def pad_to(self, row_multiple: int) -> None:
        """Pads the rows of every product to this multiple from now on."""
        self.row_multiple = row_multiple
        self._buffers = self._new_buffers(64)
        self.native = NativeLayers(self) if fits(self) else None

    def with_parts(self, backend: AttentionBackend, elementwise: Elementwise) -> Llama:
        """The same network and packed weights with another pool and other row-wise operations."""
        other = copy(self)
        other.backend, other.elementwise = backend, elementwise
        other.native = NativeLayers(other) if fits(other) else None
        return other

    def shapes(self) -> list[tuple[Linear, bool]]:
        """One layer of each shape that the network multiplies with, and whether it sees sampled rows only."""
        first = self.layers[0]
        body = {(item.inputs, item.outputs): item for item in (first.qkv, first.output, first.gate_up, first.down)}
        return [(item, False) for item in body.values()] + [(self.head, True)]

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits float32 `[S, vocabulary]` of the plan's sampling rows, or None if no row samples."""
        tokens = plan.tokens
        if tokens == 0:
            return None
        padded = pad_rows(tokens, self.row_multiple)
        if padded > self._buffers.capacity:
            self._buffers = self._new_buffers(padded + padded // 2)
        x = self._buffers.x[:padded]
        if padded > tokens:
            x[tokens:] = 0.0
        torch.narrow(x, 0, 0, tokens).copy_(self.embedding.index_select(0, torch.from_numpy(plan.token_ids)))
        planned = self.backend.plan(plan)
        self.begun.set()
        if self.native is not None:
            sampled = plan.query_start[1:][plan.sample_rows].astype(np.int64) - 1
            self.native.run(plan, planned, x, sampled)
            x = x[: len(sampled)]
        else:
            x = self._run_layers(plan, planned, x)
        if len(plan.sample_rows) == 0:
            return None
        normed = self._buffers.normed[: len(x)]
        self.elementwise.rms_norm(x, self.final_norm, self.config.norm_epsilon, normed)
        return self.head(normed)[: len(plan.sample_rows)]

    def _run_layers(self, plan: StepPlan, planned: Planned, x: torch.Tensor) -> torch.Tensor:
        """All layers over x; returns the rows that sample, padded."""
        tokens, config, elementwise = plan.tokens, self.config, self.elementwise
        normed, attended = self._buffers.normed[: len(x)], self._buffers.attended[: len(x)]
        positions = torch.from_numpy(plan.positions)
        out = attended[:tokens].view(tokens, config.heads, config.head_size)
        for index, layer in enumerate(self.layers):
            elementwise.rms_norm(x, layer.attention_norm, config.norm_epsilon, normed)
            heads = layer.qkv(normed)[:tokens].view(tokens, -1, config.head_size)
            q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(q, layer.q_norm)
                self._norm_heads(k, layer.k_norm)
            elementwise.rotary(q, k, self.cosines, self.sines, positions)
            self.backend.write_kv(planned, index, k, v)
            if index == config.layers - 1:
                if len(plan.sample_rows) == 0:
                    return x[:0]
                self.backend.attend(planned, index, q, out)
                x, attended = self._sampling_rows(plan, x, attended)
                normed = normed[: len(x)]
            else:
                self.backend.attend(planned, index, q, out)
            layer.output.add_to(x, attended)
            self._feed_forward(layer, x, normed)
        return x

    def _feed_forward(self, layer: Layer, x: torch.Tensor, normed: torch.Tensor) -> None:
        self.elementwise.rms_norm(x, layer.ffn_norm, self.config.norm_epsilon, normed)
        activated = self._buffers.activated[: len(x)]
        self.elementwise.silu_mul(layer.gate_up(normed), activated)
        layer.down.add_to(x, activated)

    def _norm_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> None:
        """Normalises each head `[T, n, head_size]` by itself, in place."""
        flat = heads.reshape(-1, self.config.head_size)
        self.elementwise.rms_norm(flat, weight, self.config.norm_epsilon, flat)
        heads.copy_(flat.view(heads.shape))

    def _sampling_rows(
        self, plan: StepPlan, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token of each row that samples, padded; both unchanged if that is every token."""
        last = plan.query_start[1:][plan.sample_rows] - 1
        if len(last) == plan.tokens:
            return x, attended
        padding = pad_rows(len(last), self.row_multiple) - len(last)
        index = torch.from_numpy(np.pad(last.astype(np.int64), (0, padding)))
        return x[index], attended[index]

    def _new_buffers(self, capacity: int) -> _Buffers:
        rows = pad_rows(capacity, self.row_multiple)
        return _Buffers(rows, self.config.hidden, self.config.heads * self.config.head_size, self.config.ffn)


def pack_layer(weights: Weights, layer: int, packer: Packer) -> Layer:
    """Joins queries, keys and values, and gate and up, and packs them."""

    def joined(*parts: str) -> Linear:
        biases = [weights.layer_or_none(layer, f"{part}.bias") for part in parts]
        matrices = [weights.layer(layer, f"{part}.weight") for part in parts]
        bias = None
        if any(item is not None for item in biases):
            filled = zip(biases, matrices, strict=True)
            bias = torch.cat([_float(b) if b is not None else torch.zeros(w.shape[0]) for b, w in filled])
        return packer.pack(torch.cat(matrices) if len(matrices) > 1 else matrices[0], bias)

    q_norm = weights.layer_or_none(layer, "self_attn.q_norm.weight")
    k_norm = weights.layer_or_none(layer, "self_attn.k_norm.weight")
    return Layer(
        attention_norm=_float(weights.layer(layer, "input_layernorm.weight")),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=_float(q_norm) if q_norm is not None else None,
        k_norm=_float(k_norm) if k_norm is not None else None,
        output=joined("self_attn.o_proj"),
        ffn_norm=_float(weights.layer(layer, "post_attention_layernorm.weight")),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )


def rotary_tables(base: float, divisors: tuple[float, ...], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[positions, head_size / 2]`, in float32 throughout as the models were trained."""
    half = len(divisors)
    frequencies = 1.0 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * (frequencies / torch.tensor(divisors))
    return angles.cos(), angles.sin()


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32).contiguous()
