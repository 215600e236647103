"""What an API's words for one request have to be able to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ftd.text.answer import Piece

from .generation import Job, Usage
from .listener import Voice


class Plain(Protocol):
    """One request in one API's words: what it asks for, and how it wants to be answered."""

    job: Job
    stream: bool  # it is a ``Dialect``, and its events are wanted

    def reply(self, answers: list[Piece], usage: Usage) -> dict[str, Any]:
        """The body of a plain reply."""
        ...


class Dialect(Plain, Voice, Protocol):
    """One that can be streamed as well."""

    def opening(self, told: int) -> Iterable[bytes]:
        """Events as soon as the request is admitted, after ``told`` events of its hold."""
        ...

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]: ...

    def closing(self, usage: Usage) -> Iterable[bytes]: ...
