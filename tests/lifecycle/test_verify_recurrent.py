"""Recorded sessions of agents on a model with recurrent layers: states are kept where they edit."""

import asyncio
from pathlib import Path

import pytest

from ftd.config import load_config
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.lifecycle.verify import read_sessions, verify
from ftd.text.textmodel import TextModel

MODEL = Path(__file__).parents[1] / "data" / "oracles" / "qwen3_next"
SESSIONS = ("truncated result", "two sub-agents")
LEEWAY_TOKENS = 64


@pytest.fixture(scope="module")
def replayed():
    flags = {"model": str(MODEL), "device": "cpu", "dtype": "float32", "cpu_threads": "1"}
    config = load_config(flags, {})
    sessions = [session for session in read_sessions() if session.name in SESSIONS]

    async def run():
        loaded = load_engine(config, prepare(MODEL, config), lambda *_: None, lambda: False)
        try:
            found = verify(loaded.handle, TextModel(MODEL), sessions)
            return {done.session: done async for done in found}
        finally:
            await loaded.handle.close()

    return asyncio.run(run())


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_is_answered_as_from_cold_and_computes_little_again(replayed, session):
    done = replayed[session]
    assert done.checked > 30
    assert (done.unequal, done.max_difference) == (0, 0.0)
    assert done.most_above_ideal <= LEEWAY_TOKENS
    assert done.recomputed_tokens < 0.75 * done.prompt_tokens
