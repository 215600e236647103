"""/v1/completions: text and token ids, one or many, with echo and logprobs."""

from __future__ import annotations

from typing import Any

import pytest


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
    return "".join(choice["text"] for choice in choices)


async def test_text_goes_on(front):
    front.script("one", " two three")
    status, body = await front.complete("one")
    assert (status, body["object"]) == (200, "text_completion")
    assert body["choices"] == [
        {"index": 0, "text": " two three", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == len(front.text.encode("one"))
    assert body["id"].startswith("cmpl-")


async def test_token_ids_are_used_as_given(front):
    ids = [5, 2, 0, 4095, 1]
    assert (await front.complete(ids))[0] == 200
    assert (await front.complete([ids, [7]]))[0] == 200
    assert [list(r.prompt_ids) for r in front.engine.requests] == [ids, ids, [7]]


async def test_several_prompts_and_copies_are_numbered_in_order(front):
    front.script("one", "1")
    front.script("two", "2")
    _, body = await front.complete(["one", "two"], n=2)
    assert [c["text"] for c in body["choices"]] == ["1", "1", "2", "2"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    events = await front.stream("/v1/completions", {"prompt": ["one", "two"], "n": 2})
    assert [text_of(events, i) for i in range(4)] == ["1", "1", "2", "2"]
    one, copy, two, _ = front.engine.requests[:4]
    assert copy.copies_of == one.request_id
    assert two.copies_of is None


async def test_stream_equals_plain_and_ends(front):
    front.script("one", "zwei 世界 👋")
    events = await front.stream(
        "/v1/completions",
        {"prompt": "one", "echo": True, "stream_options": {"include_usage": True}},
    )
    _, plain = await front.complete("one", echo=True)
    assert text_of(events) == plain["choices"][0]["text"] == "onezwei 世界 👋"
    assert events[-2]["usage"] == plain["usage"]
    assert [c["finish_reason"] for e in events[:-1] for c in e["choices"]][-1] == "stop"
    assert events[-1] == "[DONE]"


async def test_the_default_length_is_sixteen(front):
    await front.complete("one")
    assert front.engine.requests[0].max_tokens == 16


async def test_echo_of_token_ids_is_their_text(front):
    front.script("hello", "!")
    _, body = await front.complete(front.text.encode("hello"), echo=True)
    assert body["choices"][0]["text"] == "hello!"


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_with_echo_cover_prompt_and_answer(front, streamed):
    front.script("hello you", " and me")
    fields = {"echo": True, "logprobs": 2, "max_tokens": 40}
    if streamed:
        events = await front.stream("/v1/completions", {"prompt": "hello you", **fields})
        parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
        logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        text = text_of(events)
    else:
        _, body = await front.complete("hello you", **fields)
        logprobs, text = body["choices"][0]["logprobs"], body["choices"][0]["text"]
    assert text == "hello you and me"
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert text[offset:].startswith(token)
    assert len({len(column) for column in logprobs.values()}) == 1
    sampled = logprobs["top_logprobs"][-1]
    assert len(sampled) == 2
    assert front.engine.requests[-1].prompt_logprobs == 2


async def test_scoring_a_prompt_without_an_answer(front):
    status, body = await front.complete("hello you", echo=True, logprobs=1, max_tokens=0)
    (choice,) = body["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "hello you", "length")
    assert len(choice["logprobs"]["tokens"]) == len(front.text.encode("hello you"))
    assert body["usage"]["completion_tokens"] == 0


async def test_stop_ids_and_ignore_eos(front):
    word = front.text.encode("stop")[-1]
    front.script("one", tokens=[*front.text.encode("go on "), word, 5])
    _, body = await front.complete("one", stop_token_ids=[word], max_tokens=50)
    assert body["choices"][0]["text"] == "go on "
    assert body["choices"][0]["finish_reason"] == "stop"
    front.script("two", tokens=[front.engine.eos, *front.text.encode("more")])
    _, body = await front.complete("two", ignore_eos=True, max_tokens=50)
    assert body["choices"][0]["text"] == "more"
    assert front.engine.requests[-1].eos_ids == frozenset()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": ["a", [7]]}, None),
        ({"prompt": [7, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_is_refused_names_the_field(front, fields, param):
    status, body = await front.post("/v1/completions", {"prompt": "a", **fields})
    if param is None:
        assert status == 200  # texts and id lists may stand side by side
    else:
        assert (status, body["error"]["param"]) == (400, param)
