"""`jitney cache` and `jitney audit`: what is cached, where a prompt leaves it, and how to take something out of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from jitney.cli import common, sampling
from jitney.client import Client, Message, Prompt
from jitney.client.cache import AsyncCacheClient
from jitney.client.cache_types import CacheStatus, Invalidated, TierStatus
from jitney.errors import InvalidRequest
from jitney.keys import KEY_BYTES
from jitney.serving import config

app = typer.Typer(no_args_is_help=True, help="What is cached, and where a prompt leaves it.")
T = TypeVar("T")

CacheTarget = Annotated[
    str,
    typer.Option(
        "--cache",
        envvar="JITNEY_CACHE_TARGET",
        help="Address of the cache, HOST:PORT. Absent: that of the `jitney serve` on this machine.",
        show_default=False,
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="The text as it is, not as a message of a chat.")]
Ids = Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by commas or blanks.")]
NAMES = {"cpu": "memory", "ssd": "disk"}


def audit(as_json: common.AsJson = False, cache: CacheTarget = "", tls_ca: common.TlsCa = None) -> None:
    """Has the cache check every block of every tier. Exit status 1 if something is wrong."""
    found = _ask(cache, tls_ca, lambda client: client.audit())
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        for finding in found.findings:
            common.out().print(finding)
        common.out().print(f"{found.checked_blocks} blocks checked: {len(found.findings) or 'nothing'} wrong")
    raise typer.Exit(1 if found.findings else 0)


@app.command()
def status(as_json: common.AsJson = False, cache: CacheTarget = "", tls_ca: common.TlsCa = None) -> None:
    """Shows pools, tiers and hit rates. Exit status 3 if the cache is not ready."""
    found = _ask(cache, tls_ca, lambda client: client.status())
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "hit_rate": found.hit_rate}))
    else:
        common.out().print(_table(found))
    raise typer.Exit(3 if found.not_ready else 0)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="A prompt, as for `jitney generate`.")],
    system: sampling.System = "",
    raw: Raw = False,
    ids: Ids = False,
    salt: Annotated[str, typer.Option("--salt", help="The salt that the request would have.")] = "",
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Says how much of a prompt is cached in which tier, and at which token it leaves the cached prefix."""
    with common.client(target, patience, tls_ca) as client:
        found = client.explain_cache(_prompt(client, prompt, system, raw, ids), salt)
    if as_json:
        plain = dataclasses.asdict(found) | {"prefix_key": found.prefix_key.hex(), "cached_tokens": found.cached_tokens}
        print(json.dumps(plain))
        return
    out = common.out()
    out.print(f"{found.prompt_tokens} tokens in blocks of {found.block_tokens}: {found.sentence}")
    at = 0
    for count, where in (
        (found.device_tokens, "on the device"),
        (found.cpu_tokens, "in memory"),
        (found.ssd_tokens, "on disk"),
        (found.prompt_tokens - found.cached_tokens, "not cached"),
    ):
        if count:
            out.print(f"  {at:>8} to {at + count - 1:<8} {where}")
        at += count


