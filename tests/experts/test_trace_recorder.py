"""Recorded routing: whole good steps, in order, within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from ftd.experts.trace import TraceRecorder

L, K = 3, 2


def run_step(recorder: TraceRecorder, routing: np.ndarray) -> None:
    """``routing`` [T, L, K], layer by layer as the model does."""
    for layer in range(L):
        recorder.add(layer, routing[:, layer])


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (300, np.int16)])
def test_the_good_steps_are_kept(experts, dtype):
    random = np.random.default_rng(0)
    recorder = TraceRecorder(L, experts, max_tokens=100)
    kept = []
    for step in range(6):
        routing = random.integers(0, experts, (step + 1, L, K), dtype=np.int32)
        run_step(recorder, routing)
        if step % 3 == 2:
            recorder.drop_step()
        else:
            recorder.commit_step()
            kept.append(routing)
    assert recorder.kept().dtype == dtype
    np.testing.assert_array_equal(recorder.kept(), np.concatenate(kept))


def test_rows_not_in_use_and_half_steps_are_left_out():
    recorder = TraceRecorder(L, 8, max_tokens=10)
    routing = np.ones((3, L, K), np.int32)
    routing[1] = -1
    run_step(recorder, routing)
    recorder.commit_step()
    assert recorder.num_tokens == 2
    recorder.add(0, routing[:, 0])
    recorder.commit_step()
    assert recorder.num_tokens == 2


def test_a_full_recorder_takes_no_more():
    recorder = TraceRecorder(L, 8, max_tokens=4)
    for _ in range(3):
        run_step(recorder, np.ones((3, L, K), np.int32))
        recorder.commit_step()
    assert recorder.full and len(recorder.kept()) == 4


def test_nothing_recorded_is_empty():
    assert TraceRecorder(L, 8, 4).kept().shape == (0, L, 0)


def test_what_is_added_is_copied():
    recorder = TraceRecorder(1, 8, 4)
    ids = np.full((1, K), 5, np.int32)
    recorder.add(0, ids)
    ids[:] = 0
    recorder.commit_step()
    assert recorder.num_tokens == 1 and (recorder._kept[0] == 5).all()
