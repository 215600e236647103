"""What sequences hold in layers with a window, and at which positions a copy of it is kept.

To the rest of the engine the keys within the window are a recurrent state: a sequence carries them
along, and goes on from a position at which they were kept. Unlike such a state they change in
place, so what is kept is always a copy, made when the step that brought it has ended.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ftd.engine.recurrence import Recurrence, StateMoves, borders
from ftd.kv.anchors import AnchorKind
from ftd.kv.pages import PagePool
from ftd.kv.state_cache import StateCache
from ftd.kv.value import chance
from ftd.kv.window_cache import WindowPages
from ftd.schedule.sequence import Sequence


@dataclass(slots=True)
class _Held:
    """Pages of a sequence by their place in it; those before ``first`` have been given back."""

    pages: array[int] = field(default_factory=lambda: array("i"))
    first: int = 0


class Windows(Recurrence):
    """Owned by the engine thread.

    Args:
        states: where copies are kept; without slots, sequences always begin at their beginning.
    """

    def __init__(
        self,
        windows: WindowPages,
        states: StateCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(states.num_slots, 0, windows.page_tokens, clock)
        self._windows, self._states = windows, states
        self._seen_tokens = windows.windowing.tokens
        first = windows.first_page
        self.window_pages = PagePool(windows.num_pages - first, windows.page_tokens, first)
        self._held: dict[str, _Held] = {}

    @property
    def is_used(self) -> bool:
        return True

    def start(self, sequence: Sequence, known_tokens: int) -> bool:
        self._forks[sequence.key] = known_tokens
        held = self._held[sequence.key] = _Held()
        if self.store.find(sequence.ids, sequence.computed) != sequence.computed:
            return False
        slot = self.store.take(sequence.ids, sequence.computed)
        if slot is not None:
            held.first = self._first_seen(sequence.computed)
            held.pages.extend([0] * held.first)
            self._extend(held, sequence.computed)
            self._windows.load(held.pages, sequence.computed, self._states.slot(slot))
            self.pool.release(slot)  # whoever writes there next does so behind the copy
        return True

    def step(self, sequence: Sequence, tokens: int) -> StateMoves:
        """Pages for the next ``tokens``, and slots for the copies to be made behind them."""
        held, end = self._held[sequence.key], sequence.computed + tokens
        self._extend(held, end)
        targets, kept = [], []
        wanted = self._wanted(sequence, end)
        for position, chance_of in wanted.items():
            if (slot := self._border_slot()) is not None:
                targets.append((position, slot))
                kept.append(chance_of)
        return StateMoves(None, tuple(targets), tuple(kept), held.pages)

    def step_ahead(self, sequence: Sequence, moves: StateMoves | None) -> StateMoves:
        held = self._held[sequence.key]
        self._extend(held, sequence.computed + 2)
        return StateMoves(None, (), (), held.pages)

    def commit(self, sequence: Sequence, moves: StateMoves | None) -> None:
        """The step has ended: copies are made, and what no later token sees is given back.

        A step launched ahead is a later one, too: it sees nothing of what goes.
        """
        assert moves is not None
        held = self._held[sequence.key]
        for (position, slot), chance_of in zip(moves.targets, moves.kept, strict=True):
            self._windows.save(held.pages, position, self._states.slot(slot))
            self.store.keep(sequence.ids[:position], slot, chance_of)
            self.pool.release(slot)
        self._writing -= len(moves.targets)
        seen = min(self._first_seen(sequence.computed), len(held.pages))
        self.window_pages.release(held.pages[held.first : seen])
        for place in range(held.first, seen):
            held.pages[place] = 0
        held.first = max(held.first, seen)

    def abandon(self, sequence: Sequence, moves: StateMoves | None) -> None:
        """The step came to nothing: another may need the pages that this one was given."""
        assert moves is not None
        for _, slot in moves.targets:
            self.pool.release(slot)
        self._writing -= len(moves.targets)
        if held := self._held.get(sequence.key):
            used = max(held.first, -(-sequence.computed // self.page_tokens))
            self.window_pages.release(held.pages[used:])
            del held.pages[used:]

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._forks.pop(sequence.key, None)
        held = self._held.pop(sequence.key, None)
        if held is None:
            return
        if keep and sequence.computed:
            self._keep_end(sequence, held)
        self.window_pages.release(held.pages[held.first :])

    def _wanted(self, sequence: Sequence, end: int) -> dict[int, float]:
        """Positions to keep a copy at, each with the chance that it is resumed from.

        One is before the last token of the prompt, all that the same prompt computes again.
        """
        wanted = borders(sequence, end, self._forks[sequence.key], self.page_tokens)
        last = sequence.prompt_tokens - 1
        if sequence.computed < last <= end:
            wanted[last] = max(wanted.get(last, 0.0), chance(AnchorKind.USER))
        return wanted

    def _keep_end(self, sequence: Sequence, held: _Held) -> None:
        ids = sequence.ids[: sequence.computed]
        known = self.store.find(ids, len(ids)) == len(ids)
        slot = None if known or not self._has_room() else self.pool.allocate_kept()
        if slot is not None:
            self._windows.save(held.pages, len(ids), self._states.slot(slot))
            self.store.keep(ids, slot, chance(AnchorKind.TURN))
            self.pool.release(slot)

    def _first_seen(self, position: int) -> int:
        """The first page that a token at ``position``, or a later one, sees."""
        return max(0, position - self._seen_tokens) // self.page_tokens

    def _extend(self, held: _Held, tokens: int) -> None:
        """Pages for so many tokens from the sequence's beginning."""
        lacking = max(0, -(-tokens // self.page_tokens) - len(held.pages))
        pages = self.window_pages.allocate(lacking)
        assert pages is not None, (tokens, lacking, self.window_pages.free)
        held.pages.extend(pages)
