"""The routed experts of a prompt on the GPU, layer by layer; see ``Residency`` for the rest.

A layer waits for its routing, then brings the union of missed experts over the link by DMA, the
most used into slots, the next into a staging area; the CPU computes some that have few tokens.
While it computes, what the next layer surely misses is on its way. Kernels find an expert where it
is, so each layer has a table of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ftd.experts import policy
from ftd.experts.pause import NO_PAUSE, Pause
from ftd.experts.residents import DECODE_TOKENS
from ftd.experts.slots import EMPTY

from .prompt_share import Busy
from .residency import Residency
from .tables import Marker, past_copies

# Streamed ahead to a prompt's next layer: what a fast link moves while a layer of it computes, the
# next one attends and routes, and the host launches all that: 1 ms, and 1 ms for each 1024 tokens.
AHEAD_BYTES, AHEAD_TOKEN_BYTES = 56 << 20, 52 << 10


class CudaExperts(Residency):
    """``ftd.model.architecture.Experts`` on the GPU."""

    def warm_up(self) -> None:
        """Launch what passes of many tokens launch beside what others do."""
        with past_copies():
            self._table_of_pass.send(torch.from_numpy(self._address[0]))

    def forward(
        self,
        layer: int,  # among all layers
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32, -1: not in use
        weights: torch.Tensor,  # [T, K] float32
        pause: Pause = NO_PAUSE,
    ) -> torch.Tensor:  # [T, H] float32
        row = self._row[layer]
        table = self._table_of_step.device_tensor
        if row:
            self._launch_s = time.perf_counter() - self._left_s
        try:
            return self._layer(row, table, x, ids, weights, pause)
        finally:
            self._left_s = time.perf_counter()

    def _layer(
        self,
        row: int,
        table: torch.Tensor,  # [L, E] int64
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        pause: Pause,
    ) -> torch.Tensor:
        if not self.pinned:
            pause()  # other steps, too, may need the staging area
            pause = NO_PAUSE
        if self.all_resident and self._trace is None:
            if pause.is_waited_for():  # what is due goes by the time: the host must not be ahead
                reached = Marker(self._device)
                reached.mark()
                reached.wait()
            pause()
            return self._ops.moe(x, ids, weights, table[row], self._layout, self._activation)
        chosen = ids.cpu().numpy()  # waits: what to bring depends on it
        if self._trace is not None:
            self._trace.add(row, chosen)
        counts = np.bincount(chosen[chosen >= 0], minlength=self.num_experts)
        used = np.flatnonzero(counts)
        missed = used[self._table.residency[row, used] == EMPTY]
        self._uses[row] += counts
        self._num_tokens = max(self._num_tokens, len(chosen))
        step = self._step
        self._step = replace(
            step,
            hits=step.hits + len(used) - len(missed),
            misses=step.misses + len(missed),
            fetched=step.fetched + len(missed),
        )
        self._count_ahead(row, counts)
        if not len(missed):
            pause()
            return self._ops.moe(x, ids, weights, table[row], self._layout, self._activation)
        with past_copies(self._num_tokens >= policy.AHEAD_FROM_TOKENS):
            return self._with_missed(row, x, ids, weights, chosen, counts, missed, pause)

    def _with_missed(
        self,
        row: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        chosen: np.ndarray,  # ``ids``
        counts: np.ndarray,  # [E] tokens of each expert
        missed: np.ndarray,
        pause: Pause,
    ) -> torch.Tensor:
        address = self._address[row].copy()
        begun = Marker(self._device)
        begun.mark()
        begun.hold(self._copies)  # slots given up and the staging area may be in use before here
        came = self._places.enter(row)  # streamed ahead
        admitted: list[int] = []
        if self._num_tokens > DECODE_TOKENS:
            admitted = self._admit(row, self._uses[row], self._num_tokens, missed)
        for expert in admitted:
            key = row * self.num_experts + expert
            address[expert] = self._slots.address + self._start_fill(key, came.get(expert))
        for expert, place in came.items():
            address[expert] = self._staging_address(place)
        rest = [
            expert
            for expert in policy.in_order(missed, counts[missed]).tolist()
            if expert not in admitted and expert not in came
        ]
        on_link = sum(expert not in came for expert in admitted)
        theirs, free = self._of_cpu(counts, rest, on_link, pause.coming_s())
        rest = rest[: len(rest) - len(theirs)]
        share = self.share if theirs else None
        if share is not None:
            part, here = share.begin(row, x, chosen, theirs)
        passes = [rest]
        if not self.pinned:
            size = self._num_staging
            passes = [rest[at : at + size] for at in range(0, len(rest), size)] or [[]]
        y: torch.Tensor | None = None
        for i, staged in enumerate(passes):
            places = self._places.take(row, staged)
            landed = self._stage(row, places)
            for expert, place in places.items():
                address[expert] = self._staging_address(place)
            self._table_of_pass.send(torch.from_numpy(address))
            if i == 0:
                self._stream_ahead(row + 1)
                pause(free)
            landed.hold(torch.cuda.current_stream(self._device) if self._copies else None)
            now = ids if len(passes) == 1 else self._only(ids, rest, staged, first=i == 0)
            table = self._table_of_pass.device_tensor
            if share is not None:
                compute = partial(share.finish, part)
                return self.division.with_theirs(x, ids, here, weights, table, compute)
            more = self._ops.moe(x, now, weights, table, self._layout, self._activation)
            y = more if y is None else y + more
            if i + 1 < len(passes):
                begun.mark()
                begun.hold(self._copies)
                self._places.clear()
        assert y is not None
        return y

    def _of_cpu(
        self, counts: np.ndarray, rest: list[int], on_link: int, pause_s: float
    ) -> tuple[list[int], float]:
        """Which of the missed experts, those with few tokens last, the CPU computes.

        Args:
            on_link: missed experts besides, which take the link in any case.
            pause_s: of the pause that comes.
        Returns:
            Also which part of that pause costs the pass nothing.
        """
        if self.share is None or not self.pinned:
            return [], 0.0
        fewest = rest[::-1]
        busy = Busy(self._launch_s, pause_s)
        chosen, free = self.share.choose(fewest, counts[fewest].tolist(), on_link, busy)
        theirs = list(chosen)
        step, taken = self._step, len(theirs)
        self._step = replace(step, fetched=step.fetched - taken, on_cpu=step.on_cpu + taken)
        return theirs, free

    def _only(
        self, ids: torch.Tensor, rest: list[int], staged: list[int], *, first: bool
    ) -> torch.Tensor:
        """Routes of one pass: its staged experts, and with the first all that need no staging."""
        later = torch.tensor(sorted(set(rest) - set(staged)), device=ids.device)
        if first:
            return ids.masked_fill(torch.isin(ids, later), -1)
        here = torch.isin(ids, torch.tensor(staged, device=ids.device))
        return ids.masked_fill(~here, -1)

    def _stream_ahead(self, row: int) -> None:
        """Keep the link busy while a layer computes and the next one chooses its experts.

        Behind the copies of the layer before: what ``row`` all but surely misses.
        """
        if row == len(self.layers) or not self.pinned:
            return
        sure = policy.surely_used(self._plan.value[row], self._num_tokens)
        coming = self._coming(row)
        absent = [
            expert
            for expert in sure.tolist()
            if self._table.residency[row, expert] == EMPTY and expert not in coming
        ]
        most = AHEAD_BYTES + AHEAD_TOKEN_BYTES * self._num_tokens
        self._stage(row, self._places.take(row, absent[: most // self._layout.record_bytes]))

    def _count_ahead(self, row: int, counts: np.ndarray) -> None:
        came = self._places.enter(row)
        unused = sum(counts[expert] == 0 for expert in came)
        self._step = replace(
            self._step,
            ahead=self._step.ahead + len(came),
            ahead_unused=self._step.ahead_unused + int(unused),
        )
