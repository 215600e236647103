"""Experts on the CPU device: equal answers for any slots, and books that balance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.experts.costs import Allowance
from ftd.experts.host_pool import HostPool
from ftd.experts.residents import DECODE_TOKENS
from ftd.experts.runtime import ExpertRuntime
from ftd.experts.slots import EMPTY
from ftd.experts.trace import TraceRecorder
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import TorchOps
from ftd.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec

H, INNER, E, K = 16, 12, 6, 2
ATTENTION = AttentionSpec(1, 1, 16, None, 1.0)
MOE = LayerSpec(ATTENTION, MoeSpec(E, K, INNER, True))
DENSE = LayerSpec(ATTENTION, DenseSpec(32))
SPEC = ModelSpec("test", H, 8, (DENSE, MOE, MOE, DENSE, MOE), 1e-6, True, 64, (0,))
LAYERS = SPEC.moe_layers
LAYOUT = expert_layout(FORMATS["f32"], H, INNER)
ALL = len(LAYERS) * E
OPS = TorchOps()


@pytest.fixture(scope="module")
def pool():
    pool = HostPool(len(LAYERS), E, LAYOUT, LAYERS)
    random = np.random.default_rng(1)
    for layer in LAYERS:
        for expert in range(E):
            record = pool.record(layer, expert)
            record[:] = random.integers(0, 256, record.size, np.uint8)  # padding too
            numbers = record[: LAYOUT.payload_bytes].view(np.float32)
            numbers[:] = random.standard_normal(numbers.size, np.float32) * 0.2
    yield pool
    pool.close()


def routes(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(tokens)]).int()
    ids[torch.rand(tokens, K, generator=g) < 0.1] = -1
    return x, ids, torch.rand(tokens, K, generator=g)


def step(runtime: ExpertRuntime, seed: int, tokens: int, layers=LAYERS) -> list[torch.Tensor]:
    return [runtime.forward(n, *routes(seed * 31 + n, tokens)) for n in layers]


def poison_free_slots(runtime: ExpertRuntime) -> None:
    """NaN in every slot that holds nobody: a read of one shows in the answer."""
    for slot in range(runtime._table.num_slots):
        if runtime._table.owner(slot) == EMPTY:
            runtime._memory.record(slot)[:] = 0xFF


def check_books(runtime: ExpertRuntime, pool: HostPool) -> None:
    """Every address leads to the whole record of its expert; the snapshot counts what is there."""
    for row, layer in enumerate(LAYERS):
        for expert in range(E):
            slot = int(runtime._table.residency[row, expert])
            home = pool.address(layer, expert)
            want = home if slot == EMPTY else runtime._memory.address(slot)
            assert runtime._rows[row][expert] == want
            if slot != EMPTY:
                held = runtime._memory.record(slot)
                np.testing.assert_array_equal(held, pool.record(layer, expert))
    counters = runtime.counters()
    assert counters.slots_used == (runtime._table.residency != EMPTY).sum()
    assert counters.misses == counters.fetched + counters.on_cpu
    assert counters.fills - counters.evicted == counters.slots_used
    assert counters.fill_bytes == counters.fills * LAYOUT.record_bytes
    assert not runtime._table.filling


actions = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, DECODE_TOKENS)),
    st.tuples(st.just("prefill"), st.integers(DECODE_TOKENS + 1, 30)),
    st.tuples(st.just("fail"), st.integers(1, 30)),
    st.tuples(st.just("resize"), st.integers(0, ALL)),
    st.tuples(st.just("idle"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(
    num_slots=st.integers(0, ALL),
    fetch_of=st.sampled_from([None, (0, 0, 0, 1, 1, 2, 2), (0,)]),
    allowance=st.sampled_from([Allowance(0, 0), Allowance(3, 0.1)]),
    script=st.lists(actions, min_size=1, max_size=25),
    seed=st.integers(0, 10_000),
)
def test_answers_are_equal_bit_by_bit_whatever_is_resident(
    pool, num_slots, fetch_of, allowance, script, seed
):
    runtime = ExpertRuntime(
        SPEC, LAYOUT, pool, OPS, num_slots, fetch_of=fetch_of, allowance=allowance
    )
    plain = ExpertRuntime(SPEC, LAYOUT, pool, OPS)
    for n, (action, amount) in enumerate(script):
        poison_free_slots(runtime)
        if action == "resize":
            runtime.resize(amount)
        elif action == "idle":
            runtime.safe_point()
        elif action == "fail":
            before = runtime._table.residency.copy()
            step(runtime, seed + n, amount, LAYERS[: 1 + n % len(LAYERS)])
            runtime.abandon_step()
            appeared = (runtime._table.residency != EMPTY) & (before == EMPTY)
            assert not appeared.any()
        else:
            before = runtime._table.residency.copy()
            for got, want in zip(step(runtime, seed + n, amount), step(plain, seed + n, amount)):
                assert torch.equal(got, want)
            if action == "decode":
                np.testing.assert_array_equal(runtime._table.residency, before)
            runtime.safe_point()
        check_books(runtime, pool)
    runtime.close()


def test_a_new_split_counts_from_the_next_step_on(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, 1)
    step(runtime, 1, 1)
    runtime.safe_point()
    assert runtime.counters().on_cpu == 0
    nothing, all_of_them = (0,), range(E + 1)
    runtime.split([nothing, nothing, all_of_them, nothing])
    for rows in (1, 2, 5, 8, 3, 4):
        before = runtime.counters()
        step(runtime, rows, rows)
        runtime.safe_point()
        after = runtime.counters()
        over_link = rows in (3, 4)
        assert (after.on_cpu == before.on_cpu) == over_link, rows
        assert (after.fetched == before.fetched) == (not over_link), rows
    runtime.close()


def test_without_slots_routing_is_never_looked_at(pool):
    class Echo(TorchOps):
        def moe(self, x, ids, weights, address, layout, activation):
            return ids, address

    runtime = ExpertRuntime(SPEC, LAYOUT, pool, Echo())
    opaque = object()
    for _ in range(2):
        got, address = runtime.forward(LAYERS[1], None, opaque, None)
        assert got is opaque and torch.equal(address, pool.addresses(LAYERS[1]))
        runtime.safe_point()
    assert runtime.counters() == type(runtime.counters())()


def test_hits_and_misses_are_distinct_experts_of_a_layer(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, ALL, allowance=Allowance(0, 0))
    ids = torch.tensor([[0, 1], [1, 2], [-1, -1]], dtype=torch.int32)
    for _ in range(2):
        runtime.forward(LAYERS[0], torch.zeros(3, H), ids, torch.ones(3, K))
        runtime.safe_point()
    counters = runtime.counters()
    assert (counters.misses, counters.hits, counters.fetched, counters.on_cpu) == (3, 3, 3, 0)
    assert counters.slots_used == 3


def test_split_sends_the_rest_to_the_cpu_and_stores_only_what_was_fetched(pool):
    runtime = ExpertRuntime(
        SPEC, LAYOUT, pool, OPS, ALL, fetch_of=(0, 0, 1, 1), allowance=Allowance(0, 0)
    )
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    runtime.forward(LAYERS[0], torch.zeros(2, H), ids, torch.ones(2, K))
    runtime.safe_point()
    counters = runtime.counters()
    assert (counters.misses, counters.fetched, counters.on_cpu, counters.fills) == (4, 1, 3, 1)


def test_with_room_for_all_nothing_misses_in_the_end(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, ALL)
    for seed in range(30):
        step(runtime, seed, 8)
        runtime.safe_point()
    before = runtime.counters()
    step(runtime, 99, 8)
    runtime.safe_point()
    assert runtime.counters().misses == before.misses and before.evicted == 0
    assert before.slots_used == before.slots_total == ALL


def prompt(runtime: ExpertRuntime, layer: int, experts: list[int], rows: int) -> None:
    """Rows that all use the same experts."""
    ids = torch.tensor([experts] * rows, dtype=torch.int32)
    runtime.forward(layer, torch.zeros(rows, H), ids, torch.ones(rows, K))


def test_prefill_evicts_behind_itself_and_spares_what_it_has_not_read(pool):
    first, middle, last = range(3)
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, 4, allowance=Allowance(0, 0))
    for row in (first, last):
        prompt(runtime, LAYERS[row], [0, 1], 10)
    runtime.safe_point()
    residency = runtime._table.residency
    assert (residency[first, :2] != EMPTY).all() and (residency[last, :2] != EMPTY).all()
    prompt(runtime, LAYERS[first], [2, 3], 60)  # misses: nobody is behind, so nobody leaves
    assert runtime._table.num_used == 4
    prompt(runtime, LAYERS[middle], [4, 5], 60)
    assert (residency[first] == EMPTY).all()  # read already, and not used by this text
    assert (residency[last, :2] != EMPTY).all()  # as little used, but yet to be read
    runtime.safe_point()
    assert np.flatnonzero(residency[middle] != EMPTY).tolist() == [4, 5]
    check_books(runtime, pool)


def test_prefill_admits_the_hottest_of_what_it_streamed(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, 2, allowance=Allowance(0, 0))
    ids = torch.tensor([[0, 1]] * 3 + [[2, 3]] * 12 + [[4, 5]] * 5, dtype=torch.int32)
    runtime.forward(LAYERS[0], torch.zeros(20, H), ids, torch.ones(20, K))
    runtime.safe_point()
    assert np.flatnonzero(runtime._table.residency[0] != EMPTY).tolist() == [2, 3]


def test_shrinking_keeps_the_most_valuable(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, 4, allowance=Allowance(0, 0))
    for n in range(40):  # for long nothing was wanted
        ids = torch.tensor([[0, 1]] if n % 4 else [[2, 3]], dtype=torch.int32)
        runtime.forward(LAYERS[0], torch.zeros(1, H), ids, torch.ones(1, K))
        runtime.safe_point()
    resized = runtime.resize(2)
    assert sorted(resized.evicted) == [2, 3]
    assert np.flatnonzero(runtime.residency_map().slot[0] != EMPTY).tolist() == [0, 1]
    runtime.resize(ALL)
    check_books(runtime, pool)


def test_an_abandoned_step_leaves_no_count_and_no_record(pool):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, 4)
    recorder = TraceRecorder(len(LAYERS), E, 10)
    runtime.record_trace(recorder)
    values = runtime.residency_map().value
    step(runtime, 1, 20)
    runtime.abandon_step()
    runtime.safe_point()
    counters = runtime.counters()
    assert (counters.hits, counters.misses, counters.fills, counters.slots_used) == (0, 0, 0, 0)
    np.testing.assert_array_equal(runtime.residency_map().value, values)
    assert recorder.num_tokens == 0


@pytest.mark.parametrize("num_slots", [0, 4])
def test_trace_holds_the_routing_in_order(pool, num_slots):
    runtime = ExpertRuntime(SPEC, LAYOUT, pool, OPS, num_slots)
    recorder = TraceRecorder(len(LAYERS), E, 10)
    runtime.record_trace(recorder)
    ids = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    for layer in LAYERS:
        runtime.forward(layer, torch.zeros(2, H), ids, torch.ones(2, K))
    runtime.safe_point()
    assert recorder.num_tokens == 2
    np.testing.assert_array_equal(recorder._kept[:2], np.stack([ids.numpy()] * 3, 1))
