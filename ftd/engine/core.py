"""The engine's state, and one step of it: plan, pages, forward pass, sampling, bookkeeping.

Everything here runs on the engine thread. A step either commits as a whole or, interrupted at a
layer border, leaves sequences as they were: KV written for tokens that were not committed is
written again.

A pass over prompts pauses at its layer borders for decode steps of the other sequences, each with a
commit and a safe point of its own: ``beside``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
import torch

from ftd.config import FaultSpec
from ftd.cuda.faults import break_context, is_lost
from ftd.engine import figures
from ftd.engine.answering import Answering
from ftd.engine.api import (
    EngineRequest,
    EngineStatus,
    Finish,
    Output,
    Sampling,
)
from ftd.engine.batch import Span
from ftd.engine.beside import StepsBeside
from ftd.engine.figures import Totals
from ftd.engine.holdings import Holdings
from ftd.engine.meter import Meter
from ftd.engine.passes import Borders, PausingExperts
from ftd.engine.profiling import Profiling
from ftd.engine.runner import Runner, StepResult
from ftd.engine.sampling import Draw, SamplingState
from ftd.errors import ConstraintFailed, EngineFailed, OutOfMemory
from ftd.experts.residents import ExpertCounters, ResidencyMap
from ftd.experts.slots import Resized
from ftd.experts.trace import TraceRecorder
from ftd.kv.anchors import AnchorInfo
from ftd.kv.cache import KvCache
from ftd.kv.disk import DiskStore
from ftd.kv.host import HostTier
from ftd.model.architecture import Model
from ftd.schedule.policy import Limits, SequenceView, StepPlan, next_in_line, plan_step
from ftd.schedule.rates import Rates
from ftd.schedule.sequence import Sequence

log = structlog.get_logger(__name__)

# Prompt rows a step computes when all their logits are wanted: [64, V] float32 is 39 MB at 152k.
SCORED_ROWS = 64
# A chunk large enough to tell a fixed cost from one per token, small enough for a slow machine.
WARM_UP_TOKENS = 64
NO_FAULT = FaultSpec()


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    runs: Seq[tuple[Answering, int]]  # and how many of its tokens
    spans: Seq[Span]
    result: StepResult
    prompt_tokens: int = 0  # of a pass


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


class EngineCore:
    """Owns model, KV and sequences.

    Args:
        limits: of the scheduler; ``num_pages`` and ``page_tokens`` are those of ``kv``.
        host: where pages go that are evicted; None: nowhere.
        close: frees what the model stands on, once no step runs any more.
    """

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        experts: StepExperts,
        runner: Runner,
        limits: Limits,
        *,
        kernels: str = "torch",
        fault: FaultSpec = NO_FAULT,
        host: HostTier | None = None,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.beat: Callable[[], None] = lambda: None
        # What steps beside a pass have brought; by default the pass's own ``step`` returns it too.
        self.deliver: Callable[[list[Output]], None] = self._hold
        # Where memory follows need, the pool grows up to ``most_pages`` for a single sequence.
        self.most_pages = 0
        self.make_room: Callable[[int], None] = lambda pages: None
        self.model = model
        self.kv = kv
        self.experts = experts
        self.runner = runner
        self.kernels = kernels  # what computes, for people
        self.profiling: Profiling | None = None  # None: nothing that could be divided
        self.limits = limits
        self.held = Holdings(kv, limits.max_running, clock, host)
        self.pages, self.tree = self.held.pages, self.held.tree
        self.wake: Callable[[], None] = lambda: None  # from any thread: there is work again
        self.rates = Rates()
        self.totals = Totals()
        self._trials = Totals()  # of requests that nobody has asked
        self._waiting: dict[str, Answering] = {}  # in order of arrival
        self._running: dict[str, Answering] = {}
        self._beside = StepsBeside(self)
        self._early: list[Output] = []  # not delivered yet
        self._ahead: Launched | None = None  # launched before the step before it was read
        self._arrivals = 0
        self._meter = Meter(clock)
        self._fault = fault
        self._close = close
        self.clock = clock

    # ---- between steps

    def add(self, request: EngineRequest) -> None:
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals)
        sampling = SamplingState(request.sampling, request.prompt_ids, request.constraint)
        self._waiting[sequence.key] = Answering(sequence, sampling)
        if not self._waiting[sequence.key].wants_scores:
            self.held.restoring.begin(sequence)

    def end(self, request_id: str, finish: Finish = Finish.CANCELLED) -> bool:
        """Forget a request; its finished pages stay cached. False: it is over already.

        Args:
            finish: STOP if the text layer has found a stop string, which is a good end.
        """
        self.held.restoring.forget(request_id)
        answering = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if answering is None:
            return False
        self.held.give_back(answering.sequence, answered=finish is Finish.STOP)
        totals = self._totals_of(answering)
        if finish is Finish.STOP:
            totals.finished += 1
        else:
            totals.cancelled += 1
        return True

    def has_work(self) -> bool:
        waits = self._running or self._ready() or self._early
        return bool(waits or self.held.restoring.has_arrived)

    def keep_on_disk(self, store: DiskStore) -> None:
        """From now on; what it holds is found, what ends is written."""
        store.wake = self._woken
        self.held.keep_on_disk(store)

    def _woken(self) -> None:
        self.wake()  # whatever that is by then

    def _ready(self) -> list[Answering]:
        """Those that wait for their turn, and not for what is on its way to them."""
        others, waits = bool(self._running), self.held.restoring.waits
        return [a for key, a in self._waiting.items() if not waits(key, others)]

    def in_prefill(self, request_id: str) -> bool:
        return self._beside.is_in_pass(request_id)

    def request_ids(self) -> list[str]:
        return [*self._running, *self._waiting]

    def rows(self) -> list[Answering]:
        """What runs, in the order of admission."""
        return list(self._running.values())

    def running(self) -> list[Sequence]:
        """Oldest first."""
        return sorted((a.sequence for a in self._running.values()), key=lambda s: s.arrival)

    def waiting(self) -> list[Sequence]:
        """Oldest first."""
        return sorted((a.sequence for a in self._waiting.values()), key=lambda s: s.arrival)

    def longest_tokens(self) -> int:
        """Of any request in the engine, prompt and output so far."""
        unfinished = (*self._running.values(), *self._waiting.values())
        return max((len(a.sequence.ids) for a in unfinished), default=0)

    def preempt(self, key: str) -> None:
        """Back to waiting; what it has computed stays cached while there is room."""
        victim = self._running.pop(key)
        self.held.give_back(victim.sequence)
        victim.scores.clear()
        self._waiting[key] = victim
        self.totals.preempted += 1
        log.info("sequence.preempted", request=key, tokens=len(victim.sequence.ids))

    def settle(self) -> list[Output]:
        """Finish what was launched ahead: nothing is in flight afterwards."""
        step, self._ahead = self._ahead, None
        return self._early_and(self.complete(step, self.clock()) if step else [])

    def failed_for_good(self, error: Exception) -> bool:
        """No engine of this process can go on after ``error``."""
        return is_lost(error)

    def close(self) -> None:
        self.held.restoring.close()
        self._close()

    def warm_up(self) -> None:
        """Run a chunk and a decode step for nobody: proves that the model computes, and gives the
        scheduler its first rates. Nothing of it is kept.

        Raises:
            EngineFailed: the logits are not finite.
        """
        tokens = min(
            WARM_UP_TOKENS, self.limits.chunk_tokens, self.kv.num_pages * self.kv.page_tokens - 2
        )
        fault, self._fault = self._fault, NO_FAULT
        self.add(EngineRequest("warm-up", (0,) * tokens, 2, Sampling(temperature=0.0)))
        while self.has_work():
            for output in self.step():
                if output.error:
                    raise output.error
        self.held.forget_all()
        self.totals, self._meter = Totals(), Meter(self.clock)
        self.held.pages_evicted = 0
        self._fault = fault

    # ---- a step

    def step(self) -> list[Output]:
        """Run one step; returns what it brought for each request.

        Raises whatever ``beat`` raises at a layer border: nothing is committed then.
        """
        began_s = self.clock()
        self.held.restoring.take()
        if not self._running and not self._ready():
            return self._early_and([])
        try:
            step = self._ahead or self._launch()
        except torch.OutOfMemoryError as error:
            return self._early_and(self._give_up(error))
        self._ahead = None
        if any(self._is_live(answering) for answering, _ in step.runs):
            self._ahead = self._launch_ahead(step)
        return self._early_and(self.complete(step, began_s))

    def _give_up(self, error: torch.OutOfMemoryError) -> list[Output]:
        """There was no memory for a step: end the prompts in it, or all rows if it had none."""
        torch.cuda.empty_cache()
        rows = [a for a in self._running.values() if a.sequence.pending > 1]
        log.error(
            "step.out_of_memory", prompts=len(rows), rows=len(self._running), cause=str(error)
        )
        failed = OutOfMemory(
            f"the GPU had no memory for a step: {error}",
            hint="retry; if it comes again, start ftd with a smaller --vram or --prefill-chunk",
            retry_after_s=5,
        )
        return [self._fail(a, failed) for a in rows or list(self._running.values())]

    def _hold(self, outputs: list[Output]) -> None:
        self._early += outputs

    def _early_and(self, outputs: list[Output]) -> list[Output]:
        early, self._early = self._early, []
        return early + outputs

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

    def _launch(self) -> Launched:
        needed = self.longest_tokens() // self.kv.page_tokens + 1
        if self.pages.num_pages < needed <= self.most_pages:
            self.make_room(needed)
        plan = self._plan()
        self._carry_out(plan)
        runs = self._runs(plan)
        assert runs, "requests wait, but the plan runs nothing"
        if not plan.prompt_tokens:
            self._beside.none()
            return self.run(runs, Borders(self.experts, self.look))
        self._beside.pass_begins([a.key for a, _ in runs])
        try:
            step = self.run(runs, Borders(self.experts, self.look, self._beside))
        finally:
            self._beside.pass_ended()
        return replace(step, prompt_tokens=sum(tokens for _, tokens in runs))

    def run(self, runs: Seq[tuple[Answering, int]], borders: Borders) -> Launched:
        """Launch a step of so many tokens of each sequence."""
        self._inject_faults()
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

    def look(self) -> None:
        """Called at each layer border of a step that is not captured."""
        self.beat()  # whatever that is by then

    # ---- launching ahead

    def _launch_ahead(self, step: Launched) -> Launched | None:
        """Launch what surely comes next, the same rows once more, before their tokens are read.

        A row that turns out to have ended brings a surplus token, which is thrown away; what it
        writes into a page given back comes before whatever the page's next user writes.
        """
        if step.prompt_tokens or self._has_room_for_more():
            return None
        if len(step.runs) != len(self._running):
            return None
        return self.follow(step)

    def follow(self, step: Launched) -> Launched | None:
        """Launch a step of the rows of ``step``, which is not read yet; None: it cannot be."""
        if not self.runner.can_follow(step.result):
            return None
        rows = [answering for answering, _ in step.runs]
        if not all(self._is_live(a) for a in rows):
            return None
        going = [a.sequence.output_tokens + 1 < self._most_output(a.sequence) for a in rows]
        if not any(going) or self.pages.free < sum(going):  # at most one new page a row
            return None
        if self._fault != NO_FAULT:
            return None
        spans = [
            self._span_ahead(a, span) if goes else None
            for a, span, goes in zip(rows, step.spans, going)
        ]
        result = self.runner.follow(step.result, spans)
        live = [(a, 1) for a, goes in zip(rows, going) if goes]
        return Launched(live, [s for s in spans if s], result)

    def _has_room_for_more(self) -> bool:
        """The next plan may admit somebody."""
        return len(self._running) < self.limits.max_running and bool(self._ready())

    def _is_live(self, answering: Answering) -> bool:
        return self._running.get(answering.sequence.key) is answering

    # ---- planning

    def _plan(self) -> StepPlan:
        running = [self._view(a.sequence) for a in self._running.values()]
        waiting = [a.sequence.view(0) for a in self._ready()]
        line = next_in_line(waiting, running, self.limits)
        line = [key for key in line if not self._brings(self._waiting[key])]
        return plan_step(
            running,
            [self._view_after_reuse(self._waiting[key]) for key in line],
            free_pages=self.pages.free,
            idle_pages=self.pages.idle,
            limits=self.limits,
        )

    def _brings(self, answering: Answering) -> bool:
        """Bring what a request can begin with from host memory; true: it waits for that."""
        others = bool(self._running)
        return self.held.bring(answering.sequence, answering.reusable, others)

    def _view(self, sequence: Sequence) -> SequenceView:
        return sequence.view(self.pages.num_exclusive(sequence.pages))

    def _view_after_reuse(self, answering: Answering) -> SequenceView:
        known = self.held.known(answering.sequence.ids, answering.reusable)
        return answering.sequence.view_after(*known.reuse)

    def _carry_out(self, plan: StepPlan) -> None:
        for key in plan.preempt:
            self.preempt(key)
        admitted = [self._waiting.pop(key) for key in plan.admit]
        self._running.update((a.key, a) for a in admitted)
        for key in plan.passed_over:
            self._running[key].sequence.passed_over += 1
        ended = self.held.begin(
            [(a.sequence, a.reusable) for a in admitted],
            plan.new_pages,
            {run.key for run in plan.runs},
        )
        for answering in admitted:
            sequence = answering.sequence
            if sequence.reused is None:  # or it was preempted, and comes back
                answering.begins(ended[answering.key], self.held.resumed(sequence))
                self._totals_of(answering).reused_tokens += sequence.computed

    def _runs(self, plan: StepPlan) -> list[tuple[Answering, int]]:
        """What the plan runs, and how many tokens of it."""
        pairs = [(self._running[run.key], run.tokens) for run in plan.runs]
        return [(a, min(tokens, SCORED_ROWS) if a.scoring else tokens) for a, tokens in pairs]

    def _inject_faults(self) -> None:
        if self._fault.slow_s:
            time.sleep(self._fault.slow_s)
        if self._fault.step is not None and self.totals.steps + 1 == self._fault.step:
            raise EngineFailed(f"step {self._fault.step} failed, as --fault asked")
        if self._fault.memory is not None and self.totals.steps + 1 == self._fault.memory:
            self._fault = replace(self._fault, memory=None)
            raise torch.OutOfMemoryError("CUDA out of memory, as --fault asked")
        if self._fault.gpu is not None and self.totals.steps + 1 == self._fault.gpu:
            break_context(self.kv.k[0].device)

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

    def _commit(self, step: Launched, draws: Seq[Draw | EngineFailed]) -> list[Output]:
        drawing, row = [], 0
        for (answering, tokens), span in zip(step.runs, step.spans, strict=True):
            sequence = answering.sequence
            if not self._is_live(answering):
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
        return [self._answer(a, draw) for a, draw in pairs if self._is_live(a)]

    def _fail(self, answering: Answering, cause: EngineFailed) -> Output:
        sequence, key = answering.sequence, answering.request.request_id
        log.error("request.failed", request=key, cause=str(cause))
        del self._running[key]
        if isinstance(cause, ConstraintFailed):
            self.held.give_back(sequence)  # what is computed is sound
        else:
            self.held.throw_away(sequence)
        self._totals_of(answering).failed += 1
        return Output(key, finish=Finish.ERROR, error=cause)

    def _answer(self, answering: Answering, draw: Draw | EngineFailed) -> Output:
        sequence, request = answering.sequence, answering.request
        if isinstance(draw, EngineFailed):
            return self._fail(answering, draw)
        first = not answering.announced
        output = answering.take(draw, self._most_output(sequence))
        totals = self._totals_of(answering)
        totals.output_tokens += 1
        if first:
            self.held.note_anchors(sequence, request.anchors)
        if output.finish:
            del self._running[request.request_id]
            self.held.give_back(sequence, answered=True)
            totals.finished += 1
        elif sequence.computed % self.kv.page_tokens == 0:
            self.held.keep(sequence)
        return output

    def _most_output(self, sequence: Sequence) -> int:
        """Tokens that were asked for, or that the pool can have room for since it was changed."""
        pages = max(self.pages.num_pages, self.most_pages)
        room = pages * self.kv.page_tokens - sequence.prompt_tokens
        return min(sequence.request.max_tokens, room)

    # ---- figures

    def _totals_of(self, answering: Answering) -> Totals:
        return self._trials if answering.request.passing else self.totals

    def drop_anchors(self, session: str | None) -> int:
        """Forget what ``session`` alone has used, or all that nobody uses; returns pages freed."""
        return self.held.drop_anchors(session)

    def anchor_infos(self, session: str | None = None) -> tuple[AnchorInfo, ...]:
        """Anchors of one session, or all: those in memory, then those in lower tiers alone."""
        return self.held.anchor_infos(session, self._token_s)

    @property
    def _token_s(self) -> float:
        """To compute a prompt token; 0: not known yet."""
        return self.rates.line[1] if self.rates.chunk_tokens else 0.0

    def _measure(self, step: Launched, drawn: int, seconds: float, beside: bool) -> None:
        prompt = step.prompt_tokens
        rows = 0 if prompt else len(step.runs)
        if prompt:
            seconds -= self._beside.paused_s
        known = self.rates.decode_step_s(rows) is not None
        if not (beside and known):  # a pass may slow it
            self.rates = self.rates.measured(rows, prompt, seconds)
        self.totals.steps += 1
        if prompt:
            for answering, tokens in step.runs:
                self._totals_of(answering).prompt_tokens += tokens
        self._meter.step(drawn, prompt, seconds)
        if self.profiling is not None:
            misses = self.experts.counters().misses
            self.profiling.stepped(0 if beside else rows, misses, seconds)

    def status(self) -> EngineStatus:
        now_s = self.clock()
        return figures.status(
            self.pages,
            self.held.pages_evicted,
            self.held.recurrence,
            self.experts.counters(),
            self.totals,
            self._meter,
            [
                *(figures.running(a.sequence, now_s) for a in self._running.values()),
                *(figures.waiting(a.sequence, now_s) for a in self._waiting.values()),
            ],
            self.held.host,
            self.held.anchor_totals(self._token_s),
            self.profiling.source if self.profiling else "",
        )
