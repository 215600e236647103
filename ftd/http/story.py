"""What is told of a request once it is over, in one line of the log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .dialect import Plain
from .generation import Generation, Usage


@dataclass(slots=True)
class Story:
    """What the one ``request.finished`` line tells."""

    request_id: str
    endpoint: str
    started_s: float = field(default_factory=time.monotonic)
    model: str | None = None
    dialect: Plain | None = None
    generation: Generation | None = None
    outcome: str = "cancelled"  # until something else is known: the client left
    status: int = 499
    answers: dict[int, list[str]] = field(default_factory=dict)  # only with --log-prompts

    @property
    def ttft_s(self) -> float | None:
        first_s = self.generation.first_token_s if self.generation else None
        return None if first_s is None else first_s - self.started_s

    @property
    def gaps_s(self) -> Sequence[float]:
        return self.generation.gaps_s if self.generation else ()

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "outcome": self.outcome,
            "duration_ms": _ms(time.monotonic() - self.started_s),
        }
        if self.generation is not None and self.dialect is not None:
            usage = self.generation.usage()
            gaps = sorted(self.gaps_s)
            facts |= {
                "stream": self.dialect.stream,
                "answers": self.dialect.job.answers,
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "reused_tokens": usage.cached_tokens,
                **usage.match(),
                "resumed_behind": _anchor(usage),
                "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s),
                "itl_p50_ms": _ms(gaps[len(gaps) // 2]) if gaps else None,
                "itl_p99_ms": _ms(gaps[len(gaps) * 99 // 100]) if gaps else None,
            }
        if self.answers and self.dialect is not None:
            facts["prompts"] = [p.text or list(p.ids) for p in self.dialect.job.prompts]
            facts["texts"] = ["".join(texts) for _, texts in sorted(self.answers.items())]
        return facts


def _anchor(usage: Usage) -> str | None:
    anchor = usage.resumed.anchor if usage.resumed else None
    return f"{anchor.kind} at {anchor.position}" if anchor else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
