"""Kernels compiled side by side, before a warm-up would compile them one after the other.

A rehearsal of the warm-up tells which kernels it needs: within ``compiling`` a launch only queues
its kernel for ``Compiler``, and what it would have written stays zero, which is a valid index
wherever one is read. The warm-up then takes what was compiled from Triton's cache on disk.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch.overrides import TorchFunctionMode

from .compiler import Compiler, Job

log = structlog.get_logger(__name__)

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
def compiling(processes: int) -> Iterator[None]:
    """Compile the Triton kernels that are launched within, and launch none of them.

    Leaving it waits for all. A kernel that does not compile is left to its first launch, which says
    what is wrong with it.
    """
    from triton.runtime.jit import JITFunction

    from ftd.kernels.triton.keys import settle_keys

    settle_keys()
    run, do_compile = JITFunction.run, JITFunction._do_compile
    queued, submitted, signatures = set(), set(), set()
    compiler, began_s = Compiler(processes), time.monotonic()

    def queue(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kind = id(self), *map(_kind, args), *((name, _kind(v)) for name, v in kwargs.items())
        if kind not in queued:  # Triton would look for itself, and takes a millisecond
            queued.add(kind)
            run(self, *args, grid=grid, warmup=True, **kwargs)

    def submit(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> None:  # fmt: skip
        if (id(self), key) in submitted:  # not all that is launched with other numbers is another
            return
        submitted.add((id(self), key))
        types = tuple(signature.values())
        compiler.submit(
            Job(
                self.fn.__module__,
                self.fn.__qualname__,
                signature,
                constants,
                attributes,
                options.__dict__,
                self.device_caches[device][2],
                launcher=types not in signatures,
            )
        )
        signatures.add(types)

    JITFunction.run, JITFunction._do_compile = queue, submit
    try:
        with _Zeros():
            yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        queued_s = time.monotonic() - began_s
        compiled, jobs = compiler.finish(), len(compiler.jobs)
        tell = log.info if compiled == jobs else log.warning  # the rest is compiled one by one
        tell(
            "kernels.compiled",
            count=compiled,
            of=jobs,
            queued_s=round(queued_s, 2),
            took_s=round(time.monotonic() - began_s, 2),
        )
