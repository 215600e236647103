"""Reading the fields of a request body: typed, bounded, refused by name.

Fields nobody reads are ignored, as clients send many that mean nothing here.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import orjson

from ftd.engine.api import Sampling
from ftd.errors import RequestInvalid
from ftd.text.stops import StopSet

T = TypeVar("T")

MAX_DEPTH = 100  # levels of JSON: schemas of real tools have up to about 20
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5  # temperatures that would overflow logits are what they tend to
MAX_TOKENS = 2**31 - 1


def parse_body(data: bytes) -> Fields:
    """The body as an object.

    Raises:
        RequestInvalid: not JSON (NaN, lone surrogates and invalid UTF-8 are not), not an object,
            or nested too deeply.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestInvalid(
            f"the body is not valid JSON: {error}", hint="send a JSON object in UTF-8"
        ) from error
    if not isinstance(body, dict):
        raise RequestInvalid(f"the body is {_kind(body)}, it must be a JSON object")
    _check_depth(body)
    return Fields(body)


def _check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestInvalid(f"the body is nested deeper than {MAX_DEPTH} levels")
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]


class Fields:
    """A request body whose fields are taken one by one; null counts as absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self.read: set[str] = set()  # what was asked for: docs/api.md is held against it

    def raw(self, name: str) -> Any:
        self.read.add(name)
        return self._body.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestInvalid(f"{name} is {_shown(value)}, it must be true or false", param=name)
        return value

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise RequestInvalid(f"{name} is {_shown(value)}, it must be a string", param=name)
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RequestInvalid(f"{name} is {_shown(value)}, it must be an object", param=name)
        return value

    def list(self, name: str, most: int) -> list[Any]:
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise RequestInvalid(f"{name} is {_shown(value)}, it must be a list", param=name)
        if len(value) > most:
            raise RequestInvalid(
                f"{name} has {len(value):,} entries, {most:,} is the most", param=name
            )
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        number = as_whole(value)
        if number is None or not low <= number <= high:
            raise RequestInvalid(
                f"{name} is {_shown(value)}, it must be a whole number from {low:,} to {high:,}",
                param=name,
            )
        return number

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number in ``low .. high``; ``above``: ``low`` itself is not allowed."""
        value = self.raw(name)
        if value is None:
            return None
        number = as_number(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise RequestInvalid(
                f"{name} is {_shown(value)}, it must be a number "
                f"{'above' if above else 'from'} {low:g} {'and up ' if above else ''}to {high:g}",
                param=name,
            )
        return number


def as_whole(value: Any) -> int | None:
    """An integer, also when JavaScript or Python wrote it as ``4.0``."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def as_number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable and math.isfinite(value) else None


def read_sampling(
    fields: Fields, defaults: Sampling, vocab: int, *, logprobs: int | None
) -> Sampling:
    """The sampling fields both APIs share; absent ones come from the checkpoint.

    Args:
        vocab: of the model; ids at or beyond it cannot be biased.
        logprobs: read by the caller, since the two APIs spell it differently.
    """
    temperature = _or(fields.number("temperature", 0, MAX_TEMPERATURE), defaults.temperature)
    top_k = _or(fields.whole("top_k", -1, MAX_TOKENS), defaults.top_k)
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=min(max(0, top_k), vocab),
        top_p=_or(fields.number("top_p", 0, 1, above=True), defaults.top_p),
        min_p=_or(fields.number("min_p", 0, 1), defaults.min_p),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=_or(
            fields.number("repetition_penalty", 0, 10, above=True), defaults.repetition_penalty
        ),
        logit_bias=_logit_bias(fields.object("logit_bias"), vocab),
        seed=None if seed is None else seed % 2**63,
        logprobs=logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(biases: dict[str, Any], vocab: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise RequestInvalid(
            f"logit_bias has {len(biases):,} entries, {MAX_BIASES:,} is the most",
            param="logit_bias",
        )
    return tuple(_bias(key, value, vocab) for key, value in biases.items())


def _bias(key: str, value: Any, vocab: int) -> tuple[int, float]:
    token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
    if not 0 <= token < vocab:
        raise RequestInvalid(
            f"logit_bias names token {key[:20]!r}, ids are 0 to {vocab - 1}", param="logit_bias"
        )
    bias = as_number(value)
    if bias is None or not -100 <= bias <= 100:
        raise RequestInvalid(
            f"logit_bias of token {token} is {_shown(value)}, it must be from -100 to 100",
            param="logit_bias",
        )
    return token, bias


def read_stops(fields: Fields, name: str = "stop") -> StopSet:
    value = fields.raw(name)
    stops = [value] if isinstance(value, str) else fields.list(name, MAX_STOPS)
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestInvalid(
                f"{name}[{i}] is {_shown(stop)}, it must be a string of 1 to {MAX_STOP_CHARS} "
                "characters",
                param=name,
            )
    return StopSet(stops)


def read_stop_ids(fields: Fields, vocab: int) -> frozenset[int]:
    return frozenset(
        token_id(value, vocab, "stop_token_ids")
        for value in fields.list("stop_token_ids", MAX_STOP_IDS)
    )


def token_id(value: Any, vocab: int, name: str) -> int:
    token = as_whole(value)
    if token is None or not 0 <= token < vocab:
        raise RequestInvalid(
            f"{name} holds {_shown(value)}, token ids are 0 to {vocab - 1}", param=name
        )
    return token


def read_include_usage(fields: Fields) -> bool:
    value = fields.object("stream_options").get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise RequestInvalid(
            f"stream_options.include_usage is {_shown(value)}, it must be true or false",
            param="stream_options.include_usage",
        )
    return bool(value)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
