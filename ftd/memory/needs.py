"""What a model needs whatever the memory there is: sizes that follow from it and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftd.config import Config
from ftd.kernels.formats import ExpertLayout
from ftd.kv.state_cache import slot_bytes
from ftd.kv.states import LIVE_STATES
from ftd.kv.windowing import Windowing, windowing
from ftd.memory.chunk import PAGE_TOKENS, Chunk, choose_chunk
from ftd.memory.machine import Gpu
from ftd.memory.plan import MemoryPlan
from ftd.model.spec import ModelSpec, MoeSpec
from ftd.units import MiB

MIN_CONTEXT_TOKENS = 64  # less than a chat template and a short answer is no service
HEADROOM_BYTES = 256 * MiB  # interpreter, libraries, requests and answers as text
HEADROOM_SHARE = 0.02  # of the weights: page tables, and what allocators keep


def act_dtype(config: Config, spec: ModelSpec) -> Literal["bfloat16", "float32"]:
    """Type of activations and KV: "auto" follows what the model was published to compute in."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if spec.dtype == "float32" else "bfloat16"


@dataclass(frozen=True, slots=True)
class Needs:
    spec: ModelSpec
    num_experts: int  # of all layers
    record_bytes: int
    page_bytes: int
    chunk: int
    dense_bytes: int
    pool_bytes: int
    workspace_bytes: int
    headroom_bytes: int
    state_bytes: int  # of one sequence's recurrent state, or of a copy of its windows
    live_states: int  # that running sequences need at most
    windowing: Windowing | None
    num_window_pages: int
    window_bytes: int

    @staticmethod
    def of(
        spec: ModelSpec,
        layout: ExpertLayout,
        dense_bytes: int,
        config: Config,
        gpu: Gpu | None,
        started: MemoryPlan | None = None,
    ) -> Needs:
        mlps = [layer.mlp for layer in spec.layers]
        num_experts = sum(mlp.num_experts for mlp in mlps if isinstance(mlp, MoeSpec))
        pool_bytes = num_experts * layout.record_bytes
        act_bytes = 4 if act_dtype(config, spec) == "float32" else 2
        windows = windowing(spec)
        token_bytes, state_bytes = spec.kv_bytes_per_token * act_bytes // 2, 0
        if windows is not None:
            token_bytes -= windows.token_bytes(act_bytes)
            state_bytes = windows.slot_bytes(act_bytes)
        page_bytes = PAGE_TOKENS * token_bytes
        state_bytes = state_bytes or slot_bytes(spec, act_bytes)
        live_states = LIVE_STATES * config.max_running if spec.delta_layers else 0

        def of_chunk(tokens: int) -> Chunk:
            return Chunk.of(spec, layout, config, tokens, act_bytes, gpu is not None)

        least = MIN_CONTEXT_TOKENS if config.context == "auto" else config.context
        others = dense_bytes + live_states * state_bytes
        others += page_bytes * pages_for(least if config.kv_tokens == "auto" else config.kv_tokens)
        chunk = choose_chunk(spec, config, gpu, others, of_chunk, started)
        return Needs(
            spec=spec,
            num_experts=num_experts,
            record_bytes=layout.record_bytes,
            page_bytes=page_bytes,
            chunk=chunk.tokens,
            dense_bytes=dense_bytes,
            pool_bytes=pool_bytes,
            workspace_bytes=chunk.workspace_bytes,
            headroom_bytes=HEADROOM_BYTES + int(HEADROOM_SHARE * (dense_bytes + pool_bytes)),
            state_bytes=state_bytes,
            live_states=live_states,
            windowing=windows,
            num_window_pages=chunk.num_window_pages,
            window_bytes=chunk.window_bytes,
        )

    @property
    def fixed_bytes(self) -> int:
        weights = self.dense_bytes + self.pool_bytes
        states = self.live_states * self.state_bytes
        return weights + self.workspace_bytes + self.headroom_bytes + states + self.window_bytes

    @property
    def least_kv_bytes(self) -> int:
        return pages_for(MIN_CONTEXT_TOKENS) * self.page_bytes


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
