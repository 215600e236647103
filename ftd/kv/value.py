"""What it is worth to keep KV: seconds saved per byte, times the chance that it is asked for, aged.

Numbers only; the prefix tree and the disk store ask for a rank and evict the lowest first. Worth
halves each ``HALF_LIFE_S`` without use, for everything alike, so the order of two ranks never
changes while time passes: a rank is fixed when something is used, and a heap stays a heap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ftd.kv.anchors import AnchorKind

HALF_LIFE_S = 600.0  # an agent's tool call, or a person's thought, takes minutes rather than hours
# Attention over so many earlier tokens costs about what the rest of a token does.
EVEN_TOKENS = 16_384
SIDE_SHARE = 4  # a request below this part of its session's longest prompt is made beside it
_SIDE_CHANCE = 0.05
_UNMARKED = 0.1

# The chance that work resumes from there, before anything has.
_CHANCE = {
    AnchorKind.SYSTEM: 0.6,  # new sessions and sub-agents share it
    AnchorKind.FORK: 0.5,
    AnchorKind.USER: 0.4,  # a retry, or another message in its place
    AnchorKind.TURN: 0.25,
    AnchorKind.RESULT: 0.15,
    AnchorKind.ROLE: 0.15,
    AnchorKind.THOUGHT: 0.1,
    AnchorKind.CALL: 0.1,
    AnchorKind.CALL_END: 0.1,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of computing tokens again."""

    token_s: float  # each, with nothing before it

    def seconds(self, begin: int, end: int) -> float:
        """Of the tokens at positions ``begin`` to ``end``."""
        return self.token_s * (end - begin) * (1 + (begin + end) / (2 * EVEN_TOKENS))


def chance(kind: AnchorKind | None, *, turns: int = 0, side: bool = False) -> float:
    """How likely it is that a position is resumed from, when it is made.

    Args:
        kind: None: nothing is known of it.
        turns: answers in the conversation so far: what has gone on will go on.
        side: a small request beside its session's main conversation, such as one for a title.
    """
    if side:
        return _SIDE_CHANCE
    if kind is None:
        return _UNMARKED
    if kind is AnchorKind.TURN:
        return (turns + 0.5) / (turns + 2)
    return _CHANCE[kind]


def after_branches(first: float, branches: int) -> float:
    """The chance once so many others have gone on from there than the first.

    A conversation that goes on passes its own beginning each time; that tells nothing of others.
    """
    return 1 - (1 - first) * 0.5**branches


def is_side(prompt_tokens: int, longest_of_session: int) -> bool:
    return prompt_tokens * SIDE_SHARE < longest_of_session


def rank(seconds_per_byte: float, chance: float, used_s: float) -> float:
    """Order of eviction, lowest first: the logarithm of the worth, as of a common moment."""
    return log2(max(seconds_per_byte * chance, 1e-30)) + used_s / HALF_LIFE_S


def rank_of_pages(end: int, first: float, branches: int, used_s: float) -> float:
    """Of a run of pages, all alike in bytes and speed, by the token it ends with."""
    return rank(Cost(1.0).seconds(end - 1, end), after_branches(first, branches), used_s)
