"""The operations a model is composed of. One implementation per device, all with the same meaning.

``kernels.reference.TorchOps`` is the meaning itself, in plain torch; ``kernels.cpu.NativeOps`` runs
the C++ kernels. Model code calls nothing else on tensors of the step but plain element-wise torch.

Contract of every implementation in float32: the order in which a row's numbers are added does not
depend on how many rows there are, on which pages its keys lie, or on where an expert's weights are.
So batch, chunking, caching and residency change no token.

Shapes: T rows of the step, H hidden, N heads, D head dim, E experts, K experts a token, I inner,
P pages, B sequences. Activations ("act") are bfloat16 or float32, one of them for a whole model.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .activation import SILU, Activation
from .delta import DeltaWeights, LayerStates, States
from .formats import ExpertLayout, Matrix


class Ops(Protocol):
    name: str  # "torch", "avx2", "avx512bf16", ...: for logs and ``ftctl status``

    def linear(
        self,
        x: torch.Tensor,  # [T, K] act, contiguous
        weight: Matrix,  # [O, K], a tensor contiguous: bf16, f16 or f32
        bias: torch.Tensor | None = None,  # [O] any float
        out_dtype: torch.dtype | None = None,  # default: x.dtype
    ) -> torch.Tensor:  # [T, O]
        """y = x Wᵀ + b, accumulated in float32."""
        ...

    def moe(
        self,
        x: torch.Tensor,  # [T, H] act, contiguous
        ids: torch.Tensor,  # [T, K] int32, -1: route not in use
        weights: torch.Tensor,  # [T, K] float32
        address: torch.Tensor,  # [E] int64: where each expert's record lies (host pool or slot)
        layout: ExpertLayout,
        activation: Activation = SILU,
    ) -> torch.Tensor:  # [T, H] float32
        """Σ_k weights[t, k] · down(activation(gate x, up x)), summed in the order of k.

        gate, up and down add their biases where the layout has some. Each distinct expert is read
        once. Rounding points: x and h = activation(gate x, up x) in act, everything else in
        float32.
        """
        ...

    def attention(
        self,
        q: torch.Tensor,  # [T, N, D] act, contiguous
        k_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous
        v_pages: torch.Tensor,  # [P, page_tokens, NKV, D] act, contiguous
        page_table: torch.Tensor,  # [B, M] int32: pages of each sequence in order
        sequence: torch.Tensor,  # [T] int32: which row of page_table
        position: torch.Tensor,  # [T] int32: the row's place in its sequence
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,  # [N] float32
    ) -> torch.Tensor:  # [T, N, D] act
        """Causal softmax attention over the pages; a row sees its own key, already written.

        Head n reads kv head n // (N / NKV). With ``window`` a row at p sees p - window + 1 .. p.
        A sink is one more logit of its head, whose probability is dropped.
        Softmax and sums in float32.
        """
        ...

    def write_kv(
        self,
        k: torch.Tensor,  # [T, NKV, D] act
        v: torch.Tensor,  # [T, NKV, D] act
        place: torch.Tensor,  # [T] int64: page * page_tokens + offset
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> None: ...

    def rms_norm(
        self,
        x: torch.Tensor,  # [..., H] any float
        weight: torch.Tensor,  # [H]
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight, in float32 until the result is rounded."""
        ...

    def rope(
        self,
        x: torch.Tensor,  # [T, N, D] act, changed in place
        cos: torch.Tensor,  # [T, R / 2] float32, R = rotary_dim: the first R channels turn
        sin: torch.Tensor,
        interleaved: bool = False,
    ) -> torch.Tensor: ...

    def turns(
        self,
        position: torch.Tensor,  # [T] int32
        inv_freq: torch.Tensor,  # [R / 2] float32, radians per token
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, R / 2] float32 each
        """cos and sin for ``rope``, times ``scale``: angles in float32, the rest in float64."""
        ...

    def silu_mul(
        self,
        gate: torch.Tensor,  # [T, I] act, rows of any stride
        up: torch.Tensor,
    ) -> torch.Tensor:  # [T, I] act
        """silu(gate) · up in float32, rounded."""
        ...

    # The rest is composed of the above (``kernels.composed``): one kernel each on a GPU.

    def route(
        self,
        logits: torch.Tensor,  # [T, E] float32
        k: int,
        normalise: bool,
        active: torch.Tensor | None = None,  # [T] bool; None: all rows
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] int32, [T, K] float32
        """The k most probable experts, best first, the lower id first among equals.

        Rows that are not active choose -1.
        Weights are their probabilities among all experts, or with ``normalise`` among the chosen.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,  # [T, H] float32
        delta: torch.Tensor,  # [T, H] float32
        weight: torch.Tensor,  # [H]
        eps: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H] float32, [T, H]
        """x + delta, and its ``rms_norm``."""
        ...

    def split_heads(
        self,
        qkv: torch.Tensor,  # [T, N + 2 NKV, D] act, contiguous
        num_heads: int,  # N
        norms: tuple[torch.Tensor, torch.Tensor] | None,  # [D] each: per head of q and of k
        eps: float,
        turn: tuple[torch.Tensor, torch.Tensor] | None,  # cos, sin as in ``rope``
        interleaved: bool,
        place: torch.Tensor,  # [T] int64
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> torch.Tensor:  # [T, N, D] act
        """Norm of each head, rope, ``write_kv`` of k and v; returns q."""
        ...

    def sigmoid_mul(
        self,
        x: torch.Tensor,  # [T, N, D] act, contiguous
        gate: torch.Tensor,  # [T, N, D] act, a head's numbers side by side
    ) -> torch.Tensor:  # [T, N, D] act
        """x · sigmoid(gate) in float32, rounded."""
        ...

    def add_gated(
        self,
        total: torch.Tensor,  # [T, H] float32
        x: torch.Tensor,  # [T, H] float32
        gate: torch.Tensor,  # [T, 1] float32
    ) -> torch.Tensor:  # [T, H] float32
        """total + x · sigmoid(gate)."""
        ...

    def delta(
        self,
        qkv: torch.Tensor,  # [T, C] act: all q heads, then k, then v; rows of any stride, as z's
        z: torch.Tensor,  # [T, NV DV] act
        b: torch.Tensor,  # [T, NV] float32, rows of one stride with a's
        a: torch.Tensor,  # [T, NV] float32
        weights: DeltaWeights,
        states: LayerStates,
        at: States,  # which rows are whose, and the slots of their states
    ) -> torch.Tensor:  # [T, NV DV] act
        """norm(delta rule of convolved q, k, v) · silu(z); q and k of unit length.

        beta = sigmoid(b); decay = exp(rate · softplus(a + bias)); the rule itself is in
        ``kernels.delta``. States of the spans' targets are written. Rows behind the last span are
        padding: they repeat the last row's result, but for the factor silu(z).
        Rounding points: convolved q, k, v and the result in act, everything else in float32.
        """
        ...
