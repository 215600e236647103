"""How many tokens of prompts go through in one step, and what that takes: pure, of ``Needs``.

On a GPU any chunk of a prompt brings most experts over the link, so few large ones are quicker than
many small ones; but what they compute lies where experts could.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftd.config import Config
from ftd.kernels.formats import ExpertLayout
from ftd.kv.windowing import windowing
from ftd.memory import vram
from ftd.memory.machine import Gpu
from ftd.memory.plan import MemoryPlan
from ftd.memory.workspace import workspace_bytes
from ftd.model.spec import ModelSpec

PAGE_TOKENS = 16  # small enough to share prefixes well, large enough to read in one go
CPU_CHUNK = 256  # a longer one gains little on a CPU and makes others wait
GPU_CHUNKS = (8192, 4096, 2048)
SHARE = 0.12  # of what KV and experts could have, at most, for all but the smallest of them


@dataclass(frozen=True, slots=True)
class Chunk:
    tokens: int
    workspace_bytes: int
    num_window_pages: int  # of layers with pages of their own
    window_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.workspace_bytes + self.window_bytes

    @staticmethod
    def of(
        spec: ModelSpec,
        layout: ExpertLayout,
        config: Config,
        tokens: int,
        act_bytes: int,
        on_gpu: bool,
    ) -> Chunk:
        num_window_pages = window_bytes = 0
        if (windows := windowing(spec)) is not None:
            num_window_pages = windows.num_pages(PAGE_TOKENS, config.max_running, tokens)
            window_bytes = num_window_pages * PAGE_TOKENS * windows.token_bytes(act_bytes)
        workspace = workspace_bytes(
            spec,
            layout,
            rows=tokens + config.max_running,
            sampled=max(config.max_running, vram.SAMPLED_ROWS if on_gpu else 0),
            on_gpu=on_gpu,
        )
        return Chunk(tokens, workspace, num_window_pages, window_bytes)


def choose_chunk(
    spec: ModelSpec,
    config: Config,
    gpu: Gpu | None,
    others_bytes: int,
    of_chunk: Callable[[int], Chunk],
    started: MemoryPlan | None,
) -> Chunk:
    """The size that is asked for, or the largest that a small part of the GPU's memory allows.

    Args:
        others_bytes: of the GPU, for what does not go with its chunks, and for the least KV.
        started: see ``plan_memory``.
    """
    longest = spec.context if config.context == "auto" else config.context
    if started and started.windowing:  # its pages are there, for chunks as they are
        return of_chunk(started.prefill_chunk)
    if config.prefill_chunk != "auto":
        return of_chunk(min(config.prefill_chunk, longest))
    if gpu is None:
        return of_chunk(min(CPU_CHUNK, longest))
    longest = min(longest, started.prefill_chunk) if started else longest
    room = vram.budget_bytes(config, gpu) - vram.OVERHEAD_BYTES - others_bytes
    sizes = [of_chunk(min(tokens, longest)) for tokens in GPU_CHUNKS]
    return next((size for size in sizes if size.num_bytes <= SHARE * room), sizes[-1])
