"""Logprobs in the shapes of the two OpenAI APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ftd.engine.api import TokenLogprob
from ftd.text.textmodel import TextModel

_LEAST = -9999.0  # JSON has no -inf; the API's own value for "not at all"


def token_name(text: TextModel, token: int) -> str:
    """The token's text; one that is not whole characters is spelled in bytes, as OpenAI does."""
    data = text.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(text: TextModel, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        _chat_entry(text, entry.token, entry.logprob)
        | {"top_logprobs": [_chat_entry(text, token, value) for token, value in entry.top]}
        for entry in logprobs
    ]


def _chat_entry(text: TextModel, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(text, token),
        "logprob": max(logprob, _LEAST),
        "bytes": list(text.token_bytes(token)),
    }


def completion_logprobs(
    text: TextModel,
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """The four parallel lists; the first token of a prompt has no logprob."""
    return {
        "tokens": [token_name(text, token) for token in tokens],
        "token_logprobs": [e and max(e.logprob, _LEAST) for e in logprobs],
        "top_logprobs": [e and _alternatives(text, e) for e in logprobs],
        "text_offset": list(offsets),
    }


def _alternatives(text: TextModel, entry: TokenLogprob) -> dict[str, float]:
    """By token text, best first; the sampled token is among them even if others beat it."""
    named: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        named.setdefault(token_name(text, token), max(logprob, _LEAST))
    return named
