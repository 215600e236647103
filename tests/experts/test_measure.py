"""Measuring: a scripted machine's rates come out again, and the CPU's real kernels are run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.experts.cpu_bench import CpuBench
from ftd.experts.host_pool import HostPool
from ftd.experts.measure import FULL, QUICK, measure, routes
from ftd.experts.profile import Key
from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import TorchOps

KEY = Key("", "a processor", 2, "bf16 64x32")


class Scripted:
    """A machine whose times are known, with noise on every seventh sample."""

    key, gpu_name, expert_bytes, prefetch_bytes = KEY, "a GPU", 1000, (2048, 0)

    def __init__(self, *, link=True, cpu=True, hits=True, most=8):
        self.has_link, self.has_cpu, self.has_hits, self.experts_per_token = link, cpu, hits, most
        self.calls, self.closed = 0, False

    def _noisy(self, seconds):
        self.calls += 1
        return seconds * (3 if self.calls % 7 == 0 else 1)

    def link_s(self, rows, experts, seconds):
        assert self.has_link and 1 <= experts <= self.experts_per_token
        return self._noisy(2e-6 + experts * 100e-6)

    def cpu_s(self, rows, experts, seconds):
        assert self.has_cpu
        return self._noisy(10e-6 + experts * 50e-6 * rows)

    def hits_s(self, rows, experts, seconds):
        assert self.has_hits
        return self._noisy(experts * 3e-6)

    def beside(self, rows, experts, seconds):
        assert self.has_link and self.has_cpu
        self.calls += 1
        return (0.9, 1.3) if self.calls % 7 == 0 else (0.9, 0.5)

    def link_asked_s(self, rows, seconds):
        assert self.has_link and self.has_cpu
        return self._noisy(17e-6)

    def handshake_s(self, seconds):
        return 5e-6

    def cpu_row_s(self, seconds):
        return 20e-6

    def read_bytes_per_s(self, seconds):
        return 7e9

    def fixed_s(self, rows, seconds):
        return 50e-6 + rows * 1e-6

    def close(self):
        self.closed = True


def finish(measuring):
    slices = []
    while True:
        try:
            slices.append(next(measuring))
        except StopIteration as end:
            return end.value, slices


def test_rates_of_a_known_machine_come_out_again():
    profile, slices = finish(measure(Scripted(), FULL, now=123.0))
    assert [f.batch for f in profile.figures] == [1, 2, 4, 8]
    for figures in profile.figures:
        assert figures.link.experts_per_s == pytest.approx(10_000, rel=0.02)
        assert figures.link.fixed_s == pytest.approx(2e-6, abs=2e-6)
        assert figures.cpu.experts_per_s == pytest.approx(20_000 / figures.batch, rel=0.02)
        assert figures.hits.experts_per_s == pytest.approx(333_333, rel=0.02)
        assert figures.link_beside_cpu == pytest.approx(0.9, rel=0.01)
        assert figures.cpu_beside_link == pytest.approx(0.5, rel=0.01)
        assert figures.fixed_s == pytest.approx(50e-6 + figures.batch * 1e-6)
        assert figures.link_asked_s == pytest.approx(17e-6)
        assert profile.rates(figures.batch).link_asked_s == figures.link_asked_s
    assert (profile.handshake_s, profile.read_bytes_per_s) == (5e-6, 7e9)
    assert (profile.measured_at, profile.quick, profile.key) == (123.0, False, KEY)
    assert (profile.gpu_name, profile.cpu_row_s) == ("a GPU", 20e-6)
    assert profile.prefetch_bytes == (2048, 0)
    assert [s.done for s in slices] == list(range(1, slices[0].of + 1)) and slices[-1].of == len(
        slices
    )
    assert any("link and CPU" in s.phase for s in slices)


def test_a_quick_calibration_is_short_and_says_so():
    bench = Scripted()
    profile, slices = finish(measure(bench, QUICK, now=0.0))
    assert profile.quick and len(profile.figures) == 1
    assert len(slices) * QUICK.slice_s < 1.0
    assert profile.fetch_of(4, 8) is not None, "other batches are judged by the one measured"


@pytest.mark.parametrize("missing", ["link", "cpu", "hits"])
def test_what_a_machine_lacks_is_not_asked_for(missing):
    profile, _ = finish(measure(Scripted(**{missing: False}), QUICK, now=0.0))
    assert getattr(profile.figures[0], missing).experts_per_s == 0
    assert profile.figures[0].link_beside_cpu == (1.0 if missing != "hits" else pytest.approx(0.9))


def test_no_more_experts_at_once_than_a_token_uses():
    profile, _ = finish(measure(Scripted(most=1), FULL, now=0.0))
    assert profile.figures[0].link.fixed_s == 0


@given(
    rows=st.sampled_from([1, 2, 4, 8]),
    experts=st.integers(1, 8),
    of=st.sampled_from([8, 9, 63, 64, 5000]),
    seed=st.integers(0, 1000),
)
def test_routes_name_as_many_experts_as_asked(rows, experts, of, seed):
    ids = routes(np.random.default_rng(seed), rows, experts, 8, of)
    assert ids.shape == (rows, 8) and ids.dtype == np.int32
    assert ids.max() < of and ids.min() >= -1
    used = ids[ids >= 0]
    assert len(set(used.tolist())) == experts
    assert len(used) == experts * min(rows, 2)
    for row in ids:
        chosen = row[row >= 0]
        assert len(set(chosen.tolist())) == len(chosen)


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@pytest.mark.parametrize("make", [native.load, TorchOps], ids=["native", "torch"])
def test_the_cpu_is_measured_with_the_operations_that_serve(fmt, make):
    ops = make() or pytest.skip("the C++ kernels are not built")
    layout = expert_layout(FORMATS[fmt], 64, 32)
    pool = HostPool(2, 16, layout, (0, 1))
    address = torch.cat([pool.addresses(layer) for layer in (0, 1)])
    bench = CpuBench(KEY, ops, layout, address, torch.bfloat16, 4, SILU)
    measuring = measure(bench, QUICK, now=1.0)
    profile, _ = finish(measuring)
    (figures,) = profile.figures
    assert figures.cpu.experts_per_s > 0 and figures.link.experts_per_s == 0
    assert (profile.read_bytes_per_s > 0) == (make is not TorchOps)
    assert 0 < profile.cpu_row_s < 1
    assert profile.fetch_of(1, 4) == (0,) * 5
    pool.close()
    if make is not TorchOps:
        ops.close()


def test_slots_may_go_while_they_are_measured():
    bench = Scripted()
    measuring = measure(bench, FULL, now=0.0)
    for _ in range(20):
        next(measuring)
    bench.has_hits = False
    profile, _ = finish(measuring)
    assert profile.figures[0].hits.experts_per_s > 0, "what was measured before counts"
    assert profile.figures[-1].hits.experts_per_s == 0


def test_a_measurement_can_be_given_up():
    bench = Scripted()
    measuring = measure(bench, FULL, now=0.0)
    for _ in range(3):
        next(measuring)
    measuring.close()
    calls = bench.calls
    with pytest.raises(StopIteration):
        next(measuring)
    assert bench.calls == calls
