"""Dividing experts and adding up: the kernels, interpreted, against their torch reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels import divide as reference
from ftd.kernels.cpu.service import Mailbox
from ftd.kernels.divide import FETCHED, KEYS, ON_CPU, STORED, WANTED, new_shared
from ftd.kernels.reference import TorchOps
from ftd.kernels.triton import divide as kernels
from ftd.kernels.triton.ops import CudaOps
from ftd.kernels.triton.sum_norm import RouteProducts

LAYERS, EXPERTS, HIDDEN, ROW = 3, 12, 40, 1
SLOTS = (1 << 40, (1 << 40) + (1 << 20))


def shared_of(resident, worth, fetch_of, lent, *, cpu, routes, parts=1):
    address = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS) * 64 + 4096
    address[ROW, resident] += SLOTS[0]
    mailbox = Mailbox(8, routes, HIDDEN, torch.float32, pin=False) if cpu else None
    shared = new_shared(address, len(lent), SLOTS, mailbox)
    shared.parts, shared.part_rows = parts, 64
    shared.worth[ROW] = worth
    shared.fetch_of = fetch_of[None]
    shared.lent.copy_(torch.tensor(lent))
    shared.begin_step()
    shared.fill.fill_(99)  # of the layer before
    shared.asked[1] = 2**31 - 1  # the next number wraps around
    return shared


def run(module, shared, ids, active, x):
    log, here = torch.full_like(ids, 77), torch.full_like(ids, 77)
    module.divide(shared, ROW, ids, active, x, log, here)
    return log, here


@pytest.mark.parametrize("cpu, parts", [(True, 1), (False, 1), (True, 6)])
@pytest.mark.parametrize("tokens, routes", [(1, 1), (1, 4), (4, 4), (8, 3)])
def test_both_divide_alike(tokens, routes, cpu, parts):
    generator = torch.Generator().manual_seed(tokens * routes)
    for trial in range(12):
        resident = torch.rand(EXPERTS, generator=generator) < (0.0, 0.3, 0.6, 1.0)[trial % 4]
        worth = torch.rand(EXPERTS, generator=generator).round(decimals=1)  # with equal ones
        worth = torch.where(torch.rand(EXPERTS, generator=generator) < 0.4, -worth - 1, worth)
        fetch_of = torch.tensor([0, 1, 1, 2, 2, 3], dtype=torch.int32)
        if parts > 1:
            fetch_of = torch.tensor([0, 2, 5, 6, 13, 20], dtype=torch.int32)
        lent = [SLOTS[0] + 512 * i for i in range(3)]
        lent[2] *= trial % 2  # two are lent, or three
        ids = [torch.randperm(EXPERTS, generator=generator)[:routes] for _ in range(tokens)]
        ids = torch.stack(ids).int()
        if trial % 3 == 2:  # some routes of a row may be no one's
            ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        active = torch.rand(tokens, generator=generator) < 0.8
        x = torch.randn(tokens, HIDDEN, generator=generator)
        both = [
            shared_of(resident, worth, fetch_of, lent, cpu=cpu, routes=routes, parts=parts)
            for _ in range(2)
        ]
        mine, theirs = both
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                run(kernels, mine, ids, active, x), run(reference, theirs, ids, active, x)
            )
        )
        for name in ("fill", "report", "asked", "both"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        if cpu and mine.asked[0]:
            for name in ("bell", "head", "ids", "x"):
                assert torch.equal(getattr(mine.mailbox, name), getattr(theirs.mailbox, name)), name
            assert mine.mailbox.bell == -(2**31)
        elif cpu:
            assert mine.mailbox.bell == 0
        report, missed = mine.report, set(ids[active].flatten().tolist())
        missed -= {-1, *torch.nonzero(resident).flatten().tolist()}
        assert report[FETCHED] + report[ON_CPU] == parts * len(missed)
        if parts > 1 and len(missed) in (1, 2):  # all of them are the link's in part
            assert int(mine.both[0]) in missed and mine.both[1] == 64 * (4, 1)[len(missed) - 1]
            assert mine.fill[mine.both[0]] == 0, "not all of it is read"
        assert (report[ON_CPU] > 0) == bool(mine.asked[0])
        assert report[STORED] <= min(report[WANTED], 3)
        assert (report[KEYS:] >= 0).sum() == report[STORED]


def test_a_second_layer_goes_on_where_the_first_left_the_lent_slots():
    ids, active, x = torch.tensor([[0, 1, 2]]).int(), torch.ones(1).bool(), torch.zeros(1, HIDDEN)
    for module in (kernels, reference):
        shared = shared_of(
            torch.zeros(EXPERTS).bool(), torch.arange(12.0), torch.tensor([0, 1, 2]).int(),
            [SLOTS[0], SLOTS[0] + 64, SLOTS[0] + 128], cpu=True, routes=3,
        )  # fmt: skip
        run(module, shared, ids, active, x)
        assert shared.fill[:3].tolist() == [0, SLOTS[0] + 64, SLOTS[0]]
        run(module, shared, ids, active, x)
        assert shared.fill[:3].tolist() == [0, 0, SLOTS[0] + 128]
        assert shared.report.tolist() == [3, 4, 4, 2, *(ROW * EXPERTS + e for e in (2, 1, 2))]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("tokens, routes", [(1, 4), (8, 3)])
def test_both_add_alike_whoever_computed(tokens, routes, asked):
    """Expert 0 is computed by both, if anything was asked."""
    torch.manual_seed(1)
    shared = shared_of(
        torch.zeros(EXPERTS).bool(), torch.zeros(EXPERTS), torch.tensor([0, 0]).int(), [0],
        cpu=True, routes=routes,
    )  # fmt: skip
    log = torch.randint(-1, EXPERTS, (tokens, routes)).int()
    here = torch.where(torch.rand(tokens, routes) < 0.5, log, -1) if asked else log.clone()
    here[log == 0] = 0
    shared.both[0] = 0 if asked else -1
    y = torch.randn(tokens * routes, HIDDEN)
    y[here.flatten() < 0] = float("nan")
    box = shared.mailbox
    answers = box.y.view(-1)[: y.numel()].view(y.shape)
    answers.copy_(torch.randn(y.shape))
    theirs = (log >= 0) & ((here < 0) | (log == shared.both[0]))
    answers[~theirs.flatten()] = float("nan")
    shared.asked[0], shared.asked[1], box.answer[0] = asked, -5, -5
    weights = torch.rand(tokens, routes)
    mine = kernels.merge(shared, y, log, here, weights)
    assert mine.isfinite().all()
    torch.testing.assert_close(mine, reference.merge(shared, y, log, here, weights))


@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("routes", [1, 3, 4])
def test_a_choice_is_divided_in_the_same_launch(routes, normalise, in_use):
    torch.manual_seed(routes)
    resident = torch.arange(EXPERTS) % 3 == 0
    logits, active = torch.randn(1, EXPERTS), torch.tensor([in_use])
    logits[0, 5] = logits[0, 4]
    x, fetch_of = torch.randn(1, HIDDEN), torch.tensor([0, 1, 1, 1]).int()
    found = []
    for module in (kernels, reference):
        shared = shared_of(
            resident, torch.rand(EXPERTS, generator=torch.Generator().manual_seed(3)), fetch_of,
            [SLOTS[0]], cpu=True, routes=routes,
        )  # fmt: skip
        log, here = torch.full((2, 1, routes), 77).int()
        arguments = logits, normalise, active, x, log, here
        weights = module.choose_and_divide(TorchOps(), shared, ROW, *arguments)
        found.append((log, here, weights, shared))
    (log, here, weights, mine), (want_log, want_here, want, theirs) = found
    assert torch.equal(log, want_log) and torch.equal(here, want_here)
    torch.testing.assert_close(weights, want)
    assert (log >= 0).all() == in_use
    for name in ("fill", "report", "asked", "both"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("tokens, routes", [(1, 4), (8, 3)])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_and_the_norm_behind_it_are_one_launch(tokens, routes, asked, act):
    """As ``merge`` and ``add_rms_norm`` one behind the other, to the last bit; None: no CPU."""
    torch.manual_seed(2)
    shared = shared_of(
        torch.zeros(EXPERTS).bool(), torch.zeros(EXPERTS), torch.tensor([0, 0]).int(), [0],
        cpu=asked is not None, routes=routes,
    )  # fmt: skip
    log = torch.randint(-1, EXPERTS, (tokens, routes)).int()
    here = torch.where(torch.rand(tokens, routes) < 0.5, log, -1) if asked else log.clone()
    y = torch.randn(tokens * routes, HIDDEN)
    y[here.flatten() < 0] = float("nan")
    if asked is not None:
        answers = shared.mailbox.y.view(-1)[: y.numel()].view(y.shape)
        answers.copy_(torch.randn(y.shape))
        answers[(here >= 0).flatten()] = float("nan")
        shared.asked[0], shared.asked[1], shared.mailbox.answer[0] = asked, 7, 7
    weights, x, norm = torch.rand(tokens, routes), torch.randn(tokens, HIDDEN), torch.rand(HIDDEN)
    later = RouteProducts(y, log, here, weights, shared if asked is not None else None)
    want = CudaOps().add_rms_norm(x, later.sum(), norm, 1e-6, act)
    for mine, wanted in zip(later.add_rms_norm(x, norm, 1e-6, act), want):
        assert mine.isfinite().all() and torch.equal(mine, wanted)
    delta = reference.merge(shared, y, log, here, weights) if asked is not None else None
    if delta is not None:
        for mine, wanted in zip(want, TorchOps().add_rms_norm(x, delta, norm, 1e-6, act)):
            torch.testing.assert_close(mine, wanted)
