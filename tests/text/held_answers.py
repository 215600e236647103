"""Small tokenizers with the markers of a dialect, and answers drawn under a constraint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import test_parse as written  # how the families write answers
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ftd.engine.api import Constraint, Sampling
from ftd.engine.sampling import Draw, Sampler, SamplingState
from ftd.text.constrain import ConstraintCompiler
from ftd.text.conversation import Demand, Tool
from ftd.text.detokenize import Vocabulary
from ftd.text.dialects import DIALECTS, Markup, Thought

UNHELD = {"gemma4", "lfm2", "gemma3", "plain"}  # calls written as expressions, or none
DIALECTS_HELD = [name for name in written.TEMPLATES if name.split()[0] not in UNHELD]
MUST = Demand(must_call=True, choice_param="tool_choice")

EOS = "<eos>"
NO_THOUGHT = Thought()
PAIRS = ['":', '",', '{"', '"}', '"]', "\n\n", ">\n", "</", 'a"', "é", "\n}"]


def byte_tokenizer(markers: Iterable[str]) -> Tokenizer:
    """A token for each byte, some longer ones, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    for pair in PAIRS:
        ((text, _),) = as_bytes.pre_tokenize_str(pair)
        vocab[text] = len(vocab)
        merges.append((text[0], text[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return tokenizer


@dataclass
class Bench:
    """A dialect, a tokenizer, and what makes constraints for them."""

    dialect: str
    markers: Sequence[str] = ()
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer(self.markers)
        self.eos = self.tokenizer.token_to_id(EOS)
        self.vocab = self.tokenizer.get_vocab_size() + 3  # a model's may be larger
        self.markup = Markup(
            DIALECTS[self.dialect], {m: self.tokenizer.token_to_id(m) for m in self.markers}
        )
        self.vocabulary = Vocabulary(self.tokenizer)
        self.compiler = ConstraintCompiler(self.vocabulary, frozenset({self.eos}))

    def make(
        self, demand: Demand, tools: Sequence[Tool] = (), thought: Thought = NO_THOUGHT
    ) -> Constraint | None:
        found = self.compiler.constraint(self.markup, demand, tools, thought, self.vocab)
        return None if found is None else found()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def token(self, text: str) -> int:
        (token,) = self.encode(text)
        return token

    def refused_at(self, constraint: Constraint, tokens: Iterable[int]) -> int | None:
        """Which of ``tokens`` may not come; None: all may."""
        for i, token in enumerate(tokens):
            if not may_come(constraint, token):
                return i
            constraint.accept(token)
        return None

    def accepts(self, constraint: Constraint, text: str, *, ends: bool = True) -> bool:
        tokens = self.encode(text) + [self.eos] * ends
        return self.refused_at(constraint, tokens) is None

    def draw(self, constraint: Constraint | None, seed: int, most: int = 600) -> list[int]:
        """Tokens of an answer through the real sampler from random logits that like to end things.

        Ends with eos unless ``most`` came first.
        """
        sampler = Sampler(self.vocab)
        state = SamplingState(Sampling(temperature=1.0, seed=seed), (), constraint)
        noise = torch.Generator().manual_seed(seed)
        liked = torch.zeros(self.vocab)
        for text in ('"', "}", "]", '"}', "\n", *"0123456789abe:,/-", *self.markers):
            liked[self.encode(text)] = 2.5
        liked[self.eos] = 6.0
        tokens: list[int] = []
        while len(tokens) < most:
            logits = torch.randn(self.vocab, generator=noise) + liked
            (draw,) = sampler.sample(logits.view(1, -1), [state], [len(tokens)])
            assert isinstance(draw, Draw), draw
            tokens.append(draw.token)
            if draw.token == self.eos:
                break
        return tokens

    def text(self, tokens: Sequence[int], errors: str = "strict") -> str:
        data = b"".join(self.vocabulary.token_bytes(t) for t in tokens if t != self.eos)
        return data.decode(errors=errors)


def may_come(constraint: Constraint, token: int) -> bool:
    mask = constraint.mask()
    return mask is None or bool(int(mask[token // 32]) >> token % 32 & 1)


def tool(name: str, parameters: dict[str, Any], *, strict: bool = False) -> Tool:
    return Tool(name, parameters, {}, strict=strict)


def bench_for(name: str) -> Bench:
    """With the markers that are tokens in this family's tokenizers."""
    return Bench(name.partition(" ")[0], list(dict.fromkeys(written.TOKENS[name])))
