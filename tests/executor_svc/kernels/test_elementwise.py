"""The row-wise operations against float64, and each row alone against the same row in company."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.elementwise import Elementwise, NativeElementwise, TorchElementwise
from executor_svc.kernels.library import load

LIBRARY = load()
ALL: list[Elementwise] = [TorchElementwise()]
if LIBRARY is not None:
    ALL += [NativeElementwise(LIBRARY, isa) for isa in LIBRARY.isas]
by_name = pytest.mark.parametrize("ops", ALL, ids=lambda ops: ops.describe().split()[0])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@by_name
@pytest.mark.parametrize("width", [8, 100, 576])
def test_rms_norm(ops: Elementwise, width: int) -> None:
    """Rows inside wider ones; large and tiny rows; in place; a row's bits do not depend on the others."""
    x = random(67, width + 8)[:, :width]
    x[0] *= 1e10
    x[1] *= 1e-10
    weight = random(width, seed=1)
    out = torch.empty(67, width)
    ops.rms_norm(x, weight, 1e-5, out)
    wide = x.double()
    expected = wide / (wide.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-12)
    alone = torch.empty(1, width)
    for row in (0, 5, 66):
        ops.rms_norm(x[row : row + 1].clone(), weight, 1e-5, alone)
        assert torch.equal(alone[0], out[row])
    ops.rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


@by_name
@pytest.mark.parametrize("head_size", [8, 40, 64, 128])
def test_rotary(ops: Elementwise, head_size: int) -> None:
    """Queries and keys inside one fused row, rotated in place by their own positions; the values behind them stay."""
    fused = random(50, 7 * head_size)
    heads = fused.double().unflatten(1, (7, head_size))
    q = fused[:, : 4 * head_size].unflatten(1, (4, head_size))
    k = fused[:, 4 * head_size : 6 * head_size].unflatten(1, (2, head_size))
    angles = torch.outer(torch.arange(99.0), random(head_size // 2, seed=1))
    cosines, sines = angles.cos(), angles.sin()
    positions = torch.randint(0, 99, (50,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    ops.rotary(q, k, cosines, sines, positions)
    c, s = (table.double()[positions.long()].unsqueeze(1) for table in (cosines, sines))
    a, b = heads.chunk(2, dim=2)
    expected = torch.cat((a * c - b * s, b * c + a * s), dim=2)
    expected[:, 6] = heads[:, 6]
    torch.testing.assert_close(fused.double(), expected.flatten(1), rtol=1e-5, atol=1e-5)


@by_name
@pytest.mark.parametrize("width", [5, 64, 1536])
def test_silu_mul(ops: Elementwise, width: int) -> None:
    """Over the whole range of a gate, NaN and infinity included; a row's bits do not depend on the others."""
    gate_up = random(40, 2 * width)
    gate_up[:, :width] *= torch.logspace(-3, 3, 40).unsqueeze(1)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = float("nan"), float("inf"), -200.0
    out = torch.empty(40, width)
    ops.silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-30, equal_nan=True)
    alone = torch.empty(1, width)
    for row in (3, 39):
        ops.silu_mul(gate_up[row : row + 1].clone(), alone)
        assert torch.equal(alone[0], out[row])


@by_name
@pytest.mark.parametrize("width", [1, 17, 49152])
def test_argmax(ops: Elementwise, width: int) -> None:
    """The first of equals; never NaN, unless there is nothing else."""
    x = torch.randint(0, 50, (9, width), generator=torch.Generator().manual_seed(0)).float()
    x[1] = -torch.inf
    x[2] = torch.inf
    if width > 1:
        x[0, 0] = torch.nan
        x[3, width // 2] = 1000.0
        x[4, -1] = 1000.0
    out = torch.empty(9, dtype=torch.int64)
    ops.argmax(x, out)
    for row, found in zip(x, out.tolist(), strict=True):
        top = row[~row.isnan()].max()
        assert found == int((row == top).nonzero()[0, 0])
