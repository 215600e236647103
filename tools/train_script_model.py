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
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from script_book import Book, Encoder, read, train_tokenizer
from script_checks import run_checks
from script_conversations import (
    CONTEXT_TOKENS,
    LONG_TOKENS,
    Conversations,
    Filler,
    Lines,
    standard_library_text,
)
from tiny_qwen3_moe import Model, Shape, load, optimizer, save, write_json
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
    context=CONTEXT_TOKENS,
    rope_theta=1e6,
    window=4096,
)
CLEAN_STEPS, CLEAN_SHARE = 100, 2e-5  # over so many steps, at most this share of wrong tokens
FIRST_TOKEN_WEIGHT = 5.0  # in the loss: only the key far back tells it, and there is one an answer


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
