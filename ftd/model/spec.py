"""What a checkpoint's config.json says, in our words: plain numbers that plans and kernels read.

An architecture file turns its published config spelling into a ``ModelSpec``; nothing after it
reads config.json again. Letters as everywhere: H hidden, N heads, D head dim, E experts, K experts
a token, I expert inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    rotary_dim: int  # channels that rotate, from the first; the rest pass through
    interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    inv_freq: tuple[float, ...] | None = None  # overrides theta (yarn, proportional, ...)
    scale: float = 1.0  # factor on cos and sin (yarn)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    softmax_scale: float
    qk_norm: bool = False
    bias: bool = False
    window: int | None = None  # a query at p sees keys p - window + 1 .. p; None: all up to p


@dataclass(frozen=True, slots=True)
class DenseSpec:
    inner: int


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    experts_per_token: int
    inner: int  # I
    normalise_topk: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: DenseSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    model_type: str
    hidden: int  # H
    vocab: int  # V, rows of the head: may exceed the tokenizer's
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    context: int  # longest sequence the positions were trained for, in tokens
    eos_ids: tuple[int, ...]
    dtype: str = "bfloat16"  # "float16", "float32": what the model was published to compute in

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeSpec))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers, at two bytes a number."""
        return sum(4 * a.attention.num_kv_heads * a.attention.head_dim for a in self.layers)
