"""`python -m bench.always_swaps`: a scheduler that believes that a prefill takes for ever, so that every victim for
which there is room is swapped, and whatever lies in a lower tier is loaded."""

from __future__ import annotations

import sys
from dataclasses import replace

from jitney.decision import Decision
from jitney.serving.config import load_or_exit
from jitney.serving.server import build_server, run, serve_until_signal
from jitney.snapshot import Snapshot
from scheduler_svc.config import SERVICE, SchedulerConfig
from scheduler_svc.decide import decide
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.server import SERVICE_NAME, handlers


def never_computed_again(snapshot: Snapshot) -> Snapshot:
    """The same, with a prefill of one token a second."""
    return replace(snapshot, rates=replace(snapshot.rates, prefill_tokens_per_s=1))


def swap(snapshot: Snapshot, policies: PolicyBook) -> Decision:
    """The real `decide`, of that."""
    return decide(never_computed_again(snapshot), policies)


async def main(config: SchedulerConfig) -> int:
    """Serves until a signal."""
    server = build_server(config, SERVICE)
    server.grpc.add_generic_rpc_handlers((handlers(BUILT_IN, swap),))
    server.offer(SERVICE_NAME)
    return await serve_until_signal(server)


if __name__ == "__main__":
    sys.exit(run(main(load_or_exit(SchedulerConfig, SERVICE))))
