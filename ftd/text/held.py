"""Constraints at work: masks for the engine thread, from grammars that the library has compiled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from .call_reading import MAX_HEADER_CHARS
from .detokenize import Vocabulary
from .dialects import Thought

# Fuel bounds the time: compiling to half a second, a mask to some 20 ms; states the memory, at
# about 2 kB each, of one answer.
MAX_REASON_CHARS = 200
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    max_grammar_size=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """Why a grammar cannot be compiled, or is left in the middle."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What one kind of answer has to obey; shared by all of its answers."""

    tables: Tables
    matcher: LLMatcher | None = None  # never advanced, only copied
    trigger: int | None = None  # the token behind which it holds, each time; None: all the time
    unthinkable: int | None = None  # a token that may not come within thinking
    # where every message has a header: what holds behind the header of a call, by the tool's name
    calls: Mapping[str, LLMatcher] = field(default_factory=dict)
    header_begins: int = -1  # the token
    header_name: str = ""  # pattern


class Tables:
    """The tokenizer as the library wants it.

    For 150,000 tokens a second, half of which holds the GIL, and 60 MB.

    Args:
        special: tokens that are no text.
        vocab: of the model, which may be larger than the tokenizer's.
    """

    def __init__(
        self, vocabulary: Vocabulary, special: frozenset[int], eos_ids: frozenset[int], vocab: int
    ) -> None:
        texts = [vocabulary.token_bytes(token) for token in range(vocab)]
        # The library writes special tokens as FF and a name, and FF alone would do as the beginning
        # of any: no text has that byte, and names of our own begin none.
        special = special | {
            token
            for token, text in enumerate(texts)
            if not text or b"\xff" in text or not vocabulary.visible(token)
        }
        names = [b"<%d>" % token if token in special else text for token, text in enumerate(texts)]
        source = _Source(names, sorted(special), min(eos_ids))
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(source), n_vocab=vocab, eos_token=sorted(eos_ids)
        )
        self.token_bytes = vocabulary.token_bytes
        self._words = -(-vocab // 32)
        self._eos_ids = eos_ids

    def compile(self, grammar: str) -> LLMatcher:
        """Raises GrammarError. Cost: see ``_LIMITS``; the GIL is given away."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        self.mask(matcher.deep_copy())  # some errors wait for the first mask
        return matcher

    def mask(self, matcher: LLMatcher) -> torch.Tensor:
        mask = torch.empty(self._words, dtype=torch.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return mask

    def unended(self, unthinkable: int | None) -> torch.Tensor:
        """Any token but those that end the answer, and one other."""
        mask = torch.full((self._words,), -1, dtype=torch.int32)
        for token in self._eos_ids | ({unthinkable} if unthinkable is not None else set()):
            mask[token // 32] &= ~_bit(token)
        return mask


@dataclass(frozen=True, slots=True)
class _Source:
    """A tokenizer, seen from the library."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked for forced text only, and no grammar of ours forces any


class Held:
    """A whole answer obeys the rules; a thought before it is free but cannot be its end."""

    def __init__(self, rules: Rules, thought: Thought, think: tuple[int, int] | None) -> None:
        self._rules = rules
        self._think = think
        self._thinking = thought.open and think is not None
        self._may_think = thought.optional and think is not None
        self._matcher: LLMatcher | None = None
        self._mask: torch.Tensor | None = None

    def mask(self) -> torch.Tensor:
        if self._mask is None:
            self._mask = self._next()
        return self._mask

    def _next(self) -> torch.Tensor:
        tables = self._rules.tables
        if self._thinking:
            return tables.unended(self._rules.unthinkable)
        mask = tables.mask(self._copied())
        if self._may_think and self._think:
            mask[self._think[0] // 32] |= _bit(self._think[0])
        return mask

    def accept(self, token: int) -> None:
        opened, closed = self._think or (None, None)
        if self._thinking:
            if token != closed:
                return  # the mask stays
            self._thinking = False
        elif self._may_think and token == opened:
            self._thinking = True
        else:
            _advance(self._copied(), token)
        self._may_think, self._mask = False, None

    def _copied(self) -> LLMatcher:
        if self._matcher is None:
            assert self._rules.matcher is not None
            self._matcher = self._rules.matcher.deep_copy()
        return self._matcher


class Watched:
    """Text is free; what follows the trigger obeys the rules to its end, each time."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._matcher: LLMatcher | None = None  # within a block
        self._mask: torch.Tensor | None = None

    def mask(self) -> torch.Tensor | None:
        if self._matcher is not None and self._mask is None:
            self._mask = self._rules.tables.mask(self._matcher)
        return self._mask

    def accept(self, token: int) -> None:
        self._mask = None
        if self._matcher is None:
            begun = self._begun(token)
            self._matcher = begun and begun.deep_copy()
            return
        _advance(self._matcher, token)
        if self._matcher.is_stopped():
            self._matcher = None

    def _begun(self, token: int) -> LLMatcher | None:
        return self._rules.matcher if token == self._rules.trigger else None


class WatchedHeaders(Watched):
    """As before, where the text of a header tells which rules hold behind it."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._header = b""

    def _begun(self, token: int) -> LLMatcher | None:
        rules, header = self._rules, self._header
        if token == rules.trigger:
            self._header = b""
            match = re.fullmatch(rules.header_name, header.decode(errors="replace"))
            return rules.calls.get(match["name"]) if match else None
        more = header + rules.tables.token_bytes(token)
        self._header = b"" if token == rules.header_begins else more[:MAX_HEADER_CHARS]
        return None


def _advance(matcher: LLMatcher, token: int) -> None:
    if not matcher.consume_token(token):
        raise GrammarError(_reason(matcher))


def _reason(matcher: LLMatcher) -> str:
    """The library's message without its pictures of the grammar."""
    text = matcher.get_error().split("\n<")[0].split("\n   1 |")[0].split(":  (")[0]
    text = text.partition("failed to compile JSON schema: ")[2] or text
    if text.startswith("NoExtension"):
        return "nothing fits it: it asks for something without an end, or contradicts itself"
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."


def _bit(token: int) -> int:
    """The token's bit in its word, as an int32."""
    return -(2**31) if token % 32 == 31 else 1 << token % 32
