"""A run of pages in the prefix tree: the exact tokens they hold, and what is known of their use."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator

from ftd.kv.anchors import Anchor, AnchorKind, KeptAnchor

ID_BYTES = 4  # of a token in a key


class Run:
    __slots__ = (
        "anchors",
        "begin",
        "branches",
        "chance",
        "children",
        "order",
        "pages",
        "parent",
        "queued",
        "session",
        "tokens",
        "trimmed",
        "used",
    )

    def __init__(
        self, parent: Run | None, begin: int, tokens: array[int], pages: array[int]
    ) -> None:
        self.parent = parent
        self.begin = begin  # tokens before it
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Run] = {}  # by the bytes of their first page's tokens
        self.order: list[bytes] = []  # their keys, sorted: those that agree longest are neighbours
        self.used = 0.0  # when a match or insert last passed
        self.branches = 0  # ways on beside the first
        self.chance = 0.0  # of a match, as it was guessed at first
        self.anchors: dict[int, KeptAnchor] = {}  # by position
        self.session: str | None = None  # whose requests came by; "": of several, or of nobody
        self.trimmed = False  # what followed has been evicted
        self.queued = False  # has its one entry in the eviction queue

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    def ids(self) -> array[int]:
        """All tokens up to its end."""
        parts, at = [], self
        while at.parent is not None:
            parts.append(at.tokens)
            at = at.parent
        ids = array("i")
        for tokens in reversed(parts):
            ids.extend(tokens)
        return ids

    def adopt(self, key: bytes, child: Run) -> None:
        if key not in self.children:
            insort(self.order, key)
            self.branches += bool(self.children)
        self.children[key] = child

    def disown(self, key: bytes) -> Run:
        del self.order[bisect_left(self.order, key)]
        return self.children.pop(key)

    def is_tail(self, page_tokens: int) -> bool:
        """One page, filled in part."""
        return len(self.tokens) < page_tokens

    def key(self, page_tokens: int) -> bytes:
        return self.tokens[:page_tokens].tobytes()

    def nearest(self, wanted: bytes) -> tuple[Run, int] | None:
        """The child whose first page agrees longest with ``wanted``, and how many tokens do."""
        i = bisect_left(self.order, wanted)
        near = self.order[max(0, i - 1) : i + 1]
        tokens, key = max(((agreed_tokens(wanted, key), key) for key in near), default=(0, b""))
        return (self.children[key], tokens) if tokens else None

    def holding(self, key: bytes) -> Run | None:
        """A child that begins with ``key``, of at most a page."""
        return next(self.all_holding(key), None)

    def all_holding(self, key: bytes) -> Iterator[Run]:
        """All of these: none if the key is empty or longer than a page."""
        i = bisect_left(self.order, key)
        while key and i < len(self.order) and self.order[i].startswith(key):
            yield self.children[self.order[i]]
            i += 1

    def split_off(self, num_pages: int, page_tokens: int) -> Run:
        """Put the first pages into a new run above this one; returns it."""
        assert self.parent is not None and 0 < num_pages < len(self.pages), num_pages
        tokens = num_pages * page_tokens
        upper = Run(self.parent, self.begin, self.tokens[:tokens], self.pages[:num_pages])
        upper.used, upper.chance, upper.session = self.used, self.chance, self.session
        self.parent.adopt(self.key(page_tokens), upper)
        self.parent, self.begin = upper, upper.end
        self.tokens, self.pages = self.tokens[tokens:], self.pages[num_pages:]
        upper.anchors = {p: a for p, a in self.anchors.items() if p <= upper.end}
        self.anchors = {p: a for p, a in self.anchors.items() if p > upper.end}
        upper.adopt(self.key(page_tokens), self)
        return upper

    def cut_back(self, num_pages: int, page_tokens: int) -> None:
        """Only the first pages are left of it, or none."""
        self.trimmed = True
        del self.pages[num_pages:], self.tokens[num_pages * page_tokens :]
        for position in [p for p in self.anchors if p > self.end]:
            del self.anchors[position]

    def stand(self, anchor: Anchor, session: str, now_s: float) -> KeptAnchor:
        """Note an anchor at a position within the run."""
        kept = self.anchors.get(anchor.position)
        if kept is None:
            kept = KeptAnchor(anchor.position, anchor.kind, session, now_s)
            self.anchors[anchor.position] = kept
        if anchor.kind is not AnchorKind.FORK:  # says less than any other
            kept.kind = anchor.kind
        kept.session = session or kept.session
        return kept


def agreed_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two keys have in common, from the first."""
    ends = range(0, min(len(one), len(other)), ID_BYTES)
    differ = (at for at in ends if one[at : at + ID_BYTES] != other[at : at + ID_BYTES])
    return next(differ, len(ends) * ID_BYTES) // ID_BYTES
