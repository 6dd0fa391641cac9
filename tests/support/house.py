"""The three services as real processes around a tiny random model, for end-to-end and chaos tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jitney.supervisor import ServeOptions, Supervisor
from tests.support.default_model import default_cache
from tests.support.tiny_llama import make_tiny_llama

SMALL = ("--threads=1", "--pool-blocks=512", "--max-step-tokens=128", "--chunk-cap-tokens=64", "--max-rows=16")


@contextlib.contextmanager
def tiny_house(
    *,
    context: int = 2048,
    schedulers: int = 1,
    grace_s: float = 1.0,
    executor_args: tuple[str, ...] = SMALL,
    model: Path | None = None,
) -> Iterator[Supervisor]:
    """All services SERVING, in a folder of their own; what is left of them is killed at the end.

    `model` is served in place of the tiny one, with the user's own cache of prepared weights.
    """
    with tempfile.TemporaryDirectory(prefix="jitney-test-") as name:
        folder = Path(name)
        cache = folder / "cache" if model is None else default_cache()
        model = model or make_tiny_llama(folder / "model", context=context)
        options = ServeOptions(
            state_dir=folder / "state",
            schedulers=schedulers,
            grace_s=grace_s,
            start_timeout_s=120.0,
            executor_args=(f"--model={model}", f"--cache-dir={cache}", *executor_args),
        )
        supervisor = Supervisor(options)
        try:
            supervisor.start()
            yield supervisor
        finally:
            supervisor.stop(at_once=True)
