"""The scheduler on the wire: bytes to a snapshot, `decide`, and a decision to bytes.

Snapshots are taken as they came, undecoded, because a decision names the digest of the very bytes. A snapshot that
is wrong ends its own stream with INVALID_ARGUMENT and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio

from jitney.errors import InvalidRequest
from jitney.scheduler.v1 import scheduler_pb2 as pb
from jitney.scheduler_codec import decode_snapshot, encode_decision
from jitney.serving import logs, tracing
from jitney.serving.server import ServiceServer, build_server
from jitney.snapshot import CONTRACT_VERSION, Snapshot
from jitney.snapshot_checks import check
from scheduler_svc.build import BUILD
from scheduler_svc.config import SERVICE, SchedulerConfig
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from scheduler_svc.policies import BUILT_IN
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS

SERVICE_NAME: Final = "jitney.scheduler.v1.Scheduler"
SLOW_US: Final = 100_000
"""A decision that takes longer is logged."""


def scheduler_server(config: SchedulerConfig) -> ServiceServer:
    """A scheduler that is ready to be served, in the running event loop."""
    server = build_server(config, SERVICE)
    server.grpc.add_generic_rpc_handlers((handlers(),))
    server.offer(SERVICE_NAME)
    logs.get("server").info("build", build=BUILD, contract_version=CONTRACT_VERSION)
    return server


def handlers() -> grpc.GenericRpcHandler:
    """The methods of the service. Decide and DecideOnce take and give bytes."""
    unary: Callable[..., Any] = grpc.unary_unary_rpc_method_handler
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Decide": grpc.stream_stream_rpc_method_handler(_decide),
            "DecideOnce": unary(_decide_once),
            "Explain": unary(_explain, pb.ExplainRequest.FromString, pb.Explanation.SerializeToString),
            "ListPolicies": unary(
                _list_policies, pb.ListPoliciesRequest.FromString, pb.ListPoliciesResponse.SerializeToString
            ),
        },
    )


def answer(data: bytes) -> bytes:
    """The serialised decision for a serialised snapshot. InvalidRequest for one that is wrong."""
    started_ns = time.perf_counter_ns()
    snapshot = _read(data)
    with tracing.step("decide", snapshot.executor, snapshot.incarnation, snapshot.step) as span:
        decided = encode_decision(decide(snapshot))
        span.set(running=snapshot.running.rows, waiting=snapshot.waiting.rows)
    took_us = (time.perf_counter_ns() - started_ns) // 1000
    if took_us > SLOW_US:
        logs.get("decide").warning("slow", took_us=took_us, executor=snapshot.executor, step=snapshot.step)
    return decided


def _read(data: bytes) -> Snapshot:
    snapshot = decode_snapshot(data)
    check(snapshot)
    return snapshot


async def _decide(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    await context.send_initial_metadata(())  # tells the executor that somebody is there before it asks
    log = logs.get("decide").bind(peer=context.peer())
    log.info("stream opened")
    try:
        async for data in requests:
            await context.write(answer(data))
    except InvalidRequest as error:
        log.warning("snapshot refused", error=error.message)
        raise
    finally:
        log.info("stream ended")


async def _decide_once(data: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return answer(data)


async def _explain(
    request: pb.ExplainRequest, _: grpc.aio.ServicerContext[pb.ExplainRequest, pb.Explanation]
) -> pb.Explanation:
    snapshot = _read(request.snapshot.SerializeToString(deterministic=True))
    said = explain(snapshot, request.id)
    return pb.Explanation(
        state=said.state,
        reason=pb.WaitReason.Name(said.reason),
        sentence=said.sentence,
        needed=said.needed,
        available=said.available,
        ahead=said.ahead,
    )


async def _list_policies(
    _: pb.ListPoliciesRequest, __: grpc.aio.ServicerContext[pb.ListPoliciesRequest, pb.ListPoliciesResponse]
) -> pb.ListPoliciesResponse:
    return pb.ListPoliciesResponse(
        build=BUILD,
        contract_version=CONTRACT_VERSION,
        policies=[
            pb.PolicyInfo(
                name=policy.name,
                summary=policy.summary,
                parameters=[
                    pb.ParameterInfo(
                        name=parameter.name,
                        summary=parameter.summary,
                        minimum=parameter.minimum,
                        maximum=parameter.maximum,
                        default_value=parameter.default,
                    )
                    for parameter in policy.parameters
                ],
                waiting_columns=sorted(COMMON_WAITING_COLUMNS + policy.waiting_columns),
            )
            for policy in BUILT_IN.kinds
        ],
    )
