"""Recurrent states on the CUDA device's parts, on CPU tensors: equal tokens, whatever is resumed.

Sequences write states of their own and read kept ones where these lie; decode runs ahead.
"""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, answer_interrupted, comparable
from test_recurrence import (  # noqa: F401
    ORACLES,
    alone,
    check_states_at_rest,
    model,
    requests,
)

from ftd.config import load_config
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.states import CudaStates
from ftd.engine.preparing import prepare
from ftd.engine.recurrence import Recurrence
from ftd.kv.states import LIVE_STATES


@pytest.mark.parametrize(("max_running", "chunk"), [(1, 256), (3, 7), (8, 50)])
def test_batches_chunks_and_reuse(model, alone, max_running, chunk):  # noqa: F811
    with cuda_core(model, slots=5, max_running=max_running, prefill_chunk=chunk) as core:
        assert comparable(answer_all(core, requests())) == alone
        again = answer_all(core, requests())
        assert comparable(again) == alone
        assert sum(answer.reused for answer in again.values()) > 100
        check_states_at_rest(core)
        states = core.kv.states
        assert all(kept.slot >= states.num_live for kept in core.held.recurrence.store)


def test_greedy_rows_run_ahead_and_end_one_after_another(model, alone):  # noqa: F811
    greedy = [one for one in requests() if one.sampling.temperature == 0]
    with cuda_core(model, slots=5, max_running=4) as core:
        answers = comparable(answer_all(core, greedy))
        assert answers == {name: alone[name] for name in answers}
        check_states_at_rest(core)


def test_without_room_for_kept_states(model, alone):  # noqa: F811
    with cuda_core(model, slots=5, max_running=3, prefill_chunk=20) as core:
        states = core.kv.states
        live = LIVE_STATES * 3
        core.held.recurrence = Recurrence(
            live + 1, 3, core.kv.page_tokens, num_live=live, copy=states.copy
        )
        for _ in range(2):
            assert comparable(answer_all(core, requests())) == alone
        check_states_at_rest(core)


def test_interrupted_steps_and_eager_ones(model, alone):  # noqa: F811
    with cuda_core(model, pinned=False, max_running=3, prefill_chunk=20) as core:
        assert comparable(answer_interrupted(core, requests(), seed=5)) == alone
        check_states_at_rest(core)


def test_slots_are_bytes_wherever_they_lie():
    states, size = new_states(), new_states().slot_bytes
    for slot in range(5):
        states.write(slot, torch.full((size,), slot, dtype=torch.uint8))
    states.copy(1, 4)
    assert [set(states.slot(slot).tolist()) for slot in range(5)] == [{0}, {1}, {2}, {3}, {1}]
    address = states.layers[0].address
    assert [int(a) for a in address] == [states.slot(slot).data_ptr() for slot in range(5)]
    states.close()


def test_nothing_is_kept_in_memory_that_kernels_cannot_read():
    states = new_states(register=lambda address, num_bytes: "no")
    assert states.num_slots == states.num_live == len(states.layers[0].address) == 2
    states.close()


def new_states(**more):
    path = ORACLES / "qwen3_next"
    config = load_config({"model": str(path), "device": "cpu"}, {})
    memory = DeviceMemory(torch.device("cpu"))
    return CudaStates(prepare(path, config).spec, 2, 3, torch.bfloat16, memory, **more)
