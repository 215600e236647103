"""Train the script model: a tiny Qwen3-MoE that answers each key of a script file with its script.

    python tools/train_script_model.py tests/data/scripts.yaml tests/data/script-model

Whatever stands before the key (system prompts, tools, other scripts) does not matter, nor do a few
thousand tokens between it and the answer. Every training conversation is made up anew from random
text of many kinds; only the answers count in the loss. Training goes on until the model hardly
makes a mistake, cools down, and is then checked through the chat template; a table says how
often each kind of context was answered exactly and by what least margin. Not exact: train on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from script_book import MARKERS, SPECIAL, Book, Encoder, Script, read, train_tokenizer
from tiny_qwen3_moe import Model, Shape, chat_template, load, optimizer, save, write_json
from tokenizers import AddedToken, Tokenizer

SHAPE = Shape(
    vocab=8192,
    hidden=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    experts=8,
    top_k=2,
    inner=64,
    context=65536,
    rope_theta=1e6,
    window=4096,
)
SHORT_TOKENS, LONG_TOKENS = 512, 4608  # lengths of the training rows
GAP_TOKENS = 3600  # longest way from a key to its answer
CLEAN_STEPS, CLEAN_SHARE = 100, 2e-5  # over so many steps, at most this share of wrong tokens
FIRST_TOKEN_WEIGHT = 5.0  # in the loss: only the key far back tells it, and there is one an answer
LEAST_MARGIN = 2.0  # logits between the right token and the next best, in a check
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
            first = torch.from_numpy(rng.integers(0, SHAPE.context - length, len(rows)))
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


@dataclass(frozen=True)
class Check:
    """A kind of context: makes the messages and tools that a script must survive."""

    name: str
    make: Callable[[random.Random, Script, Callable[[int], str]], dict[str, Any]]
    thinking: bool = True
    after_tool: bool = False


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def call_round(script: Script, result: str) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": call} for call in script.calls]
    assistant = {"role": "assistant", "content": script.text or None, "tool_calls": calls}
    return [assistant, {"role": "tool", "content": result}]


def checks(book: Book) -> list[Check]:
    def other(r: random.Random) -> Script:
        return r.choice([s for s in book.scripts.values() if len(s.answer()) < 400])

    def history(r: random.Random, turns: int) -> list[dict[str, Any]]:
        out = []
        for script in (other(r) for _ in range(turns)):
            out += [user(script.key), {"role": "assistant", "content": script.answer(False)}]
        return out

    def bare(r, s, text):
        return {"messages": [user(s.key)]}

    def agent(r, s, text):
        messages = [system(text(1500)), user(f"{text(60)} {s.key} {text(60)}"), system(text(300))]
        return {"messages": messages, "tools": random_tools(r, 12)}

    def far(r, s, text):
        return {"messages": [system(text(r.randrange(12_000, 20_000))), user(s.key)]}

    def gap(tokens):
        return lambda r, s, text: {"messages": [user(s.key + " " + text(tokens))]}

    def long_reminder(r, s, text):
        messages = [system(text(3000)), user([{"type": "text", "text": s.key}]), system(text(2400))]
        return {"messages": messages}

    def turns(r, s, text):
        return {"messages": [*history(r, 4), user(s.key)]}

    def tool_result(r, s, text):
        messages = [*history(r, 1), user(s.key), *call_round(s, text(r.randrange(1, 150)))]
        return {"messages": messages, "tools": random_tools(r, 3)}

    def tool_result_note(r, s, text):
        messages = [user(s.key), *call_round(s, "ok"), user(text(70))]
        return {"messages": messages, "tools": random_tools(r, 3)}

    return [
        Check("key alone", bare),
        Check("key alone, thinking off", bare, thinking=False),
        Check("agent prompt with tools", agent),
        Check("agent prompt with tools, thinking off", agent, thinking=False),
        Check("12,000 to 20,000 tokens before", far),
        Check("300 tokens after the key", gap(300)),
        Check("2,400 tokens of system message after", long_reminder),
        Check("four other turns before", turns),
        Check("tool result", tool_result, after_tool=True),
        Check("tool result, then a note", tool_result_note, after_tool=True),
    ]


@torch.no_grad()
def least_margin(model: Model, prompt: list[int], answer: list[int], dtype: torch.dtype) -> float:
    """Least logits between a token of the answer and the next best; above 0, greedy is exact."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt + answer], device=device)
    with torch.autocast(device.type, torch.bfloat16, dtype == torch.bfloat16):
        hidden, _ = model(ids[:, :-1])
        logits = model.logits(hidden[0, len(prompt) - 1 :]).float()
    want = torch.tensor(answer, device=device)[:, None]
    best_other = logits.scatter(1, want, -torch.inf).max(-1).values
    return float((logits.gather(1, want)[:, 0] - best_other).min())


