"""When a pass over prompts pauses at a layer border for a decode step of the streams beside it.

A pass reads most experts whatever its length, so it is long rather than cut small; streams go on
within it. Two promises meet there: each stream keeps ``KEPT`` of the speed it has alone, and no
prompt takes more than ``SLOWED`` of its time alone, so pauses may take a third of the time. How far
apart they are depends on what a step costs beside a pass, which is measured: the share aimed at
lies in the middle. Where a step costs so much that both cannot hold, both are missed alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEPT = 0.25
SLOWED = 1.5
MOST_PAUSED = 0.5  # of the time, whatever a step costs beside a pass
LEARNT = 0.1  # of each step beside a pass: the mean follows within tens of them


@dataclass(frozen=True, slots=True)
class Pauses:
    """Of the passes since there have been both prompts and streams.

    Args:
        began_s: None: there are not both now.
        served_s: what the steps in pauses would have taken alone.
        slower: what a step beside a pass takes, as a multiple of its time alone. It is remembered
            from prompt to prompt.
    """

    began_s: float | None = None
    served_s: float = 0.0
    slower: float = 1.0

    @property
    def aim(self) -> float:
        """The share of its speed that a stream shall keep."""
        affordable = (1 - 1 / SLOWED) / self.slower
        return min((KEPT + affordable) / 2, MOST_PAUSED / self.slower)

    def due(self, now_s: float, decode_s: float | None) -> bool:
        """Whether a decode step runs now.

        Args:
            decode_s: what it takes alone; None: not known, so that one has to be measured.
        """
        assert self.began_s is not None
        if decode_s is None:
            return True
        return self.served_s + decode_s / 2 <= self.aim * (now_s - self.began_s)

    def ran(self, paused_s: float, decode_s: float) -> Pauses:
        """After a step that took ``paused_s``, and would take ``decode_s`` alone."""
        seen = paused_s / decode_s if decode_s else 1.0
        slower = self.slower + LEARNT * (seen - self.slower)
        return replace(self, served_s=self.served_s + decode_s, slower=slower)

    def since(self, now_s: float) -> Pauses:
        """From now on there are both; if there were already, since when stays."""
        return self if self.began_s is not None else replace(self, began_s=now_s)

    def over(self) -> Pauses:
        """There are not both any more."""
        return Pauses(slower=self.slower)
