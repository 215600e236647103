"""Models, health, metrics, and the page for people."""

from __future__ import annotations

import re

import pytest


async def get(front, path: str):
    async with front.client.get(f"{front.url}{path}") as response:
        return response, await response.text()


async def test_models_are_listed_with_their_aliases(front):
    response, _ = await get(front, "/v1/models?limit=1000")
    body = await response.json()
    assert (response.status, body["object"]) == (200, "list")
    assert [entry["id"] for entry in body["data"]] == ["test-model", "gpt-test"]
    assert body["data"][0] | {"id": ""} == {
        "id": "",
        "object": "model",
        "type": "model",
        "created": 1_700_000_000,
        "created_at": "2023-11-14T22:13:20Z",
        "owned_by": "ftd",
        "display_name": "test-model",
        "lifecycle": "active",
        "max_input_tokens": 2047,
        "max_tokens": 2047,
        "context_length": 2048,
    }


@pytest.mark.parametrize(
    ("name", "status"),
    [("test-model", 200), ("gpt-test", 200), ("claude-opus-9", 200), ("gpt-9", 200), ("x/y", 404)],
)
async def test_one_model(front, name, status):
    response, text = await get(front, f"/v1/models/{name}")
    assert response.status == status
    assert ("model_not_found" in text) == (status == 404)


async def test_a_model_with_a_slash_in_its_name(front):
    front.lifecycle.served.name = "Qwen/Qwen3"
    response, _ = await get(front, "/v1/models/Qwen/Qwen3")
    assert (await response.json())["id"] == "Qwen/Qwen3"


async def test_health_is_503_until_ready_and_says_why(front):
    front.lifecycle.facts = {"ready": False, "cause": "loading", "progress": {"fraction": 0.4}}
    front.lifecycle.served = None
    response, _ = await get(front, "/health")
    assert response.status == 503
    assert (await response.json()) == front.lifecycle.facts
    assert "Retry-After" in response.headers
    assert (await get(front, "/health/live"))[0].status == 200
    assert (await get(front, "/v1/models"))[0].status == 503


async def test_health_is_200_when_ready(front):
    response, _ = await get(front, "/health")
    assert response.status == 200
    assert (await response.json())["ready"] is True


async def test_metrics_count_requests_and_the_engines_figures(front):
    front.script("greet", "hello you all")
    await front.chat("greet")
    await front.chat("greet", n=-1)
    response, text = await get(front, "/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'ftd_http_requests_total{endpoint="chat",outcome="stop",status="200"} 1.0' in text
    assert 'outcome="invalid_value",status="400"} 1.0' in text
    assert "ftd_finished_total 1.0" in text
    assert 'ftd_time_to_first_token_seconds_count{endpoint="chat"} 1.0' in text
    front.lifecycle.served = None
    assert "ftd_ready 0.0" in (await get(front, "/metrics"))[1]


async def test_status_tells_what_runs_in_every_state(front):
    front.script("greet", "hello you all")
    await front.chat("greet")
    response, _ = await get(front, "/status")
    body = await response.json()
    assert (response.status, body["health"]["ready"]) == (200, True)
    assert body["engine"]["finished"] == 1 and body["limits"]["context_tokens"] == 2048
    front.lifecycle.served = None
    front.lifecycle.facts = {"ready": False, "cause": "loading"}
    response, _ = await get(front, "/status")
    body = await response.json()
    assert (response.status, body["engine"], body["health"]["cause"]) == (200, None, "loading")


async def test_the_page_takes_nothing_from_elsewhere(front):
    response, page = await get(front, "/")
    assert (response.status, response.content_type) == (200, "text/html")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page):
        response, text = await get(front, f"/{path}")
        assert response.status == 200 and response.content_type in ("text/css", "text/javascript")
        assert "://" not in text and "innerHTML" not in text
    ids = set(re.findall(r'id="([^"]+)"', page))
    script = (await get(front, "/static/page.js"))[1]
    assert set(re.findall(r'(?:at|say|bar)\("([^"]+)"', script)) <= ids
    for path in ("/static/page.py", "/static/..%2fapp.py", "/static/"):
        assert (await get(front, path))[0].status == 404
