"""The numerics contract on a GPU: float32 tokens equal those of the CPU device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from asking import asking
from cuda_core import cuda_core
from driving import Answer, answer_all, check_pages, comparable, engine_core
from measuring import measured_while_serving
from test_contract import ORACLES, requests

from ftd.errors import EngineFailed
from ftd.experts import policy
from ftd.experts.measure import FULL
from ftd.experts.profile import to_json
from ftd.experts.split import PromptRates
from ftd.kernels import blocks
from ftd.kernels.cpu import native
from ftd.schedule.pauses import Pauses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


needs_cpu_kernels = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="the C++ kernels are not built"
)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe-window"])
def model(request):
    return ORACLES / request.param


@pytest.fixture(scope="module")
def tokens(model):
    with engine_core(model, device="cpu", max_running=1) as core:
        answers = comparable(answer_all(core, requests()))
    return {name: answer[0] for name, answer in answers.items()}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("slots", [0, 7, 32])
def test_tokens_equal_those_of_the_cpu(model, tokens, slots, pinned):
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=slots, pinned=pinned, ops=CudaOps(), device="cuda:0", max_running=8
    ) as core:
        for _ in range(2):  # slots as filled at the start, then as the policy left them
            answers = comparable(answer_all(core, requests()))
            assert {name: answer[0] for name, answer in answers.items()} == tokens
        status = core.status()
    assert (status.expert_misses > 0) == (slots < 32)


@pytest.mark.parametrize("slots", [0, 9, 32])
@pytest.mark.parametrize("pinned", [True, False])
def test_steps_within_passes(model, tokens, monkeypatch, slots, pinned):
    """Captured steps while experts come to this layer and the next; eager ones before that."""
    from ftd.kernels.triton.ops import CudaOps

    rng = random.Random(4)
    monkeypatch.setattr(Pauses, "due", lambda self, now_s, decode_s: rng.choice((0, 0, 0, 1, 1, 3)))
    monkeypatch.setattr(policy, "AHEAD_FROM_TOKENS", 17)
    monkeypatch.setattr(policy, "SURE_USES", 1.0)
    with cuda_core(
        model, slots=slots, staging=8, pinned=pinned, ops=CudaOps(), device="cuda:0",
        max_running=12, prefill_chunk=32,
    ) as core:  # fmt: skip
        for _ in range(2):
            core.tree.clear()
            arrive = {one.request_id: 2 * i for i, one in enumerate(requests())}
            answers = comparable(answer_all(core, requests(), arrive=arrive))
            assert {name: answer[0] for name, answer in answers.items()} == tokens


@needs_cpu_kernels
@pytest.mark.parametrize("many", [True, False])
def test_a_long_prompt_whose_experts_the_cpu_shares(model, tokens, monkeypatch, many):
    """Blocks of tokens; ``many``: experts come ahead, and the CPU's products go past them."""
    from ftd.kernels.triton.ops import CudaOps

    monkeypatch.setattr(blocks, "PRODUCTS_BYTES", 4 * 16 * 2 * 64)  # of sixteen tokens
    monkeypatch.setattr(policy, "AHEAD_FROM_TOKENS", 17 if many else 10_000)
    monkeypatch.setattr(policy, "SURE_USES", 1.0)
    with cuda_core(
        model, slots=7, staging=8, fetch_of=[0, 1], ops=CudaOps(), device="cuda:0",
        max_running=12, prefill_chunk=100,
    ) as core:  # fmt: skip
        core.experts.share_prompts(PromptRates(1e-2, 0.0, 0.0))
        for _ in range(2):
            core.tree.clear()
            answers = comparable(answer_all(core, requests()))
            assert {name: answer[0] for name, answer in answers.items()} == tokens


@needs_cpu_kernels
@pytest.mark.parametrize("fetch_of", [[0], [0, 0, 1, 2]])
def test_misses_divided_between_link_and_cpu(model, tokens, fetch_of):
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=7, fetch_of=fetch_of, ops=CudaOps(), device="cuda:0", max_running=8
    ) as core:
        for _ in range(2):
            answers = comparable(answer_all(core, requests()))
            assert {name: answer[0] for name, answer in answers.items()} == tokens
        counters = core.experts.counters()
    assert counters.on_cpu > 0 and counters.fills > 0


@needs_cpu_kernels
@pytest.mark.parametrize("slots", [0, 7])
def test_experts_that_link_and_cpu_share(model, tokens, slots, monkeypatch):
    from ftd.kernels.triton.ops import CudaOps

    monkeypatch.setattr("ftd.kernels.formats.PLAIN_PART_ROWS", 16)  # of 32
    with cuda_core(
        model, slots=slots, fetch_of=[0, 0.5, 0.5, 1.5], ops=CudaOps(), device="cuda:0",
        max_running=8,
    ) as core:  # fmt: skip
        for _ in range(2):
            answers = comparable(answer_all(core, requests()))
            assert {name: answer[0] for name, answer in answers.items()} == tokens
        counters = core.experts.counters()
    assert counters.on_cpu > 0 and counters.fetched > 0


