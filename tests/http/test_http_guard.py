"""Keys, hosts, origins, sizes, methods and routes that do not exist."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ftd.config import Config, HttpAddress
from ftd.errors import ConfigError
from ftd.http.app import make_app

BODY = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-one"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# agents\n{KEY}\n\n  sk-zwei-ü  \n")
    return path


async def request(front, method: str, path: str, **options):
    async with front.client.request(method, f"{front.url}{path}", **options) as response:
        return response, await response.read()


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/test-model"),
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/static/other.js"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_asks_for_the_key(start_front, key_file, method, path):
    front = await start_front(Config(api_key_file=key_file))
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": KEY[:-1]}, {"x-api-key": ""}]
    for headers in [*wrong, {"Authorization": f"Basic {KEY}"}, {"x-api-key": "# agents"}]:
        response, body = await request(front, method, path, headers=headers, json=BODY)
        assert response.status == 401
        assert response.content_type == "application/json"
        assert b"invalid_api_key" in body


async def test_both_header_styles_and_every_key_work(start_front, key_file):
    front = await start_front(Config(api_key_file=key_file))
    for headers in (
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": "sk-zwei-ü"},
    ):
        with capture_logs() as lines:
            response, _ = await request(
                front, "POST", "/v1/chat/completions", headers=headers, json=BODY
            )
        assert response.status == 200
        assert "sk-" not in str(lines)


async def test_health_needs_no_key(start_front, key_file):
    front = await start_front(Config(api_key_file=key_file))
    for path in ("/health", "/health/live", "/", "/static/page.css", "/static/page.js"):
        assert (await request(front, "GET", path))[0].status == 200


async def test_without_keys_any_key_is_accepted(front):
    headers = {"Authorization": "Bearer dummy", "x-api-key": "x"}
    response, _ = await request(front, "POST", "/v1/chat/completions", headers=headers, json=BODY)
    assert response.status == 200


def test_a_key_file_that_is_missing_or_empty_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path, reason in ((tmp_path / "missing", "cannot be read"), (empty, "holds no key")):
        with pytest.raises(ConfigError, match=reason):
            make_app(None, Config(api_key_file=path))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1919", 200),
        ("LOCALHOST.:1919", 200),
        ("ftd.localhost", 200),
        ("127.0.0.1:1919", 200),
        ("[::1]:1919", 200),
        ("192.168.1.7", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_only_our_own_names_are_served(front, host, status):
    response, body = await request(front, "GET", "/v1/models", headers={"Host": host})
    assert response.status == status
    assert status == 200 or b"forbidden" in body


async def test_further_hosts_may_be_named(start_front):
    named = await start_front(
        Config(allowed_hosts=("GPU.example",), http=HttpAddress("box.example", 1919))
    )
    for host, status in (("gpu.example", 200), ("box.example:80", 200), ("evil.example", 403)):
        response, _ = await request(named, "GET", "/health", headers={"Host": host})
        assert response.status == status
    anyone = await start_front(Config(allowed_hosts=("*",)))
    assert (await request(anyone, "GET", "/health", headers={"Host": "x.example"}))[0].status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("app://obsidian.md", 200),
        ("vscode-webview://abc", 200),
    ],
)
async def test_pages_of_other_sites_are_refused_and_nobody_is_named(front, origin, status):
    headers = {"Origin": origin}
    response, _ = await request(front, "POST", "/v1/chat/completions", headers=headers, json=BODY)
    assert response.status == status
    assert "Access-Control-Allow-Origin" not in response.headers
    headers["Access-Control-Request-Method"] = "POST"
    response, _ = await request(front, "OPTIONS", "/v1/chat/completions", headers=headers)
    assert response.status >= 400
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_an_allowed_origin_may_read_answers_errors_and_streams(start_front, key_file):
    origin = "https://chat.example"
    front = await start_front(Config(allow_origin=(origin,), api_key_file=key_file))
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-api-key",
    }
    response, _ = await request(front, "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert response.status == 204
    assert "x-api-key" in response.headers["Access-Control-Allow-Headers"]
    for headers, fields in (
        ({}, {}),
        ({"x-api-key": KEY}, {}),
        ({"x-api-key": KEY}, {"stream": True}),
        ({"x-api-key": KEY}, {"n": -1}),
    ):
        response, _ = await request(
            front,
            "POST",
            "/v1/chat/completions",
            headers={"Origin": origin, **headers},
            json={**BODY, **fields},
        )
        assert response.headers["Access-Control-Allow-Origin"] == origin
        assert response.headers["Vary"] == "Origin"
    other, _ = await request(front, "GET", "/health", headers={"Origin": "https://other.example"})
    assert other.status == 403


async def test_a_body_that_is_too_large_is_413(start_front):
    front = await start_front(Config(body_limit=2000))
    for data in (b"x" * 200_000, _chunks(200)):
        response, body = await request(front, "POST", "/v1/completions", data=data)
        assert response.status == 413
        assert b"request_too_large" in body
        assert b"2,000 bytes" in body
    assert (await front.chat("hi"))[0] == 200


async def _chunks(count: int):
    for _ in range(count):
        yield b"x" * 1000


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_compressed_body_is_refused_unread(front, encoding):
    headers = {"Content-Encoding": encoding}
    response, body = await request(
        front, "POST", "/v1/chat/completions", headers=headers, data=b"\x1f\x8b\x08" * 100
    )
    assert response.status == 415
    assert b"unsupported_content_encoding" in body


async def test_a_declared_length_that_is_too_large_is_refused_unread(start_front):
    front = await start_front(Config(body_limit=2000))
    status, body = await _declare(front, 200 * 2**20)
    assert status == 413
    assert b"209,715,200 bytes" in body


async def _declare(front, size: int) -> tuple[int, bytes]:
    port = int(front.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    status = int((await reader.readline()).split()[1])
    await reader.readuntil(b"\r\n\r\n")
    body = await reader.read(2000)
    writer.close()
    return status, body


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/chat/completions", 405, b"use POST"),
        ("PUT", "/v1/models", 405, b"use GET"),
        ("POST", "/health", 405, b"use GET"),
        ("POST", "/v1/embeddings", 404, b"no embeddings"),
        ("POST", "/v1/images/generations", 404, b"text only"),
        ("POST", "/v1/audio/speech", 404, b"text only"),
        ("POST", "/v1/message", 404, b"/v1/messages"),
        ("GET", "/v1/responses", 405, b"use POST"),
        ("GET", "/v1/chat/completions/", 404, b"does not exist"),
    ],
)
async def test_what_does_not_exist_says_so_in_json(front, method, path, status, words):
    response, body = await request(front, method, path, json=BODY if method == "POST" else None)
    assert (response.status, response.content_type) == (status, "application/json")
    assert words in body
    assert status != 405 or response.headers["Allow"]


async def test_head_of_unknown_paths_is_404(front):
    for path in ("/", "/api/hello"):
        assert (await request(front, "HEAD", path))[0].status == 404


async def test_a_websocket_is_refused_so_that_codex_goes_on_with_post(front):
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x" * 16}
    assert (await request(front, "GET", "/v1/responses", headers=headers))[0].status == 426


async def test_our_own_mistake_is_500_without_details(front, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("inner secret")

    monkeypatch.setattr(front.lifecycle, "health", broken)
    response, body = await request(front, "GET", "/health")
    assert response.status == 500
    assert b"inner secret" not in body
    assert b"internal_error" in body


@pytest.mark.parametrize(
    "rest",
    [
        b"Authorization: Bearer sk-secret\x01\r\n\r\n",
        b"Authorization: " + b"sk-secret" * 1000 + b"\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nsk-secret\r\n",
    ],
    ids=["control character", "long header", "chunk"],
)
async def test_what_is_no_http_is_logged_in_a_line_without_its_bytes(front, caplog, rest):
    reader, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
    with capture_logs() as lines:
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n" + rest)
        assert (await reader.readline()).split()[1] in (b"400", b"431")
        writer.close()
    assert not caplog.records
    assert [line["event"] for line in lines] == ["http.unreadable"]
    assert "sk-" not in str(lines)
