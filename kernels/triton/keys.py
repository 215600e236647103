"""Triton's cache on disk finds a kernel whatever was compiled before it.

The key of a kernel that calls others depends on whether these have keys already: two processes that
begin with different kernels would not find each other's. So all get theirs in one order.
"""

from __future__ import annotations

import functools
from importlib import import_module
from pkgutil import iter_modules

from triton.runtime.jit import JITFunction

from .numbers import INTERPRETED


@functools.cache
def settle_keys() -> None:
    """To be called before the first launch; takes a tenth of a second, once."""
    if INTERPRETED:
        return
    package = __name__.rpartition(".")[0]
    for found in sorted(iter_modules(import_module(package).__path__), key=lambda m: m.name):
        module = import_module(f"{package}.{found.name}")
        for _, kernel in sorted(vars(module).items()):
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key
