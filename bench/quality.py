"""What lighter weights cost in quality: perplexity of a fixed text and agreement of greedy answers with fp32.

    python -m bench.quality [--model PATH] [--text FILE] [--new-tokens 64]

Each precision of the executor computes the same text, token by token as if each had been decoded, and continues the
beginning of each of its paragraphs greedily. fp32 with an fp32 cache is the reference. `top1` is the share of positions
at which the most likely token is the reference's, `kl` the mean divergence of the distributions in nats, `greedy` the
share of new tokens before an answer first differs, `same_answers` how many never do. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.batching import BLOCK_TOKENS
from executor_svc.kernels.library import load
from executor_svc.model.linear import Arithmetic
from executor_svc.model.model import CpuModel
from executor_svc.step_plan import SamplingRows, StepPlan
from executor_svc.tokenizer import Tokenizer, load_tokenizer
from jitney.columns import I32
from jitney.models import default_model_path
from jitney.serving import config

TEXT = Path(__file__).parent / "data" / "prose.txt"
STEP_TOKENS = 256
PROMPT_TOKENS = 24
VARIANTS: tuple[tuple[str, Arithmetic, str], ...] = (
    ("fp32", "fp32", "fp32"),
    ("fp16", "fp16", "fp16"),
    ("int16", "int16", "fp16"),
    ("int8", "int8", "fp16"),
)
"""Name, weights, cache; the first is the reference."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One precision beside the reference."""

    perplexity: float
    top1: float
    kl: float
    greedy: float
    same_answers: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a model makes of the text: log-probabilities `[tokens, vocabulary]`, and its answers `[prompts, tokens]`."""

    likely: torch.Tensor
    answers: I32


def single_tokens(ids: I32, positions: I32, rows: I32, table: I32) -> StepPlan:
    """A step of one token for each entry: at its position of its row of the table, which may come again."""
    blocks = table[rows, positions // BLOCK_TOKENS].astype(np.int64)
    return StepPlan(
        step=0,
        token_ids=ids.astype(np.int32),
        positions=positions.astype(np.int32),
        write_slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        query_start=np.arange(len(ids) + 1, dtype=np.int32),
        context_tokens=(positions + 1).astype(np.int32),
        block_table=table,
        table_rows=rows.astype(np.int32),
        sample_rows=np.arange(len(ids), dtype=np.int32),
        sampling=SamplingRows.greedy(len(ids)),
    )


def blocks_for(rows: int, tokens: int) -> I32:
    """A table of so many rows."""
    each = -(-tokens // BLOCK_TOKENS)
    return np.arange(rows * each, dtype=np.int32).reshape(rows, each)


def read(model: CpuModel, ids: I32) -> torch.Tensor:
    """Log-probabilities after each token of one text."""
    table, parts = blocks_for(1, len(ids)), []
    for first in range(0, len(ids), STEP_TOKENS):
        positions = np.arange(first, min(first + STEP_TOKENS, len(ids)), dtype=np.int32)
        logits = model.llama.forward(single_tokens(ids[positions], positions, np.zeros_like(positions), table))
        assert logits is not None
        parts.append(torch.log_softmax(logits, dim=-1))
    return torch.cat(parts)


def answer(model: CpuModel, prompts: Sequence[I32], new_tokens: int) -> I32:
    """The greedy continuation of prompts of equal length."""
    length, rows = len(prompts[0]), np.arange(len(prompts), dtype=np.int32)
    table = blocks_for(len(prompts), length + new_tokens)
    every = np.tile(np.arange(length, dtype=np.int32), len(prompts))
    drawn = model.run(single_tokens(np.concatenate(prompts), every, np.repeat(rows, length), table)).token_ids
    tokens = [drawn[length - 1 :: length]]
    for position in range(length, length + new_tokens - 1):
        tokens.append(model.run(single_tokens(tokens[-1], np.full_like(rows, position), rows, table)).token_ids)
    return np.stack(tokens, axis=1)


def compare(said: Said, reference: Said, ids: I32) -> Quality:
    """The measures of one precision."""
    real = said.likely[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:]).long()]
    divergence = (reference.likely.exp() * (reference.likely - said.likely)).sum(dim=-1).double().mean()
    agreed = np.logical_and.accumulate(said.answers == reference.answers, axis=1)
    return Quality(
        perplexity=round(float((-real.double().mean()).exp()), 4),
        top1=round(float((said.likely.argmax(dim=-1) == reference.likely.argmax(dim=-1)).double().mean()), 4),
        kl=round(float(divergence), 6),
        greedy=round(float(agreed.mean()), 4),
        same_answers=f"{int(agreed[:, -1].sum())} of {len(agreed)}",
    )


def run(path: Path, text: str, new_tokens: int) -> dict[str, Quality]:
    """Loads one precision after the other."""
    tokenizer: Tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(text)
    prompts = [tokenizer.encode(paragraph)[:PROMPT_TOKENS] for paragraph in text.split("\n\n")]
    prompts = [prompt for prompt in prompts if len(prompt) == PROMPT_TOKENS]
    needed = max(len(ids), len(prompts) * (PROMPT_TOKENS + new_tokens)) // BLOCK_TOKENS + len(prompts) + 1
    reference: Said | None = None
    found: dict[str, Quality] = {}
    print(f"{len(ids)} tokens of text, {len(prompts)} prompts of {PROMPT_TOKENS}, {new_tokens} new tokens each")
    for name, arithmetic, kv in VARIANTS:
        if arithmetic in ("int16", "int8") and load() is None:
            continue
        model = CpuModel.load(path, arithmetic=arithmetic, kv=kv, pool_blocks=needed, cache_dir=config.cache_dir())
        said = Said(read(model, ids), answer(model, prompts, new_tokens))
        del model
        gc.collect()
        reference = reference or said
        found[name] = compare(said, reference, ids)
        print(name, json.dumps(asdict(found[name])), flush=True)
    return found


def main() -> int:
    """Parses the command line, prints a line for each precision and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model", type=Path, default=None, help="GGUF file or directory; default: what `make model` got"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text, paragraphs divided by empty lines")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    found = run(options.model or default_model_path(), text, options.new_tokens)
    print(json.dumps({name: asdict(quality) for name, quality in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
