"""What counts when a router of one run chose otherwise."""

from __future__ import annotations

import pytest
import torch
from against_oracle import Run, check_close, check_close_on_gpu, closeness
from oracle_check import Prompt

PROMPT = Prompt("p", ids=[1, 2, 3], greedy=[0, 0], margins=[1.0, 1.0], logits_start=0)


def run(chosen: list[int], errors: list[float]) -> Run:
    """Four rows of one layer with one expert each, and logits that are off by so much."""
    ids = torch.tensor(chosen)[:, None]
    logits = torch.zeros(4, 3)
    logits[:, 0] = 5.0 + torch.tensor(errors)
    return Run(logits, {0: (ids, torch.ones(4, 1))})


def test_a_row_behind_another_choice_is_not_judged():
    exact = run([4, 5, 6, 7], [0.0] * 4)
    found = closeness([PROMPT], lambda p: run([4, 5, 9, 7], [0.1, 0.1, 3.0, 2.0]), lambda p: exact)
    assert abs(found.undisturbed_error - 0.1) < 1e-5
    assert (found.disagreed, found.looks) == (1, 4)
    check_close_on_gpu(found)
    with pytest.raises(AssertionError):
        check_close(found)


def test_an_error_where_all_choose_alike_is_judged():
    exact = run([4, 5, 6, 7], [0.0] * 4)
    found = closeness([PROMPT], lambda p: run([4, 5, 6, 7], [0.1, 0.3, 0.4, 2.0]), lambda p: exact)
    for check in (check_close, check_close_on_gpu):
        with pytest.raises(AssertionError):
            check(found)
