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
``evict`` can free. Pages are evicted least recently used first, from the ends of the tree.

Token ids and page numbers come and go as ``array("i")``: four bytes each, compared and copied as
one piece. The tree belongs to one loaded model: KV of another model or dtype is never found in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ftd.kv.pages import PagePool

_BLOCK_PAGES = 128  # compared at once
_ID_BYTES = 4  # of a token in a key


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


class _Node:
    __slots__ = ("children", "order", "pages", "parent", "queued", "tokens", "used")

    def __init__(self, parent: _Node | None, tokens: array[int], pages: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, _Node] = {}  # by the bytes of their first page's tokens
        self.order: list[bytes] = []  # their keys, sorted: those that agree longest are neighbours
        self.used = 0  # tick of the last match or insert that passed
        self.queued = False  # has its one entry in the eviction queue

    def adopt(self, key: bytes, child: _Node) -> None:
        if key not in self.children:
            insort(self.order, key)
        self.children[key] = child

    def disown(self, key: bytes) -> _Node:
        del self.order[bisect_left(self.order, key)]
        return self.children.pop(key)


class PrefixTree:
    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_tokens = pool.page_tokens
        self._tick = 0
        self._serial = count()
        self._root = _Node(None, array("i"), array("i"))
        self._queue: list[tuple[int, int, _Node]] = []  # (used then, tie-break, leaf)

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
        self._touch(path)
        self._pool.retain(pages)
        if found is None:
            return Match(pages, None)
        node, tokens, page = found
        if self._is_tail(node):
            node.used = self._tick
        self._pool.retain((page,))
        return Match(pages, Part(page, tokens))

    def insert(self, ids: array[int], pages: array[int], *, ends: bool = False) -> None:
        """Keep the whole pages of ``ids``, whose KV has been computed into the caller's ``pages``.

        To be called with all tokens computed so far, after each chunk; what is known already costs
        next to nothing. Where the tree has a page with the same tokens, the caller becomes a user
        of that one, in place, and its own copy is released.

        Args:
            ends: the caller writes no more: a page filled in part is kept as well.
        """
        num_pages = min(len(ids) // self._page_tokens, len(pages))
        path = self._path(ids, num_pages)
        known = self._pages(path)
        end = self._touch(path)
        self._swap(pages, known)
        whole = num_pages * self._page_tokens
        if len(known) < num_pages:
            tokens = ids[len(known) * self._page_tokens : whole]
            end = self._extend(end, tokens, pages[len(known) : num_pages])
        if ends and len(ids) > whole and len(pages) > num_pages:
            self._keep_tail(end, ids[whole:], pages[num_pages])

    def evict(self, n: int) -> int:
        """Free up to ``n`` idle pages, least recently used first; returns how many."""
        freed, busy = 0, []
        while freed < n and self._queue:
            tick, _, node = heappop(self._queue)
            node.queued = False
            if node.children or not node.pages:
                continue  # queued again when it has lost the last of them; or gone already
            if tick != node.used:
                self._enqueue(node)  # used since it was queued
                continue
            freed += self._trim(node, n - freed)
            if node.pages:
                busy.append(node)
        for node in busy:  # one for each running sequence at most, and the one trimmed in part
            self._enqueue(node)
        return freed

    def clear(self) -> int:
        """Forget all that no running sequence uses; returns the number of pages freed."""
        return self.evict(self._pool.idle)

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Pages have been moved: old number → new. Tokens, users and order of use are as before."""
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            node.pages = array("i", [moves.get(page, page) for page in node.pages])
            nodes.extend(node.children.values())

    def _most_tokens(self, ids: array[int], limit: int | None) -> int:
        return max(len(ids) - 1 if limit is None else min(limit, len(ids) - 1), 0)

    def _key(self, tokens: array[int], at: int = 0) -> bytes:
        return tokens[at : at + self._page_tokens].tobytes()

    def _path(self, ids: array[int], num_pages: int) -> list[tuple[_Node, int]]:
        """Nodes along ``ids`` and how many pages of each agree: all, except perhaps of the last."""
        path: list[tuple[_Node, int]] = []
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

    def _pages(self, path: list[tuple[_Node, int]]) -> array[int]:
        pages = array("i")
        for node, agreed in path:
            pages.extend(node.pages[:agreed])
        return pages

    def _part(
        self, path: list[tuple[_Node, int]], ids: array[int], at: int, most: int
    ) -> tuple[_Node, int, int] | None:
        """Behind ``path``, which ends at token ``at``: the page that agrees longest.

        Returns:
            Its node, how many of its tokens agree, the page; None: not even one token does.
        """
        wanted = ids[at : min(most, at + self._page_tokens)].tobytes()
        node, pages = path[-1] if path else (self._root, 0)
        if pages < len(node.pages):  # in the middle of a run: nothing else follows there
            there = self._key(node.tokens, pages * self._page_tokens)
            tokens = _agreed_tokens(wanted, there)
            return (node, tokens, node.pages[pages]) if tokens else None
        i = bisect_left(node.order, wanted)
        near = node.order[max(0, i - 1) : i + 1]
        tokens, key = max(((_agreed_tokens(wanted, key), key) for key in near), default=(0, b""))
        child = node.children[key] if tokens else None
        return (child, tokens, child.pages[0]) if child else None

    def _extend(self, end: _Node, tokens: array[int], pages: array[int]) -> _Node:
        """Put new pages behind ``end``; returns the node they are in."""
        key = self._key(tokens)
        self._drop_covered(end, key)
        for page in pages:
            self._pool.keep(page)
        if end is not self._root and not end.children:
            end.tokens.extend(tokens)  # the same path grows: used at the same tick, so one node
            end.pages.extend(pages)
            return end
        return self._adopt(end, key, tokens, pages)

    def _keep_tail(self, end: _Node, tokens: array[int], page: int) -> None:
        """Keep a page filled in part, unless another has the same tokens and more."""
        key = tokens.tobytes()
        i = bisect_left(end.order, key)
        if i < len(end.order) and end.order[i].startswith(key):
            return
        self._drop_covered(end, key)
        self._pool.keep(page)
        self._adopt(end, key, tokens, array("i", (page,)))

    def _adopt(self, parent: _Node, key: bytes, tokens: array[int], pages: array[int]) -> _Node:
        node = _Node(parent, tokens, pages)
        node.used = self._tick
        parent.adopt(key, node)
        self._enqueue(node)
        return node

    def _drop_covered(self, node: _Node, key: bytes) -> None:
        """Drop the tails behind ``node`` that a page with the tokens of ``key`` has as well."""
        for end in range(_ID_BYTES, len(key), _ID_BYTES):
            if key[:end] in node.children:
                tail = node.disown(key[:end])
                self._pool.drop(tail.pages.pop())

    def _is_tail(self, node: _Node) -> bool:
        return len(node.tokens) < self._page_tokens

    def _touch(self, path: list[tuple[_Node, int]]) -> _Node:
        """Mark the path as used now; returns the node it ends with, cutting one if need be."""
        self._tick += 1
        if not path:
            return self._root
        end, agreed = path[-1]
        if agreed < len(end.pages):
            end = self._cut(end, agreed)
        for node, _ in path[:-1]:
            node.used = self._tick
        end.used = self._tick
        return end

    def _cut(self, node: _Node, num_pages: int) -> _Node:
        """Put the first pages of a node into a new one above it."""
        assert node.parent is not None and 0 < num_pages < len(node.pages), num_pages
        tokens = num_pages * self._page_tokens
        upper = _Node(node.parent, node.tokens[:tokens], node.pages[:num_pages])
        node.parent.adopt(self._key(node.tokens), upper)
        node.parent, node.tokens, node.pages = upper, node.tokens[tokens:], node.pages[num_pages:]
        upper.adopt(self._key(node.tokens), node)
        return upper

    def _swap(self, pages: array[int], known: array[int]) -> None:
        """Make the user of ``pages`` a user of the tree's pages instead, where they differ."""
        if pages[: len(known)] == known:
            return
        for i, theirs in enumerate(known):
            if pages[i] != theirs:
                self._pool.retain((theirs,))
                self._pool.release((pages[i],))
                pages[i] = theirs

    def _enqueue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._queue, (node.used, next(self._serial), node))

    def _trim(self, node: _Node, n: int) -> int:
        """Drop up to ``n`` idle pages from the end of a leaf, and the leaf when none is left."""
        key, before = self._key(node.tokens), len(node.pages)
        while node.pages and before - len(node.pages) < n and self._pool.is_idle(node.pages[-1]):
            self._pool.drop(node.pages.pop())
        del node.tokens[len(node.pages) * self._page_tokens :]
        parent = node.parent
        if not node.pages and parent is not None:
            parent.disown(key)
            if not parent.children and parent is not self._root:
                self._enqueue(parent)
        return before - len(node.pages)


def _agreed_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two keys have in common, from the first."""
    ends = range(0, min(len(one), len(other)), _ID_BYTES)
    differ = (at for at in ends if one[at : at + _ID_BYTES] != other[at : at + _ID_BYTES])
    return next(differ, len(ends) * _ID_BYTES) // _ID_BYTES
