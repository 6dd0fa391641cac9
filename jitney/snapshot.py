"""The situation that an executor shows to a scheduler, as plain values and numpy columns.

Meaning of each field: `protos/jitney/scheduler/v1/scheduler.proto`. The codec turns it to and from the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from jitney.columns import (
    CandidateTable,
    EndedTable,
    EndingTable,
    HistogramTable,
    RunningTable,
    TenantTable,
    WaitingPolicyTable,
    WaitingTable,
)

CONTRACT_VERSION = 1
MAX_CANDIDATES = 64
MAX_ENDED = 4096
MAX_POLICY_MEMORY_BYTES = 64 * 1024
PRIORITY_RANGE = (-100, 100)


class Batching(IntEnum):
    """How rows board and leave."""

    UNSPECIFIED = 0
    CONTINUOUS = 1
    STATIC_PADDED = 2
    STATIC_DROPPING = 3


class HorizonKind(IntEnum):
    """How long a decision holds."""

    UNSPECIFIED = 0
    STEPS = 1
    UNTIL_EVENT = 2


class LowerTiers(IntEnum):
    """When blocks are copied from and to lower tiers, not computed again: hits are loaded, victims swapped."""

    UNSPECIFIED = 0
    MEASURED = 1
    ALWAYS = 2
    NEVER = 3


class Outcome(IntEnum):
    """How a request ended."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3
    DEADLINE = 4
    REFUSED = 5
    ERROR = 6


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """A learned predictor, exported to integers; `content` is empty once a replica holds the digest."""

    name: str
    digest: bytes
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policy decides, and its parameters, sorted by name."""

    name: str = "fcfs"
    parameters: tuple[tuple[str, int], ...] = ()
    tables: tuple[PolicyTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The executor's configuration, as far as deciding depends on it."""

    max_step_tokens: int = 256
    max_rows: int = 32
    block_tokens: int = 16
    context_tokens: int = 8192
    chunk_cap_tokens: int = 128
    block_reserve: int = 0
    max_preemptions: int = 2
    batching: Batching = Batching.CONTINUOUS
    horizon_kind: HorizonKind = HorizonKind.STEPS
    horizon_steps: int = 1
    target_tpot_us: int = 0
    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0
    lower_tiers: LowerTiers = LowerTiers.MEASURED


@dataclass(frozen=True, slots=True)
class Blocks:
    """Device blocks. total = free + evictable + granted + held."""

    total: int = 0
    free: int = 0
    evictable: int = 0
    leaving: int = 0
    granted: int = 0


@dataclass(frozen=True, slots=True)
class TierRoom:
    """Room in a lower tier, zero where there is no such tier; the waits of a load, and of the CPU tier of a swap."""

    free_blocks: int = 0
    pin_blocks: int = 0
    queue_us: int = 0
    out_queue_us: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates; 0 means unknown."""

    to_host_bytes_per_s: int = 0
    to_device_bytes_per_s: int = 0
    ssd_write_bytes_per_s: int = 0
    ssd_read_bytes_per_s: int = 0
    prefill_tokens_per_s: int = 0
    block_bytes: int = 0
    step_base_ns: int = 0
    step_per_row_ns: int = 0
    step_per_token_ns: int = 0
    step_per_context_token_ps: int = 0


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """What a policy remembers between decisions; at most MAX_POLICY_MEMORY_BYTES."""

    policy: str = ""
    version: int = 0
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a decision may depend on. `digest` is xxh3-128 of the serialised bytes as received."""

    executor: str = ""
    incarnation: int = 0
    step: int = 0
    attempt: int = 0
    now_us: int = 0
    policy: PolicyChoice = field(default_factory=PolicyChoice)
    settings: Settings = field(default_factory=Settings)
    blocks: Blocks = field(default_factory=Blocks)
    cpu: TierRoom = field(default_factory=TierRoom)
    ssd: TierRoom = field(default_factory=TierRoom)
    rates: Rates = field(default_factory=Rates)
    running: RunningTable = field(default_factory=RunningTable)
    ending: EndingTable = field(default_factory=EndingTable)
    waiting: WaitingTable = field(default_factory=WaitingTable)
    waiting_policy: WaitingPolicyTable = field(default_factory=WaitingPolicyTable)
    candidates: CandidateTable = field(default_factory=CandidateTable)
    ended: EndedTable = field(default_factory=EndedTable)
    ended_unlisted: int = 0
    tenants: TenantTable = field(default_factory=TenantTable)
    histograms: HistogramTable = field(default_factory=HistogramTable)
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    contract_version: int = CONTRACT_VERSION
    digest: bytes = b""
