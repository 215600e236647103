"""Cores, quotas and nodes, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftd.kernels.cpu.topology import (
    Node,
    default_threads,
    discover_nodes,
    place_threads,
    usable_cores,
)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (16, 14), (128, 126)]
)
def test_default_threads_leave_cores_to_loop_and_engine(cores, threads):
    assert default_threads(cores) == threads


def test_usable_cores_follow_the_affinity_mask(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert usable_cores(tmp_path) == 6


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000\n", 8), ("250000 100000\n", 2), ("50000 100000\n", 1)]
)
def test_usable_cores_follow_a_unified_cgroup(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, "proc/self/cgroup", "0::/user/ftd.service\n")
    write(tmp_path, "sys/fs/cgroup/user/ftd.service/cpu.max", quota)
    assert usable_cores(tmp_path) == cores


def test_usable_cores_follow_the_tightest_parent(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, "proc/self/cgroup", "0::/user/ftd.service\n")
    write(tmp_path, "sys/fs/cgroup/user/ftd.service/cpu.max", "600000 100000")
    write(tmp_path, "sys/fs/cgroup/user/cpu.max", "300000 100000")
    assert usable_cores(tmp_path) == 3


def test_usable_cores_follow_an_old_cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, "proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "400000")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(tmp_path) == 4


def test_nodes_are_read_in_order_without_processors_of_others(tmp_path):
    write(tmp_path, "sys/devices/system/node/node10/cpulist", "8-9\n")
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-2,5\n")
    write(tmp_path, "sys/devices/system/node/node2/cpulist", "\n")  # memory without processors
    nodes = discover_nodes(tmp_path, frozenset({0, 2, 5, 9}))
    assert nodes == (Node(0, (0, 2, 5)), Node(10, (9,)))


def test_without_nodes_there_is_one(tmp_path):
    assert discover_nodes(tmp_path, frozenset({1, 3})) == (Node(0, (1, 3)),)


def test_threads_spread_over_nodes_by_their_processors():
    nodes = (Node(0, (0, 1, 2, 3)), Node(1, (4, 5)))
    placement = place_threads(6, nodes, pin=False)
    assert placement.node == (0, 0, 0, 0, 1, 1)
    assert placement.cpus == ((), *[(0, 1, 2, 3)] * 3, (4, 5), (4, 5))
    assert place_threads(3, nodes, pin=False).node == (0, 0, 1)


def test_pinned_threads_get_a_processor_each_but_for_the_caller():
    nodes = (Node(0, (0, 1)), Node(1, (2, 3)))
    assert place_threads(4, nodes, pin=True).cpus == ((), (1,), (2,), (3,))


def test_on_one_node_nobody_is_moved_unasked():
    assert place_threads(2, (Node(0, (0, 1)),), pin=False).cpus == ((), ())
