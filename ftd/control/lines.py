"""The protocol's lines: commands and answers to JSON and back, checked against their dataclasses.

Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

import orjson

from ftd.control.protocol import COMMANDS, PROTOCOL, Command, entry_of

LIMIT_BYTES = 64 * 1024  # of a command; answers may be longer

R = TypeVar("R")


class Malformed(ValueError):
    """A line that is not what the protocol says; the text says where."""


def encode(message: Any) -> bytes:
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def encode_command(instance: Command[Any]) -> bytes:
    facts = {f.name: getattr(instance, f.name) for f in fields(instance)}  # type: ignore[arg-type]
    return encode({"protocol": PROTOCOL, "command": entry_of(instance).name, **facts})


def decode_command(line: bytes) -> Command[Any]:
    """Raises Malformed."""
    message = decode_object(line)
    if (version := message.pop("protocol", PROTOCOL)) != PROTOCOL:
        raise Malformed(
            f"this ftd speaks protocol {PROTOCOL}, the client {version!r:.50}: "
            "use the ftctl of the same version"
        )
    name = message.pop("command", None)
    entry = COMMANDS.get(name) if isinstance(name, str) else None
    if entry is None:
        raise Malformed(f"unknown command {name!r}; known are {', '.join(sorted(COMMANDS))}")
    try:
        return typing.cast(Command[Any], build(entry.command, message, strict=True))
    except Malformed as error:
        raise Malformed(f"{name}: {error}") from None


def decode_object(line: bytes) -> dict[str, Any]:
    """Raises Malformed."""
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"not a line of JSON: {error}") from None
    if not isinstance(message, dict):
        raise Malformed(f"a JSON object was expected, {type(message).__name__} found")
    return message


def build(cls: type[R], values: Mapping[str, Any], *, strict: bool = False) -> R:
    """A dataclass from parsed JSON, checked against its annotations.

    Args:
        strict: unknown fields are refused instead of ignored.
    Raises:
        Malformed: names the field, what was expected and what was found.
    """
    hints = _hints(typing.cast(Hashable, cls))
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    if strict and (unknown := sorted(values.keys() - known.keys())):
        raise Malformed(f"unknown field {unknown[0]!r}; known are {', '.join(known) or 'none'}")
    found = {}
    for name, field in known.items():
        if name in values:
            found[name] = _fit(values[name], hints[name], name, strict)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise Malformed(f"field {name!r} is missing")
    return cls(**found)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fit(value: Any, hint: Any, where: str, strict: bool) -> Any:
    """``value`` as the annotation ``hint`` wants it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (hint,) = (a for a in args if a is not type(None))  # only ``X | None`` is used here
        return _fit(value, hint, where, strict)
    if origin is Literal:
        if value in args:
            return value
        raise Malformed(f"{where}: one of {', '.join(map(repr, args))} expected, {value!r} found")
    if origin is tuple and isinstance(value, list):
        return tuple(_fit(v, args[0], f"{where}[{i}]", strict) for i, v in enumerate(value))
    if is_dataclass(hint) and isinstance(value, dict):
        return build(typing.cast(type[Any], hint), value, strict=strict)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):  # True is an int
        return value
    raise Malformed(f"{where}: {getattr(hint, '__name__', hint)} expected, {value!r} found")
