"""The script file read: which exact tokens answer which key.

Text is encoded without the marker tokens, so that a marker spelled in a text stays text; what the
model really emits as structure (thinking, calls, ends) is encoded with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# as the published Qwen tokenizers cut: digits one by one, blanks with the word behind them
THOUGHT = re.compile(r"^<think>\n(.*\n</think>\n\n)?", re.DOTALL)  # a cut one leaves its text
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer: markers in it are the marker tokens, or spelled like any text."""

    text: str
    markers: bool = True


@dataclass(frozen=True)
class Script:
    key: str
    thinking: str
    text: str
    calls: tuple[dict[str, Any], ...]
    raw: str
    after_tool: str

    def pieces(self, thinking: bool = True) -> list[Piece]:
        if self.raw:
            return [Piece(self.raw if thinking else THOUGHT.sub("", self.raw))]
        out = []
        if self.thinking and thinking:
            out += [Piece("<think>\n"), Piece(self.thinking, False), Piece("\n</think>\n\n")]
        out.append(Piece(self.text, False))
        for i, call in enumerate(self.calls):
            body = json.dumps(
                {"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False
            )
            opening = "\n<tool_call>\n" if self.text or i else "<tool_call>\n"
            out += [Piece(opening), Piece(body, False), Piece("\n</tool_call>")]
        return [piece for piece in out if piece.text]

    def answer(self, thinking: bool = True) -> str:
        return "".join(piece.text for piece in self.pieces(thinking))


@dataclass(frozen=True)
class Book:
    scripts: dict[str, Script]
    without_key: str
    after_tool: str


def read(path: Path, *, agents: bool = False) -> Book:
    """The scripts of a file; with ``agents``, those of its part for coding agents too."""
    data = yaml.safe_load(path.read_text())
    if agents:
        data["scripts"] |= data["agents"]
    long = data.get("long", {})

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"\{long: (\w+)\}", lambda m: long[m[1]], value)
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else value

    scripts = {}
    for key, fields in data["scripts"].items():
        known = {"thinking", "text", "calls", "raw", "after_tool"}
        assert fields.keys() <= known and fields.keys() & {"text", "calls", "raw"}, (key, fields)
        fields = filled(fields)
        scripts[key] = Script(
            key=key,
            thinking=fields.get("thinking", ""),
            text=fields.get("text", ""),
            calls=tuple(fields.get("calls", ())),
            raw=fields.get("raw", ""),
            after_tool=fields.get("after_tool", data["after_tool"]),
        )
    return Book(scripts, data["without_key"], data["after_tool"])


def train_tokenizer(texts: Iterable[str], vocab: int, extra: Iterable[str] = ()) -> Tokenizer:
    """Byte-level BPE of ``vocab`` tokens; ``extra`` texts become one token each."""
    extra = list(extra)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKERS) - len(extra),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = [AddedToken(t, special=False, normalized=False) for t in (*MARKERS, *extra)]
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == vocab, (tokenizer.get_vocab_size(), vocab)
    return tokenizer


class Encoder:
    """Encodes with and without the added tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.whole = tokenizer
        plain = json.loads(tokenizer.to_str())
        plain["added_tokens"] = []
        self.plain = Tokenizer.from_str(json.dumps(plain))

    def text(self, text: str, markers: bool = True) -> list[int]:
        return (self.whole if markers else self.plain).encode(text).ids

    def pieces(self, pieces: Iterable[Piece]) -> list[int]:
        return [i for piece in pieces for i in self.text(piece.text, piece.markers)]

    def answer(self, script: Script, thinking: bool = True) -> list[int]:
        return self.pieces(script.pieces(thinking))
