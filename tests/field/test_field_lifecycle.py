"""Reload, failure, signals and broken checkpoints, seen from outside."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ask import ask, chat, post
from running_ftd import ANSWERS, SCRIPT_MODEL, running_ftd

from ftd.control.client import Client, Refused
from ftd.control.protocol import Reload


def reload(ftd, model: Path | None = None, **fields: object):
    with Client(ftd.socket, timeout_s=30) as client:
        return client.call(Reload(model=str(model) if model else None, **fields))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the script model to break or rename."""
    return Path(shutil.copytree(SCRIPT_MODEL, tmp_path / "copy"))


async def test_reloads_with_requests_in_flight_lose_none(copy):
    with running_ftd(fault="slow:5ms") as ftd:
        for model in (None, copy, None):
            tasks = [
                asyncio.create_task(ask(ftd.base, key, stream=i % 2 == 0))
                for i, key in enumerate(["S14", "S15", "S13", "S20"])
            ]
            await asyncio.sleep(0.1)
            done = await asyncio.to_thread(reload, ftd, model)
            assert done.drained
            for task, key in zip(tasks, ["S14", "S15", "S13", "S20"], strict=True):
                assert (await task).text == ANSWERS[key]["text"]
        assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]
        ftd.wait_rest()


async def test_a_broken_model_is_refused_and_the_old_one_serves_on(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    with running_ftd() as ftd:
        with pytest.raises(Refused, match="128"):
            await asyncio.to_thread(reload, ftd, copy)
        assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]
        assert ftd.status().ready


async def test_a_failed_step_ends_every_request_and_the_engine_recovers():
    with running_ftd(fault="step:30,slow:20ms") as ftd:
        replies = await asyncio.gather(*(post(ftd.base, chat("S14")) for _ in range(4)))
        assert {reply.status for reply in replies} <= {200, 500, 503}
        assert any(reply.status == 500 for reply in replies)
        assert all(reply.error["message"] for reply in replies if reply.status != 200)
        await asyncio.to_thread(ftd.wait_ready)
        assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]


@pytest.mark.parametrize("state", ["idle", "prefill", "decode", "twice"])
async def test_sigterm_ends_within_five_seconds_and_answers_everybody(state):
    with running_ftd(fault="slow:50ms", prefill_chunk=16) as ftd:
        long = chat("lorem ipsum dolor " * 200 + "S60", stream=True)
        bodies = {"idle": [], "prefill": [long], "decode": [chat("S60", stream=True)] * 3}
        tasks = [
            asyncio.create_task(post(ftd.base, body)) for body in bodies.get(state, [long, long])
        ]
        await asyncio.sleep(0.5)
        ftd.process.send_signal(signal.SIGTERM)
        if state == "twice":
            await asyncio.sleep(0.1)
            ftd.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(ftd.process.wait, 5.5)
        assert code == 0, ftd.log.read_text()
        for task in tasks:
            reply = await task
            last = reply.events[-1] if reply.events else reply.body
            assert reply.done or "error" in last, reply
        assert not ftd.socket.exists()


async def test_health_is_live_before_ready_and_says_why_not():
    with running_ftd(wait=False) as ftd:
        await asyncio.to_thread(ftd.wait_up)
        assert ftd.health("/health/live")[0] == 200
        status, body = ftd.health()
        assert status == 200 or (status == 503 and body["cause"])
        await asyncio.to_thread(ftd.wait_ready)
        assert ftd.health()[0] == 200


async def test_requests_that_come_before_the_model_are_answered_by_it():
    """They wait, as agents give up on a refusal; a broken one is refused all the same."""
    with running_ftd(wait=False) as ftd:
        await asyncio.to_thread(ftd.wait_up)
        plain, stream, broken = await asyncio.gather(
            ask(ftd.base, "S10"),
            ask(ftd.base, "S14", stream=True),
            post(ftd.base, chat("S10", temperature=-1)),
        )
        assert plain.text == ANSWERS["S10"]["text"]
        assert stream.text == ANSWERS["S14"]["text"]
        assert (broken.status, broken.error["param"]) == (400, "temperature")
        assert ftd.wait_rest().finished == 2


async def test_sigterm_while_requests_wait_for_the_model_answers_each():
    with running_ftd(wait=False, heartbeat="100ms") as ftd:
        await asyncio.to_thread(ftd.wait_up)
        tasks = [
            asyncio.create_task(post(ftd.base, chat("S60", stream=stream)))
            for stream in (True, False)
        ]
        await asyncio.sleep(0.2)
        ftd.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ftd.process.wait, 20) == 0, ftd.log.read_text()
        for task in tasks:
            reply = await task
            last = reply.events[-1] if reply.events else reply.body
            assert reply.done or "error" in last or reply.status == 200, reply
        assert not ftd.socket.exists()


def start_refused(model: Path, *flags: str) -> str:
    """Standard error of an ftd that does not start."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ftd", f"--model={model}", "--http=127.0.0.1:0", *flags),
            *(f"--socket={model.parent / 's.sock'}", "--log-level=error"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done
    return done.stderr


ASSISTANT = "{{ '<|im_start|>assistant\\n' }}"  # a template's last line loses its newline

BREAKAGES = {
    "missing weights": (lambda d: (d / "model.safetensors").unlink(), "*.safetensors"),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes(
            (d / "model.safetensors").read_bytes()[:-100]
        ),
        "model.norm.weight",
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "template with a syntax error": (
        lambda d: (d / "chat_template.jinja").write_text("{% for %}"),
        "chat_template.jinja",
    ),
    "config that is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_is_refused_by_file(copy, breakage):
    do, named = BREAKAGES[breakage]
    do(copy)
    said = start_refused(copy)
    assert "ftd: error:" in said and named in said, said
    assert "Traceback" not in said


async def test_a_template_that_refuses_is_a_400_with_its_reason(copy):
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASSISTANT
    )
    with running_ftd(copy) as ftd:
        twice = [{"role": "user", "content": "S10"}, {"role": "user", "content": "S13"}]
        reply = await post(ftd.base, chat(twice))
        assert reply.status == 200 or "roles must alternate" in reply.error["message"]
        assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]


async def test_a_template_that_never_ends_is_cut_and_others_go_on(copy):
    (copy / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + ASSISTANT
    )
    with running_ftd(copy) as ftd:
        endless = asyncio.create_task(post(ftd.base, chat("loop")))
        assert (await ask(ftd.base, "S10")).text == ANSWERS["S10"]["text"]
        reply = await endless
        assert reply.status == 400 and "template" in reply.error["message"]
