"""Runs a service's main module as a child that ends with its parent: `python -m jitney.serving.child PID MODULE ...`.

The kernel sends SIGTERM when the thread that started this process has ended, however that came about; the service
then drains as usual. Linux only; elsewhere the child simply runs.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Ends with the thread that started this process. Exits at once if the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> None:
    """argv: the parent's process id, the module, its arguments."""
    parent, module, *arguments = sys.argv[1:]
    follow_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
