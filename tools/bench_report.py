"""Results of a bench: kept as JSON while it runs, told as Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


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
        f"{number(statistics.median(values))} {line.unit} "
        f"| {number(min(values))} to {number(max(values))} | {len(values)}"
    )


def _several(line: Line, values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f"{number(min(values))} to {number(max(values))}, {len(values)}"
    return f"{number(statistics.median(values))} {line.unit} ({spread})"


def _bar(line: Line, bar: float | None, values: Sequence[float]) -> str:
    if bar is None:
        return ""
    sign = "≥" if line.better == "more" else "≤"
    reached = values and line.reaches(statistics.median(values), bar)
    return f"{sign} {number(bar)} {'reached' if reached else 'missed' if values else ''}".strip()


def number(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"
