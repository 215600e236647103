"""What the next step runs: pure functions from plain numbers to a plan.

All sequences are treated alike: one with a single pending token is a decode row, one with more is a
prompt (or a preempted sequence that comes back), computed in chunks. A step is one or the other:
all decode rows, or a *pass* over chunks of prompts, large ones, within which decode rows have steps
of their own (``pauses``).

Order. Sequences are admitted as they arrived; only copies that wait for a sibling's prompt are
overtaken. Prompts under way take turns, the shortest first, but each turn passed over counts as a
chunk less, and none counts as longer than ``PATIENCE`` chunks: a short prompt waits little, a long
one never starves.

Pages. Admission needs pages for one chunk, beside what prompts under way still need; nothing is set
aside for output that may never come. When pages run out, cached ones are evicted, then the youngest
running sequences are preempted in favour of older ones. What cannot get a page just now keeps those
it has and waits. The oldest always gets its pages, and one sequence alone fits into the pool, so
something always comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    chunk_tokens: int  # prompt tokens in one step, at most
    num_pages: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a plan needs to know of a sequence."""

    key: str
    arrival: int  # rank: smaller is older
    prompt_tokens: int
    tokens: int  # prompt and output so far
    computed: int = 0  # of these, how many have KV
    pages: int = 0  # held
    exclusive_pages: int = 0  # of these, how many nobody else uses
    passed_over: int = 0  # steps with prompt work in which it had none
    waits_for: str | None = None  # sibling whose prompt it copies

    @property
    def pending(self) -> int:
        return self.tokens - self.computed


@dataclass(frozen=True, slots=True)
class Run:
    key: str
    tokens: int  # the next ones pending; if these are all, logits are wanted


@dataclass(frozen=True, slots=True)
class StepPlan:
    """To be carried out in this order: preempt, admit, make free, allocate, run."""

    preempt: tuple[str, ...]  # back to waiting, their pages released
    admit: tuple[str, ...]  # waiting to running, with the pages the prefix tree has for them
    new_pages: int  # what chunks and rows together need: evict cached pages until so many are free
    runs: tuple[Run, ...]  # chunks of prompts, or decode rows, oldest first
    prompt_tokens: int  # of a pass; 0: these are decode rows
    passed_over: tuple[str, ...]  # prompts that had no turn, though others had


def next_in_line(
    waiting: Sequence[SequenceView], running: Sequence[SequenceView], limits: Limits
) -> list[str]:
    """Who may be admitted next, as far as order and number go: the candidates of ``plan_step``."""
    unready = {s.key for s in (*waiting, *running) if s.computed < s.prompt_tokens}
    ready = (s.key for s in sorted(waiting, key=_arrival) if s.waits_for not in unready)
    return list(islice(ready, max(0, limits.max_running - len(running))))


def plan_step(
    running: Sequence[SequenceView],
    candidates: Sequence[SequenceView],
    *,
    free_pages: int,
    idle_pages: int,
    limits: Limits,
) -> StepPlan:
    """Choose what the next step does.

    Args:
        candidates: those of ``next_in_line``, in its order, as they would be after using what the
            prefix tree knows of them; ``exclusive_pages`` are then the pages that are idle now.
        free_pages, idle_pages: of the pool; idle ones can be evicted.
    """
    ledger = _Ledger(limits, free_pages + idle_pages, sorted(running, key=_arrival))
    rows = ledger.claim()
    admitted = ledger.admit(candidates, len(rows))
    rows += ledger.join(s for s in admitted if s.pending == 1)
    prompts = [s for s in (*ledger.running, *admitted) if s.pending > 1]
    chunks = ledger.chunks(prompts, limits.chunk_tokens)
    served = {run.key for run in chunks}
    return StepPlan(
        preempt=tuple(s.key for s in ledger.preempted),
        admit=tuple(s.key for s in admitted),
        new_pages=ledger.new_pages,
        runs=chunks or tuple(Run(s.key, 1) for s in rows),
        prompt_tokens=sum(run.tokens for run in chunks),
        passed_over=tuple(s.key for s in prompts if chunks and s.key not in served),
    )


