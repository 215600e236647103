"""The prefix tree against a naive model: one entry a page, keyed by the tokens up to its end."""

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.kv.anchors import Ended
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree

PAGE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=16).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    """Sequences that start, compute chunks, commit them, and leave; evictions at any moment."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=12, page_tokens=PAGE)
        self.tree = PrefixTree(self.pool)
        self.entries = {}  # tokens up to the page's last -> [page, last use]
        self.running = []  # (ids, pages), the KV of all ids computed
        self.tick = 0

    def known(self, ids, limit):
        found = []
        for end in range(PAGE, limit // PAGE * PAGE + 1, PAGE):
            if ids[:end] not in self.entries:
                break
            found.append(ids[:end])
        return found

    def parts(self, ids, begin, limit):
        """Pages that go on where whole ones end, and how many of their tokens agree."""
        found = {}
        for key, (page, _) in self.entries.items():
            if (len(key) - 1) // PAGE * PAGE == begin and key[:begin] == ids[:begin]:
                pairs = zip(key[begin:], ids[begin:limit], strict=False)
                found[page] = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
                if found[page] is None:
                    found[page] = min(len(key), limit, len(ids)) - begin
        return found

    def use(self, keys):
        self.tick += 1
        for key in keys:
            self.entries[key][1] = self.tick

    def in_use(self, page):
        return any(page in pages for _, pages in self.running)

    def idle(self):
        return [key for key, (page, _) in self.entries.items() if not self.in_use(page)]

    @rule(ids=TOKENS, limit=st.one_of(st.none(), st.integers(0, 16)), commit=st.booleans())
    def start(self, ids, limit, commit):
        limit = min(len(ids) - 1, len(ids) if limit is None else limit)
        keys = self.known(ids, limit)
        expected = [self.entries[key][0] for key in keys]
        parts = self.parts(ids, PAGE * len(keys), limit)
        most = max(parts.values(), default=0)
        reuse = self.tree.peek(array("i", ids), limit)
        assert (reuse.tokens, reuse.pages) == (PAGE * len(keys) + most, len(keys))
        assert reuse.idle_pages == sum(not self.in_use(page) for page in expected)
        pages, part, _ = self.tree.match(array("i", ids), limit)
        assert list(pages) == expected
        assert (part.tokens if part else 0) == most
        self.use(keys)
        if part:
            assert parts[part.page] == most
            self.pool.release((part.page,))
            tails = [k for k, (page, _) in self.entries.items() if page == part.page]
            self.entries[tails[0]][1] = (
                self.tick if len(tails[0]) % PAGE else self.entries[tails[0]][1]
            )
        self.running.append((ids, pages))
        more = self.pool.allocate(-(-len(ids) // PAGE) - len(pages))
        if more is None:
            self.stop(len(self.running) - 1, commit=False)
            return
        pages.extend(more)
        if commit:
            self.commit(len(self.running) - 1, len(ids))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit_chunk(self, data):
        i = data.draw(st.integers(0, len(self.running) - 1))
        self.commit(i, data.draw(st.integers(0, len(self.running[i][0]))))

    def commit(self, i, computed, ends=False):
        ids, pages = self.running[i]
        before = list(pages)
        keys = [ids[:end] for end in range(PAGE, computed + 1, PAGE)]
        self.tree.insert(array("i", ids[:computed]), pages, ends=ends)
        self.use([key for key in keys if key in self.entries])
        for n, key in enumerate(keys):
            if key not in self.entries:
                self.enter(key, before[n])
            before[n] = self.entries[key][0]
        if ends and computed % PAGE and not self.covered(ids[:computed]):
            self.enter(ids[:computed], before[computed // PAGE])
        assert list(pages) == before

    def enter(self, key, page):
        for end in range((len(key) - 1) // PAGE * PAGE + 1, len(key)):
            self.entries.pop(key[:end], None)  # a tail that is now known as part of a longer page
        self.entries[key] = [page, self.tick]

    def covered(self, key):
        begin = len(key) // PAGE * PAGE
        return any(
            (len(k) - 1) // PAGE * PAGE == begin and k[: len(key)] == key for k in self.entries
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), commit=st.booleans(), ends=st.booleans())
    def finish(self, data, commit, ends):
        self.stop(data.draw(st.integers(0, len(self.running) - 1)), commit, ends)

    def stop(self, i, commit, ends=False):
        if commit:
            self.commit(i, len(self.running[i][0]), ends)
        self.pool.release(self.running.pop(i)[1])

    @rule(n=st.integers(1, 4))
    def evict(self, n):
        expected = 0
        while expected < n and self.idle():
            inner = {key[: (len(key) - 1) // PAGE * PAGE] for key in self.entries}
            leaves = [key for key in self.idle() if key not in inner]
            oldest = min(self.entries[key][1] for key in leaves)
            ties = [key for key in leaves if self.entries[key][1] == oldest]
            before = {key: self.entries[key][0] for key in ties}
            assert self.tree.evict(1) == 1
            gone = [key for key in ties if not self.pool.is_idle(before[key])]
            assert len(gone) == 1
            del self.entries[gone[0]]
            expected += 1
        if expected < n:
            assert self.tree.evict(n - expected) == 0

    @rule()
    def clear(self):
        idle = self.idle()
        assert self.tree.clear() == len(idle)
        for key in idle:
            del self.entries[key]

    @invariant()
    def accounts_agree(self):
        held = {page for page, _ in self.entries.values()}.union(*(p for _, p in self.running))
        assert self.pool.held == len(held)
        assert self.pool.held + self.pool.free == self.pool.num_pages
        assert self.pool.idle == len(self.idle())
        assert len({page for page, _ in self.entries.values()}) == len(self.entries)
        for key in self.entries:  # every entry, and nothing else, is found
            assert self.tree.peek(array("i", (*key, 0))).tokens >= len(key)
        for _, pages in self.running:
            mine = [sum(page in other for _, other in self.running) == 1 for page in pages]
            assert self.pool.num_exclusive(pages) == sum(mine)


TestPrefixTree = TreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def committed(tree, pool, ids):
    """Run one sequence to its end: match, compute, commit, leave. Returns the tokens reused."""
    ids = array("i", ids)
    pages, part, _ = tree.match(ids)
    reused = len(pages) * pool.page_tokens
    if part:
        reused += part.tokens
        pool.release((part.page,))
    missing = -(-len(ids) // pool.page_tokens) - len(pages)
    if missing > pool.free:
        tree.evict(missing - pool.free)
    pages.extend(pool.allocate(missing))
    tree.insert(ids, pages, ends=True)
    pool.release(pages)
    return reused


@pytest.fixture
def pool():
    return PagePool(num_pages=64, page_tokens=4)


@pytest.fixture
def tree(pool):
    return PrefixTree(pool)


def test_a_retry_computes_one_token(tree, pool):
    for length in (1, 3, 4, 5, 8, 9):
        ids = range(100 * length, 101 * length)
        assert committed(tree, pool, ids) == 0
        assert length - committed(tree, pool, ids) == 1


def test_what_continues_an_answer_computes_only_what_is_new(tree, pool):
    turn = [*range(30)]
    assert committed(tree, pool, turn) == 0
    assert committed(tree, pool, [*turn, 50, 51]) == 30
    assert committed(tree, pool, [*turn, 50, 51, *range(60, 70)]) == 32
    assert committed(tree, pool, [*turn, 90]) == 30  # another end of the first: copied again
    assert committed(tree, pool, [*turn, 50, 51, 99]) == 32


def test_of_many_ways_on_the_one_that_agrees_longest_is_copied_from(tree, pool):
    for last in range(8):
        committed(tree, pool, [1, 2, 3, 4, 5, last, last])
    assert committed(tree, pool, [1, 2, 3, 4, 5, 6, 6, 6]) == 7
    assert committed(tree, pool, [1, 2, 3, 4, 5, 9, 9, 9]) == 5
    assert committed(tree, pool, [1, 2, 9, 9]) == 2


def test_an_edit_reuses_all_before_it(tree, pool):
    committed(tree, pool, range(40))
    edited = [*range(22), 99, *range(23, 40)]
    assert committed(tree, pool, edited) == 22
    assert committed(tree, pool, range(40)) == 39  # the first form is still there
    assert committed(tree, pool, edited) == 39


def test_two_who_compute_the_same_end_with_one_copy(tree, pool):
    ids = array("i", range(8))
    first, second = array("i", pool.allocate(2)), array("i", pool.allocate(2))
    tree.insert(ids, first)
    tree.insert(ids, second)
    assert second == first
    assert (pool.held, pool.idle) == (2, 0)
    pool.release(first)
    pool.release(second)
    assert (pool.held, pool.idle) == (2, 2)


def test_eviction_spares_what_runs_and_starts_with_the_oldest(tree, pool):
    committed(tree, pool, [1] * 8)
    committed(tree, pool, [2] * 8)
    running, _, _ = tree.match(array("i", [1] * 9))
    assert tree.evict(1) == 1
    assert tree.peek(array("i", [2] * 9)).tokens == 4
    assert tree.evict(10) == 1
    assert tree.peek(array("i", [1] * 9)).tokens == 8
    pool.release(running)
    assert tree.clear() == 2
    assert pool.free == pool.num_pages


def test_5000_distinct_prompts_leave_nothing_but_pages_behind(tree, pool):
    draw = random.Random(1)
    for _ in range(5000):
        shared = [7] * draw.randrange(0, 40)
        committed(tree, pool, [*shared, *(draw.randrange(1000) for _ in range(60))])
    assert pool.held <= pool.num_pages
    assert len(tree._queue) <= pool.num_pages  # one entry a node, one page a node at least
    tree.clear()
    assert pool.free == pool.num_pages
    assert not tree._queue and not tree._root.children


def test_a_long_prompt_committed_in_chunks_is_found_whole():
    pool = PagePool(num_pages=12_500, page_tokens=16)
    tree = PrefixTree(pool)
    ids = array("i", (i * i % 150_001 for i in range(200_000)))
    pages = array("i", pool.allocate(12_500))
    for end in range(0, 200_001, 4_096):
        tree.insert(ids[:end], pages)
    tree.insert(ids, pages)
    found, part, _ = tree.match(ids)
    assert found == pages[:-1]
    assert part == (pages[-1], 15)
    assert tree.peek(ids + array("i", [1])) == (200_000, 12_500, 0)
    ids[100_000] += 1
    assert tree.peek(ids) == (100_000, 6_250, 0)
    ids[99_999] += 1
    assert tree.peek(ids) == (99_999, 6_249, 0)


def test_why_a_match_ended(tree, pool):
    def why(ids):
        pages, part, ended = tree.match(array("i", ids))
        pool.release([*pages, *([part.page] if part else [])])
        return ended

    assert why(range(9)) is Ended.NOTHING
    committed(tree, pool, range(30))
    assert why(range(30)) is Ended.WHOLE
    assert why([*range(30), 99, 98]) is Ended.GOES_ON
    assert why([*range(18), 99, 98]) is Ended.DIFFERS
    assert why([99, 98]) is Ended.DIFFERS
    tree.evict(3)
    assert why(range(30)) is Ended.EVICTED
    tree.clear()
    assert why(range(30)) is Ended.NOTHING
