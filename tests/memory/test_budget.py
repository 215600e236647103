"""Budgets asked for while serving: what they mean, and that refusals name numbers that work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.config import Config
from ftd.errors import BudgetExceeded, ConfigError, FtdError
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.memory.budget import Bounds, plan_change, settings_for
from ftd.memory.change import Change
from ftd.memory.machine import Gpu, Machine
from ftd.memory.planner import plan_memory
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from ftd.units import Amount, GiB, MiB

LAYER = LayerSpec(AttentionSpec(32, 4, 128, None, 0.1), MoeSpec(128, 8, 768, True))
SPEC = ModelSpec("qwen3_moe", 2048, 151936, (LAYER,) * 48, 1e-6, False, 40960, (1,))
LAYOUT = expert_layout(FORMATS["bf16"], 2048, 768)
H200 = Gpu(0, "H200", "GPU-0", (9, 0), 140 * GiB, 139 * GiB)


def planner(gpu: Gpu | None = None, available: int = 96 * GiB):
    machine = Machine(16, available, available, "the machine", (0,), "madvise")
    return lambda config: plan_memory(SPEC, LAYOUT, 3_080_000_000, config, machine, gpu)


def bounds(plan, longest: int = 0, most_pages: int = 2**20) -> Bounds:
    return Bounds(longest, plan.most_vram_bytes, most_pages, SPEC.context)


def test_what_is_not_given_stays():
    config = Config(vram=Amount(bytes=8 * GiB), kv_tokens=4096)
    plan = planner()(config)
    assert settings_for(config, Change(), plan) == config
    new = settings_for(config, Change(expert_slots=100), plan)
    assert (new.vram, new.kv_tokens, new.expert_slots) == (config.vram, 4096, 100)
    new = settings_for(config, Change(vram=Amount(percent=50), kv_tokens="auto"), plan)
    assert (new.vram, new.kv_tokens) == (Amount(percent=50), "auto")


def test_auto_without_a_budget_keeps_the_sum():
    config = Config(kv_tokens=16384, expert_slots=300)
    plan = planner()(config)
    new = settings_for(config, Change(auto=True), plan)
    assert new.vram == Amount(bytes=plan.kv_bytes + plan.slots_bytes)
    again = planner()(new)
    assert again.kv_bytes + again.slots_bytes <= plan.kv_bytes + plan.slots_bytes


def test_auto_and_numbers_contradict():
    with pytest.raises(ConfigError, match="--kv-tokens"):
        settings_for(Config(), Change(kv_tokens=100, auto=True), planner()(Config()))


NUMBERS = re.compile(r"--([a-z-]+) (\d+)(M?) or (more|less)")


@settings(deadline=None, max_examples=60)
@given(
    on_gpu=st.booleans(),
    vram=st.one_of(st.none(), st.integers(64, 160 * 1024)),
    kv_tokens=st.one_of(st.just("auto"), st.integers(16, 2**21)),
    slots=st.one_of(st.just("auto"), st.integers(0, 7000)),
    context=st.sampled_from(["auto", 4096, 32768]),
    longest=st.sampled_from([0, 1000, 30000]),
)
def test_a_refusal_names_numbers_that_work(on_gpu, vram, kv_tokens, slots, context, longest):
    plan_with = planner(H200 if on_gpu else None)
    config = Config(
        vram=None if vram is None else Amount(bytes=vram * MiB),
        kv_tokens=kv_tokens,
        expert_slots=slots,
        context=context,
    )
    limits = bounds(plan_with(Config()), longest, most_pages=2**16)
    try:
        plan = plan_change(plan_with, config, limits)
    except FtdError as refusal:
        said = refusal.hint if refusal.hint.startswith("what works: ") else ""
        for name, number, mega, way in NUMBERS.findall(said):
            field, n = name.replace("-", "_"), int(number)
            page = 1 if mega or field == "expert_slots" else 16
            near = n - page if way == "more" else n + page
            value, beyond = (Amount(bytes=m * MiB) if mega else m for m in (n, near))
            assert plan_change(plan_with, replace(config, **{field: value}), limits)
            with pytest.raises(FtdError):
                plan_change(plan_with, replace(config, **{field: beyond}), limits)
    else:
        assert plan.kv_tokens > longest
        assert plan.num_pages <= 2**16
        assert context in ("auto", plan.context_tokens)


def test_the_smallest_budget_and_the_largest_context_are_told():
    config = Config(context=32768, vram=Amount(bytes=2 * GiB))
    with pytest.raises(BudgetExceeded) as refused:
        plan_change(planner(), config, bounds(planner()(Config())))
    assert "--vram 3072M or more" in refused.value.hint
    assert "ftd --context 21840 or less" in refused.value.hint


def test_no_slots_at_all_have_no_bound():
    limits = bounds(planner()(Config()))
    config = Config(vram=Amount(bytes=4 * GiB), kv_tokens=2**21, expert_slots=0)
    with pytest.raises(BudgetExceeded) as refused:
        plan_change(planner(), config, limits)
    most = int(re.findall(r"--kv-tokens (\d+) or less", refused.value.hint)[0])
    with pytest.raises(BudgetExceeded) as refused:
        plan_change(planner(), replace(config, kv_tokens=most, expert_slots=9), limits)
    assert refused.value.hint.endswith("--expert-slots 0")


def test_a_request_under_way_sets_the_least():
    config = Config(kv_tokens=1024)
    with pytest.raises(BudgetExceeded, match=r"2,000 tokens.* 1,024") as refused:
        plan_change(planner(), config, bounds(planner()(Config()), longest=2000))
    assert "--kv-tokens 2001 or more" in refused.value.hint
