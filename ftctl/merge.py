"""Our piece of a client's config file merged into the user's: pure functions from text to text.

Objects are merged key by key and ours win; lists of objects with an ``id`` are merged by it; all
else is replaced. JSON may have comments and trailing commas, as several clients allow (they do not
survive a change; the backup has them). TOML keeps every byte outside of the table that is ours.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]

# a string, or what is to be left out of JSON: comments, and commas before a closing bracket
_JSONC = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*[}\]])',
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Unreadable(ValueError):
    """The file is not what its client would read; the text says where."""


def merged_text(name: str, text: str, ours: Tree, defaults: Tree | None = None) -> str:
    """``text`` with ``ours`` in it, unchanged if it says so already. Raises Unreadable.

    Args:
        defaults: what is added only where nothing stands.
    """
    toml = name.endswith(".toml")
    was = _read_toml(text) if toml else _read_json(text)
    wanted = merge(merge(defaults or {}, was), ours)
    if wanted == was:
        return text
    if not toml:
        return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    merged = _with_tables(text, ours, wanted)
    if _read_toml(merged) != wanted:  # the user wrote our table in another form
        raise Unreadable(f"it has {_dotted(next(_tables(ours)))} in a form that is not changed")
    return merged


def merge(was: Any, ours: Any) -> Any:
    if isinstance(was, dict) and isinstance(ours, dict):
        return {**was, **{k: merge(was[k], v) if k in was else v for k, v in ours.items()}}
    if isinstance(was, list) and _has_ids(was) and isinstance(ours, list) and _has_ids(ours):
        ids = {item["id"] for item in ours}
        return [item for item in was if item["id"] not in ids] + ours
    return ours


def _has_ids(items: list[Any]) -> bool:
    return all(isinstance(item, dict) and "id" in item for item in items)


def _read_json(text: str) -> Tree:
    plain = _JSONC.sub(lambda found: found["text"] or "", text.removeprefix("\ufeff"))
    try:
        tree = json.loads(plain) if plain.strip() else {}
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Unreadable(f"an object was expected, it holds a {type(tree).__name__}")
    return tree


def _read_toml(text: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(f"it is not TOML: {error}") from None


def _tables(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The ways to the tables that hold values."""
    if _values(tree):
        yield path
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _tables(value, (*path, key))


def _values(table: Tree) -> Tree:
    return {k: v for k, v in table.items() if not isinstance(v, dict)}


def _with_tables(text: str, ours: Tree, wanted: Tree) -> str:
    for path in _tables(ours):
        text = _without_table(text, _dotted(path))
        values = _values(functools.reduce(lambda table, key: table[key], path, wanted))
        lines = [f"{_key(k)} = {json.dumps(v, default=str)}" for k, v in values.items()]
        table = "\n".join([f"[{_dotted(path)}]", *lines, ""])
        text = f"{text.rstrip()}\n\n{table}" if text.strip() else table
    return text


def _without_table(text: str, name: str) -> str:
    kept, ours = [], False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            header = line.split("#")[0].strip()
            ours = header == f"[{name}]"
        if not ours:
            kept.append(line)
    return "".join(kept)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(map(_key, path))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key)
