"""Histories as each client sends them back: the prompt begins with what was generated before."""

from __future__ import annotations

import json
from typing import Any

import pytest

PAGE_TOKENS = 16
THOUGHT = "<think>\nThe file  has to be\n written.\n</think>\n\n"
# blanks, numbers, escapes, an order of keys and line ends that no client sends back as they are
WRITE = '{"path":  "a\\/\\u00e9.txt",\n "size": 1.0, "content": "x = 1  \\ny\\t\\n"}'
READ = '{"path": "b"  }'
PATCH = '{"input":"*** Begin\\u0020Patch\\n+ x \\n"}'
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("write", "read")
]
MESSAGES_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in ("write", "read")]
RESPONSES_TOOLS = [
    *({"type": "function", "name": name, "parameters": PARAMETERS} for name in ("write", "read")),
    {"type": "custom", "name": "patch"},
]


def called(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}",  "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


ANSWER = f"{THOUGHT}I write  it. \n{called(('write', WRITE), ('read', READ))}"
LAST = "All \u00e9 done.\n"


def javascript(arguments: str) -> str:
    """Parsed and written again: blanks gone, escapes undone, 1.0 as 1."""
    value = json.loads(arguments)
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in value.items()}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False)


def claude(value: dict[str, Any]) -> dict[str, Any]:
    """Another order of keys, and no blanks at the ends of lines."""
    value = json.loads(javascript(json.dumps(value)))
    for key, text in value.items():
        if isinstance(text, str):
            value[key] = "\n".join(line.rstrip() for line in text.split("\n"))
    return dict(reversed(value.items()))


class Conversation:
    """Posts turns of a conversation and looks at the prompts the engine gets."""

    def __init__(self, front: Any) -> None:
        self.front = front
        self.known: list[int] = []

    async def post(self, path: str, body: dict[str, Any], answer: str) -> Any:
        front = self.front
        front.scripts.clear()
        front.script("", answer)
        status, reply = await front.post(path, body)
        assert status == 200, reply
        ids = list(front.engine.requests[-1].prompt_ids)
        assert ids[: len(self.known)] == self.known, front.text.text_of([ids])
        common = len(self.known) // PAGE_TOKENS * PAGE_TOKENS
        assert common > 0.9 * len(self.known) or not self.known
        self.known = [*ids, *front.text.encode(answer)]
        return reply


CHAT_CLIENTS = {
    "as it was": lambda message: message,
    "opencode": lambda message: {
        "role": "assistant",
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [rewritten(call) for call in message.get("tool_calls", [])] or None,
    },
    "openclaw": lambda message: {
        **message,
        "tool_calls": [
            {**rewritten(call), "id": call["id"].replace("_", "")}
            for call in message.get("tool_calls", [])
        ],
    },
    "mini": lambda message: {
        **{key: value for key, value in message.items() if value is not None},
        "provider_specific_fields": {"refusal": None},
    },
    "reasoning under another name": lambda message: {
        **{key: value for key, value in message.items() if key != "reasoning_content"},
        "reasoning": message.get("reasoning_content"),
    },
}


def rewritten(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": javascript(function["arguments"])}}


@pytest.mark.parametrize("client", CHAT_CLIENTS)
async def test_chat(front, client):
    conversation = Conversation(front)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": f"Go, {client}."},
    ]
    for answer in (ANSWER, called(("read", READ)), LAST, LAST):
        body = {"messages": messages, "tools": CHAT_TOOLS}
        reply = await conversation.post("/v1/chat/completions", body, answer)
        message = CHAT_CLIENTS[client](reply["choices"][0]["message"])
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        if answer == LAST:
            messages.append({"role": "user", "content": "Go on."})


@pytest.mark.parametrize("client", ["as it was", "opencode", "claude"])
async def test_messages(front, client):
    rewrite = {
        "as it was": lambda value: value,
        "opencode": lambda value: json.loads(javascript(json.dumps(value))),
        "claude": claude,
    }[client]
    conversation = Conversation(front)
    billing = "x-anthropic-billing-header: cc_version=1.2.3."
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Go, {client}."}]
    for i, answer in enumerate((ANSWER, called(("read", READ)), LAST, LAST)):
        system = [
            {"type": "text", "text": f"{billing}{i}"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        ]
        body = {
            "max_tokens": 500,
            "system": system,
            "messages": messages,
            "tools": MESSAGES_TOOLS,
            "thinking": {"type": "adaptive"},
        }
        reply = await conversation.post("/v1/messages?beta=true", body, answer)
        blocks = [
            {**block, "input": rewrite(block["input"])} if "input" in block else block
            for block in reply["content"]
        ]
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "On."}]})
        messages.append({"role": "system", "content": "The date is unknown."})


