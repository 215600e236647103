"""Figures for Prometheus: the engine's own counters, and what only the front end sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ftd.engine.api import EngineStatus
from ftd.errors import NotReady

from .ports import Lifecycle

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

_GAUGES = {
    "running": "Requests being computed.",
    "waiting": "Requests waiting for their turn.",
    "pages_total": "KV pages of the pool.",
    "pages_free": "KV pages nobody holds.",
    "pages_held": "KV pages held by requests or the prefix tree.",
    "pages_cached": "KV pages only the prefix tree holds.",
    "window_pages_total": "KV pages of layers that keep no more than a window.",
    "window_pages_held": "Of these, pages of requests being computed.",
    "states_total": "Slots of recurrent states or windows, of a model that has them.",
    "states_free": "State slots nobody holds.",
    "states_held": "State slots held by requests or kept to resume from.",
    "states_cached": "State slots only kept to resume from.",
    "host_pages_total": "Pages of the host memory below a GPU's KV, as far as it is pinned.",
    "host_pages_held": "Of these, pages that hold KV.",
    "slots_total": "Expert slots.",
    "slots_used": "Expert slots that hold an expert.",
    "decode_tokens_per_s": "Output tokens a second, over the last seconds.",
    "prefill_tokens_per_s": "Prompt tokens a second, over the last seconds.",
}
_COUNTERS = {
    "steps": "Forward passes.",
    "prompt_tokens": "Prompt tokens computed.",
    "reused_tokens": "Prompt tokens found in the prefix cache.",
    "output_tokens": "Tokens sampled.",
    "finished": "Requests answered to their end.",
    "cancelled": "Requests cancelled, mostly by clients that left.",
    "failed": "Requests ended by an error.",
    "expert_hits": "Experts found in a slot.",
    "expert_misses": "Experts not found in a slot.",
    "expert_fetched": "Misses whose weights came over the link.",
    "expert_on_cpu": "Misses computed by the CPU.",
    "expert_ahead": "Experts streamed before the layer of a prompt had chosen them.",
    "expert_ahead_unused": "Of these, experts that were not chosen: bytes for nothing.",
    "expert_fill_bytes": "Bytes of experts that came into a slot.",
    "expert_evicted": "Experts that lost their slot.",
    "preempted": "Sequences put off for lack of pages.",
    "pages_evicted": "Pages of the prefix cache that made room for others.",
    "host_pages_saved": "Of these, pages that went to host memory.",
    "host_pages_loaded": "Pages that came back from host memory.",
}


class _EngineFigures(Collector):
    """Read when asked for; after a reload the counters start anew, which Prometheus expects."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def collect(self) -> Iterator[Metric]:
        try:
            served = self._lifecycle.current()
        except NotReady:
            yield GaugeMetricFamily("ftd_ready", "Whether a model takes requests.", 0)
            return
        yield GaugeMetricFamily("ftd_ready", "Whether a model takes requests.", 1)
        status: EngineStatus = served.engine.status()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ftd_{name}", text, getattr(status, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ftd_{name}", text, getattr(status, name))


class Metrics:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(lifecycle))
        self._requests = Counter(
            "ftd_http_requests",
            "Generation requests by endpoint and outcome.",
            ("endpoint", "status", "outcome"),
            registry=self._registry,
        )
        self._ttft = Histogram(
            "ftd_time_to_first_token_seconds",
            "From the request's first byte to its first token.",
            ("endpoint",),
            buckets=_TTFT_S,
            registry=self._registry,
        )
        self._gap = Histogram(
            "ftd_inter_token_seconds",
            "Time between tokens of one answer: the median of each request.",
            ("endpoint",),
            buckets=_GAP_S,
            registry=self._registry,
        )

    def request_finished(
        self,
        endpoint: str,
        status: int,
        outcome: str,
        ttft_s: float | None,
        gaps_s: Sequence[float],
    ) -> None:
        """Count one request; outcomes are a small set, so labels stay few."""
        self._requests.labels(endpoint, str(status), outcome).inc()
        if ttft_s is not None:
            self._ttft.labels(endpoint).observe(ttft_s)
            if gaps := sorted(gaps_s):
                self._gap.labels(endpoint).observe(gaps[len(gaps) // 2])

    def text(self) -> bytes:
        return generate_latest(self._registry)
