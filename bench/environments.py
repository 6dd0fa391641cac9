"""Virtual environments of what is compared with Jitney, each made once, in the cache directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitney.serving import config


class NotToBeHad(Exception):
    """A peer cannot be had here; the message says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed, in order: each entry of `installs` is the arguments of one `pip`. `check` is Python code that
    must run in it. `size` is said while it is made."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    check: str
    size: str

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return config.cache_dir() / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def made(self) -> Path:
        """Its interpreter; makes the environment if it is not there as described. Raises NotToBeHad."""
        marker = self.folder / ".made"
        recipe = "\n".join(" ".join(arguments) for arguments in self.installs)
        if marker.exists() and marker.read_text() == recipe:
            return self.python
        print(f"making an environment in {self.folder}: {self.size}, once", flush=True)
        run_or_refuse([sys.executable, "-m", "venv", str(self.folder)])
        for arguments in self.installs:
            run_or_refuse(
                [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments]
            )
        run_or_refuse([str(self.python), "-c", self.check])
        marker.write_text(recipe)
        return self.python


def run_or_refuse(command: Sequence[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Runs a command of a set-up to its end; `variables` are added to the environment's. Raises NotToBeHad."""
    environment = {**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", **(variables or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)
    except OSError as error:
        raise NotToBeHad(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        raise NotToBeHad(f"`{' '.join(command[-3:])}` failed: {said[-1] if said else 'it said nothing'}")
