"""Hit rates by pool size as an SVG: one panel a trace, one line an order."""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 50, 40, 40
LINES = {"belady": "#888888", "cost": "#d1495b", "lru": "#00798c"}


def plot(traces: dict[str, Any]) -> str:
    """The picture of what `bench.prefix_traces.run` found in each trace."""
    across = LEFT + len(traces) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{TOP + HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, (name, trace) in enumerate(traces.items()):
        parts += _panel(LEFT + panel * (WIDTH + GAP), name, trace)
    for at, (order, colour) in enumerate(LINES.items()):
        x, y = LEFT + at * 90, TOP + HEIGHT + 50
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{order}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, name: str, trace: dict[str, Any]) -> list[str]:
    infinite: float = trace["infinite"]["hit_rate"]
    sizes = [pool["percent"] for pool in trace["pools"]]
    first, last = math.log(min(sizes)), math.log(max(sizes))

    def across(percent: int) -> float:
        return left + WIDTH * (math.log(percent) - first) / max(last - first, 1e-9)

    def down(rate: float) -> float:
        return TOP + HEIGHT * (1 - rate / max(infinite, 1e-9))

    parts = [
        f'<text x="{left}" y="{TOP - 14}">{escape(name)}: hit rate by % of the working set</text>',
        f'<path d="M{left} {TOP}V{TOP + HEIGHT}H{left + WIDTH}" fill="none" stroke="black"/>',
        f'<path d="M{left} {TOP}h{WIDTH}" stroke="#bbbbbb" stroke-dasharray="4 4"/>',
        f'<text x="{left - 6}" y="{TOP + 4}" text-anchor="end">{infinite:.2f}</text>',
        f'<text x="{left - 6}" y="{TOP + HEIGHT}" text-anchor="end">0</text>',
    ]
    for percent in sizes:
        parts.append(f'<text x="{across(percent):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{percent}</text>')
    for order, colour in LINES.items():
        points = " ".join(f"{across(p['percent']):.1f},{down(p['hit_rate'][order]):.1f}" for p in trace["pools"])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts
