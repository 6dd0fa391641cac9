"""How many threads compute a step."""

from __future__ import annotations

import os

import torch


def use_threads(count: int) -> int:
    """Sets the number for the whole process; 0: one for each core that this process may use. Returns it."""
    chosen = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen
