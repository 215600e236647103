"""What a pass over prompts calls in each of its layers, so that steps of others can run then."""

from __future__ import annotations

from typing import Protocol


class Pause(Protocol):
    """Made once a layer, when steps of others disturb the pass least."""

    def is_waited_for(self) -> bool:
        """Whether anybody could have a step in this pass."""
        ...

    def coming_s(self) -> float:
        """How long it is expected to be if it is made now; 0: nobody has a step to run."""
        ...

    def __call__(self, free: float = 0.0) -> None:
        """Make it.

        Args:
            free: the part of its time in which the pass goes on all the same, since its experts
                are on their way over the link.
        """
        ...


class NoPause:
    """Of a step that nobody waits for."""

    def is_waited_for(self) -> bool:
        return False

    def coming_s(self) -> float:
        return 0.0

    def __call__(self, free: float = 0.0) -> None:
        pass


NO_PAUSE = NoPause()
