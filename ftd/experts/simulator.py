"""Replays recorded or synthetic routing against a machine's rates, one policy at a time. Pure.

The default policy is the code that serves: ``policy.py`` and ``split.py``. Beside it stand what
other systems do (LRU over the link, a fixed split, everything on the CPU), the same policy with
every miss over the link, and a bound (Belady's choice, which knows the future). Time of a layer:
the latest of link and CPU for its misses and the GPU's memory for its hits, and a fixed part.
The default begins as a start does, with full slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ftd.experts import costs, policy
from ftd.experts.costs import Allowance, Pace
from ftd.experts.machines import Machine
from ftd.experts.split import Rates, fetch_table

# ---- routing --------------------------------------------------------------------------------


def synthetic_routing(
    num_tokens: int,
    num_layers: int,
    num_experts: int,
    experts_per_token: int,
    *,
    skew: float = 1.0,
    drift: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """[tokens, L, K] int16: the logit of expert e is ``skew * g_e + N(0, 1)``, g_e fixed per layer.

    The model of the synthetic benchmark checkpoints. ``drift`` in [0, 1] moves the g_e at each
    token, keeping their spread: 0.02 forgets half of them in about 1700 tokens.
    """
    random = np.random.default_rng(seed)
    popularity = random.standard_normal((num_layers, num_experts), np.float32)
    routing = np.empty((num_tokens, num_layers, experts_per_token), np.int16)
    for token in range(num_tokens):
        if drift:
            change = random.standard_normal(popularity.shape, np.float32)
            popularity = np.sqrt(1 - drift**2) * popularity + drift * change
        logits = skew * popularity + random.standard_normal(popularity.shape, np.float32)
        routing[token] = np.argpartition(-logits, experts_per_token, axis=1)[:, :experts_per_token]
    return routing


def steps_of(routing: np.ndarray, num_experts: int, batch: int) -> np.ndarray:
    """[steps, L, E] bool: what each decode step uses when ``batch`` parts of a text run at once."""
    tokens, num_layers, _ = routing.shape
    steps = tokens // batch
    used = np.zeros((steps, num_layers, num_experts), bool)
    step, layer = np.arange(steps)[:, None, None], np.arange(num_layers)[None, :, None]
    for row in range(batch):
        used[step, layer, routing[row * steps : (row + 1) * steps]] = True
    return used


# ---- policies -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    on_link: np.ndarray  # [L] misses read over the link
    background: int = 0  # copies that run beside this step
    missed: np.ndarray | None = None  # [L], where residency changes within the step


class Contender(Protocol):
    resident: np.ndarray  # [L, E] bool

    def serve(self, used: np.ndarray, pace: Pace) -> Served:
        """Serve one step that uses ``used`` [L, E]; ``resident`` is then that of the next step."""
        ...


class Default:
    """The policy that serves: values, read-through fills, background fills in idle link time."""

    def __init__(
        self,
        used: np.ndarray,
        num_slots: int,
        rates: Rates,
        parts: int = 1,
        tuning: policy.Tuning | None = None,
        *,
        link_only: bool = False,
    ) -> None:
        _, num_layers, num_experts = used.shape
        most = int(used.sum(2).max())
        self._rates, self._tuning = rates, tuning or policy.Tuning()
        self._fetch_of = range(most + 1) if link_only else fetch_table(rates, most, parts)
        self._state = policy.new_state(num_layers, num_experts, float(used[0].sum(1).mean()))
        self.resident = np.zeros((num_layers, num_experts), bool)
        self.resident.T.flat[:num_slots] = True  # as the start fills them, evenly over the layers
        self._free = max(0, num_slots - self.resident.size)
        self._plan = policy.plan(
            self._state, self._tuning, self.resident, self.resident & False, self._free, 0,
            Allowance(0, 0),
        )  # fmt: skip

    def serve(self, used: np.ndarray, pace: Pace) -> Served:
        fill = self._plan.fill  # their copies run during this step, their slots are taken
        stored, wanted, on_link = self._read_through(used & ~self.resident)
        flat = self.resident.reshape(-1)
        arrived = np.union1d(fill, np.array(stored, np.int64))
        self._free -= len(stored)
        self._free += len(fill) + len(stored) - len(arrived)  # read twice: one slot comes back
        flat[arrived] = True
        policy.observe(self._state, self._tuning, used)
        self._plan = policy.plan(
            self._state, self._tuning, self.resident, used, self._free, wanted,
            costs.allowance(self._rates, pace),
        )  # fmt: skip
        flat[self._plan.evict] = False
        self._free += len(self._plan.evict) - len(self._plan.fill)
        return Served(on_link, len(fill))

    def _read_through(self, misses: np.ndarray) -> tuple[list[int], int, np.ndarray]:
        num_experts = misses.shape[1]
        stored: list[int] = []
        wanted = 0
        on_link = np.zeros(len(misses))
        for layer in np.flatnonzero(misses.any(1)):
            experts = np.flatnonzero(misses[layer])
            on_link[layer] = count = self._fetch_of[len(experts)]
            whole = int(count)  # what the CPU computes a part of is not stored
            for expert in policy.in_order(experts, self._plan.value[layer, experts])[:whole]:
                if self._plan.admit[layer, expert]:
                    wanted += 1
                    if len(stored) < self._free:
                        stored.append(int(layer * num_experts + expert))
        return stored, wanted, on_link


class LeastRecent:
    """LRU over what ``share`` of the misses the link reads; the rest is computed on the CPU.

    It changes residency layer by layer, as systems do that decide on the host at each miss.

    share 1: every miss is fetched. share 0: nothing comes in once the slots are full.
    """

    def __init__(self, used: np.ndarray, num_slots: int, share: float) -> None:
        self._num_slots, self._share, self._owed, self._now = num_slots, share, 0.0, 0
        self._num_used = 0
        self.resident = np.zeros(used.shape[1:], bool)
        self._last = np.zeros(used.shape[1:], np.int64)

    def serve(self, used: np.ndarray, pace: Pace) -> Served:
        self._now += 1
        on_link, missed = np.zeros((2, len(used)), np.int64)
        for layer, now in enumerate(used):
            misses = np.flatnonzero(now & ~self.resident[layer])
            missed[layer] = len(misses)
            self._last[layer, now] = self._now
            if not len(misses):
                continue
            on_link[layer] = count = self._on_link(len(misses))
            filling = self._num_used < self._num_slots and self._share == 0
            self._take(layer, misses if filling else misses[:count])
        return Served(on_link, missed=missed)

    def _on_link(self, misses: int) -> int:
        self._owed += self._share * misses  # carried on: halves are not lost
        count = min(int(self._owed + 0.5), misses)
        self._owed -= count
        return count

    def _take(self, layer: int, experts: np.ndarray) -> None:
        """Into slots, those of whoever was used least recently: of layers to come, too."""
        experts = experts[: self._num_slots]
        lacking = max(0, self._num_used + len(experts) - self._num_slots)
        if lacking:
            age = np.where(self.resident, self._last, self._now + 1).ravel()
            self.resident.reshape(-1)[np.argpartition(age, lacking - 1)[:lacking]] = False
        self.resident[layer, experts] = True
        self._num_used += len(experts) - lacking


class Belady:
    """Keeps what is used again soonest, among residents and this step's misses; splits by q*."""

    def __init__(self, used: np.ndarray, num_slots: int, rates: Rates, parts: int = 1) -> None:
        self._num_slots, self._step = num_slots, 0
        self._fetch_of = np.array(fetch_table(rates, int(used.sum(2).max()), parts))
        self.resident = np.zeros(used.shape[1:], bool)
        never = len(used) + 1
        self._next = np.full((len(used) + 1, *used.shape[1:]), never, np.int32)
        for step in range(len(used) - 1, -1, -1):
            self._next[step] = np.where(used[step], step, self._next[step + 1])

    def serve(self, used: np.ndarray, pace: Pace) -> Served:
        self._step += 1
        misses = used & ~self.resident
        kept = self.resident | used
        soonest = np.where(kept, -self._next[self._step], -np.inf)
        self.resident = _best(soonest.astype(float), self._num_slots, kept)
        return Served(self._fetch_of[misses.sum(1)])


