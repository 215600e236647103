"""How fast the engine has been in the last seconds."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

WINDOW_S = 5.0
STEPS = 64  # of which the median step time is taken


class Pace:
    """Tokens a second over the last seconds of work of one kind, however long ago that was."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque()  # tokens, seconds
        self._tokens, self._seconds = 0, 0.0  # of all of them

    def step(self, tokens: int, seconds: float) -> None:
        self._add(tokens, seconds)
        self._steps.append((tokens, seconds))
        while self._seconds - self._steps[0][1] >= WINDOW_S:
            tokens, seconds = self._steps.popleft()
            self._add(-tokens, -seconds)

    def _add(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds

    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.decode, self.prefill = Pace(), Pace()
        self._clock = clock
        self._steps: deque[tuple[float, int, int]] = deque()  # end, tokens drawn, prompt tokens
        self._seconds: deque[float] = deque(maxlen=STEPS)

    def step(self, drawn: int, prompt_tokens: int, seconds: float) -> None:
        now_s = self._clock()
        self._steps.append((now_s, drawn, prompt_tokens))
        self._seconds.append(seconds)
        if prompt_tokens:
            self.prefill.step(prompt_tokens, seconds)
        else:
            self.decode.step(drawn, seconds)
        self._forget(now_s)

    def decode_tokens_per_s(self) -> float:
        return self._per_s(1)

    def prefill_tokens_per_s(self) -> float:
        return self._per_s(2)

    def step_ms_p50(self) -> float:
        return 1000 * statistics.median(self._seconds) if self._seconds else 0.0

    def _per_s(self, column: int) -> float:
        self._forget(self._clock())
        return sum(step[column] for step in self._steps) / WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._steps and self._steps[0][0] < now_s - WINDOW_S:
            self._steps.popleft()
