"""Memory that moves on a GPU: tiers below its KV, and budgets that change under streams."""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import Answer, check_pages, request
from test_contract import ORACLES
from tiers import OTHER, PROMPT, ask, close_disk, open_disk, pin_all

from ftd.config import load_config
from ftd.cuda.memory import held_bytes
from ftd.engine.api import EngineRequest, Sampling
from ftd.engine.loading import load_engine
from ftd.engine.preparing import prepare
from ftd.engine.resize import resize
from ftd.errors import BudgetExceeded
from ftd.lifecycle.elastic import ElasticMemory
from ftd.memory.change import Change
from ftd.units import Amount, GiB, MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = ORACLES / "qwen3_moe"


def gpu_core(model=MODEL, **more):
    from ftd.kernels.triton.ops import CudaOps

    return cuda_core(model, ops=CudaOps(), device="cuda:0", slots=9, **more)


def test_what_was_evicted_comes_back_from_host_memory():
    with gpu_core(num_pages=24, max_running=2, host_pages=64) as core:
        pin_all(core, 64)
        first = ask(core, "first", PROMPT)
        host = core.held.host
        for n in range(3):
            ask(core, f"other{n}", OTHER)
            again = ask(core, f"again{n}", PROMPT)
            assert (again.tokens, again.reused) == (first.tokens, len(PROMPT) - 1)
        assert host.pages_saved and host.pages_loaded >= 3 * 16
        assert host.pool.held == host.pool.idle or host._loading


def test_pages_survive_on_disk(tmp_path):
    with gpu_core(num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        first = ask(core, "first", PROMPT)
        close_disk(core)
    with gpu_core(num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        again = ask(core, "again", PROMPT)
        assert (again.tokens, again.reused) == (first.tokens, len(PROMPT) - 1)
        close_disk(core)


def test_recurrent_states_survive_on_disk(tmp_path):
    path = ORACLES / "qwen3_next"
    with gpu_core(path, num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        first = ask(core, "first", PROMPT)
        close_disk(core)
    with gpu_core(path, num_pages=60, max_running=2) as core:
        open_disk(core, tmp_path)
        again = ask(core, "again", PROMPT)
        assert (again.tokens, again.reused) == (first.tokens, 288)  # its last whole page
        close_disk(core)


def stream_four(core, change=lambda step: None) -> dict[str, list[int]]:
    prompts = {f"r{i}": PROMPT[i * 40 : i * 40 + 60 + i] for i in range(4)}
    answers = {name: Answer() for name in prompts}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, 80))
    for step in range(10_000):
        if not core.has_work():
            break
        for output in core.settle() if step % 8 == 7 else []:
            answers[output.request_id].take(output)
        if step % 8 == 7:
            change(step)
        for output in core.step() if core.has_work() else []:
            answers[output.request_id].take(output)
        check_pages(core)
    assert all(answer.finish for answer in answers.values())
    return {name: answer.tokens for name, answer in answers.items()}


def test_a_budget_is_halved_restored_and_refused_under_four_streams():
    big, half = (100_000, 32), (50_000, 16)
    with gpu_core(num_pages=big[0], max_pages=big[0], max_running=4, host_pages=64) as core:
        calm = stream_four(core)
        core.held.forget_all()
        graphs = dict(core.runner._graphs)
        used, held, refused = [], [], 0

        def change(step: int) -> None:
            nonlocal refused
            resize(core, *(half if step // 8 % 2 else big))
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
            held.append(held_bytes(torch.device("cuda:0")))  # others come and go
            if core.roster.longest_tokens() > 2 * core.kv.page_tokens:
                with pytest.raises(BudgetExceeded):
                    resize(core, 2, 0)
                refused += 1
            assert core.pages.num_pages in (half[0], big[0])

        assert stream_four(core, change) == calm
        assert refused > 4 and core.runner._graphs == graphs
        moved = (big[0] - half[0]) * core.kv.page_bytes
        assert max(used) - min(used) > 0.9 * moved
        bigs = held[0::2]
        assert max(bigs) - min(bigs) < 64 * MiB, "memory leaks from change to change"


async def test_a_loaded_model_follows_vram_budgets():
    flags = {"model": str(MODEL), "device": "cuda:0", "dtype": "float32", "vram": "4G"}
    config = load_config({**flags, "kv_tokens": "500000", "host_kv": "64M"}, {})
    prepared = prepare(MODEL, config)
    assert prepared.plan.host_kv_bytes > 60 * MiB
    loaded = load_engine(config, prepared, lambda *_: None, lambda: False)
    memory = ElasticMemory(config, prepared, loaded)
    engine = loaded.handle

    async def tokens(name: str) -> list[int]:
        found: list[int] = []
        one = EngineRequest(name, tuple(PROMPT), 20, Sampling(temperature=0.0))
        async for output in engine.submit(one):
            assert output.error is None, output
            found += output.tokens
        return found

    try:
        first = await tokens("first")
        before = torch.cuda.mem_get_info()[0]
        done = await memory.apply(Change(kv_tokens=100_000))
        assert done.kv_tokens == 100_000
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed > 0.9 * 400_000 / 16 * prepared.plan.page_bytes
        assert await tokens("second") == first
        await memory.apply(Change(vram=Amount(bytes=5 * GiB), kv_tokens=400_000))
        with pytest.raises(BudgetExceeded, match="is its budget"):
            await memory.apply(Change(vram=Amount(bytes=1 * GiB)))
        assert await tokens("third") == first
        await memory.apply(Change(vram="auto"))
        await memory.rebalance()
        assert await tokens("fourth") == first
    finally:
        await loaded.handle.close()
