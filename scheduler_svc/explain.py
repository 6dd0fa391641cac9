"""What a decision does with one request, and why, in one sentence with numbers: the same function run on the same
snapshot, and nothing remembered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jitney.decision import PreemptionMode, Refusal, RefusalReason, WaitReason
from jitney.errors import Missing
from jitney.snapshot import Snapshot
from scheduler_svc.admission import Wait
from scheduler_svc.decide import Plan, plan
from scheduler_svc.displacement import MIN_GAIN_PERCENT
from scheduler_svc.loading import Load
from scheduler_svc.policies import BUILT_IN, PolicyBook
from scheduler_svc.policies.base import Policy
from scheduler_svc.quotas import Quotas, line
from scheduler_svc.reasons import SHARED_BY_ALL, row_reason


@dataclass(frozen=True, slots=True)
class Explanation:
    """`state`: "running", "admitted", "waiting", "preempted", "refused" or "ending". `needed` and `available` are
    blocks, rows or tokens, as the sentence says; `ahead` counts those before it in the policy's order."""

    state: str
    sentence: str
    reason: WaitReason = WaitReason.UNSPECIFIED
    needed: int = 0
    available: int = 0
    ahead: int = 0


def explain(snapshot: Snapshot, request: int, policies: PolicyBook = BUILT_IN) -> Explanation:
    """Of one request of the snapshot. Missing if the snapshot does not name it."""
    planned = plan(snapshot, policies)
    for refusal in planned.refusals:
        if refusal.id == request:
            sentence = _refused(refusal)
            return Explanation("refused", sentence, needed=refusal.value, available=refusal.limit)
    if len(found := np.flatnonzero(snapshot.ending.id == request)):
        held = int(snapshot.ending.held_blocks[found[0]])
        return Explanation("ending", f"reaches its last token in a launched step and then frees {held} blocks")
    policy = policies.choose(snapshot.policy)
    if len(found := np.flatnonzero(planned.rows.id == request)):
        return _running(snapshot, planned, int(found[0]), policy)
    if len(found := np.flatnonzero(snapshot.waiting.id == request)):
        return _waiting(snapshot, planned, int(found[0]), policy)
    raise Missing(f"the snapshot does not name request {request}", field="id", value=request)


def _refused(refusal: Refusal) -> str:
    if refusal.reason is RefusalReason.DEADLINE:
        return f"needs {refusal.value} us, its deadline leaves {refusal.limit}: it is refused"
    if refusal.reason is RefusalReason.QUOTA:
        again = f"try again in {refusal.retry_after_us} us"
        return f"its tenant has {refusal.value} tokens waiting, allowed are {refusal.limit}: it is refused, {again}"
    return f"needs {refusal.value} blocks, the pool has {refusal.limit}: it is refused"


def _running(snapshot: Snapshot, planned: Plan, position: int, policy: Policy) -> Explanation:
    rows, relief = planned.rows, planned.relief
    tokens, wanted = int(planned.tokens[position]), int(rows.wanted[position])
    if position in relief.victims:
        place = int(np.flatnonzero(relief.victims == position)[0])
        mode, move = PreemptionMode(int(relief.modes[place])), int(relief.move_us[place])
        blocks, cost = int(rows.private[position]), int(relief.recompute_us[place])
        moved = f"moving {move} us" if move >= 0 else "moving is not possible"
        way = mode.name.lower().replace("_", " ")
        whom = "to rows that need one"
        if for_id := int(relief.for_id[place]):
            table, row = snapshot.running, int(np.flatnonzero(snapshot.running.id == rows.id[position])[0])
            says = policy.says(snapshot, table, row, planned.ranking)
            whom = f"and its row to request {for_id}, which {_better(snapshot, planned, position, for_id)} ({says})"
        sentence = f"gives {blocks} blocks {whom} ({way}): recomputing costs {cost} us, {moved}"
        return Explanation("preempted", sentence, WaitReason.BLOCKS, needed=1, ahead=position)
    if tokens:
        left = int(rows.known[position] - rows.planned[position])
        done = "computes its next token" if left <= 1 else f"computes {tokens} of {left} tokens to come"
        sentence = f"{done}, with {int(rows.held[position])} blocks"
        return Explanation("running", sentence, needed=wanted, available=tokens, ahead=position)
    reason = row_reason(position, rows, relief)
    sentence = {
        WaitReason.PREFIX: f"waits for request {int(rows.waits_for[position])}, which computes a prefix of it",
        WaitReason.LOAD: "waits for its blocks",
        WaitReason.BLOCKS: "needs 1 block, 0 are free: it sits out this step",
    }.get(reason, f"the step's {snapshot.settings.max_step_tokens} tokens are spent on others")
    return Explanation("running", sentence, reason, needed=wanted, ahead=position)


