"""Which backend serves, what is said of it, and our kernels behind the seam that the model uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc import attention_choice
from executor_svc.attention import KVShape
from executor_svc.attention_choice import Backend, Device, device_backend, find_device
from executor_svc.attention_device import DeviceAttention
from executor_svc.clock import MonotonicClock
from executor_svc.copies import MemoryCopies
from executor_svc.copies_choice import copies_for
from executor_svc.copies_device import DeviceCopies
from executor_svc.kernels.cuda.emulated_launcher import EmulatedLauncher
from executor_svc.model.linear import best_arithmetic
from executor_svc.model.model import CpuModel
from executor_svc.model.open_model import ModelOptions, open_model
from jitney.errors import InvalidRequest
from tests.support.attention_cases import LAYERS, Content, Span
from tests.support.tiny_llama import make_tiny_llama

MIXED = (Span(0, 1), Span(1, 130, 130), Span(2, 17), Span(3, 16), Span(4, 540, 48), Span(5, 33, 20), Span(6, 530))
DECODES = tuple(Span(i, end) for i, end in enumerate((1, 2, 15, 16, 17, 64, 65, 257, 513)))


def emulated(shape: KVShape, heads: int, *, fixed_splits: bool = False, name: Backend = "cupy_cuda") -> DeviceAttention:
    """The backend on this CPU, its pool full of NaN."""
    device = find_device(name, True, pytest.fail)
    assert device is not None
    backend = device_backend(device, shape, heads, pytest.fail, fixed_splits=fixed_splits)
    backend.pool.fill_(float("nan"))
    return backend


def content_of(spans: tuple[Span, ...], kv_heads: int, group: int, head_size: int, dtype: torch.dtype) -> Content:
    """Queries are of the pool's type."""
    ends = [span.end for span in spans]
    content = Content(ends, kv_heads=kv_heads, group=group, head_size=head_size, dtype=dtype)
    content.q = torch.from_numpy(content.q).to(dtype).float().numpy()
    return content


def fill(content: Content, backend: DeviceAttention, spans: tuple[Span, ...], layer: int) -> None:
    """Brings what the spans need into the pool."""
    before = [Span(span.sequence, span.end - span.queries, span.end - span.queries) for span in spans]
    before = [span for span in before if span.end]
    planned = backend.plan(content.plan(before))
    backend.write_kv(planned, layer, content.rows(content.k[layer], before), content.rows(content.v[layer], before))


@pytest.mark.parametrize("spans", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "dtype", "fixed_splits"),
    [(2, 4, 128, torch.bfloat16, False), (3, 3, 64, torch.float16, True), (1, 8, 64, torch.bfloat16, False)],
)
def test_our_kernels_behind_the_seam(
    spans: tuple[Span, ...], kv_heads: int, group: int, head_size: int, dtype: torch.dtype, fixed_splits: bool
) -> None:
    """Prefills, chunks and decodes in one step, and decodes alone, over a poisoned pool, in every layer."""
    content = content_of(spans, kv_heads, group, head_size, dtype)
    backend = emulated(content.shape, kv_heads * group, fixed_splits=fixed_splits)
    assert backend.name == "cupy_cuda" and ("fixed" in backend.describe()) == fixed_splits
    for layer in reversed(range(LAYERS)):
        fill(content, backend, spans, layer)
        out = content.run(backend, spans, layer)
        assert np.abs(out.numpy() - content.expected(spans, layer)).max() < 4e-3


def test_with_fixed_splits_a_row_does_not_depend_on_its_company() -> None:
    content = content_of(DECODES, 2, 3, 64, torch.float16)
    backend = emulated(content.shape, 6, fixed_splits=True)
    fill(content, backend, DECODES, 0)
    together = content.run(backend, DECODES)
    for row, span in enumerate(DECODES):
        assert torch.equal(content.run(backend, [span])[0], together[row])


def test_blocks_round_trip() -> None:
    shape = KVShape(blocks=9, layers=3, block_tokens=16, kv_heads=2, head_size=64, dtype=torch.float16)
    backend = emulated(shape, 4)
    data = torch.randint(0, 256, (9, shape.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    backend.write_blocks(torch.arange(9), data).wait()
    backend.copy_blocks(torch.tensor([1, 1, 8]), torch.tensor([0, 5, 3])).wait()
    into = torch.empty(9, shape.block_bytes, dtype=torch.uint8)
    assert backend.read_blocks(torch.arange(9), into).done()
    assert torch.equal(into, data[[1, 1, 2, 8, 4, 1, 6, 7, 8]])


def test_shapes_without_kernels_fall_back_with_one_line() -> None:
    said: list[str] = []
    device = Device(torch.device("cpu"), EmulatedLauncher(), emulated=True)
    shape = KVShape(blocks=3, layers=1, block_tokens=16, kv_heads=2, head_size=80, dtype=torch.float16)
    assert device_backend(device, shape, 4, said.append).name == "torch_cuda"
    assert len(said) == 1 and "torch_cuda serves" in said[0] and "80" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("wanted", ["auto", "torch_cuda", "cupy_cuda"])
def test_without_a_gpu_one_sentence_says_so_and_the_cpu_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Backend
) -> None:
    monkeypatch.setattr(attention_choice, "cuda_fault", lambda: "torch finds no CUDA GPU")
    said: list[str] = []
    directory = make_tiny_llama(tmp_path / "model")
    model = open_model(directory, ModelOptions(backend=wanted, pool_blocks=8), None, said.append)
    assert isinstance(model, CpuModel)
    assert said == ["no GPU backend runs here, the CPU backend serves: torch finds no CUDA GPU"]
    assert model.info.arithmetic == best_arithmetic()
    copies = copies_for(model.backend, MonotonicClock(), 0)
    assert isinstance(copies, MemoryCopies)
    copies.close()


def test_the_cpu_may_be_asked_for_and_has_no_bf16(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model")
    options = ModelOptions(backend="cpu", pool_blocks=8)
    assert isinstance(open_model(directory, options, None, pytest.fail), CpuModel)
    for field in ("arithmetic", "kv"):
        wrong = ModelOptions(backend="cpu", pool_blocks=8, **{field: "bf16"})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="bf16 is for GPUs") as caught:
            open_model(directory, wrong, None, pytest.fail)
        assert caught.value.field == field


def test_a_device_has_one_type_and_copies_on_streams(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path / "model", hidden=256)
    options = ModelOptions(backend="cupy_cuda", emulated=True, pool_blocks=8, max_step_rows=2)
    model = open_model(directory, options, None, pytest.fail)
    assert (model.info.backend, model.info.arithmetic, model.info.bit_invariant) == ("cupy_cuda", "bf16", False)
    copies = copies_for(model.backend, MonotonicClock(), 0)
    assert isinstance(copies, DeviceCopies)
    copies.close()
    with pytest.raises(InvalidRequest, match="--kv is fp32"):
        open_model(
            directory,
            ModelOptions(backend="torch_cuda", emulated=True, pool_blocks=8, arithmetic="fp16", kv="fp32"),
            None,
            pytest.fail,
        )
