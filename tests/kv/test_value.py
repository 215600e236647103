"""What is evicted first, in numbers, and what that does to sessions in a simulated day."""

import random
from array import array
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.kv.anchor_book import AnchorBook
from ftd.kv.anchors import Anchor, AnchorKind
from ftd.kv.pages import PagePool
from ftd.kv.prefix_tree import PrefixTree, least_recently_used
from ftd.kv.value import HALF_LIFE_S, Cost, after_branches, chance, is_side, rank, rank_of_pages

CHANCES = st.floats(0.01, 1.0)
TIMES = st.floats(0, 1e6)


@given(begin=st.integers(0, 10**6), tokens=st.integers(1, 10**6), more=st.integers(1, 10**6))
def test_cost_adds_up_and_grows_with_the_position(begin, tokens, more):
    cost = Cost(0.01)
    parts = cost.seconds(begin, begin + tokens) + cost.seconds(
        begin + tokens, begin + tokens + more
    )
    assert parts == pytest.approx(cost.seconds(begin, begin + tokens + more))
    assert cost.seconds(begin + more, begin + more + tokens) > cost.seconds(begin, begin + tokens)


@given(value=st.floats(1e-12, 1.0), odds=CHANCES, used_s=TIMES)
def test_worth_halves_in_a_half_life(value, odds, used_s):
    aged = rank(value, odds, used_s)
    assert aged == pytest.approx(rank(value / 2, odds, used_s + HALF_LIFE_S), abs=1e-6)
    assert aged < rank(value, odds, used_s + 1.0)


@given(first=CHANCES, branches=st.integers(0, 40))
def test_every_other_way_on_makes_the_next_likelier(first, branches):
    assert after_branches(first, branches) <= after_branches(first, branches + 1) <= 1.0


def test_a_conversation_that_has_gone_on_is_likelier_to_go_on():
    turns = [chance(AnchorKind.TURN, turns=n) for n in range(30)]
    assert turns == sorted(turns) and turns[0] < 0.3 and turns[-1] > 0.9
    assert chance(AnchorKind.SYSTEM, side=True) < chance(None) < turns[0]


def test_a_request_far_below_its_sessions_longest_is_made_beside_it():
    assert is_side(900, 12_000) and not is_side(9_000, 12_000) and not is_side(900, 0)


# ---- a simulated day: no tensors, only tokens


@dataclass
class Day:
    """Requests against a tree of so many pages; counts what had to be computed again."""

    by_value: bool
    num_pages: int
    now_s: float = 0.0
    known: set = field(default_factory=set)
    again: int = 0  # tokens computed though they had been before

    def __post_init__(self):
        self.pool = PagePool(self.num_pages, 16)
        order = rank_of_pages if self.by_value else least_recently_used
        self.tree = PrefixTree(self.pool, order, lambda: self.now_s)
        self.book = AnchorBook(self.tree)

    def ask(self, ids, anchors=(), session="", answer=40):
        """One request and its answer; returns the tokens found."""
        prompt, ids = (
            len(ids),
            array("i", [*ids, *header(f"{session} {len(ids)}", answer)]),
        )
        pages, part, _ = self.tree.match(ids, prompt - 1)
        found = len(pages) * 16
        if part:
            found += part.tokens
            self.pool.release((part.page,))
        self.book.resumed(ids, found, session)
        lacking = -(-len(ids) // 16) - len(pages)
        if lacking > self.pool.free:
            self.tree.evict(lacking - self.pool.free)
        pages.extend(self.pool.allocate(lacking))
        odds = self.book.first_chance(session, prompt)
        self.tree.insert(ids, pages, ends=True, chance=odds, session=session)
        self.pool.release(pages)
        anchors = [*anchors, Anchor(len(ids), AnchorKind.TURN)]
        self.book.note(ids, anchors, session, prompt)
        self.again += sum(ids[:end].tobytes() in self.known for end in range(found + 1, prompt, 16))
        self.known.update(ids[:end].tobytes() for end in range(1, len(ids) + 1))
        return found, list(ids)


def header(name, tokens):
    return [crc32(f"{name} {n}".encode()) % 9999 for n in range(tokens)]  # the same in each run


def test_a_title_request_never_evicts_the_main_session():
    day = Day(by_value=True, num_pages=100)
    system = header("system", 800)
    anchors = [Anchor(800, AnchorKind.SYSTEM)]
    _, history = day.ask(system + header("task", 200), anchors, "main")
    for turn in range(30):
        day.now_s += 5.0
        found, _ = day.ask(header(f"title {turn}", 180), (), "main", answer=10)
        assert found == 0
    found, _ = day.ask(history + header("more", 50), anchors, "main")
    assert found == len(history)


def test_small_sub_agents_never_evict_the_main_session_either():
    day = Day(by_value=True, num_pages=110)
    anchors = [Anchor(600, AnchorKind.SYSTEM)]
    _, history = day.ask(header("system", 600) + header("task", 300), anchors, "s")
    for turn in range(4):
        day.now_s += 20.0
        anchors.append(Anchor(len(history), AnchorKind.TURN))
        _, history = day.ask(history + header(f"result {turn}", 60), anchors, "s")
    for agent in range(20):
        day.now_s += 10.0
        _, said = day.ask(
            header("agent", 150) + header(f"job {agent}", 60),
            [Anchor(150, AnchorKind.SYSTEM)],
            f"s/{agent}",
        )
        day.ask(said + header(f"answer {agent}", 30), (), f"s/{agent}")
    found, _ = day.ask(history + header("more", 50), anchors, "s")
    assert found == len(history)


def run_of_a_day(by_value, seed):
    """Two long sessions with pauses, beside many short requests that never come back."""
    draw = random.Random(seed)
    day = Day(by_value, num_pages=320)
    system = header("system", 700)
    ask = partial(day.ask, anchors=[Anchor(700, AnchorKind.SYSTEM)])
    histories = {name: system + header(name, 300) for name in ("one", "two")}
    for step in range(60):
        day.now_s += draw.uniform(5, 60)
        if step % 4 == 0:
            name = draw.choice(list(histories))
            _, said = ask(histories[name] + header(f"{name} {step}", 50), session=name)
            if len(said) < 2000:
                histories[name] = said
        else:
            day.ask(header(f"short {step}", draw.randrange(300, 900)), session=f"short {step}")
    return day.again


def test_by_value_less_is_computed_again_than_by_recency():
    runs = [(run_of_a_day(True, seed), run_of_a_day(False, seed)) for seed in range(4)]
    assert all(value <= recency for value, recency in runs)
    assert sum(value for value, _ in runs) < 0.5 * sum(recency for _, recency in runs)
