"""Logits to tokens, on the CPU.

In this order, as users of the OpenAI API, transformers and vLLM expect:

1. ``logit_bias`` is added;
2. repetition penalty, over prompt and output: positive logits are divided by it, others multiplied;
3. presence and frequency penalty, over the output only: subtracted once, and once for each time;
4. a constraint's mask forbids;
5. temperature divides; 0 takes the largest (of equal ones the first) and is done;
6. top_k, then top_p of what is left, then min_p relative to the most likely token.
   Tokens as likely as the last one kept are kept too, so the set never depends on a sort's order;
7. one uniform number, a function of seed and position, picks from the kept tokens in the order of
   the vocabulary. Nothing else enters: neither the row's place in the batch nor its neighbours.

Logprobs are the model's own: log-softmax of the logits before all of this.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftd.engine.api import Constraint, Sampling, TokenLogprob
from ftd.engine.philox import uniform
from ftd.errors import ConstraintFailed, EngineFailed

# Temperatures beyond these overflow float32 and draw like these: greedy, and evenly.
_COLDEST, _HOTTEST = 1e-30, 1e30
# The cut of top_p is first sought among tokens this near to the most likely one, in nats: a few
# hundred in a peaked distribution. If it lies behind them, the whole vocabulary is sorted.
_NEAR = 12.0


@dataclass(frozen=True, slots=True)
class Draw:
    token: int
    logprob: TokenLogprob | None = None  # if asked for


class SamplingState:
    """How one sequence is sampled, and what that remembers from token to token."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._broken: Exception | None = None  # what the constraint raised
        self.drawn = 0  # tokens so far
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
        self._seen: _Seen | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = _Seen(prompt_ids)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self._seen = _Seen(())

    @property
    def changes_logits(self) -> bool:
        return self._bias is not None or self._seen is not None

    def change(self, row: torch.Tensor) -> None:
        """Apply bias and penalties to ``row`` [V], in place."""
        if self._bias is not None:
            row.index_add_(0, *self._bias)
        if self._seen is not None:
            self._seen.penalise(row, self.sampling)

    @property
    def biased(self) -> bool:
        return self._bias is not None

    @property
    def penalised(self) -> bool:
        return self._seen is not None

    @property
    def constrained(self) -> bool:
        """Which tokens may be drawn next depends on the one before."""
        return self._constraint is not None

    def write_bias(self, out: torch.Tensor) -> None:
        """What is added to the logits: [V] float32."""
        out.zero_()
        if self._bias is not None:
            out.index_add_(0, *self._bias)

    def write_counts(self, out: torch.Tensor) -> None:
        """``ftd.kernels.sample.Kept.counts`` of the sequence so far: [V] int32."""
        out.zero_()
        if self._seen is not None:
            self._seen.write(out)

    def mask(self) -> torch.Tensor | None:
        """[ceil(V / 32)] int32, bit 1: this token may be drawn next; None: any may.

        Raises:
            ConstraintFailed: nobody knows, so none may.
        """
        if self._constraint is None:
            return None
        try:
            if self._broken is None:
                return self._constraint.mask()
        except Exception as error:
            self._broken = error
        raise ConstraintFailed(
            f"the answer could not be held to its grammar: {self._broken}",
            hint="a simpler schema or grammar may help; other requests are not affected",
        ) from self._broken

    def add(self, token: int) -> None:
        """Take note of a token of the output."""
        self.drawn += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._constraint is not None and self._broken is None:
            try:
                self._constraint.accept(token)
            except Exception as error:  # told when the next token is to be drawn
                self._broken = error


