"""A module that is loaded when something of it is first asked for."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _PutOff(ModuleType):
    """Becomes the module itself. ``importlib.util.LazyLoader`` would load at the next import."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None, self.__name__
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def put_off(name: str) -> None:
    """Let imports of a module from here on be for nothing until its contents are needed.

    To be called where one thread runs. Nothing happens where it is loaded already, or missing.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _PutOff
    module.__dict__.pop("__path__", None)  # an import of a part asks for it, and loads the whole
    sys.modules[name] = module
