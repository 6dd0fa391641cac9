"""Configuration of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.serving.config import ServingConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(ServingConfig):
    """The cache: owns the metadata of every block, and says which blocks may be reused."""

    audit_idle_s: float = option(
        5.0, "Seconds without a batch after which a changed ledger is audited; 0: never", minimum=0, maximum=86400
    )
