"""How the kernels of a decode step follow each other: the next starts while the last still runs.

A step is many launches of a few microseconds, so what lies between two of them counts. From sm_90
on, a kernel may begin before the one ahead of it has ended (programmatic dependent launch; captured
in a graph it is an edge of that kind): its programs take their places, compute indices and load
weights, and wait at one point for everything earlier to end and be visible.

Rules for a kernel that is launched with ``chained``, or a chain of them breaks:

- It calls ``wait_for_earlier`` in every program, whatever else it does. The kernel behind it waits
  for this one only; that those before have ended, too, it knows because this one has waited.
- Before, it loads nothing but what was there when the step began and no kernel of a step writes:
  weights, norms, biases. Even what an earlier kernel but one has written may not be there yet.
  Where rows stand (positions, page tables) is settled before the embedding, which torch launches:
  kernels behind it may load that, too, past the L1 cache (".cg").
- Before, it stores nothing: an earlier kernel may still read what lies there.
- It may ``prefetch`` anything at any time: that brings lines to the L2 cache and tells nothing of
  what they hold. Between two uses of a few numbers, a layer's weights have taken their place there.
- ``let_next_start`` comes first: the next kernel only uses what this one leaves of the GPU, as it
  starts once each program of this one has come so far.

Kernels that are not launched so (torch's, cuBLAS') wait for all before them, and are waited for.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)
LINE_BYTES = 128  # what one address brings to the L2 cache
LEAST_DRIVER = 12030  # CUDA 12.3: the first that captures such launches


@triton.jit
def let_next_start(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()


@triton.jit
def prefetch(places, CHAINED: tl.constexpr):
    """Bring the lines that these addresses lie in to the L2 cache; nothing waits for them."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@functools.cache
def can_chain(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    return driver_version() >= LEAST_DRIVER


def driver_version() -> int:
    """As 1000 * major + 10 * minor of the newest CUDA it knows; 0: there is none to ask."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def chained(x: torch.Tensor) -> dict[str, Any]:
    """The arguments of a launch on ``x``'s device whose kernel keeps the rules above."""
    return {"CHAINED": True, "launch_pdl": True} if can_chain(x.device) else {"CHAINED": False}
