"""Missed experts computed by the CPU in the middle of captured steps, and what happens if it fails.

A step waits for each answer without a limit of its own. So a thread watches: if a question stays
unanswered for ``DEADLINE_S``, it answers for the CPU until no step is under way any more. Those
steps are worth nothing, and the engine fails with the cause.
"""

from __future__ import annotations

import threading
import time

import torch

from ftd.errors import EngineFailed
from ftd.kernels.activation import Activation
from ftd.kernels.cpu.native import NativeOps
from ftd.kernels.cpu.service import ExpertService, Mailbox
from ftd.kernels.formats import ExpertLayout

DEADLINE_S = 1.0  # a layer's question takes milliseconds; requests are told within two seconds
LOOK_S = 0.1
DRAIN_LOOK_S = 0.001  # while answering in the CPU's place


class CpuExperts:
    """
    Args:
        ops: with a pool of its own, which nobody else uses.
        address: [L, E] int64, records in host memory.
        most_tokens: of a captured step.
        pin: the GPU reaches the mailbox; False on the CPU device.
        stuck: a fault for tests: from the n-th step on there are no answers.
    """

    def __init__(
        self,
        ops: NativeOps,
        address: torch.Tensor,
        layout: ExpertLayout,
        activation: Activation,
        act: torch.dtype,
        most_tokens: int,
        experts_per_token: int,
        *,
        pin: bool,
        deadline_s: float = DEADLINE_S,
        stuck: int | None = None,
    ) -> None:
        self.ops, self.threads = ops, ops.pool.threads
        self.mailbox = Mailbox(most_tokens, experts_per_token, layout.hidden, act, pin=pin)
        self.service = ExpertService(ops, self.mailbox, address, layout, activation)
        self._deadline_s, self._steps_to_stuck = deadline_s, stuck
        self._under_way = 0  # steps; changed by the engine thread alone
        self._late = ""
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._run, name="ftd-deadline", daemon=True)
        self._watch.start()

    def step_begins(self) -> None:
        """Before a step that may ask is launched."""
        self._under_way += 1
        self.service.expect()
        if self._steps_to_stuck is not None:
            self._steps_to_stuck -= 1
            if self._steps_to_stuck == 0:
                self.service.stick()

    def step_ended(self) -> None:
        """Its event has passed.

        Raises:
            EngineFailed: a question of it was not answered, or wrongly.
        """
        self._under_way -= 1
        self.service.done()
        if self._late:
            raise EngineFailed(self._late, hint="the model is loaded again; the log has the cause")
        if self.service.fault:
            raise EngineFailed(
                f"the CPU could not compute experts for the GPU (fault {self.service.fault})"
            )

    def close(self) -> None:
        """No step may be under way. Idempotent."""
        self._closing.set()
        self._watch.join()
        self.service.close()

    def _run(self) -> None:
        asked, since_s = self._unanswered(), time.monotonic()
        while not self._closing.wait(DRAIN_LOOK_S if self._late else LOOK_S):
            if self._late:
                self.mailbox.answer.copy_(self.mailbox.bell)
                continue
            now_s, asked_now = time.monotonic(), self._unanswered()
            if asked_now is None or asked_now != asked:
                asked, since_s = asked_now, now_s
            elif self._under_way and now_s - since_s >= self._deadline_s:
                self._late = (
                    f"the CPU computed no experts for {now_s - since_s:.1f} s in the middle of a "
                    f"step, {self._deadline_s:.1f} s is the limit"
                )

    def _unanswered(self) -> int | None:
        """The number at the bell, if it has no answer."""
        bell = int(self.mailbox.bell)
        return None if bell == int(self.mailbox.answer) else bell
