"""Measuring on the GPU's parts: everything but the device is what serves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftd.cuda.bench import CudaBench, Stopwatch
from ftd.cuda.cpu_experts import CpuExperts
from ftd.cuda.division import Division
from ftd.experts.cpu_bench import CpuBench
from ftd.experts.host_pool import HostPool
from ftd.experts.measure import QUICK, Effort, measure
from ftd.experts.profile import Key
from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.triton.ops import CudaOps

KEY = Key("GPU-1", "a processor", 2, "bf16 64x32")
LAYOUT = expert_layout(FORMATS["bf16"], 64, 32)
L, E, K = 3, 8, 2
CPU = torch.device("cpu")


@pytest.fixture
def pool():
    pool = HostPool(L, E, LAYOUT, range(L))
    yield pool
    pool.close()


@pytest.fixture
def native_ops():
    ops = native.load(threads=2) or pytest.skip("the C++ kernels are not built")
    yield ops
    ops.close()


def host_of(pool):
    return torch.stack([pool.addresses(layer) for layer in range(L)])


def make(pool, ops, **more):
    more = {"pinned": True, "resident": host_of(pool)[0].numpy, **more}
    return CudaBench(KEY, ops, LAYOUT, SILU, host_of(pool), CPU, torch.bfloat16, K, **more)


def finish(measuring):
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return end.value


def test_link_slots_and_layer_are_measured_with_the_kernels_of_a_step(pool):
    seen = []

    class Watching(CudaOps):
        def moe(self, x, ids, weights, address, layout, activation):
            seen.append((x.shape, ids[ids >= 0].unique().numel(), len(address)))
            return torch.zeros(x.shape)

    bench = make(pool, Watching(), step=lambda rows: seen.append(rows) or True, layers=L)
    profile = finish(measure(bench, Effort((1, 4), (1, 2), rounds=1, slice_s=1e-4), now=1.0))
    assert [f.batch for f in profile.figures] == [1, 4]
    for figures in profile.figures:
        assert figures.link.experts_per_s > 0 and figures.hits.experts_per_s > 0
        assert figures.cpu.experts_per_s == 0 and figures.fixed_s > 0
    calls = {call for call in seen if isinstance(call, tuple)}
    assert ((4, 64), 2, L * E) in calls and ((1, 64), 1, L * E) in calls
    assert {1, 4} <= set(seen)
    bench.close()


def test_with_the_cpu_all_is_measured_and_the_mailbox_serves_on(pool, native_ops):
    host = host_of(pool)
    cpu = CpuExperts(native_ops, host, LAYOUT, SILU, torch.bfloat16, 8, K, pin=False)
    division = Division(native_ops, LAYOUT, SILU, host.clone(), (0, 0), cpu)
    alone = CpuBench(KEY, native_ops, LAYOUT, host.flatten(), torch.bfloat16, K, SILU)
    bench = make(pool, native_ops, cpu=alone, division=division)
    fetch_of, worth = division.shared.fetch_of.clone(), division.shared.worth.clone()
    try:
        profile = finish(measure(bench, QUICK, now=1.0))
        rung = int(division.shared.asked[1])
        assert rung > 0 and int(cpu.mailbox.answer) == rung, "numbers at the bell go on"
        assert torch.equal(division.shared.fetch_of, fetch_of)
        assert torch.equal(division.shared.worth, worth)
    finally:
        cpu.close()
    (figures,) = profile.figures
    assert figures.cpu.experts_per_s > 0 and figures.link.experts_per_s > 0
    assert 0 < figures.cpu_beside_link <= 1 and profile.handshake_s >= 1e-6
    assert profile.read_bytes_per_s > 0
    assert len(profile.fetch_of(1, K)) == K + 1


def test_nothing_is_read_over_a_link_that_kernels_cannot_use(pool):
    bench = make(pool, CudaOps(), pinned=False, resident=lambda: np.empty(0, np.int64))
    profile = finish(measure(bench, QUICK, now=1.0))
    assert profile.rates(1) is None and profile.figures[0].fixed_s is None


def test_large_experts_are_read_in_few_layers(pool):
    big = expert_layout(FORMATS["bf16"], 8192, 28672)
    bench = CudaBench(KEY, CudaOps(), big, SILU, host_of(pool), CPU, torch.bfloat16, 2, pinned=True)
    assert bench._shape(1).layers == 1
    assert make(pool, CudaOps())._shape(1).layers == 16


def test_the_real_kernel_runs_in_the_interpreter(pool, monkeypatch):
    monkeypatch.setattr("ftd.cuda.bench.MOST_LAYERS", 1)
    monkeypatch.setattr("ftd.experts.cpu_bench.LEAST_CALLS", 1)
    for layer in range(L):
        for expert in range(E):
            pool.record(layer, expert)[:] = 0x3C
    bench = make(pool, CudaOps())
    assert bench.link_s(2, 2, 0.0) > 0


def test_time_on_the_cpu_device_has_passed():
    watch = Stopwatch(CPU)
    with watch:
        pass
    assert watch.passed() and watch.seconds() >= 0
