"""The engine of one model: what the next step runs, and when it is launched.

Everything here runs on the engine thread. What a step is and does: ``steps``; who waits and runs:
``roster``; what sequences hold: ``holdings``. A pass over prompts pauses at its layer borders for
decode steps of the other sequences, each with a commit and a safe point of its own: ``beside``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from ftd.config import FaultSpec
from ftd.cuda.faults import is_lost
from ftd.engine import figures
from ftd.engine.answering import Answering
from ftd.engine.api import EngineRequest, EngineStatus, Finish, Output, Sampling
from ftd.engine.beside import StepsBeside
from ftd.engine.faults import NO_FAULT, Faults
from ftd.engine.figures import Totals
from ftd.engine.holdings import Holdings
from ftd.engine.meter import Meter
from ftd.engine.passes import Borders
from ftd.engine.roster import Roster
from ftd.engine.runner import Runner
from ftd.engine.steps import Launched, StepExperts, Steps
from ftd.errors import OutOfMemory
from ftd.kv.anchors import AnchorInfo
from ftd.kv.cache import KvCache
from ftd.kv.disk import DiskStore
from ftd.kv.host import HostTier
from ftd.model.architecture import Model
from ftd.schedule.policy import Limits, SequenceView, StepPlan, next_in_line, plan_step
from ftd.schedule.sequence import Sequence

log = structlog.get_logger(__name__)

# Prompt rows a step computes when all their logits are wanted: [64, V] float32 is 39 MB at 152k.
SCORED_ROWS = 64
# A chunk large enough to tell a fixed cost from one per token, small enough for a slow machine.
WARM_UP_TOKENS = 64


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
        self.wake: Callable[[], None] = lambda: None  # from any thread: there is work again
        # Gives the pool as many pages as a single sequence needs, up to ``held.most_pages``.
        self.make_room: Callable[[int], None] = lambda pages: None
        self.model = model
        self.kv = kv
        self.experts = experts
        self.runner = runner
        self.kernels = kernels  # what computes, for people
        self.limits = limits
        self.held = Holdings(kv, limits.max_running, clock, host)
        self.pages, self.tree = self.held.pages, self.held.tree
        self.roster = Roster(self.held)
        faults = Faults(fault, kv.k[0].device)
        self.steps = Steps(experts, runner, self.held, self.roster, faults, clock)
        self._beside = StepsBeside(self.steps, self.look, self._deliver)
        self._early: list[Output] = []  # not delivered yet
        self._ahead: Launched | None = None  # launched before the step before it was read
        self._close = close

    # ---- between steps

    def add(self, request: EngineRequest) -> None:
        self.roster.add(request)

    def end(self, request_id: str, finish: Finish = Finish.CANCELLED) -> bool:
        """See ``Roster.end``."""
        return self.roster.end(request_id, finish)

    def has_work(self) -> bool:
        waits = self.roster.running or self.roster.ready() or self._early
        return bool(waits or self.held.restoring.has_arrived)

    def keep_on_disk(self, store: DiskStore) -> None:
        """From now on; what it holds is found, what ends is written."""
        store.wake = self._woken
        self.held.keep_on_disk(store)

    def _woken(self) -> None:
        self.wake()  # whatever that is by then

    def in_prefill(self, request_id: str) -> bool:
        return self._beside.is_in_pass(request_id)

    def settle(self) -> list[Output]:
        """Finish what was launched ahead: nothing is in flight afterwards."""
        step, self._ahead = self._ahead, None
        return self._early_and(self.steps.complete(step, self.steps.clock()) if step else [])

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
        faults = self.steps.faults
        asked, faults.asked = faults.asked, NO_FAULT
        self.add(EngineRequest("warm-up", (0,) * tokens, 2, Sampling(temperature=0.0)))
        while self.has_work():
            for output in self.step():
                if output.error:
                    raise output.error
        self.held.forget_all()
        self.roster.totals, self.steps.meter = Totals(), Meter(self.steps.clock)
        self.held.pages_evicted = 0
        faults.asked = asked

    # ---- a step

    def step(self) -> list[Output]:
        """Run one step; returns what it brought for each request.

        Raises whatever ``beat`` raises at a layer border: nothing is committed then.
        """
        began_s = self.steps.clock()
        self.held.restoring.take()
        if not self.roster.running and not self.roster.ready():
            return self._early_and([])
        try:
            step = self._ahead or self._launch()
        except torch.OutOfMemoryError as error:
            return self._early_and(self._give_up(error))
        self._ahead = None
        if any(self.roster.is_running(answering) for answering, _ in step.runs):
            self._ahead = self._launch_ahead(step)
        return self._early_and(self.steps.complete(step, began_s))

    def _give_up(self, error: torch.OutOfMemoryError) -> list[Output]:
        """There was no memory for a step: end the prompts in it, or all rows if it had none."""
        torch.cuda.empty_cache()
        running = list(self.roster.running.values())
        rows = [a for a in running if a.sequence.pending > 1]
        log.error("step.out_of_memory", prompts=len(rows), rows=len(running), cause=str(error))
        failed = OutOfMemory(
            f"the GPU had no memory for a step: {error}",
            hint="retry; if it comes again, start ftd with a smaller --vram or --prefill-chunk",
            retry_after_s=5,
        )
        return [self.roster.fail(a, failed) for a in rows or running]

    def _hold(self, outputs: list[Output]) -> None:
        self._early += outputs

    def _deliver(self, outputs: list[Output]) -> None:
        self.deliver(outputs)  # whatever that is by then

    def _early_and(self, outputs: list[Output]) -> list[Output]:
        early, self._early = self._early, []
        return early + outputs

    def _launch(self) -> Launched:
        needed = self.roster.longest_tokens() // self.kv.page_tokens + 1
        if self.pages.num_pages < needed <= self.held.most_pages:
            self.make_room(needed)
        plan = self._plan()
        self._carry_out(plan)
        runs = self._runs(plan)
        assert runs, "requests wait, but the plan runs nothing"
        if not plan.prompt_tokens:
            self._beside.none()
            return self.steps.run(runs, Borders(self.experts, self.look))
        self._beside.pass_begins([a.key for a, _ in runs])
        try:
            step = self.steps.run(runs, Borders(self.experts, self.look, self._beside))
        finally:
            self._beside.pass_ended()
        prompt_tokens = sum(tokens for _, tokens in runs)
        return replace(step, prompt_tokens=prompt_tokens, paused_s=self._beside.paused_s)

    def _launch_ahead(self, step: Launched) -> Launched | None:
        """Launch what surely comes next, the same rows once more, before their tokens are read."""
        if step.prompt_tokens or self._has_room_for_more():
            return None
        if len(step.runs) != len(self.roster.running):
            return None
        return self.steps.follow(step)

    def _has_room_for_more(self) -> bool:
        """The next plan may admit somebody."""
        return len(self.roster.running) < self.limits.max_running and bool(self.roster.ready())

    def look(self) -> None:
        """Called at each layer border of a step that is not captured."""
        self.beat()  # whatever that is by then

    # ---- planning

    def _plan(self) -> StepPlan:
        running = [self._view(a.sequence) for a in self.roster.running.values()]
        waiting = [a.sequence.view(0) for a in self.roster.ready()]
        line = next_in_line(waiting, running, self.limits)
        line = [key for key in line if not self._brings(self.roster.waiting[key])]
        return plan_step(
            running,
            [self._view_after_reuse(self.roster.waiting[key]) for key in line],
            free_pages=self.pages.free,
            idle_pages=self.pages.idle,
            limits=self.limits,
        )

    def _brings(self, answering: Answering) -> bool:
        """Bring what a request can begin with from host memory; true: it waits for that."""
        others = bool(self.roster.running)
        return self.held.bring(answering.sequence, answering.reusable, others)

    def _view(self, sequence: Sequence) -> SequenceView:
        return sequence.view(self.pages.num_exclusive(sequence.pages))

    def _view_after_reuse(self, answering: Answering) -> SequenceView:
        known = self.held.known(answering.sequence.ids, answering.reusable)
        return answering.sequence.view_after(*known.reuse)

    def _carry_out(self, plan: StepPlan) -> None:
        for key in plan.preempt:
            self.roster.preempt(key)
        admitted = self.roster.admit(plan.admit)
        for key in plan.passed_over:
            self.roster.running[key].sequence.passed_over += 1
        ended = self.held.begin(
            [(a.sequence, a.reusable) for a in admitted],
            plan.new_pages,
            {run.key for run in plan.runs},
        )
        for answering in admitted:
            sequence = answering.sequence
            if sequence.reused is None:  # or it was preempted, and comes back
                answering.begins(ended[answering.key], self.held.resumed(sequence))
                self.roster.totals_of(answering).reused_tokens += sequence.computed

    def _runs(self, plan: StepPlan) -> list[tuple[Answering, int]]:
        """What the plan runs, and how many tokens of it."""
        pairs = [(self.roster.running[run.key], run.tokens) for run in plan.runs]
        return [(a, min(tokens, SCORED_ROWS) if a.scoring else tokens) for a, tokens in pairs]

    # ---- what others see

    def drop_anchors(self, session: str | None) -> int:
        """Forget what ``session`` alone has used, or all that nobody uses; returns pages freed."""
        return self.held.drop_anchors(session)

    def anchor_infos(self, session: str | None = None) -> tuple[AnchorInfo, ...]:
        """Anchors of one session, or all: those in memory, then those in lower tiers alone."""
        return self.held.anchor_infos(session, self.steps.rates.token_s)

    def status(self) -> EngineStatus:
        now_s = self.steps.clock()
        profiling, roster = self.steps.profiling, self.roster
        return figures.status(
            self.pages,
            self.held.pages_evicted,
            self.held.recurrence,
            self.experts.counters(),
            roster.totals,
            self.steps.meter,
            [
                *(figures.running(a.sequence, now_s) for a in roster.running.values()),
                *(figures.waiting(a.sequence, now_s) for a in roster.waiting.values()),
            ],
            self.held.host,
            self.held.anchor_totals(self.steps.rates.token_s),
            profiling.source if profiling else "",
        )
