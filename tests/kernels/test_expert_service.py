"""Experts computed for another processor: it rings in shared memory, the pool answers."""

from __future__ import annotations

import time

import pytest
import torch

from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.cpu.service import ExpertService, Mailbox
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.kernels.reference import TorchOps

LAYERS, EXPERTS, ROUTES, HIDDEN, INNER, MOST = 2, 8, 2, 64, 32, 8
GIVEN_UP_S = 20.0  # far beyond any machine's load


class Asking:
    def __init__(self, threads):
        self.layout = expert_layout(FORMATS["bf16"], HIDDEN, INNER)
        count = LAYERS * EXPERTS
        numbers = torch.randn(count * self.layout.record_bytes // 2) / 8
        self.memory = numbers.to(torch.bfloat16)
        at = torch.arange(count) * self.layout.record_bytes + self.memory.data_ptr()
        self.address = at.view(LAYERS, EXPERTS)
        self.ops = native.load(threads=threads)
        self.box = Mailbox(MOST, ROUTES, HIDDEN, torch.float32, pin=False)
        self.service = ExpertService(self.ops, self.box, self.address, self.layout, SILU)

    def ring(self, layer, x, ids, number):
        box, tokens = self.box, len(x)
        box.x[:tokens], box.ids[:tokens] = x, ids
        box.head[0], box.head[1] = layer, tokens
        box.bell[0] = number

    def answered(self, number, seconds=GIVEN_UP_S):
        deadline = time.monotonic() + seconds
        while self.box.answer[0] != number:
            if time.monotonic() > deadline:
                return False
        return True

    def expected(self, layer, x, ids):
        """[T, K, H]"""
        parts = []
        for k in range(ROUTES):
            one = ids[:, k : k + 1].contiguous()
            part = TorchOps().moe(x, one, torch.ones(one.shape), self.address[layer], self.layout)
            parts.append(part)
        return torch.stack(parts, 1)

    def close(self):
        self.service.close()
        self.ops.close()


@pytest.fixture(params=[1, 3])
def asking(request):
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    asking = Asking(request.param)
    yield asking
    asking.close()


def draw(tokens, generator):
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:ROUTES] for _ in x]).int()
    ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return x, ids


def test_each_question_has_its_answer_and_unused_routes_none(asking):
    generator = torch.Generator().manual_seed(1)
    for number in range(1, 60):
        x, ids = draw(1 + number % MOST, generator)
        asking.service.expect()
        asking.box.y.fill_(7.0)
        if number % 20 == 0:
            time.sleep(0.05)  # it has gone to sleep in between
        asking.ring(number % LAYERS, x, ids, number)
        assert asking.answered(number)
        asking.service.done()
        y = asking.box.y.view(-1)[: ids.numel() * HIDDEN].view(*ids.shape, HIDDEN)
        used = ids >= 0
        expected = asking.expected(number % LAYERS, x, ids)
        torch.testing.assert_close(y[used], expected[used], rtol=1e-5, atol=1e-5)
        assert (y[~used] == 7.0).all()
    assert asking.service.fault == 0


def test_numbers_wrap_around(asking):
    x, ids = draw(1, torch.Generator().manual_seed(2))
    asking.service.expect()
    for number in (2**31 - 1, -(2**31), -1, 0, 1):
        asking.ring(0, x, ids, number)
        assert asking.answered(number)


def test_what_cannot_be_answered_is_told_and_keeps_nobody_waiting(asking):
    x, ids = draw(1, torch.Generator().manual_seed(3))
    asking.service.expect()
    asking.ring(LAYERS, x, ids, 1)
    assert asking.answered(1)
    assert asking.service.fault != 0


def test_a_stuck_thread_does_not_answer_and_can_be_closed(asking):
    x, ids = draw(1, torch.Generator().manual_seed(4))
    asking.service.expect()
    asking.service.stick()
    asking.ring(0, x, ids, 1)
    assert not asking.answered(1, 0.2)


def test_the_pool_sleeps_when_nobody_rings_for_long_and_when_no_step_is_under_way(asking):
    def asleep():
        deadline = time.monotonic() + GIVEN_UP_S
        workers = asking.ops.pool.threads - 1
        while asking.ops.pool.parked < workers and time.monotonic() < deadline:
            time.sleep(0.005)
        return asking.ops.pool.parked == workers

    x, ids = draw(1, torch.Generator().manual_seed(5))
    asking.service.expect()
    assert asleep()  # a step without a question: a prompt, perhaps
    asking.ring(0, x, ids, 1)
    assert asking.answered(1)
    asking.service.done()
    assert asleep()
    asking.service.expect()
    asking.service.stick()
    asking.ring(0, x, ids, 2)
    assert asleep()
