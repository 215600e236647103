"""Finds the pages whose KV a new sequence can use again: a radix tree over whole pages of tokens.

A node is a run of pages with the exact tokens they hold; its children continue it with different
next pages. Match and insert cut a run where they end, so all pages of a node were last used
together, and a node's end is a page border somebody cared about. Costs follow the number of nodes
on the path, not of pages: comparing tokens is one C loop over two arrays.

A match goes on within the page where it leaves the tree: the page that agrees longest is named, for
the caller to copy what they share. A sequence that ends within a page leaves that page as a *tail*,
a leaf of fewer tokens; nobody writes to it any more, whoever continues it copies it.

Running sequences use a path from the root (``insert`` swaps their own copy of a page for the
tree's), so behind an idle page there are only idle ones, and ``PagePool.idle`` is exactly what
``evict`` can free. Pages are evicted from the ends of the tree, those of the lowest rank first: by
default the least recently used, in an engine by value (``ftd.kv.value``).

Token ids and page numbers come and go as ``array("i")``: four bytes each, compared and copied as
one piece. The tree belongs to one loaded model: KV of another model or dtype is never found in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from ftd.kv.anchors import Ended, KeptAnchor
from ftd.kv.pages import PagePool
from ftd.kv.runs import ID_BYTES, Run, agreed_tokens

_BLOCK_PAGES = 128  # compared at once


class Reuse(NamedTuple):
    tokens: int  # that a match would bring
    pages: int  # of which so many are whole, the rest is in a page to copy from
    idle_pages: int  # of the whole ones, those that could be evicted now and would be in use then


class Part(NamedTuple):
    """A page whose first ``tokens`` agree."""

    page: int
    tokens: int


class Match(NamedTuple):
    pages: array[int]
    part: Part | None  # of the page behind them
    ended: Ended


# Of a run of pages: its end, the chance of a match, other ways on from it, and its last use
Rank = Callable[[int, float, int, float], float]


def least_recently_used(end: int, chance: float, branches: int, used: float) -> float:
    return used


class PrefixTree:
    """
    Args:
        rank: what is evicted first has the lowest; must rise with use.
        clock: of uses; without one each use is a tick.
    """

    def __init__(
        self,
        pool: PagePool,
        rank: Rank = least_recently_used,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._pool = pool
        self._page_tokens = pool.page_tokens
        self._rank = rank
        self._clock = clock or count(1).__next__
        self.leaving: Callable[[Run, int], None] | None = None  # told of pages before ``evict``
        self._now = 0.0
        self._serial = count()
        self._root = Run(None, 0, array("i"), array("i"))
        self._queue: list[tuple[float, int, Run]] = []  # (rank then, tie-break, leaf)

    def peek(self, ids: array[int], limit: int | None = None) -> Reuse:
        """What ``match`` would find, without taking or touching anything."""
        most = self._most_tokens(ids, limit)
        path = self._path(ids, most // self._page_tokens)
        pages = self._pages(path)
        part = self._part(path, ids, len(pages) * self._page_tokens, most)
        tokens = len(pages) * self._page_tokens + (part[1] if part else 0)
        return Reuse(tokens, len(pages), self._pool.num_idle(pages))

    def match(self, ids: array[int], limit: int | None = None) -> Match:
        """Pages of the longest known beginning of ``ids``, with the caller as a further user.

        At most ``limit`` tokens, and never all of ``ids``: the last token has to be computed, since
        its logits choose the next one. The page of ``part`` is not the caller's to use: it is to
        be copied, then released.
        """
        most = self._most_tokens(ids, limit)
        path = self._path(ids, most // self._page_tokens)
        pages = self._pages(path)
        found = self._part(path, ids, len(pages) * self._page_tokens, most)
        tokens = len(pages) * self._page_tokens + (found[1] if found else 0)
        ended = Ended.WHOLE if tokens == most else self._why(path, found)
        self._touch(path)
        self._pool.retain(pages)
        if found is None:
            return Match(pages, None, ended)
        node, shared, page = found
        if node.is_tail(self._page_tokens):
            node.used = self._now
        self._pool.retain((page,))
        return Match(pages, Part(page, shared), ended)

    def insert(
        self,
        ids: array[int],
        pages: array[int],
        *,
        ends: bool = False,
        chance: float = 0.0,
        session: str = "",
    ) -> None:
        """Keep the whole pages of ``ids``, whose KV has been computed into the caller's ``pages``.

        To be called with all tokens computed so far, after each chunk; what is known already costs
        next to nothing. Where the tree has a page with the same tokens, the caller becomes a user
        of that one, in place, and its own copy is released.

        Args:
            ends: the caller writes no more: a page filled in part is kept as well.
            chance: of a match with what is new.
            session: it comes from; what is new stands apart from what another session has left.
        """
        num_pages = min(len(ids) // self._page_tokens, len(pages))
        path = self._path(ids, num_pages)
        known = self._pages(path)
        end = self._touch(path)
        self._swap(pages, known)
        whole = num_pages * self._page_tokens
        if len(known) < num_pages:
            tokens = ids[len(known) * self._page_tokens : whole]
            end = self._extend(end, tokens, pages[len(known) : num_pages], chance, session)
        if ends and len(ids) > whole and len(pages) > num_pages:
            self._keep_tail(end, ids[whole:], pages[num_pages], chance)

    def evict(self, n: int, below: float = inf) -> int:
        """Free up to ``n`` idle pages, those of the lowest rank first; returns how many.

        Args:
            below: only of a lower rank than this.
        """
        return self._evict(n, below, self.leaving)

    def forget(self, n: int) -> int:
        """As ``evict``, but for good: nobody is told of the pages."""
        return self._evict(n, inf, None)

    def _evict(self, n: int, below: float, leaving: Callable[[Run, int], None] | None) -> int:
        freed, busy = 0, []
        while freed < n and self._queue:
            rank, _, node = heappop(self._queue)
            node.queued = False
            if node.children or not node.pages:
                continue  # queued again when it has lost the last of them; or gone already
            if rank < self._rank_of(node):
                self._enqueue(node)  # used since it was queued
                continue
            if rank >= below:
                busy.append(node)
                break
            freed += self._trim(node, n - freed, leaving)
            if node.pages:
                busy.append(node)
        for node in busy:  # one for each running sequence at most, and the one trimmed in part
            self._enqueue(node)
        return freed

    def clear(self) -> int:
        """Forget all that no running sequence uses; returns the number of pages freed."""
        freed = self.forget(self._pool.idle)
        self._root.trimmed = bool(self._root.children)  # with nothing left, nothing is missed
        return freed

    def now_s(self) -> float:
        """When something was last used."""
        return self._now

    def path(self, ids: array[int]) -> list[Run]:
        """The runs that hold ``ids``, as far as they are known, to a page filled in part."""
        runs = [run for run, _ in self._path(ids, len(ids) // self._page_tokens)]
        end = runs[-1] if runs else self._root
        if end.end < len(ids) and (tail := end.holding(ids[end.end :].tobytes())):
            runs.append(tail)
        return runs

    def runs(self) -> Iterator[Run]:
        """All, each after its parent."""
        runs = list(self._root.children.values())
        while runs:
            run = runs.pop()
            yield run
            runs.extend(run.children.values())

    def cut(self, run: Run, end: int) -> Run:
        """Part a run at the page border at or behind position ``end``; returns what is before."""
        pages = -(-(end - run.begin) // self._page_tokens)
        return run.split_off(pages, self._page_tokens) if pages < len(run.pages) else run

    def drop(self, run: Run) -> int:
        """Free the idle pages at the end of a leaf; returns how many."""
        assert not run.children, run.end
        return self._trim(run, len(run.pages))

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Pages have been moved: old number → new. Tokens, users and order of use are as before."""
        for run in self.runs():
            run.pages = array("i", [moves.get(page, page) for page in run.pages])

    def _most_tokens(self, ids: array[int], limit: int | None) -> int:
        return max(len(ids) - 1 if limit is None else min(limit, len(ids) - 1), 0)

    def _key(self, tokens: array[int], at: int = 0) -> bytes:
        return tokens[at : at + self._page_tokens].tobytes()

    def _path(self, ids: array[int], num_pages: int) -> list[tuple[Run, int]]:
        """Nodes along ``ids`` and how many pages of each agree: all, except perhaps of the last."""
        path: list[tuple[Run, int]] = []
        node, at, end = self._root, 0, num_pages * self._page_tokens
        while at < end:
            child = node.children.get(self._key(ids, at))
            if child is None:
                break
            agreed = self._agreed_pages(child.tokens, ids, at, end)
            path.append((child, agreed))
            if agreed < len(child.pages):
                break
            node, at = child, at + len(child.tokens)
        return path

    def _agreed_pages(self, run: array[int], ids: array[int], at: int, end: int) -> int:
        """How many pages of ``run`` agree with ``ids[at:end]``, from the first."""
        agreed, length = 0, min(len(run), end - at)
        # In blocks first, of a size whose copies stay in the fastest cache; then page by page.
        for size in (_BLOCK_PAGES * self._page_tokens, self._page_tokens):
            while agreed < length:
                stop = min(agreed + size, length)
                if run[agreed:stop] != ids[at + agreed : at + stop]:
                    break
                agreed = stop
        return agreed // self._page_tokens

    def _pages(self, path: list[tuple[Run, int]]) -> array[int]:
        pages = array("i")
        for node, agreed in path:
            pages.extend(node.pages[:agreed])
        return pages

    def _part(
        self, path: list[tuple[Run, int]], ids: array[int], at: int, most: int
    ) -> tuple[Run, int, int] | None:
        """Behind ``path``, which ends at token ``at``: the page that agrees longest.

        Returns:
            Its node, how many of its tokens agree, the page; None: not even one token does.
        """
        wanted = ids[at : min(most, at + self._page_tokens)].tobytes()
        node, pages = path[-1] if path else (self._root, 0)
        if pages < len(node.pages):  # in the middle of a run: nothing else follows there
            there = self._key(node.tokens, pages * self._page_tokens)
            tokens = agreed_tokens(wanted, there)
            return (node, tokens, node.pages[pages]) if tokens else None
        if (near := node.nearest(wanted)) is None:
            return None
        child, tokens = near
        return child, tokens, child.pages[0]

    def _why(self, path: list[tuple[Run, int]], part: tuple[Run, int, int] | None) -> Ended:
        """Why a match goes no further."""
        node, pages = path[-1] if path else (self._root, 0)
        if part and part[1] == len(part[0].tokens) and part[0].is_tail(self._page_tokens):
            return Ended.EVICTED if part[0].trimmed else Ended.GOES_ON
        if part or pages < len(node.pages) or node.children:
            return Ended.DIFFERS
        if node.trimmed:
            return Ended.EVICTED
        return Ended.GOES_ON if path else Ended.NOTHING

    def _extend(
        self, end: Run, tokens: array[int], pages: array[int], chance: float, session: str
    ) -> Run:
        """Put new pages behind ``end``; returns the node they are in."""
        key = self._key(tokens)
        anchors = self._drop_covered(end, key)
        for page in pages:
            self._pool.keep(page)
        grows = end is not self._root and not end.children
        if grows and end.session in (None, session):
            end.tokens.extend(tokens)  # the same path grows: used at the same time, so one node
            end.pages.extend(pages)
            end.chance = max(end.chance, chance)
            self._enqueue(end)
        else:
            end = self._adopt(end, key, tokens, pages, chance)
        end.anchors |= anchors
        return end

    def _keep_tail(self, end: Run, tokens: array[int], page: int, chance: float) -> None:
        """Keep a page filled in part, unless another has the same tokens and more."""
        key = tokens.tobytes()
        if end.holding(key):
            return
        anchors = self._drop_covered(end, key)
        self._pool.keep(page)
        self._adopt(end, key, tokens, array("i", (page,)), chance).anchors = anchors

    def _adopt(
        self, parent: Run, key: bytes, tokens: array[int], pages: array[int], chance: float
    ) -> Run:
        node = Run(parent, parent.end, tokens, pages)
        node.used, node.chance = self._now, chance
        parent.adopt(key, node)
        self._enqueue(node)
        return node

    def _drop_covered(self, node: Run, key: bytes) -> dict[int, KeptAnchor]:
        """Drop the tails behind ``node`` that a page with the tokens of ``key`` has as well.

        Returns:
            The anchors that stood on them.
        """
        anchors: dict[int, KeptAnchor] = {}
        for end in range(ID_BYTES, len(key), ID_BYTES):
            if key[:end] in node.children:
                tail = node.disown(key[:end])
                self._pool.drop(tail.pages.pop())
                anchors |= tail.anchors
        return anchors

    def _touch(self, path: list[tuple[Run, int]]) -> Run:
        """Mark the path as used now; returns the node it ends with, cutting one if need be."""
        self._now = self._clock()
        if not path:
            return self._root
        end, agreed = path[-1]
        if agreed < len(end.pages):
            end = end.split_off(agreed, self._page_tokens)
        for node, _ in path[:-1]:
            node.used = max(node.used, self._now)
        end.used = max(end.used, self._now)
        return end

    def _swap(self, pages: array[int], known: array[int]) -> None:
        """Make the user of ``pages`` a user of the tree's pages instead, where they differ."""
        if pages[: len(known)] == known:
            return
        for i, theirs in enumerate(known):
            if pages[i] != theirs:
                self._pool.retain((theirs,))
                self._pool.release((pages[i],))
                pages[i] = theirs

    def _enqueue(self, node: Run) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._queue, (self._rank_of(node), next(self._serial), node))

    def _rank_of(self, node: Run) -> float:
        return self._rank(node.end, node.chance, node.branches, node.used)

    def _trim(self, node: Run, n: int, leaving: Callable[[Run, int], None] | None = None) -> int:
        """Drop up to ``n`` idle pages from the end of a leaf, and the leaf when none is left."""
        key, going = self._key(node.tokens), 0
        while going < min(n, len(node.pages)) and self._pool.is_idle(node.pages[-1 - going]):
            going += 1
        if not going:
            return 0
        if leaving:
            leaving(node, going)
        for _ in range(going):
            self._pool.drop(node.pages.pop())
        node.cut_back(len(node.pages), self._page_tokens)
        parent = node.parent
        if not node.pages and parent is not None:
            parent.disown(key)
            parent.trimmed = True
            if not parent.children and parent is not self._root:
                self._enqueue(parent)
        return going
