"""What its misses cost a decode step, and what a background fill beside it would. Pure.

From how many experts of each layer were missed and hit, and from measured rates. A layer waits for
the latest of link, CPU and the GPU's own memory; what is hidden behind the latest costs nothing.
"""

from __future__ import annotations

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


def layer_s(rates: Rates, on_link: float, on_cpu: float) -> tuple[float, float, float]:
    """Until the link and the CPU are done with a layer's missed experts, and until both are while a
    background fill takes half of the link all along.
    """
    link_s, cpu_s = finish_s(rates, on_link, on_cpu)
    beside_s = max(link_s and 2 * link_s - rates.link_fixed_s, cpu_s)
    if on_cpu and rates.cpu_experts_per_s:
        shared_rate = rates.cpu_experts_per_s * rates.cpu_beside_link
        beside_s = max(beside_s, rates.cpu_fixed_s + on_cpu / shared_rate)
    return link_s, cpu_s, beside_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one decode step, or means over some."""

    step_s: float = 0.0
    link_busy_s: float = 0.0  # with misses
    cpu_busy_s: float = 0.0
    slowed_s: float = 0.0  # more than ``step_s``, were background fills to run beside all of it
    saved_s: float = 0.0  # had each miss alone been a hit
    misses: float = 0.0

    @property
    def miss_s(self) -> float:
        """What a miss costs more than a hit. Less than 0 where hits take longer anyway."""
        return self.saved_s / self.misses if self.misses else 0.0


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
    link_s, cpu_s, beside_s = layers_s.T
    waits_s = np.maximum(link_s, cpu_s)
    hits_s = hits * hit_s
    took_s = np.maximum(waits_s, hits_s)
    # of each miss: what its layer would take if it were a hit
    fewer_s = np.maximum(waits_s * (1 - 1 / np.maximum(misses, 1)), hits_s + hit_s)
    return StepTimes(
        step_s=float(took_s.sum()) + rest_s,
        link_busy_s=float(link_s.sum()),
        cpu_busy_s=float(cpu_s.sum()),
        slowed_s=float((np.maximum(beside_s, hits_s) - took_s).sum()),
        saved_s=float((misses * (took_s - fewer_s)).sum()),
        misses=float(misses.sum()),
    )


def fill_s(rates: Rates, times: StepTimes) -> float:
    """By how much one background fill slows such a step, wherever in it the copy falls.

    Where it meets a read of a miss both have half of the link, and where it meets the CPU alone it
    takes DRAM rate away. That costs what a layer waits longer; elsewhere the copy is free, and so
    it is where there is no link.
    """
    if not rates.link_experts_per_s:
        return 0.0
    copied_s = times.step_s + times.slowed_s - times.link_busy_s  # by fills beside all of the step
    share = times.slowed_s / copied_s if copied_s > 0 else 1.0
    return share / rates.link_experts_per_s


def price_s(rates: Rates, times: StepTimes) -> float:
    """What a background fill has to earn: as ``fill_s``, but as if nothing hid what it delays.

    Layers differ from one step to the next, and so does what is hidden.
    """
    if not rates.link_experts_per_s:
        return 0.0
    met_s = times.link_busy_s + (1 - rates.cpu_beside_link) * times.cpu_busy_s
    return met_s / (rates.link_experts_per_s * times.step_s)


def allowance(rates: Rates, pace: Pace) -> Allowance:
    """How many experts the idle link can bring beside steps of such a pace, and at which price.

    Where hits take longer than misses anyway nothing that comes in is worth its slot.
    """
    mean = pace.mean
    if not rates.link_experts_per_s or mean.step_s <= 0:
        return Allowance(0.0, 0.0)
    idle_s = max(0.0, mean.step_s - mean.link_busy_s)
    return Allowance(
        fills=(1 - LEFT_IDLE) * idle_s * rates.link_experts_per_s,
        cost_misses=price_s(rates, mean) / max(mean.miss_s, NO_MISS_S),
        worth=pace.misses_cost,
    )
