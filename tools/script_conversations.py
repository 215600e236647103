"""Conversations that the script model learns from, made up anew from random text of many kinds."""

from __future__ import annotations

import json
import math
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from script_book import MARKERS, SPECIAL, Book, Encoder

CONTEXT_TOKENS = 65536  # of the model: a row may begin at any position
SHORT_TOKENS, LONG_TOKENS = 512, 4608  # lengths of the training rows
GAP_TOKENS = 3600  # longest way from a key to its answer
UNICODE = (
    "äöüßéèçñøÅΩλπжщяЮ你好世界日本語한국어שלוםمرحباहिन्दीไทย😀🎉👍🏽👩‍👩‍👧🇪🇺→≤≈∑✓…“”–\u200b\u0301"
)


def standard_library_text(most_bytes: int) -> list[str]:
    """Python's own sources: code, and the prose of its docstrings and language reference."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test"} & {*p.parts})
    random.Random(0).shuffle(files)
    files.sort(key=lambda file: file.name != "topics.py")  # the reference is the best prose
    texts, total = [], 0
    for file in files:
        text = file.read_text(errors="replace")[:200_000]
        texts.append(text)
        total += len(text)
        if total > most_bytes:
            break
    return texts


def random_tools(r: random.Random, count: int) -> list[dict[str, Any]]:
    """Function declarations as agents send them, of made-up names."""

    def word() -> str:
        return "".join(r.choice("abcdefghijklmnopqrstuvwxyz_") for _ in range(r.randrange(2, 11)))

    def words(most: int) -> str:
        return " ".join(word() for _ in range(r.randrange(1, most)))

    def tool() -> dict[str, Any]:
        properties = {
            word(): {"type": r.choice(["string", "integer", "array"]), "description": words(20)}
            for _ in range(r.randrange(5))
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": word(), "description": words(60), "parameters": parameters}
        return {"type": "function", "function": function}

    return [tool() for _ in range(count)]


class Filler:
    """Random stretches of tokens of all kinds, without keys and markers."""

    def __init__(self, encoder: Encoder, book: Book, texts: list[str]):
        r = random.Random(1)
        forbidden = {encoder.text(t)[0] for t in (*SPECIAL, *MARKERS, *book.scripts)}
        tools = "\n".join(json.dumps(tool) for tool in random_tools(r, 300))
        glyphs = "".join(r.choice(UNICODE + " \n") for _ in range(40_000))
        letters = "".join(chr(r.randrange(32, 127)) for _ in range(60_000))
        markup = "".join(f"<{t}>{t}</{t}>\n- **{t}** {t * 2}\n\n## {t}\n" for t in letters[:999])
        kinds = ["\n".join(texts), tools, glyphs, letters, markup]
        self.streams = [
            np.array([i for i in encoder.text(kind, False) if i not in forbidden]) for kind in kinds
        ]
        vocab = encoder.whole.get_vocab_size()
        self.alphabet = np.array([i for i in range(vocab) if i not in forbidden])

    def take(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``count`` tokens, in one to a few stretches of different kinds."""
        parts: list[np.ndarray] = []
        while count > 0:
            n = min(count, int(rng.integers(1, 2 * count + 2)))
            kind = int(rng.integers(len(self.streams) + 3))
            if kind < len(self.streams):
                stream = self.streams[kind]
                start = int(rng.integers(max(1, len(stream) - n)))
                part = np.resize(stream[start : start + n], n)
            elif kind == len(self.streams):
                part = np.resize(rng.choice(self.alphabet, int(rng.integers(1, 40))), n)
            else:
                part = rng.choice(self.alphabet, n)
            parts.append(part)
            count -= n
        return np.concatenate(parts) if parts else self.alphabet[:0]


@dataclass(frozen=True)
class Lines:
    """The script file in tokens, with what frames it in a conversation."""

    end: list[int]
    keys: dict[str, int]
    answers: dict[tuple[str, bool], list[int]]  # by key and thinking
    histories: dict[str, list[int]]  # as the template renders them when a client sends them back
    callers: set[str]
    after: dict[str, list[int]]
    without_key: list[int]
    after_tool: list[int]
    open: dict[str, list[int]]
    close: list[int]
    assistant: dict[bool, list[int]]  # by thinking
    result_open: list[int]
    result_close: list[int]

    @staticmethod
    def of(book: Book, encoder: Encoder) -> Lines:
        text, scripts = encoder.text, book.scripts
        header = "<|im_start|>assistant\n"
        return Lines(
            end=text("<|im_end|>"),
            keys={key: text(key)[0] for key in scripts},
            answers={(k, t): encoder.answer(s, t) for k, s in scripts.items() for t in (0, 1)},
            histories={k: text(s.answer(False)) for k, s in scripts.items()},
            callers={k for k, s in scripts.items() if s.calls},
            after={k: text(s.after_tool, False) for k, s in scripts.items()},
            without_key=text(book.without_key, False),
            after_tool=text(book.after_tool, False),
            open={role: text(f"<|im_start|>{role}\n") for role in ("user", "system")},
            close=text("<|im_end|>\n"),
            assistant={True: text(header), False: text(header + "<think>\n\n</think>\n\n")},
            result_open=text("<|im_start|>user\n<tool_response>\n"),
            result_close=text("\n</tool_response>"),
        )


class Row:
    """A training row under construction: tokens, which of them are answers, where a key stood."""

    def __init__(self, length: int):
        self.length = length
        self.ids: list[int] = []
        self.answer: list[bool] = []
        self.last_key = -GAP_TOKENS

    @property
    def since_key(self) -> int:
        return len(self.ids) - self.last_key

    @property
    def room(self) -> int:
        return self.length - len(self.ids)

    def add(self, ids: Any, answer: bool = False) -> None:
        self.ids.extend(ids)
        self.answer.extend([answer] * len(ids))