def _best(worth: np.ndarray, count: int, among: np.ndarray) -> np.ndarray:
    """[L, E] bool: the ``count`` of highest worth ``among`` those given."""
    if among.sum() <= count:
        return among
    best = np.zeros(worth.size, bool)
    best[np.argpartition(-worth.ravel(), count - 1)[:count]] = count > 0
    return best.reshape(worth.shape) & among


MakeContender = Callable[[np.ndarray, int, Rates, int], Contender]


def _fixed_split(used: np.ndarray, num_slots: int, rates: Rates, parts: int) -> Contender:
    link = rates.link_experts_per_s * rates.link_beside_cpu
    cpu = rates.cpu_experts_per_s * rates.cpu_beside_link
    return LeastRecent(used, num_slots, link / (link + cpu))


def _link_only(used: np.ndarray, num_slots: int, rates: Rates, parts: int) -> Contender:
    return Default(used, num_slots, rates, parts, link_only=True)


def _least_recent(share: float) -> MakeContender:
    return lambda used, num_slots, rates, parts: LeastRecent(used, num_slots, share)


CONTENDERS: dict[str, MakeContender] = {
    "default": Default,
    "lru-fetch-all": _least_recent(1.0),
    "fixed-split": _fixed_split,
    "cpu-all": _least_recent(0.0),
    "link-only": _link_only,
    "oracle": Belady,
}
RIVALS = ("lru-fetch-all", "fixed-split")  # the default must lose to neither


