"""Tables in Markdown, and plots of lines as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")


def line_chart(lines: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """An SVG of lines over two logarithmic axes; points are (x, y), all above 0."""
    width, height, left, top = 640, 400, 70, 40
    points = [point for line in lines.values() for point in line]
    low_x, high_x = (pick(x for x, _ in points) for pick in (min, max))
    low_y, high_y = (pick(y for _, y in points) for pick in (min, max))

    def place(value: float, low: float, high: float, length: float) -> float:
        return length * math.log(value / low) / max(math.log(high / low), 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + place(x, low_x, high_x, width), top + height - place(y, low_y, high_y, height)

    parts = []
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line)
        _, end = at(*line[-1])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 8}" y="{end + 4:.0f}" fill="{color}">{name}</text>')
    parts += [
        f'<text x="{at(x, low_y)[0]:.0f}" y="{top + height + 18}" text-anchor="middle">{x:,.0f}</text>'
        for x in sorted({x for x, _ in points})
    ]
    for exponent in range(math.floor(math.log10(low_y)), math.ceil(math.log10(high_y)) + 1):
        if low_y <= 10**exponent <= high_y:
            y = at(low_x, 10**exponent)[1]
            parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{10**exponent:,}</text>')
            parts.append(
                f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" height="{top + height + 30}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="22" font-weight="bold">{title}</text>{"".join(parts)}</svg>\n'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells below a header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
