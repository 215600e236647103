"""The pages of ``test_anchor_pages`` over a tier of host memory: it never holds wrong ones."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_anchor_pages import PAGE, PAGES, SPEC, AnchorPages

from ftd.cuda.host_pages import PinnedPages
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.memory import DeviceMemory
from ftd.engine import restoring
from ftd.kv.host import GHOST, HostTier

CPU = torch.device("cpu")
HOST_PAGES = 25
AT_ONCE = restoring.BROUGHT_AT_ONCE


class HostPages(AnchorPages):
    first_page = CudaKvCache.first_page

    def make_kv(self):
        return CudaKvCache(SPEC, PAGES, PAGE, torch.float32, DeviceMemory(CPU))

    def make_host(self):
        size = self.kv.page_bytes
        memory = PinnedPages(HOST_PAGES, size, CPU, piece_bytes=3 * size)
        return HostTier(memory, self.kv, PAGE, lambda: self.now_s)

    @rule(pages=st.sampled_from([1, 3, 256]))
    def bring_at_once(self, pages):
        restoring.BROUGHT_AT_ONCE = pages

    def teardown(self):
        restoring.BROUGHT_AT_ONCE = AT_ONCE
        super().teardown()

    @rule()
    def use_nothing_of_disk(self):
        self.store.clear()

    @invariant()
    def host_pages_are_accounted_for(self):
        pool, tree = self.host.pool, self.host.tree
        assert pool.free + pool.held == pool.num_pages <= HOST_PAGES
        kept = [page for run in tree.runs() for page in run.pages if page != GHOST]
        assert len(kept) == len(set(kept))
        loading = {page for _, pages in self.host._loading for page in pages}
        assert pool.held == len(set(kept) | loading)
        for run in tree.runs():
            assert all(run.begin < position <= run.end for position in run.anchors)
            assert len(run.pages) == -(-len(run.tokens) // PAGE)

    @invariant()
    def host_pages_hold_their_tokens(self):
        for run in self.host.tree.runs():
            for i, page in enumerate(run.pages):
                if page == GHOST:
                    continue
                tokens = run.tokens[i * PAGE : (i + 1) * PAGE]
                k, v = self.host._memory.row(page).view(torch.float32).view(2, PAGE, -1)
                for place, token in enumerate(tokens):
                    assert k[place].unique().tolist() == [token]
                    assert v[place].unique().tolist() == [-token]


HostPages.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestHostPages = HostPages.TestCase
