"""What a tool's schema says of its arguments, and what calls of a dialect cannot be held to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .arguments import kinds, referred
from .dialects import Markup, Params
from .schema import Schema

MOST_UNORDERED = 60  # members of an object in any order: the library has 64 bits for them
_ABOUT_TEXT = frozenset(
    {"$ref", "allOf", "anyOf", "const", "enum", "format", "maxLength", "minLength", "oneOf"}
    | {"pattern"}
)
_CONSTRAINING = frozenset(
    {"allOf", "anyOf", "const", "enum", "maxProperties", "minProperties", "oneOf"}
    | {"patternProperties", "$ref"}
)


def properties_of(schema: Schema) -> tuple[dict[str, Any], frozenset[str]]:
    """Those that are declared, and which of them are required."""
    declared, required = schema.get("properties"), schema.get("required")
    properties = dict(declared) if isinstance(declared, Mapping) else {}
    names = required if isinstance(required, list) else []
    undeclared: dict[str, Any] = {
        name: {} for name in names if isinstance(name, str) and name not in properties
    }
    return properties | undeclared, frozenset(names)


def is_plain_object(schema: Schema) -> bool:
    """Declared members and nothing else: they may come in any order."""
    properties, _ = properties_of(schema)
    known = {"type", "properties", "required", "additionalProperties"}
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
    return (
        0 < len(properties) <= MOST_UNORDERED
        and schema.get("type") == "object"
        and schema.get("additionalProperties", False) is False
        and not (schema.keys() - known) & _CONSTRAINING
        and all(re.match(r"#/(?:\$defs|definitions)/", ref) for ref in references)
    )


def rooted(prop: Any, root: Schema) -> dict[str, Any]:
    """A property's schema by itself, with what it may refer to."""
    prop = prop if isinstance(prop, Mapping) else {}
    return {**prop, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


def resolved(prop: Any, root: Schema) -> Schema:
    """What a property's references lead to."""
    seen = 0
    while isinstance(prop, Mapping) and isinstance(prop.get("$ref"), str) and seen < 8:
        prop, seen = referred(prop["$ref"], root), seen + 1
    return prop if isinstance(prop, Mapping) else {}


def listed_texts(prop: Schema, *, only: bool = False) -> list[str] | None:
    """The values that are allowed, if they are listed, as a call without JSON writes them.

    Args:
        only: those that are texts.
    """
    values = [prop["const"]] if "const" in prop else prop.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return [
        v if isinstance(v, str) else json.dumps(v) for v in values if isinstance(v, str) or not only
    ]


def not_held(markup: Markup, schema: Schema) -> tuple[str, str] | None:
    """Path and reason of what this dialect's calls cannot be held to; None: it holds all of it."""
    form = markup.dialect.call
    if markup.dialect.json or not isinstance(form, Params):
        return None
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    for keyword in schema:
        if keyword not in known and keyword in _CONSTRAINING:
            return f"#/{keyword}", f"the keyword {keyword} is not held around tool arguments"
    for name, declared in properties_of(schema)[0].items():
        prop, types = resolved(declared, schema), kinds(declared, schema)
        if listed_texts(prop) is not None or types is None or "string" not in types:
            continue
        path = f"#/properties/{name}"
        if types - {"string", "null"} and not form.typed:
            return path, "text or something else: this model's calls do not tell which"
        if unheld := _unheld_keyword(prop):
            return f"{path}/{unheld}", "is not held in text arguments of this model's calls"
    return None


def _unheld_keyword(prop: Schema) -> str | None:
    """What is said of a text beyond its length."""
    found = next((word for word in ("pattern", "format", "allOf") if word in prop), None)
    for word in ("anyOf", "oneOf"):  # text or null is common
        parts = prop.get(word)
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, Mapping) or part.keys() & _ABOUT_TEXT:
                found = found or word
    return found
