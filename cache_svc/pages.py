"""Blocks of the lower tiers lie in whole pages: memory is given by them, and direct I/O asks for them."""

PAGE_BYTES = 4096


def paged(count: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES
