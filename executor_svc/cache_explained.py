"""How much of a prompt is cached and where it leaves the cached prefix, in numbers and one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from jitney.block_ops import ChainHits
from jitney.executor.v1 import executor_pb2 as pb
from jitney.keys import Key


def explained(
    prompt_tokens: int, block_tokens: int, hits: ChainHits, keys: Sequence[Key], model_version: str
) -> pb.ExplainCacheResponse:
    """The answer. `hits` are of the whole blocks of the prompt, `keys` those of its root and of all of them."""
    cached = hits.device_blocks + hits.cpu_blocks + hits.ssd_blocks
    return pb.ExplainCacheResponse(
        prompt_tokens=prompt_tokens,
        block_tokens=block_tokens,
        device_tokens=hits.device_blocks * block_tokens,
        cpu_tokens=hits.cpu_blocks * block_tokens,
        ssd_tokens=hits.ssd_blocks * block_tokens,
        pending_tokens=hits.pending_blocks * block_tokens,
        hit_tokens=min(cached * block_tokens, prompt_tokens - 1),
        sentence=sentence(prompt_tokens, block_tokens, hits),
        prefix_key=keys[-1] if len(keys) > 1 else b"",
        model_version=model_version,
        keys=keys,
    )


def sentence(prompt_tokens: int, block_tokens: int, hits: ChainHits) -> str:
    """Where the prompt leaves the cached prefix, and why as far as it is known."""
    whole, tail = divmod(prompt_tokens, block_tokens)
    cached = hits.device_blocks + hits.cpu_blocks + hits.ssd_blocks
    if not whole:
        return f"the prompt has {prompt_tokens} tokens, only whole blocks of {block_tokens} are cached"
    if cached >= whole and not tail:
        return "all of it is cached; its last token is computed all the same"
    if cached >= whole:
        return f"it leaves the cached prefix at token {whole * block_tokens}, where its last, unfilled block begins"
    why = "what stands behind was never computed here under this salt and model, or is kept no more"
    if not cached:
        why = "its first block was never computed here under this salt and model, or is kept no more"
    if hits.pending_blocks:
        why = f"another request computes the next {hits.pending_blocks * block_tokens} tokens now"
    return f"it leaves the cached prefix at token {cached * block_tokens}: {why}"
