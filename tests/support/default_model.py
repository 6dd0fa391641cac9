"""The model file that `make model` fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.models import default_model_path


def default_model() -> Path:
    """Its path. Without it the calling test fails, with a sentence that says what to run."""
    path = default_model_path()
    if not path.is_file():
        pytest.fail(f"the default model is not at {path}: run `make model`", pytrace=False)
    return path


def default_cache() -> Path:
    """Where its dequantised weights are kept between runs."""
    return default_model_path().parents[2]
