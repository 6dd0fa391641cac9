"""Hit rates of public traces through the real ledger: the cost-aware order, LRU, and the best possible.

    python -m bench.prefix_traces --conversation FILE --synthetic FILE --agentic FILE [--plot FILE.svg] [--sizes 5 20]

`bench.trace_files` says where the files are to be had; leave out those that you do not have. The requests of a trace
come one after the other, each as the executor sends it: Acquire and Reserve, then Seal and Release. Pools have 1 to
100 % of the working set, beside Belady's order over blocks that go leaves first, and a cache without a limit. Costs are
those of the prompts at $0.14 for a million missed and $0.0028 for a million hit tokens. `kv_bytes_scale` says what KV
of half and a quarter of the bytes would buy in the memory of the 10 % pool. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.belady import belady_hits
from bench.prefix_plot import plot
from bench.trace_files import Trace, read_agentic, read_mooncake
from cache_svc.blocks import BlockTable
from cache_svc.cost_order import ORDERS, CostOrder
from cache_svc.eviction import OrderOf
from cache_svc.ledger import Ledger
from jitney.block_ops import Acquire, Batch, Release, RequestId, Reserve, ResultCode, Seal
from jitney.keys import Key

SIZES = (1, 2, 5, 10, 20, 50, 100)
JUDGED = (5, 10, 20, 50)
MISSED_USD = 0.14e-6
HIT_USD = 0.0028e-6
KV_BYTES_SCALES = (1.0, 0.5, 0.25)
SCALED_SIZE = 10
READERS: dict[str, Callable[[Path, str], Trace]] = {
    "conversation": read_mooncake,
    "synthetic": read_mooncake,
    "agentic": read_agentic,
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a trace came to in one pool."""

    hit_blocks: int
    us_per_request: float


def replay(trace: Trace, blocks: int, order: OrderOf) -> Replayed:
    """Sends the trace through a ledger with so many blocks, empty at first.

    A chain longer than the pool is cut to its length. Token ids say nothing here: one a block stands for all.
    """
    ledger = Ledger(BlockTable(blocks, order=order), 1)
    keys: dict[int, Key] = {}
    root = Key(bytes(32))
    before: dict[str, Any] = {}
    hits = 0
    started = time.perf_counter()
    for number, (chain, generated) in enumerate(zip(trace.chains, trace.generated_tokens, strict=True), 1):
        request = RequestId(number)
        names = [keys.get(block) or keys.setdefault(block, _key(block)) for block in chain[:blocks]]
        batch = Batch(
            number, acquires=[Acquire(request, names)], reserves=[Reserve(request, names, len(names))], **before
        )
        answer = ledger.apply(batch)
        found, new = len(answer.acquires[0].blocks), answer.reserves[0].blocks
        assert answer.reserves[0].code is ResultCode.OK and found + len(new) == len(names)
        hits += found
        parent = names[found - 1] if found else root
        release = Release(request, generated_tokens=generated)
        seal = Seal(request, new, names[found:], parent, bytes(4 * len(new)), "default", b"", "")
        before = {"seals": [seal] if new else [], "releases": [release]}
    return Replayed(hits, (time.perf_counter() - started) * 1e6 / max(1, len(trace.chains)))


def _key(block: int) -> Key:
    return Key(hashlib.sha256(block.to_bytes(8, "little")).digest())


def measure(trace: Trace, sizes: Sequence[int]) -> dict[str, Any]:
    """One trace at all sizes."""
    total, working_set = trace.total, trace.distinct
    pools = []
    for percent in sizes:
        blocks = max(1, working_set * percent // 100)
        done = {name: replay(trace, blocks, order) for name, order in ORDERS.items()}
        hits = {name: each.hit_blocks for name, each in done.items()} | {"belady": belady_hits(trace.chains, blocks)}
        gap = hits["belady"] - hits["lru"]
        pool: dict[str, Any] = {
            "percent": percent,
            "blocks": blocks,
            "hit_rate": {name: round(count / total, 5) for name, count in hits.items()},
            "usd": {name: round(_usd(trace, count), 4) for name, count in hits.items()},
            "gap_closed": round((hits["cost"] - hits["lru"]) / gap, 4) if gap else None,
            "vs_lru": round(hits["cost"] / max(1, hits["lru"]), 5),
            "us_per_request": {name: round(each.us_per_request, 1) for name, each in done.items()},
        }
        pools.append(pool)
        rates = ", ".join(f"{name} {rate:.4f}" for name, rate in pool["hit_rate"].items())
        print(f"{trace.name:12} {percent:3} %: {rates}; gap closed {pool['gap_closed']}", flush=True)
    infinite = total - working_set
    return {
        "requests": len(trace.chains),
        "blocks_asked": total,
        "working_set_blocks": working_set,
        "block_tokens": trace.block_tokens,
        "infinite": {"hit_rate": round(infinite / total, 5), "usd": round(_usd(trace, infinite), 4)},
        "uncached_usd": round(_usd(trace, 0), 4),
        "pools": pools,
        "kv_bytes_scale": [_scaled(trace, scale) for scale in KV_BYTES_SCALES],
    }


def _scaled(trace: Trace, scale: float) -> dict[str, float]:
    """The same bytes hold 1 / scale as many blocks."""
    blocks = max(1, int(trace.distinct * SCALED_SIZE / 100 / scale))
    hits = replay(trace, blocks, CostOrder).hit_blocks
    rate, usd = hits / trace.total, _usd(trace, hits)
    return {"scale": scale, "blocks": blocks, "hit_rate": round(rate, 5), "usd": round(usd, 4)}


def _usd(trace: Trace, hit_blocks: int) -> float:
    hit = hit_blocks * trace.block_tokens
    return hit * HIT_USD + (sum(trace.prompt_tokens) - hit) * MISSED_USD


def run(paths: dict[str, Path], sizes: Sequence[int] = SIZES, first_session: int = 0) -> dict[str, Any]:
    """All traces that there are paths for (names: `READERS`), and the three figures over them; None without a size
    that they need."""
    readers = READERS | {"agentic": partial(read_agentic, first=first_session)}
    traces = {name: measure(readers[name](path, name), sizes) for name, path in paths.items()}
    pools = [(trace, pool) for trace in traces.values() for pool in trace["pools"]]
    whole = [p["hit_rate"]["cost"] / trace["infinite"]["hit_rate"] for trace, p in pools if p["percent"] == 100]
    closed = [p["gap_closed"] for _, p in pools if p["percent"] in JUDGED and p["gap_closed"] is not None]
    return {
        "hit_vs_infinite": round(min(whole), 4) if whole else None,
        "lru_to_belady_gap_closed": round(sum(closed) / len(closed), 4) if closed else None,
        "worst_vs_lru": round(min(pool["vs_lru"] for _, pool in pools), 4) if pools else None,
        "traces": traces,
    }


def main() -> int:
    """Prints a line a pool, and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_traces", description=__doc__.split("\n", 1)[0])
    for name in READERS:
        parser.add_argument(f"--{name}", type=Path, help="the trace's file, see bench/trace_files.py")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="percent of the working set")
    parser.add_argument("--first-session", type=int, default=0, help="of the agentic ones, 0 to 7: other eighths")
    parser.add_argument("--plot", type=Path, help="where to write hit rates by size, as SVG")
    options = parser.parse_args()
    paths = {name: path for name in READERS if (path := getattr(options, name)) is not None}
    if not paths:
        parser.error("name at least one trace; bench/trace_files.py says where they are to be had")
    found = run(paths, options.sizes, options.first_session)
    if options.plot:
        options.plot.write_text(plot(found["traces"]), encoding="utf-8")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
