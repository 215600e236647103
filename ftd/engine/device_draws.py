"""Between a sequence's sampling state and what the device draws with, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ftd.cuda.sampling import SamplerMemory, SampleRow
from ftd.engine.api import TokenLogprob
from ftd.engine.philox import uniform
from ftd.engine.runner import Drawn
from ftd.engine.sampling import Draw, SamplingState, none_allowed, not_finite
from ftd.errors import ConstraintFailed, EngineFailed
from ftd.kernels.sample import BIASED, LOGPROBS, MASKED, PENALISED, RowNumbers
from ftd.kernels.sample import Drawn as DeviceDrawn


class RowDraws:
    """The draws of one launch.

    Args:
        states: of each row; None: not in use.
        positions: of the tokens to be drawn, each in its sequence.
    """

    def __init__(self, states: Sequence[SamplingState | None], positions: Sequence[int]) -> None:
        self.states, self._positions = states, positions
        self._failed: dict[int, ConstraintFailed] = {}  # rows whose constraint has

    @property
    def constrained(self) -> bool:
        return any(state is not None and state.constrained for state in self.states)

    def keeping(self) -> list[SamplingState]:
        """States that need a slot."""
        return [s for s in self.states if s is not None and s.changes_logits]

    def rows(self, memory: SamplerMemory) -> list[SampleRow | None]:
        """For ``RowSampler.launch``: the tokens before must be known where a row is constrained."""
        return [
            None if state is None else self._row(i, state, position, memory)
            for i, (state, position) in enumerate(zip(self.states, self._positions, strict=True))
        ]

    def _row(self, i: int, state: SamplingState, position: int, memory: SamplerMemory) -> SampleRow:
        mask = None
        try:
            mask = state.mask()
        except ConstraintFailed as error:
            self._failed[i] = error
        slot = memory.slot_of(state) if state.changes_logits else -1
        assert slot is not None, "no slot was given to a row that needs one"
        numbers = _numbers(state, slot, masked=mask is not None)
        number = uniform(state.seed, position) if state.sampling.temperature else 0.5
        return SampleRow(numbers, number, mask)

    def take(self, block: torch.Tensor, vocab: int) -> Drawn:
        """What came of it, noted in the states.

        Args:
            block: of ``ftd.kernels.sample.Drawn``, on the CPU.
        """
        drawn = DeviceDrawn(block)
        found = zip(self.states, self._positions, drawn.tokens.tolist(), drawn.bad.tolist())
        draws: Drawn = []
        for i, (state, position, token, bad) in enumerate(found):
            if state is not None:
                draws.append(self._draw(i, state, position, token, bad, drawn, vocab))
        return draws

    def _draw(
        self, i: int, state: SamplingState, position: int, token: int, bad: int,
        drawn: DeviceDrawn, vocab: int,
    ) -> Draw | EngineFailed:  # fmt: skip
        if bad:
            return not_finite(bad, vocab, position)
        if i in self._failed:
            return self._failed[i]
        if token < 0:
            return none_allowed(position)
        state.add(token)
        top = state.sampling.logprobs
        return Draw(token, None if top is None else _logprob(drawn, i, token, min(top, vocab)))


def _numbers(state: SamplingState, slot: int, *, masked: bool) -> RowNumbers:
    s = state.sampling
    flags = (
        BIASED * state.biased
        | PENALISED * state.penalised
        | MASKED * masked
        | LOGPROBS * (s.logprobs is not None)
    )
    return RowNumbers(
        s.temperature, s.top_k, s.top_p, s.min_p,
        s.presence_penalty, s.frequency_penalty, s.repetition_penalty, flags, slot,
    )  # fmt: skip


def _logprob(drawn: DeviceDrawn, i: int, token: int, top: int) -> TokenLogprob:
    pairs = itertools.islice(zip(drawn.top[i].tolist(), drawn.top_logprobs[i].tolist()), top)
    ranked = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, float(drawn.logprob[i]), tuple(ranked))
