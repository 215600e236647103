"""The GPU's side of the plan: nothing here needs a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.config import Config
from ftd.errors import BudgetExceeded, ConfigError
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.memory.machine import Gpu, Machine
from ftd.memory.plan import MemoryPlan
from ftd.memory.planner import plan_memory
from ftd.memory.yielding import SPARE_BYTES
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from ftd.units import Amount, GiB, MiB

LAYER = LayerSpec(AttentionSpec(32, 4, 128, None, 0.1), MoeSpec(128, 8, 768, True))
QWEN_30B = ModelSpec("qwen3_moe", 2048, 151936, (LAYER,) * 48, 1e-6, False, 40960, (1,))
LAYOUT = expert_layout(FORMATS["bf16"], 2048, 768)
DENSE_BYTES = 3_080_000_000
HOST = Machine(16, 128 * GiB, 100 * GiB, "the machine", (0,), "madvise")


def plan(gpu_bytes: int, config: Config | None = None, started: MemoryPlan | None = None):
    gpu = Gpu(0, "a GPU", "GPU-0", (9, 0), gpu_bytes, gpu_bytes - 500 * MiB)
    return plan_memory(QWEN_30B, LAYOUT, DENSE_BYTES, config or Config(), HOST, gpu, started)


def test_a_gpu_that_holds_all_experts_needs_no_staging():
    p = plan(141 * GiB)
    assert p.num_slots == p.num_experts == 6144
    assert p.vram.staging_records == 0
    assert p.kv_tokens == 8 * 16384
    assert "all 6,144 experts: nothing goes over the link" in p.table()


def test_a_smaller_one_has_slots_kv_and_staging():
    p = plan(24 * GiB)
    assert 0 < p.num_slots < 6144
    assert 0 < p.vram.staging_records <= 128
    assert p.kv_tokens >= 16384
    assert p.vram.total_bytes <= p.vram.budget_bytes <= 24 * GiB


def test_a_prompt_goes_through_in_steps_as_large_as_a_small_part_of_the_budget_allows():
    def chunk(budget: int, **settings) -> int:
        return plan(24 * GiB, Config(vram=Amount(bytes=budget), **settings)).prefill_chunk

    assert [chunk(gib * GiB) for gib in (6, 10, 20)] == [2048, 4096, 8192]
    assert chunk(20 * GiB, context=3000) == 3000
    assert chunk(8 * GiB, prefill_chunk=6000) == 6000
    for mib in range(7600, 30_000, 64):  # a larger chunk never takes what KV was asked for
        budget = Amount(bytes=mib * MiB)
        assert plan(32 * GiB, Config(vram=budget, kv_tokens=32768)).num_pages == 2048
    least, most = (plan(24 * GiB, Config(vram=Amount(bytes=n * GiB))) for n in (6, 20))
    assert plan(24 * GiB, Config(vram=Amount(bytes=6 * GiB)), most).prefill_chunk == 2048
    assert plan(24 * GiB, Config(vram=Amount(bytes=20 * GiB)), least).prefill_chunk == 2048
    smaller, larger = (plan(n * GiB, Config(prefill_chunk=8192)).vram for n in (12, 24))
    assert smaller.workspace_bytes == larger.workspace_bytes


def test_the_budget_counts_everything_the_process_takes():
    p = plan(24 * GiB, Config(vram=Amount(bytes=8 * GiB)))
    assert p.vram.total_bytes <= 8 * GiB
    assert p.vram.total_bytes > 8 * GiB - LAYOUT.record_bytes
    half = plan(24 * GiB, Config(vram=Amount(percent=50)))
    assert half.vram.budget_bytes == 12 * GiB


def test_auto_leaves_what_is_kept_free_for_others():
    p = plan(24 * GiB, Config(vram="auto"))
    assert p.vram.budget_bytes == 24 * GiB - 500 * MiB - SPARE_BYTES
    assert p.vram.total_bytes <= p.vram.budget_bytes
    with pytest.raises(ConfigError, match="ftd uses none") as refused:
        plan_memory(QWEN_30B, LAYOUT, DENSE_BYTES, Config(vram="auto"), HOST)
    assert refused.value.hint == "leave --vram out, or use --vram SIZE"


def test_the_host_keeps_the_pool_and_nothing_of_the_gpu():
    p = plan(24 * GiB)
    assert p.total_bytes == p.pool_bytes + p.headroom_bytes + p.host_kv_bytes


def test_host_memory_beside_the_pool_takes_what_the_gpu_evicts():
    p = plan(24 * GiB)
    free = HOST.available_bytes - p.pool_bytes - p.headroom_bytes
    assert 0 < p.host_kv_bytes <= min(free / 4, 4 * p.kv_bytes)
    assert p.host_kv_bytes % p.page_bytes == 0 and "host KV" in p.table()
    assert plan(24 * GiB, Config(host_kv=0)).host_kv_bytes == 0
    assert plan(24 * GiB, Config(host_kv=3 * GiB)).host_kv_bytes == 3 * GiB
    with pytest.raises(BudgetExceeded, match=r"--host-kv .*: .* is free beside the experts"):
        plan(24 * GiB, Config(host_kv=200 * GiB))


def test_the_cpu_device_has_its_kv_in_host_memory_already():
    with pytest.raises(ConfigError, match="in host memory already"):
        plan_memory(QWEN_30B, LAYOUT, DENSE_BYTES, Config(host_kv=GiB), HOST)


def test_explicit_numbers_win():
    p = plan(24 * GiB, Config(expert_slots=700, kv_tokens=4096, context=2048))
    assert (p.num_slots, p.kv_tokens, p.context_tokens) == (700, 4096, 2048)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(vram=Amount(bytes=30 * GiB)), r"30\.0 GiB, of which a GPU has 23\.5 GiB free"),
        (Config(vram=Amount(bytes=3 * GiB)), r"the GPU needs .* 3\.00 GiB is its budget"),
        (Config(expert_slots=6000), r"of expert slots\), .* is its budget"),
        (Config(kv_tokens=2_000_000), r"183 GiB of KV\), .* is its budget"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(config, said):
    with pytest.raises(BudgetExceeded, match=said) as e:
        plan(24 * GiB, config)
    assert "--vram" in e.value.hint


@given(
    gpu_gib=st.integers(4, 160),
    slots=st.one_of(st.just("auto"), st.integers(0, 6144)),
    kv_tokens=st.one_of(st.just("auto"), st.integers(16, 1_000_000)),
    percent=st.one_of(st.none(), st.integers(10, 95)),
)
def test_the_parts_never_exceed_the_budget(gpu_gib, slots, kv_tokens, percent):
    vram = None if percent is None else Amount(percent=percent)
    try:
        p = plan(gpu_gib * GiB, Config(expert_slots=slots, kv_tokens=kv_tokens, vram=vram))
    except BudgetExceeded:
        return
    assert p.vram.total_bytes <= p.vram.budget_bytes
    assert p.context_tokens <= p.kv_tokens
