"""The one point at which arrivals, aborts and deadlines enter the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from executor_svc.endings import Endings
from executor_svc.live_request import LiveRequest, State
from executor_svc.ports import Clock
from executor_svc.registry import Registry
from executor_svc.request import FinishReason


class Intake:
    """Commands from other threads, in order; run on the loop's thread."""

    def __init__(
        self,
        clock: Clock,
        registry: Registry,
        endings: Endings,
        predict: Callable[[LiveRequest], tuple[int, int]],
    ) -> None:
        """`predict` gives p50 and p90 of a request's output tokens."""
        self._predict = predict
        self._clock = clock
        self._registry = registry
        self._endings = endings
        self._commands: deque[Callable[[int], None]] = deque()
        self._step_in_flight = 0

    def submit(self, rows: Sequence[LiveRequest], arrival_us: int) -> None:
        """A new request, a row for each choice; any thread."""

        def add(now_us: int) -> None:
            del now_us
            for request in rows:
                self._registry.add(request, arrival_us, self._predict(request))
                request.note(arrival_us, f"arrived with {request.prompt_tokens} prompt tokens")

        self.run(add)

    def abort(self, request: LiveRequest, message: str) -> None:
        """Ends a request if it is still live; any thread."""

        def end(now_us: int) -> None:
            if request.state is not State.ENDED and request.slot >= 0:
                self._endings.end(request, FinishReason.ABORTED, now_us, self._step_in_flight, message=message)

        self.run(end)

    def run(self, command: Callable[[int], None]) -> None:
        """Anything that must happen between two steps; any thread."""
        self._commands.append(command)
        self._clock.ring()

    def take(self, now_us: int, step_in_flight: int) -> bool:
        """Runs what has come and ends what is over its deadline; whether anything changed."""
        self._step_in_flight = step_in_flight
        changed = False
        while self._commands:
            self._commands.popleft()(now_us)
            changed = True
        for request in self._registry.expired(now_us):
            self._endings.end(request, FinishReason.DEADLINE, now_us, step_in_flight, message="deadline passed")
            changed = True
        return changed
