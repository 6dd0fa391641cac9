"""`python -m jitney.demo`: three services, thirty requests at once, and what came of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from jitney.demo import run_and_exit


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(prog="python -m jitney.demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or model folder; absent: the default model")
    parser.add_argument("--schedulers", type=int, default=1, help="how many schedulers")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="write a picture of what was shown")
    arguments = parser.parse_args()
    run_and_exit(arguments.model, arguments.schedulers, arguments.picture)


if __name__ == "__main__":
    main()
