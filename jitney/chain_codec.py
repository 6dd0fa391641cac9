"""Look-ups and declarations, between plain values and the messages of `jitney.cache.v1`."""

from __future__ import annotations

from collections.abc import Sequence

from jitney.block_ops import Block, Chain, ChainHits, DeclaredBlock, RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.packed import split_keys, state_of, wire


def encode_chains(executor: str, chains: Sequence[Chain]) -> pb.LookupRequest:
    """The look-up as a message."""
    return pb.LookupRequest(
        executor=executor,
        chains=[pb.Chain(request=chain.request, keys=b"".join(chain.keys)) for chain in chains],
    )


def decode_chains(message: pb.LookupRequest) -> list[Chain]:
    """The chains of a look-up. InvalidRequest for keys of a wrong length."""
    return [Chain(RequestId(chain.request), split_keys(chain.keys, "chains.keys")) for chain in message.chains]


def encode_hits(hits: Sequence[ChainHits]) -> pb.LookupResponse:
    """Hits as a message."""
    return pb.LookupResponse(
        hits=[
            pb.ChainHits(
                device_blocks=hit.device_blocks,
                unheld_blocks=hit.unheld_blocks,
                cpu_blocks=hit.cpu_blocks,
                ssd_blocks=hit.ssd_blocks,
                pending_blocks=hit.pending_blocks,
                pending_owner=hit.pending_owner,
            )
            for hit in hits
        ]
    )


def decode_hits(message: pb.LookupResponse) -> list[ChainHits]:
    """Hits of a message."""
    return [
        ChainHits(
            hit.device_blocks,
            hit.unheld_blocks,
            hit.cpu_blocks,
            hit.ssd_blocks,
            hit.pending_blocks,
            RequestId(hit.pending_owner),
        )
        for hit in message.hits
    ]


def encode_declared(blocks: Sequence[DeclaredBlock]) -> list[pb.DeclaredBlock]:
    """Declared blocks as messages."""
    return [
        pb.DeclaredBlock(
            block=block.block,
            state=wire(block.state),
            key=block.key,
            parent=block.parent,
            token_ids=block.token_ids,
            tenant=block.tenant,
            salt_digest=block.salt_digest,
            model_version=block.model_version,
            holders=block.holders,
            joiners=block.joiners,
        )
        for block in blocks
    ]


def decode_declared(messages: Sequence[pb.DeclaredBlock]) -> list[DeclaredBlock]:
    """Declared blocks of messages. InvalidRequest for an unknown state."""
    return [
        DeclaredBlock(
            block=Block(message.block),
            state=state_of(message.state),
            key=message.key,
            parent=message.parent,
            token_ids=message.token_ids,
            tenant=message.tenant,
            salt_digest=message.salt_digest,
            model_version=message.model_version,
            holders=[RequestId(request) for request in message.holders],
            joiners=[RequestId(request) for request in message.joiners],
        )
        for message in messages
    ]
