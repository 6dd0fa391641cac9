"""The CUDA kernels against float64, on the emulation, and on a GPU where there is one: the same cases."""

from __future__ import annotations

import pytest
import torch

from executor_svc.attention import KVShape
from executor_svc.kernels.cuda.cupy_launcher import CupyLauncher, NoGpu
from executor_svc.kernels.cuda.emulated_launcher import EmulatedLauncher
from executor_svc.kernels.cuda.launch import Launcher
from executor_svc.kernels.cuda.paged import DecodeRows, PagedKernels, Splits
from executor_svc.kernels.cuda.variants import VARIANTS, variant_for
from tests.support import paged_cases as cases
from tests.support.paged_cases import EDGES, PagedCase


def launchers() -> list[Launcher]:
    """Whatever runs the kernels here."""
    try:
        return [EmulatedLauncher(), CupyLauncher()]
    except NoGpu:
        return [EmulatedLauncher()]


@pytest.fixture(scope="module", params=launchers(), ids=lambda launcher: launcher.name)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """One of them."""
    found: Launcher = request.param
    return found


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_decode(launcher: Launcher, head_size: int, dtype: torch.dtype, group: int) -> None:
    """Ragged rows at the edges of blocks and warps, an empty one, over every division of the context."""
    case = PagedCase(EDGES, group=group, head_size=head_size, dtype=dtype, device=launcher.device)
    cases.check_decode(launcher, case)


@pytest.mark.parametrize("group", [2, 5, 6, 7])
def test_other_groups(launcher: Launcher, group: int) -> None:
    """Every number of query heads that a tile holds."""
    case = PagedCase(EDGES, kv_heads=1, group=group, device=launcher.device, seed=group)
    cases.check_decode(launcher, case, (Splits(1), Splits(3)))


def test_long_and_shared(launcher: Launcher) -> None:
    """Contexts of thousands of tokens, most of whose blocks several rows share."""
    case = PagedCase([2100, 2048, 4001], kv_heads=1, group=8, head_size=128, shared_blocks=128, device=launcher.device)
    cases.check_decode(launcher, case, (Splits(1), Splits(8), Splits.fixed(4096)))


