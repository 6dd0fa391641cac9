"""Public traces of prompts as chains of blocks: Mooncake's, and agentic coding sessions.

- Mooncake (Apache-2.0): `FAST25-release/traces/conversation_trace.jsonl` and `synthetic_trace.jsonl` of
  https://github.com/kvcache-ai/Mooncake. Blocks of 512 tokens; the last id of a request is of a block that its prompt
  fills only in part, which no cache of whole blocks can keep: it is left out, its tokens count as missed.
- Agentic sessions (Apache-2.0): `traces/trace_*.json` of https://github.com/callanjfox/kv-cache-tester, one session a
  line, with `hash_ids` or, shorter, `hash_runs` of [first, last]. Blocks of 64 tokens; ids are local to a session.

Both may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SESSION_EVERY_S = 125.0
"""Between the starts of two agentic sessions: some fifteen are active at a time."""
BLOCKS_IN_ONE = 8
"""Of an agentic session: 512 tokens, as in the other traces."""
SESSIONS_OF = 8
"""One agentic session of so many is taken."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`chains` [request][block]: equal numbers are equal prefixes. `prompt_tokens`, `generated_tokens` [request]."""

    name: str
    block_tokens: int
    chains: Sequence[Sequence[int]]
    prompt_tokens: Sequence[int]
    generated_tokens: Sequence[int]

    @property
    def total(self) -> int:
        """Blocks asked for."""
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        """The working set: blocks that an infinite cache would hold in the end."""
        return len({block for chain in self.chains for block in chain})


def open_trace(path: Path) -> IO[str]:
    """The file as text."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def read_mooncake(path: Path, name: str) -> Trace:
    """A trace of Mooncake's, requests in their order."""
    chains, tokens, generated, size = [], [], [], 512
    with open_trace(path) as lines:
        for line in lines:
            request = json.loads(line)
            tokens.append(request["input_length"])
            generated.append(request["output_length"])
            chains.append(request["hash_ids"][: request["input_length"] // size])
    return Trace(name, size, chains, tokens, generated)


def read_agentic(path: Path, name: str, first: int = 0) -> Trace:
    """Every eighth session from number `first` on, started one after the other, their requests merged by time.

    The system prompt and the tools, the first blocks of each session, are one prefix common to all.
    """
    requests: list[tuple[float, int, int, dict[str, Any]]] = []
    with open_trace(path) as lines:
        for number, line in enumerate(lines):
            if number % SESSIONS_OF != first:
                continue
            session = json.loads(line)
            common = (session["system_tokens"] + session["tool_tokens"]) // session["block_size"]
            start = number // SESSIONS_OF * SESSION_EVERY_S
            requests += [(start + each["t"], number, common, each) for each in _requests(session["requests"])]
    requests.sort(key=lambda request: request[:2])
    numbers: dict[tuple[int, int, int], int] = {}
    chains = []
    for _, session_number, common, request in requests:
        chain: list[int] = []
        before = -1
        ids = _ids(request)
        for at in range(BLOCKS_IN_ONE - 1, len(ids), BLOCKS_IN_ONE):
            key = (before, -1, at) if at < common else (before, session_number, ids[at])
            before = numbers.setdefault(key, len(numbers))
            chain.append(before)
        chains.append(chain)
    prompts, generated = ([request[what] for *_, request in requests] for what in ("in", "out"))
    return Trace(name, 64 * BLOCKS_IN_ONE, chains, prompts, generated)


def _requests(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of the session itself and of its sub-agents."""
    for entry in entries:
        if "in" in entry and ("hash_runs" in entry or "hash_ids" in entry):
            yield entry
        yield from _requests(entry.get("requests", ()))


def _ids(request: dict[str, Any]) -> list[int]:
    if "hash_ids" in request:
        return list(request["hash_ids"])
    return [number for first, last in request["hash_runs"] for number in range(first, last + 1)]
