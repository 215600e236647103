"""Arguments of tool calls on their way to JSON text, while they are still being written."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import orjson

MAX_DEPTH = 100  # of schemas looked through, and of literals that are read as Python
_MAX_WORD_CHARS = 4096
_ESCAPE_CHARS = 10  # the longest one: \UXXXXXXXX

Schema = Mapping[str, Any]

# within a string: its end, an escape, or what may not stand there
_IN_STRING = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s0-9+\-.,:eEtrufalsn]')
_SCALAR = re.compile(r"[0-9+\-.eEa-z]*")
_WORD = re.compile(r"([\w.+\-]+)\s*([:=]?)")  # and whether it is a key
_CLOSER = {"{": "}", "[": "]", "(": ")"}


def quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return orjson.dumps(text).decode()


def is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


class JsonScanner:
    """Finds the end of one JSON value; checks no more than it must to do that.

    ``stuck``: what comes next is no part of the value: a character no JSON has in that place, or a
    control character or symbol within a string (``in_string``), which the caller may step over.
    """

    def __init__(self) -> None:
        self.in_string = False
        self.stuck = False
        self._escaped = False
        self._closers: list[str] = []
        self._begun = False
        self._scalar = False

    def scan(self, text: str) -> tuple[int, bool]:
        """How many characters of ``text`` belong to the value, and whether it ends there."""
        position, self.stuck = 0, False
        if not self._begun and text:
            self._begun = True
            self._scalar = text[0] not in '{["'
        if self._scalar:
            match = _SCALAR.match(text)
            position = match.end() if match else 0
            return position, position < len(text)
        while position < len(text):
            if self._escaped:
                self._escaped = False
                self.stuck = bool(_IN_STRING.match(text, position)) and text[position] not in '"\\'
                if self.stuck:
                    break
                position += 1
                continue
            found = (_IN_STRING if self.in_string else _OUTSIDE).search(text, position)
            if found is None:
                return len(text), False
            position = found.end()
            if not self._pass(found[0]):
                self.stuck = True
                return found.start(), False
            if not self._closers and not self.in_string:
                return position, True
        return position, False

    def _pass(self, char: str) -> bool:
        if self.in_string:
            self._escaped = char == "\\"
            self.in_string = char != '"'
            return char in '"\\'
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._closers.append(_CLOSER[char])
        elif self._closers and char == self._closers[-1]:
            self._closers.pop()
        else:
            return False
        return True


class LiteralScanner:
    """Turns arguments written as in a programming language into JSON, piece by piece.

    ``{key:"a", n:1}``, ``(key='a', n=None)``: keys need no quotes, strings have ``quotes``, numbers
    and the words for true, false and null are read, other bare words become strings.
    """

    def __init__(self, bracket: str, quotes: tuple[str, ...], spelling: Mapping[int, str]) -> None:
        self.stuck = False
        self._quotes = quotes
        self._escapes = any(len(quote) == 1 and quote.isascii() for quote in quotes)
        self._spelling = spelling
        self._closers = [(_CLOSER[bracket], "}")]
        self._quote = ""

    def scan(self, text: str, last: bool) -> tuple[str, int, bool]:
        """JSON for the beginning of ``text``, how many characters that was, whether all ended."""
        out: list[str] = []
        position = 0
        while position < len(text) and self._closers:
            step = self._string if self._quote else self._outside
            json, taken = step(text, position, last)
            if taken == 0:
                break
            out.append(json)
            position += taken
        return "".join(out), position, not self._closers

    def _string(self, text: str, position: int, last: bool) -> tuple[str, int]:
        if text.startswith(self._quote, position):
            taken, self._quote = len(self._quote), ""
            return '"', taken
        if self._escapes and text[position] == "\\":
            return self._escape(text, position, last)
        end = min(
            end if (end := text.find(mark, position)) >= 0 else len(text)
            for mark in (self._quote, "\\" if self._escapes else self._quote)
        )
        if end == len(text) and not last:
            end = _before_beginning(text, position, self._quote)
        return self._quoted(text[position:end]), end - position

    def _quoted(self, text: str) -> str:
        return quoted(text.translate(self._spelling))[1:-1]

    def _escape(self, text: str, position: int, last: bool) -> tuple[str, int]:
        """One escape of a Python string."""
        piece = text[position : position + _ESCAPE_CHARS]
        if len(piece) < _ESCAPE_CHARS and not last and (len(piece) < 2 or piece[1] in "xuU"):
            return "", 0
        match = re.match(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))", piece)
        if match:
            code = int(match[1] or match[2] or match[3], 16)
            if 0xD800 <= code < 0xE000:  # half a character: JSON pairs them too
                return f"\\u{code:04x}", match.end()
            return self._quoted(chr(min(code, 0xFFFD) if code > 0x10FFFF else code)), match.end()
        known = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
        char = piece[1:2]
        plain = known.get(char, char if char in "\\'\"/" else "\\" + char)
        return self._quoted(plain), len(piece[:2])

    def _outside(self, text: str, position: int, last: bool) -> tuple[str, int]:
        for quote in self._quotes:
            if text.startswith(quote, position):
                self._quote = quote
                return '"', len(quote)
            if not last and quote.startswith(text[position:]):
                return "", 0
        if match := _WORD.match(text, position):
            if match.end() == len(text) and not match[2] and not last:
                self.stuck = len(match[0]) > _MAX_WORD_CHARS
                return "", 0
            return (quoted(match[1]) + ":" if match[2] else _literal(match[1])), len(match[0])
        return self._punctuation(text[position])

    def _punctuation(self, char: str) -> tuple[str, int]:
        if char in _CLOSER:
            self._closers.append((_CLOSER[char], "}" if char == "{" else "]"))
            return ("{" if char == "{" else "["), 1
        if char == self._closers[-1][0]:
            return self._closers.pop()[1], 1
        if char in ",:=" or char.isspace():
            return (":" if char == "=" else char), 1
        self.stuck = True
        return "", 0


def _before_beginning(text: str, start: int, mark: str) -> int:
    """Where the beginning of ``mark`` stands at the end of ``text``; its end if it does not."""
    for size in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _literal(word: str) -> str:
    word = _WORDS.get(word, word)
    return word if _type_of(word) in ("null", "boolean", "integer", "number") else quoted(word)


def kinds(schema: Any, root: Schema, depth: int = 0) -> frozenset[str] | None:
    """The JSON types an argument may have by its schema; None: it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    found: list[frozenset[str] | None] = []
    if isinstance(reference := schema.get("$ref"), str):
        found.append(kinds(referred(reference, root), root, depth + 1))
    declared = schema.get("type")
    if isinstance(declared, str | list):
        named = {declared} if isinstance(declared, str) else {str(name) for name in declared}
        found.append(frozenset(named | ({"null"} if schema.get("nullable") is True else set())))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        found.append(frozenset(_type_of(orjson.dumps(value).decode()) or "" for value in values))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [kinds(part, root, depth + 1) for part in schema[word]]
            known = [part for part in parts if part is not None]
            found.append(frozenset().union(*known) if len(known) == len(parts) else None)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found.append(kinds(part, root, depth + 1))
    known = [part for part in found if part]
    return frozenset.intersection(*known) if known else None


