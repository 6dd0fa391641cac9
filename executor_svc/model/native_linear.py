"""Linear layers by the kernels of kernels/linear.c, which treat every row alike however many there are.

Half precision: weights rounded to fp16, activations and sums in fp32. Eight and sixteen bits: weights as whole numbers
with a scale for every output and every 64 inputs, activations as int16 with a scale for every 64 of a row by itself;
sums over 64 inputs are exact, so that every instruction set gives the same ones. With sixteen bits a weight may have as
many as the sums have room for, some 14: its error is that of fp16, and processors multiply such pairs twice as fast.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Literal

import torch

from executor_svc.kernels.library import Library

WORTH_THREADS_PRODUCTS = 200_000
GROUP = 64
"""Inputs that share a scale: GROUP in kernels/product.h."""
Form = Literal["fp16", "int8", "int16"]
KINDS: dict[Form, int] = {"fp16": 0, "int8": 1, "int16": 2}
_LARGEST_HALF = 65504.0
_LARGEST_INT8 = 127.0
_LARGEST_INT16 = 32767.0
_GROUP_SUM = (2**31 - 1) // 16383 - GROUP
"""What the magnitudes of an int16 group may add up to before they are rounded: with activations of at most 16,383 the
sums fit into 32 bits."""
_LARGEST_SCALE = 32768.0
_SMALLEST_SCALE = 2.0**-14
_ROUNDED_UP = 1.0 + 2.0**-11
"""A scale in half precision is then no smaller than what it is made of."""
_HUGE_PAGE = 2 << 20


class Matrix(ctypes.Structure):
    """`Matrix` of kernels/product.h, field by field."""

    _fields_ = (
        *(("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p)),
        *(("inputs", ctypes.c_int64), ("outputs", ctypes.c_int64), ("kind", ctypes.c_int64)),
        ("unit", ctypes.c_float),
    )


class NativeLinear:
    """Weights in panels, see kernels/product.h. `matrix` is what kernels read; it lives as long as the layer."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, library: Library, isa: str, form: Form = "fp16"
    ) -> None:
        self.isa = isa
        self.outputs, self.inputs = weight.shape
        self.panel = int(library.kernel("linear_panel", isa)())
        padded = torch.nn.functional.pad(weight.to(torch.float32), (0, 0, 0, -self.outputs % self.panel))
        unit = 1.0
        if form == "fp16":
            self._packed = _pack_half(padded, self.panel)
        else:
            self._packed, unit = _pack_whole(padded, self.panel, form)
        self._bias = bias
        self._whole = form != "fp16"
        self._kernel = library.kernel("linear", isa)
        self.matrix = Matrix(
            packed=self._packed.data_ptr(),
            bias=bias.data_ptr() if bias is not None else None,
            inputs=self.inputs,
            outputs=self.outputs,
            kind=KINDS[form],
            unit=unit,
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
        quantised = torch.empty(rows, self.inputs + self.inputs % 2, dtype=torch.int16) if self._whole else None
        scale = torch.empty(rows, groups_of(self.inputs)) if self._whole else None
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


def groups_of(inputs: int) -> int:
    """Groups of that many inputs."""
    return -(-inputs // GROUP)


def _pack_whole(weight: torch.Tensor, panel: int, form: Form) -> tuple[torch.Tensor, float]:
    """uint8 `[panel][group]` of `[pair of inputs][output in panel][2]` and scales `[output in panel]`; their unit."""
    outputs, inputs = weight.shape
    bounded = weight.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    grouped = torch.nn.functional.pad(bounded, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    largest, kind = (_LARGEST_INT8, torch.int8) if form == "int8" else (_LARGEST_INT16, torch.int16)
    wanted = grouped.abs().amax(dim=2) / largest
    if form == "int16":
        wanted = torch.maximum(wanted, grouped.abs().sum(dim=2) / _GROUP_SUM)
    unit = float(wanted.nan_to_num().max()) / _LARGEST_SCALE or 1.0
    scales = (wanted / unit * _ROUNDED_UP).clamp(min=_SMALLEST_SCALE).half()
    whole = (grouped / (scales.float() * unit).unsqueeze(2)).nan_to_num().round().clamp(-largest, largest)
    groups, numbers = grouped.shape[1], GROUP * panel * kind.itemsize
    packed = huge_pages(outputs // panel * groups * (numbers + 2 * panel)).view(-1, groups, numbers + 2 * panel)
    pairs = whole.to(kind).view(-1, panel, groups, GROUP // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
    packed[:, :, :numbers] = pairs.view(-1, groups, numbers // kind.itemsize).view(torch.uint8)
    packed[:, :, numbers:] = scales.view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return packed, unit


def huge_pages(size: int) -> torch.Tensor:
    """uint8 `[size]`, in large pages where the kernel has them: weights are read from end to end at every step."""
    room = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    skipped = -whole.data_ptr() % _HUGE_PAGE
    return whole[skipped : skipped + size]
