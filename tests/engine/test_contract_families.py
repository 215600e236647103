"""The numerics contract for families whose layers do what Qwen3-MoE's do not.

Granite scales what blocks add and stacks its experts; gpt-oss has sinks, a window in some layers,
biases and four-bit experts. One run has batches, small chunks, a few slots that are emptied,
too few pages and what an earlier run left in the cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import answer_all, answer_alone, comparable, engine_core
from test_contract import requests

from ftd.engine.resize import resize

ORACLES = Path(__file__).parents[1] / "data" / "oracles"


@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss-mxfp4"])
def test_equal_tokens_whatever_runs_beside(family):
    model = ORACLES / family
    alone = answer_alone(model, requests())
    with engine_core(model, num_pages=15, max_running=5, prefill_chunk=7, expert_slots=3) as core:
        assert comparable(answer_all(core, requests())) == alone
        evicted = resize(core, core.pages.num_pages, 1).experts_evicted
        resize(core, core.pages.num_pages, 3)
        assert comparable(answer_all(core, requests())) == alone
        status = core.status()
    assert status.expert_hits > 0 and status.expert_misses > 0 and evicted > 0
