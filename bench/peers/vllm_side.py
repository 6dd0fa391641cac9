"""vLLM's engine; runs in an environment of its own. Lines: see `bench.peers.piped`.

vllm_side.py FOLDER SLOTS CONTEXT DTYPE
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


def say(**event: Any) -> None:
    """To the bench."""
    os.write(OUT, json.dumps(event).encode() + b"\n")


async def serve(engine: AsyncLLM) -> None:
    """Until its input ends."""
    reader = asyncio.StreamReader(1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(engine, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def answer(engine: AsyncLLM, asked: dict[str, Any]) -> None:
    """One request."""
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=asked["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompt = {"prompt_token_ids": asked["prompt"]}
    async for output in engine.generate(prompt, sampling, request_id=str(asked["id"])):
        count = len(output.outputs[0].token_ids)
        if count:
            say(came=[[asked["id"], count]])


async def main() -> None:
    """Starts the engine, warms it up, serves."""
    folder, slots, context, dtype = sys.argv[1:]
    try:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                dtype=dtype,
                max_num_seqs=int(slots),
                max_model_len=int(context),
                disable_log_stats=True,
            )
        )
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}")
        raise
    say(ready=True)
    await serve(engine)
    engine.shutdown()


if __name__ == "__main__":
    OUT = os.dup(1)  # what others print must not come between
    os.dup2(2, 1)
    asyncio.run(main())
