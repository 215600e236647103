"""The CUDA device's parts on CPU tensors keep the numerics contract: equal tokens, always.

Captured steps, padding, staging, slots that come and go, eager steps, an unregistered pool.
"""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from asking import asking
from cuda_core import cuda_core
from driving import answer_all, answer_alone, comparable, engine_core, request
from test_constrained_rows import AFTER, Cycle, prompt
from test_contract import ORACLES, requests

from ftd.engine.api import Sampling
from ftd.engine.cuda_runner import CudaRunner
from ftd.errors import EngineFailed
from ftd.experts.costs import Allowance
from ftd.experts.split import PromptRates
from ftd.kernels.cpu import native
from ftd.schedule.pauses import Pauses

MODEL = ORACLES / "qwen3_moe"


@pytest.fixture(scope="module")
def alone():
    """Each request by itself on the CPU device."""
    return answer_alone(MODEL, requests())


@pytest.mark.parametrize("slots", [0, 1, 20, 32])
@pytest.mark.parametrize("max_running", [1, 12])
def test_slots_and_batches(alone, slots, max_running):
    with cuda_core(MODEL, slots=slots, max_running=max_running, prefill_chunk=50) as core:
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone
        status = core.status()
    assert status.slots_used <= status.slots_total == slots
    assert (status.expert_misses > 0) == (slots < 32)


@pytest.mark.parametrize("slots", [0, 9, 32])
@pytest.mark.parametrize(("pinned", "staging"), [(True, 4), (True, 0), (False, 3)])
def test_steps_within_passes(alone, monkeypatch, slots, pinned, staging):
    """Captured steps while a layer's experts are on their way; eager ones before they are."""
    rng = random.Random(4)
    monkeypatch.setattr(Pauses, "due", lambda self, now_s, decode_s: rng.choice((0, 0, 0, 1, 1, 3)))
    with cuda_core(
        MODEL, slots=slots, staging=staging, pinned=pinned, max_running=12, prefill_chunk=32
    ) as core:
        some = requests()
        if not pinned:  # see test_a_pool_that_kernels_cannot_read
            some = [one for one in some if one.sampling.temperature == 0]
        for _ in range(2):
            core.tree.clear()
            arrive = {one.request_id: 2 * i for i, one in enumerate(some)}
            answers = comparable(answer_all(core, some, arrive=arrive))
            assert answers == {name: alone[name] for name in answers}


needs_cpu_kernels = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="the C++ kernels are not built"
)


@needs_cpu_kernels
@pytest.mark.parametrize("fetch_of", [[0], [0, 0, 1, 2], [0, 1]])
@pytest.mark.parametrize("slots", [0, 9])
def test_misses_divided_between_link_and_cpu(alone, slots, fetch_of):
    """Each route's product comes from whoever computed it, and they are added in the same order."""
    with cuda_core(MODEL, slots=slots, fetch_of=fetch_of, max_running=8) as core:
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone
        counters = core.experts.counters()
    assert counters.on_cpu > 0
    assert counters.fetched + counters.on_cpu == counters.misses
    assert (counters.fills > 0) == (slots > 0)


@needs_cpu_kernels
@pytest.mark.parametrize("slots", [0, 9])
def test_experts_that_link_and_cpu_share(alone, slots, monkeypatch):
    """Their sums are made in another order: logprobs may differ in their last bits."""
    monkeypatch.setattr("ftd.kernels.formats.PLAIN_PART_ROWS", 16)  # of 32
    with cuda_core(MODEL, slots=slots, fetch_of=[0, 0.5, 0.5, 1.5], max_running=8) as core:
        assert core.experts.parts == 2
        for _ in range(2):
            answers = comparable(answer_all(core, requests()))
            assert {name: a[0] for name, a in answers.items()} == {
                n: a[0] for n, a in alone.items()
            }
        counters = core.experts.counters()
    assert counters.on_cpu > 0 and counters.fetched > 0
    assert counters.fetched + counters.on_cpu == counters.misses


@needs_cpu_kernels
@pytest.mark.parametrize("slots", [0, 9])
@pytest.mark.parametrize("rates", [PromptRates(1.0, 0.0, 0.0), PromptRates(1.0, 0.6, 0.1)], ids=str)
def test_the_cpu_computes_some_of_a_prompts_misses(alone, slots, rates):
    with cuda_core(MODEL, slots=slots, fetch_of=[0, 1], max_running=4, prefill_chunk=50) as core:
        core.experts.share_prompts(rates)
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone
        core.experts.division.split([list(range(33))] * 4)  # decode asks nothing from here on
        before = core.experts.counters()
        answer_all(core, [request("long", prompt(3, 200), 1)])
        after = core.experts.counters()
    on_cpu, misses = after.on_cpu - before.on_cpu, after.misses - before.misses
    assert 0 < on_cpu <= misses and after.fetched - before.fetched == misses - on_cpu


