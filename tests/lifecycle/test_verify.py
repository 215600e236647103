"""Recorded sessions of agents on the demo model: what is reused changes no bit of an answer."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftd.checkpoint.source import resolve
from ftd.config import load_config
from ftd.engine.api import EngineLimits
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.errors import ConfigError
from ftd.kv.anchors import Anchor, AnchorKind
from ftd.lifecycle.verify import (
    MOST_BYTES,
    SESSIONS,
    Session,
    Verified,
    read_sessions,
    replay,
    verify,
)
from ftd.text.textmodel import TextModel

PAGE_TOKENS = 16
ORACLES = Path(__file__).parent.parent / "data" / "oracles"


@pytest.fixture(scope="module")
def replayed():
    """Each session's outcome, on a pool that holds them all, and the engine's status after it."""
    path = resolve("demo").path
    flags = {"model": "demo", "device": "cpu", "dtype": "float32", "kv_tokens": "16384"}
    config = load_config(flags, {})

    async def run():
        loaded = load_engine(config, prepare(path, config), lambda *_: None, lambda: False)
        warmed_up = loaded.handle.status()
        assert (warmed_up.steps, warmed_up.decode_pace_tokens_per_s) == (0, 0.0)
        try:
            found = verify(loaded.handle, TextModel(path), read_sessions())
            return {done.session: done async for done in found}, loaded.handle.status()
        finally:
            await loaded.handle.close()

    return asyncio.run(run())


@pytest.mark.parametrize("session", [session.name for session in read_sessions()])
def test_a_session_is_answered_as_from_cold_and_computes_little_again(replayed, session):
    done = replayed[0][session]
    assert done.checked > 30
    assert (done.unequal, done.max_difference) == (0, 0.0)
    assert done.most_above_ideal <= PAGE_TOKENS
    assert done.recomputed_tokens <= done.ideal_tokens + PAGE_TOKENS
    assert done.recomputed_tokens < 0.75 * done.prompt_tokens


def test_what_a_replay_asks_is_not_counted_as_requests_of_clients(replayed):
    status = replayed[1]
    assert status.steps > 100
    assert (status.finished, status.cancelled, status.failed) == (0, 0, 0)
    assert (status.prompt_tokens, status.reused_tokens, status.output_tokens) == (0, 0, 0)


@pytest.mark.parametrize(("family", "spare"), [("qwen3_moe-window", 16), ("qwen3_next", 64)])
def test_other_kinds_of_layers_resume_as_close_to_the_ideal(family, spare):
    """A conversation of bare tokens: goes on, is edited in the middle, goes on from there."""
    path = ORACLES / family
    config = load_config({"model": str(path), "device": "cpu", "dtype": "float32"}, {})
    turns = [[(7 * n * n + turn) % 400 for n in range(90)] for turn in range(5)]
    histories = [
        turns[:2],
        turns[:3],
        [turns[0], turns[4], turns[2]],
        [turns[0], *turns[4:], turns[3]],
    ]

    async def run():
        loaded = load_engine(config, prepare(path, config), lambda *_: None, lambda: False)
        done = Verified(family)
        try:
            for history in histories:
                ids = [token for turn in history for token in turn]
                borders = range(90, len(ids), 90)
                anchors = [Anchor(at + by, AnchorKind.TURN) for at in borders for by in (-11, 0)]
                await replay(loaded.handle, done, ids, anchors)
        finally:
            await loaded.handle.close()
        return done

    done = asyncio.run(run())
    assert done.requests == len(histories) and done.checked > 30
    assert (done.unequal, done.max_difference) == (0, 0.0)
    assert done.most_above_ideal <= spare


def test_a_file_that_holds_no_sessions_is_refused(tmp_path):
    path = tmp_path / "sessions.json"
    sessions = ('[{"name": "a"}]', '[{"name": "a", "about": "", "requests": [7]}]', "[7]")
    for text in ("", "[]", *(f'{{"tools": [], "sessions": {each}}}' for each in sessions)):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"sessions\.json"):
            read_sessions(path)
    with pytest.raises(ConfigError):
        read_sessions(tmp_path / "none.json")


def test_what_may_never_end_is_not_read(tmp_path):
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for path, words in ((pipe, "no plain file"), (large, r"64\.0 MiB"), (Path("/dev/zero"), "no")):
        with pytest.raises(ConfigError, match=words):
            read_sessions(path)


def test_a_recording_is_read_alike_every_time():
    first, second = read_sessions(SESSIONS), read_sessions(SESSIONS)
    assert first == second
    assert all(isinstance(s, Session) and s.requests for s in first)


@pytest.mark.parametrize(
    ("context_tokens", "pool_tokens", "hint"),
    [(690, 4096, "--context"), (4096, 690, "--kv-tokens")],
)
def test_what_cannot_be_held_is_refused_before_anything_is_asked(context_tokens, pool_tokens, hint):
    limits = EngineLimits(context_tokens, pool_tokens, 1, 1, vocab=512, trained_tokens=4096)
    engine = SimpleNamespace(limits=limits)  # cannot be asked

    async def run():
        async for _ in verify(engine, TextModel(resolve("demo").path), read_sessions()):
            pass

    with pytest.raises(ConfigError, match=r"two sub-agents.* 683 is the most") as refusal:
        asyncio.run(run())
    assert refusal.value.hint == f"{hint} raises the limit"
