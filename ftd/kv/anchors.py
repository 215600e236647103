"""Anchors: positions of a prompt that work is likely to resume from, and what became of them.

The text layer finds them (``ftd.text.borders``), requests carry them, the prefix tree keeps them
with the pages they stand on, ``ftctl anchors`` lists them. A match does not need one: it goes as
far as tokens agree. Anchors say what a stretch of tokens is worth (``ftd.kv.value``), where the
state of a recurrent layer is kept, and what a match ended behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AnchorKind(StrEnum):
    """What ends at, or comes behind, a position."""

    SYSTEM = "system"  # end of tools and system prompt
    USER = "user"  # before the last message of the user
    TURN = "turn"  # end of an answer
    RESULT = "result"  # end of a tool's result
    FORK = "fork"  # two prompts have parted here, and a third came to it
    ROLE = "role"  # a message begins
    THOUGHT = "thought"  # end of thinking
    CALL = "call"  # a call begins
    CALL_END = "call end"


@dataclass(frozen=True, slots=True)
class Anchor:
    position: int  # tokens before it
    kind: AnchorKind


class Ended(StrEnum):
    """Why a match ended where it did."""

    WHOLE = "the whole prompt is known"  # but for its last token, which has to be computed
    GOES_ON = "new tokens behind all that was known"
    NOTHING = "nothing is known yet"
    DIFFERS = "other tokens follow here in what is known"
    EVICTED = "what followed here has been evicted"
    STATE = "no state of recurrent or windowed layers is kept further on"
    OFF = "logprobs of the prompt were asked for"


@dataclass(frozen=True, slots=True)
class Resumed:
    """How a prompt made use of what was known."""

    ended: Ended
    anchor: Anchor | None = None  # the last one it passed


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptAnchor:
    """An anchor in the prefix tree."""

    position: int
    kind: AnchorKind
    session: str
    used_s: float
    hits: int = 0  # matches that ended at it, or behind it before the next
    saved: float = 0.0  # by those, in seconds if a first token takes one (``value.Cost``)

    @property
    def identity(self) -> tuple[str, str, int]:
        """What it is found by on disk."""
        return self.session, str(self.kind), self.position

    @property
    def shown(self) -> bool:
        """A place where prompts part is an anchor once a prompt has come to it again."""
        return self.kind is not AnchorKind.FORK or self.hits > 0


@dataclass(frozen=True, slots=True)
class AnchorTotals:
    """All anchors together, and what is kept to resume from."""

    count: int = 0  # in the memory steps use, and those left in the host memory below it
    kv_bytes: int = 0  # of pages that nobody runs on, in the memory steps use
    host_bytes: int = 0
    state_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0  # since loading
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnchorInfo:
    """One line of ``ftctl anchors``."""

    session: str
    kind: str
    position: int
    tokens: int  # behind the anchor before it
    kv_bytes: int = 0  # of these tokens, in the memory steps read; what several share, once
    host_bytes: int = 0  # in the tier of host memory below a GPU's
    state_bytes: int = 0  # of the state of recurrent layers at the position
    disk_bytes: int = 0
    hits: int = 0
    age_s: float = 0.0  # since its last use
    saved_s: float = 0.0  # by all hits
    in_use: bool = False  # by a running request
