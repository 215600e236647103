"""Answers as text: stop strings, usage, message shapes, in both modes on a model that is exact."""

from __future__ import annotations

import asyncio

import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, running_ftd

PLAIN = [
    key
    for key, a in ANSWERS.items()
    if not a["thinking"] and not a["calls"] and len(a["token_ids"]) < 400
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("key", PLAIN)
async def test_every_script_comes_exactly(ftd, key, stream):
    if ANSWERS[key]["answer"] != ANSWERS[key]["text"]:
        pytest.skip("markers of its own")
    reply = await ask(ftd.base, key, stream=stream)
    assert reply.text == ANSWERS[key]["text"]
    assert reply.finish == "stop"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["END OF"], "alpha "),
        (["END OFF"], "alpha END OF FILE omega"),
        (["END OF FILE om", "END"], "alpha "),
        (["alpha"], ""),
        (["a", "alpha"], ""),
        (["omega and far more than the whole answer"], "alpha END OF FILE omega"),
        (" omega", "alpha END OF FILE"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_stop_strings_end_the_text_before_them(ftd, stop, text, stream):
    reply = await ask(ftd.base, "S12", stop=stop, stream=stream)
    assert reply.text == text
    assert reply.finish == "stop"


async def test_an_empty_stop_string_is_refused(ftd):
    reply = await post(ftd.base, chat("S12", stop=[""]))
    assert reply.status == 400 and "stop" in reply.error["param"]


@pytest.mark.parametrize("cut", [1, 3, 7])
async def test_max_tokens_cuts_at_the_same_place_in_both_modes(ftd, cut):
    plain = await ask(ftd.base, "S20", max_tokens=cut)
    stream = await ask(ftd.base, "S20", max_tokens=cut, stream=True)
    assert plain.text == stream.text
    assert ANSWERS["S20"]["text"].startswith(plain.text.rstrip("\ufffd"))
    assert plain.finish == stream.finish == "length"


async def test_the_usage_chunk_comes_only_as_asked(ftd):
    plain = await ask(ftd.base, "S10")
    for options in (None, {"include_usage": False}, {}):
        reply = await ask(ftd.base, "S10", stream=True, stream_options=options)
        assert reply.usage is None
    reply = await ask(ftd.base, "S10", stream=True, stream_options={"include_usage": True})
    assert reply.events[-1]["choices"] == []
    assert all(not event.get("usage") for event in reply.events[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reply.events[-1]["usage"][name] == plain.usage[name]
    assert plain.usage["completion_tokens"] == len(ANSWERS["S10"]["token_ids"])


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SHAPES = {
    "parts": [{"role": "user", "content": parts("please", "give me S13", "now")}],
    "system parts": [
        {"role": "system", "content": parts("You", "answer", "scripts")},
        {"role": "user", "content": "S13"},
    ],
    "developer": [{"role": "developer", "content": "be exact"}, {"role": "user", "content": "S13"}],
    "two systems": [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "S13"},
    ],
    "system in the middle": [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "S10"},
        {"role": "assistant", "content": "Hello from script ten."},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "S13"},
    ],
    "two users": [{"role": "user", "content": "S10"}, {"role": "user", "content": "S13"}],
    "only a system": [{"role": "system", "content": "S13"}],
    "assistant last": [
        {"role": "user", "content": "S13"},
        {"role": "assistant", "content": "wait"},
    ],
    "null content": [
        {"role": "user", "content": "S10"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "S13"},
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_every_shape_of_messages_is_answered(ftd, shape, stream):
    reply = await ask(ftd.base, SHAPES[shape], stream=stream)
    assert reply.text == ANSWERS["S13"]["text"]


async def test_an_image_is_refused_by_message_and_part(ftd):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reply = await post(
        ftd.base,
        chat(
            [{"role": "user", "content": "S10"}, {"role": "user", "content": [*parts("x"), image]}]
        ),
    )
    assert reply.status == 400
    assert "messages[1]" in reply.error["message"] or "messages[1]" in reply.error["param"]
    assert "image" in reply.error["message"]


ABSURD = [
    {"temperature": -1},
    {"temperature": 1e9},
    {"temperature": "NaN"},
    {"top_p": -1},
    {"top_p": 2},
    {"top_k": -5},
    {"top_k": 0.01},
    {"top_logprobs": 10**9, "logprobs": True},
    {"n": 5_000_000},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1000000000": 1}},
    {"logit_bias": {"5": 1e30}},
    {"stop": ["x"] * 10_000},
    {"repetition_penalty": 0},
    {"stream": "yes"},
    {"messages": []},
    {"max_tokens": 0},
    {"max_tokens": -3},
]


async def test_absurd_values_are_refused_by_name_and_hurt_nobody(ftd):
    neighbour = asyncio.create_task(ask(ftd.base, "S14", stream=True))
    for fields in ABSURD:
        reply = await post(ftd.base, {**chat("S10"), **fields})
        assert reply.status == 400, (fields, reply.body)
        assert reply.error["type"] == "invalid_request_error"
        field = next(iter(fields))
        assert field in str(reply.error["param"]) + reply.error["message"], (fields, reply.error)
    assert (await neighbour).text == ANSWERS["S14"]["text"]
    assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-9},
        {"temperature": 0.0, "seed": 2**62},
        {"temperature": 1, "top_k": 1},
        {"temperature": 100, "top_k": 1, "seed": 3},
        {"temperature": 2, "top_p": 1e-6},
        {"temperature": 5, "min_p": 1.0},
    ],
    ids=str,
)
async def test_extremes_that_mean_something_are_served(ftd, fields):
    reply = await post(ftd.base, {**chat("S13"), **fields})
    assert reply.status == 200, reply.body
    assert reply.text == ANSWERS["S13"]["text"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
async def test_bodies_that_are_no_request_are_refused(ftd, body):
    reply = await post(ftd.base, body)
    assert reply.status == 400, reply.body
    assert reply.error["message"]


async def test_unknown_fields_of_any_type_are_ignored(ftd):
    extra = {
        "x_a": None,
        "x_b": [1, {"c": 2}],
        "x_d": {"e": []},
        "x_f": 1e99,
        "x_g": "",
        "betas": True,
    }
    assert (await ask(ftd.base, "S10", **extra)).text == ANSWERS["S10"]["text"]


async def test_routes_that_do_not_exist_say_so(ftd):
    for path in ("/v1/embeddings", "/v1/images/generations", "/nothing"):
        reply = await post(ftd.base, {"input": "x"}, path)
        assert reply.status == 404 and reply.error["message"]


async def test_the_answer_does_not_depend_on_neighbours(ftd):
    keys = ["S13", "S14", "S15", "S20", "S21", "S22", "S24", "S33"] * 2
    replies = await asyncio.gather(
        *(ask(ftd.base, key, stream=i % 2 == 0) for i, key in enumerate(keys))
    )
    for key, reply in zip(keys, replies, strict=True):
        assert reply.text == ANSWERS[key]["text"]


async def test_life_signs_come_while_a_long_prompt_is_computed():
    """Slow steps stand in for a slow machine; the first chunk comes at once, then empty ones."""
    with running_ftd(fault="slow:300ms") as slow:
        filler = "lorem ipsum dolor " * 200
        reply = await ask(slow.base, "S10 " + filler, stream=True)
    assert reply.text == ANSWERS["S10"]["text"]
    first = reply.events[0]["choices"][0]["delta"]
    assert first["role"] == "assistant"
    empty = [e for e in reply.events[1:] if e["choices"][0]["delta"] in ({}, {"content": ""})]
    assert len(empty) >= 2, "no sign of life before the first token"
