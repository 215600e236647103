"""What an architecture file provides: the published spelling on one side, a model on the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ftd.kernels.formats import Matrix
from ftd.kernels.ops import Ops
from ftd.kernels.unsummed import Unsummed
from ftd.kv.cache import KvCache

from .spec import ModelSpec
from .step import StepInput


@dataclass(frozen=True, slots=True)
class Part:
    """Where one matrix of an expert, or a bias, lies in the files.

    Named and shaped as in a checkpoint of plain numbers. ``ftd.checkpoint.stored`` knows how
    quantised ones spell the same matrix.
    """

    tensor: str  # name in the checkpoint
    shape: tuple[int, ...]  # of that whole tensor, as stored
    index: int | None = None  # leading index, where experts are stacked
    rows: tuple[int, int] | None = None  # [begin, end) rows of it, where gate and up are fused
    step: int = 1  # every so many of these rows, where gate and up take turns
    transposed: bool = False  # plain numbers lie as [in, out]: its rows are their columns
    apart: str | None = None  # its name in checkpoints that spell stacked experts one by one


class Experts(Protocol):
    """The routed experts of all layers: who is where is its business, not the model's."""

    def forward(
        self,
        layer: int,  # index among all layers
        x: torch.Tensor,  # [T, H] act
        ids: torch.Tensor,  # [T, K] int32
        weights: torch.Tensor,  # [T, K] float32
    ) -> torch.Tensor | Unsummed:  # [T, H] float32
        ...


@runtime_checkable
class Choosing(Protocol):
    """``Experts`` that take the router's logits: its choice and what comes of it are one launch."""

    def choose(
        self,
        layer: int,
        x: torch.Tensor,  # [T, H] act
        logits: torch.Tensor,  # [T, E] float32
        k: int,
        normalise: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] int32 and float32, for ``forward``
        """As ``Ops.route`` of the rows in use; ``forward`` of the same layer comes next."""
        ...


class Observer(Protocol):
    """Looks into a forward pass."""

    def hidden(self, index: int, state: torch.Tensor) -> None:
        """The residual stream before layer ``index``; last, ``logit_rows`` after the final norm."""
        ...

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """What the router of a layer chose: [T, K] int32 and float32."""
        ...


class Model(Protocol):
    spec: ModelSpec

    def forward(
        self, step: StepInput, kv: KvCache, experts: Experts, observer: Observer | None = None
    ) -> torch.Tensor:
        """Write the rows' KV and return logits [R, V] float32 of ``step.logit_rows``."""
        ...

    def of_each_kind(self) -> Model:
        """Itself with two layers of each kind: what launches the same kernels.

        Two, since what each layer has a part of may begin at 16 bytes in every other layer only.
        Its logits mean nothing.
        """
        ...


class Architecture(Protocol):
    """One module per family; ``ftd.model.registry.ARCHITECTURES`` maps model_type to it."""

    model_types: tuple[str, ...]

    def spec(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """Read config.json; generation_config.json may add eos ids.

        Raises CheckpointError naming the key that is missing or odd.
        """
        ...

    def dense_tensors(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor that is not a routed expert's; kept in the stored dtype."""
        ...

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> dict[str, Part]:
        """The parts "gate", "up" and "down" of one expert.

        With ``MoeSpec.bias`` also "gate_bias", "up_bias" and "down_bias", whose shape has no
        columns.
        """
        ...

    def ignored(self, name: str) -> bool:
        """Tensors on disk that text generation does without."""
        ...

    def build(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, Matrix],
        ops: Ops,
        dtype: torch.dtype,
    ) -> Model:
        """The model, computing in ``dtype``. Empties ``weights``: fused matrices replace parts."""
        ...
