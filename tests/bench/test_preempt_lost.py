"""What rows lose by preemptions, read off decisions made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.preempt import Ratio
from bench.preempt_lost import Watch
from jitney.columns import AdmitColumns, PreemptColumns, RunColumns
from jitney.decision import Decision, PreemptionMode
from jitney.snapshot import Snapshot
from tests.support.situations import running, waiting

STEP_US = 10_000


def snapshot(at: int, here: dict[int, int], gone: tuple[int, ...] = ()) -> Snapshot:
    """`here` are tokens computed by row."""
    rows = [{"id": row, "computed_tokens": tokens} for row, tokens in here.items()]
    return Snapshot(
        now_us=at * STEP_US, running=running(*rows), waiting=waiting(*({"id": row, "preemptions": 1} for row in gone))
    )


def runs(tokens: dict[int, int], victim: int = 0, mode: int = PreemptionMode.RECOMPUTE) -> Decision:
    """A decision; `victim` 0: nobody leaves."""
    ids = np.array(list(tokens), np.uint64)
    left = np.array([victim] if victim else [], np.uint64)
    figures = np.zeros(len(left), np.int64)
    return Decision(
        run=RunColumns(id=ids, tokens=np.array(list(tokens.values()), np.int32)),
        preempt=PreemptColumns(
            id=left, mode=np.full(len(left), mode, np.uint8), recompute_us=figures, move_us=figures, for_id=left
        ),
    )


def test_a_victim_loses_time_until_it_is_back_and_slows_the_rows_beside_it() -> None:
    back = Decision(
        run=RunColumns(id=np.array([1], np.uint64), tokens=np.array([1], np.int32)),
        admit=AdmitColumns(
            id=np.array([2], np.uint64),
            tokens=np.array([30], np.int32),
            blocks=np.array([3], np.int32),
            load_blocks=np.array([0], np.int32),
        ),
    )
    lost = Watch.over(
        [
            (snapshot(0, {1: 20, 2: 40}), runs({1: 1}, victim=2)),
            (snapshot(1, {1: 21}, gone=(2,)), back),
            (snapshot(2, {1: 22, 2: 30}), runs({1: 1, 2: 10})),
            (snapshot(3, {1: 23, 2: 40}), runs({1: 1, 2: 1})),
            (snapshot(4, {1: 24, 2: 41}), runs({1: 1, 2: 1})),
        ],
        token_s=0.001,
    )
    assert (lost.preemptions, lost.swaps) == (1, 0)
    assert lost.away_s == pytest.approx(0.02)
    assert lost.stalled_s == pytest.approx(0.01)  # the victim's last step here: it was told to leave
    assert lost.slowed_s == pytest.approx(0.04)  # 40 tokens, one row beside them


def test_a_row_without_a_block_loses_the_step() -> None:
    frames = [(snapshot(at, {1: 20, 2: 40}), runs({1: 1}, victim=0)) for at in range(4)]
    lost = Watch.over(frames, token_s=0.001)
    assert lost.lost_s == lost.stalled_s == pytest.approx(0.03)


def test_what_goes_down_is_counted_as_a_swap() -> None:
    frames = [
        (snapshot(0, {1: 20, 2: 40}), runs({1: 1}, victim=2, mode=PreemptionMode.SWAP_CPU)),
        (snapshot(1, {}), runs({})),
    ]
    assert Watch.over(frames, token_s=0.001).swaps == 1


def test_a_ratio_is_known_as_well_as_its_loads_agree() -> None:
    assert Ratio.of([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == Ratio(2.0, 0.0)
    wide = Ratio.of([1.0, 3.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert wide.value == 2.0
    assert wide.error == pytest.approx(0.408, abs=0.01)  # of the mean of four: the deviation over two
