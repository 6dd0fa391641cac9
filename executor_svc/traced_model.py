"""Traces around the model: one root span a step, linked to the requests that it runs for the first time, and back.

Only used where a trace collector is configured. Scheduler and cache derive the same trace from (executor,
incarnation, step), so that their spans of a step are children of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from executor_svc.model_runner import StepModel
from executor_svc.step_plan import StepPlan, StepResult
from jitney.serving import tracing

RequestSpans = dict[int, tracing.Span]
"""Spans of live requests by their internal id."""


class HasId(Protocol):
    """A live request, as far as it matters here."""

    @property
    def id(self) -> int:
        """Its internal id."""


class TracedModel:
    """A StepModel that records each step. `running` is read from the model's thread."""

    def __init__(
        self,
        inner: StepModel,
        name: str,
        incarnation: int,
        spans: RequestSpans,
        running: Callable[[], Iterable[HasId]],
    ) -> None:
        self._inner = inner
        self._name = name
        self._incarnation = incarnation
        self._spans = spans
        self._running = running

    def run(self, plan: StepPlan) -> StepResult:
        """See StepModel."""
        with tracing.step("step", self._name, self._incarnation, plan.step, root=True) as step:
            step.set(rows=plan.rows, tokens=plan.tokens, sampled=len(plan.sample_rows))
            self._link(step)
            return self._inner.run(plan)

    def _link(self, step: tracing.Span) -> None:
        for request in list(self._running()):
            span = self._spans.pop(request.id, None)
            if span is not None:
                step.link(span.context)
                span.link(step.context)
