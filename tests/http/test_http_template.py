"""Checkpoints whose template is missing, refuses, or never ends: the server goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from ftd.text import template
from ftd.text.textmodel import TextModel

DEMO = Path(__file__).parents[2] / "ftd" / "demo"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
ENDLESS = (
    "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture
def with_template(tmp_path, start_front):
    async def start(source: str | None):
        for name in ("tokenizer.json", "config.json", "generation_config.json"):
            shutil.copyfile(DEMO / name, tmp_path / name)
        config = {} if source is None else {"chat_template": source}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return await start_front(text=TextModel(tmp_path))

    return start


async def test_without_a_template_chat_is_400_and_completions_work(with_template):
    front = await with_template(None)
    status, body = await front.chat("hi")
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "/v1/completions" in body["error"]["hint"]
    assert (await front.complete("hi"))[0] == 200


async def test_two_users_in_a_row_are_joined_where_roles_must_alternate(with_template):
    front = await with_template(ALTERNATE)
    users = [{"role": "user", "content": text} for text in ("one", "two")]
    status, _ = await front.post("/v1/chat/completions", {"messages": users})
    assert status == 200
    assert front.text.decode(front.engine.requests[0].prompt_ids) == "one\n\ntwo"


async def test_what_no_form_can_mend_is_400_with_the_templates_reason(with_template):
    front = await with_template(ALTERNATE)
    messages = [{"role": "user", "content": "one"}, {"role": "tool", "content": "r"}] * 2
    messages.insert(0, {"role": "tool", "content": "r"})
    for stream in (False, True):
        status, body = await front.post(
            "/v1/chat/completions", {"messages": messages, "stream": stream}
        )
        assert (status, body["error"]["code"]) == (400, "chat_template_refused")
        assert "messages[0]: Conversation roles must alternate" in body["error"]["message"]


async def test_a_runaway_template_is_cut_and_others_go_on(with_template, monkeypatch):
    monkeypatch.setattr(template, "CPU_LIMIT_S", 0.3)
    front = await with_template(ENDLESS)
    runaways = [asyncio.create_task(front.chat("loop")) for _ in range(2)]
    assert (await front.chat("hi"))[0] == 200
    for status, body in await asyncio.gather(*runaways):
        assert (status, body["error"]["code"]) == (400, "chat_template_runaway")
    assert (await front.chat("hi"))[0] == 200
