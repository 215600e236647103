"""What ``--fault`` asks of steps, brought about."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ftd.config import FaultSpec
from ftd.cuda.faults import break_context
from ftd.errors import EngineFailed

NO_FAULT = FaultSpec()


class Faults:
    def __init__(self, asked: FaultSpec, device: torch.device) -> None:
        self.asked = asked
        self._device = device

    def before_step(self, number: int) -> None:
        """Args:
        number: of the step that is about to be launched, from 1.
        """
        asked = self.asked
        if asked.slow_s:
            time.sleep(asked.slow_s)
        if asked.step == number:
            raise EngineFailed(f"step {number} failed, as --fault asked")
        if asked.memory is not None and asked.memory <= number:  # steps beside a pass count, too
            self.asked = replace(asked, memory=None)
            raise torch.OutOfMemoryError("CUDA out of memory, as --fault asked")
        if asked.gpu == number:
            break_context(self._device)
