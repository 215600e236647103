"""Launches a step of given sequences, and takes in what it has brought.

A step either commits as a whole or, interrupted at a layer border, leaves sequences as they were:
KV written for tokens that were not committed is written again. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ftd.engine.answering import Answering
from ftd.engine.api import Output
from ftd.engine.batch import Span
from ftd.engine.faults import NO_FAULT, Faults
from ftd.engine.holdings import Holdings
from ftd.engine.meter import Meter
from ftd.engine.passes import Borders, PausingExperts
from ftd.engine.profiling import Profiling
from ftd.engine.roster import Roster
from ftd.engine.runner import Runner, StepResult
from ftd.engine.sampling import Draw
from ftd.errors import EngineFailed
from ftd.experts.residents import ExpertCounters, ResidencyMap
from ftd.experts.slots import Resized
from ftd.experts.trace import TraceRecorder
from ftd.schedule.rates import Rates


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    runs: Seq[tuple[Answering, int]]  # and how many of its tokens
    spans: Seq[Span]
    result: StepResult
    prompt_tokens: int = 0  # of a pass
    paused_s: float = 0.0  # of that, for steps of others


class StepExperts(PausingExperts, Protocol):
    """The routed experts, told where steps end: ``ExpertRuntime`` or ``CudaExperts``."""

    def within_pass(self) -> AbstractContextManager[None]:
        """Inside, other steps begin and end while the one that is under way pauses."""
        ...

    def safe_point(self) -> None: ...
    def abandon_step(self) -> None: ...
    def resize(self, num_slots: int, num_staging: int | None = None) -> Resized: ...
    def residency_map(self) -> ResidencyMap: ...
    def counters(self) -> ExpertCounters: ...
    @property
    def recording(self) -> bool: ...
    def record_trace(self, recorder: TraceRecorder | None) -> None: ...


class Steps:
    """
    Attributes:
        rates: how long steps take, for the scheduler.
        profiling: told how long they take; None: nothing that could be divided.
    """

    def __init__(
        self,
        experts: StepExperts,
        runner: Runner,
        held: Holdings,
        roster: Roster,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        self.experts, self.runner, self.held, self.roster = experts, runner, held, roster
        self.faults, self.clock = faults, clock
        self.rates = Rates()
        self.profiling: Profiling | None = None
        self.meter = Meter(clock)

    # ---- launching

    def run(self, runs: Seq[tuple[Answering, int]], borders: Borders) -> Launched:
        """Launch a step of so many tokens of each sequence."""
        self.faults.before_step(self.roster.totals.steps + 1)
        spans = [self._span(answering, tokens) for answering, tokens in runs]
        sampling = [answering.drawing(tokens) for answering, tokens in runs]
        try:
            result = self.runner.run(spans, sampling, borders)
        except BaseException:
            self.experts.abandon_step()
            for (answering, _), span in zip(runs, spans, strict=True):
                self.held.recurrence.abandon(answering.sequence, span.states)
            raise
        return Launched(runs, spans, result)

    def follow(self, step: Launched) -> Launched | None:
        """Launch a step of the rows of ``step``, which is not read yet; None: it cannot be.

        A row that turns out to have ended brings a surplus token, which is thrown away; what it
        writes into a page given back comes before whatever the page's next user writes.
        """
        if not self.runner.can_follow(step.result):
            return None
        rows = [answering for answering, _ in step.runs]
        if not all(self.roster.is_running(a) for a in rows):
            return None
        most = self.held.most_output
        going = [a.sequence.output_tokens + 1 < most(a.sequence) for a in rows]
        if not any(going) or self.held.pages.free < sum(going):  # at most one new page a row
            return None
        if self.faults.asked != NO_FAULT:
            return None
        spans = [
            self._span_ahead(a, span) if goes else None
            for a, span, goes in zip(rows, step.spans, going)
        ]
        result = self.runner.follow(step.result, spans)
        live = [(a, 1) for a, goes in zip(rows, going) if goes]
        return Launched(live, [s for s in spans if s], result)

    def _span(self, answering: Answering, tokens: int) -> Span:
        """The next tokens of a sequence, with pages for them."""
        sequence = answering.sequence
        begin, end = sequence.computed, sequence.computed + tokens
        self.held.extend(sequence, end)
        last = int(end == len(sequence.ids))
        logits = tokens if answering.scoring else last
        states = self.held.recurrence.step(sequence, tokens)
        return Span(sequence.ids[begin:end], begin, sequence.pages, logits, states)

    def _span_ahead(self, answering: Answering, span: Span) -> Span:
        """The token that the running step is about to bring, with a page for its keys.

        Args:
            span: of the running step.
        """
        sequence = answering.sequence
        begin = sequence.computed + 1
        self.held.extend(sequence, begin + 1)
        states = self.held.recurrence.step_ahead(sequence, span.states)
        return Span((0,), begin, sequence.pages, 1, states)

    # ---- taking in

    def complete(self, step: Launched, began_s: float, *, beside: bool = False) -> list[Output]:
        """Wait for a step, and take in what it has brought.

        Args:
            beside: a pass pauses for it.
        """
        draws = step.result.draws()
        self.experts.safe_point()
        outputs = self._commit(step, draws)
        self._measure(step, len(outputs), self.clock() - began_s, beside)
        return outputs

    def _commit(self, step: Launched, draws: Seq[Draw | EngineFailed]) -> list[Output]:
        drawing, row = [], 0
        for (answering, tokens), span in zip(step.runs, step.spans, strict=True):
            sequence = answering.sequence
            if not self.roster.is_running(answering):
                drawing.append(answering)  # of a step launched ahead: its token is surplus
                self.held.recurrence.abandon(sequence, span.states)
                continue
            if answering.scoring:
                answering.score(span.begin, step.result.logits()[row : row + span.logits])
            row += span.logits
            sequence.computed += tokens
            self.held.recurrence.commit(sequence, span.states)
            sequence.passed_over = 0
            if tokens > 1:
                self.held.keep(sequence)
            if sequence.pending == 0:
                drawing.append(answering)
        pairs = list(zip(drawing, draws, strict=True))
        return [self._answer(a, draw) for a, draw in pairs if self.roster.is_running(a)]

    def _answer(self, answering: Answering, draw: Draw | EngineFailed) -> Output:
        sequence = answering.sequence
        if isinstance(draw, EngineFailed):
            return self.roster.fail(answering, draw)
        first = not answering.announced
        output = answering.take(draw, self.held.most_output(sequence))
        self.roster.totals_of(answering).output_tokens += 1
        if first:
            self.held.note_anchors(sequence, answering.request.anchors)
        if output.finish:
            self.roster.finish(answering)
        elif sequence.computed % self.held.kv.page_tokens == 0:
            self.held.keep(sequence)
        return output

    def _measure(self, step: Launched, drawn: int, seconds: float, beside: bool) -> None:
        prompt = step.prompt_tokens
        rows = 0 if prompt else len(step.runs)
        seconds -= step.paused_s
        known = self.rates.decode_step_s(rows) is not None
        if not (beside and known):  # a pass may slow it
            self.rates = self.rates.measured(rows, prompt, seconds)
        self.roster.totals.steps += 1
        if prompt:
            for answering, tokens in step.runs:
                self.roster.totals_of(answering).prompt_tokens += tokens
        self.meter.step(drawn, prompt, seconds)
        if self.profiling is not None:
            misses = self.experts.counters().misses
            self.profiling.stepped(0 if beside else rows, misses, seconds)
