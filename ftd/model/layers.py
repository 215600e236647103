"""The blocks decoder layers are built of. A family's file picks some and gives them their weights.

Every block takes the normalised input x [T, H] act and returns its part of the residual stream,
[T, H] float32; the stream itself is float32 in both modes. Nothing here waits for a device value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ftd.kernels.formats import Matrix
from ftd.kernels.ops import Ops
from ftd.kernels.unsummed import Unsummed, summed
from ftd.kv.cache import KvCache

from .architecture import Choosing, Experts, Observer
from .rope import Rotary
from .spec import AttentionSpec, MoeSpec
from .step import StepInput


@dataclass(slots=True)
class Pass:
    """What the blocks of one forward pass share."""

    step: StepInput
    kv: KvCache
    experts: Experts
    observer: Observer | None = None
    _turns: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def turn(self, rotary: Rotary, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, R / 2] of the step's positions, computed once for all layers."""
        if rotary not in self._turns:
            self._turns[rotary] = rotary.at(self.step.position, ops)
        return self._turns[rotary]

    def paging(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where an attention layer's keys go [T], and its page table [B, M]."""
        windows, step = self.kv.windows, self.step
        if windows is None or layer not in windows.k:
            return step.place, step.page_table
        assert step.window_place is not None and step.window_table is not None, layer
        return step.window_place, step.window_table


# [T, H] act → [T, H] float32
Block = Callable[["torch.Tensor", Pass], "torch.Tensor | Unsummed"]


@dataclass(slots=True, eq=False)
class Linear:
    ops: Ops
    weight: Matrix  # [O, K] as stored
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None  # default: as the input

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias, self.out_dtype)


@dataclass(slots=True, eq=False)
class Joined:
    """Several matrices of one input whose scales keep them apart: their results side by side."""

    parts: Sequence[Linear]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


@dataclass(slots=True, eq=False)
class RmsNorm:
    ops: Ops
    weight: torch.Tensor  # [H] float32
    eps: float
    out_dtype: torch.dtype  # act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.out_dtype)

    def after(
        self, x: torch.Tensor, delta: torch.Tensor | Unsummed
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [T, H] float32 and act
        """The residual stream with ``delta`` added, and its norm."""
        if not isinstance(delta, torch.Tensor):
            return delta.add_rms_norm(x, self.weight, self.eps, self.out_dtype)
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps, self.out_dtype)


@dataclass(slots=True, eq=False)
class Embedding:
    weight: torch.Tensor  # [V, H] as stored
    scale: float = 1.0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, self.weight).float()  # [T, H]
        return x if self.scale == 1.0 else x * self.scale


@dataclass(slots=True, eq=False)
class Attention:
    """Grouped-query attention over the pages: q, k and v in one product.

    q and k may be normed, each head by itself or all heads of a row together.
    """

    ops: Ops
    spec: AttentionSpec
    layer: int  # of the KV cache
    qkv: Linear | Joined  # rows of all q heads, each before its gate if there is one; k; v
    out: Linear
    rotary: Rotary | None
    q_norm: RmsNorm | None = None  # and k_norm: both or none
    k_norm: RmsNorm | None = None
    sinks: torch.Tensor | None = None  # [N] float32

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        spec, step = self.spec, run.step
        heads = spec.num_heads + 2 * spec.num_kv_heads
        k_pages, v_pages = run.kv.k[self.layer], run.kv.v[self.layer]
        place, page_table = run.paging(self.layer)
        qkv, gate = self._ungated(self.qkv(x))
        norms = (self.q_norm, self.k_norm) if self.q_norm and self.k_norm else None
        if norms and spec.qk_norm == "width":
            qkv, norms = self._normed(qkv, *norms), None
        q = self.ops.split_heads(
            qkv.view(-1, heads, spec.head_dim),
            spec.num_heads,
            (norms[0].weight, norms[1].weight) if norms else None,
            norms[0].eps if norms else 0.0,
            run.turn(self.rotary, self.ops) if self.rotary else None,
            bool(self.rotary and self.rotary.spec.interleaved),
            place,
            k_pages,
            v_pages,
        )
        attended = self.ops.attention(
            q,
            k_pages,
            v_pages,
            page_table,
            step.sequence,
            step.position,
            spec.softmax_scale,
            spec.window,
            self.sinks,
        )
        if gate is not None:
            attended = self.ops.sigmoid_mul(attended, gate)
        return self.out(attended.view(-1, spec.num_heads * spec.head_dim))

    def _ungated(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q, k and v without the gate between them, and the gate [T, N, D]."""
        spec = self.spec
        if not spec.gated:
            return qkv, None
        q, kv = qkv.tensor_split((2 * spec.num_heads * spec.head_dim,), dim=1)
        q, gate = q.reshape(len(q), spec.num_heads, 2, spec.head_dim).unbind(2)
        return torch.cat((q.flatten(1), kv), dim=1), gate

    def _normed(self, qkv: torch.Tensor, q_norm: RmsNorm, k_norm: RmsNorm) -> torch.Tensor:
        """q and k normed over all their heads."""
        kv = self.spec.num_kv_heads * self.spec.head_dim
        q, k, v = qkv.split((self.spec.num_heads * self.spec.head_dim, kv, kv), dim=1)
        return torch.cat((q_norm(q.contiguous()), k_norm(k.contiguous()), v), dim=1)


@dataclass(slots=True, eq=False)
class DenseMlp:
    """down(silu(gate x) · up x)"""

    ops: Ops
    gate_up: Linear | Joined
    down: Linear

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(self.ops.silu_mul(gate, up))


@dataclass(slots=True, eq=False)
class SharedExpert:
    """An expert that serves every row, with a weight of its own where it has a gate."""

    ops: Ops
    mlp: DenseMlp
    gate: Linear | None  # to one number, float32

    def added(self, routed: torch.Tensor, x: torch.Tensor, run: Pass) -> torch.Tensor:
        """What it adds to the sum of the routed experts [T, H] float32."""
        y = self.mlp(x, run)
        return routed + y if self.gate is None else self.ops.add_gated(routed, y, self.gate(x))


@dataclass(slots=True, eq=False)
class SparseMlp:
    """The router chooses experts for each row; ``run.experts`` computes and adds them."""

    spec: MoeSpec
    layer: int
    router: Linear  # float32 out: rounding logits to act would only make ties
    shared: SharedExpert | None = None

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor | Unsummed:
        logits, k, normalise = self.router(x), self.spec.experts_per_token, self.spec.normalise_topk
        if isinstance(run.experts, Choosing):
            ids, weights = run.experts.choose(self.layer, x, logits, k, normalise)
        else:
            ids, weights = self.router.ops.route(logits, k, normalise, run.step.active)
        if run.observer:
            run.observer.routed(self.layer, ids, weights)
        routed = run.experts.forward(self.layer, x, ids, weights)
        return routed if self.shared is None else self.shared.added(summed(routed), x, run)
