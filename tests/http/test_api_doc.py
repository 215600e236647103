"""docs/api.md is true: every row is tried, and no field is read that has no row."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftd.http.app import make_app
from ftd.http.chat import read_chat
from ftd.http.completions import read_completion
from ftd.http.fields import Fields
from ftd.http.messages import read_messages
from ftd.http.responses import read_responses

DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}
READERS = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/messages": read_messages,
    "/v1/responses": read_responses,
}


class Row(NamedTuple):
    path: str
    field: str
    answer: str
    value: Any


def rows() -> list[Row]:
    found = []
    for section in DOC.split("\n## ")[1:]:
        heading = re.match(r"`POST (\S+)`", section)
        for field, answer, value in re.findall(
            r"^\| `(\w+)` \| (supported|ignored|refused) \| .*\| `(.+)` \|$", section, re.M
        ):
            found.append(Row(heading[1], field, answer, json.loads(value)))
    return found


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.path}-{r.field}-{r.answer}")
async def test_a_row_is_true(front, row: Row):
    status, body = await front.post(row.path, {**BASE[row.path], row.field: row.value})
    if row.answer == "refused":
        assert status == 400
        assert row.field in (body["error"].get("param") or body["error"]["message"])
    else:
        assert status == 200, body


@pytest.mark.parametrize(("path", "read"), READERS.items())
def test_exactly_the_documented_fields_are_read(front, path, read):
    fields = Fields(dict(BASE[path]))
    read(fields, front.asked)
    documented = {row.field for row in ROWS if row.path == path and row.answer != "ignored"}
    assert fields.read == documented


@pytest.mark.parametrize(
    ("path", "module", "params"),
    [
        (
            "/v1/chat/completions",
            "openai.types.chat.completion_create_params",
            "CompletionCreateParamsStreaming",
        ),
        (
            "/v1/completions",
            "openai.types.completion_create_params",
            "CompletionCreateParamsStreaming",
        ),
        (
            "/v1/responses",
            "openai.types.responses.response_create_params",
            "ResponseCreateParamsStreaming",
        ),
        (
            "/v1/messages",
            "anthropic.types.message_create_params",
            "MessageCreateParamsStreaming",
        ),
        (
            "/v1/messages",
            "anthropic.types.beta.message_create_params",
            "MessageCreateParamsStreaming",
        ),
    ],
)
def test_every_field_of_the_official_client_has_a_row(path, module, params):
    known = typing.get_type_hints(getattr(pytest.importorskip(module), params))
    assert set(known) <= {row.field for row in ROWS if row.path == path}


def test_every_route_is_documented(front):
    app = make_app(front.lifecycle, front.config)
    routes = {resource.canonical for resource in app.router.resources()}
    assert all(f"`{route}`" in DOC for route in routes)
    table = DOC[: DOC.index("\n## ")]
    assert set(re.findall(r"`(/[^`]*)`(?=[^|]*\| [A-Z, ]+ \|)", table)) == routes