def test_many_rows_and_heads(launcher: Launcher) -> None:
    """A batch as a server has it."""
    lengths = [(37 * i) % 150 for i in range(24)]
    case = PagedCase(lengths, kv_heads=4, group=4, head_size=128, dtype=torch.float16, device=launcher.device)
    cases.check_decode(launcher, case, (Splits(2),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores(launcher: Launcher, dtype: torch.dtype) -> None:
    """Where one token outweighs all others by far, the early ones or the late ones, nothing overflows."""
    case = PagedCase([200, 333], kv_heads=1, group=8, dtype=dtype, device=launcher.device)
    case.q.mul_(30.0)
    cases.check_decode(launcher, case, (Splits(1), Splits(3)))


def test_a_token_that_is_not_a_number_spoils_its_rows_only(launcher: Launcher) -> None:
    """Inside a context NaN is the model's; it stays with the rows that read it."""
    case = PagedCase([40, 100, 40], kv_heads=1, group=4, device=launcher.device)
    slot = int(case.slots(1)[70])
    case.pool[slot // 16, cases.LAYER, 1, slot % 16, :, 5] = float("nan")
    found = case.decode(launcher, Splits(3))
    assert bool(found[1, :, 5].isnan().all())
    cases.assert_close(found[[0, 2]], case.expected()[[0, 2]])


def test_rows_without_indexes(launcher: Launcher) -> None:
    """Rows in the order of queries and table: a step of a captured graph."""
    case = PagedCase([50, 0, 20], device=launcher.device)
    indexed = case.decode(launcher, Splits(2))
    rows = case.rows()
    assert rows.table_rows is not None and rows.tokens is not None
    plain = DecodeRows(rows.contexts, rows.table[rows.table_rows.long()])
    kernels = case.kernels(launcher)
    out = torch.zeros(3, *case.q.shape[1:], device=launcher.device)
    scratch = torch.zeros(kernels.scratch_floats(3, 2), device=launcher.device)
    queries = case.q[rows.tokens.long()].contiguous()
    kernels.decode(case.pool, cases.LAYER, queries, out, plain, Splits(2), scratch)
    assert torch.equal(out.cpu(), indexed)


def test_bits_of_a_row_are_its_own(launcher: Launcher) -> None:
    """With splits of a fixed size."""
    cases.check_bits(launcher)


def test_far_blocks(launcher: Launcher) -> None:
    """Offsets are 64 bits wide."""
    cases.check_far_blocks(launcher)


@pytest.mark.parametrize(("dtype", "kv_heads", "head_size"), [(torch.float16, 3, 64), (torch.bfloat16, 9, 128)])
def test_write_kv(launcher: Launcher, dtype: torch.dtype, kv_heads: int, head_size: int) -> None:
    cases.check_write(launcher, dtype, kv_heads, head_size)


@pytest.mark.parametrize(("kv_heads", "layers"), [(1, 2), (3, 3), (8, 12)])
def test_moves(launcher: Launcher, kv_heads: int, layers: int) -> None:
    cases.check_moves(launcher, kv_heads, layers)


def test_splits_fill_the_device() -> None:
    """Few rows are split as far as warps have blocks, many not at all; fixed splits follow the context alone."""
    assert Splits.even(1, 8, 4096, 132) == Splits(32)
    assert Splits.even(1, 8, 64, 132) == Splits(1)
    assert Splits.even(256, 8, 1024, 132).count <= 3
    for rows in (1, 2, 7, 32, 256):
        waves = rows * 8 * Splits.even(rows, 8, 8192, 132).count / (3 * 132)
        assert waves >= 0.8 * -(-waves // 1)
    assert Splits.fixed(0) == Splits(1, 32)
    assert Splits.fixed(512) == Splits(1, 32)
    assert Splits.fixed(513) == Splits(2, 32)


def test_what_is_computed() -> None:
    """Four variants, each for groups up to 8 in blocks of 16 tokens; all else goes to another backend."""
    assert len(VARIANTS) == 4
    shape = KVShape(1, 1, 16, 4, 128, torch.bfloat16)
    assert [variant_for(shape, 4 * group) is not None for group in range(11)] == [False, *[True] * 8, False, False]
    assert variant_for(shape, 30) is None
    for other in (
        KVShape(1, 1, 32, 4, 128, torch.bfloat16),
        KVShape(1, 1, 16, 4, 96, torch.bfloat16),
        KVShape(1, 1, 16, 4, 128, torch.float32),
    ):
        assert variant_for(other, 16) is None
        with pytest.raises(ValueError, match="not head size"):
            PagedKernels(EmulatedLauncher(), other, 16)


def test_wrong_tensors_are_refused() -> None:
    """Before anything runs."""
    case = PagedCase([20])
    kernels, rows, none = case.kernels(EmulatedLauncher()), case.rows(), torch.zeros(0)
    out = torch.zeros(len(case.q), 6, 64)
    slots = torch.zeros(1, dtype=torch.int64)
    k = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    for call, message in (
        (lambda: kernels.decode(case.pool, 0, case.q.float(), out, rows, Splits(1), none), "expected"),
        (lambda: kernels.decode(case.pool, 0, case.q[:, :4], out, rows, Splits(1), none), "expected"),
        (lambda: kernels.decode(case.pool, 0, case.q, out, rows, Splits(2), none), "scratch"),
        (lambda: kernels.decode(case.pool, 3, case.q, out, rows, Splits(1), none), "layer 3"),
        (lambda: kernels.write_kv(case.pool, 0, k, k.half(), slots), "expected"),
        (lambda: kernels.write_kv(case.pool, 0, k, k, slots.int()), "slots"),
        (
            lambda: kernels.write_kv(case.pool, 0, torch.zeros(400).bfloat16()[1:129].view(1, 2, 64), k, slots),
            "aligned",
        ),
        (lambda: kernels.read_blocks(case.pool, slots, torch.zeros(1, 8, dtype=torch.uint8)), "uint8"),
        (lambda: kernels.copy_blocks(case.pool, slots, slots.int()), "int64"),
        (lambda: DecodeRows(rows.contexts.long(), rows.table), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
