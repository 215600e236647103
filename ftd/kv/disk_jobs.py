"""What passes between the engine and the thread that keeps KV on disk."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ftd.kv.block_file import Head
from ftd.kv.block_index import Entry
from ftd.kv.cache import Landing

AHEAD_BLOCKS = 4  # read and checked before the engine has taken them


@dataclass(frozen=True, slots=True)
class StateAt:
    """A kept state of recurrent layers."""

    position: int
    chance: float
    slot: int
    life: int  # of the slot


class Block(NamedTuple):
    """What has been read of a file."""

    head: Head
    tokens: int  # that agree with the prompt
    pages: torch.Tensor  # [n, page_bytes] uint8
    states: Mapping[int, torch.Tensor]  # by position, [state_bytes] uint8


@dataclass(frozen=True, slots=True)
class Offer:
    """A sequence that has ended, as the engine thread saw it."""

    ids: array[int]
    pages: array[int]
    lives: tuple[int, ...]  # of the pages
    chance: float
    anchors: tuple[tuple[int, str, str], ...]  # position, kind, session
    states: tuple[StateAt, ...]
    ready: Landing  # all of it has been computed


@dataclass(slots=True)
class Reading:
    """Blocks of one prompt on their way from disk."""

    ids: array[int]
    entries: Sequence[tuple[Entry, int]]  # and how many tokens of each
    blocks: deque[Block] = field(default_factory=deque)
    over: bool = False  # no more will come
    unwanted: bool = False
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AHEAD_BLOCKS))

    def give_up(self) -> None:
        """Whoever asked for it wants no more."""
        self.unwanted = True
        self.room.release()


def up_to_a_state(
    entries: list[tuple[Entry, int]], known_tokens: int, prompt_tokens: int
) -> list[tuple[Entry, int]]:
    """What lies behind the last state that a prompt can begin with is of no use to it."""
    last = 0
    for i, (entry, tokens) in enumerate(entries, start=1):
        end = min(entry.head.begin + tokens, prompt_tokens - 1)
        if any(known_tokens < position <= end for position, _ in entry.head.states):
            last = i
    return entries[:last]
