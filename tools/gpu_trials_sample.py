"""Trials of sampling on a GPU; ``check_gpu_kernels`` runs them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import product

import torch
from gpu_trials import failures, row, seconds

from ftd.kernels.sample import (
    BIASED,
    LOGPROBS,
    MASKED,
    PENALISED,
    Drawn,
    Kept,
    RowNumbers,
    Rows,
    mask_words,
    sample_ref,
)
from ftd.kernels.triton.sample import Work, sample


class Draws:
    """Rows of logits to be drawn from, with the reference on the CPU and the kernels on the GPU."""

    ASKED = (
        RowNumbers(),
        RowNumbers(temperature=0.9),
        RowNumbers(temperature=0.7, top_k=20, top_p=0.8),
        RowNumbers(temperature=1.0, top_p=0.95, min_p=0.01),
        RowNumbers(temperature=1.5, top_k=5000),
        RowNumbers(temperature=1e30, top_p=0.5),
        RowNumbers(0.8, 0, 0.9, 0.0, 0.5, 0.2, 1.1, BIASED | PENALISED | MASKED | LOGPROBS, 1),
        RowNumbers(0.0, 0, 1.0, 0.0, 0.0, 0.3, 1.2, PENALISED | LOGPROBS, 4),
    )
    PLAIN = tuple(RowNumbers(temperature=t) for t in (0.6, 1.0, 0.0, 2.0) * 2)

    def __init__(self, B: int, V: int, asked: Sequence[RowNumbers], spread: float = 3.0) -> None:
        self.B, self.asked = B, asked[:B]
        self.shapes = functools.reduce(operator.or_, (n.shapes for n in self.asked))
        self.logits = torch.randn(B, V) * spread
        self.rows, self.kept = Rows(B), Kept(8, V, "cpu")
        self.kept.bias[1, torch.randperm(V)[:500]] = 5.0
        self.kept.counts[:, torch.randperm(V)[:500]] = 5
        self.mask = torch.randint(-(2**31), 2**31 - 1, (B, mask_words(V)), dtype=torch.int32)
        self.set(0.5)
        self.out, self.ids = Drawn.empty(B, "cuda"), torch.zeros(B, dtype=torch.int64).cuda()
        self.on_gpu = Rows(B, "cuda"), Kept(8, V, "cuda"), self.mask.cuda(), Work(8, V, "cuda")
        self.logits_on_gpu = self.logits.cuda()
        self.send()

    def set(self, first: float) -> None:
        for b, numbers in enumerate(self.asked):
            self.rows.set(b, numbers, (first + 0.618 * b) % 1 or 0.5)

    def send(self) -> None:
        rows, kept, *_ = self.on_gpu
        self.logits_on_gpu.copy_(self.logits)
        rows.block.copy_(self.rows.block)
        kept.counts.copy_(self.kept.counts)
        kept.bias.copy_(self.kept.bias)

    def draw(self) -> None:
        rows, kept, mask, work = self.on_gpu
        sample(self.logits_on_gpu, rows, kept, mask, self.out, self.ids, work, self.shapes)

    def compare(self, name: str) -> list[bool]:
        """Which rows drew what the reference draws; all else has to be equal."""
        wanted = Drawn.empty(self.B, "cpu")
        sample_ref(self.logits, self.rows, self.kept, self.mask, wanted)
        found = Drawn(self.out.block.cpu())
        same = (found.tokens == wanted.tokens)[: self.B].tolist()
        sound = wanted.bad == 0  # in others everything but that is undefined
        wrong = not found.bad.equal(wanted.bad) or not found.top[sound].equal(wanted.top[sound])
        for numbers, equal, is_sound in zip(self.asked, same, sound.tolist()):
            wrong |= is_sound and not numbers.temperature and not equal
        error = (found.top_logprobs - wanted.top_logprobs)[sound].abs().max()
        if all(same) and sound.all():
            error = max(error, (found.logprob - wanted.logprob).abs().max())
            wrong |= not self.on_gpu[1].counts.cpu().equal(self.kept.counts)
        if wrong or not error <= 1e-4:
            failures.append(name)
            print(f"WRONG {name}: {found.tokens.tolist()}, not {wanted.tokens.tolist()}; {error}")
        return same


def check_sample() -> None:
    """Draws may differ where the uniform number falls on a border of tokens: one in a hundred."""
    same: list[bool] = []
    for (V, spread), B, asked in product(
        ((151936, 3.0), (151936, 0.05), (1000, 2.0)), (1, 8), (Draws.ASKED, Draws.PLAIN)
    ):
        draws = Draws(B, V, asked[::-1], spread)
        name = f"sample V={V} spread={spread} B={B}"
        draws.draw()
        same += draws.compare(name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draws.draw()
        for turn in range(6):
            draws.set(0.07 + 0.15 * turn)
            draws.logits = draws.logits.roll(turn, 1)
            if turn == 5:
                draws.logits[0, 7] = float("nan")
            draws.send()
            graph.replay()
            torch.cuda.synchronize()
            same += draws.compare(f"{name}, replayed")[turn == 5 :]
    if same.count(False) > len(same) / 100:
        failures.append("sample")
        print(f"WRONG sample: {same.count(False)} of {len(same)} draws differ", flush=True)


def bench_sample() -> None:
    V = 151936
    for B in (1, 4, 8):
        for what, asked in (
            ("temperature", Draws.PLAIN),
            ("top_p", (RowNumbers(temperature=0.8, top_p=0.9),) * 8),
            ("top_k, top_p", (Draws.ASKED[2],) * 8),
            ("everything", (Draws.ASKED[6],) * 8),
        ):
            draws = Draws(B, V, asked)
            row(f"sample B={B} {what}", seconds(lambda i, d=draws: d.draw()), B * V * 4)
