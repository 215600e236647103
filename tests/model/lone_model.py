"""Runs a model without an engine: files read whole, pages in a fixed shuffle, experts at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from ftd.kernels.formats import FORMATS, RECORD_ALIGN_BYTES, ExpertLayout, expert_layout
from ftd.kernels.ops import Ops
from ftd.kv.cache import KvCache
from ftd.model.architecture import Architecture
from ftd.model.registry import architecture_for
from ftd.model.spec import ModelSpec
from ftd.model.step import StepInput


class PlainExperts:
    """Every expert's record in one buffer; nothing is ever a miss."""

    def __init__(
        self,
        architecture: Architecture,
        spec: ModelSpec,
        tensors: Mapping[str, torch.Tensor],
        ops: Ops,
    ) -> None:
        self._ops = ops
        self._address: dict[int, torch.Tensor] = {}
        mlp = spec.layers[spec.moe_layers[0]].mlp
        self._layout: ExpertLayout = expert_layout(FORMATS["bf16"], spec.hidden, mlp.inner)
        size = self._layout.record_bytes
        count = len(spec.moe_layers) * mlp.num_experts
        self._memory = torch.zeros(count * size + RECORD_ALIGN_BYTES, dtype=torch.uint8)
        start = -self._memory.data_ptr() % RECORD_ALIGN_BYTES
        for layer in spec.moe_layers:
            addresses = []
            for expert in range(mlp.num_experts):
                parts = architecture.expert_parts(spec, layer, expert)
                flat = torch.cat(
                    [tensors[parts[p].tensor].flatten() for p in ("gate", "up", "down")]
                )
                flat = flat.view(torch.uint8)
                self._memory[start : start + len(flat)] = flat
                addresses.append(self._memory.data_ptr() + start)
                start += size
            self._address[layer] = torch.tensor(addresses)

    def forward(self, layer, x, ids, weights):
        return self._ops.moe(x, ids, weights, self._address[layer], self._layout)


class Recorder:
    """An observer that keeps everything, appended over steps."""

    def __init__(self) -> None:
        self.states: dict[int, list[torch.Tensor]] = {}
        self.routes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def hidden(self, index: int, state: torch.Tensor) -> None:
        self.states.setdefault(index, []).append(state.clone())

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.routes.setdefault(layer, []).append((ids.clone(), weights.clone()))

    def state(self, index: int) -> torch.Tensor:
        return torch.cat(self.states[index])

    def routing(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = zip(*self.routes[layer], strict=True)
        return torch.cat(ids), torch.cat(weights)


class LoneModel:
    def __init__(
        self,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype = torch.float32,
        *,
        num_sequences: int = 1,
        page_tokens: int = 16,
        capacity: int = 256,  # tokens of a sequence
    ) -> None:
        config = json.loads((directory / "config.json").read_text())
        architecture = architecture_for(config)
        self.spec = architecture.spec(config)
        tensors: dict[str, torch.Tensor] = {}
        for file in directory.glob("model*.safetensors"):
            tensors |= load_file(file)
        shapes = architecture.dense_tensors(self.spec)
        dense = {name: tensors[name] for name in shapes}
        assert {n: tuple(t.shape) for n, t in dense.items()} == shapes
        self.experts = PlainExperts(architecture, self.spec, tensors, ops)
        self.model = architecture.build(self.spec, dense, ops, dtype)
        assert not dense  # build takes everything
        pages = -(-capacity // page_tokens)
        self.kv = KvCache(self.spec, num_sequences * pages, page_tokens, dtype)
        order = torch.randperm(
            num_sequences * pages, generator=torch.Generator().manual_seed(3), dtype=torch.int32
        )
        self._page_tokens = page_tokens
        self._table = order.view(num_sequences, pages)
        self._lengths = [0] * num_sequences

    def step(
        self, tokens: Mapping[int, Sequence[int]], observer: Recorder | None = None
    ) -> torch.Tensor:
        """Append tokens to some sequences in one forward pass; logits of all rows, [T, V]."""
        ids, sequence, position = [], [], []
        for owner, new in tokens.items():
            ids += new
            sequence += [owner] * len(new)
            position += range(self._lengths[owner], self._lengths[owner] + len(new))
            self._lengths[owner] += len(new)
        owners, at = torch.tensor(sequence), torch.tensor(position)
        place = self._table[owners, at // self._page_tokens].long() * self._page_tokens
        return self.model.forward(
            StepInput(
                ids=torch.tensor(ids),
                position=at.int(),
                sequence=owners.int(),
                place=place + at % self._page_tokens,
                page_table=self._table,
                logit_rows=torch.arange(len(ids)),
            ),
            self.kv,
            self.experts,
            observer,
        )

    def run(
        self, ids: Sequence[int], chunks: Sequence[int] = (), observer: Recorder | None = None
    ) -> torch.Tensor:
        """Logits [T, V] of a new sequence, fed in the given chunk lengths and then the rest."""
        self._lengths[0] = 0
        parts, rest = [], list(ids)
        for chunk in [*chunks, len(ids)]:
            if rest:
                parts.append(self.step({0: rest[:chunk]}, observer))
                rest = rest[chunk:]
        return torch.cat(parts)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        self._lengths[0] = 0
        tokens = [int(self.step({0: ids})[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step({0: tokens[-1:]})[-1].argmax()))
        return tokens
