"""Results of a bench drawn as SVG: against the bars, or several engines side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from bench_report import Line, Results, number

BAR_HEIGHT, ROW_HEIGHT, LEFT, WIDTH, RIGHT = 16, 30, 300, 360, 150  # in pixels
REACHED, MISSED = "#1b6ca8", "#b5482a"
OTHERS = ("#9aa5b1", "#c9a227", "#7a9e7e", "#a06cd5")


def plot(lines: Sequence[Line], results: Results) -> str:
    """Each median as a multiple of its bar; the mark behind it is the stretch."""
    shown = [line for line in lines if line.bar and results.values.get(line.key)]
    medians = {line.key: statistics.median(results.values[line.key]) for line in shown}
    most = max((line.ratio(medians[line.key]) for line in shown), default=1.0)
    scale = WIDTH / min(max(1.25, most * 1.05), 4.0)
    parts = []
    for n, line in enumerate(shown):
        top, value = n * ROW_HEIGHT + 24, medians[line.key]
        length = min(WIDTH, scale * line.ratio(value))
        colour = REACHED if line.reaches(value, line.bar) else MISSED
        middle = top + BAR_HEIGHT - 4
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(line.work)}</text>'
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{colour}"/>'
            f'<text x="{LEFT + length + 5:.1f}" y="{middle}">{number(value)} {line.unit}</text>'
        )
        if line.stretch:
            x = LEFT + min(WIDTH, scale * line.ratio(line.stretch))
            parts.append(_mark(x, top - 3, top + BAR_HEIGHT + 3))
    parts.append(_mark(LEFT + scale, 16, len(shown) * ROW_HEIGHT + 26, dashes=""))
    parts.append(f'<text x="{LEFT + scale:.1f}" y="12" text-anchor="middle">bar</text>')
    return _svg(parts, len(shown) * ROW_HEIGHT + 34)


def side_by_side(lines: Sequence[Line], all_results: Mapping[str, Results]) -> str:
    """Rows that several engines have values of: their medians, each row on a scale of its own."""
    rows = [(line, _medians(line, all_results)) for line in lines]
    shown = [(line, medians) for line, medians in rows if len(medians) > 1]
    colours = dict(zip(all_results, (REACHED, *OTHERS)))
    parts, top = [], 12
    for line, medians in shown:
        better = "more is better" if line.better == "more" else "less is better"
        parts.append(
            f'<text x="{LEFT - 8}" y="{top + BAR_HEIGHT - 4}" text-anchor="end">'
            f"{escape(line.work)}</text>"
            f'<text x="{LEFT - 8}" y="{top + 2 * BAR_HEIGHT - 4}" text-anchor="end" fill="#667">'
            f"{line.unit}, {better}</text>"
        )
        for name, value in medians.items():
            length = WIDTH * value / max(medians.values())
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR_HEIGHT - 2}" '
                f'fill="{colours[name]}"/>'
                f'<text x="{LEFT + length + 5:.1f}" y="{top + BAR_HEIGHT - 4}">'
                f"{number(value)} {escape(name)}</text>"
            )
            top += BAR_HEIGHT
        top += BAR_HEIGHT * max(1, 3 - len(medians))
    return _svg(parts, top)


def _medians(line: Line, all_results: Mapping[str, Results]) -> dict[str, float]:
    found = {name: result.values.get(line.key) for name, result in all_results.items()}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _svg(parts: Sequence[str], height: int) -> str:
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{height}"'
    style = 'font-family="sans-serif" font-size="11"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _mark(x: float, top: float, end: float, dashes: str = "2 2") -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{x:.1f} {top}V{end}" stroke="#333"{dash}/>'
