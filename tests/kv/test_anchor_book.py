"""Anchors on the pages of a prefix tree, against a list of what should stand."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorKind
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree

PAGE = 4
KINDS = [kind for kind in AnchorKind if kind is not AnchorKind.FORK]


@pytest.fixture
def pool():
    return PagePool(64, PAGE)


@pytest.fixture
def tree(pool):
    return PrefixTree(pool)


@pytest.fixture
def book(tree):
    return AnchorBook(tree)


def keep(tree, pool, book, ids, anchors=(), session=""):
    """Run a sequence to its end. Returns what it resumed behind."""
    ids = array("i", ids)
    pages, part, _ = tree.match(ids)
    known = len(pages) * PAGE
    if part:
        known += part.tokens
        pool.release((part.page,))
    passed = book.resumed(ids, known, session)
    pages.extend(pool.allocate(-(-len(ids) // PAGE) - len(pages)))
    tree.insert(ids, pages, ends=True, session=session)
    book.note(ids, anchors, session, len(ids))
    pool.release(pages)
    return passed


def standing(book):
    return {(s.anchor.position, str(s.anchor.kind), s.anchor.session) for s in book}


def at(*positions, kind=AnchorKind.ROLE):
    return [Anchor(position, kind) for position in positions]


def test_anchors_stand_within_pages_and_in_the_last_one(tree, pool, book):
    keep(tree, pool, book, range(22), at(3, 4, 5, 21, 22), "s")
    assert standing(book) == {(p, "role", "s") for p in (3, 4, 5, 21, 22)}
    assert [s.tokens for s in sorted(book, key=lambda s: s.anchor.position)] == [3, 1, 1, 16, 1]


def test_tokens_that_prompts_share_are_held_once(tree, pool, book):
    keep(tree, pool, book, range(24), at(4, 24), "a")
    keep(tree, pool, book, [*range(16), *[50] * 8], at(4, 20), "b")
    found = {s.anchor.session + str(s.anchor.position): (s.tokens, s.held) for s in book}
    assert found.pop("b4") == (4, 4)  # both have come by
    (a_tokens, a_held), (b_tokens, b_held) = found["a24"], found["b20"]
    assert (a_tokens, b_tokens) == (20, 16)
    assert a_held + b_held == 12 + 8 + 4  # and not 12 more, of those between 4 and 16


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=12),
            st.sets(st.integers(1, 12), max_size=4),
        ),
        max_size=8,
    )
)
def test_no_more_is_held_than_the_tree_has(prompts):
    pool = PagePool(64, PAGE)
    tree = PrefixTree(pool)
    book = AnchorBook(tree)
    for number, (ids, places) in enumerate(prompts):
        anchors = at(*sorted(place for place in places if place <= len(ids)))
        keep(tree, pool, book, ids, anchors, str(number))
    for standing in book:
        assert 0 <= standing.held <= standing.anchor.position
        assert standing.tokens >= 0
    assert sum(s.held for s in book) <= sum(len(run.tokens) for run in tree.runs())


def test_the_deepest_anchor_passed_gets_the_hit(tree, pool, book):
    keep(tree, pool, book, range(22), at(5, 13))
    passed = keep(tree, pool, book, [*range(15), 99, 98])
    assert (passed.position, passed.hits) == (13, 1)
    assert passed.saved == pytest.approx(15, rel=0.01)
    assert keep(tree, pool, book, [*range(4), 99]) is None


def test_what_is_dropped_is_no_longer_counted(tree, pool, book):
    keep(tree, pool, book, range(24), at(5, 20), "a")
    keep(tree, pool, book, [*range(8), *[50] * 16], at(20), "b")
    assert book.count == 3
    held = list(book)  # as a cycle of runs is, until it is collected
    book.drop("b")
    assert book.count == 2
    book.drop()
    assert book.count == 0 and len(held) == 3


def test_the_hit_of_a_trial_is_in_no_total(tree, pool, book):
    keep(tree, pool, book, range(22), at(5))
    assert book.resumed(array("i", range(22)), 8, trial=True).hits == 1
    assert (book.hits, book.saved) == (0, 0.0)


def test_where_prompts_part_twice_is_an_anchor(tree, pool, book):
    keep(tree, pool, book, range(30), at(8))
    assert keep(tree, pool, book, [*range(18), 90, 91]).position == 8
    assert (18, "fork", "") not in standing(book)
    assert keep(tree, pool, book, [*range(18), 80, 81]).position == 18
    assert (18, "fork", "") in standing(book)


def test_an_anchor_goes_with_its_page(tree, pool, book):
    keep(tree, pool, book, range(22), at(4, 9, 20, 22))
    assert tree.evict(1) == 1
    assert standing(book) == {(p, "role", "") for p in (4, 9, 20)}
    tree.evict(2)
    assert standing(book) == {(p, "role", "") for p in (4, 9)}
    tree.clear()
    assert standing(book) == set()


def test_dropping_a_session_leaves_what_others_share(tree, pool, book):
    keep(tree, pool, book, [*range(16), *[50] * 8], at(16, kind=AnchorKind.SYSTEM) + at(20), "a")
    keep(tree, pool, book, [*range(16), *[60] * 8], at(16, kind=AnchorKind.SYSTEM) + at(21), "b")
    assert book.drop("a") == 2
    assert standing(book) == {(16, "system", "b"), (21, "role", "b")}
    assert tree.peek(array("i", [*range(16), *[60] * 9])).tokens == 24
    assert book.drop() == 6
    assert pool.free == pool.num_pages


def test_dropping_a_session_takes_what_stands_behind_its_last_anchor_too(tree, pool, book):
    keep(tree, pool, book, range(24), at(5), "a")
    keep(tree, pool, book, [*range(8), *[50] * 16], (), "a")  # a run without anchors
    assert book.drop("b") == 0
    book.drop("a")
    assert pool.free == pool.num_pages


def test_dropping_a_session_takes_what_has_lost_its_anchors(tree, pool, book):
    keep(tree, pool, book, range(24), at(20), "a")
    assert tree.evict(2) == 2 and standing(book) == set()
    assert book.drop("b") == 0
    assert book.drop("a") == 4
    assert pool.free == pool.num_pages


def test_whoever_parts_from_a_session_s_prompt_does_not_own_what_follows(tree, pool, book):
    keep(tree, pool, book, range(24), at(4), "a")
    keep(tree, pool, book, [*range(10), *[50] * 6], at(4), "b")
    keep(tree, pool, book, [*range(10), *[60] * 6], at(4), "b")  # the fork is seen again: an anchor
    assert (10, "fork", "b") in standing(book)
    assert book.drop("b") == 4
    assert tree.peek(array("i", range(25))).tokens == 24
    assert book.drop("a") == 4  # what is before the fork has served both
    assert tree.peek(array("i", range(25))).tokens == 8


def test_whoever_goes_on_behind_a_session_s_prompt_owns_only_that(tree, pool, book):
    keep(tree, pool, book, range(16), at(12), "a")
    keep(tree, pool, book, range(28), at(12, 20), "b")
    assert book.drop("b") == 3
    assert tree.peek(array("i", range(25))).tokens == 16
    keep(tree, pool, book, range(40), at(12, 20), "a")
    keep(tree, pool, book, range(44), at(12, 20), "a")  # grows as one run
    assert len(list(tree.runs())) == 2 and book.drop("a") == 7


def test_a_title_of_a_session_is_told_from_its_main_prompt(tree, pool, book):
    first = book.first_chance("s", 10)
    keep(tree, pool, book, range(100), at(50), "s")
    assert book.first_chance("s", 10) < first
    assert book.first_chance("s", 90) == book.first_chance("", 10) == first


@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=20), st.sets(st.integers(1, 20))
        ),
        max_size=8,
    ),
    evicted=st.integers(0, 8),
)
@example(prompts=[([1, 1], {1}), ([1, 0], set()), ([1, 0], set())], evicted=0)
def test_what_is_noted_stands_while_its_tokens_are_kept(prompts, evicted):
    pool = PagePool(64, PAGE)
    tree = PrefixTree(pool)
    book = AnchorBook(tree)
    noted = set()
    for ids, positions in prompts:
        places = sorted(p for p in positions if p <= len(ids))
        keep(tree, pool, book, ids, at(*places))
        noted |= {tuple(ids[:p]) for p in places}
    tree.evict(evicted)
    kept = {ids for ids in noted if tree.peek(array("i", (*ids, 9))).tokens == len(ids)}
    found = set()
    for anchor, _, run, _ in book:
        above, tokens = run, []
        while above is not None:
            tokens, above = [*above.tokens, *tokens], above.parent
        assert run.begin < anchor.position <= run.end == len(tokens)
        if anchor.kind is not AnchorKind.FORK:
            found.add(tuple(tokens[: anchor.position]))
    assert found <= kept
    assert evicted or found == kept


def test_anchors_behind_the_system_prompt_may_share_its_last_page(tree, pool, book):
    system = Anchor(5, AnchorKind.SYSTEM)
    keep(tree, pool, book, range(14), [system, *at(6, 8, 9)])
    for run in tree.runs():
        assert all(run.begin < position <= run.end for position in run.anchors)
    assert {position for run in tree.runs() for position in run.anchors} == {5, 6, 8, 9}
