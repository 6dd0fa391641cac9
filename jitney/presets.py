"""Sizes of a step by what the server is for. Plain values; they go for settings of the executor that are left at their
defaults.

A step costs a part that is the same for one row and for many, so more rows a step give more tokens a second and a
longer wait for each one. `interactive` keeps that wait within a target, with few rows and small chunks of prompts
between two tokens; `batch` takes what fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRESETS: Final[Mapping[str, Mapping[str, int]]] = {
    "interactive": {"max_rows": 32, "max_step_tokens": 128, "chunk_cap_tokens": 64, "target_tpot_ms": 100},
    "batch": {"max_rows": 256, "max_step_tokens": 1024, "chunk_cap_tokens": 512, "target_tpot_ms": 0},
}
