"""What a GPU can do to its users: no memory, a copy that fails, a context that is gone.

Every request gets an error at once; the engine goes on, or ftd ends with the cause.
On the CPU's tensors the errors are made up; with ``-m gpu`` they are those of a real GPU.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, answer_alone, check_pages, request
from test_contract import ORACLES, requests

from ftd.config import FaultSpec
from ftd.cuda.faults import is_lost
from ftd.engine.api import EngineLimits, Finish
from ftd.engine.thread import EngineThread
from ftd.errors import EngineFailed, GpuLost, OutOfMemory
from ftd.kernels.triton.ops import CudaOps

sys.path.insert(0, str(Path(__file__).parents[1] / "field"))

from ask import chat, post
from running_ftd import running_ftd

MODEL = ORACLES / "qwen3_moe"
LIMITS = EngineLimits(512, 512, 8, 64, 512)

on_a_gpu = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
devices = pytest.mark.parametrize("device", ["cpu", on_a_gpu])


def core_on(device, **settings):
    ops = CudaOps() if device != "cpu" else None
    return cuda_core(MODEL, slots=9, device=device, ops=ops, max_running=4, **settings)


def tokens_alone(asked):
    """On the CPU device, each by itself."""
    return {name: answer[0] for name, answer in answer_alone(MODEL, asked).items()}


def tokens_of(answers):
    return {name: answer.tokens for name, answer in answers.items()}


def ask_too_much(device):
    """What an allocation beyond the device's memory raises."""
    if device == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
    torch.empty(2**40, device=device)


@devices
def test_a_prompt_without_memory_fails_alone(device, monkeypatch):
    """In the middle of its layers; who decodes beside goes on, and the prompt can come again."""
    long, beside = request("long", range(100, 220), 6), request("beside", range(40), 30)
    alone = tokens_alone([long, beside])
    with core_on(device, prefill_chunk=64) as core:
        forward, failing = core.experts.forward, []

        def refusing(layer, x, ids, weights, *pause):
            if layer == 2 and len(x) >= 64 and not failing:
                failing.append(layer)
                ask_too_much(device)
            return forward(layer, x, ids, weights, *pause)

        monkeypatch.setattr(core.experts, "forward", refusing)
        answers = answer_all(core, [beside, long], arrive={"long": 6})
        assert failing
        assert isinstance(answers["long"].error, OutOfMemory)
        assert answers["long"].error.hint and answers["long"].finish is Finish.ERROR
        assert answers["beside"].tokens == alone["beside"]
        check_pages(core)
        assert core.status().failed == 1
        assert tokens_of(answer_all(core, [long])) == {"long": alone["long"]}


@devices
def test_steps_without_memory_leave_an_engine_that_answers(device):
    with core_on(device) as core:
        core.steps.faults.asked = FaultSpec(memory=3)
        failed = [a for a in answer_all(core, requests()[:5]).values() if a.error]
        assert failed and all(isinstance(a.error, OutOfMemory) for a in failed)
        again = requests(seed=2)[:3]
        tokens = tokens_of(answer_all(core, again))
        check_pages(core)
    assert tokens == tokens_alone(again)


async def failure_of(core, break_it):
    """Break a busy engine; returns what its requests got, and what it says of itself."""
    engine = EngineThread(core, LIMITS)
    tickets = [engine.submit(request(f"r{i}", range(i, 40 + i), 400)) for i in range(6)]
    for ticket in tickets[:2]:
        await anext(ticket)  # two decode, others wait or are prompts
    await engine.at_safe_point(break_it)

    async def last_of(ticket):
        return [output async for output in ticket][-1]

    last = await asyncio.gather(*map(last_of, tickets))
    failure = await engine.wait_failed()
    await engine.close()
    return [output.error for output in last], failure


def check_all_failed(errors, failure):
    assert all(isinstance(error, GpuLost) for error in errors), errors
    assert is_lost(failure.__cause__)


async def test_a_copy_that_fails_ends_every_request():
    """Of what prompts need that wait for their turn, with no expert in a slot."""

    class Broken(list):
        def __getitem__(self, _):
            raise RuntimeError("CUDA error: invalid argument")

    def refuse_copies(core):
        core.experts.resize(0)
        core.experts._records = list(map(Broken, core.experts._records))

    with core_on("cpu") as core:
        errors, failure = await failure_of(core, refuse_copies)
    check_all_failed(errors[core.limits.max_running :], failure)  # who decoded may be done


async def test_a_lost_gpu_ends_every_request():
    """The context of this process survives: a real one is broken in a process of its own, below."""

    def lose(core):
        core.steps.faults.asked = FaultSpec(gpu=core.roster.totals.steps + 2)

    with core_on("cpu") as core:
        check_all_failed(*await failure_of(core, lose))


@devices
async def test_a_lost_gpu_ends_ftd_with_the_cause(device):
    """A device-side assertion in the thirtieth step: requests hear of it, then ftd is gone."""
    with running_ftd(device=device, fault="gpu:30,slow:20ms", max_running=4) as ftd:
        replies = await asyncio.gather(*(post(ftd.base, chat("S14")) for _ in range(6)))
        failed = [reply for reply in replies if reply.status != 200]
        assert failed and {reply.error["code"] for reply in failed} <= {
            "gpu_lost",
            "model_not_ready",
        }
        assert any("the GPU failed" in reply.error["message"] for reply in failed)
        code = await asyncio.to_thread(ftd.process.wait, 15)
        log = ftd.log.read_text()
    assert code == 1
    assert "the GPU failed" in log and "model.recovered" not in log


def test_a_lack_of_memory_is_not_a_lost_gpu():
    lost = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert is_lost(lost)
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_lost(RuntimeError("CUDA error: out of memory"))
    assert not is_lost(EngineFailed("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"))
    assert is_lost(EngineFailed("cuMemMap failed: CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert not is_lost(ValueError("no slot"))
    try:
        raise ValueError("a step") from lost
    except ValueError as error:
        assert is_lost(error)
