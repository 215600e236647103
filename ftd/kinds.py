"""How the values of settings are written: one ``Kind`` for each sort of value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd.units import (
    DURATION_EXAMPLES,
    SIZE_EXAMPLES,
    Amount,
    format_bytes,
    format_seconds,
    parse_amount,
    parse_duration,
    parse_size,
)


@dataclass(frozen=True, slots=True)
class HttpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """Faults asked for by a test: ``--fault step:3,slow:50ms``. Never set in service."""

    step: int | None = None  # the n-th step since start raises
    memory: int | None = None  # the n-th step finds no memory
    gpu: int | None = None  # the n-th step breaks the GPU's context, which lasts
    load: int | None = None  # the n-th load of a model since start fails half-way
    slow_s: float = 0.0  # every step takes this much longer
    stuck: int | None = None  # in the n-th step beside a GPU the CPU stops answering


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of a setting are written: ``parse(value, typed)`` returns or raises ValueError.

    ``typed`` values come from TOML and have a type; the others are the text of a flag or variable.
    """

    allowed: str
    parse: Callable[[Any, bool], Any]
    metavar: str
    repeatable: bool = False
    switch: bool = False

    def read(self, value: object, typed: bool) -> Any:
        try:
            return self.parse(value, typed)
        except ValueError as e:
            raise ValueError(str(e) or f"expected {self.allowed}, found {_shown(value)}") from None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "the switch " + str(value).lower()
    if isinstance(value, str):
        return repr(value)
    names = {dict: "a table", list: "a list"}
    return next((name for t, name in names.items() if isinstance(value, t)), str(value))


def text() -> Kind:
    def parse(value: Any, typed: bool) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value.strip()

    return Kind("a text that is not empty", parse, "TEXT")


def shaped(allowed: str, form: str, metavar: str) -> Kind:
    """Text of a form; ``allowed`` says it in words."""

    def parse(value: Any, typed: bool) -> str:
        if not isinstance(value, str) or not re.fullmatch(form, value.strip()):
            raise ValueError
        return value.strip()

    return Kind(allowed, parse, metavar)


def choice(*names: str) -> Kind:
    def parse(value: Any, typed: bool) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind("one of " + ", ".join(names), parse, "|".join(names))


def device() -> Kind:
    def parse(value: Any, typed: bool) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", value):
            raise ValueError
        return value

    return Kind("auto, cpu, cuda or cuda:N", parse, "auto|cpu|cuda[:N]")


def whole(low: int, high: int, *, auto: bool = False, kilo: bool = False) -> Kind:
    """A whole number; with ``kilo`` 32K may stand for 32768."""

    def parse(value: Any, typed: bool) -> int | str:
        if auto and value == "auto":
            return "auto"
        if kilo and isinstance(value, str) and re.fullmatch(r"\d+[KMkm]", value):
            number = parse_size(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and not typed and re.fullmatch(r"-?\d+", value.strip()):
            number = int(value)
        else:
            raise ValueError
        if not low <= number <= high:
            raise ValueError
        return number

    allowed = f"a whole number from {low} to {high}" + (", or auto" if auto else "")
    return Kind(allowed, parse, "N|auto" if auto else "N")


def size(low: int, high: int, *, auto: bool = False) -> Kind:
    def parse(value: Any, typed: bool) -> int | str:
        if auto and value == "auto":
            return "auto"
        size = value if isinstance(value, int) and not isinstance(value, bool) else None
        if size is None:
            if not isinstance(value, str):
                raise ValueError
            size = parse_size(value)
        if not low <= size <= high:
            raise ValueError(
                f"expected from {format_bytes(low)} to {format_bytes(high)}, "
                f"found {format_bytes(size)}"
            )
        return size

    if auto:
        return Kind(f"{SIZE_EXAMPLES}, or auto", parse, "SIZE|auto")
    return Kind(SIZE_EXAMPLES, parse, "SIZE")


def amount(*, auto: bool = False) -> Kind:
    def parse(value: Any, typed: bool) -> Amount | str:
        if auto and value == "auto":
            return "auto"
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return Amount(bytes=value)
        if not isinstance(value, str):
            raise ValueError
        return parse_amount(value)

    if auto:
        return Kind(
            f"{SIZE_EXAMPLES}, a percentage such as 90%, or auto", parse, "SIZE|PERCENT|auto"
        )
    return Kind(f"{SIZE_EXAMPLES}, or a percentage such as 90%", parse, "SIZE|PERCENT")


def duration(low_s: float, high_s: float) -> Kind:
    def parse(value: Any, typed: bool) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        elif isinstance(value, str):
            seconds = parse_duration(value)
        else:
            raise ValueError
        if not low_s <= seconds <= high_s:
            raise ValueError(
                f"expected from {format_seconds(low_s)} to {format_seconds(high_s)}, "
                f"found {format_seconds(seconds) if seconds >= 0 else f'{seconds} s'}"
            )
        return seconds

    return Kind(DURATION_EXAMPLES, parse, "DURATION")


def path(max_bytes: int = 4095) -> Kind:
    def parse(value: Any, typed: bool) -> Path:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        path = Path(value).expanduser()
        if (length := len(os.fsencode(path))) > max_bytes:
            raise ValueError(f"expected a path of at most {max_bytes} bytes, found {length} bytes")
        return path

    return Kind("a path", parse, "PATH")


def http_address() -> Kind:
    form = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s]+):(\d{1,5})")

    def parse(value: Any, typed: bool) -> HttpAddress:
        match = form.fullmatch(value) if isinstance(value, str) else None
        if not match or int(match[2]) > 65535:
            raise ValueError
        return HttpAddress(match[1].strip("[]"), int(match[2]))

    return Kind("HOST:PORT such as 127.0.0.1:1919 (port 0: any free one)", parse, "HOST:PORT")


def switch() -> Kind:
    words = {
        w: on for on, ws in ((True, "true yes on 1"), (False, "false no off 0")) for w in ws.split()
    }

    def parse(value: Any, typed: bool) -> bool:
        if isinstance(value, bool):
            return value
        if typed or not isinstance(value, str) or value.lower() not in words:
            raise ValueError
        return words[value.lower()]

    return Kind("true or false", parse, "", switch=True)


def several(each: Kind) -> Kind:
    """A flag given several times, a TOML list, or a variable with commas."""

    def parse(value: Any, typed: bool) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [value] if typed else [part for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError
        return tuple(each.read(part, typed) for part in value)

    return Kind(f"a list; each {each.allowed}", parse, each.metavar, repeatable=True)


def fault() -> Kind:
    def parse(value: Any, typed: bool) -> FaultSpec:
        if not isinstance(value, str):
            raise ValueError
        found: dict[str, Any] = {}
        for part in value.split(","):
            name, _, number = part.strip().partition(":")
            if name in ("step", "memory", "gpu", "load", "stuck") and re.fullmatch(
                r"[1-9]\d{0,8}", number
            ):
                found[name] = int(number)
            elif name == "slow":
                found["slow_s"] = parse_duration(number)
            else:
                raise ValueError
        return FaultSpec(**found)

    allowed = "step:N, memory:N, gpu:N, load:N, stuck:N or slow:DURATION, joined by commas"
    return Kind(allowed, parse, "FAULT")
