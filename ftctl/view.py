"""Answers of ftd as lines of text for people: pure functions of the answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from ftd.control import protocol as p
from ftd.control.profile_table import profile_lines
from ftd.engine.api import EngineLimits, EngineStatus, RequestInfo
from ftd.kv.anchors import AnchorInfo, AnchorTotals
from ftd.units import format_bytes, format_count, format_seconds

R = TypeVar("R")

GREEN, YELLOW, RED, BOLD = "32", "33", "31", "1"
STATE_COLOURS = {"ready": GREEN, "failed": RED}


@dataclass(frozen=True, slots=True)
class Paint:
    """Colours where they are wanted: on a terminal that can, unless NO_COLOR says otherwise."""

    on: bool

    @classmethod
    def of(cls, stream: TextIO) -> Paint:
        dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
        return cls(stream.isatty() and not dumb)

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.on else text


def status(result: p.StatusResult, paint: Paint) -> list[str]:
    rows = [
        ("state", state(result, paint)),
        ("model", f"{result.model} from {result.path}" if result.model else "none"),
        ("http", result.http),
        (
            "process",
            f"ftd {result.version}, pid {result.pid}, up {format_seconds(result.uptime_s)}, "
            f"{format_bytes(result.rss_bytes)} resident",
        ),
    ]
    if result.progress:
        rows.append(("progress", progress(result.progress, 68)))
    if limits := result.limits:
        rows.append(
            (
                "limits",
                f"context {format_count(limits.context_tokens)}, {_pool(limits, result.engine)}, "
                f"{limits.max_running} running, {limits.max_waiting} waiting",
            )
        )
    if engine := result.engine:
        rows += [
            (
                "requests",
                f"{engine.running} running, {engine.waiting} waiting; {engine.finished} finished, "
                f"{engine.cancelled} cancelled, {engine.failed} failed",
            ),
            ("speed", _speed(engine)),
            (
                "pages",
                f"{engine.pages_held} of {engine.pages_total} held, {engine.pages_cached} of them "
                f"by the prefix cache only; {engine.page_tokens} tokens each",
            ),
            (
                "tokens",
                f"{format_count(engine.prompt_tokens)} prompt computed, "
                f"{format_count(engine.reused_tokens)} reused, "
                f"{format_count(engine.output_tokens)} written",
            ),
        ]
        if engine.host_pages_total:
            rows.append(
                (
                    "host KV",
                    f"{engine.host_pages_held} of {engine.host_pages_total} pages, "
                    f"{format_count(engine.host_pages_loaded)} have come back from there",
                )
            )
        if engine.anchors.count or engine.anchors.disk_bytes:
            rows.append(("anchors", anchor_totals(engine.anchors)))
        if engine.window_pages_total:
            held = f"{engine.window_pages_held} of {engine.window_pages_total} pages held"
            rows.append(("windows", held))
        if engine.states_total:
            held = f"{engine.states_held} of {engine.states_total} held"
            rows.append(("states", f"{held}, {engine.states_cached} of them to resume from only"))
        if engine.slots_total:
            rows.append(("experts", f"{_slots(engine)}, {_hits(engine)}"))
        if engine.rates_from:
            rows.append(("rates", f"from {engine.rates_from}"))
    if result.last_failure:
        rows.append(("failure", paint(result.last_failure, RED)))
    return [f"{name:9} {text}" for name, text in rows]


def health(result: p.HealthResult, paint: Paint) -> list[str]:
    return ["ready" if result.ready else f"not ready: {result.cause}"]


def one_line(result: p.StatusResult, paint: Paint) -> list[str]:
    """For ``watch`` into a pipe or file."""
    words = [result.state, f"model={result.model}"]
    if result.progress:
        words.append(f"phase={result.progress.phase.replace(' ', '-')}")
        if result.progress.total_bytes:
            words.append(f"done={share(result.progress.done_bytes, result.progress.total_bytes)}")
    if engine := result.engine:
        words += [
            f"running={engine.running}",
            f"waiting={engine.waiting}",
            f"decode_tok_s={engine.decode_tokens_per_s:.1f}",
            f"prefill_tok_s={engine.prefill_tokens_per_s:.1f}",
            f"step_ms={engine.step_ms_p50:.2f}",
            f"pages={engine.pages_held}/{engine.pages_total}",
        ]
        if engine.slots_total:
            words += [f"slots={engine.slots_used}/{engine.slots_total}", f"hits={_rate(engine)}"]
        if engine.anchors.count:
            words += [f"anchors={engine.anchors.count}", f"anchor_hits={engine.anchors.hits}"]
        if engine.host_pages_total:
            words.append(f"host_pages={engine.host_pages_held}/{engine.host_pages_total}")
    return [" ".join(words)]


def progress(report: p.Progress, columns: int) -> str:
    """One line shorter than ``columns``: a bar if the phase has a measure, else what is left."""
    if report.fraction is not None:
        return gauge(report.phase, report.fraction, 1.0, "", columns - 1)
    if not report.total_bytes:
        left = f", {report.running} running, {report.waiting} waiting"
        return cut(report.phase + (left if report.phase == "draining" else " ..."), columns - 1)
    text = f"{format_bytes(report.done_bytes)} of {format_bytes(report.total_bytes)}"
    return gauge(report.phase, report.done_bytes, report.total_bytes, text, columns - 1)


def requests(result: p.RequestsResult, paint: Paint) -> list[str]:
    return request_table(result.requests) if result.requests else ["no requests"]


def experts(result: p.ExpertsResult, paint: Paint) -> list[str]:
    looked_up = result.hits + result.misses
    return [
        f"slots     {result.slots_used} of {result.slots_total} filled",
        f"hits      {share(result.hits, looked_up)} of {format_count(looked_up)} look-ups",
        f"misses    {format_count(result.misses)}, {format_count(result.fetched)} of them fetched",
        f"evicted   {format_count(result.evicted)}",
    ]


def anchors(result: p.AnchorsResult, paint: Paint, most: int | None = None) -> list[str]:
    """At most so many of them: those used last."""
    columns: list[tuple[str, Callable[[AnchorInfo], str]]] = [
        ("session", lambda a: a.session or "-"),
        ("kind", lambda a: a.kind),
        ("position", lambda a: str(a.position)),
        ("tokens", lambda a: str(a.tokens)),
        ("kv", lambda a: format_bytes(a.kv_bytes)),
        ("state", lambda a: format_bytes(a.state_bytes) if a.state_bytes else "-"),
        ("host", lambda a: format_bytes(a.host_bytes) if a.host_bytes else "-"),
        ("disk", lambda a: format_bytes(a.disk_bytes) if a.disk_bytes else "-"),
        ("hits", lambda a: str(a.hits)),
        ("age", lambda a: format_seconds(a.age_s)),
        ("saved", lambda a: format_seconds(a.saved_s) if a.hits else "-"),
        ("", lambda a: "in use" if a.in_use else ""),
    ]
    last_used = sorted(result.anchors, key=lambda a: a.age_s)[:most]
    rows = sorted(last_used, key=lambda a: (a.session, a.position))
    lines = _grid(columns, rows) if rows else ["no anchors"]
    if more := len(result.anchors) - len(rows):
        lines.append(f"... and {format_count(more)} more, not used as lately (--json shows all)")
    return [*lines, *([f"{result.pages_freed} pages freed"] if result.pages_freed else [])]


def anchor_totals(totals: AnchorTotals) -> str:
    """In one line: how many, what came of them, and where what is kept lies."""
    tiers = [
        ("KV", totals.kv_bytes),
        ("host", totals.host_bytes),
        ("states", totals.state_bytes),
        ("disk", totals.disk_bytes),
    ]
    held = ", ".join(f"{name} {format_bytes(n)}" for name, n in tiers if n) or "nothing kept"
    saved = f" saved {format_seconds(totals.saved_s)}" if totals.hits else ""
    return f"{format_count(totals.count)}: {format_count(totals.hits)} hits{saved}; {held}"


def verified(result: p.VerifyResult, paint: Paint) -> list[str]:
    columns: list[tuple[str, Callable[[p.VerifiedSession], str]]] = [
        ("session", lambda s: s.session),
        ("requests", lambda s: str(s.requests)),
        ("prompt", lambda s: str(s.prompt_tokens)),
        ("recomputed", lambda s: str(s.recomputed_tokens)),
        ("ideal", lambda s: str(s.ideal_tokens)),
        ("checked", lambda s: str(s.checked)),
        ("unequal", lambda s: str(s.unequal)),
        ("difference", lambda s: f"{s.max_difference:.2g}"),
    ]
    verdict = paint("equal", GREEN) if result.equal else paint("NOT equal", RED)
    return [*_grid(columns, result.sessions), f"answers of {result.model} are {verdict}"]


def cancelled(result: p.CancelResult, paint: Paint) -> list[str]:
    return [f"{result.request_id} cancelled"]


def checked(result: p.CheckResult, paint: Paint) -> list[str]:
    need, available = format_bytes(result.need_bytes), format_bytes(result.available_bytes)
    how = "while the old one serves" if result.beside else "once the old one is freed"
    return [*result.report, f"{result.model} can be loaded {how}: {need} of {available}"]


def reloaded(result: p.ReloadResult, paint: Paint) -> list[str]:
    change = f"{result.was or 'no model'} -> {result.model}"
    pause = "no pause" if result.beside else f"paused {format_seconds(result.unready_s)}"
    cut = "" if result.drained else ", requests that ran on were cut"
    return [f"{change}, loaded in {format_seconds(result.load_s)}, {pause}{cut}"]


def budget(result: p.BudgetResult, paint: Paint) -> list[str]:
    if not result.changed:
        return [*result.plan, *_by_need(result)]
    words = [
        _change("slots", result.slots_were, result.slots),
        _change("KV tokens", result.kv_tokens_were, result.kv_tokens),
        f"paused {format_seconds(result.paused_ms / 1000)}",
    ]
    if result.context_tokens != result.context_tokens_were:
        words.insert(2, _change("context", result.context_tokens_were, result.context_tokens))
    took = [
        (result.experts_evicted, "experts evicted"),
        (result.pages_evicted, "cached pages dropped"),
        (result.pages_moved, "pages moved"),
        (result.preempted, "sequences put off"),
    ]
    words += [f"{format_count(number)} {name}" for number, name in took if number]
    return [", ".join(words), *_by_need(result)]


def _by_need(result: p.BudgetResult) -> list[str]:
    if result.auto:
        return [f"divided by need, KV tokens up to {format_count(result.kv_tokens_most)}"]
    return ["no longer divided by need"] if result.auto_was else []


def _change(name: str, before: int, after: int) -> str:
    if before == after:
        return f"{name} {format_count(after)} as before"
    return f"{name} {format_count(before)} -> {format_count(after)}"


def profiled(result: p.ProfileResult, paint: Paint) -> list[str]:
    return profile_lines(result)


def traced(result: p.TraceResult, file: Path, paint: Paint) -> list[str]:
    size = f"{result.layers} layers, {result.experts_per_token} experts each"
    return [f"{format_count(result.tokens)} tokens of {result.model} ({size}) in {file}"]


def drained(result: p.DrainResult, paint: Paint) -> list[str]:
    if result.unloaded:
        return [f"{result.model} is unloaded: nothing to drain; the next request loads it"]
    return [f"{result.model} drained in {format_seconds(result.waited_s)}; takes no requests"]


def stopped(result: p.StopResult, paint: Paint) -> list[str]:
    return [f"ftd stopped (pid {result.pid})"]


def state(result: p.StatusResult, paint: Paint, width: int = 1000) -> str:
    text = result.state if result.ready else f"{result.state}: {result.cause}"
    return paint(cut(text, width), STATE_COLOURS.get(result.state, YELLOW))


def _pool(limits: EngineLimits, engine: EngineStatus | None) -> str:
    """As large as it is; where it follows need, how large it can become too."""
    now = engine.pages_total * engine.page_tokens if engine else limits.pool_tokens
    more = f" (up to {format_count(limits.pool_tokens)})" if limits.pool_tokens > now else ""
    return f"pool {format_count(now)} tokens{more}"


def _speed(engine: EngineStatus) -> str:
    """While it computes, or last did."""
    return (
        f"decode {engine.decode_pace_tokens_per_s:.1f} tok/s, "
        f"prefill {engine.prefill_pace_tokens_per_s:.1f} tok/s, step {engine.step_ms_p50:.2f} ms"
    )


def _slots(engine: EngineStatus) -> str:
    return f"{engine.slots_used} of {engine.slots_total} slots"


def _hits(engine: EngineStatus) -> str:
    return f"{_rate(engine)} hits"


def _rate(engine: EngineStatus) -> str:
    return share(engine.expert_hits, engine.expert_hits + engine.expert_misses)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def gauge(name: str, part: float, whole: float, text: str, width: int) -> str:
    """``name [#####-----]  50% text``: the bar takes what the words leave."""
    frame = len(f"{name:9} [] 100% {text}")
    cells = max(0, min(40, width - frame))
    full = int(cells * min(1.0, part / whole)) if whole else 0
    bar = "#" * full + "-" * (cells - full)
    return cut(f"{name:9} [{bar}] {share(part, whole):>4} {text}", width)


def request_table(rows: Iterable[RequestInfo]) -> list[str]:
    columns: list[tuple[str, Callable[[RequestInfo], str]]] = [
        ("request", lambda r: r.request_id),
        ("state", lambda r: r.state),
        ("prompt", lambda r: f"{r.computed_tokens}/{r.prompt_tokens}"),
        ("reused", lambda r: str(r.reused_tokens)),
        ("out", lambda r: str(r.output_tokens)),
        ("age", lambda r: format_seconds(r.age_s)),
    ]
    return _grid(columns, rows)


def _grid(columns: Sequence[tuple[str, Callable[[R], str]]], rows: Iterable[R]) -> list[str]:
    cells = [[name for name, _ in columns], *([show(r) for _, show in columns] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."[: max(0, width)]
