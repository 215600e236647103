"""Triton's interpreter without its largest cost: it patches the language anew in each inner call.

Once for each launch is enough, since all kernels of a launch see the same modules.
"""

from __future__ import annotations

import inspect
from typing import Any


def install() -> None:
    """For this process; does nothing where there is no triton, or one that works otherwise."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ == __name__:
        return
    patched: set[str] = set()

    class Scope:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def restore(self) -> None:
            patched.clear()
            self.inner.restore()

    def patch_once(fn: Any) -> Any:
        modules = {
            value.__name__
            for value in fn.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        }
        if modules and modules <= patched:
            return None  # an inner call: only launches ask for the scope
        patched.update(modules)
        return Scope(patch(fn))

    interpreter._patch_lang = patch_once