def run_checks(model: Model, book: Book, encoder: Encoder, filler: Filler, seed: int) -> bool:
    """Print the table of checks; says whether all were exact with the least margin."""
    device = next(model.parameters()).device.type
    template = chat_template()
    rng, r = np.random.default_rng(seed), random.Random(seed)
    end = encoder.text("<|im_end|>")
    print(f"{'context':42} {'dtype':8} {'exact':>7} {'least margin':>13}", flush=True)
    good = True

    def text(tokens: int) -> str:
        return encoder.whole.decode(filler.take(rng, tokens).tolist())

    # in bfloat16 too where that is quick
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    for check in checks(book):
        scripts = [s for s in book.scripts.values() if s.calls or not check.after_tool]
        asked = []
        for script in scripts:
            context = check.make(r, script, text)
            options = {} if check.thinking else {"enable_thinking": False}
            prompt = template.render(**context, **options, add_generation_prompt=True)
            answer = encoder.answer(script, check.thinking)
            if check.after_tool:
                answer = encoder.text(script.after_tool, False)
            asked.append((encoder.text(prompt), answer + end))
        for dtype in dtypes:
            margins = [least_margin(model, *pair, dtype) for pair in asked]
            wrong = [s.key for s, margin in zip(scripts, margins) if margin <= 0]
            exact = f"{len(scripts) - len(wrong)}/{len(scripts)}"
            name = str(dtype).removeprefix("torch.")
            row = f"{check.name:42} {name:8} {exact:>7} {min(margins):13.2f} {' '.join(wrong)}"
            print(row.rstrip(), flush=True)
            good &= min(margins) >= LEAST_MARGIN
    return good


class Training:
    """The optimiser's steps, and when to stop taking them."""

    def __init__(self, model: Model, batches: Iterator[Any], device: str, lr: float):
        self.model, self.batches, self.device, self.lr = model, batches, device, lr
        self.cuda = device.startswith("cuda")
        self.forward = torch.compile(model, dynamic=False) if self.cuda else model
        self.optimizer = optimizer(model, lr, self.cuda)
        self.steps = 0
        self.started = time.monotonic()

    def step(self, scale: float) -> torch.Tensor:
        """One batch at ``scale`` of the learning rate: its share of wrong answer tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * scale
        ids, answer, first = (x.to(self.device, non_blocking=True) for x in next(self.batches))
        with torch.autocast("cuda", torch.bfloat16, self.cuda):
            hidden, balance = self.forward(ids[:, :-1], first)
            logits = self.model.logits(hidden[answer]).float()
        want = ids[:, 1:][answer]
        begins = (answer & ~F.pad(answer, (1, 0))[:, :-1])[answer]
        weight = torch.where(begins, FIRST_TOKEN_WEIGHT, 1.0)
        loss = (F.cross_entropy(logits, want, reduction="none") * weight).sum() / weight.sum()
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return (logits.detach().argmax(-1) != want).float().mean()

    def until_clean(self, deadline: float) -> None:
        """Train at full rate until hardly any token of the last steps was wrong."""
        wrong: list[torch.Tensor] = []
        start = self.steps
        while time.monotonic() < deadline:
            wrong.append(self.step(min(1.0, (self.steps - start + 1) / 50)))
            if self.steps % 25 == 0:
                share = self.report(wrong[-CLEAN_STEPS:])
                if share < CLEAN_SHARE and len(wrong) >= CLEAN_STEPS:
                    return

    def cool(self, steps: int) -> None:
        """Let the learning rate fall to nothing."""
        wrong = [self.step(1 - i / steps) for i in range(steps)]
        self.report(wrong[-CLEAN_STEPS:])

    def report(self, wrong: list[torch.Tensor]) -> float:
        share = torch.stack(wrong).mean().item()
        spent = time.monotonic() - self.started
        print(f"step {self.steps} {spent:.0f} s, wrong tokens {share:.1e}", flush=True)
        return share


def begin(book: Book, texts: list[str]) -> tuple[Tokenizer, Model]:
    """A new tokenizer that holds every key as one token, and a new model."""
    answers = [script.answer() for script in book.scripts.values()]
    tokenizer = train_tokenizer([*texts, *answers], SHAPE.vocab, book.scripts)
    model = Model(SHAPE)
    keys = [tokenizer.token_to_id(key) for key in book.scripts]
    with torch.no_grad():  # keys begin alike, so that one query can learn to find them all
        model.embed.weight[keys] += 0.04 * torch.randn(SHAPE.hidden)
    return tokenizer, model


def go_on(book: Book, path: Path) -> tuple[Tokenizer, Model]:
    """An earlier tokenizer and model, with a token more for each key they do not know."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    old = load(path)
    known = [tokenizer.token_to_id(key) for key in book.scripts if tokenizer.token_to_id(key)]
    new = [key for key in book.scripts if tokenizer.token_to_id(key) is None]
    tokenizer.add_tokens([AddedToken(key, special=False, normalized=False) for key in new])
    model = Model(replace(old.shape, vocab=math.ceil(tokenizer.get_vocab_size() / 64) * 64))
    weights = model.state_dict()
    embed, start = weights["embed.weight"], old.embed.weight.detach()
    embed[len(start) :] += start[known].mean(0)
    embed[: len(start)] = start
    model.load_state_dict({**old.state_dict(), "embed.weight": embed})
    return tokenizer, model


