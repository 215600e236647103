"""Stop strings: nothing of them is shown, whatever way the text was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.text.stops import StopScanner, StopSet


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, by brute force: the first end of any match, and there the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(pieces: list[str], stops: StopSet) -> tuple[list[str], str | None]:
    scanner = StopScanner(stops)
    shown = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        if scanner.matched:
            return shown, scanner.matched
    return [*shown, scanner.flush()], None


CASES = [
    ("alpha END OF FILE omega", ["END OF"]),
    ("alpha END OF FILE omega", ["END OFF"]),
    ("alpha END OF FILE omega", ["END OF", "END"]),
    ("alpha END OF FILE omega", ["END OF FILE", "END OF"]),
    ("alpha", ["a"]),
    ("alpha", ["alphabet soup that is longer than the answer"]),
    ("abcd", ["abcd", "bc"]),
    ("aabaabaaab", ["aabaaab"]),
    ("xabab!", ["abac", "bab"]),
    ("日本語👋🏽です", ["👋", "本日"]),
    ("nothing", []),
]


@pytest.mark.parametrize(("text", "stops"), CASES)
def test_every_cut_into_three_gives_the_same(text: str, stops: list[str]):
    automaton = StopSet(stops)
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        shown, matched = scan([text[:i], text[i:j], text[j:]], automaton)
        assert ("".join(shown), matched) == expected(text, stops)


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_any_cut_equals_the_definition(text: str, stops: list[str], cuts: list[int]):
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, matched = scan(pieces, StopSet(stops))
    assert ("".join(shown), matched) == expected(text, stops)


def test_only_what_may_begin_a_stop_string_is_held_back():
    scanner = StopScanner(StopSet(["END OFF"]))
    assert scanner.push("alpha EN") == "alpha "
    assert scanner.push("D OF") == ""
    assert scanner.push(" FILES") == "END OF FILES"
    assert scanner.push("E") == ""
    assert scanner.flush() == "E"


def test_a_set_without_stops_holds_nothing_back():
    assert not StopSet([])
    assert StopScanner(StopSet([])).push("END") == "END"
