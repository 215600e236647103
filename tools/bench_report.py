"""Results of a bench: kept as JSON while it runs, told as Markdown, drawn as SVG."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

BAR_HEIGHT, ROW_HEIGHT, LEFT, WIDTH, RIGHT = 16, 30, 300, 360, 150  # of the plot, in pixels
REACHED, MISSED, NO_BAR = "#1b6ca8", "#b5482a", "#9aa5b1"


@dataclass(frozen=True)
class Line:
    """One row of the table: what is measured, and what it should reach."""

    key: str
    work: str
    unit: str
    bar: float | None = None
    stretch: float | None = None
    better: Literal["more", "less"] = "more"

    def reaches(self, value: float, bar: float | None) -> bool:
        return bar is not None and (value >= bar if self.better == "more" else value <= bar)

    def ratio(self, value: float) -> float:
        """1 at the bar, more where it is better."""
        assert self.bar
        return value / self.bar if self.better == "more" else self.bar / max(value, 1e-9)


@dataclass
class Results:
    """Everything measured so far. Written out after each value: a run that is cut loses nothing."""

    path: Path | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, values: Sequence[float]) -> None:
        self.values.setdefault(key, []).extend(values)
        self.save()

    def note(self, key: str, fact: Any) -> None:
        self.facts[key] = fact
        self.save()

    def fail(self, key: str, why: str) -> None:
        self.failed[key] = why
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        kept = {k: v for k, v in vars(self).items() if k != "path"}
        part.write_text(json.dumps(kept, indent=1))
        part.replace(self.path)

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(None, **json.loads(path.read_text()))


def table(lines: Sequence[Line], all_results: dict[str, Results]) -> str:
    """Medians and their spread beside the bars, a column of values for each result."""
    named = len(all_results) > 1
    heads = [f"{name}: median (range, runs)" if named else "median | range | runs"
             for name in all_results]  # fmt: skip
    rows = [["work", *heads, "bar", "stretch"]]
    for line in lines:
        found = [result.values.get(line.key, []) for result in all_results.values()]
        if not any(found):
            continue
        cells = [_several(line, v) if named else _one(line, v) for v in found]
        bars = [_bar(line, line.bar, found[0]), _bar(line, line.stretch, found[0])]
        rows.append([line.work, *cells, *bars])
    written = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([written[0], "|" + " --- |" * (written[0].count("|") - 1), *written[1:]])


def _one(line: Line, values: Sequence[float]) -> str:
    return (
        f"{_number(statistics.median(values))} {line.unit} "
        f"| {_number(min(values))} to {_number(max(values))} | {len(values)}"
    )


def _several(line: Line, values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f"{_number(min(values))} to {_number(max(values))}, {len(values)}"
    return f"{_number(statistics.median(values))} {line.unit} ({spread})"


def _bar(line: Line, bar: float | None, values: Sequence[float]) -> str:
    if bar is None:
        return ""
    sign = "≥" if line.better == "more" else "≤"
    reached = values and line.reaches(statistics.median(values), bar)
    return f"{sign} {_number(bar)} {'reached' if reached else 'missed' if values else ''}".strip()


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


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
            f'<text x="{LEFT + length + 5:.1f}" y="{middle}">{_number(value)} {line.unit}</text>'
        )
        if line.stretch:
            x = LEFT + min(WIDTH, scale * line.ratio(line.stretch))
            parts.append(_mark(x, top - 3, top + BAR_HEIGHT + 3))
    height = len(shown) * ROW_HEIGHT + 34
    parts.append(_mark(LEFT + scale, 16, height - 8, dashes=""))
    parts.append(f'<text x="{LEFT + scale:.1f}" y="12" text-anchor="middle">bar</text>')
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{height}"'
    style = 'font-family="sans-serif" font-size="11"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _mark(x: float, top: float, end: float, dashes: str = "2 2") -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{x:.1f} {top}V{end}" stroke="#333"{dash}/>'
