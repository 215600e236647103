"""Recurrent states: which slots of the state cache are free, and which states are worth keeping.

A delta net sums up all tokens before a position in a state of fixed size. A state never changes
once it is written: a step reads the one in its sequence's slot and writes the next one to another
slot. So a slot can be shared like a page, by running sequences and by the store alike, and a step
that is given up leaves everything as it was.

To continue from a position takes the pages before it *and* the state there, so the prefix tree and
the store are asked together: a match goes as deep as the deepest kept state within it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator

from ftd.kv.value import Cost, after_branches, rank

LIVE_STATES = 2  # of a running sequence: the one it is at, and the one that a step writes
_BLOCK_TOKENS = 2048  # compared at once: copies stay in the fastest cache


class StatePool:
    """Slots and how many users each has: accounting only. ``free + held == num_slots``, always.

    Args:
        num_live: the first so many are for what running sequences write, the others for what is
            kept to resume from; 0: every slot is good for both.
    """

    def __init__(self, num_slots: int, num_live: int = 0) -> None:
        assert num_live <= num_slots, (num_live, num_slots)
        self.num_slots, self.num_live = num_slots, num_live
        self._free_kept = list(range(num_slots - 1, num_live - 1, -1))  # a stack, as in PagePool
        self._free = list(range(num_live - 1, -1, -1)) if num_live else self._free_kept
        self._users = [0] * num_slots
        self.lives = [0] * num_slots  # how often each has come free; only grows

    @property
    def free(self) -> int:
        return len(self._free) + (len(self._free_kept) if self.num_live else 0)

    @property
    def held(self) -> int:
        return self.num_slots - self.free

    def users(self, slot: int) -> int:
        return self._users[slot]

    def allocate(self) -> int | None:
        """A slot for a running sequence, the caller its only user, or None if none is free."""
        return self._take(self._free)

    def allocate_kept(self) -> int | None:
        """A slot for a state to keep, the caller its only user, or None if none is free."""
        return self._take(self._free_kept)

    def _take(self, free: list[int]) -> int | None:
        if not free:
            return None
        slot = free.pop()
        self._users[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """Add a user to a slot in use."""
        assert self._users[slot] > 0, f"slot {slot} is free"
        self._users[slot] += 1

    def release(self, slot: int) -> None:
        """Take a user away; the slot is free when it was the last."""
        assert self._users[slot] > 0, f"slot {slot} has no user"
        self._users[slot] -= 1
        if self._users[slot] == 0:
            self.lives[slot] += 1
            (self._free if slot < self.num_live else self._free_kept).append(slot)


class KeptState:
    """The state after ``position`` tokens of some beginning."""

    __slots__ = ("chance", "children", "hits", "parent", "position", "slot", "tokens", "used_s")

    def __init__(
        self, parent: KeptState | None, tokens: array[int], position: int, slot: int
    ) -> None:
        self.parent = parent  # the deepest kept state before it; the root has position 0
        self.tokens = tokens  # between the parent's position and this one
        self.position = position
        self.slot = slot
        self.children: list[KeptState] = []
        self.chance = 0.0  # that it is taken, as far as was known when it was kept
        self.used_s = 0.0  # when it was last kept or taken
        self.hits = 0  # how often it was taken

    @property
    def rank(self) -> float:
        """Order of eviction, lowest first: by the tokens to compute again without it."""
        seconds = Cost(1.0).seconds(self.position - len(self.tokens), self.position)
        return rank(seconds, after_branches(self.chance, max(0, self.hits - 1)), self.used_s)

    def ids(self) -> array[int]:
        """All tokens up to its position."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return sum(reversed(parts), array("i"))


