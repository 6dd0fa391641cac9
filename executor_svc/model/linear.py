"""Linear layers over packed weights: fp16 weights with fp32 activations and sums, int16 or int8 weights with int16
activations, or plain fp32 as the reference.

A layer takes float32 `[rows, inputs]` and gives float32 `[rows, outputs]`. A row's result is the same bits among all
row counts that are multiples of the number that probe.py finds, and only among those. fp16 has two forms: our own
kernel (native_linear.py), which treats every row alike however many there are, and fbgemm's through torch where that
does not run. Whole numbers have our own kernel only.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from executor_svc.kernels.library import load
from executor_svc.model.huge_pages import HugePages
from executor_svc.model.native_linear import PACKING, Form, NativeLinear
from jitney.errors import InvalidRequest

Arithmetic = Literal[Form, "fp32"]
_WHOLE = ("int8", "int16")
_FP16_ENGINES = ("x86", "fbgemm")


class Linear(Protocol):
    """One layer. x: elements of a row side by side; out too."""

    inputs: int
    outputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x times the weights, plus the bias if there is one, as a new tensor."""

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The same added to `out` [rows, outputs]."""


class FbgemmLinear:
    """Weights rounded to fp16 and packed by torch for fbgemm."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        full = weight.to(torch.float32).contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(full, bias)
        self._apply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        result: torch.Tensor = self._apply(x, self._packed)
        return result

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See Linear."""
        out += self(x)


class Fp32Linear:
    """`torch.nn.functional.linear` over float32 weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = weight.to(torch.float32).contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See Linear."""
        out += self(x)


class Packer:
    """Packs the layers of a model, all in one form. `describe` says what decides the bits of a product."""

    def __init__(self, arithmetic: Arithmetic, native: bool = True, isa: str | None = None) -> None:
        """`native` false: fp16 through torch. Raises InvalidRequest where this machine has no kernels for that."""
        self._arithmetic = arithmetic
        self._fp32 = arithmetic == "fp32"
        self._room = HugePages()
        self._library = load() if native and not self._fp32 else None
        self._isa = self._library.pick(isa) if self._library is not None else ""
        if arithmetic in _WHOLE and self._library is None:
            raise InvalidRequest(
                f"{arithmetic} weights need the native kernels, which do not run here or are off; choose fp16 or fp32",
                field="arithmetic",
                value=arithmetic,
            )
        if not self._fp32 and self._library is None and not has_fbgemm():
            raise InvalidRequest(
                "this machine has no fp16 linear kernels: they need a C compiler, or x86-64 with AVX2; choose fp32",
                field="arithmetic",
                value=arithmetic,
            )

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """One layer of `[outputs, inputs]` and `[outputs]`, of any float type."""
        if bias is not None:
            bias = bias.to(torch.float32).contiguous()
        if self._arithmetic == "fp32":
            return Fp32Linear(weight, bias)
        if self._library is not None:
            return NativeLinear(weight, bias, self._library, self._isa, self._arithmetic, self._room)
        return FbgemmLinear(weight, bias)

    def describe(self) -> str:
        """For the fingerprint."""
        if self._fp32:
            return "linear=fp32-mkl" if torch.backends.mkl.is_available() else "linear=fp32-blas"
        if self._library is not None:
            return f"linear={self._arithmetic}-{self._library.describe(self._isa)} packing={PACKING}"
        return "linear=fp16-fbgemm"


def best_arithmetic(native: bool = True) -> Arithmetic:
    """The fastest whose results are as good as those of half precision."""
    return "int16" if native and load() is not None else "fp16"


def has_fbgemm() -> bool:
    """Whether torch brings fp16 packed linear layers for this machine."""
    return torch.backends.quantized.engine in _FP16_ENGINES and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def pad_rows(rows: int, multiple: int) -> int:
    """The next multiple."""
    return -(-rows // multiple) * multiple
