"""When there is nothing to decide: nobody waits, and every row that runs goes on by its next token.

Any decision would say just that, and asking for it costs CPU time in two processes at every step, of the same cores
that compute. So the loop lets rows go on without asking, as long as blocks are plenty. It asks again as soon as
anything comes from outside, a row has no block, or a while has passed: what ended meanwhile is told with it, and
whoever wants an explanation finds a snapshot that is not old.
"""

from __future__ import annotations

from executor_svc.apply import Apply
from executor_svc.course import Course
from executor_svc.registry import Registry
from jitney.snapshot import Batching, HorizonKind, Settings

ASK_AFTER_US = 100_000
SPARE_BLOCKS_A_ROW = 2
"""Below so many free blocks for each row that runs, what is decided may be who has to leave."""


class Rest:
    """Belongs to the loop's thread. Never, unless it is `allowed`, and each decision holds for one step."""

    def __init__(self, settings: Settings, registry: Registry, apply: Apply, course: Course, *, allowed: bool) -> None:
        one_step = settings.horizon_kind is HorizonKind.STEPS and settings.horizon_steps == 1
        self._allowed = allowed and one_step and settings.batching is Batching.CONTINUOUS
        self._registry = registry
        self._apply = apply
        self._course = course
        self._decided_us = 0
        self._disturbed = True

    def decided(self, now_us: int) -> None:
        """A decision has come."""
        self._decided_us, self._disturbed = now_us, False

    def disturb(self) -> None:
        """Something has happened that the next decision is to know of."""
        self._disturbed = True

    def overdue(self, now_us: int) -> bool:
        """Whether the scheduler is to be asked in any case: because it wanted to be, or was not for a while."""
        wake_at_us = self._course.decision.wake_at_us
        return 0 < wake_at_us <= now_us or now_us - self._decided_us >= ASK_AFTER_US

    def holds(self) -> bool:
        """Whether the next boundary needs no decision; while a step runs, of the one at its end."""
        registry = self._registry
        if not self._allowed or self._disturbed or registry.num_waiting or not registry.running:
            return False
        counts = self._apply.counts
        if counts.free + counts.evictable < SPARE_BLOCKS_A_ROW * len(registry.running):
            return False
        if self._course.coasting or self._apply.boarding:
            return False
        slots = registry.running_slots()
        start, length = registry.planned(slots)
        waits = (registry.waits_for[slots] != 0) | (registry.loading[slots] != 0)
        return not ((length - start > 1) | waits).any() and self._course.names_all()
