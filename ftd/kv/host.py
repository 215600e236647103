"""A tier of host memory below the pages that a GPU's steps use: what is evicted there goes here.

Pages are kept in a prefix tree of their own, by the same worth, and go when something worth more
comes. As a tree loses its ends first, what is here continues what is there; the beginning that is
not here is held by ghosts, which cost nothing. What has been brought back stays here as well as
long as nothing better comes: if it is evicted again it need not be copied.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import AnchorInfo, KeptAnchor
from ftd.kv.cache import Landing
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.kv.runs import Run
from ftd.kv.value import rank_of_pages

GHOST = -1  # a page that is not here


class Movable(Protocol):
    """The pages that steps use; ``ftd.cuda.kv.CudaKvCache``."""

    def save(self, pages: Sequence[int], rows: Sequence[torch.Tensor]) -> None: ...
    def load(self, pages: Sequence[int], rows: Sequence[torch.Tensor]) -> Landing: ...


class HostMemory(Protocol):
    """Pinned memory that grows up to a limit, beside whoever asks for it."""

    @property
    def num_pages(self) -> int: ...

    def row(self, page: int) -> torch.Tensor:
        """[page_bytes] uint8."""
        ...

    def want(self, num_pages: int) -> None:
        """So many would be of use."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """What the tier has of a prompt behind the pages that are known."""

    pages: array[int]  # the caller is a user of each
    tokens: int  # of the prompt, up to where they end
    chance: float
    anchors: tuple[KeptAnchor, ...]


class HostTier:
    """Owned by the engine thread."""

    def __init__(
        self,
        memory: HostMemory,
        kv: Movable,
        page_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._kv, self._clock = memory, kv, clock
        self._page_tokens = page_tokens
        self._moment = 0.0
        self.pool = _HostPool(0, page_tokens)
        self.tree = _HostTree(self.pool, rank_of_pages, lambda: self._moment)
        self.book = AnchorBook(self.tree)
        self.pages_saved = self.pages_loaded = 0
        self._loading: deque[tuple[Landing, array[int]]] = deque()
        memory.want(1)

    # ---- from there to here

    def take(self, run: Run, num_pages: int) -> None:
        """The last pages of a run are about to be evicted there."""
        self._settle()
        first = run.begin // self._page_tokens
        there = range(first + len(run.pages) - num_pages, first + len(run.pages))
        ids = run.ids()
        rank = rank_of_pages(run.end, run.chance, run.branches, run.used)
        lacking = self.tree.lacking(ids, there)
        if self._make_room(len(lacking), rank):
            lacking = self.tree.lacking(ids, there)  # anew: some of it may just have gone
        new = self.pool.allocate(min(len(lacking), self.pool.free)) or []
        end = there.stop if len(new) == len(lacking) else lacking[len(new)]
        if end == there.start:
            return
        at = dict(zip(lacking, new))
        self._kv.save([run.pages[i - first] for i in at], [self._memory.row(p) for p in new])
        self.pages_saved += len(new)
        known = self.tree.filled(ids, at)[:end]
        rest = array("i", [at.get(i, GHOST) for i in range(len(known), end)])
        self._moment = run.used
        ids = ids[: end * self._page_tokens]
        session = run.session or ""
        self.tree.insert(ids, known + rest, ends=True, chance=run.chance, session=session)
        self.pool.release(new)
        *_, last = self.tree.path(ids)
        if last.session != run.session:  # what goes on behind these pages may be another's
            self.tree.cut(last, len(ids)).session = run.session
        left = run.begin + (len(run.pages) - num_pages) * self._page_tokens
        if going := [run.anchors[p] for p in sorted(run.anchors) if left < p <= len(ids)]:
            self.book.take_back(ids, going)

    def _make_room(self, num_pages: int, rank: float) -> bool:
        """As far as what is here is worth less; whether something has gone."""
        self._memory.want(self.pool.held + num_pages)
        self._settle()
        gone = False
        while num_pages > self.pool.free:
            if not self.tree.evict(num_pages - self.pool.free, below=rank):
                break
            gone = True
        return gone

    # ---- and back

    def find(self, ids: array[int], known_pages: int, limit: int | None = None) -> Found | None:
        """What goes on behind so many whole pages, up to ``limit`` tokens; None: nothing."""
        self._settle()
        self._moment = self._clock()
        found, tokens = self.tree.behind(ids, known_pages, limit)
        if not found:
            return None
        self.pool.retain(found)
        runs = self.tree.path(ids[:tokens])
        standing = (run.anchors[p] for run in runs for p in sorted(run.anchors) if p <= tokens)
        return Found(found, tokens, max(run.chance for run in runs), tuple(standing))

    def load(self, found: Found, into: Sequence[int]) -> Landing:
        """Bring the first pages of it to where steps use them."""
        rows = [self._memory.row(page) for page in found.pages[: len(into)]]
        landing = self._kv.load(into, rows)
        self.pages_loaded += len(into)
        self._loading.append((landing, found.pages))  # read until then
        return landing

    def cut(self, found: Found, known_pages: int, num_pages: int) -> Found:
        """Only the first pages of it."""
        self.pool.release(found.pages[num_pages:])
        tokens = (known_pages + num_pages) * self._page_tokens
        anchors = tuple(a for a in found.anchors if a.position <= tokens)
        return Found(found.pages[:num_pages], tokens, found.chance, anchors)

    def release(self, found: Found) -> None:
        """It is not wanted after all."""
        self.pool.release(found.pages)

    def _settle(self) -> None:
        while self._loading and self._loading[0][0].passed():
            self.pool.release(self._loading.popleft()[1])
        if self._memory.num_pages > self.pool.num_pages:
            self.pool.resize(self._memory.num_pages)

    # ----

    def infos(self, page_bytes: int, token_s: float) -> Iterator[AnchorInfo]:
        """Anchors, each with the bytes that are here behind the one before it; shared ones once.

        Args:
            token_s: to compute a token.
        """
        for anchor, tokens, run, listed in self.book:
            held = self._pages_between(run, anchor.position - listed, anchor.position)
            yield AnchorInfo(
                session=anchor.session,
                kind=str(anchor.kind),
                position=anchor.position,
                tokens=tokens,
                host_bytes=held * page_bytes,
                hits=anchor.hits,
                age_s=max(0.0, self._clock() - anchor.used_s),
                saved_s=anchor.saved * token_s,
            )

    def _pages_between(self, run: Run | None, begin: int, end: int) -> int:
        """Pages of a path that are here and begin with a token from ``begin`` to ``end``."""
        held, size = 0, self._page_tokens
        while run is not None and run.parent is not None and run.end > begin:
            first = -(-max(0, begin - run.begin) // size)
            last = -(-(min(end, run.end) - run.begin) // size)
            held += _here(run.pages[first:last])
            run = run.parent
        return held

    def clear(self) -> None:
        for landing, _ in self._loading:
            landing.wait()
        self._settle()
        self.tree.clear()

    def close(self) -> None:
        """No copy may be on its way any more."""
        self._memory.close()


class _HostPool(PagePool):
    """Pages of the tier. A ghost is nobody's, and is never missed."""

    def keep(self, page: int) -> None:
        if page != GHOST:
            super().keep(page)

    def drop(self, page: int) -> None:
        if page != GHOST:
            super().drop(page)

    def retain(self, pages: Iterable[int]) -> None:
        super().retain(page for page in pages if page != GHOST)

    def release(self, pages: Iterable[int]) -> None:
        super().release(page for page in pages if page != GHOST)

    def is_idle(self, page: int) -> bool:
        return page == GHOST or super().is_idle(page)


