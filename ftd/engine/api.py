"""What crosses the border between the event loop and the engine thread: requests in, tokens out.

Plain data only. The engine thread never touches text; the loop never touches tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from ftd.kv.anchors import Anchor, AnchorTotals, Resumed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Every value has been validated before it gets here."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the engine draws one; the answer then is not repeatable
    logprobs: int | None = (
        None  # how many alternatives besides the sampled token; None: no logprobs
    )


class Constraint(Protocol):
    """What one sequence's output has to obey: a grammar, and how far it has come.

    The engine thread has it to itself; what either method raises ends this sequence alone.
    """

    def mask(self) -> torch.Tensor | None:
        """Tokens that may come next: [ceil(V / 32)] int32 on the CPU, bit 1: allowed; None: any.

        An eos token is allowed where the output may end, and nothing else once it has to.
        Cost: up to a few ms for the first call after ``accept``, nothing for the next.
        """
        ...

    def accept(self, token: int) -> None:
        """The token that was drawn; it depends on nothing else what is allowed next."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str  # unique while the daemon lives; client ids are kept apart elsewhere
    prompt_ids: Sequence[int]  # used exactly as given
    max_tokens: int  # already cut to what context and pool leave
    sampling: Sampling = Sampling()
    eos_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_ids: frozenset[int] = frozenset()  # stop_token_ids: end without being part of the text
    prompt_logprobs: int | None = None  # alternatives per prompt token; turns prefix reuse off
    copies_of: str | None = None  # request_id of a sibling (n > 1) whose prompt pages are awaited
    arrival_s: float = 0.0  # time.monotonic()
    constraint: Constraint | None = None  # of this sequence alone
    anchors: tuple[Anchor, ...] = ()  # borders within the prompt, in order
    session: str = ""  # whose conversation it is, where the client says
    passing: bool = False  # a trial: nothing of it is worth keeping on disk


class Finish(StrEnum):
    EOS = "eos"  # an eos id was sampled; it is the last token of the output
    STOP = "stop"  # a stop id, or the text layer found a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # alternatives, best first


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought for one request. The last one carries ``finish``."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of ``tokens`` if asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # before the first token
    reused_tokens: int | None = None  # found in the prefix cache; with the first output
    resumed: Resumed | None = None  # where, and why not further on; with the first output
    finish: Finish | None = None
    error: Exception | None = None  # an FtdError, with finish == ERROR or CANCELLED


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One line of ``ftctl requests``."""

    request_id: str
    state: str  # waiting | prefill | decode
    prompt_tokens: int
    computed_tokens: int  # prompt tokens whose KV exists (reused or computed)
    reused_tokens: int
    output_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot, replaced as a whole after each step. Counters only grow; gauges are as of now."""

    # gauges
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0  # by running requests or the prefix tree, each page counted once
    pages_cached: int = 0  # of the held ones, those only the prefix tree holds (evictable)
    page_tokens: int = 0
    window_pages_total: int = (
        0  # of layers that keep no more than a window, if some have pages apart
    )
    window_pages_held: int = 0
    states_total: int = 0  # recurrent ones, of a model that has them, or copies of windows
    states_free: int = 0
    states_held: int = 0
    states_cached: int = 0  # of the held ones, those kept to resume from and in no use
    host_pages_total: int = 0  # of the tier of host memory below a GPU's, as far as it is pinned
    host_pages_held: int = 0
    slots_total: int = 0
    slots_used: int = 0
    # counters
    steps: int = 0
    prompt_tokens: int = 0  # computed
    reused_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    expert_hits: int = 0  # (step, layer, distinct expert) found in a slot
    expert_misses: int = 0
    expert_fetched: int = 0  # misses whose weights came over the link
    expert_on_cpu: int = 0  # misses computed where their weights are
    expert_ahead: int = 0  # streamed before the layer of a prompt had chosen its experts
    expert_ahead_unused: int = 0  # of these: bytes for nothing
    expert_fill_bytes: int = 0  # of records that became resident
    expert_evicted: int = 0
    preempted: int = 0  # sequences put off for lack of pages
    pages_evicted: int = 0  # of the prefix cache, for lack of room
    host_pages_saved: int = 0  # evicted ones that went to host memory
    host_pages_loaded: int = 0  # and came back
    # rates over the last seconds
    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    # of the last steps that decode, and of those with a prompt: time between them does not count
    decode_pace_tokens_per_s: float = 0.0
    prefill_pace_tokens_per_s: float = 0.0
    step_ms_p50: float = 0.0
    rates_from: str = ""  # what the split of missed experts follows from; "": it needs no rates
    anchors: AnchorTotals = field(default=AnchorTotals())
    requests: tuple[RequestInfo, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request may ask for; fixed while a model is loaded (until its budget changes)."""

    context_tokens: int  # prompt + output of one sequence
    pool_tokens: int  # KV pool: the same bound for one sequence from another side
    max_running: int
    max_waiting: int
    vocab: int
    trained_tokens: int = 0  # the longest context that the model was made for; 0: not known

    @property
    def raised_by(self) -> str:
        """What lets a sequence be longer; empty: nothing, the model was made for no more."""
        if self.pool_tokens < self.context_tokens:
            return "--kv-tokens"
        if self.context_tokens >= self.trained_tokens:
            return ""
        return (
            "--context" if self.context_tokens < self.pool_tokens else "--context with --kv-tokens"
        )


class Ticket(Protocol):
    """A submitted request, on the event loop: iterate its outputs; the last has ``finish``."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def end(self, finish: Finish = Finish.CANCELLED) -> None:
        """Stop computing at the next safe point: the client left, or a stop string was found.

        Idempotent; no further outputs come. Pages go back, finished prefix pages stay cached.
        """
        ...


class EngineHandle(Protocol):
    """The engine as the event loop sees it. Every method is called on the loop."""

    limits: EngineLimits
    heartbeat: int  # moves each step, each layer of a prefill, each second when idle

    async def wait_failed(self) -> Exception:
        """Return the cause once the engine has failed; every request has had its error by then."""
        ...

    def submit(self, request: EngineRequest) -> Ticket:
        """Queue a request; returns at once.

        Raises:
            ContextExceeded, RequestInvalid: it can never run with these limits.
            QueueFull: ``max_waiting`` requests wait already.
            NotReady: the engine drains, has failed or is closed.
        """
        ...

    def cancel(self, request_id: str, reason: str) -> bool:
        """An operator's cancel: the ticket ends with RequestCancelled. False: no such request."""
        ...

    def status(self) -> EngineStatus: ...

    async def at_safe_point(self, run: Callable[[Any], Any]) -> Any:
        """Run ``run(core)`` on the engine thread between two steps and return its result.

        Raises NotReady: the engine has failed or is closed.
        """
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the running and waiting ones. False: timed out."""
        ...

    async def close(self, cause: Exception | None = None) -> None:
        """End every request with ``cause`` (default: NotReady), stop, free the memory."""
        ...
