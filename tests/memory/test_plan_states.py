"""Recurrent states in the memory plan: a fixed number of bytes for each sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ftd.config import Config
from ftd.errors import BudgetExceeded
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kv.state_cache import StateCache, slot_bytes
from ftd.memory.machine import Gpu, Machine
from ftd.memory.plan import MemoryPlan
from ftd.memory.planner import KEPT_STATES, plan_memory
from ftd.model.qwen3_5_moe import Qwen3_5Moe
from ftd.units import Amount, GiB

TINY = Path(__file__).parents[1] / "data" / "oracles" / "qwen3_5_moe" / "config.json"
# as published; card 5.3 of the project's notes on models
QWEN_35B = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
DENSE = 5 * GiB
STATE = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # 61.4 MiB


def spec():
    config = json.loads(TINY.read_text())
    return Qwen3_5Moe().spec(config | {"text_config": config["text_config"] | QWEN_35B})


def plan(available: int, started: MemoryPlan | None = None, gpu=None, **settings) -> MemoryPlan:
    layout = expert_layout(FORMATS["bf16"], 2048, 512)
    machine = Machine(16, available, available, "the machine", (0,), "madvise")
    if "vram" in settings:
        settings["vram"] = Amount(bytes=settings["vram"])
    config = Config(**settings)
    return plan_memory(spec(), layout, DENSE, config, machine, gpu, started)


def test_keys_and_values_are_of_the_layers_that_attend():
    assert spec().kv_bytes_per_token == 10 * 2 * 2 * 256 * 2


def test_a_sequence_has_a_state_of_fixed_size_whatever_its_length():
    assert slot_bytes(spec(), 2) == STATE
    for context in (1024, 262144):
        p = plan(128 * GiB, context=context)
        assert p.num_states == (2 + KEPT_STATES) * 8
        assert p.states_bytes == p.num_states * STATE
        assert p.total_bytes <= p.available_bytes
    assert ("states", p.states_bytes) in [(name, size) for name, size, _ in p.device_rows()]


def test_states_to_resume_from_take_a_share_and_those_of_sequences_come_first():
    least = plan(128 * GiB).pool_bytes + DENSE + 4 * GiB
    p = plan(least, max_running=4)
    assert 2 * 4 < p.num_states < (2 + KEPT_STATES) * 4
    with pytest.raises(BudgetExceeded, match=r"needs .* is available") as refused:
        plan(least, max_running=64)
    assert "--max-running" in refused.value.hint
    assert plan(least, max_running=1).num_states >= 2


def test_a_later_plan_leaves_states_as_they_are():
    p = plan(128 * GiB)
    again = plan(96 * GiB, p)
    assert (again.num_states, again.states_bytes) == (p.num_states, p.states_bytes)


def test_the_cache_takes_what_was_planned():
    cache = StateCache(spec(), 3, torch.bfloat16)
    assert cache.slot_bytes == STATE
    assert len(cache.layers) == 30
    last = cache.layers[29]
    assert last.tail - last.recurrent == 32 * 128 * 128 * 4
    assert cache.slot_bytes - last.tail == 3 * 8192 * 2
    assert [int(cache.layers[0].address[slot]) for slot in range(3)] == [
        cache.slot(slot).data_ptr() for slot in range(3)
    ]
    cache.slot(1)[last.recurrent :] = 7
    assert not cache.slot(0).any() and not cache.slot(2).any()
    copy = cache.slot(1).clone()
    cache.slot(2)[:] = copy
    assert (cache.slot(2)[last.recurrent :] == 7).all()
    cache.close()


def test_a_gpu_has_the_states_of_running_sequences_and_the_host_those_to_resume_from():
    gpu = Gpu(0, "a GPU", "GPU-1", (8, 9), total_bytes=24 * GiB, free_bytes=23 * GiB)
    p = plan(256 * GiB, gpu=gpu, vram=20 * GiB, max_running=3)
    assert (p.vram.num_states, p.vram.states_bytes) == (6, 6 * STATE)
    assert p.num_states == 6 + 3 * KEPT_STATES
    assert ("states", 6 * STATE) in [row[:2] for row in p.device_rows()]
    assert p.vram.total_bytes <= p.vram.budget_bytes
    on_host = p.table().split("host memory")[1]
    assert "48 to resume from" in on_host and f"{3 * KEPT_STATES * STATE:,} B" in on_host
    assert plan(256 * GiB, p, gpu=gpu, vram=20 * GiB, max_running=3) == p
    # of its rows the residual stream and what the widest layer has at once; logits are more
    rows = p.prefill_chunk + 3
    assert p.vram.workspace_bytes < rows * (4 * 2048 + 35_000) * 4 + 1 * GiB
    without = plan(256 * GiB, gpu=gpu, vram=20 * GiB, max_running=1)
    assert without.num_slots > p.num_slots
    with pytest.raises(BudgetExceeded) as refused:
        plan(256 * GiB, gpu=gpu, vram=8 * GiB, max_running=64)
    assert "--max-running: 7.68 GiB are for it" in refused.value.hint
