"""How an expert's gate and up become h: one formula, whose numbers a family chooses."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Activation:
    """h = (u + shift) · g · sigmoid(alpha · g), with g = min(gate, limit) and |u| ≤ limit."""

    limit: float = inf
    alpha: float = 1.0
    shift: float = 0.0


SILU = Activation()  # silu(gate) · up
GPT_OSS = Activation(limit=7.0, alpha=1.702, shift=1.0)  # limit: its config's swiglu_limit
