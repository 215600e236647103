"""The GPU as its driver tells of it: without torch, whose import takes longer than all of a check.

Says what ``ftd.cuda.device.look_for_gpu`` would; a start asks torch, which has to work anyway.
"""

from __future__ import annotations

import ctypes
import runpy
import uuid
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t, c_void_p
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ftd.cuda.device import NO_TRITON, NOT_USABLE, Verdict, no_such_gpu, too_old, without_cuda
from ftd.cuda.device import OLDEST_CAPABILITY as OLDEST
from ftd.memory.machine import Gpu

_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NAME_BYTES = 256


class _Refused(Exception):
    """The driver has no answer."""


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    found: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return found


def look_by_driver(
    index: int = 0,
    load: Callable[[], ctypes.CDLL] = _driver,
    built_for: Callable[[], str | None] = torch_cuda,
) -> Verdict:
    """The GPU of that number if kernels can run on it. Makes a context, for its free memory."""
    if (cuda := built_for()) is None:
        return Verdict(None, without_cuda(version("torch")))
    try:
        return _look(load(), index, int(cuda.partition(".")[0]))
    except (OSError, AttributeError, _Refused):
        return Verdict(None, NOT_USABLE)


def _look(driver: ctypes.CDLL, index: int, least_version: int) -> Verdict:
    def ask(name: str, *arguments: object) -> None:
        if getattr(driver, name)(*arguments) != 0:
            raise _Refused(name)

    ask("cuInit", 0)
    known, count, device = c_int(), c_int(), c_int()
    ask("cuDriverGetVersion", byref(known))
    ask("cuDeviceGetCount", byref(count))
    if known.value // 1000 < least_version or not count.value:
        return Verdict(None, NOT_USABLE)
    if index >= count.value:
        return Verdict(None, no_such_gpu(index, count.value))
    if find_spec("triton") is None:
        return Verdict(None, NO_TRITON)
    ask("cuDeviceGet", byref(device), index)
    name, identity = (c_char * _NAME_BYTES)(), (c_char * 16)()
    ask("cuDeviceGetName", name, _NAME_BYTES, device)
    ask("cuDeviceGetUuid", identity, device)
    numbers = [c_int(), c_int()]
    for number, attribute in zip(numbers, _CAPABILITY, strict=True):
        ask("cuDeviceGetAttribute", byref(number), attribute, device)
    capability = numbers[0].value, numbers[1].value
    called = name.value.decode()
    if capability < OLDEST:
        return Verdict(None, too_old(called, capability))
    context, free, total = c_void_p(), c_size_t(), c_size_t()
    ask("cuDevicePrimaryCtxRetain", byref(context), device)
    ask("cuCtxSetCurrent", context)
    ask("cuMemGetInfo_v2", byref(free), byref(total))
    return Verdict(
        Gpu(
            index,
            called,
            str(uuid.UUID(bytes=identity.raw)),
            capability,
            total_bytes=total.value,
            free_bytes=free.value,
        )
    )
