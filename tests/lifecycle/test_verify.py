"""Recorded sessions of agents on the demo model: what is reused changes no bit of an answer."""

import asyncio

import pytest

from ftd.checkpoint.source import resolve
from ftd.config import load_config
from ftd.engine.loading import load_engine, prepare
from ftd.errors import ConfigError
from ftd.lifecycle.verify import SESSIONS, Session, read_sessions, verify
from ftd.text.textmodel import TextModel

PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def replayed():
    """Each session's outcome, on a pool that holds them all."""
    path = resolve("demo").path
    flags = {"model": "demo", "device": "cpu", "dtype": "float32", "kv_tokens": "16384"}
    config = load_config(flags, {})

    async def run():
        loaded = load_engine(config, prepare(path, config), lambda *_: None, lambda: False)
        try:
            found = verify(loaded.handle, TextModel(path), read_sessions())
            return {done.session: done async for done in found}
        finally:
            await loaded.handle.close()

    return asyncio.run(run())


@pytest.mark.parametrize("session", [session.name for session in read_sessions()])
def test_a_session_is_answered_as_from_cold_and_computes_little_again(replayed, session):
    done = replayed[session]
    assert done.checked > 30
    assert (done.unequal, done.max_difference) == (0, 0.0)
    assert done.most_above_ideal <= PAGE_TOKENS
    assert done.recomputed_tokens <= done.ideal_tokens + PAGE_TOKENS
    assert done.recomputed_tokens < 0.75 * done.prompt_tokens


def test_a_file_that_holds_no_sessions_is_refused(tmp_path):
    path = tmp_path / "sessions.json"
    for text in ("", "[]", '{"tools": [], "sessions": [{"name": "a"}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"sessions\.json"):
            read_sessions(path)
    with pytest.raises(ConfigError):
        read_sessions(tmp_path / "none.json")


def test_a_recording_is_read_alike_every_time():
    first, second = read_sessions(SESSIONS), read_sessions(SESSIONS)
    assert first == second
    assert all(isinstance(s, Session) and s.requests for s in first)
