"""A small bar plot in text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
ASCII: Final = " .:-=+*##"


def resample(values: Sequence[tuple[float, float]], columns: int) -> list[float]:
    """(time, value) pairs in order of time -> the mean of each of `columns` equal spans; a span without any repeats
    the one before."""
    if not values:
        return []
    first, last = values[0][0], values[-1][0]
    span = (last - first) / columns or 1.0
    sums, counts = [0.0] * columns, [0] * columns
    for at, value in values:
        column = min(columns - 1, int((at - first) / span))
        sums[column] += value
        counts[column] += 1
    out: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        out.append(total / count if count else (out[-1] if out else 0.0))
    return out


def bars(values: Sequence[float], rows: int, unicode: bool = True) -> list[str]:
    """Lines from top to bottom, each with its scale at the left; the highest value fills all rows."""
    if not values:
        return []
    glyphs = BLOCKS if unicode else ASCII
    most = max(values) or 1.0
    steps = len(glyphs) - 1
    lines = []
    for row in range(rows - 1, -1, -1):
        filled = (min(max(round(value / most * rows * steps) - row * steps, 0), steps) for value in values)
        edge = "┤" if unicode else "|"
        lines.append(f"{most * (row + 1) / rows:5.1f} {edge}" + "".join(glyphs[level] for level in filled))
    return lines
