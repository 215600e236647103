"""The GPU's context, made while torch is still being imported: both take about half a second.

torch uses the device's primary context, so it finds this one. Without torch: only the driver's own
library is called, which lets other threads run meanwhile. Whatever goes wrong here is left to torch
to find, and to say.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

_OK = 0


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def begin(device: str, load: Callable[[], ctypes.CDLL] = _driver) -> threading.Thread | None:
    """Start making the context that ``--device`` asks for; None where it asks for none."""
    if device == "cpu":
        return None
    index = int(device.partition(":")[2] or 0)
    thread = threading.Thread(target=_make, args=(index, load), name="ftd-context", daemon=True)
    thread.start()
    return thread


def _make(index: int, load: Callable[[], ctypes.CDLL]) -> None:
    try:
        cuda = load()
    except OSError:
        return  # no driver
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == _OK and cuda.cuDeviceGet(ctypes.byref(device), index) == _OK:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