class _Ledger:
    """Pages while a plan is being made: what is still to be had, and who was given how many."""

    def __init__(self, limits: Limits, room: int, running: list[SequenceView]) -> None:
        self.limits = limits
        self.room = room  # pages free, or that eviction would free
        self.running = running  # oldest first; the preempted ones go from the end
        self.preempted: list[SequenceView] = []
        self.new_pages = 0
        self._reserved: dict[str, int] = {}  # for the oldest, if it is a prompt

    def need(self, s: SequenceView, tokens: int) -> int:
        """Pages it lacks for its next ``tokens``."""
        return max(0, -(-(s.computed + tokens) // self.limits.page_tokens) - s.pages)

    def claim(self) -> list[SequenceView]:
        """Give every decode row its page, and set aside the oldest prompt's; returns the rows."""
        rows: list[SequenceView] = []
        i = 0
        while i < len(self.running):
            s = self.running[i]
            if s.pending == 1 or i == 0:
                need = self.need(s, min(s.pending, self.limits.chunk_tokens))
                while need > self.room and len(self.running) > i + 1:
                    self._preempt_youngest()
                if need <= self.room:
                    self.room -= need
                    if s.pending == 1:
                        rows.append(s)
                        self.new_pages += need
                    else:
                        self._reserved[s.key] = need
            i += 1
        return rows

    def _preempt_youngest(self) -> None:
        victim = self.running.pop()
        self.preempted.append(victim)
        # Pages shared by several victims are exclusive to none of them, yet come free as well:
        # what the others hold bounds that from the other side.
        given = self.new_pages + sum(self._reserved.values())
        others = self.limits.num_pages - sum(s.pages for s in self.running) - given
        self.room = max(self.room + victim.exclusive_pages, others)

    def admit(self, candidates: Sequence[SequenceView], decode_rows: int) -> list[SequenceView]:
        """In their order, as far as one chunk of each fits beside what the others need."""
        admitted: list[SequenceView] = []
        if self.preempted:
            return admitted
        # A page for every stream: it is soon at its next border, and would preempt the newcomer.
        spare = self.room - decode_rows
        spare -= sum(self._outstanding(s) for s in self.running if s.pending > 1)
        for s in candidates:
            chunk = self.need(s, min(s.pending, self.limits.chunk_tokens))
            if s.exclusive_pages + chunk > spare:
                break
            admitted.append(s)
            self.room -= s.exclusive_pages
            spare -= s.exclusive_pages + self._outstanding(s)
        return admitted

    def join(self, newcomers: Iterable[SequenceView]) -> list[SequenceView]:
        """Give a page to rows that begin as such, where one is left."""
        rows = []
        for s in newcomers:
            need = self.need(s, 1)
            if need <= self.room:
                self.room -= need
                self.new_pages += need
                rows.append(s)
        return rows

    def _outstanding(self, s: SequenceView) -> int:
        """Pages a prompt still needs before its first token, less those set aside."""
        return self.need(s, s.pending) - self._reserved.get(s.key, 0)

    def chunks(self, prompts: Sequence[SequenceView], budget: int) -> tuple[Run, ...]:
        """Share ``budget`` tokens out in turns, leaving to older prompts what they still need."""
        chunks: list[Run] = []
        outstanding = {s.key: self._outstanding(s) for s in prompts}
        for s in sorted(prompts, key=self._turn):
            older = sum(outstanding[t.key] for t in prompts if t.arrival < s.arrival)
            reserved = self._reserved.pop(s.key, 0)
            within = max(0, self.room - older) + reserved
            covered = (s.pages + within) * self.limits.page_tokens - s.computed
            tokens = min(s.pending, budget, covered)
            if budget < min(s.pending, self.limits.page_tokens, self.limits.chunk_tokens):
                tokens = 0  # crumbs are no turn
            need = self.need(s, tokens) if tokens > 0 else 0
            self.room += reserved - need
            if tokens > 0:
                chunks.append(Run(s.key, tokens))
                budget -= tokens
                self.new_pages += need
                outstanding[s.key] = self.need(s, s.pending) - need
        return tuple(chunks)

    def _turn(self, s: SequenceView) -> tuple[int, int]:
        chunks = -(-s.pending // self.limits.chunk_tokens)
        return min(chunks, PATIENCE) - s.passed_over, s.arrival


def _arrival(s: SequenceView) -> int:
    return s.arrival
