"""Records which experts the router chose: what tools/simulate.py replays."""

from __future__ import annotations

import numpy as np


class TraceRecorder:
    """Routing of up to ``max_tokens`` rows as [tokens, L, K].

    Rows of a step count only once the step is known to be good. Bounded memory:
    ``max_tokens * L * K`` bytes, twice that with more than 256 experts. Later rows are left out.
    """

    def __init__(self, num_layers: int, num_experts: int, max_tokens: int) -> None:
        self._num_layers = num_layers
        self._dtype = np.uint8 if num_experts <= 256 else np.int16
        self._max_tokens = max_tokens
        self._kept: np.ndarray | None = None  # [max_tokens, L, K], made when K is known
        self._step: list[np.ndarray | None] = [None] * num_layers
        self.num_tokens = 0

    @property
    def full(self) -> bool:
        return self.num_tokens >= self._max_tokens

    def add(self, layer: int, ids: np.ndarray) -> None:
        """Keep a copy of one layer's routing, [T, K]; a full recorder ignores it."""
        if not self.full:
            self._step[layer] = ids.copy()

    def commit_step(self) -> None:
        """The step was good. A step that did not reach every layer is dropped."""
        layers = [ids for ids in self._step if ids is not None]
        self.drop_step()
        if len(layers) < self._num_layers or len({ids.shape for ids in layers}) != 1:
            return
        rows = np.stack(layers, axis=1)  # [T, L, K]
        rows = rows[(rows >= 0).all((1, 2))]  # rows not in use carry -1
        if self._kept is None:
            self._kept = np.empty((self._max_tokens, *rows.shape[1:]), self._dtype)
        rows = rows[: self._max_tokens - self.num_tokens]
        self._kept[self.num_tokens : self.num_tokens + len(rows)] = rows
        self.num_tokens += len(rows)

    def drop_step(self) -> None:
        self._step = [None] * self._num_layers

    def kept(self) -> np.ndarray:
        """What was recorded, [tokens, L, K]."""
        kept = self._kept if self._kept is not None else np.empty((0, self._num_layers, 0))
        return kept[: self.num_tokens].astype(self._dtype, copy=False)
