"""Channels to services: keepalive, message limits, quick reconnects, several addresses as one."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jitney.errors import Away, InvalidRequest
from jitney.serving import tracing

MAX_MESSAGE_BYTES: Final = 64 << 20

Options = list[tuple[str, Any]]


def options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Channel options: pings tell a dead peer from a silent one within a minute; a lost one is sought again at once."""
    service_config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", service_config),
    ]


def target_uri(targets: str | Sequence[str]) -> str:
    """One gRPC target for "host:port", "unix:/path", or several "ip:port" ("a,b" is split). Raises InvalidRequest."""
    parts = targets.split(",") if isinstance(targets, str) else list(targets)
    parts = [part.strip() for part in parts if part.strip()]
    if not parts:
        raise InvalidRequest("no address was given", field="target")
    if len(parts) == 1:
        part = parts[0]
        return part if "://" in part or part.startswith(("unix:", "ipv4:", "ipv6:", "dns:")) else f"dns:///{part}"
    hosts = [_address(part) for part in parts]
    family = {ip.version for ip, _ in hosts}
    if len(family) != 1:
        raise InvalidRequest("several addresses must be all IPv4 or all IPv6", field="target", value=",".join(parts))
    texts = [f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}" for ip, port in hosts]
    return f"ipv{family.pop()}:{','.join(texts)}"


def channel(
    targets: str | Sequence[str],
    *,
    tls_ca: Path | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to one service at one or several addresses, calls spread over those that answer."""
    uri, interceptors = target_uri(targets), tracing.client_interceptors()
    if tls_ca is None:
        return grpc.aio.insecure_channel(uri, options=options(max_message_bytes), interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes())
    return grpc.aio.secure_channel(uri, credentials, options=options(max_message_bytes), interceptors=interceptors)


def sync_channel(
    targets: str | Sequence[str],
    *,
    tls_ca: Path | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Channel:
    """The twin of `channel` for code without an event loop."""
    uri = target_uri(targets)
    if tls_ca is None:
        return grpc.insecure_channel(uri, options=options(max_message_bytes))
    credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes())
    return grpc.secure_channel(uri, credentials, options=options(max_message_bytes))


async def health(target: str, service: str = "", timeout_s: float = 1.0) -> str:
    """The gRPC health of a service: "SERVING", "NOT_SERVING", ..., or "UNREACHABLE"."""
    async with channel(target) as link:
        stub: Any = health_pb2_grpc.HealthStub(link)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def wait_healthy(target: str, timeout_s: float, service: str = "") -> None:
    """Returns once the service says SERVING; raises Away after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while (state := await health(target, service)) != "SERVING":
        if time.monotonic() >= end:
            raise Away(f"{target} is {state} after {timeout_s:g} s", field="target", value=target)
        await asyncio.sleep(0.05)


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        return ipaddress.ip_address(host), int(port)
    except ValueError as error:
        message = f"of several addresses each must be IP:PORT, got {text!r}"
        raise InvalidRequest(message, field="target", value=text) from error
