"""The live view of ``ftctl watch``: a frame of lines from an event and what came before it. Pure.

No line is longer than the terminal is wide, and none wraps: a frame replaces the one before it line
by line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftctl import view
from ftctl.view import Paint
from ftd.control import protocol as p
from ftd.engine.api import EngineStatus
from ftd.units import format_bytes, format_count, format_seconds

MOST_COLUMNS = 120
CHART_CELLS = 24  # events that a chart looks back
CYAN, MAGENTA, BLUE, DIM = "36", "35", "34", "2"
# Uses of memory: letter, and colour. What is planned and holds nothing yet is a dot of its colour.
LOOKS = {
    "CUDA": ("C", DIM),
    "dense weights": ("d", BLUE),
    "host pool": ("p", CYAN),
    "workspace": ("w", DIM),
    "staging": ("g", DIM),
    "states": ("s", view.YELLOW),
    "KV pool": ("K", view.GREEN),
    "expert slots": ("E", MAGENTA),
}
BARS = " .:-=+*#%@"  # of a chart without Unicode
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Style:
    paint: Paint
    unicode: bool

    @property
    def bars(self) -> str:
        return BLOCKS if self.unicode else BARS


@dataclass(slots=True)
class History:
    """Rates of the last events, for the charts."""

    decode: deque[float] = field(default_factory=lambda: deque(maxlen=CHART_CELLS))
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=CHART_CELLS))

    def add(self, event: p.StatusResult) -> None:
        if traffic := event.traffic:
            self.decode.append(traffic.decode_tokens_per_s)
            self.prefill.append(traffic.prefill_tokens_per_s)


def frame(
    event: p.StatusResult, history: History, columns: int, rows: int, style: Style
) -> list[str]:
    """At most ``rows`` lines of at most ``columns`` characters, colours apart."""
    width, paint = min(columns, MOST_COLUMNS), style.paint
    lines = _head(event, width, paint)
    if event.progress:
        lines += ["", view.progress(event.progress, width)]
    if event.memory:
        lines += ["", *_memory(event.memory, width, paint)]
    if event.engine:
        lines += ["", *_engine(event.engine, event.traffic, width, paint)]
        lines += ["", *_rates(event.engine, history, width, style)]
    if event.last_failure:
        lines += ["", paint(view.cut(f"last failure: {event.last_failure}", width), view.RED)]
    foot = paint(view.cut("q or Ctrl-C leaves; ftd goes on", width), DIM)
    table = view.request_table(event.engine.requests) if event.engine else []
    if event.engine and not event.engine.requests:
        table = ["no requests"]
    room = rows - len(lines) - 3
    if table and room > 0:
        if len(table) > room:
            left = len(table) - room + 1
            table = [*table[: room - 1], f"and {left} more: ftctl requests"]
        lines += ["", *(view.cut(line, width) for line in table)]
    return [*lines[: max(0, rows - 2)], "", foot][:rows]


def _head(event: p.StatusResult, width: int, paint: Paint) -> list[str]:
    resident = format_bytes(event.rss_bytes)
    title = f"{event.model or 'no model'} at {event.http}"
    up = f"up {format_seconds(event.uptime_s)}, {resident} resident"
    gap = width - len(title) - len(up)
    line = title + " " * gap + up if gap > 1 else title
    return [paint(view.cut(line, width), view.BOLD), view.state(event, paint, width)]


def _memory(uses: Sequence[p.MemoryRow], width: int, paint: Paint) -> list[str]:
    """A map of the memory that computes, and what its letters mean; headroom is nobody's."""
    uses = [use for use in uses if use.name != "headroom"]
    total = sum(use.planned_bytes for use in uses)
    used = sum(use.used_bytes for use in uses)
    head = f"memory    {format_bytes(used)} of {format_bytes(total)} in use"
    cells, parts, end = width, [], 0
    for use in uses:
        letter, colour = LOOKS.get(use.name, ("?", DIM))
        begin, end_bytes = end, sum(u.planned_bytes for u in uses[: uses.index(use) + 1])
        end = round(cells * end_bytes / total) if total else 0
        length = end - begin
        full = round(length * use.used_bytes / use.planned_bytes) if use.planned_bytes else 0
        parts.append(paint(letter * full + "." * (length - full), colour))
    legend = [
        (letter, colour, f"{use.name} {_part(use)}")
        for use in uses
        if use.planned_bytes
        for letter, colour in [LOOKS.get(use.name, ("?", DIM))]
    ]
    return [view.cut(head, width), "".join(parts), *_wrapped(legend, width, paint)]


