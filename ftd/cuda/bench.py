"""Measures link, slots and CPU with the kernels of a decode step, on the device that serves.

Layers run in captured graphs, as in a step, so that launches cost what they cost there; which
experts they use is drawn anew for each run. Layers that use none run in turns with them, and their
time is taken off. On the CPU device a captured graph is a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from ftd.experts.cpu_bench import CpuBench, repeat
from ftd.experts.measure import routes
from ftd.experts.profile import Key
from ftd.kernels.formats import ExpertLayout
from ftd.kernels.unsummed import summed
from ftd.units import MiB

from .division import Division

MOST_LAYERS = 16  # of a captured run
RUN_BYTES = 512 * MiB  # that a run reads at most, where experts are large
LEAST_S = 1e-7  # what noise leaves of a time after another was taken off


class CudaBench:
    """``ftd.experts.measure.Bench``; may be used at a safe point, with no step in flight.

    Args:
        division: whose layers are run.
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
        division: Division,
        layout: ExpertLayout,
        host: torch.Tensor,
        device: torch.device,
        act: torch.dtype,
        experts_per_token: int,
        *,
        pinned: bool,
        gpu_name: str = "",
        cpu: CpuBench | None = None,
        resident: Callable[[], np.ndarray] = lambda: np.empty(0, np.int64),
        step: Callable[[int], bool] = lambda rows: False,
        layers: int = 1,
    ) -> None:
        self.key, self.gpu_name, self.expert_bytes = key, gpu_name, layout.payload_bytes
        self.experts_per_token = experts_per_token
        self.prefetch_bytes = cpu.prefetch_bytes if cpu else None
        self.has_link, self.has_cpu = pinned, cpu is not None and division.cpu is not None
        self._division, self._layout = division, layout
        self._host, self._device, self._act = host, device, act
        self._cpu, self._resident = cpu, resident
        self._step, self._layers = step, layers
        self._random = np.random.default_rng(0)
        self._runs: dict[int, _Run] = {}

    @property
    def has_hits(self) -> bool:
        return len(self._resident()) >= self.experts_per_token

    def link_s(self, rows: int, experts: int, seconds: float) -> float:
        return self._layers_s(self._host, rows, experts, seconds)

    def hits_s(self, rows: int, experts: int, seconds: float) -> float:
        assert self.has_hits, "the kernels would read at address 0"
        slots = self._random.permutation(self._resident())
        table = torch.from_numpy(np.resize(slots, tuple(self._host.shape)))
        return self._layers_s(table, rows, experts, seconds)

    def cpu_s(self, rows: int, experts: int, seconds: float) -> float:
        """Until the answer is there, less what the GPU launches anyway."""
        return self._layers_s(self._host, rows, experts, seconds, asks=True)

    def _layers_s(
        self, table: torch.Tensor, rows: int, experts: int, seconds: float, *, asks: bool = False
    ) -> float:
        run = self._run(rows)
        run.use(table, 0 if asks else self._division.parts)
        found: dict[int, list[float]] = {experts: [], 0: []}

        def once() -> None:
            for count, times in found.items():
                times.append(self._launched_s(run, count))

        repeat(once, seconds)
        return max(LEAST_S, median(found[experts]) - median(found[0]))

    def _launched_s(self, run: _Run, experts: int) -> float:
        """Of one layer."""
        watch, service = Stopwatch(self._device), self._division.cpu
        run.draw(self._random, experts)
        if service is not None:
            service.step_begins()
        with watch:
            run.launch()
        took_s = watch.seconds() / run.layers
        if service is not None:
            service.step_ended()
        return took_s

    def beside(self, rows: int, experts: int, seconds: float) -> tuple[float, float]:
        assert self._cpu is not None
        run, cpu = self._run(rows), self._cpu
        run.use(self._host, self._division.parts)
        link: list[tuple[float, float]] = []  # alone, and beside the CPU
        on_cpu: tuple[list[float], list[float]] = ([], [])

        def once() -> None:
            alone_s = self._launched_s(run, experts)
            on_cpu[0].append(cpu.once(rows, experts))
            watch = Stopwatch(self._device)
            run.draw(self._random, experts)
            with watch:
                run.launch()
            times = [cpu.once(rows, experts)]
            while not watch.passed():
                times.append(cpu.once(rows, experts))
            on_cpu[1].extend(times[:-1] or times)  # the link may be done before the last
            link.append((alone_s, watch.seconds() / run.layers))

        repeat(once, seconds)
        alone_s, beside_s = (median(times) for times in zip(*link))
        return alone_s / beside_s, median(on_cpu[0]) / median(on_cpu[1])

    def link_asked_s(self, rows: int, seconds: float) -> float | None:
        """One expert, of which the CPU has so little that the link is the later of both."""
        parts = self._division.parts
        if parts == 1:
            return None
        run = self._run(rows)
        found: list[tuple[float, float, float]] = []

        def once() -> None:
            run.use(self._host, parts - 1)
            shared_s = self._launched_s(run, 1)
            run.use(self._host, parts)
            found.append((shared_s, self._launched_s(run, 1), self._launched_s(run, 0)))

        repeat(once, seconds)
        shared_s, alone_s, nothing_s = (median(times) for times in zip(*found))
        share = 1 - self._layout.part_rows / self._layout.inner
        return max(0.0, shared_s - nothing_s - share * (alone_s - nothing_s))

    def handshake_s(self, seconds: float) -> float | None:
        if self._cpu is None:
            return None
        asked_s = self.cpu_s(1, 1, seconds / 2)
        return max(0.0, asked_s - self._cpu.cpu_s(1, 1, seconds / 2))

    def cpu_row_s(self, seconds: float) -> float:
        assert self._cpu is not None
        return self._cpu.cpu_row_s(seconds)

    def read_bytes_per_s(self, seconds: float) -> float:
        return self._cpu.read_bytes_per_s(seconds) if self._cpu else 0.0

    def fixed_s(self, rows: int, seconds: float) -> float | None:
        watch = Stopwatch(self._device)
        self._take_device()
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

    def _take_device(self) -> None:
        """For the calling thread: events and launches go where it stands."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _run(self, rows: int) -> _Run:
        self._take_device()
        run = self._runs.get(rows)
        if run is None:
            read = self.experts_per_token * self.expert_bytes
            layers = max(1, min(MOST_LAYERS, RUN_BYTES // read))
            which = self._random.integers(self._host.shape[0], size=layers).tolist()
            x = torch.full((rows, self._layout.hidden), 0.5, dtype=self._act, device=self._device)
            run = _Run(self._division, which, x, self.experts_per_token)
            pool = next((other.memory for other in self._runs.values()), None)
            run.capture(pool)
            self._runs[rows] = run
        return run


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


class _Run:
    """Layers that run one after the other as one graph.

    They share the mailbox and its numbers with the steps that serve, and nothing else.

    Args:
        which: layers of the model.
    """

    def __init__(
        self, division: Division, which: Sequence[int], x: torch.Tensor, routes_per_row: int
    ) -> None:
        shared, self._device = division.shared, x.device
        self.layers, self._which, self._x = len(which), which, x
        self._shared = replace(
            shared,
            address=torch.zeros_like(shared.address),
            worth=torch.full_like(shared.worth, -1.0),  # nothing is stored
            fetch_of=torch.zeros_like(shared.fetch_of),
            lent=torch.zeros_like(shared.lent),
            fill=torch.zeros_like(shared.fill),
            both=torch.zeros_like(shared.both),
            report=shared.blank.clone(),
        )
        self._aside = division.aside(self._shared)
        shape = (len(x), routes_per_row)
        self._ids = torch.full((self.layers, *shape), -1, dtype=torch.int32, device=self._device)
        self._weights = torch.ones(shape, device=self._device)
        self._active = torch.ones(len(x), dtype=torch.bool, device=self._device)
        self._log, self._here = torch.empty_like(self._ids[0]), torch.empty_like(self._ids[0])
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def memory(self) -> Any:
        """For further graphs, of which no two run at once."""
        return None if self._graph is None else self._graph.pool()

    def capture(self, memory: Any) -> None:
        """Run once as it is, which compiles what no step has, then capture."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self._work()
        self._graph = graph

    def use(self, table: torch.Tensor, on_link: int) -> None:
        """Experts are at ``table`` [L, E]; of those not in slots the link has so many parts."""
        self._shared.address.copy_(table)
        most = self._shared.fetch_of.shape[-1]
        self._shared.fetch_of.copy_(torch.arange(most) * on_link)

    def draw(self, random: np.random.Generator, experts: int) -> None:
        _, rows, each = self._ids.shape
        of = self._shared.address.shape[1]
        drawn = [routes(random, rows, experts, each, of) for _ in range(self.layers)]
        self._ids.copy_(torch.from_numpy(np.stack(drawn)))

    def launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._work()

    @torch.no_grad()
    def _work(self) -> None:
        for layer, row in enumerate(self._which):
            ids = self._ids[layer]
            self._aside.divide(row, self._x, ids, self._active, self._log, self._here)
            summed(self._aside.finish(row, self._x, self._weights, self._log, self._here))
