from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.config import Config, load_config
from ftd.errors import BudgetExceeded, ConfigError
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.memory.machine import Machine
from ftd.memory.planner import plan_memory
from ftd.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, SharedSpec
from ftd.units import Amount, GiB, MiB, parse_size


def model(*, layers=48, hidden=2048, experts=128, inner=768, kv_heads=4, context=40960,
          vocab=151936):  # fmt: skip
    attention = AttentionSpec(32, kv_heads, 128, None, 0.1)
    layer = LayerSpec(attention, MoeSpec(experts, 8, inner, True))
    return ModelSpec("qwen3_moe", hidden, vocab, (layer,) * layers, 1e-6, False, context, (1,))


QWEN_30B = model()
QWEN_30B_DENSE = 3_080_000_000
LAYOUT = expert_layout(FORMATS["bf16"], 2048, 768)


def machine(available: int) -> Machine:
    return Machine(16, available, available, "the machine", (0,), "madvise")


def plan(available: int, config: Config | None = None, spec=QWEN_30B, dense=QWEN_30B_DENSE):
    layout = expert_layout(FORMATS["bf16"], spec.hidden, spec.layers[0].mlp.inner)
    return plan_memory(spec, layout, dense, config or Config(), machine(available))


def test_the_rows_of_qwen3_30b_have_the_published_sizes():
    """models.md: 54 GiB of experts in 9 MiB records, 96 KiB of KV a token."""
    p = plan(96 * GiB)
    assert p.pool_bytes == 54 * GiB
    assert p.dense_bytes == QWEN_30B_DENSE
    assert p.kv_bytes == p.kv_tokens * 96 * 1024
    assert p.num_slots == 0
    assert p.context_tokens == 40960
    assert p.kv_tokens >= p.context_tokens


def test_a_wide_shared_expert_needs_workspace():
    spec = model()
    layer = spec.layers[0]
    wide = replace(layer, mlp=replace(layer.mlp, shared=SharedSpec(20_480, gated=True)))
    plain = plan(100 * GiB, spec=spec)
    shared = plan(100 * GiB, spec=replace(spec, layers=(wide,) * len(spec.layers)))
    routed = 3 * 8 * 768  # what eight experts of a row hold at once
    rows = plain.prefill_chunk + Config().max_running  # of a step
    more = rows * (3 * 20_480 + 2 * spec.hidden - routed) * 4
    assert shared.workspace_bytes - plain.workspace_bytes == more


def test_float32_doubles_the_kv_bytes():
    config = Config(dtype="float32", kv_tokens=4096)
    assert plan(96 * GiB, config).kv_bytes == 4096 * 2 * 96 * 1024


def test_kv_takes_at_most_its_share_once_a_whole_context_fits():
    free = 96 * GiB - plan(96 * GiB).total_bytes + plan(96 * GiB).kv_bytes
    assert plan(96 * GiB).kv_bytes <= max(free / 2, 40960 * 96 * 1024)
    assert plan(960 * GiB).kv_tokens == 8 * 16384  # enough for all that run; more is not taken


def test_less_memory_gives_a_shorter_context():
    small, smaller = plan(62 * GiB), plan(60 * GiB)
    assert smaller.context_tokens < small.context_tokens <= 40960
    assert smaller.context_tokens == smaller.kv_tokens


def test_explicit_numbers_win():
    p = plan(96 * GiB, Config(context=2048, kv_tokens=4096, expert_slots=7, prefill_chunk=128))
    assert (p.context_tokens, p.kv_tokens, p.num_slots, p.prefill_chunk) == (2048, 4096, 7, 128)


def test_a_chunk_is_no_longer_than_the_context():
    assert plan(96 * GiB, Config(context=64)).prefill_chunk == 64


def test_slots_fill_a_budget_that_is_given_and_are_off_without():
    p = plan(96 * GiB, Config(vram=Amount(bytes=8 * GiB)))
    assert p.num_slots > 0
    assert 8 * GiB - LAYOUT.record_bytes < p.kv_bytes + p.slots_bytes <= 8 * GiB
    half = plan(96 * GiB, Config(vram=Amount(percent=50)))
    assert half.total_bytes < 96 * GiB
    assert half.num_slots > p.num_slots


def test_no_more_slots_than_experts():
    spec = model(layers=2, experts=8, hidden=64, inner=32)
    assert plan(16 * GiB, Config(vram=Amount(bytes=4 * GiB)), spec, 0).num_slots == 16


@pytest.mark.parametrize(
    ("config", "said", "hint"),
    [
        (
            Config(context=100_000),
            "--context 100000: the model was trained for at most 40960 tokens",
            "use --context 40960 or less",
        ),
        (
            Config(expert_slots=7000),
            "--expert-slots 7000: the model has 6144 experts",
            "use --expert-slots 6144 or less",
        ),
    ],
)
def test_numbers_that_the_model_cannot_have(config, said, hint):
    with pytest.raises(ConfigError) as e:
        plan(96 * GiB, config)
    assert e.value.message == said
    assert e.value.hint == hint


