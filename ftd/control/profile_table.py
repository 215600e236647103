"""A machine's profile as people read it: for ``ftctl profile`` and ``ftd --profile``."""

from __future__ import annotations

from ftd.control.protocol import ProfileResult, ProfileRow
from ftd.units import format_bytes, format_seconds

GB = 1e9


def profile_lines(result: ProfileResult) -> list[str]:
    on = f"{result.gpu_name} ({result.gpu}) and " if result.gpu else ""
    lines = [
        f"experts    {result.experts}, {format_bytes(result.expert_bytes)} each",
        f"machine    {on}{result.cpu}, {result.threads} threads",
    ]
    if result.read_bytes_per_s:
        lines.append(f"memory     {result.read_bytes_per_s / GB:.1f} GB/s read by the CPU")
    if any(row.link_bytes_per_s and row.cpu_bytes_per_s for row in result.rows):
        us = result.handshake_s * 1e6
        lines.append(f"handshake  {f'{us:.0f} us' if us >= 1 else 'below 1 us'}, in the CPU's time")
    cells = [_HEADS, *(_cells(row) for row in result.rows)]
    kept = [column for column in zip(*cells) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in kept]
    lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in zip(*kept)]
    pause = f", longest pause {format_seconds(result.longest_pause_s)}"
    took = f"measured in {format_seconds(result.took_s)}{pause if result.longest_pause_s else ''}"
    return [*lines, f"{took}; kept in {result.path}"]


_HEADS = (
    "batch",
    "link",
    "CPU",
    "both: link",
    "CPU",
    "slots",
    "rest of a layer",
    "over the link, of 1, 2, 3 ... misses",
)


def _cells(row: ProfileRow) -> tuple[str, ...]:
    both = row.link_bytes_per_s and row.cpu_bytes_per_s
    return (
        str(row.batch),
        _path(row.link_bytes_per_s, row.link_fixed_s),
        _path(row.cpu_bytes_per_s, row.cpu_fixed_s),
        _rate(row.link_bytes_per_s * row.link_beside_cpu) if both else "-",
        _rate(row.cpu_bytes_per_s * row.cpu_beside_link) if both else "-",
        _rate(row.slots_bytes_per_s),
        "-" if row.layer_fixed_s is None else f"{row.layer_fixed_s * 1e6:.0f} us",
        " ".join(f"{count:.2g}" for count in row.fetch_of[1:]) if both else "-",
    )


def _path(bytes_per_s: float, fixed_s: float) -> str:
    fixed = f" + {fixed_s * 1e6:.0f} us" if bytes_per_s and fixed_s >= 0.5e-6 else ""
    return _rate(bytes_per_s) + fixed


def _rate(bytes_per_s: float) -> str:
    if not bytes_per_s:
        return "-"
    return (
        f"{bytes_per_s / GB:.1f} GB/s"
        if bytes_per_s < 1000 * GB
        else f"{bytes_per_s / GB:.0f} GB/s"
    )
