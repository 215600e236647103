"""Kernels compiled side by side, before a warm-up would compile them one after the other.

A rehearsal of the warm-up tells which kernels it needs: within ``compiling`` a launch only queues
its kernel for compilation, and what it would have written stays zero, which is a valid index
wherever one is read. Triton keeps what was compiled in memory and in its cache on disk. Its passes
and the assembler run without Python's lock, so threads do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_UNSET = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


class _Zeros(TorchFunctionMode):
    """Tensors that begin as anything begin as zeros."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNSET else made


def mark_of(*facts: object) -> Path:
    """A file in Triton's cache that is there once everything needed under ``facts`` is compiled.

    It goes with the cache. Other kernels, another Triton and other facts have others.
    """
    import triton
    from triton import knobs

    import ftd.kernels.triton as kernels

    digest = hashlib.sha256(repr((triton.__version__, *facts)).encode())
    for file in sorted(Path(kernels.__path__[0]).glob("*.py")):
        digest.update(file.read_bytes())
    return Path(knobs.cache.dir) / f"ftd-{digest.hexdigest()[:16]}"


def _kind(value: Any) -> Any:
    """Arguments of one kind are compiled alike; not all that are have one kind."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    return value.__class__, value


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Compile the Triton kernels that are launched within, and launch none of them.

    Leaving it waits for all. A kernel that does not compile is left to its first launch, which says
    what is wrong with it.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    run, queued = JITFunction.run, set()

    def queue(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kind = id(self), *map(_kind, args), *((name, _kind(v)) for name, v in kwargs.items())
        if kind not in queued:  # Triton would look for itself, and takes a millisecond
            queued.add(kind)
            run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(threads, thread_name_prefix="ftd-compile") as executor:
        JITFunction.run = queue
        try:
            with AsyncCompileMode(executor, ignore_errors=True), _Zeros():
                yield
        finally:
            JITFunction.run = run
