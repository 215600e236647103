"""What a machine reaches with experts of one shape: measured once, kept, and decided from. Pure.

Times are of one layer's experts. A path that takes ``fixed_s`` before its first expert and then
``1 / experts_per_s`` for each is a line; a rate of 0 means that the path does not exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from ftd.experts.machines import PARTS, Machine
from ftd.experts.split import PromptRates, Rates, beside_copies, fetch_table

VERSION = 1  # raised when an old file would be misread
BATCHES = (1, 2, 4, 8)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """What a profile holds for."""

    gpu: str  # UUID; "": the CPU device
    cpu: str  # the processor's name
    threads: int  # that compute experts; 0: none do
    experts: str  # format and shape: "bf16 2048x768"


@dataclass(frozen=True, slots=True)
class Line:
    experts_per_s: float = 0.0
    fixed_s: float = 0.0

    def seconds(self, experts: int) -> float:
        return self.fixed_s + experts / self.experts_per_s if experts else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one batch size."""

    batch: int
    link: Line = Line()  # read over the link by the GPU's kernel
    cpu: Line = Line()  # computed by the CPU in place, asking and answering included
    hits: Line = Line()  # read from slots
    link_beside_cpu: float = 1.0  # part of its rate that the link keeps while the CPU computes
    cpu_beside_link: float = 1.0
    fixed_s: float | None = None  # of a layer: what it takes beside its experts; None: not known
    link_asked_s: float = 0.0  # what asking the CPU adds to the link's fixed time


