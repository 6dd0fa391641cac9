"""Jitney beside llama.cpp, transformers and vLLM on this machine: same weights, same token ids, greedy, same lengths.

    python -m bench.peers [--peers jitney,"llama.cpp F16"] [--loads decode_heavy,mixed] [--rounds 5] [--scale 0.5]
                          [--slots 4,8,16,32,64] [--drop-below 0.5] [--limit-s 300] [--results FILE] [--quick] [--list]

Each peer lives in an environment of its own in the cache directory, made when it is first needed (llama.cpp is built
from source: minutes). For each load a peer's best number of slots is found by short trials, uphill from the middle.
Then everybody serves the load once a round, one after another. A peer that is under `--drop-below` of the best peer
after a round is not measured in later ones. Each result is a line of JSON; with `--results` the lines are kept in a
file, and a run that finds them there goes on from them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from bench.common import load_average
from bench.peers.figures import Absent, Left, last_line, table
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.loads import LOADS
from bench.peers.ours import Ours
from bench.peers.packages import Transformers, VllmCpu
from bench.peers.runs import Bench, Options
from bench.peers.servers import Peer
from bench.roofline import Machine
from executor_svc.model.loader import load_weights
from jitney.models import default_model_path
from jitney.serving import config

ROUNDS = 5
SLOTS = "4,8,16,32,64"
QUICK_SCALE = 0.125
BATCHES = (1, 8, 32)
CONTEXT = 256
T = TypeVar("T")


def known_peers(model: Path) -> dict[str, Peer]:
    """By name, in the order in which they are served."""
    kind = model.stem.rpartition(".")[2] if model.suffix == ".gguf" else ""
    peers: list[Peer] = [Ours(model), Ours(model, int8=True), LlamaCpp(model, "F16"), LlamaCpp(model, "Q8_0")]
    if kind.startswith("Q"):
        peers.append(LlamaCpp(model, "as it is", kind))
    peers += [VllmCpu(model), Transformers(model, "static"), Transformers(model, "continuous")]
    return {peer.name: peer for peer in peers}


def main() -> int:
    """Parses the command line; prints a line a measurement, the table and the JSON line."""
    options = _parser().parse_args()
    model = (options.model or default_model_path()).absolute()
    peers = known_peers(model)
    if options.list:
        print("\n".join([*(f"peer  {name}" for name in peers), *(f"load  {name}" for name in LOADS)]))
        return 0
    scale = QUICK_SCALE if options.quick else options.scale
    rounds = 1 if options.quick else options.rounds
    print(f"{model.name}; {rounds} rounds, scale {scale:g}; {load_average()} at the start", flush=True)
    shape = load_weights(model, config.cache_dir()).config
    bench = Bench(
        Options(
            loads=_chosen(options.loads, LOADS),
            rounds=rounds,
            scale=scale,
            slots=[int(slots) for slots in ("16" if options.quick else options.slots).split(",")],
            drop_below=options.drop_below,
            capacity_tokens_per_s=options.capacity,
            limit_s=options.limit_s,
            file=options.results,
        ),
        _chosen(options.peers, peers),
        shape.vocabulary,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server is left behind
    asyncio.run(bench.run())
    results = bench.results
    print("\n".join(["", *table(results)]))
    for record in results.records:
        if isinstance(record, Absent):
            print(f"not measured: {record.peer}{f' in {record.load}' if record.load else ''}: {record.reason}")
        if isinstance(record, Left):
            print(
                f"left out after a round: {record.peer} in {record.load}, "
                f"at {record.share_of_best:.2f} of the best peer (limit {record.below:g})"
            )
    capacity, roofline = results.capacity(), {}
    if capacity is not None:
        bandwidth, products = capacity
        machine = Machine(torch.get_num_threads(), bandwidth.median * 1e9, products.median * 1e9)
        roofline = {batch: batch / machine.step_s(shape, batch, CONTEXT) for batch in BATCHES}
        print(f"memory {bandwidth.text(1)} GB/s, fp32 products {products.text(0)} GFLOP/s; at most, with fp16 weights:")
        for batch, most in roofline.items():
            print(f"  batch {batch:2d}, context {CONTEXT}: {most:6.1f} tokens/s")
    print(f"{load_average()} at the end")
    print(json.dumps(last_line(results, roofline.get(32))))
    return 0


def _chosen(names: str, known: dict[str, T]) -> list[T]:
    """Those that are named, comma separated; all if none is."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise SystemExit(f"{name!r} is not known; these are: {', '.join(known)}")
    return [known[name] for name in wanted]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.split("\n", 1)[0])
    add: Callable[..., object] = parser.add_argument
    add("--model", type=Path, default=None, help="default: what `make model` got")
    add("--peers", default="", help="comma separated, see --list; default: all")
    add("--loads", default="", help="comma separated, see --list; default: all")
    add("--rounds", type=int, default=ROUNDS)
    add("--scale", type=float, default=1.0, help="of the number of requests, 64 at 1")
    add("--slots", default=SLOTS, help="numbers of slots to try")
    add("--drop-below", type=float, default=0.5, help="share of the best peer under which one is left after a round")
    add("--capacity", type=float, default=0.0, help="tokens/s of Jitney for the Poisson load; default: as measured")
    add("--limit-s", type=float, default=300.0, help="a measurement that takes longer is cut")
    add("--results", type=Path, default=None, help="file of lines that are kept; a run goes on from them")
    add("--quick", action="store_true", help="one round of 8 requests with 16 slots")
    add("--list", action="store_true", help="names of peers and loads")
    return parser


if __name__ == "__main__":
    sys.exit(main())
