"""Linear layers by the kernels of kernels/linear.c, which treat every row alike however many there are.

Half precision: weights rounded to fp16, activations and sums in fp32. Eight and sixteen bits: weights as whole numbers
with a scale for every output and every 64 inputs, activations as int16 with a scale for every 64 of a row by itself;
sums over 64 inputs are exact, so that every instruction set gives the same ones. With sixteen bits a weight may have as
many as the sums have room for, some 14: its error is that of fp16, and processors multiply such pairs twice as fast.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from executor_svc.kernels.library import Library
from executor_svc.model.huge_pages import HugePages

WORTH_THREADS_PRODUCTS = 200_000
GROUP = 64
"""Inputs that share a scale: GROUP in kernels/product.h."""
Form = Literal["fp16", "int8", "int16"]
KINDS: dict[Form, int] = {"fp16": 0, "int8": 1, "int16": 2}
PACKING = 1
"""For the fingerprint: to be counted up when the same weights come to other numbers."""
_LARGEST_HALF = 65504.0
_LARGEST: dict[Form, float] = {"int8": 127.0, "int16": 32767.0}
_SLAB_PANELS = 64
"""Panels that are packed at a time: what that takes besides the result stays small."""
_GROUP_SUM = (2**31 - 1) // 16383 - GROUP
"""What the magnitudes of an int16 group may add up to before they are rounded: with activations of at most 16,383 the
sums fit into 32 bits."""
_LARGEST_SCALE = 32768.0
_SMALLEST_SCALE = 2.0**-14
_SMALLEST_UNIT = 2.0**-126
"""What float32 still holds in full: a smaller one would come to 0, and scales in units of it to infinity."""
_ROUNDED_UP = 1.0 + 2.0**-11
"""A scale in half precision is then no smaller than what it is made of."""


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
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        library: Library,
        isa: str,
        form: Form = "fp16",
        room: HugePages | None = None,
    ) -> None:
        """`room`: where the packed weights go, beside those of other layers."""
        room = room or HugePages(0)
        self.isa = isa
        self.outputs, self.inputs = weight.shape
        self.panel = int(library.kernel("linear_panel", isa)())
        padded = torch.nn.functional.pad(weight.to(torch.float32), (0, 0, 0, -self.outputs % self.panel))
        unit = 1.0
        if form == "fp16":
            self._packed = _pack_half(padded, self.panel, room)
        else:
            self._packed, unit = _pack_whole(padded, self.panel, form, room)
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


def _pack_half(weight: torch.Tensor, panel: int, room: HugePages) -> torch.Tensor:
    """`[panel][input][output in panel]` of fp16; what is beyond its range becomes its largest number."""
    outputs, inputs = weight.shape
    packed = room.take(2 * outputs * inputs).view(torch.float16).view(-1, inputs, panel)
    packed.copy_(weight.clamp(-_LARGEST_HALF, _LARGEST_HALF).view(-1, panel, inputs).transpose(1, 2))
    return packed


def groups_of(inputs: int) -> int:
    """Groups of that many inputs."""
    return -(-inputs // GROUP)


def _pack_whole(weight: torch.Tensor, panel: int, form: Form, room: HugePages) -> tuple[torch.Tensor, float]:
    """uint8 `[panel][group]` of `[pair of inputs][output in panel][2]` and scales `[output in panel]`; their unit."""
    outputs, inputs = weight.shape
    groups, bits = groups_of(inputs), torch.int8 if form == "int8" else torch.int16
    row = GROUP * panel * bits.itemsize + 2 * panel
    packed = room.take(outputs // panel * groups * row).view(-1, groups, row)
    slabs = weight.split(_SLAB_PANELS * panel)
    largest = max(float(_steps(_grouped(slab), form).nan_to_num().max()) for slab in slabs)
    unit = max(largest / _LARGEST_SCALE, _SMALLEST_UNIT)
    for part, into in zip(slabs, packed.split(_SLAB_PANELS), strict=True):
        slab = _grouped(part)
        scales = (_steps(slab, form) / unit * _ROUNDED_UP).clamp(min=_SMALLEST_SCALE).half()
        whole = (slab / (scales.float() * unit).unsqueeze(2)).nan_to_num().round()
        whole = whole.clamp(-_LARGEST[form], _LARGEST[form])
        pairs = whole.to(bits).view(-1, panel, groups, GROUP // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
        into[:, :, : -2 * panel] = pairs.view(-1, groups, GROUP * panel).view(torch.uint8)
        into[:, :, -2 * panel :] = scales.view(-1, panel, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return packed, unit


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """`[outputs, groups, GROUP]`, within the range of half precision."""
    bounded = weight.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return torch.nn.functional.pad(bounded, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)


def _steps(grouped: torch.Tensor, form: Form) -> torch.Tensor:
    """`[outputs, groups]`: what 1 has to stand for, at least, so that a group's numbers fit."""
    steps = grouped.abs().amax(dim=2) / _LARGEST[form]
    return torch.maximum(steps, grouped.abs().sum(dim=2) / _GROUP_SUM) if form == "int16" else steps
