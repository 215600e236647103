"""Pages under everything anchors do with them: shared, copied in part, marked, evicted by value,
written to disk and read again. Every page holds the tokens it was computed from, written down."""

import random
import shutil
import tempfile
import threading
import time
from array import array
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.engine.api import EngineRequest
from ftd.engine.restoring import Restoring
from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorKind
from ftd.kv.cache import KvCache
from ftd.kv.disk import BLOCK_PAGES, DiskStore
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.kv.value import rank_of_pages
from ftd.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec
from ftd.schedule.sequence import Sequence

PAGE, PAGES = 2, 60
BLOCK = BLOCK_PAGES * PAGE
LAYER = LayerSpec(AttentionSpec(8, 1, 64, rope=None, softmax_scale=1.0), DenseSpec(16))
SPEC = ModelSpec("test", 32, 100, (LAYER,), 1e-6, True, 1024, (0,))
# prompts that share long beginnings, some longer than a block on disk
PROMPTS = st.tuples(st.integers(1, 2), st.integers(0, 40), st.integers(1, 40), st.integers(0, 3))


def tokens_of(prompt):
    kind, shared, more, seed = prompt
    draw = random.Random(seed)
    return (*([kind] * shared), *(draw.randrange(1, 4) for _ in range(more)))


class AnchorPages(RuleBasedStateMachine):
    first_page = 0

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.pool = PagePool(PAGES, PAGE, self.first_page)
        self.now_s = 0.0
        self.tree = PrefixTree(self.pool, rank_of_pages, lambda: self.now_s)
        self.book = AnchorBook(self.tree)
        self.kv = self.make_kv()
        self.host = self.make_host()
        self.tree.leaving = self.host.take if self.host else None
        self.running = []
        self.count = 0
        self.open_disk()

    def make_kv(self):
        return KvCache(SPEC, PAGES, PAGE, torch.float32)

    def make_host(self):
        return None

    def open_disk(self):
        self.store = DiskStore(self.directory, "0" * 40, 60_000, self.kv, self.pool)
        self.disk = Restoring(self.store, self.tree, self.pool, self.kv, self.book, self.host)

    def teardown(self):
        self.store.close()
        self.kv.close()
        if self.host:
            self.host.close()
        shutil.rmtree(self.directory)

    @rule(prompt=PROMPTS, wait=st.booleans())
    def start(self, prompt, wait):
        self.count += 1
        self.now_s += 100.0
        ids = tokens_of(prompt)
        sequence = Sequence(EngineRequest(f"r{self.count}", ids, 1, session=f"s{prompt[0]}"), 0)
        if wait:
            self.store.wait_idle(10)
        self.disk.begin(sequence)
        until_s = time.monotonic() + 10
        while self.disk.waits(sequence.key) and time.monotonic() < until_s:
            self.disk.take()
            self.pages_are_accounted_for()
        assert not self.disk.waits(sequence.key)
        while self.disk.bring(sequence, None, others=wait):
            self.pages_are_accounted_for()
        self.disk.forget(sequence.key)
        pages, part, _ = self.tree.match(sequence.ids)
        sequence.start(pages, PAGE)
        lacking = -(-len(ids) // PAGE) - len(pages)
        if lacking > self.pool.free:
            self.tree.evict(lacking - self.pool.free)
        more = self.pool.allocate(lacking)
        if part:
            if more:
                self.kv.copy(part.page, more[0], part.tokens)
                sequence.computed += part.tokens
            self.pool.release((part.page,))
        if more is None:
            self.pool.release(sequence.leave())
            return
        sequence.pages.extend(more)
        self.book.resumed(sequence.ids, sequence.computed, sequence.request.session)
        self.holds_its_tokens(sequence)
        for place in range(sequence.computed, len(ids)):
            page = sequence.pages[place // PAGE] * self.kv.page_stride
            self.kv.k[0][page, place % PAGE] = float(ids[place])
            self.kv.v[0][page, place % PAGE] = -float(ids[place])
        sequence.computed = len(ids)
        self.running.append(sequence)

    def holds_its_tokens(self, sequence):
        for place in range(sequence.computed):
            page = sequence.pages[place // PAGE] * self.kv.page_stride
            token = float(sequence.ids[place])
            assert self.kv.k[0][page, place % PAGE].unique().tolist() == [token]
            assert self.kv.v[0][page, place % PAGE].unique().tolist() == [-token]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.holds_its_tokens(sequence)
        if keep:
            tokens, session = sequence.computed, sequence.request.session
            odds = self.book.first_chance(session, tokens)
            self.tree.insert(sequence.ids, sequence.pages, ends=True, chance=odds)
            self.disk.offer(sequence, odds, True)
            self.pool.release(sequence.leave())
            middle = Anchor(max(1, tokens // 2), AnchorKind.SYSTEM)
            self.book.note(sequence.ids, [middle, Anchor(tokens, AnchorKind.TURN)], session, tokens)
        else:
            self.pool.release(sequence.leave())

    @rule(n=st.integers(1, 40))
    def evict(self, n):
        idle = self.pool.idle
        assert self.tree.evict(n) == min(n, idle)

    @rule(session=st.sampled_from([None, "s1", "s2"]))
    def drop(self, session):
        free = self.pool.free
        assert self.book.drop(session) == self.pool.free - free
        if session and self.host:
            self.host.book.drop(session)

    @rule()
    def restart(self):
        """Memory is lost but for what runs; the disk is as it was."""
        self.store.close()
        self.tree.clear()
        self.disk.distrust()
        self.open_disk()

    @invariant()
    def pages_are_accounted_for(self):
        assert self.pool.free + self.pool.held == PAGES
        in_use = {page for s in self.running for page in s.pages}
        kept = [page for run in self.tree.runs() for page in run.pages]
        assert len(kept) == len(set(kept))
        assert self.pool.held == len(in_use | set(kept))
        assert self.pool.idle == len(set(kept) - in_use)

    @invariant()
    def anchors_stand_within_their_runs(self):
        for run in self.tree.runs():
            assert all(run.begin < position <= run.end for position in run.anchors)
            assert all(a.position == position for position, a in run.anchors.items())


AnchorPages.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnchorPages = AnchorPages.TestCase


def test_a_page_that_has_come_free_is_not_written(tmp_path, monkeypatch):
    """Whatever the worker has read of it goes nowhere: it may be another's by now."""
    pool = PagePool(PAGES, PAGE)
    kv = KvCache(SPEC, PAGES, PAGE, torch.float32)
    store = DiskStore(tmp_path, "0" * 40, 10**6, kv, pool)
    write, held = store._write, threading.Event()
    monkeypatch.setattr(store, "_write", lambda offer: (held.wait(10), write(offer)))
    pages = pool.allocate(2 * BLOCK_PAGES)
    store.offer(array("i", range(2 * BLOCK)), pages, 0.5, ())
    pool.release(pages[-1:])
    held.set()
    store.close()
    kv.close()
    assert len(list(tmp_path.rglob("*.ftdkv"))) == 1  # the block before it is sound
