"""The emulation of CUDA's threads: what a GPU does together it does too, and it says what a GPU would not survive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from executor_svc.kernels.cuda import cupy_launcher, sources
from executor_svc.kernels.cuda.cupy_launcher import NoGpu, import_cupy
from executor_svc.kernels.cuda.emulated_launcher import EmulatedFault, EmulatedLauncher
from executor_svc.kernels.cuda.launch import Kernel
from executor_svc.kernels.cuda.variants import VARIANTS
from tests.support.cuda_mutants import apply

KERNELS = """
/* out[i]: the sum of what all threads of the block hold, by way of shared memory. */
extern "C" __global__ void write_kv(float *out, int flaw) {
    __shared__ float held[64];
    held[threadIdx.x] = (float)threadIdx.x;
    if (flaw != 1) __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < (int)blockDim.x; i++) sum += held[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

/* One flaw each. */
extern "C" __global__ void move_blocks(char *out, int flaw) {
    if (flaw == 0 && threadIdx.x < 40) __syncthreads();
    if (flaw == 1) store16(out + threadIdx.x, load16(out));
    if (flaw == 2) ((volatile char *)nullptr)[threadIdx.x] = 1;
    if (flaw == 3 && threadIdx.x != 5) shuffle(1.0f, 0);
    if (flaw == 4) { if (threadIdx.x % 2) shuffle(1.0f, 0); else { float c[4] = {}; mma(c, 0, 0, 0, 0, 0, 0); } }
}

/* Lanes: the next one's number, and the pair's sum. */
extern "C" __global__ void merge_splits(float *out, i64 many) {
    const float mine = (float)threadIdx.x;
    out[2 * threadIdx.x] = shuffle(mine, (threadIdx.x + 1) % 32);
    out[2 * threadIdx.x + 1] = mine + shuffle_xor(mine, 1) + (float)many;
}

/* c = a b for a [16, 16] and b [16, 8], each lane with the fragments that primitives.cuh says. */
extern "C" __global__ void paged_decode(float *out, const float *a, const float *b) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 x[4], y[2];
    for (int i = 0; i < 4; i++) {
        const float *from = a + 16 * (g + 8 * (i % 2)) + 2 * t + 8 * (i / 2);
        x[i] = pack(from[0], from[1]);
    }
    for (int i = 0; i < 2; i++) y[i] = pack(b[8 * (2 * t + 8 * i) + g], b[8 * (2 * t + 8 * i + 1) + g]);
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma(c, x[0], x[1], x[2], x[3], y[0], y[1]);
    for (int i = 0; i < 4; i++) out[8 * (g + 8 * (i / 2)) + 2 * t + i % 2] = c[i];
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other kernels under the names of the real ones."""
    folder = tmp_path_factory.mktemp("sources")
    apply(None, folder)
    (folder / "paged_decode.cuh").write_text(KERNELS)
    for name in ("blocks.cuh", "merge.cuh"):
        (folder / name).write_text("")
    return folder


def kernel(folder: Path, name: str) -> Kernel:
    return Kernel(EmulatedLauncher(folder).module(VARIANTS[1]), name, sources.arguments(name, folder))


def test_threads_see_each_other_behind_a_barrier(folder: Path) -> None:
    """And NaN without it, in whatever order threads run."""
    out = np.zeros(3 * 64, np.float32)
    run = kernel(folder, "write_kv")
    run((3, 1, 1), 64, (out.ctypes.data, 0), 0)
    assert (out == 64 * 63 / 2).all()
    for _ in range(5):
        run((3, 1, 1), 64, (out.ctypes.data, 1), 0)
        assert np.isnan(out).any()
    run((0, 1, 1), 64, (0, 0), 0)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        (0, "a barrier that not all threads reach"),
        (1, "16 bytes at an address that is not aligned"),
        (2, "an address where nothing is"),
        (3, "lanes wait for others that never come"),
        (4, "lanes of a warp meet at different instructions"),
    ],
)
def test_a_fault_is_named_and_survived(folder: Path, flaw: int, message: str) -> None:
    out = np.zeros(4096, np.uint8)
    start = out.ctypes.data + -out.ctypes.data % 16
    run = kernel(folder, "move_blocks")
    with pytest.raises(EmulatedFault, match=f"move_blocks: {message}: thread"):
        run((2, 1, 1), 64, (start, flaw), 0)
    run((2, 1, 1), 64, (start, 9), 0)


def test_lanes_exchange(folder: Path) -> None:
    out = np.zeros(64, np.float32)
    kernel(folder, "merge_splits")((1, 1, 1), 32, (out.ctypes.data, 2**31), 0)
    lanes = np.arange(32, dtype=np.float32)
    assert (out[0::2] == (lanes + 1) % 32).all()
    pairs = (4 * (np.arange(32) // 2) + 1).astype(np.float32)
    assert (out[1::2] == pairs + np.float32(2**31)).all()


def test_the_tensor_core_multiplies(folder: Path) -> None:
    random = np.random.default_rng(5)
    a, b = (random.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    out = np.zeros((16, 8), np.float32)
    kernel(folder, "paged_decode")((1, 1, 1), 32, (out.ctypes.data, a.ctypes.data, b.ctypes.data), 0)
    assert (out == a @ b).all()


def test_arguments_are_those_of_the_source() -> None:
    """What is packed is read off each kernel's declaration."""
    assert sources.arguments("move_blocks") == (
        *(np.uint64, np.int64, np.uint64, np.uint64, np.int64, np.uint64, np.int64),
    )
    assert [kind for kind in sources.arguments("paged_decode") if kind is np.float32] == [np.float32]
    with pytest.raises(ValueError, match="no kernel attend"):
        sources.arguments("attend")
    with pytest.raises(ValueError, match="shorter than"):
        Kernel(EmulatedLauncher().module(VARIANTS[0]), "move_blocks", sources.arguments("move_blocks"))(
            (1, 1, 1), 32, (0,), 0
        )


@pytest.mark.parametrize("fault", [RuntimeError("libnvrtc.so.13 is not found\nhere"), PermissionError("read-only")])
def test_a_cupy_that_cannot_compile_is_one_sentence_too(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    """Tried when the launcher is made, not at the first step."""

    def refuse(**_: object) -> None:
        raise fault

    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="90"))
    monkeypatch.setattr(cupy_launcher, "import_cupy", lambda: SimpleNamespace(cuda=cuda, RawModule=refuse))
    with pytest.raises(
        NoGpu, match=r"^CuPy cannot compile and run a kernel here: (libnvrtc.* is not found|read-only)$"
    ):
        cupy_launcher.CupyLauncher()


def test_without_a_gpu_one_sentence_says_so() -> None:
    try:
        import_cupy()
    except NoGpu as error:
        assert str(error).startswith("CuPy ")
        assert "\n" not in str(error)
    else:
        assert cupy_launcher.CupyLauncher().device == "cuda"
