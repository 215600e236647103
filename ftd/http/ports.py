"""What the HTTP front end serves from: the narrow view it has of ``ftd.lifecycle``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from ftd.engine.api import EngineHandle
from ftd.lifecycle.served import Listed
from ftd.text.textmodel import TextModel


class ServedModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Collection[str]: ...

    @property
    def created(self) -> float:
        """When it was loaded, as a Unix time."""
        ...

    @property
    def text(self) -> TextModel: ...

    @property
    def engine(self) -> EngineHandle: ...


class Lifecycle(Protocol):
    def current(self) -> ServedModel:
        """The model that takes requests now.

        Raises:
            NotReady: none does; the message says why, ``retry_after_s`` when to ask again.
        """
        ...

    async def wait_ready(self, timeout_s: float | None) -> ServedModel:
        """``current``, but waits while a model is on its way. Raises NotReady."""
        ...

    def listed(self) -> Listed:
        """Of the model that takes requests, or is loaded when one comes. Raises NotReady."""
        ...

    def health(self) -> dict[str, Any]:
        """``ready`` (bool), and facts for people: cause, progress of loading, model."""
        ...
