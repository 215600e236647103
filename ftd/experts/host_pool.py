"""Every expert of the model in host memory: one mapping, one aligned record for each expert.

Records of one NUMA node lie together. Each node holds an equal range of the experts of every layer,
so a layer is read with the bandwidth of all nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ftd.errors import BudgetExceeded
from ftd.kernels.formats import ExpertLayout
from ftd.units import MiB, format_bytes

HUGE_PAGE_BYTES = 2 * MiB

_MPOL_PREFERRED = 1  # <linux/mempolicy.h>: this node, another one when it is full
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}  # of the system call, which libc does not wrap


@dataclass(frozen=True, slots=True)
class _Stripe:
    """The experts of one NUMA node."""

    node: int
    first_expert: int
    num_experts: int
    offset: int  # of their records from the aligned start of the mapping


class HostPool:
    """Owns the memory; knows nothing of what is in it.

    Args:
        num_layers_moe: layers with experts, ``len(moe_layers)``.
        num_experts: E, in each of them.
        moe_layers: their indices among all layers.
        nodes: NUMA nodes over which the records are spread.
        available_bytes: what the machine can give; None: known to be enough.
    Raises:
        BudgetExceeded: the records need more than that, or than the system grants.
    Cost: address space only; the memory is taken as records are filled.
    """

    def __init__(
        self,
        num_layers_moe: int,
        num_experts: int,
        layout: ExpertLayout,
        moe_layers: Sequence[int],
        *,
        nodes: Sequence[int] = (0,),
        available_bytes: int | None = None,
    ) -> None:
        assert num_layers_moe == len(moe_layers), (num_layers_moe, moe_layers)
        self.layout = layout
        self.num_experts = num_experts
        self.moe_layers = tuple(moe_layers)
        self._row = {layer: row for row, layer in enumerate(moe_layers)}
        self._stripes = _stripes(num_layers_moe, num_experts, layout.record_bytes, nodes)
        last = self._stripes[-1]
        size = last.offset + num_layers_moe * last.num_experts * layout.record_bytes
        self.num_bytes = num_layers_moe * num_experts * layout.record_bytes
        if available_bytes is not None and size > available_bytes:
            raise _too_large(self.num_bytes, f"{format_bytes(available_bytes)} is available")
        try:
            self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise _too_large(self.num_bytes, f"the system refused: {e.strerror}") from e
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        unaligned = self._bytes.ctypes.data
        self._base = -(-unaligned // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._bytes = self._bytes[self._base - unaligned :][:size]
        self._advise()

    def address(self, layer: int, expert: int) -> int:
        """Where the record of an expert begins; ``layer`` counts among all layers."""
        return self._base + self._offset(layer, expert)

    def addresses(self, layer: int) -> torch.Tensor:
        """Addresses of all records of a layer, [E] int64."""
        return torch.tensor([self.address(layer, e) for e in range(self.num_experts)])

    def record(self, layer: int, expert: int) -> np.ndarray:
        """The bytes of one record, [record_bytes] uint8: a view, which may be written."""
        offset = self._offset(layer, expert)
        return self._bytes[offset : offset + self.layout.record_bytes]

    def node_ranges(self) -> list[tuple[int, int, int]]:
        """(address, bytes, NUMA node) of each node's records, as ``CpuPool.place`` takes them."""
        ends = [s.offset for s in self._stripes[1:]] + [len(self._bytes)]
        return [
            (self._base + s.offset, end - s.offset, s.node) for s, end in zip(self._stripes, ends)
        ]

    def close(self) -> None:
        """Give the memory back at once, even while views of records still exist.

        They then read zeros; the address space goes with the last of them. Idempotent.
        """
        if self._map.closed:
            return
        self._map.madvise(mmap.MADV_DONTNEED)
        self._bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a view of a record is alive somewhere
            self._map.close()

    def _offset(self, layer: int, expert: int) -> int:
        assert 0 <= expert < self.num_experts, (expert, self.num_experts)
        stripe = next(s for s in self._stripes if expert < s.first_expert + s.num_experts)
        index = self._row[layer] * stripe.num_experts + expert - stripe.first_expert
        return stripe.offset + index * self.layout.record_bytes

    def _advise(self) -> None:
        """Ask for huge pages and, with several nodes, for each range's node: wishes, not needs."""
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if len(self._stripes) > 1:
            for address, num_bytes, node in self.node_ranges():
                prefer_node(address, num_bytes, node)


def _stripes(
    num_layers: int, num_experts: int, record_bytes: int, nodes: Sequence[int]
) -> list[_Stripe]:
    nodes = nodes[:num_experts]
    starts = [-(-i * num_experts // len(nodes)) for i in range(len(nodes) + 1)]
    stripes, offset = [], 0
    for node, (first, end) in zip(nodes, itertools.pairwise(starts)):
        stripes.append(_Stripe(node, first, end - first, offset))
        offset += num_layers * (end - first) * record_bytes
        offset = -(-offset // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES  # no huge page on two nodes
    return stripes


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask that pages not yet touched come from one NUMA node. False: not possible here."""
    number = _MBIND_NUMBER.get(platform.machine())
    if number is None:
        return False
    mask = ctypes.c_ulong(1 << node)
    # maxnode counts one more than the bits that are looked at
    bits = ctypes.c_ulong(ctypes.sizeof(mask) * 8 + 1)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED), ctypes.byref(mask), bits, ctypes.c_uint(0),
    )  # fmt: skip
    return int(result) == 0


def _too_large(need_bytes: int, but: str) -> BudgetExceeded:
    return BudgetExceeded(
        f"the experts need {format_bytes(need_bytes)} of memory, {but}",
        hint="free memory or raise the memory limit of ftd, or serve a smaller model",
    )
