"""Ranges that grow and shrink, under a driver made of ordinary memory: nothing is lost or leaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from cuda_core import cuda_core
from driving import Answer, check_pages, comparable
from fake_driver import FakeDriver
from test_contract import requests

from ftd.cuda.kv import CudaKvCache
from ftd.cuda.memory import DeviceMemory
from ftd.engine.resize import resize
from ftd.errors import BudgetExceeded
from ftd.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec

CPU = torch.device("cpu")
CHUNK = 4096
MODEL = Path(__file__).parents[1] / "data" / "oracles" / "qwen3_moe"


def test_addresses_stay_and_every_chunk_goes_back():
    cu = FakeDriver(8 * CHUNK)
    memory = DeviceMemory(CPU, CHUNK, cu)
    room = memory.reserve(20 * CHUNK, CHUNK + 1)
    address = room.address
    assert room.mapped_bytes == 2 * CHUNK == cu.created_bytes
    room.bytes().fill_(7)
    room.resize(5 * CHUNK)
    assert room.address == address and (room.bytes()[: 2 * CHUNK] == 7).all()
    room.resize(CHUNK)
    assert (room.bytes() == 7).all()
    assert cu.created_bytes == 5 * CHUNK and memory.free_bytes == 4 * CHUNK
    memory.trim()
    assert cu.created_bytes == CHUNK and memory.free_bytes == 0
    room.close()
    room.close()
    assert cu.created_bytes == 0 and not cu.ranges


def test_a_range_that_cannot_grow_is_as_it_was():
    cu = FakeDriver(4 * CHUNK)
    memory = DeviceMemory(CPU, CHUNK, cu)
    one, two = memory.reserve(9 * CHUNK, CHUNK), memory.reserve(9 * CHUNK, CHUNK)
    with pytest.raises(BudgetExceeded, match="refuses"):
        one.resize(4 * CHUNK)
    assert (one.mapped_bytes, two.mapped_bytes, cu.created_bytes) == (CHUNK, CHUNK, 2 * CHUNK)
    one.resize(3 * CHUNK)
    with pytest.raises(BudgetExceeded):
        memory.reserve(CHUNK, CHUNK)
    assert cu.created_bytes == 4 * CHUNK
    one.close()
    two.close()
    assert cu.created_bytes == 0 and not cu.ranges


def test_what_one_range_gives_up_another_takes_without_the_driver():
    cu = FakeDriver(6 * CHUNK)
    memory = DeviceMemory(CPU, CHUNK, cu)
    slots, pages = memory.reserve(9 * CHUNK, 4 * CHUNK), memory.reserve(9 * CHUNK, 2 * CHUNK)
    created = set(cu.chunks)
    for _ in range(3):
        slots.resize(CHUNK)
        pages.resize(5 * CHUNK)
        pages.resize(2 * CHUNK)
        slots.resize(4 * CHUNK)
    assert set(cu.chunks) == created and memory.free_bytes == 0
    slots.close()
    pages.close()
    assert not cu.chunks and not cu.ranges


def small_cache(cu: FakeDriver) -> CudaKvCache:
    layer = LayerSpec(AttentionSpec(8, 2, 64, rope=None, softmax_scale=1.0), DenseSpec(16))
    spec = ModelSpec("test", 32, 100, (layer,) * 3, 1e-6, True, 1024, (0,))
    return CudaKvCache(spec, 3, 4, torch.float32, DeviceMemory(CPU, CHUNK, cu), max_pages=40)


def test_a_page_is_one_run_of_bytes_of_which_each_layer_sees_its_part():
    cache = small_cache(FakeDriver(10**6))
    for i, tensor in enumerate(tensor for both in zip(cache.k, cache.v) for tensor in both):
        for page in range(4):
            tensor[page * cache.page_stride] = 10 * page + i
    for page in range(4):
        values = [cache.pages[page, i].unique().tolist() for i in range(6)]
        assert values == [[10 * page + i] for i in range(6)]
    cache.copy(1, 2, 3)
    assert (cache.pages[2, :, :3] == cache.pages[1, :, :3]).all()
    assert (cache.pages[2, 0, 3] == 20).all()
    cache.close()


def test_pages_keep_what_they_hold_and_new_ones_are_numbers():
    cu = FakeDriver(10**6)
    cache = small_cache(cu)
    addresses = [tensor.data_ptr() for tensor in (*cache.k, *cache.v)]
    cache.pages[1:4] = 5.0
    cache.resize(30)
    assert (cache.pages[1:4] == 5).all() and not cache.pages[4:31].any()
    cache.move([(3, 20)])
    cache.resize(20)
    assert (cache.pages[20] == 5).all()
    assert [tensor.data_ptr() for tensor in (*cache.k, *cache.v)] == addresses
    with pytest.raises(AssertionError):
        cache.resize(41)
    cache.close()
    assert cu.created_bytes == 0


def test_a_cache_that_cannot_grow_is_as_it_was():
    cu = FakeDriver(20 * CHUNK)
    cache = small_cache(cu)
    before = cu.created_bytes
    with pytest.raises(BudgetExceeded):
        cache.resize(40)
    assert (cache.num_pages, cu.created_bytes) == (3, before)
    assert not cache.pages[:4].any()
    cache.close()


def test_without_a_driver_a_pool_cannot_grow():
    layer = LayerSpec(AttentionSpec(8, 1, 64, rope=None, softmax_scale=1.0), DenseSpec(16))
    spec = ModelSpec("test", 32, 100, (layer,), 1e-6, True, 1024, (0,))
    cache = CudaKvCache(spec, 3, 4, torch.float32, DeviceMemory(CPU), max_pages=40)
    assert cache.max_pages == 3
    cache.resize(2)
    cache.resize(3)
    cache.close()


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple]:
    with cuda_core(MODEL, num_pages=40, max_running=1) as core:
        found: dict[str, tuple] = {}
        for one in requests():
            core.tree.clear()
            answer = {one.request_id: Answer()}
            core.add(one)
            while core.has_work():
                for output in core.step():
                    answer[output.request_id].take(output)
            found |= comparable(answer)
        return found


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_equal_while_device_memory_comes_and_goes(alone, seed):
    rng, cu = random.Random(seed), FakeDriver(2**28)
    with cuda_core(
        MODEL, slots=9, num_pages=40, max_running=6, prefill_chunk=24, cu=cu, max_pages=120
    ) as core:
        answers = {one.request_id: Answer() for one in requests()}
        arriving, moved = list(requests()), 0
        while arriving or core.has_work():
            if arriving and rng.random() < 0.5:
                core.add(arriving.pop(0))
            if rng.random() < 0.3:
                outputs = core.settle()
                for output in outputs:
                    answers[output.request_id].take(output)
                done = resize(core, rng.choice([13, 17, 40, 120]), rng.choice([0, 1, 9, 32]))
                moved += done.pages_moved
            if core.has_work():
                for output in core.step():
                    answers[output.request_id].take(output)
            check_pages(core)
        assert moved
    assert comparable(answers) == alone
    assert cu.created_bytes == 0


@pytest.mark.parametrize("pinned", [True, False])
def test_experts_that_leave_leave_a_staging_area(alone, pinned):
    greedy = [one for one in requests() if one.sampling.temperature == 0]
    cu = FakeDriver(2**28)
    with cuda_core(
        MODEL, slots=32, staging=0, num_pages=40, max_running=4, cu=cu, pinned=pinned
    ) as core:
        record = core.experts._layout.record_bytes
        before = cu.created_bytes
        if not pinned:
            with pytest.raises(BudgetExceeded, match="not registered"):
                resize(core, 40, 9)
        resize(core, 40, 9, 5)
        assert before - cu.created_bytes > (32 - 9 - 5) * record - 3 * CHUNK
        answers = {one.request_id: Answer() for one in greedy}
        for one in greedy:
            core.add(one)
        while core.has_work():
            for output in core.step():
                answers[output.request_id].take(output)
        assert comparable(answers) == {name: alone[name] for name in answers}
        assert core.status().expert_misses
        resize(core, 40, 32, 0)
        assert abs(cu.created_bytes - before) <= CHUNK
