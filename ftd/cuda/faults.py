"""What the GPU's failures mean, and how tests bring them about.

A CUDA error that is no lack of memory stays: every later call of the process fails with it, so the
process has to end, and whoever looks after it starts another. Told by the words of the libraries,
since torch, triton and the driver each raise something else.
"""

from __future__ import annotations

import re

import torch

_CUDA = re.compile(r"CUDA error|Triton Error \[CUDA\]|CUDA_ERROR_|CUDA driver error|cudaError")
_NO_MEMORY = re.compile(r"out.of.memory", re.I)


def is_lost(error: BaseException | None) -> bool:
    """Whether ``error``, or what caused it, says that the GPU's context is broken."""
    while error is not None:
        text = str(error)
        if _CUDA.search(text) and not _NO_MEMORY.search(text):
            return True
        error = error.__cause__
    return False


def break_context(device: torch.device) -> None:
    """Bring about an error that stays; on the CPU device one is raised that looks like it."""
    if device.type == "cuda":  # its kernel asserts; the error comes up where somebody waits next
        torch.zeros(8, device=device)[torch.full((1,), 1 << 20, device=device)]
    else:
        raise RuntimeError("CUDA error: the context was broken, as --fault asked")
