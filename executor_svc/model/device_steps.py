"""One step on a device, forward and sampling, without waiting for it.

Steps in which every row computes one token run over fixed buffers: rows are padded to the next bucket, tables to the
next width, and forward and sampling are each recorded once a size (graphs.py) and replayed. Rows of padding have no
context, write nowhere, and what they yield is not looked at. Other steps run as they are.

Tokens stay on the device: those that a step drew are in `drawn`, by its rows, and the next step may name them there
before the host has seen them (`step_plan.drawn_by`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from executor_svc.attention_device import DecodeRows, DevicePlan, tables_of
from executor_svc.model.device_buffers import Field, StaticInputs
from executor_svc.model.device_llama import DeviceLlama
from executor_svc.model.graphs import Recorder, Work, bucket_of, width_of
from executor_svc.sampling_device import COLUMNS, Way, column_values, draw, log_probabilities, way_of
from executor_svc.step_plan import MAX_LOGPROBS, StepPlan

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Outputs:
    """What steps leave on the device, for up to `rows` rows."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        top = min(MAX_LOGPROBS, vocabulary)
        self.logits = torch.zeros((rows, vocabulary), dtype=torch.float32, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int32, device=device)
        self.own = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_ids = torch.zeros((rows, top), dtype=torch.int32, device=device)
        self.top_values = torch.zeros((rows, top), dtype=torch.float32, device=device)


class DecodeSteps:
    """Steps of up to `rows` rows of one token each, over tables of `width` blocks."""

    def __init__(self, llama: DeviceLlama, rows: int, width: int, outputs: Outputs, recorder: Recorder) -> None:
        self._llama, self._outputs, self._recorder = llama, outputs, recorder
        self._rows, self._width = rows, width
        fields: dict[str, Field] = {
            "slots": (INT64, (rows,)),
            "token_ids": (INT32, (rows,)),
            "positions": (INT32, (rows,)),
            "contexts": (INT32, (rows,)),
            "tables": (INT32, (rows, width)),
        }
        self._inputs = StaticInputs(fields, llama.device)
        self._columns = StaticInputs({name: (dtype, (rows,)) for name, dtype in COLUMNS.items()}, llama.device)
        device = self._inputs.device
        self._planned = DevicePlan(rows, device["slots"], DecodeRows(device["tables"], device["contexts"]))
        self._forward: Work | None = None
        self._sampling: dict[tuple[Way, bool], Work] = {}

    def launch(self, plan: StepPlan, way: Way, logprobs: bool) -> None:
        """Queues the step."""
        self._fill(plan)
        self._inputs.send()
        if self._forward is None:
            self._forward = self._recorder.record(self._compute)
        else:
            self._forward()
        if way is not Way.GREEDY:
            self._fill_columns(plan)
            self._columns.send()
        sampling = self._sampling.get((way, logprobs))
        if sampling is None:
            self._sampling[way, logprobs] = self._recorder.record(partial(self._sample, way, logprobs))
        else:
            sampling()

    def make_ready(self, ways: Sequence[tuple[Way, bool]] = ((Way.GREEDY, False),)) -> None:
        """Records the forward pass and these ways of sampling (with log-probabilities or not), over rows of padding."""
        self._fill(None)
        self._inputs.send()
        if self._forward is None:
            self._forward = self._recorder.record(self._compute)
        for way, logprobs in ways:
            if (way, logprobs) not in self._sampling:
                self._sampling[way, logprobs] = self._recorder.record(partial(self._sample, way, logprobs))

    def _fill(self, plan: StepPlan | None) -> None:
        host = self._inputs.next()
        count = plan.rows if plan is not None else 0
        for name, padding in (("slots", -1), ("token_ids", 0), ("positions", 0), ("contexts", 0), ("tables", 0)):
            host[name][count:] = padding
        if plan is not None:
            host["slots"][:count] = plan.write_slots
            host["token_ids"][:count] = plan.token_ids
            host["positions"][:count] = plan.positions
            host["contexts"][:count] = plan.context_tokens
            size = self._llama.backend.shape.block_tokens
            host["tables"][:count] = tables_of(plan, np.arange(count), self._width, size)

    def _fill_columns(self, plan: StepPlan) -> None:
        host = self._columns.next()
        for name, values in column_values(plan.sampling).items():
            host[name].fill(0)
            host[name][plan.sample_rows] = values

    def _compute(self) -> None:
        device = self._inputs.device
        tokens = known(device["token_ids"], self._outputs.drawn)
        self._outputs.logits[: self._rows].copy_(
            self._llama.forward(tokens, device["positions"], self._planned, sampled=None)
        )

    def _sample(self, way: Way, logprobs: bool) -> None:
        outputs, rows = self._outputs, self._rows
        logits = outputs.logits[:rows]
        drawn = draw(logits, self._columns.device, way)
        outputs.drawn[:rows].copy_(drawn)
        if logprobs:
            own, ids, values = log_probabilities(logits, drawn)
            outputs.own[:rows].copy_(own)
            outputs.top_ids[:rows].copy_(ids)
            outputs.top_values[:rows].copy_(values)


