"""Chat and completion requests as a client sends them, plain and streamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson


@dataclass
class Reply:
    status: int
    body: dict[str, Any] = field(default_factory=dict)  # plain, or of an error
    events: list[dict[str, Any]] = field(default_factory=list)  # of a stream
    done: bool = False  # the stream said [DONE]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    @property
    def text(self) -> str:
        if self.events:
            return "".join(
                c["delta"].get("content") or "" if "delta" in c else c["text"]
                for e in self.events
                for c in e["choices"]
            )
        choice = self.body["choices"][0]
        return (choice["message"]["content"] or "") if "message" in choice else choice["text"]

    @property
    def finish(self) -> str | None:
        if self.events:
            reasons = [c["finish_reason"] for e in self.events for c in e["choices"]]
            return next((r for r in reasons if r), None)
        return self.body["choices"][0]["finish_reason"]

    @property
    def usage(self) -> dict[str, Any] | None:
        if self.events:
            return next((e["usage"] for e in reversed(self.events) if e.get("usage")), None)
        return self.body.get("usage")

    @property
    def cached(self) -> int:
        assert self.usage is not None
        return self.usage["prompt_tokens_details"]["cached_tokens"]


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, **fields}


async def post(
    base: str, body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
) -> Reply:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            base + path, data=data, headers={"Content-Type": "application/json", **(headers or {})}
        ) as answer,
    ):
        reply = Reply(answer.status, headers=dict(answer.headers))
        if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            async for line in answer.content:
                if line.startswith(b"data: "):
                    if line.strip() == b"data: [DONE]":
                        reply.done = True
                    else:
                        reply.events.append(orjson.loads(line[6:]))
        else:
            reply.body = orjson.loads(await answer.read())
        return reply


async def ask(base: str, content: Any, **fields: Any) -> Reply:
    """A chat request that has to succeed."""
    reply = await post(base, chat(content, **fields))
    assert reply.status == 200, reply.body
    assert reply.done == bool(fields.get("stream"))
    return reply
