"""Memory that follows need, on a real engine: the oracle model in float32."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ftd.config import load_config
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_engine, prepare
from ftd.errors import ConfigError, ContextExceeded
from ftd.lifecycle.elastic import ElasticMemory
from ftd.memory.balance import LastMove
from ftd.memory.change import Change

MODEL = Path(__file__).parents[1] / "data" / "oracles" / "qwen3_moe"
PROMPT = tuple(3 + i % 400 for i in range(600))


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(name, prompt, max_tokens, Sampling(temperature=0.0))


async def answer(memory: ElasticMemory, one: EngineRequest) -> list[int]:
    tokens: list[int] = []
    async for output in memory._engine.submit(one):
        assert output.error is None, output
        tokens += output.tokens
    return tokens


@pytest.fixture
async def memory():
    flags = {"model": str(MODEL), "device": "cpu", "dtype": "float32", "prefill_chunk": "64"}
    config = load_config({**flags, "kv_tokens": "512", "expert_slots": "32"}, {})
    prepared = prepare(MODEL, config)
    loaded = load_engine(config, prepared, lambda *_: None, lambda: False)
    memory = ElasticMemory(config, prepared, loaded)
    yield memory
    await loaded.handle.close()


async def test_a_long_prompt_takes_from_experts_and_they_come_back(memory):
    engine = memory._engine
    with pytest.raises(ContextExceeded):
        engine.submit(request("refused", PROMPT))
    await memory.apply(Change(kv_tokens=2048))
    alone = await answer(memory, request("alone", PROMPT))
    await memory.apply(Change(kv_tokens=512))
    budget = memory.plan.kv_bytes + memory.plan.slots_bytes

    await memory.apply(Change(auto=True))
    assert memory.auto and memory.config.vram.bytes == budget
    await engine.at_safe_point(lambda core: core.tree.clear())
    before = engine.status()
    assert (before.pages_total, before.slots_total) == (32, 32)
    assert before.pages_total * 16 < len(PROMPT) < engine.limits.pool_tokens
    assert await answer(memory, request("long", PROMPT)) == alone
    grown = engine.status()
    assert grown.pages_total * 16 > len(PROMPT) and grown.slots_total < before.slots_total
    assert memory.plan.kv_bytes + memory.plan.slots_bytes <= budget

    await engine.at_safe_point(lambda core: core.tree.clear())
    for i in range(12):
        await answer(memory, request(f"short{i}", PROMPT[i : i + 9]))
        memory._last = LastMove()  # as if much time had passed
        await memory.rebalance()
    back = engine.status()
    assert back.slots_total > grown.slots_total and back.pages_total < grown.pages_total
    assert memory.plan.kv_bytes + memory.plan.slots_bytes <= budget


async def test_numbers_end_it(memory):
    await memory.apply(Change(auto=True))
    done = await memory.apply(Change(kv_tokens=256, expert_slots=3))
    assert not memory.auto and (done.kv_tokens, done.slots) == (256, 3)
    assert memory._engine.limits.pool_tokens == 256
    assert await memory.rebalance() is None
    assert await memory._engine.at_safe_point(lambda core: core.most_pages) == 0


async def test_refused_without_a_gpu_and_nothing_changes(memory):
    before = memory._engine.status()
    with pytest.raises(ConfigError, match="no GPU"):
        await memory.apply(Change(vram="auto"))
    with pytest.raises(ConfigError, match="either"):
        await memory.apply(Change(auto=True, expert_slots=3))
    assert replace(memory._engine.status(), steps=0) == replace(before, steps=0)


async def test_changes_wait_for_each_other(memory):
    sizes = [Change(kv_tokens=n, expert_slots=n // 128) for n in (256, 1024, 384, 512)]
    await asyncio.gather(*(memory.apply(change) for change in sizes))
    assert (memory.plan.kv_tokens, memory.plan.num_slots) == (512, 4)
    assert memory._engine.limits.pool_tokens == 512
