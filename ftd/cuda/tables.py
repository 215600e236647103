"""Small host arrays on their way to the device while steps are in flight, and back.

A pinned buffer must not be written while a copy may still read it: each of these keeps several
versions and takes the oldest, whose copy is long done; if it is not, it waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

_past_copies: ContextVar[bool] = ContextVar("past_copies", default=False)

VERSIONS = 4  # one being read by a running step, one by a launched one, and two to spare


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """What is queued inside goes to ``stream``; on the CPU device there is none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def past_copies(many: bool = True) -> Iterator[None]:
    """Inside, ``bring`` does not wait for the copies that are on their way, if they are many."""
    outside = _past_copies.set(many)
    try:
        yield
    finally:
        _past_copies.reset(outside)


def bring(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a small copy from pinned memory to the device."""
    if target.is_cuda and _past_copies.get():
        from ftd.kernels.triton.pull import pull

        pull(source, target)
    else:
        target.copy_(source, non_blocking=True)


class Marker:
    """A place in the order of a stream; on the CPU device everything is always done."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Let ``stream`` wait for this place."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class Upload:
    """A device tensor whose contents the host replaces in stream order."""

    def __init__(self, device_tensor: torch.Tensor, versions: int = VERSIONS) -> None:
        self.device_tensor = device_tensor
        shape, dtype, device = device_tensor.shape, device_tensor.dtype, device_tensor.device
        pin = device.type == "cuda"
        self._buffers = [torch.empty(shape, dtype=dtype, pin_memory=pin) for _ in range(versions)]
        self._markers = [Marker(device) for _ in range(versions)]
        self._next = 0

    def send(self, host: torch.Tensor) -> None:
        """Queue a copy of ``host`` on the current stream; it may change as soon as this returns."""
        version = self._next
        self._next = (version + 1) % len(self._buffers)
        self._markers[version].wait()
        self._buffers[version].copy_(host)
        bring(self.device_tensor, self._buffers[version])
        self._markers[version].mark()


class Download:
    """What steps leave in a device tensor, brought to the host without stopping them."""

    def __init__(self, device_tensors: Sequence[torch.Tensor], versions: int = VERSIONS) -> None:
        self._sources = tuple(device_tensors)
        device = self._sources[0].device
        pin = device.type == "cuda"
        self._buffers = [
            tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for t in self._sources)
            for _ in range(versions)
        ]
        self._markers = [Marker(device) for _ in range(versions)]
        self._next = 0

    def fetch(self) -> Fetched:
        """Queue the copy on the current stream."""
        version = self._next
        self._next = (version + 1) % len(self._buffers)
        for buffer, source in zip(self._buffers[version], self._sources):
            buffer.copy_(source, non_blocking=True)
        self._markers[version].mark()
        return Fetched(self._buffers[version], self._markers[version])


class Fetched:
    """One copy on its way: good until ``VERSIONS`` more have been asked for."""

    __slots__ = ("_buffers", "_marker")

    def __init__(self, buffers: tuple[torch.Tensor, ...], marker: Marker) -> None:
        self._buffers, self._marker = buffers, marker

    def passed(self) -> bool:
        return self._marker.passed()

    def get(self) -> tuple[torch.Tensor, ...]:
        """Wait for it."""
        self._marker.wait()
        return self._buffers
