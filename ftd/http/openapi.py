"""``/openapi.json``: the routes for programs. What a field does stands in docs/api.md.

Requests are described as far as a wrong type is refused; answers as far as clients rely on them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web

from .fields import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS, MAX_TEMPERATURE
from .turn import MAX_NAME_CHARS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items} | ({} if most is None else {"maxItems": most})


def _one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _shape(required: str, **properties: Schema) -> Schema:
    """An object; further fields are allowed, as clients send many and answers may gain some."""
    return {"type": "object", "properties": properties, "required": required.split()}


_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
_PART = _shape("type text", type={"const": "text"}, text=_TEXT)
_CONTENT = _one_of(_TEXT, _list(_PART))
_SAMPLING = {
    "temperature": _number(0, MAX_TEMPERATURE),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "seed": _whole(-(2**63), 2**63 - 1),
}
_STOPS = _one_of(_STOP, _list(_STOP, MAX_STOPS))
_COUNT = _whole(0, 2**31 - 1)
_STREAM_OPTIONS = _shape("", include_usage=_FLAG)

_REQUESTS: dict[str, Schema] = {
    "ChatRequest": _shape(
        "messages",
        messages=_list(
            _shape(
                "role content",
                role={"enum": ["system", "developer", "user", "assistant"]},
                content=_CONTENT,
            )
        )
        | {"minItems": 1},
        model=_TEXT,
        max_completion_tokens=_whole(1, 2**31 - 1),
        max_tokens=_whole(1, 2**31 - 1),
        n=_whole(1, MAX_CHOICES),
        stop=_STOPS,
        stream=_FLAG,
        stream_options=_STREAM_OPTIONS,
        logprobs=_FLAG,
        top_logprobs=_whole(0, MAX_LOGPROBS),
        tools=_list(
            _shape("type function", type={"const": "function"}, function=_shape("name", name=_NAME))
        ),
        parallel_tool_calls=_FLAG,
        chat_template_kwargs=_OBJECT,
        **_SAMPLING,
    ),
    "CompletionRequest": _shape(
        "prompt",
        prompt=_one_of(_TEXT, _list(_TEXT), _list(_COUNT), _list(_list(_COUNT))),
        model=_TEXT,
        max_tokens=_COUNT,
        n=_whole(1, MAX_CHOICES),
        best_of=_whole(1, MAX_CHOICES),
        echo=_FLAG,
        logprobs=_whole(0, MAX_LOGPROBS),
        stop=_STOPS,
        stream=_FLAG,
        stream_options=_STREAM_OPTIONS,
        **_SAMPLING,
    ),
    "MessagesRequest": _shape(
        "messages",
        messages=_list(
            _shape("role content", role={"enum": ["user", "assistant", "system"]}, content=_CONTENT)
        )
        | {"minItems": 1},
        model=_TEXT,
        max_tokens=_COUNT,
        system=_CONTENT,
        stop_sequences=_list(_STOP, MAX_STOPS),
        stream=_FLAG,
        thinking=_shape("type", type={"enum": ["adaptive", "enabled", "disabled"]}),
        tools=_list(_shape("name input_schema", name=_NAME, input_schema=_OBJECT)),
        **_SAMPLING,
    ),
    "ResponsesRequest": _shape(
        "input",
        input=_one_of(
            _TEXT,
            _list(
                _shape(
                    "role content",
                    role={"enum": ["user", "assistant", "system", "developer"]},
                    content=_TEXT,
                )
            )
            | {"minItems": 1},
        ),
        model=_TEXT,
        instructions=_TEXT,
        max_output_tokens=_whole(1, 2**31 - 1),
        metadata=_OBJECT,
        parallel_tool_calls=_FLAG,
        previous_response_id=_TEXT,
        store=_FLAG,
        stream=_FLAG,
        tools=_list(_shape("type name", type={"const": "function"}, name=_NAME)),
        **_SAMPLING,
    ),
}
_USAGE = _shape(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
_ANSWERS: dict[str, Schema] = {
    "ChatAnswer": _shape(
        "id object created model choices usage",
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(_shape("index message finish_reason", index=_COUNT, message=_OBJECT)),
        usage=_USAGE,
    ),
    "CompletionAnswer": _shape(
        "id object created model choices usage",
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices=_list(_shape("index text finish_reason", index=_COUNT, text=_TEXT)),
        usage=_USAGE,
    ),
    "Message": _shape(
        "id type role model content stop_reason stop_sequence usage",
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list(_shape("type", type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason=_TEXT,
        usage=_shape("input_tokens output_tokens", input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageCount": _shape("input_tokens", input_tokens=_COUNT),
    "Response": _shape(
        "id object created_at status model output usage error incomplete_details",
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete", "failed", "cancelled"]},
        model=_TEXT,
        output=_list(_shape("id type", id=_TEXT, type=_TEXT)),
    ),
    "ResponseCount": _shape("object input_tokens", object=_TEXT, input_tokens=_COUNT),
    "Compaction": _shape("id object output usage", id=_TEXT, output=_list(_OBJECT)),
    "Deleted": _shape("id object deleted", id=_TEXT, deleted={"const": True}),
    "Items": _shape("object data has_more", data=_list(_OBJECT), has_more=_FLAG),
    "Model": _shape(
        "id object type created created_at owned_by display_name max_input_tokens",
        id=_TEXT,
        created=_COUNT,
        max_input_tokens=_COUNT,
    ),
    "Models": _shape(
        "object data has_more",
        data=_list({"$ref": "#/components/schemas/Model"}),
        has_more=_FLAG,
    ),
    "Health": _shape("ready", ready=_FLAG),
    "Status": _shape("version health limits engine", version=_TEXT, health=_OBJECT),
    "Live": _shape("live", live={"const": True}),
    "Document": _shape("openapi paths", openapi=_TEXT, paths=_OBJECT),
    "Error": _shape(
        "error",
        error=_shape("message type param code", message=_TEXT, type=_TEXT, code=_TEXT),
    ),
    "AnthropicError": _shape(
        "type error",
        type={"const": "error"},
        error=_shape("message type", message=_TEXT, type=_TEXT),
    ),
}
# path -> method -> what it takes and what it answers with
_ROUTES: dict[str, dict[str, tuple[str, str]]] = {
    "/v1/chat/completions": {"post": ("ChatRequest", "ChatAnswer")},
    "/v1/completions": {"post": ("CompletionRequest", "CompletionAnswer")},
    "/v1/messages": {"post": ("MessagesRequest", "Message")},
    "/v1/messages/count_tokens": {"post": ("MessagesRequest", "MessageCount")},
    "/v1/responses": {"post": ("ResponsesRequest", "Response")},
    "/v1/responses/input_tokens": {"post": ("ResponsesRequest", "ResponseCount")},
    "/v1/responses/compact": {"post": ("ResponsesRequest", "Compaction")},
    "/v1/responses/{id}": {"get": ("", "Response"), "delete": ("", "Deleted")},
    "/v1/responses/{id}/input_items": {"get": ("", "Items")},
    "/v1/responses/{id}/cancel": {"post": ("", "Response")},
    "/v1/models": {"get": ("", "Models")},
    "/v1/models/{id}": {"get": ("", "Model")},
    "/health": {"get": ("", "Health")},
    "/health/live": {"get": ("", "Live")},
    "/metrics": {"get": ("", "")},
    "/status": {"get": ("", "Status")},
    "/openapi.json": {"get": ("", "Document")},
}
_STREAMED = frozenset({"ChatAnswer", "CompletionAnswer", "Message", "Response"})


def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "ftd", "version": version("ftd")},
        "paths": {path: _path(path, methods) for path, methods in _ROUTES.items()},
        "components": {
            "schemas": {**_REQUESTS, **_ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _path(path: str, methods: dict[str, tuple[str, str]]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        method: _operation(path, method, *schemas) for method, schemas in methods.items()
    }
    if "{id}" in path:
        entry["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return entry


def _operation(path: str, method: str, takes: str, answers: str) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": _TEXT}}
    if answers:
        content = {"application/json": {"schema": _reference(answers)}}
    if takes and answers in _STREAMED:
        content["text/event-stream"] = {"schema": _shape("data", event=_TEXT, data=_TEXT)}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    errors = {"application/json": {"schema": _reference(error)}}
    operation: dict[str, Any] = {
        "operationId": "_".join([method, *path.strip("/").replace("{id}", "id").split("/")]),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": errors},
        },
    }
    if path == "/health":
        operation["responses"]["503"] = {"description": "Not ready.", "content": content}
    if takes:
        body = {"application/json": {"schema": _reference(takes)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


@cache
def _bytes() -> bytes:
    return orjson.dumps(document())


async def show(request: web.Request) -> web.Response:
    return web.Response(body=_bytes(), content_type="application/json")
