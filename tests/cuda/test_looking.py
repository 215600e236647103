"""A GPU as its driver tells of it: what is said of it, or why none is usable."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_char, c_int, c_size_t, cast

import pytest
import torch

from ftd.cuda.device import look_for_gpu
from ftd.cuda.looking import look_by_driver, torch_cuda
from ftd.units import GiB

INVALID = 101


class Driver:
    """Two GPUs; ``refuse``: a call that fails."""

    def __init__(self, *, version=12080, capability=(9, 0), count=2, refuse=""):
        self.version, self.capability, self.count, self.refuse = version, capability, count, refuse
        self.current = None

    def __getattr__(self, name):
        raise AttributeError(name)

    def cuInit(self, flags):
        return INVALID if self.refuse == "cuInit" else 0

    def cuDriverGetVersion(self, to):
        return _set(to, self.version)

    def cuDeviceGetCount(self, to):
        return _set(to, self.count)

    def cuDeviceGet(self, to, index):
        return _set(to, 70 + index)

    def cuDeviceGetName(self, to, size, device):
        ctypes.memmove(to, b"NVIDIA Test 9000\0", 17)
        return 0

    def cuDeviceGetUuid(self, to, device):
        cast(to, POINTER(c_char * 16))[0][:] = bytes(range(15)) + bytes([device.value])
        return 0

    def cuDeviceGetAttribute(self, to, attribute, device):
        return _set(to, self.capability[{75: 0, 76: 1}[attribute]])

    def cuDevicePrimaryCtxRetain(self, to, device):
        self.current = device.value
        return 0

    def cuCtxSetCurrent(self, context):
        return 0

    def cuMemGetInfo_v2(self, free, total):
        if self.refuse == "cuMemGetInfo_v2" or self.current is None:
            return INVALID
        _set(free, 20 * GiB, c_size_t)
        return _set(total, 24 * GiB, c_size_t)


def _set(to, value, kind=c_int):
    cast(to, POINTER(kind))[0] = value
    return 0


def look(driver, index=0, built_for="12.8"):
    return look_by_driver(index, lambda: driver, lambda: built_for)


@pytest.fixture(autouse=True)
def triton_installed(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "ftd.cuda.looking.find_spec", lambda name: name if name == "triton" else real(name)
    )


def test_all_that_a_plan_needs():
    gpu = look(Driver(), index=1).gpu
    assert (gpu.index, gpu.name, gpu.capability) == (1, "NVIDIA Test 9000", (9, 0))
    assert (gpu.free_bytes, gpu.total_bytes) == (20 * GiB, 24 * GiB)
    assert gpu.uuid == "00010203-0405-0607-0809-0a0b0c0d0e47"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(refuse="cuInit"), "no usable GPU"),
        (Driver(count=0), "no usable GPU"),
        (Driver(version=11080), "no usable GPU"),  # older than what torch was built for
        (Driver(refuse="cuMemGetInfo_v2"), "no usable GPU"),
        (Driver(capability=(7, 5)), "NVIDIA Test 9000 has compute capability 7.5"),
    ],
)
def test_why_there_is_none(driver, reason):
    verdict = look(driver)
    assert verdict.gpu is None and reason in verdict.reason


def test_a_number_too_high_a_library_missing_and_a_torch_without_cuda():
    assert look(Driver(), index=2).reason == "there is no GPU 2: torch sees 2"
    assert "built without CUDA" in look(Driver(), built_for=None).reason

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert "no usable GPU" in look_by_driver(0, missing, lambda: "12.8").reason


def test_what_torch_was_built_for_is_known_without_it():
    assert torch_cuda() == torch.version.cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_say_the_same():
    assert look_by_driver() == look_for_gpu()
