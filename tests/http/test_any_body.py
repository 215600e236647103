"""Whatever stands in a body, it is read or refused by name; nothing else happens."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.errors import FtdError
from ftd.http.chat import read_chat
from ftd.http.compaction import read_compaction
from ftd.http.fields import parse_body
from ftd.http.messages import count_messages, read_messages
from ftd.http.responses import count_responses, read_responses

WORDS = [
    *["text", "user", "assistant", "system", "tool", "developer", "function", "custom", "auto"],
    *["tool_use", "tool_result", "thinking", "image", "document", "tool_reference", "content"],
    *["message", "reasoning", "function_call", "function_call_output", "namespace", "none", "any"],
    *["item_reference", "additional_tools", "tool_search_output", "shell_call", "high", "enabled"],
    *["tool_addition", "tool_definition", "input_text", "compaction", "json_schema", "hologram"],
    *["ftd1.eJw=", "x", ""],
]
KEYS = [
    *["type", "role", "content", "text", "name", "id", "call_id", "arguments", "input", "output"],
    *[
        "tools",
        "tool",
        "tool_calls",
        "function",
        "parameters",
        "input_schema",
        "thinking",
        "effort",
    ],
    *["source", "data", "summary", "encrypted_content", "tool_name", "tool_use_id", "definition"],
    *["action", "defer_loading", "format", "schema", "output_config", "description", "namespace"],
]
FIELDS = [
    *["messages", "input", "system", "tools", "tool_choice", "thinking", "output_config", "text"],
    *["reasoning", "reasoning_effort", "instructions", "include", "metadata", "response_format"],
    *["chat_template_kwargs", "previous_response_id", "stop_sequences", "store", "stream", "model"],
    *["max_tokens", "max_output_tokens", "parallel_tool_calls", "background", "prompt_cache_key"],
]
LEAF = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
JSON = st.recursive(
    LEAF | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=25,
)
# bodies that come further than the first check
PART = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4).flatmap(
    lambda part: st.sampled_from(WORDS).map(lambda kind: {**part, "type": kind})
)
PART_OF_ODD_TYPE = st.builds(lambda part, kind: {**part, "type": kind}, PART, JSON)
MESSAGE = st.builds(
    lambda rest, role, content: {**rest, "role": role, "content": content},
    PART,
    st.sampled_from(["user", "assistant", "system", "tool"]),
    st.lists(PART, max_size=3) | st.sampled_from(WORDS),
)


@pytest.mark.parametrize(
    "read",
    [
        *[read_chat, read_messages, read_responses],
        *[count_messages, count_responses, read_compaction],
    ],
)
def test_any_body_is_read_or_refused(front, read):
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
        messages=st.lists(MESSAGE, min_size=1, max_size=4),
        items=st.lists(PART | MESSAGE, min_size=1, max_size=4),
        odd=st.none() | PART_OF_ODD_TYPE,
    )
    def check(fields: dict[str, Any], messages: list[Any], items: list[Any], odd: Any) -> None:
        if odd is not None:
            message = {"type": "message", "role": "user", "content": [odd]}
            messages, items = [*messages, message], [*items, message]
            fields = {"system": [odd], **fields}
        body = {"messages": messages, "input": items, **fields}
        try:
            data = orjson.dumps(body)
        except TypeError:
            return  # a number no JSON of ours has
        try:
            read(parse_body(data), front.asked)
        except FtdError as error:
            assert error.status in (400, 404), error
            assert error.message

    check()
