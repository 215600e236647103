"""The gated delta rule and the causal convolution before it, in torch, for one sequence.

Per token and head, with the state S [DK, DV], in float32:

    S ← decay · S;   S ← S + k (beta · (v − Sᵀ k))ᵀ;   o = Sᵀ q

Token by token, on purpose. The chunked form (a triangular system per block of 64 tokens) does the
same in large products, but its sums depend on where a chunk begins and ends; here a row's result
depends on the rows before it and on nothing else, so chunks, batches and reuse change no bit, and
the state is at hand after every token. The C++ kernels do the same with the columns of the states
shared among threads, in a fifth of torch's time on one core.

Every product has the same shape whatever the step holds: BLAS picks its order of sums by shape.
Source: torch_recurrent_gated_delta_rule in transformers' modeling_qwen3_next.py, 5.24.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod

import torch

UNIT_EPS = 1e-6  # under the root of q's and k's length, whatever the model's norms have


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a layer has between its projections."""

    num_key_heads: int  # NK: of q and of k
    num_value_heads: int  # NV, a multiple of it
    key_dim: int  # DK
    value_dim: int  # DV
    conv: torch.Tensor  # [W, C] float32, the oldest token's first; C = 2 NK DK + NV DV
    rate: torch.Tensor  # [NV] float64: -exp(A_log)
    bias: torch.Tensor  # [NV] float64: dt_bias
    norm: torch.Tensor  # [DV] float32, of each head's result
    norm_eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """Where one layer's part of every state lies: behind the slot's address, in bytes."""

    address: torch.Tensor  # [S] int64, of each slot
    recurrent: int  # to [NV, DK, DV] float32
    tail: int  # to [W - 1, C] act: the convolution's input at the last W - 1 tokens


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Where the recurrent state of one sequence is read, and where later ones are written.

    No slot is written that the step also reads.
    """

    begin: int  # its first row in the step
    source: int | None  # slot of the state before that row; None: the sequence begins here
    # (row that comes after, slot) in order of rows; the last one is after the sequence's last row
    targets: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.targets[-1][0]


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Spans of one row each, on the device: what a captured step reads."""

    source: torch.Tensor  # [T] int64, -1: the sequence begins
    target: torch.Tensor  # [T] int64, -1: the row is no sequence's, and gives zeros


States = tuple[StateSpan, ...] | StateRows


def delta_scan(
    q: torch.Tensor,  # [T, NV, DK] float32, contiguous
    k: torch.Tensor,  # [T, NV, DK] float32, contiguous
    v: torch.Tensor,  # [T, NV, DV] float32, contiguous
    decay: torch.Tensor,  # [T, NV] float32
    beta: torch.Tensor,  # [T, NV] float32
    source: torch.Tensor | None,  # [NV, DK, DV] float32: the state before the rows; None: zero
    target: torch.Tensor,  # [NV, DK, DV] float32: becomes the state after them; may be the source
) -> torch.Tensor:  # [T, NV, DV] float32
    """The rule over the rows of one sequence, T > 0; ``source`` is left as it is."""
    out = torch.empty_like(v)
    if source is None:
        target.zero_()
        source = target
    for t in range(len(q)):
        torch.mul(source, decay[t, :, None, None], out=target)
        key = k[t, :, None]  # [NV, 1, DK]
        change = (v[t, :, None] - torch.bmm(key, target)) * beta[t, :, None, None]  # [NV, 1, DV]
        target.baddbmm_(key.transpose(1, 2), change)
        torch.bmm(q[t, :, None], target, out=out[t, :, None])
        source = target
    return out


def causal_conv(
    x: torch.Tensor,  # [W - 1 + T, C] act: the rows of a sequence, and those just before them
    weight: torch.Tensor,  # [W, C] float32, the oldest row's first
) -> torch.Tensor:  # [T, C] act
    """silu of each channel's convolution over the last W rows, in float32 until it is rounded."""
    rows = len(x) - len(weight) + 1
    y = x[:rows].float() * weight[0]
    for back, row_weight in enumerate(weight[1:], start=1):
        y += x[back : back + rows].float() * row_weight  # rounded twice: never a fused product
    return torch.nn.functional.silu(y.double()).to(x.dtype)  # float64: see kernels.reference


def state_views(
    states: LayerStates, slot: int, weights: DeltaWeights, act: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:  # [NV, DK, DV] float32, [W - 1, C] act
    """A layer's part of a state in host memory; the caller owns what they look at."""
    address = int(states.address[slot])
    width, channels = weights.conv.shape
    recurrent = (weights.num_value_heads, weights.key_dim, weights.value_dim)
    return (
        _view(address + states.recurrent, recurrent, torch.float32),
        _view(address + states.tail, (width - 1, channels), act),
    )


def _view(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