@pytest.mark.parametrize("client", ["codex", "pi", "stored"])
async def test_responses(front, client):
    conversation = Conversation(front)
    items: list[dict[str, Any]] = [{"role": "user", "content": f"Go, {client}."}]
    previous = None
    answers = (ANSWER, f"{THOUGHT}{called(('patch', PATCH))}", LAST, LAST)
    for i, answer in enumerate(answers):
        body = {"input": items, "tools": RESPONSES_TOOLS, "store": client == "stored"}
        body |= {"instructions": "You help.", "include": ["reasoning.encrypted_content"]}
        body |= {"previous_response_id": previous} if previous else {}
        body |= {"client_metadata": {"turn": i}, "prompt_cache_key": "session 1"}
        reply = await conversation.post("/v1/responses", body, answer)
        output = reply["output"]
        fresh = [
            {
                "type": f"{item['type']}_output",
                "call_id": item["call_id"],
                "output": "done",
            }
            for item in output
            if item["type"].endswith("_call")
        ] or [{"role": "user", "content": "Go on."}]
        if client == "stored":
            previous, items = reply["id"], fresh
            continue
        if client == "codex":
            output = [{**item, "summary": []} if "summary" in item else item for item in output]
        else:
            output = [
                {**item, "arguments": javascript(item["arguments"])}
                if "arguments" in item
                else item
                for item in output
            ]
        items = [*items, *output, *fresh]


async def test_one_call_is_remembered_with_the_end_of_its_block(front):
    conversation = Conversation(front)
    question = {"role": "user", "content": "Go, one by one."}
    body = {"messages": [question], "tools": CHAT_TOOLS, "parallel_tool_calls": False}
    reply = await conversation.post("/v1/chat/completions", body, called(("write", WRITE)))
    message = CHAT_CLIENTS["opencode"](reply["choices"][0]["message"])
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    body["messages"] = [question, message, result]
    await conversation.post("/v1/chat/completions", body, LAST)


async def test_what_the_client_changed_is_what_the_model_reads(front):
    conversation = Conversation(front)
    question = {"role": "user", "content": "Go, and edit."}
    body = {"messages": [question], "tools": CHAT_TOOLS}
    reply = await conversation.post("/v1/chat/completions", body, ANSWER)
    message = reply["choices"][0]["message"]
    changes = [
        {"content": "I wrote something else."},
        {"reasoning_content": "Nothing has to be done."},
        {"tool_calls": message["tool_calls"][:1]},
    ]
    for change in changes:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            for call in ({**message, **change})["tool_calls"]
        ]
        messages = [question, {**message, **change}, *results]
        await front.post("/v1/chat/completions", {**body, "messages": messages})
        prompt = front.prompt()
        assert f",\n {WRITE[-10:]}" not in prompt and '"size": 1.0,' in prompt
        for field, value in change.items():
            assert value in prompt if isinstance(value, str) else prompt.count("done") == 1, field
            assert not isinstance(value, str) or message[field] not in prompt


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (f"{THOUGHT}I write it. {called(('write', WRITE))[:-30]}", {}),  # never closed
        (ANSWER, {"max_tokens": 30}),
        (ANSWER, {"stop": ["write  it"]}),
    ],
    ids=["malformed", "cut", "stopped"],
)
async def test_an_answer_that_did_not_end_well_is_rendered_by_the_template(front, answer, fields):
    front.scripts.clear()
    front.script("", answer)
    before = front.text.echoes.size_bytes
    question = {"role": "user", "content": "Go, and fail."}
    body = {"messages": [question], "tools": CHAT_TOOLS, **fields}
    status, reply = await front.post("/v1/chat/completions", body)
    assert status == 200
    assert front.text.echoes.size_bytes == before
    messages = [question, reply["choices"][0]["message"], {"role": "user", "content": "On."}]
    status, _ = await front.post("/v1/chat/completions", {**body, "messages": messages})
    assert status == 200


async def test_tokens_are_counted_as_they_are_generated_from(front):
    conversation = Conversation(front)
    body = {"max_tokens": 500, "messages": [{"role": "user", "content": "Go, and count."}]}
    body["tools"] = MESSAGES_TOOLS
    reply = await conversation.post("/v1/messages", body, ANSWER)
    body["messages"] = [
        *body["messages"],
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": "Go on."},
    ]
    _, counted = await front.post("/v1/messages/count_tokens", body)
    await conversation.post("/v1/messages", body, LAST)
    assert counted["input_tokens"] == len(front.engine.requests[-1].prompt_ids)


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({}, {}, ""),
        ({"X-Claude-Code-Session-Id": "s1"}, {}, "s1"),
        ({"X-Claude-Code-Session-Id": "s1", "x-claude-code-agent-id": "a2"}, {}, "s1/a2"),
        ({"session-id": "s3"}, {"prompt_cache_key": "k"}, "s3"),
        ({"x-session-id": "s4"}, {}, "s4"),
        ({}, {"prompt_cache_key": "k"}, "k"),
    ],
)
async def test_the_engine_is_told_whose_conversation_it_is(front, headers, fields, session):
    front.script("go", "Gone.")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}),
        ("/v1/responses", {"input": "go"}),
    ):
        status, _ = await front.post(path, {**body, **fields}, headers=headers)
        assert status == 200
        assert front.engine.requests[-1].session == session
