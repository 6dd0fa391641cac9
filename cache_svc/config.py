"""Configuration of the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from jitney.serving.config import ConfigError, ServingConfig, default_shared_dir, option

LEAST_SSD_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(ServingConfig):
    """The cache: owns the metadata of every block, and the bytes of the tiers below the device."""

    audit_idle_s: float = option(
        5.0, "Seconds without a batch after which what has changed is audited; 0: never", minimum=0, maximum=86400
    )
    eviction: Literal["cost", "lru"] = option(
        "cost", "What is evicted first: cost, what is worth least (recompute cost times chance of reuse); or lru"
    )
    cpu_bytes: int = option(1 << 30, "Limit of the CPU tier, in shared memory; 0: none", minimum=0, maximum=1 << 46)
    ssd_dir: Path | None = option(None, "Folder of the SSD tier, for this cache alone; absent: no SSD tier")
    ssd_bytes: int = option(
        8 << 30, "Limit of the SSD tier, all that is in its folder included", minimum=LEAST_SSD_BYTES, maximum=1 << 50
    )
    ssd_file_bytes: int = option(1 << 30, "Size of its files; another one starts empty", minimum=1 << 20)
    shared_dir: Path | None = option(
        None, "Folder shared with the executors, for the CPU tier; absent: in shared memory, else the temporary folder"
    )
    pin_permille: int = option(500, "Of a tier, what swapped requests may pin", minimum=0, maximum=1000)
    pin_limit_s: float = option(60.0, "Seconds after which a swapped request's pins end", minimum=0, maximum=86400)
    tenant_permille: int = option(1000, "Of a lower tier, what one tenant may have", minimum=1, maximum=1000)
    interval_blocks: int = option(
        8, "Blocks of a long chain after each of which a hit on the SSD may end", minimum=1, maximum=1 << 20
    )

    kv_events: str = option(
        "",
        "ZeroMQ address that KV events are published at, such as tcp://127.0.0.1:5557; they hold the token ids of all "
        "prompts and answers; empty: nowhere",
    )
    kv_events_replay: str = option("", "ZeroMQ address that asks for missed KV events go to")
    kv_events_topic: str = option("", "Topic of the KV events")
    kv_events_kept: int = option(10_000, "Batches of KV events that can be asked for", minimum=1, maximum=1 << 24)

    def settled(self) -> Self:
        """With the shared folder filled in."""
        return self if self.shared_dir is not None else replace(self, shared_dir=default_shared_dir())

    def validate(self) -> None:
        """See ServingConfig."""
        ServingConfig.validate(self)
        if self.ssd_dir is not None and self.ssd_dir == self.shared_dir:
            raise ConfigError("--ssd-dir and --shared-dir must be two folders", field="ssd_dir", value=self.ssd_dir)
        if bool(self.kv_events) != bool(self.kv_events_replay):
            what = "--kv-events and --kv-events-replay belong together: one of them is not set"
            raise ConfigError(what, field="kv_events_replay")
