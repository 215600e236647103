"""Finds the pages whose KV a new sequence can use again: a radix tree over whole pages of tokens.

A node is a run of pages with the exact tokens they hold; its children continue it with different
next pages. Match and insert cut a run where they end, so all pages of a node were last used
together, and a node's end is a page border somebody cared about. Costs follow the number of nodes
on the path, not of pages: comparing tokens is one C loop over two arrays.

Running sequences use a path from the root (``insert`` swaps their own copy of a page for the
tree's), so behind an idle page there are only idle ones, and ``PagePool.idle`` is exactly what
``evict`` can free. Pages are evicted least recently used first, from the ends of the tree.

Token ids and page numbers come and go as ``array("i")``: four bytes each, compared and copied as
one piece. The tree belongs to one loaded model: KV of another model or dtype is never found in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ftd.kv.pages import PagePool

_BLOCK_PAGES = 128  # compared at once


class Reuse(NamedTuple):
    tokens: int  # that a match would bring, whole pages
    idle_pages: int  # of its pages, those that could be evicted now and would be in use then


class _Node:
    __slots__ = ("children", "pages", "parent", "queued", "tokens", "used")

    def __init__(self, parent: _Node | None, tokens: array[int], pages: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, _Node] = {}  # by the bytes of their first page's tokens
        self.used = 0  # tick of the last match or insert that passed
        self.queued = False  # has its one entry in the eviction queue


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
        pages = self._pages(self._path(ids, self._page_limit(ids, limit)))
        return Reuse(len(pages) * self._page_tokens, self._pool.num_idle(pages))

    def match(self, ids: array[int], limit: int | None = None) -> array[int]:
        """Pages of the longest known beginning of ``ids``, with the caller as a further user.

        At most ``limit`` tokens, and never all of ``ids``: the last token has to be computed, since
        its logits choose the next one.
        """
        path = self._path(ids, self._page_limit(ids, limit))
        pages = self._pages(path)
        self._touch(path)
        self._pool.retain(pages)
        return pages

    def insert(self, ids: array[int], pages: array[int]) -> None:
        """Keep the whole pages of ``ids``, whose KV has been computed into the caller's ``pages``.

        To be called with all tokens computed so far, after each chunk; what is known already costs
        next to nothing. Where the tree has a page with the same tokens, the caller becomes a user
        of that one, in place, and its own copy is released.
        """
        num_pages = min(len(ids) // self._page_tokens, len(pages))
        path = self._path(ids, num_pages)
        known = self._pages(path)
        end = self._touch(path)
        self._swap(pages, known)
        if len(known) == num_pages:
            return
        tokens = ids[len(known) * self._page_tokens : num_pages * self._page_tokens]
        new = pages[len(known) : num_pages]
        for page in new:
            self._pool.keep(page)
        if end is not self._root and not end.children:
            end.tokens.extend(tokens)  # the same path grows: used at the same tick, so one node
            end.pages.extend(new)
            return
        node = _Node(end, tokens, new)
        node.used = self._tick
        end.children[self._key(tokens)] = node
        self._enqueue(node)

    def evict(self, n: int) -> int:
        """Free up to ``n`` idle pages, least recently used first; returns how many."""
        freed, busy = 0, []
        while freed < n and self._queue:
            tick, _, node = heappop(self._queue)
            node.queued = False
            if node.children:
                continue  # queued again when it has lost the last of them
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

    def _page_limit(self, ids: array[int], limit: int | None) -> int:
        tokens = len(ids) - 1 if limit is None else min(limit, len(ids) - 1)
        return max(tokens, 0) // self._page_tokens

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
        node.parent.children[self._key(node.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[tokens:], node.pages[num_pages:]
        upper.children[self._key(node.tokens)] = node
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
            del parent.children[key]
            if not parent.children and parent is not self._root:
                self._enqueue(parent)
        return before - len(node.pages)
