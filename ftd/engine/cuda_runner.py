"""Steps on the GPU: decode as captured graphs, everything else launched operation by operation.

A row that asks for no more than a temperature is drawn from on the device, inside the graph; logits
of the others are copied and drawn from as on the CPU device. One wait a step, for the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ftd.cuda.captured import CapturedExperts
from ftd.cuda.graphs import BATCHES, DecodeGraph, DecodeRow, batch_for
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.residency import CudaExperts, Launch
from ftd.cuda.sampling import draw
from ftd.cuda.tables import Fetched
from ftd.engine.api import Sampling
from ftd.engine.batch import Span, pack
from ftd.engine.philox import uniform
from ftd.engine.recurrence import StateMoves
from ftd.engine.runner import Drawn, StepResult, drawing, ends_of
from ftd.engine.sampling import Draw, Sampler, SamplingState
from ftd.errors import EngineFailed
from ftd.model.architecture import Experts, Model
from ftd.model.step import StepInput

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
    ) -> None:
        self._model, self._kv, self._experts, self._device = model, kv, experts, device
        self._most_pages, self._chunk_tokens = most_pages, chunk_tokens
        self._capture, self._variants = capture, tuple(variants)
        self.sampler = Sampler(model.spec.vocab)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by rows, and whether divided

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture a graph for each batch size; compiles what is not in the cache on disk."""
        if not self._capture:
            return
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        pool = None
        kinds = [(batch, divided) for divided in self._variants for batch in reversed(BATCHES)]
        for done, kind in enumerate(kinds):  # the largest first: its memory serves all
            progress(done, len(kinds))
            graph = self._graphs[kind] = self._new_graph(*kind)
            if stream is not None:
                pool = graph.capture(pool, stream)
        progress(len(kinds), len(kinds))
        self._warm_prompts()

    def launch_empty(self, batch: int) -> bool:
        """Queue a captured step of which no row is in use: it computes all but the experts.

        False: there is none. No other step may be in flight.
        """
        graph = self._graphs.get((batch, True)) or self._graphs.get((batch, False))
        if graph is not None:
            graph.launch([])
        return graph is not None

    def close(self) -> None:
        """Let the graphs and their memory go; nothing may run any more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def _warm_prompts(self) -> None:
        """Run prompts of each size for which kernels are compiled; nobody's keys are touched."""
        page_tokens = self._kv.page_tokens
        greedy = SamplingState(Sampling(temperature=0.0), ())
        for tokens in warm_up_sizes(min(self._chunk_tokens, self._most_pages * page_tokens)):
            pages = [self._kv.scratch_page] * -(-tokens // page_tokens)
            # of the states nobody has one yet
            moves = StateMoves(None, ((tokens, 0),), (0.0,)) if self._kv.states else None
            span = Span((0,) * tokens, 0, pages, 1, moves)
            self._eager([span], [greedy], self._experts).draws()
            self._experts.abandon_step()

    def routed(self, launch: Launch, log: np.ndarray, report: np.ndarray | None) -> None:
        self._experts.routed(launch, log, report)

    def _new_graph(self, batch: int, divided: bool) -> DecodeGraph:
        experts = CapturedExperts(self._experts, batch, divided=divided)

        def forward(step: StepInput, active: torch.Tensor) -> torch.Tensor:
            experts.active = active
            return self._model.forward(step, self._kv, experts)

        return DecodeGraph(
            batch,
            self._most_pages,
            self._kv.page_tokens,
            self._kv.page_stride,
            self._kv.scratch_page,
            self._device,
            forward,
            experts.left,
        )

    def run(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> StepResult:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the engine thread's; costs nothing if it is
        batch = batch_for(len(spans))
        decode = all(span.count == 1 and s is not None for span, s in zip(spans, sampling))
        if decode and batch and self._graphs:
            return self._replay(batch, spans, sampling)
        return self._eager(spans, sampling, experts)

    def _replay(
        self, batch: int, spans: Sequence[Span], sampling: Sequence[SamplingState | None]
    ) -> DecodeResult:
        states, positions = drawing(spans, sampling)
        rows = [_row(span, state) for span, state in zip(spans, states)]
        divided = not self._experts.all_resident
        if divided not in self._variants:
            divided = not divided
        graph, launch = self._graphs[batch, divided], self._experts.launching(divided=divided)
        return DecodeResult(self, graph, states, positions, graph.launch(rows), launch)

    def can_follow(self, result: StepResult) -> bool:
        return isinstance(result, DecodeResult) and result.all_rows_go_on

    def follow(self, result: StepResult, spans: Sequence[Span | None]) -> StepResult:
        assert isinstance(result, DecodeResult) and len(spans) == len(result.states)
        result.followed = True
        states = [s if span else None for s, span in zip(result.states, spans)]
        positions = [span.begin + 1 if span else 0 for span in spans]
        rows = [_row(span, s) if span and s else None for span, s in zip(spans, states)]
        launch = self._experts.launching(divided=result.divided)
        fetched = result.graph.launch(rows, following=True)
        return DecodeResult(self, result.graph, states, positions, fetched, launch)

    @torch.no_grad()
    def _eager(
        self, spans: Sequence[Span], sampling: Sequence[SamplingState | None], experts: Experts
    ) -> EagerResult:
        packed = padded(pack(spans, self._kv.page_tokens, self._kv.page_stride), self._most_pages)
        names = [name for name in StepInput.__slots__ if name != "states"]
        tensors = {name: getattr(packed, name).to(self._device) for name in names}
        step = replace(packed, **tensors)
        logits = self._model.forward(step, self._kv, experts)
        states, positions = drawing(spans, sampling)
        ends = ends_of(spans, sampling)
        drawn = None
        if ends:
            numbers = [_draw_with(state, p) for state, p in zip(states, positions)]
            temperature, u = torch.tensor(numbers, dtype=torch.float64).to(self._device).unbind(1)
            drawn = draw(logits[ends], temperature.float(), u)
        return EagerResult(self.sampler, states, positions, drawn, logits, ends)


def padded(step: StepInput, most_pages: int) -> StepInput:
    """Repeat the last row up to a whole block of rows, and widen the page table to its full width.

    Kernels are compiled for few shapes then. A repeated row chooses the same experts and writes the
    same keys to the same place, so it costs and changes nothing. For recurrent layers it lies
    behind every sequence's rows: they repeat the last one's result.
    """
    rows = len(step.ids)
    row = torch.arange(-(-rows // BLOCK_ROWS) * BLOCK_ROWS).clamp(max=rows - 1)
    table = torch.nn.functional.pad(step.page_table, (0, most_pages - step.page_table.shape[1]))
    return StepInput(
        step.ids[row],
        step.position[row],
        step.sequence[row],
        step.place[row],
        table,
        step.logit_rows,
        step.states,
    )


def warm_up_sizes(most_tokens: int) -> list[int]:
    """Prompt sizes that between them use every variant of the kernels: powers of two, and the most.

    Their tiles, and over how many programs attention is split, change at these.
    """
    sizes = itertools.takewhile(lambda n: n < most_tokens, (BLOCK_ROWS << i for i in range(20)))
    return [*sizes, most_tokens]


def _draw_with(state: SamplingState, position: int) -> tuple[float, float]:
    temperature = state.sampling.temperature
    return temperature, uniform(state.seed, position) if temperature else 0.5


def on_device(state: SamplingState) -> bool:
    """The device's draw is all this row needs."""
    s = state.sampling
    plain = s.top_k == 0 and s.top_p >= 1 and s.min_p == 0
    wanted = s.logprobs is None and not state.changes_logits and (plain or s.temperature == 0)
    return wanted and state.free


def _row(span: Span, state: SamplingState) -> DecodeRow:
    position = span.begin + span.count
    row = DecodeRow(span.ids[0], span.begin, span.pages, *_draw_with(state, position))
    if span.states is None:
        return row
    source = -1 if span.states.source is None else span.states.source
    ((_, target),) = span.states.targets
    return replace(row, source=source, target=target)


class DecodeResult:
    """A captured step.

    Args:
        states: of each row; None: a row that is not in use.
        launch: what the step was given.
    """

    def __init__(
        self,
        runner: CudaRunner,
        graph: DecodeGraph,
        states: Sequence[SamplingState | None],
        positions: Sequence[int],
        fetched: Fetched,
        launch: Launch,
    ) -> None:
        self._runner, self.graph, self.states, self._positions = runner, graph, states, positions
        self._fetched, self._launch = fetched, launch
        self.followed = False  # its logits are being overwritten

    @property
    def divided(self) -> bool:
        return self._launch.divided

    @property
    def all_rows_go_on(self) -> bool:
        """No row has ended, and none needs its logits on the host."""
        return all(state is not None and on_device(state) for state in self.states)

    def logits(self) -> torch.Tensor:
        assert not self.followed
        return self.graph.logits[: len(self.states)].cpu()

    def draws(self) -> Drawn:
        tokens, finite, log, *report = self._fetched.get()
        self._runner.routed(self._launch, log.numpy(), report[0].numpy() if report else None)
        drawn: Drawn = []
        found = zip(self.states, self._positions, tokens.tolist(), finite.tolist())
        for row, (state, position, token, is_finite) in enumerate(found):
            if state is None:
                continue
            if is_finite and on_device(state):
                state.add(token)
                drawn.append(Draw(token))
            elif self.followed:
                drawn.append(EngineFailed(f"the logits at position {position} are not finite"))
            else:
                logits = self.graph.logits[row : row + 1].cpu()
                drawn += self._runner.sampler.sample(logits, [state], [position])
        return drawn


class EagerResult:
    """
    Args:
        drawn: tokens of the rows ``ends`` of ``logits``, and whether each row is finite.
    """

    def __init__(
        self,
        sampler: Sampler,
        states: Sequence[SamplingState],
        positions: Sequence[int],
        drawn: tuple[torch.Tensor, torch.Tensor] | None,
        logits: torch.Tensor,
        ends: Sequence[int],
    ) -> None:
        self._sampler, self._states, self._positions = sampler, states, positions
        self._drawn, self._logits, self._ends = drawn, logits, ends

    def logits(self) -> torch.Tensor:
        return self._logits.cpu()

    def draws(self) -> Drawn:
        if self._drawn is None:
            return []
        tokens, finite = (t.tolist() for t in self._drawn)
        drawn: Drawn = []
        found = zip(self._states, self._positions, tokens, finite, self._ends)
        for state, position, token, is_finite, row in found:
            if is_finite and on_device(state):
                state.add(token)
                drawn.append(Draw(token))
            else:
                logits = self._logits[row : row + 1].cpu()
                drawn += self._sampler.sample(logits, [state], [position])
        return drawn
