"""Operations on device blocks and their results, as plain values: what executor and cache say to each other.

Meaning and order: `protos/jitney/cache/v1/cache.proto`. A block is named by its handle: generation << 32 | id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

from jitney.keys import Key

Block = NewType("Block", int)
RequestId = NewType("RequestId", int)


def block_id(block: Block) -> int:
    """Index of the block in the device pool."""
    return block & 0xFFFFFFFF


def generation(block: Block) -> int:
    """How often the block had been freed when the handle was given."""
    return block >> 32


def handle(index: int, gen: int) -> Block:
    """The handle of pool index `index` in generation `gen`."""
    return Block(gen << 32 | index)


class ResultCode(IntEnum):
    """What became of one operation, or of one block of it."""

    UNSPECIFIED = 0
    OK = 1
    STALE = 2
    DUPLICATE = 3
    SHORT = 4
    LOST = 5
    NOT_HELD = 6
    SKIPPED = 7
    IN_PLACE = 8


class Tier(IntEnum):
    """Where a block's bytes are."""

    UNSPECIFIED = 0
    DEVICE = 1
    CPU = 2
    SSD = 3


class BlockState(IntEnum):
    """FREE -> GRANTED -> WRITING -> SEALED(holders >= 1) <-> CACHED(no holder, evictable) -> FREE."""

    UNSPECIFIED = 0
    FREE = 1
    GRANTED = 2
    WRITING = 3
    SEALED = 4
    CACHED = 5


@dataclass(frozen=True, slots=True)
class Seal:
    """Consecutive blocks of one chain whose content is complete. `token_ids` is int32 little-endian."""

    request: RequestId
    blocks: Sequence[Block]
    keys: Sequence[Key]
    parent: Key
    token_ids: bytes
    tenant: str
    salt_digest: bytes
    model_version: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The request will not compute its pending keys any more."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Release:
    """The request holds `blocks` no more; empty: everything, joins and pending keys too.

    `generated_tokens`, so far, say something of how soon a block is used again.
    """

    request: RequestId
    blocks: Sequence[Block] = ()
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    """The request has nothing on the device any more; what it had sealed is stored in `tier` and pinned there."""

    request: RequestId
    tier: Tier


@dataclass(frozen=True, slots=True)
class Bind:
    """Granted blocks that now belong to a request."""

    request: RequestId
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Return:
    """Granted blocks given back."""

    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Share:
    """Makes `requests` holders of a partly filled block."""

    block: Block
    requests: Sequence[RequestId]


@dataclass(frozen=True, slots=True)
class Fork:
    """Asks for a private copy of a shared block."""

    request: RequestId
    block: Block


@dataclass(frozen=True, slots=True)
class Acquire:
    """Hold every sealed block from the start of the chain on, then join pending ones."""

    request: RequestId
    keys: Sequence[Key]
    least_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bind new blocks up to `blocks_total` of the request; `keys` name the chain from its first block on."""

    request: RequestId
    keys: Sequence[Key]
    blocks_total: int
    load_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's operations; they run in the order of these fields."""

    op_seq: int
    step: int = 0
    in_flight_step: int = 0
    seals: Sequence[Seal] = ()
    withdraws: Sequence[Withdraw] = ()
    releases: Sequence[Release] = ()
    swaps: Sequence[Swap] = ()
    binds: Sequence[Bind] = ()
    returns: Sequence[Return] = ()
    shares: Sequence[Share] = ()
    forks: Sequence[Fork] = ()
    acquires: Sequence[Acquire] = ()
    reserves: Sequence[Reserve] = ()
    grant: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Device blocks by what they are good for."""

    free: int = 0
    evictable: int = 0
    leaving: int = 0
    granted: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class ForkResult:
    """`block` is the new one, to be filled before the next step (0 with IN_PLACE)."""

    code: ResultCode
    block: Block = Block(0)


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """Blocks held now, and how many pending keys behind them were joined."""

    code: ResultCode
    blocks: Sequence[Block] = ()
    joined: int = 0
    owner: RequestId = RequestId(0)


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """New blocks in the order of the chain; the first `cpu_blocks + ssd_blocks` come from there under `ticket`."""

    code: ResultCode
    blocks: Sequence[Block] = ()
    short_by: int = 0
    ticket: int = 0
    cpu_blocks: int = 0
    ssd_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SwapResult:
    """Blocks pinned for the request in the tier or on the way to it; of these, those that are still to be stored."""

    code: ResultCode
    pinned_blocks: int = 0
    leaving_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Of a lower tier: blocks that can be stored, that can be pinned, and that are ordered or queued and not copied."""

    free_blocks: int = 0
    pin_blocks: int = 0
    queue_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """Room below the device, and the measured rates of the SSD (0: unknown)."""

    cpu: Room = field(default_factory=Room)
    ssd: Room = field(default_factory=Room)
    ssd_write_bytes_per_s: int = 0
    ssd_read_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class JoinEvent:
    """Of joined keys: those sealed now (held, in order), and how many nobody computes any more."""

    request: RequestId
    blocks: Sequence[Block] = ()
    withdrawn: int = 0


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Results at the index of their operation. Codes of seals, releases, binds and returns: one a block."""

    op_seq: int
    counts: Counts = field(default_factory=Counts)
    seals: Sequence[Sequence[ResultCode]] = ()
    withdraws: Sequence[ResultCode] = ()
    releases: Sequence[Sequence[ResultCode]] = ()
    swaps: Sequence[SwapResult] = ()
    binds: Sequence[Sequence[ResultCode]] = ()
    returns: Sequence[Sequence[ResultCode]] = ()
    shares: Sequence[ResultCode] = ()
    forks: Sequence[ForkResult] = ()
    acquires: Sequence[AcquireResult] = ()
    reserves: Sequence[ReserveResult] = ()
    granted: Sequence[Block] = ()
    joins: Sequence[JoinEvent] = ()
    apply_us: int = 0
    lower: LowerTiers = field(default_factory=LowerTiers)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain to look up for a request."""

    request: RequestId
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class ChainHits:
    """How much of a chain is where."""

    device_blocks: int = 0
    unheld_blocks: int = 0
    cpu_blocks: int = 0
    ssd_blocks: int = 0
    pending_blocks: int = 0
    pending_owner: RequestId = RequestId(0)


@dataclass(frozen=True, slots=True)
class DeclaredBlock:
    """A block that is not free, as the executor tells it to a restarted cache."""

    block: Block
    state: BlockState
    key: bytes = b""
    parent: bytes = b""
    token_ids: bytes = b""
    tenant: str = ""
    salt_digest: bytes = b""
    model_version: str = ""
    holders: Sequence[RequestId] = ()
    joiners: Sequence[RequestId] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of the CPU tier: `slots` slots of `slot_bytes`, then a uint32 generation for each."""

    path: str
    bytes: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What Open answers."""

    epoch: int
    boot_id: bytes
    segments: Sequence[Segment] = ()
    lower: LowerTiers = field(default_factory=LowerTiers)
