"""Which experts deserve a slot: pure decisions over recency, frequency and measured costs.

An expert's *value* is the rate at which the next steps are expected to use it, in uses per step. It
mixes two averages of what was used: one that forgets within tens of steps, which follows the text,
and one that forgets within hundreds, which follows the router's drift. How much each of them tells
of the next step is measured by least squares, and weighs it. One that has not been used for a while
is worth at most a few uses in as long a while: after a change of text the
favourites of before leave in the order of their last use, as an LRU lets them. On recorded routing
the mix misses less than recency (LRU) or frequency alone at every size of cache.

How far values tell what will be used is measured, too: by how much more those are used that are
worth more. Where that is little, routing is even, and neither swaps nor empty slots bring anything.

The host calls ``observe`` and ``plan`` once a step, at the safe point. [L, E] arrays, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftd.experts.costs import Allowance


@dataclass(frozen=True, slots=True)
class Tuning:
    """Chosen with tools/simulate.py over recorded and synthetic routing. All are flat optima."""

    recent_half_life_steps: float = 16.0
    frequent_half_life_steps: float = 128.0
    recent_weights: tuple[float, float] = (0.1, 0.8)  # the bounds of what is measured
    weight_half_life_steps: float = 128.0
    overdue_uses: float = 2.0  # in the time since its last use an expert is worth no more;
    early_steps: float = 16.0  # before so many steps that says less: it may be chance
    swap_share: float = 0.3  # a newcomer must be worth so much more: estimates are noisy
    admit_share: float = 0.2  # less where it comes in on its way, at no cost
    trust_half_life_steps: float = 64.0
    least_trust: float = 0.15  # with less, no slot stands empty
    horizon_steps: float = 32.0  # within so many steps a background fill must earn its cost,
    sure_steps: float = 256.0  # or so many, where in the long run the difference is
    sure_deviations: float = 2.5  # so many times what chance would make it
    prefill_weight_steps: float = 64.0  # a long prompt counts as so many steps at most
    demand_half_life_steps: float = 8.0
    max_empty_share: float = 1 / 32  # of slots, or of absent experts: may stand empty for fills
    empty_share: float = 2.0  # of what it loses, an empty slot must serve in fills
    max_quiet_steps: int = 64  # without an admission, then one comes in whatever it costs


@dataclass(slots=True)
class PolicyState:
    recent: np.ndarray  # [L, E] float32, uses per step
    frequent: np.ndarray  # [L, E] float32, uses per step
    since: np.ndarray  # [L, E] float32, steps since the last use
    steps: float  # observed so far, the prior included
    averages: np.ndarray  # [2, 2] float64, covariance of ``recent`` and ``frequent``,
    told: np.ndarray  # [2] float64, and of each with uses
    weighed: float = 0.0  # steps in these sums
    recent_weight: float = 0.4  # of ``recent`` in values, ``frequent`` has the rest
    foretold: float = 0.0  # covariance of uses with values,
    spread: float = 0.0  # and variance of values
    demand: float = 0.0  # read-through fills wanted per step
    credit: float = 0.0  # background fills saved up
    quiet_steps: int = 0  # since something was admitted
    values: np.ndarray | None = None  # [L, E] float32, as of the last step; None: not asked for yet

    @property
    def trust(self) -> float:
        """How much more is used of what is expected to be used more. In [0, 1]."""
        if self.steps < TRUST_FROM_STEPS or not self.spread:
            return 1.0
        return min(1.0, max(0.0, self.foretold / self.spread))


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for the next step. Keys are flat: layer * E + expert."""

    evict: np.ndarray  # [n] int64 keys
    fill: np.ndarray  # [n] int64 keys to copy in the background, most valuable first
    value: np.ndarray  # [L, E] float32: misses are fetched in this order, highest first
    admit: np.ndarray  # [L, E] bool: a fetched miss is worth storing


