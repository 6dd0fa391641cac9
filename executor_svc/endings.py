"""How requests end: usage and timings, said once to the client, to the counters and to the scheduler."""

from __future__ import annotations

from executor_svc.apply import Apply
from executor_svc.counters import Counters
from executor_svc.live_request import LiveRequest, State
from executor_svc.registry import Registry
from executor_svc.request import Finish, FinishReason
from executor_svc.situation import Situation
from jitney.snapshot import Batching, Outcome, Settings


class Endings:
    """Ends live requests. One whose last launched step is not over keeps its blocks until it is."""

    def __init__(
        self, settings: Settings, registry: Registry, apply: Apply, situation: Situation, counters: Counters
    ) -> None:
        self._pads = settings.batching is Batching.STATIC_PADDED
        self.padding: list[LiveRequest] = []  # ended, computed on as padding: static batching only
        self._registry = registry
        self._apply = apply
        self._situation = situation
        self._counters = counters
        self._in_flight: list[LiveRequest] = []  # ended, with a step on its way

    def end(
        self,
        request: LiveRequest,
        reason: FinishReason,
        now_us: int,
        step_in_flight: int,
        *,
        message: str = "",
        stop_matched: str = "",
        stop_token_id: int | None = None,
    ) -> None:
        """Ends it now; nothing more is appended to its answer. `step_in_flight`: the oldest one; 0: none is."""
        outcome = Outcome(int(reason))
        computed = int(self._registry.computed_tokens[request.slot])
        pads = self._pads and request.state is State.RUNNING and not request.joined and computed > 0
        self._situation.ended(request, outcome)
        self._counters.outcomes[outcome] += 1
        self._registry.end(request)
        self._apply.tails.leave(request)  # those that wait for it go on by themselves, even if it stays as padding
        if pads:
            self.padding.append(request)
        else:
            self._leave(request, step_in_flight)
        cached = max(0, request.cached_tokens)
        answer = request.answer
        rest = request.submission.text.finish()
        if rest:
            answer.texts.append(rest)
        arrival = int(self._registry.arrival_us[request.slot])
        answer.finish = Finish(
            reason=reason,
            message=message,
            stop_matched=stop_matched,
            stop_token_id=stop_token_id,
            prompt_tokens=request.prompt_tokens,
            cached_device_tokens=cached - sum(request.lower_tokens),
            cached_cpu_tokens=request.lower_tokens[0],
            cached_ssd_tokens=request.lower_tokens[1],
            generated_tokens=request.generated,
            computed_prompt_tokens=request.computed_prompt_tokens,
            preemptions=int(self._registry.preemptions[request.slot]),
            queue_us=(request.first_row_us or now_us) - arrival,
            ttft_us=request.first_token_us - arrival if request.first_token_us else 0,
            total_us=now_us - arrival,
            steps=request.steps,
        )
        if request.on_change is not None:
            request.on_change()

    def keep_padding(self, named: set[int], step_in_flight: int) -> None:
        """Static batching: ended rows that the decision does not name are padding no longer."""
        for request in [r for r in self.padding if r.id not in named]:
            self.padding.remove(request)
            self._leave(request, step_in_flight)

    def step_over(self, step_in_flight: int) -> None:
        """A step has ended: those that ended meanwhile leave, if no step that is in flight now computes them."""
        ended, self._in_flight = self._in_flight, []
        for request in ended:
            self._leave(request, step_in_flight)

    def _leave(self, request: LiveRequest, step_in_flight: int) -> None:
        """Its blocks are let go once the last step that writes them is over."""
        if step_in_flight and request.last_launched_step >= step_in_flight:
            self._in_flight.append(request)
        else:
            self._apply.leave(request)
