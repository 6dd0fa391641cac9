"""Every attention backend against float64, and, where it promises so, bit for bit against itself run otherwise.

Pools are full of NaN but for what was written, so that a single read outside of a row's context shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor_svc.attention import AttentionBackend, KVShape
from executor_svc.attention_torch_cuda import TorchCudaAttention
from executor_svc.backends import select_backend
from executor_svc.kernels.library import load
from tests.support.attention_cases import LAYERS, Content, Span, stored

LIBRARY = load()
NATIVE = tuple(f"native-{isa}" for isa in LIBRARY.isas) if LIBRARY is not None else ()
ALL = (*NATIVE, "torch", "plain", "torch_cuda")
INVARIANT = (*NATIVE, "torch")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, whatever the machine; put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def made(name: str, shape: KVShape) -> AttentionBackend:
    """The backend; of a GPU's, with this CPU as its device."""
    return TorchCudaAttention(shape, torch.device("cpu")) if name == "torch_cuda" else select_backend(shape, name)


def poisoned(name: str, shape: KVShape) -> AttentionBackend:
    """A backend whose pool holds nothing but NaN."""
    backend = made(name, shape)
    backend.pool.fill_(float("nan"))
    return backend


def fill(content: Content, backend: AttentionBackend, upto: Sequence[int], layer: int = 0) -> None:
    """Brings the first tokens of each sequence into the pool."""
    spans = [Span(i, end, end) for i, end in enumerate(upto) if end]
    if spans:
        planned = backend.plan(content.plan(spans))
        backend.write_kv(planned, layer, content.rows(content.k[layer], spans), content.rows(content.v[layer], spans))


def assert_close(out: torch.Tensor, expected: NDArray[np.float64]) -> None:
    """Within a few roundings of float32."""
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-5, atol=5e-6)


MIXED = (Span(0, 1), Span(1, 130, 130), Span(2, 17), Span(3, 16), Span(4, 540, 48), Span(5, 33, 20), Span(6, 530, 4))


@cache
def mixed(
    kv_heads: int, group: int, head_size: int, block_tokens: int, dtype: torch.dtype
) -> tuple[Content, tuple[NDArray[np.float64], ...]]:
    """The content of MIXED and what each layer of it must give."""
    lengths = [span.end for span in MIXED]
    content = Content(
        lengths, kv_heads=kv_heads, group=group, head_size=head_size, block_tokens=block_tokens, dtype=dtype
    )
    return content, tuple(content.expected(MIXED, layer) for layer in range(LAYERS))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "block_tokens", "dtype"),
    [
        (3, 3, 64, 16, torch.float16),
        (3, 3, 64, 16, torch.float32),
        (2, 4, 128, 16, torch.float16),
        (1, 8, 128, 32, torch.float32),
        (2, 1, 64, 8, torch.float16),
        (1, 3, 24, 5, torch.float16),
        (2, 2, 64, 48, torch.float16),
        (1, 7, 40, 8, torch.float16),
        (2, 5, 8, 64, torch.float32),
        (1, 2, 256, 16, torch.float16),
        (1, 71, 16, 16, torch.float16),
    ],
)
def test_mixed_step(
    name: str, kv_heads: int, group: int, head_size: int, block_tokens: int, dtype: torch.dtype
) -> None:
    """Prefills, a chunk behind a prefix and decodes, ragged at block and tile edges, in one plan."""
    content, expected = mixed(kv_heads, group, head_size, block_tokens, dtype)
    backend = poisoned(name, content.shape)
    for layer in reversed(range(LAYERS)):
        fill(content, backend, [span.end - span.queries for span in MIXED], layer)
        assert_close(content.run(backend, MIXED, layer), expected[layer])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("end", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025])
def test_decode_at_every_edge(name: str, end: int) -> None:
    """One query at the edges of vectors, blocks, strips and tiles; alone, so that long contexts are split."""
    content = Content([end], kv_heads=2, group=3)
    backend = poisoned(name, content.shape)
    fill(content, backend, [end - 1])
    spans = [Span(0, end)]
    assert_close(content.run(backend, spans), content.expected(spans))


