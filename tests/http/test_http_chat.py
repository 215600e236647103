"""/v1/chat/completions: plain and streamed, over a scripted engine and a real socket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from ftd.config import Config
from ftd.engine.api import Finish
from ftd.errors import EngineFailed, NotReady

ANSWER = "Hi there, 世界 👩‍👩‍👧!\n\tÜber END OF FILE"


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def finishes(events: list[Any]) -> list[str]:
    choices = [choice for e in events if e != "[DONE]" for choice in e["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


async def test_a_plain_answer(front):
    front.script("greet", ANSWER, reused_tokens=5)
    status, body = await front.chat("greet", model="whatever")
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "test-model"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    out = len(front.text.encode(ANSWER)) + 1
    prompt = len(front.engine.requests[0].prompt_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": out,
        "total_tokens": prompt + out,
        "prompt_tokens_details": {"cached_tokens": 5, "recomputed_tokens": prompt - 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_the_prompt_is_the_rendered_template(front):
    await front.chat("greet")
    rendered = front.text.render([{"role": "user", "content": "greet"}])
    assert front.engine.requests[0].prompt_ids == front.text.encode(rendered)


@pytest.mark.parametrize("per_output", [1, 3])
async def test_stream_equals_plain(front, per_output):
    front.script("greet", ANSWER, per_output=per_output)
    events = await front.stream_chat("greet")
    _, plain = await front.chat("greet")
    assert text_of(events) == plain["choices"][0]["message"]["content"] == ANSWER
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finishes(events) == ["stop"]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["delta"] == {}
    assert len({e["id"] for e in events[:-1]}) == 1
    assert all(e["object"] == "chat.completion.chunk" for e in events[:-1])
    assert not any("\ufffd" in str(e) for e in events)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, False),
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        (None, False),
    ],
)
async def test_usage_comes_in_a_stream_only_if_asked_for(front, options, asked):
    front.script("greet", "hello")
    extra = {} if options == {} else {"stream_options": options}
    events = await front.stream_chat("greet", **extra)
    with_usage = [e for e in events[:-1] if e.get("usage")]
    _, plain = await front.chat("greet")
    if asked:
        assert with_usage == [events[-2]]
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == plain["usage"]
    else:
        assert not with_usage


async def test_every_copy_is_streamed_and_ended(front):
    front.script("greet", "hello you")
    events = await front.stream_chat("greet", n=3, seed=5)
    assert [text_of(events, i) for i in range(3)] == ["hello you"] * 3
    assert finishes(events) == ["stop"] * 3
    first, *others = front.engine.requests
    assert [r.copies_of for r in others] == [first.request_id] * 2
    assert [r.sampling.seed for r in front.engine.requests] == [5, 6, 7]
    _, plain = await front.chat("greet", n=3)
    assert [c["index"] for c in plain["choices"]] == [0, 1, 2]
    assert plain["usage"]["prompt_tokens"] == len(first.prompt_ids)


STOPS: list[tuple[Any, str]] = [
    (["END OF"], ANSWER[: ANSWER.index("END")]),
    (["END OFF"], ANSWER),
    (["END OF FILE", "END OF"], ANSWER[: ANSWER.index("END")]),
    ("Hi", ""),
    (["x" * 200], ANSWER),
    (["界 "], ANSWER[: ANSWER.index("界")]),
    ([], ANSWER),
    (None, ANSWER),
]


@pytest.mark.parametrize(("stop", "text"), STOPS)
async def test_stop_strings(front, stop, text):
    front.script("greet", ANSWER)
    events = await front.stream_chat("greet", stop=stop)
    _, plain = await front.chat("greet", stop=stop)
    assert text_of(events) == plain["choices"][0]["message"]["content"] == text
    assert finishes(events) == ["stop"]
    assert not front.engine.active


async def test_a_stop_string_ends_the_work(front):
    front.script("greet", "one two three " * 100)
    await front.chat("greet", stop=["three"], max_tokens=1000)
    assert front.engine.counts == {Finish.STOP: 1}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_ends_with_length(front, field):
    front.script("greet", "hello " * 50)
    _, body = await front.chat("greet", **{field: 4})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 4
    assert front.engine.requests[0].max_tokens == 4


async def test_an_answer_may_go_on_until_the_context_ends(front):
    for asked in (None, 100_000):
        await front.chat("greet", max_tokens=asked)
        request = front.engine.requests.pop()
        assert request.max_tokens + len(request.prompt_ids) == 2048


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(front):
    for stream in (False, True):
        status, body = await front.chat("word " * 3000, stream=stream)
        error = body["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("This model's maximum context length is 2047 tokens. ")
        assert "your messages resulted in 300" in error["message"]
        assert "--context" in error["hint"]
    assert not front.engine.requests


async def test_a_prompt_too_long_by_its_bytes_is_refused_before_it_is_tokenized(front, monkeypatch):
    await front.chat("hi")
    front.engine.requests.clear()
    monkeypatch.setattr(type(front.text), "encode", None)
    long = "a" * 1_000_000
    for status, body in (await front.chat(long), await front.complete(["hi", long])):
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = await front.message(long)
    assert status == 400 and "prompt is too long: 15627 tokens > 2047" in body["error"]["message"]
    assert not front.engine.requests


async def test_the_pool_limits_as_well_and_is_named(front):
    front.engine.limits = replace(front.engine.limits, pool_tokens=64)
    status, body = await front.chat("word " * 100)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "--kv-tokens" in body["error"]["hint"]


async def test_the_longest_prompt_that_fits_is_answered(front):
    ids = front.text.encode("word " * 3000)
    status, body = await front.complete(ids[:2047])
    assert (status, body["usage"]["completion_tokens"]) == (200, 1)
    status, _ = await front.complete(ids[:2048])
    assert status == 400


async def test_logprobs(front):
    front.script("greet", "hé👋")
    _, body = await front.chat("greet", logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hé👋"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["logprob"] == -0.5
    events = await front.stream_chat("greet", logprobs=True, top_logprobs=2)
    streamed = [
        entry
        for e in events[:-1]
        for choice in e["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    _, body = await front.chat("greet", logprobs=True)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_token_that_is_half_a_character_is_spelled_in_bytes(front):
    half = front.text.encode("👋")[0]
    front.script("greet", tokens=[half])
    _, body = await front.chat("greet", logprobs=True)
    assert body["choices"][0]["message"]["content"] == "\ufffd"
    assert body["choices"][0]["logprobs"]["content"][0]["token"].startswith("bytes:\\x")


async def test_life_signs_while_the_prompt_is_computed(start_front):
    front = await start_front(Config(heartbeat=0.05))
    front.script("slow", "done", first_delay_s=0.4)
    events = await front.stream_chat("slow")
    beats = [e for e in events[1:-2] if e["choices"][0]["delta"] == {}]
    assert len(beats) >= 3
    assert all(e["choices"][0]["finish_reason"] is None for e in beats)
    assert {e["id"] for e in beats} == {events[0]["id"]}
    assert text_of(events) == "done"


async def test_tokens_without_text_do_not_silence_the_life_signs(start_front):
    front = await start_front(Config(heartbeat=0.05))
    front.script("slow", tokens=[1] * 20, delay_s=0.02)
    events = await front.stream_chat("slow")
    assert len(events) > 5


async def test_headers_and_role_come_before_the_first_token(front):
    front.script("slow", "done", first_delay_s=30)
    body = {"messages": [{"role": "user", "content": "slow"}], "stream": True}
    async with front.client.post(f"{front.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"].startswith("chatcmpl-")
        assert b"assistant" in await response.content.readline()


async def test_an_error_after_the_headers_is_an_event_and_the_end(front):
    front.script("bad", "some text", error=EngineFailed("a step failed: boom"), error_at=2)
    events = await front.stream_chat("bad")
    assert events[-1]["error"]["code"] == "engine_failed"
    assert events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    status, body = await front.chat("bad")
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert not front.engine.active


async def test_an_operators_cancel_reaches_both_modes(front):
    front.script("long", "word " * 100, delay_s=0.02)
    plain = asyncio.create_task(front.chat("long"))
    stream = asyncio.create_task(front.stream_chat("long"))
    await front.until(lambda: len(front.engine.active) == 2)
    for request_id in list(front.engine.active):
        front.engine.cancel(request_id, "by test")
    status, body = await plain
    assert (status, body["error"]["code"]) == (499, "request_cancelled")
    assert (await stream)[-1]["error"]["code"] == "request_cancelled"


async def test_a_full_queue_says_when_to_come_back(front):
    front.engine.limits = replace(front.engine.limits, max_running=1, max_waiting=2)
    front.script("first", first_delay_s=60)
    first = asyncio.create_task(front.chat("first"))
    await front.until(lambda: front.engine.active)
    status, body = await front.chat("hi", n=3)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(front.engine.active) == 1, "the admitted copies were given back"
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "stream": True}
    async with front.client.post(f"{front.url}/v1/chat/completions", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
    first.cancel()


async def test_no_model_is_503_with_retry_after(front):
    front.lifecycle.served = None
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with front.client.post(f"{front.url}/v1/chat/completions", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "3")
        assert (await response.json())["error"]["code"] == "model_not_ready"


async def test_a_model_switched_while_reading_is_asked_anew(front):
    """The request was rendered for the old model, whose engine drains: the new one answers."""
    old = front.lifecycle.served
    old.engine.refusal = NotReady("the model is being drained", retry_after_s=5)
    new = replace(old, name="new-model", engine=replace(old.engine, refusal=None))
    calls = iter([old])
    front.lifecycle.current = lambda: next(calls, new)
    status, body = await front.chat("hi")
    assert (status, body["model"]) == (200, "new-model")


async def test_parts_are_joined_in_order(front):
    parts = [{"type": "text", "text": t} for t in ("one", "", "two")]
    messages = [{"role": r, "content": parts} for r in ("system", "user", "assistant", "tool")]
    status, _ = await front.post("/v1/chat/completions", {"messages": messages})
    prompt = front.text.decode(front.engine.requests[0].prompt_ids)
    assert (status, prompt.count("one\ntwo")) == (200, 4)


async def test_an_image_is_refused_and_the_next_request_served(front):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    status, body = await front.chat([{"type": "text", "text": "look"}, image])
    assert status == 400
    assert body["error"]["param"] == "messages[0].content[1]"
    assert "reads text only" in body["error"]["message"]
    assert (await front.chat("hi"))[0] == 200


def roles(*names: str) -> list[dict[str, str]]:
    return [{"role": name, "content": name} for name in names]


@pytest.mark.parametrize(
    "messages",
    [
        roles("system", "user", "assistant", "system", "user"),
        roles("system", "system", "user"),
        roles("system"),
        roles("developer", "user"),
        roles("user", "user"),
        roles("user", "assistant"),
        [
            {"role": "user", "content": "a"},
            {"role": "assistant"},
            {"role": "user", "content": None},
        ],
    ],
    ids=lambda m: "-".join(x["role"] for x in m),
)
async def test_every_order_of_roles_is_answered(front, messages):
    status, _ = await front.post("/v1/chat/completions", {"messages": messages})
    assert status == 200


async def test_an_assistants_last_message_gets_a_fresh_turn(front):
    await front.post("/v1/chat/completions", {"messages": roles("user", "assistant")})
    prompt = front.engine.requests[0].prompt_ids
    assert front.text.decode(prompt).endswith("assistant\n")


TOOL = {"type": "function", "function": {"name": "list_files", "parameters": {}}}


async def test_tools_are_told_to_the_model_unless_forbidden(front):
    for choice, told in ((None, True), ("auto", True), ("none", False)):
        status, _ = await front.chat("hi", tools=[TOOL, {"type": "web_search"}], tool_choice=choice)
        prompt = front.text.decode(front.engine.requests.pop().prompt_ids)
        assert (status, "list_files" in prompt, "web_search" in prompt) == (200, told, False)
    for tools in ({}, {"tools": []}, {"tools": None}):
        assert (await front.chat("hi", tool_choice="none", **tools))[0] == 200


OFF: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
]


@pytest.mark.parametrize("fields", OFF)
@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_thinking_is_off_however_it_is_said(front, fields, tools):
    await front.chat("hi", tools=tools, **fields)
    off = front.text.decode(front.engine.requests.pop().prompt_ids)
    await front.chat("hi", tools=tools, reasoning_effort="high")
    on = front.text.decode(front.engine.requests.pop().prompt_ids)
    assert off == on + "<think>\n\n</think>\n\n"


async def test_one_line_is_logged_and_holds_no_text(front):
    front.script("greet", "secret answer", reused_tokens=3)
    with capture_logs() as lines:
        await front.chat("greet secret question")
        await front.stream_chat("greet secret question")
        await front.chat("greet secret question", temperature=-1)
    finished = [line for line in lines if line["event"] == "request.finished"]
    assert [line["status"] for line in finished] == [200, 200, 400]
    assert [line["outcome"] for line in finished] == ["stop", "stop", "invalid_value"]
    line = finished[0]
    assert line["endpoint"] == "chat"
    assert line["reused_tokens"] == 3
    assert line["output_tokens"] == len(front.text.encode("secret answer")) + 1
    assert {"ttft_ms", "itl_p50_ms", "itl_p99_ms", "duration_ms", "request_id"} <= line.keys()
    assert "secret" not in str(lines)


async def test_text_is_logged_when_asked_for(start_front):
    front = await start_front(Config(log_prompts=True))
    front.script("greet", "secret answer")
    with capture_logs() as lines:
        await front.chat("greet")
    line = next(line for line in lines if line["event"] == "request.finished")
    assert "greet" in line["prompts"][0]
    assert line["texts"] == ["secret answer"]


async def test_more_answers_than_may_ever_wait_are_refused_for_good(front):
    """A 429 would be tried again for ever."""
    status, body = await front.chat("hi", n=13)
    assert (status, body["error"]["param"]) == (400, "n")
    assert "12" in body["error"]["message"]
    assert (await front.chat("hi", n=12))[0] == 200
