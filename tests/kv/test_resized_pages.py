"""Pages, prefix tree and their memory while the pool is resized, against tokens written down.

Every computed page holds the tokens it was computed from, so a page that is lost, moved to the
wrong place or named by its old number shows at once.
"""

import os
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.kv.cache import KvCache
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree
from ftd.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec

PAGE, MOST = 2, 12
MIB = 2**20
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=14).map(tuple)


def spec(*heads):
    layers = tuple(
        LayerSpec(AttentionSpec(8, n, 64, rope=None, softmax_scale=1.0), DenseSpec(16))
        for n in heads
    )
    return ModelSpec("test", 32, 100, layers, 1e-6, True, 1024, (0,))


class ResizedMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=MOST, page_tokens=PAGE)
        self.tree = PrefixTree(self.pool)
        self.cache = KvCache(spec(1, 2), MOST, PAGE, torch.float32, max_pages=2 * MOST)
        self.running = []  # (ids, pages)

    def teardown(self):
        self.cache.close()

    @rule(ids=TOKENS)
    def start(self, ids):
        pages, part, _ = self.tree.match(array("i", ids))
        known = len(pages)
        more = self.pool.allocate(-(-len(ids) // PAGE) - known)
        if part:
            self.pool.release((part.page,))
        if more is None:
            self.pool.release(pages)
            return
        if part:
            self.cache.copy(part.page, more[0], part.tokens)
            copied = ids[known * PAGE : known * PAGE + part.tokens]
            for tensor in (*self.cache.k, *self.cache.v):
                assert tensor[more[0], : part.tokens, 0, 0].tolist() == list(copied)
        pages.extend(more)
        for n, page in enumerate(pages[known:], known):
            for place, token in enumerate(ids[n * PAGE : (n + 1) * PAGE]):
                for tensor in (*self.cache.k, *self.cache.v):
                    tensor[page, place] = token
        self.running.append((ids, pages))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data):
        ids, pages = data.draw(st.sampled_from(self.running))
        self.tree.insert(array("i", ids), pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        ids, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.tree.insert(array("i", ids), pages, ends=True)
        self.pool.release(pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        _, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(pages)

    @rule(num_pages=st.integers(1, 2 * MOST))
    def resize(self, num_pages):
        in_use = self.pool.held - self.pool.idle
        num_pages = max(num_pages, in_use, 1)
        self.tree.evict(max(0, self.pool.held - num_pages))
        kept = self.pool.held
        moves = self.pool.resize(num_pages)
        self.cache.move(moves)
        self.tree.renumber(dict(moves))
        for _, pages in self.running:
            pages[:] = array("i", [dict(moves).get(page, page) for page in pages])
        self.cache.resize(num_pages)
        assert self.pool.held == kept
        assert len({page for page, _ in moves} & {to for _, to in moves}) == 0

    @invariant()
    def all_pages_are_accounted_for(self):
        assert self.pool.free + self.pool.held == self.pool.num_pages == self.cache.num_pages
        in_use = {page for _, pages in self.running for page in pages}
        assert self.pool.held - self.pool.idle == len(in_use)
        assert all(0 <= page < self.pool.num_pages for page in in_use)

    @invariant()
    def every_page_holds_its_tokens(self):
        for ids, pages in self.running:
            for tensor in (*self.cache.k, *self.cache.v):
                read = tensor[list(pages)][:, :, 0, 0].flatten()[: len(ids)]
                assert read.tolist() == list(ids)


ResizedMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestResizedMachine = ResizedMachine.TestCase


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_pages_that_go_is_given_back(dtype):
    cache = KvCache(spec(2, 2), 256, 16, dtype, max_pages=2**16)
    before = resident_bytes()
    cache.resize(4096)
    for tensor in (*cache.k, *cache.v):
        tensor[:4096] = 1.0
    held = 4096 * cache.page_bytes
    assert held >= 60 * MIB * dtype.itemsize // 2
    assert abs(resident_bytes() - before - held) < 8 * MIB
    address = cache.k[0].data_ptr()
    cache.resize(1024)
    assert abs(resident_bytes() - before - held // 4) < 8 * MIB
    cache.resize(4096)
    assert cache.k[0].data_ptr() == address
    assert (cache.k[0][:1024] == 1).all() and not cache.v[1][1025:].any()
    cache.close()


def test_address_space_that_is_not_granted_is_done_without():
    cache = KvCache(spec(2), 8, 16, torch.float32, max_pages=2**44)
    assert cache.max_pages == 8
    cache.close()
