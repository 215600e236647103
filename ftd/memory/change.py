"""What ``ftctl budget`` asks for. Loads nothing heavy: the daemon needs it before any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftd.config import Auto
from ftd.units import Amount


@dataclass(frozen=True, slots=True)
class Change:
    """What was asked for; None: as it is."""

    vram: Amount | Literal["auto"] | None = None  # "auto": what other processes leave
    kv_tokens: int | Auto | None = None
    expert_slots: int | Auto | None = None
    auto: bool = False  # divide by need from now on
