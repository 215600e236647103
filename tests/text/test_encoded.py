"""Ids of texts that are known already."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.text.encoded import EncodedTexts


@settings(deadline=None)
@given(
    texts=st.lists(st.text(max_size=3).map(lambda text: text * 300), max_size=30),
    limit_bytes=st.sampled_from([0, 3000, 10**6]),
)
def test_ids_are_those_of_the_text_and_memory_is_bounded(texts, limit_bytes):
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [ord(char) for char in text]

    encoded = EncodedTexts(encode, limit_bytes)
    for text in texts:
        assert list(encoded.ids(text)) == [ord(char) for char in text]
        assert encoded.size_bytes <= limit_bytes
    if limit_bytes > 10**5:
        long = [text for text in asked if text]
        assert len(long) == len(set(long)), "nothing is tokenized twice"


def test_the_least_recently_used_go_first():
    asked: list[str] = []
    encoded = EncodedTexts(lambda text: asked.append(text) or [0] * len(text), 6000)
    for char in "aababca":
        encoded.ids(char * 400)
    assert [text[0] for text in asked] == ["a", "b", "c"]
    encoded.ids("d" * 400)
    encoded.ids("b" * 400)
    assert [text[0] for text in asked] == ["a", "b", "c", "d", "b"], "b had to go, a was in use"
