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
from ftd.kernels.reference import TorchOps

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


def make(pool, ops, cpu=None, **more):
    host = host_of(pool)
    slots = (0, 1) if "slots" not in more else more.pop("slots")
    division = Division(ops, LAYOUT, SILU, host.clone(), slots, cpu)
    if cpu is not None:
        more["cpu"] = CpuBench(KEY, ops, LAYOUT, host.flatten(), torch.bfloat16, K, SILU)
    more = {"pinned": True, "resident": host[0].numpy, **more}
    bench = CudaBench(KEY, division, LAYOUT, host, CPU, torch.bfloat16, K, **more)
    return bench, division


def finish(measuring):
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return end.value


class Watching(TorchOps):
    def __init__(self):
        self.seen = set()

    def moe(self, x, ids, weights, address, layout, activation):
        self.seen.add((len(ids), ids[ids >= 0].unique().numel()))
        return torch.zeros(x.shape)


def test_link_slots_and_layer_are_measured_with_the_layers_of_a_step(pool):
    ops, steps = Watching(), []
    bench, _ = make(pool, ops, step=lambda rows: not steps.append(rows), layers=L)
    profile = finish(measure(bench, Effort((1, 4), (1, 2), rounds=1, slice_s=1e-4), now=1.0))
    assert [f.batch for f in profile.figures] == [1, 4]
    for figures in profile.figures:
        assert figures.link.experts_per_s > 0 and figures.hits.experts_per_s > 0
        assert figures.cpu.experts_per_s == 0 and figures.fixed_s > 0
    rows_and_experts = {(rows * K, experts) for rows in (1, 4) for experts in (0, 1, 2)}
    assert ops.seen == rows_and_experts and set(steps) == {1, 4}
    bench.close()


def test_with_the_cpu_all_is_measured_and_the_mailbox_serves_on(pool, native_ops):
    cpu = CpuExperts(native_ops, host_of(pool), LAYOUT, SILU, torch.bfloat16, 8, K, pin=False)
    bench, division = make(pool, native_ops, cpu)
    before = [part.clone() for part in (division.shared.fetch_of, division.shared.worth)]
    try:
        profile = finish(measure(bench, QUICK, now=1.0))
        rung = int(division.shared.asked[1])
        assert rung > 0 and int(cpu.mailbox.answer) == rung, "numbers at the bell go on"
        for part, was in zip((division.shared.fetch_of, division.shared.worth), before):
            assert torch.equal(part, was)
        assert torch.equal(division.shared.address, host_of(pool))
    finally:
        cpu.close()
    (figures,) = profile.figures
    assert figures.cpu.experts_per_s > 0 and figures.link.experts_per_s > 0
    assert 0 < figures.cpu_beside_link <= 1 and profile.handshake_s >= 0
    assert profile.read_bytes_per_s > 0
    assert len(profile.fetch_of(1, K)) == K + 1


def test_what_asking_adds_is_what_the_links_share_does_not_explain(monkeypatch):
    layout = expert_layout(FORMATS["bf16"], 64, 256)
    assert layout.parts == 4
    pool = HostPool(1, E, layout, range(1))
    host = pool.addresses(0)[None]
    division = Division(TorchOps(), layout, SILU, host, (0, 1), None)
    bench = CudaBench(KEY, division, layout, host, CPU, torch.bfloat16, K, pinned=True)

    def launched_s(bench, run, experts):
        on_link = int(run._shared.fetch_of[0, experts])
        return 10e-6 + {(0, 0): 0, (1, 4): 80e-6, (1, 3): 60e-6 + 7e-6}[experts, on_link]

    monkeypatch.setattr(CudaBench, "_launched_s", launched_s)
    assert bench.link_asked_s(1, 1e-4) == pytest.approx(7e-6)
    pool.close()


def test_nothing_is_read_over_a_link_that_kernels_cannot_use(pool):
    bench, _ = make(pool, TorchOps(), pinned=False, resident=lambda: np.empty(0, np.int64))
    profile = finish(measure(bench, QUICK, now=1.0))
    assert profile.rates(1) is None and profile.figures[0].fixed_s is None


def test_large_experts_are_read_in_few_layers(pool, monkeypatch):
    monkeypatch.setattr("ftd.cuda.bench.RUN_BYTES", 3 * K * LAYOUT.payload_bytes)
    bench, _ = make(pool, TorchOps())
    assert bench._run(1).layers == 3
    monkeypatch.setattr("ftd.cuda.bench.RUN_BYTES", 1)
    assert bench._run(2).layers == 1


def test_time_on_the_cpu_device_has_passed():
    watch = Stopwatch(CPU)
    with watch:
        pass
    assert watch.passed() and watch.seconds() >= 0
