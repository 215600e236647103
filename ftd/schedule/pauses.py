"""When a pass over prompts pauses at a layer border for decode steps of the streams beside it.

A pass reads most experts whatever its length, so it is long rather than cut small; streams go on
within it. Two promises meet there: each stream keeps ``KEPT`` of the speed it has alone, and no
prompt takes more than ``SLOWED`` of its time alone, so a third of the time may be lost to it. How
far apart they are depends on what a step costs the pass, which is measured: less than the step
takes where the link brings experts meanwhile. The share aimed at lies in the middle. Where a step
costs so much that both cannot hold, both are missed alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEPT = 0.25
SLOWED = 1.5
MOST_PAUSED = 0.5  # of the time, whatever a step costs the pass
LEARNT = 0.1  # of each step beside a pass: the mean follows within tens of them


@dataclass(frozen=True, slots=True)
class Pauses:
    """Of the passes since there have been both prompts and streams.

    Args:
        settled_s: when the last steps ran, or both began; None: there are not both now.
        owed_s: what was due to streams then, in seconds of steps as they take alone: each moment
            counts by what was aimed at in it.
        slower: what a step beside a pass takes, as a multiple of its time alone. This and ``lost``
            are remembered from prompt to prompt.
        lost: what it costs the pass, as a multiple of the same.
    """

    settled_s: float | None = None
    owed_s: float = 0.0
    slower: float = 1.0
    lost: float = 1.0

    @property
    def aim(self) -> float:
        """The share of its speed that a stream shall keep."""
        most = MOST_PAUSED / self.slower
        if self.lost <= 0:
            return most
        return min((KEPT + (1 - 1 / SLOWED) / self.lost) / 2, most)

    def due(self, now_s: float, decode_s: float | None) -> int:
        """How many decode steps run now, one behind the other.

        Args:
            decode_s: what one takes alone; None: not known, so that one has to be measured.
        """
        if decode_s is None:
            return 1
        owed_s = self._owed_s(now_s)
        # while they run, more become due
        return max(0, int((owed_s / decode_s + 0.5) / (1 - self.aim * self.slower)))

    def _owed_s(self, now_s: float) -> float:
        assert self.settled_s is not None
        return self.owed_s + self.aim * (now_s - self.settled_s)

    def pause_s(self, now_s: float, decode_s: float | None) -> float:
        """How long those that are due will take; 0 where that is not known."""
        return self.due(now_s, decode_s) * self.slower * decode_s if decode_s else 0.0

    def ran(
        self, now_s: float, paused_s: float, decode_s: float, steps: int = 1, free: float = 0.0
    ) -> Pauses:
        """After so many steps that took ``paused_s``, and would take ``decode_s`` each alone.

        Args:
            free: the part of that time which the pass has not lost.
        """
        served_s = steps * decode_s
        seen = paused_s / served_s if served_s else 1.0
        learnt = 1 - (1 - LEARNT) ** steps
        return replace(
            self,
            settled_s=now_s,
            owed_s=self._owed_s(now_s) - served_s,
            slower=self.slower + learnt * (seen - self.slower),
            lost=self.lost + learnt * ((1 - free) * seen - self.lost),
        )

    def since(self, now_s: float) -> Pauses:
        """From now on there are both; if there were already, since when stays."""
        return self if self.settled_s is not None else replace(self, settled_s=now_s)

    def over(self) -> Pauses:
        """There are not both any more."""
        return Pauses(slower=self.slower, lost=self.lost)
