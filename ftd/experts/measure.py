"""What is measured of a machine, in which order, and what follows from it. A ``Bench`` does it.

Samples of all kinds take turns, so that noise meets them alike, and medians are kept. A slice is
short: between two of them a running engine serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from ftd.experts.profile import BATCHES, Figures, Key, Line, Profile, fit_line

LEAST_SHARE = 0.01  # of its own rate that a path keeps beside the other


class Bench(Protocol):
    """Runs the kernels that serve, each time on experts drawn anew, for about ``seconds``.

    Times are medians, in seconds for one layer's experts.
    """

    key: Key
    gpu_name: str  # "": the CPU device
    expert_bytes: int
    experts_per_token: int  # at most so many at once
    prefetch_bytes: tuple[int, int] | None  # as the C++ kernels have it now
    has_link: bool  # the GPU can read the host pool
    has_cpu: bool

    @property
    def has_hits(self) -> bool:
        """Enough experts are resident on the GPU."""
        ...

    def link_s(self, rows: int, experts: int, seconds: float) -> float: ...
    def hits_s(self, rows: int, experts: int, seconds: float) -> float: ...
    def cpu_s(self, rows: int, experts: int, seconds: float) -> float:
        """Asking and answering included, where a GPU asks."""
        ...

    def beside(self, rows: int, experts: int, seconds: float) -> tuple[float, float]:
        """The part of its rate that each of link and CPU keeps while both run."""
        ...

    def link_asked_s(self, rows: int, seconds: float) -> float | None:
        """What asking the CPU adds to the link's time; None: experts are not divided."""
        ...

    def handshake_s(self, seconds: float) -> float | None:
        """What asking adds to the CPU's work; None: nobody asks."""
        ...

    def cpu_row_s(self, seconds: float) -> float:
        """The CPU's time for one token of one expert that serves many."""
        ...

    def read_bytes_per_s(self, seconds: float) -> float:
        """Plain read of the host pool by the CPU's threads; 0: not to be had."""
        ...

    def fixed_s(self, rows: int, seconds: float) -> float | None:
        """What a layer of a step takes beside its experts; None: not to be had."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Effort:
    batches: tuple[int, ...]
    experts: tuple[int, ...]  # of a layer at once, as far as a token uses so many
    rounds: int
    slice_s: float


FULL = Effort(BATCHES, (1, 2, 4, 8), rounds=3, slice_s=0.03)
QUICK = Effort((1,), (1, 8), rounds=1, slice_s=0.02)


@dataclass(frozen=True, slots=True)
class Slice:
    """One was just measured."""

    phase: str
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class _Task:
    kind: str
    rows: int = 1
    experts: int = 0

    def __str__(self) -> str:
        name = _NAMES[self.kind]
        return f"measuring {name}" + (f", batch {self.rows}" if self.experts else "")


_NAMES = {
    "link": "the link",
    "cpu": "the CPU",
    "both": "link and CPU together",
    "asked": "the link while the CPU is asked",
    "hits": "experts in slots",
    "layer": "a layer without experts",
    "handshake": "the handshake",
    "rows": "the CPU, many tokens",
    "read": "the CPU's memory",
}


def measure(bench: Bench, effort: Effort, now: float) -> Generator[Slice, None, Profile]:
    """Measure slice by slice; closing the generator gives the rest up.

    Args:
        now: unix time, for the profile.
    """
    tasks = list(_tasks(bench, effort))
    samples: dict[_Task, list[tuple[float, ...]]] = defaultdict(list)
    total = len(tasks) * effort.rounds
    for done in range(total):
        task = tasks[done % len(tasks)]
        if (sample := _sample(bench, task, effort.slice_s)) is not None:
            samples[task].append(sample)
        yield Slice(str(task), done + 1, total)
    medians = {task: tuple(map(median, zip(*found))) for task, found in samples.items()}
    return _profile(bench, effort, medians, now)


def _counts(bench: Bench, effort: Effort) -> tuple[int, ...]:
    return tuple(sorted({min(n, bench.experts_per_token) for n in effort.experts}))


def _tasks(bench: Bench, effort: Effort) -> Iterator[_Task]:
    counts = _counts(bench, effort)
    for rows in effort.batches:
        for experts in counts:
            if bench.has_link:
                yield _Task("link", rows, experts)
            if bench.has_cpu:
                yield _Task("cpu", rows, experts)
        if bench.has_link and bench.has_cpu:
            yield _Task("both", rows, counts[-1])
            yield _Task("asked", rows)
        for experts in {counts[0], counts[-1]} if bench.has_hits else ():
            yield _Task("hits", rows, experts)
        yield _Task("layer", rows)
    if bench.has_cpu:
        yield _Task("handshake")
        yield _Task("rows")
        yield _Task("read")


def _sample(bench: Bench, task: _Task, seconds: float) -> tuple[float, ...] | None:
    """None: there is nothing of this kind to measure."""
    match task.kind:
        case "link":
            return (bench.link_s(task.rows, task.experts, seconds),)
        case "cpu":
            return (bench.cpu_s(task.rows, task.experts, seconds),)
        case "hits" if not bench.has_hits:
            return None  # the slots went while it was measured
        case "hits":
            return (bench.hits_s(task.rows, task.experts, seconds),)
        case "both":
            return bench.beside(task.rows, task.experts, seconds)
        case "asked":
            found = bench.link_asked_s(task.rows, seconds)
        case "layer":
            found = bench.fixed_s(task.rows, seconds)
        case "handshake":
            found = bench.handshake_s(seconds)
        case "rows":
            found = bench.cpu_row_s(seconds)
        case _:
            found = bench.read_bytes_per_s(seconds)
    return None if found is None else (found,)


def _profile(
    bench: Bench, effort: Effort, medians: dict[_Task, tuple[float, ...]], now: float
) -> Profile:
    def line(kind: str, rows: int) -> Line:
        points = [(t.experts, s[0]) for t, s in medians.items() if (t.kind, t.rows) == (kind, rows)]
        return fit_line(points) if points else Line()

    def beside(rows: int) -> tuple[float, float]:
        most = _counts(bench, effort)[-1]
        link, cpu = medians.get(_Task("both", rows, most), (1.0, 1.0))
        return min(1.0, max(LEAST_SHARE, link)), min(1.0, max(LEAST_SHARE, cpu))

    def only(task: _Task) -> float | None:
        return medians[task][0] if task in medians else None

    figures = tuple(
        Figures(
            rows,
            line("link", rows),
            line("cpu", rows),
            line("hits", rows),
            *beside(rows),
            only(_Task("layer", rows)),
            only(_Task("asked", rows)) or 0.0,
        )
        for rows in effort.batches
    )
    return Profile(
        bench.key,
        bench.expert_bytes,
        figures,
        read_bytes_per_s=only(_Task("read")) or 0.0,
        cpu_row_s=only(_Task("rows")) or 0.0,
        handshake_s=only(_Task("handshake")) or 0.0,
        measured_at=now,
        prefetch_bytes=bench.prefetch_bytes,
        gpu_name=bench.gpu_name,
        quick=effort is QUICK,
    )


def routes(
    random: np.random.Generator, rows: int, experts: int, routes_per_row: int, of: int
) -> np.ndarray:
    """[rows, routes_per_row] int32: so many distinct ones of ``of`` experts; -1: not in use.

    In a batch each serves two rows, about as many as misses do that several rows share.
    """
    chosen = random.permutation(of)[:experts] if of < 64 else _distinct(random, experts, of)
    ids = np.full((rows, routes_per_row), -1, np.int32)
    taken = [0] * rows
    for i, expert in enumerate(chosen):
        for row in {i % rows, (i + 1) % rows}:
            ids[row, taken[row]] = expert
            taken[row] += 1
    return ids


def _distinct(random: np.random.Generator, count: int, of: int) -> list[int]:
    """Without the cost of a permutation of thousands."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(random.integers(of))] = None
    return list(found)
