"""Runs a planned step on the device: rows in, logits and drawn tokens out.

The core knows sequences and pages; a runner knows where tensors live. ``run`` may return before the
device is done: what it returns waits when it is asked for something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ftd.engine.batch import Span, pack
from ftd.engine.sampling import Draw, Sampler, SamplingState
from ftd.errors import EngineFailed
from ftd.kv.cache import KvCache
from ftd.model.architecture import Experts, Model

Drawn = list[Draw | EngineFailed]


class StepResult(Protocol):
    def logits(self) -> torch.Tensor:
        """[R, V] float32 on the CPU: of every row that a span asked for, in order."""
        ...

    def draws(self) -> Drawn:
        """A token for each span with a sampling state, in order."""
        ...


class Runner(Protocol):
    def run(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> StepResult:
        """One step.

        Args:
            sampling: for each span, how the token after it is drawn; None: there is none yet.
            experts: called at each layer of a step that is not captured.
        """
        ...

    def can_follow(self, result: StepResult) -> bool:
        """A next step of the same rows may be launched before the tokens of ``result`` are read."""
        ...

    def follow(self, result: StepResult, spans: Sequence[Span | None]) -> StepResult:
        """Launch that step. ``spans``: None in place of rows that end; their tokens are unread."""
        ...

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile and capture whatever later steps should not wait for."""
        ...


class CpuRunner:
    """Everything at once, on the CPU."""

    def __init__(self, model: Model, kv: KvCache) -> None:
        self._model, self._kv = model, kv
        self._sampler = Sampler(model.spec.vocab)

    def run(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> CpuResult:
        logits = self._model.forward(pack(spans, self._kv.page_tokens), self._kv, experts)
        return CpuResult(logits, spans, sampling, self._sampler)

    def can_follow(self, result: StepResult) -> bool:
        return False  # a step is over before its result exists

    def follow(self, result: StepResult, spans: Sequence[Span | None]) -> StepResult:
        raise AssertionError("no step follows another on the CPU")

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing is compiled on the way."""


class CpuResult:
    def __init__(
        self,
        logits: torch.Tensor,
        spans: Sequence[Span],
        sampling: Sequence[SamplingState | None],
        sampler: Sampler,
    ) -> None:
        self._logits = logits
        self._spans, self._sampling, self._sampler = spans, sampling, sampler

    def logits(self) -> torch.Tensor:
        return self._logits

    def draws(self) -> Drawn:
        ends = ends_of(self._spans, self._sampling)
        rows = self._logits if len(ends) == len(self._logits) else self._logits[ends]
        return self._sampler.sample(rows, *drawing(self._spans, self._sampling))


def ends_of(spans: Sequence[Span], sampling: Sequence[SamplingState | None]) -> list[int]:
    """Logit rows from which a token is drawn."""
    ends, row = [], 0
    for span, state in zip(spans, sampling, strict=True):
        row += span.logits
        if state is not None:
            ends.append(row - 1)
    return ends


def drawing(
    spans: Sequence[Span], sampling: Sequence[SamplingState | None]
) -> tuple[list[SamplingState], list[int]]:
    """States of the spans that draw, and the positions of their new tokens."""
    pairs = [(s, span.begin + span.count) for span, s in zip(spans, sampling) if s is not None]
    return [s for s, _ in pairs], [position for _, position in pairs]
