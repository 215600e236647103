"""One token for each row of logits: what the device's sampler reads, keeps and brings.

The rules, and their order, are those of ``ftd.engine.sampling``. Everything lies in buffers of
fixed addresses, so that a captured graph serves any rows: numbers of each row in one block that one
copy moves, results in another; token counts and biases in slots that a row names, since they are
large and change hands seldom.

``sample_ref`` is the torch reference of ``ftd.kernels.triton.sample``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

MOST_TOP = 20  # alternatives beside the drawn token
BIASED, PENALISED, MASKED, LOGPROBS = 1, 2, 4, 8  # flags of a row: what it needs beside a draw
# Temperatures beyond these overflow float32 and draw like these: greedy, and evenly.
COLDEST, HOTTEST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """How one row is drawn from; the defaults are those of a row that nobody looks at."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    flags: int = 0
    slot: int = -1  # of counts and biases

    @property
    def shapes(self) -> Shapes:
        ranked = self.flags & LOGPROBS != 0
        if not self.temperature:
            return Shapes(self.flags != 0, ranked=ranked)
        by_k, by_p = self.top_k > 0, self.top_p < 1
        return Shapes(by_k or by_p or self.min_p > 0 or self.flags != 0, by_k, by_p, ranked)


class Shapes(NamedTuple):
    """What the rows of a launch need, and so which kernels run."""

    full: bool = False  # False: nothing but a temperature
    by_k: bool = False
    by_p: bool = False
    ranked: bool = False

    def __or__(self, other: Shapes) -> Shapes:
        return Shapes(*(mine or theirs for mine, theirs in zip(self, other)))


ALL_SHAPES = (Shapes(), *(Shapes(True, *needs) for needs in product((False, True), repeat=3)))


