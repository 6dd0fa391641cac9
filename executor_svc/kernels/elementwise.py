"""Row-wise operations of a Llama layer: native where the kernels are, torch otherwise.

Every operation treats each row alike, whatever the other rows are and however many. Both give the same values but
not the same bits; `describe` tells them apart. Tensors are float32 on the CPU; a row may lie in a wider one (any
stride between rows), its elements must be adjacent.
"""

from __future__ import annotations

from typing import Protocol

import torch

from executor_svc.kernels.library import Library, load, threads_for


class Elementwise(Protocol):
    """The operations. T rows; `out` is written whole."""

    def describe(self) -> str:
        """What decides the bits of the results: for the fingerprint."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """out = x / sqrt(mean(x^2) + epsilon) * weight; x and out [T, width], which may be the same."""

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Rotates q [T, heads, size] and k [T, kv_heads, size] in place, two halves a head.

        Tables are contiguous [positions, size / 2]; `positions` int32 [T], inside the tables.
        """

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, width] = silu(gate) * up, with gate_up [T, 2 * width] holding gate, then up."""

    def argmax(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out int64 [T]: the first index of each row's largest element, x [T, width]. NaN is never the largest."""


class NativeElementwise:
    """The kernels of rows.c."""

    def __init__(self, library: Library, isa: str | None = None) -> None:
        self.isa = library.pick(isa)
        self.library = library
        self._rms_norm = library.kernel("rms_norm", self.isa)
        self._rotary = library.kernel("rotary", self.isa)
        self._silu_mul = library.kernel("silu_mul", self.isa)
        self._argmax = library.kernel("argmax", self.isa)

    def describe(self) -> str:
        """See Elementwise."""
        return self.library.describe(self.isa)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """See Elementwise."""
        rows, width = x.shape
        self._rms_norm(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), epsilon, out.data_ptr(), out.stride(0)),
            *(rows, width, threads_for(rows * width)),
        )

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """See Elementwise."""
        rows, q_heads, size = q.shape
        k_heads = k.shape[1]
        self._rotary(
            *(q.data_ptr(), q.stride(0), q_heads, k.data_ptr(), k.stride(0), k_heads, size),
            *(cosines.data_ptr(), sines.data_ptr(), positions.data_ptr()),
            *(rows, threads_for(rows * (q_heads + k_heads) * size)),
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See Elementwise."""
        rows, width = out.shape
        self._silu_mul(
            *(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0)),
            *(rows, width, threads_for(2 * rows * width)),
        )

    def argmax(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Elementwise."""
        rows, width = x.shape
        threads = min(rows, threads_for(rows * width))
        self._argmax(x.data_ptr(), x.stride(0), out.data_ptr(), rows, width, threads)


class TorchElementwise:
    """The same by torch's own operations."""

    def describe(self) -> str:
        """See Elementwise."""
        return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """See Elementwise."""
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
        out.copy_(x * scale * weight)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """See Elementwise."""
        index = positions.to(torch.int64)
        cosine, sine = cosines[index].unsqueeze(1), sines[index].unsqueeze(1)
        for heads in (q, k):
            first, second = heads.chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See Elementwise."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def argmax(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Elementwise."""
        torch.argmax(torch.nan_to_num(x, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), dim=-1, out=out)


def select_elementwise(native: bool = True, isa: str | None = None) -> Elementwise:
    """The native operations where they run, unless told otherwise. ValueError: an instruction set of another CPU."""
    library = load() if native else None
    return TorchElementwise() if library is None else NativeElementwise(library, isa)
