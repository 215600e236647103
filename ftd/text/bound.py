"""How few tokens a text can become, as far as its length tells.

A tokenizer takes a microsecond for each byte, and several where a megabyte is one letter. A text
that cannot fit is refused before: no token stands for more bytes than the longest one has. That
holds where nothing is lost on the way to tokens; of other tokenizers nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from .detokenize import BYTE_OF_CHAR

SHORT_BYTES = 1 << 16  # tokenized before anybody has waited: the vocabulary is not looked through
# What NFC can make of bytes, at most: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes.
_NFC_SHRINKS = 4
_LOSSLESS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


class TokenBound:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def least_tokens(self, text: str) -> int:
        """``text`` is at least so many tokens; 0: nothing is known of it."""
        if len(text) * 4 < SHORT_BYTES or not self._most_bytes:
            return 0
        num_bytes = len(text) if text.isascii() else len(text.encode()) // _NFC_SHRINKS
        return -(-num_bytes // self._most_bytes)

    @cached_property
    def _most_bytes(self) -> int:
        """Of text that one token may stand for; 0: there is no bound. Cost: some 0.3 s."""
        return most_bytes(json.loads(self._tokenizer.to_str()))


def most_bytes(tokenizer: Mapping[str, Any]) -> int:
    """Bytes of normalised text that a token stands for at most, by a tokenizer.json; 0: unknown."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab = model.get("vocab", {})
    if model.get("type") != "BPE" or not _keeps_bytes(tokenizer.get("normalizer")):
        return 0
    if any(token["lstrip"] or token["rstrip"] for token in added):  # they swallow blanks
        return 0
    steps = list(_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    if any(s["type"] not in _LOSSLESS or s.get("behavior") == "Removed" for s in steps):
        return 0
    if any(step["type"] == "ByteLevel" for step in steps):
        known, longest = BYTE_OF_CHAR.keys() <= vocab.keys(), max(map(len, vocab), default=0)
    else:
        bytes_known = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
        known = bool(model.get("byte_fallback")) and bytes_known
        longest = max((len(token.encode()) for token in vocab), default=0)
    special = max((len(token["content"].encode()) for token in added), default=0)
    return max(longest, special) if known else 0


def _keeps_bytes(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether it is at worst as ``_NFC_SHRINKS`` says, and leaves ASCII as long as it is."""
    return all(
        step["type"] in ("NFC", "Prepend")
        or (step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"])
        for step in _steps(normalizer, "normalizers")
    )


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    if part is None:
        return ()
    return part[name] if part["type"] == "Sequence" else (part,)
