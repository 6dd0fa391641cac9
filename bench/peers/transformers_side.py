"""transformers, with static or continuous batches; runs in an environment of its own. Lines: see `bench.peers.piped`.

    transformers_side.py FOLDER SLOTS static|continuous

A static batch takes what waits, as many as there are slots, in order of arrival, and runs until its longest answer is
done; prompts are padded on the left.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

GATHER_S = 0.02  # requests sent at once are taken together


def say(**event: Any) -> None:
    """To the bench."""
    os.write(OUT, json.dumps(event).encode() + b"\n")


class Requests:
    """What was asked, read by a thread."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._waiting.put(json.loads(line))
        self._waiting.put(None)

    def take(self, most: int) -> list[dict[str, Any]]:
        """At least one, at most so many; none at the end."""
        taken: list[dict[str, Any]] = []
        while len(taken) < most:
            try:
                asked = self._waiting.get(timeout=GATHER_S if taken else None)
            except queue.Empty:
                break
            if asked is None:
                break
            taken.append(asked)
        return taken


class Heard(BaseStreamer):
    """Tells of each step's tokens, of rows that are not done."""

    def __init__(self, batch: list[dict[str, Any]]) -> None:
        self._left = {asked["id"]: asked["new_tokens"] for asked in batch}
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The prompts first, then a token a row."""
        if self._is_prompt:
            self._is_prompt = False
            return
        came = [[number, 1] for number, left in self._left.items() if left > 0]
        for number, _ in came:
            self._left[number] -= 1
        say(came=came)

    def end(self) -> None:
        """Nothing to say."""


def serve_static(model: Any, requests: Requests, slots: int) -> None:
    """Batch by batch."""
    while batch := requests.take(slots):
        longest = max(len(asked["prompt"]) for asked in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, asked in enumerate(batch):
            ids[row, longest - len(asked["prompt"]) :] = torch.tensor(asked["prompt"])
            mask[row, longest - len(asked["prompt"]) :] = 1
        count = max(asked["new_tokens"] for asked in batch)
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=Heard(batch),
        )


def serve_continuous(model: Any, requests: Requests, slots: int) -> None:
    """By its own continuous batching."""
    settings: Any = GenerationConfig
    manager = model.init_continuous_batching(
        generation_config=settings(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=4096, max_batch_tokens=512, max_requests_per_batch=slots
        ),
    )
    manager.start()
    said: dict[str, int] = {}

    def tell() -> None:
        for output in manager:
            if output.error:
                say(failed=output.error)
            count = len(output.generated_tokens)
            came = count - said.get(output.request_id, 0)
            said[output.request_id] = count
            if came > 0:
                say(came=[[int(output.request_id), came]])
        fatal = manager.background_thread_status.fatal_error
        if fatal is not None:
            say(failed=f"{type(fatal).__name__}: {fatal}")
            os._exit(1)

    threading.Thread(target=tell, daemon=True).start()
    while batch := requests.take(1):
        (asked,) = batch
        manager.add_request(
            asked["prompt"], request_id=str(asked["id"]), max_new_tokens=asked["new_tokens"], streaming=True
        )


@torch.inference_mode()
def main() -> None:
    """Loads the model in fp32, the fastest type of this library on a CPU without half-precision arithmetic."""
    folder, slots, way = sys.argv[1:]
    try:
        models: Any = AutoModelForCausalLM
        model = models.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        requests = Requests()
        say(ready=True)
        (serve_static if way == "static" else serve_continuous)(model, requests, int(slots))
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    OUT = os.dup(1)  # what others print must not come between
    os.dup2(2, 1)
    main()
