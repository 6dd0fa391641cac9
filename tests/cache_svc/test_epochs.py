"""Names, incarnations, epochs and numbers of batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache_svc.epochs import ANSWERS_KEPT, MAX_BLOCKS, DevicePool, Epochs
from jitney.block_ops import Acquire, Batch, BlockState, DeclaredBlock, RequestId, handle
from jitney.errors import Conflict, InvalidRequest, Missing, TooLarge
from jitney.keys import Key

BOOT = b"b" * 16
POOL = DevicePool("executor-0", 7, b"print", 8, 1024, 4)


def test_a_higher_incarnation_fences_and_a_lower_one_is_refused() -> None:
    epochs = Epochs(BOOT)
    assert epochs.open(POOL, redeclares=False).epoch == 1
    epochs.session("executor-0", 1, BOOT).apply(Batch(1, grant=3))
    assert epochs.open(replace(POOL, incarnation=9), redeclares=False).epoch == 2
    with pytest.raises(Conflict) as fenced:
        epochs.session("executor-0", 1, BOOT)
    assert fenced.value.field == "epoch"
    with pytest.raises(Conflict) as lower:
        epochs.open(POOL, redeclares=True)
    assert (lower.value.field, lower.value.limit) == ("incarnation", "9")
    assert epochs.of("executor-0").ledger.blocks.counts().free == 8


def test_names_do_not_fence_each_other() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    epochs.open(replace(POOL, executor="executor-1", incarnation=99), redeclares=False)
    assert epochs.session("executor-0", 1, BOOT).apply(Batch(1)).op_seq == 1


def test_all_pools_together_have_a_limit() -> None:
    epochs = Epochs(BOOT)
    for number in range(4):
        epochs.open(replace(POOL, executor=f"executor-{number}", blocks=MAX_BLOCKS), redeclares=False)
    with pytest.raises(TooLarge) as full:
        epochs.open(replace(POOL, executor="one-more"), redeclares=False)
    assert (full.value.field, full.value.value) == ("blocks", str(4 * MAX_BLOCKS + 8))
    epochs.open(replace(POOL, executor="executor-3"), redeclares=False)
    epochs.open(replace(POOL, executor="one-more"), redeclares=False)


def test_opening_again_begins_anew() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    epochs.session("executor-0", 1, BOOT).apply(Batch(1, grant=5))
    epochs.open(POOL, redeclares=False)
    answer = epochs.session("executor-0", 2, BOOT).apply(Batch(1))
    assert answer.counts.free == 8


def test_another_boot_id_is_refused() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    with pytest.raises(Conflict) as caught:
        epochs.session("executor-0", 1, b"a" * 16)
    assert caught.value.field == "boot_id"


def test_an_unknown_name_is_missing() -> None:
    with pytest.raises(Missing):
        Epochs(BOOT).session("nobody", 1, BOOT)


def test_a_repeat_gets_the_first_answer_and_a_gap_is_refused() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    session = epochs.session("executor-0", 1, BOOT)
    first = session.apply(Batch(1, grant=2))
    assert session.apply(Batch(1, grant=2)) is first
    assert session.ledger.blocks.counts().granted == 2
    with pytest.raises(Conflict) as gap:
        session.apply(Batch(3))
    assert (gap.value.field, gap.value.limit, gap.value.value) == ("op_seq", "2", "3")
    for number in range(2, ANSWERS_KEPT + 2):
        session.apply(Batch(number))
    with pytest.raises(Conflict):
        session.apply(Batch(1))
    assert session.apply(Batch(2)).op_seq == 2


def test_a_repeat_that_says_something_else_is_refused() -> None:
    """Somebody else has used the number: an answer to other operations would leave blocks that nobody knows of."""
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    session = epochs.session("executor-0", 1, BOOT)
    session.apply(Batch(1, grant=8))
    with pytest.raises(Conflict) as other:
        session.apply(Batch(1, grant=2))
    assert (other.value.field, other.value.value) == ("op_seq", "1")


def test_a_malformed_batch_does_not_use_up_its_number() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=False)
    session = epochs.session("executor-0", 1, BOOT)
    with pytest.raises(InvalidRequest):
        session.apply(Batch(1, acquires=[Acquire(RequestId(1), [Key(b"x")])]))
    assert session.apply(Batch(1)).op_seq == 1


def test_no_batch_is_answered_before_the_declaration_is_complete() -> None:
    epochs = Epochs(BOOT)
    epochs.open(POOL, redeclares=True)
    session = epochs.session("executor-0", 1, BOOT)
    with pytest.raises(Conflict) as caught:
        session.apply(Batch(1))
    assert caught.value.field == "redeclare"
    with pytest.raises(InvalidRequest):
        session.redeclare([DeclaredBlock(handle(0, 3), BlockState.FREE)])
    session.redeclare([DeclaredBlock(handle(0, 3), BlockState.GRANTED)])
    assert session.apply(Batch(1)).counts.granted == 1
    with pytest.raises(Conflict):
        session.redeclare([])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks", 0),
        ("blocks", 1 << 25),
        ("block_bytes", 0),
        ("block_bytes", 1 << 40),
        ("block_tokens", 0),
        ("executor", ""),
        ("executor", "x" * 300),
        ("fingerprint", bytes(300)),
    ],
)
def test_an_impossible_pool(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(POOL, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
