"""The context that is made beside imports asks the driver for the right device, or for nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from ftd.cuda import early


class Driver:
    def __init__(self, init: int = 0) -> None:
        self.init, self.calls = init, []

    def cuInit(self, flags):
        self.calls.append("init")
        return self.init

    def cuDeviceGet(self, device, index):
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 70 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append(device.value)
        return 0


@pytest.mark.parametrize(("device", "number"), [("auto", 70), ("cuda", 70), ("cuda:3", 73)])
def test_the_device_that_was_asked_for(device, number):
    driver = Driver()
    early.begin(device, lambda: driver).join()
    assert driver.calls == ["init", number]


def test_none_for_the_cpu_nor_without_a_driver():
    assert early.begin("cpu", lambda: pytest.fail("asked for")) is None

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    early.begin("auto", missing).join()
    driver = Driver(init=100)
    early.begin("auto", lambda: driver).join()
    assert driver.calls == ["init"]


def test_it_needs_no_torch():
    code = "import ftd.cuda.early, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
