"""When a pass over prompts pauses at a layer border for a decode step of the streams beside it.

A pass reads most experts whatever its length, so it is long rather than cut small; streams go on
within it. While prompts are computed each stream keeps a quarter of the speed it has without them:
the seconds that its steps would take alone come to a share of the seconds that go by. So a prompt
takes at most about 1 / (1 - share) of its time alone, less where a step and a pass overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Aimed at, for a promised 0.25: a pass has few borders, and steps beside it are slower.
SHARE = 0.32
MOST_PAUSED = 0.5  # of the time, whatever a step costs beside a pass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Of the passes since there have been both prompts and streams."""

    began_s: float
    paused_s: float = 0.0
    served_s: float = 0.0  # what the steps in pauses would have taken alone

    def due(self, now_s: float, decode_s: float | None) -> bool:
        """Whether a decode step runs now.

        Args:
            decode_s: what it takes alone; None: not known, so that one has to be measured.
        """
        if decode_s is None:
            return True
        elapsed_s = now_s - self.began_s
        if self.paused_s > MOST_PAUSED * elapsed_s:
            return False
        return self.served_s + decode_s / 2 <= SHARE * elapsed_s

    def ran(self, paused_s: float, decode_s: float) -> Pauses:
        """After a step that took ``paused_s``, and would take ``decode_s`` alone."""
        return replace(self, paused_s=self.paused_s + paused_s, served_s=self.served_s + decode_s)