@pytest.mark.parametrize("name", ALL)
def test_shared_blocks_and_unwritten_slots(name: str) -> None:
    """Rows over the same prefix blocks; a wholly cached prompt runs its last token again without writing it."""
    content = Content([80, 96, 71], kv_heads=2, group=3, shared_tokens=64)
    backend = poisoned(name, content.shape)
    fill(content, backend, [80, 95, 70])
    held = backend.pool.clone()
    spans = [Span(0, 80, write=False), Span(1, 96), Span(2, 71), Span(0, 64, 3, write=False)]
    assert_close(content.run(backend, spans), content.expected(spans))
    changed = (held.view(torch.uint8) != backend.pool.view(torch.uint8)).flatten(2).any(dim=2).nonzero().tolist()
    assert changed == sorted([[int(content.table[1, 95 // 16]), 0], [int(content.table[2, 70 // 16]), 0]])


@pytest.mark.parametrize("name", ALL)
def test_written_values_are_rounded_to_nearest_even(name: str) -> None:
    """Ties, subnormal numbers, the largest and infinity, as torch rounds them."""
    values = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 2.0**-25, 1.5 * 2.0**-24, -(2.0**-15), 65519.0, 65520.0, -1e30])
    values = torch.cat([values, torch.randn(56, generator=torch.Generator().manual_seed(0)) * 1e-5])
    content = Content([1], kv_heads=1)
    backend = poisoned(name, content.shape)
    planned = backend.plan(content.plan([Span(0, 1)]))
    rows = values.view(1, 1, 64)
    backend.write_kv(planned, 1, rows, -rows)
    keys, values_held = stored(backend, int(content.table[0, 0]), 1)
    assert torch.equal(keys[0, 0].contiguous().view(torch.int16), values.half().view(torch.int16))
    assert torch.equal(values_held[0, 0].contiguous().view(torch.int16), (-values).half().view(torch.int16))
    assert keys[1:].isnan().all() and values_held[1:].isnan().all()


@pytest.mark.parametrize("name", ALL)
def test_large_scores(name: str) -> None:
    """Scores far apart neither overflow nor lose the largest one."""
    content = Content([280], kv_heads=1, group=3)
    content.q *= 40
    backend = poisoned(name, content.shape)
    spans = [Span(0, 280, 280)]
    np.testing.assert_allclose(content.run(backend, spans).numpy(), content.expected(spans), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group", "head_size"), [(3, 3, 64), (1, 8, 128), (2, 1, 24)])
def test_bits_do_not_depend_on_company(
    name: str, dtype: torch.dtype, kv_heads: int, group: int, head_size: int
) -> None:
    """Whole prompts at once, token by token, in random chunks beside others, with 1 to 4 threads: the same bits."""
    lengths = (270, 90, 64)
    content = Content(lengths, kv_heads=kv_heads, group=group, head_size=head_size, dtype=dtype)
    whole = poisoned(name, content.shape)
    alone = [content.run(whole, [Span(i, end, end)]) for i, end in enumerate(lengths)]
    for seed in range(4):
        random = np.random.default_rng(seed)
        torch.set_num_threads((1, 2, 3, 4)[seed])
        backend = poisoned(name, content.shape)
        done = [0] * len(lengths)
        while done != list(lengths):
            spans = []
            for i in random.permutation(len(lengths)):
                left = lengths[i] - done[i]
                count = min(left, int(random.choice([0, 1, 1, 2, 19, 50, 100])))
                if count:
                    done[i] += count
                    spans.append(Span(int(i), done[i], count))
            if not spans:
                continue
            out = content.run(backend, spans)
            start = 0
            for span in spans:
                got, start = out[start : start + span.queries], start + span.queries
                assert torch.equal(got, alone[span.sequence][span.end - span.queries : span.end]), (seed, span)


@pytest.mark.parametrize("name", INVARIANT)
def test_bits_of_a_long_context_do_not_depend_on_how_it_is_cut(name: str) -> None:
    """A query alone (cut into tiles), with one head an item, and with all heads in one."""
    content = Content([1500] + [40] * 40, kv_heads=3, group=3)
    backend = poisoned(name, content.shape)
    fill(content, backend, [1499] + [39] * 40)
    crowd = [Span(i, 40) for i in range(1, 41)]
    outs = []
    for threads, others in ((1, 0), (2, 0), (4, 0), (2, 2), (2, 5), (2, 40), (1, 40)):
        torch.set_num_threads(threads)
        outs.append(content.run(backend, [*crowd[:others], Span(0, 1500)])[-1])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", INVARIANT)
def test_infinity_of_a_later_token_stays_there(name: str) -> None:
    """A token whose values overflow the pool's type spoils its own row from there on, and nothing before."""
    content = Content([40, 40], kv_heads=1, group=2)
    content.v[0, 0, 20] = 1e6
    content.k[0, 0, 30] = np.nan
    out = content.run(poisoned(name, content.shape), [Span(0, 40, 40), Span(1, 40, 40)])
    finite = out.isfinite().flatten(1).all(dim=1)
    assert finite[:20].all() and not finite[20:40].any() and finite[40:].all()
    assert out[30:40].isnan().all()


@pytest.mark.parametrize("name", ALL)
def test_strided_rows_and_padding(name: str) -> None:
    """Rows of q, k, v and out may lie in wider ones; rows behind the plan's tokens are left alone."""
    content = Content([33, 50], kv_heads=2, group=3)
    backend = poisoned(name, content.shape)
    spans = [Span(0, 33, 33), Span(1, 50, 50)]
    fused = torch.full((96, 10 * 64 + 24), float("nan"))
    q, k, v = (fused[:, a * 64 : b * 64].unflatten(1, (b - a, 64)) for a, b in ((0, 6), (6, 8), (8, 10)))
    for to, array in ((q, content.q), (k, content.k), (v, content.v)):
        to[:83] = content.rows(array[0], spans)
    out = torch.full((96, 500), 7.0)
    planned = backend.plan(content.plan(spans))
    backend.write_kv(planned, 0, k, v)
    backend.attend(planned, 0, q, out[:, :384].unflatten(1, (6, 64)))
    assert_close(out[:83, :384].unflatten(1, (6, 64)), content.expected(spans))
    assert (out[83:] == 7).all() and (out[:, 384:] == 7).all()


@pytest.mark.parametrize("name", ALL)
def test_blocks_round_trip(name: str) -> None:
    """Copied, gathered and scattered blocks hold every byte, NaN payloads too; others are untouched."""
    shape = KVShape(blocks=9, layers=3, block_tokens=8, kv_heads=2, head_size=24, dtype=torch.float16)
    backend = made(name, shape)
    data = torch.randint(0, 256, (9, shape.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    everything = torch.arange(9)
    backend.write_blocks(everything, data).wait()
    backend.copy_blocks(torch.tensor([1, 1, 8]), torch.tensor([0, 5, 3])).wait()
    into = torch.empty(9, shape.block_bytes, dtype=torch.uint8)
    assert backend.read_blocks(everything, into).done()
    assert torch.equal(into, data[[1, 1, 2, 8, 4, 1, 6, 7, 8]])
    backend.read_blocks(torch.tensor([7, 3]), into[:2])
    assert torch.equal(into[:2], data[[7, 8]])
    backend.read_blocks(torch.empty(0, dtype=torch.int64), into[:0])


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_reaches_outside_is_refused(name: str) -> None:
    """Blocks, slots, table rows and positions outside are a ValueError before anything is touched."""
    content = Content([40], kv_heads=1)
    backend = made(name, content.shape)
    for column, index, value, message in (
        ("write_slots", 3, content.shape.blocks * 16, "write slot"),
        ("write_slots", 3, -2, "write slot"),
        ("table_rows", 0, 1, "table row"),
        ("context_tokens", 0, 39, "fewer tokens"),
        ("context_tokens", 0, 41, "positions"),
        ("positions", 7, 8, "positions"),
        ("block_table", (0, 2), content.shape.blocks, "row 0 names a block"),
        ("block_table", (0, 0), -1, "row 0 names a block"),
        ("query_start", 1, 39, "query_start"),
    ):
        step = content.plan([Span(0, 40, 40)])
        getattr(step, column)[index] = value
        with pytest.raises(ValueError, match=message):
            backend.plan(step)
    planned = backend.plan(content.plan([Span(0, 40, 40)]))
    with pytest.raises(ValueError, match="float"):
        backend.write_kv(planned, 0, torch.zeros(40, 1, 64).int(), torch.zeros(40, 1, 64))
    with pytest.raises(ValueError, match="divide"):
        wide = Content([40], kv_heads=2)
        other = made(name, wide.shape)
        other.attend(other.plan(wide.plan([Span(0, 40, 40)])), 0, torch.zeros(40, 3, 64), torch.zeros(40, 3, 64))
    with pytest.raises(ValueError, match="block is outside"):
        backend.copy_blocks(torch.tensor([0]), torch.tensor([content.shape.blocks]))
