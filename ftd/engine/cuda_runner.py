"""Steps on the GPU: decode and short prompts as captured graphs, others operation by operation.

Tokens are drawn on the device, so that the next step can be launched before they are read: one wait
a step, for them. Where a row obeys a grammar its next mask depends on the token before; then only
the forward pass is launched ahead, and the draws once that token is known.

More sequences than the largest graph holds go in waves, each a launch of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from ftd.cuda.captured import CapturedExperts
from ftd.cuda.experts import CudaExperts
from ftd.cuda.graphs import BATCHES, DecodeGraph, DecodeRow, batch_for
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.precompile import compiling, mark_of
from ftd.cuda.residency import Launch
from ftd.cuda.sampling import MOST_ROWS, RowSampler, SamplerMemory, mark_of_draws
from ftd.cuda.tables import Fetched
from ftd.engine.api import Sampling
from ftd.engine.batch import Span, pack
from ftd.engine.device_draws import RowDraws
from ftd.engine.recurrence import StateMoves
from ftd.engine.runner import Drawn, StepResult, drawing, ends_of
from ftd.engine.sampling import SamplingState
from ftd.kernels.cpu.topology import usable_cores
from ftd.model.architecture import Experts, Model
from ftd.model.step import StepInput

log = structlog.get_logger(__name__)

# Of a prompt that goes token by token through captured steps where no expert is missed: four steps
# of eight, some 10 ms, where launching a pass one operation after the other takes 30.
RESIDENT_TOKENS = 4 * BATCHES[-1]
# The same where the CPU computes most of the misses: three steps of 9 ms, where a pass takes 45.
DIVIDED_TOKENS = 3 * BATCHES[-1]
BLOCK_ROWS = 16  # of a prompt: what one tensor core tile holds


class CudaRunner:
    """
    Args:
        experts: of which captured steps read the address table.
        most_pages: of one sequence: what a page table holds.
        chunk_tokens: of the longest prompt chunk.
        capture: False where kernels cannot read the host pool: every step is then eager.
        variants: of captured steps. True: misses are divided; False: every expert is read where it
            is, which suits when all are resident.
        most_rows: of a step that decodes.
    """

    def __init__(
        self,
        model: Model,
        kv: CudaKvCache,
        experts: CudaExperts,
        device: torch.device,
        most_pages: int,
        chunk_tokens: int,
        *,
        capture: bool = True,
        variants: Sequence[bool] = (True, False),
        most_rows: int = BATCHES[-1],
    ) -> None:
        self._model, self._kv, self._experts, self._device = model, kv, experts, device
        self._most_pages, self._chunk_tokens = most_pages, chunk_tokens
        self._capture, self._variants = capture, tuple(variants)
        self.memory = SamplerMemory(model.spec.vocab, device)
        self._samplers: dict[int, RowSampler] = {}  # of steps that are not captured, by rows
        # what each wave of a step has drawn, for a step that follows
        shape = (len(waves_of(most_rows)), BATCHES[-1])
        self._carried = torch.zeros(shape, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by rows, and whether divided

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture a graph for each batch size; compiles what is not in the cache on disk."""
        if not self._capture:
            return
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        pool = None
        kinds = [(batch, divided) for divided in self._variants for batch in reversed(BATCHES)]
        marks = self._marks() if self._device.type == "cuda" else ()
        if not all(mark.exists() for mark in marks):
            try:
                with compiling(usable_cores()):
                    self.rehearse(kinds)
            except Exception:  # the warm-up will show whether it matters
                log.warning("kernels.not_rehearsed", cost="a slower start", exc_info=True)
        for done, kind in enumerate(kinds):  # the largest first: its memory serves all
            progress(done, len(kinds))
            graph = self._graphs[kind] = self._new_graph(*kind)
            if stream is not None:
                pool = graph.capture(pool, stream)
        progress(len(kinds), len(kinds))
        self._warm_prompts()
        for mark in marks:
            with suppress(OSError):  # of a cache that cannot be written: it is compiled each time
                mark.touch()

    def _marks(self) -> tuple[Path, ...]:
        sizes = self._most_pages, self._chunk_tokens, self._kv.page_tokens, self._variants
        kind, dtype = torch.cuda.get_device_capability(self._device), self._kv.k[0].dtype
        steps = mark_of(self._model.spec, self._experts.layout, dtype, kind, sizes)
        return steps, mark_of_draws(self.memory.vocab, self._device)

    def rehearse(self, kinds: Sequence[tuple[int, bool]]) -> None:
        """Go through the motions of ``warm_up``, where launches only compile."""
        whole = self._model
        self._model = whole.of_each_kind()
        try:
            self._warm_prompts()  # first: their kernels take longest to compile
            for kind in kinds:
                self._new_graph(*kind).rehearse()
        finally:
            self._model = whole
            self._samplers.clear()

    def launch_empty(self, batch: int) -> bool:
        """Queue a captured step of which no row is in use: it computes all but the experts.

        False: there is none. No other step may be in flight.
        """
        graph = self._graphs.get((batch, True)) or self._graphs.get((batch, False))
        if graph is not None:
            graph.launch([])
            graph.sample([])
        return graph is not None

    def close(self) -> None:
        """Let the graphs and their memory go; nothing may run any more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def _warm_prompts(self) -> None:
        """Run prompts of each size for which kernels are compiled; nobody's keys are touched."""
        self._experts.warm_up()
        page_tokens = self._kv.page_tokens
        greedy = SamplingState(Sampling(temperature=0.0), ())
        for tokens in warm_up_sizes(min(self._chunk_tokens, self._most_pages * page_tokens)):
            pages = [self._kv.scratch_page] * -(-tokens // page_tokens)
            moves = None
            if self._kv.windows:
                moves = StateMoves(None, (), (), [0] * len(pages))
            elif self._kv.states:  # of which nobody has one yet
                moves = StateMoves(None, ((tokens, 0),), (0.0,))
            span = Span((0,) * tokens, 0, pages, 1, moves)
            self._eager([span], [greedy], self._experts).draws()
            self._experts.abandon_step()

    def _new_graph(self, batch: int, divided: bool) -> DecodeGraph:
        experts = CapturedExperts(self._experts, batch, divided=divided)

        def forward(step: StepInput) -> torch.Tensor:
            assert step.active is not None
            experts.active = step.active
            return self._model.forward(step, self._kv, experts)

        return DecodeGraph(
            batch,
            self._most_pages,
            self._kv.page_tokens,
            self._kv.page_stride,
            self._kv.scratch_page,
            self._device,
            forward,
            self.memory,
            experts.left,
            in_flight=2 * len(self._carried),
            windowed=self._kv.windows is not None,
        )

    def run(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> StepResult:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the engine thread's; costs nothing if it is
        decode = all(span.count == 1 and s is not None for span, s in zip(spans, sampling))
        if decode and self._graphs and len(spans) <= self._carried.numel():
            return self._replay(spans, sampling)
        if self._graphs and self._is_short(spans, sampling):
            return self._replay_prompts(spans, sampling)
        return self._eager(spans, sampling, experts)

    def _is_short(self, spans: Sequence[Span], sampling: Sequence[SamplingState | None]) -> bool:
        """Captured steps, whose rows are tokens of a few prompts, cost less than an eager pass.

        They read a missed expert once for each eight tokens, so several pay only where none is
        missed, or the CPU computes beside the link. A recurrent state goes from token to token, and
        captured rows take theirs at once.
        """
        if self._kv.states is not None and self._kv.windows is None:
            return False
        if any(span.logits != int(s is not None) for span, s in zip(spans, sampling)):
            return False  # a prompt that is judged
        tokens, most = sum(span.count for span in spans), BATCHES[-1]
        if len(spans) == 1 and not self._experts.recording:
            if self._experts.all_resident:
                most = RESIDENT_TOKENS
            elif self._experts.division.cpu is not None:
                most = DIVIDED_TOKENS
        return tokens <= most

    def _replay_prompts(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None]
    ) -> DecodeResult:
        """Each token a row of its own: all write their keys before any of them looks back."""
        rows = [row for span in spans for row in one_by_one(span)]
        states: list[SamplingState | None] = [None] * len(rows)
        for end, state in zip(itertools.accumulate(span.count for span in spans), sampling):
            states[end - 1] = state
        *before, last = waves_of(len(rows))
        for wave in before:
            self._replay(rows[wave], states[wave]).draws()  # none, but what it used is taken in
        return self._replay(rows[last], states[last])

    def _replay(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None]
    ) -> DecodeResult:
        states, positions = list(sampling), [span.begin + 1 for span in spans]
        divided = not self._experts.all_resident
        if divided not in self._variants:
            divided = not divided
        cuts = waves_of(len(spans))
        waves = []
        for number, rows in enumerate(cuts):
            draws = RowDraws(states[rows], positions[rows])
            batch = batch_for(len(draws.states))
            assert batch is not None, rows
            graph, launch = self._graphs[batch, divided], self._experts.launching(divided=divided)
            graph.launch([_row(span) for span in spans[rows]])
            carried = self._carried[number] if len(cuts) > 1 else None
            waves.append(Wave(graph, draws, launch, carried))
            waves[-1].place_and_sample(self.memory)  # before another wave runs in its graph
        return DecodeResult(self, waves)

    def can_follow(self, result: StepResult) -> bool:
        return isinstance(result, DecodeResult) and result.can_be_followed

    def follow(self, result: StepResult, spans: Sequence[Span | None]) -> StepResult:
        assert isinstance(result, DecodeResult)
        result.sample()
        waves, rest = [], list(spans)
        for before in result.waves:
            was = before.draws.states
            ours, rest = rest[: len(was)], rest[len(was) :]
            states = [state if span else None for state, span in zip(was, ours)]
            draws = RowDraws(states, [span.begin + 1 if span else 0 for span in ours])
            graph = before.graph
            launch = self._experts.launching(divided=before.launch.divided)
            if before.carried is not None:
                graph.ids.copy_(before.carried[: graph.batch])
            graph.launch([_row(span) if span else None for span in ours], following=True)
            waves.append(Wave(graph, draws, launch, before.carried))
            if not draws.constrained:
                waves[-1].sample(self.memory)
        assert not rest, (len(spans), [len(wave.draws.states) for wave in waves])
        return DecodeResult(self, waves)

    def take(self, wave: Wave) -> Drawn:
        """Wait for a wave's tokens, and take in what it has used."""
        assert wave.fetched is not None
        block, log, *report = wave.fetched.get()
        self._experts.routed(wave.launch, log.numpy(), report[0].numpy() if report else None)
        return wave.draws.take(block, self.memory.vocab)

    @torch.no_grad()
    def _eager(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> EagerResult:
        packed = padded(pack(spans, self._kv.page_tokens, self._kv.page_stride), self._most_pages)
        step = packed.to(self._device)
        logits = self._model.forward(step, self._kv, experts)
        states, positions = drawing(spans, sampling)
        drawn = []
        ends = ends_of(spans, sampling)
        for at in range(0, len(ends), MOST_ROWS):
            part = slice(at, at + MOST_ROWS)
            draws = RowDraws(states[part], positions[part])
            drawn.append((draws, self._draw(logits[ends[part]], draws)))
        return EagerResult(drawn, logits)

    def _draw(self, logits: torch.Tensor, draws: RowDraws) -> torch.Tensor:
        """``Drawn.block`` of a launch that is not captured, in memory of its own."""
        rows = len(draws.states)
        sampler = self._samplers.get(rows)
        if sampler is None:
            sampler = self._samplers[rows] = RowSampler(rows, self.memory)
        self.memory.place(draws.keeping())
        sampler.launch(logits, draws.rows(self.memory))
        return sampler.drawn.block.clone()


def one_by_one(span: Span) -> list[Span]:
    """Its tokens; what is drawn after the last one is not said."""
    moves = replace(span.states, targets=(), kept=()) if span.states else None  # a window's pages
    return [
        Span((token,), span.begin + i, span.pages, 0, moves) for i, token in enumerate(span.ids)
    ]


def waves_of(rows: int) -> list[slice]:
    """Rows of a step as the largest graph takes them; each gets its token in every step."""
    most = BATCHES[-1]
    return [slice(at, min(at + most, rows)) for at in range(0, rows, most)]


def padded(step: StepInput, most_pages: int) -> StepInput:
    """Repeat the last row up to a whole block of rows, and widen the page table to its full width.

    Kernels are compiled for few shapes then. A repeated row chooses the same experts and writes the
    same keys to the same place, so it costs and changes nothing. For recurrent layers it lies
    behind every sequence's rows: they repeat the last one's result.
    """
    rows = len(step.ids)
    row = torch.arange(-(-rows // BLOCK_ROWS) * BLOCK_ROWS).clamp(max=rows - 1)

    def wide(table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(table, (0, most_pages - table.shape[1]))

    return StepInput(
        step.ids[row],
        step.position[row],
        step.sequence[row],
        step.place[row],
        wide(step.page_table),
        step.logit_rows,
        step.states,
        window_place=None if step.window_place is None else step.window_place[row],
        window_table=None if step.window_table is None else wide(step.window_table),
    )


def warm_up_sizes(most_tokens: int) -> list[int]:
    """Prompt sizes that between them use every variant of the kernels: powers of two, and the most.

    Their tiles, and over how many programs attention is split, change at these.
    """
    sizes = itertools.takewhile(lambda n: n < most_tokens, (BLOCK_ROWS << i for i in range(20)))
    return [*sizes, most_tokens]


def _row(span: Span) -> DecodeRow:
    row = DecodeRow(span.ids[0], span.begin, span.pages, window=span.window)
    if span.states is None or span.window:
        return row
    source = -1 if span.states.source is None else span.states.source
    ((_, target),) = span.states.targets
    return replace(row, source=source, target=target)


@dataclass(slots=True)
class Wave:
    """Rows of a step that one graph computes.

    Attributes:
        carried: where its tokens are kept for a step that follows, while other waves use its graph.
        fetched: None: it waits for the tokens before, on which a row's mask depends.
    """

    graph: DecodeGraph
    draws: RowDraws
    launch: Launch
    carried: torch.Tensor | None
    fetched: Fetched | None = None

    def place_and_sample(self, memory: SamplerMemory) -> None:
        """All tokens before are known."""
        memory.place(self.draws.keeping())
        self.sample(memory)

    def sample(self, memory: SamplerMemory) -> None:
        self.fetched = self.graph.sample(self.draws.rows(memory))
        if self.carried is not None:
            self.carried[: self.graph.batch].copy_(self.graph.ids)


class DecodeResult:
    """A captured step, in its waves."""

    def __init__(self, runner: CudaRunner, waves: Sequence[Wave]) -> None:
        self._runner, self.waves = runner, waves

    @property
    def can_be_followed(self) -> bool:
        """No row has ended, and what the next draws need is or will be on the device."""
        if len(self.waves) > 1 and any(wave.draws.constrained for wave in self.waves):
            return False  # draws cannot wait for masks: the next wave takes the graph's logits
        if any(state is None for wave in self.waves for state in wave.draws.states):
            return False
        keeping = [state for wave in self.waves for state in wave.draws.keeping()]
        return all(self._runner.memory.slot_of(state) is not None for state in keeping)

    def sample(self) -> None:
        """Launch the draws that had to wait for the tokens before, which are known now."""
        for wave in self.waves:
            if wave.fetched is None:
                wave.place_and_sample(self._runner.memory)

    def logits(self) -> torch.Tensor:
        """None: rows that decode are the last of their sequences, and judge no prompt."""
        return torch.empty(0, self._runner.memory.vocab)

    def draws(self) -> Drawn:
        self.sample()
        return [draw for wave in self.waves for draw in self._runner.take(wave)]


class EagerResult:
    """
    Args:
        drawn: launches of draws, and the ``Drawn.block`` of each on the device.
    """

    def __init__(
        self, drawn: Sequence[tuple[RowDraws, torch.Tensor]], logits: torch.Tensor
    ) -> None:
        self._drawn, self._logits = drawn, logits

    def logits(self) -> torch.Tensor:
        return self._logits.cpu()

    def draws(self) -> Drawn:
        vocab = self._logits.shape[1]
        return [d for draws, block in self._drawn for d in draws.take(block.cpu(), vocab)]