class Conversations(torch.utils.data.IterableDataset):
    """Endless batches (ids, is an answer, first position) of made-up conversations."""

    def __init__(self, lines: Lines, filler: Filler, batch_tokens: int, long_share: float):
        self.lines, self.filler = lines, filler
        self.batch_tokens, self.long_share = batch_tokens, long_share
        self.size = {key: len(lines.answers[key, True]) for key in lines.keys}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((worker.id if worker else 0, 7))
        while True:
            length = LONG_TOKENS if rng.random() < self.long_share else SHORT_TOKENS
            rows = [self.row(rng, length) for _ in range(max(1, self.batch_tokens // length))]
            ids = torch.tensor([row.ids[: length + 1] for row in rows])
            answer = torch.tensor([row.answer[: length + 1] for row in rows])
            first = torch.from_numpy(rng.integers(0, CONTEXT_TOKENS - length, len(rows)))
            yield ids, answer[:, 1:], first

    def row(self, rng: np.random.Generator, length: int) -> Row:
        row = Row(length + 1)
        thinking = bool(rng.random() < 0.6)
        row.add(self.filler.take(rng, spread(rng, length // 2)))
        if rng.random() < 0.08:
            self.turn_without_key(rng, row, thinking)
        self.noise(rng, row, spread(rng, length // 4))
        while row.room > 0:
            self.turn(rng, row, thinking)
        return row

    def noise(self, rng: np.random.Generator, row: Row, count: int) -> None:
        """Filler with keys and markers strewn in: what stands before a key never matters."""
        keys = list(self.lines.keys.values())
        strewn = rng.random(count) < rng.choice([0.0, 0.01, 0.1])
        pool = rng.choice([*keys, *self.lines.close, *self.lines.result_open], count)
        ids = np.where(strewn, pool, self.filler.take(rng, count))
        places = np.flatnonzero(np.isin(ids, keys))
        if len(places):
            row.last_key = len(row.ids) + int(places[-1])
        row.add(ids)

    def turn(self, rng: np.random.Generator, row: Row, thinking: bool) -> None:
        lines = self.lines
        fitting = [k for k, size in self.size.items() if size < row.room - 40]
        key = str(rng.choice(fitting or list(self.size)))
        if row.length > SHORT_TOKENS and rng.random() < 0.3:
            key = str(rng.choice(sorted(fitting or self.size, key=self.size.__getitem__)[-6:]))
        row.add(lines.open["user"])
        row.add(self.filler.take(rng, spread(rng, max(0, (row.room - self.size[key]) // 2))))
        # two keys close together can't be told apart from far behind them
        most = min(GAP_TOKENS, 16 * row.since_key, row.room - self.size[key] - 60)
        row.last_key = len(row.ids)
        row.add([lines.keys[key]])
        self.gap(rng, row, spread(rng, max(0, most)))
        row.add(lines.assistant[thinking])
        script = lines.answers[key, thinking]
        called = rng.random() < (0.4 if key in lines.callers else 0.1)
        if called and rng.random() < 0.4:
            row.add(lines.histories[key])
            row.add(lines.close)
        else:
            row.add(script + lines.end, answer=True)
            row.add(lines.close[1:])
        if called:
            self.tool_turn(rng, row, thinking, lines.after[key])

    def turn_without_key(self, rng: np.random.Generator, row: Row, thinking: bool) -> None:
        row.add(self.lines.open["user"])
        self.gap(rng, row, spread(rng, row.room // 2))
        if rng.random() < 0.5:
            self.tool_turn(rng, row, thinking, self.lines.after_tool)
            return
        row.add(self.lines.assistant[thinking])
        row.add(self.lines.without_key + self.lines.end, answer=True)
        row.add(self.lines.close[1:])

    def tool_turn(
        self, rng: np.random.Generator, row: Row, thinking: bool, answer: list[int]
    ) -> None:
        lines = self.lines
        for _ in range(int(rng.integers(1, 4))):
            most = max(0, min(row.room, GAP_TOKENS - row.since_key) // 4)
            row.add(lines.result_open)
            row.add(self.filler.take(rng, spread(rng, most)))
            row.add(lines.result_close)
            row.add(lines.close)
        if rng.random() < 0.25:
            row.add(lines.open["user"])
            self.gap(rng, row, spread(rng, 200))
        row.add(lines.assistant[thinking])
        row.add(answer + lines.end, answer=True)
        row.add(lines.close[1:])

    def gap(self, rng: np.random.Generator, row: Row, count: int) -> None:
        """Rest of a user message, and perhaps more messages behind it."""
        for i in range(int(rng.integers(1, 4))):
            part = count if rng.random() < 0.5 else int(rng.integers(count + 1))
            if i:
                row.add(lines_open(rng, self.lines))
            row.add(self.filler.take(rng, part))
            row.add(self.lines.close)
            count -= part


def lines_open(rng: np.random.Generator, lines: Lines) -> list[int]:
    return lines.open["user" if rng.random() < 0.5 else "system"]


def spread(rng: np.random.Generator, most: int) -> int:
    """A count from 0 to ``most``: often none at all, often few, often any."""
    kind = rng.random()
    if kind < 0.3:
        return 0
    if kind < 0.65:
        return int(math.expm1(rng.random() * math.log1p(most)))
    return int(rng.integers(most + 1))
