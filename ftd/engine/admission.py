"""Which requests an engine takes: refusals before anything has begun."""

from __future__ import annotations

from ftd.errors import ContextExceeded, RequestInvalid

from .api import EngineLimits, EngineRequest, EngineStatus


def check_request(request: EngineRequest, limits: EngineLimits) -> None:
    """Refuse what can never run. Raises ContextExceeded or RequestInvalid."""
    tokens = len(request.prompt_ids)
    if tokens == 0:
        raise RequestInvalid("the prompt has 0 tokens, at least 1 is needed", param="prompt")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= limits.vocab:
        raise RequestInvalid(
            f"a prompt token id is {low if low < 0 else high}, "
            f"the model's ids are 0 to {limits.vocab - 1}",
            param="prompt",
        )
    # one token of room: a prompt that fills the context could not be answered
    most = min(limits.context_tokens, limits.pool_tokens)
    if tokens >= most:
        raise ContextExceeded(tokens, most - 1, raised_by=limits.raised_by)
    assert request.max_tokens >= 1, request.max_tokens


def retry_after_s(status: EngineStatus) -> float:
    """When a place in a full queue may be free: the oldest request's age is a fair guess."""
    oldest = max((r.age_s for r in status.requests), default=1.0)
    return float(min(30, max(1, round(oldest / max(1, status.running)))))
