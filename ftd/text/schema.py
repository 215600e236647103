"""JSON schemas as the grammar library takes them; what it cannot hold is named, never passed over.

Draft 2020-12, and what older drafts have in common with it. The library refuses most of what it
lacks without saying where; here every keyword is looked at in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import orjson

from ftd.errors import RequestInvalid

MAX_BYTES = 512 * 1024
MAX_DEPTH = 40  # levels of schemas: the library reads 128 of JSON
MAX_JOINED = 16  # patterns that allOf may join: each doubles the search for a string they share
MAX_MULTIPLE = 10_000  # of which multiples are to be told: a second of compiling, and it squares
_MOST_DIGITS = 400  # between two numbers of JSON
_MOST_BLAMED = 300  # subschemas tried to find the one at fault

Schema = Mapping[str, Any]


class SchemaTooLarge(RequestInvalid):
    """Compiling it would take too long, whether or not every keyword is held."""


_UNSUPPORTED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
# that are held; then those that JSON schema defines beside them. Any other is only a remark
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_OTHER_FORMATS = frozenset(
    {
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    }
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")


def prepared(schema: Any, param: str) -> dict[str, Any]:
    """``schema`` without what constrains nothing.

    Raises:
        RequestInvalid: naming the keyword and its path.
    """
    size = len(orjson.dumps(schema))
    if size > MAX_BYTES:
        raise SchemaTooLarge(
            f"{param}: the JSON schema has {size:,} bytes, {MAX_BYTES:,} is the most", param=param
        )
    ready = _prepared(schema, param, "#", 0)
    _check_joined(ready, param)
    if isinstance(ready, bool):
        ready = {} if ready else {"enum": []}
    ready.pop("x-guidance", None)  # the library's own options
    return ready


def _prepared(schema: Any, param: str, path: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise refusal(param, path, "a schema must be an object, true or false")
    if depth > MAX_DEPTH:
        raise refusal(param, path, f"schemas are nested deeper than {MAX_DEPTH} levels")
    ready: dict[str, Any] = {}
    for keyword, value in schema.items():
        if _means_nothing(keyword, value):
            continue
        at = f"{path}/{keyword}"
        if keyword in _UNSUPPORTED:
            raise refusal(param, at, f"the keyword {keyword} is not supported")
        if keyword == "format" and isinstance(value, str) and value in _OTHER_FORMATS:
            raise refusal(param, at, f"the format {value} is not supported")
        if keyword in _MAPS and isinstance(value, dict):
            value = {
                name: _prepared(child, param, f"{at}/{name}", depth + 1)
                for name, child in value.items()
            }
        elif keyword in _LISTS and isinstance(value, list):
            value = [
                _prepared(child, param, f"{at}/{i}", depth + 1) for i, child in enumerate(value)
            ]
        elif keyword in _SINGLES:
            value = _prepared(value, param, at, depth + 1)
        ready[keyword] = value
    return ready


def _check_joined(schema: Any, param: str) -> None:
    """What costs most where it is joined, counted in all the schema: allOf and $ref join anything.

    Raises:
        SchemaTooLarge
    """
    patterns = sum(isinstance(part.get("pattern"), str) for part in _parts(schema))
    if patterns > MAX_JOINED and any("allOf" in part for part in _parts(schema)):
        raise SchemaTooLarge(
            f"{param}: the JSON schema has allOf and {patterns} patterns, "
            f"{MAX_JOINED} is the most beside allOf",
            param=param,
        )
    found = {part["multipleOf"] for part in _parts(schema) if _is_step(part.get("multipleOf"))}
    steps = [Decimal(repr(step)).as_tuple() for step in found]
    finest = min((int(step.exponent) for step in steps), default=0)
    digits = [(int("".join(map(str, step.digits))), int(step.exponent) - finest) for step in steps]
    apart = max((shift for _, shift in digits), default=0) > _MOST_DIGITS
    common = 0 if apart else math.lcm(*(value * 10**shift for value, shift in digits))
    if apart or common > MAX_MULTIPLE:
        raise SchemaTooLarge(
            f"{param}: the values of multipleOf in the JSON schema have no common multiple up to "
            f"{MAX_MULTIPLE:,} steps of their last digit",
            param=param,
        )


def _is_step(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _parts(schema: Any) -> Iterator[Schema]:
    """The schema and all within it."""
    if isinstance(schema, dict):
        yield schema
        for _, child in _children(schema):
            yield from _parts(child)


def _means_nothing(keyword: str, value: Any) -> bool:
    match keyword:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "minProperties" | "minItems" | "minLength":
            return value == 0 and value is not False
        case "format":
            return isinstance(value, str) and value not in _FORMATS | _OTHER_FORMATS
    return False


def _children(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Subschemas and where they stand."""
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((f"{keyword}/{name}", child) for name, child in schema[keyword].items())
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(schema[keyword]))
    for keyword in _SINGLES:
        yield keyword, schema.get(keyword)


def blamed(schema: Schema, fails: Callable[[Schema], str | None]) -> tuple[str, str]:
    """Path of the smallest subschema that fails by itself, and how.

    Args:
        fails: tells why a schema cannot be compiled; ``schema`` cannot.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
    path, reason, tries = "#", fails(schema) or "", 0
    while True:
        for place, child in _children(schema):
            tries += 1
            if tries > _MOST_BLAMED:
                return path, reason
            if isinstance(child, dict) and (why := fails({**shared, **child})):
                path, reason, schema = f"{path}/{place}", why, child
                break
        else:
            return path, reason


def refusal(param: str, path: str, reason: str) -> RequestInvalid:
    return RequestInvalid(f"{param}: JSON schema at {path}: {reason}", param=param)
