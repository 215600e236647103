"""Constraints in the engine: a row obeys its own, keeps it through preemption, and fails alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from driving import answer_all, engine_core, request

from ftd.engine.api import Finish, Sampling
from ftd.errors import ConstraintFailed

MODEL = Path(__file__).parents[1] / "data" / "oracles" / "qwen3_moe"
WORDS = 32  # masks of more tokens than the model has are cut


def mask_of(tokens: Iterable[int]) -> torch.Tensor:
    mask = torch.zeros(WORDS * 32, dtype=torch.bool)
    mask[list(tokens)] = True
    powers = 2 ** torch.arange(32, dtype=torch.int64)
    return (mask.view(WORDS, 32) * powers).sum(dim=1).to(torch.int32)


class Cycle:
    """What may follow a token, by the token modulo 3; breaks where it is told to."""

    def __init__(self, after: dict[int, list[int]], start: list[int], break_at: int = -1) -> None:
        self.accepted: list[int] = []
        self._after, self._allowed, self._break_at = after, start, break_at

    def mask(self) -> torch.Tensor | None:
        if len(self.accepted) == self._break_at:
            raise ValueError("lost the thread")
        return mask_of(self._allowed) if self._allowed else None

    def accept(self, token: int) -> None:
        assert not self._allowed or token in self._allowed, token
        self.accepted.append(token)
        self._allowed = self._after[token % 3]


AFTER = {0: [10, 11, 12, 40], 1: [200, 203, 211], 2: []}  # after some tokens, anything may come
DRAWN = Sampling(temperature=1.5, seed=4)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(500) for _ in range(length)]


@pytest.fixture(scope="module")
def core():
    with engine_core(MODEL, prefill_chunk=32) as core:
        yield core


def test_each_row_obeys_its_own_constraint_and_free_rows_change_nothing(core):
    free = [request(f"free{i}", prompt(i, 20), 12, sampling=DRAWN) for i in range(2)]
    alone = answer_all(core, free)
    held = [Cycle(AFTER, [7, 8, 9]), Cycle(AFTER, [100 + i for i in range(50)])]
    mixed = [
        free[0],
        request("held0", prompt(3, 40), 12, sampling=DRAWN, constraint=held[0]),
        free[1],
        request("held1", prompt(4, 9), 12, constraint=held[1]),
    ]
    answers = answer_all(core, mixed)
    assert [answers[r.request_id].tokens for r in free] == [
        alone[r.request_id].tokens for r in free
    ]
    for i, constraint in enumerate(held):
        assert constraint.accepted == answers[f"held{i}"].tokens
        assert len(constraint.accepted) == 12


def test_a_constraint_goes_on_where_it_was_when_its_row_is_preempted():
    def requests():
        return [
            request(f"r{i}", prompt(i, 60), 40, sampling=DRAWN, constraint=Cycle(AFTER, [i + 1]))
            for i in range(4)
        ]

    with engine_core(MODEL) as core:
        roomy = answer_all(core, requests())
    with engine_core(MODEL, num_pages=13) as core:
        scarce = answer_all(core, requests())
    assert {n: a.tokens for n, a in scarce.items()} == {n: a.tokens for n, a in roomy.items()}
    assert all(a.tokens[0] == i + 1 and len(a.tokens) == 40 for i, a in enumerate(roomy.values()))


@pytest.mark.parametrize("break_at", [0, 5])
def test_a_constraint_that_breaks_fails_its_row_alone_and_keeps_the_cache(core, break_at: int):
    long = prompt(9, 64)
    broken = Cycle(AFTER, [1], break_at)
    answers = answer_all(
        core,
        [
            request("broken", long, 12, constraint=broken),
            request("other", prompt(10, 20), 12, sampling=DRAWN),
        ],
    )
    failed = answers["broken"]
    assert failed.finish is Finish.ERROR and len(failed.tokens) == break_at
    assert isinstance(failed.error, ConstraintFailed) and "lost the thread" in failed.error.message
    assert answers["other"].finish is Finish.LENGTH
    again = answer_all(core, [request("again", long, 2)])
    assert again["again"].reused >= 48  # a client's bad grammar costs nobody the cache


def test_a_token_that_was_not_expected_ends_the_row():
    class Stubborn(Cycle):
        def mask(self) -> torch.Tensor | None:
            return None

    with engine_core(MODEL) as core:
        stubborn = Stubborn(AFTER, [501])
        answers = answer_all(core, [request("r", prompt(1, 9), 5, constraint=stubborn)])
    assert answers["r"].finish is Finish.ERROR and len(answers["r"].tokens) == 1


def test_a_finished_constraint_ends_with_eos(core):
    ending = Cycle({0: [33], 1: [33], 2: [33]}, [44])
    answers = answer_all(
        core, [request("r", prompt(2, 9), 5, constraint=ending, eos_ids=frozenset({33}))]
    )
    assert answers["r"].tokens == [44, 33] and answers["r"].finish is Finish.EOS
