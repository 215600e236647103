"""What an engine did between two looks, as rates: a pure function of two snapshots of counters."""

from __future__ import annotations

from ftd.control.protocol import Traffic
from ftd.engine.api import EngineStatus
from ftd.lifecycle.served import Reads


def between(
    before: EngineStatus, now: EngineStatus, seconds: float, reads: Reads | None
) -> Traffic | None:
    """None: another engine has counted before, or no time has passed.

    Args:
        reads: None: what a step reads is not known.
    """
    steps = now.steps - before.steps
    if seconds <= 0 or steps < 0:
        return None
    hits = (now.expert_hits - before.expert_hits) / seconds
    misses = (now.expert_misses - before.expert_misses) / seconds
    fetched = (now.expert_fetched - before.expert_fetched) / seconds
    link = dram = None
    if reads and now.slots_total and reads.on_gpu:
        link = fetched * reads.record_bytes
        dram = misses * reads.record_bytes  # over the link or by the CPU: from host memory
    elif reads and now.slots_total:
        dram = (hits + misses) * reads.record_bytes + steps / seconds * reads.dense_bytes
    return Traffic(
        seconds=round(seconds, 3),
        steps_per_s=steps / seconds,
        decode_tokens_per_s=(now.output_tokens - before.output_tokens) / seconds,
        prefill_tokens_per_s=(now.prompt_tokens - before.prompt_tokens) / seconds,
        reused_tokens_per_s=(now.reused_tokens - before.reused_tokens) / seconds,
        hits_per_s=hits,
        misses_per_s=misses,
        fetched_per_s=fetched,
        evicted_per_s=(now.expert_evicted - before.expert_evicted) / seconds,
        link_bytes_per_s=link,
        dram_bytes_per_s=dram,
    )
