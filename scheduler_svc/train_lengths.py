"""`python -m scheduler_svc.train_lengths SOURCE --out FILE`: learns lengths of answers, and writes them as integers.

SOURCE is a decision log or a trace (see `length_samples`). Gradient-boosted trees for the median and for the 90th
percentile are trained on the earlier four fifths with scikit-learn (`pip install jitney[train]`), exported as the
integer table that `scheduler_svc.lengths.trees` reads, and judged on the later fifth beside what history said. The
same source gives the same table. Prints one JSON line; exit status 2 with a sentence if it cannot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from jitney.columns import I64
from jitney.errors import Away, InvalidRequest, JitneyError
from jitney.scheduler_codec import digest_of
from scheduler_svc.length_samples import Samples, read_samples
from scheduler_svc.lengths.scale import length_of, log_of
from scheduler_svc.lengths.signals import FINE
from scheduler_svc.lengths.trees import LengthTable, Trees, inputs_of, read_table, write_table

DEPTH: Final = 3
TREES: Final = 60
RATE: Final = 0.1
LEAST_SAMPLES: Final = 50
MOST_SAMPLES: Final = 20_000
"""The newest are taken."""
_NEVER: Final = (1 << 31) - 1


def train(samples: Samples) -> tuple[LengthTable, dict[str, object]]:
    """A table, and how well it does. InvalidRequest for too few samples, Away without scikit-learn."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ModuleNotFoundError:
        raise Away("training needs scikit-learn: pip install 'jitney[train]'") from None
    count = len(samples.generated_tokens)
    if count < LEAST_SAMPLES:
        raise InvalidRequest(
            f"{count} answers are too few to learn from, {LEAST_SAMPLES} are needed",
            field="source",
            limit=LEAST_SAMPLES,
            value=count,
        )
    newest = slice(max(count - MOST_SAMPLES, 0), None)
    lengths = samples.generated_tokens[newest]
    history = np.where(samples.history >= 0, log_of(samples.history), -1)[newest]
    x = inputs_of(samples.features[newest], log_of(samples.prompt_tokens[newest]), history)
    y = FINE * log_of(lengths)
    earlier = len(y) * 4 // 5
    found = []
    for quantile in (0.5, 0.9):
        model = GradientBoostingRegressor(
            loss="quantile",
            alpha=quantile,
            n_estimators=TREES,
            max_depth=DEPTH,
            learning_rate=RATE,
            min_samples_leaf=max(5, earlier // 200),
            random_state=0,
        )
        found.append(_exported(model.fit(x[:earlier], y[:earlier]), x[:1]))
    table = LengthTable(*found)
    return table, _judged(table, x[earlier:], lengths[earlier:], history[earlier:]) | {"trained_on": earlier}


def _judged(table: LengthTable, x: I64, lengths: I64, history: I64) -> dict[str, object]:
    """Mean errors in tokens, and the share of answers within p90."""
    p50, p90 = length_of(table.p50.predict(x)), length_of(np.maximum(table.p50.predict(x), table.p90.predict(x)))
    known = history >= 0
    beside = np.abs(length_of(history) - lengths)[known].mean() if known.any() else np.nan
    return {
        "judged_on": len(lengths),
        "mae_tokens": round(float(np.abs(p50 - lengths).mean()), 1),
        "history_mae_tokens": None if np.isnan(beside) else round(float(beside), 1),
        "p90_coverage": round(float((lengths <= p90).mean()), 3),
    }


def _exported(model: Any, first: I64) -> Trees:
    """A fitted model as integers; its trees are grown to their full depth with nodes that never go right."""
    inner = (1 << DEPTH) - 1
    inputs, thresholds = np.zeros((TREES, inner), np.int64), np.full((TREES, inner), _NEVER, np.int64)
    leaves = np.zeros((TREES, inner + 1), np.int64)
    for number, grown in enumerate(model.estimators_[:, 0]):
        tree = grown.tree_
        places = [(0, 0, DEPTH)]  # node, its place in the full tree, levels below it
        while places:
            node, place, levels = places.pop()
            if levels == 0:
                leaves[number, place - inner] = round(RATE * float(tree.value[node, 0, 0]))
            elif tree.children_left[node] < 0:
                places += [(node, 2 * place + 1, levels - 1), (node, 2 * place + 2, levels - 1)]
            else:
                inputs[number, place] = tree.feature[node]
                thresholds[number, place] = int(np.floor(tree.threshold[node]))
                places.append((int(tree.children_left[node]), 2 * place + 1, levels - 1))
                places.append((int(tree.children_right[node]), 2 * place + 2, levels - 1))
    start = round(float(np.ravel(model.init_.predict(first))[0]))
    return Trees(DEPTH, start, inputs.reshape(-1), thresholds.reshape(-1), leaves.reshape(-1))


def main(argv: Sequence[str]) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.train_lengths", description=__doc__)
    parser.add_argument("source", type=Path, help="folder of a decision log, a segment of one, or a trace as CSV")
    parser.add_argument("--out", type=Path, required=True, help="file that gets the table")
    asked = parser.parse_args(argv)
    try:
        table, judged = train(read_samples(asked.source))
    except JitneyError as error:
        print(f"lengths: {error.message}", file=sys.stderr)
        return 2
    content = write_table(table)
    read_table(content)
    asked.out.write_bytes(content)
    print(json.dumps({"table": str(asked.out), "bytes": len(content), "digest": digest_of(content).hex(), **judged}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