def _part(use: p.MemoryRow) -> str:
    planned = format_bytes(use.planned_bytes)
    same = use.used_bytes >= use.planned_bytes
    return planned if same else f"{format_bytes(use.used_bytes)} of {planned}"


def _wrapped(legend: Sequence[tuple[str, str, str]], width: int, paint: Paint) -> list[str]:
    lines, line, length = [], "", 0
    for letter, colour, text in legend:
        text = view.cut(text, max(0, width - 2))
        if length and length + 3 + len(text) + 2 > width:
            lines.append(line)
            line, length = "", 0
        gap = "   " if length else ""
        line += f"{gap}{paint(letter, colour)} {text}"
        length += len(gap) + 2 + len(text)
    return [*lines, line] if line else lines


def _engine(engine: EngineStatus, traffic: p.Traffic | None, width: int, paint: Paint) -> list[str]:
    pages = f"{format_count(engine.pages_held)} of {format_count(engine.pages_total)} pages, "
    pages += f"{format_count(engine.pages_cached)} cached"
    lines = [view.gauge("KV", engine.pages_held, engine.pages_total, pages, width)]
    if engine.host_pages_held:
        pages = f"{format_count(engine.host_pages_held)} of {format_count(engine.host_pages_total)}"
        note = f"{pages} pages in host memory"
        lines.append(
            view.gauge("host KV", engine.host_pages_held, engine.host_pages_total, note, width)
        )
    if engine.anchors.count or engine.anchors.disk_bytes:
        lines.append(view.cut(f"anchors   {view.anchor_totals(engine.anchors)}", width))
    if engine.slots_total:
        slots = f"{engine.slots_used} of {engine.slots_total} slots"
        lines.append(view.gauge("experts", engine.slots_used, engine.slots_total, slots, width))
    if traffic:
        lines += [view.cut(line, width) for line in _traffic(engine, traffic)]
    put_off = f", put off {engine.preempted} times" if engine.preempted else ""
    requests = (
        f"requests  {engine.running} running, {engine.waiting} waiting{put_off}; "
        f"{engine.finished} finished, {engine.cancelled} cancelled, {engine.failed} failed"
    )
    return [*lines, view.cut(requests, width)]


def _traffic(engine: EngineStatus, traffic: p.Traffic) -> list[str]:
    lines = []
    looked_up = traffic.hits_per_s + traffic.misses_per_s
    if engine.slots_total:
        in_place = traffic.misses_per_s - traffic.fetched_per_s
        lines.append(
            f"experts   {view.share(traffic.hits_per_s, looked_up)} hits of {looked_up:,.0f}/s; "
            f"misses {traffic.fetched_per_s:,.0f}/s fetched, {in_place:,.0f}/s in place; "
            f"{traffic.evicted_per_s:,.0f}/s evicted"
        )
    moved = [
        (name, rate)
        for name, rate in (("link", traffic.link_bytes_per_s), ("DRAM", traffic.dram_bytes_per_s))
        if rate is not None
    ]
    if moved:
        rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in moved)
        lines.append(f"bytes     {rates} of weights")
    asked = traffic.reused_tokens_per_s + traffic.prefill_tokens_per_s
    if asked:
        lines.append(f"prefix    {view.share(traffic.reused_tokens_per_s, asked)} of tokens reused")
    return lines


def _rates(engine: EngineStatus, history: History, width: int, style: Style) -> list[str]:
    rows = [
        ("decode", history.decode, engine.decode_tokens_per_s, f"step {engine.step_ms_p50:.2f} ms"),
        ("prefill", history.prefill, engine.prefill_tokens_per_s, ""),
    ]
    lines = []
    for name, values, rate, note in rows:
        text = f"{rate:9,.1f} tok/s  {note}".rstrip()
        cells = max(0, min(CHART_CELLS, width - 12 - len(text)))
        lines.append(view.cut(f"{name:9} {chart(values, cells, style.bars)} {text}", width))
    return lines


def chart(values: Sequence[float], cells: int, bars: str) -> str:
    """The last ``cells`` values, each against the largest of them."""
    shown = list(values)[-cells:] if cells else []
    most = max(shown, default=0.0)
    steps = len(bars) - 1
    drawn = "".join(bars[min(steps, -int(-steps * v // most))] if most else bars[0] for v in shown)
    return drawn.rjust(cells)
