"""Requests that between them ask for all that can be asked of a token."""

from __future__ import annotations

from driving import request
from test_constrained_rows import AFTER, Cycle, prompt

from ftd.engine.api import Sampling

ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.7, "logprobs": 20},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": ((7, 6.0), (40, -100.0)), "logprobs": 3},
    {"temperature": 1.1, "repetition_penalty": 1.1, "logit_bias": ((3, 2.0),), "top_k": 100},
]


def asking(count: int, *, held: bool = True, tokens: int = 20):
    """``count`` of them, of unequal lengths; some of them ``held`` to a grammar."""
    return [
        request(
            f"r{i}",
            prompt(i, 10 + i),
            tokens + i % 3,
            sampling=Sampling(seed=i, **ASKED[i % len(ASKED)]),
            constraint=Cycle(AFTER, [i + 1]) if held and i % 4 == 2 else None,
        )
        for i in range(count)
    ]
