"""Linear layers over packed weights: fp16 weights with fp32 activations and sums, or plain fp32 as the reference.

A layer takes float32 `[rows, inputs]` and gives a new float32 `[rows, outputs]`. A row's result is the same bits
among all row counts that are multiples of the number that probe.py finds, and only among those.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from jitney.errors import InvalidRequest

Arithmetic = Literal["fp16", "fp32"]
_FP16_ENGINES = ("x86", "fbgemm")


class Linear(Protocol):
    """One layer; call it."""

    inputs: int
    outputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x times the weights, plus the bias if there is one."""


class Fp16Linear:
    """Weights rounded to fp16 and packed for fbgemm; sums in fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        full = weight.to(torch.float32).contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(full, bias)
        self._apply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        result: torch.Tensor = self._apply(x, self._packed)
        return result


class Fp32Linear:
    """`torch.nn.functional.linear` over float32 weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = weight.to(torch.float32).contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


def pack(arithmetic: Arithmetic, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Packs `[outputs, inputs]` of any float type. Raises InvalidRequest where this machine has no such kernels."""
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    if arithmetic == "fp32":
        return Fp32Linear(weight, bias)
    if not has_fp16():
        raise InvalidRequest(
            "this machine has no fp16 linear kernels (they need x86-64 with AVX2); choose fp32",
            field="arithmetic",
            value=arithmetic,
        )
    return Fp16Linear(weight, bias)


def has_fp16() -> bool:
    """Whether torch brings fp16 packed linear layers for this machine."""
    return torch.backends.quantized.engine in _FP16_ENGINES and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def describe(arithmetic: Arithmetic) -> str:
    """What decides the bits of a product, for the fingerprint."""
    if arithmetic == "fp32":
        return "fp32-mkl" if torch.backends.mkl.is_available() else "fp32-blas"
    return "fp16-fbgemm"


def pad_rows(rows: int, multiple: int) -> int:
    """The next multiple."""
    return -(-rows // multiple) * multiple
