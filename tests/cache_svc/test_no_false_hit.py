"""16: a hit is a whole chain of 256-bit digests: of blocks, salt, model and all that stands before. Nothing shorter."""

from __future__ import annotations

import numpy as np

from cache_svc.blocks import BlockTable
from cache_svc.index import Content, Origin
from jitney.keys import KEY_BYTES, Key, Root, chain

BLOCKS, LOOKED_UP, BLOCK_TOKENS = 20_000, 1_000_000, 2
ORIGIN = Origin("t", b"", "m")


def test_16_of_a_million_random_blocks_none_is_found() -> None:
    """Token ids of a tiny vocabulary, so that equal blocks come often: what differs is what stands before them."""
    table = BlockTable(BLOCKS)
    draw = np.random.default_rng(0)
    root = Root("", "m", "", b"f").key()
    sealed: list[Key] = []
    parent = root
    for block, key in enumerate(chain(root, draw.integers(0, 4, BLOCKS * BLOCK_TOKENS).astype(np.int32), BLOCK_TOKENS)):
        table.reserve(1)
        table.seal(block, key, parent, Content(b"", ORIGIN))
        sealed.append(key)
        parent = key
    assert table.index.find(sealed) == list(range(BLOCKS))
    other = Root("", "another model", "", b"f").key()
    tokens = draw.integers(0, 4, LOOKED_UP * BLOCK_TOKENS).astype(np.int32)
    strangers = chain(other, tokens, BLOCK_TOKENS)
    assert len(set(strangers)) == LOOKED_UP
    assert all(len(key) == KEY_BYTES == 32 for key in strangers[:100])
    assert not table.index.sealed.keys() & strangers


def test_16_every_part_of_the_root_counts() -> None:
    tokens = np.zeros(2, np.int32)
    roots = [
        Root("", "m", "", b"f"),
        Root("a", "m", "", b"f"),
        Root("", "n", "", b"f"),
        Root("", "m", "x", b"f"),
        Root("", "m", "", b"g"),
        Root("m", "", "", b"f"),  # the same letters elsewhere
        Root("", "", "m", b"f"),
    ]
    keys = {chain(root.key(), tokens, 2)[0] for root in roots}
    assert len(keys) == len(roots)
