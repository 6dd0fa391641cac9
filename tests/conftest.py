"""What all tests need."""

from __future__ import annotations

import signal

# Also where the shell that runs the tests in the background ignores it: the processes that they start are interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
