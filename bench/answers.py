"""How long the real model's own answers are: a few hundred varied prompts of several endpoints, kept as lengths.

    python -m bench.answers [--out bench/data/answers.json]

Takes minutes; `bench.lengths` reads the file. Nothing of a prompt or an answer is kept but counts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.live_loop import LiveLoop, Silence, services
from executor_svc.clock import MonotonicClock
from executor_svc.live_request import LiveRequest
from executor_svc.model.model import CpuModel
from executor_svc.model_runner import ModelRunner
from executor_svc.request import Sampling, Submission
from executor_svc.tokenizer import Tokenizer, Turn, load_tokenizer
from jitney import features
from jitney.models import default_model_path
from jitney.serving import config
from jitney.snapshot import Settings

ANSWERS = Path(__file__).with_name("data") / "answers.json"
MAX_TOKENS = 320
POOL_BLOCKS = 1024

THINGS = (
    "the moon", "bicycles", "bread", "the Roman army", "photosynthesis", "chess", "volcanoes", "jazz", "glaciers",
    "compilers", "inflation", "bees", "the printing press", "tides", "vaccines", "origami", "lighthouses", "democracy",
    "black holes", "coffee", "whales", "the stock market", "earthquakes", "soap", "railways", "dreams", "solar power",
    "the alphabet", "deserts", "clocks",
)  # fmt: skip
SENTENCES = (
    "The train was late, so we missed the ferry.", "She sold her house and bought a boat.", "I love this little shop!",
    "The soup was cold and the waiter rude.", "It rained for a week and the river rose.", "What a wonderful evening.",
    "He repaired the roof before winter.", "The new law changes little.", "My parcel never arrived.", "It works well.",
)  # fmt: skip
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "classify": (
        "Answer with one word, positive or negative: {sentence}",
        "Is this a complaint? Answer only yes or no. {sentence}",
        "Which of the words animal, place, thing or idea fits {thing} best? Only the word.",
    ),
    "short": (
        "In one sentence: what is interesting about {thing}?",
        "Define {thing} briefly.",
        "Was ist das Besondere an {thing}? Antworte kurz.",
        "Give {thing} a title of at most 5 words.",
    ),
    "chat": (
        "Tell me something about {thing}.",
        "I have just read about {thing}. What should I read next?",
        "Why do people care about {thing}?",
        "Qu'est-ce que {thing} ? Explique-le simplement.",
    ),
    "list": (
        "List {count} facts about {thing}.",
        "Give me {count} ideas for a talk on {thing}, as bullets.",
        "Enumerate {count} words that have to do with {thing}.",
    ),
    "essay": (
        "Explain in detail how {thing} came to be what it is today, step by step.",
        "Write an essay about {thing}.",
        "Write a story in which {thing} plays a part, in about {words} words.",
    ),
    "code": (
        "Write a Python function that prints {count} lines about {thing}.",
        "Write a short SQL table definition for a database about {thing}.",
    ),
    "rewrite": (
        "Rewrite this politely: {sentence}",
        "Translate into French: {sentence}",
        "Summarise in one sentence: {sentence} {sentence}",
    ),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt."""

    endpoint: str
    tenant: str
    text: str


def prompts(count: int, seed: int) -> Iterator[Asked]:
    """Of all endpoints, mixed; three tenants, who use them in different proportions."""
    draw = random.Random(seed)
    habits = {"shop": (4, 3, 1, 1, 0, 0, 2), "school": (0, 2, 3, 3, 3, 1, 1), "studio": (0, 1, 2, 1, 2, 4, 1)}
    for _ in range(count):
        tenant = draw.choice(sorted(habits))
        endpoint = draw.choices(sorted(ENDPOINTS), habits[tenant])[0]
        text = draw.choice(ENDPOINTS[endpoint]).format(
            thing=draw.choice(THINGS), sentence=draw.choice(SENTENCES), count=draw.randint(2, 9),
            words=draw.choice((50, 100, 200)),
        )  # fmt: skip
        yield Asked(endpoint, tenant, text)


class Asker:
    """Keeps as many requests as there are rows on their way."""

    def __init__(self, live: LiveLoop, tokenizer: Tokenizer, asked: list[Asked]) -> None:
        self._live, self._tokenizer = live, tokenizer
        self._left = list(enumerate(asked))[::-1]
        self.answers: dict[int, dict[str, object]] = {}

    def run(self, rows: int) -> list[dict[str, object]]:
        """The answers' lengths, in the order of the prompts."""
        total, told = len(self._left), time.monotonic()
        for _ in range(rows):
            self._next()
        while len(self.answers) < total:
            self._live.loop.tick()
            if time.monotonic() - told > 20:
                told = time.monotonic()
                print(f"{len(self.answers)} of {total}", flush=True)
        return [self.answers[number] for number in sorted(self.answers)]

    def _next(self) -> None:
        if not self._left:
            return
        number, asked = self._left.pop()
        ids = self._tokenizer.encode_chat([Turn("user", asked.text)])
        submission = Submission(
            client_id=f"r{number}",
            prompt_ids=ids,
            max_tokens=MAX_TOKENS,
            text=Silence(),
            sampling=Sampling(temperature=0.7, top_p=0.95, seed=number),
            stop_token_ids=self._tokenizer.eos_ids,
        )

        def heard(request: LiveRequest) -> None:
            if request.answer.finish is not None:
                self.answers[number] = {
                    "tenant": asked.tenant,
                    "endpoint": asked.endpoint,
                    "features": features.count([asked.text]),
                    "prompt_tokens": len(ids),
                    "output_tokens": request.generated,
                }
                self._next()

        self._live.submit(submission, heard)


def main() -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.answers", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ANSWERS)
    parser.add_argument("--count", type=int, default=420)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    path = default_model_path()
    tokenizer = load_tokenizer(path)
    model = CpuModel.load(path, pool_blocks=POOL_BLOCKS, cache_dir=config.cache_dir())
    torch.set_num_threads(2)
    settings = Settings(max_rows=options.rows, max_step_tokens=256, context_tokens=model.info.context_tokens)

    def runner(clock: MonotonicClock) -> ModelRunner:
        return ModelRunner(model, clock)

    with (
        services("scheduler_svc", "cache_svc") as (scheduler, cache),
        LiveLoop(scheduler.target, cache.target, settings, POOL_BLOCKS, runner) as live,
    ):
        answers = Asker(live, tokenizer, list(prompts(options.count, seed=7))).run(options.rows)
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    options.out.write_text(
        f'{{"model": {json.dumps(model.info.name)}, "max_tokens": {MAX_TOKENS}, "answers": [\n{lines}\n]}}\n'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
