"""Hands a checkpoint's dense tensors to the layers that are built of them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from ftd.kernels.decode import decode
from ftd.kernels.formats import Matrix, PackedMatrix, stacked
from ftd.kernels.ops import Ops

from .layers import Joined, Linear, RmsNorm


class DenseWeights:
    """Tensors by published name, each taken out once.

    So a fused matrix replaces its parts one layer at a time, and memory never holds a model twice.
    """

    def __init__(
        self,
        tensors: MutableMapping[str, Matrix],
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
        """In float32, where the checkpoint has it in a scaled format."""
        found = self._tensors.pop(name)
        return decode(found) if isinstance(found, PackedMatrix) else found

    def linear(self, name: str, out_dtype: torch.dtype | None = None) -> Linear:
        """``name.weight``, and ``name.bias`` where the model has one."""
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        return Linear(self.ops, self._tensors.pop(f"{name}.weight"), bias, out_dtype)

    def fused(self, names: Sequence[str], out_dtype: torch.dtype | None = None) -> Linear | Joined:
        """Several matrices of the same input as one, their rows one after another."""
        parts = [self.linear(name, out_dtype) for name in names]
        weight = _one_matrix([part.weight for part in parts])
        if weight is None:
            return Joined(parts)
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), names
        bias = torch.cat(biases) if biases else None
        return Linear(self.ops, weight, bias, out_dtype)

    def norm(self, name: str) -> RmsNorm:
        weight = self.tensor(f"{name}.weight").float() + self._norm_offset
        return RmsNorm(self.ops, weight, self._eps, self._dtype)

    def finish(self) -> None:
        assert not self._tensors, sorted(self._tensors)


def _one_matrix(parts: Sequence[Matrix]) -> Matrix | None:
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    packed = [part for part in parts if isinstance(part, PackedMatrix)]
    if len(packed) == len(parts):
        return stacked(packed)
    if len(plain) == len(parts) and len({part.dtype for part in plain}) == 1:
        return torch.cat(plain)
    return None
