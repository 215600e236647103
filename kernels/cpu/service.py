"""Experts computed for another processor in the middle of its step, through memory that both see.

The other side stores what it asks for and a new number at the bell; a C++ thread answers with the
pool's help (service.cpp). One question at a time.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int32, c_void_p

import torch

from ftd.errors import EngineFailed

from ..activation import Activation
from ..formats import ExpertLayout
from .library import ActivationRecord, LayoutRecord
from .native import _CODE, NativeOps

_LINE = 64  # bytes of a cache line: bell and answer have one each


class _Mailbox(Structure):
    _fields_ = (
        ("bell", c_void_p),
        ("answer", c_void_p),
        ("head", c_void_p),
        ("ids", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("address", c_void_p),
        ("layers", c_int32),
        ("most_tokens", c_int32),
        ("routes", c_int32),
        ("experts", c_int32),
        ("act", c_int32),
        ("pad", c_int32),
        ("layout", LayoutRecord),
        ("activation", ActivationRecord),
    )


class Mailbox:
    """The shared memory, as views of one block of bytes.

    Args:
        pin: kernels of the GPU reach it, at the addresses that it has here.
    """

    def __init__(
        self, most_tokens: int, routes: int, hidden: int, act: torch.dtype, *, pin: bool
    ) -> None:
        parts = {
            "bell": (torch.int32, (1,)),
            "answer": (torch.int32, (1,)),
            "head": (torch.int32, (4,)),  # layer, tokens, expert asked for in part or -1, its rows
            "ids": (torch.int32, (most_tokens, routes)),
            "x": (act, (most_tokens, hidden)),
            "y": (torch.float32, (most_tokens, routes, hidden)),
        }
        sizes = {
            name: -(-dtype.itemsize * torch.Size(shape).numel() // _LINE) * _LINE
            for name, (dtype, shape) in parts.items()
        }
        self.block = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=pin)
        at, views = 0, {}
        for name, (dtype, shape) in parts.items():
            end = at + dtype.itemsize * torch.Size(shape).numel()
            views[name] = self.block[at:end].view(dtype).view(shape)
            at += sizes[name]
        self.bell, self.answer, self.head = views["bell"], views["answer"], views["head"]
        self.ids, self.x, self.y = views["ids"], views["x"], views["y"]
        self.head[2] = -1


class ExpertService:
    """The thread that answers. Lives as long as ``ops`` does, or shorter.

    Args:
        address: [L, E] int64, records in host memory.
    Raises:
        EngineFailed: the system starts no thread.
    """

    def __init__(
        self,
        ops: NativeOps,
        mailbox: Mailbox,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation,
    ) -> None:
        assert address.dtype == torch.int64 and address.is_contiguous(), address.dtype
        self._c = ops.pool.library.functions
        self._kept = (ops, mailbox, address)  # what the thread reads
        (layers, experts), (tokens, routes) = address.shape, mailbox.ids.shape
        shared = (mailbox.bell, mailbox.answer, mailbox.head, mailbox.ids, mailbox.x, mailbox.y)
        plan = _Mailbox(
            *(part.data_ptr() for part in shared),
            address.data_ptr(),
            layers,
            tokens,
            routes,
            experts,
            _CODE[mailbox.x.dtype],
            0,
            LayoutRecord.of(layout),
            ActivationRecord.of(activation),
        )
        self._handle = self._c.ftd_service_start(ops.handle, byref(plan))
        if not self._handle:
            raise EngineFailed(
                "the thread that computes experts beside the GPU cannot be started",
                hint="raise the limit on threads (ulimit -u, TasksMax)",
            )

    def expect(self) -> None:
        """Before a step that may ask: the thread and the pool wake up."""
        self._c.ftd_service_expect(self._handle)

    def done(self) -> None:
        """That step is over."""
        self._c.ftd_service_done(self._handle)

    @property
    def fault(self) -> int:
        """Not 0: a question could not be answered, and its step is worth nothing."""
        return self._c.ftd_service_fault(self._handle)

    def stick(self) -> None:
        """For tests: from the next question on there is no answer."""
        self._c.ftd_service_stick(self._handle)

    def close(self) -> None:
        """Idempotent; no step may be under way."""
        handle, self._handle = self._handle, None
        if handle:
            self._c.ftd_service_stop(handle)
