"""What ``ftctl`` and ``ftd`` say to each other: JSON lines over a Unix socket.

    → {"protocol": 1, "command": "reload", "model": "/models/b", "how": "drain", "timeout_s": 60.0}
    ← {"progress": {"phase": "reading weights", "done_bytes": 8192, "total_bytes": 65536}}
    ← {"result": {"model": "b", "was": "a", ...}}      or
    ← {"error": {"code": "checkpoint_invalid", "message": "...", "hint": "..."}}

A connection carries any number of commands, one after the other. Every line from ftd has exactly
one of the keys above; a stream is many results and ends with the connection. Fields are only ever
added: a client ignores those it does not know; ftd refuses unknown ones, for a flag that is
silently ignored is worse than an error. ``ftd.control.lines`` writes and reads them.

Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from ftd.engine.api import EngineLimits, EngineStatus, RequestInfo
from ftd.kv.anchors import AnchorInfo

PROTOCOL = 1  # raised when an old client would misread what a new ftd says, or the other way round
INTERVAL_S = (0.05, 60.0)  # between two results of watch

R = TypeVar("R")


class At(StrEnum):
    """When a command runs."""

    ANY_TIME = "any time"  # reads a snapshot
    SAFE_POINT = "safe point"  # changes the engine between two steps
    BESIDE = "beside"  # takes long: runs beside the engine, which is changed at a safe point


class Command(Generic[R]):
    """Base of all commands; ``R`` is what the answer holds."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table of commands."""

    name: str
    command: type[Command[Any]]
    result: type[Any]
    at: At
    stream: bool


COMMANDS: dict[str, Entry] = {}
_ENTRY_OF: dict[type[Command[Any]], Entry] = {}

C = TypeVar("C", bound=type[Command[Any]])


def command(name: str, *, at: At, result: type[Any], stream: bool = False) -> Callable[[C], C]:
    def enter(cls: C) -> C:
        assert name not in COMMANDS, name
        COMMANDS[name] = _ENTRY_OF[cls] = Entry(name, cls, result, at, stream)
        return cls

    return enter


def entry_of(instance: Command[Any]) -> Entry:
    return _ENTRY_OF[type(instance)]


# ---- parts of answers


