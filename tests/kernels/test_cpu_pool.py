"""The pool of CPU threads: its life, its sleep, its nodes. Results are checked in native_ops."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest
import torch

from ftd.errors import ConfigError
from ftd.kernels.cpu import native
from ftd.kernels.cpu.library import Library
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.cpu.pool import CpuPool
from ftd.kernels.cpu.topology import Node
from ftd.kernels.formats import FORMATS, expert_layout

reason = native.unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no C++ kernels: {reason}")


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


def workers() -> int:
    return sum(
        open(f"/proc/self/task/{task}/comm").read().startswith("ftd-cpu-")
        for task in os.listdir("/proc/self/task")
    )


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen in 20 s"
        time.sleep(0.005)


def big_linear(ops: NativeOps) -> torch.Tensor:
    return ops.linear(torch.ones(1, 512), torch.ones(2000, 512))


def test_pools_come_and_go(library):
    before = workers()
    for threads in (1, 2, 4, 3):
        pool = CpuPool(library, threads)
        assert workers() == before + threads - 1
        ops = NativeOps(pool, "portable")
        assert (big_linear(ops) == 512).all()
        ops.close()
        assert workers() == before


def test_a_pool_that_never_worked_ends(library):
    CpuPool(library, 3).close()


def test_closing_twice_is_harmless(library):
    ops = NativeOps(CpuPool(library, 2), "portable")
    ops.close()
    ops.close()


def test_two_pools_work_side_by_side(library):
    first, second = (NativeOps(CpuPool(library, 3), "portable") for _ in range(2))
    for _ in range(20):
        assert torch.equal(big_linear(first), big_linear(second))
    first.close()
    assert (big_linear(second) == 512).all()
    second.close()


def test_idle_workers_sleep_and_use_no_time(library):
    ops = NativeOps(CpuPool(library, 4, park_after_us=100), "portable")
    big_linear(ops)
    wait_until(lambda: ops.pool.parked == 3)
    me = psutil.Process()
    before = sum(me.cpu_times()[:2])
    time.sleep(0.3)
    assert sum(me.cpu_times()[:2]) - before < 0.1
    assert (big_linear(ops) == 512).all()  # and they can be used again
    ops.close()


def test_wake_starts_the_workers_before_there_is_work(library):
    pool = CpuPool(library, 3, park_after_us=5_000_000)
    wait_until(lambda: pool.parked == 0)
    pool.close()
    pool = CpuPool(library, 3, park_after_us=20_000)
    wait_until(lambda: pool.parked == 2)
    pool.wake()
    wait_until(lambda: pool.parked < 2)
    wait_until(lambda: pool.parked == 2)  # nothing came: asleep again
    pool.close()


def test_finished_counts_the_work_done(library):
    ops = NativeOps(CpuPool(library, 3), "portable")
    counts = [ops.pool.finished]
    for _ in range(3):
        big_linear(ops)
        counts.append(ops.pool.finished)
    assert counts == sorted(set(counts))
    ops.close()


def test_callers_of_one_pool_take_turns(library):
    ops = NativeOps(CpuPool(library, 3), "portable")
    wrong: list[torch.Tensor] = []

    def call() -> None:
        for _ in range(40):
            y = big_linear(ops)
            if not (y == 512).all():
                wrong.append(y)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    ops.close()


def test_many_short_jobs_end_each(library):
    ops = NativeOps(CpuPool(library, 5), "portable")
    x, weight = torch.ones(1, 64), torch.ones(1024, 64)
    for _ in range(3000):
        assert ops.linear(x, weight)[0, 1023] == 64
    ops.close()


@pytest.mark.parametrize(("threads", "num_nodes"), [(1, 2), (2, 2), (5, 2), (2, 3), (3, 5)])
def test_nodes_share_the_work_without_changing_the_result(library, threads, num_nodes):
    """Made-up nodes with experts on each, some of them without a thread."""
    layout = expert_layout(FORMATS["f32"], 96, 200)
    records = torch.randn(9, layout.record_bytes // 4)
    address = records.data_ptr() + torch.arange(9) * layout.record_bytes
    x, weights = torch.randn(5, 96), torch.rand(5, 3)
    ids = torch.stack([torch.randperm(9)[:3] for _ in range(5)]).to(torch.int32)
    plain = NativeOps(CpuPool(library, threads), "portable")
    want = plain.moe(x, ids, weights, address, layout), big_linear(plain)
    plain.close()
    nodes = tuple(Node(3 * n, (0,)) for n in range(num_nodes))
    pool = CpuPool(library, threads, nodes=nodes)
    ops = NativeOps(pool, "portable")
    for expert in range(9):
        pool.place(int(address[expert]), layout.record_bytes, 3 * (expert % num_nodes))
    assert torch.equal(ops.moe(x, ids, weights, address, layout), want[0])
    assert torch.equal(big_linear(ops), want[1])
    ops.close()


def test_threads_that_cannot_be_started_are_an_error_with_their_number(library, monkeypatch):
    class NoThreads:
        def ftd_pool_create(self, plan):
            return None

    monkeypatch.setattr(library, "functions", NoThreads())
    with pytest.raises(ConfigError, match="1000000 CPU threads cannot be started"):
        CpuPool(library, 1_000_000)
