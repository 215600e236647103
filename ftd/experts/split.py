"""How a layer's misses are divided between the link and the CPU: pure functions of measured rates.

Both paths run at the same time and their sums are added, so a layer waits for the later one. Each
has a fixed cost, and while both run each keeps only part of its own rate: they share the DRAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

LEFT_BY_COPIES = 0.5  # of the link, to a step beside a pass
FEW_MISSES = 2  # of a layer, where most experts are resident


@dataclass(frozen=True, slots=True)
class Rates:
    """What one machine reaches for one weight format and one batch size.

    A rate of 0 means the path does not exist (no compiled CPU kernels, no link).
    """

    link_experts_per_s: float
    link_fixed_s: float
    cpu_experts_per_s: float
    cpu_fixed_s: float  # the handshake: publish, wake, answer
    link_beside_cpu: float = 1.0  # (0, 1]: part of its rate the link keeps while the CPU computes
    cpu_beside_link: float = 1.0  # (0, 1]: part of its rate the CPU keeps while the link reads
    link_asked_s: float = 0.0  # what asking the CPU adds to the link's fixed cost

    def __post_init__(self) -> None:
        assert min(self.link_experts_per_s, self.cpu_experts_per_s) >= 0, self
        assert max(self.link_experts_per_s, self.cpu_experts_per_s) > 0, self
        assert min(self.link_fixed_s, self.cpu_fixed_s, self.link_asked_s) >= 0, self
        assert 0 < self.link_beside_cpu <= 1 and 0 < self.cpu_beside_link <= 1, self


def beside_copies(rates: Rates) -> Rates:
    """Of a step beside a pass whose experts are on their way over the link."""
    return replace(rates, link_experts_per_s=rates.link_experts_per_s * LEFT_BY_COPIES)


def finish_s(rates: Rates, on_link: float, on_cpu: float) -> tuple[float, float]:
    """When the link and the CPU are done with their experts of a layer, in seconds from its start.

    A path without work is done at 0. The path that starts first, or has work left when the other is
    done, runs at its own rate; in between both run at their shared rates.
    """
    infinite = float("inf")
    if (on_link and not rates.link_experts_per_s) or (on_cpu and not rates.cpu_experts_per_s):
        return (infinite if on_link else 0.0, infinite if on_cpu else 0.0)
    link_s = on_link and on_link / rates.link_experts_per_s
    cpu_s = on_cpu and on_cpu / rates.cpu_experts_per_s
    if not (on_link and on_cpu):
        return (link_s and rates.link_fixed_s + link_s, cpu_s and rates.cpu_fixed_s + cpu_s)
    link_fixed_s = rates.link_fixed_s + rates.link_asked_s
    start = max(link_fixed_s, rates.cpu_fixed_s)  # from here on both run
    link_left = max(0.0, link_s - (start - link_fixed_s))
    cpu_left = max(0.0, cpu_s - (start - rates.cpu_fixed_s))
    shared = min(link_left / rates.link_beside_cpu, cpu_left / rates.cpu_beside_link)
    link_tail = link_left - shared * rates.link_beside_cpu
    cpu_tail = cpu_left - shared * rates.cpu_beside_link
    link_end = start + shared + link_tail if link_left else link_fixed_s + link_s
    cpu_end = start + shared + cpu_tail if cpu_left else rates.cpu_fixed_s + cpu_s
    return link_end, cpu_end


def fetch_table(rates: Rates, max_misses: int, parts: int = 1) -> tuple[float, ...]:
    """For each number of misses m <= ``max_misses``, how many to read over the link.

    Minimises the later of link and CPU. Ties go to the link, whose reads fill slots for free, and
    to whole experts, of which the link can fill one more.

    Args:
        parts: of these one expert may be divided; 1: the table has whole numbers.
    Cost: max_misses² / 2 evaluations, about a microsecond each.
    """

    def fetched(misses: int) -> float:
        def layer_s(on_link: float) -> float:
            return max(finish_s(rates, on_link, misses - on_link))

        whole = min(range(misses, -1, -1), key=layer_s)
        if parts == 1 or not misses:
            return whole
        # between the ends, where a path has no fixed cost, one path's time rises as the other's
        # falls: the best is beside the best whole number
        inside = min(range(misses - 1, 0, -1), key=layer_s, default=whole)
        near = {
            part
            for around in (whole, inside)
            for part in range(max(0, around - 1) * parts, min(misses, around + 1) * parts + 1)
        }
        best = min(sorted(near, reverse=True), key=lambda part: layer_s(part / parts)) / parts
        return best if layer_s(best) < layer_s(whole) else whole

    return tuple(fetched(misses) for misses in range(max_misses + 1))


def miss_s(rates: Rates, parts: int = 1) -> float:
    """What a miss costs a decode step, if layers that miss at all miss ``FEW_MISSES``."""
    fetched = fetch_table(rates, FEW_MISSES, parts)[-1]
    return max(finish_s(rates, fetched, FEW_MISSES - fetched)) / FEW_MISSES


@dataclass(frozen=True, slots=True)
class PromptRates:
    """What missed experts of a prompt's layer cost, each by itself."""

    link_s: float  # to bring one over the link
    cpu_s: float  # to read one on the CPU, however few its tokens
    cpu_row_s: float  # to compute one token of one expert there
    fixed_s: float = 0.0  # of the CPU's part: activations go there and products come back

    def expert_s(self, tokens: int) -> float:
        """Of one expert on the CPU."""
        return max(self.cpu_s, tokens * self.cpu_row_s)


def prompt_share(
    rates: PromptRates, tokens: Sequence[int], on_link: int = 0, busy_s: float = 0.0
) -> int:
    """How many of a layer's missed experts the CPU takes while the link brings the others.

    Args:
        tokens: of each missed expert, rising: those with few are cheap for the CPU, and to the link
            all are alike.
        on_link: experts that the link brings besides.
        busy_s: how long the layer keeps the CPU from its part.
    """
    best, best_s = 0, (len(tokens) + on_link) * rates.link_s
    cpu_s = rates.fixed_s + busy_s
    for taken, rows in enumerate(tokens, 1):
        cpu_s += rates.expert_s(rows)
        layer_s = max(cpu_s, (len(tokens) - taken + on_link) * rates.link_s)
        if layer_s < best_s:
            best, best_s = taken, layer_s
        elif cpu_s >= best_s:
            break
    return best


def shared_s(
    rates: PromptRates, tokens: Sequence[int], taken: int, on_link: int = 0, busy_s: float = 0.0
) -> float:
    """How long a layer of which the CPU takes so many experts is bound by either; as above."""
    own_s = rates.fixed_s + sum(map(rates.expert_s, tokens[:taken])) if taken else 0.0
    return max(own_s + busy_s, (len(tokens) - taken + on_link) * rates.link_s)
