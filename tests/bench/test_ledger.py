"""The batches of the ledger's bench are what an executor would send, and its ratios are of the mixes that they name."""

from __future__ import annotations

import pytest

from bench.ledger import InProcess, ratios
from bench.ledger_rows import Rows
from bench.ledger_workload import ANSWER_TOKENS, PREFIXES, PROMPT_BLOCKS, ROWS, prompt
from cache_svc.audit import audit


@pytest.mark.parametrize("common_blocks", [0, PROMPT_BLOCKS])
def test_all_rows_are_there_and_hit_what_they_should(common_blocks: int) -> None:
    here = InProcess()
    rows = Rows(common_blocks, here.apply)
    for _ in range(ANSWER_TOKENS + 4):
        rows.step()
    assert rows.hit_blocks == common_blocks
    assert len(here.ledger.requests) == ROWS
    _, chain = rows.newest()
    assert here.ledger.lookup(chain).device_blocks == common_blocks
    assert audit(here.ledger, contents=False) == []


def test_prompts_share_just_what_they_should() -> None:
    one, same, other = prompt(1, 100), prompt(1 + PREFIXES, 100), prompt(2, 100)
    assert (one[:1600] == same[:1600]).all() and (one[1600:] != same[1600:]).any()
    assert (one[:1600] != other[:1600]).any()


def test_ratios() -> None:
    worst = {"apply_lru": 1.0, "apply": 2.0, "apply_grpc": 4.0, "vllm": 4.0, "vllm_touched": 2.0}
    worst |= {"hash_lookup": 1.0, "vllm_hash": 9.0}
    best = worst | {"apply": 1.0, "hash_lookup": 3.0, "vllm_hash": 4.0}
    found = ratios({0: worst, PROMPT_BLOCKS // 2: best, PROMPT_BLOCKS: best})
    assert (found["apply_ratio"], found["worst_apply_ratio"], found["worst_apply_ratio_lru"]) == (0.25, 0.5, 0.25)
    assert (found["apply_grpc_ratio"], found["hash_lookup8k_ratio"], found["apply_ratio_touched"]) == (1.0, 0.75, 0.5)
