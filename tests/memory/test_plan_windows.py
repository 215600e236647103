"""Layers with a window in the plan: a fixed row, and more context for the same bytes of KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftd.config import Config
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.memory.machine import Gpu, Machine
from ftd.memory.plan import MemoryPlan
from ftd.memory.planner import plan_memory
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from ftd.units import Amount, GiB

LAYER = LayerSpec(AttentionSpec(32, 4, 128, None, 0.1), MoeSpec(128, 8, 768, True))
QWEN_30B = ModelSpec("qwen3_moe", 2048, 151936, (LAYER,) * 48, 1e-6, False, 40960, (1,))
LAYOUT = expert_layout(FORMATS["bf16"], 2048, 768)
DENSE_BYTES = 3_080_000_000
HOST = Machine(16, 128 * GiB, 100 * GiB, "the machine", (0,), "madvise")
WINDOWED = replace(LAYER, mixer=replace(LAYER.attention, window=128))
ALTERNATING = replace(QWEN_30B, layers=(WINDOWED, LAYER) * 24)


def plan(spec: ModelSpec, on_gpu: bool, **settings: object) -> MemoryPlan:
    gpu = Gpu(0, "a GPU", "GPU-0", (9, 0), 24 * GiB, 24 * GiB) if on_gpu else None
    return plan_memory(spec, LAYOUT, DENSE_BYTES, Config(**settings), HOST, gpu)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_same_bytes_of_kv_hold_twice_the_context(on_gpu):
    whole, half = (plan(spec, on_gpu, kv_tokens=32768) for spec in (QWEN_30B, ALTERNATING))
    assert 2 * half.kv_bytes == whole.kv_bytes
    fewer = plan(ALTERNATING, on_gpu, kv_tokens=65536)
    assert fewer.kv_bytes == whole.kv_bytes and fewer.context_tokens == 40960


@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_says_what_windows_take_and_how_many_can_be_resumed_from(on_gpu):
    p = plan(ALTERNATING, on_gpu, max_running=4)
    table = p.table()
    assert "window KV" in table and "layers with a window of 128 tokens: 24" in table
    token_bytes = 24 * 2 * 4 * 128 * 2
    assert p.window_bytes == p.num_window_pages * 16 * token_bytes
    assert f"{p.window_bytes:,} B" in table
    seen = 127 // 16 + 2
    assert p.num_window_pages > 4 * seen + p.prefill_chunk // 16
    assert 0 < p.num_states <= 4 * 16
    assert p.states_bytes == p.num_states * 127 * token_bytes
    assert "to resume from" in table


def test_windows_are_part_of_the_budget():
    p = plan(ALTERNATING, True, vram=Amount(bytes=8 * GiB))
    assert 8 * GiB - LAYOUT.record_bytes < p.vram.total_bytes <= 8 * GiB
    rows = sum(num_bytes for _, num_bytes, _ in p.device_rows())
    assert rows == p.vram.total_bytes


def test_a_model_without_windows_has_no_such_row():
    p = plan(QWEN_30B, True)
    assert p.windowing is None and p.window_bytes == 0 and "window KV" not in p.table()
