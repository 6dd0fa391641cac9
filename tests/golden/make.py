"""`python -m tests.golden.make`: makes the golden logs anew.

A golden log is what `decide` said at a few hundred steps of a simulated run, policy by policy. The tests replay them
byte for byte, whatever the build, so that a change of any decision shows, and so does a machine that decides
otherwise. Run this when decisions are meant to change, look at what `jitney replay --any-build` says of the old ones
first, and commit the new ones together with the change, saying why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from jitney.snapshot import Batching, PolicyChoice, Settings
from scheduler_svc.policies import BUILT_IN
from tests.support.recorded import SETTINGS, recorded, with_horizon, write_segment

FOLDER: Final = Path(__file__).parent
STEPS: Final = 120
STATIC: Final = Settings(
    max_step_tokens=48,
    max_rows=10,
    block_tokens=4,
    context_tokens=512,
    chunk_cap_tokens=16,
    batching=Batching.STATIC_PADDED,
)


def cases() -> dict[str, tuple[PolicyChoice, Settings]]:
    """Name of the file -> what decides under which settings."""
    found = {kind.name: (PolicyChoice(kind.name), SETTINGS) for kind in BUILT_IN.kinds}
    found["static"] = (PolicyChoice(), STATIC)
    found["horizon"] = (PolicyChoice("sjf"), with_horizon(4))
    return found


def main() -> None:
    """Writes all files."""
    for name, (choice, settings) in cases().items():
        path = FOLDER / f"{name}.jlog"
        write_segment(path, recorded(STEPS, 11, choice, settings))
        print(f"{path.name}: {STEPS} decisions in {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
