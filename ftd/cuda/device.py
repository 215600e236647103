"""Which GPU computes, or why none does. Looks, and takes nothing but a context."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from ftd.errors import ConfigError
from ftd.memory.machine import Gpu

OLDEST_CAPABILITY = (8, 0)  # bf16 matrix products in hardware


@dataclass(frozen=True, slots=True)
class Verdict:
    gpu: Gpu | None
    reason: str = ""  # why there is none


def look_for_gpu(index: int = 0) -> Verdict:
    """The GPU of that number if kernels can run on it. Makes a context: about 0.3 s."""
    if not torch.backends.cuda.is_built():
        return Verdict(None, f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        return Verdict(None, "torch sees no usable GPU (driver, container or CUDA_VISIBLE_DEVICES)")
    if index >= torch.cuda.device_count():
        return Verdict(None, f"there is no GPU {index}: torch sees {torch.cuda.device_count()}")
    if importlib.util.find_spec("triton") is None:
        return Verdict(None, "the package triton is not installed")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        return Verdict(
            None, f"{torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}, at least 8.0 is needed",
        )  # fmt: skip
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as e:
        return Verdict(None, f"GPU {index} does not answer: {e}")
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


def choose_gpu(device: str) -> Verdict:
    """Obey ``--device``: auto takes GPU 0 if it is usable, cuda[:N] insists on it.

    Raises:
        ConfigError: a GPU was asked for and cannot be used.
    """
    if device == "cpu":
        return Verdict(None, "--device cpu")
    verdict = look_for_gpu(int(device.partition(":")[2] or 0) if device != "auto" else 0)
    if verdict.gpu is None and device != "auto":
        raise ConfigError(
            f"--device {device}: {verdict.reason}",
            hint="use --device cpu, or --device auto to take a GPU only where there is one",
        )
    return verdict
