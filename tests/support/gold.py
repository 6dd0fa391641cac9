"""GOLD(r): the tokens of a request run alone on a fresh simulated server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitney.snapshot import Settings
from simulator.simulation import Simulation, Watched


def gold(settings: Settings, watched: Watched, stop: Sequence[str] = ()) -> list[int]:
    """What the request yields alone, in one chunk, with an empty cache and all the room it needs."""
    asked = watched.request.submission
    tokens = len(asked.prompt_ids) + asked.max_tokens
    blocks = -(-tokens // settings.block_tokens) + 4
    roomy = replace(settings, max_step_tokens=tokens, chunk_cap_tokens=tokens, context_tokens=max(tokens, 16))
    alone = Simulation(roomy, blocks)
    same = alone.submit_choices(
        asked.prompt_ids.tolist(),
        asked.max_tokens,
        1,
        first_choice=asked.choice,
        stop=stop,
        stop_token_ids=sorted(asked.stop_token_ids),
        sampling=asked.sampling,
    )
    alone.run_until_idle()
    return same[0].answer.token_ids
