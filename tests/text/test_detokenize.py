"""Pieces joined equal the tokenizer's own decode, for every kind of decoder and any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ftd.text.detokenize import Vocabulary

DEMO = Path(__file__).parents[2] / "ftd" / "demo" / "tokenizer.json"
TEXT = "The quick brown fox. Übergrößenträger, 世界 👩‍👩‍👧 naïve «quotes» 🇩🇪 \t\n  blanks"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    _add_tokens(tokenizer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mixtral: blanks are ▁, unknown characters are byte tokens."""
    words = ["<unk>", "▁", "▁The", "▁fox", "ox", ".", "ü", "▁▁", "a", "\ufffd", "世"]
    names = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_tokens(tokenizer)
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {name: i for i, name in enumerate(["<unk>", "▁", "▁The", "▁fox", "es", ".", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    _add_tokens(tokenizer)
    return tokenizer


def word_piece() -> Tokenizer:
    names = ["[UNK]", "the", "fox", "##es", ".", "don", "'", "t", "n't", ","]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    _add_tokens(tokenizer)
    return tokenizer


def bpe_suffix() -> Tokenizer:
    names = ["the</w>", "fo", "x</w>", ".</w>", "ü"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"the": 0, "fox": 1, "<unk>": 2}, unk_token="<unk>"))


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words")])


TOKENIZERS = {
    f.__name__: f()
    for f in (byte_level, byte_fallback, metaspace, word_piece, bpe_suffix, no_decoder)
} | {"demo": Tokenizer.from_file(str(DEMO))}


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Vocabulary(tokenizer).detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_decode_of_any_ids(name: str, data: st.DataObject):
    tokenizer = TOKENIZERS[name]
    beyond = tokenizer.get_vocab_size() + 3  # models pad their vocabulary
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte_fallback", "byte_level"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_decode_of_broken_utf8(name: str, data: st.DataObject):
    tokenizer = TOKENIZERS[name]
    bytes_ = [t for t in tokenizer.get_vocab().values() if _is_single_byte(tokenizer, t)]
    ids = data.draw(st.lists(st.sampled_from(sorted(bytes_)), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def _is_single_byte(tokenizer: Tokenizer, token: int) -> bool:
    name = tokenizer.id_to_token(token)
    return name.startswith("<0x") or len(name) == 1


@pytest.mark.parametrize("name", ["byte_level", "demo"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back_and_characters_are_never_split(name: str, text: str):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_held_back_are_flushed_at_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("👋").ids
    assert len(ids) > 1
    pieces = pieces_of(tokenizer, ids[:-1])
    assert "".join(pieces[:-1]) == ""
    assert "".join(pieces) == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_window_stays_small(name: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = TOKENIZERS[name]
    vocabulary = Vocabulary(tokenizer)
    longest = 0
    decode = vocabulary.decode

    def watch(tokens):
        nonlocal longest
        tokens = list(tokens)
        longest = max(longest, len(tokens))
        return decode(tokens)

    monkeypatch.setattr(vocabulary, "decode", watch)
    detokenizer = vocabulary.detokenizer()
    for i in range(2000):
        detokenizer.push(1 + i % 4)
    assert longest < 32


def test_token_bytes_are_the_parts_of_the_text():
    for name in ("byte_level", "demo"):
        vocabulary = Vocabulary(TOKENIZERS[name])
        ids = TOKENIZERS[name].encode(TEXT).ids
        assert b"".join(map(vocabulary.token_bytes, ids)).decode() == TEXT
    vocabulary = Vocabulary(TOKENIZERS["byte_fallback"])
    vocab = TOKENIZERS["byte_fallback"].get_vocab()
    names = ["▁The", "▁fox", "<0xE4>", "<0xB8>", "<|end|>"]
    found = [
        vocabulary.token_bytes(vocab.get(n, TOKENIZERS["byte_fallback"].token_to_id(n)))
        for n in names
    ]
    assert found == [b" The", b" fox", b"\xe4", b"\xb8", b"<|end|>"]
    assert vocabulary.token_bytes(10**6) == b""
