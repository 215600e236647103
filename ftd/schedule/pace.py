"""How many prompt tokens join a step, so that running streams keep their share of speed.

While prompts are computed, each stream is promised a quarter of the speed it has without them.
Every decode step earns credit, in seconds of prompt work; a chunk runs when its cost is covered.
Where a chunk costs in proportion to its tokens, small ones run in every step and streams flow
smoothly. Where it has a large fixed part (any chunk reads most experts), small ones would multiply
bytes: then large chunks run, with some decode steps between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftd.schedule.rates import Rates

_SHARE = 0.3  # aimed at, for a promised 0.25: measured rates lag behind
_FIXED_PART = 0.2  # of a chunk's cost, at most: how long it pays to make chunks larger
_PROBE_TOKENS = 32  # of the first chunk ever measured, if streams wait for it


@dataclass(frozen=True, slots=True)
class Pace:
    tokens: int  # of prompts, at most, in this step
    credit_s: float  # left for the next one


def pace(
    rates: Rates,
    credit_s: float,
    *,
    decode_rows: int,
    pending_tokens: int,
    least_tokens: int,
    most_tokens: int,
) -> Pace:
    """Prompt tokens for a step of ``decode_rows`` streams, with ``pending_tokens`` to compute.

    Args:
        credit_s: as the last step left it.
        least_tokens: the smallest chunk worth a step: a page.
        most_tokens: the largest one allowed.
    """
    if pending_tokens == 0:
        return Pace(0, 0.0)
    if decode_rows == 0:
        return Pace(min(pending_tokens, most_tokens), 0.0)
    decode_s = rates.decode_step_s(decode_rows)
    if decode_s is None:
        return Pace(0, 0.0)  # this step has streams only, and so measures them
    earned_s = decode_s * (1 / _SHARE - 1)
    most_tokens = min(most_tokens, pending_tokens)
    if not rates.chunk_tokens:
        return Pace(min(most_tokens, _PROBE_TOKENS), 0.0)
    tokens = max(_chunk_tokens(rates, earned_s, most_tokens), min(least_tokens, most_tokens))
    fixed_s, token_s = rates.line
    left_s = credit_s + earned_s - fixed_s - token_s * tokens
    if left_s < 0:
        return Pace(0, credit_s + earned_s)
    return Pace(tokens, min(left_s, earned_s))


def _chunk_tokens(rates: Rates, earned_s: float, most_tokens: int) -> int:
    """The smallest chunk that wastes little, or more if one decode step pays for more."""
    fixed_s, token_s = rates.line
    if rates.one_size and rates.chunk_tokens < most_tokens / 2:
        return most_tokens  # small ones only so far: find out what a large one costs
    if token_s == 0:
        return most_tokens
    token_part_s = max(earned_s - fixed_s, fixed_s * (1 / _FIXED_PART - 1))
    return int(min(token_part_s / token_s, most_tokens))
