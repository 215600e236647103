"""Memory that follows need, on a real engine: the oracle model in float32."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ftd.config import load_config
from ftd.engine import preparing
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.errors import ConfigError, ContextExceeded
from ftd.lifecycle.elastic import ElasticMemory
from ftd.memory import chunk, vram
from ftd.memory.balance import LastMove
from ftd.memory.change import Change
from ftd.memory.machine import Gpu
from ftd.memory.planner import plan_memory
from ftd.memory.yielding import Calm
from ftd.units import Amount, GiB, MiB

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
    assert await memory._engine.at_safe_point(lambda core: core.held.most_pages) == 0


async def test_refused_without_a_gpu_and_nothing_changes(memory):
    before = memory._engine.status()
    with pytest.raises(ConfigError, match="uses none"):
        await memory.apply(Change(vram="auto"))
    with pytest.raises(ConfigError, match="either"):
        await memory.apply(Change(auto=True, expert_slots=3))
    assert replace(memory._engine.status(), steps=0) == replace(before, steps=0)


CONTEXT = 600 * MiB  # of CUDA, kernels, graphs: what no call tells, and the plan counts as more


@pytest.fixture
async def on_gpu(memory, monkeypatch):
    """As if the model lay on a GPU of 4 GiB, of which other processes have what the test says."""
    total, others = 4 * GiB, SimpleNamespace(taken=0)
    prepared = memory._prepared
    spec, layout, dense = prepared.spec, prepared.layout, prepared.plan.dense_bytes

    def held():  # of what this process has, what it could give back
        used = memory.plan.vram
        return used.total_bytes - used.overhead_bytes

    def mem_get_info(_):  # others have no more than is free, and take the rest when it comes free
        return max(0, total - CONTEXT - held() - others.taken), total

    # so many sequences want more KV than a small GPU has
    config = replace(memory.config, kv_tokens="auto", expert_slots="auto", max_running=256)
    gpu = Gpu(0, "a GPU", "GPU-0", (9, 0), total, total - CONTEXT)
    plan = plan_memory(spec, layout, dense, config, prepared.machine, gpu)
    memory.config, memory._plan = config, plan
    memory._prepared = replace(prepared, plan=plan)
    memory._most_context = plan.context_tokens
    monkeypatch.setattr(preparing, "held_bytes", lambda _: held())
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return others


async def look_often(memory, times: int = 12):
    for _ in range(times):
        memory._calm = Calm(since_s=-1e9)  # as if it had been calm for long
        await memory.rebalance()
    return memory.plan.vram


async def test_what_others_take_of_the_gpu_is_yielded_and_taken_back(memory, on_gpu):
    alone = await answer(memory, request("alone", PROMPT[:300]))
    await memory.apply(Change(vram="auto"))
    quiet = await look_often(memory)
    assert quiet.total_bytes <= quiet.budget_bytes <= 4 * GiB
    assert torch.cuda.mem_get_info(0)[0] >= 512 * MiB
    on_gpu.taken = 2150 * MiB
    pressed = await look_often(memory)
    assert pressed.total_bytes < quiet.total_bytes
    assert torch.cuda.mem_get_info(0)[0] >= 512 * MiB
    assert memory._engine.status().pages_total == memory.plan.num_pages
    assert await answer(memory, request("pressed", PROMPT[:300])) == alone
    on_gpu.taken = 0
    back = await look_often(memory)
    assert back.total_bytes == quiet.total_bytes
    assert memory.moves


async def test_prompts_go_in_smaller_steps_where_the_budget_is_small(memory, on_gpu, monkeypatch):
    started = memory._prepared.plan
    assert started.prefill_chunk == 64  # what is counted of it grows little up to 256
    workspace = started.workspace_bytes - vram.CHUNKED_RANGES * vram.CHUNK_BYTES
    monkeypatch.setattr(chunk, "GPU_CHUNKS", (256, 128, 64))
    monkeypatch.setattr(chunk, "SHARE", workspace / (1 * GiB))
    memory.config = replace(memory.config, prefill_chunk="auto")
    memory._prepared = replace(memory._prepared, plan=replace(started, prefill_chunk=256))
    for mib, tokens in ((3000, 256), (1400, 64), (3000, 256)):
        await memory.apply(Change(vram=Amount(bytes=mib * MiB)))
        assert memory.plan.prefill_chunk == tokens
        assert await memory._engine.at_safe_point(lambda core: core.limits.chunk_tokens) == tokens


async def test_a_start_with_vram_auto_yields_until_a_size_is_asked_for(memory, on_gpu):
    assert not memory.moves
    loaded = SimpleNamespace(handle=memory._engine, most_pages=memory._most_pages)
    started = ElasticMemory(replace(memory.config, vram="auto"), memory._prepared, loaded)
    assert started.moves
    await started.apply(Change(kv_tokens=256))
    assert started.moves
    await started.apply(Change(vram=Amount(bytes=2 * GiB)))
    assert not started.moves


async def test_no_more_is_yielded_than_can_be(memory, on_gpu):
    await memory.apply(Change(vram="auto"))
    on_gpu.taken = 3 * GiB  # not even the context of the process would fit beside it
    pressed = await look_often(memory)
    assert memory._engine.status().pages_total == memory.plan.num_pages
    on_gpu.taken = 0
    assert (await look_often(memory)).total_bytes > pressed.total_bytes


async def test_by_need_and_by_what_others_leave(memory, on_gpu):
    await memory.apply(Change(vram="auto", auto=True))
    on_gpu.taken = 2500 * MiB
    pressed = await look_often(memory)
    status = memory._engine.status()
    held = status.pages_total * memory.plan.page_bytes
    held += status.slots_total * memory.plan.record_bytes
    assert memory.auto and held <= memory.shared.budget_bytes
    assert pressed.total_bytes <= pressed.budget_bytes


async def test_changes_wait_for_each_other(memory):
    sizes = [Change(kv_tokens=n, expert_slots=n // 128) for n in (256, 1024, 384, 512)]
    await asyncio.gather(*(memory.apply(change) for change in sizes))
    assert (memory.plan.kv_tokens, memory.plan.num_slots) == (512, 4)
    assert memory._engine.limits.pool_tokens == 512