@dataclass(frozen=True, slots=True)
class Profile:
    key: Key
    expert_bytes: int  # that a kernel reads of one expert
    figures: tuple[Figures, ...]  # by rising batch, at least one
    read_bytes_per_s: float = 0.0  # plain read by the CPU's threads; 0: not measured
    cpu_row_s: float = 0.0  # one token of one expert on the CPU, among many; 0: not measured
    handshake_s: float = 0.0  # of the CPU's fixed time: what asking adds to its work
    measured_at: float = 0.0  # unix time
    prefetch_bytes: tuple[int, int] | None = None  # of the C++ kernels: one token, several
    gpu_name: str = ""  # for people
    quick: bool = False  # a calibration at the start: few samples, one batch size

    def at(self, batch: int) -> Figures:
        """Of this batch size, or the nearest larger one, or the largest."""
        return next((f for f in self.figures if f.batch >= batch), self.figures[-1])

    def rates(self, batch: int) -> Rates | None:
        """For the split of misses; None: neither path was measured."""
        of = self.at(batch)
        if not (of.link.experts_per_s or of.cpu.experts_per_s):
            return None
        return Rates(
            link_experts_per_s=of.link.experts_per_s,
            link_fixed_s=of.link.fixed_s,
            cpu_experts_per_s=of.cpu.experts_per_s,
            cpu_fixed_s=of.cpu.fixed_s,
            link_beside_cpu=of.link_beside_cpu,
            cpu_beside_link=of.cpu_beside_link,
            link_asked_s=of.link_asked_s,
        )

    def fetch_of(
        self, batch: int, experts_per_token: int, parts: int = 1, *, beside: bool = False
    ) -> tuple[float, ...] | None:
        """For each number of misses that a layer can have, how many take the link.

        Args:
            parts: of an expert that link and CPU may share.
            beside: a pass whose copies take the link, too.
        """
        rates = self.rates(batch)
        if rates is None:
            return None
        rates = beside_copies(rates) if beside else rates
        return fetch_table(rates, batch * experts_per_token, parts)

    def prompt_rates(self, fixed_s: float = 0.0) -> PromptRates | None:
        """For the misses of a prompt's layer; None: the CPU, or the link, was not measured.

        Args:
            fixed_s: of the CPU's part: to bring activations there and products back.
        """
        link, cpu = self.at(1).link, self.at(1).cpu
        if not (link.experts_per_s and cpu.experts_per_s and self.cpu_row_s):
            return None
        return PromptRates(
            1 / link.experts_per_s, 1 / cpu.experts_per_s, self.cpu_row_s, fixed_s + cpu.fixed_s
        )

    def machine(self, name: str, batch: int = 1, parts: int = PARTS) -> Machine:
        """As the simulator takes it.

        Args:
            parts: of an expert that link and CPU may share.
        """
        of, size = self.at(batch), self.expert_bytes
        link, cpu = of.link.experts_per_s * size, of.cpu.experts_per_s * size
        shared_link = of.link_beside_cpu * link
        fixed = {f.batch: f.fixed_s for f in self.figures if f.fixed_s is not None}
        known = {} if of.fixed_s is None else {"layer_fixed_s": of.fixed_s, "row_fixed_s": 0.0}
        if 1 in fixed and (last := max(fixed)) > 1:
            slope = max(0.0, fixed[last] - fixed[1]) / (last - 1)
            known = {"layer_fixed_s": fixed[1], "row_fixed_s": slope}
        return Machine(
            name,
            link_bytes_per_s=link,
            dram_bytes_per_s=cpu,
            hbm_bytes_per_s=of.hits.experts_per_s * size or math.inf,
            gemv_share=1.0,
            hbm_share=1.0,
            link_beside_cpu=of.link_beside_cpu,
            dram_per_link_byte=(1 - of.cpu_beside_link) * cpu / shared_link if shared_link else 0.0,
            handshake_s=0.0,  # in the CPU's fixed time
            cpu_fixed_s=of.cpu.fixed_s,
            link_fixed_s=of.link.fixed_s,
            link_asked_s=of.link_asked_s,
            parts=parts,
            **known,
        )


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (experts, seconds) whose relative errors are least; nothing is negative."""
    assert points and all(n > 0 and s > 0 for n, s in points), points
    weights = [1 / s**2 for _, s in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points))
    slope = 0.0
    if spread:
        covered = sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, points))
        slope = covered / spread
    fixed = mean_s - slope * mean_n
    if slope <= 0 or fixed < 0:  # noise, or one point: all of it is the experts'
        slope, fixed = mean_s / mean_n, 0.0
    return Line(1 / slope, fixed)


# ---- as text


def to_json(profile: Profile) -> str:
    return json.dumps({"version": VERSION, **asdict(profile)}, indent=1) + "\n"


def from_json(text: str) -> Profile:
    """Raises ValueError: no profile, one of another version, or with numbers that cannot be."""
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop("version", None) != VERSION:
        raise ValueError(f"not a profile of version {VERSION}")
    try:
        figures = tuple(_figures(f) for f in values.pop("figures"))
        ahead = values.get("prefetch_bytes")
        values |= {"key": _build(Key, values["key"]), "figures": figures}
        values["prefetch_bytes"] = None if ahead is None else (ahead[0], ahead[1])
        profile = _build(Profile, values)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or wrong: {error}") from None
    _refuse_absurd(profile)
    return profile


def _figures(values: Mapping[str, Any]) -> Figures:
    lines = {name: _build(Line, values[name]) for name in ("link", "cpu", "hits")}
    return _build(Figures, {**values, **lines})


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})


def _refuse_absurd(profile: Profile) -> None:
    batches = [f.batch for f in profile.figures]
    if not batches or sorted(set(batches)) != batches:
        raise ValueError(f"batches are {batches}")
    shares = [s for f in profile.figures for s in (f.link_beside_cpu, f.cpu_beside_link)]
    lines = [line for f in profile.figures for line in (f.link, f.cpu, f.hits)]
    numbers = [n for line in lines for n in (line.experts_per_s, line.fixed_s)]
    numbers += [f.fixed_s for f in profile.figures if f.fixed_s is not None]
    numbers += [f.link_asked_s for f in profile.figures]
    numbers += [profile.read_bytes_per_s, profile.handshake_s, profile.measured_at]
    numbers += [profile.cpu_row_s, *(profile.prefetch_bytes or ())]
    for number in (*shares, *numbers, profile.expert_bytes, *batches):
        if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise ValueError(f"{number!r} is no time, rate or share")
    if not all(isinstance(n, int) and n < 2**20 for n in profile.prefetch_bytes or ()):
        raise ValueError(f"prefetch_bytes are {profile.prefetch_bytes}")
    if not all(0 < share <= 1 for share in shares) or profile.expert_bytes < 1:
        raise ValueError(f"shares are {shares}, expert_bytes {profile.expert_bytes}")
    names = (profile.key.gpu, profile.key.cpu, profile.key.experts, profile.gpu_name)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"names are {names}")
