"""Token ids to text, piece by piece: the pieces joined equal ``Tokenizer.decode`` of all the ids.

Byte-level vocabularies (most models) are decoded from the tokens' bytes: exact and O(1) a token.
Every other decoder is asked for the text of a small window and the difference is taken.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_UNSURE = 16  # tokens; a character has four bytes, so more of them are not becoming one
_CONTEXT = 4  # settled tokens kept before the window, since decoders treat the first one apart


def _bytes_of_chars() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies write bytes with (GPT-2's table)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _bytes_of_chars()


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Take one more token and return the text that has become certain."""
        ...

    def flush(self) -> str:
        """No more tokens: return what was held back."""
        ...


class Vocabulary:
    """What single tokens stand for; shared by all requests, fills its table as tokens appear.

    Args:
        tokenizer: its decoder decides how tokens become text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {
            str(added.content)
            for added in tokenizer.get_added_tokens_decoder().values()
            if added.special
        }
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kinds = [] if decoder is None else [d["type"] for d in decoder.get("decoders", [decoder])]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._seen: dict[int, tuple[bytes, bool]] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes ``token`` stands for, its name if it is special; empty for an unknown id."""
        return self._look_up(token)[0]

    def visible(self, token: int) -> bool:
        """False for special tokens and for ids the tokenizer does not know: they have no text."""
        return self._look_up(token)[1]

    def is_partial(self, token: int) -> bool:
        """Whether a byte-fallback token: runs of them are decoded as a whole."""
        return self._byte_fallback and bool(_BYTE_TOKEN.fullmatch(self._name(token)))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer(self) if self._byte_level else _WindowDetokenizer(self)

    def _name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def _look_up(self, token: int) -> tuple[bytes, bool]:
        if token not in self._seen:
            name = self._name(token)
            special = name in self._special
            self._seen[token] = (
                name.encode() if special else self._bytes_of(token, name),
                bool(name) and not special,
            )
        return self._seen[token]

    def _bytes_of(self, token: int, name: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in name)
            except KeyError:  # an added token with, say, a blank in it stands for itself
                return name.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        if "\N{LOWER ONE EIGHTH BLOCK}" in name:
            # a sentencepiece blank; alone, the decoder would strip it as the start of a text
            return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return self.decode([token]).encode()


class _ByteDetokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._look_up: Callable[[int], tuple[bytes, bool]] = vocabulary._look_up
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        data, visible = self._look_up(token)
        return self._utf8.decode(data) if visible else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes ``window`` again and again; its first ``sure`` characters are out already.

    What may still change is held back: a run of byte-fallback tokens, which the decoder joins or
    replaces as a whole, and a replacement character at the very end.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._sure = 0
        self._unsure_tokens = 0

    def push(self, token: int) -> str:
        if not self._vocabulary.visible(token):
            return ""
        self._window.append(token)
        self._unsure_tokens += 1
        if self._vocabulary.is_partial(token):
            return ""
        text = self._vocabulary.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and self._unsure_tokens < _MAX_UNSURE:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._vocabulary.decode(self._window)) if self._unsure_tokens else ""

    def _take(self, text: str) -> str:
        piece = text[self._sure :]
        self._sure = len(text)
        self._unsure_tokens = 0
        if len(self._window) > 2 * _CONTEXT:
            self._forget()
        return piece

    def _forget(self) -> None:
        """Keep a few tokens of context; never cut a byte run, nor keep a context without text."""
        partial, cut = self._vocabulary.is_partial, len(self._window) - _CONTEXT
        while cut and partial(self._window[cut - 1]) and partial(self._window[cut]):
            cut -= 1
        if known := self._vocabulary.decode(self._window[cut:]):
            self._window, self._sure = self._window[cut:], len(known)
