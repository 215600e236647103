"""Device memory whose addresses stay while its size changes: reserved ranges, mapped in chunks.

Expert slots live in such a range, KV pages in another, of chunks of one size: what one gives up the
other takes without asking the driver, whose part is the slow one. ``trim`` gives back to the driver
what nobody has taken. Without ``cuda.bindings`` a range is an ordinary allocation of its full size:
everything works, only resizing does not give memory back.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ftd.errors import BudgetExceeded, EngineFailed
from ftd.memory.vram import CHUNK_BYTES
from ftd.units import format_bytes

from .driver import available, call, driver, tensor_at

_taken_bytes: dict[int, int] = {}  # by device: chunks that this process has of the driver


def held_bytes(device: torch.device) -> int:
    """GPU memory that comes free when the model that this process has loaded goes."""
    return _taken_bytes.get(device.index or 0, 0) + torch.cuda.memory_reserved(device)


def round_up(num_bytes: int, unit: int = CHUNK_BYTES) -> int:
    return -(-num_bytes // unit) * unit


class DeviceRange(Protocol):
    address: int

    @property
    def mapped_bytes(self) -> int: ...

    def resize(self, num_bytes: int) -> None:
        """Map at least the first ``num_bytes``. No kernel may use what goes away."""
        ...

    def bytes(self) -> torch.Tensor:
        """[mapped_bytes] uint8: valid until the range shrinks or closes."""
        ...

    def span(self) -> torch.Tensor:
        """[B] uint8, all that may ever be mapped; what is not must not be touched."""
        ...

    def close(self) -> None: ...


class DeviceMemory:
    """Gives out ranges on one device.

    Args:
        cu: the driver, ``cuda.bindings.driver``; None: the one that is installed, if the device is
            a GPU.
    """

    def __init__(
        self, device: torch.device, chunk_bytes: int = CHUNK_BYTES, cu: Any | None = None
    ) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self._free: list[object] = []  # chunks that are mapped nowhere
        if cu is None and device.type == "cuda" and available():
            cu = driver()
        self.elastic = cu is not None
        if cu is not None:
            self.cu = cu
            if device.type == "cuda":
                torch.cuda.current_stream(device)  # makes the context that driver calls need
            self._properties = cu.CUmemAllocationProp()
            self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            self._properties.location.id = device.index or 0
            self._access = cu.CUmemAccessDesc()
            self._access.location = self._properties.location
            self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def reserve(self, max_bytes: int, num_bytes: int) -> DeviceRange:
        """Address space for ``max_bytes``, of which ``num_bytes`` are backed by memory.

        Raises:
            BudgetExceeded: the device has no more memory.
        """
        if not self.elastic:
            return _PlainRange(self.device, num_bytes)
        return _MappedRange(self, max_bytes, num_bytes)

    def take(self) -> object:
        """A chunk that is mapped nowhere. Raises BudgetExceeded."""
        if self._free:
            return self._free.pop()
        cu = self.cu
        code, handle = cu.cuMemCreate(self.chunk_bytes, self._properties, 0)
        if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise _exhausted(self.chunk_bytes, self.device)
        if int(code) != 0:
            raise EngineFailed(f"cuMemCreate failed: {code.name}")
        self._count(self.chunk_bytes)
        return handle

    def give(self, handle: object) -> None:
        """It is mapped nowhere any more: for the next to ``take``, or for ``trim``."""
        self._free.append(handle)

    @property
    def free_bytes(self) -> int:
        return len(self._free) * self.chunk_bytes

    def trim(self) -> None:
        """Give back to the driver what no range uses."""
        while self._free:
            call(self.cu.cuMemRelease, self._free.pop())
            self._count(-self.chunk_bytes)

    def _count(self, num_bytes: int) -> None:
        index = self.device.index or 0
        _taken_bytes[index] = _taken_bytes.get(index, 0) + num_bytes

    def allow(self, address: int, num_bytes: int) -> None:
        call(self.cu.cuMemSetAccess, address, num_bytes, [self._access], 1)


class _MappedRange:
    def __init__(self, memory: DeviceMemory, max_bytes: int, num_bytes: int) -> None:
        self._memory = memory
        self._chunks: list[object] = []
        self._max_bytes = round_up(max(max_bytes, num_bytes, 1), memory.chunk_bytes)
        self._reserved = call(memory.cu.cuMemAddressReserve, self._max_bytes, 0, 0, 0)
        self.address = int(self._reserved)
        try:
            self.resize(num_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def mapped_bytes(self) -> int:
        return len(self._chunks) * self._memory.chunk_bytes

    def resize(self, num_bytes: int) -> None:
        assert num_bytes <= self._max_bytes, (num_bytes, self._max_bytes)
        chunks, were = -(-num_bytes // self._memory.chunk_bytes), len(self._chunks)
        try:
            self._grow(chunks)
        except BaseException:
            self._shrink(were)
            self._memory.trim()
            raise
        self._shrink(chunks)

    def _grow(self, chunks: int) -> None:
        cu, size, first = self._memory.cu, self._memory.chunk_bytes, len(self._chunks)
        while len(self._chunks) < chunks:
            handle = self._memory.take()
            call(cu.cuMemMap, self.address + len(self._chunks) * size, size, 0, handle, 0)
            self._chunks.append(handle)
        if chunks > first:
            self._memory.allow(self.address + first * size, (chunks - first) * size)

    def _shrink(self, chunks: int) -> None:
        cu, size = self._memory.cu, self._memory.chunk_bytes
        while len(self._chunks) > chunks:
            handle = self._chunks.pop()
            call(cu.cuMemUnmap, self.address + len(self._chunks) * size, size)
            self._memory.give(handle)

    def bytes(self) -> torch.Tensor:
        if not self._chunks:  # nothing is there that the driver could be asked about
            return torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        return tensor_at(self.address, self.mapped_bytes, self._memory.device)

    def span(self) -> torch.Tensor:
        return tensor_at(self.address, self._max_bytes, self._memory.device)

    def close(self) -> None:
        """Unmap, trim, and free the address space. Idempotent."""
        if self._max_bytes:
            self.resize(0)
            self._memory.trim()
            call(self._memory.cu.cuMemAddressFree, self._reserved, self._max_bytes)
            self._max_bytes = 0


class _PlainRange:
    """An ordinary allocation: cannot grow, and gives memory back only when it is closed."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        try:
            self._bytes = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as e:
            raise _exhausted(num_bytes, device) from e
        self.address = self._bytes.data_ptr()

    @property
    def mapped_bytes(self) -> int:
        return len(self._bytes)

    def resize(self, num_bytes: int) -> None:
        if num_bytes > self.mapped_bytes:
            raise BudgetExceeded(
                f"{format_bytes(num_bytes)} are asked for, {format_bytes(self.mapped_bytes)} were "
                "taken at the start",
                hint="install cuda-bindings, then memory can grow while ftd runs",
            )

    def bytes(self) -> torch.Tensor:
        return self._bytes

    def span(self) -> torch.Tensor:
        return self._bytes

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)


def _exhausted(num_bytes: int, device: torch.device) -> BudgetExceeded:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return BudgetExceeded(
        f"the GPU refuses {format_bytes(num_bytes)} more, {format_bytes(free)} of it is free",
        hint="lower --vram, or end what else uses the GPU",
    )
