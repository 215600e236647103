"""Which blocks are on disk, which of them a prompt can use, and which go first: no files, no KV."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ftd.kv.block_file import Head, block_key
from ftd.kv.runs import agreed_tokens
from ftd.kv.value import Cost, after_branches, rank


@dataclass(slots=True)
class Entry:
    key: str
    head: Head
    ids: array[int]
    file_bytes: int
    used_s: float  # unix time


class BlockIndex:
    """
    Args:
        model: digest that all blocks carry.
        block_tokens: of every block but those a sequence ends in.
    """

    def __init__(self, model: str, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.bytes = 0
        self._entries: dict[str, Entry] = {}
        self._behind: dict[str, set[str]] = defaultdict(set)  # keys by that of the block before

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        assert entry.key not in self._entries, entry.key
        self._entries[entry.key] = entry
        self.bytes += entry.file_bytes
        self._behind[entry.head.parent].add(entry.key)

    def remove(self, key: str) -> Entry | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.bytes -= entry.file_bytes
        siblings = self._behind[entry.head.parent]
        siblings.discard(key)
        if not siblings:
            del self._behind[entry.head.parent]
        return entry

    def blocks(self, ids: array[int]) -> Iterator[tuple[str, str, array[int]]]:
        """Key, parent's key and tokens of each block of ``ids``; the last one may be short."""
        parent = ""
        for at in range(0, len(ids), self.block_tokens):
            tokens = ids[at : at + self.block_tokens]
            key = block_key(self.model, parent, tokens)
            yield key, parent, tokens
            parent = key

    def known(self, ids: array[int]) -> list[tuple[Entry, int]]:
        """The blocks that ``ids`` begin with, one behind the other, and how many tokens of each.

        After whole blocks, the one that agrees longest with what follows.
        """
        found: list[tuple[Entry, int]] = []
        for key, _, tokens in self.blocks(ids):
            entry = self._entries.get(key)
            if entry is None or len(tokens) < self.block_tokens:
                break
            found.append((entry, len(tokens)))
        rest = ids[len(found) * self.block_tokens :][: self.block_tokens].tobytes()
        parent = found[-1][0].key if found else ""
        behind = [self._entries[key] for key in self._behind.get(parent, ())]
        agreed = [(agreed_tokens(rest, entry.ids.tobytes()), entry.key) for entry in behind]
        most, key = max(agreed, default=(0, ""))
        return [*found, (self._entries[key], most)] if most else found

    def covered(self, parent: str, ids: array[int]) -> list[Entry]:
        """Shorter blocks behind ``parent`` with the first of the same tokens."""
        behind = (self._entries[key] for key in self._behind.get(parent, ()))
        return [e for e in behind if len(e.ids) < len(ids) and e.ids == ids[: len(e.ids)]]

    def first_out(self, limit_bytes: int) -> list[Entry]:
        """Blocks to remove so that the others fit: ends of their lines, the least worth first."""
        out: list[Entry] = []
        excess = self.bytes - limit_bytes
        left = {key: len(self._behind.get(key, ())) for key in self._entries}
        heap = [(self._rank(self._entries[key]), key) for key, n in left.items() if n == 0]
        heapify(heap)
        while excess > 0 and heap:
            entry = self._entries[heappop(heap)[1]]
            out.append(entry)
            excess -= entry.file_bytes
            if (parent := entry.head.parent) in left:
                left[parent] -= 1
                if left[parent] == 0:
                    heappush(heap, (self._rank(self._entries[parent]), parent))
        return out

    def _rank(self, entry: Entry) -> float:
        head = entry.head
        seconds = Cost(1.0).seconds(head.begin, head.begin + head.tokens)
        branches = max(0, len(self._behind.get(entry.key, ())) - 1)
        odds = after_branches(head.chance, branches)
        return rank(seconds / max(1, entry.file_bytes), odds, entry.used_s)
