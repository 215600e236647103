"""The contract under changing budgets: equal tokens while pages and slots come and go."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from driving import (
    Answer,
    answer_all,
    answer_alone,
    check_pages,
    comparable,
    engine_core,
    request,
)
from test_contract import ORACLES, prompts, requests

from ftd.engine.core import EngineCore
from ftd.engine.resize import Resizing, resize
from ftd.errors import BudgetExceeded

PAGES = 40
MIB = 2**20
LEAST_PAGES = 13  # the longest request alone needs 12


def num_experts(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return config["num_hidden_layers"] * config["num_experts"]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def model(request) -> Path:
    return ORACLES / request.param


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, tuple]:
    return answer_alone(model, requests())


def check_slots(core: EngineCore, slots: int) -> None:
    status = core.status()
    assert status.slots_used <= status.slots_total == slots


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_equal_while_pages_and_slots_come_and_go(model, alone, seed):
    rng = random.Random(seed)
    done: list[Resizing] = []
    slots, pages = 9, PAGES
    with engine_core(
        model, num_pages=PAGES, max_running=6, prefill_chunk=24, expert_slots=slots
    ) as core:
        answers = {one.request_id: Answer() for one in requests()}
        arriving = list(requests())
        while arriving or core.has_work():
            if arriving and rng.random() < 0.5:
                core.add(arriving.pop(0))
            if rng.random() < 0.3:
                pages = rng.choice([LEAST_PAGES, 17, 25, PAGES, 3 * PAGES])
                slots = rng.choice([0, 1, 9, num_experts(model)])
                done.append(resize(core, pages, slots))
            if core.has_work():
                for output in core.step():
                    answers[output.request_id].take(output)
            check_pages(core)
            check_slots(core, slots)
        assert core.status().pages_total == pages
        assert core.status().pages_held == core.status().pages_cached
    assert comparable(answers) == alone
    assert sum(r.pages_moved for r in done) and sum(r.experts_evicted for r in done)


def test_the_youngest_gives_way_and_continues(model, alone):
    long = [one for one in requests() if len(one.prompt_ids) >= 90]
    with engine_core(model, num_pages=PAGES, max_running=4, prefill_chunk=256) as core:
        for one in long:
            core.add(one)
        answers = {one.request_id: Answer() for one in long}
        for output in core.step():
            answers[output.request_id].take(output)
        done = resize(core, LEAST_PAGES, 0)
        assert done.preempted >= 1
        assert long[0].request_id in {s.key for s in core.roster.oldest_running()}
        while core.has_work():
            for output in core.step():
                answers[output.request_id].take(output)
    assert comparable(answers) == {name: alone[name] for name in answers}


def test_what_fits_of_the_prefix_cache_is_kept(model, alone):
    prompt = prompts(1)["r8"]
    with engine_core(model, num_pages=PAGES, max_running=4, prefill_chunk=256) as core:
        answer_all(core, [request("old", [3] * 120, 2), request("new", prompt, 4)])
        cached = core.status().pages_cached
        done = resize(core, LEAST_PAGES, 0)
        assert done.pages_evicted == cached - LEAST_PAGES > 0
        again = answer_all(core, [request("again", prompt, 4)])["again"]
    last = len(prompt) - 1
    assert again.reused in (last, last // 16 * 16)  # a recurrent state is kept at a page's border


def test_a_pool_smaller_than_a_request_is_refused_and_nothing_changes(model):
    with engine_core(model, num_pages=PAGES, max_running=4, prefill_chunk=24) as core:
        core.add(request("long", [3] * 200, 4))
        before = core.status().pages_free
        with pytest.raises(BudgetExceeded, match=r"200 tokens.* 192") as refused:
            resize(core, 12, 0)
        assert "--kv-tokens 208" in refused.value.hint
        assert (core.status().pages_total, core.status().pages_free) == (PAGES, before)
        done = resize(core, 13, 0)
        assert done.pages == 13


def test_an_answer_ends_with_the_pool_that_became_smaller(model, alone):
    with engine_core(model, num_pages=PAGES, max_running=4, prefill_chunk=256) as core:
        core.add(request("one", [3] * 100, 500))
        core.step()
        resize(core, 8, 0)
        tokens = 1
        while core.has_work():
            tokens += sum(len(output.tokens) for output in core.step())
    assert 100 + tokens == 8 * 16


def resident_bytes(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+) kB", status)[1]) * 1024


def test_memory_goes_back_at_once_and_is_never_more_than_before():
    with engine_core(ORACLES / "qwen3_moe", kv_tokens=32768) as core:
        page_bytes, before = core.kv.page_bytes, resident_bytes("VmRSS")
        for tensor in (*core.kv.k, *core.kv.v):
            tensor[: core.kv.num_pages] = 1.0
        full = resident_bytes("VmRSS")
        assert full - before > 0.9 * 2048 * page_bytes > 50 * MIB
        with suppress(OSError):  # not everywhere may the high-water mark be set back
            Path("/proc/self/clear_refs").write_text("5")
        peak = resident_bytes("VmHWM")
        resize(core, 512, 0)
        assert abs(full - resident_bytes("VmRSS") - 1536 * page_bytes) < 4 * MIB
        resize(core, 2048, 0)
        assert abs(full - resident_bytes("VmRSS") - 1536 * page_bytes) < 4 * MIB, "not touched yet"
        assert resident_bytes("VmHWM") - peak < 4 * MIB
