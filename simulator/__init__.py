"""A virtual clock and models that only count, around the real loop, decide and ledger."""
