"""Which GPU computes, or why none does. Looks, and takes nothing but a context."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ftd.errors import ConfigError, first_line
from ftd.memory.machine import Gpu

OLDEST_CAPABILITY = (8, 0)  # bf16 matrix products in hardware


NOT_USABLE = "torch sees no usable GPU (driver, container or CUDA_VISIBLE_DEVICES)"
NO_TRITON = "the package triton is not installed"


@dataclass(frozen=True, slots=True)
class Verdict:
    gpu: Gpu | None
    reason: str = ""  # why there is none


def without_cuda(version: str) -> str:
    return f"torch {version} was built without CUDA"


def no_such_gpu(index: int, count: int) -> str:
    return f"there is no GPU {index}: torch sees {count}"


def too_old(name: str, capability: tuple[int, int]) -> str:
    return f"{name} has compute capability {capability[0]}.{capability[1]}, at least 8.0 is needed"


def look_for_gpu(index: int = 0) -> Verdict:
    """The GPU of that number if kernels can run on it. Makes a context: about 0.3 s."""
    if not torch.backends.cuda.is_built():
        return Verdict(None, without_cuda(torch.__version__))
    if not torch.cuda.is_available():
        return Verdict(None, NOT_USABLE)
    if index >= torch.cuda.device_count():
        return Verdict(None, no_such_gpu(index, torch.cuda.device_count()))
    if importlib.util.find_spec("triton") is None:
        return Verdict(None, NO_TRITON)
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return Verdict(None, too_old(torch.cuda.get_device_name(index), capability))
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as e:
        return Verdict(None, f"GPU {index} does not answer: {first_line(e)}")
    properties = torch.cuda.get_device_properties(index)
    return Verdict(
        Gpu(
            index,
            properties.name,
            str(properties.uuid),
            capability,
            total_bytes=total,
            free_bytes=free,
        )
    )


def choose_gpu(device: str, look: Callable[[int], Verdict] = look_for_gpu) -> Verdict:
    """Obey ``--device``: auto takes GPU 0 if it is usable, cuda[:N] insists on it.

    Raises:
        ConfigError: a GPU was asked for and cannot be used.
    """
    if device == "cpu":
        return Verdict(None, "--device cpu")
    verdict = look(int(device.partition(":")[2] or 0) if device != "auto" else 0)
    if verdict.gpu is None and device != "auto":
        raise ConfigError(
            f"--device {device}: {verdict.reason}",
            hint="use --device cpu, or --device auto to take a GPU only where there is one",
        )
    return verdict