def _padded(batch: int) -> int:
    """Rows for which blocks are laid out: each of their parts then begins at 16 bytes."""
    return -(-batch // 4) * 4


class Rows:
    """Numbers of R >= B rows, as views of one block of bytes."""

    def __init__(self, batch: int, device: torch.device | str = "cpu") -> None:
        self.padded = R = _padded(batch)
        self.block = torch.zeros(48 * R, dtype=torch.uint8, device=device)
        parts = self.block.split([16 * R, 20 * R, 12 * R])
        self.doubles = parts[0].view(torch.float64).view(2, R)  # uniform in (0, 1), top_p
        # temperature, log of min_p, presence, frequency, repetition
        self.floats = parts[1].view(torch.float32).view(5, R)
        self.ints = parts[2].view(torch.int32).view(3, R)  # top_k, slot, flags
        if self.block.device.type == "cpu":  # element by element torch is slow
            self._doubles, self._floats = self.doubles.numpy(), self.floats.numpy()
            self._ints = self.ints.numpy()

    def set(self, row: int, numbers: RowNumbers, uniform: float) -> None:
        """On the CPU."""
        n = numbers
        least = math.log(n.min_p) if n.min_p > 0 else -math.inf
        hot = n.temperature and min(max(n.temperature, COLDEST), HOTTEST)
        top_k = min(n.top_k, 2**31 - 1)
        self._doubles[:, row] = uniform, n.top_p
        self._floats[:, row] = hot, least, n.presence, n.frequency, n.repetition
        self._ints[:, row] = top_k, n.slot, n.flags


class Kept:
    """What rows have beside numbers, on the device.

    Attributes:
        counts: [S, V] int32; twice how often a token is part of the output, one more if it is part
            of the prompt.
        bias: [S, V] float32, added to the logits.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        self.counts = torch.zeros(slots, vocab, dtype=torch.int32, device=device)
        self.bias = torch.zeros(slots, vocab, dtype=torch.float32, device=device)


class Drawn:
    """What R >= B rows have brought, as views of one block of bytes.

    Attributes:
        tokens: [R] int64; -1: the mask allows nothing.
        bad: [R] int32, logits that are not finite.
        logprob: [R] float32, of the token, where asked for.
        top, top_logprobs: [R, MOST_TOP], best first, of equal ones the lowest id.
    """

    ROW_BYTES = 16 + 8 * MOST_TOP

    def __init__(self, block: torch.Tensor) -> None:
        R = len(block) // self.ROW_BYTES
        wide = 4 * MOST_TOP * R
        parts = block.split([8 * R, 4 * R, 4 * R, wide, wide])
        self.block = block
        self.tokens = parts[0].view(torch.int64)
        self.bad = parts[1].view(torch.int32)
        self.logprob = parts[2].view(torch.float32)
        self.top = parts[3].view(torch.int32).view(R, MOST_TOP)
        self.top_logprobs = parts[4].view(torch.float32).view(R, MOST_TOP)

    @classmethod
    def empty(cls, batch: int, device: torch.device | str) -> Drawn:
        num_bytes = _padded(batch) * cls.ROW_BYTES
        return cls(torch.zeros(num_bytes, dtype=torch.uint8, device=device))


def mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def sample_ref(
    logits: torch.Tensor,  # [B, V] float32, not changed
    rows: Rows,  # of B rows
    kept: Kept,
    mask: torch.Tensor,  # [B, ceil(V / 32)] int32
    out: Drawn,
) -> None:
    """Draw; a drawn token is added to its row's counts."""
    B = len(logits)
    out.bad[:B] = (~logits.isfinite()).sum(1)
    uniforms, top_ps = rows.doubles.tolist()
    for b, (top_k, slot, flags) in enumerate(rows.ints.T.tolist()[:B]):
        temperature, least, presence, frequency, repetition = rows.floats[:, b]
        x = logits[b].clone()
        if flags & BIASED:
            x += kept.bias[slot]
        if flags & PENALISED:
            x = _penalised(x, kept.counts[slot], presence, frequency, repetition)
        if flags & MASKED:
            bits = mask[b, :, None] >> torch.arange(32, dtype=torch.int32) & 1
            x[bits.flatten()[: len(x)] == 0] = -math.inf
        best = int(x.argmax())
        if not x[best].isfinite():
            out.tokens[b] = -1
        elif temperature == 0:
            out.tokens[b] = best
        else:
            x = (x - x[best]) / temperature
            x[x < _floor(x, top_k, top_ps[b], float(least))] = -math.inf
            mass = x.exp().cumsum(0, dtype=torch.float64)
            picked = torch.searchsorted(mass, mass[-1] * uniforms[b], right=True)
            out.tokens[b] = picked.clamp(max=len(x) - 1)
        if flags & PENALISED and out.tokens[b] >= 0:
            kept.counts[slot, out.tokens[b]] += 2
        if flags & LOGPROBS:
            _logprobs(logits[b], b, out)


def _penalised(
    x: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    times = (counts >> 1).float()
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - (presence * (times > 0) + frequency * times)


def _floor(x: torch.Tensor, top_k: int, top_p: float, least: float) -> float:
    """The smallest kept value of ``x`` [V], whose largest is 0."""
    floor = least
    if 0 < top_k < len(x):
        floor = max(floor, float(x.topk(top_k).values[-1]))
        x = x[x >= float(x.topk(top_k).values[-1])]
    if top_p < 1:
        ordered = x.sort(descending=True).values
        mass = ordered.exp().cumsum(0, dtype=torch.float64)
        wanted = top_p * x.exp().sum(dtype=torch.float64)
        at = int(torch.searchsorted(mass, wanted))
        floor = max(floor, float(ordered[min(at, len(ordered) - 1)]))
    return floor


def _logprobs(row: torch.Tensor, b: int, out: Drawn) -> None:
    norm = row.logsumexp(0)
    out.logprob[b] = row[out.tokens[b]] - norm
    values, ids = row.topk(min(MOST_TOP, len(row)))
    best = np.lexsort((ids.numpy(), -values.numpy()))
    out.top[b, : len(best)] = ids[best].int()
    out.top_logprobs[b, : len(best)] = (values - norm)[best]
