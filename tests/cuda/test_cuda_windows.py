"""Layers with a window on the CUDA device's parts, on CPU tensors: captured steps that run ahead,
prompts as rows of them, host memory below. Tokens are those of an engine that keeps every page.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, answer_interrupted, comparable
from test_windows import alone, check_at_rest, model, requests  # noqa: F401

from ftd.cuda.states import CudaWindowStates
from ftd.kv.windowing import Windowing


@contextmanager
def windowed_core(path, **settings):
    with cuda_core(path, **{"slots": 5, "max_running": 4, **settings}) as core:
        assert core.kv.windows is not None
        yield core
        check_at_rest(core)


@pytest.mark.parametrize(("max_running", "chunk"), [(1, 256), (3, 7)])
def test_batches_chunks_and_reuse(model, alone, max_running, chunk):  # noqa: F811
    with windowed_core(model, max_running=max_running, prefill_chunk=chunk) as core:
        assert comparable(answer_all(core, requests())) == alone
        again = answer_all(core, requests())
        assert comparable(again) == alone
        assert sum(answer.reused for answer in again.values()) > 300


def test_greedy_rows_run_ahead_and_end_one_after_another(model, alone):  # noqa: F811
    greedy = [one for one in requests() if one.sampling.temperature == 0]
    with windowed_core(model) as core:
        launched = core.runner.follow
        ahead = []
        core.runner.follow = lambda *a: ahead.append(a) or launched(*a)
        answers = comparable(answer_all(core, greedy))
        assert answers == {name: alone[name] for name in answers} and len(ahead) > 20


def test_short_prompts_are_rows_of_captured_steps(model, alone):  # noqa: F811
    with windowed_core(model, slots=None, max_running=1) as core:  # all experts resident
        short = [one for one in requests() if len(one.prompt_ids) <= 33]
        replayed, replay = [], core.runner._replay_prompts
        core.runner._replay_prompts = lambda *a: replayed.append(a) or replay(*a)
        answers = comparable(answer_all(core, short))
        assert answers == {name: alone[name] for name in answers} and replayed


def test_pages_come_back_from_host_memory(model, alone):  # noqa: F811
    with windowed_core(model, num_pages=26, host_pages=80, prefill_chunk=24) as core:
        for _ in range(3):
            assert comparable(answer_all(core, requests())) == alone
        assert core.held.host.pages_loaded > 0


def test_interrupted_steps(model, alone):  # noqa: F811
    with windowed_core(model, max_running=3, prefill_chunk=20) as core:
        assert comparable(answer_interrupted(core, requests(), seed=5)) == alone


def test_copies_are_kept_in_memory_that_cannot_be_registered_too():
    windowing = Windowing((0,), 3, 1, 4)
    states = CudaWindowStates(
        windowing, 5, torch.float32, torch.device("cpu"), register=lambda address, num_bytes: "no"
    )
    assert states.num_slots == 5 and states.slot_bytes == 128
    states.write(4, torch.full((128,), 7, dtype=torch.uint8))
    assert states.slot(4).tolist() == [7] * 128
    states.close()
