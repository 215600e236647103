"""Places of the staging area: which of a pass's experts lie there, and which place is free."""

from __future__ import annotations

from collections.abc import Sequence


class Places:
    """A layer's experts hold theirs until the pass enters a later layer."""

    def __init__(self, num: int) -> None:
        self._free = list(range(num - 1, -1, -1))
        self._held: dict[int, dict[int, int]] = {}  # row → expert → place

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, row: int) -> dict[int, int]:
        """The pass is at ``row``: what others hold is free. Returns its experts' places."""
        for other in [other for other in self._held if other != row]:
            self._free.extend(self._held.pop(other).values())
        return dict(self._held.get(row, {}))

    def take(self, row: int, experts: Sequence[int]) -> dict[int, int]:
        """Give places to the first of ``experts``, as many as are free; they hold none yet."""
        held = self._held.setdefault(row, {})
        taken = {}
        for expert in experts[: len(self._free)]:
            assert expert not in held, (row, expert)
            taken[expert] = held[expert] = self._free.pop()
        return taken

    def clear(self) -> None:
        for held in self._held.values():
            self._free.extend(held.values())
        self._held.clear()
