"""The numerics contract in float32 on the CPU device: equal tokens whatever the engine does beside.

Every way of running a set of requests gives the tokens, logprobs and endings of each request alone
on a cold engine: other batches, chunks, arrivals, caches, page shortages, preemptions, slots.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from driving import (
    answer_all,
    answer_alone,
    answer_interrupted,
    comparable,
    engine_core,
    request,
)

from ftd.engine.api import EngineRequest, Finish, Sampling

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
VOCAB = 500  # ids below the special ones


def prompts(seed: int) -> dict[str, list[int]]:
    """Twelve prompts of uneven lengths; some share a beginning, within a page and beyond it."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(75)]
    found = {}
    for i, length in enumerate([1, 2, 15, 16, 17, 33, 64, 90, 130, 31, 47, 5]):
        head = shared[: rng.choice([0, 5, 16, 40, 75])] if i > 5 else []
        tail = [rng.randrange(VOCAB) for _ in range(max(1, length - len(head)))]
        found[f"r{i}"] = head + tail
    return found


def requests(seed: int = 1) -> list[EngineRequest]:
    """Half greedy, half drawn with a seed, some with logprobs and penalties."""
    made = []
    for i, (name, prompt) in enumerate(prompts(seed).items()):
        sampling = Sampling(temperature=0.0)
        if i % 2:
            sampling = Sampling(
                temperature=0.9,
                top_p=0.95,
                seed=1000 + i,
                logprobs=2,
                repetition_penalty=1.1 if i % 3 else 1.0,
            )
        made.append(request(name, prompt, max_tokens=5 + 3 * i, sampling=sampling))
    return made


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe-window"])
def model(request) -> Path:
    return ORACLES / request.param


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, tuple]:
    return answer_alone(model, requests())


@pytest.mark.parametrize("max_running", [2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_batches_and_chunks(model, alone, max_running, chunk):
    with engine_core(model, max_running=max_running, prefill_chunk=chunk) as core:
        assert comparable(answer_all(core, requests())) == alone


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("max_running", [1, 4])
def test_slots(model, alone, share, max_running):
    config = json.loads((model / "config.json").read_text())
    num_experts = config["num_hidden_layers"] * config["num_experts"]
    slots = max(1, int(share * num_experts))
    with engine_core(model, max_running=max_running, expert_slots=slots) as core:
        for _ in range(2):  # cold slots, then filled ones
            assert comparable(answer_all(core, requests())) == alone
        status = core.status()
    assert status.slots_used <= status.slots_total == slots
    assert status.expert_hits > 0 and status.expert_misses > 0
    assert status.expert_evicted > 0 or slots == num_experts
    if slots > 1:  # a single one may stand empty for the next fill
        assert status.slots_used > 0


def test_cached_prompts(model, alone):
    with engine_core(model, max_running=4) as core:
        answer_all(core, requests())
        again = answer_all(core, requests())
    assert comparable(again) == alone
    for one in requests():
        assert again[one.request_id].reused == len(one.prompt_ids) - 1


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_too_small_for_all_evicts_and_preempts(model, alone, seed):
    rng = random.Random(seed)
    arrive = {one.request_id: rng.randrange(30) for one in requests()}
    pages = rng.choice([13, 15, 20])  # the longest request alone needs 12
    with engine_core(model, num_pages=pages, max_running=8, prefill_chunk=24) as core:
        assert comparable(answer_all(core, requests(), arrive=arrive)) == alone


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_do_not_change_the_others(model, alone, seed):
    rng = random.Random(seed)
    names = [one.request_id for one in requests()]
    arrive = {name: rng.randrange(20) for name in names}
    leave = {name: arrive[name] + rng.randrange(8) for name in rng.sample(names, 5)}
    with engine_core(model, num_pages=30, max_running=5, prefill_chunk=16, expert_slots=9) as core:
        answers = answer_all(core, requests(), arrive=arrive, leave=leave)
    for name, answer in answers.items():
        if name in leave and answer.finish is None:
            assert answer.tokens == alone[name][0][: len(answer.tokens)]
        else:
            assert comparable({name: answer})[name] == alone[name]


def test_an_interrupted_step_commits_nothing(model, alone):
    with engine_core(model, max_running=4, prefill_chunk=20, expert_slots=11) as core:
        assert comparable(answer_interrupted(core, requests(), seed=5)) == alone


def test_copies_wait_for_the_prompt_and_compute_at_most_a_page_of_it(model, alone):
    first = next(one for one in requests() if len(one.prompt_ids) > 100)
    copies = [
        request(f"copy{i}", first.prompt_ids, first.max_tokens, copies_of=first.request_id)
        for i in range(3)
    ]
    with engine_core(model, max_running=4, prefill_chunk=32) as core:
        answers = answer_all(core, [*copies[:1], first, *copies[1:]])
    for copy in copies:
        assert answers[copy.request_id].tokens == alone[first.request_id][0]
    for copy in copies[1:]:
        assert answers[copy.request_id].reused >= len(first.prompt_ids) - 16


def test_prompt_logprobs_are_those_of_the_tokens_when_sampled(model):
    prompt = prompts(1)["r8"]
    with engine_core(model, max_running=2, prefill_chunk=50) as core:
        drawn = answer_all(
            core, [request("a", prompt, 20, sampling=Sampling(temperature=0.0, logprobs=3))]
        )["a"]
        scored = answer_all(core, [request("b", prompt + drawn.tokens, 1, prompt_logprobs=3)])["b"]
    assert scored.reused == 0 and scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(prompt) + len(drawn.tokens)
    assert list(scored.prompt_logprobs[len(prompt) :]) == drawn.logprobs


def test_ends_at_eos_stop_id_or_length(model, alone):
    one = next(one for one in requests() if one.request_id == "r8")
    tokens = alone["r8"][0]
    new = next(i for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    token = tokens[new]
    with engine_core(model) as core:
        answers = answer_all(
            core,
            [
                request("eos", one.prompt_ids, 29, eos_ids=frozenset({token})),
                request("stop", one.prompt_ids, 29, stop_ids=frozenset({token, 499})),
                request("length", one.prompt_ids, new),
            ],
        )
    assert (answers["eos"].tokens, answers["eos"].finish) == (tokens[: new + 1], Finish.EOS)
    assert (answers["stop"].tokens, answers["stop"].finish) == (tokens[: new + 1], Finish.STOP)
    assert (answers["length"].tokens, answers["length"].finish) == (tokens[:new], Finish.LENGTH)