# ---- replay ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    tokens_per_s: float
    miss_share: float  # of distinct experts used
    link_bytes_per_token: float  # misses read through and background fills
    cpu_bytes_per_token: float


def simulate(
    used: np.ndarray,  # [steps, L, E] bool
    name: str,
    machine: Machine,
    *,
    num_slots: int,
    expert_bytes: int,
    batch: int = 1,
    warm_up: float = 0.25,
    make: MakeContender | None = None,
) -> Outcome:
    """Decode all steps under one policy; the first ``warm_up`` part of them is not counted."""
    rates, parts = machine.rates(expert_bytes, batch), machine.parts
    contender = (make or CONTENDERS[name])(used, num_slots, rates, parts)
    layers_s = _layers_s(rates, int(used.sum(2).max()), parts)
    hit_s, rest_s = machine.hit_s(expert_bytes, batch), used.shape[1] * machine.fixed_s(batch)
    skip = int(len(used) * warm_up)
    seconds = uses = missed = over_link = on_cpu = 0.0
    pace = Pace()
    for step, now in enumerate(used):
        misses = (now & ~contender.resident).sum(1)
        served = contender.serve(now, pace)
        misses = misses if served.missed is None else served.missed
        fetched, rest = served.on_link, misses - served.on_link
        divided_s = layers_s[misses, np.rint(fetched * parts).astype(np.int64)]
        times = costs.step_times(divided_s, misses, now.sum(1) - misses, hit_s, rest_s)
        pace = pace.after(times)
        if step >= skip:
            seconds += times.step_s
            if served.background:
                seconds += served.background * costs.fill_s(rates, times)
            uses += now.sum()
            missed += misses.sum()
            over_link += fetched.sum() + served.background
            on_cpu += rest.sum()
    tokens = batch * (len(used) - skip)
    return Outcome(
        policy=name,
        tokens_per_s=tokens / seconds,
        miss_share=missed / uses,
        link_bytes_per_token=over_link * expert_bytes / tokens,
        cpu_bytes_per_token=on_cpu * expert_bytes / tokens,
    )


def _layers_s(rates: Rates, most: int, parts: int) -> np.ndarray:
    """[misses, parts over the link, 3]: ``costs.layer_s``."""
    times = np.zeros((most + 1, most * parts + 1, 3))
    for misses in range(most + 1):
        for part in range(misses * parts + 1):
            times[misses, part] = costs.layer_s(rates, part / parts, misses - part / parts)
    return times


def compare(
    used: np.ndarray,
    machine: Machine,
    names: Iterable[str] = tuple(CONTENDERS),
    *,
    num_slots: int,
    expert_bytes: int,
    batch: int = 1,
) -> Iterator[Outcome]:
    """One outcome per policy, in the order of ``names``."""
    for name in names:
        yield simulate(
            used,
            name,
            machine,
            num_slots=num_slots,
            expert_bytes=expert_bytes,
            batch=batch,
        )
