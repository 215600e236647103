"""Runs a model without an engine: pages in a fixed shuffle, every expert at hand; CPU or GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ftd.checkpoint.headers import check, read_checkpoint
from ftd.checkpoint.load import load_weights
from ftd.cuda.kv import CudaKvCache
from ftd.cuda.memory import DeviceMemory
from ftd.cuda.states import CudaStates
from ftd.experts.host_pool import HostPool
from ftd.kernels.activation import Activation
from ftd.kernels.delta import StateSpan
from ftd.kernels.ops import Ops
from ftd.kv.cache import KvCache
from ftd.kv.state_cache import StateCache
from ftd.model.registry import architecture_for
from ftd.model.step import StepInput


class PlainExperts:
    """Every expert's record in the host pool; nothing is ever a miss."""

    def __init__(self, pool: HostPool, ops: Ops, activation: Activation) -> None:
        self._pool, self._ops, self._activation = pool, ops, activation

    def address(self, layer):
        return self._pool.addresses(layer)

    def forward(self, layer, x, ids, weights):
        layout = self._pool.layout
        return self._ops.moe(x, ids, weights, self.address(layer), layout, self._activation)


class ExpertsOnDevice(PlainExperts):
    """The same with every record copied to a GPU."""

    def __init__(self, pool: HostPool, ops: Ops, activation: Activation, device) -> None:
        super().__init__(pool, ops, activation)
        self._records = {
            layer: torch.stack(
                [torch.from_numpy(pool.record(layer, e)) for e in range(pool.num_experts)]
            ).to(device)
            for layer in pool.moe_layers
        }

    def address(self, layer):
        records = self._records[layer]
        numbers = torch.arange(len(records), device=records.device)
        return records.data_ptr() + numbers * records.stride(0)


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
        device: str = "cpu",
    ) -> None:
        checkpoint = read_checkpoint(directory)
        architecture = architecture_for(checkpoint.config)
        self.spec = architecture.spec(checkpoint.config)
        layout = check(checkpoint, architecture, self.spec)
        layers = self.spec.moe_layers
        moe = self.spec.layers[layers[0]].mlp
        pool = HostPool(len(layers), moe.num_experts, layout, layers)
        dense = load_weights(
            checkpoint, architecture, self.spec, pool, lambda done, total: None, lambda: False
        )
        pages = -(-capacity // page_tokens)
        num_slots = 2 * num_sequences + 1  # two a sequence, in turns, and one to see unused
        self._device = torch.device(device)
        if self._device.type == "cpu":
            self.experts = PlainExperts(pool, ops, moe.activation)
            self.kv = KvCache(self.spec, num_sequences * pages, page_tokens, dtype)
            if self.spec.delta_layers:
                self.kv.states = StateCache(self.spec, num_slots, dtype)
        else:
            memory = DeviceMemory(self._device)
            self.experts = ExpertsOnDevice(pool, ops, moe.activation, self._device)
            self.kv = CudaKvCache(self.spec, num_sequences * pages, page_tokens, dtype, memory)
            if self.spec.delta_layers:
                self.kv.states = CudaStates(self.spec, num_slots, 0, dtype, memory)
            dense = {name: tensor.to(self._device) for name, tensor in dense.items()}
        self.model = architecture.build(self.spec, dense, ops, dtype)
        assert not dense  # build takes everything
        order = torch.randperm(
            num_sequences * pages, generator=torch.Generator().manual_seed(3), dtype=torch.int32
        )
        self._page_tokens = page_tokens
        order = (order + self.kv.first_page) * self.kv.page_stride
        self._table = order.view(num_sequences, pages)
        self._lengths = [0] * num_sequences
        self._slots = [0] * num_sequences  # which of its two holds a sequence's state

    def step(
        self, tokens: Mapping[int, Sequence[int]], observer: Recorder | None = None
    ) -> torch.Tensor:
        """Append tokens to some sequences in one forward pass; logits of all rows, [T, V]."""
        ids, sequence, position, states = [], [], [], []
        for owner, new in tokens.items():
            states.append(self._state_span(owner, len(ids), len(new)))
            ids += new
            sequence += [owner] * len(new)
            position += range(self._lengths[owner], self._lengths[owner] + len(new))
            self._lengths[owner] += len(new)
        owners, at = torch.tensor(sequence), torch.tensor(position)
        place = self._table[owners, at // self._page_tokens].long() * self._page_tokens
        step = StepInput(
            ids=torch.tensor(ids),
            position=at.int(),
            sequence=owners.int(),
            place=place + at % self._page_tokens,
            page_table=self._table,
            logit_rows=torch.arange(len(ids)),
            states=tuple(states) if self.spec.delta_layers else (),
        )
        return self.model.forward(step.to(self._device), self.kv, self.experts, observer)

    def _state_span(self, owner: int, begin: int, rows: int) -> StateSpan:
        source = 2 * owner + self._slots[owner] if self._lengths[owner] else None
        self._slots[owner] ^= 1
        return StateSpan(begin, source, ((begin + rows, 2 * owner + self._slots[owner]),))

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