# A prompt of fewer tokens leaves too many experts out, and an estimate of fewer uses in it than
# these is not to be trusted.
AHEAD_FROM_TOKENS = 256
SURE_USES = 8.0
LEAST_TRUST = 1e-3
TRUST_FROM_STEPS = 12.0  # before, what little is known is all there is
WEIGHED_EACH_STEPS = 4  # is enough,
WEIGHED_FROM_STEPS = 32.0  # and before, or
LEAST_APART = 1e-3  # with less of their variances, both averages say the same
NEARLY = 0.95  # a demand of so much less than one fill a step is reason for an empty slot
PRIOR_STEPS = 4.0  # the even routing assumed before anything was seen weighs as many steps


def new_state(num_layers: int, num_experts: int, uses_per_layer: float) -> PolicyState:
    """Before the first step every expert is as likely as any other."""
    even = np.full((num_layers, num_experts), uses_per_layer / num_experts, np.float32)
    return PolicyState(
        even.copy(), even, np.zeros_like(even), PRIOR_STEPS, np.zeros((2, 2)), np.zeros(2)
    )  # fmt: skip


def _learning_rates(state: PolicyState, tuning: Tuning, steps: float) -> tuple[float, float]:
    """How far ``steps`` steps move the two averages. Young averages are plain means."""
    seen = steps / (state.steps + steps)
    return (
        max(1 - 0.5 ** (steps / tuning.recent_half_life_steps), seen),
        max(1 - 0.5 ** (steps / tuning.frequent_half_life_steps), seen),
    )


def observe(
    state: PolicyState,
    tuning: Tuning,
    uses: np.ndarray,
    prompt_steps: float | None = None,
    *,
    judge: bool = True,
) -> None:
    """Take in what the last step used. Once a step, on the thread that launches them.

    Args:
        uses: [L, E] uses per step: 0 or 1 after decode; tokens routed / tokens after a prefill.
        prompt_steps: how many decode steps a prefill speaks for. None: it was a decode step, which
            tells how good the values were, too.
        judge: look at that; False where nobody asks for values.
    """
    now = uses.astype(np.float32)
    if prompt_steps is None and judge:
        _judge(state, tuning, now)
        if int(state.steps) % WEIGHED_EACH_STEPS == 0:
            _weigh(state, tuning, now)
    steps = prompt_steps or 1.0
    to_recent, to_frequent = _learning_rates(state, tuning, steps)
    state.recent += to_recent * (now - state.recent)
    state.frequent += to_frequent * (now - state.frequent)
    state.since += 1  # a prompt counts once: it may well leave out what answers use
    state.since[now > 0] = 0
    state.steps += steps
    state.values = None


def _judge(state: PolicyState, tuning: Tuning, used: np.ndarray) -> None:
    values = _values(state, tuning)
    above = values - values.mean()
    fade = 0.5 ** (1 / tuning.trust_half_life_steps)
    state.foretold = fade * state.foretold + float(np.vdot(above, used))
    state.spread = fade * state.spread + float(np.vdot(above, above))


def _weigh(state: PolicyState, tuning: Tuning, used: np.ndarray) -> None:
    """By how much each average tells what is used, given the other: a regression over steps."""
    both = np.stack([a.ravel() - a.mean() for a in (state.recent, state.frequent)])
    fade = 0.5 ** (WEIGHED_EACH_STEPS / tuning.weight_half_life_steps)
    state.averages = fade * state.averages + both @ both.T
    state.told = fade * state.told + both @ used.ravel()
    state.weighed = fade * state.weighed + WEIGHED_EACH_STEPS
    (rr, rf), (_, ff) = state.averages
    if state.weighed < WEIGHED_FROM_STEPS or rr * ff - rf * rf <= LEAST_APART * rr * ff:
        return
    of_recent, of_frequent = np.linalg.solve(state.averages, state.told)
    if of_recent + of_frequent > 0:
        least, most = tuning.recent_weights
        share = of_recent / (of_recent + of_frequent)
        state.recent_weight = min(most, max(least, float(share)))


