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

from jitney.cli import common, prompts, sampling
from jitney.client import Client
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
    prompt: Annotated[str, typer.Argument(help='A prompt, as for `jitney generate`; "-" reads it from stdin.')],
    system: sampling.System = "",
    raw: Raw = False,
    ids: Ids = False,
    salt: Annotated[str, typer.Option("--salt", help="The salt that the request would have.")] = "",
    as_json: common.AsJson = False,
    target: common.Target = common.TARGET,
    patience: common.Patience = common.PATIENCE_S,
    tls_ca: common.TlsCa = None,
) -> None:
    """Says how much of a prompt is cached in which tier, and at which token it leaves the cached prefix.

    With --json: cached_key is that of the last cached block (empty: none), prefix_key that of the prompt's last whole
    block, cached or not.
    """
    with common.client(target, patience, tls_ca) as client:
        found = client.explain_cache(prompts.asked(client, prompts.text_of(prompt), system, raw, ids), salt)
    if as_json:
        plain = dataclasses.asdict(found) | {"prefix_key": found.prefix_key.hex(), "cached_key": found.cached_key.hex()}
        del plain["keys"]
        print(json.dumps(plain | {"cached_tokens": found.cached_tokens}))
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
        str | None,
        typer.Option(
            "--prefix",
            help='A prompt, as for `jitney generate` (with its --system); "-" reads it from stdin. Goes: the first '
            "block with a token of it, and all behind it, also of prompts that share that block.",
        ),
    ] = None,
    system: sampling.System = "",
    raw: Raw = False,
    ids: Ids = False,
    key: Annotated[str, typer.Option("--key", help="Key of a block in hex: it and what stands behind it go.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="What this tenant computed first goes.")] = "",
    salt: Annotated[
        str | None, typer.Option("--salt", help="What was computed under this salt goes; with --prefix: its salt.")
    ] = None,
    model_version: Annotated[str, typer.Option("--model-version", help="What this model computed goes.")] = "",
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
            block = _prefix_key(client, prompts.text_of(prefix), system, raw, ids, salt or "")

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
    nothing = not (gone.device_blocks or gone.cpu_blocks or gone.ssd_blocks)
    common.out().print(f"{'nothing of it was cached; ' if nothing else ''}gone: {counts}")


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


def _prefix_key(client: Client, text: str, system: str, raw: bool, ids: bool, salt: str) -> bytes:
    """Key of the first block with a token of the text: of that in which the prompt leaves what any prompt begins with.
    Two others are compared, since the text may begin as one of them does. Raises InvalidRequest if no block of the
    prompt alone has such a token."""
    found = client.explain_cache(prompts.asked(client, text, system, raw, ids), salt)
    before = 0  # blocks without a token of it
    if prompts.is_chat(client, system, raw, ids):
        others = [client.explain_cache(prompts.asked(client, other, system), salt).keys for other in ("", "?")]
        before = min(sum(a == b for a, b in zip(found.keys, keys, strict=False)) for keys in others) - 1
    if before + 1 < len(found.keys):
        return found.keys[before + 1]
    size, at = found.block_tokens, before * found.block_tokens
    also = f"all that begins with the {at} tokens before them" if before else "all else under this salt"
    raise InvalidRequest(
        f"the prompt has {found.prompt_tokens} tokens and fills no block of {size} with a token of the text: a block "
        f"that its answer filled has a key that only prompt and answer give. --key {found.keys[before].hex()} removes "
        f"such blocks, with {also}",
        field="prefix",
        limit=at + size,
        value=found.prompt_tokens,
    )


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
