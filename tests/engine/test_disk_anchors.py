"""KV on disk under a running engine: found after a restart, equal bit for bit, never trusted."""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from ftd.config import load_config
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.engine.thread import EngineThread
from ftd.errors import ConfigError
from ftd.kv.anchors import Anchor, AnchorKind

MODEL = Path(__file__).parent.parent / "data" / "oracles" / "qwen3_moe"
RECURRENT = MODEL.parent / "qwen3_next"
VOCAB = 500
GREEDY = Sampling(temperature=0.0, logprobs=2)
PROMPT = [n * n * 7 % VOCAB for n in range(600)]


@asynccontextmanager
async def engine(directory, **settings):
    flags = {"anchor_dir": str(directory), "kv_tokens": "1024", **settings}
    flags = {"model": str(MODEL), "device": "cpu", "dtype": "float32", **flags}
    config = load_config(flags, {})
    loaded = load_engine(
        config, prepare(Path(flags["model"]), config), lambda *_: None, lambda: False
    )
    try:
        yield loaded.handle
    finally:
        await loaded.handle.close()


ANCHORS = (Anchor(300, AnchorKind.SYSTEM), Anchor(500, AnchorKind.USER))


async def ask(handle: EngineThread, name, ids, tokens=6, anchors=ANCHORS, **more):
    request = EngineRequest(name, tuple(ids), tokens, GREEDY, anchors=anchors, session="s", **more)
    outputs = [output async for output in handle.submit(request)]
    answer = [(o.tokens, o.logprobs) for o in outputs]
    return outputs[0].reused_tokens, answer


async def settle(handle):
    def at_rest(core):
        status = core.status()
        assert status.pages_free + status.pages_held == status.pages_total
        assert status.pages_held == status.pages_cached

    await handle.at_safe_point(at_rest)