def prefill_steps(tuning: Tuning, num_tokens: int) -> float:
    """How many decode steps a prompt chunk speaks for."""
    return min(float(num_tokens), tuning.prefill_weight_steps)


def value(state: PolicyState, tuning: Tuning) -> np.ndarray:
    """[L, E] float32: expected uses per step. The caller's own."""
    return _values(state, tuning).copy()


def _values(state: PolicyState, tuning: Tuning) -> np.ndarray:
    if state.values is None:
        state.values = _value(state, tuning, state.recent, state.frequent, state.since)
    return state.values


def _value(
    state: PolicyState,
    tuning: Tuning,
    recent: np.ndarray,
    frequent: np.ndarray,
    since: np.ndarray,
) -> np.ndarray:
    mixed = state.recent_weight * recent + (1 - state.recent_weight) * frequent
    age = since + 1
    return np.minimum(mixed, tuning.overdue_uses / age * (1 + tuning.early_steps / age))


def value_after(
    state: PolicyState, tuning: Tuning, layer: int, uses: np.ndarray, prompt_steps: float
) -> np.ndarray:
    """[E]: the layer's values as they will be once a prefill's ``uses`` [E] have been observed."""
    to_recent, to_frequent = _learning_rates(state, tuning, prompt_steps)
    recent, frequent = state.recent[layer], state.frequent[layer]
    since = np.where(uses > 0, np.float32(0), state.since[layer] + 1)
    return _value(
        state,
        tuning,
        recent + to_recent * (uses - recent),
        frequent + to_frequent * (uses - frequent),
        since,
    )


def surely_used(values: np.ndarray, num_tokens: int) -> np.ndarray:
    """Experts that a prompt of so many tokens is all but certain to use, the likeliest first.

    Args:
        values: [E], expected uses per token.
    """
    if num_tokens < AHEAD_FROM_TOKENS:
        return np.empty(0, np.int64)
    likely = np.flatnonzero(values * num_tokens >= SURE_USES)
    return in_order(likely, values[likely])


