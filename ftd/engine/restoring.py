"""Between sequences and the tiers below the pages that steps use: host memory and the disk.

What ends is offered to the disk; what is evicted goes to host memory by itself. A request whose
prompt goes on, on disk, behind what memory has, waits until that has been read; all others run on.
What has arrived is put into pages and into the prefix tree between two steps. From host memory
pages are brought when a request is next in line, by copies beside the steps of others: it waits for
them as long as there are others.
"""

from __future__ import annotations

from array import array
from contextlib import suppress

import structlog

from ftd.engine.recurrence import Recurrence
from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorInfo, AnchorKind
from ftd.kv.cache import KvCache, Landing
from ftd.kv.disk import DiskStore
from ftd.kv.disk_jobs import Block, Reading
from ftd.kv.host import Found, HostTier
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.schedule.sequence import Sequence

log = structlog.get_logger(__name__)

BROUGHT_AT_ONCE = 256  # pages: their copies take some ms to queue, and are queued between steps


class Restoring:
    """
    Args:
        store: None: nothing is kept on disk.
        host: None: there is no tier of host memory.
    """

    def __init__(
        self,
        store: DiskStore | None,
        tree: PrefixTree,
        pages: PagePool,
        kv: KvCache,
        anchors: AnchorBook,
        host: HostTier | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        self._store, self._host = store, host
        self._recurrence = recurrence if recurrence and recurrence.is_used else None
        self._tree, self._pages, self._kv, self._anchors = tree, pages, kv, anchors
        self._readings: dict[str, Reading] = {}
        self._brought: dict[str, Landing | None] = {}  # who was next in line, and what comes

    @property
    def has_arrived(self) -> bool:
        """There is something for ``take``."""
        return any(r.blocks or r.over for r in self._readings.values())

    def waits(self, key: str, others: bool = False) -> bool:
        """Whether a request is to wait for what comes.

        Args:
            others: there is something else to compute meanwhile.
        """
        landing = self._brought.get(key)
        return key in self._readings or bool(others and landing and not landing.passed())

    def bring(self, sequence: Sequence, limit: int | None, others: bool) -> bool:
        """Begin to copy from host memory what would spare more than a page, or go on with it.

        Args:
            limit: tokens of the prompt that may be known.
            others: somebody waits for the steps between: not all of it at once.
        Returns:
            Whether the request is better computed when that has come.
        """
        if self._host is None:
            return False
        if sequence.key in self._brought:
            landing = self._brought[sequence.key]
            if landing is None or not landing.passed():
                return others and landing is not None
        self._brought[sequence.key] = None
        known = self._tree.peek(sequence.ids, limit)
        found = self._host.find(sequence.ids, known.pages, limit)
        if found is None:
            return False
        if found.tokens - known.tokens <= self._pages.page_tokens:
            self._host.release(found)
            return False
        if more := others and len(found.pages) > BROUGHT_AT_ONCE:
            found = self._host.cut(found, known.pages, BROUGHT_AT_ONCE)
        landing = self._brought[sequence.key] = self._load(sequence.ids, known.pages, found)
        return landing is not None and others and (more or not landing.passed())

    def _load(self, ids: array[int], num_known: int, found: Found) -> Landing | None:
        host, size = self._host, self._pages.page_tokens
        assert host is not None
        pages, part, _ = self._tree.match(ids, num_known * size)
        assert part is None and len(pages) == num_known, (len(pages), num_known)
        lacking = len(found.pages) - self._pages.free
        if lacking > 0:
            self._tree.evict(lacking)
            self._kv.join()  # what else came free must not be written before it has been saved
        new = self._pages.allocate(min(len(found.pages), self._pages.free))
        if not new:
            host.release(found)
            self._pages.release(pages)
            return None
        landing = host.load(found, new)
        pages.extend(new)
        end = min(found.tokens, len(pages) * size)
        self._tree.insert(ids[:end], pages, ends=True, chance=found.chance)
        self._pages.release(pages)
        self._anchors.take_back(ids[:end], found.anchors)
        return landing

    def begin(self, sequence: Sequence) -> None:
        """Read from disk what would spare a new request more than a page."""
        if self._store is None:
            return
        here = self._tree.peek(sequence.ids)
        known = here.tokens
        if self._host and (found := self._host.find(sequence.ids, here.pages)):
            known = max(known, found.tokens)
            self._host.release(found)
        if self._recurrence:
            known = self._recurrence.within(sequence.ids, known)
        known += self._pages.page_tokens
        if known >= len(sequence.ids):
            return
        if reading := self._store.read(sequence.ids[: sequence.prompt_tokens], known):
            self._readings[sequence.key] = reading

    def forget(self, key: str) -> None:
        self._brought.pop(key, None)
        if reading := self._readings.pop(key, None):
            reading.give_up()

    def take(self) -> None:
        """Put into pages what has been read; to be called between two steps."""
        for key, reading in list(self._readings.items()):
            over = reading.over  # looked at first: nothing comes behind it
            while reading.blocks:
                block = reading.blocks.popleft()
                reading.room.release()
                if not self._put(reading.ids, block):
                    reading.blocks.clear()
                    over = True
            if over:
                self._readings.pop(key).give_up()

    def offer(self, sequence: Sequence, chance: float, turn: bool) -> None:
        """A sequence leaves pages in the prefix tree: have them written."""
        if self._store is None or sequence.computed < self._pages.page_tokens:
            return
        session = sequence.request.session
        anchors = [(a.position, str(a.kind), session) for a in sequence.request.anchors]
        if turn:
            anchors.append((sequence.computed, str(AnchorKind.TURN), session))
        ids = sequence.ids[: sequence.computed]
        states = self._recurrence.store.path(ids) if self._recurrence else ()
        self._store.offer(ids, sequence.pages, chance, tuple(anchors), states)

    def drop(self, session: str | None = None) -> None:
        """Forget what is in host memory of a session, or all, and then what is on disk as well."""
        if session is None:
            self.distrust()
            if self._store is not None:
                self._store.clear()
        elif self._host is not None:
            self._host.book.drop(session)

    def distrust(self) -> None:
        """What has been computed may be damaged: forget all that stems from it in memory."""
        if self._host is not None:
            self._host.clear()

    def close(self) -> None:
        """Stop writing; what was offered is written first, if that takes no more than seconds."""
        if self._store is not None:
            self._store.close()

    @property
    def disk_bytes(self) -> int:
        return self._store.bytes if self._store else 0

    def below(self, token_s: float) -> list[AnchorInfo]:
        """Anchors of the tiers below: those in host memory, then those on disk.

        Args:
            token_s: to compute a token.
        """
        host = self._host.infos(self._kv.page_bytes, token_s) if self._host else ()
        return [*host, *self.on_disk()]

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

    def _put(self, ids: array[int], block: Block) -> bool:
        """The first tokens of a block into the prefix tree.

        False: what comes before it has gone, or there are no pages.
        """
        head, tokens, data, states = block
        end = head.begin + tokens
        pages, part, _ = self._tree.match(ids, head.begin)
        if part:
            self._pages.release((part.page,))
        count = -(-tokens // self._pages.page_tokens)
        if count > self._pages.free:
            self._tree.evict(count - self._pages.free)
            self._kv.join()
        new = self._pages.allocate(count)
        if new is None or len(pages) * self._pages.page_tokens != head.begin:
            self._pages.release([*pages, *(new or ())])
            return False
        self._kv.scatter(new, data[:count])
        pages.extend(new)
        self._tree.insert(ids[:end], pages, ends=True, chance=head.chance)
        self._pages.release(pages)
        for position, chance in head.states:
            if position <= end and self._recurrence and self._kv.states:
                slot = self._recurrence.put_back(ids[:position], chance)
                if slot is not None:
                    self._kv.states.write(slot, states[position])
        for position, kind, session in head.anchors:
            with suppress(ValueError):  # a kind that a later version knows
                anchor = Anchor(position, AnchorKind(kind))
                self._anchors.note(ids[:end], [anchor], session, end)
        return True
