"""What a stream's client hears before its request is admitted, API by API.

While a model is being loaded nothing is known of the answer yet, and clients give up on a silence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ftd.errors import FtdError

from .errors import anthropic_error_object, error_object
from .fields import Fields
from .responses import echoed, failed
from .stream import event


class _Chunks:
    """OpenAI's chunks with nothing in them: clients do not count comments as signs of life."""

    def __init__(self, fields: Fields, request_id: str, kind: str, choice: dict[str, Any]) -> None:
        self.told = 0
        model = fields.text("model") or ""
        envelope = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        choice = {"index": 0, **choice, "logprobs": None, "finish_reason": None}
        self._chunk = event({**envelope, "choices": [choice]})

    def beat(self) -> Iterator[bytes]:
        self.told += 1
        yield self._chunk

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(error_object(error))


class ChatHold(_Chunks):
    def __init__(self, fields: Fields, request_id: str) -> None:
        super().__init__(fields, request_id, "chat.completion.chunk", {"delta": {}})


class CompletionHold(_Chunks):
    def __init__(self, fields: Fields, request_id: str) -> None:
        super().__init__(fields, request_id, "text_completion", {"text": ""})


class MessagesHold:
    def __init__(self, fields: Fields, request_id: str) -> None:
        self.told = 0

    def beat(self) -> Iterator[bytes]:
        self.told += 1
        yield event({"type": "ping"}, "ping")

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield event(anthropic_error_object(error), "error")


class ResponsesHold:
    """Its events are numbered; the response that follows goes on counting."""

    def __init__(self, fields: Fields, request_id: str) -> None:
        self.told = 0
        self._response = {"id": request_id, "created_at": int(time.time()), **echoed(fields)}

    def beat(self) -> Iterator[bytes]:
        if not self.told:
            yield self._event("response.created")
        yield self._event("response.in_progress")

    def failure(self, error: FtdError) -> Iterator[bytes]:
        yield self._event("response.failed", **failed(error))

    def _event(self, kind: str, **changes: Any) -> bytes:
        number, self.told = self.told, self.told + 1
        response = {**self._response, **changes}
        return event({"type": kind, "sequence_number": number, "response": response}, kind)
