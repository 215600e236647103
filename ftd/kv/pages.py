"""Which pages of the KV cache are free, and who holds the others: accounting only, no tensors.

A page is held by any number of running sequences (its *users*) and, apart from them, by the prefix
tree (*kept*). It goes back to the free list when the last of both lets go. A page that only the
tree holds is *idle*: it can be evicted. At all times ``free + held == num_pages``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class PagePool:
    """Every operation costs O(1) a page.

    Args:
        first: number of the first page; those below are not given out.
    """

    def __init__(self, num_pages: int, page_tokens: int, first: int = 0) -> None:
        assert num_pages >= 0 and page_tokens > 0, (num_pages, page_tokens)
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._first = first
        # A stack, low numbers on top: what was touched is used again before memory never touched.
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._users = [0] * (first + num_pages)
        self._kept = bytearray(first + num_pages)
        self._idle = 0
        self.lives = [0] * (first + num_pages)  # how often each page has come free; only grows

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages with a user or kept by the tree, each counted once."""
        return self.num_pages - len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the prefix tree holds."""
        return self._idle

    def allocate(self, n: int) -> list[int] | None:
        """Give the caller ``n`` pages as their only user, or None if fewer are free."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._users[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a user to pages that somebody holds already."""
        users, kept = self._users, self._kept
        for page in pages:
            if users[page] == 0:
                assert kept[page], f"page {page} is free"
                self._idle -= 1
            users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a user away; what nobody holds any more is free."""
        users, kept = self._users, self._kept
        for page in pages:
            assert users[page] > 0, f"page {page} has no user"
            users[page] -= 1
            if users[page] == 0:
                if kept[page]:
                    self._idle += 1
                else:
                    self._free.append(page)
                    self.lives[page] += 1

    def keep(self, page: int) -> None:
        """The prefix tree takes hold of a page in use."""
        assert self._users[page] > 0 and not self._kept[page], page
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix tree lets go of a page."""
        assert self._kept[page], page
        self._kept[page] = 0
        if self._users[page] == 0:
            self._idle -= 1
            self._free.append(page)
            self.lives[page] += 1

    def resize(self, num_pages: int) -> list[tuple[int, int]]:
        """Change the number of pages. A held page whose number goes away takes a free one's place.

        Args:
            num_pages: at least as many as are held.
        Returns:
            (from, to) of each page to be copied and renumbered, in any order: no page is both.
        """
        assert num_pages >= max(1, self.held), (num_pages, self.held)
        were, end = self._first + self.num_pages, self._first + num_pages
        free = set(self._free) | set(range(were, end))
        leaving = [page for page in range(end, were) if page not in free]
        staying = sorted((page for page in free if page < end), reverse=True)
        moves = [(page, staying.pop()) for page in leaving]
        more = max(0, end - were)
        self._users.extend([0] * more)
        self._kept.extend(bytes(more))
        self.lives.extend([0] * (end - len(self.lives)))
        for page, to in moves:
            self._users[to], self._kept[to] = self._users[page], self._kept[page]
            self.lives[page] += 1
        del self._users[end:], self._kept[end:]
        self._free, self.num_pages = staying, num_pages
        return moves

    def is_idle(self, page: int) -> bool:
        return self._users[page] == 0 and bool(self._kept[page])

    def num_exclusive(self, pages: Sequence[int]) -> int:
        """How many of one sequence's pages no other sequence uses.

        Whoever shares pages with it shares them from the start, so these are the last ones.
        """
        return len(pages) - bisect_left(pages, True, key=lambda page: self._users[page] == 1)

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many pages of one path of the prefix tree are idle: the last ones, likewise."""
        return len(pages) - bisect_left(pages, True, key=self.is_idle)