@needs_cpu_kernels
def test_what_is_read_over_the_link_is_stored_on_the_way():
    greedy = [request(f"r{i}", prompt(i, 12), 40) for i in range(3)]
    with cuda_core(MODEL, slots=12, fetch_of=[0, 1, 2, 3], max_running=3) as core:
        core.experts._allowance = Allowance(0.0, 1.0)  # no fills in the background
        settle, settled = core.experts._table.settle, []
        core.experts._table.settle = lambda *of: settled.append(settle(*of)) or settled[-1]
        answer_all(core, greedy)
        assert sum(settled) > 3 and core.experts.counters().slots_used <= 12
        shared, pool = core.experts.division.shared, core.experts._pool
        for key in np.flatnonzero(core.experts.residency_map().slot.ravel() >= 0).tolist():
            row, expert = divmod(key, core.experts.num_experts)
            record = pool.record(core.experts.layers[row], expert)
            held = (ctypes.c_uint8 * len(record)).from_address(int(shared.address[row, expert]))
            assert np.array_equal(np.frombuffer(held, np.uint8), record), key


@needs_cpu_kernels
def test_a_stuck_cpu_fails_the_engine_and_nothing_hangs():
    with (
        cuda_core(
            MODEL, slots=0, fetch_of=[0], max_running=3, deadline_s=0.2, fault="stuck:7"
        ) as core,
        pytest.raises(EngineFailed, match="computed no experts for"),
    ):
        answer_all(core, [request(f"r{i}", prompt(i, 12), 10) for i in range(3)])


@pytest.mark.parametrize("staging", [1, 3, 8])
@pytest.mark.parametrize("slots", [0, 6])
def test_a_pool_that_kernels_cannot_read(alone, slots, staging):
    """Every missed expert goes through the staging area, in passes if it is small.

    The passes of a row are added in another order, so its last bits may differ: greedy only.
    """
    greedy = [one for one in requests() if one.sampling.temperature == 0]
    with cuda_core(MODEL, slots=slots, staging=staging, pinned=False, max_running=4) as core:
        answers = comparable(answer_all(core, greedy))
    assert answers == {name: alone[name] for name in answers}


def test_everything_resident_never_asks_where_experts_are(alone):
    with cuda_core(MODEL, slots=32, staging=0, max_running=4) as core:
        assert core.experts.all_resident
        assert comparable(answer_all(core, requests())) == alone
        assert core.status().expert_misses == 0


def test_rows_that_end_one_after_another(alone):
    """Steps are launched ahead while all rows go on; each ending makes the batch anew."""
    greedy = [one for one in requests() if one.sampling.temperature == 0]
    with cuda_core(MODEL, slots=9, max_running=8) as core:
        answers = comparable(answer_all(core, greedy))
    assert answers == {name: alone[name] for name in answers}


@pytest.mark.parametrize(("count", "held"), [(1, False), (8, True), (8, False), (17, False)])
def test_anything_asked_of_a_token_is_drawn_ahead(count, held):
    """Penalties, biases, masks, logprobs; and more rows than the largest graph holds."""
    with engine_core(MODEL, max_running=count) as core:
        wanted = comparable(answer_all(core, asking(count, held=held)))
    with cuda_core(MODEL, slots=9, max_running=count) as core:
        follow, followed = core.runner.follow, []
        core.runner.follow = lambda *of: followed.append(1) or follow(*of)
        assert comparable(answer_all(core, asking(count, held=held))) == wanted
    assert len(followed) >= 14, "rows end at three lengths, and each end makes the batch anew"


@pytest.fixture(scope="module", params=[True, False], ids=["held", "free"])
def asked_alone(request):
    with engine_core(MODEL, max_running=1) as core:
        answers = comparable(answer_all(core, asking(14, held=request.param, tokens=24)))
    return request.param, answers