def _better(snapshot: Snapshot, planned: Plan, position: int, for_id: int) -> str:
    classes = planned.ranking.waiting_class
    row = int(np.flatnonzero(snapshot.waiting.id == for_id)[0])
    if classes is not None and int(classes[row]) < int(planned.rows.rank_class[position]):
        return "outranks it"
    return f"with others yields at least {MIN_GAIN_PERCENT} % more tokens per second"


def _waiting(snapshot: Snapshot, planned: Plan, row: int, policy: Policy) -> Explanation:
    boarding = planned.boarding
    if row in boarding.rows:
        place = boarding.rows.index(row)
        tokens, blocks, load = boarding.tokens[place], boarding.blocks[place], boarding.loads[place]
        begins = f"with {tokens} tokens" if tokens else "and waits for a prefix that is being computed"
        if load.blocks:
            begins = "and waits for its blocks" if load.found else "and loads what lower tiers have of it"
        sentence = f"boards {begins}, takes {blocks} blocks{_loads(load, blocks)}"
        return Explanation("admitted", sentence, needed=blocks, available=blocks)
    among = ~np.isin(snapshot.waiting.id, np.array([r.id for r in planned.refusals], np.uint64))
    boards, wait = set(boarding.rows), boarding.wait
    order = line(snapshot, planned.ranking, snapshot.waiting.rows, among, Quotas.of(snapshot))
    behind = [other for other in order.tolist() if other not in boards]
    says = f"{policy.name}: {policy.says(snapshot, snapshot.waiting, row, planned.ranking)}"
    if row not in behind:
        return _held_back(snapshot, row, says)
    ahead = behind.index(row)
    if wait is None:
        return Explanation("waiting", f"is next to board ({says})", ahead=ahead)
    lacks = _lacks(snapshot, wait)
    if ahead == 0 or wait.reason in SHARED_BY_ALL:
        return Explanation("waiting", f"{lacks} ({says})", wait.reason, wait.needed, wait.available, ahead)
    first = int(snapshot.waiting.id[wait.row])
    sentence = f"stands behind request {first}, {ahead} are ahead of it ({says}); the first {lacks}"
    return Explanation("waiting", sentence, WaitReason.BEHIND, wait.needed, wait.available, ahead)


def _loads(load: Load, blocks: int) -> str:
    """What the lower tiers have of a request that boards, and what becomes of it."""
    if not load.found:
        return ""
    where = "lower tiers" if load.ssd or not load.blocks else "the CPU tier"
    if load.blocks:
        instead = f"{_ms(load.load_us)} instead of {_ms(load.compute_us)} of prefill"
        return f"; {load.blocks} of its {blocks} blocks are loaded from {where}, {instead}"
    slower = f", at best {_ms(load.load_us)} instead of {_ms(load.compute_us)}" if load.compute_us else ""
    return f"; {load.found} of its blocks lie in {where}, to compute them is faster{slower}"


def _ms(time_us: int) -> str:
    return f"{time_us // 1000}.{time_us % 1000 // 100} ms"


def _held_back(snapshot: Snapshot, row: int, says: str) -> Explanation:
    tenants, tenant = snapshot.tenants, int(snapshot.waiting.tenant[row])
    limit = int(tenants.max_rows[np.flatnonzero(tenants.tenant == tenant)[0]])
    sentence = f"tenant {tenant} may have {limit} rows, and has or gets them for other requests ({says})"
    return Explanation("waiting", sentence, WaitReason.QUOTA, needed=1, available=0)


def _lacks(snapshot: Snapshot, wait: Wait) -> str:
    settings = snapshot.settings
    if wait.reason is WaitReason.ROWS:
        return f"needs a row, all {settings.max_rows} are taken"
    if wait.reason is WaitReason.BATCH:
        return f"waits until the batch that runs has ended, {wait.needed} rows are left"
    if wait.reason is WaitReason.TOKENS:
        return f"needs {wait.needed} tokens, the step's {settings.max_step_tokens} are spent"
    blocks = f"needs {wait.needed} blocks, {wait.available} free after {wait.kept} reserved"
    if wait.reason is WaitReason.BOUND:
        times = int(snapshot.waiting.preemptions[wait.row])
        return f"{blocks}: preempted {times} times, it boards with blocks for its whole length"
    return blocks
