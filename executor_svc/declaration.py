"""What a restarted cache is told: every device block that is not free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from executor_svc.blocks import DeviceBlocks
from executor_svc.live_request import UNKNOWN_BLOCK, LiveRequest
from jitney.block_ops import Block, BlockState, DeclaredBlock, RequestId
from jitney.keys import Key


def declaration(requests: Iterable[LiveRequest], blocks: DeviceBlocks) -> list[DeclaredBlock]:
    """The grant, and the blocks of these requests: those that run, that have ended and are not released, and
    substitutes whose load is being copied."""
    size = blocks.block_tokens
    writing: dict[Block, DeclaredBlock] = {}
    holders: dict[Block, list[RequestId]] = {}
    sealed: dict[Block, DeclaredBlock] = {}
    for request in requests:
        keys = request.hash_to(len(request.blocks) * size, size)
        for index, block in enumerate(request.blocks):
            holders.setdefault(block, []).append(request.id)
            if index < request.sealed:
                if block not in sealed:
                    sealed[block] = _sealed(request, index, block, size)
            elif block != UNKNOWN_BLOCK:  # of one that ended while it joined
                pending = keys[index] if index < request.boarded_tokens // size else Key(b"")
                parent = request.parent_of(index) if pending else b""
                writing.setdefault(block, DeclaredBlock(block, BlockState.WRITING, key=pending, parent=parent))
    return [
        *(DeclaredBlock(block, BlockState.GRANTED) for block in blocks.granted),
        *(replace(found, holders=holders[block]) for block, found in [*sealed.items(), *writing.items()]),
    ]


def _sealed(request: LiveRequest, index: int, block: Block, size: int) -> DeclaredBlock:
    return DeclaredBlock(
        block,
        BlockState.SEALED,
        key=request.keys[index],
        parent=request.parent_of(index),
        token_ids=request.tokens[index * size : (index + 1) * size].tobytes(),
        tenant=request.submission.tenant,
        salt_digest=request.salt_digest,
        model_version=request.root.model_version,
    )
