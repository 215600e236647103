"""The anchors that stand in a prefix tree: noted when pages are kept, counted when one is used.

An anchor stands on the run that holds the token before it, and goes when that page goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

from ftd.kv.anchors import Anchor, AnchorKind, KeptAnchor
from ftd.kv.prefix_tree import PrefixTree
from ftd.kv.runs import Run
from ftd.kv.states import StateStore
from ftd.kv.value import Cost, chance, is_side

SESSIONS = 4096  # whose longest prompt is remembered


class Standing(NamedTuple):
    anchor: KeptAnchor
    tokens: int  # behind the anchor before it
    run: Run
    held: int  # of these tokens, those that are not listed with an anchor of another prompt


class AnchorBook:
    """
    Args:
        below: of a tier that keeps what is evicted here. An anchor that stands there still is the
            same one when its tokens have been computed again.
    """

    def __init__(self, tree: PrefixTree, below: AnchorBook | None = None) -> None:
        self._tree, self._below = tree, below
        self._longest: dict[str, int] = {}  # prompt of each session, oldest sessions first
        self._shown: WeakSet[KeptAnchor] = WeakSet()  # as long as a run has them, in any tier
        self.hits = 0
        self.saved = 0.0  # as in ``KeptAnchor``

    @property
    def count(self) -> int:
        return len(self._shown)

    def first_chance(self, session: str, prompt_tokens: int) -> float:
        """Of a match with what a request adds, before anything is known of it."""
        return chance(None, side=self._is_side(session, prompt_tokens))

    def note(
        self, ids: array[int], anchors: Iterable[Anchor], session: str, prompt_tokens: int
    ) -> None:
        """Anchors of what has been kept of ``ids``, in order.

        Behind the system prompt a run is cut: what many share outlives what they do not.
        """
        side, turns = self._is_side(session, prompt_tokens), 0
        self._remember(session, prompt_tokens)
        path = self._tree.path(ids)
        for passed in path:
            passed.session = session if passed.session in (None, session) else ""
        runs: Iterator[Run] = iter(path)
        run = next(runs, None)
        for anchor in anchors:
            while run is not None and anchor.position > run.end:
                run = next(runs, None)
            if run is None:
                return
            self._stand(run, ids, anchor, session)
            upper = run
            if anchor.kind is AnchorKind.SYSTEM:
                upper = self._tree.cut(run, anchor.position)
            if upper is not run:  # further anchors may stand on the page that was cut behind
                run, runs = upper, chain((run,), runs)
            upper.chance = max(upper.chance, chance(anchor.kind, turns=turns, side=side))
            turns += anchor.kind is AnchorKind.TURN

    def resumed(
        self, ids: array[int], tokens: int, session: str = "", *, trial: bool = False
    ) -> KeptAnchor | None:
        """A prompt goes on behind ``tokens`` known ones: the anchor it has passed last, if any.

        Where prompts part a second time is an anchor from then on.

        Args:
            trial: nobody has asked it: it counts in no total.
        """
        runs = self._tree.path(ids[:tokens])
        if not runs or runs[-1].end < tokens:
            return None
        passed = max(
            (a for run in runs for a in run.anchors.values() if a.position <= tokens and a.shown),
            key=lambda a: a.position,
            default=None,
        )
        if passed is None or passed.position < tokens:
            fork = runs[-1].anchors.get(tokens)
            if fork is not None:
                passed = fork
            else:
                self._stand(runs[-1], ids, Anchor(tokens, AnchorKind.FORK), session)
        if passed is not None:
            passed.hits += 1
            passed.used_s = self._tree.now_s()
            saved = Cost(1.0).seconds(0, tokens)
            passed.saved += saved
            self._shown.add(passed)
            self.hits += not trial
            self.saved += saved * (not trial)
        return passed

    def take_back(self, ids: array[int], anchors: Iterable[KeptAnchor]) -> None:
        """Anchors, in order, of pages that are here again."""
        runs = self._tree.path(ids)
        for anchor in anchors:
            for run in runs:
                if run.begin < anchor.position <= run.end:
                    known = run.anchors.get(anchor.position)
                    if known is None or known.hits < anchor.hits:
                        run.anchors[anchor.position] = anchor

    def with_states(self, states: StateStore) -> set[tuple[Run, int]]:
        """Runs and positions at which a state of recurrent layers is kept beside the pages."""
        found = set()
        for kept in states:
            runs = self._tree.path(kept.ids())
            if runs and runs[-1].end >= kept.position:
                found.add((runs[-1], kept.position))
        return found

    def drop(self, session: str | None = None) -> int:
        """Forget what only ``session`` has used, or all; returns the pages freed.

        What running requests use stays.
        """
        freed = 0
        for run in reversed(list(self._tree.runs())):
            if not run.children and session in (None, _owner(run)):
                freed += self._tree.drop(run)
        self._shown = WeakSet(standing.anchor for book in self._tiers for standing in book)
        return freed

    @property
    def _tiers(self) -> tuple[AnchorBook, ...]:
        return (self, self._below) if self._below else (self,)

    def __iter__(self) -> Iterator[Standing]:
        """All of them, each after those before it on its path."""
        before: dict[Run, int] = {}
        listed: dict[Run, int] = {}  # up to which position of each run
        seen: set[int] = set()
        for run in self._tree.runs():
            last = before.get(run.parent, 0) if run.parent else 0
            for position in sorted(run.anchors):
                anchor = run.anchors[position]
                if anchor.shown and id(anchor) not in seen:
                    seen.add(id(anchor))
                    yield Standing(anchor, position - last, run, _list(run, position, listed))
                if anchor.shown:
                    last = position
            before[run] = last

    def _stand(self, run: Run, ids: array[int], anchor: Anchor, session: str) -> None:
        """Note an anchor. Pages copied from one another in part share those of the common part."""
        if anchor.position not in run.anchors and run.parent is not None:
            if self._below and (known := self._below._known(ids, anchor.position)):
                run.anchors[anchor.position] = known
            key = run.tokens[: anchor.position - run.begin].tobytes()
            for twin in run.parent.all_holding(key):
                if known := twin.anchors.get(anchor.position):
                    run.anchors[anchor.position] = known
                    break
        kept = run.stand(anchor, session, self._tree.now_s())
        if kept.shown:
            self._shown.add(kept)

    def _known(self, ids: array[int], position: int) -> KeptAnchor | None:
        """The anchor that stands behind so many tokens of ``ids``."""
        *_, run = self._tree.path(ids[:position]) or (None,)
        if run is None or ids[run.begin : position] != run.tokens[: position - run.begin]:
            return None
        return run.anchors.get(position)

    def _is_side(self, session: str, prompt_tokens: int) -> bool:
        return is_side(prompt_tokens, self._longest.get(session, 0))

    def _remember(self, session: str, prompt_tokens: int) -> None:
        if not session:
            return
        longest = max(prompt_tokens, self._longest.pop(session, 0))
        self._longest[session] = longest
        if len(self._longest) > SESSIONS:
            del self._longest[next(iter(self._longest))]


def _list(run: Run, position: int, listed: dict[Run, int]) -> int:
    """List the tokens on the way to a position of a run; how many are new to the list."""
    new, at = 0, run
    while at.parent is not None:
        begin, end = listed.get(at, at.begin), min(position, at.end)
        if begin >= end:  # and so is what comes before
            break
        new += end - begin
        listed[at] = end
        at = at.parent
    return new


def _owner(run: Run) -> str | None:
    """Whose a run is: of the only session that came by, or else by the anchors before its end.

    Where prompts part is not asked: whoever comes there second has used nothing behind it.
    """
    if run.session is not None:
        return run.session
    at: Run | None = run
    while at is not None:
        made = [p for p, anchor in at.anchors.items() if anchor.kind is not AnchorKind.FORK]
        if made:
            return at.anchors[max(made)].session
        at = at.parent
    return None
