"""Requests in the engine: who waits, who runs, and what becomes of those that end.

Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from ftd.engine.answering import Answering
from ftd.engine.api import EngineRequest, Finish, Output
from ftd.engine.figures import Totals
from ftd.engine.holdings import Holdings
from ftd.engine.sampling import SamplingState
from ftd.errors import ConstraintFailed, EngineFailed
from ftd.schedule.sequence import Sequence

log = structlog.get_logger(__name__)


class Roster:
    def __init__(self, held: Holdings) -> None:
        self.waiting: dict[str, Answering] = {}  # in order of arrival
        self.running: dict[str, Answering] = {}  # in order of admission
        self.totals = Totals()
        self._trials = Totals()  # of requests that nobody has asked
        self._held = held
        self._arrivals = 0

    # ---- who there is

    def is_running(self, answering: Answering) -> bool:
        return self.running.get(answering.key) is answering

    def ready(self) -> list[Answering]:
        """Those that wait for their turn, and not for what is on its way to them."""
        others, waits = bool(self.running), self._held.restoring.waits
        return [a for key, a in self.waiting.items() if not waits(key, others)]

    def oldest_running(self) -> list[Sequence]:
        """Oldest first."""
        return _by_arrival(self.running.values())

    def oldest_waiting(self) -> list[Sequence]:
        """Oldest first."""
        return _by_arrival(self.waiting.values())

    def longest_tokens(self) -> int:
        """Of any request, prompt and output so far."""
        unfinished = (*self.running.values(), *self.waiting.values())
        return max((len(a.sequence.ids) for a in unfinished), default=0)

    def totals_of(self, answering: Answering) -> Totals:
        return self._trials if answering.request.passing else self.totals

    # ---- who comes and goes

    def add(self, request: EngineRequest) -> None:
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals)
        sampling = SamplingState(request.sampling, request.prompt_ids, request.constraint)
        answering = self.waiting[sequence.key] = Answering(sequence, sampling)
        if not answering.wants_scores:
            self._held.restoring.begin(sequence)

    def admit(self, keys: Iterable[str]) -> list[Answering]:
        admitted = [self.waiting.pop(key) for key in keys]
        self.running.update((a.key, a) for a in admitted)
        return admitted

    def preempt(self, key: str) -> None:
        """Back to waiting; what it has computed stays cached while there is room."""
        victim = self.running.pop(key)
        self._held.give_back(victim.sequence)
        victim.scores.clear()
        self.waiting[key] = victim
        self.totals.preempted += 1
        log.info("sequence.preempted", request=key, tokens=len(victim.sequence.ids))

    def end(self, request_id: str, finish: Finish) -> bool:
        """Forget a request; its finished pages stay cached. False: it is over already.

        Args:
            finish: STOP if the text layer has found a stop string, which is a good end.
        """
        self._held.restoring.forget(request_id)
        answering = self.waiting.pop(request_id, None) or self.running.pop(request_id, None)
        if answering is None:
            return False
        self._held.give_back(answering.sequence, answered=finish is Finish.STOP)
        totals = self.totals_of(answering)
        if finish is Finish.STOP:
            totals.finished += 1
        else:
            totals.cancelled += 1
        return True

    def finish(self, answering: Answering) -> None:
        """It has all its tokens."""
        del self.running[answering.key]
        self._held.give_back(answering.sequence, answered=True)
        self.totals_of(answering).finished += 1

    def fail(self, answering: Answering, cause: EngineFailed) -> Output:
        """End one that runs; returns what it is told."""
        log.error("request.failed", request=answering.key, cause=str(cause))
        del self.running[answering.key]
        if isinstance(cause, ConstraintFailed):
            self._held.give_back(answering.sequence)  # what is computed is sound
        else:
            self._held.throw_away(answering.sequence)
        self.totals_of(answering).failed += 1
        return Output(answering.key, finish=Finish.ERROR, error=cause)


def _by_arrival(answering: Iterable[Answering]) -> list[Sequence]:
    return sorted((a.sequence for a in answering), key=lambda sequence: sequence.arrival)
