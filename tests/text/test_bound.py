"""No text becomes fewer tokens than its length tells; where some could be lost, nothing is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from ftd.text import bound
from ftd.text.bound import TokenBound, most_bytes

DEMO = Path(__file__).parents[2] / "ftd" / "demo" / "tokenizer.json"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_fallback(**changes):
    model = {"type": "BPE", "byte_fallback": True, "vocab": {**BYTES, "▁▁the": 256}}
    return {
        "model": model,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        **changes,
    }


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO))


@pytest.fixture(scope="module")
def composing():
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@given(
    st.one_of(
        st.text(max_size=60),
        st.text("ab ", max_size=60),
        st.sampled_from(["\u1fbe\u0308\u0301", "\u1100\u1161\u11a8", "\u212a", "<|im_start|>"]),
    ),
    st.integers(1, 40),
)
def test_no_text_has_fewer_tokens(tokenizer, composing, text, times):
    for each in (tokenizer, composing):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bound, "SHORT_BYTES", 0)
            least = TokenBound(each).least_tokens(text * times)
        assert least <= len(each.encode(text * times, add_special_tokens=False).ids)


def test_a_long_text_has_as_many_tokens_as_its_bytes_need(tokenizer):
    longest = most_bytes(json.loads(tokenizer.to_str()))
    assert longest == 64
    assert TokenBound(tokenizer).least_tokens("a" * 640_001) == 10_001
    assert TokenBound(tokenizer).least_tokens("ä" * 640_000) == 5_000
    assert TokenBound(tokenizer).least_tokens("a" * 640) == 0


@pytest.mark.parametrize(
    ("tokenizer", "longest"),
    [
        (byte_fallback(), 9),
        (byte_fallback(normalizer={"type": "NFC"}), 9),
        (byte_fallback(normalizer={"type": "Lowercase"}), 0),
        (byte_fallback(normalizer={"type": "NFKC"}), 0),
        (byte_fallback(pre_tokenizer={"type": "WhitespaceSplit"}), 0),
        (byte_fallback(pre_tokenizer={"type": "Split", "behavior": "Removed"}), 0),
        (
            byte_fallback(added_tokens=[{"content": "<s>" * 9, "lstrip": False, "rstrip": False}]),
            27,
        ),
        (byte_fallback(added_tokens=[{"content": "<mask>", "lstrip": True, "rstrip": False}]), 0),
        (byte_fallback(model={"type": "BPE", "vocab": BYTES, "byte_fallback": False}), 0),
        (byte_fallback(model={"type": "Unigram", "vocab": []}), 0),
        (byte_fallback(model={"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}), 0),
    ],
)
def test_where_bytes_can_be_lost_there_is_no_bound(tokenizer, longest):
    assert most_bytes(tokenizer) == longest


def test_a_normaliser_that_only_writes_blanks_otherwise_loses_nothing():
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blanks]}
    assert most_bytes(byte_fallback(normalizer=steps)) == 9
    shrinks = {**blanks, "pattern": {"String": "aa"}}
    assert most_bytes(byte_fallback(normalizer=shrinks)) == 0