@dataclass(frozen=True, slots=True)
class Error:
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0  # 0: the phase has no measure
    running: int = 0  # requests that have not ended yet
    waiting: int = 0
    fraction: float | None = None  # done, where bytes do not measure it


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A use of the memory that computes: the GPU's, or on the CPU device all of it."""

    name: str
    planned_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the engine did since the event before, as rates."""

    seconds: float
    steps_per_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    reused_tokens_per_s: float
    hits_per_s: float  # (step, layer, distinct expert)
    misses_per_s: float
    fetched_per_s: float  # of the misses, those over the link; the others are computed in place
    evicted_per_s: float
    link_bytes_per_s: float | None  # None: there is no link
    dram_bytes_per_s: float | None  # None: experts are not counted without slots


@dataclass(frozen=True, slots=True)
class StatusResult:
    version: str
    pid: int
    uptime_s: float
    state: str  # loading, ready, draining, reloading, failed, stopped
    ready: bool
    cause: str | None  # why it is not ready
    last_failure: str | None  # of an engine or a reload, until a reload succeeds
    model: str | None
    path: str | None
    http: str
    rss_bytes: int
    progress: Progress | None = None
    limits: EngineLimits | None = None
    engine: EngineStatus | None = None
    memory: tuple[MemoryRow, ...] = ()
    traffic: Traffic | None = None  # of watch, from its second event on
    api_key_file: str | None = None  # where the keys stand that HTTP asks for; None: it asks none


@dataclass(frozen=True, slots=True)
class HealthResult:
    state: str
    ready: bool
    cause: str | None


@dataclass(frozen=True, slots=True)
class RequestsResult:
    model: str | None
    requests: tuple[RequestInfo, ...]


@dataclass(frozen=True, slots=True)
class CancelResult:
    request_id: str


@dataclass(frozen=True, slots=True)
class ReloadResult:
    model: str
    was: str | None
    beside: bool  # the old model served until the new one was ready
    drained: bool  # no request of the old model was cut
    load_s: float
    unready_s: float  # how long no model took requests


@dataclass(frozen=True, slots=True)
class DrainResult:
    model: str
    waited_s: float
    unloaded: bool = False  # it was: there was nothing to drain, and the next request loads it


@dataclass(frozen=True, slots=True)
class StopResult:
    pid: int


@dataclass(frozen=True, slots=True)
class CheckResult:
    model: str
    report: tuple[str, ...]
    need_bytes: int
    available_bytes: int
    beside: bool  # a reload would load it while the old model serves


@dataclass(frozen=True, slots=True)
class ExpertsResult:
    """Where the experts are. Counters count (step, layer, distinct expert) since loading."""

    slots_total: int
    slots_used: int
    hits: int
    misses: int
    fetched: int
    evicted: int


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """Sizes in force, and what a change did; without a change it is the same as before."""

    changed: bool
    auto: bool  # slots and KV share the budget by need
    auto_was: bool
    kv_tokens: int
    kv_tokens_were: int
    kv_tokens_most: int  # what the pool may grow to
    slots: int
    slots_were: int
    context_tokens: int = 0  # most of one sequence; 0: an older ftd does not say
    context_tokens_were: int = 0
    pages_evicted: int = 0  # of the prefix cache
    pages_moved: int = 0
    experts_evicted: int = 0
    preempted: int = 0  # sequences that continue later
    paused_ms: float = 0.0
    plan: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Experts the router chose, [tokens, layers, experts_per_token]."""

    model: str
    tokens: int
    layers: int
    experts_per_token: int
    dtype: str  # uint8 or int16
    data: str  # base64, row-major


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What the machine reaches with decode batches of one size; a rate of 0: there is no such path.

    ``n`` experts of a layer take the fixed time and ``n`` times their bytes at the rate.
    """

    batch: int
    link_bytes_per_s: float
    link_fixed_s: float
    cpu_bytes_per_s: float
    cpu_fixed_s: float
    link_beside_cpu: float  # part of its rate that the link keeps while the CPU computes
    cpu_beside_link: float
    slots_bytes_per_s: float  # resident experts
    layer_fixed_s: float | None  # what a layer takes beside its experts; None: not known
    fetch_of: tuple[float, ...]  # of 0, 1, 2, ... misses in a layer, so many take the link


@dataclass(frozen=True, slots=True)
class ProfileResult:
    model: str
    gpu: str  # UUID; "": the CPU device
    gpu_name: str
    cpu: str
    threads: int  # of the CPU
    experts: str  # their format and shape
    expert_bytes: int
    rows: tuple[ProfileRow, ...]
    read_bytes_per_s: float  # plain read of the experts by the CPU
    handshake_s: float  # what asking adds to the CPU's work; in its fixed time
    path: str  # the file it was written to
    took_s: float
    longest_pause_s: float  # in which no step of a request ran


@dataclass(frozen=True, slots=True)
class AnchorsResult:
    model: str
    anchors: tuple[AnchorInfo, ...]  # those that are left
    pages_freed: int = 0  # by dropping


@dataclass(frozen=True, slots=True)
class VerifiedSession:
    """What came of replaying one recorded session; see ``ftd.lifecycle.verify``."""

    session: str
    requests: int
    prompt_tokens: int
    recomputed_tokens: int
    ideal_tokens: int  # behind the last border that an earlier prompt or answer shares
    most_above_ideal: int  # of a single request
    checked: int  # answers compared with a cold run
    unequal: int
    max_difference: float  # of a logprob


@dataclass(frozen=True, slots=True)
class VerifyResult:
    model: str
    sessions: tuple[VerifiedSession, ...]
    equal: bool


# ---- the table


@command("status", at=At.ANY_TIME, result=StatusResult)
@dataclass(frozen=True, slots=True)
class Status(Command[StatusResult]):
    pass


@command("health", at=At.ANY_TIME, result=HealthResult)
@dataclass(frozen=True, slots=True)
class Health(Command[HealthResult]):
    pass


@command("watch", at=At.ANY_TIME, result=StatusResult, stream=True)
@dataclass(frozen=True, slots=True)
class Watch(Command[StatusResult]):
    interval_s: float = 0.5


@command("requests", at=At.ANY_TIME, result=RequestsResult)
@dataclass(frozen=True, slots=True)
class Requests(Command[RequestsResult]):
    pass


@command("experts", at=At.ANY_TIME, result=ExpertsResult)
@dataclass(frozen=True, slots=True)
class Experts(Command[ExpertsResult]):
    pass


@command("anchors", at=At.SAFE_POINT, result=AnchorsResult)
@dataclass(frozen=True, slots=True)
class Anchors(Command[AnchorsResult]):
    drop: bool = False  # forget them, with the pages that no running request uses
    session: str | None = None  # only what this one alone has used; None: all


@command("verify", at=At.BESIDE, result=VerifyResult)
@dataclass(frozen=True, slots=True)
class Verify(Command[VerifyResult]):
    tolerance: float = 0.0  # of a logprob; 0: equal bit for bit
    sessions: str | None = None  # a file of recorded ones; None: those that come with ftd


@command("cancel", at=At.SAFE_POINT, result=CancelResult)
@dataclass(frozen=True, slots=True)
class Cancel(Command[CancelResult]):
    request_id: str


@command("check", at=At.BESIDE, result=CheckResult)
@dataclass(frozen=True, slots=True)
class Check(Command[CheckResult]):
    model: str | None = None  # None: the one that is served


@command("reload", at=At.BESIDE, result=ReloadResult)
@dataclass(frozen=True, slots=True)
class Reload(Command[ReloadResult]):
    model: str | None = None  # None: the one that is served, read anew
    how: Literal["drain", "cut"] = "drain"
    timeout_s: float | None = None  # how long requests may go on; None: ftd's --drain-timeout


@command("budget", at=At.SAFE_POINT, result=BudgetResult)
@dataclass(frozen=True, slots=True)
class Budget(Command[BudgetResult]):
    """Written as flags are: "6G" or "90%", "32K" or "auto". None: as it is; all None: just tell."""

    vram: str | None = None
    kv_tokens: str | None = None
    expert_slots: str | None = None
    auto: bool = False


@command("trace", at=At.BESIDE, result=TraceResult)
@dataclass(frozen=True, slots=True)
class Trace(Command[TraceResult]):
    """Record the routing of what is computed from now on."""

    tokens: int
    timeout_s: float  # the trace is shorter if requests bring no more until then


@command("profile", at=At.BESIDE, result=ProfileResult)
@dataclass(frozen=True, slots=True)
class Profile(Command[ProfileResult]):
    """Measure link, CPU and slots with the kernels that serve; misses are divided by it then."""


@command("drain", at=At.BESIDE, result=DrainResult)
@dataclass(frozen=True, slots=True)
class Drain(Command[DrainResult]):
    timeout_s: float | None = None


@command("stop", at=At.ANY_TIME, result=StopResult)
@dataclass(frozen=True, slots=True)
class Stop(Command[StopResult]):
    pass
