"""Hands a checkpoint's dense tensors to the layers that are built of them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from ftd.kernels.ops import Ops

from .layers import Linear, RmsNorm


class DenseWeights:
    """Tensors by published name, each taken out once.

    So a fused matrix replaces its parts one layer at a time, and memory never holds a model twice.
    """

    def __init__(
        self,
        tensors: MutableMapping[str, torch.Tensor],
        ops: Ops,
        dtype: torch.dtype,
        eps: float,
        norm_offset: float = 0.0,  # added to the weight of every norm
    ) -> None:
        self._tensors = tensors
        self.ops = ops
        self._dtype = dtype
        self._eps = eps
        self._norm_offset = norm_offset
        self.device = next(iter(tensors.values())).device

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors.pop(name)

    def linear(self, name: str, out_dtype: torch.dtype | None = None) -> Linear:
        """``name.weight``, and ``name.bias`` where the model has one."""
        bias = self._tensors.pop(f"{name}.bias", None)
        return Linear(self.ops, self.tensor(f"{name}.weight"), bias, out_dtype)

    def fused(self, names: Sequence[str]) -> Linear:
        """Several matrices of the same input as one, their rows one after another."""
        parts = [self.linear(name) for name in names]
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), names
        weight = torch.cat([part.weight for part in parts])
        return Linear(self.ops, weight, torch.cat(biases) if biases else None)

    def norm(self, name: str) -> RmsNorm:
        weight = self.tensor(f"{name}.weight").float() + self._norm_offset
        return RmsNorm(self.ops, weight, self._eps, self._dtype)

    def finish(self) -> None:
        assert not self._tensors, sorted(self._tensors)