class _Seen:
    """Distinct tokens of a sequence and how often each is part of the output."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._index = {token: i for i, token in enumerate(dict.fromkeys(prompt_ids))}
        self._tokens = torch.tensor([*self._index, *[0] * 64])  # with room to grow
        self._times = torch.zeros(len(self._tokens))

    def add(self, token: int) -> None:
        i = self._index.setdefault(token, len(self._index))
        if i == len(self._tokens):
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
            self._times = torch.cat([self._times, torch.zeros_like(self._times)])
        self._tokens[i] = token
        self._times[i] += 1

    def write(self, out: torch.Tensor) -> None:
        known = len(self._index)
        out[self._tokens[:known]] = 2 * self._times[:known].int() + 1

    def penalise(self, row: torch.Tensor, sampling: Sampling) -> None:
        tokens, times = self._tokens[: len(self._index)], self._times[: len(self._index)]
        x = row[tokens]
        if (penalty := sampling.repetition_penalty) != 1.0:
            x = torch.where(x > 0, x / penalty, x * penalty)
        x -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
        row[tokens] = x


class Sampler:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._bits = torch.arange(32, dtype=torch.int32)

    def sample(
        self,
        logits: torch.Tensor,  # [R, V] float32, not changed
        states: Sequence[SamplingState],  # of R different sequences
        positions: Sequence[int],  # of the tokens to be drawn, each in its sequence
    ) -> list[Draw | EngineFailed]:
        """Draw one token for each row, and note it in the row's state.

        A row that cannot be drawn from, because the model gave NaN or infinity, or the constraint
        fails or forbids everything, brings the error in its place; other rows are not affected.
        """
        assert logits.shape == (len(states), self.vocab) and len(positions) == len(states), (
            logits.shape,
            len(states),
            len(positions),
        )
        largest = logits.argmax(dim=1).tolist()
        # The sum is not finite if one term is not: cheaper than a look at each, which then follows.
        suspect = (~logits.sum(dim=1).isfinite()).tolist()
        draws: list[Draw | EngineFailed] = []
        for r, state in enumerate(states):
            if suspect[r] and not logits[r].isfinite().all():
                bad = int((~logits[r].isfinite()).sum())
                draws.append(not_finite(bad, self.vocab, positions[r]))
                continue
            try:
                mask = state.mask()
            except ConstraintFailed as error:
                draws.append(error)
                continue
            token: int | None = largest[r]
            if state.changes_logits or mask is not None or state.sampling.temperature > 0:
                token = self._draw(logits[r], state, positions[r], mask)
            if token is None:
                draws.append(none_allowed(positions[r]))
                continue
            state.add(token)
            top = state.sampling.logprobs
            draws.append(Draw(token, None if top is None else token_logprob(logits[r], token, top)))
        return draws

    def _draw(
        self, row: torch.Tensor, state: SamplingState, position: int, mask: torch.Tensor | None
    ) -> int | None:
        sampling = state.sampling
        if state.changes_logits or mask is not None:
            row = row.clone()
            state.change(row)
        if mask is not None:
            allowed = (mask[:, None] >> self._bits & 1).flatten()[: self.vocab].bool()
            row.masked_fill_(~allowed, -math.inf)
        best = row.argmax()
        if not row[best].isfinite():
            return None
        if sampling.temperature == 0:
            return int(best)
        # From here on log-probabilities up to a constant, the largest 0: exp cannot overflow.
        row = (row - row[best]) / min(max(sampling.temperature, _COLDEST), _HOTTEST)
        kept = None
        if (floor := _floor(row, sampling)) > -math.inf:
            kept = (row >= floor).nonzero().flatten()
            row = row[kept]
        mass = row.exp().cumsum(0, dtype=torch.float64)
        i = int(torch.searchsorted(mass, mass[-1] * uniform(state.seed, position), right=True))
        return i if kept is None else int(kept[i])


def _floor(row: torch.Tensor, sampling: Sampling) -> float:
    """The smallest kept value of ``row`` [V], whose largest is 0; minus infinity: all are kept."""
    floors = [math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf]
    if 0 < sampling.top_k < len(row):
        floors.append(float(row.topk(sampling.top_k).values[-1]))
        if sampling.top_p < 1:
            row = row[row >= floors[-1]]
    if sampling.top_p < 1:
        floors.append(_nucleus(row, sampling.top_p))
    return max(floors)


def _nucleus(row: torch.Tensor, top_p: float) -> float:
    """The largest value down to which the tokens of ``row`` hold ``top_p`` of its mass."""
    wanted = top_p * row.exp().sum(dtype=torch.float64)
    for candidates in (row[row > -_NEAR], row):
        ordered = candidates.sort(descending=True).values
        mass = ordered.exp().cumsum(0, dtype=torch.float64)
        i = int(torch.searchsorted(mass, wanted))
        if i < len(ordered):
            return float(ordered[i])
    return float(ordered[-1])  # top_p so near to 1 that rounding hides the rest


def token_logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """The model's own log-probability of ``token`` and of the ``top`` most likely ones, best first.

    Args:
        row: [V] float32, logits as the model gave them.
    """
    norm = row.logsumexp(0)
    values, ids = row.topk(min(top, len(row)))
    ranked = sorted(zip((values - norm).tolist(), ids.tolist()), key=lambda x: (-x[0], x[1]))
    return TokenLogprob(token, float(row[token] - norm), tuple((i, p) for p, i in ranked))


def not_finite(bad: int, vocab: int, position: int) -> EngineFailed:
    return EngineFailed(
        f"{bad} of the model's {vocab} logits at position {position} are not finite",
        hint="the weights may be damaged; other requests are not affected",
    )


def none_allowed(position: int) -> ConstraintFailed:
    return ConstraintFailed(f"no token is allowed at position {position}")
