"""/openapi.json: it tells of every route, and the server keeps to it whatever is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ftd.http.app import make_app
from ftd.http.openapi import document

PAGE = {"/", "/static/{name}"}  # for people


def test_every_route_is_told_with_its_methods(front):
    app = make_app(front.lifecycle, front.config)
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource.canonical not in PAGE
    }
    told = {(path, m) for path, entry in document()["paths"].items() for m in entry}
    told -= {(path, "parameters") for path, _ in told}
    assert routes - told == {("/v1/responses", "get")}, "it only refuses WebSockets"
    assert told <= routes


def test_every_reference_leads_somewhere():
    schemas = document()["components"]["schemas"]

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in schemas
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document())


PATHS = [path for path, entry in document()["paths"].items() if "post" in entry]


@pytest.mark.parametrize("path", PATHS)
async def test_the_server_keeps_to_its_document(front, path):
    """Valid and invalid bodies: no failure of ours, documented forms, and the next one works."""
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis import GenerationMode, checks
    from schemathesis.specs.openapi import checks as openapi_checks

    schema = schemathesis.openapi.from_dict(document())
    schema.config.update(base_url=front.url)
    operation = schema[path]["POST"]
    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if path != "/v1/responses/{id}/cancel":
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def check(case: Any) -> None:
        case.call_and_validate(
            checks=[
                checks.not_a_server_error,
                openapi_checks.status_code_conformance,
                openapi_checks.content_type_conformance,
                openapi_checks.response_schema_conformance,
            ],
            timeout=20,
        )

    await asyncio.to_thread(check)
    assert (await front.chat("hi"))[0] == 200
    assert not front.engine.active
