"""The rules of sampling.py by the kernel of kernels/sampling.c: all rows of a step in one call.

A row's bits depend neither on other rows, nor on the number of threads, nor on the instruction set. Beside the
reference of sampling.py another token comes only where the random number, `top_p` or `min_p` meets the edge between two
tokens to within the rounding of the likelihoods, 2e-6 of them.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kernels.elementwise import NativeElementwise
from executor_svc.kernels.library import threads_for
from executor_svc.step_plan import SamplingRows, StepResult

_pointer, _i64 = ctypes.c_void_p, ctypes.c_int64
_COLUMNS: dict[str, np.dtype[np.generic]] = {
    "temperature": np.dtype(np.float32),
    "top_p": np.dtype(np.float32),
    "min_p": np.dtype(np.float32),
    "top_k": np.dtype(np.int32),
    "seed": np.dtype(np.uint64),
    "choice": np.dtype(np.int32),
    "position": np.dtype(np.int32),
    "logprobs": np.dtype(np.int32),
}
"""Of SamplingRows, in the kernel's order."""


class _Sampled(ctypes.Structure):
    """`Sampled` of kernels/sampling.c, field by field."""

    _fields_ = (
        *(("logits", _pointer), ("stride", _i64), ("rows", _i64), ("vocabulary", _i64)),
        *((name, _pointer) for name in _COLUMNS),
        *(("tokens", _pointer), ("own", _pointer), ("ids", _pointer), ("likely", _pointer), ("most", _i64)),
        *(("scratch", _pointer), ("threads", _i64)),
    )


class NativeSampler:
    """One thread at a time; the work is spread over torch's number of threads, a row to each."""

    def __init__(self, elementwise: NativeElementwise) -> None:
        self._elementwise = elementwise
        self._sample = elementwise.library.kernel("sample", elementwise.isa)
        self._scratch_bytes = elementwise.library.kernel("sample_scratch", elementwise.isa)
        self._scratch: NDArray[np.uint8] = np.empty(0, np.uint8)

    def draw(self, step: int, logits: torch.Tensor | None, rows: SamplingRows) -> StepResult:
        """See Sampler."""
        if logits is None or len(logits) == 0:
            return StepResult(step, np.empty(0, np.int32))
        count, vocabulary = logits.shape
        most = min(int(rows.logprobs.max()), vocabulary)
        if most < 0 and rows.temperature.max() <= 0.0:
            first = torch.empty(count, dtype=torch.int64)
            self._elementwise.argmax(logits, first)
            return StepResult(step, first.numpy().astype(np.int32))
        tokens = np.empty(count, np.int32)
        logprobs = np.full(count, np.nan, np.float32) if most >= 0 else None
        ids = np.full((count, most), -1, np.int32) if most > 0 else None
        likely = np.full((count, most), -np.inf, np.float32) if most > 0 else None
        columns = [np.ascontiguousarray(getattr(rows, name), dtype) for name, dtype in _COLUMNS.items()]
        threads = min(count, threads_for(logits.numel()))
        room = self._scratch_bytes(vocabulary) * threads
        if len(self._scratch) < room:
            self._scratch = np.empty(room, np.uint8)
        written = (tokens, logprobs, ids, likely)
        self._sample(
            ctypes.byref(
                _Sampled(
                    *(logits.data_ptr(), logits.stride(0), count, vocabulary),
                    *(column.ctypes.data for column in columns),
                    *(None if array is None else array.ctypes.data for array in written),
                    *(max(most, 0), self._scratch.ctypes.data, threads),
                )
            )
        )
        return StepResult(step, tokens, logprobs, ids, likely)
