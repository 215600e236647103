"""Measures link, slots and CPU with the kernels of a decode step, on the device that serves.

Layers run in captured graphs, as in a step, so that launches cost what they cost there; which
experts they read is drawn anew for each run. On the CPU device a captured graph is a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from ftd.experts.cpu_bench import CpuBench, repeat
from ftd.experts.measure import routes
from ftd.experts.profile import Key
from ftd.kernels.activation import Activation
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.ops import Ops
from ftd.units import MiB

from .division import Division

MOST_LAYERS = 16  # of a captured run
RUN_BYTES = 512 * MiB  # that a run reads at most, where experts are large
LEAST_HANDSHAKE_S = 1e-6  # what noise leaves of it


class CudaBench:
    """``ftd.experts.measure.Bench``; may be used at a safe point, with no step in flight.

    Args:
        cpu: None: the CPU computes no experts.
        host: [L, E] int64, records in host memory.
        pinned: kernels can read them.
        resident: addresses of slots that hold an expert, as of now.
        step: queues a captured step of so many rows, none of them in use; False: there is none.
        layers: of such a step.
    """

    def __init__(
        self,
        key: Key,
        ops: Ops,
        layout: ExpertLayout,
        activation: Activation,
        host: torch.Tensor,
        device: torch.device,
        act: torch.dtype,
        experts_per_token: int,
        *,
        pinned: bool,
        cpu: CpuBench | None = None,
        division: Division | None = None,
        resident: Callable[[], np.ndarray] = lambda: np.empty(0, np.int64),
        step: Callable[[int], bool] = lambda rows: False,
        layers: int = 1,
    ) -> None:
        self.key, self.expert_bytes = key, layout.payload_bytes
        self.experts_per_token = experts_per_token
        self.has_link, self.has_cpu = pinned, cpu is not None
        self._ops, self._layout, self._activation = ops, layout, activation
        self._host, self._device, self._act = host, device, act
        self._cpu, self._division, self._resident = cpu, division, resident
        self._step, self._layers = step, layers
        self._random = np.random.default_rng(0)
        self._runs: dict[int, _Run] = {}
        self._asking: _Asking | None = None

    @property
    def has_hits(self) -> bool:
        return len(self._resident()) >= self.experts_per_token

    def link_s(self, rows: int, experts: int, seconds: float) -> float:
        return self._read(self._host.flatten(), rows, experts, seconds)

    def hits_s(self, rows: int, experts: int, seconds: float) -> float:
        return self._read(torch.from_numpy(self._resident()), rows, experts, seconds)

    def _read(self, address: torch.Tensor, rows: int, experts: int, seconds: float) -> float:
        run, watch = self._run(rows), Stopwatch(self._device)
        found: list[float] = []

        def once() -> None:
            self._draw(run, address, experts)
            with watch:
                run.launch()
            found.append(watch.seconds() / run.layers)

        repeat(once, seconds)
        return median(found)

    def cpu_s(self, rows: int, experts: int, seconds: float) -> float:
        assert self._cpu is not None
        return self._cpu.cpu_s(rows, experts, seconds)

    def both_s(self, rows: int, experts: int, seconds: float) -> tuple[float, float]:
        assert self._cpu is not None
        run, watch = self._run(rows), Stopwatch(self._device)
        on_cpu: list[float] = []
        on_link: list[float] = []

        def once() -> None:
            self._draw(run, self._host.flatten(), experts)
            with watch:
                run.launch()
            began = len(on_cpu)
            while len(on_cpu) == began or not watch.passed():
                on_cpu.append(cpu.once(rows, experts))
            if len(on_cpu) > began + 1:
                on_cpu.pop()  # the link may have been done before it was
            on_link.append(watch.seconds() / run.layers)

        cpu = self._cpu
        repeat(once, seconds)
        return median(on_link), median(on_cpu)

    def handshake_s(self, seconds: float) -> float | None:
        division = self._division
        if division is None or division.cpu is None or self._cpu is None:
            return None
        if self._asking is None:
            self._asking = _Asking(division, self._host, self._random, self._shape(1), self._act)
        asking, watch = self._asking, Stopwatch(self._device)
        compute, service = self._cpu.compute, division.cpu
        asked: list[float] = []
        silent: list[float] = []
        alone: list[float] = []

        def once() -> None:
            for asks, found in ((True, asked), (False, silent)):
                ids = asking.draw(asks)
                service.step_begins()
                with watch:
                    asking.launch()
                found.append(watch.seconds() / asking.layers)
                service.step_ended()
            alone.extend(map(compute, ids))

        repeat(once, seconds)
        return max(LEAST_HANDSHAKE_S, median(asked) - median(silent) - median(alone))

    def read_bytes_per_s(self, seconds: float) -> float:
        return self._cpu.read_bytes_per_s(seconds) if self._cpu else 0.0

    def fixed_s(self, rows: int, seconds: float) -> float | None:
        watch = Stopwatch(self._device)
        if not self._step(rows):
            return None
        found: list[float] = []

        def once() -> None:
            with watch:
                self._step(rows)
            found.append(watch.seconds() / self._layers)

        repeat(once, seconds)
        return median(found)

    def close(self) -> None:
        """Let the graphs go; nothing of them runs any more."""
        self._runs.clear()
        self._asking = None

    def _run(self, rows: int) -> _Run:
        run = self._runs.get(rows)
        if run is None:
            run = self._runs[rows] = _Run(self._shape(rows), self._host.numel(), self._act)
            run.prepare(self._moe)
        return run

    def _shape(self, rows: int) -> _Shape:
        read = self.experts_per_token * self.expert_bytes
        layers = max(1, min(MOST_LAYERS, RUN_BYTES // read))
        return _Shape(layers, rows, self.experts_per_token, self._layout.hidden, self._device)

    def _moe(self, run: _Run, layer: int) -> None:
        self._ops.moe(
            run.x, run.ids[layer], run.weights, run.address, self._layout, self._activation
        )

    def _draw(self, run: _Run, address: torch.Tensor, experts: int) -> None:
        drawn = [
            routes(self._random, run.rows, experts, self.experts_per_token, len(address))
            for _ in range(run.layers)
        ]
        run.ids.copy_(torch.from_numpy(np.stack(drawn)))
        run.address[: len(address)].copy_(address)


class Stopwatch:
    """Time on the device between entering and leaving; on the CPU device, time."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._times = [0.0, 0.0]

    def __enter__(self) -> None:
        self._mark(0)

    def __exit__(self, *_: object) -> None:
        self._mark(1)

    def _mark(self, end: int) -> None:
        if self._events is not None:
            self._events[end].record()
        else:
            self._times[end] = time.perf_counter()

    def passed(self) -> bool:
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """Waits for the end."""
        if self._events is None:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


