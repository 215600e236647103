"""The few calls of the CUDA driver and runtime that torch has no name for, with their errors."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

import torch

from ftd.errors import EngineFailed

HOST_REGISTER_PORTABLE, HOST_REGISTER_MAPPED = 1, 2  # <driver_types.h>


@functools.cache
def available() -> bool:
    """The package cuda-bindings is installed and loads."""
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    return True


def driver() -> Any:
    """``cuda.bindings.driver``; only where it is ``available``."""
    return importlib.import_module("cuda.bindings.driver")


def call(function: Any, *args: Any) -> Any:
    """One driver call; raises with the function's name and the driver's word for the error."""
    code, *results = function(*args)
    if int(code) != 0:
        raise EngineFailed(f"{function.__name__} failed: {code.name}")
    return results[0] if len(results) == 1 else results


def register_host(address: int, num_bytes: int) -> str | None:
    """Make host memory readable by kernels and copies. None: done, else why not."""
    flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags)
    if int(code) == 0:
        return None
    return f"cudaHostRegister of {num_bytes} bytes: {torch.cuda.cudart().cudaGetErrorString(code)}"


def unregister_host(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class _Bytes:
    """Device memory as torch.as_tensor takes it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8 over memory that somebody else owns and keeps."""
    if device.type == "cpu":
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)
    return torch.as_tensor(_Bytes(address, num_bytes), device=device)