@app.command()
def invalidate(
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="Text or ids: what begins with its whole blocks goes.")
    ] = None,
    key: Annotated[str, typer.Option("--key", help="Key of a block in hex: it and what stands behind it go.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="What this tenant computed first goes.")] = "",
    salt: Annotated[
        str | None, typer.Option("--salt", help="What was computed under this salt goes; with --prefix: its salt.")
    ] = None,
    model_version: Annotated[str, typer.Option("--model-version", help="What this model computed goes.")] = "",
    ids: Ids = False,
    as_json: common.AsJson = False,
    cache: CacheTarget = "",
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Takes something out of every tier, and says how many blocks went. Name one of the things that may go."""
    named = [bool(prefix), bool(key), bool(tenant), bool(model_version), salt is not None and not prefix]
    if sum(named) != 1:
        raise InvalidRequest("name one of --prefix, --key, --tenant, --salt and --model-version", field="invalidate")
    block = _key(key)
    if prefix:
        with common.client(target, patience, tls_ca) as client:
            found = client.explain_cache(_prompt(client, prefix, "", True, ids), salt or "")
        block = found.prefix_key
        if not block:
            what = f"a prefix has at least one block of {found.block_tokens} tokens, this one has {found.prompt_tokens}"
            raise InvalidRequest(what, field="prefix", limit=found.block_tokens, value=found.prompt_tokens)

    def work(client: AsyncCacheClient) -> Awaitable[Invalidated]:
        if block:
            return client.invalidate_prefix(block)
        if tenant:
            return client.invalidate_tenant(tenant)
        if model_version:
            return client.invalidate_model_version(model_version)
        return client.invalidate_salt(salt or "")

    gone = _ask(cache, tls_ca, work)
    if as_json:
        print(json.dumps(dataclasses.asdict(gone)))
        return
    counts = f"{gone.device_blocks} blocks on devices, {gone.cpu_blocks} in memory, {gone.ssd_blocks} on disk"
    common.out().print(f"gone: {counts}")


def _ask(cache: str, tls_ca: Path | None, work: Callable[[AsyncCacheClient], Awaitable[T]]) -> T:
    """One call of the cache."""

    async def run() -> T:
        async with AsyncCacheClient(cache or _served(), tls_ca=tls_ca) as client:
            return await work(client)

    return asyncio.run(run())


def _served() -> str:
    """Where the cache of this machine's `jitney serve` listens."""
    path = config.state_dir() / "endpoints.json"
    try:
        target: str = json.loads(path.read_text(encoding="utf-8"))["cache"]
    except (OSError, ValueError, KeyError) as error:
        what = f"no `jitney serve` has left its addresses in {path}: say --cache HOST:PORT"
        raise InvalidRequest(what, field="cache") from error
    return target


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != KEY_BYTES:
        raise InvalidRequest(f"--key has {2 * KEY_BYTES} hex digits, not {text!r}", field="key", value=text)
    return key


def _prompt(client: Client, text: str, system: str, raw: bool, ids: bool) -> Prompt:
    """As `jitney generate` has it; a chat where the model has a template for one."""
    if ids:
        try:
            return [int(part) for part in text.replace(",", " ").split()]
        except ValueError as error:
            raise InvalidRequest(f"token ids are whole numbers: {error}", field="prompt") from error
    if raw or not (system or client.model_info().has_chat_template):
        return text
    return [Message("system", system), Message("user", text)] if system else [Message("user", text)]


def _table(found: CacheStatus) -> Table:
    table = Table(title="cache", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(found):
        table.add_row(name, value)
    return table


def rows(found: CacheStatus) -> list[tuple[str, str]]:
    """Name and value of each line."""
    ready = found.not_ready or ("yes, the disk is still being read" if found.scanning else "yes")
    table = [
        ("ready", ready),
        ("hits", f"{100 * found.hit_rate:.1f} % of {found.hit_tokens + found.missed_tokens} tokens in whole blocks"),
        ("evicted", f"{found.evictions} blocks from devices, {found.unstored_blocks} of them without a copy below"),
    ]
    for pool in found.executors:
        blocks = pool.blocks
        said = f"{blocks.free} free, {blocks.evictable} cached, {blocks.granted} granted, {blocks.leaving} leaving"
        table.append((pool.executor, f"{said}, of {blocks.total}; {pool.requests} requests"))
    for tier in found.tiers:
        table += _tier_rows(tier)
    return table


def _tier_rows(tier: TierStatus) -> list[tuple[str, str]]:
    name = NAMES.get(tier.name, tier.name)
    pinned = f", {tier.pinned_slots} pinned" if tier.pinned_slots else ""
    retired = f", {tier.retired_slots} retired" if tier.retired_slots else ""
    lines = [
        (name, f"{tier.used_slots} of {tier.slots} slots used{pinned}{retired}; limit {_size(tier.limit_bytes)}"),
        (
            "",
            f"{tier.hit_tokens} hit tokens; {tier.stored_blocks} blocks in, {tier.loaded_blocks} up, "
            f"{tier.skipped_blocks} skipped, {tier.evictions} evicted, {tier.dropped_blocks} dropped, "
            f"{tier.bad_blocks} bad",
        ),
    ]
    for what, copies in (("written", tier.written), ("read", tier.read)):
        if copies.bytes:
            lines.append(("", f"{_size(copies.bytes)} {what} in {copies.time_us / 1e6:.1f} s"))
    if tier.tenant_bytes:
        tenants = sorted(tier.tenant_bytes.items(), key=lambda item: -item[1])
        lines.append(("", "tenants: " + ", ".join(f"{tenant} {_size(size)}" for tenant, size in tenants[:8])))
    if tier.errors:
        lines.append(("", "errors: " + ", ".join(f"{count} {error}" for error, count in tier.errors.items())))
    return lines


def _size(count: int) -> str:
    """In MiB."""
    return f"{count / (1 << 20):.1f} MiB"