def referred(reference: str, root: Any) -> Any:
    """What a reference within the schema ``root`` points at."""
    if not reference.startswith("#"):
        return None
    for key in reference.lstrip("#/").split("/"):
        root = (
            root.get(key.replace("~1", "/").replace("~0", "~"))
            if isinstance(root, Mapping)
            else None
        )
    return root


def as_json(text: str, allowed: frozenset[str] | None) -> str:
    """An argument written without regard to its type, as JSON of one its schema allows.

    JSON stays as it was written; Python's words and literals are read, as some templates print
    them; anything else is a string.
    """
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    if bare[:1] in "{[" and bare and _type_of(bare) is None:
        bare = _from_python(bare)
    kind = _type_of(bare)
    may_be_string = allowed is None or "string" in allowed
    if kind is None or (kind == "string" and may_be_string):
        return quoted(text)
    fits = allowed is None or kind in allowed or (kind == "integer" and "number" in allowed)
    return bare if fits or not may_be_string else quoted(text)


def _type_of(json: str) -> str | None:
    """The JSON type of a text; None if it is no JSON."""
    try:
        value = orjson.loads(json)
    except orjson.JSONDecodeError:
        return None
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    names |= {dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def _from_python(text: str) -> str:
    try:
        return orjson.dumps(ast.literal_eval(text)).decode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
