"""`cupy_cuda`: paged attention on a GPU by kernels of our own, launched through CuPy, or emulated on this CPU.

Decode rows, writes and copies of whole blocks are theirs; prefills run through torch's fused attention. How contexts
are split depends on the sizes of the step's buffers only, so that a captured graph serves all steps of its size.
"""

from __future__ import annotations

import torch

from executor_svc.attention import KVShape
from executor_svc.attention_device import DecodeRows, DeviceAttention, DevicePlan
from executor_svc.kernels.cuda.launch import Launcher
from executor_svc.kernels.cuda.paged import DecodeRows as KernelRows
from executor_svc.kernels.cuda.paged import PagedKernels, Splits

EMULATED_PROCESSORS = 4


class CupyCudaAttention(DeviceAttention):
    """See the module. Contexts are read once for all heads of a group."""

    name = "cupy_cuda"

    def __init__(self, shape: KVShape, query_heads: int, launcher: Launcher, *, fixed_splits: bool = False) -> None:
        """`fixed_splits`: a row is computed alike whatever is beside it, if not as fast. ValueError: there are no
        kernels for the shape."""
        self._kernels = PagedKernels(launcher, shape, query_heads)
        super().__init__(shape, torch.device(launcher.device))
        self._launcher = launcher
        self._fixed = fixed_splits
        self._cuda = self.device.type == "cuda"
        self._processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if self._cuda else EMULATED_PROCESSORS
        )
        self._scratch: dict[int, torch.Tensor] = {}  # captured graphs hold on to them: none is ever given up

    def describe(self) -> str:
        """See AttentionBackend."""
        splits = "fixed" if self._fixed else "even"
        return f"{super().describe()} {self._launcher.describe()} splits={splits}"

    def _decode(self, rows: DecodeRows, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        most = rows.tables.shape[1] * self.shape.block_tokens
        if self._fixed:
            splits = Splits.fixed(most)
        else:
            splits = Splits.even(len(rows.contexts), self.shape.kv_heads, most, self._processors)
        floats = self._kernels.scratch_floats(len(rows.contexts), splits.count)
        self._kernels.decode(
            self._room,
            layer,
            q.to(self.shape.dtype),
            out,
            KernelRows(rows.contexts, rows.tables),
            splits,
            self._scratch_of(floats),
            self._stream,
        )

    def _write(self, plan: DevicePlan, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = k.to(self.shape.dtype), v.to(self.shape.dtype)
        self._kernels.write_kv(self._room, layer, k, v, plan.slots[: plan.tokens], self._stream)

    def copy_sent(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See DeviceAttention."""
        self._kernels.copy_blocks(self._room, sources, targets, self._stream)

    def _read(self, blocks: torch.Tensor, into: torch.Tensor) -> None:
        self._kernels.read_blocks(self._room, blocks, into, self._stream)

    def _write_whole(self, blocks: torch.Tensor, source: torch.Tensor) -> None:
        self._kernels.write_blocks(self._room, blocks, source, self._stream)

    @property
    def _stream(self) -> int:
        """The current stream, which is another one while a graph is being captured."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self._cuda else 0

    def _scratch_of(self, floats: int) -> torch.Tensor:
        size = 1 << max(0, floats - 1).bit_length()
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._scratch[size]
