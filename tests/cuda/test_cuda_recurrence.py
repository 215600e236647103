"""Recurrent states on the CUDA device's parts, on CPU tensors: equal tokens, whatever is resumed.

Sequences write states of their own and read kept ones where these lie; decode runs ahead.
"""

from __future__ import annotations

import pytest
from cuda_core import cuda_core
from driving import answer_all, answer_interrupted, comparable
from test_recurrence import alone, check_states_at_rest, model, requests  # noqa: F401

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
