"""Linear layers by the kernels of kernels/linear.c, which treat every row alike however many there are.

Two forms. Half precision: weights rounded to fp16, activations and sums in fp32. Eight bits: weights as int8 with a
scale in half precision for every output and every 64 inputs, activations as int16 with a scale for each row by itself;
sums over 64 inputs are exact, so that every instruction set gives the same ones.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

from executor_svc.kernels.library import Library

WORTH_THREADS_PRODUCTS = 200_000
GROUP = 64
"""Inputs that share a scale: GROUP in kernels/product.h."""
HALF, INT8 = 0, 1
_LARGEST_HALF = 65504.0
_LARGEST_INT8 = 127.0
_HUGE_PAGE = 2 << 20


class Matrix(ctypes.Structure):
    """`Matrix` of kernels/product.h, field by field."""

    _fields_ = (
        *(("packed", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p)),
        *(("inputs", ctypes.c_int64), ("outputs", ctypes.c_int64), ("kind", ctypes.c_int64)),
    )


class NativeLinear:
    """Weights in panels, see kernels/product.h. `matrix` is what kernels read; it lives as long as the layer."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, library: Library, isa: str, int8: bool = False
    ) -> None:
        self.isa = isa
        self.outputs, self.inputs = weight.shape
        self.panel = int(library.kernel("linear_panel", isa)())
        padded = torch.nn.functional.pad(weight.to(torch.float32), (0, 0, 0, -self.outputs % self.panel))
        self._scales: torch.Tensor | None = None
        if int8:
            self._packed, self._scales = _pack_int8(padded, self.panel)
        else:
            self._packed = _pack_half(padded, self.panel)
        self._bias = bias
        self._int8 = int8
        self._kernel = library.kernel("linear", isa)
        self.matrix = Matrix(
            packed=self._packed.data_ptr(),
            scales=self._scales.data_ptr() if self._scales is not None else None,
            bias=bias.data_ptr() if bias is not None else None,
            inputs=self.inputs,
            outputs=self.outputs,
            kind=INT8 if int8 else HALF,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        out = torch.empty(x.shape[0], self.outputs)
        self._run(out, x, 0)
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """See Linear."""
        self._run(out, x, 1)

    def _run(self, out: torch.Tensor, x: torch.Tensor, add: int) -> None:
        rows = x.shape[0]
        quantised = torch.empty(rows, self.inputs + self.inputs % 2, dtype=torch.int16) if self._int8 else None
        scale = torch.empty(rows) if self._int8 else None
        self._kernel(
            *(ctypes.byref(self.matrix), x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), rows, add),
            quantised.data_ptr() if quantised is not None else None,
            scale.data_ptr() if scale is not None else None,
            torch.get_num_threads() if rows * self.inputs * self.outputs >= WORTH_THREADS_PRODUCTS else 1,
        )


def _pack_half(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """`[panel][input][output in panel]` of fp16; what is beyond its range becomes its largest number."""
    outputs, inputs = weight.shape
    packed = huge_pages(2 * outputs * inputs).view(torch.float16).view(-1, inputs, panel)
    packed.copy_(weight.clamp(-_LARGEST_HALF, _LARGEST_HALF).view(-1, panel, inputs).transpose(1, 2))
    return packed


def _pack_int8(weight: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[panel][pair of inputs][output in panel][2]` of int8, and scales `[panel][group][output in panel]` of fp16."""
    outputs, inputs = weight.shape
    grouped = torch.nn.functional.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scales = (grouped.abs().amax(dim=2) / _LARGEST_INT8).clamp(max=_LARGEST_HALF).half()
    steps = scales.float().unsqueeze(2)
    whole = torch.where(steps > 0.0, grouped / steps, 0.0).round().clamp(-_LARGEST_INT8, _LARGEST_INT8)
    even = inputs + inputs % 2
    packed = huge_pages(outputs * even).view(torch.int8).view(-1, even // 2, panel, 2)
    packed.copy_(whole.view(outputs, -1)[:, :even].reshape(-1, panel, even // 2, 2).transpose(1, 2))
    return packed, scales.view(-1, panel, scales.shape[1]).transpose(1, 2).contiguous()


def huge_pages(size: int) -> torch.Tensor:
    """uint8 `[size]`, in large pages where the kernel has them: weights are read from end to end at every step."""
    room = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    skipped = -whole.data_ptr() % _HUGE_PAGE
    return whole[skipped : skipped + size]
