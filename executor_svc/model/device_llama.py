"""The forward pass on a device: weights and activations in one float type, norms and rotation in float32.

Unlike on the CPU (llama.py), rows are not padded for their bits' sake, and nothing is asked of the host between the
first operation and the last: a pass over fixed buffers can be captured as a CUDA graph. Residuals are added by the
products themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, silu

from executor_svc.attention import Planned
from executor_svc.attention_device import DeviceAttention
from executor_svc.model.llama import rotary_tables
from executor_svc.model.weights import EMBEDDING, FINAL_NORM, Weights


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One decoder layer, on the device. Products that add to the residual are held transposed, `[inputs, outputs]`."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class DeviceLlama:
    """The network over one attention backend. One step at a time."""

    def __init__(self, weights: Weights, backend: DeviceAttention, dtype: torch.dtype, max_tokens: int) -> None:
        """`max_tokens` of a context: so far the rotary tables reach."""
        self.config = config = weights.config
        self.backend = backend
        self.dtype = dtype
        self.device = backend.device

        self.embedding = self._put(weights.tensors[EMBEDDING])
        self.layers = [self._layer(weights, layer) for layer in range(config.layers)]
        self.final_norm = self._put(weights.tensors[FINAL_NORM])
        self.head = self.embedding if config.tied else self._put(weights.head)
        cosines, sines = rotary_tables(config.rope_base, config.rope_divisors, max_tokens)
        self.cosines = torch.cat((cosines, cosines), dim=1).to(self.device)
        self.sines = torch.cat((-sines, sines), dim=1).to(self.device)

    @property
    def weight_bytes(self) -> int:
        """Of all weights that a step reads, the embedding left out where it is not the head."""
        parts = [self.head, *(getattr(layer, name) for layer in self.layers for name in DeviceLayer.__slots__)]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, planned: Planned, sampled: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits float32 `[S, vocabulary]` of the tokens int64 `sampled` [S]; None: of every token.

        `token_ids` and `positions` are int [T], on the device.
        """
        config, tokens = self.config, len(token_ids)
        x = self.embedding[token_ids]
        cosines, sines = self.cosines[positions][:, None], self.sines[positions][:, None]
        rotated = config.heads + config.kv_heads
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, (config.hidden,), layer.attention_norm, config.norm_epsilon)
            heads = linear(normed, layer.qkv, layer.qkv_bias).view(tokens, -1, config.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(heads, layer.q_norm, layer.k_norm)
            rotate(heads[:, :rotated], cosines, sines)
            q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
            attended = torch.empty((tokens, config.heads, config.head_size), dtype=self.dtype, device=self.device)
            self.backend.write_kv(planned, index, k, v)
            self.backend.attend(planned, index, q, attended)
            add_product(x, attended.view(tokens, -1), layer.output, layer.output_bias)
            normed = rms_norm(x, (config.hidden,), layer.ffn_norm, config.norm_epsilon)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
            add_product(x, silu(gate).mul_(up), layer.down, layer.down_bias)
        if sampled is not None:
            x = x[sampled]
        normed = rms_norm(x, (config.hidden,), self.final_norm, config.norm_epsilon)
        return linear(normed, self.head).float()

    def _norm_heads(self, heads: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Normalises each query and key head by itself, in place."""
        config = self.config
        for first, last, weight in (
            (0, config.heads, q_norm),
            (config.heads, config.heads + config.kv_heads, k_norm),
        ):
            part = heads[:, first:last]
            part.copy_(rms_norm(part, (config.head_size,), weight, config.norm_epsilon))

    def _layer(self, weights: Weights, layer: int) -> DeviceLayer:
        def joined(*parts: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The parts' rows below each other, and their biases, zero where a part has none."""
            matrices = [self._put(weights.layer(layer, f"{part}.weight")) for part in parts]
            biases = [weights.layer_or_none(layer, f"{part}.bias") for part in parts]
            if all(bias is None for bias in biases):
                return torch.cat(matrices), None
            filled = [
                self._put(bias) if bias is not None else matrix.new_zeros(len(matrix))
                for bias, matrix in zip(biases, matrices, strict=True)
            ]
            return torch.cat(matrices), torch.cat(filled)

        def norm(part: str) -> torch.Tensor | None:
            found = weights.layer_or_none(layer, f"{part}.weight")
            return self._put(found) if found is not None else None

        qkv, qkv_bias = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        output, output_bias = joined("self_attn.o_proj")
        gate_up, gate_up_bias = joined("mlp.gate_proj", "mlp.up_proj")
        down, down_bias = joined("mlp.down_proj")
        return DeviceLayer(
            attention_norm=self._put(weights.layer(layer, "input_layernorm.weight")),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=norm("self_attn.q_norm"),
            k_norm=norm("self_attn.k_norm"),
            output=output.t(),
            output_bias=output_bias,
            ffn_norm=self._put(weights.layer(layer, "post_attention_layernorm.weight")),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down.t(),
            down_bias=down_bias,
        )

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotates `[T, heads, size]` in place, two halves a head. Tables are float32 `[T, 1, size]`, each half repeated,
    the first half of the sines negative."""
    half = heads.shape[2] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.copy_((heads * cosines).addcmul_(swapped, sines))


def add_product(x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Adds rows times weight `[inputs, outputs]`, and the bias, to x, in place."""
    x.addmm_(rows, weight)
    if bias is not None:
        x.add_(bias)
