"""``/v1/responses/compact``: a conversation as what the user said and a summary of the rest."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ftd.text.answer import Piece
from ftd.text.conversation import Demand, Thinking
from ftd.text.messages import content_text
from ftd.text.stops import StopSet

from .fields import Fields, read_sampling
from .front import Asked
from .generation import Job, Usage
from .ids import item_id, seal
from .responses import usage_object
from .responses_input import read_input
from .turn import turn_job

_TASK = (
    "The conversation above grows too long to be sent again. Write a summary that lets another "
    "assistant go on with the work: what the user wants, what was decided and done, what was found "
    "(names of files, commands, values), and what remains to be done. Write the summary only."
)
SUMMARY_TOKENS = 4096
CHARS_PER_TOKEN = 4  # roughly; a quarter of the context is left to the user's own messages

Item = dict[str, Any]


def read_compaction(fields: Fields, asked: Asked) -> Compaction:
    limits, text = asked.served.engine.limits, asked.served.text
    given = read_input(fields, asked)
    messages = [*given.conversation.messages, {"role": "user", "content": _TASK}]
    conversation = replace(
        given.conversation,
        messages=messages,
        tools=(),
        thinking=Thinking(on=False),
        demand=Demand(),
    )
    job = turn_job(
        asked,
        conversation,
        sampling=read_sampling(fields, text.defaults, limits.vocab, logprobs=None),
        stops=StopSet([]),
        max_tokens=SUMMARY_TOKENS,
    )
    kept_chars = min(limits.context_tokens, limits.pool_tokens) // 4 * CHARS_PER_TOKEN
    return Compaction(asked, job, _users_words(given.items, kept_chars))


def _users_words(items: list[Item], most_chars: int) -> list[Item]:
    """The user's messages, the newest that fit, as they were sent."""
    kept: list[Item] = []
    for item in reversed(items):
        if item.get("role") != "user":
            continue
        most_chars -= len(content_text(item.get("content"), "input"))
        if most_chars < 0:
            break
        kept.append(item)
    return kept[::-1]


class Compaction:
    """``dialect.Plain``: items to go on from."""

    stream = False

    def __init__(self, asked: Asked, job: Job, kept: list[Item]) -> None:
        self.job = job
        self._id = asked.request_id
        self._kept = kept

    def reply(self, answers: list[Piece], usage: Usage) -> Item:
        summary = {
            "type": "compaction",
            "id": item_id("cmp_", self._id, len(self._kept)),
            "encrypted_content": seal(answers[0].text),
        }
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept, summary],
            "usage": usage_object(usage),
        }
