"""The machine's profile in an engine: found or calibrated at the start, measured again on request.

Everything runs on the engine thread, at safe points; a measurement goes slice by slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import structlog

from ftd.errors import Busy, ConfigError
from ftd.experts.measure import FULL, QUICK, Bench, Slice, measure
from ftd.experts.modes import Mode, State, Tuning, after_step
from ftd.experts.profile import BATCHES, Profile
from ftd.experts.profile_store import ProfileStore
from ftd.experts.split import PromptRates, miss_s

log = structlog.get_logger(__name__)

TUNING = Tuning()
QUICK_HOLDS_S = 24 * 3600.0  # what few samples say, on a machine that was perhaps busy


class Divides(Protocol):
    """What obeys a profile: the experts."""

    @property
    def parts(self) -> int:
        """Of an expert that link and CPU may share; 1: experts are not divided."""
        ...

    def split(
        self,
        fetch_of: Sequence[Sequence[float]],
        beside: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """For 1, 2, 4 and 8 rows: for each number of misses of a layer, how many take the link.

        Args:
            beside: the same in the pauses of a pass; None: nothing else.
        """
        ...

    def share_prompts(self, rates: PromptRates | None) -> None:
        """What the CPU takes of a prompt's missed experts; None: nothing."""
        ...


class Profiling:
    """
    Args:
        calibrates: rates matter enough to look for them at the start, for less than a second.
        clock: unix time.
    """

    def __init__(
        self,
        bench: Bench,
        experts: Divides,
        store: ProfileStore,
        *,
        calibrates: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.profile: Profile | None = None
        self._bench, self._experts, self._clock = bench, experts, clock
        self._calibrates = calibrates
        self._measuring: Generator[Slice, None, Profile] | None = None
        self._owner: object = None  # of that measurement
        self._tables: dict[int, Sequence[float]] = {}  # by rows, as the profile divides
        self._beside: dict[int, Sequence[float]] = {}  # the same in the pauses of a pass
        self._modes: dict[int, State] = {}  # of those that leave something to the CPU
        self._misses = 0  # since loading

    def start(self) -> None:
        """Take the stored profile if there is one for this machine, else a quick calibration."""
        profile = self.store.find(self._bench.key)
        if profile and profile.quick and self._clock() - profile.measured_at > QUICK_HOLDS_S:
            profile = None
        if profile is None and self._calibrates:
            profile = self._calibrate()
        if profile is not None:
            self.take(profile)

    def _calibrate(self) -> Profile:
        began_s = time.monotonic()
        try:
            profile = _result(measure(self._bench, QUICK, self._clock()))
        finally:
            self._bench.close()
        log.info("profile.calibrated", took_s=round(time.monotonic() - began_s, 2))
        try:
            self.store.save(profile)
        except ConfigError as error:  # the next start has to do it again
            log.warning("profile.not_kept", reason=error.message, hint=error.hint)
        return profile

    def take(self, profile: Profile) -> None:
        """Divide misses as it says, from the next step on."""
        self.profile = profile
        of = self._bench.experts_per_token
        parts = self._experts.parts
        tables = {b: profile.fetch_of(b, of, parts) for b in BATCHES}
        beside = {b: profile.fetch_of(b, of, parts, beside=True) for b in BATCHES}
        self._tables = {batch: table for batch, table in tables.items() if table}
        self._beside = {batch: table for batch, table in beside.items() if table}
        self._modes = {}
        if self._bench.has_link and self._tables:
            divided = {b for b, t in self._tables.items() if t != tuple(range(len(t)))}
            self._modes = {batch: State() for batch in divided if self._bench.has_cpu}
            self._tell()
            self._experts.share_prompts(profile.prompt_rates())
        log.info("profile.taken", of=self.source, fetch_of=tables[1])

    def stepped(self, rows: int, misses: int, seconds: float) -> None:
        """A step is over: leave the way of dividing that is measured slower.

        Args:
            rows: of a decode step; of others 0.
            misses: since loading.
        """
        missed, self._misses = misses - self._misses, misses
        batch = next((b for b in BATCHES if b >= rows), 0) if rows else 0
        state = self._modes.get(batch)
        if state is None:
            return
        after = self._modes[batch] = after_step(state, TUNING, seconds, missed)
        if after.mode is not state.mode:
            self._tell()
        if after.settled is not state.settled:
            log.info(
                "split.changed",
                rows=batch,
                mode=str(after.settled),
                split_ms=round(1000 * after.split_s, 3),
                link_ms=round(1000 * after.link_s, 3),
            )

    def _tell(self) -> None:
        """The experts, how each batch size divides."""
        self._experts.split(self._as_modes_say(self._tables), self._as_modes_say(self._beside))

    def _as_modes_say(self, tables: Mapping[int, Sequence[float]]) -> list[Sequence[float]]:
        return [
            range(len(table)) if self._mode(batch) is Mode.LINK else table
            for batch, table in tables.items()
        ]

    def _mode(self, batch: int) -> Mode:
        return self._modes[batch].mode if batch in self._modes else Mode.SPLIT

    @property
    def source(self) -> str:
        """Where the rates in force come from, for people."""
        if self.profile is None:
            return ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.profile.measured_at))
        kind = f"{'a quick calibration' if self.profile.quick else 'the profile'} of {when}"
        left = [str(b) for b, state in self._modes.items() if state.settled is Mode.LINK]
        return f"{kind}; with {', '.join(left)} rows all over the link was faster" if left else kind

    @property
    def miss_s(self) -> float:
        """What a miss costs a decode step more than a hit; 0: not known, or there is no link."""
        rates = self.profile.rates(1) if self.profile and self._bench.has_link else None
        return miss_s(rates, self._experts.parts) if rates else 0.0

    @property
    def experts_per_token(self) -> int:
        return self._bench.experts_per_token

    @property
    def parts(self) -> int:
        return self._experts.parts

    # ---- measured again, slice by slice

    def next_slice(self, owner: object) -> Slice | Profile:
        """Measure a little more; the profile, already taken over, when all is measured.

        Args:
            owner: the same in every call of one measurement; the first begins it.
        Raises:
            Busy: another one is under way.
            ConfigError: what is measured could not be kept.
        """
        if self._owner is None:
            self.store.prepare()
            self._owner, self._measuring = owner, measure(self._bench, FULL, self._clock())
        if self._owner is not owner:
            raise Busy("a measurement is under way", hint="wait for it; ftctl watch shows it")
        assert self._measuring is not None
        try:
            return next(self._measuring)
        except StopIteration as end:
            profile: Profile = end.value
            self.take(profile)
            return profile

    def end(self, owner: object) -> None:
        """Done, or given up: let go of what its measurement needed. Idempotent."""
        if self._measuring is not None and self._owner is owner:
            self._measuring.close()
            self._measuring = self._owner = None
            self._bench.close()


def _result(measuring: Generator[Slice, None, Profile]) -> Profile:
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            profile: Profile = end.value
            return profile
