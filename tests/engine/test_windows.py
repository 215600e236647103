"""Models whose layers give back what has left their windows: tokens and logprobs are those of an
engine that keeps every page, far beyond the window, whatever is reused.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import pytest
from driving import answer_all, answer_interrupted, comparable, engine_core, request

import ftd.memory.needs
from ftd.engine.api import Anchor, EngineRequest, Finish, Sampling

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
VOCAB = 500  # ids below the special ones
FAMILIES = ["gpt_oss-mxfp4", "qwen3_moe-window"]  # windows of 16 and 24 tokens
SHARED = [random.Random(1).randrange(VOCAB) for _ in range(300)]
BORDERS = (21, 64, 150, 223)


def requests() -> list[EngineRequest]:
    """Prompts much longer than a window and shorter ones, with beginnings in common."""
    rng = random.Random(7)
    made = []
    for i, (head, tail) in enumerate(
        [(0, 1), (0, 15), (0, 16), (0, 33), (300, 1), (150, 20), (64, 90), (223, 40), (30, 3)]
    ):
        prompt = SHARED[:head] + [rng.randrange(VOCAB) for _ in range(tail)]
        sampling = Sampling(temperature=0.0, logprobs=2)
        if i % 2:
            sampling = Sampling(temperature=0.9, top_p=0.95, seed=i, logprobs=2)
        anchors = tuple(Anchor(b, "role") for b in BORDERS if b < len(prompt))
        made.append(request(f"r{i}", prompt, 7 + 6 * i, sampling=sampling, anchors=anchors))
    return made


@contextmanager
def windowed_core(model: Path, **settings):
    with engine_core(model, **{"cpu_threads": 1, "max_running": 4, **settings}) as core:
        assert core.kv.windows is not None
        yield core
        check_at_rest(core)


def check_at_rest(core) -> None:
    status = core.status()
    assert status.states_held == status.states_cached == len(core.held.recurrence.store)
    assert 0 == status.window_pages_held < status.window_pages_total


@contextmanager
def paged_core(model: Path, **settings):
    """An engine that keeps all keys of all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ftd.memory.needs, "windowing", lambda spec: None)
        with engine_core(model, **{"cpu_threads": 1, **settings}) as core:
            assert core.kv.windows is None
            yield core


@pytest.fixture(scope="module", params=FAMILIES)
def model(request) -> Path:
    return ORACLES / request.param


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, tuple]:
    """Each request by itself, with nothing to resume from."""
    found: dict[str, tuple] = {}
    with paged_core(model, max_running=1, prefill_chunk=256) as core:
        for one in requests():
            core.tree.clear()
            found |= comparable(answer_all(core, [one]))
    return found


@pytest.mark.parametrize(("max_running", "chunk"), [(1, 256), (2, 1), (3, 7), (8, 50)])
def test_batches_chunks_and_reuse(model, alone, max_running, chunk):
    with windowed_core(model, max_running=max_running, prefill_chunk=chunk) as core:
        assert comparable(answer_all(core, requests())) == alone
        again = answer_all(core, requests())
    assert comparable(again) == alone
    if max_running == 8:  # room for all their borders
        for one in requests():
            assert again[one.request_id].reused == len(one.prompt_ids) - 1


def test_prompts_that_end_at_a_border_or_a_token_to_either_side(model):
    ends = sorted(b + by for b in BORDERS for by in (-1, 0, 1))
    asked = [request(f"p{end}", SHARED[:end], 4) for end in ends]
    anchors = tuple(Anchor(border, "role") for border in BORDERS)
    with paged_core(model) as core:
        cold = {}
        for one in asked:
            core.tree.clear()
            cold |= comparable(answer_all(core, [one]))
    with windowed_core(model, max_running=8) as core:
        answer_all(core, [request("whole", SHARED, 4, anchors=anchors)])
        for one in asked:
            answer = answer_all(core, [one])
            assert comparable(answer)[one.request_id] == cold[one.request_id]
            end = len(one.prompt_ids)
            passed = max(b for b in (0, *BORDERS) if b < end)
            assert passed <= answer[one.request_id].reused < end


@pytest.mark.parametrize("seed", range(2))
def test_too_few_pages_and_slots_evict_and_preempt(model, alone, seed):
    rng = random.Random(seed)
    arrive = {one.request_id: rng.randrange(30) for one in requests()}
    with windowed_core(model, num_pages=26, max_running=6, prefill_chunk=24) as core:
        core.held.recurrence.max_kept = rng.choice([0, 1, 5])
        for _ in range(2):
            assert comparable(answer_all(core, requests(), arrive=arrive)) == alone
        assert core.roster.totals.preempted > 0


def test_clients_that_leave_and_steps_that_are_given_up(model, alone):
    leave = {"r4": 3, "r6": 9, "r8": 1}
    with windowed_core(model, prefill_chunk=16) as core:
        answers = answer_all(core, requests(), leave=leave)
        check_at_rest(core)
        assert comparable(answer_interrupted(core, requests(), seed=5)) == alone
    for name, answer in answers.items():
        if answer.finish is not None:
            assert comparable({name: answer})[name] == alone[name]
        else:
            assert answer.tokens == alone[name][0][: len(answer.tokens)]


def test_a_conversation_goes_on_from_where_it_ended(model):
    with windowed_core(model) as core:
        answer = answer_all(core, [request("a", SHARED[:100], 30)])["a"].tokens
        turn = request("b", [*SHARED[:100], *answer, *SHARED[200:220]], 8)
        warm = answer_all(core, [turn])["b"]
        assert warm.reused == 100 + 30 - 1
        core.held.forget_all()
        assert core.status().states_held == 0
        cold = answer_all(core, [turn])["b"]
    assert cold.reused == 0 and cold.tokens == warm.tokens and warm.finish is Finish.LENGTH


def test_a_long_answer_holds_a_window_and_no_more():
    with windowed_core(ORACLES / "gpt_oss-mxfp4") as core:
        core.add(request("long", SHARED[:40], 400))
        most = 0
        while core.has_work():
            core.step()
            most = max(most, core.held.recurrence.window_pages.held)
        pages = core.kv.windows.windowing.tokens // core.kv.page_tokens + 2
        assert most <= pages < 440 // core.kv.page_tokens


def test_the_same_bytes_of_kv_hold_twice_the_context():
    model = ORACLES / "gpt_oss-mxfp4"  # every other layer has a window
    with windowed_core(model, kv_tokens=4096) as core, paged_core(model, kv_tokens=4096) as whole:
        assert 2 * core.kv.page_bytes == whole.kv.page_bytes
        assert core.pages.num_pages == whole.pages.num_pages
