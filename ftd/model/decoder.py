"""A decoder of pre-norm layers on a float32 residual stream: what every family so far is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ftd.kernels.formats import PackedMatrix
from ftd.kernels.unsummed import Unsummed, summed
from ftd.kv.cache import KvCache

from .architecture import Experts, Observer
from .layers import Block, Embedding, Linear, Pass, RmsNorm
from .spec import ModelSpec
from .step import StepInput


@dataclass(slots=True, eq=False)
class Layer:
    mixer_norm: RmsNorm
    mixer: Block  # mixes along the sequence: attention
    mlp_norm: RmsNorm
    mlp: Block


@dataclass(slots=True, eq=False)
class Decoder:
    """``ftd.model.architecture.Model``."""

    spec: ModelSpec
    embedding: Embedding
    layers: Sequence[Layer]
    norm: RmsNorm
    head: Linear  # float32 out

    def forward(
        self, step: StepInput, kv: KvCache, experts: Experts, observer: Observer | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            return self._logits(step, Pass(step, kv, experts, observer))

    def _logits(self, step: StepInput, run: Pass) -> torch.Tensor:
        observer = run.observer
        x = self.embedding(step.ids)  # [T, H] float32
        normed = self.layers[0].mixer_norm(x)
        next_norms = [*(layer.mixer_norm for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            if observer:
                observer.hidden(index, x)
            x, normed = layer.mlp_norm.after(x, self._part(layer.mixer, normed, run))
            x, normed = next_norm.after(x, self._part(layer.mlp, normed, run))
        if step.logit_rows is not None:
            normed = normed[step.logit_rows]  # [R, H] act
        if observer:
            observer.hidden(len(self.layers), normed)
        logits = self.head(normed)  # [R, V]
        return logits if self.spec.logit_scale == 1.0 else logits / self.spec.logit_scale

    def of_each_kind(self) -> Decoder:
        """See ``Model``; a kind is what a layer computes, and how its weights are stored."""
        seen: Counter[Any] = Counter()
        layers = []
        for spec, layer in zip(self.spec.layers, self.layers):
            kind = spec, _formats(layer)
            if seen[kind] < 2:
                layers.append(layer)
            seen[kind] += 1
        return replace(self, layers=layers)

    def _part(self, block: Block, normed: torch.Tensor, run: Pass) -> torch.Tensor | Unsummed:
        """What a block adds to the residual stream."""
        delta, scale = block(normed, run), self.spec.residual_scale
        return delta if scale == 1.0 else summed(delta) * scale


def _formats(part: Any) -> Any:
    """How the weights of a layer are stored: matrices of one shape may differ in it."""
    if isinstance(part, PackedMatrix):
        return part.layout
    if isinstance(part, torch.Tensor):
        return part.dtype, part.shape
    if is_dataclass(part):
        return tuple(_formats(getattr(part, field.name)) for field in fields(part))
    return tuple(map(_formats, part)) if isinstance(part, (list, tuple)) else None
