"""What its misses cost a decode step, and what a background fill beside it would. Pure.

The engine and the simulator price fills with this: from how many experts of each layer were missed
and hit, from measured rates, and from how long steps take. A layer waits for the latest of link,
CPU and the GPU's own memory; what is hidden behind the latest costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from ftd.experts.split import Rates, finish_s

LEARNT = 0.2  # of a step, by the means over steps
LEFT_IDLE = 0.25  # of the link's idle time, since steps differ
NO_MISS_S = 1e-9  # a miss that costs less costs nothing: no fill earns what it takes


@dataclass(frozen=True, slots=True)
class Allowance:
    """What background fills may take from the next step."""

    fills: float  # how many, on average: a fraction is saved up
    cost_misses: float  # what one fill slows the step, counted in average misses
    worth: bool = True  # a miss less makes the step faster


def layer_s(
    rates: Rates, on_link: float, on_cpu: float, cpu_spread: float = 0.0
) -> tuple[float, float, float]:
    """Of a layer's missed experts: until the link is done, until both paths are, and until both are
    while a background fill takes half of the link all along.

    Args:
        cpu_spread: standard deviation of the CPU's time, as a part of it.
    """
    link_s, cpu_s = finish_s(rates, on_link, on_cpu)
    beside_s = max(link_s and 2 * link_s - rates.link_fixed_s, cpu_s)
    if on_cpu and rates.cpu_experts_per_s:
        shared_rate = rates.cpu_experts_per_s * rates.cpu_beside_link
        beside_s = max(beside_s, rates.cpu_fixed_s + on_cpu / shared_rate)
    both_s = later_s(link_s, cpu_s, cpu_spread * cpu_s) if on_link else cpu_s
    return link_s, both_s, max(beside_s, both_s)


def later_s(one_s: float, other_s: float, deviation_s: float) -> float:
    """Mean of the later of two, one of which varies: it is later than both means."""
    if not deviation_s or not math.isfinite(one_s):
        return max(one_s, other_s)
    z = (other_s - one_s) / deviation_s
    density = math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return one_s + deviation_s * (density + z * (1 + math.erf(z / math.sqrt(2))) / 2)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one decode step, or means over some."""

    step_s: float = 0.0
    link_busy_s: float = 0.0  # with misses
    slowed_s: float = 0.0  # more than ``step_s``, were background fills to run beside all of it
    saved_s: float = 0.0  # had each miss alone been a hit
    misses: float = 0.0

    @property
    def miss_s(self) -> float:
        """What a miss costs more than a hit. Less than 0 where hits take longer anyway."""
        return self.saved_s / self.misses if self.misses else 0.0


def step_times(
    layers_s: np.ndarray, misses: np.ndarray, hits: np.ndarray, hit_s: float, rest_s: float = 0.0
) -> StepTimes:
    """
    Args:
        layers_s: [L, 3] what ``layer_s`` says of each layer.
        misses, hits: [L] distinct experts.
        hit_s: of one resident expert.
        rest_s: of the step, beside its experts.
    """
    link_s, waits_s, beside_s = layers_s.T
    hits_s = hits * hit_s
    took_s = np.maximum(waits_s, hits_s)
    fewer_s = np.maximum(waits_s * (1 - 1 / np.maximum(misses, 1)), hits_s + hit_s)
    return StepTimes(
        step_s=float(took_s.sum()) + rest_s,
        link_busy_s=float(link_s.sum()),
        slowed_s=float((np.maximum(beside_s, hits_s) - took_s).sum()),
        saved_s=float((misses * (took_s - fewer_s)).sum()),
        misses=float(misses.sum()),
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """How decode steps go: the last one, and means over the last five or so."""

    last: StepTimes = StepTimes()
    mean: StepTimes = StepTimes()

    def after(self, step: StepTimes) -> Pace:
        if not self.mean.step_s:
            return Pace(step, step)
        pairs = zip(astuple(self.mean), astuple(step), strict=True)
        return Pace(step, StepTimes(*(mean + LEARNT * (new - mean) for mean, new in pairs)))

    @property
    def misses_cost(self) -> bool:
        """The last steps and the very last one agree that with a miss less they were faster."""
        return self.mean.miss_s > 0 and (not self.last.misses or self.last.miss_s > 0)


def fill_s(rates: Rates, times: StepTimes) -> float:
    """By how much one background fill slows such a step, wherever in it the copy falls.

    Where it meets a read of a miss both have half of the link, so the read is later by as long as
    it meets it, and where it meets the CPU alone it takes DRAM rate away. Elsewhere it is free.
    """
    copied_s = times.step_s + times.slowed_s - times.link_busy_s  # by fills beside all of the step
    share = times.slowed_s / copied_s if copied_s > 0 else 1.0
    return share / rates.link_experts_per_s


def allowance(rates: Rates, pace: Pace) -> Allowance:
    """How many experts the idle link can bring beside steps of such a pace, and at which price."""
    mean = pace.mean
    if not rates.link_experts_per_s or mean.step_s <= 0:
        return Allowance(0.0, 0.0)
    idle_s = max(0.0, mean.step_s - mean.link_busy_s)
    return Allowance(
        fills=(1 - LEFT_IDLE) * idle_s * rates.link_experts_per_s,
        cost_misses=fill_s(rates, mean) / max(mean.miss_s, NO_MISS_S),
        worth=pace.misses_cost,
    )


@dataclass(frozen=True, slots=True)
class Dividing:
    """One way of dividing a layer's misses, and what it takes."""

    rates: Rates
    layers_s: np.ndarray  # [M + 1, 3]: ``layer_s`` of 0 to M misses
    hit_s: float  # of one resident expert; 0: not known

    def times(self, misses: np.ndarray, hits: np.ndarray) -> StepTimes:
        """Of the experts of a step: [L] each. More misses than M count as M."""
        known = np.minimum(misses, len(self.layers_s) - 1)
        return step_times(self.layers_s[known], misses, hits, self.hit_s)


def dividing(rates: Rates, fetch_of: Sequence[float], hit_s: float) -> Dividing:
    """
    Args:
        fetch_of: for each number of misses, how many take the link (``split.fetch_table``).
    """
    layers_s = [layer_s(rates, on_link, m - on_link) for m, on_link in enumerate(fetch_of)]
    return Dividing(rates, np.array(layers_s), hit_s)
