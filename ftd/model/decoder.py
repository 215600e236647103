"""A decoder of pre-norm layers on a float32 residual stream: what every family so far is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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

    @torch.no_grad()
    def forward(
        self, step: StepInput, kv: KvCache, experts: Experts, observer: Observer | None = None
    ) -> torch.Tensor:
        run = Pass(step, kv, experts, observer)
        x = self.embedding(step.ids)  # [T, H] float32
        normed = self.layers[0].mixer_norm(x)
        for index, layer in enumerate(self.layers):
            if observer:
                observer.hidden(index, x)
            x, normed = layer.mlp_norm.after(x, layer.mixer(normed, run))
            delta = layer.mlp(normed, run)
            if index + 1 < len(self.layers):
                x, normed = self.layers[index + 1].mixer_norm.after(x, delta)
            else:
                x = x + delta
        x = self.norm(x[step.logit_rows])  # [R, H] act
        if observer:
            observer.hidden(len(self.layers), x)
        return self.head(x)  # [R, V]
