"""Decode steps of streams beside a pass over prompts: what runs in its pauses.

They touch nothing of what the pass holds: its sequences are not theirs, its pages have users,
states it writes are in nobody's slots yet, and experts of the layers it has not read are not
evicted. Within one pause each step is launched before the tokens of the one before are read; when
it ends nothing of theirs is in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ftd.engine.answering import Answering
from ftd.engine.api import Output
from ftd.engine.passes import Borders
from ftd.engine.steps import Launched, Steps
from ftd.experts.residents import DECODE_TOKENS
from ftd.schedule.pauses import Pauses


class StepsBeside:
    """``Pause`` of passes.

    Args:
        look: called at each layer border of the steps.
        deliver: gets what they bring, at once.
    Attributes:
        paused_s: of the pass that runs now, or ran last.
    """

    def __init__(
        self, steps: Steps, look: Callable[[], None], deliver: Callable[[list[Output]], None]
    ) -> None:
        self._steps, self._look, self._deliver = steps, look, deliver
        self._pauses = Pauses()
        self._prompts: frozenset[str] = frozenset()  # in the pass that runs now
        self.paused_s = 0.0

    def is_in_pass(self, key: str) -> bool:
        return key in self._prompts

    def pass_begins(self, keys: Seq[str]) -> None:
        self._prompts = frozenset(keys)
        self._pauses = self._pauses.since(self._steps.clock())
        self.paused_s = 0.0

    def pass_ended(self) -> None:
        self._prompts = frozenset()

    def none(self) -> None:
        """There are no prompts any more."""
        self._pauses = self._pauses.over()

    def is_waited_for(self) -> bool:
        return bool(self._streams())

    def coming_s(self) -> float:
        rows = len(self._streams())
        return self._pauses.pause_s(self._steps.clock(), self._decode_s(rows)) if rows else 0.0

    def __call__(self, free: float = 0.0) -> None:
        """Decode steps of the streams, as many as are due."""
        streams = self._streams()
        if not streams:
            self._pauses = self._pauses.over().since(self._steps.clock())  # nobody has waited
        elif self._due(len(streams)):
            with self._steps.experts.within_pass():
                while (most := self._due(len(streams))) and (rows := self._with_pages(streams)):
                    self._run(rows, most, free)
                    streams = self._streams()

    def _due(self, rows: int) -> int:
        return self._pauses.due(self._steps.clock(), self._decode_s(rows)) if rows else 0

    def _decode_s(self, rows: int) -> float | None:
        return self._steps.rates.decode_step_s(rows)

    def _streams(self) -> list[Answering]:
        """Those that could have a decode step now, as many as one has room for, in turns."""
        rows = [a for a in self._steps.roster.running.values() if a.sequence.pending == 1]
        rows = [a for a in rows if not self.is_in_pass(a.key)]
        return sorted(rows, key=lambda a: (a.served, a.sequence.arrival))[:DECODE_TOKENS]

    def _with_pages(self, streams: Seq[Answering]) -> list[Answering]:
        """Those of them for whose next token there is a page; nobody is preempted now."""
        held = self._steps.held
        rows, pages = [], 0
        for answering in streams:
            lacking = held.lacking(answering.sequence, len(answering.sequence.ids))
            held.make_free(pages + lacking)
            if pages + lacking <= held.pages.free:
                pages += lacking
                rows.append(answering)
        return rows

    def _run(self, rows: Seq[Answering], most: int, free: float) -> None:
        """Up to so many steps of the same rows, and at least one."""
        steps = self._steps
        began_s = step_s = steps.clock()
        runs = [(answering, 1) for answering in rows]
        step: Launched | None = steps.run(runs, Borders(steps.experts, self._look))
        done = 0
        while step is not None:
            done += 1
            ahead = steps.follow(step) if done < most else None
            outputs = steps.complete(step, step_s, beside=True)
            for answering in rows:
                answering.served = steps.roster.totals.steps
            self._deliver(outputs)
            step, step_s = ahead, steps.clock()
        now_s = steps.clock()
        took_s = now_s - began_s
        self.paused_s += took_s
        decode_s = self._decode_s(len(rows)) or took_s / done
        self._pauses = self._pauses.ran(now_s, took_s, decode_s, done, free)
