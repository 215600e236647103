"""What a checkpoint's config.json says, in our words: plain numbers that plans and kernels read.

An architecture file turns its published config spelling into a ``ModelSpec``; nothing after it
reads config.json again. Letters as everywhere: H hidden, N heads, D head dim, E experts, K experts
a token, I expert inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftd.kernels.activation import SILU, Activation


@dataclass(frozen=True, slots=True)
class RopeStretch:
    """How a model was made to reach further than it was trained for: its pairs turn more slowly."""

    factor: float
    # Pairs up to the first number keep their speed, those from the second on are slowed by the
    # factor, a ramp lies between (yarn). None: all are slowed.
    ramp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    rotary_dim: int  # channels that rotate, from the first; the rest pass through
    interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    stretch: RopeStretch | None = None
    scale: float = 1.0  # factor on cos and sin (yarn)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    softmax_scale: float
    qk_norm: Literal["head", "width"] | None = None  # over each head, or all heads together
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    sinks: bool = False  # each head has one more logit, whose share of the softmax is dropped
    window: int | None = None  # a query at p sees keys p - window + 1 .. p; None: all up to p
    gated: bool = False  # each channel of the result is weighted by a sigmoid of the input


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net: a state of fixed size stands for all tokens before."""

    num_key_heads: int
    num_value_heads: int  # a multiple: each key head serves as many consecutive value heads
    key_dim: int  # of a head
    value_dim: int
    conv_width: int  # tokens that the causal convolution before it sees

    @property
    def channels(self) -> int:
        """Of q, k and v together, as the convolution sees them."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    inner: int


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert that serves every token."""

    inner: int
    gated: bool  # its part is weighted by the sigmoid of one more row of the input


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    experts_per_token: int
    inner: int  # I
    normalise_topk: bool
    router_bias: bool = False
    shared: SharedSpec | None = None
    activation: Activation = SILU  # of routed experts
    bias: bool = False  # routed experts add one to gate, up and down


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: AttentionSpec | DeltaSpec  # what mixes along the sequence
    mlp: DenseSpec | MoeSpec

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), self.mixer
        return self.mixer


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
    embedding_scale: float = 1.0  # factor on the embedding of a token
    residual_scale: float = 1.0  # factor on what a block adds to the residual stream
    logit_scale: float = 1.0  # divisor of the logits

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeSpec))

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """Those that keep keys and values, in the order of the KV cache."""
        return tuple(x.mixer for x in self.layers if isinstance(x.mixer, AttentionSpec))

    @property
    def delta_layers(self) -> tuple[DeltaSpec, ...]:
        """Those that keep a state, in the order of the state cache."""
        return tuple(x.mixer for x in self.layers if isinstance(x.mixer, DeltaSpec))

    def place(self, layer: int) -> int:
        """The index of a layer's mixer among those of its kind."""
        kind = type(self.layers[layer].mixer)
        return sum(isinstance(x.mixer, kind) for x in self.layers[:layer])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers, at two bytes a number."""
        return sum(4 * a.num_kv_heads * a.head_dim for a in self.attention_layers)
