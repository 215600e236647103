"""Between sequences and the disk: what ends is offered to it, what begins may wait for it.

A request whose prompt goes on, on disk, behind what memory has, waits until that has been read; all
others run on. What has arrived is put into pages and into the prefix tree between two steps.
"""

from __future__ import annotations

from array import array
from contextlib import suppress

import structlog
import torch

from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorInfo, AnchorKind
from ftd.kv.block_file import Head
from ftd.kv.cache import KvCache
from ftd.kv.disk import DiskStore, Reading
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.schedule.sequence import Sequence

log = structlog.get_logger(__name__)


class Restoring:
    """
    Args:
        store: None: nothing is kept on disk.
    """

    def __init__(
        self,
        store: DiskStore | None,
        tree: PrefixTree,
        pages: PagePool,
        kv: KvCache,
        anchors: AnchorBook,
    ) -> None:
        self._store = store
        self._tree, self._pages, self._kv, self._anchors = tree, pages, kv, anchors
        self._readings: dict[str, Reading] = {}

    @property
    def has_arrived(self) -> bool:
        """There is something for ``take``."""
        return any(r.blocks or r.over for r in self._readings.values())

    def waits(self, key: str) -> bool:
        return key in self._readings

    def begin(self, sequence: Sequence) -> None:
        """Read from disk what would spare a new request more than a page."""
        if self._store is None:
            return
        known = self._tree.peek(sequence.ids).tokens + self._pages.page_tokens
        if known >= len(sequence.ids):
            return
        if reading := self._store.read(sequence.ids[: sequence.prompt_tokens], known):
            self._readings[sequence.key] = reading

    def forget(self, key: str) -> None:
        if reading := self._readings.pop(key, None):
            reading.give_up()

    def take(self) -> None:
        """Put into pages what has been read; to be called between two steps."""
        for key, reading in list(self._readings.items()):
            over = reading.over  # looked at first: nothing comes behind it
            while reading.blocks:
                head, tokens, layers = reading.blocks.popleft()
                reading.room.release()
                if not self._put(reading.ids, head, tokens, layers):
                    reading.blocks.clear()
                    over = True
            if over:
                self.forget(key)

    def offer(self, sequence: Sequence, chance: float, turn: bool) -> None:
        """A sequence leaves pages in the prefix tree: have them written."""
        if self._store is None or sequence.computed < self._pages.page_tokens:
            return
        session = sequence.request.session
        anchors = [(a.position, str(a.kind), session) for a in sequence.request.anchors]
        if turn:
            anchors.append((sequence.computed, str(AnchorKind.TURN), session))
        ids = sequence.ids[: sequence.computed]
        self._store.offer(ids, sequence.pages, chance, tuple(anchors))

    def clear(self) -> None:
        """Remove what is on disk."""
        if self._store is not None:
            self._store.clear()

    def close(self) -> None:
        """Stop writing; what was offered is written first, if that takes no more than seconds."""
        if self._store is not None:
            self._store.close()

    def on_disk(self) -> list[AnchorInfo]:
        """Anchors of the blocks on disk, each with the bytes behind the one before it."""
        infos = []
        last: dict[str, int] = {}  # anchor in or before each block
        for entry in self._store.entries() if self._store else ():
            before = last.get(entry.head.parent, 0)
            token_bytes = entry.file_bytes / entry.head.tokens
            for position, kind, session in entry.head.anchors:
                infos.append(
                    AnchorInfo(
                        session=session,
                        kind=kind,
                        position=position,
                        tokens=position - before,
                        disk_bytes=round((position - before) * token_bytes),
                    )
                )
                before = position
            last[entry.key] = before
        return infos

    def _put(self, ids: array[int], head: Head, tokens: int, layers: list[torch.Tensor]) -> bool:
        """The first tokens of a block into the prefix tree.

        False: what comes before it has gone, or there are no pages.
        """
        end = head.begin + tokens
        pages, part, _ = self._tree.match(ids, head.begin)
        if part:
            self._pages.release((part.page,))
        count = -(-tokens // self._pages.page_tokens)
        if count > self._pages.free:
            self._tree.evict(count - self._pages.free)
        new = self._pages.allocate(count)
        if new is None or len(pages) * self._pages.page_tokens != head.begin:
            self._pages.release([*pages, *(new or ())])
            return False
        into = (layer for both in zip(self._kv.k, self._kv.v, strict=True) for layer in both)
        for layer, values in zip(into, layers, strict=True):
            layer[new] = values[:count]
        pages.extend(new)
        self._tree.insert(ids[:end], pages, ends=True, chance=head.chance)
        self._pages.release(pages)
        for position, kind, session in head.anchors:
            with suppress(ValueError):  # a kind that a later version knows
                anchor = Anchor(position, AnchorKind(kind))
                self._anchors.note(ids[:end], [anchor], session, end)
        return True
