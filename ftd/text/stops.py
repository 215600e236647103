"""Stop strings, found across token borders in linear time (Aho-Corasick).

``StopSet`` is the automaton, built once per request; ``StopScanner`` walks it for one answer. Text
that may turn out to begin a stop string is held back, everything else is let through at once, so
nothing of a stop string is ever shown. The match that is complete first wins; of several complete
at the same character the longest. The result does not depend on how the text was cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopSet:
    """The automaton over all stop strings of a request; immutable, shared by its answers."""

    __slots__ = ("depth", "fail", "match", "next")

    def __init__(self, stops: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]  # node -> character -> node
        self.fail = [0]  # node -> the longest proper suffix that is a node too
        self.depth = [0]  # characters from the root: what must be held back here
        self.match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self.next) > 1

    def _insert(self, stop: str) -> None:
        assert stop, "an empty stop string would end every answer at once"
        node = 0
        for char in stop:
            if char not in self.next[node]:
                self.next[node][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = self.next[node][char]
        self.match[node] = stop

    def _link(self) -> None:
        """Breadth first, so that a node's suffix is finished before the node."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class StopScanner:
    """One answer's way through a ``StopSet``."""

    __slots__ = ("_held", "_node", "_stops", "matched")

    def __init__(self, stops: StopSet) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is sure to be shown; once ``matched``, push no more."""
        stops, node = self._stops, self._node
        if not stops:
            return text
        for position, char in enumerate(text):
            node = stops.step(node, char)
            if matched := stops.match[node]:
                self.matched = matched
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown[: -len(matched)]
        self._node = node
        text = self._held + text
        shown = text[: len(text) - stops.depth[node]]
        self._held = text[len(shown) :]
        return shown

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def flush(self) -> str:
        """The text ends here, or something else comes between: what was held back is shown."""
        held, self._held, self._node = self._held, "", 0
        return held