def files(directory):
    return sorted(directory.rglob("*.ftdkv"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A directory in which an engine has left a prompt and its answer, and what it answered."""
    directory = tmp_path_factory.mktemp("anchors")

    async def run():
        async with engine(directory) as handle:
            reused, answer = await ask(handle, "first", PROMPT)
            assert reused == 0
            return answer

    return directory, asyncio.run(run())


async def test_what_is_only_tried_is_not_written(tmp_path):
    async with engine(tmp_path) as handle:
        await ask(handle, "tried", PROMPT[:100], passing=True)
    assert files(tmp_path) == []


@pytest.fixture
def copied(kept, tmp_path):
    directory, answer = kept
    shutil.copytree(directory, tmp_path / "anchors")
    return tmp_path / "anchors", answer


async def test_a_prompt_is_found_after_a_restart(copied):
    directory, answer = copied
    assert len(files(directory)) == 3  # 605 tokens in blocks of 256
    async with engine(directory) as handle:
        assert await ask(handle, "again", PROMPT) == (599, answer)
        reused, _ = await ask(handle, "part", [*PROMPT[:400], 3, 4, 5])
        assert reused == 400
        await settle(handle)
        kinds = await handle.at_safe_point(lambda core: core.anchor_infos())
        found = {(a.kind, a.position): a for a in kinds if a.session == "s"}
        assert {("system", 300), ("user", 500)} <= found.keys()
        assert found["system", 300].kv_bytes > 0 and found["system", 300].disk_bytes > 0


async def test_another_end_takes_what_is_common_from_disk(copied):
    directory, _ = copied
    async with engine(directory) as handle:
        reused, warm = await ask(handle, "other", [*PROMPT[:560], 9, 8, 7])
        assert reused == 560
    async with engine(directory.parent / "empty") as handle:
        assert (await ask(handle, "other", [*PROMPT[:560], 9, 8, 7]))[1] == warm


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "foreign": lambda data: b"#!/bin/sh\necho\n" + data,
    "a bit of the KV": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "a word of the head": lambda data: data.replace(b'"chance"', b'"chanCe"'),
    "a bit of the tokens": lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
    "longer": lambda data: data + b"x",
    "another format": lambda data: data[:8] + b"\x63" + data[9:],
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_files_are_left_out_with_a_line_in_the_log(copied, damage):
    directory, answer = copied
    for path in files(directory):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with structlog.testing.capture_logs() as logs:
        async with engine(directory) as handle:
            reused, again = await ask(handle, "again", PROMPT)
            assert (reused, again) == (0, answer)
            await settle(handle)
    ignored = [line for line in logs if line["event"] == "anchors.file_ignored"]
    assert ignored and all(line["cause"] for line in ignored)


async def test_blocks_renamed_to_each_other_are_left_out(copied):
    directory, answer = copied
    first, second, *_ = files(directory)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    async with engine(directory) as handle:
        reused, again = await ask(handle, "again", PROMPT)
        assert again == answer and reused in (0, 256)  # the first may be none of the two


async def test_another_type_of_the_same_model_finds_nothing(copied):
    directory, _ = copied
    async with engine(directory, dtype="bfloat16") as handle:
        assert (await ask(handle, "again", PROMPT))[0] == 0


async def test_files_stay_within_their_limit(tmp_path):
    async with engine(tmp_path, anchor_bytes="1M") as handle:
        for n in range(4):
            await ask(handle, f"r{n}", [(n + k * k) % VOCAB for k in range(700)])
    assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= 2**20


async def test_requests_that_leave_while_the_disk_is_read_leave_nothing(copied):
    directory, answer = copied
    async with engine(directory) as handle:
        tickets = [handle.submit(EngineRequest(f"r{n}", tuple(PROMPT), 4)) for n in range(4)]
        for ticket in tickets[1:]:
            ticket.end()
        async for _ in tickets[0]:
            pass
        assert (await ask(handle, "again", PROMPT)) == (599, answer)
        await settle(handle)


async def test_writes_that_were_cut_are_removed_once_they_are_old(copied):
    directory, _ = copied
    old, new = (files(directory)[0].with_name(f"{name}.part") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    async with engine(directory):
        assert (old.exists(), new.exists()) == (False, True)


async def test_dropping_all_removes_the_files(copied):
    directory, _ = copied
    async with engine(directory) as handle:
        await ask(handle, "again", PROMPT)
        await handle.at_safe_point(lambda core: core.drop_anchors(None))
        assert not await handle.at_safe_point(lambda core: core.anchor_infos())
    assert files(directory) == []


async def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold anchors"):
        async with engine(tmp_path / "file"):
            pass


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """As ``kept``, of a model with recurrent layers: a prompt in two turns, and its answers."""
    directory = tmp_path_factory.mktemp("states")

    async def run():
        async with engine(directory, model=str(RECURRENT), max_running="2") as handle:
            _, first = await ask(handle, "first", PROMPT)
            _, other = await ask(handle, "other", [*PROMPT[:400], *PROMPT[:90]])
            return first, other

    return directory, asyncio.run(run())


async def test_recurrent_states_survive_with_their_pages(recurrent, tmp_path):
    directory, (first, other) = recurrent
    shutil.copytree(directory, tmp_path / "anchors")
    async with engine(tmp_path / "anchors", model=str(RECURRENT), max_running="2") as handle:
        assert await ask(handle, "again", PROMPT) == (592, first)  # its last whole page
        reused, again = await ask(handle, "other", [*PROMPT[:400], *PROMPT[:90]])
        assert (reused, again) == (480, other)
        reused, _ = await ask(handle, "middle", [*PROMPT[:350], 1, 2, 3])
        assert reused == 300  # the system prompt's end
        await settle(handle)
        states = await handle.at_safe_point(lambda core: core.status())
        assert states.states_held == states.states_cached


async def test_states_that_are_cut_are_left_out(recurrent, tmp_path):
    directory, (first, _) = recurrent
    shutil.copytree(directory, tmp_path / "anchors")
    for path in files(tmp_path):
        data = path.read_bytes()
        path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    with structlog.testing.capture_logs() as logs:
        async with engine(tmp_path / "anchors", model=str(RECURRENT), max_running="2") as handle:
            assert await ask(handle, "again", PROMPT) == (0, first)
    assert any(line["event"] == "anchors.file_ignored" for line in logs)


async def test_a_block_is_written_anew_for_states_that_came_later(tmp_path):
    settings = {"model": str(RECURRENT), "max_running": "2"}
    async with engine(tmp_path, **settings) as handle:
        await ask(handle, "first", PROMPT, anchors=())
        await ask(handle, "second", [*PROMPT[:222], 5, 5, 5], anchors=())  # where it parts is kept
    async with engine(tmp_path, **settings) as handle:
        reused, third = await ask(handle, "third", [*PROMPT[:222], 6, 6, 6])
        assert reused == 222
        assert (await ask(handle, "first", PROMPT))[0] == 592
    async with engine(tmp_path.with_name("empty"), **settings) as handle:
        assert await ask(handle, "third", [*PROMPT[:222], 6, 6, 6]) == (0, third)


async def test_windows_survive_with_their_pages(tmp_path):
    settings = {"model": str(MODEL.parent / "gpt_oss-mxfp4"), "max_running": "2"}
    async with engine(tmp_path / "anchors", **settings) as handle:
        _, first = await ask(handle, "first", PROMPT)
    async with engine(tmp_path / "anchors", **settings) as handle:
        assert await ask(handle, "again", PROMPT) == (599, first)
        reused, _ = await ask(handle, "middle", [*PROMPT[:350], 1, 2, 3])
        assert reused == 300  # the system prompt's end
        await settle(handle)
