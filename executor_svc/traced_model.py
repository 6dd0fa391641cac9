"""Traces around the model: one root span a step, linked to the requests that it runs for the first time, and back.

Only used where a trace collector is configured. Scheduler and cache derive the same trace from (executor,
incarnation, step), so that their spans of a step are children of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from executor_svc.model_runner import StepModel
from executor_svc.queued_runner import QueueModel
from executor_svc.step_plan import StepPlan, StepResult
from jitney.serving import tracing

Submitted = TypeVar("Submitted")
RequestSpans = dict[int, tracing.Span]
"""Spans of live requests by their internal id."""


class HasId(Protocol):
    """A live request, as far as it matters here."""

    @property
    def id(self) -> int:
        """Its internal id."""


class StepSpans:
    """Begins the spans of steps. `running` is read from the model's thread."""

    def __init__(
        self, name: str, incarnation: int, spans: RequestSpans, running: Callable[[], Iterable[HasId]]
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._spans = spans
        self._running = running

    def begin(self, plan: StepPlan) -> tracing.Span:
        """The step's, linked to the requests that it runs for the first time."""
        step = tracing.step("step", self._name, self._incarnation, plan.step, root=True)
        step.set(rows=plan.rows, tokens=plan.tokens, sampled=len(plan.sample_rows))
        for request in list(self._running()):
            span = self._spans.pop(request.id, None)
            if span is not None:
                step.link(span.context)
                span.link(step.context)
        return step


class TracedModel:
    """A StepModel that records each step."""

    def __init__(self, inner: StepModel, spans: StepSpans) -> None:
        self._inner = inner
        self._spans = spans

    def run(self, plan: StepPlan) -> StepResult:
        """See StepModel."""
        with self._spans.begin(plan):
            return self._inner.run(plan)


class TracedQueue(Generic[Submitted]):
    """A QueueModel that records each step, from when it was queued."""

    def __init__(self, inner: QueueModel[Submitted], spans: StepSpans) -> None:
        self._inner = inner
        self._spans = spans

    def submit(self, plan: StepPlan) -> tuple[tracing.Span, Submitted]:
        """See QueueModel."""
        return self._spans.begin(plan), self._inner.submit(plan)

    def collect(self, submitted: tuple[tracing.Span, Submitted], /) -> StepResult:
        """See QueueModel."""
        span, step = submitted
        try:
            return self._inner.collect(step)
        finally:
            span.end()
