from __future__ import annotations

import ctypes
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import BudgetExceeded
from ftd.experts import host_pool
from ftd.experts.host_pool import HUGE_PAGE_BYTES, HostPool, prefer_node
from ftd.kernels.formats import FORMATS, RECORD_ALIGN_BYTES, expert_layout

LAYOUT = expert_layout(FORMATS["bf16"], 40, 24)  # 5760 bytes in a record of 8192


@given(
    num_experts=st.integers(1, 9),
    layers=st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True),
    nodes=st.integers(1, 4),
)
def test_records_are_aligned_apart_and_written_where_their_address_says(num_experts, layers, nodes):
    pool = HostPool(len(layers), num_experts, LAYOUT, layers, nodes=range(nodes))
    keys = [(layer, e) for layer in layers for e in range(num_experts)]
    for mark, (layer, e) in enumerate(keys, start=1):
        assert not pool.record(layer, e).any()
        pool.record(layer, e)[:] = mark
    for mark, (layer, e) in enumerate(keys, start=1):
        address = pool.address(layer, e)
        assert address % RECORD_ALIGN_BYTES == 0
        assert address == pool.addresses(layer)[e] == pool.record(layer, e).ctypes.data
        data = ctypes.string_at(address, LAYOUT.record_bytes)
        assert data == bytes([mark]) * LAYOUT.record_bytes
    assert pool.num_bytes == len(keys) * LAYOUT.record_bytes
    pool.close()


def test_the_pool_begins_at_a_huge_page_and_so_does_each_nodes_part():
    pool = HostPool(2, 6, LAYOUT, (0, 1), nodes=(0, 1))
    assert pool.address(0, 0) % HUGE_PAGE_BYTES == 0
    assert pool.address(0, 3) % HUGE_PAGE_BYTES == 0
    assert pool.address(1, 2) - pool.address(0, 0) == 5 * LAYOUT.record_bytes


def test_each_node_is_asked_for_its_part_of_the_experts(monkeypatch):
    asked = []
    monkeypatch.setattr(host_pool, "prefer_node", lambda *args: asked.append(args))
    pool = HostPool(3, 5, LAYOUT, (0, 1, 2), nodes=(0, 2))
    assert asked == pool.node_ranges()
    (first, first_bytes, node_a), (second, second_bytes, node_b) = asked
    assert (node_a, node_b) == (0, 2)
    assert (first, second) == (pool.address(0, 0), pool.address(0, 3))
    assert first_bytes >= 9 * LAYOUT.record_bytes
    assert second_bytes == 6 * LAYOUT.record_bytes


def test_the_kernel_understands_what_is_asked_of_a_node():
    pool = HostPool(1, 1, LAYOUT, (0,))
    if not prefer_node(pool.address(0, 0), LAYOUT.record_bytes, 0):
        pytest.skip("no NUMA system call here")
    pool.record(0, 0)[:] = 1


def test_views_share_the_memory():
    pool = HostPool(1, 2, LAYOUT, (3,))
    view = torch.from_numpy(pool.record(3, 1))
    view[5] = 77
    assert pool.record(3, 1)[5] == 77


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def test_close_frees_the_memory_even_while_a_view_is_held():
    layout = expert_layout(FORMATS["bf16"], 1024, 1024)
    pool = HostPool(1, 16, layout, (0,))  # 96 MiB
    for e in range(16):
        pool.record(0, e)[:] = 1
    view = pool.record(0, 3)
    full = resident_bytes()
    pool.close()
    pool.close()
    assert full - resident_bytes() > 0.8 * 16 * layout.record_bytes
    assert not view.any()  # still readable: a mistake elsewhere must not become a crash


def test_too_little_memory_is_refused_with_both_numbers():
    layout = expert_layout(FORMATS["bf16"], 1024, 1024)
    with pytest.raises(BudgetExceeded, match=r"need 96\.0 MiB of memory, 50\.0 MiB is available"):
        HostPool(1, 16, layout, (0,), available_bytes=50 << 20)


def test_what_the_system_refuses_is_a_typed_error():
    layout = expert_layout(FORMATS["bf16"], 4096, 2**20)
    with pytest.raises(BudgetExceeded, match="the system refused"):
        HostPool(100, 10_000, layout, range(100))
