"""Recorded sessions of agents on models that keep states, or windows, where they are edited."""

import asyncio
from pathlib import Path

import pytest

from ftd.config import load_config
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.lifecycle.verify import read_sessions, verify
from ftd.text.textmodel import TextModel

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
SESSIONS = ("truncated result", "two sub-agents", "edit in the middle")
LEEWAY_TOKENS = {"qwen3_next": 64, "gpt_oss-mxfp4": 16}


@pytest.fixture(scope="module", params=LEEWAY_TOKENS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def replayed(family):
    model = ORACLES / family
    flags = {"model": str(model), "device": "cpu", "dtype": "float32", "cpu_threads": "1"}
    config = load_config(flags, {})
    sessions = [session for session in read_sessions() if session.name in SESSIONS]

    async def run():
        loaded = load_engine(config, prepare(model, config), lambda *_: None, lambda: False)
        try:
            found = verify(loaded.handle, TextModel(model), sessions)
            return {done.session: done async for done in found}
        finally:
            await loaded.handle.close()

    return asyncio.run(run())


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_is_answered_as_from_cold_and_computes_little_again(replayed, family, session):
    done = replayed[session]
    assert done.checked > 30
    assert (done.unequal, done.max_difference) == (0, 0.0)
    assert done.most_above_ideal <= LEEWAY_TOKENS[family]
    assert done.recomputed_tokens < 0.75 * done.prompt_tokens
