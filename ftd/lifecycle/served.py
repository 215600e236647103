"""What the lifecycle speaks of: a served model, its state, progress, and its loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftd.engine.api import EngineHandle, EngineLimits
from ftd.lifecycle.succession import Footprint
from ftd.units import format_bytes

if TYPE_CHECKING:
    from ftd.checkpoint.source import ModelSource
    from ftd.config import Config
    from ftd.memory.change import Change
    from ftd.text.textmodel import TextModel


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # takes no new requests; stays so until a reload or the end
    RELOADING = "reloading"  # takes requests all the same while the old model serves
    UNLOADED = "unloaded"  # nobody asked for a while; the next request loads the model again
    FAILED = "failed"
    STOPPED = "stopped"


class How(StrEnum):
    """What becomes of running requests when the old model has to go."""

    DRAIN = "drain"
    CUT = "cut"


class Phase(StrEnum):
    FINDING = "finding files"  # takes long only where the hub has to be asked
    CHECKING = "checking"
    READING = "reading weights"
    WARMING_UP = "warming up"
    RESIZING = "changing the budget"
    DRAINING = "draining"
    WAITING = "waiting to try again"


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    began_s: float  # monotonic
    done_bytes: int = 0
    total_bytes: int = 0  # 0: the phase has no measure

    @property
    def fraction(self) -> float | None:
        return self.done_bytes / self.total_bytes if self.total_bytes else None

    def __str__(self) -> str:
        if self.fraction is None:
            return str(self.phase)
        return f"{self.phase}, {self.fraction:.0%} of {format_bytes(self.total_bytes)}"

    def facts(self) -> dict[str, Any]:
        return {
            "phase": str(self.phase),
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "fraction": self.fraction,
        }


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A row of the memory that computes: the GPU's, or on the CPU device all of it."""

    name: str
    planned_bytes: int
    used_bytes: int  # of KV and slots what holds something; of the others what was planned
    note: str


@dataclass(frozen=True, slots=True)
class Reads:
    """What steps read, for rates of memory and link."""

    record_bytes: int  # of an expert
    dense_bytes: int  # of all weights that every step uses
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class BudgetDone:
    """What a change of budget did, all without a request being ended."""

    kv_tokens: int
    kv_tokens_were: int
    slots: int
    slots_were: int
    pages_evicted: int  # of the prefix cache
    pages_moved: int
    experts_evicted: int
    preempted: int  # sequences that continue later
    paused_s: float  # how long no step ran


class Memory(Protocol):
    """Memory of a loaded model, which changes while it serves. Lives on the event loop."""

    @property
    def config(self) -> Config:
        """The settings that the present sizes follow from."""
        ...

    @property
    def footprint(self) -> Footprint: ...

    @property
    def auto(self) -> bool:
        """Expert slots and KV share the budget by need."""
        ...

    @property
    def moves(self) -> bool:
        """``rebalance`` is to be called now and then."""
        ...

    @property
    def reads(self) -> Reads: ...

    def uses(self) -> tuple[MemoryUse, ...]: ...

    def table(self) -> str:
        """The plan in force, as people read it."""
        ...

    async def apply(self, change: Change) -> BudgetDone:
        """Change sizes at a safe point, while requests run.

        Raises:
            BudgetExceeded, ConfigError: it cannot be; nothing has changed.
        """
        ...

    async def rebalance(self) -> BudgetDone | None:
        """Move a piece of memory between slots and KV if that pays, or yield to other processes.

        Raises:
            NotReady: the engine is closed.
            BudgetExceeded: there is not enough left to yield to.
        """
        ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ServedModel:
    name: str
    aliases: tuple[str, ...]  # other names a request may use
    created: int  # unix time of loading
    path: Path
    text: TextModel
    engine: EngineHandle
    memory: Memory

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def listed(self) -> Listed:
        return Listed(self.name, self.aliases, self.created, self.limits)


@dataclass(frozen=True, slots=True)
class Listed:
    """What lists of models tell, also of one that is unloaded."""

    name: str
    aliases: tuple[str, ...]
    created: int
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did."""

    model: str
    was: str | None
    beside: bool  # the old model served until the new one was ready
    drained: bool  # no request of the old model was cut
    load_s: float
    unready_s: float  # how long no model took requests


@dataclass(frozen=True, slots=True)
class Preflight:
    """A model whose headers, config and plan are good."""

    beside: bool  # it can be loaded while the old model serves, and gets all it would get alone
    need_bytes: int
    available_bytes: int
    report: Callable[[], tuple[str, ...]]  # the printed plan and every finding; may take a second
    prepared: Any  # what the loader goes on with
    vocab: int = 0  # of the model


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: EngineHandle
    memory: Memory


class Models(Protocol):
    """The blocking work on models; every method is called on a thread of its own."""

    def resolve(self, model: str, progress: Callable[[int, int], None]) -> ModelSource:
        """Find the files of a directory, hub id or ``demo``; what ``progress`` raises ends it.

        Raises:
            ModelNotFound: nothing there, or the hub cannot be reached.
        """
        ...

    def check(self, config: Config, source: ModelSource, old: Footprint | None) -> Preflight:
        """Check headers, config and plan.

        Args:
            old: the model that is loaded now and would go.
        Raises:
            CheckpointError, BudgetExceeded, ConfigError: it could not be served.
        """
        ...

    def open_text(self, source: ModelSource) -> TextModel:
        """Tokenizer and template. Raises CheckpointError."""
        ...

    def load(
        self,
        config: Config,
        preflight: Preflight,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> Loaded:
        """Read the weights, start the engine and run a first real step.

        Gives up soon after ``cancelled()`` is true.
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model whose headers, plan, tokenizer and template are good."""

    config: Config
    source: ModelSource
    text: TextModel
    preflight: Preflight