class DeviceSteps:
    """Queues steps of up to `max_rows` rows, whose contexts have up to `max_blocks` blocks."""

    def __init__(self, llama: DeviceLlama, max_rows: int, max_blocks: int, recorder: Recorder) -> None:
        self._llama, self._recorder = llama, recorder
        self._max_blocks = max_blocks
        self.max_rows = bucket_of(max_rows)
        self.outputs = Outputs(self.max_rows, llama.config.vocabulary, llama.device)
        self._decode: dict[tuple[int, int], DecodeSteps] = {}

    def launch(self, plan: StepPlan) -> None:
        """Queues the step; what its sampling rows drew is in `outputs`, by row, once it has run.

        ValueError: it has more rows than were made room for.
        """
        if plan.rows > self.max_rows:
            raise ValueError(f"a step of {plan.rows} rows, at most {self.max_rows} are made room for")
        way, logprobs = way_of(plan.sampling), bool((plan.sampling.logprobs >= 0).any())
        if plan.tokens == plan.rows and len(plan.sample_rows):
            blocks = self._llama.backend.blocks_of(int(plan.context_tokens.max()))
            self.decode_steps(plan.rows, blocks).launch(plan, way, logprobs)
        else:
            self._launch_mixed(plan, way, logprobs)

    def decode_steps(self, rows: int, blocks: int) -> DecodeSteps:
        """Those for so many rows whose contexts have so many blocks."""
        key = bucket_of(rows), width_of(blocks, self._llama.backend.width_growth, self._max_blocks)
        steps = self._decode.get(key)
        if steps is None:
            steps = self._decode[key] = DecodeSteps(self._llama, *key, self.outputs, self._recorder)
        return steps

    def _launch_mixed(self, plan: StepPlan, way: Way, logprobs: bool) -> None:
        """A step with prefills, over buffers of its own."""
        backend, outputs = self._llama.backend, self.outputs
        planned = backend.plan(plan)
        tokens = known(backend.send(plan.token_ids), outputs.drawn)
        last = backend.send((plan.query_start[1:][plan.sample_rows] - 1).astype(np.int64))
        logits = self._llama.forward(tokens, backend.send(plan.positions), planned, last).float()
        if not len(plan.sample_rows):
            return
        columns = {name: backend.send(values) for name, values in column_values(plan.sampling).items()}
        rows = backend.send(plan.sample_rows.astype(np.int64))
        drawn = draw(logits, columns, way)
        outputs.drawn.index_copy_(0, rows, drawn)
        if logprobs:
            own, ids, values = log_probabilities(logits, drawn)
            outputs.own.index_copy_(0, rows, own)
            outputs.top_ids.index_copy_(0, rows, ids)
            outputs.top_values.index_copy_(0, rows, values)


def known(token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Token ids int64, those of `drawn_by` looked up."""
    ids = token_ids.long()
    return torch.where(ids < 0, drawn[(-1 - ids).clamp_min_(0)].long(), ids)
