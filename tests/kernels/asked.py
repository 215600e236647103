"""One question to the CPU's expert service through its mailbox, as a captured step asks it."""

from __future__ import annotations

import time

import torch

from ftd.kernels.activation import Activation
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.cpu.service import ExpertService, Mailbox
from ftd.kernels.formats import ExpertLayout

GIVEN_UP_S = 20.0


class Asked:
    """The answer, [T, K, H]; NaN where nothing was said."""

    def __init__(
        self,
        ops: NativeOps,
        layout: ExpertLayout,
        address: torch.Tensor,  # [E] int64
        activation: Activation,
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        part: tuple[int, int],
    ) -> None:
        hidden = x.shape[1]
        box = Mailbox(8, ids.shape[1], hidden, x.dtype, pin=False)
        service = ExpertService(ops, box, address[None].contiguous(), layout, activation)
        box.y.fill_(float("nan"))
        box.x[: len(x)], box.ids[: len(x)] = x, ids
        box.head.copy_(torch.tensor([0, len(x), *part]))
        service.expect()
        box.bell[0] = 1
        deadline = time.monotonic() + GIVEN_UP_S
        while box.answer[0] != 1:
            assert time.monotonic() < deadline
        self.fault = service.fault
        service.close()
        self.y = box.y.view(-1)[: ids.numel() * hidden].view(*ids.shape, hidden).clone()
