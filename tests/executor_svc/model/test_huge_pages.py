"""Pieces of large mappings: apart, aligned, and alive as long as they are used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from executor_svc.model.huge_pages import HugePages


@pytest.mark.parametrize("mapping", [0, 1000, 1 << 20])
def test_pieces_do_not_touch(mapping: int) -> None:
    pages = HugePages(mapping)
    sizes = [1, 64, 100, 0, 999, 5000, 3 << 20] * 4
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(pages.take, sizes))
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 or len(piece) == 0
        assert (piece == 0).all()
        piece.fill_(number + 1)
    del pages
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert len(piece) == size and (piece == number + 1).all()
