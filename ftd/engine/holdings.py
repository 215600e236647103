"""What sequences hold, pages and recurrent states, and what is kept of them for others to use.

The accounts of one model: page pool, prefix tree, anchors on the tree's pages, states, what is in
host memory and on disk. Who runs is not known here. Owned by the engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ftd.engine import figures
from ftd.engine.recurrence import Recurrence
from ftd.engine.restoring import Restoring
from ftd.engine.windows import Windows
from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorInfo, AnchorKind, AnchorTotals, Ended
from ftd.kv.cache import KvCache
from ftd.kv.disk import DiskStore
from ftd.kv.host import HostTier
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import Part, PrefixTree, Reuse
from ftd.kv.value import rank_of_pages
from ftd.schedule.sequence import Sequence

EVICTED_AT_ONCE = 16  # pages, where they go to host memory: looking up their place costs more


@dataclass(frozen=True, slots=True)
class Known:
    """What a sequence can begin with."""

    reuse: Reuse
    limit: int | None  # to match it with
    agreed: int  # tokens of it whose pages are known: states may be missing


class Holdings:
    """
    Args:
        host: where pages go that are evicted; None: nowhere.
    """

    def __init__(
        self,
        kv: KvCache,
        max_running: int,
        clock: Callable[[], float],
        host: HostTier | None = None,
    ) -> None:
        self.kv, self.host = kv, host
        self.pages = PagePool(kv.num_pages, kv.page_tokens, kv.first_page)
        self.tree = PrefixTree(self.pages, rank_of_pages, clock)
        self.anchors = AnchorBook(self.tree, host.book if host else None)
        if host is not None:
            self.tree.leaving = host.take
        self.recurrence = Recurrence(0, max_running, kv.page_tokens, clock)
        if kv.windows and kv.states:
            self.recurrence = Windows(kv.windows, kv.states, clock)
        elif states := kv.states:
            self.recurrence = Recurrence(
                states.num_slots, max_running, kv.page_tokens, clock,
                num_live=states.num_live, copy=states.copy,
            )  # fmt: skip
        self.restoring = self._restoring(None)
        self.pages_evicted = 0  # of the prefix cache, for lack of room
        self.most_pages = 0  # that the pool may grow to, where memory follows need
        self._clock = clock

    def keep_on_disk(self, store: DiskStore) -> None:
        """From now on; what it holds is found, what ends is written."""
        self.restoring = self._restoring(store)

    def _restoring(self, store: DiskStore | None) -> Restoring:
        return Restoring(
            store, self.tree, self.pages, self.kv, self.anchors, self.host, self.recurrence
        )

    # ---- beginnings

    def known(self, ids: array[int], limit: int | None) -> Known:
        reuse = self.tree.peek(ids, limit)
        tokens = self.recurrence.within(ids, reuse.tokens)
        if tokens == reuse.tokens:
            return Known(reuse, limit, reuse.tokens)
        return Known(self.tree.peek(ids, tokens), tokens, reuse.tokens)

    def bring(self, sequence: Sequence, limit: int | None, others: bool) -> bool:
        """From host memory, what a sequence that is next in line can begin with.

        Args:
            limit: of its match.
            others: there is something else to compute meanwhile.
        Returns:
            Whether it is better computed when that has come.
        """
        if self.recurrence.is_used and limit is None:
            limit = self.recurrence.within(sequence.ids, len(sequence.ids) - 1)
        return self.restoring.bring(sequence, limit, others)

    def begin(
        self,
        newcomers: Iterable[tuple[Sequence, int | None]],
        new_pages: int,
        counted: AbstractSet[str],
    ) -> Mapping[str, Ended]:
        """Give sequences the beginnings that are known of them, and free pages for a step.

        Args:
            newcomers: with the limit of their match.
            new_pages: that the step's runs need.
            counted: keys whose own copy of a page ``new_pages`` includes.
        Returns:
            Why each match ended where it did.
        """
        ended: dict[str, Ended] = {}
        begun: list[tuple[Sequence, int]] = []
        parts: list[tuple[Sequence, Part]] = []
        for sequence, limit in newcomers:
            self.kv.join()  # what it knows may still be on its way
            self.restoring.forget(sequence.key)
            known = self.known(sequence.ids, limit)
            match = self.tree.match(sequence.ids, known.limit)
            sequence.start(match.pages, self.kv.page_tokens)
            ended[sequence.key] = match.ended
            begun.append((sequence, known.agreed))
            if match.part:
                parts.append((sequence, match.part))
        later = sum(sequence.key not in counted for sequence, _ in parts)
        self.make_free(new_pages + later)
        if self.pages.free < new_pages + later:  # what is to be copied from is in the way
            self.pages.release(part.page for _, part in parts)
            parts.clear()
            self.make_free(new_pages)
        for sequence, part in parts:
            self._copy_part(sequence, part)
        for sequence, agreed in begun:
            if not self.recurrence.start(sequence, agreed):
                self.pages.release(sequence.leave())
        return ended

    def make_free(self, num_pages: int) -> None:
        lacking = num_pages - self.pages.free
        if lacking > 0:
            more = EVICTED_AT_ONCE if self.host is not None else 0
            self.pages_evicted += self.tree.evict(max(lacking, more))
            self.kv.join()  # nothing is written there before it has been saved

    def _copy_part(self, sequence: Sequence, part: Part) -> None:
        """Go on in a page of one's own with the tokens that a page of the tree begins with."""
        pages = self.pages.allocate(1)
        assert pages is not None, self.pages.free
        self.kv.copy(part.page, pages[0], part.tokens)
        self.pages.release((part.page,))
        sequence.pages.extend(pages)
        sequence.computed += part.tokens

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """Pages a sequence lacks for so many tokens from its beginning."""
        return max(0, -(-tokens // self.kv.page_tokens) - len(sequence.pages))

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Give a sequence pages for so many tokens from its beginning; they are free."""
        pages = self.pages.allocate(self.lacking(sequence, tokens))
        assert pages is not None, (sequence.key, tokens, self.pages.free)
        sequence.pages.extend(pages)

    def most_output(self, sequence: Sequence) -> int:
        """Tokens that were asked for, or that the pool can have room for since it was changed."""
        pages = max(self.pages.num_pages, self.most_pages)
        room = pages * self.kv.page_tokens - sequence.prompt_tokens
        return min(sequence.request.max_tokens, room)

    # ---- what stays

    def keep(self, sequence: Sequence) -> None:
        """Let the prefix tree have what is computed so far."""
        chance = self._chance(sequence)
        ids, session = sequence.ids[: sequence.computed], sequence.request.session
        self.tree.insert(ids, sequence.pages, chance=chance, session=session)

    def resumed(self, sequence: Sequence) -> Anchor | None:
        """The anchor that a sequence which begins has come by last; counts as its use."""
        ids, request = sequence.ids, sequence.request
        anchor = self.anchors.resumed(
            ids, sequence.computed, request.session, trial=request.passing
        )
        return Anchor(anchor.position, anchor.kind) if anchor else None

    def note_anchors(self, sequence: Sequence, anchors: Iterable[Anchor]) -> None:
        ids = sequence.ids[: sequence.computed]
        self.anchors.note(ids, anchors, sequence.request.session, sequence.prompt_tokens)

    def give_back(self, sequence: Sequence, *, answered: bool = False) -> None:
        """All it holds; what is computed stays cached while there is room."""
        ids, chance = sequence.ids[: sequence.computed], self._chance(sequence)
        session = sequence.request.session
        self.tree.insert(ids, sequence.pages, ends=True, chance=chance, session=session)
        self.recurrence.leave(sequence)
        if not sequence.request.passing:
            self.restoring.offer(sequence, chance, answered)
        turn = [Anchor(sequence.computed, AnchorKind.TURN)] if answered and ids else []
        self.note_anchors(sequence, [*sequence.request.anchors, *turn])
        self.pages.release(sequence.leave())

    def throw_away(self, sequence: Sequence) -> None:
        """All it holds, as what is computed may be damaged; so may be its earlier chunks."""
        self.recurrence.leave(sequence, keep=False)
        self.pages.release(sequence.leave())
        self.forget_all()

    def forget_all(self) -> None:
        """Nothing that was computed before is used by a later request."""
        self.kv.join()
        self.tree.clear()
        self.restoring.distrust()
        self.recurrence.clear()

    def _chance(self, sequence: Sequence) -> float:
        return self.anchors.first_chance(sequence.request.session, sequence.prompt_tokens)

    # ---- anchors, for people

    def drop_anchors(self, session: str | None) -> int:
        """Forget what ``session`` alone has used, or all that nobody uses; returns pages freed.

        What is on disk goes only with all.
        """
        self.kv.join()
        self.restoring.drop(session)
        if session is None:
            self.recurrence.clear()
        return self.anchors.drop(session)

    def anchor_totals(self, token_s: float) -> AnchorTotals:
        """Args:
        token_s: to compute a prompt token; 0: not known yet.
        """
        states = self.kv.states.slot_bytes * len(self.recurrence.store) if self.kv.states else 0
        return AnchorTotals(
            count=self.anchors.count,
            kv_bytes=self.pages.idle * self.kv.page_bytes,
            host_bytes=self.host.pool.held * self.kv.page_bytes if self.host else 0,
            state_bytes=states,
            disk_bytes=self.restoring.disk_bytes,
            hits=self.anchors.hits,
            saved_s=self.anchors.saved * token_s,
        )

    def anchor_infos(self, session: str | None, token_s: float) -> tuple[AnchorInfo, ...]:
        """Anchors of one session, or all: those in memory, then those in lower tiers alone.

        Args:
            token_s: to compute a prompt token; 0: not known yet.
        """
        infos = figures.anchors(
            self.anchors,
            self.restoring.below(token_s),
            self.anchors.with_states(self.recurrence.store),
            figures.AnchorCosts(
                token_bytes=self.kv.page_bytes / self.kv.page_tokens,
                state_bytes=self.kv.states.slot_bytes if self.kv.states else 0,
                token_s=token_s,
            ),
            is_idle=self.pages.is_idle,
            now_s=self._clock(),
        )
        return tuple(info for info in infos if session in (None, info.session))
