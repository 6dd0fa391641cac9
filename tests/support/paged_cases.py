"""Cases for the CUDA kernels, whoever runs them: a pool full of NaN but for what rows have, and float64 to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from executor_svc.attention import KVShape
from executor_svc.kernels.cuda.launch import Launcher
from executor_svc.kernels.cuda.paged import DecodeRows, PagedKernels, Splits

LAYERS, LAYER = 3, 1
EDGES = (0, 1, 15, 16, 17, 333, 64, 65, 33)
"""Lengths at the edges of blocks, of the four warps' turns, and behind them; one row has nothing."""
SPLITS = (Splits(1), Splits(3), Splits(8), Splits(22, 1), Splits(4, 3), Splits.fixed(4096))
"""Evenly in 1, 3 and 8; a block each; chunks of 3 whose last takes what is left; as for reproducible results."""
CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (4e-3, 1e-5), torch.float16: (1e-3, 1e-5)}
"""Relative and absolute tolerance of a result by its type: the type's own rounding and a little more."""
NAN = float("nan")


class PagedCase:
    """One query a row over shuffled blocks; the first `shared_blocks` blocks of all rows are the first row's.

    Rows lie in another order in the queries and in the table than in the step; queries in rows of a wider tensor.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int = 2,
        group: int = 3,
        head_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        shared_blocks: int = 0,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        rows, longest, self.lengths, self.group = len(lengths), max(1, *lengths), list(lengths), group
        width = -(-longest // 16)
        self.shape = KVShape(rows * width + 3, LAYERS, 16, kv_heads, head_size, dtype)
        self.device = device
        wide = (kv_heads * group + 2 * kv_heads) * head_size
        fused = torch.full((rows + 2, wide), NAN, dtype=dtype)
        self.tokens = torch.randperm(rows + 2, generator=random)[:rows].int()
        self.table_rows = torch.randperm(rows, generator=random).int()
        blocks = torch.randperm(self.shape.blocks, generator=random)[: rows * width].reshape(rows, width)
        blocks[:, :shared_blocks] = blocks[:1, :shared_blocks]
        size = (rows, longest, kv_heads, head_size)
        self.k, self.v = (torch.randn(size, generator=random).to(dtype) for _ in range(2))
        shared = 16 * shared_blocks
        self.k[:, :shared], self.v[:, :shared] = self.k[:1, :shared], self.v[:1, :shared]
        queries = 2 * torch.randn(rows, kv_heads * group, head_size, generator=random)
        fused[self.tokens, : kv_heads * group * head_size] = queries.flatten(1).to(dtype)
        self.q = fused.to(device)[:, : kv_heads * group * head_size].unflatten(1, (-1, head_size))
        self.blocks = blocks
        self.pool = self._filled().to(device)

    def slots(self, row: int) -> torch.Tensor:
        """Where a row's tokens are in the pool."""
        position = torch.arange(self.lengths[row])
        return self.blocks[row, position // 16] * 16 + position % 16

    def _filled(self) -> torch.Tensor:
        shape = self.shape
        pool = torch.full((shape.blocks, LAYERS, 2, 16, shape.kv_heads, shape.head_size), NAN, dtype=shape.dtype)
        for row, length in enumerate(self.lengths):
            slots = self.slots(row)
            pool[slots // 16, LAYER, 0, slots % 16] = self.k[row, :length]
            pool[slots // 16, LAYER, 1, slots % 16] = self.v[row, :length]
        return pool

    def rows(self, only: Sequence[int] | None = None) -> DecodeRows:
        """All rows of the step, or some; table entries behind a context name a block far outside."""
        wanted = list(range(len(self.lengths)) if only is None else only)
        table = torch.full_like(self.blocks, 2**31 - 1, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            used = -(-length // 16)
            table[self.table_rows[row], :used] = self.blocks[row, :used].int()
        columns = (torch.tensor(self.lengths, dtype=torch.int32), table, self.table_rows, self.tokens)
        picked = [columns[0][wanted], columns[1], columns[2][wanted], columns[3][wanted]]
        return DecodeRows(*(one.to(self.device) for one in picked))

    def kernels(self, launcher: Launcher) -> PagedKernels:
        """The kernels for this case's pool."""
        return PagedKernels(launcher, self.shape, self.shape.kv_heads * self.group)

    def decode(
        self,
        launcher: Launcher,
        splits: Splits,
        out_dtype: torch.dtype = torch.float32,
        only: Sequence[int] | None = None,
        pool: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs it; results in the order of the step's rows `[rows, heads, head_size]`. Asserts that nothing else was
        written."""
        kernels, rows = self.kernels(launcher), self.rows(only)
        heads, size = self.shape.kv_heads * self.group, self.shape.head_size
        wide = torch.full((len(self.q) + 1, heads * size + 8), 7.0, dtype=out_dtype, device=self.device)
        out = wide[:, : heads * size].unflatten(1, (heads, size))
        scratch = torch.full((kernels.scratch_floats(len(rows.contexts), splits.count),), NAN, device=self.device)
        kernels.decode(self.pool if pool is None else pool, LAYER, self.q, out, rows, splits, scratch)
        assert rows.tokens is not None
        found: torch.Tensor = out[rows.tokens.long()].cpu()
        out[rows.tokens.long()] = 7.0
        assert bool((wide == 7.0).all()), "wrote where nothing of a row lies"
        return found

    def expected(self) -> torch.Tensor:
        """float64 `[rows, heads, head_size]`, in the order of the step's rows."""
        heads, size = self.shape.kv_heads * self.group, self.shape.head_size
        result = torch.zeros(len(self.lengths), heads, size, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            k, v = (x[row, :length].double().repeat_interleave(self.group, dim=1) for x in (self.k, self.v))
            scores = torch.einsum("hd,thd->ht", self.q[int(self.tokens[row])].cpu().double(), k) / math.sqrt(size)
            if length:
                result[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=1), v)
        return result


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what the result's type holds."""
    rtol, atol = CLOSE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol, equal_nan=False)


def check_decode(launcher: Launcher, case: PagedCase, splits: Sequence[Splits] = SPLITS) -> None:
    """Every division of the context, as float32 and in the pool's type. AssertionError if one is wrong."""
    expected = case.expected()
    for one in splits:
        for dtype in (torch.float32, case.shape.dtype):
            assert_close(case.decode(launcher, one, dtype), expected)


def check_far_blocks(launcher: Launcher, head_size: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    """Blocks that lie more than 2^31 elements into the pool. The pool's memory is only touched where rows are."""
    case = PagedCase([40, 200], kv_heads=1, group=2, head_size=head_size, dtype=dtype, device=launcher.device)
    shape, first = case.shape, (2**32 // case.shape.block_bytes) + 5
    pool = torch.empty(first + shape.blocks, LAYERS, 2, 16, 1, head_size, dtype=shape.dtype, device=launcher.device)
    pool[first:] = case.pool
    case.blocks = case.blocks + first
    assert_close(case.decode(launcher, Splits(1), pool=pool), case.expected())


def check_bits(launcher: Launcher) -> None:
    """With splits of a fixed size a row's bits are its own: alone, in company, on a larger grid."""
    case = PagedCase([300, 70, 1, 129, 48], group=4, head_size=128, device=launcher.device)
    together = case.decode(launcher, Splits.fixed(300, 4))
    for splits in (Splits.fixed(1000, 4), Splits.fixed(512, 4)):
        assert torch.equal(case.decode(launcher, splits), together)
    for row, length in enumerate(case.lengths):
        alone = case.decode(launcher, Splits.fixed(length, 4), only=[row])
        assert torch.equal(alone[0], together[row]), f"row {row}"


def check_write(launcher: Launcher, dtype: torch.dtype = torch.float16, kv_heads: int = 3, head_size: int = 64) -> None:
    """Keys and values of scattered tokens, some of them skipped, out of wider rows."""
    shape = KVShape(9, LAYERS, 16, kv_heads, head_size, dtype)
    pool = torch.full((9, LAYERS, 2, 16, kv_heads, head_size), NAN, dtype=dtype, device=launcher.device)
    kernels = PagedKernels(launcher, shape, kv_heads)
    random = torch.Generator().manual_seed(3)
    wide = torch.randn(40, 2 * kv_heads * head_size + 16, generator=random).to(dtype).to(launcher.device)
    k, v = (
        wide[:, i * kv_heads * head_size :][:, : kv_heads * head_size].unflatten(1, (-1, head_size)) for i in (0, 1)
    )
    slots = torch.randperm(9 * 16, generator=random)[:37]
    slots[::5] = -1
    expected = pool.cpu().clone()
    kept = slots >= 0
    for i, x in enumerate((k, v)):
        expected[slots[kept] // 16, LAYER, i, slots[kept] % 16] = x[:37].cpu()[kept]
    kernels.write_kv(pool, LAYER, k, v, slots.to(launcher.device))
    assert torch.equal(pool.cpu().view(torch.int16), expected.view(torch.int16))


def check_moves(launcher: Launcher, kv_heads: int = 3, layers: int = LAYERS) -> None:
    """Copies, gathers and scatters keep every byte, NaN of any kind too, and leave all others alone."""
    shape = KVShape(11, layers, 16, kv_heads, 64, torch.float16)
    kernels, size, device = PagedKernels(launcher, shape, kv_heads), shape.block_bytes, launcher.device
    random = torch.Generator().manual_seed(4)
    data = torch.randint(0, 256, (11, size), dtype=torch.uint8, generator=random)
    whole = data.to(device).view(torch.float16).view(11, layers, 2, 16, kv_heads, 64)

    def blocks(*ids: int) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=device)

    kernels.copy_blocks(whole, blocks(1, 1, 8), blocks(0, 5, 3))
    expected = data[[1, 1, 2, 8, 4, 1, 6, 7, 8, 9, 10]]
    assert torch.equal(whole.view(torch.uint8).reshape(11, size).cpu(), expected), "copy"
    padded = torch.full((4, size + 48), 9, dtype=torch.uint8, device=device)
    kernels.read_blocks(whole, blocks(10, 0, 7), padded[:3])
    assert torch.equal(padded[:3, :size].cpu(), expected[[10, 0, 7]]), "gather"
    assert bool((padded[:, size:] == 9).all()) and bool((padded[3] == 9).all()), "a gather wrote behind its blocks"
    kernels.write_blocks(whole, blocks(2, 9), padded[1:3])
    expected = expected.clone()
    expected[[2, 9]] = expected[[0, 7]]
    assert torch.equal(whole.view(torch.uint8).reshape(11, size).cpu(), expected), "scatter"
    into = torch.zeros(2, 2, 16, kv_heads, 64, dtype=torch.float16, device=device)
    kernels.gather_layer(whole, LAYER, blocks(6, 3), into)
    assert torch.equal(into.view(torch.int16), whole[[6, 3], LAYER].view(torch.int16)), "gather of a layer"
    kernels.read_blocks(whole, blocks(), padded[:0])