class _Shape:
    """Layers of a run, and the tensors that they read."""

    def __init__(
        self, layers: int, rows: int, routes_per_row: int, hidden: int, device: torch.device
    ) -> None:
        self.layers, self.rows, self.device, self.hidden = layers, rows, device, hidden
        self.ids = torch.full((layers, rows, routes_per_row), -1, dtype=torch.int32, device=device)
        self.weights = torch.ones(rows, routes_per_row, device=device)


class _Captured:
    """Layers that run one after the other as one graph."""

    def __init__(self, shape: _Shape, act: torch.dtype) -> None:
        self.layers, self.rows, self.device = shape.layers, shape.rows, shape.device
        self.ids, self.weights = shape.ids, shape.weights
        self.x = torch.full((shape.rows, shape.hidden), 0.5, dtype=act, device=shape.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._work: Callable[[], None] = lambda: None

    def capture(self, work: Callable[[], None]) -> None:
        """``work`` once as it is, which compiles, then captured."""
        self._work = work
        if self.device.type != "cuda":
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize(self.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            work()

    @torch.no_grad()
    def launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._work()


class _Run(_Captured):
    """Layers that read experts through one table."""

    def __init__(self, shape: _Shape, entries: int, act: torch.dtype) -> None:
        super().__init__(shape, act)
        self.address = torch.zeros(entries, dtype=torch.int64, device=shape.device)

    def prepare(self, moe: Callable[[_Run, int], None]) -> None:
        def work() -> None:
            for layer in range(self.layers):
                moe(self, layer)

        self.capture(work)


class _Asking(_Captured):
    """Layers of one row that ask the CPU for one expert, or for none.

    They share the mailbox and its numbers with the steps that serve, and nothing else.
    """

    def __init__(
        self,
        division: Division,
        host: torch.Tensor,
        random: np.random.Generator,
        shape: _Shape,
        act: torch.dtype,
    ) -> None:
        super().__init__(shape, act)
        shared, device = division.shared, shape.device
        self._experts, self._random = host.shape, random
        self._aside = division.aside(
            replace(
                shared,
                address=host.to(device),
                worth=torch.full(host.shape, -1.0, device=device),
                fetch_of=torch.zeros_like(shared.fetch_of),
                lent=torch.zeros_like(shared.lent),
                fill=torch.zeros_like(shared.fill),
                report=shared.blank.clone(),
            )
        )
        self._rows = random.integers(host.shape[0], size=shape.layers).tolist()
        self._active = torch.zeros(1, dtype=torch.bool, device=device)
        self._log, self._here = torch.empty_like(shape.ids[0]), torch.empty_like(shape.ids[0])
        self.draw(False)

        def work() -> None:
            for layer, row in enumerate(self._rows):
                self._aside.forward(
                    row, self.x, self.ids[layer], self.weights, self._active, self._log, self._here
                )

        self.capture(work)

    def draw(self, asks: bool) -> torch.Tensor:
        """[layers, 1, K] int32 on the CPU: one expert in each layer, in all of its routes."""
        experts = self._random.integers(self._experts[1], size=(self.layers, 1, 1))
        ids = torch.from_numpy(experts).int().expand(self.ids.shape).contiguous()
        self.ids.copy_(ids)
        self._active.fill_(asks)
        return ids
