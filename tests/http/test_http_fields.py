"""Absurd values are refused by name, unknown fields are ignored, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.config import Config
from ftd.engine.api import Sampling
from ftd.errors import FtdError
from ftd.http.chat import read_chat
from ftd.http.completions import read_completion
from ftd.http.fields import Fields, parse_body, read_sampling
from ftd.http.front import Asked
from ftd.http.response_store import ResponseStore

ABSURD: list[tuple[str, Any]] = [
    ("temperature", 1e9),
    ("temperature", -1),
    ("temperature", "NaN"),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 2),
    ("top_k", -5),
    ("top_k", 0.01),
    ("top_k", 1e12),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e300),
    ("logprobs", 1),
    ("top_logprobs", 1e9),
    ("top_logprobs", 5),
    ("n", 5_000_000),
    ("n", 0),
    ("n", 1.5),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(10**9): 1}),
    ("logit_bias", {"4096": 1}),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"7": 1e30}),
    ("logit_bias", {"7": None}),
    ("logit_bias", [7]),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("seed", 2**70),
    ("seed", -(2**70)),
    ("seed", 0.5),
    ("stop", ["x"] * 10_000),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [7]),
    ("stop", {"a": 1}),
    ("stop", ["x" * 257]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [4096]),
    ("stop_token_ids", "7"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1e300),
    ("max_tokens", "many"),
    ("max_completion_tokens", 0),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", "usage"),
    ("stream_options.include_usage", {"stream_options": {"include_usage": "yes"}}),
    ("ignore_eos", "no"),
    ("model", 7),
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("tools", {}),
    ("tools[0]", {"tools": ["f"]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
    ("ignore_eos", {"ignore_eos": True, "response_format": {"type": "json_object"}}),
    ("response_format", "json"),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "extreme"),
    ("reasoning_effort", 7),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}),
]


@pytest.mark.parametrize(("field", "value"), ABSURD, ids=lambda v: str(v)[:30])
async def test_an_absurd_value_is_refused_by_name(front, field, value):
    fields = value if "." in field or "[" in field else {field: value}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, answer = await front.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["type"] == "invalid_request_error"
    assert field.partition(".")[0].partition("[")[0] in answer["error"]["message"]
    assert not front.engine.requests


async def test_neighbours_of_an_absurd_request_get_their_known_answer(front):
    front.script("known", "the known answer", delay_s=0.005)
    known = asyncio.create_task(front.chat("known"))
    for field, value in ABSURD[:20]:
        assert (await front.chat("hi", **{field: value}))[0] == 400
    _, body = await known
    assert body["choices"][0]["message"]["content"] == "the known answer"


BAD_BODIES = [
    b"",
    b"{",
    b"not json",
    b"[]",
    b'"text"',
    b"null",
    b"7",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}',
    b'{"temperature": 1e999, "messages": [{"role": "user", "content": "hi"}]}',
    b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
]


@pytest.mark.parametrize("data", BAD_BODIES, ids=lambda d: d[:20])
async def test_a_body_that_is_no_sane_object_is_refused(front, data):
    for path in ("/v1/chat/completions", "/v1/completions"):
        async with front.client.post(f"{front.url}{path}", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_compressed_body_is_refused(front):
    headers = {"Content-Encoding": "gzip"}
    url = f"{front.url}/v1/completions"
    async with front.client.post(url, data=b"not gzip", headers=headers) as response:
        assert response.status == 415
        assert "compressed" in (await response.json())["error"]["message"]


async def test_the_content_type_does_not_matter(front):
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    url = f"{front.url}/v1/chat/completions"
    async with front.client.post(url, data=data, headers=headers) as response:
        assert response.status == 200


UNKNOWN = {
    "user": "u",
    "store": False,
    "metadata": {"a": [1]},
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "verbosity": "low",
    "client_metadata": [None],
    "extra": {"deep": [{"x": 1.5}]},
    "": 7,
    "ünknown": "ß",
}


async def test_unknown_fields_are_ignored(front):
    front.script("known", "the known answer")
    status, body = await front.chat("known", **UNKNOWN)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "the known answer")


async def test_null_counts_as_absent(front):
    nulls = {field: None for field, _ in ABSURD if "." not in field and field != "messages"}
    assert (await front.chat("hi", **nulls))[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [name for name, _ in ABSURD if "." not in name and "[" not in name]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from([*NAMES, "prompt", "echo", "suffix"]), JSON, max_size=4),
    read=st.sampled_from([read_chat, read_completion]),
)
def test_any_values_are_read_or_refused(demo_text, fields, read):
    class Served:
        name = "m"
        text = demo_text

        class engine:
            from ftd.engine.api import EngineLimits

            limits = EngineLimits(2048, 4096, 4, 8, vocab=4096)

    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fields}
    try:
        data = orjson.dumps(body)
    except TypeError:
        return  # not JSON in the first place
    try:
        dialect = read(parse_body(data), Asked(Served, "req_1", Config(), ResponseStore()))
    except FtdError as error:
        assert error.status in (400, 404)
        return
    assert all(0 <= t < 4096 for prompt in dialect.job.prompts for t in prompt.ids)
    assert 0 <= dialect.job.sampling.temperature <= 100
    assert 1 <= dialect.job.copies <= 128


def sampling_of(**fields: Any) -> Sampling:
    defaults = Sampling(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.1)
    return read_sampling(Fields(fields), defaults, 4096, logprobs=None)


def test_defaults_of_the_checkpoint_hold_where_nothing_is_said():
    given_fields = {"temperature": 0.2, "top_k": 0, "top_p": 1, "repetition_penalty": 1}
    assert sampling_of() == Sampling(0.7, top_k=20, top_p=0.9, repetition_penalty=1.1)
    assert sampling_of(**given_fields) == Sampling(0.2)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"top_k": 100_000}, {"top_k": 4096}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"logit_bias": {"7": -100, "8": 1.5}}, {"logit_bias": ((7, -100.0), (8, 1.5))}),
        ({"min_p": 0.1, "presence_penalty": -2}, {"min_p": 0.1, "presence_penalty": -2.0}),
    ],
)
def test_documented_clamps(fields, change):
    assert sampling_of(**fields) == replace(sampling_of(), **change)


async def test_the_status_line_agrees_with_the_body(front):
    """An error is never a 200 with an error inside, nor a page of HTML."""
    for body in ({}, {"messages": 7}, {"messages": [{"role": "user"}], "n": -1, "stream": True}):
        async with front.client.post(f"{front.url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert response.content_type == "application/json"
            assert set((await response.json())["error"]) >= {"message", "type", "param", "code"}


async def test_thousands_of_prompts_leave_nothing_behind(front):
    async with aiohttp.ClientSession() as client:
        for i in range(200):
            body = {"messages": [{"role": "user", "content": f"prompt {i}"}], "max_tokens": 2}
            async with client.post(f"{front.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
    assert not front.engine.active