def in_order(experts: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """``experts`` [n] by falling ``worth`` [n]; equal ones by number, so that replays agree."""
    return experts[np.argsort(-worth, kind="stable")]


def num_swaps(
    gains: np.ndarray,
    losses: np.ndarray,
    tuning: Tuning,
    cost: float = 0.0,
    trust: float = 1.0,
    lasting: np.ndarray | None = None,
) -> int:
    """How many swaps pay, pair by pair: ``gains`` [n] fall, ``losses`` [m] rise, uses per step.

    Args:
        cost: of one swap, in misses.
        trust: in what is told of gains and losses.
        lasting: of each pair: its difference is sure to last. None: no one is.
    """
    pairs = min(len(gains), len(losses))
    steps = np.full(pairs, tuning.horizon_steps)
    if lasting is not None:
        steps[lasting[:pairs]] = tuning.sure_steps
    earned_by = steps * max(trust, LEAST_TRUST)
    pays = gains[:pairs] > losses[:pairs] * (1 + tuning.swap_share) + cost / earned_by
    return int(np.argmin(np.append(pays, False)))  # up to the first that does not


def _lasting(
    state: PolicyState, tuning: Tuning, newcomers: np.ndarray, leaving: np.ndarray
) -> np.ndarray:
    """[n] bool: in the long run more is used of the newcomer, by more than chance.

    A use counts ``to_frequent`` at first and half as much on average, and uses are independent of
    each other, so an average varies by the root of itself times that.

    Args:
        newcomers, leaving: keys, pair by pair; -1 of ``leaving``: an empty slot.
    """
    _, to_frequent = _learning_rates(state, tuning, 1.0)
    pairs = min(len(newcomers), len(leaving))
    newcomers, leaving = newcomers[:pairs], leaving[:pairs]
    frequent = state.frequent.ravel()
    gains, losses = frequent[newcomers], np.where(leaving >= 0, frequent[leaving], 0.0)
    chance = np.sqrt(to_frequent / 2 * (gains + losses))
    return gains - losses > tuning.sure_deviations * chance


def _lowest(value: np.ndarray, n: int) -> np.ndarray:
    """Indices of the ``n`` lowest finite values, ascending."""
    if n <= 0:
        return np.empty(0, np.int64)
    if n < len(value):
        chosen = np.argpartition(value, n)[:n]
    else:
        chosen = np.arange(len(value))
    chosen = chosen[np.argsort(value[chosen], kind="stable")]
    return chosen[np.isfinite(value[chosen])]


def plan(
    state: PolicyState,
    tuning: Tuning,
    resident: np.ndarray,  # [L, E] bool
    used: np.ndarray,  # [L, E] bool: by the last step; these are not evicted
    num_free: int,
    wanted: int,  # fetched misses of the last step with their admit bit set, stored or not
    allowance: Allowance,
) -> Plan:
    """Decide who leaves, who is copied in the background and whose miss is stored when fetched.

    While slots are free everything is admitted and nobody leaves. Then as many of the least
    valuable leave as the next step's fills are expected to need, and only what is worth more than
    the next one to leave comes in. Cost: 0.25 ms for 48 x 128 experts, 0.4 ms for 92 x 160.
    """
    values = value(state, tuning)
    flat, is_resident = values.ravel(), resident.ravel()
    num_slots = int(np.count_nonzero(is_resident)) + num_free
    num_absent = flat.size - num_slots + num_free
    most_empty = max(1, int(min(num_slots, flat.size - num_slots) * tuning.max_empty_share))

    fade = 0.5 ** (1 / tuning.demand_half_life_steps)
    state.demand = fade * state.demand + (1 - fade) * wanted
    trust = state.trust
    admits = allowance.worth and trust >= tuning.least_trust
    empty = min(most_empty, int(state.demand + NEARLY)) if admits else 0
    state.credit = min(state.credit + allowance.fills, max(1.0, 2 * allowance.fills))
    state.quiet_steps = 0 if wanted and admits else state.quiet_steps + 1
    overdue = state.quiet_steps >= tuning.max_quiet_steps

    candidates = min(max(int(state.credit), int(overdue)), most_empty + num_free)
    incoming = _lowest(np.where(is_resident, np.inf, -flat), candidates)
    victims = _lowest(np.where(is_resident & ~used.ravel(), flat, np.inf), empty + candidates + 1)
    # An empty slot costs what whoever would be in it is worth, at each step.
    served = np.clip(state.demand - np.arange(min(empty, len(victims))), 0, 1)
    empty = int(np.count_nonzero(served > tuning.empty_share * flat[victims[: len(served)]]))
    # Background fills take spare slots first, then those of victims they are worth more than.
    leaving = np.concatenate([np.full(max(0, num_free - empty), -1), victims])
    losses = np.where(leaving >= 0, flat[leaving], 0.0)
    fills = 0
    if allowance.worth:
        lasting = _lasting(state, tuning, incoming, leaving)
        fills = num_swaps(flat[incoming], losses, tuning, allowance.cost_misses, trust, lasting)
    if overdue and not fills:
        fills = num_swaps(flat[incoming[:1]], losses, tuning)
    if fills:
        state.credit = max(0.0, state.credit - fills)
        state.quiet_steps = 0

    evictions = min(empty + fills, num_absent) - num_free  # no more empty slots than absent experts
    evictions = min(max(0, evictions), len(victims))
    fills = min(fills, num_free + evictions)
    if num_free - fills > empty or not len(victims):
        floor = -np.inf  # slots to spare, or nobody to defend them: everything is welcome
    elif not allowance.worth:
        floor = np.inf
    else:
        floor = float(flat[victims[min(evictions, len(victims) - 1)]]) * (1 + tuning.admit_share)
    to_recent, to_frequent = _learning_rates(state, tuning, 1.0)
    one_use = state.recent_weight * to_recent + (1 - state.recent_weight) * to_frequent
    return Plan(victims[:evictions], incoming[:fills], values, values + one_use > floor)
