"""Sizes, durations and counts as people type and read them. Loads nothing heavy: ftctl has it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_SIZE_UNITS = {"": 1, "K": KiB, "M": MiB, "G": GiB, "T": TiB}
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")

SIZE_EXAMPLES = "a size such as 512M, 6G or 1.5T (K, M, G, T are powers of 1024)"
DURATION_EXAMPLES = "a duration such as 50ms, 5s, 2m or 1h"


@dataclass(frozen=True, slots=True)
class Amount:
    """A part of some memory: so many bytes, or a share of whatever is there."""

    bytes: int | None = None
    percent: float | None = None

    def of(self, whole_bytes: int) -> int:
        if self.bytes is not None:
            return self.bytes
        assert self.percent is not None, self
        return int(whole_bytes * self.percent / 100)

    def __str__(self) -> str:
        return format_bytes(self.bytes) if self.bytes is not None else f"{self.percent:g}%"


def parse_size(text: str) -> int:
    """Bytes in "6G", "512 MiB" or "4096". Raises ValueError saying what is allowed."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"expected {SIZE_EXAMPLES}, found {text!r}")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def parse_amount(text: str) -> Amount:
    """A size, or a percentage of what there is: "6G" or "90%"."""
    match = _PERCENT.fullmatch(text.strip())
    if not match:
        try:
            return Amount(bytes=parse_size(text))
        except ValueError:
            raise ValueError(
                f"expected {SIZE_EXAMPLES}, or a percentage such as 90%, found {text!r}"
            ) from None
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise ValueError(f"expected a percentage above 0% and up to 100%, found {text!r}")
    return Amount(percent=percent)


def parse_duration(text: str) -> float:
    """Seconds in "50ms", "5s", "2m", "1h" or "5". Raises ValueError saying what is allowed."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(f"expected {DURATION_EXAMPLES}, found {text!r}")
    return float(match[1]) * _SECONDS[match[2] or ""]


def format_bytes(n: int) -> str:
    """Three significant digits at most: "512 B", "4.00 KiB", "57.1 GiB"."""
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{n} B"
    digits = max(0, 2 - int(math.log10(max(abs(value), 1.0))))
    return f"{value:.{digits}f} {unit}"


def size_below(n: int) -> str:
    """The largest short size up to ``n``, as it is typed: "21G", "1945M"."""
    for letter, unit in (("T", TiB), ("G", GiB), ("M", MiB), ("K", KiB)):
        if n >= 10 * unit:
            return f"{n // unit}{letter}"
    return str(n)


def size_above(n: int) -> str:
    """The smallest short size from ``n`` on: "22G", "1946M"."""
    for letter, unit in (("T", TiB), ("G", GiB), ("M", MiB), ("K", KiB)):
        if n > 9 * unit:
            return f"{-(-n // unit)}{letter}"
    return str(n)


def format_count(n: int) -> str:
    """Grouped by thousands: "18,432"."""
    return f"{n:,}"


def typed_seconds(s: float) -> str:
    """In a form that ``parse_duration`` reads: "50ms", "100s", "2m", "1h"."""
    if 0 < s < 1:
        return f"{s * 1000:g}ms"
    for unit, seconds in (("h", 3600), ("m", 60)):
        if s and s % seconds == 0:
            return f"{s / seconds:g}{unit}"
    return f"{s:g}s"


def format_seconds(s: float) -> str:
    """In the unit a reader would choose: "50 ms", "3.2 s", "2 min 5 s", "1 h 1 min"."""
    if s < 1:
        return f"{s * 1000:.3g} ms"
    if s < 60:
        return f"{s:.3g} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
