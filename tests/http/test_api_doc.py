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

DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
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
        assert (status, body["error"]["param"]) == (400, row.field)
    else:
        assert status == 200, body


@pytest.mark.parametrize(
    ("path", "read"), [("/v1/chat/completions", read_chat), ("/v1/completions", read_completion)]
)
def test_exactly_the_documented_fields_are_read(front, path, read):
    fields = Fields(dict(BASE[path]))
    read(fields, front.asked)
    documented = {row.field for row in ROWS if row.path == path and row.answer != "ignored"}
    assert fields.read == documented


@pytest.mark.parametrize(
    ("path", "module"),
    [("/v1/chat/completions", "openai.types.chat"), ("/v1/completions", "openai.types")],
)
def test_every_field_of_the_official_client_has_a_row(path, module):
    params = pytest.importorskip(f"{module}.completion_create_params")
    known = typing.get_type_hints(params.CompletionCreateParamsStreaming)
    assert set(known) <= {row.field for row in ROWS if row.path == path}


def test_every_route_is_documented(front):
    app = make_app(front.lifecycle, front.config)
    routes = {resource.canonical for resource in app.router.resources()}
    assert all(f"`{route}`" in DOC for route in routes)
    table = DOC[: DOC.index("\n## ")]
    assert set(re.findall(r"`(/[^`]+)`(?=[^|]*\| (?:GET|POST) \|)", table)) == routes