@pytest.mark.parametrize(
    ("available", "config", "said", "hint"),
    [
        (
            32 * GiB,
            Config(),
            r"the model needs 58\.\d GiB of memory \(56\.9 GiB of weights\), 32\.0 GiB is "
            r"available, limited by the machine",
            r"free or add 26\.\d GiB, raise the memory limit",
        ),
        (
            64 * GiB,
            Config(kv_tokens=200_000),
            r"--kv-tokens 200000: 200,000 tokens of KV need 18\.3 GiB, 5\.\d\d GiB is left",
            r"use --kv-tokens \d+ or less",
        ),
        (
            60 * GiB,
            Config(context=40960),
            r"--context 40960: 40,960 tokens of KV need 3\.75 GiB, 1\.\d\d GiB is left",
            r"use --context \d+ or less",
        ),
        (
            64 * GiB,
            Config(vram=Amount(bytes=20 * GiB)),
            r"--vram 20\.0 GiB: 5\.\d\d GiB is free beside the weights",
            r"use --vram 5\d{3}M or less",
        ),
        (
            64 * GiB,
            Config(vram=Amount(bytes=MiB)),
            r"--vram 1\.00 MiB: KV needs at least 6\.00 MiB",
            r"use --vram 6144K or more",
        ),
        (
            64 * GiB,
            Config(vram=Amount(bytes=2 * GiB), expert_slots=1000),
            r"--expert-slots 1000: they need 8\.79 GiB, 2\.00 GiB is there for slots and KV",
            r"use --expert-slots 226",
        ),
    ],
)
def test_what_does_not_fit_names_the_number_to_change(available, config, said, hint):
    with pytest.raises(BudgetExceeded) as e:
        plan(available, config)
    assert re.fullmatch(said, e.value.message), e.value.message
    assert re.match(hint, e.value.hint), e.value.hint


def test_a_refusal_names_who_gave_the_number():
    config = load_config({}, {"FTD_KV_TOKENS": "200000"})
    with pytest.raises(BudgetExceeded, match="FTD_KV_TOKENS = 200000: "):
        plan(64 * GiB, config)


def follow(hint: str, config: Config, m: Machine) -> tuple[Config, Machine]:
    """Do what a hint says."""
    if needed := re.search(r"so that (\d+[KMGT]?) are available", hint):
        return config, replace(m, available_bytes=parse_size(needed[1]))
    found = re.findall(r"--([a-z-]+) (\d+[KMGT]?)", hint)
    changes = {name.replace("-", "_"): parse_size(n) for name, n in found}
    assert changes, hint
    if "vram" in changes:
        changes["vram"] = Amount(bytes=changes["vram"])
    return replace(config, **changes), m


SPECS = st.builds(
    model,
    layers=st.integers(1, 60),
    hidden=st.sampled_from([64, 2048]),
    experts=st.integers(1, 128),
    inner=st.sampled_from([16, 768]),
    kv_heads=st.integers(1, 8),
    context=st.sampled_from([64, 512, 4096, 262144]),
    vocab=st.sampled_from([512, 151936]),
)
CONFIGS = st.builds(
    Config,
    context=st.just("auto") | st.integers(16, 64),
    kv_tokens=st.just("auto") | st.integers(64, 10**6),
    expert_slots=st.just("auto") | st.integers(0, 10_000),
    vram=st.none()
    | st.builds(Amount, bytes=st.integers(1, 100 * GiB))
    | st.builds(Amount, percent=st.floats(0.01, 100)),
    prefill_chunk=st.just("auto") | st.integers(1, 2048),
    max_running=st.integers(1, 64),
    dtype=st.sampled_from(["auto", "bfloat16", "float32"]),
) | st.builds(Config, context=st.integers(16, 262144), expert_slots=st.integers(0, 10_000))


@settings(max_examples=150)
@given(SPECS, CONFIGS, st.integers(0, 100 * GiB), st.integers(0, 4 * GiB))
def test_a_plan_stays_within_memory_and_what_a_refusal_suggests_works(
    spec, config, available, dense
):
    layout = expert_layout(FORMATS["bf16"], spec.hidden, spec.layers[0].mlp.inner)
    m = machine(available)
    for _ in range(6):  # five numbers can be wrong one after the other
        try:
            p = plan_memory(spec, layout, dense, config, m)
            break
        except (BudgetExceeded, ConfigError) as e:
            config, m = follow(e.hint, config, m)
    else:
        raise AssertionError("the hints lead nowhere")
    assert p.total_bytes <= m.available_bytes
    assert p.context_tokens <= min(spec.context, p.kv_tokens)
    assert p.num_slots <= p.num_experts
    if config.vram and config.vram.bytes:
        assert p.kv_bytes + p.slots_bytes <= config.vram.bytes
    for name, got in (("context", p.context_tokens), ("expert_slots", p.num_slots)):
        if getattr(config, name) != "auto":
            assert got == getattr(config, name)
    if config.kv_tokens != "auto":
        assert 0 <= p.kv_tokens - config.kv_tokens < p.page_tokens


def test_the_table_shows_every_row_in_bytes():
    p = plan(96 * GiB, Config(vram=Amount(bytes=8 * GiB)))
    table = p.table()
    for number in (p.dense_bytes, p.pool_bytes, p.workspace_bytes, p.kv_bytes, p.slots_bytes,
                   p.headroom_bytes, p.total_bytes, p.available_bytes):  # fmt: skip
        assert f"{number:,} B" in table
    assert "context 40,960" in table
    assert "limited by the machine" in table
    rows = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) B", table)]
    assert sum(rows[:6]) == rows[6]
