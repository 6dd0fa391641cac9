"""Traces through the ledger, beside the best order there can be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.belady import belady_hits
from bench.prefix_plot import plot
from bench.prefix_traces import replay, run
from bench.trace_files import Trace, read_agentic, read_mooncake
from cache_svc.cost_order import ORDERS

PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


def chains_of(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Equal prefixes get equal numbers."""
    numbers: dict[tuple[int, ...], int] = {}
    return [[numbers.setdefault(tuple(path[: at + 1]), len(numbers)) for at in range(len(path))] for path in paths]


def best_hits(chains: Sequence[Sequence[int]], blocks: int, cached: frozenset[tuple[int, ...]] = frozenset()) -> int:
    """By trying every way to evict."""
    if not chains:
        return 0
    chain = tuple(chains[0][:blocks])
    prefixes = [chain[: at + 1] for at in range(len(chain))]
    hits = sum(prefix in cached for prefix in prefixes)
    others = [prefix for prefix in cached if prefix not in prefixes]
    kept = [set(some) for count in range(len(others) + 1) for some in itertools.combinations(others, count)]
    closed = [
        some
        for some in kept
        if len(some) + len(prefixes) <= blocks
        and all(p[:-1] in some or p[:-1] in prefixes or len(p) == 1 for p in some)
    ]
    return hits + max(best_hits(chains[1:], blocks, frozenset([*some, *prefixes])) for some in closed)


@given(paths=PATHS, blocks=st.integers(3, 5))
@settings(max_examples=60, deadline=None)
def test_no_order_hits_more_than_belady(paths: list[list[int]], blocks: int) -> None:
    chains = chains_of(paths)
    best = belady_hits(chains, blocks)
    assert best == best_hits(chains, blocks)
    trace = Trace("t", 16, chains, [100] * len(chains), [50] * len(chains))
    for order in ORDERS.values():
        assert replay(trace, blocks, order).hit_blocks <= best
    assert replay(trace, max(trace.distinct, blocks), ORDERS["cost"]).hit_blocks == trace.total - trace.distinct


def mooncake(folder: Path) -> Path:
    """Three conversations, whose turns alternate; each prompt ends in a block that is not full."""
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for turn, user in itertools.product(range(6), range(3)):
            ids = [0, *(100 * user + 10 + at for at in range(turn)), 1000 + 10 * turn + user]
            file.write(json.dumps({"input_length": 512 * len(ids) - 100, "output_length": 9, "hash_ids": ids}) + "\n")
    return path


def test_the_last_block_of_a_prompt_is_not_full(tmp_path: Path) -> None:
    trace = read_mooncake(mooncake(tmp_path), "m")
    assert (trace.total, trace.distinct, trace.block_tokens) == (3 * (1 + 2 + 3 + 4 + 5 + 6), 1 + 3 * 5, 512)


def test_figures_of_a_small_trace(tmp_path: Path) -> None:
    found = run({"conversation": mooncake(tmp_path)})
    assert found["hit_vs_infinite"] == 1.0 and found["worst_vs_lru"] > 0
    trace = found["traces"]["conversation"]
    assert [pool["percent"] for pool in trace["pools"]] == [1, 2, 5, 10, 20, 50, 100]
    assert trace["infinite"]["usd"] == pytest.approx(trace["pools"][-1]["usd"]["cost"])
    assert [each["blocks"] for each in trace["kv_bytes_scale"]] == [1, 3, 6]
    picture = ElementTree.fromstring(plot(found["traces"]))
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 3


def test_agentic_sessions_share_their_system_prompt(tmp_path: Path) -> None:
    def request(at: float, *runs: tuple[int, int]) -> dict[str, object]:
        return {"t": at, "out": 9, "in": 64 * sum(last - first + 1 for first, last in runs), "hash_runs": runs}

    session = {
        "block_size": 64,
        "system_tokens": 512,
        "tool_tokens": 512,
        "requests": [request(0, (1, 24)), request(5, (1, 32)), {"requests": [request(2, (1, 16), (40, 55))]}],
    }
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for _ in range(9)))
    trace = read_agentic(path, "a")
    assert len(trace.chains) == 6
    first, sub_agent, second = trace.chains[:3]
    assert first == second[:3] and first[:2] == sub_agent[:2] and first[2] != sub_agent[2]
    assert trace.chains[3][:2] == first[:2] and trace.chains[3][2] != first[2]
