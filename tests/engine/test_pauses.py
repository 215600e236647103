"""Decode steps within a pass over prompts: when they run, and that nobody's tokens change."""

from __future__ import annotations

import random

import pytest
from driving import (
    Answer,
    answer_all,
    answer_alone,
    answer_interrupted,
    check_pages,
    comparable,
    engine_core,
    request,
)
from test_contract import ORACLES, requests

from ftd.engine.api import Output
from ftd.schedule.pauses import Pauses

MODELS = ("qwen3_moe", "qwen3_next")


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return ORACLES / request.param


@pytest.fixture(scope="module")
def alone(model):
    return answer_alone(model, requests())


@pytest.fixture
def often(monkeypatch):
    """Steps, some of them several, are due at half of the looks, whatever the time."""
    rng = random.Random(3)
    monkeypatch.setattr(Pauses, "due", lambda self, now_s, decode_s: rng.choice((0, 0, 0, 1, 1, 3)))


def steps_beside(core) -> list[int]:
    """From now on: how many tokens each step beside a pass has brought."""
    brought, hold = [], core.deliver

    def deliver(outputs: list[Output]) -> None:
        brought.append(len(outputs))
        hold(outputs)

    core.deliver = deliver
    return brought


@pytest.mark.parametrize("slots", [0, 6])
def test_steps_within_passes_change_no_token(model, alone, often, slots):
    with engine_core(model, max_running=12, prefill_chunk=32, expert_slots=slots) as core:
        brought = steps_beside(core)
        arrive = {f"r{i}": 2 * i for i in range(12)}
        for _ in range(2):
            core.tree.clear()
            assert comparable(answer_all(core, requests(), arrive=arrive)) == alone
        assert len(brought) > 20 and max(brought) <= 8


def test_passes_given_up_and_pages_short(model, alone, often):
    with engine_core(model, num_pages=20, max_running=6, prefill_chunk=24, expert_slots=5) as core:
        assert comparable(answer_interrupted(core, requests(), seed=2)) == alone
        check_pages(core)


def test_requests_end_and_come_while_a_pass_pauses(model, alone, often):
    rng, answers, arriving = random.Random(5), {}, requests()
    with engine_core(model, max_running=6, prefill_chunk=24, expert_slots=5) as core:

        def between(outputs: list[Output]) -> None:
            for output in outputs:
                if output.request_id in answers:
                    answers[output.request_id].take(output)
            if arriving and rng.random() < 0.2:
                add(arriving.pop(0))
            for name in [n for n, a in answers.items() if a.tokens and not a.finish]:
                if rng.random() < 0.02 and not core.in_prefill(name):
                    core.end(name)
                    del answers[name]  # whoever asked has gone

        def add(one) -> None:
            answers[one.request_id] = Answer()
            core.add(one)

        core.deliver = between
        while arriving or core.has_work():
            if arriving and rng.random() < 0.3:
                add(arriving.pop(0))
            if core.has_work():
                between(core.step())
            check_pages(core)
    assert len(answers) > 4
    found = comparable(answers)
    assert found == {name: alone[name] for name in found}


def test_streams_keep_their_share_of_the_time_of_long_prompts():
    """The clock counts layers: a step and a chunk take the same."""
    with engine_core(ORACLES / "qwen3_moe", max_running=4, prefill_chunk=16) as core:
        layers = 0

        def tick() -> None:
            nonlocal layers
            layers += 1

        core.beat, core.steps.clock = tick, lambda: float(layers)
        core.add(request("stream", [1, 2, 3], max_tokens=400))
        for _ in range(5):
            core.step()
        per_step = core.steps.rates.decode_step_s(1)
        brought = steps_beside(core)
        core.add(request("long", [i % 400 for i in range(330)], max_tokens=1))
        began, finished = layers, False
        while not finished:
            finished = any(o.request_id == "long" and o.finish for o in core.step())
        assert len(brought) * per_step / (layers - began) == pytest.approx(Pauses().aim, abs=0.03)
        assert core.status().running == 1


def test_without_streams_nothing_is_saved_up():
    with engine_core(ORACLES / "qwen3_moe", max_running=4, prefill_chunk=16) as core:
        layers = 0

        def tick() -> None:
            nonlocal layers
            layers += 1

        core.beat, core.steps.clock = tick, lambda: float(layers)
        brought = steps_beside(core)
        core.add(request("first", [i % 300 for i in range(200)], max_tokens=1))
        while core.has_work():
            core.step()
        assert not brought