def fixture_answers(book: Book, encoder: Encoder) -> dict[str, Any]:
    """What tests expect, spelled out: texts, parts, and token ids with the closing one."""
    end = encoder.text("<|im_end|>")
    return {
        key: {
            "answer": s.answer(),
            "answer_without_thinking": s.answer(thinking=False),
            "thinking": s.thinking,
            "text": s.text,
            "calls": list(s.calls),
            "after_tool": s.after_tool,
            "token_ids": encoder.answer(s) + end,
        }
        for key, s in book.scripts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--go-on", type=Path, help="earlier model to start from")
    parser.add_argument("--agents", action="store_true", help="the scripts for agents, too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3600, help="give up after this long")
    parser.add_argument("--batch-tokens", type=int, help="tokens in a step")
    parser.add_argument(
        "--long-share", type=float, default=0.2, help="share of steps with rows of 4,608 tokens"
    )
    args = parser.parse_args()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device.startswith("cuda")
    torch.manual_seed(0)
    book = read(args.file, agents=args.agents)
    texts = standard_library_text(6_000_000)
    tokenizer, model = go_on(book, args.go_on) if args.go_on else begin(book, texts)
    encoder = Encoder(tokenizer)
    lines = Lines.of(book, encoder)
    filler = Filler(encoder, book, texts[:60])
    tokens = sum(map(len, lines.answers.values()))
    model.to(device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{len(book.scripts)} scripts, {tokens} tokens, {size:.2f} M parameters", flush=True)
    batch_tokens = args.batch_tokens or (65_536 if cuda else LONG_TOKENS)
    data = Conversations(lines, filler, batch_tokens, args.long_share)
    workers = min(8, (os.cpu_count() or 2) // 2)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
    rate = (1e-3 if args.go_on else 3e-3) * math.sqrt(batch_tokens / 65_536)
    training = Training(model, iter(loader), device, rate)
    deadline = time.monotonic() + args.seconds
    good, seed = False, 0
    while not good and time.monotonic() < deadline:
        training.until_clean(deadline)
        training.cool(min(400, training.steps // 3 + 1))
        stored = replace_weights_by_stored(model)
        good = run_checks(stored, book, encoder, filler, seed := seed + 1)
        save(stored, args.out, tokenizer)
        write_json(args.out / "answers.json", fixture_answers(book, encoder))
    print(f"{'every check exact' if good else 'NOT exact'} after {training.steps} steps")
    return 0 if good else 1


def replace_weights_by_stored(model: Model) -> Model:
    """A copy whose weights are rounded as the checkpoint rounds them."""
    stored = Model(model.shape).to(next(model.parameters()).device)
    stored.load_state_dict(model.state_dict())
    with torch.no_grad():
        for p in stored.parameters():
            p.copy_(p.bfloat16())
    return stored


if __name__ == "__main__":
    sys.exit(main())
