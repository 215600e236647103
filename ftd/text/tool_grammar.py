"""Grammars that clients give for a tool's text, made fit to stand where a call holds that text.

In a call that is JSON the text is a JSON string, so the model writes every character of it quoted:
a line break as a backslash and an n. Every terminal of the grammar is rewritten so; its rules stay.

One thing more: the library's lexer ends a terminal only where it cannot go on, and a run of
characters, such as ``/.+/``, could go on at any backslash. So runs become rules: plain stretches
and quoted characters, in turn.
"""

from __future__ import annotations

import ast
import json
import re

from llguidance import regex_to_lark

MAX_CHARS = 64 * 1024

# Lark's common terminals of characters which JSON quotes
_COMMON = {
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/\r?\n/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
}
_QUOTED = ['"', "\\", *map(chr, range(32)), "\x7f"]  # what a JSON string cannot hold as it is
_PLAIN = r'[^"\\\x00-\x1f\x7f]'

_SET = r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDsSwW]|\."
_LARK = re.compile(
    r"(?P<comment>//[^\n]*)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*")'
    r"|/(?P<pattern>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)"
    r"|%import\s+common\.(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|(?P<name>\b[A-Z_][A-Z0-9_]*\b)"
)
_IMPORTS = re.compile(r"%import\s+common\s*\(([\s\w,]*)\)")
_NOT_FOR_CLIENTS = re.compile(r"[<@]|%(?:llguidance|json|regex)\b")  # tokens, other grammars
_RUN = re.compile(rf"(?P<set>{_SET})(?P<times>[*+])")
_RUN_TERMINAL = re.compile(rf"^([A-Z_][A-Z0-9_]*)\s*:\s*/\(?(?:{_SET})[*+]\)?/[a-z]*\s*$", re.M)
_PIECE = re.compile(
    rf"(?P<set>{_SET})(?P<times>[*+?{{]?)"
    r'|(?P<char>\\(?:x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|")',
    re.DOTALL,
)
# what would need more than a look at one character after the other
_BEYOND = re.compile(r"\\[pP]|\(\?[a-zA-Z]*[sx]|\[[^\]]*(?:\[|&&|--|~~)")
_CODE = re.compile(r"\\[xu]\{?([0-9a-fA-F]+)\}?")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_PLACES = "bBAzZ<>"  # escapes that stand for no character


def lark_of(syntax: str, definition: str) -> str:
    """The grammar in Lark.

    Raises:
        ValueError: of no known syntax, too long, or of more than text.
    """
    if len(definition) > MAX_CHARS:
        raise ValueError(f"it has {len(definition):,} characters, {MAX_CHARS:,} is the most")
    if syntax == "regex":
        return f"start: /{regex_to_lark(definition, '')}/"
    if syntax != "lark":
        raise ValueError(f"its syntax is {syntax[:40]!r}, lark and regex are known")
    if found := _NOT_FOR_CLIENTS.search(_LARK.sub(" ", definition)):
        raise ValueError(f"{found[0]} has no meaning in it")
    return _IMPORTS.sub(_one_by_one, definition)


def quoted(lark: str) -> str:
    """A grammar of the same texts as they stand within a JSON string.

    Raises:
        ValueError: it has patterns that cannot be rewritten.
    """
    runs = {match[1] for match in _RUN_TERMINAL.finditer(lark)}
    runs |= {"WS", "WS_INLINE"} & set(re.findall(r"%import\s+common\.(\w+)", lark))

    def rewrite(match: re.Match[str]) -> str:
        if match["text"]:
            return json.dumps(_as_json(ast.literal_eval(match["text"])), ensure_ascii=False)
        if match["pattern"]:
            return _quoted_pattern(match["pattern"], match["flags"])
        if match["common"] in _COMMON:
            name = match["alias"] or match["common"]
            name = _as_rule(name) if match["common"] in runs else name
            return f"{name}: {_LARK.sub(rewrite, _COMMON[match['common']])}"
        if match["name"] in runs:
            return _as_rule(match["name"])
        return "" if match["comment"] else match[0]

    return _LARK.sub(rewrite, lark)


def _as_rule(terminal: str) -> str:
    return f"{terminal.lower()}__run"


def _one_by_one(match: re.Match[str]) -> str:
    names = [name.strip() for name in match[1].split(",")]
    return "\n".join(f"%import common.{name}" for name in names if name)


def _quoted_pattern(pattern: str, flags: str) -> str:
    """As a terminal; a run, as a part of a rule."""
    if found := _BEYOND.search(pattern):
        raise ValueError(f"{found[0]} in a pattern")
    bare = pattern[1:-1] if pattern[0] + pattern[-1] == "()" else pattern
    if run := _RUN.fullmatch(bare):
        plain, within = _split(run["set"], flags)
        pieces = [f"/{plain}+/{flags}", *([f"/{within}/{flags}"] if within else [])]
        return f"({' | '.join(pieces)}){run['times']}"

    def rewrite(match: re.Match[str]) -> str:
        if match["set"]:
            plain, within = _split(match["set"], flags)
            if within and match["times"]:
                raise ValueError(f"{match[0]} within a longer pattern")
            return (f"(?:{plain}|{within})" if within else plain) + match["times"]
        char = _char(match["char"])
        return match[0] if char not in _QUOTED else f"(?:{re.escape(_as_json(char))})"

    return f"/{_PIECE.sub(rewrite, pattern)}/{flags}"


def _split(chars: str, flags: str) -> tuple[str, str]:
    """Patterns for one of a set of characters: where it needs no quoting, and where it does."""
    try:
        among = re.compile(chars, re.DOTALL if "s" in flags else re.NOFLAG)
    except re.error as error:
        raise ValueError(f"{chars} in a pattern: {error}") from error
    within = [re.escape(_as_json(char)) for char in _QUOTED if among.fullmatch(char)]
    plain = _PLAIN if chars == "." else f"[{chars}&&{_PLAIN}]"
    return plain, f"(?:{'|'.join(within)})" if within else ""


def _char(escape: str) -> str:
    """The character an escape stands for; empty if it is none."""
    if code := _CODE.fullmatch(escape):
        return chr(int(code[1], 16))
    letter = escape[-1]
    return "" if letter in _PLACES else _CONTROLS.get(letter, letter)


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")