@pytest.mark.parametrize("seed", range(2))
def test_who_comes_and_goes_changes_no_token_of_others(asked_alone, seed):
    """Any of it at once: waves, preemption, slots that change hands, steps that nobody reads."""
    held, wanted = asked_alone
    rng = random.Random(seed + 2 * held)
    arrive = {name: rng.randrange(60) for name in wanted}
    leave = {name: rng.randrange(5, 90) for name in wanted if rng.random() < 0.2}
    with cuda_core(
        MODEL, slots=9, max_running=rng.choice([3, 8, 12]), num_pages=rng.choice([14, 20, 40]),
        prefill_chunk=16,
    ) as core:  # fmt: skip
        requests = asking(14, held=held, tokens=24)
        answers = comparable(answer_all(core, requests, arrive=arrive, leave=leave))
    for name, (tokens, logprobs, finish, error) in answers.items():
        if finish is None:
            assert name in leave
            whole = wanted[name]
            assert (tokens, logprobs) == (whole[0][: len(tokens)], whole[1][: len(logprobs)])
        else:
            assert (tokens, logprobs, finish, error) == wanted[name]


def test_requests_that_wait_for_a_place_do_not_stop_steps_from_being_launched_ahead():
    many = [request(f"r{i}", prompt(i, 12), 30) for i in range(4)]
    with cuda_core(MODEL, slots=9, max_running=2) as core:
        follow, followed = core.runner.follow, []
        core.runner.follow = lambda *of: followed.append(1) or follow(*of)
        answers = comparable(answer_all(core, many))
    assert len(followed) == 2 * 28, "two batches: the first token is the prompt's, the last follows"
    assert answers == answer_alone(MODEL, many)


@pytest.mark.parametrize(("count", "held"), [(11, True), (30, False)])
def test_waves_that_are_not_launched_ahead(count, held):
    """Rows held to a grammar, whose draws cannot wait; and more than there are slots for counts."""
    with engine_core(MODEL, max_running=count) as core:
        wanted = comparable(answer_all(core, asking(count, held=held, tokens=6)))
    with cuda_core(MODEL, slots=9, max_running=count) as core:
        assert comparable(answer_all(core, asking(count, held=held, tokens=6))) == wanted


def test_rows_that_are_held_now_and_then_are_drawn_from_what_was_launched_ahead():
    """A constraint that lets anything come follows the launched step; a mask takes its logits."""

    def held():
        return [
            request(
                f"r{i}",
                prompt(i, 20 + i),
                30,
                sampling=Sampling(temperature=1.2 * (i % 2), seed=i),
                constraint=Cycle(AFTER, [i + 1]) if i else None,
            )
            for i in range(4)
        ]

    with engine_core(MODEL) as core:
        wanted = comparable(answer_all(core, held()))
    with cuda_core(MODEL, slots=9, max_running=4) as core:
        assert comparable(answer_all(core, held())) == wanted
    assert {len(tokens) for tokens, *_ in wanted.values()} == {30}


@pytest.mark.parametrize(("slots", "chunk"), [(9, 5), (9, 8), (32, 5), (32, 30), (32, 50)])
def test_short_prompts_as_rows_of_captured_steps(alone, monkeypatch, slots, chunk):
    eager, captured = [], []
    run_eager, run_captured = CudaRunner._eager, CudaRunner._replay_prompts

    def count_eager(runner, spans, *rest):
        eager.append(sum(span.count for span in spans))
        return run_eager(runner, spans, *rest)

    def count_captured(runner, spans, *rest):
        captured.append(sum(span.count for span in spans))
        return run_captured(runner, spans, *rest)

    with cuda_core(MODEL, slots=slots, max_running=3, prefill_chunk=chunk) as core:
        monkeypatch.setattr(CudaRunner, "_eager", count_eager)
        monkeypatch.setattr(CudaRunner, "_replay_prompts", count_captured)
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone
    most = 32 if slots == 32 else 8
    assert captured and max(captured) <= most
    assert all(tokens > 8 for tokens in eager)
    assert (not eager) == (chunk <= 8)


def test_a_prompt_that_is_judged_is_not_short(alone):
    prompt = requests()[3].prompt_ids[:6]
    with cuda_core(MODEL, slots=32, max_running=3) as core:
        mine = answer_all(core, [request("judged", prompt, 4, prompt_logprobs=2)])["judged"]
    with engine_core(MODEL, max_running=1) as core:
        theirs = answer_all(core, [request("judged", prompt, 4, prompt_logprobs=2)])["judged"]
    assert mine.tokens == theirs.tokens and mine.prompt_logprobs == theirs.prompt_logprobs
