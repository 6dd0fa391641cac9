"""`torch_cuda`: paged attention on a GPU by torch alone. Contexts are gathered, torch's fused attention runs on them.

It computes every shape, and is what the shapes fall back to for which there are no kernels. The queries of a group of
heads stand as rows over their KV head, so that keys and values are gathered once a group.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from executor_svc.attention_device import DecodeRows, DeviceAttention

GATHERED_BYTES = 1 << 30
"""Keys and values that are gathered at a time, at most, but those of a row at least."""


class TorchCudaAttention(DeviceAttention):
    """See the module. Reads each context three times where a kernel reads it once."""

    name = "torch_cuda"
    width_growth = 2

    def _decode(self, rows: DecodeRows, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        shape = self.shape
        tokens = rows.tables.shape[1] * shape.block_tokens
        row_bytes = 2 * tokens * shape.kv_heads * shape.head_size * q.dtype.itemsize
        each = max(1, GATHERED_BYTES // row_bytes)
        for first in range(0, len(q), each):
            part = slice(first, first + each)
            self._decode_some(rows.tables[part], rows.contexts[part], layer, q[part], out[part])

    def _decode_some(
        self, tables: torch.Tensor, contexts: torch.Tensor, layer: int, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """What lies behind a context may be anything, NaN too: it is zeroed, and masked."""
        shape = self.shape
        count, heads, size = q.shape
        places = torch.arange(tables.shape[1] * shape.block_tokens, device=self.device)
        inside = places < contexts[:, None]
        k, v = (
            self._room[tables, layer, index].flatten(1, 2).to(q.dtype).masked_fill(~inside[..., None, None], 0)
            for index in (0, 1)
        )
        seen = inside | (places == 0)  # an empty row sees one zero, and gives zero
        grouped = q.reshape(count, shape.kv_heads, heads // shape.kv_heads, size)
        result = scaled_dot_product_attention(
            grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen[:, None, None, :]
        )
        out.copy_(result.reshape(count, heads, size))