class _HostTree(PrefixTree):
    def lacking(self, ids: array[int], there: range) -> list[int]:
        """Which pages of ``ids`` are ghosts or not known."""
        found, first = [], 0
        for node, agreed in self._path(ids, len(ids) // self._page_tokens):
            within = range(max(there.start, first), min(there.stop, first + agreed))
            found += [i for i in within if node.pages[i - first] == GHOST]
            first += agreed
        return [*found, *range(max(there.start, first), there.stop)]

    def filled(self, ids: array[int], at: Mapping[int, int]) -> array[int]:
        """Whole pages of a known beginning, in which those of ``at``, by place, replace ghosts."""
        first, path = 0, self._path(ids, len(ids) // self._page_tokens)
        for node, agreed in path:
            for i, page in at.items():
                if first <= i < first + agreed:
                    assert node.pages[i - first] == GHOST, i
                    self._pool.keep(page)
                    node.pages[i - first] = page
            first += agreed
        return self._pages(path)

    def behind(
        self, ids: array[int], known_pages: int, limit: int | None
    ) -> tuple[array[int], int]:
        """What follows so many pages up to a ghost, and up to which token; counts as their use."""
        most = self._most_tokens(ids, limit)
        path = self._path(ids, most // self._page_tokens)
        found, first = array("i"), 0
        for node, agreed in path:
            found.extend(node.pages[max(0, known_pages - first) : agreed])
            first += agreed
        part = self._part(path, ids, first * self._page_tokens, most)
        self._touch(path)
        if GHOST in found:
            del found[found.index(GHOST) :]
            return found, (known_pages + len(found)) * self._page_tokens
        if first < known_pages or part is None or part[2] == GHOST:
            return found, first * self._page_tokens
        found.append(part[2])
        return found, first * self._page_tokens + part[1]

    def clear(self) -> int:
        freed = 0
        while self.evict(self._pool.num_pages + 1):  # ghosts count as well
            freed += 1
        self._root.trimmed = bool(self._root.children)
        return freed


def _here(pages: Sequence[int]) -> int:
    return sum(page != GHOST for page in pages)
