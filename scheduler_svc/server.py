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
from scheduler_svc.config import SERVICE, SchedulerConfig
from scheduler_svc.decide import decide
from scheduler_svc.explain import explain
from scheduler_svc.memory import Memory
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.base import COMMON_WAITING_COLUMNS, Policy
from scheduler_svc.policies.custom import with_custom
from scheduler_svc.tables import Tables

SERVICE_NAME: Final = "jitney.scheduler.v1.Scheduler"
SLOW_US: Final = 100_000
"""A decision that takes longer is logged."""


def scheduler_server(config: SchedulerConfig) -> ServiceServer:
    """A scheduler that is ready to be served, in the running event loop. InvalidRequest if its policy is none."""
    policies = with_custom(config.policy)
    server = build_server(config, SERVICE)
    server.grpc.add_generic_rpc_handlers((handlers(policies),))
    server.offer(SERVICE_NAME)
    names = [policy.name for policy in policies.kinds]
    logs.get("server").info("build", build=policies.build, contract_version=CONTRACT_VERSION, policies=names)
    return server


def handlers(policies: PolicyBook = BUILT_IN) -> grpc.GenericRpcHandler:
    """The methods of the service. Decide and DecideOnce take and give bytes."""
    service = _Service(policies)
    unary: Callable[..., Any] = grpc.unary_unary_rpc_method_handler
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Decide": grpc.stream_stream_rpc_method_handler(service.decide),
            "DecideOnce": unary(service.decide_once),
            "Explain": unary(service.explain, pb.ExplainRequest.FromString, pb.Explanation.SerializeToString),
            "ListPolicies": unary(
                service.list_policies, pb.ListPoliciesRequest.FromString, pb.ListPoliciesResponse.SerializeToString
            ),
        },
    )


def answer(data: bytes, policies: PolicyBook = BUILT_IN, tables: Tables | None = None) -> bytes:
    """The serialised decision for a serialised snapshot. InvalidRequest for one that is wrong, Conflict for one that
    names a table which is not held here."""
    started_ns = time.perf_counter_ns()
    snapshot = _read(data, tables or Tables())
    if Memory.read(snapshot.memory).lost:
        told = {"executor": snapshot.executor, "step": snapshot.step, "version": snapshot.memory.version}
        logs.get("decide").warning("policy memory in an unknown format: all start empty", **told)
    with tracing.step("decide", snapshot.executor, snapshot.incarnation, snapshot.step) as span:
        decided = encode_decision(decide(snapshot, policies))
        span.set(running=snapshot.running.rows, waiting=snapshot.waiting.rows)
    took_us = (time.perf_counter_ns() - started_ns) // 1000
    if took_us > SLOW_US:
        logs.get("decide").warning("slow", took_us=took_us, executor=snapshot.executor, step=snapshot.step)
    return decided


def _read(data: bytes, tables: Tables) -> Snapshot:
    snapshot = tables.fill(decode_snapshot(data))
    check(snapshot)
    return snapshot


class _Service:
    """The methods, over the policies that this scheduler knows. Keeps nothing but the tables that it was sent."""

    def __init__(self, policies: PolicyBook) -> None:
        self._policies = policies
        self._tables = Tables()

    async def decide(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """One decision for each snapshot, in order."""
        await context.send_initial_metadata(())  # tells the executor that somebody is there before it asks
        log = logs.get("decide").bind(peer=context.peer())
        log.info("stream opened")
        try:
            async for data in requests:
                await context.write(answer(data, self._policies, self._tables))
        except InvalidRequest as error:
            log.warning("snapshot refused", error=error.message)
            raise
        finally:
            log.info("stream ended")

    async def decide_once(self, data: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """The unary twin."""
        return answer(data, self._policies, self._tables)

    async def explain(
        self, request: pb.ExplainRequest, _: grpc.aio.ServicerContext[pb.ExplainRequest, pb.Explanation]
    ) -> pb.Explanation:
        """What a decision does with one request, and why."""
        snapshot = _read(request.snapshot.SerializeToString(deterministic=True), self._tables)
        said = explain(snapshot, request.id, self._policies)
        return pb.Explanation(
            state=said.state,
            reason=pb.WaitReason.Name(said.reason),
            sentence=said.sentence,
            needed=said.needed,
            available=said.available,
            ahead=said.ahead,
        )

    async def list_policies(
        self,
        _: pb.ListPoliciesRequest,
        __: grpc.aio.ServicerContext[pb.ListPoliciesRequest, pb.ListPoliciesResponse],
    ) -> pb.ListPoliciesResponse:
        """All policies, with parameters and the tables and columns that each reads."""
        return pb.ListPoliciesResponse(
            build=self._policies.build,
            contract_version=CONTRACT_VERSION,
            policies=[_told(policy) for policy in self._policies.kinds],
        )


def _told(policy: type[Policy]) -> pb.PolicyInfo:
    return pb.PolicyInfo(
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
        tables=sorted(policy.tables),
    )
