"""A driver whose device memory is ordinary memory: reserving, mapping and their mistakes.

Addresses are real, so tensors over them work; what is not mapped holds bytes that make NaN.
"""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

UNMAPPED = 0xFF


class Code(int):
    name = "CUDA_SUCCESS"


class OutOfMemory(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class FakeDriver:
    """
    Args:
        capacity_bytes: of all chunks that exist at a time.
    """

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.created_bytes, self.most_bytes = capacity_bytes, 0, 0
        self.chunks: dict[int, int] = {}  # handle → bytes
        self.mapped: dict[int, int] = {}  # address → handle
        self.ranges: dict[int, mmap.mmap] = {}
        self._next = 0

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[Code, int]:
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranges[address] = memory
        ctypes.memset(address, UNMAPPED, size)
        return Code(0), address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Code]:
        assert not any(address <= at < address + size for at in self.mapped), "still mapped"
        del self.ranges[address]
        return (Code(0),)

    def cuMemCreate(self, size: int, *_: object) -> tuple[int, int | None]:
        if self.created_bytes + size > self.capacity_bytes:
            return OutOfMemory(2), None
        self._next += 1
        self.chunks[self._next] = size
        self.created_bytes += size
        self.most_bytes = max(self.most_bytes, self.created_bytes)
        return Code(0), self._next

    def cuMemRelease(self, handle: int) -> tuple[Code]:
        assert handle not in self.mapped.values(), "released while mapped"
        self.created_bytes -= self.chunks.pop(handle)
        return (Code(0),)

    def cuMemMap(self, address: int, size: int, _: int, handle: int, __: int) -> tuple[Code]:
        assert address not in self.mapped and self.chunks[handle] == size
        self.mapped[address] = handle
        return (Code(0),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Code]:
        del self.mapped[address]
        ctypes.memset(address, UNMAPPED, size)
        return (Code(0),)

    def cuMemSetAccess(self, *_: object) -> tuple[Code]:
        return (Code(0),)
