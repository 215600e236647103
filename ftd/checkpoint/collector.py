"""Python's collector of cycles, out of the way while a hundred thousand small objects are made.

It looks through all of them again and again, finds nothing, and takes half of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def without_collector(work: Callable[P, T]) -> Callable[P, T]:
    """Run ``work`` with the collector off; for a second or so, and nothing that makes cycles."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return run
