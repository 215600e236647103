"""What background fills may take from the next step: from what the last steps missed and took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ftd.experts import costs
from ftd.experts.costs import Allowance, Dividing, Pace, StepTimes

# Until rates are measured and a step is: a miss is read over the link, and bringing it into a slot
# costs one more read of it.
UNMEASURED = Allowance(fills=2.0, cost_misses=1.0)


class FillPrice:
    """Owned by the engine thread.

    Args:
        allowance: until it is measured.
    """

    def __init__(self, allowance: Allowance = UNMEASURED) -> None:
        self._allowance = allowance
        self._ways: Sequence[Dividing] = ()
        self._way: Dividing | None = None  # of the running step
        self._step = StepTimes()
        self._pace = Pace()

    def divide(self, ways: Sequence[Dividing]) -> None:
        """How misses are divided from now on, with 1, 2, 4 and 8 rows."""
        self._ways = ways

    def routed(self, rows: int, misses: np.ndarray, hits: np.ndarray) -> None:
        """Of the running decode step: distinct experts of each layer, [L] each."""
        self._way = None
        if self._ways and rows:
            self._way = self._ways[min((rows - 1).bit_length(), len(self._ways) - 1)]
            self._step = self._way.times(misses, hits)

    def took(self, rows: int, seconds: float) -> None:
        """The step is over.

        Args:
            rows: 0: it was no decode step, or it ran beside something else.
        """
        if self._way is not None and rows:
            step = replace(self._step, step_s=max(seconds, self._step.step_s))
            self._pace = self._pace.after(step)
            self._allowance = costs.allowance(self._way.rates, self._pace)
        self._way = None

    @property
    def allowance(self) -> Allowance:
        return self._allowance
