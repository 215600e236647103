"""Prompts beyond the limits, bodies beyond the limits, keys, hosts and origins."""

from __future__ import annotations

import asyncio
import stat

import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, running_ftd


async def prompt_of(base: str, tokens: int) -> list[int]:
    """Token ids for /v1/completions: used exactly as given."""
    return [300 + i % 700 for i in range(tokens)]


async def test_prompts_at_the_limit_work_and_beyond_it_name_both_numbers(ftd):
    stream = asyncio.create_task(ask(ftd.base, "S14", stream=True))
    for tokens, status in [
        (2046, 200),
        (2047, 200),
        (2048, 400),
        (2049, 400),
        (3000, 400),
        (5000, 400),
    ]:
        for streamed in (False, True):
            reply = await post(
                ftd.base,
                {"prompt": await prompt_of(ftd.base, tokens), "max_tokens": 4, "stream": streamed},
                "/v1/completions",
            )
            assert reply.status == status, (tokens, reply.body)
            if status == 400:
                assert reply.error["code"] == "context_length_exceeded"
                assert str(tokens) in reply.error["message"] and "2047" in reply.error["message"]
    assert (await stream).text == ANSWERS["S14"]["text"]


async def test_max_tokens_beyond_the_context_is_cut_silently(ftd):
    reply = await ask(ftd.base, "S10", max_tokens=64_000)
    assert reply.text == ANSWERS["S10"]["text"]


async def test_the_control_socket_is_the_owners_alone(ftd):
    assert stat.S_IMODE(ftd.socket.stat().st_mode) == 0o600


async def test_foreign_hosts_and_origins_are_refused(ftd):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        reply = await post(ftd.base, chat("S10"), headers=headers)
        assert reply.status == 403, reply.body
        assert "Access-Control-Allow-Origin" not in reply.headers
    reply = await post(ftd.base, chat("S10"), headers={"Authorization": "Bearer anything"})
    assert reply.status == 200


async def test_a_body_beyond_the_limit_is_refused():
    with running_ftd(body_limit="64K") as small:
        reply = await post(small.base, b'{"messages": "' + b"x" * 100_000 + b'"}')
        assert reply.status == 413, reply.body
        assert (await ask(small.base, "S10")).text == ANSWERS["S10"]["text"]


async def test_keys_open_every_model_route_in_both_header_styles(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# comment\nsecret-one\nsecret-two\n")
    keys.chmod(0o600)
    with running_ftd(api_key_file=keys) as locked:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secret"}):
            for path in ("/v1/chat/completions", "/v1/completions"):
                reply = await post(locked.base, chat("S10"), path, headers=headers)
                assert reply.status == 401 and reply.error["message"]
        for headers in ({"Authorization": "Bearer secret-one"}, {"x-api-key": "secret-two"}):
            reply = await post(locked.base, chat("S10"), headers=headers)
            assert reply.status == 200
        assert locked.health("/health/live")[0] == 200
        log = locked.log.read_text()
    assert "secret" not in log


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_no_prompt_text_in_the_log(ftd, stream):
    await ask(ftd.base, "S10 my-very-private-words", stream=stream)
    log = ftd.log.read_text()
    assert "request.finished" in log and "my-very-private-words" not in log
    assert ANSWERS["S10"]["text"] not in log
