"""What the engine tells of itself: snapshots made of its parts, for status, watch and anchors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace

from ftd.engine.api import EngineStatus, RequestInfo
from ftd.engine.meter import Meter
from ftd.engine.recurrence import Recurrence
from ftd.experts.residents import ExpertCounters
from ftd.kv.anchor_book import Standing
from ftd.kv.anchors import AnchorInfo, AnchorTotals
from ftd.kv.host import HostTier
from ftd.kv.pages import PagePool
from ftd.kv.runs import Run
from ftd.schedule.sequence import Sequence


@dataclass(slots=True)
class Totals:
    """Since loading; steps are counted whoever they are for, the others for clients alone."""

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0


def status(
    pages: PagePool,
    pages_evicted: int,
    recurrence: Recurrence,
    experts: ExpertCounters,
    totals: Totals,
    meter: Meter,
    requests: Iterable[RequestInfo],
    host: HostTier | None,
    anchors: AnchorTotals,
    rates_from: str = "",
) -> EngineStatus:
    requests = tuple(requests)
    waiting = sum(request.state == "waiting" for request in requests)
    return EngineStatus(
        running=len(requests) - waiting,
        waiting=waiting,
        pages_total=pages.num_pages,
        pages_free=pages.free,
        pages_held=pages.held,
        pages_cached=pages.idle,
        page_tokens=pages.page_tokens,
        pages_evicted=pages_evicted,
        window_pages_total=recurrence.window_pages.num_pages,
        window_pages_held=recurrence.window_pages.held,
        states_total=recurrence.pool.num_slots,
        states_free=recurrence.pool.free,
        states_held=recurrence.pool.held,
        states_cached=recurrence.store.idle,
        host_pages_total=host.pool.num_pages if host else 0,
        host_pages_held=host.pool.held if host else 0,
        host_pages_saved=host.pages_saved if host else 0,
        host_pages_loaded=host.pages_loaded if host else 0,
        slots_total=experts.slots_total,
        slots_used=experts.slots_used,
        expert_hits=experts.hits,
        expert_misses=experts.misses,
        expert_fetched=experts.fetched,
        expert_on_cpu=experts.on_cpu,
        expert_ahead=experts.ahead,
        expert_ahead_unused=experts.ahead_unused,
        expert_fill_bytes=experts.fill_bytes,
        expert_evicted=experts.evicted,
        decode_tokens_per_s=meter.decode_tokens_per_s(),
        prefill_tokens_per_s=meter.prefill_tokens_per_s(),
        decode_pace_tokens_per_s=meter.decode.tokens_per_s(),
        prefill_pace_tokens_per_s=meter.prefill.tokens_per_s(),
        step_ms_p50=meter.step_ms_p50(),
        rates_from=rates_from,
        anchors=anchors,
        requests=requests,
        **asdict(totals),
    )


def running(sequence: Sequence, now_s: float) -> RequestInfo:
    return _request(sequence, "decode" if sequence.pending == 1 else "prefill", now_s)


def waiting(sequence: Sequence, now_s: float) -> RequestInfo:
    return _request(sequence, "waiting", now_s)


def _request(sequence: Sequence, state: str, now_s: float) -> RequestInfo:
    return RequestInfo(
        request_id=sequence.key,
        state=state,
        prompt_tokens=sequence.prompt_tokens,
        computed_tokens=min(sequence.computed, sequence.prompt_tokens),
        reused_tokens=sequence.reused or 0,
        output_tokens=sequence.output_tokens,
        age_s=max(0.0, now_s - sequence.request.arrival_s) if sequence.request.arrival_s else 0.0,
    )


@dataclass(frozen=True, slots=True)
class AnchorCosts:
    token_bytes: float  # of KV
    state_bytes: int  # of recurrent layers
    token_s: float  # to compute one again; 0: not known yet


def anchors(
    standing: Iterable[Standing],
    below: Iterable[AnchorInfo],  # in host memory, and on disk
    states: AbstractSet[tuple[Run, int]],  # where a state of recurrent layers is kept
    costs: AnchorCosts,
    *,
    is_idle: Callable[[int], bool],  # whether no running request uses a page
    now_s: float,
) -> Iterator[AnchorInfo]:
    """Those in the memory that steps use, then those that are only in the tiers below."""
    stored: dict[tuple[str, str, int], AnchorInfo] = {}
    for a in below:
        key = (a.session, a.kind, a.position)
        stored[key] = _both(stored[key], a) if key in stored else a
    nothing = AnchorInfo("", "", 0, 0)
    for anchor, tokens, run, held in standing:
        lower = stored.pop(anchor.identity, nothing)
        yield AnchorInfo(
            session=anchor.session,
            kind=str(anchor.kind),
            position=anchor.position,
            tokens=tokens,
            kv_bytes=round(held * costs.token_bytes),
            state_bytes=costs.state_bytes if (run, anchor.position) in states else 0,
            host_bytes=lower.host_bytes,
            disk_bytes=lower.disk_bytes,
            hits=anchor.hits,
            age_s=max(0.0, now_s - anchor.used_s),
            saved_s=anchor.saved * costs.token_s,
            in_use=not is_idle(run.pages[0]),
        )
    yield from stored.values()


def _both(one: AnchorInfo, other: AnchorInfo) -> AnchorInfo:
    """The same anchor, in host memory and on disk."""
    return replace(
        one,
        host_bytes=one.host_bytes + other.host_bytes,
        disk_bytes=one.disk_bytes + other.disk_bytes,
    )
