"""Every operation against a naive model: a set of holders for each page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.kv.pages import PagePool

TREE = "tree"


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=7, page_tokens=4)
        self.holders = {page: [] for page in range(7)}  # users by name, and the tree

    def pages(self, wanted):
        return [page for page, holders in self.holders.items() if wanted(holders)]

    @rule(n=st.integers(0, 9), who=st.sampled_from("abc"))
    def allocate(self, n, who):
        free = set(self.pages(lambda holders: not holders))
        got = self.pool.allocate(n)
        if n > len(free):
            assert got is None
            return
        assert len(set(got)) == n and set(got) <= free
        for page in got:
            self.holders[page].append(who)

    @precondition(lambda self: self.pages(bool))
    @rule(data=st.data(), who=st.sampled_from("abc"))
    def retain(self, data, who):
        pages = data.draw(st.lists(st.sampled_from(self.pages(bool)), unique=True))
        self.pool.retain(pages)
        for page in pages:
            self.holders[page].append(who)

    @rule(data=st.data(), who=st.sampled_from("abc"))
    def release(self, data, who):
        mine = self.pages(lambda holders: who in holders)
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.pool.release(pages)
        for page in pages:
            self.holders[page].remove(who)

    @precondition(lambda self: self.pages(lambda holders: holders and TREE not in holders))
    @rule(data=st.data())
    def keep(self, data):
        pages = self.pages(lambda holders: holders and TREE not in holders)
        page = data.draw(st.sampled_from(pages))
        self.pool.keep(page)
        self.holders[page].append(TREE)

    @precondition(lambda self: self.pages(lambda holders: TREE in holders))
    @rule(data=st.data())
    def drop(self, data):
        page = data.draw(st.sampled_from(self.pages(lambda holders: TREE in holders)))
        self.pool.drop(page)
        self.holders[page].remove(TREE)

    @invariant()
    def accounts_agree(self):
        assert self.pool.held + self.pool.free == self.pool.num_pages
        assert self.pool.held == len(self.pages(bool))
        idle = self.pages(lambda holders: holders == [TREE])
        assert self.pool.idle == len(idle)
        assert [page for page in range(7) if self.pool.is_idle(page)] == idle


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_page_is_never_released_twice():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="no user"):
        pool.release(pages)
    assert pool.free == 2


def test_a_free_page_cannot_be_retained():
    pool = PagePool(2, 16)
    with pytest.raises(AssertionError, match="free"):
        pool.retain([0])


def test_pages_used_before_are_given_out_first():
    pool = PagePool(4, 16)
    first = pool.allocate(2)
    assert first == [0, 1]
    pool.release([0])
    assert pool.allocate(1) == [0]


def test_exclusive_pages_are_those_behind_the_shared_ones():
    pool = PagePool(5, 16)
    pages = pool.allocate(4)
    assert pool.num_exclusive(pages) == 4
    pool.retain(pages[:3])
    assert pool.num_exclusive(pages) == 1
    pool.release(pages)
    assert pool.num_exclusive(pages[:3]) == 3
