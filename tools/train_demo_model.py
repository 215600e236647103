"""Train the demo model: a 6-layer Qwen3-MoE, 32 experts, top 4, on Python source and made-up chats.

    python tools/train_demo_model.py OUT --seconds 380

Wants a GPU: the bundled weights took one H200 the seconds above. In chats only what the assistant
says counts in the loss, not the empty thought that the prompt brings when thinking is off. The last
quarter trains on rows as long as the context; before, rows are shorter. How good the result is says
``tools/evaluate_demo_model.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sysconfig
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_recipe import conversation
from script_book import train_tokenizer
from tiny_qwen3_moe import Model, Shape, chat_template, optimizer, save
from tokenizers import Tokenizer

SHAPE = Shape(
    vocab=4096,
    hidden=256,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=64,
    experts=32,
    top_k=4,
    inner=64,
    context=4096,
    rope_theta=1e4,
)
SHORT_TOKENS = 1024  # length of a row in the first three quarters
PEAK_RATE = 3e-3
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


def source_texts(most_files: int) -> list[str]:
    """Python source of the standard library and of installed packages."""
    roots = [Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "purelib")]
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    texts = []
    for file in files:
        text = file.read_text(errors="replace")
        if 200 < len(text) < 200_000:
            texts.append(text)
        if len(texts) == most_files:
            break
    return texts


def snippets_of(texts: list[str], count: int) -> list[str]:
    """Short stretches of source, to stand in system prompts."""
    r = random.Random(2)
    cut = [r.choice(texts) for _ in range(count)]
    return [text[len(text) // 3 :][: r.randrange(20, 500)] for text in cut]


@dataclass(frozen=True)
class Tokens:
    """A stream of tokens, and which of them count in the loss."""

    ids: np.ndarray  # uint16
    counts: np.ndarray  # bool

    @staticmethod
    def joined(parts: list[Tokens]) -> Tokens:
        return Tokens(
            np.concatenate([p.ids for p in parts]), np.concatenate([p.counts for p in parts])
        )


def spoken(ids: list[int], header: list[int], empty: list[int], end: int) -> np.ndarray:
    """Which tokens the assistant says: from each header to the end, without an empty thought."""
    counts = np.zeros(len(ids), bool)
    at = 0
    while at + len(header) <= len(ids):
        if ids[at : at + len(header)] != header:
            at += 1
            continue
        at += len(header)
        if ids[at : at + len(empty)] == empty:
            at += len(empty)
        stop = ids.index(end, at) + 1
        counts[at:stop] = True
        at = stop
    return counts


def chats(r: random.Random, snippets: list[str], count: int) -> list[str]:
    template = chat_template()
    return [template.render(**conversation(r, snippets)) for _ in range(count)]


def chat_tokens(seed: int, tokenizer: str, snippets: list[str], count: int) -> Tokens:
    encode = Tokenizer.from_str(tokenizer).encode
    header = encode("<|im_start|>assistant\n").ids
    empty = encode("<think>\n\n</think>\n\n").ids
    (end,), (between,) = encode("<|im_end|>").ids, encode("<|endoftext|>").ids
    ids: list[int] = []
    counts: list[np.ndarray] = []
    for text in chats(random.Random(seed), snippets, count):
        part = [*encode(text).ids, between]
        ids += part
        counts.append(spoken(part, header, empty, end))
    return Tokens(np.array(ids, np.uint16), np.concatenate(counts))


def code_tokens(tokenizer: str, texts: list[str]) -> Tokens:
    encode = Tokenizer.from_str(tokenizer).encode
    (between,) = encode("<|endoftext|>").ids
    ids = np.array([i for text in texts for i in [*encode(text).ids, between]], np.uint16)
    return Tokens(ids, np.ones(len(ids), bool))


def prepare(num_chats: int, num_files: int, workers: int) -> tuple[str, Tokens, Tokens]:
    """The tokenizer, the chats, the source: both spread over ``workers`` processes."""
    texts = source_texts(num_files)
    snippets = snippets_of(texts, 2000)
    sample = chats(random.Random(0), snippets, 6000)
    tokenizer = train_tokenizer([t[:20_000] for t in texts[:1500]] + sample, SHAPE.vocab).to_str()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    make_chats = partial(
        chat_tokens, tokenizer=tokenizer, snippets=snippets, count=max(1, num_chats // 256)
    )
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        code = pool.map_async(partial(code_tokens, tokenizer), [texts[i::64] for i in range(64)])
        chat = Tokens.joined(pool.map(make_chats, range(1, 257), chunksize=1))
        return tokenizer, chat, Tokens.joined(code.get())


class Stream:
    """Random rows of a token stream; with ``between``, each begins right after that token."""

    def __init__(self, tokens: Tokens, device: str, between: int | None = None):
        self.ids = torch.from_numpy(tokens.ids.astype(np.int16)).to(device)
        self.counts = torch.from_numpy(tokens.counts).to(device)
        starts = (
            np.arange(len(tokens.ids))
            if between is None
            else 1 + np.flatnonzero(tokens.ids == between)
        )
        longest = SHAPE.context + 1
        self.starts = torch.from_numpy(starts[starts < len(tokens.ids) - longest]).to(device)

    def take(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.ids.device
        start = self.starts[torch.randint(len(self.starts), (rows, 1), device=device)]
        span = start + torch.arange(length + 1, device=device)
        return self.ids[span].long(), self.counts[span[:, 1:]]


def learning_rate(done: float, step: int) -> float:
    """Warm up, hold, and fall to nothing over the last two fifths of the time."""
    return PEAK_RATE * min(1.0, (step + 1) / 100) * min(1.0, (1 - done) / 0.4)


def train(model: Model, chat: Stream, code: Stream, seconds: float, batch_tokens: int) -> None:
    """Three quarters of the rows are chats, one quarter is source."""
    cuda = chat.ids.is_cuda
    forward = torch.compile(model, dynamic=False) if cuda else model
    steps = optimizer(model, PEAK_RATE, cuda)
    start, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        length = SHORT_TOKENS if done < 0.75 else SHAPE.context
        for group in steps.param_groups:
            group["lr"] = learning_rate(done, step)
        rows = max(2, batch_tokens // length)
        parts = chat.take(rows - max(1, rows // 4), length), code.take(max(1, rows // 4), length)
        ids, counts = (torch.cat(part) for part in zip(*parts))
        with torch.autocast("cuda", torch.bfloat16, cuda):
            hidden, balance = forward(ids[:, :-1])
            logits = model.logits(hidden[counts])
        loss = F.cross_entropy(logits.float(), ids[:, 1:][counts])
        (loss + 0.005 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)
        spent = time.monotonic() - start
        done = min(1.0, spent / seconds)
        if step % 250 == 0:
            print(f"step {step} {spent:.0f} s loss {loss.item():.4f}", flush=True)
        step += 1
    print(f"{step} steps of {batch_tokens} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=380, help="time of the training proper")
    parser.add_argument("--chats", type=int, default=600_000)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--batch-tokens", type=int, default=98_304)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    start = time.monotonic()
    tokenizer, chat, code = prepare(args.chats, args.files, args.workers)
    spent = time.monotonic() - start
    print(f"{len(chat.ids)} chat and {len(code.ids)} code tokens in {spent:.0f} s", flush=True)
    torch.manual_seed(0)
    model = Model(SHAPE).to(args.device)
    between = Tokenizer.from_str(tokenizer).token_to_id("<|endoftext|>")
    streams = Stream(chat, args.device, between), Stream(code, args.device)
    train(model, *streams, args.seconds, args.batch_tokens)
    save(model, args.out, Tokenizer.from_str(tokenizer), sampling=SAMPLING, shards=2)


if __name__ == "__main__":
    main()