class StateStore:
    """Kept states by the exact tokens before them: a tree whose nodes are states.

    The store is a user of each slot it keeps. Costs follow the number of states on the path; tokens
    are compared in C. Evicts what is worth least, as ``ftd.kv.value`` has it.
    """

    def __init__(self, pool: StatePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._root = KeptState(None, array("i"), 0, -1)
        self._kept: dict[int, KeptState] = {}  # by slot

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[KeptState]:
        return iter(tuple(self._kept.values()))

    @property
    def idle(self) -> int:
        """Slots that nobody but the store uses: what ``evict`` can free."""
        return sum(self._is_idle(kept) for kept in self._kept.values())

    def find(self, ids: array[int], limit: int) -> int:
        """The deepest position, at most ``limit``, with a kept state of these tokens; or 0."""
        return self._deepest(ids, min(limit, len(ids))).position

    def path(self, ids: array[int]) -> list[KeptState]:
        """The kept states that these tokens come by, in order."""
        found, node = [], self._root
        while after := next((c for c in node.children if _leads(c, ids, len(ids))), None):
            found.append(node := after)
        return found

    def take(self, ids: array[int], position: int) -> int | None:
        """The slot of the state that ``find`` found, with the caller as a further user.

        None at position 0: a sequence begins without a state.
        """
        kept = self._deepest(ids, position)
        assert kept.position == position, (kept.position, position)
        if kept is self._root:
            return None
        kept.used_s = self._clock()
        kept.hits += 1
        self._pool.retain(kept.slot)
        return kept.slot

    def keep(self, ids: array[int], slot: int, chance: float) -> None:
        """Remember that ``slot`` holds the state after all of ``ids``; known ones stay as they are.

        The caller's use of the slot is its own to release.

        Args:
            chance: that somebody takes it, as in ``ftd.kv.value``.
        """
        parent = self._deepest(ids, len(ids))
        if parent.position == len(ids):
            parent.used_s, parent.chance = self._clock(), max(parent.chance, chance)
            return
        assert slot not in self._kept, f"slot {slot} is kept for other tokens"
        kept = KeptState(parent, ids[parent.position :], len(ids), slot)
        for child in [c for c in parent.children if self._continues(c, ids)]:
            parent.children.remove(child)
            self._append(kept, child, child.tokens[len(kept.tokens) :])
        self._append(parent, kept, kept.tokens)
        self._kept[slot] = kept
        self._pool.retain(slot)
        kept.used_s, kept.chance = self._clock(), chance

    def evict(self) -> bool:
        """Free the slot whose state is worth least. False: all are in use."""
        idle = [kept for kept in self._kept.values() if self._is_idle(kept)]
        if idle:
            self.drop(min(idle, key=lambda kept: kept.rank))
        return bool(idle)

    def drop(self, kept: KeptState) -> None:
        """Forget a state. Its slot is free unless a sequence uses it."""
        parent = kept.parent
        assert parent is not None and self._kept[kept.slot] is kept, kept.slot
        parent.children.remove(kept)
        for child in kept.children:
            self._append(parent, child, kept.tokens + child.tokens)
        del self._kept[kept.slot]
        self._pool.release(kept.slot)

    def clear(self) -> None:
        """Forget all states."""
        for kept in self:
            self.drop(kept)

    def _deepest(self, ids: array[int], limit: int) -> KeptState:
        node = self._root
        while found := next((c for c in node.children if _leads(c, ids, limit)), None):
            node = found
        return node

    def _continues(self, child: KeptState, ids: array[int]) -> bool:
        """``child`` lies behind ``ids``, which lie behind its parent."""
        start = child.position - len(child.tokens)
        return child.position > len(ids) and child.tokens[: len(ids) - start] == ids[start:]

    def _append(self, parent: KeptState, child: KeptState, tokens: array[int]) -> None:
        child.parent, child.tokens = parent, tokens
        parent.children.append(child)

    def _is_idle(self, kept: KeptState) -> bool:
        return self._pool.users(kept.slot) == 1


def _leads(child: KeptState, ids: array[int], limit: int) -> bool:
    """The tokens of ``child`` go on as ``ids`` do, to a position within ``limit``."""
    if child.position > limit:
        return False
    start, length = child.position - len(child.tokens), len(child.tokens)
    return all(
        child.tokens[at : at + _BLOCK_TOKENS]
        == ids[start + at : start + min(at + _BLOCK_TOKENS, length)]
        for at in range(0, length, _BLOCK_TOKENS)
    )