@needs_cpu_kernels
def test_a_stuck_cpu_fails_the_engine_and_nothing_hangs(model):
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=0, fetch_of=[0], ops=CudaOps(), device="cuda:0", max_running=3, deadline_s=0.5
    ) as core:
        core.experts.division.cpu.service.stick()
        with pytest.raises(EngineFailed, match="computed no experts for"):
            answer_all(core, requests())


@needs_cpu_kernels
def test_a_copy_goes_on_while_a_step_waits_for_the_cpu(model):
    """Waits must not stand in the way of fills, or the two would stop each other."""
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=0, fetch_of=[0], ops=CudaOps(), device="cuda:0", max_running=1, deadline_s=5.0
    ) as core:
        one = requests()[0]
        core.add(one)
        core.step()  # the prompt; its first decode step may be launched ahead
        core.settle()
        core.experts.division.cpu.service.stick()
        core._ahead = core._launch()  # asks, and waits for what does not come
        source = torch.ones(1 << 20).pin_memory()
        target = torch.zeros(1 << 20, device="cuda:0")
        with torch.cuda.stream(torch.cuda.Stream()):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        copied.synchronize()  # would last as long as the wait if they shared a queue
        assert core.experts.division.cpu._late == ""
        with pytest.raises(EngineFailed):
            core.settle()


@needs_cpu_kernels
@pytest.mark.parametrize("slots", [0, 7, 32])
def test_a_machine_measured_while_it_serves(model, tokens, slots, capsys, monkeypatch):
    from ftd.kernels.triton.ops import CudaOps

    monkeypatch.setattr("ftd.engine.profiling.FULL", replace(FULL, rounds=1, slice_s=0.005))
    some = requests()
    with cuda_core(
        model, slots=slots, fetch_of=[0, 0, 1, 2], ops=CudaOps(), device="cuda:0", max_running=8
    ) as core:
        profile, answers = measured_while_serving(core, some)
        assert {name: answer.tokens for name, answer in answers.items()} == tokens
        again = comparable(answer_all(core, some))  # divided as the profile says
        assert {name: answer[0] for name, answer in again.items()} == tokens
    with capsys.disabled():
        print(to_json(profile))
    assert [f.batch for f in profile.figures] == [1, 2, 4, 8]
    for figures in profile.figures:
        assert figures.link.experts_per_s > 0 and figures.cpu.experts_per_s > 0
        assert figures.fixed_s > 0 and (figures.hits.experts_per_s > 0) == (slots > 0)
    assert 0 <= profile.handshake_s < 1e-3


def test_memory_comes_and_goes_under_captured_steps(model, tokens):
    from ftd.engine.resize import resize
    from ftd.kernels.triton.ops import CudaOps

    rng = random.Random(1)
    with cuda_core(
        model, slots=9, num_pages=40, max_pages=40_000, ops=CudaOps(), device="cuda:0",
        max_running=6, prefill_chunk=24,
    ) as core:  # fmt: skip
        graphs = dict(core.runner._graphs)
        all_experts = len(core.experts.layers) * core.experts.num_experts
        answers = {one.request_id: Answer() for one in requests()}
        arriving, least_free, most_free = list(requests()), 2**60, 0
        while arriving or core.has_work():
            if arriving and rng.random() < 0.5:
                core.add(arriving.pop(0))
            outputs = []
            if rng.random() < 0.3:
                outputs += core.settle()
                resize(core, rng.choice([13, 17, 40, 40_000]), rng.choice([0, 1, 9, all_experts]))
                free = torch.cuda.mem_get_info()[0]
                least_free, most_free = min(least_free, free), max(most_free, free)
            if core.has_work():
                outputs += core.step()
            for output in outputs:
                answers[output.request_id].take(output)
            check_pages(core)
        assert core.runner._graphs == graphs, "captured again"
    assert {name: answer.tokens for name, answer in answers.items()} == tokens
    assert most_free - least_free > 0.9 * (40_000 - 40) * core.kv.page_bytes


@pytest.mark.parametrize(("count", "held"), [(1, False), (8, True), (17, False)])
def test_anything_asked_of_a_token_is_drawn_as_on_the_cpu(count, held):
    """Penalties, biases, masks, logprobs; launched ahead, and in waves."""
    from ftd.kernels.triton.ops import CudaOps

    model = ORACLES / "qwen3_moe"
    with engine_core(model, device="cpu", max_running=count) as core:
        wanted = answer_all(core, asking(count, held=held))
    with cuda_core(
        model, slots=9, ops=CudaOps(), device="cuda:0", max_running=count
    ) as core:  # fmt: skip
        follow, followed = core.runner.follow, []
        core.runner.follow = lambda *of: followed.append(1) or follow(*of)
        answers = answer_all(core, asking(count, held=held))
    assert len(followed) >= 14
    assert {name: a.tokens for name, a in answers.items()} == {
        name: a.tokens for name, a in wanted.items()
    }
    for name, answer in answers.items():
        for mine, theirs in zip(answer.logprobs, wanted[name].logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-3)


def test_the_driver_tells_what_torch_does():
    from dataclasses import asdict

    from ftd.cuda.device import look_for_gpu
    from ftd.cuda.looking import look_by_driver

    mine, theirs = (asdict(look(0).gpu) for look in (look_by_driver, look_for_gpu))
    assert mine.pop("free_bytes") > 0 and theirs.pop("free_bytes") > 0
    assert mine == theirs
